"""What goes wrong before a job runs: typed, in time, and nothing is left behind."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.cluster.strangers import broken_engine, broken_trainer, dying_trainer, mute_engine
from weightsync.cluster.launch import launch
from weightsync.cluster.placement import Placement, reserved
from weightsync.errors import DeadlineExceededError, LoadError, TrainerRankError, WeightSyncError
from weightsync.types import Deadline

pytestmark = pytest.mark.timeout(600)

SMALL = Placement(rank_cpus=0.01, engine_cpus=0.01)


@pytest.fixture(autouse=True)
def nothing_is_left(ray_cluster: Any) -> Iterator[None]:
    """Every bundle and every actor's share is given back: all CPUs of the cluster are free."""
    import ray

    yield
    deadline = Deadline(60)
    while (free := ray.available_resources().get("CPU")) != (there := ray.cluster_resources().get("CPU")):
        deadline.check(f"resources given back: {free} of {there} CPUs are free")
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("trainer", "engine", "kind", "words"),
    [
        (broken_trainer, broken_engine, LoadError, "engine-0 has no model"),
        (broken_trainer, mute_engine, WeightSyncError, "rank 0 has no model"),
        (dying_trainer, mute_engine, TrainerRankError, "training rank 1 is gone"),
    ],
)
def test_a_factory_that_fails_is_told_by_name(trainer: Any, engine: Any, kind: Any, words: str) -> None:
    with (
        pytest.raises(kind, match=words),
        launch(trainer, engine, num_ranks=2, num_engines=1, placement=SMALL, start_timeout_s=120),
    ):
        pytest.fail("it is not there")


def test_a_cluster_without_room_is_told_with_what_it_has() -> None:
    """Asked for, there, and free: all three stand in the message."""
    greedy = Placement(rank_cpus=100, engine_cpus=1)
    started = time.monotonic()
    with (
        pytest.raises(DeadlineExceededError, match=r"CPU 100.*nodes have: .*CPU 4 GPU 2.*Free now: CPU"),
        launch(broken_trainer, mute_engine, num_ranks=1, num_engines=1, placement=greedy, start_timeout_s=1.0),
    ):
        pytest.fail("there is no room")
    assert time.monotonic() - started < 20


def test_a_placement_that_is_full_at_first_is_waited_for() -> None:
    """What another job holds is taken as soon as it is given back."""
    from weightsync.handles.fanout import in_thread

    half = Placement(rank_cpus=3, engine_cpus=3, spread="STRICT_SPREAD").layout(num_ranks=1, num_engines=1)
    with reserved(half.bundles, spread="STRICT_SPREAD", timeout_s=10):

        def later() -> bool:
            with reserved(half.bundles, spread="STRICT_SPREAD", timeout_s=20):
                return True

        waiting = in_thread(later, name="second")
        assert not waiting.done()
    assert waiting.result(20) is True
