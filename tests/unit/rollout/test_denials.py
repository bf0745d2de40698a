"""What an agent denies: at once, after its grace, or not at all."""

from __future__ import annotations

import time

import pytest

from weightsync.rollout.denials import Denials
from weightsync.rollout.sender import Ticket, Wish
from weightsync.types import Deadline, Version
from weightsync.types.publication import AgentVersion

AGENT = "http://agent:1"


def ticket(number: int, run_id: str = "r", until_s: float = 100.0) -> Ticket:
    wish = Wish(version=Version(run_id=run_id, number=number), endpoint=AGENT)
    return Ticket(number=1, wish=wish, until=Deadline(until_s))


def says(number: int | None, run_id: str | None = "r", coming: int | None = None) -> AgentVersion:
    return AgentVersion(
        model_id="m", run_id=None if number is None else run_id, version=number, coming=coming,
        coming_run_id=None if coming is None else run_id,
    )  # fmt: skip


def denied(denials: Denials, said: AgentVersion | None, *, in_s: float = 0.0, had: str | None = "r") -> list[int]:
    found = denials.judge(AGENT, said, asked_s=time.monotonic() + in_s, had=had)
    assert all(each.absent and each.refused for each in found)
    return [each.wish.version.number for each in found]


@pytest.mark.parametrize(
    ("said", "newest"),
    [(says(3), 3), (says(3, coming=4), 4), (says(9, "other"), None), (says(9, "other", coming=10), None)],
)
def test_a_number_above_what_the_agent_has_is_denied_after_its_grace(said: AgentVersion, newest: int | None) -> None:
    denials, claim = Denials(), ticket(5)
    denials.watch(claim, grace_s=1.0)
    assert denied(denials, said, had=None) == []
    assert denied(denials, said, in_s=1.1, had=None) == [5]
    assert (claim.absent, claim.newest) == (True, newest)
    assert denied(denials, said, in_s=1.1) == []


@pytest.mark.parametrize("said", [None, says(None), says(3, coming=5), says(3, coming=6)])
def test_who_says_nothing_or_is_about_to_have_it_denies_nothing(said: AgentVersion | None) -> None:
    denials, claim = Denials(), ticket(5)
    denials.watch(claim, grace_s=0.0)
    assert denied(denials, said, in_s=1.0) == []
    assert (claim.there, denials.next_look_s(AGENT, "r", 4)) == (False, 0.0)
    assert denied(denials, says(5), in_s=1.0) == []
    assert (claim.there, denials.next_look_s(AGENT, "r", 4)) == (True, None)


def test_an_agent_that_names_another_run_than_it_had_has_ended_that_one_at_once() -> None:
    denials = Denials()
    denials.watch(ticket(5), grace_s=60.0)
    assert denied(denials, says(1, "successor"), had="successor") == []
    assert denied(denials, says(1, "successor"), had="r") == [5]


def test_what_was_denied_once_is_denied_at_once_until_the_agent_comes_there() -> None:
    denials = Denials()
    denials.watch(ticket(100), grace_s=1.0)
    assert denied(denials, says(3), in_s=1.1) == [100]
    for number, at_once in ((100, True), (101, True), (4, False)):
        denials.watch(claim := ticket(number), grace_s=1.0)
        assert (denials.next_look_s(AGENT, "r", 3) == 0.0) == at_once
        assert denied(denials, says(3)) == ([number] if at_once else [])
        claim.there = True
        denials.next_look_s(AGENT, "r", 3)
    assert denied(denials, says(100)) == []
    denials.watch(ticket(101), grace_s=1.0)
    assert denied(denials, says(100)) == [], "it may be a moment too early, as any other"


def test_nobody_is_asked_about_what_is_over_or_brought() -> None:
    denials = Denials()
    denials.watch(ticket(5, until_s=0.0), grace_s=0.0)
    assert denials.next_look_s(AGENT, "r", 0) is None
    denials.watch(ticket(6), grace_s=0.0)
    assert denials.next_look_s("http://another:1", "r", 0) is None
    assert denials.next_look_s(AGENT, "other", 6) == 0.0
    assert denials.next_look_s(AGENT, "r", 6) is None


def test_tickets_are_bounded() -> None:
    denials = Denials()
    for number in range(1000):
        denials.watch(ticket(number + 10), grace_s=0.0)
    assert len(denied(denials, says(1), in_s=1.0)) == 256
