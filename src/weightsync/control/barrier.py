"""VersionBarrier: models that are served together have published the same version before anybody fetches it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec

from weightsync.errors import ConfigError, DeadlineExceededError, NotPublishedError, TransferAbortedError
from weightsync.types import Deadline
from weightsync.types.control import BarrierStatus
from weightsync.types.fleet import ModelVersion


class VersionBarrier:
    """Waits for sets of models. Thread-safe.

    A set is complete when all of its models have published one number, each of its own current run. A model that has
    gone further waits for the others to come after: what it published before may be overwritten by then. A model of no
    set passes by itself.

    Args:
        sets: models that are served together.

    Raises:
        ConfigError: a set of one, or a model of two sets.
    """

    def __init__(self, sets: Sequence[Sequence[str]] = ()) -> None:
        self._set_of: dict[str, tuple[str, ...]] = {}
        for models in sets:
            if len(set(models)) < 2 or any(tag in self._set_of for tag in models):
                raise ConfigError(f"a set has two models or more, and a model is of one set: {list(models)}")
            self._set_of.update(dict.fromkeys(models, tuple(sorted(set(models)))))
        self._lock = threading.Condition()
        self._published: dict[str, ModelVersion] = {}
        self._left: dict[str, str] = {}  # by model: the run that another took over from last
        self._waiting: dict[tuple[str, ...], list[tuple[float, float]]] = {}

    def set_of(self, model_id: str) -> tuple[str, ...]:
        """The models that are served together with this one, itself included."""
        return self._set_of.get(model_id, (model_id,))

    @property
    def sets(self) -> frozenset[tuple[str, ...]]:
        """Models that are served together."""
        return frozenset(self._set_of.values())

    def arrive(self, version: ModelVersion) -> None:
        """A trainer has published it. One of a new run takes the place of any other; an older one changes nothing."""
        with self._lock:
            before = self._published.get(version.model_id)
            if before is not None and before.run_id == version.run_id and before.version > version.version:
                return
            if before is not None and before.run_id != version.run_id:
                self._left[version.model_id] = before.run_id
            self._published[version.model_id] = version
            self._lock.notify_all()

    def deny(self, version: ModelVersion, newest: int | None) -> None:
        """It was announced, and its agent has it not: what that agent has of the run takes its place, if anything."""
        with self._lock:
            known = self._published.get(version.model_id)
            if newest is None or known is None or known.run_id != version.run_id or known.version != version.version:
                return
            self._published[version.model_id] = msgspec.structs.replace(known, version=newest)
            self._lock.notify_all()

    def published(self) -> Mapping[str, ModelVersion]:
        """The newest of each model."""
        with self._lock:
            return dict(self._published)

    def is_ahead(self, version: ModelVersion) -> bool:
        """Whether other models of its set have not published that number yet."""
        with self._lock:
            others = [self._published.get(tag) for tag in self.set_of(version.model_id) if tag != version.model_id]
            return any(each is None or each.version < version.version for each in others)

    def look(self) -> None:
        """Whoever waits looks again."""
        with self._lock:
            self._lock.notify_all()

    def wait(
        self, wanted: ModelVersion, timeout_s: float, check: Callable[[], None] = lambda: None
    ) -> tuple[ModelVersion, ...]:
        """The versions that go together with this one, or with a newer one of its run.

        Args:
            wanted: what a trainer has told of.
            timeout_s: how long to wait.
            check: called at each look; what it raises ends the wait.

        Raises:
            TransferAbortedError: another run of that model took over.
            NotPublishedError: its agent has it not, see `deny`.
            DeadlineExceededError: some models are not there; says which.
        """
        with self._lock:
            late = self._left.get(wanted.model_id) == wanted.run_id != self._published[wanted.model_id].run_id
        if not late:
            self.arrive(wanted)
        models = self.set_of(wanted.model_id)
        deadline, since = Deadline(timeout_s), (time.monotonic(), timeout_s)
        with self._lock:
            self._waiting.setdefault(models, []).append(since)
            try:
                while True:
                    check()
                    mine = self._published[wanted.model_id]
                    if mine.run_id != wanted.run_id:
                        raise TransferAbortedError(
                            f"run {mine.run_id} of model {wanted.model_id} took over", version=str(wanted.of)
                        )
                    if mine.version < wanted.version:
                        raise NotPublishedError(
                            f"its agent has it not: it has {mine.of}", version=str(wanted.of), newest=mine.version
                        )
                    versions = tuple(self._published[tag] for tag in models if tag in self._published)
                    if len(versions) == len(models) and len({each.version for each in versions}) == 1:
                        return versions
                    if not self._lock.wait(deadline.remaining_s) and deadline.expired:
                        raise DeadlineExceededError(self._missing(models, timeout_s), version=str(wanted.of))
            finally:
                self._waiting[models].remove(since)

    def status(self) -> tuple[BarrierStatus, ...]:
        """The sets that somebody waits for, and that are not complete."""
        with self._lock:
            found = []
            for models, waiting in self._waiting.items():
                numbers, newest = self._numbers(models)
                behind = tuple(tag for tag, number in numbers.items() if number is None or number < newest)
                if waiting and behind:
                    since, timeout_s = min(waiting)
                    found.append(
                        BarrierStatus(
                            versions=numbers,
                            waits_for=behind,
                            version=newest,
                            waited_s=time.monotonic() - since,
                            timeout_s=timeout_s,
                        )
                    )
            return tuple(found)

    def _numbers(self, models: Sequence[str]) -> tuple[dict[str, int | None], int]:
        """What each has published, and the newest of these."""
        published = {tag: self._published[tag].version for tag in models if tag in self._published}
        return {tag: published.get(tag) for tag in models}, max(published.values(), default=-1)

    def _missing(self, models: Sequence[str], timeout_s: float) -> str:
        numbers, newest = self._numbers(models)
        published = ", ".join(f"{tag} has published {'nothing' if n is None else n}" for tag, n in numbers.items())
        return (
            f"models {', '.join(models)} are served together, and after {timeout_s:g} s not all have published version "
            f"{newest}: {published}"
        )
