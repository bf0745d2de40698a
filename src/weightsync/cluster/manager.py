"""RayWeightSync: the call graph's two calls, `initialize` and `sync_weights`, in the driver of a Ray job.

    driver                     training rank 0                    engines
      |--- initialize() --------->|---------- HTTP: describe, init --->|
      |<--------------------------|                                    |
      |--- sync_weights(v) ------>|---------- HTTP: begin, chunks, stage, commit
      |<-- SyncReport ------------|                                    |

The driver's calls are actor calls, on every training rank at once. A sync that finds the group gone (an engine died or
came back) builds a new one.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from weightsync.cluster.engine_actor import RayEngine
from weightsync.cluster.ranks import RayRank, ask_all, settle_owed
from weightsync.cluster.ray_calls import kill
from weightsync.config import WeightSyncConfig
from weightsync.errors import InvalidRequestError, SyncInProgressError, TrainerRankError, WeightSyncError
from weightsync.handles.fanout import EngineFanout
from weightsync.types import Deadline, EngineReply, SyncReport
from weightsync.types.deadline import check_wait_s

_T = TypeVar("_T")
_MARGIN_S = 10.0  # beyond the ranks' own deadlines: to abort, to agree on the outcome, and to say so
_REPLACE_S = 10.0


class RayWeightSync:
    """A `Push` whose caller is the driver: every call goes to all training ranks at once.

    One call at a time. When a training rank dies its process group is broken: the call under way and all later ones
    raise `TrainerRankError`; engines go on serving. When an engine dies the call under way fails, and the next one
    goes on with the others.

    Args:
        ranks: all training ranks, joined.
        engines: the same that rank 0 was given.
        config: the same that the ranks were given: its time limits count.
        start_engine: starts an engine's actor anew and returns its handle.
    """

    def __init__(
        self,
        ranks: Sequence[RayRank],
        engines: Sequence[RayEngine],
        *,
        config: WeightSyncConfig,
        start_engine: Callable[[str], Any],
    ) -> None:
        self.ranks = tuple(ranks)
        self.engines: Mapping[str, RayEngine] = {engine.engine_id: engine for engine in engines}
        self._client = EngineFanout(engines)
        self._transfer = config.transfer
        self._start_engine = start_engine
        self._busy = threading.Lock()
        self._broken: TrainerRankError | None = None
        self._owed: dict[Any, RayRank] = {}  # answers to a call that raised before they came

    def initialize(self) -> None:
        """`PushSync.initialize` on every rank.

        Raises:
            TrainerRankError: a rank is gone or silent. The job has to be restarted.
            WeightSyncError: as `PushSync.initialize`; it may be called again.
        """
        self._all("initialize", timeout_s=self._transfer.join_timeout_s + _MARGIN_S, kind=type(None))

    def sync_weights(self, version: int) -> SyncReport:
        """`PushSync.sync_weights` on every rank; returns or raises within `transfer_timeout_s` and a margin of 10 s
        after all ranks have come to it, which may take as long.

        Raises:
            SyncInProgressError: another call runs, or a rank still works on one that has failed. It is not disturbed.
            TrainerRankError: a rank is gone or silent. Engines serve their old version (one whose pause was left
                behind serves again when its lease ends); the job has to be restarted.
            WeightSyncError: as `PushSync.sync_weights`: the next call goes on with the engines that answer.
        """
        reports = self._all(
            "sync_weights", version, timeout_s=2 * self._transfer.transfer_timeout_s + _MARGIN_S, kind=SyncReport
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
        return self._all("run", method, args, options, timeout_s=timeout_s, kind=None)

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
        self.ranks[0].urgent("replace_engine", engine_id, actor, kind=type(None), timeout_s=_REPLACE_S)
        self.engines[engine_id].replace(actor)

    def restart_engine(self, engine_id: str, *, timeout_s: float) -> None:
        """Ends an engine's actor, if there is one, starts another in its place, and waits until that one is built.

        It serves what its factory built until the next sync takes it in.

        Raises:
            InvalidRequestError: no engine has that name.
            WeightSyncError: it did not start. The engine counts as lost.
        """
        if engine_id not in self.engines:
            raise InvalidRequestError(f"there is no engine {engine_id!r}; there are {', '.join(self.engines)}")
        fresh = RayEngine(self._start_engine(engine_id), engine_id=engine_id)
        try:
            fresh.ready(timeout_s=timeout_s)
            self.replace_engine(engine_id, fresh.actor)
        except BaseException:  # nobody would end it, and the next try has its place
            with contextlib.suppress(Exception):  # Ray is gone, say: that is no reason
                kill(fresh.actor)
            raise

    def is_idle(self) -> bool:
        """Whether all ranks are there and none is in a call; waits a moment for answers to one that has raised."""
        if not self._busy.acquire(blocking=False):
            return False
        try:
            settle_owed(self._owed)
        except WeightSyncError:
            return False
        finally:
            self._busy.release()
        return self._broken is None

    def close(self) -> None:
        """Gives back nothing: the actors belong to who started them."""

    def _all(self, method: str, *args: Any, timeout_s: float, kind: type[_T] | None) -> list[_T]:
        if not self._busy.acquire(blocking=False):
            raise SyncInProgressError("another call of this RayWeightSync is running", state_left="it goes on")
        try:
            if self._broken is not None:
                raise self._broken
            settle_owed(self._owed)
            return ask_all(self.ranks, method, *args, deadline=Deadline(timeout_s), kind=kind, owed=self._owed)
        except TrainerRankError as error:
            self._broken = error
            raise
        finally:
            self._busy.release()
