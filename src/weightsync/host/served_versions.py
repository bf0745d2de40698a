"""ServedVersions: what each engine of one model serves, as far as is known: by its loads, and by asking it."""

from __future__ import annotations

import dataclasses
import functools
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future

from weightsync.errors import WeightSyncError
from weightsync.handles.fanout import collect, in_thread
from weightsync.host.agent_state import is_in
from weightsync.host.engine_update import EngineUpdate, LoadReport
from weightsync.host.staged_version import StagedVersion
from weightsync.memory import boot_s
from weightsync.types import EngineReply, Version
from weightsync.types.fleet import NOT_STARTED

_ASK_S = 3.0
_MARGIN_S = 1.0
_MAX_PROVED = 100
_ADOPTED = "?"
"""The life of a trainer whose version was adopted, and which a controller vouches for: any of its run will do."""
_UNSURE = "??"
"""The same, and nobody has vouched for it: no other will do."""

_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question:
    """What an engine was asked once. Who asks while it is under way gets its answer too.

    Attributes:
        answer: what it says.
        asked_s: since when, by `boot_s`.
        num_loads: the engine's, then: what was asked before a load says nothing of after it.
    """

    answer: Future[EngineReply]
    asked_s: float
    num_loads: int


class Engine:
    """What is known of one engine. Under the lock of its `ServedVersions`.

    Attributes:
        update: what loads it.
        served: by its last load or answer.
        seen_s: see `ServedVersions.seen_s`.
        silence: why it does not say what it serves; None: it did.
        was_silent: the last such words; empty: there were none.
        unreachable: whether it did not answer when it was looked at last.
        unprovable: why it could not prove its live bytes.
        checksum: its own, of what was loaded last.
        unequal: it has this version with another checksum than others: it serves nothing before its next load.
        logged: the error of its last load, in words; None: that went well.
        load: that was not ended, or has ended and was not noted yet.
        num_loads: begun and ended ones: odd while one is under way.
        asking: the last question to it.
    """

    def __init__(self, update: EngineUpdate) -> None:
        self.name = update.engine_id
        self.update = update
        self.served: Version | None = None
        self.seen_s = 0.0
        self.silence: str | None = None
        self.was_silent = ""
        self.unreachable = False
        self.unprovable: str | None = None
        self.checksum: str | None = None
        self.unequal: Version | None = None
        self.logged: str | None = None
        self.load: Future[LoadReport] | None = None
        self.num_loads = 0
        self.asking: Question | None = None

    @property
    def is_loading(self) -> bool:
        """Whether a load has not let go of it, late ones included."""
        return self.load is not None and not self.load.done()

    def is_starting(self, error: WeightSyncError) -> bool:
        """Whether it was never there, and by this error nobody listens at its address."""
        return not self.update.has_answered and isinstance(error.__cause__, ConnectionRefusedError)

    def why(self, error: WeightSyncError) -> str:
        """Its error as it stands in reports."""
        return f"{NOT_STARTED}: {words(error)}" if self.is_starting(error) else words(error)

    def serves(self, version: Version) -> bool:
        """That version, or a newer one of its run, as far as is known."""
        return self.silence is None and is_in(version, self.served)


