"""TrainerActor: a training rank in a Ray actor of its own.

Torch is imported when the rank joins, not with this module: the driver needs none.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import msgspec

from weightsync.cluster.actors import Answer, StartedActor, answer, unlinked_in_time, user_method
from weightsync.cluster.engine_actor import RayEngine
from weightsync.config import WeightSyncConfig
from weightsync.errors import ConfigError, GroupJoinError, InvalidRequestError, StateError, WeightSyncError
from weightsync.memory.segment import unlink_own
from weightsync.net.routes import interface_towards
from weightsync.types import Push, SyncReport

if TYPE_CHECKING:
    from weightsync.extract.base import WeightExtractor
    from weightsync.trainer.push import PushSync


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankContext:
    """What a trainer factory is told. `torch.distributed`'s default group is there already.

    Attributes:
        rank: of the training job.
        world_size: ranks of the job.
        engines: rank 0's handles, in the order of the engines; empty on the others.
        config: as given to `launch`, with the `master_addr` that the engines can reach, and the URL of the controller.
        token: of that controller; None where there is none.
    """

    rank: int
    world_size: int
    engines: tuple[RayEngine, ...]
    config: WeightSyncConfig
    token: str | None = dataclasses.field(default=None, repr=False)

    def push(self, extractor: WeightExtractor, **options: Any) -> PushSync:
        """The rank's `PushSync`, as the config says; `options` are further arguments of it.

        Raises:
            ConfigError: a controller orders this job's pushes; or a time-out is among `options`: the driver waits by
                `config.transfer`, too, and would take a slower push for a broken job.
        """
        if self.config.push.controller is not None:
            raise ConfigError(
                f"{self.config.push.controller} orders the pushes of this job: its ranks take them by weightsync.push("
                "weights, context.engines, config=context.config, token=context.token), in their own step"
            )
        from weightsync.handles.fanout import EngineFanout
        from weightsync.trainer.push import TIME_OUTS, PushSync

        if own := [name for name in TIME_OUTS if name in options]:
            raise ConfigError(
                f"{', '.join(own)}: the driver waits by `transfer` of launch's config=, too; set it there"
            )
        client = EngineFanout(self.engines) if self.rank == 0 else None
        return PushSync.from_config(self.config, extractor, client, **options)


@runtime_checkable
class PushesItself(Protocol):
    """A `weightsync.Pusher`: its engines are met, and the ranks call it themselves."""

    def step(self, version: int | None = None) -> SyncReport | None: ...
    def close(self, *, wait: bool = True) -> None: ...


class RankTrainer(Protocol):
    """What a trainer factory gives. Its further public methods can be called by `RayWeightSync.run`."""

    @property
    def push(self) -> Push | PushesItself:
        """A `PushSync`, which the driver calls; or a `weightsync.Pusher`, which the trainer's own step calls."""


