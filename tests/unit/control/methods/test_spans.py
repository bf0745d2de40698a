"""Spans: parts of a sync, while it runs and afterwards."""

from __future__ import annotations

import contextlib

import pytest

from weightsync.control.methods import spans as spans_module
from weightsync.control.methods.spans import Spans
from weightsync.handles.fanout import in_thread
from weightsync.types.service import ModelStatus


class Clock:
    """Time that passes when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(spans_module, "time", made)
    return made


def read(spans: Spans) -> list[tuple[str, str | None, float, float]]:
    return [(span.name, span.who, span.start_s, span.seconds) for span in spans.so_far()]


def test_parts_of_a_sync(clock: Clock) -> None:
    spans = Spans()
    clock.now += 1.0
    with spans.of("barrier"):
        clock.now += 2.0
        assert read(spans) == [("barrier", None, 1.0, 2.0)], "it goes on"
    clock.now += 4.0
    with contextlib.suppress(ZeroDivisionError), spans.of("transfer", who="a"):
        clock.now += 8.0
        raise ZeroDivisionError
    clock.now += 16.0
    assert read(spans) == [("barrier", None, 1.0, 2.0), ("transfer", "a", 7.0, 8.0)]


def test_the_first_seconds_of_one_may_be_of_another(clock: Clock) -> None:
    """Those that nobody waited are none, and it began before whatever is said of it."""
    spans = Spans()
    for who, seconds in (("a", 1.5), ("b", 0.0), ("c", 60.0)):
        clock.now += 1.0
        with spans.of("transfer", who=who) as span:
            clock.now += 2.0
            span.first("agent", seconds)
            assert spans.so_far()[-1].seconds == max(0.0, 2.0 - seconds), "it goes on"
            clock.now += 1.0
    assert read(spans) == [
        ("agent", "a", 1.0, 1.5), ("transfer", "a", 2.5, 1.5),
        ("transfer", "b", 5.0, 3.0),
        ("agent", "c", 9.0, 2.0), ("transfer", "c", 11.0, 1.0),
    ]  # fmt: skip


def test_two_of_one_name_at_once_the_earliest_first(clock: Clock) -> None:
    spans = Spans()
    first, second = spans.of("transfer", who="a"), spans.of("transfer", who="a")
    first.__enter__()
    clock.now += 1.0
    second.__enter__()
    clock.now += 1.0
    second.__exit__(None, None, None)
    clock.now += 1.0
    assert read(spans) == [("transfer", "a", 0.0, 3.0), ("transfer", "a", 1.0, 1.0)]
    first.__exit__(None, None, None)


def test_what_an_instance_says_of_its_load(clock: Clock) -> None:
    spans = Spans()
    clock.now += 10.0
    spans.of_status("a", ModelStatus(load_s=3.0, paused_s=0.5))
    spans.of_status("b", ModelStatus())
    assert read(spans) == [("load", "a", 7.0, 3.0), ("pause", "a", 9.5, 0.5)]


def test_a_transfer_knows_what_came_when_it_has_ended(clock: Clock) -> None:
    spans = Spans()
    with spans.of("transfer", who="a") as span:
        span.first("agent", 0.0)
        span.moved(1000)
        assert [each.nbytes for each in spans.so_far()] == [0]
        clock.now += 1.0
    assert [each.nbytes for each in spans.so_far()] == [1000]


def test_a_load_from_before_the_sync_starts_before_it(clock: Clock) -> None:
    spans = Spans()
    spans.of_status("a", ModelStatus(load_s=3.0))
    assert read(spans) == [("load", "a", -3.0, 3.0)]


def test_they_do_not_grow_for_ever() -> None:
    spans = Spans()

    def many() -> None:
        for _ in range(600):
            with spans.of("commit", who="a"):
                spans.so_far()

    for each in [in_thread(many, name="many") for _ in range(2)]:
        each.result(30.0)
    slowest = spans.so_far()
    assert len(slowest) == 8
    assert min(span.seconds for span in slowest) >= max(
        sorted(span.seconds for span in spans._done)[: len(spans._done) - 8], default=0.0
    )
    assert len(spans._done) <= 10_000
