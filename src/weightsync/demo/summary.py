"""What the demo proves: one row a step, the JSON summary of them all, and what is wrong with it."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

LOSS_GAP_TOLERANCE = 0.01
"""The most by which trainer's and engine's loss on the same text may differ: a vLLM engine computes in bf16."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepRow:
    """One step of the demo: train, push, serve.

    Attributes:
        version: the version that the engine reports it serves.
        trainer_loss: the trainer's loss on the held-out text, after this step.
        engine_loss: the engine's loss on the same text, with the weights it got.
        total_bytes: bytes of the model, once.
        phases_s: seconds by phase, summed over processes (phases overlap).
        paused_s: the longest time any engine answered nothing.
        digests_equal: True: proved from the engine's live bytes; False: they differ; None: can't be proved.
        sample: what the engine writes after the prompt.
        train_s: seconds of training before the push.
        sync_s: seconds of the push, from call to return.
        unprovable: why `digests_equal` is None.
        density: share of the elements that changed, where the version came as a delta.
        received_bytes: that were sent for it then.
    """

    version: int
    trainer_loss: float
    engine_loss: float
    total_bytes: int
    phases_s: Mapping[str, float]
    paused_s: float
    digests_equal: bool | None
    sample: str = ""
    train_s: float | None = None
    sync_s: float | None = None
    unprovable: str = ""
    density: float | None = None
    received_bytes: int | None = None

    @property
    def loss_gap(self) -> float:
        """How far the two losses are apart; NaN where one of them is."""
        return abs(self.trainer_loss - self.engine_loss)


def summarize(rows: Sequence[StepRow], *, num_steps_asked: int, by_deltas: bool = False) -> dict[str, Any]:
    """The summary as JSON-able data; numbers that are not finite are null.

    Returns:
        `steps` (a list, one object a step), `versions`, `digests_equal` (false if any step's is, else null if any
        can't be proved, else true), `loss_gap_max`, `num_steps_asked`, `loss_gap_tolerance`,
        `by_deltas` (whether deltas were asked for), `paused_delta_s` and `paused_full_s` (medians of the versions that
        came as deltas, and of the full ones behind the first; null without any), `paused_first_s` (of the first, which
        an engine loads as it would without us; null where that was a delta).
    """
    digests = [row.digests_equal for row in rows]
    gaps = [row.loss_gap for row in rows]
    return {
        "steps": [_step(row) for row in rows],
        "versions": [row.version for row in rows],
        "digests_equal": False if False in digests else None if None in digests or not digests else True,
        "loss_gap_max": largest_gap(gaps),
        "num_steps_asked": num_steps_asked,
        "loss_gap_tolerance": LOSS_GAP_TOLERANCE,
        "by_deltas": by_deltas,
        "paused_delta_s": _median([row.paused_s for row in rows if row.density is not None]),
        "paused_full_s": _median([row.paused_s for row in rows[1:] if row.density is None]),
        "paused_first_s": _median([row.paused_s for row in rows[:1] if row.density is None]),
    }


def verdict(summary: Mapping[str, Any]) -> list[str]:
    """What is wrong with a run, in words; empty where everything holds. The demo exits non-zero on any.

    An unprovable digest is not wrong by itself; a digest that differs, and a loss that is no number, are.
    """
    steps: Sequence[Mapping[str, Any]] = summary["steps"]
    problems: list[str] = []
    if len(steps) < summary["num_steps_asked"]:
        problems.append(f"{len(steps)} of {summary['num_steps_asked']} steps were done")
    for before, after in itertools.pairwise(steps):
        if after["version"] <= before["version"]:
            problems.append(f"version {after['version']} came after version {before['version']}")
    for step in steps:
        version, trainer, engine = step["version"], step["trainer_loss"], step["engine_loss"]
        if step["digests_equal"] is False:
            problems.append(f"version {version}: the engine's weights differ from the trainer's")
        if trainer is None or engine is None:
            problems.append(f"version {version}: a loss is no finite number (trainer {trainer}, engine {engine})")
        elif abs(trainer - engine) > summary["loss_gap_tolerance"]:
            problems.append(
                f"version {version}: trainer's loss {trainer:.4f} and engine's loss {engine:.4f} differ by more than "
                f"{summary['loss_gap_tolerance']:g}"
            )
    if summary.get("by_deltas") and not any(step["density"] for step in steps[1:]):
        problems.append("no version came as a delta")
    losses = [step["engine_loss"] for step in steps if step["engine_loss"] is not None]
    if len(losses) > 1 and losses[-1] >= losses[0]:
        problems.append(f"the engine's loss did not fall: {losses[0]:.4f} at first, {losses[-1]:.4f} at last")
    return problems


def write_summary(summary: Mapping[str, Any], path: str | os.PathLike[str]) -> Path:
    """Writes the summary as JSON.

    Raises:
        OSError: the file can't be written.
    """
    target = Path(path)
    target.write_text(json.dumps(summary, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    return target


def _step(row: StepRow) -> dict[str, Any]:
    facts = dataclasses.asdict(row)
    facts["bytes"], facts["phases"] = facts.pop("total_bytes"), facts.pop("phases_s")
    facts |= {"loss_gap": row.loss_gap, "unprovable": row.unprovable or None}
    facts["phases"] = {name: finite(seconds) for name, seconds in facts["phases"].items()}
    return {name: finite(fact) if isinstance(fact, float) else fact for name, fact in facts.items()}


def _median(values: Sequence[float]) -> float | None:
    return finite(statistics.median(values)) if values else None


def largest_gap(gaps: Sequence[float]) -> float | None:
    """None where there is none, or one is no finite number."""
    return finite(max(gaps, default=None, key=lambda gap: math.inf if math.isnan(gap) else gap))


def finite(value: float | None) -> float | None:
    """The number as JSON has it; None where it has none."""
    return value if value is not None and math.isfinite(value) else None
