"""EngineGroup: the engines of one model on one host, each loaded for itself: one that fails fails alone."""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from typing import Any

from weightsync.clients.fanout import in_thread
from weightsync.errors import (
    ConfigError,
    DeadlineExceededError,
    DigestMismatchError,
    NoEnginesError,
    SyncFailedError,
    TransferAbortedError,
    WeightSyncError,
    as_weightsync_error,
)
from weightsync.memory import boot_s
from weightsync.observe import Metrics, Recorder
from weightsync.rollout.permit import Hold, Permit
from weightsync.rollout.pulled import Pulled
from weightsync.rollout.staged_load import EngineLoader, LoadReport
from weightsync.types import Deadline, EngineHandle, EngineReply, Version

_ASK_S = 3.0
_MARGIN_S = 1.0
_LET_GO_S = 10.0
"""An abort's own time, and some more."""
_MAX_PROVED = 100
_ADOPTED = "?"
"""The life of a trainer whose version was adopted, and which a controller vouches for: any of its run will do."""
_UNSURE = "??"
"""The same, and nobody has vouched for it: no other will do."""

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
        permit: in a fleet: what may be committed.

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
        permit: Permit | None = None,
    ) -> None:
        strangers = [engine for engine in engines if not isinstance(engine, EngineHandle)]
        if strangers:
            raise ConfigError(
                f"engines of model {model_id!r} are handles (EmbeddedEngine.of(ModuleWeightLoader(model)), HttpEngine, "
                f"VllmEngine), not {type(strangers[0]).__name__}"
            )
        self._metrics = metrics
        self._tell_changed = changed
        self._permit = permit
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
        self._silent: dict[str, str] = {}
        self._mute: set[str] = set()
        self._unprovable: dict[str, str] = {}
        self._loads: dict[str, Future[LoadReport]] = {}
        self._given: list[Future[LoadReport]] = []
        self._num_loads = dict.fromkeys(names, 0)
        self._seen_s = dict.fromkeys(names, 0.0)
        self._asking: dict[str, Future[EngineReply]] = {}
        self._life: str | None = None
        self._proved: dict[Version, str | None] = {}

    @property
    def take_patches(self) -> bool:
        """Whether any engine could be given changed elements alone, as far as is known."""
        return any(loader.takes_patches for loader in self._loaders)

    def served(self) -> dict[str, Version | None]:
        """What each serves; None where it serves nothing that was given to it, or does not say."""
        with self._lock:
            return {who: None if who in self._silent else version for who, version in self._served.items()}

    def seen_s(self) -> float:
        """By `boot_s`, since when each is known to be the process that serves what `served` says; 0: some is not.
        Before the first version each serves what it was started with: now.
        """
        with self._lock:
            return min(self._seen_s.values()) if self._proved else boot_s()

    def answering(self) -> dict[str, Version | None]:
        """As `served`, of those that answered last and whose last load went well, or goes on within its time."""
        with self._lock:
            stuck = {who for who, load in self._loads.items() if self._num_loads[who] % 2 == 0 and not load.done()}
            return {who: served for who, served in self._served.items() if who not in stuck and who not in self._silent}

    def unprovable(self) -> dict[str, str]:
        """Why some could not prove their live bytes, by engine."""
        with self._lock:
            return dict(self._unprovable)

    def serve(self, version: Version) -> bool:
        """Whether all serve that version or a newer one of its run."""
        return all(_is_served(version, served) for served in self.served().values())

    def available(self) -> dict[str, bool]:
        """Whether each engine serves, as it says itself. Asks all at once."""
        answers = self._ask(self._loaders)
        return {who: isinstance(said, EngineReply) and said.serving for who, said in answers.items()}

    def look(self) -> None:
        """Asks engines what they serve: one that was started again by itself serves something else than we believe.

        One that does not answer is believed to serve nothing until it does, and is not loaded for that alone. One that
        is being loaded is left alone: it says enough, and has no time.
        """
        with self._lock:
            loading = {who for who, load in self._loads.items() if not load.done()}
        self._look([loader for loader in self._loaders if loader.engine_id not in loading])

    def adopt(self, version: Version, digest: str) -> bool:
        """Takes for served what engines serve already, though this process has not given it to them: those that say
        that this is their version, with this digest, as they committed it. Whether all serve it then.

        What an engine says is its own record, kept in the memory of the process that serves: one that was started again
        has none.
        """
        for engine_id, said, began_s in self._found():
            if said.intact and (said.version, said.model_digest) == (version, digest):
                self._take_over(engine_id, version, digest, began_s)
        return self.serve(version)

    def adopt_any(self) -> Version | None:
        """As `adopt`, of the version with one digest that all say that they were given; None: there is none.

        See `settle` then: it may be of another life of its trainer.
        """
        found = [each for each in self._found() if each[1].intact]
        names = {(said.version, said.model_digest) for _, said, _ in found}
        if len(found) < len(self._loaders) or len(names) > 1:
            return None
        version, digest = names.pop()
        if version is None or digest is None:
            return None
        for engine_id, _, began_s in found:
            self._take_over(engine_id, version, digest, began_s, life=_UNSURE)
        return version if self.serve(version) else None

    def settle(self, life: str | None) -> None:
        """What `adopt_any` took over is of that life of its trainer; None: it is taken back."""
        with self._lock:
            if self._life != _UNSURE:
                return
            self._life = life
            if life is None:
                self._proved.clear()
                self._served, self._seen_s = dict.fromkeys(self._served), dict.fromkeys(self._seen_s, 0.0)

    def _found(self) -> list[tuple[str, EngineReply, float]]:
        """What those say that serve nothing as far as is known, and are not being loaded."""
        with self._lock:
            idle = [each for each in self._loaders if not self._served[each.engine_id] and not self._is_loading(each)]
            begun, began_s = dict(self._num_loads), boot_s()
        answers = self._ask(idle)
        with self._lock:
            return [
                (who, said, began_s)
                for who, said in answers.items()
                if isinstance(said, EngineReply) and begun[who] == self._num_loads[who]
            ]

    def _take_over(
        self, engine_id: str, version: Version, digest: str, began_s: float, *, life: str = _ADOPTED
    ) -> None:
        with self._lock:
            if self._num_loads[engine_id] % 2 or self._proved.get(version, digest) != digest:
                return  # its trainer lives, and published something else
            if life == _UNSURE and self._life not in (None, _UNSURE):
                return
            self._proved[version] = digest
            self._life = life if self._life is None else self._life
            self._served[engine_id], self._seen_s[engine_id] = version, began_s
            self._mute.discard(engine_id)
            self._silent.pop(engine_id, None)
        _logger.info("engine %s serves %s already: it is not loaded again", engine_id, version)
        self._tell_changed()

    def _is_loading(self, loader: EngineLoader) -> bool:
        load = self._loads.get(loader.engine_id)
        return load is not None and not load.done()

    def digest_of(self, version: Version) -> str | None:
        """What its trainer published under that name, of versions that this process brought lately."""
        with self._lock:
            return self._proved.get(version)

    def loaded_s(self) -> float:
        """As `seen_s`, and 0 before each serves something that was given to it."""
        with self._lock:
            return min(self._seen_s.values())

    def all_dead(self, version: Version) -> dict[str, str]:
        """Why each engine that needs a version does not answer; empty where one does, or one has not failed before.

        Engines that failed, or were silent, are asked what they serve: some may need nothing at all.
        """
        with self._lock:
            suspects = {*self._silent, *self._loads}
        needy = self._needy(version)
        if not all(loader.engine_id in suspects for loader in needy):
            return {}
        self._look(needy)
        needy = self._needy(version)
        with self._lock:
            why = {who: "it has not let go of its last load" for who, load in self._loads.items() if not load.done()}
            why |= self._silent
        names = [loader.engine_id for loader in needy]
        return {who: why[who] for who in names} if all(who in why for who in names) else {}

    def load(self, pulled: Pulled, deadline: Deadline) -> GroupReport:
        """Loads every engine that does not serve the version yet, all at once.

        One that did not answer when it was looked at last is left out. Returns when each has let go of it, or
        `_LET_GO_S` after the deadline; see `holders` then.
        """
        self._remember(pulled)
        errors: dict[str, str] = {}
        self._given = []
        loads: dict[str, Future[LoadReport]] = {}
        needy, began_s = self._needy(pulled.version), boot_s()
        hold = None if self._permit is None else self._permit.hold(pulled.version, len(needy))
        for loader in needy:
            who = loader.engine_id
            before = self._loads.get(who)
            if before is not None and not before.done():
                errors[who] = f"StateError: it has not let go of its last load, and is not given {pulled.version}"
                continue
            with self._lock:
                if who in self._mute:  # the others would wait for it
                    errors[who] = self._silent[who]
                    continue
                self._num_loads[who] += 1
                self._loads[who] = loads[who] = in_thread(
                    _bound(loader, pulled, deadline, hold), name=f"weightsync-load-{who}"
                )
                self._given.append(loads[who])
        if errors and hold is not None:
            hold.failed("; ".join(errors.values()))
        end = Deadline(deadline.remaining_s + _LET_GO_S)
        wrong, paused_s, num_chunks, num_patched = False, 0.0, 0, 0
        for who, load in loads.items():
            wait_for([load], timeout=end.remaining_s)  # each ends by its own deadline, unless its handle has none
            now, reason, error = None, None, _error_of(load, f"it has not let go within {end.timeout_s:g} s")
            if error is None:
                report = load.result()
                self._seen_s[who] = began_s
                now, reason, num_chunks = report.version, report.unprovable, report.num_chunks
                paused_s = max(paused_s, report.paused_s)
                num_patched += report.patched
            else:
                typed = as_weightsync_error(error, SyncFailedError, "the load failed")
                _logger.warning("engine %s: %s was not loaded: %s", who, pulled.version, typed)
                self._metrics.observe_failure(typed)
                errors[who] = f"{type(typed).__name__}: {typed}"
                wrong = wrong or isinstance(typed, DigestMismatchError)
                if hold is not None:
                    now = self._left_with(who, typed, hold)
            with self._lock:
                self._num_loads[who] += 1
                self._served[who] = now
                self._mute.discard(who)
                self._silent.pop(who, None)
                if who in errors and now is None:
                    self._silent[who] = errors[who]
                self._unprovable.pop(who, None)
                if reason:
                    self._unprovable[who] = reason
                if load.done():
                    del self._loads[who]
            self._tell_changed()
        if self._permit is not None and hold is not None:
            self._permit.ended(hold)
        return GroupReport(
            engine_ids=tuple(loads),
            errors=errors,
            bytes_are_wrong=wrong,
            paused_s=paused_s,
            num_chunks=num_chunks,
            unprovable=self.unprovable(),
            num_patched=num_patched,
        )

    def holders(self) -> list[Future[LoadReport]]:
        """Loads of the last call of `load` that did not end in time: until they do, what they were given must not
        change."""
        return [load for load in self._given if not load.done()]

    def _left_with(self, who: str, error: WeightSyncError, hold: Hold) -> Version | None:
        """What an engine of a fleet serves after its load has failed: a fleet would leave it out for not knowing."""
        if hold.why is not None and isinstance(error, TransferAbortedError):
            with self._lock:
                return self._served[who]  # nothing was paused or written
        said = self._ask([loader for loader in self._loaders if loader.engine_id == who])[who]
        return self._known(said) if isinstance(said, EngineReply) and said.serving else None

    def _needy(self, version: Version) -> list[EngineLoader]:
        """Who does not serve that version, or a newer one of its run."""
        served = self.served()
        return [loader for loader in self._loaders if not _is_served(version, served[loader.engine_id])]

    def _remember(self, pulled: Pulled) -> None:
        """What an engine says that it serves is believed of versions that it was given, by this trainer, alone."""
        with self._lock:
            run_id = pulled.version.run_id
            if self._life == _ADOPTED:
                self._life = pulled.life
            elif pulled.life != self._life:
                self._life = pulled.life
                self._proved = {version: digest for version, digest in self._proved.items() if version.run_id != run_id}
                for who, served in self._served.items():
                    if served is not None and served.run_id == run_id:  # of the life before
                        self._served[who] = None
            self._proved[pulled.version] = pulled.manifest.model_digest
            while len(self._proved) > _MAX_PROVED:
                del self._proved[next(iter(self._proved))]

    def _look(self, loaders: Sequence[EngineLoader]) -> None:
        with self._lock:
            begun, began_s = dict(self._num_loads), boot_s()
        for engine_id, said in self._ask(loaders).items():
            with self._lock:
                if begun[engine_id] != self._num_loads[engine_id] or begun[engine_id] % 2:
                    continue  # it is, or was, loaded meanwhile: that says more
                before, was_silent = self._served[engine_id], self._silent.pop(engine_id, None)
                if isinstance(said, EngineReply):  # who paused it is not our business
                    now = self._served[engine_id] = self._known(said)
                    if now is not None:  # else its lease was lent for something that it has not
                        self._seen_s[engine_id] = began_s
                    self._mute.discard(engine_id)
                else:
                    now = before
                    self._mute.add(engine_id)
                    self._silent[engine_id] = f"{type(said).__name__}: {said}"
            if now != before:
                _logger.warning("engine %s serves %s, not %s: it is brought back", engine_id, now, before)
            elif not isinstance(said, EngineReply) and was_silent is None:
                _logger.warning("engine %s does not say what it serves: %s", engine_id, said)
            if now != before or isinstance(said, EngineReply) != (was_silent is None):
                self._tell_changed()

    def _known(self, said: EngineReply) -> Version | None:
        if said.version is None or said.version not in self._proved:
            return None
        proved = self._proved[said.version]
        return said.version if None in (proved, said.model_digest) or proved == said.model_digest else None

    def _ask(self, loaders: Sequence[EngineLoader]) -> dict[str, EngineReply | BaseException]:
        """What each engine says of itself, or why it says nothing."""
        calls: dict[str, Future[EngineReply]] = {}
        with self._lock:
            for each in loaders:
                who = each.engine_id
                if who not in self._asking or self._asking[who].done():  # one that never answers is asked once
                    self._asking[who] = in_thread(_asked(each), name=f"weightsync-ask-{who}")
                calls[who] = self._asking[who]
        wait_for(calls.values(), timeout=_ASK_S + _MARGIN_S)
        said: dict[str, EngineReply | BaseException] = {}
        for who, call in calls.items():
            error = _error_of(call, f"no answer within {_ASK_S + _MARGIN_S:g} s")
            said[who] = call.result() if error is None else error
        return said


def _error_of(call: Future[Any], late: str) -> BaseException | None:
    return call.exception() if call.done() else DeadlineExceededError(late)


def _is_served(version: Version, served: Version | None) -> bool:
    return served is not None and served.run_id == version.run_id and not version.is_newer_than(served)


def _asked(loader: EngineLoader) -> Callable[[], EngineReply]:
    return lambda: loader.describe(timeout_s=_ASK_S)


def _bound(loader: EngineLoader, pulled: Pulled, deadline: Deadline, hold: Hold | None) -> Callable[[], LoadReport]:
    def load() -> LoadReport:
        try:
            return loader.load(pulled, deadline=deadline, hold=hold)
        except BaseException as error:
            if hold is not None:
                hold.failed(f"engine {loader.engine_id}: {error}")
            raise

    return load
