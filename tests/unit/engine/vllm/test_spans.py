"""Spans of answers from what a worker recorded, against a simulated batch that knows the truth of each token."""

from __future__ import annotations

import dataclasses
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from weightsync.engine.vllm.spans import Answer, Edge, spans_of, tokens_digest
from weightsync.types import VersionSpan

PROMPT = [1, 2, 3]


@dataclasses.dataclass
class Row:
    """One choice of a request, in a batch or out of it."""

    prompt: list[int]
    goal: int
    tokens: list[int] = dataclasses.field(default_factory=list)
    truth: list[str | None] = dataclasses.field(default_factory=list)
    stay: int | None = None
    fresh: bool = False  # whether its last token is still on its way


class Batch:
    """vLLM's batch, as a worker sees it before each step: rows come, leave, stay through a commit, sample or don't.

    Args:
        dice: decides.
        rows: what is asked for.
        num_tokens: of the vocabulary; few, so that answers are alike for long.
        late: whether a step is told before the token of the step before is known.
    """

    def __init__(self, dice: random.Random, rows: list[Row], *, num_tokens: int, late: bool) -> None:
        self._dice = dice
        self._rows = rows
        self._num_tokens = num_tokens
        self._late = late
        self._version: str | None = None
        self._number = 0
        self._num_stays = 0
        self.edges: list[Edge] = []

    def run(self, *, over: int) -> None:
        """Until each has all of its tokens, and up to `over` more that nobody is told of."""
        while any(len(row.tokens) < row.goal + over for row in self._rows):
            self._step(over)
        for row in self._rows:
            self._leave(row)

    def _step(self, over: int) -> None:
        dice = self._dice
        come = []
        for row in self._rows:
            if dice.random() < 0.15 or len(row.tokens) >= row.goal + over:
                self._leave(row)
            elif row.stay is None:
                self._num_stays += 1
                row.stay, row.fresh = self._num_stays, False
                come.append(row)
        changes = dice.random() < 0.2
        if changes:
            self._number += 1
            self._version = None if dice.random() < 0.2 else f"r/{self._number}"
        there = [row for row in self._rows if row.stay is not None]
        dice.shuffle(there)
        for row in there:
            if changes or row in come:
                self._record(row)
        for row in there:
            if row.tokens or dice.random() < 0.8:  # else: only a part of its prompt was read
                row.tokens.append(dice.randrange(self._num_tokens))
                row.truth.append(self._version)
                row.fresh = self._late

    def _leave(self, row: Row) -> None:
        if row.stay is not None:
            self._record(row, leaves=True)
            row.stay = None

    def _record(self, row: Row, *, leaves: bool = False) -> None:
        assert row.stay is not None
        known = row.tokens[:-1] if row.fresh else row.tokens
        self.edges.append(
            Edge(
                stay=row.stay, prompt=tokens_digest(row.prompt), position=len(row.tokens), known=len(known),
                tokens=tokens_digest(known), version=None if leaves else self._version, leaves=leaves,
            )
        )  # fmt: skip


def said(spans: list[VersionSpan]) -> list[str | None]:
    return [span.version for span in spans for _ in range(span.start, span.end)]


def answers_of(rows: list[Row]) -> list[Answer]:
    return [Answer(prompt=row.prompt, tokens=row.tokens[: row.goal]) for row in rows]


@given(st.integers(0, 1 << 32), st.integers(0, 20), st.integers(0, 3), st.booleans())
@settings(max_examples=300)
def test_one_answer_is_told_exactly(seed: int, goal: int, over: int, late: bool) -> None:
    """Seen red with the first edge of a position kept instead of the last."""
    row = Row(PROMPT, goal)
    batch = Batch(random.Random(seed), [row], num_tokens=2, late=late)
    batch.run(over=over)
    (spans,) = spans_of(batch.edges, answers_of([row]))
    assert said(spans) == row.truth[:goal]


