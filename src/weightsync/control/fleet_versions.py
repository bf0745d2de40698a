"""FleetVersions: what a fleet serves of each model, which whoever comes in has to serve too."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from weightsync.types import Version
from weightsync.types.fleet import AbsentVersion, ModelVersion

_logger = logging.getLogger(__name__)


class FleetVersions:
    """By model. Not thread-safe: its pool's lock.

    Attributes:
        current: what instances have to serve. Within a run it never goes back, but from what nobody has fetched.
        digests: of what is current, as instances that take part say.
    """

    def __init__(self) -> None:
        self.current: dict[str, ModelVersion] = {}
        self.digests: dict[str, tuple[Version, str]] = {}
        self._claimed: set[str] = set()  # models whose current version nobody has fetched yet
        self._served: dict[str, ModelVersion] = {}  # what was current last that somebody had fetched
        self._together: dict[str, frozenset[str]] = {}  # the models that were decided with it

    def decided(self, versions: Sequence[ModelVersion], *, claimed: bool) -> None:
        """See `RolloutPool.decided`."""
        group = frozenset(each.model_id for each in versions)
        for each in versions:
            self._together[each.model_id] = group
            before = self.current.get(each.model_id)
            if each.model_id in self._claimed:
                before = self._served.get(each.model_id)
            if before is None or before.run_id != each.run_id or before.version <= each.version:
                self._decide(each, claimed=claimed)

    def absent(self, denied: AbsentVersion) -> None:
        """What somebody was told to serve is not there."""
        tag, current = denied.of.model_id, self.current.get(denied.of.model_id)
        if tag not in self._claimed or current is None or current.of != denied.of.of:
            return
        _logger.warning("model %s: %s was announced and is given up: its agent has it not", tag, current.of)
        if denied.newest is None:
            del self.current[tag]
            self._claimed.discard(tag)
        elif denied.newest < current.version:
            self.current[tag] = msgspec.structs.replace(current, version=denied.newest)

    def note_digests(self, serves: Iterable[ModelVersion], digests: Mapping[str, str]) -> None:
        """An instance that takes part has told them."""
        for each in serves:
            digest, current = digests.get(each.model_id), self.current.get(each.model_id)
            if digest is not None and current is not None and current.of == each.of:
                self.digests[each.model_id] = each.of, digest

    def settle_for(self, served: Mapping[str, Version | None], others: Iterable[str]) -> None:
        """What is served of an announced run becomes current, if it is no older than what was so last: a trainer that
        waits for nobody may always be ahead of whoever fetches, and then nobody would ever come in.

        Args:
            served: by an instance that answers nothing yet.
            others: models of those who take part: with them nothing changes.
        """
        taken = set(others)
        for group in {self._together.get(tag, frozenset((tag,))) for tag in served}:
            if not group <= self._claimed or group & taken:
                continue
            goals = {tag: self.current[tag] for tag in group}
            mine = {tag: served[tag] for tag in group if tag in served}
            numbers = {
                version.number if version is not None and version.run_id == goals[tag].run_id else -1
                for tag, version in mine.items()
            }
            before = [each for tag, each in self._served.items() if tag in group and each.run_id == goals[tag].run_id]
            oldest = max((each.version for each in before), default=0)
            number = numbers.pop()
            if not numbers and oldest <= number < min(each.version for each in goals.values()):  # a set has one number
                for tag, goal in goals.items():
                    self._decide(msgspec.structs.replace(goal, version=number), claimed=tag not in mine)

    def _decide(self, version: ModelVersion, *, claimed: bool) -> None:
        self.current[version.model_id] = version
        if claimed:
            self._claimed.add(version.model_id)
        else:
            self._claimed.discard(version.model_id)
            self._served[version.model_id] = version
