"""TrainerActor: a training rank in a Ray actor of its own.

Torch is imported when the rank joins, not with this module: the driver needs none.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import socket
import struct
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

from weightsync.cluster.client import EngineThroughController, RayEngine
from weightsync.cluster.engine_actor import user_method
from weightsync.cluster.post import Mailbox
from weightsync.cluster.ray_calls import here, start_actor
from weightsync.cluster.wire import answer, refusal
from weightsync.config import WeightSyncConfig
from weightsync.errors import ConfigError, GroupJoinError, InvalidRequestError, StateError
from weightsync.memory.segment import unlink_own
from weightsync.types import SyncMethod

if TYPE_CHECKING:
    from weightsync.extract.base import WeightExtractor
    from weightsync.publish.push import PushSync

WORK, POST = "work", "post"
_GROUPS = {WORK: 1, POST: 4}
"""One thread works: it alone trains and syncs, in the order of the calls, as collectives have to. The others carry init
requests, which a sync under way waits for."""
_SIOCGIFADDR = 0x8915


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankContext:
    """What a trainer factory is told. `torch.distributed`'s default group is there already.

    Attributes:
        rank: of the training job.
        world_size: ranks of the job.
        engines: rank 0's handles, in the order of the engines; empty on the others.
        config: as given to `launch`, with the `master_addr` that the engines can reach.
    """

    rank: int
    world_size: int
    engines: tuple[EngineThroughController, ...]
    config: WeightSyncConfig

    def push(self, extractor: WeightExtractor, **options: Any) -> PushSync:
        """The rank's `PushSync`, as the config says.

        Args:
            extractor: of this rank's model.
            options: further arguments of `PushSync`.
        """
        from weightsync.clients.fanout import EngineFanout
        from weightsync.publish.push import PushSync

        client = EngineFanout(self.engines) if self.rank == 0 else None
        return PushSync.from_config(self.config, extractor, client, **options)


class RankTrainer(Protocol):
    """What a trainer factory gives. Its further public methods can be called by `RayWeightSync.run`."""

    @property
    def push(self) -> SyncMethod:
        """Usually a `PushSync`."""
        ...


TrainerFactory = Callable[[RankContext], RankTrainer]
"""Called on every rank, in the thread that will train."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Meeting:
    """Where the training ranks meet.

    Attributes:
        address: of rank 0's store.
        port: of rank 0's store.
        backend: of the default group: "gloo" or "nccl".
        timeout_s: of the group's collectives, the training's own as well.
    """

    address: str
    port: int
    backend: str
    timeout_s: float