@given(st.integers(0, 1 << 32), st.integers(2, 4), st.integers(1, 4), st.integers(0, 2), st.booleans(), st.booleans())
@settings(max_examples=1000)
def test_of_several_answers_nothing_wrong_is_said(
    seed: int, num_rows: int, num_tokens: int, over: int, late: bool, same: bool
) -> None:
    """Unknown, or right: also where answers are alike for long, or to their ends. Seen red with edges of stays that may
    be several answers' taken for one's own, and with the openings given away though there are more than answers."""
    dice = random.Random(seed)
    rows = [Row(PROMPT if same else [number], dice.randint(0, 15)) for number in range(num_rows)]
    batch = Batch(dice, rows, num_tokens=num_tokens, late=late)
    batch.run(over=over)
    for row, spans in zip(rows, spans_of(batch.edges, answers_of(rows)), strict=True):
        told = said(spans)
        assert len(told) == row.goal
        assert all(mine is None or mine == true for mine, true in zip(told, row.truth, strict=False)), (told, row.truth)


@given(st.integers(0, 1 << 32), st.integers(2, 4), st.booleans())
@settings(max_examples=300)
def test_answers_to_different_prompts_are_told_exactly(seed: int, num_rows: int, late: bool) -> None:
    """Also where their tokens are alike. Seen red with the prompts left out."""
    dice = random.Random(seed)
    rows = [Row([number], dice.randint(1, 15)) for number in range(num_rows)]
    batch = Batch(dice, rows, num_tokens=2, late=late)
    batch.run(over=0)
    for row, spans in zip(rows, spans_of(batch.edges, answers_of(rows)), strict=True):
        assert said(spans) == row.truth


def test_two_answers_of_one_prompt_are_told_apart_by_their_tokens() -> None:
    def edge(stay: int, tokens: list[int], version: str | None, *, leaves: bool = False) -> Edge:
        return Edge(
            stay=stay, prompt=tokens_digest(PROMPT), position=len(tokens), known=len(tokens),
            tokens=tokens_digest(tokens), version=version, leaves=leaves,
        )  # fmt: skip

    edges = [edge(1, [], "r/1"), edge(2, [], "r/1"), edge(1, [5, 6], "r/2"), edge(2, [7], "r/2")]
    one, two = Answer(prompt=PROMPT, tokens=[5, 6, 6]), Answer(prompt=PROMPT, tokens=[7, 6, 6])
    expected = [["r/1", "r/1", "r/2"], ["r/1", "r/2", "r/2"]]
    assert [said(spans) for spans in spans_of(edges, [one, two])] == expected
    assert [said(spans) for spans in spans_of(edges, [two, one])] == expected[::-1]


def test_an_answer_that_was_cut_off_is_told_to_its_end() -> None:
    """By a stop string: vLLM's worker went on for some tokens, and through a commit."""
    first = [
        Edge(stay=stay, prompt=b"", position=0, known=0, tokens=tokens_digest([]), version="r/1") for stay in (1, 2)
    ]
    later = [
        Edge(stay=stay, prompt=b"", position=4, known=4, tokens=tokens_digest([5, stay, 6, 6]), version="r/2")
        for stay in (1, 2)
    ]
    cut, whole = Answer(prompt=None, tokens=[5, 1]), Answer(prompt=None, tokens=[5, 2, 6, 6, 6])
    assert [said(spans) for spans in spans_of([*first, *later], [cut, whole])] == [["r/1"] * 2, ["r/1"] * 4 + ["r/2"]]


def test_what_is_of_another_request_makes_all_unknown() -> None:
    mine = Edge(stay=1, prompt=b"", position=0, known=0, tokens=tokens_digest([]), version="r/1")
    other = Edge(stay=2, prompt=b"", position=2, known=2, tokens=tokens_digest([9, 9]), version="r/2")
    answer = Answer(prompt=None, tokens=[4, 4, 4])
    assert said(spans_of([mine], [answer])[0]) == ["r/1"] * 3
    assert said(spans_of([mine, other], [answer])[0]) == [None] * 3
    assert said(spans_of([], [answer])[0]) == [None] * 3
