"""NeMo-RL: a checkpoint engine that publishes.

    policy:
      generation:
        refit_transport: "weightsync.adapters.nemo_rl:WeightSyncCheckpointEngine"

Its base class is `nemo_rl.utils.checkpoint_engines.base.CheckpointEngine`, as it was in August 2026. NeMo-RL makes one
in every worker and does not say of which kind that is. So each `prepare` offers an address, a token and a run; those of
training rank 0 come first in what all are then given, and hold. There is one `prepare` for many transfers: who receives
counts them.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import AsyncGenerator, Iterable
from typing import Any

import msgspec
import torch
from nemo_rl.utils.checkpoint_engines.base import CheckpointEngine

from weightsync.adapters.checkpoint_engine import Receiver, Sender, TransferPlan, node_address
from weightsync.errors import InvalidRequestError, StateError
from weightsync.types import Version
from weightsync.types.message import learn

_BATCH_BYTES = 64 << 20


class WeightSyncCheckpointEngine(CheckpointEngine):  # type: ignore[misc]
    """See the module. Training ranks other than 0 walk their weights and send nothing.

    Args:
        bucket_size: NeMo-RL's, in bytes: a batch of tensors on the receiving side has about so much at most.
        host: where the trainer's agent listens, and how workers reach it; this node's address by Ray where not given.
        timeout_s: how long one transfer may take.
        mode: how workers fetch a version, see `Puller`.
        release_after_refit: NeMo-RL's; it calls `finalize` after each transfer then, and everything begins anew.
        publishing: further arguments of `WeightManager`.
    """

    def __init__(
        self,
        bucket_size: int = _BATCH_BYTES,
        *,
        host: str | None = None,
        model_id: str = "actor",
        timeout_s: float = 600.0,
        mode: str = "auto",
        release_after_refit: bool = False,
        **publishing: Any,
    ) -> None:
        self._batch_bytes = bucket_size
        self._host = host
        self._model_id = model_id
        self._timeout_s = timeout_s
        self._mode = mode
        self._publishing = publishing
        self._held: socket.socket | None = None
        self._offer: _Offer | None = None
        self._sender: Sender | None = None
        self._receiver: Receiver | None = None
        self._lost_count = False

    def prepare(self) -> dict[str, Any]:
        """What this worker offers, were it training rank 0. Its port is held until the worker's part is known; on a
        node that has not the address of the option `host` there is none to hold: it is not training rank 0's."""
        if self._offer is None:
            host, port = self._host or node_address(), 0
            try:
                self._held = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
                self._held.bind((host, 0))
                port = self._held.getsockname()[1]
            except OSError:
                self._let_go()
            self._offer = _Offer(
                host=host, port=port, token=secrets.token_hex(32),
                run_id=f"nemo-rl-{secrets.token_hex(6)}", model_id=self._model_id,
            )  # fmt: skip
        if self._sender is not None:
            self._offer.number = self._sender.next_number
        return msgspec.structs.asdict(self._offer)

    def init_policy_process_group(
        self, *, worker_rank: int, train_world_size: int, rollout_world_size: int, metadata: list[Any]
    ) -> None:
        """Training rank 0 starts its agent; the others need none.

        Raises:
            ConfigError: the agent can't listen there.
            EngineUnreachableError: it did not start.
        """
        self._let_go()
        if worker_rank == 0 and self._sender is None:
            offer = _first(metadata, train_world_size + rollout_world_size)
            self._sender = Sender(
                offer.model_id, host=offer.host, port=offer.port, token=offer.token, run_id=offer.run_id,
                **self._publishing,
            )  # fmt: skip
            self._sender.prepare()

    def init_rollout_process_group(
        self, *, rollout_rank: int, train_world_size: int, rollout_world_size: int, metadata: list[Any]
    ) -> None:
        """A rollout worker learns whom it pulls from, and which transfer is the next."""
        self._let_go()
        offer = _first(metadata, train_world_size + rollout_world_size)
        host = f"[{offer.host}]" if ":" in offer.host else offer.host
        plan = TransferPlan(
            endpoint=f"http://{host}:{offer.port}", model_id=offer.model_id,
            version=Version(run_id=offer.run_id, number=offer.number), token=offer.token,
        )  # fmt: skip
        if self._receiver is None:
            self._receiver = Receiver(mode=self._mode)
        self._receiver.join(plan)
        self._lost_count = False

    async def send_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Publishes them, on training rank 0; other ranks walk theirs in step. See `Sender.send`."""
        if self._sender is None:
            for _ in weights:
                pass
            return
        self._sender.send(weights, timeout_s=self._timeout_s)

    async def receive_weight_batches(self) -> AsyncGenerator[list[tuple[str, torch.Tensor]], None]:
        """The next version, whole and proved, in batches. See `Receiver.receive`.

        Raises:
            StateError: the last transfer brought nothing, so that this worker can't tell that version from the next.
        """
        receiver = self._receiver
        if receiver is None:
            raise StateError("init_rollout_process_group comes first")
        if self._lost_count:
            raise StateError("the last transfer brought nothing here: prepare all workers again, to know the next one")
        received = receiver.received_batches(self._batch_bytes, timeout_s=self._timeout_s)
        try:
            async for batch in received:
                yield batch
        finally:
            await received.aclose()
            self._lost_count = not receiver.expect_next()  # it has come where it was not taken to its end, too

    def finalize(self) -> None:
        """Ends the agent and gives memory back; a `prepare` begins anew. Idempotent."""
        self._let_go()
        for each in (self._sender, self._receiver):
            if each is not None:
                each.close()
        self._offer = self._sender = self._receiver = None

    def _let_go(self) -> None:
        if self._held is not None:
            self._held.close()
            self._held = None


class _Offer(msgspec.Struct):
    host: str
    port: int
    token: str
    run_id: str
    model_id: str
    number: int = 1


learn(_Offer)


def _first(metadata: list[Any], num_workers: int) -> _Offer:
    """What training rank 0 offers.

    Raises:
        InvalidRequestError: not every worker has an offer of this engine, or rank 0 can't listen at its address.
    """
    if len(metadata) != num_workers or not num_workers:
        raise InvalidRequestError(f"{num_workers} workers take part, {len(metadata)} have prepared to")
    try:
        offer = msgspec.convert(metadata[0], _Offer)
    except msgspec.ValidationError as error:
        raise InvalidRequestError(f"training rank 0 has prepared another checkpoint engine: {error}") from None
    if offer.port == 0:
        raise InvalidRequestError(
            f"training rank 0 can't listen on {offer.host}: the option `host` is an address of its node"
        )
    return offer
