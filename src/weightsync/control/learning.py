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
        """The newest whole set that instances serve; of models that a trainer has told of meanwhile, nothing."""
        self.until_s = 0.0
        told = frozenset(self._goals.current)
        whole = [beat for beat in heard if beat.whole and not beat.lacks]
        runs = collections.Counter(_runs(beat) for beat in whole)
        alike = collections.Counter(_numbers(beat) for beat in whole)
        for beat in sorted(  # who may answer first; runs are not compared, of the one that most have the newest
            whole,
            key=lambda beat: (beat.leased, runs[_runs(beat)], alike[_numbers(beat)] > 1, _numbers(beat)),
            reverse=True,
        ):
            if not any(each.model_id in self._goals.current.keys() - told for each in beat.serves):  # with others
                self._goals.learn([each for each in beat.serves if each.sender_endpoint and each.model_id not in told])
        if found := tuple(each for model_id, each in self._goals.current.items() if model_id not in told):
            self._goes_on = not told
            self._learnt(found)

    def learn_more(self, beat: HeartbeatRequest, others: Sequence[HeartbeatRequest], *, believed: bool) -> None:
        """An instance serves these: what is newer counts while nothing was brought or claimed here. It was told to
        commit that by the controller before, and has taken longer than this one has listened; or it was not believed,
        and was right.

        Args:
            beat: what it says.
            others: what the others said last, of those that were heard of late.
            believed: it takes part, or nobody does. Else two have to agree: those that answer would go dark for it.
        """
        if self._goes_on and beat.whole and not beat.lacks:
            agreed = {(each.model_id, each.of) for other in others for each in other.serves}
            newer = [
                each
                for each in beat.serves
                if each.sender_endpoint and self._is_newer(each) and (believed or (each.model_id, each.of) in agreed)
            ]
            if newer:
                self._goals.learn(newer)
                self._learnt(tuple(newer))

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
