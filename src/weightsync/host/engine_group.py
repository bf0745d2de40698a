"""EngineGroup: the engines of one model on one host, each loaded for itself: one that fails fails alone."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait

from weightsync.errors import (
    ConfigError,
    DigestMismatchError,
    NoEnginesError,
    SyncFailedError,
    TransferAbortedError,
    WeightSyncError,
    as_weightsync_error,
)
from weightsync.handles.fanout import collect, in_thread
from weightsync.host.commit_gate import CommitGate, PendingCommit
from weightsync.host.engine_update import EngineUpdate, LoadReport
from weightsync.host.served_versions import Engine, ServedVersions, words
from weightsync.host.staged_version import StagedVersion
from weightsync.memory import boot_s
from weightsync.observe import Metrics, Recorder
from weightsync.types import Deadline, EngineHandle, Version
from weightsync.types.canary import CanaryReading
from weightsync.update.session import OTHER_CHECKSUM, unequal

_LET_GO_S = 10.0
"""An abort's own time, that of a question after it, and some more."""
_HANGS = "it has not let go of its last load"

_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupReport:
    """How it went.

    Attributes:
        engine_ids: who was loaded.
        errors: what failed, by engine; those serve their old version, or refuse to serve.
        bytes_are_wrong: some engine found other bytes than were proved.
        paused_s: the longest pause of any.
        num_chunks: how many requests each was given.
        unprovable: why some could not prove their live bytes, by engine.
        num_patched: how many were given the changed elements alone.
        checksums: engines' own, of their live weights, by engine; of those that have one.
        full_because: why engines were given all of it, though deltas brought it, by engine.
        canaries: what engines answered to the trainer's canary, by engine; of those that were asked one.
        held_s: for so long all had staged it, and in a fleet it might not be committed yet.
        written: how many elements engines have written in place, those alone that did not write all of them.
    """

    engine_ids: tuple[str, ...]
    errors: dict[str, str]
    bytes_are_wrong: bool
    paused_s: float
    num_chunks: int
    unprovable: dict[str, str]
    num_patched: int = 0
    checksums: dict[str, str] = dataclasses.field(default_factory=dict)
    full_because: dict[str, str] = dataclasses.field(default_factory=dict)
    canaries: dict[str, CanaryReading] = dataclasses.field(default_factory=dict)
    written: int = 0
    held_s: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Load:
    """One engine's load.

    Attributes:
        engine: which.
        number: the engine's `num_loads` while it counts; it was given up, or has ended, where that is another.
        staged: what it is given.
        deadline: of it.
        hold: in a fleet: what it waits for before its commit.
        began_s: by `boot_s`.
    """

    engine: Engine
    number: int
    staged: StagedVersion
    deadline: Deadline
    hold: PendingCommit | None
    began_s: float