class ServedVersions:
    """Thread-safe.

    Args:
        updates: what loads each engine.
        changed: called after what an engine serves has changed, from any thread.
    """

    def __init__(self, updates: Sequence[EngineUpdate], changed: Callable[[], None]) -> None:
        self._engines = [Engine(update) for update in updates]
        self._tell_changed = changed
        self._lock = threading.Lock()
        self._incarnation: str | None = None
        self._proved: dict[Version, str | None] = {}

    @property
    def take_patches(self) -> bool:
        """Whether any engine could be given changed elements alone, as far as is known."""
        return any(engine.update.takes_patches for engine in self._engines)

    def served(self) -> dict[str, Version | None]:
        """What each serves; None where it serves nothing that was given to it, or does not say."""
        with self._lock:
            return {engine.name: None if engine.silence is not None else engine.served for engine in self._engines}

    def common(self) -> Version | None:
        """The version that every engine serves, the oldest of one run; None: some serve nothing, or another run."""
        served = set(self.served().values())
        known = [version for version in served if version is not None]
        if None in served or len({version.run_id for version in known}) != 1:
            return None
        return min(known, key=lambda version: version.number)

    def seen_s(self) -> float:
        """By `boot_s`, since when each is known to be the process that serves what `served` says; 0: some is not.
        Before the first version each serves what it was started with: now.
        """
        with self._lock:
            return min(engine.seen_s for engine in self._engines) if self._proved else boot_s()

    def loaded_s(self) -> float:
        """As `seen_s`, and 0 before each serves something that was given to it."""
        with self._lock:
            return min(engine.seen_s for engine in self._engines)

    def answering(self) -> dict[str, Version | None]:
        """As `served`, of those that answered last and whose last load went well, or goes on within its time."""
        with self._lock:
            late = [engine.name for engine in self._engines if engine.num_loads % 2 == 0 and engine.is_loading]
            return {
                engine.name: engine.served
                for engine in self._engines
                if engine.name not in late and engine.silence is None
            }

    def unprovable(self) -> dict[str, str]:
        """Why some could not prove their live bytes, by engine."""
        with self._lock:
            return {engine.name: engine.unprovable for engine in self._engines if engine.unprovable}

    def gone(self) -> dict[str, str]:
        """Why some did not answer when they were looked at last, by engine."""
        with self._lock:
            return {engine.name: engine.silence or "" for engine in self._engines if engine.unreachable}

    def standing(self, errors: Mapping[str, str]) -> dict[str, str]:
        """Those without what says that an engine does not answer, where it does by now."""
        with self._lock:
            over = {engine.name: engine.was_silent for engine in self._engines if engine.silence is None}
        return {who: why for who, why in errors.items() if over.get(who) != why}

    def all_serve(self, version: Version) -> bool:
        """Whether all serve that version or a newer one of its run."""
        return not self._outdated(version)

    def available(self) -> dict[str, bool]:
        """Whether each engine serves, as it says itself. Asks all at once."""
        replies, _, _ = self._ask(self._engines)
        return {engine.name: engine.name in replies and replies[engine.name].serving for engine in self._engines}

    def look(self) -> None:
        """Asks engines what they serve: one that was started again by itself serves something else than we believe.

        One that does not answer is believed to serve nothing until it does, and is not loaded for that alone. One that
        is being loaded is left alone: it says enough, and has no time.
        """
        with self._lock:
            idle = [engine for engine in self._engines if not engine.is_loading]
        self._look(idle)

    # --- what engines were given by the service before this one ---

    def adopt(self, version: Version, digest: str) -> bool:
        """Takes for served what engines serve already, though this process has not given it to them: those that say
        that this is their version, with this digest, as they committed it. Whether all serve it then.

        What an engine says is its own record, kept in the memory of the process that serves: one that was started again
        has none.
        """
        for engine, reply, began_s in self._found():
            if reply.intact and (reply.version, reply.model_digest) == (version, digest) and version != engine.unequal:
                self._take_over(engine, version, digest, began_s)
        return self.all_serve(version)

    def adopt_any(self) -> Version | None:
        """As `adopt`, of the version with one digest that all say that they were given; None: there is none.

        See `settle` then: it may be of another life of its trainer.
        """
        found = [each for each in self._found() if each[1].intact]
        names = {(reply.version, reply.model_digest) for _, reply, _ in found}
        if len(found) < len(self._engines) or len(names) > 1:
            return None
        version, digest = names.pop()
        if version is None or digest is None:
            return None
        for engine, _, began_s in found:
            self._take_over(engine, version, digest, began_s, incarnation=_UNSURE)
        return version if self.all_serve(version) else None

    def settle(self, incarnation: str | None) -> None:
        """What `adopt_any` took over is of that life of its trainer; None: it is taken back."""
        with self._lock:
            if self._incarnation != _UNSURE:
                return
            self._incarnation = incarnation
            if incarnation is None:
                self._proved.clear()
                for engine in self._engines:
                    engine.served, engine.seen_s = None, 0.0

    def _found(self) -> list[tuple[Engine, EngineReply, float]]:
        """What those say that serve nothing as far as is known, and are not being loaded."""
        with self._lock:
            idle = {each: each.num_loads for each in self._engines if not each.served and not each.is_loading}
        replies, _, asked = self._ask(list(idle))
        with self._lock:
            return [
                (engine, replies[engine.name], asked[engine.name].asked_s)
                for engine, num_loads in idle.items()
                if engine.name in replies and engine.num_loads == num_loads == asked[engine.name].num_loads
            ]

    def _take_over(
        self, engine: Engine, version: Version, digest: str, began_s: float, *, incarnation: str = _ADOPTED
    ) -> None:
        with self._lock:
            if engine.num_loads % 2 or self._proved.get(version, digest) != digest:
                return  # its trainer lives, and published something else
            if incarnation == _UNSURE and self._incarnation not in (None, _UNSURE):
                return
            self._proved[version] = digest
            self._incarnation = incarnation if self._incarnation is None else self._incarnation
            engine.served, engine.seen_s = version, began_s
            engine.unreachable, engine.silence = False, None
        _logger.info("engine %s serves %s already: it is not loaded again", engine.name, version)
        self._tell_changed()

    def digest_of(self, version: Version) -> str | None:
        """What its trainer published under that name, of versions that this process brought lately."""
        with self._lock:
            return self._proved.get(version)

    # --- what engines say ---

    def _outdated(self, version: Version) -> list[Engine]:
        """Who does not serve that version, or a newer one of its run."""
        with self._lock:
            return [engine for engine in self._engines if not engine.serves(version)]

    def _remember(self, staged: StagedVersion) -> None:
        """What an engine says that it serves is believed of versions that it was given, by this trainer, alone."""
        with self._lock:
            run_id = staged.version.run_id
            if self._incarnation == _ADOPTED:
                self._incarnation = staged.incarnation
            elif staged.incarnation != self._incarnation:
                self._incarnation = staged.incarnation
                self._proved = {version: digest for version, digest in self._proved.items() if version.run_id != run_id}
                for engine in self._engines:
                    if engine.served is not None and engine.served.run_id == run_id:  # of the life before
                        engine.served = None
            self._proved[staged.version] = staged.manifest.model_digest
            while len(self._proved) > _MAX_PROVED:
                del self._proved[next(iter(self._proved))]

    def _look(self, engines: Sequence[Engine]) -> None:
        with self._lock:
            begun = {engine: engine.num_loads for engine in engines}
        replies, errors, asked = self._ask(engines)
        for engine in engines:
            reply, error, question = replies.get(engine.name), errors.get(engine.name), asked[engine.name]
            with self._lock:
                if begun[engine] != engine.num_loads or begun[engine] % 2:
                    continue  # it is, or was, loaded meanwhile: that says more
                if question.num_loads != engine.num_loads and question.answer.done():
                    continue  # it was asked before its last load; where there is no answer yet, it is silent still
                before, was_silent = engine.served, engine.silence is not None
                engine.unreachable, engine.silence = reply is None, None if error is None else engine.why(error)
                engine.was_silent = engine.silence or engine.was_silent
                if reply is not None:  # who paused it is not our business
                    engine.served = self._known(engine, reply)
                    if engine.served is not None:  # else its lease was lent for something that it has not
                        engine.seen_s = question.asked_s
                now = engine.served
            if now != before:
                named = None if reply is None else reply.version
                other = "" if now == named else f" (it says {named}, of another trainer, or damaged since)"
                _logger.warning("engine %s serves %s%s, not %s: it is brought back", engine.name, now, other, before)
            elif error is not None and not was_silent and engine.is_starting(error):
                _logger.warning("waits for engine %s to start: %s", engine.name, error)
            elif error is not None and not was_silent:
                _logger.warning("engine %s does not say what it serves, it is asked again: %s", engine.name, error)
            if now != before or (error is not None) != was_silent:
                self._tell_changed()

    def _known(self, engine: Engine, reply: EngineReply) -> Version | None:
        """What it serves, whole, if that was given to it, and is what its trainer published. Under the lock."""
        if reply.version is None or reply.version not in self._proved or not reply.intact:
            return None
        if reply.version == engine.unequal:
            return None
        proved = self._proved[reply.version]
        return reply.version if None in (proved, reply.model_digest) or proved == reply.model_digest else None

    def _ask(
        self, engines: Sequence[Engine]
    ) -> tuple[dict[str, EngineReply], dict[str, WeightSyncError], dict[str, Question]]:
        """What each engine says of itself, why others say nothing, and the question that this answers."""
        asked: dict[str, Question] = {}
        with self._lock:
            asked_s = boot_s()
            for each in engines:
                if each.asking is None or each.asking.answer.done():  # one that never answers is asked once
                    describe = functools.partial(each.update.describe, timeout_s=_ASK_S)
                    answer = in_thread(describe, name=f"weightsync-ask-{each.name}")
                    each.asking = Question(answer=answer, asked_s=asked_s, num_loads=each.num_loads)
                asked[each.name] = each.asking
        calls = {name: question.answer for name, question in asked.items()}
        return *collect(calls, timeout_s=_ASK_S + _MARGIN_S), asked


def words(error: WeightSyncError) -> str:
    """How an engine's error stands in reports."""
    return f"{type(error).__name__}: {error}"
