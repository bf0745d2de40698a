"""TokenVersions in a batch that is run as vLLM's model runner runs its own; the answers' spans are what was served.

vLLM itself is not needed: two names of its interface stand in for it.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import random
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from weightsync.engine.vllm import version_board
from weightsync.engine.vllm.spans import Answer, spans_of
from weightsync.engine.vllm.version_board import TAG, VersionBoard
from weightsync.types import Version

MODULE = "weightsync.engine.vllm.token_versions"
PROMPT = [1, 2]


class MoveDirectionality(enum.Enum):
    UNIDIRECTIONAL = 0
    SWAP = 1


@dataclasses.dataclass
class Update:
    """vLLM's `BatchUpdate`."""

    removed: list[int] = dataclasses.field(default_factory=list)
    added: list[tuple[int, Any, list[int] | None, list[int]]] = dataclasses.field(default_factory=list)
    moved: list[tuple[int, int, MoveDirectionality]] = dataclasses.field(default_factory=list)


@pytest.fixture
def processor(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Makes a `TokenVersions` of so many pipeline stages and replicas."""
    stand_in = types.ModuleType("vllm.v1.sample.logits_processor")
    stand_in.__dict__.update(LogitsProcessor=object, MoveDirectionality=MoveDirectionality)
    groups = types.ModuleType("vllm.distributed.parallel_state")
    distributed = types.ModuleType("vllm.distributed")
    distributed.__dict__.update(parallel_state=groups)
    rank = types.SimpleNamespace(rank_in_group=0)
    groups.__dict__.update(get_tp_group=lambda: rank)
    for name in ("vllm", "vllm.v1", "vllm.v1.sample"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    for each in (stand_in, groups, distributed):
        monkeypatch.setitem(sys.modules, each.__name__, each)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    module = importlib.import_module(MODULE)

    def make(pp: int = 1, dp: int = 1, tp_rank: int = 0) -> Any:
        rank.rank_in_group = tp_rank
        parallel = types.SimpleNamespace(pipeline_parallel_size=pp, data_parallel_size=dp)
        return module.TokenVersions(types.SimpleNamespace(parallel_config=parallel), "cpu", False)

    yield make
    monkeypatch.delitem(sys.modules, MODULE)


@pytest.fixture
def board() -> Iterator[VersionBoard]:
    with VersionBoard() as made:
        yield made


class Row:
    """A request in vLLM's batch. Its list of tokens is another one when it comes again, as under async scheduling."""

    def __init__(self, tag: str | None, goal: int) -> None:
        self.params = types.SimpleNamespace(extra_args=None if tag is None else {TAG: tag, "other": 1})
        self.goal = goal
        self.told: list[int] = []
        self.truth: list[str | None] = []
        self.tokens: list[int] = []


class Runner:
    """What vLLM's `InputBatch` does to its rows: fills gaps with who comes, then with the last, and swaps some."""

    def __init__(self, processor: Any, dice: random.Random, *, late: bool) -> None:
        self.processor = processor
        self.rows: list[Row | None] = []
        self._dice = dice
        self._late = late

    def step(self, scheduled: list[Row], version: str | None) -> None:
        update = Update()
        for index, row in enumerate(self.rows):
            if row is not None and row not in scheduled:
                self.rows[index] = None
        gaps = sorted(index for index, row in enumerate(self.rows) if row is None)
        for row in scheduled:
            if row not in self.rows:
                row.tokens = list(row.told)
                index = gaps.pop(0) if gaps else len(self.rows)
                self.rows[index : index + 1] = [row]
                update.added.append((index, row.params, PROMPT, row.tokens))
        while gaps:
            last = max((index for index, row in enumerate(self.rows) if row is not None), default=-1)
            if gaps[0] >= last:
                break
            index = gaps.pop(0)
            self.rows[index], self.rows[last] = self.rows[last], None
            update.moved.append((last, index, MoveDirectionality.UNIDIRECTIONAL))
        update.removed = gaps[::-1]
        while self.rows and self.rows[-1] is None:
            self.rows.pop()
        if len(self.rows) > 1 and self._dice.random() < 0.3:
            one, other = self._dice.sample(range(len(self.rows)), 2)
            self.rows[one], self.rows[other] = self.rows[other], self.rows[one]
            update.moved.append((one, other, MoveDirectionality.SWAP))
        self.processor.update_state(update if update.removed or update.added or update.moved else None)
        for each in self.rows:
            assert each is not None
            each.tokens[:] = each.told  # placeholders are filled in before the logits
            each.told.append(self._dice.randrange(1 << 30))
            each.truth.append(version)
            each.tokens.append(-1 if self._late else each.told[-1])


@given(seed=st.integers(0, 1 << 32), late=st.booleans())
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_each_row_is_recorded_wherever_it_is_moved(
    processor: Callable[..., Any], board: VersionBoard, seed: int, late: bool
) -> None:
    """Requests come, are preempted, come again, end, are moved; versions change.

    Seen red with moves left out, with swaps taken for moves, and with a change that is told one step late."""
    dice = random.Random(seed)
    served: list[Version | None] = [None]
    version_board.served = lambda: served[0]
    runner = Runner(processor(), dice, late=late)
    tags = [board.claim() if dice.random() < 0.8 else None for _ in range(5)]
    rows = [Row(tag, dice.randint(1, 12)) for tag in tags]
    number = 0
    while any(len(row.told) < row.goal for row in rows):
        if dice.random() < 0.2:
            number += 1
            served[0] = None if dice.random() < 0.2 else Version(run_id="r", number=number)
        now = [row for row in rows if len(row.told) < row.goal and dice.random() < 0.8]
        runner.step(now, None if served[0] is None else str(served[0]))
    for tag, row in zip(tags, rows, strict=True):
        if tag is not None:
            (spans,) = spans_of(board.edges(tag), [Answer(prompt=PROMPT, tokens=row.told)])
            assert [span.version for span in spans for _ in range(span.start, span.end)] == row.truth
            board.release(tag)
    version_board.served = None


def test_a_version_that_stays_is_written_once(processor: Callable[..., Any], board: VersionBoard) -> None:
    """A step that changes nothing costs a look at the version."""
    asked = []

    def served() -> Version:
        asked.append(None)
        return Version(run_id="r", number=1)

    version_board.served = served
    tag = board.claim()
    assert tag is not None
    recorder, tokens = processor(), [4]
    recorder.update_state(None)
    assert asked == [], "nobody is there"
    recorder.update_state(Update(added=[(0, Row(tag, 1).params, PROMPT, tokens)]))
    for _ in range(5):
        tokens.append(7)
        recorder.update_state(None)
    assert [(edge.position, edge.version) for edge in board.edges(tag)] == [(1, "r/1")]
    assert len(asked) == 6
    version_board.served = None


def test_rows_without_a_tag_of_ours_are_left_alone(processor: Callable[..., Any], board: VersionBoard) -> None:
    """Also where a client made one up."""
    recorder = processor()
    for extra in (None, {}, {TAG: 5}, {TAG: "no:tag:of"}, {TAG: ["x"]}):
        recorder.update_state(Update(added=[(0, types.SimpleNamespace(extra_args=extra), None, [])]))
    recorder.update_state(Update(removed=[0]))


def test_without_an_engine_of_ours_the_version_is_unknown(processor: Callable[..., Any], board: VersionBoard) -> None:
    version_board.served = None
    tag = board.claim()
    assert tag is not None
    processor().update_state(Update(added=[(0, Row(tag, 1).params, None, [])]))
    assert [edge.version for edge in board.edges(tag)] == [None]


@pytest.mark.parametrize("layout", [{"pp": 2}, {"dp": 2}, {"tp_rank": 1}])
def test_only_the_worker_whose_rows_are_whole_records(
    processor: Callable[..., Any], board: VersionBoard, layout: dict[str, int]
) -> None:
    tag = board.claim()
    assert tag is not None
    processor(**layout).update_state(Update(added=[(0, Row(tag, 1).params, PROMPT, [])]))
    assert board.edges(tag) == []


def test_logits_are_left_as_they_are(processor: Callable[..., Any]) -> None:
    logits = object()
    assert processor().apply(logits) is logits
    assert processor().is_argmax_invariant()
