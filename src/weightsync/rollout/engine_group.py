"""EngineGroup: the engines of one model on one host, each loaded for itself: one that fails fails alone."""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable, Mapping, Sequence

from weightsync.clients.fanout import in_thread
from weightsync.errors import (
    ConfigError,
    DigestMismatchError,
    NoEnginesError,
    SyncFailedError,
    as_weightsync_error,
)
from weightsync.observe import Metrics, Recorder
from weightsync.rollout.pulled import Pulled
from weightsync.rollout.staged_load import EngineLoader, LoadReport
from weightsync.types import Deadline, EngineHandle, EngineReply, Version

_ASK_S = 3.0

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
    """

    engine_ids: tuple[str, ...]
    errors: dict[str, str]
    bytes_are_wrong: bool
    paused_s: float
    num_chunks: int
    unprovable: dict[str, str]
    num_patched: int = 0


class EngineGroup:
    """Loads them, and knows what each serves. One load at a time; the rest from any thread.

    Args:
        engines: handles.
        model_id: which model.
        pause_timeout_s: how long an engine may take to finish running generations.
        recorder: where phases go.
        metrics: where failures are counted.
        changed: called after what an engine serves has changed.

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
    ) -> None:
        self._metrics = metrics
        self._tell_changed = changed
        self._loaders = [
            EngineLoader(engine, model_id, pause_timeout_s=pause_timeout_s, recorder=recorder) for engine in engines
        ]
        if not self._loaders:
            raise NoEnginesError(f"model {model_id!r} has no engine")
        names = [loader.engine_id for loader in self._loaders]
        if len(set(names)) != len(names):
            raise ConfigError(f"engines of model {model_id!r} share a name: {', '.join(names)}")
        self._lock = threading.Lock()
        self._served: dict[str, Version | None] = dict.fromkeys(names)
        self._unprovable: dict[str, str] = {}

    @property
    def take_patches(self) -> bool:
        """Whether any engine could be given changed elements alone, as far as is known."""
        return any(loader.takes_patches for loader in self._loaders)

    def served(self) -> dict[str, Version | None]:
        """What each serves, as far as is known."""
        with self._lock:
            return dict(self._served)

    def unprovable(self) -> dict[str, str]:
        """Why some could not prove their live bytes, by engine."""
        with self._lock:
            return dict(self._unprovable)

    def serve(self, version: Version) -> bool:
        """Whether all serve that version or a newer one of its run."""
        return all(
            served is not None and served.run_id == version.run_id and not version.is_newer_than(served)
            for served in self.served().values()
        )

    def available(self) -> dict[str, bool]:
        """Whether each engine serves, as it says itself. Asks all at once."""
        answers = self._ask(self._loaders)
        return {who: isinstance(said, EngineReply) and said.serving for who, said in answers.items()}

    def look(self) -> None:
        """Asks engines what they serve: one that was started again by itself serves something else than we believe."""
        for engine_id, said in self._ask(self._loaders).items():
            now = said.version if isinstance(said, EngineReply) else None  # who paused it is not our business
            with self._lock:
                before, self._served[engine_id] = self._served[engine_id], now
            if now != before:
                _logger.warning("engine %s serves %s, not %s: it is brought back", engine_id, now, before)
                self._tell_changed()

    def all_dead(self, version: Version, failed: Mapping[str, str]) -> dict[str, str]:
        """Why each engine that needs a version does not answer; empty where one does, or has not `failed` before."""
        served = self.served()
        needy = [loader for loader in self._loaders if served[loader.engine_id] != version]
        if not all(loader.engine_id in failed for loader in needy):
            return {}
        answers = self._ask(needy)
        if any(isinstance(said, EngineReply) for said in answers.values()):
            return {}
        return {who: f"{type(said).__name__}: {said}" for who, said in answers.items()}

    def load(self, pulled: Pulled, deadline: Deadline) -> GroupReport:
        """Loads every engine that does not serve the version yet, all at once. Returns when each has let go of it."""
        served = self.served()
        calls: list[tuple[str, Callable[[], LoadReport]]] = [
            (loader.engine_id, _bound(loader, pulled, deadline))
            for loader in self._loaders
            if served[loader.engine_id] != pulled.version
        ]
        loads = [(who, in_thread(call, name=f"weightsync-load-{who}")) for who, call in calls]
        errors: dict[str, str] = {}
        wrong, paused_s, num_chunks, num_patched = False, 0.0, 0, 0
        for who, load in loads:
            error = load.exception()  # each ends by its own deadline; the staging must not go before
            now, reason = None, None
            if error is None:
                report = load.result()
                now, reason, num_chunks = report.version, report.unprovable, report.num_chunks
                paused_s = max(paused_s, report.paused_s)
                num_patched += report.patched
            else:
                typed = as_weightsync_error(error, SyncFailedError, "the load failed")
                _logger.warning("engine %s: %s was not loaded: %s", who, pulled.version, typed)
                self._metrics.observe_failure(typed)
                errors[who] = f"{type(typed).__name__}: {typed}"
                wrong = wrong or isinstance(typed, DigestMismatchError)
            with self._lock:
                self._served[who] = now
                self._unprovable.pop(who, None)
                if reason:
                    self._unprovable[who] = reason
            self._tell_changed()
        return GroupReport(
            engine_ids=tuple(who for who, _ in loads),
            errors=errors,
            bytes_are_wrong=wrong,
            paused_s=paused_s,
            num_chunks=num_chunks,
            unprovable=self.unprovable(),
            num_patched=num_patched,
        )

    def _ask(self, loaders: Sequence[EngineLoader]) -> dict[str, EngineReply | BaseException]:
        """What each engine says of itself, or why it says nothing."""
        calls = {each.engine_id: in_thread(_asked(each), name=f"weightsync-ask-{each.engine_id}") for each in loaders}
        return {who: error if (error := call.exception()) is not None else call.result() for who, call in calls.items()}


def _asked(loader: EngineLoader) -> Callable[[], EngineReply]:
    return lambda: loader.describe(timeout_s=_ASK_S)


def _bound(loader: EngineLoader, pulled: Pulled, deadline: Deadline) -> Callable[[], LoadReport]:
    return lambda: loader.load(pulled, deadline=deadline)
