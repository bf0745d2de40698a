"""A report is one line that a log wants."""

from __future__ import annotations

import dataclasses

import msgspec

from weightsync.types import SyncReport, Version
from weightsync.types.service import ModelStatus

REPORT = SyncReport(
    version=Version(run_id="run", number=3), engine_ids=("a",), lost={}, total_bytes=33_000_000, sent_bytes=400_000,
    num_deltas=1, full_because=None, num_chunks=1, seconds=0.144, paused_s=0.0823, phases_s={}, digests_equal=True,
    unprovable={},
)  # fmt: skip


def test_what_changed_alone_is_a_share() -> None:
    assert str(REPORT) == "v3: 0.4 MB (1.2 %) in 0.14 s, paused 82 ms, proved"


def test_little_and_nothing_are_told_as_they_are() -> None:
    small = dataclasses.replace(REPORT, num_deltas=0, sent_bytes=4_200, total_bytes=4_200)
    assert str(small).startswith("v3: 4.2 kB in")
    unchanged = dataclasses.replace(REPORT, sent_bytes=0)
    assert str(unchanged).startswith("v3: 0.0 kB (0.0 %) in")
    mapped = ModelStatus(run_id="run", version=3, pull_s=0.1, load_s=0.04, paused_s=0.08, total_bytes=33_000_000)
    assert str(mapped).startswith("v3: 33.0 MB mapped in")


def test_all_of_it_an_engine_that_proves_nothing_and_one_that_is_lost() -> None:
    report = dataclasses.replace(
        REPORT,
        num_deltas=0,
        sent_bytes=33_000_000,
        digests_equal=None,
        unprovable={"vllm": "repacked"},
        lost={"b": "x"},
    )
    unproved = "unproved by vllm (report.unprovable says why)"  # seen red: without where the reason is
    assert str(report) == f"v3: 33.0 MB in 0.14 s, paused 82 ms, {unproved}, without b"
    asked = dataclasses.replace(REPORT, num_deltas=0, sent_bytes=33_000_000, full_because="it has grown")
    assert str(asked) == "v3: 33.0 MB in 0.14 s, paused 82 ms, proved; all of it: it has grown"


def test_what_a_host_serves() -> None:
    """Seen red: bytes and seconds of a version that could not be loaded stood behind the served one's number."""
    status = ModelStatus(
        run_id="run", version=3, pull_s=0.1, load_s=0.044, paused_s=0.0823, received_bytes=400_000,
        total_bytes=33_000_000, num_deltas=1,
    )  # fmt: skip
    assert str(status) == "v3: 0.4 MB (1.2 %) in 0.14 s, paused 82 ms, proved"
    assert str(ModelStatus()) == "no version yet"
    assert str(msgspec.structs.replace(status, fetched="run/3")) == str(status)
    other = msgspec.structs.replace(status, fetched="other/1", engines={"one": None})
    assert str(other) == "v3: served, and other/1 was fetched since; not served by one now"
    assert str(ModelStatus(version=3)) == "v3: from before this service started, by its record"
