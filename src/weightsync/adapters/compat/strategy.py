"""Strategies, senders and receivers as the documents have them: created from a config, driven with `await`.

    create_sync_info -> create_sender        create_receiver(sync_info, rank_offset)
           send_chunks = one push of ours: begin, chunks, proof, pause, commit, resume
                 each step is one request_dict: parse_request -> receive_and_load_weights(request, loader)

The documents load each chunk into the live model; here the steps of one push cross by the same one call, so a receiver
that runs the documents' handler never serves half a model. Both ends join their group at the first sync, at once: the
documents' order, one end after the other, would wait for itself.
"""

from __future__ import annotations

import uuid
from typing import Any, ClassVar

import msgspec

from weightsync.adapters.compat.calls import config_of, in_thread
from weightsync.adapters.compat.groups import ProcessGroup, group_info
from weightsync.adapters.compat.messages import REQUESTS
from weightsync.adapters.compat.receiver import (
    BroadcastTransferReceiver,
    CudaIpcTransferReceiver,
    PackedCudaIpcTransferReceiver,
    WeightTransferReceiver,
)
from weightsync.adapters.compat.sender import (
    BroadcastTransferSender,
    CudaIpcTransferSender,
    Met,
    PackedCudaIpcTransferSender,
    WeightTransferSender,
)
from weightsync.config import WeightSyncConfig
from weightsync.errors import ConfigError
from weightsync.net.routes import address_towards
from weightsync.transfer import base
from weightsync.transfer.group import OpenStore, open_store
from weightsync.transfer.registry import strategy_for
from weightsync.types import EmptyWeightSyncInitInfo, InferenceEngineClient, WeightSyncInitInfo, WeightUpdateRequest

_DESCRIBE_S = 10.0


class WeightTransferStrategy:
    """A factory. May be sent to workers: what rank 0 keeps open for the sender stays behind.

    Args:
        cfg: its `transfer` counts: addresses and deadlines. That of a later call counts, where one is given.
    """

    name: ClassVar[str]
    sender: ClassVar[type[WeightTransferSender]]
    receiver: ClassVar[type[WeightTransferReceiver]]

    def __init__(self, cfg: Any = None) -> None:
        self._cfg = cfg
        self._kept: dict[str, object] = {}  # by group: what `create_sender` needs besides the info

    def __getstate__(self) -> dict[str, Any]:
        return {"_cfg": self._cfg, "_kept": {}}

    async def create_sync_info(self, cfg: Any, inference_client: InferenceEngineClient) -> WeightSyncInitInfo:
        """Training rank 0: what receivers meet the sender by; the world size is what engines report themselves. The
        address is this machine's towards engines that are named by URLs, where the config says none: of actors on
        other machines it has to.

        Raises:
            SyncFailedError: an engine does not answer.
            ConfigError: no address of this machine leads to an engine.
        """

        def make() -> WeightSyncInitInfo:
            sizes = inference_client.get_world_sizes(timeout_s=_DESCRIBE_S)
            chosen: dict[str, str] = {}
            if self.name == "broadcast" and "master_addr" not in self.config(cfg).transfer.model_fields_set:
                urls = [name for name in inference_client.engine_ids if "://" in name]
                towards = address_towards(urls, instead="say transfer.master_addr in the configuration")
                chosen = {} if towards is None else {"master_addr": towards}
            info, self._kept[info.group_name] = self.ours(cfg, **chosen).create_init_info(sizes)
            return info

        return await in_thread(make)

    async def create_init_info(
        self,
        master_addr: str | None = None,
        master_port: int | None = None,
        world_size: int | None = None,
        group_name: str | None = None,
        backend: str | None = None,
    ) -> WeightSyncInitInfo:
        """The same for engines that are not known yet. What is not given is chosen; `world_size` is what engines report
        at the first sync, whatever was said here.

        Raises:
            ConfigError: something is said of a process group, and this strategy has none.
            GroupJoinError: rank 0 can't listen on that address and port.
            InvalidRequestError: a port, world size or backend that can't be.
        """
        arguments = ("master_addr", "master_port", "world_size", "group_name", "backend")
        values = (master_addr, master_port, world_size, group_name, backend)
        named: dict[str, Any] = dict(zip(arguments, values, strict=True))
        given = {name: value for name, value in named.items() if value not in (None, ...)}

        def make() -> WeightSyncInitInfo:
            if given and self.name != "broadcast":
                raise ConfigError(f"strategy {self.name} has no process group: leave out {', '.join(given)}")
            if not given:
                info, kept = self.ours(None).create_init_info({"engines": 1})
            else:
                info, kept = _opened(given, config_of(self._cfg))
            self._kept[info.group_name] = kept
            return info

        return await in_thread(make)

    async def create_sender(
        self,
        cfg: Any = None,
        inference_client: InferenceEngineClient | None = None,
        sync_info: WeightSyncInitInfo | None = None,
        process_group: ProcessGroup | None = None,
    ) -> WeightTransferSender:
        """Training side, on every rank. Returns at once: both ends join at the first sync.

        Args:
            cfg: of the sender; or the process group, as the plan has it.
            inference_client: the engines; rank 0's.
            sync_info: of `create_sync_info`; one is made at the first sync where not given.
            process_group: joined by hand.
        """
        if isinstance(cfg, ProcessGroup):
            cfg, process_group = None, cfg
        cfg = self._cfg if cfg in (None, ...) else cfg
        sender = self.sender(process_group, strategy=self._met(cfg, sync_info), cfg=cfg)
        return sender.for_client(inference_client)

    async def create_receiver(
        self, cfg: Any = None, sync_info: WeightSyncInitInfo | None = None, rank_offset: int | None = None
    ) -> WeightTransferReceiver:
        """Inference side. Returns at once: it joins when the sender does.

        Args:
            cfg: of the receiver: its deadlines; left out in the plan's `create_receiver(sync_info, rank_offset)`.
            sync_info: of the training side.
            rank_offset: this engine's first rank in the group.

        Raises:
            ConfigError: there is no `sync_info`, or it is another strategy's; or the config.
        """
        if isinstance(cfg, WeightSyncInitInfo):
            cfg, sync_info, rank_offset = None, cfg, rank_offset if sync_info is None else sync_info  # type: ignore[assignment]
        sync_info = self._named(sync_info)
        if not isinstance(sync_info, WeightSyncInitInfo) or sync_info.strategy != self.name:
            raise ConfigError(f"create_receiver needs the sync_info of strategy {self.name}, got {sync_info!r:.80}")
        return self.receiver(info=sync_info, rank_offset=rank_offset, cfg=self.config(cfg))

    def get_request_type(self) -> type[WeightUpdateRequest]:
        """Which header its sender announces chunks by."""
        return REQUESTS[self.ours(None).request_type]

    def ours(self, cfg: Any, **chosen: str) -> base.WeightTransferStrategy:
        """Our strategy, with the config's settings, and what was chosen of `transfer` besides."""
        config = self.config(cfg)
        transfer = config.transfer.model_copy(update={"strategy": self.name, **chosen})
        return strategy_for(config.model_copy(update={"transfer": transfer}))

    def config(self, cfg: Any) -> WeightSyncConfig:
        """The config that counts: a call's own, or this strategy's."""
        return config_of(self._cfg if cfg in (None, ...) else cfg)

    def _named(self, info: WeightSyncInitInfo | None) -> WeightSyncInitInfo | None:
        """A document's empty info names no strategy: whoever is given it is meant."""
        nameless = isinstance(info, EmptyWeightSyncInitInfo) and not info.strategy
        return msgspec.structs.replace(info, strategy=self.name) if info is not None and nameless else info

    def _met(self, cfg: Any, info: WeightSyncInitInfo | None) -> Met:
        info = self._named(info)
        kept = self._kept.pop(info.group_name, None) if info is not None else None
        return Met(self.ours(cfg), None if info is None else (info, kept))


