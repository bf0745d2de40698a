"""How far another clock is: by the midpoint of the shortest exchange, as NTP does."""

from __future__ import annotations

import pytest

from weightsync.clients.timeline import TimelineClient
from weightsync.types.timeline import Timeline


class Exchanges(TimelineClient):
    """Exchanges that take what the test says, to a clock that is ahead."""

    def __init__(self, ways_s: list[tuple[float, float]], *, ahead_s: float) -> None:
        super().__init__("http://127.0.0.1:9")
        self.now_s = 100.0
        self._ways = iter(ways_s)
        self._ahead_s = ahead_s

    def clock(self, *, timeout_s: float = 10.0) -> Timeline:
        there_s, back_s = next(self._ways)
        self.now_s += there_s
        said = Timeline(kind="agent", name="a", now_s=self.now_s + self._ahead_s)
        self.now_s += back_s
        return said


def test_the_midpoint_is_exact_where_both_ways_take_as_long() -> None:
    client = Exchanges([(0.1, 0.1)] * 5, ahead_s=7.0)
    found = client.offset(clock=lambda: client.now_s)
    assert (found.ahead_s, found.error_s) == (pytest.approx(7.0), pytest.approx(0.1))


def test_the_shortest_exchange_counts_and_the_truth_lies_within_the_bound() -> None:
    client = Exchanges([(0.5, 0.1), (0.01, 0.03), (2.0, 0.0), (0.4, 0.4), (0.1, 0.1)], ahead_s=-7.0)
    found = client.offset(clock=lambda: client.now_s)
    assert found.error_s == pytest.approx(0.02)
    assert abs(found.ahead_s + 7.0) <= found.error_s
