"""An offload's report is one line that a log wants; what interrupts a gathered offload comes out of it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator

import pytest
import torch

from weightsync.errors import StateError, WeightSyncError
from weightsync.extract.module import ModuleWeightExtractor
from weightsync.observe import Recorder
from weightsync.trainer.offload_steps import OffloadReport, OffloadSteps
from weightsync.trainer.ranks import TrainingRanks
from weightsync.types import Version, WeightChunk

REPORT = OffloadReport(
    version=Version(run_id="run", number=3), published=True, path="shards", seconds=0.144, waited_s=0.0,
    copied_bytes=33_000_000,
)  # fmt: skip


def test_a_publication() -> None:
    assert str(REPORT) == "v3: 33.0 MB copied in 0.14 s, published"


def test_one_that_waited_and_one_that_did_not_come_about() -> None:
    waited = dataclasses.replace(REPORT, waited_s=0.05)
    assert str(waited) == "v3: 33.0 MB copied in 0.14 s, of which it waited 50 ms for a segment, published"
    late = dataclasses.replace(waited, published=False, copied_bytes=0, why="no segment came free")
    assert str(late).endswith("not published: no segment came free")


class Many(ModuleWeightExtractor):
    """Chunks without an end."""

    def extract_weights(self, dtype: str | None = None) -> Iterator[WeightChunk]:
        while True:
            yield WeightChunk(names=("weight",), tensors=(self.model.weight.detach(),))


class Interrupted:
    """A writer that is interrupted at its first tensor."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def write(self, *_: object) -> int:
        raise self._error


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3), StateError("no room"), OSError("disk")])
def test_what_ends_a_gathered_offload_comes_out_at_once(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen red: Ctrl-C was an error of the deadline, when that was over, and a loop that takes those trained on."""
    steps = OffloadSteps(
        TrainingRanks(timeout_s=10), ["here"], model_id="m", dtype=None, guard_s=1.0, leases=False, timeout_s=60.0,
        recorder=Recorder("t"),
    )  # fmt: skip
    monkeypatch.setattr(steps, "_writer", Interrupted(error))
    begun_s = time.monotonic()
    with pytest.raises(type(error) if not isinstance(error, OSError) else WeightSyncError) as caught:
        steps._write_gathered(Many(torch.nn.Linear(2, 2)))
    assert time.monotonic() - begun_s < 30.0
    assert caught.value is error or "disk" in str(caught.value)
