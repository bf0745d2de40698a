"""RayWeightSync: the controller's `WeightSyncManager` over Ray; two calls, as the call graph has them.

    driver                     training rank 0              engines
      |--- initialize() --------->| create_init_info           |
      |<-- init requests ---------|                            |
      |------------------------------------- init ------------>|  (rank 0 joins meanwhile)
      |--- answers -------------->|                            |
      |--- sync_weights(v) ------>| begin, chunks, stage, commit: straight to the engine actors
      |<-- SyncReport ------------|                            |

A sync that finds the group gone (an engine died or came back) builds a new one the same way.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from weightsync.clients.fanout import EngineFanout
from weightsync.cluster.client import RayEngine
from weightsync.cluster.post import Postman
from weightsync.cluster.ranks import RanksFailedError, RayRank, ask_all, settle_owed
from weightsync.cluster.trainer_actor import POST
from weightsync.cluster.wire import read_answer
from weightsync.config import WeightSyncConfig
from weightsync.errors import (
    ConfigError,
    InvalidRequestError,
    StateError,
    SyncInProgressError,
    TrainerRankError,
    WeightSyncError,
)
from weightsync.types import Deadline, EngineReply, InitRequest, SyncReport
from weightsync.types.deadline import check_wait_s

_T = TypeVar("_T")
_MARGIN_S = 10.0  # beyond the ranks' own deadlines: to abort, to agree on the outcome, and to say so
_REPLACE_S = 10.0


class RayWeightSync:
    """A `SyncMethod` whose caller is the driver: every call goes to all training ranks at once.

    One call at a time. When a training rank dies its process group is broken: the call under way and all later ones
    raise `TrainerRankError`; engines go on serving. When an engine dies the call under way fails, and the next one
    goes on with the others.

    Args:
        ranks: all training ranks, joined.
        engines: the same that rank 0 was given.
        config: the same that the ranks were given: its time limits count.
        start_engine: starts an engine's actor anew and returns its handle; None where nobody can.
    """

    def __init__(
        self,
        ranks: Sequence[RayRank],
        engines: Sequence[RayEngine],
        *,
        config: WeightSyncConfig,
        start_engine: Callable[[str], Any] | None = None,
    ) -> None:
        if not ranks:
            raise ConfigError("a job has at least one training rank")
        self.ranks = tuple(ranks)
        self.engines: Mapping[str, RayEngine] = {engine.engine_id: engine for engine in engines}
        self._client = EngineFanout(engines)
        self._transfer = config.transfer
        self._start_engine = start_engine
        self._busy = threading.Lock()
        self._broken: TrainerRankError | None = None
        self._owed: dict[Any, RayRank] = {}  # answers to a call that raised before they came
        self._postman = Postman(self.ranks[0], self.engines)
        self._postman.start()

    @property
    def init_requests(self) -> Mapping[str, InitRequest]:
        """The latest init request that each engine was handed by this controller."""
        return dict(self._postman.handed_on)

    def initialize(self) -> None:
        """`PushSync.initialize` on every rank.

        Raises:
            TrainerRankError: a rank is gone or silent. The job has to be restarted.
            WeightSyncError: as `PushSync.initialize`; it may be called again.
        """
        self._all("initialize", timeout_s=self._transfer.join_timeout_s + _MARGIN_S, read=_nothing)

    def sync_weights(self, version: int) -> SyncReport:
        """`PushSync.sync_weights` on every rank; returns or raises within `transfer_timeout_s` and a margin of 10 s.

        Raises:
            SyncInProgressError: another call runs, or a rank still works on one that has failed. It is not disturbed.
            TrainerRankError: a rank is gone or silent. Engines serve their old version (one whose pause was left
                behind serves again when its lease ends); the job has to be restarted.
            WeightSyncError: as `PushSync.sync_weights`: the next call goes on with the engines that answer.
        """
        reports = self._all(
            "sync_weights", version, timeout_s=self._transfer.transfer_timeout_s + _MARGIN_S, read=_report
        )
        return reports[0]

    def run(self, method: str, *args: Any, timeout_s: float, **options: Any) -> list[Any]:
        """Calls a public method of every rank's trainer, e.g. a training step; what each returned, by rank.

        Arguments and results cross as Ray sends them; an error comes back typed.

        Raises:
            TrainerRankError: a rank is gone, or did not answer within `timeout_s`. The job has to be restarted.
            WeightSyncError: what the method raised on a rank. The others may still be in it.
        """
        check_wait_s("timeout_s", timeout_s)
        return self._all("run", method, args, options, timeout_s=timeout_s, read=_value)

    def describe(self, *, timeout_s: float) -> tuple[Mapping[str, EngineReply], Mapping[str, WeightSyncError]]:
        """Asks every engine what it is; see `InferenceEngineClient.describe`."""
        return self._client.describe(timeout_s=timeout_s)

    def replace_engine(self, engine_id: str, actor: Any) -> None:
        """From the next sync on `engine_id` is another actor, one of `start_engine`. Also safe while a sync runs.

        Raises:
            InvalidRequestError: no engine has that name.
            TrainerRankError: rank 0 is gone.
        """
        if engine_id not in self.engines:
            raise InvalidRequestError(f"there is no engine {engine_id!r}; there are {', '.join(self.engines)}")
        rank_0 = self.ranks[0]
        body = rank_0.get(
            rank_0.submit("replace_engine", engine_id, actor, group=POST), "replace_engine", timeout_s=_REPLACE_S
        )
        read_answer(body, type(None), peer=rank_0.name, what="replace_engine")
        self.engines[engine_id].replace(actor)

    def restart_engine(self, engine_id: str, *, timeout_s: float) -> None:
        """Ends an engine's actor, if there is one, starts another in its place, and waits until that one is built.

        It serves what its factory built until the next sync takes it in.

        Raises:
            StateError: this controller did not start the engines; start an actor and call `replace_engine`.
            WeightSyncError: it did not start. The engine counts as lost.
        """
        if self._start_engine is None:
            raise StateError("this controller did not start the engines: start an actor and call replace_engine")
        if engine_id not in self.engines:
            raise InvalidRequestError(f"there is no engine {engine_id!r}; there are {', '.join(self.engines)}")
        fresh = RayEngine(self._start_engine(engine_id), engine_id=engine_id)
        fresh.ready(timeout_s=timeout_s)
        self.replace_engine(engine_id, fresh.actor)

    def close(self) -> None:
        """Hands on no more init requests. The actors live on: they belong to who started them. Idempotent."""
        self._postman.close()

    def _all(self, method: str, *args: Any, timeout_s: float, read: Callable[[RayRank, Any], _T]) -> list[_T]:
        with self._exclusive():
            if self._broken is not None:
                raise self._broken
            try:
                settle_owed(self._owed)
                return ask_all(self.ranks, method, *args, deadline=Deadline(timeout_s), read=read, owed=self._owed)
            except TrainerRankError as error:
                self._broken = error
                raise
            except RanksFailedError as failed:
                if failed.broken and isinstance(failed.error, TrainerRankError):
                    self._broken = failed.error
                raise failed.error from None

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[None]:
        if not self._busy.acquire(blocking=False):
            raise SyncInProgressError("another call of this RayWeightSync is running", state_left="it goes on")
        try:
            yield
        finally:
            self._busy.release()


def _nothing(rank: RayRank, body: Any) -> None:
    return read_answer(body, type(None), peer=rank.name, what="initialize")


def _report(rank: RayRank, body: Any) -> SyncReport:
    return read_answer(body, SyncReport, peer=rank.name, what="sync_weights")


def _value(rank: RayRank, told: Any) -> Any:
    body, value = told
    read_answer(body, type(None), peer=rank.name, what="run")
    return value
