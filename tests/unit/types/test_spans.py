"""Spans of versions: without gaps from 0 to the end, and of each token what was said last."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightsync.types import Version, VersionSpan, whole_span
from weightsync.types.spans import add_edge, spans_from

EDGES = st.lists(st.tuples(st.integers(0, 12), st.sampled_from([None, "r/1", "r/2", "r/3"])), max_size=12)


def span(version: str | None, start: int, end: int) -> VersionSpan:
    return VersionSpan(version=version, start=start, end=end)


@given(EDGES, st.integers(0, 10))
def test_each_token_has_the_version_that_was_said_last(edges: list[tuple[int, str | None]], num_tokens: int) -> None:
    """Seen red with `>` for `>=` in `add_edge`, and with a bound that leaves one token out."""
    painted: list[str | None] = [None] * num_tokens
    for position, version in edges:
        painted[position:] = [version] * len(painted[position:])
    spans = spans_from(edges, num_tokens)
    assert [each.version for each in spans for _ in range(each.start, each.end)] == painted
    assert [each.start for each in spans] == [0, *(each.end for each in spans)][: len(spans)]
    assert all(one.version != other.version for one, other in itertools.pairwise(spans))
    assert all(each.start < each.end for each in spans)


def test_an_answer_over_a_commit() -> None:
    assert spans_from([(0, "r/1"), (7, "r/2")], 10) == [span("r/1", 0, 7), span("r/2", 7, 10)]
    assert spans_from([(3, "r/1")], 5) == [span(None, 0, 3), span("r/1", 3, 5)]
    assert spans_from([(0, "r/1"), (5, "r/2")], 5) == [span("r/1", 0, 5)]
    assert spans_from([(0, "r/1")], 0) == []


def test_an_answer_of_one_version() -> None:
    assert whole_span(Version(run_id="r", number=4), 3) == [span("r/4", 0, 3)]
    assert whole_span(None, 3) == [span(None, 0, 3)]
    assert whole_span(None, 0) == []


def test_a_later_edge_takes_back_what_lies_behind_it() -> None:
    starts: list[tuple[int, str | None]] = [(0, "r/1"), (5, "r/2")]
    add_edge(starts, 3, "r/1")
    assert starts == [(0, "r/1")]


def test_spans_travel_as_json() -> None:
    told = msgspec.json.encode(span("r/1", 0, 2))
    assert told == b'{"version":"r/1","start":0,"end":2}'
    assert msgspec.json.decode(told, type=VersionSpan) == span("r/1", 0, 2)
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(b'{"version":"r/1","start":0}', type=VersionSpan)
