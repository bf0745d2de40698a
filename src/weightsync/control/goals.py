"""FleetGoals: which version of each model the instances of a fleet have to serve.

    decided   some instance commits it, or came in with it; within a run it never goes back
    claimed   it was told of while nobody took part: nobody has fetched it yet. Who comes in first serves it

A trainer that waits for nobody may publish faster than an instance fetches and loads. So a claim stays while an
instance that was told it is on its way. Its agent may have something newer by then: the claim follows what the first
one has staged, until that one has come in with it. What is newer still is brought to it by the next sync.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import msgspec

from weightsync.types import Version
from weightsync.types.fleet import AbsentVersion, ModelVersion

_LEADS_S = 30.0
"""How long a claim follows one instance, from what it has staged to serving it; then others may lead for as long."""
_LONGEST_LEAD_S = 960.0
"""Who takes over from one that has led in vain leads twice as long, at most so long: each may need more than it had."""

_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Leader:
    """For which instance a claim stays.

    Attributes:
        instance_id: which.
        since_s: when it had something staged for the first time; None: it fetches yet.
        ready: whether it has what is claimed.
        leads_s: how long it leads.
    """

    instance_id: str
    since_s: float | None = None
    ready: bool = False
    leads_s: float = _LEADS_S

    def rests(self, now_s: float) -> bool:
        """Whether others go before it: it has led for long, and did not come in."""
        return self.since_s is not None and (now_s - self.since_s) % (2 * self.leads_s) >= self.leads_s


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
        self._unsure: set[str] = set()  # of which that is what an instance had that answered nobody
        self._told: dict[str, ModelVersion] = {}  # the newest claim of each
        self._sets: dict[str, tuple[str, ...]] = {}
        self._knows_sets = False
        self._torn: set[tuple[str, ...]] = set()  # of which an instance has denied some, or two have a model each
        self._leaders: dict[str, _Leader] = {}

    def know_sets(self, sets: Iterable[tuple[str, ...]]) -> None:
        """These models belong together, and no others do."""
        self._knows_sets = True
        for names in sets:
            self._sets |= dict.fromkeys(names, names)

    def mixes(self, model_ids: Iterable[str]) -> bool:
        """Whether an instance that has these may serve half of a set."""
        found = collections.Counter(self._sets.get(name, (name,)) for name in model_ids)
        return not self._knows_sets or max(found.values(), default=0) > 1

    def tear(self, model_ids: Iterable[str]) -> None:
        """What is current of their sets is no set, until one is decided or claimed."""
        self._torn.update(self._sets[name] for name in model_ids if name in self._sets)

    def decide(self, versions: Sequence[ModelVersion]) -> None:
        """Some instance serves them from now on, or is about to."""
        self._note_set(versions)
        for each in versions:
            if not self._goes_back(each):
                self._settle(each)

    def learn(self, versions: Iterable[ModelVersion], *, answered: bool) -> None:
        """Instances serve them, as a controller hears that was started anew; who knows which belong together.

        Args:
            versions: what.
            answered: they could answer with that until now, and go on: a sync brings what is claimed. Else a claim
                that is not below that stays, and gives way to it where it is denied.
        """
        for each in versions:
            goal = self.current.get(each.model_id)
            claim = goal if each.model_id in self._claimed else None
            above = claim is not None and (claim.run_id != each.run_id or claim.version > each.version)
            if above and not answered:
                self._decided[each.model_id] = each
                self._unsure.add(each.model_id)
            else:
                self._settle(each)

    def claim(self, versions: Sequence[ModelVersion]) -> None:
        """They were told of, and nobody takes part."""
        if any(self._goes_back(each) for each in versions):
            return
        self._note_set(versions)
        for each in versions:
            known, goal = self._told.get(each.model_id), self.current.get(each.model_id)
            if known is None or known.run_id != each.run_id or known.version < each.version:
                self._told[each.model_id] = each
            alike = goal is not None and msgspec.structs.replace(goal, version=each.version) == each
            if not alike or self._leader(each.model_id) is None:
                self.current[each.model_id] = each
                self._claimed.add(each.model_id)
                self._leaders.pop(each.model_id, None)

    def tell(
        self, instance_id: str, model_ids: Collection[str], syncs: Iterable[Mapping[str, ModelVersion]] = ()
    ) -> tuple[ModelVersion, ...]:
        """What an instance that joins is told to serve of these models. Where a claim waits for nobody, it does so
        for this one. Claims of sets go on: two trainers are not to be waited for at once.

        Args:
            syncs: what those that run bring: who answers nothing may serve that before anybody has decided for it.
        """
        for model_id in model_ids:
            if self._may_be_led(model_id) and self._leader(model_id) is None:
                self._leaders[model_id] = _Leader(instance_id=instance_id)
        goals = dict(self.current)
        for each in syncs:
            goals |= each
        return tuple(each for tag, each in goals.items() if tag in model_ids)

    def offer(self, instance_id: str, model_ids: Collection[str], ready: Sequence[ModelVersion], now_s: float) -> None:
        """An instance that joins has these staged, or serves them and answers nobody: a claim follows it, until it
        comes in, or has lost what it had, or takes too long.

        Args:
            instance_id: which.
            model_ids: all that it has. Where another one leads with one of them, that one leads with all: each would
                wait for the other.
            ready: what it has, of some of them.
            now_s: by the pool's clock.
        """
        led = [self._leader(model_id) for model_id in model_ids if self._may_be_led(model_id)]
        others = any(
            each is not None and each.ready and each.instance_id != instance_id and not each.rests(now_s)
            for each in led
        )
        for each in ready if not others else ():
            model_id, goal, known = each.model_id, self.current.get(each.model_id), self._told.get(each.model_id)
            if model_id not in model_ids or not self._may_be_led(model_id) or goal is None or known is None:
                continue
            if not (goal.run_id == known.run_id == each.run_id and goal.version <= each.version <= known.version):
                continue
            leader = self._leader(model_id)
            if leader is None or leader.instance_id != instance_id or leader.since_s is None:
                in_vain = leader is not None and leader.since_s is not None
                leads_s = min(2 * leader.leads_s, _LONGEST_LEAD_S) if leader is not None and in_vain else _LEADS_S
                leader = _Leader(instance_id=instance_id, since_s=now_s, leads_s=leads_s)
            if not leader.rests(now_s):
                self._leaders[model_id] = dataclasses.replace(leader, ready=True)
                self.current[model_id] = msgspec.structs.replace(goal, version=each.version)
        has = {(each.model_id, each.of) for each in ready}
        for model_id, leader in tuple(self._leaders.items()):
            if leader.instance_id == instance_id and (model_id, self.current[model_id].of) not in has:
                self._leaders[model_id] = dataclasses.replace(leader, ready=False)

    def apart(self, serves: Mapping[str, Version | None]) -> bool:
        """Whether models that belong together are served with other numbers than each other, and nobody decided so."""
        for names in set(self._sets.values()):
            found = {name: serves[name] for name in names if name in serves}
            goals = [self.current[name] for name in found if name in self.current and name not in self._claimed]
            torn = names in self._torn
            agreed = not torn and {each.model_id: each.of for each in goals} == found
            numbers = {None if each is None else each.number for each in found.values()}
            if not agreed and len(numbers if torn else numbers - {None}) > 1:  # what serves nothing mixes with nothing
                return True
        return False

    def came_in(self, serves: Mapping[str, Version | None]) -> None:
        """An instance takes part, and serves these: what was claimed is decided."""
        for model_id, version in serves.items():
            goal = self.current.get(model_id)
            if model_id in self._claimed and goal is not None and version == goal.of:
                self._settle(goal)

    def returns(self, serves: Mapping[str, Version | None]) -> None:
        """An instance that joins serves these. Where they are what was decided last, claims hold it up no more: nobody
        has answered with anything newer, and a sync brings what is claimed. All models of a set do so together."""
        for names in {self._sets[name] for name in serves if name in self._claimed}:
            decided = [self._decided.get(name) for name in names]
            if all(each and each.of == serves.get(name, each.of) for name, each in zip(names, decided, strict=True)):
                for name in names if not self._unsure.intersection(names) else ():
                    self._fall_back(self.current[name])

    def deny(self, denied: AbsentVersion) -> None:
        """An instance has heard from the agent that what it was told to serve is not there.

        A claim gives way to what there is, and to nothing older than was decided; else to what was decided last. All
        models of its set do so together.
        """
        goal = self.current.get(denied.of.model_id)
        if denied.of.model_id not in self._claimed or goal is None or goal.of != denied.of.of:
            return
        if denied.newest is not None and denied.newest >= goal.version:
            return
        _logger.warning("model %s: %s was announced and is given up: its agent has it not", goal.model_id, goal.of)
        together = [self.current[name] for name in self._sets[goal.model_id] if name in self.current]
        claims = [each for each in together if each.model_id in self._claimed and each.version == goal.version]
        floor = max((self._decided[each.model_id].version for each in together if self._has_served(each)), default=-1)
        self._torn.add(self._sets[goal.model_id])
        for each in claims:
            if denied.newest is not None and denied.newest > floor:
                self.current[each.model_id] = msgspec.structs.replace(each, version=denied.newest)
            elif each.model_id in self._decided:
                self._fall_back(each)
            else:
                del self.current[each.model_id]
                self._claimed.discard(each.model_id)
                self._leaders.pop(each.model_id, None)

    @property
    def decided(self) -> Mapping[str, ModelVersion]:
        """The last one of each model that was decided, or learnt."""
        return self._decided

    def _fall_back(self, claim: ModelVersion) -> None:
        """To what was decided last of that model."""
        decided = self._decided[claim.model_id]
        moved = claim.sender_endpoint if decided.run_id == claim.run_id else decided.sender_endpoint
        self._settle(msgspec.structs.replace(decided, sender_endpoint=moved))

    def _settle(self, version: ModelVersion) -> None:
        model_id = version.model_id
        self._unsure.discard(model_id)
        self.current[model_id] = self._decided[model_id] = version
        self._claimed.discard(model_id)
        self._leaders.pop(model_id, None)

    def _has_served(self, version: ModelVersion) -> bool:
        """Whether something of its run was decided."""
        before = self._decided.get(version.model_id)
        return before is not None and before.run_id == version.run_id

    def _goes_back(self, version: ModelVersion) -> bool:
        return self._has_served(version) and self._decided[version.model_id].version > version.version

    def _may_be_led(self, model_id: str) -> bool:
        return model_id in self._claimed and len(self._sets[model_id]) == 1

    def _note_set(self, versions: Sequence[ModelVersion]) -> None:
        names = tuple(each.model_id for each in versions)
        self._sets |= dict.fromkeys(names, names)
        self._torn.discard(names)

    def _leader(self, model_id: str) -> _Leader | None:
        """Who leads, while it is on its way."""
        leader = self._leaders.get(model_id)
        return leader if leader is not None and self._is_coming(leader.instance_id) else None
