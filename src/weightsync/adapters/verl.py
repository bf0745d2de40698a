"""verl: a checkpoint engine by the name "weightsync".

    actor_rollout_ref:
      rollout:
        checkpoint_engine:
          backend: weightsync
          custom_backend_module: weightsync.adapters.verl

Its base class is `verl.checkpoint_engine.CheckpointEngine` of verl 0.9. verl drives it, a step after the other:
`prepare` on every worker, `build_topology` once, `init_process_group` on every worker, then `send_weights` on training
ranks and `receive_weights` on rollout workers at the same time, `finalize` on all.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator
from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from verl.checkpoint_engine import CheckpointEngine, CheckpointEngineRegistry

from weightsync.adapters.checkpoint_engine import Receiver, Sender, TransferPlan, node_address, plan_in, worker_device
from weightsync.errors import ConfigError, TransferError
from weightsync.memory import MappedSegment
from weightsync.types import Version

WHOLE, CHANGES = "named_tensors", "delta_flush"
_BUCKET_BYTES = 512 << 20
_PATCH_LIMIT = 0.5
_MARGIN_S = 10.0  # that other workers have beyond their pull

_logger = logging.getLogger(__name__)


@CheckpointEngineRegistry.register("weightsync")
class WeightSyncCheckpointEngine(CheckpointEngine):  # type: ignore[misc]
    """See the module. Ranks that are not the master walk their weights and send nothing.

    Args:
        bucket_size: verl's, in bytes: a flush of `delta_flush` has about so much at most. Nothing else is cut.
        is_master: whether this is training rank 0.
        host: where the trainer's agent listens, and how workers reach it; this node's address by Ray where not given.
        timeout_s: how long one transfer may take.
        mode: how workers fetch a version, see `Puller`.
        wire_format: how it is given to verl's rollout: "named_tensors", or "delta_flush", which brings changed
            elements alone to one that has verl's loader for them.
        publishing: further arguments of `WeightManager`.
    """

    def __init__(
        self,
        bucket_size: int = 0,
        is_master: bool = False,
        *,
        host: str | None = None,
        timeout_s: float = 600.0,
        mode: str = "auto",
        wire_format: str = "named_tensors",
        **publishing: Any,
    ) -> None:
        if wire_format not in (WHOLE, CHANGES):
            raise ConfigError(f"wire_format is {WHOLE!r} or {CHANGES!r}, not {wire_format!r}")
        self.wire_format = wire_format
        self.is_master = is_master
        self._bucket_bytes = bucket_size or _BUCKET_BYTES
        self._host = host
        self._publishing = publishing
        self._timeout_s = timeout_s
        self._mode = mode
        self._sender: Sender | None = None
        self._receiver: Receiver | None = None
        self._given: tuple[Version, str | None] | None = None  # what verl's rollout has, where flushes brought it

    def prepare(self) -> dict[str, Any] | None:
        """The plan of the next transfer, of the master."""
        if not self.is_master:
            return None
        if self._sender is None:
            self._sender = Sender(host=self._host or node_address(), **self._publishing)
        plan: dict[str, Any] = msgspec.to_builtins(self._sender.prepare())
        return plan

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any] | None]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Every rollout worker is given the plan; training ranks need nothing."""
        plan = plan_in(metadata)
        return {"plan": [None] * actor_wg_world_size}, {"plan": [plan] * rollout_world_size}

    def init_process_group(self, plan: dict[str, Any] | None) -> None:
        """A rollout worker takes the plan."""
        if plan is None:
            return
        if self._receiver is None:
            limit = _PATCH_LIMIT if self.wire_format == CHANGES else 0.0
            self._receiver = Receiver(mode=self._mode, patch_limit=lambda: limit)
        self._receiver.join(msgspec.convert(plan, TransferPlan))

    async def send_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], global_steps: int | None = None
    ) -> dict[str, float]:
        """Publishes them, on the master; other ranks walk theirs in step. See `Sender.send`."""
        if self._sender is None:
            for _ in weights:
                pass
            return {}
        return self._sender.send(weights, timeout_s=self._timeout_s)

    def receive_weights(
        self, global_steps: int | None = None
    ) -> AsyncIterator[tuple[str, torch.Tensor]] | Iterator[Any]:
        """The version that the master sends, proved: whole tensors, or flushes of changes. See `Receiver.receive`.

        They lie on the worker's GPU, where it has one: verl's rollouts hand some of them to another process by handle.
        """
        assert self._receiver is not None, "init_process_group comes first"
        return self._flushes() if self.wire_format == CHANGES else self._tensors()

    async def _tensors(self) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
        assert self._receiver is not None
        device = worker_device()
        async with contextlib.aclosing(self._receiver.received(timeout_s=self._timeout_s)) as received:
            async for name, tensor in received:
                yield name, tensor.to(device)

    def _flushes(self) -> Iterator[Any]:
        from weightsync.adapters.verl_flush import changed, flushes, needs_whole, whole

        assert self._receiver is not None
        most_bytes = self._bucket_bytes
        with contextlib.ExitStack() as stack:
            before, self._given = self._given, None  # what is interrupted comes whole the next time
            patch, failed = None, None
            try:
                staged = stack.enter_context(self._receiver.pulled(timeout_s=self._timeout_s))
                if staged.patch is not None and before == (staged.patch.base, staged.patch.base_digest):
                    segment = stack.enter_context(MappedSegment(staged.patch.segment, need_bytes=1))
                    if not needs_whole(changed(staged.patch, staged.manifest, segment, most_bytes=most_bytes)):
                        patch = staged.patch
            except Exception as error:
                _logger.error("the version could not be fetched: %s", error)  # Ray may show another worker's error
                failed = error
            change = None if patch is None else f"{patch.base} {patch.base_digest}"
            all_have_it = _all_have(change, failed=failed, timeout_s=self._timeout_s + _MARGIN_S)
            if failed is not None:
                raise failed
            if patch is not None and all_have_it:
                pieces = changed(patch, staged.manifest, segment, most_bytes=most_bytes)
            else:
                pieces = whole(staged, stack.enter_context(MappedSegment(staged.segment, need_bytes=1)))
            yield from flushes(pieces, most_bytes=most_bytes)
            self._given = staged.version, staged.manifest.model_digest

    def finalize(self) -> None:
        """Nothing: what is kept makes the next transfer a delta."""


def _all_have(change: str | None, *, failed: Exception | None, timeout_s: float) -> bool:
    """Whether every worker of this rollout has the same change. verl calls a rollout once for each flush of one of its
    workers, and the others wait for that: all give the same ones, or verl waits for good. They are verl's group.

    Raises:
        TransferError: another worker has failed, is gone, or did not come in time. Nothing was given to verl.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return change is not None
    mine = 0 if failed is not None else 1  # 0: failed; 1: it has none; else what it has
    if failed is None and change is not None:
        mine = 2 + int.from_bytes(hashlib.sha256(change.encode()).digest()[:7], "big")
    told = torch.tensor([mine, -mine])
    try:
        dist.all_reduce(told, op=dist.ReduceOp.MIN, async_op=True).wait(timedelta(seconds=timeout_s))
    except RuntimeError as error:
        raise failed or TransferError(f"the workers of this rollout could not agree: {error}") from error
    least, most = int(told[0]), -int(told[1])
    if least == 0 and failed is None:
        raise TransferError("another worker of this rollout could not fetch the version: see its log")
    return 1 < least == most
