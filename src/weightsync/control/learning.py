"""Learning: what a controller that was started anew takes for current, from what its instances say that they serve."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Sequence

from weightsync.control.goals import FleetGoals
from weightsync.types.fleet import HeartbeatRequest, ModelVersion


class Learning:
    """Not thread-safe: its pool's lock.

    Args:
        goals: which learn.
        until_s: what was heard by then, by the pool's clock, counts.
        learnt: told of what was learnt.

    Attributes:
        until_s: nobody comes in before; 0 once it has learnt.
    """

    def __init__(self, goals: FleetGoals, until_s: float, learnt: Callable[[tuple[ModelVersion, ...]], None]) -> None:
        self.until_s = until_s
        self._goals = goals
        self._learnt = learnt
        self._goes_on = False

    def learn(self, heard: Iterable[HeartbeatRequest]) -> None:
        """The newest whole set that instances serve; of models that were decided, nothing. When a claim was denied, and
        left no goal, once more."""
        first, self.until_s = self.until_s > 0, 0.0
        whole = [beat for beat in heard if beat.whole and not beat.lacks]
        runs = collections.Counter(_runs(beat) for beat in whole)
        alike = collections.Counter(_numbers(beat) for beat in whole)
        decided, found = self._goals.decided, list[ModelVersion]()
        for beat in sorted(  # who may answer first; runs are not compared, of the one that most have the newest
            whole,
            key=lambda beat: (beat.leased, runs[_runs(beat)], alike[_numbers(beat)] > 1, _numbers(beat)),
            reverse=True,
        ):
            known = [decided[each.model_id].of == each.of for each in beat.serves if each.model_id in decided]
            new = [each for each in beat.serves if each.sender_endpoint and each.model_id not in decided]
            mine = {each.model_id: each.of for each in beat.serves}
            with_others = {name: each.of for name, each in decided.items()} | mine
            if all(known):  # one set, and no other beside it
                if self._goals.apart(with_others) and not self._goals.apart(mine):
                    self._goals.tear(mine)
                self._goals.learn(new, answered=first and beat.leased)
                found += new
        current = self._goals.current
        if found := [each for each in found if current[each.model_id] == each]:
            self._goes_on = len(found) == len(current)
            self._learnt(tuple(found))

    def learn_more(self, beat: HeartbeatRequest, heard: Sequence[HeartbeatRequest], *, answers: bool) -> bool:
        """An instance serves these: what is newer counts while nothing was brought or claimed here. It was told to
        commit that by the controller before, and has taken longer than this one has listened; or it was not believed,
        and was right.

        At once it counts where more instances serve it than the fleet's goal, or as many and it answers. Else the goal
        stays, and a sync is to bring the others there: who can't have it would go dark.

        Args:
            beat: what it says.
            heard: what each said last that was heard of late.
            answers: it takes part.

        Returns:
            Whether it has something newer, and the goal stays.
        """
        newer = [each for each in beat.serves if self._is_newer(each)]
        if not (self._goes_on and beat.whole and not beat.lacks and newer and all(e.sender_endpoint for e in newer)):
            return False
        sets = [{(each.model_id, each.of) for each in other.serves} for other in heard if other.whole]
        num_newer = sum({(each.model_id, each.of) for each in newer} <= served for served in sets)
        goals = {(each.model_id, self._goals.current[each.model_id].of) for each in newer}
        stays = num_newer < sum(bool(goals & served) for served in sets) + (not answers)
        if not stays:
            self._goals.learn(newer, answered=True)
        self._learnt(tuple(newer))
        return stays

    def brings(self, versions: Sequence[ModelVersion]) -> None:
        """A sync brings these, or they are claimed; none: nobody knows what. From then on this controller decides."""
        if not versions or any(self._goals.current.get(each.model_id) != each for each in versions):
            self._goes_on = False

    def _is_newer(self, version: ModelVersion) -> bool:
        goal = self._goals.current.get(version.model_id)
        return goal is not None and goal.run_id == version.run_id and goal.version < version.version


def _runs(beat: HeartbeatRequest) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((each.model_id, each.run_id) for each in beat.serves))


def _numbers(beat: HeartbeatRequest) -> tuple[tuple[int, str], ...]:
    return tuple(sorted((each.version, f"{each.model_id} {each.run_id}") for each in beat.serves))
