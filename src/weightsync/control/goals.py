"""FleetGoals: which version of each model the instances of a fleet have to serve.

    decided   some instance commits it, or came in with it; within a run it never goes back
    claimed   it was told of while nobody took part: nobody has fetched it yet. Who comes in first serves it

A trainer that waits for nobody may publish faster than an instance fetches and loads. So a claim stays while an
instance that was told it is on its way. Its agent may have something newer by then: the claim follows what the first
one has staged, until that one has come in with it. What is newer still is brought to it by the next sync.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from weightsync.types import Version
from weightsync.types.fleet import AbsentVersion, ModelVersion

_LEADS_S = 120.0
"""How long an instance may take from what it has staged to serving it, before a claim follows another one."""

_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Leader:
    """For which instance a claim stays. `ready_s`: since when it has it staged; None: it fetches it."""

    instance_id: str
    ready_s: float | None


class FleetGoals:
    """Not thread-safe: its pool's lock.

    Args:
        is_coming: whether an instance of that name joins, and was heard not long ago.

    Attributes:
        current: by model; claimed or decided.
    """

    def __init__(self, is_coming: Callable[[str], bool]) -> None:
        self.current: dict[str, ModelVersion] = {}
        self._is_coming = is_coming
        self._claimed: set[str] = set()
        self._decided: dict[str, ModelVersion] = {}  # the last one of each: what is claimed goes not below it
        self._told: dict[str, ModelVersion] = {}  # the newest claim of each
        self._sets: dict[str, tuple[str, ...]] = {}
        self._leaders: dict[str, _Leader] = {}

    def decide(self, versions: Sequence[ModelVersion]) -> None:
        """Some instance serves them from now on, or is about to."""
        for each in versions:
            if not self._goes_back(each):
                self._settle(each)
        self._note_set(versions)

    def claim(self, versions: Sequence[ModelVersion]) -> None:
        """They were told of, and nobody takes part."""
        self._note_set(versions)
        for each in versions:
            told, goal = self._told.get(each.model_id), self.current.get(each.model_id)
            if told is None or told.run_id != each.run_id or told.version < each.version:
                self._told[each.model_id] = each
            alike = goal is not None and msgspec.structs.replace(goal, version=each.version) == each
            stays = alike and self._leader(each.model_id) is not None
            if not stays and not self._goes_back(each):
                self.current[each.model_id] = each
                self._claimed.add(each.model_id)
                self._leaders.pop(each.model_id, None)

    def tell(self, instance_id: str, model_ids: Iterable[str]) -> None:
        """An instance that joins is told what to serve of these models: where a claim waits for nobody, it does so
        for this one. Claims of sets go on: two trainers are not to be waited for at once."""
        for model_id in model_ids:
            if model_id in self._claimed and len(self._sets[model_id]) == 1 and self._leader(model_id) is None:
                self._leaders[model_id] = _Leader(instance_id=instance_id, ready_s=None)

    def offer(self, instance_id: str, ready: Sequence[ModelVersion], now_s: float) -> None:
        """An instance that joins has these staged, or serves them and answers nobody: a claim follows it, until it
        comes in, or has lost what it had."""
        for each in ready:
            model_id, goal, told = each.model_id, self.current.get(each.model_id), self._told.get(each.model_id)
            if model_id not in self._claimed or len(self._sets[model_id]) > 1 or goal is None or told is None:
                continue
            if not (goal.run_id == told.run_id == each.run_id and goal.version <= each.version <= told.version):
                continue
            leader = self._leader(model_id)
            leads = leader is not None and leader.instance_id == instance_id
            since_s = None if leader is None else leader.ready_s
            if leads or since_s is None or now_s - since_s >= _LEADS_S:
                ready_s = since_s if leads and since_s is not None else now_s
                self._leaders[model_id] = _Leader(instance_id=instance_id, ready_s=ready_s)
                self.current[model_id] = msgspec.structs.replace(goal, version=each.version)
        has = {(each.model_id, each.of) for each in ready}
        for model_id, leader in tuple(self._leaders.items()):
            if leader.instance_id == instance_id and (model_id, self.current[model_id].of) not in has:
                self._leaders[model_id] = _Leader(instance_id=instance_id, ready_s=None)

    def came_in(self, serves: Mapping[str, Version | None]) -> None:
        """An instance takes part, and serves these: what was claimed is decided."""
        for model_id, version in serves.items():
            goal = self.current.get(model_id)
            if model_id in self._claimed and goal is not None and version == goal.of:
                self._settle(goal)

    def deny(self, denied: AbsentVersion) -> None:
        """An instance has heard from the agent that what it was told to serve is not there.

        A claim gives way to what there is, all models of its set together, and to nothing older than was decided.
        """
        goal = self.current.get(denied.of.model_id)
        if denied.of.model_id not in self._claimed or goal is None or goal.of != denied.of.of:
            return
        if denied.newest is not None and denied.newest >= goal.version:
            return
        _logger.warning("model %s: %s was announced and is given up: its agent has it not", goal.model_id, goal.of)
        for model_id in self._sets[goal.model_id]:
            claimed = self.current.get(model_id)
            if model_id not in self._claimed or claimed is None or claimed.version != goal.version:
                continue
            before = self._decided.get(model_id)
            before = before if before is not None and before.run_id == claimed.run_id else None
            if denied.newest is not None and (before is None or before.version < denied.newest):
                self.current[model_id] = msgspec.structs.replace(claimed, version=denied.newest)
            elif before is not None:
                self._settle(before)
            else:
                del self.current[model_id]
                self._claimed.discard(model_id)
                self._leaders.pop(model_id, None)

    def _settle(self, version: ModelVersion) -> None:
        model_id = version.model_id
        self.current[model_id] = self._decided[model_id] = version
        self._claimed.discard(model_id)
        self._leaders.pop(model_id, None)

    def _goes_back(self, version: ModelVersion) -> bool:
        before = self._decided.get(version.model_id)
        return before is not None and before.run_id == version.run_id and before.version > version.version

    def _note_set(self, versions: Sequence[ModelVersion]) -> None:
        names = tuple(each.model_id for each in versions)
        self._sets |= dict.fromkeys(names, names)

    def _leader(self, model_id: str) -> _Leader | None:
        """Who leads, while it is on its way."""
        leader = self._leaders.get(model_id)
        return leader if leader is not None and self._is_coming(leader.instance_id) else None