class BroadcastTransferStrategy(WeightTransferStrategy):
    """Process groups; see ours."""

    name, sender, receiver = "broadcast", BroadcastTransferSender, BroadcastTransferReceiver


class CudaIpcTransferStrategy(WeightTransferStrategy):
    """One handle a tensor; see ours."""

    name, sender, receiver = "cuda_ipc", CudaIpcTransferSender, CudaIpcTransferReceiver


class PackedCudaIpcTransferStrategy(WeightTransferStrategy):
    """One handle a chunk; see ours."""

    name, sender, receiver = "packed_cuda_ipc", PackedCudaIpcTransferSender, PackedCudaIpcTransferReceiver


_STRATEGIES = {
    kind.name: kind for kind in (BroadcastTransferStrategy, CudaIpcTransferStrategy, PackedCudaIpcTransferStrategy)
}


def _opened(given: dict[str, Any], config: WeightSyncConfig) -> tuple[WeightSyncInitInfo, OpenStore]:
    """An info with what was said, the config's settings for the rest, and the store that it names."""
    transfer = config.transfer
    chosen = {
        "master_addr": transfer.master_addr,
        "master_port": 1,  # the system's choice, below
        "world_size": 2,
        "group_name": f"weightsync-{uuid.uuid4().hex[:12]}",
        "backend": "nccl" if transfer.backend == "nccl" else "gloo",
    }
    info = group_info(**{**chosen, **given}, config=config)
    kept = open_store(info.master_addr, port=given.get("master_port", 0), timeout_s=info.join_timeout_s)
    return msgspec.structs.replace(info, master_port=kept.port), kept


def create_strategy(cfg: Any) -> WeightTransferStrategy:
    """The strategy that a config means; see `config.select_strategy`.

    Raises:
        ConfigError: it contradicts itself, or means a strategy that no document has.
    """
    name = strategy_for(config_of(cfg)).name
    if name not in _STRATEGIES:
        raise ConfigError(f"strategy {name} has no name in the documents: use weightsync.push")
    return _STRATEGIES[name](cfg)
