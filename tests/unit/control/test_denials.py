"""Versions that their agent had not: when each is tried again."""

from __future__ import annotations

from weightsync.control.denials import _MAX_DENIED, Denials
from weightsync.control.events import StartSync


def goal(version: int, run_id: str = "r") -> StartSync:
    return StartSync(run_id=run_id, version=version)


def test_each_is_tried_again_three_times() -> None:
    denials = Denials()
    assert [denials.again_after_s(goal(5), "r", 1) for _ in range(4)] == [1.0, 2.0, 4.0, None]
    assert denials.again_after_s(goal(6), "r", 1) == 1.0


def test_what_is_served_or_of_another_run_is_not() -> None:
    denials = Denials()
    assert denials.again_after_s(goal(5), "r", 1) == 1.0
    assert denials.again_after_s(goal(6), "other", 1) == 1.0, "it is the run that was asked for"
    assert denials.again_after_s(goal(5), "r", 1) == 1.0, "of that run it begins anew"


def test_of_many_the_lowest_are() -> None:
    denials = Denials()
    for version in range(2, 2 + _MAX_DENIED):
        assert denials.again_after_s(goal(version), "r", 1) == 1.0
    assert denials.again_after_s(goal(100), "r", 1) is None, "there are enough below it"
    assert denials.again_after_s(goal(3), "r", 1) == 2.0
    assert denials.again_after_s(goal(100), "r", 3) == 1.0, "two of them are served by now"


def test_one_that_could_not_be_tried_has_all_its_tries() -> None:
    denials = Denials()
    for _ in range(9):
        assert denials.again_after_s(goal(5), "r", 1) == 1.0
        denials.was_no_try(goal(5))
    denials.was_no_try(goal(7))
    assert denials.again_after_s(goal(7), "r", 1) == 1.0
