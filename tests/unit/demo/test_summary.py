from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from weightsync.demo.summary import StepRow, summarize, verdict, write_summary


def row(version: int, **changes: Any) -> StepRow:
    facts: dict[str, Any] = {
        "version": version,
        "trainer_loss": 5.0 - version,
        "engine_loss": 5.0 - version + 0.001,
        "total_bytes": 1000,
        "phases_s": {"extract": 0.1},
        "paused_s": 0.02,
        "digests_equal": True,
    }
    return StepRow(**{**facts, **changes})


def problems(*rows: StepRow, asked: int | None = None) -> list[str]:
    return verdict(summarize(rows, num_steps_asked=len(rows) if asked is None else asked))


def test_a_good_run_has_no_problem_and_the_promised_keys() -> None:
    summary = summarize([row(1), row(2)], num_steps_asked=2)
    assert verdict(summary) == []
    assert summary["versions"] == [1, 2]
    assert summary["digests_equal"] is True
    assert summary["loss_gap_max"] == pytest.approx(0.001)
    assert len(summary["steps"]) == 2
    needed = {"version", "trainer_loss", "engine_loss", "paused_s", "bytes", "phases", "digests_equal"}
    assert needed <= summary["steps"][0].keys()
    assert summary["steps"][0]["phases"] == {"extract": 0.1}


@pytest.mark.parametrize(
    ("rows", "asked", "says"),
    [
        ([row(1), row(2, digests_equal=False)], 2, "version 2: the engine's weights differ"),
        ([row(1), row(2, engine_loss=3.02)], 2, "differ by more than 0.01"),
        ([row(1), row(2, trainer_loss=4.5, engine_loss=4.5)], 2, "did not fall"),
        ([row(1, trainer_loss=4, engine_loss=4), row(2, trainer_loss=4, engine_loss=4)], 2, "did not fall"),
        ([row(1), row(2)], 3, "2 of 3 steps"),
        ([], 1, "0 of 1 steps"),
        ([row(1), row(2, engine_loss=math.nan)], 2, "no finite number"),
        ([row(1), row(2, trainer_loss=math.inf, engine_loss=math.inf)], 2, "no finite number"),
        ([row(1), row(1, trainer_loss=3, engine_loss=3)], 2, "version 1 came after version 1"),
    ],
)
def test_each_fault_is_one_problem(rows: list[StepRow], asked: int, says: str) -> None:
    found = problems(*rows, asked=asked)
    assert [says in problem for problem in found] == [True], found


def test_unprovable_is_told_and_no_fault() -> None:
    rows = [row(1), row(2, digests_equal=None, unprovable="the engine repacked them")]
    summary = summarize(rows, num_steps_asked=2)
    assert summary["digests_equal"] is None
    assert summary["steps"][1]["unprovable"] == "the engine repacked them"
    assert verdict(summary) == []
    assert summarize([*rows, row(3, digests_equal=False)], num_steps_asked=3)["digests_equal"] is False
    assert summarize([], num_steps_asked=0)["digests_equal"] is None


def test_pauses_of_deltas_and_of_full_versions_are_told_apart() -> None:
    """The first version is neither: an engine loads it as it would by itself."""
    rows = [
        row(number, paused_s=paused_s, density=density)
        for number, paused_s, density in (
            (1, 9.0, None),
            (2, 0.1, 0.01),
            (3, 0.3, 0.01),
            (4, 0.8, None),
            (5, 0.2, 0.01),
        )
    ]
    summary = summarize(rows, num_steps_asked=5, by_deltas=True)
    assert (summary["paused_delta_s"], summary["paused_full_s"], summary["paused_first_s"]) == (0.2, 0.8, 9.0)
    summary = summarize(rows[:1], num_steps_asked=1)
    assert (summary["paused_delta_s"], summary["paused_full_s"]) == (None, None)


any_float = st.floats(allow_nan=True, allow_infinity=True)
any_row = st.builds(
    row,
    st.integers(min_value=0, max_value=9),
    trainer_loss=any_float,
    engine_loss=any_float,
    paused_s=any_float,
    phases_s=st.dictionaries(st.sampled_from(["load", "pack"]), any_float),
    digests_equal=st.sampled_from([True, False, None]),
    sample=st.text(),
)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # other tests may hold the cores
@given(st.lists(any_row, max_size=5))
def test_any_run_is_valid_json_and_its_verdict_survives_it(rows: list[StepRow]) -> None:
    summary = summarize(rows, num_steps_asked=3)
    told = json.loads(json.dumps(summary, allow_nan=False))
    assert verdict(told) == verdict(summary)
    if any(not math.isfinite(one.trainer_loss) or one.digests_equal is False for one in rows) or len(rows) < 3:
        assert verdict(told)
    if any(math.isnan(one.loss_gap) for one in rows):
        assert told["loss_gap_max"] is None


def test_the_file_is_the_summary(tmp_path: Path) -> None:
    summary = summarize([row(1)], num_steps_asked=1)
    assert json.loads(write_summary(summary, tmp_path / "s.json").read_text()) == summary