TrainerFactory = Callable[[RankContext], RankTrainer]
"""Called on every rank, in the thread that will train."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Meeting:
    """Where the training ranks meet.

    Attributes:
        backend: of the default group: "gloo" or "nccl".
        timeout_s: of the group's collectives, the training's own as well.
    """

    address: str
    port: int
    backend: str
    timeout_s: float


class TrainerActor(StartedActor):
    """The actor's class; `start` starts one.

    Order: `ready`; `open_store` on rank 0; `join` on all; then `initialize`, `sync_weights` and `ask`, on all ranks in
    the same order.

    Args:
        rank: of the job.
        world_size: ranks of the job.
    """

    num_asks = 1  # it alone trains and syncs, in the order of the calls, as collectives have to

    @classmethod
    def start(cls, *args: Any, bundle: tuple[Any, int] | None = None, **options: Any) -> Any:
        """See `StartedActor.start`.

        Raises:
            ConfigError: `options` asks for restarts.
        """
        if options.get("max_restarts"):
            raise ConfigError(
                "a training rank that died can't come back into its process group: leave max_restarts at 0"
            )
        return super().start(*args, bundle=bundle, **options)

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__(f"training rank {rank}", kind=WeightSyncError, rank=rank)
        self._rank = rank
        self._world_size = world_size
        self._store: Any = None
        self._engines: dict[str, RayEngine] = {}
        self._trainer: RankTrainer | None = None
        self._turn = threading.Lock()  # what the trainer is asked runs

    def open_store(self, address: str, timeout_s: float) -> Answer:
        """Rank 0: opens the store that the ranks meet at; answers its port, which the system chose."""

        def step() -> int:
            from weightsync.transfer.group import new_store

            self._store, port = new_store(address, timeout_s=timeout_s)
            return port

        return self._answer("can't open the training ranks' store", step)

    def join(
        self,
        meeting: Meeting,
        config: dict[str, Any],
        token: str | None,
        engines: tuple[RayEngine, ...],
        factory: TrainerFactory,
    ) -> Answer:
        """Joins the default group and builds this rank's trainer; `engines` are rank 0's. Returns when every rank has
        joined."""

        def step() -> None:
            self._join_group(meeting)
            self._engines = {engine.engine_id: engine for engine in engines}
            context = RankContext(
                rank=self._rank, world_size=self._world_size, engines=engines if self._rank == 0 else (),
                config=WeightSyncConfig.load(config), token=token,
            )  # fmt: skip
            trainer = factory(context)
            push = getattr(trainer, "push", None)
            if not callable(getattr(push, "sync_weights", None)) and not isinstance(push, PushesItself):
                raise ConfigError(
                    f"a trainer factory returns an object with a Push as `push`, not a {type(trainer).__name__}; "
                    "RankContext.push makes one, weightsync.push one that the trainer's own step calls"
                )
            self._trainer = trainer

        return self._answer("building the trainer failed", step)

    def initialize(self) -> Answer:
        """`PushSync.initialize`; nothing where the trainer pushes by itself."""

        def step(trainer: RankTrainer) -> None:
            if not isinstance(push := trainer.push, PushesItself):
                push.initialize()

        return self._with_trainer("initialize", step)

    def sync_weights(self, version: int) -> Answer:
        """`PushSync.sync_weights`; answers the `SyncReport`."""

        def step(trainer: RankTrainer) -> Any:
            if isinstance(push := trainer.push, PushesItself):
                raise StateError(
                    "this trainer pushes in its own step: run that, it asks its controller whether it is to"
                )
            return msgspec.to_builtins(push.sync_weights(version))

        return self._with_trainer("sync_weights", step)

    def run(self, method: str, args: tuple[Any, ...], options: dict[str, Any]) -> Answer:
        return self._with_trainer(method, lambda trainer: user_method(trainer, method)(*args, **options))

    def replace_engine(self, engine_id: str, actor: Any) -> Answer:
        """Rank 0: from here on this engine is another actor."""

        def step() -> None:
            engine = self._engines.get(engine_id)
            if engine is None:
                known = ", ".join(self._engines) or "none"
                raise InvalidRequestError(f"there is no engine {engine_id!r} to replace; known: {known}")
            engine.replace(actor)

        return self._answer("replace_engine", step)

    def close(self, *, in_order: bool = True) -> Answer:
        """Leaves the transfer group, and unlinks shared memory though a sync may run.

        The process is ended by who started it.

        Args:
            in_order: whether a last version may be pushed: not where the job ended in an error, nor while the trainer
                is in a step, whose weights are half-changed.
        """
        is_idle = self._turn.acquire(blocking=False)
        try:
            if self._trainer is not None:
                with unlinked_in_time(), contextlib.suppress(Exception):  # a sync that runs ends with the process
                    push = self._trainer.push
                    if isinstance(push, PushesItself) and not (in_order and is_idle):
                        push.close(wait=False)
                    else:
                        push.close()
        finally:
            if is_idle:
                self._turn.release()
        unlink_own()
        return answer()

    def _with_trainer(self, what: str, step: Callable[[RankTrainer], Any]) -> Answer:
        def checked() -> Any:
            if self._trainer is None:
                raise StateError("this rank has not joined yet", rank=self._rank)
            with self._turn:
                return step(self._trainer)

        return self._answer(f"{what} failed on training rank {self._rank}", checked)

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