class TrainerActor:
    """The actor's class; `start_trainer` starts one. Every method answers with JSON bytes and raises nothing.

    Order: `where`; `open_store` on rank 0; `join` on all; then `initialize`, `sync_weights` and `run`, on all ranks in
    the same order.

    Args:
        rank: of the job.
        world_size: ranks of the job.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank = rank
        self._world_size = world_size
        self._store: Any = None
        self._mailbox = Mailbox()
        self._engines: dict[str, RayEngine] = {}
        self._trainer: RankTrainer | None = None

    def where(self) -> bytes:
        """Answers node id, IP address and process id."""
        return answer([*here(), os.getpid()])

    def open_store(self, address: str, timeout_s: float) -> bytes:
        """Rank 0: opens the store that the ranks meet at; answers its port, which the system chose."""
        try:
            from weightsync.transfer.group import new_store

            self._store, port = new_store(address, timeout_s=timeout_s)
            return answer(port)
        except Exception as error:
            return refusal(error, "can't open the training ranks' store", rank=self._rank)

    def join(
        self, meeting: Meeting, config: dict[str, Any], engines: tuple[RayEngine, ...], factory: TrainerFactory
    ) -> bytes:
        """Joins the default group and builds this rank's trainer. Returns when every rank has joined.

        Args:
            meeting: where.
            config: of a `WeightSyncConfig`.
            engines: for rank 0.
            factory: see `TrainerFactory`.
        """
        try:
            self._join_group(meeting)
            self._engines = {engine.engine_id: engine for engine in engines}
            context = RankContext(
                rank=self._rank,
                world_size=self._world_size,
                engines=tuple(EngineThroughController(engine, self._mailbox) for engine in engines),
                config=WeightSyncConfig.load(config),
            )
            trainer = factory(context)
            if not callable(getattr(getattr(trainer, "push", None), "sync_weights", None)):
                raise ConfigError(
                    f"a trainer factory returns an object with a SyncMethod as `push`, not a {type(trainer).__name__}; "
                    "RankContext.push makes one"
                )
            self._trainer = trainer
            return answer()
        except Exception as error:
            return refusal(error, "building the trainer failed", rank=self._rank)

    def initialize(self) -> bytes:
        """`PushSync.initialize`."""
        return self._with_trainer("initialize", lambda trainer: trainer.push.initialize())

    def sync_weights(self, version: int) -> bytes:
        """`PushSync.sync_weights`; answers the `SyncReport`."""
        return self._with_trainer("sync_weights", lambda trainer: trainer.push.sync_weights(version))

    def run(self, method: str, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[bytes, Any]:
        """Calls a method of the trainer; an answer without a value (or with the error), and what it returned."""
        values: list[Any] = []
        body = self._with_trainer(method, lambda trainer: values.append(user_method(trainer, method)(*args, **options)))
        return body, values[0] if values else None

    def take(self, controller: str, timeout_s: float) -> bytes:
        """`Mailbox.take`."""
        try:
            return self._mailbox.take(timeout_s, controller=controller)
        except Exception as error:
            return refusal(error, "no init requests can be fetched", rank=self._rank)

    def deliver(self, number: int, body: bytes) -> bytes:
        """`Mailbox.deliver`."""
        self._mailbox.deliver(number, body)
        return answer()

    def replace_engine(self, engine_id: str, actor: Any) -> bytes:
        """Rank 0: from here on this engine is another actor."""
        engine = self._engines.get(engine_id)
        if engine is None:
            known = ", ".join(self._engines) or "none"
            return refusal(InvalidRequestError(f"there is no engine {engine_id!r} to replace; known: {known}"), "")
        engine.replace(actor)
        return answer()

    def close(self) -> bytes:
        """Leaves the transfer group, and unlinks shared memory though a sync may run.

        The process is ended by who started it.
        """
        self._mailbox.close()
        if self._trainer is not None:
            with contextlib.suppress(Exception):  # a sync may be running: it ends with the process
                self._trainer.push.close()
        unlink_own()
        return answer()

    def _with_trainer(self, what: str, step: Callable[[RankTrainer], Any]) -> bytes:
        try:
            if self._trainer is None:
                raise StateError("this rank has not joined yet")
            return answer(step(self._trainer))
        except Exception as error:
            return refusal(error, f"{what} failed on training rank {self._rank}", rank=self._rank)

    def _join_group(self, meeting: Meeting) -> None:
        import torch.distributed as dist
        from torch._C._distributed_c10d import TCPStore

        timeout = timedelta(seconds=meeting.timeout_s)
        interface = interface_towards(meeting.address)
        if interface is not None:
            # Gloo's own choice is what the host's name resolves to: often loopback, where other hosts meet nobody.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        try:
            store = self._store or TCPStore(meeting.address, meeting.port, None, False, timeout, wait_for_workers=False)
            dist.init_process_group(
                meeting.backend, store=store, rank=self._rank, world_size=self._world_size, timeout=timeout
            )
        except RuntimeError as error:
            raise GroupJoinError(
                f"the training ranks did not meet at {meeting.address}:{meeting.port}: {error}", rank=self._rank
            ) from error


def start_trainer(rank: int, world_size: int, *, bundle: tuple[Any, int] | None = None, **options: Any) -> Any:
    """Starts a training rank's actor and returns its handle at once.

    Args:
        rank: of the job.
        world_size: ranks of the job.
        bundle: placement group and number of a bundle.
        options: Ray's own; num_cpus is 0 unless told otherwise. A rank is never restarted: its job is broken.

    Raises:
        ConfigError: `options` asks for restarts.
    """
    if options.get("max_restarts"):
        raise ConfigError("a training rank that died can't come back into its process group: leave max_restarts at 0")
    options.setdefault("num_cpus", 0)
    return start_actor(TrainerActor, rank, world_size, groups=_GROUPS, bundle=bundle, **options)


def interface_towards(address: str) -> str | None:
    """The network interface that `address` is reached by; None where that can't be told (IPv6, no Linux)."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # sends nothing: it asks the routing table
        own = probe.getsockname()[0]
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                told = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(told[20:24]) == own:
                    return name
    return None
