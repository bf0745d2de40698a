"""The cost model: measured costs choose the form, and choices move with them."""

from __future__ import annotations

import threading

import pytest

from weightsync.codec.delta_cost import CostModel, Work
from weightsync.codec.delta_units import ElementKind, Unit
from weightsync.errors import InvalidRequestError

UNIT = Unit(start=0, nbytes=16 << 20, kind=ElementKind.FLOAT16)


def test_a_slower_link_makes_fewer_units_full() -> None:
    most = [CostModel(link_bytes_per_s=speed, num_cores=2).most_changed(UNIT) for speed in (1e6, 1e8, 1e9, 1e10, 1e12)]
    assert most == sorted(most, reverse=True)
    assert most[0] == UNIT.num_elements
    assert most[-1] < 0.2 * UNIT.num_elements


def costing(element_s: float) -> CostModel:
    costs = CostModel(num_cores=2)
    for _ in range(200):
        costs.observe_encode(Work.SPARSE, 1_000_000, 1_000_000 * element_s)
    return costs


def test_dearer_sparse_coding_makes_more_units_full() -> None:
    most = [costing(element_s).most_changed(UNIT) for element_s in (1e-10, 1e-8, 1e-7, 1e-6)]
    assert most == sorted(most, reverse=True)
    assert most[0] > most[-1] > 0


def test_one_percent_is_sparse_on_any_real_link() -> None:
    for speed in (1e6, 1e9, 1e10):
        assert CostModel(link_bytes_per_s=speed, num_cores=2).most_changed(UNIT) > 0.02 * UNIT.num_elements


def test_zstd_is_for_slow_links() -> None:
    slow, fast = CostModel(link_bytes_per_s=1e5, num_cores=2), CostModel(link_bytes_per_s=1e10, num_cores=2)
    assert slow.packs_full(UNIT)
    assert not fast.packs_full(UNIT)
    assert fast.prefers_full(UNIT, UNIT.num_elements, UNIT.nbytes // 2)
    assert not slow.prefers_full(UNIT, UNIT.num_elements, UNIT.nbytes // 2)
    assert slow.prefers_full(UNIT, 1, UNIT.nbytes)


def test_observations_move_the_means_and_the_choices() -> None:
    costs = CostModel(link_bytes_per_s=1e10, num_cores=2)
    before = costs.most_changed(UNIT)
    decode_s = 14e-9
    for _ in range(60):
        costs.observe_link(1 << 30, 1000.0)
    assert costs.link_bytes_per_s == pytest.approx((1 << 30) / 1000, rel=0.05)
    assert costs.most_changed(UNIT) > before
    for _ in range(60):
        costs.observe_encode(Work.SPARSE, 1_000_000, 0.5)
        costs.observe_planes(UNIT, 1_000_000, 2_000_000)
        costs.observe_packed(UNIT, UNIT.nbytes // 4)
    assert costs.seconds(Work.SPARSE) == pytest.approx(0.5e-6 + decode_s, rel=0.05)
    assert costs.planes_bytes(UNIT, 1_000_000) == pytest.approx(2_000_000, rel=0.05)
    assert costs.seconds(Work.FULL) < costs.seconds(Work.PACKED)


def test_small_and_wrong_observations_count_for_little() -> None:
    costs = CostModel(link_bytes_per_s=1e9)
    costs.observe_link(100, 1.0)
    assert costs.link_bytes_per_s > 1e8
    speed = costs.link_bytes_per_s
    costs.observe_link(0, 1.0)
    for seconds in (0.0, -1.0, float("nan"), float("inf")):
        costs.observe_link(1 << 30, seconds)
    assert costs.link_bytes_per_s == speed
    fixed = CostModel(link_bytes_per_s=1e9, fixed=True)
    fixed.observe_link(1 << 30, 1000.0)
    assert fixed.link_bytes_per_s == pytest.approx(1e9)


def test_threads_may_observe_at_once() -> None:
    costs = CostModel()

    def observe() -> None:
        for _ in range(500):
            costs.observe_encode(Work.FULL, 1 << 26, 0.01)

    threads = [threading.Thread(target=observe) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    decode_s = CostModel().seconds(Work.FULL) / 2
    assert costs.seconds(Work.FULL) == pytest.approx(0.01 / (1 << 26) + decode_s, rel=0.01)


@pytest.mark.parametrize("rate", [0.0, -1.0, float("inf"), float("nan")])
def test_rates_lie_above_nothing(rate: float) -> None:
    with pytest.raises(InvalidRequestError):
        CostModel(link_bytes_per_s=rate)