class EngineGroup(ServedVersions):
    """Loads them, and knows what each serves. One load at a time; the rest from any thread.

    Args:
        engines: handles.
        model_id: which model.
        pause_timeout_s: how long an engine may take to finish running generations.
        recorder: where phases go.
        metrics: where failures are counted.
        changed: called after what an engine serves has changed, from any thread.
        gate: in a fleet: what may be committed.
        leased: whether they are to answer under a lease alone.

    Raises:
        NoEnginesError: there are none.
        ConfigError: two have one name.
    """

    def __init__(
        self,
        engines: Sequence[EngineHandle],
        model_id: str,
        *,
        pause_timeout_s: float,
        recorder: Recorder,
        metrics: Metrics,
        changed: Callable[[], None],
        gate: CommitGate | None = None,
        leased: bool = False,
    ) -> None:
        strangers = [engine for engine in engines if not isinstance(engine, EngineHandle)]
        if strangers:
            raise ConfigError(
                f"engines of model {model_id!r} are handles (EmbeddedEngine.of(ModuleWeightLoader(model)), HttpEngine, "
                f"VllmEngine), not {type(strangers[0]).__name__}"
            )
        names = [engine.engine_id for engine in engines]
        if not names:
            raise NoEnginesError(f"model {model_id!r} has no engine")
        if len(set(names)) != len(names):
            raise ConfigError(f"engines of model {model_id!r} share a name: {', '.join(names)}")
        updates = [
            EngineUpdate(engine, model_id, pause_timeout_s=pause_timeout_s, recorder=recorder, leased=leased)
            for engine in engines
        ]
        super().__init__(updates, changed)
        self._metrics = metrics
        self._gate = gate
        self._given: list[Future[LoadReport]] = []

    def all_dead(self, version: Version) -> dict[str, str]:
        """Why each engine that needs a version does not answer; empty where one does, or one has not failed before.

        Engines that failed, or were silent, are asked what they serve: some may need nothing at all.
        """
        outdated = self._outdated(version)
        with self._lock:
            if not all(engine.silence is not None or engine.load is not None for engine in outdated):
                return {}
        self._look(outdated)
        outdated = self._outdated(version)
        with self._lock:
            why = {engine.name: engine.silence or (_HANGS if engine.is_loading else "") for engine in outdated}
        return why if all(why.values()) else {}

    def load(self, staged: StagedVersion, deadline: Deadline) -> GroupReport:
        """Loads every engine that does not serve the version yet, all at once; what each serves is known as soon as it
        says so.

        One that did not answer when it was looked at last is left out. Returns when each has let go of it, or
        `_LET_GO_S` after the deadline; see `holders` then.
        """
        self._remember(staged)
        errors: dict[str, str] = {}
        running: dict[str, Future[LoadReport]] = {}
        loads: list[_Load] = []
        self._given = given = list[Future[LoadReport]]()
        outdated, began_s = self._outdated(staged.version), boot_s()
        hold = None if self._gate is None else self._gate.hold(staged.version, len(outdated))
        for engine in outdated:
            with self._lock:
                if engine.is_loading:
                    errors[engine.name] = f"StateError: {_HANGS}, and is not given {staged.version}"
                elif engine.unreachable:  # the others would wait for it
                    errors[engine.name] = engine.silence or ""
                else:
                    engine.num_loads += 1
                    load = _Load(
                        engine=engine, number=engine.num_loads, staged=staged, deadline=deadline, hold=hold,
                        began_s=began_s,
                    )  # fmt: skip
                    loads.append(load)
                    run = functools.partial(self._run, load)
                    engine.load = running[engine.name] = in_thread(run, name=f"weightsync-load-{engine.name}")
                    given.append(engine.load)
        if hold is not None and (why := [*errors.values(), *_failures(running)]):
            hold.failed("; ".join(why))
        # each ends by its own deadline, unless its handle has none
        reports, failed = collect(running, timeout_s=deadline.remaining_s + _LET_GO_S, late="it has not let go")
        for load in loads:
            who = load.engine.name
            if who in failed:
                self._failed(load, failed[who], let_go=running[who].done())
        failed |= self._disagreeing(staged.version)
        found = {engine.name: engine for engine in self._engines}
        if self._gate is not None and hold is not None:
            self._gate.ended(hold)
        return GroupReport(
            engine_ids=tuple(running),
            errors=errors | {who: found[who].why(error) for who, error in failed.items()},
            bytes_are_wrong=any(isinstance(error, DigestMismatchError) for error in failed.values()),
            paused_s=max((report.paused_s for report in reports.values()), default=0.0),
            num_chunks=max((report.num_chunks for report in reports.values()), default=0),
            held_s=0.0 if hold is None else hold.held_s,
            unprovable=self.unprovable(),
            num_patched=sum(report.patched for report in reports.values()),
            checksums=self._sums(staged.version),
            written=sum(report.written or 0 for report in reports.values()),
            full_because={who: report.full_because for who, report in reports.items() if report.full_because},
            canaries={who: report.canary for who, report in reports.items() if report.canary is not None},
        )

    def _disagreeing(self, version: Version) -> dict[str, WeightSyncError]:
        """Engines that serve this version with another checksum than most: they count as serving nothing, and are
        loaded again. Each commits for itself here, so they have answered meanwhile."""
        wrong: dict[str, WeightSyncError] = {}
        sums = self._sums(version)
        with self._lock:
            for engine in self._engines:
                if engine.name in unequal(sums):
                    error = wrong[engine.name] = DigestMismatchError(
                        OTHER_CHECKSUM, peer=engine.name, version=str(version)
                    )
                    engine.served, engine.silence, engine.unequal = None, words(error), version
        for each in wrong.values():
            self._metrics.observe_failure(each)
        if wrong:
            self._tell_changed()
        return wrong

    def _sums(self, version: Version) -> dict[str, str]:
        with self._lock:
            return {
                engine.name: engine.checksum
                for engine in self._engines
                if engine.checksum is not None and engine.served == version
            }

    def holders(self) -> list[Future[LoadReport]]:
        """Loads of the last call of `load` that did not end in time: until they do, what they were given must not
        change."""
        return [load for load in self._given if not load.done()]

    def wait_loads(self, timeout_s: float) -> None:
        """Until no load of the last call of `load` is under way, and no longer than that."""
        wait(self.holders(), timeout_s)

    def _run(self, load: _Load) -> LoadReport:
        """In a thread of the engine's own: what it has come to is noted without waiting for another engine."""
        try:
            report = load.engine.update.load(load.staged, deadline=load.deadline, hold=load.hold)
        except BaseException as caught:
            error = as_weightsync_error(caught, SyncFailedError, "the load failed")
            if load.hold is not None:
                load.hold.failed(f"engine {load.engine.name}: {error}")
            self._failed(load, error, let_go=True)
            if error is caught:
                raise
            raise error from caught
        engine = load.engine
        with self._lock:
            if engine.num_loads == load.number:
                engine.num_loads += 1
                engine.served, engine.seen_s, engine.unprovable = report.version, load.began_s, report.unprovable
                engine.checksum, engine.unequal = report.checksum, None
                engine.silence, engine.unreachable, engine.load = None, False, None
                engine.logged = None
        self._tell_changed()
        return report

    def _failed(self, load: _Load, error: WeightSyncError, *, let_go: bool) -> None:
        """Notes what a load that failed has left, once: one that was given up may end later."""
        engine = load.engine
        with self._lock:
            if engine.num_loads != load.number:
                return
        served = None if load.hold is None else self._left_with(engine, error, load.hold)
        with self._lock:
            if engine.num_loads != load.number:
                return
            engine.num_loads += 1
            was_silent, starting = engine.silence is not None, engine.is_starting(error)
            engine.served, engine.unreachable = served, starting
            engine.silence = engine.why(error) if served is None else None
            engine.load = None if let_go else engine.load
        if _was_released(load.hold, error):  # its fleet, or another engine's failure, wanted it so
            _logger.info("engine %s: %s", engine.name, error)
        elif starting:  # nothing has failed yet
            if not was_silent:
                _logger.warning("waits for engine %s to start: %s", engine.name, error)
        else:
            known, engine.logged = engine.logged == str(error), str(error)
            reason = f"the same {type(error).__name__} as before" if known else error
            _logger.warning("engine %s: %s was not loaded: %s", engine.name, load.staged.version, reason)
            self._metrics.observe_failure(error)
        self._tell_changed()

    def _left_with(self, engine: Engine, error: WeightSyncError, hold: PendingCommit) -> Version | None:
        """What an engine of a fleet serves after its load has failed: a fleet would leave it out for not knowing."""
        failed_s = boot_s()
        if _was_released(hold, error):
            with self._lock:
                return engine.served  # nothing was paused or written
        for _ in range(2):  # who joins a question of before is told of before
            replies, _, asked = self._ask([engine])
            if asked[engine.name].asked_s >= failed_s:
                reply = replies.get(engine.name)
                with self._lock:
                    return self._known(engine, reply) if reply is not None and reply.serving else None
        return None


def _failures(running: Mapping[str, Future[LoadReport]]) -> list[str]:
    """Of loads that have failed so far: where no thread could be had, nobody else says so."""
    errors = {who: load.exception() for who, load in running.items() if load.done()}
    return [f"engine {who}: {error}" for who, error in errors.items() if error is not None]


def _was_released(hold: PendingCommit | None, error: WeightSyncError) -> bool:
    """Whether a load ended because its version was not to be committed: nothing was paused or written."""
    return hold is not None and hold.why is not None and isinstance(error, TransferAbortedError)
