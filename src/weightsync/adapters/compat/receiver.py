"""WeightTransferReceiver as the documents have it: each step of a push is one request that it parses and runs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from weightsync.adapters.compat.calls import config_of, in_thread
from weightsync.adapters.compat.groups import ProcessGroup, init_custom_process_group
from weightsync.errors import InvalidRequestError, StateError
from weightsync.transfer import base
from weightsync.transfer.broadcast import BroadcastTransferReceiver as _BroadcastReceiver
from weightsync.transfer.registry import strategy_named
from weightsync.types import (
    REQUEST_TYPES,
    Deadline,
    EngineOp,
    EngineRequest,
    Full,
    WeightSyncInitInfo,
    WeightUpdateRequest,
)

if TYPE_CHECKING:
    from weightsync.adapters.compat.loaders import WeightLoader


class WeightTransferReceiver:
    """The receiving end, of one worker.

    Args:
        process_group: joined by hand.
        info: of the sender; it joins by that when the sender does.
        rank_offset: its rank there.
        cfg: its deadlines.

    Attributes:
        timeout_s: how long a step, or one chunk, may take.
        join_timeout_s: how long the step that joins the group may take, where that is longer.
    """

    def __init__(
        self,
        process_group: ProcessGroup | None = None,
        *,
        info: WeightSyncInitInfo | None = None,
        rank_offset: int | None = None,
        cfg: Any = None,
    ) -> None:
        transfer = config_of(cfg).transfer
        self.timeout_s = transfer.transfer_timeout_s
        self.join_timeout_s = transfer.join_timeout_s
        self._info, self._rank = info, rank_offset
        self._ours: base.WeightTransferReceiver | None = None
        self._joined: str | None = None
        if process_group is not None:
            self._ours, self._joined = _BroadcastReceiver(process_group.group), process_group.info.group_name

    async def initialize(
        self, master_addr: str, master_port: int, rank_offset: int, world_size: int, group_name: str, backend: str
    ) -> ProcessGroup:
        """Joins the process group now; returns when everybody has.

        Raises:
            GroupJoinError: somebody did not come.
        """
        group = await in_thread(
            lambda: init_custom_process_group(master_addr, master_port, world_size, rank_offset, group_name, backend)
        )
        self._ours, self._joined, self._rank = _BroadcastReceiver(group.group), group_name, rank_offset
        return group

    def parse_request(self, request_dict: Mapping[str, Any]) -> EngineRequest | WeightUpdateRequest:
        """A step of a push that crossed as plain data, checked. Without `op` it is the header of a chunk.

        Raises:
            InvalidRequestError: it is none.
        """
        fields = dict(request_dict)
        try:
            op = EngineOp(fields.pop("op", EngineOp.UPDATE_WEIGHTS))
            if op is not EngineOp.UPDATE_WEIGHTS:
                return msgspec.convert(fields, REQUEST_TYPES[op])
        except (ValueError, msgspec.ValidationError) as error:
            raise InvalidRequestError(f"this is no step of a push: {error}") from error
        return base.parse_request(fields)

    async def receive_and_load_weights(
        self, request: EngineRequest | WeightUpdateRequest | Mapping[str, Any], loader: WeightLoader
    ) -> dict[str, Any]:
        """Runs one step on the loader's model: of a chunk, receives its bytes and loads them. Parses it first, where it
        is not yet.

        Returns:
            The engine's answer, as plain data. A handler that returns it lets the sender see the proof.

        Raises:
            WeightSyncError: the step failed; the model serves its old version, or nothing.
        """
        step = self.parse_request(request) if isinstance(request, Mapping) else request
        reply = await in_thread(lambda: loader.step(step, self))
        return msgspec.to_builtins(reply)  # type: ignore[no-any-return]

    async def receive_weights(self, request: WeightUpdateRequest) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """The tensors of one announced chunk, by themselves: nothing is loaded. Views, until the next is asked for.

        Raises:
            StateError: it has joined nothing, and has no `sync_info`.
        """
        deadline = Deadline(self.timeout_s)
        ours = await in_thread(self._receiving)
        updates = await in_thread(lambda: ours.receive_weights(request, deadline=deadline))
        try:
            for update in updates:
                assert isinstance(update, Full)
                yield update.name, update.tensor
        finally:
            ours.release(request)

    def join(self, info: WeightSyncInitInfo, rank: int) -> base.WeightTransferReceiver:
        """Our receiver in the sender's group: the one that was joined by hand, or a new one.

        Raises:
            InvalidRequestError: the sender counts this worker at another rank than `create_receiver` was told.
            GroupJoinError: not everybody came.
        """
        named = self._info is not None and self._info.group_name == info.group_name
        if named and self._rank is not None and rank != self._rank:
            raise InvalidRequestError(
                f"the sender counts this worker as rank {rank}, create_receiver was told rank_offset {self._rank}: "
                "offsets follow from the world sizes that engines report, in the client's order"
            )
        if self._ours is None or self._joined != info.group_name:
            self._ours = strategy_named(info.strategy).create_receiver(info, rank=rank)
            self._joined = info.group_name
        return self._ours

    def _receiving(self) -> base.WeightTransferReceiver:
        if self._ours is None and (self._info is None or self._rank is None):
            raise StateError("this receiver was told neither a process group nor a sync_info")
        return self._ours or self.join(self._info, self._rank)  # type: ignore[arg-type]


class BroadcastTransferReceiver(WeightTransferReceiver):
    """Of a process group."""


class CudaIpcTransferReceiver(WeightTransferReceiver):
    """Of handles, one a tensor."""


class PackedCudaIpcTransferReceiver(WeightTransferReceiver):
    """Of handles, one a chunk."""


class Joining(base.WeightTransferStrategy):
    """How an engine's worker comes to a document's receiver: the strategy that it looks up."""

    def __init__(self, receiver: WeightTransferReceiver, name: str) -> None:
        self.name, self.request_type, self._receiver = name, strategy_named(name).request_type, receiver

    def create_receiver(self, info: WeightSyncInitInfo, *, rank: int) -> base.WeightTransferReceiver:
        return self._receiver.join(info, rank)

    def create_init_info(self, world_sizes: Mapping[str, int]) -> tuple[WeightSyncInitInfo, object]:
        raise AssertionError("an engine receives")

    def create_sender(self, *_: Any, **__: Any) -> base.WeightTransferSender:
        raise AssertionError("an engine receives")
