"""An offload's report is one line that a log wants."""

from __future__ import annotations

import dataclasses

from weightsync.trainer.offload_steps import OffloadReport
from weightsync.types import Version

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
