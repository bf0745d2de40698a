"""FleetVersions: when what one serves is what a fleet without anybody has to serve from now on."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.control.pool_kit import at, beat, made
from weightsync.control.fleet_versions import FleetVersions
from weightsync.types import Version


def served(number: int, run_id: str = "r") -> Version:
    return Version(run_id=run_id, number=number)


def test_where_nobody_takes_part_who_serves_an_older_one_of_that_run_comes_in() -> None:
    """Seen red: with a trainer that waits for nobody, what is newest is always one ahead."""
    pool, _ = made()
    pool.decided([at(3)])
    pool.decided([at(9)], claimed=True)
    assert not pool.heartbeat(beat("a", at(2))).lease_s, "older than what was served last"
    assert not pool.heartbeat(beat("a", at(7, run_id="another"))).lease_s
    assert pool.heartbeat(beat("a", at(7))).admitted
    assert pool.current("m") == at(7)
    pool.decided([at(10)], claimed=True)
    assert not pool.heartbeat(beat("b", at(8))).lease_s, "somebody takes part: what that one serves is the fleet's"


def test_nothing_is_settled_for_while_a_sync_runs_or_half_of_a_set_is_served() -> None:
    pool, _ = made()
    pool.decided([at(9)], claimed=True)
    with pool.syncing():
        assert not pool.heartbeat(beat("a", at(7))).lease_s
    assert not pool.heartbeat(beat("a", at(7), whole=False)).lease_s
    assert pool.heartbeat(beat("a", at(7))).lease_s


def test_a_set_is_served_at_one_number() -> None:
    versions = FleetVersions()
    versions.decided([at(9), at(9, model="n", run_id="s")], claimed=True)
    for mixed in ({"m": served(7), "n": served(8, "s")}, {"m": served(7), "n": None}, {"m": served(7), "n": served(7)}):
        versions.settle_for(mixed, ())
        assert versions.current["m"] == at(9)
    versions.settle_for({"m": served(7), "n": served(7, "s")}, ())
    assert versions.current == {"m": at(7), "n": at(7, model="n", run_id="s")}


def test_one_with_half_of_the_models_decides_for_the_set() -> None:
    """Another one with the other half follows it, and does not decide once more."""
    versions = FleetVersions()
    versions.decided([at(9), at(9, model="n")], claimed=True)
    versions.settle_for({"m": served(7)}, ())
    versions.settle_for({"n": served(8)}, ())
    assert versions.current == {"m": at(7), "n": at(7, model="n")}


def test_with_somebody_of_the_set_nothing_changes() -> None:
    versions = FleetVersions()
    versions.decided([at(9), at(9, model="n")], claimed=True)
    versions.settle_for({"m": served(7)}, ["n"])
    assert versions.current["m"] == at(9)
    versions.settle_for({"m": served(7)}, ["other"])
    assert versions.current["m"] == at(7)


@given(st.lists(st.tuples(st.sampled_from(["decide", "claim", "serve"]), st.integers(0, 20)), max_size=30))
def test_within_a_run_what_was_served_never_goes_back(events: list[tuple[str, int]]) -> None:
    versions, newest = FleetVersions(), 0
    for what, number in events:
        before = versions.current.get("m")
        if what == "serve":
            versions.settle_for({"m": served(number)}, ())
            if versions.current.get("m") != before:
                assert number >= newest
                newest = number
        else:
            versions.decided([at(number)], claimed=what == "claim")
            if what == "decide" and versions.current["m"] == at(number):
                newest = max(newest, number)


@pytest.mark.parametrize("number", [9, 10])
def test_what_is_newer_than_what_was_announced_is_nothing_to_settle_for(number: int) -> None:
    versions = FleetVersions()
    versions.decided([at(9)], claimed=True)
    versions.settle_for({"m": served(number)}, ())
    assert versions.current["m"] == at(9)
