"""VersionBarrier: models of one set go on together, each from its own current run."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from weightsync.control.barrier import VersionBarrier
from weightsync.errors import ConfigError, DeadlineExceededError, NotPublishedError, TransferAbortedError
from weightsync.handles.fanout import in_thread
from weightsync.types.fleet import ModelVersion

LONG_S = 10.0
PAIR = ("actor", "critic")


def at(model: str, version: int, run_id: str = "r") -> ModelVersion:
    return ModelVersion(model_id=model, run_id=run_id, version=version, sender_endpoint=f"http://{model}-{run_id}")


def waits(barrier: VersionBarrier, wanted: ModelVersion, timeout_s: float = LONG_S) -> Future[tuple[ModelVersion, ...]]:
    return in_thread(lambda: barrier.wait(wanted, timeout_s), name="waits")


def until(condition: Callable[[], Any], what: str) -> None:
    end = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.002)


@pytest.mark.parametrize("sets", [[["actor"]], [["actor", "actor"]], [[]], [PAIR, ["critic", "other"]]], ids=str)
def test_sets_that_cannot_be(sets: list[list[str]]) -> None:
    with pytest.raises(ConfigError, match="a set has two models or more"):
        VersionBarrier(sets)


def test_a_model_of_no_set_passes_by_itself() -> None:
    barrier = VersionBarrier([PAIR])
    assert barrier.set_of("other") == ("other",)
    assert barrier.set_of("critic") == PAIR
    assert barrier.wait(at("other", 3), 0.0) == (at("other", 3),)
    assert barrier.status() == ()


def test_a_set_waits_for_its_last_model() -> None:
    barrier = VersionBarrier([("critic", "actor")])
    actor = waits(barrier, at("actor", 1))
    until(barrier.status, "it waits")
    (seen,) = barrier.status()
    assert (seen.versions, seen.waits_for, seen.version) == ({"actor": 1, "critic": None}, ("critic",), 1)
    assert 0 <= seen.waited_s < LONG_S == seen.timeout_s
    critic = waits(barrier, at("critic", 1))
    assert actor.result(LONG_S) == critic.result(LONG_S) == (at("actor", 1), at("critic", 1))
    assert barrier.status() == ()


def test_runs_of_a_set_are_different_and_numbers_are_equal() -> None:
    barrier = VersionBarrier([PAIR])
    barrier.arrive(at("critic", 4, "its own"))
    assert barrier.wait(at("actor", 4), 0.0) == (at("actor", 4), at("critic", 4, "its own"))


def test_one_that_has_gone_further_is_waited_for() -> None:
    """What it published before may be overwritten."""
    barrier = VersionBarrier([PAIR])
    barrier.arrive(at("actor", 2))
    critic = waits(barrier, at("critic", 1))
    until(barrier.status, "it waits")
    assert (barrier.status()[0].waits_for, barrier.status()[0].version) == (("critic",), 2)
    assert not critic.done()
    barrier.arrive(at("critic", 2))
    assert critic.result(LONG_S) == (at("actor", 2), at("critic", 2))


def test_what_is_missing_at_the_deadline_is_said() -> None:
    barrier = VersionBarrier([("actor", "critic", "judge")])
    barrier.arrive(at("critic", 1))
    with pytest.raises(DeadlineExceededError) as caught:
        barrier.wait(at("actor", 2), 0.05)
    for said in ("actor, critic, judge are served together", "0.05 s", "version 2", "actor has published 2",
                 "critic has published 1", "judge has published nothing"):  # fmt: skip
        assert said in str(caught.value), said
    assert caught.value.version == "r/2"
    assert barrier.status() == (), "nobody waits any more"


def test_an_older_version_changes_nothing() -> None:
    barrier = VersionBarrier()
    barrier.arrive(at("actor", 5))
    barrier.arrive(at("actor", 4))
    assert barrier.published() == {"actor": at("actor", 5)}
    assert barrier.wait(at("actor", 4), 0.0) == (at("actor", 5),), "or a newer one of its run"


def test_a_new_run_ends_the_wait_for_the_old_one() -> None:
    barrier = VersionBarrier([PAIR])
    old = waits(barrier, at("actor", 7, "r1"))
    until(barrier.status, "it waits")
    barrier.arrive(at("actor", 1, "r2"))
    with pytest.raises(TransferAbortedError, match="run r2 of model actor took over"):
        old.result(LONG_S)
    assert barrier.status() == ()


def test_a_sync_of_the_old_run_that_starts_late_takes_nothing_back() -> None:
    """Seen to fail: it took the new run's place, and the new one was fetched from the old one's agent."""
    barrier = VersionBarrier()
    barrier.arrive(at("actor", 7, "r1"))
    barrier.arrive(at("actor", 1, "r2"))
    with pytest.raises(TransferAbortedError, match="run r2 of model actor took over"):
        barrier.wait(at("actor", 7, "r1"), 0.0)
    assert barrier.published() == {"actor": at("actor", 1, "r2")}
    barrier.arrive(at("actor", 8, "r1"))  # its trainer itself says so
    assert barrier.wait(at("actor", 8, "r1"), 0.0) == (at("actor", 8, "r1"),)


def test_a_run_that_nobody_has_told_of_yet() -> None:
    barrier = VersionBarrier()
    barrier.arrive(at("actor", 7, "r1"))
    assert barrier.wait(at("actor", 1, "r2"), 0.0) == (at("actor", 1, "r2"),)


def test_many_wait_for_sets_that_trainers_publish_at_their_own_pace() -> None:
    """All waiters of a set get one number of all its models, at least theirs."""
    chance = random.Random(3)
    sets = [("a", "b", "c"), ("d", "e")]
    barrier = VersionBarrier(sets)
    versions = 12
    gates = {number: threading.Barrier(5) for number in range(1, versions + 1)}
    pauses = {(model, n): chance.random() * 0.004 for model in "abcde" for n in gates}

    def trainer(model: str) -> list[tuple[ModelVersion, ...]]:
        found = []
        for number, gate in gates.items():
            time.sleep(pauses[model, number])
            found.append(barrier.wait(at(model, number), LONG_S))
            gate.wait(LONG_S)
        return found

    running = {model: in_thread(lambda model=model: trainer(model), name=model) for model in "abcde"}  # type: ignore[misc]
    for model, thread in running.items():
        for number, found in enumerate(thread.result(LONG_S), start=1):
            assert found == tuple(at(each, number) for each in barrier.set_of(model))
    assert barrier.status() == ()


def test_the_longest_wait_of_a_set_is_what_users_see() -> None:
    barrier = VersionBarrier([PAIR])
    first = waits(barrier, at("actor", 1), 5.0)
    until(barrier.status, "it waits")
    second = waits(barrier, at("actor", 1), 7.0)
    until(lambda: len(barrier._waiting[PAIR]) == 2, "both wait")
    assert len(barrier.status()) == 1
    assert barrier.status()[0].timeout_s == 5.0
    barrier.arrive(at("critic", 1))
    assert first.result(LONG_S) == second.result(LONG_S)


def test_a_number_that_was_denied_gives_way_to_what_is_there() -> None:
    barrier = VersionBarrier([PAIR])
    barrier.arrive(at("critic", 2))
    barrier.arrive(at("actor", 1000))
    assert barrier.is_ahead(at("actor", 1000))
    ahead, other = waits(barrier, at("actor", 1000)), waits(barrier, at("critic", 2))
    until(lambda: len(barrier._waiting[PAIR]) == 2, "both wait")
    barrier.deny(at("actor", 1000), 2)
    assert [each.version for each in other.result(LONG_S)] == [2, 2]
    with pytest.raises(NotPublishedError) as caught:
        ahead.result(LONG_S)
    assert caught.value.newest == 2
    assert not barrier.is_ahead(at("actor", 2))


def test_a_denial_of_what_is_not_the_newest_any_more_changes_nothing() -> None:
    barrier = VersionBarrier()
    barrier.arrive(at("actor", 5))
    for version, newest in ((at("actor", 4), 1), (at("actor", 5, "other"), 1), (at("actor", 5), None)):
        barrier.deny(version, newest)
        assert barrier.published()["actor"].version == 5
