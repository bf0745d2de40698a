from __future__ import annotations

import itertools
import json
import math
import os
import stat
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from weightsync.observe import Recorder, chrome_trace, write_chrome_trace
from weightsync.observe.lanes import layout
from weightsync.types import PhaseRecord


def record(name: str, start_s: float, end_s: float, track: str) -> PhaseRecord:
    return PhaseRecord(name=name, start_s=start_s, end_s=end_s, track=track)


def names(trace: dict, what: str) -> dict[tuple[int, int], str]:
    return {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in trace["traceEvents"]
        if event["ph"] == "M" and event["name"] == f"{what}_name"
    }


def test_tracks_become_processes_and_threads() -> None:
    records = [
        record("load", 1.7e9 + 0.5, 1.7e9 + 0.75, "engine-0/worker-1"),
        record("extract", 1.7e9, 1.7e9 + 1, "trainer"),
        record("load", 1.7e9, 1.7e9 + 1, "engine-0/worker-0/copy"),
    ]
    trace = chrome_trace(records)
    assert sorted(names(trace, "process").values()) == ["engine-0", "trainer"]
    assert sorted(names(trace, "thread").values()) == ["main", "worker-0/copy", "worker-1"]
    events = {
        names(trace, "thread")[event["pid"], event["tid"]]: event
        for event in trace["traceEvents"]
        if event["ph"] == "X"
    }
    assert (events["worker-1"]["ts"], events["worker-1"]["dur"]) == (500_000, 250_000)
    assert events["worker-1"]["pid"] == events["worker-0/copy"]["pid"] != events["main"]["pid"]
    assert trace["otherData"]["start_s"] == 1.7e9


def test_overlapping_phases_get_threads_of_their_own_and_kinds_stay_together() -> None:
    records = [
        record("extract", 0, 2, "trainer"),
        record("send", 1, 3, "trainer"),
        record("extract", 3, 5, "trainer"),
        record("send", 4, 6, "trainer"),
        record("send", 8, 9, "trainer"),
    ]
    trace = chrome_trace(records)
    threads = names(trace, "thread")
    assert sorted(threads.values()) == ["main", "main (2)"]
    placed = [
        (event["name"], threads[event["pid"], event["tid"]]) for event in trace["traceEvents"] if event["ph"] == "X"
    ]
    assert set(placed) == {("extract", "main"), ("send", "main (2)")}


def test_touching_phases_share_a_lane() -> None:
    (track,) = layout([record("a", 0, 1, "t"), record("b", 1, 2, "t"), record("c", 2, 2, "t")])
    assert len(track.lanes) == 1


def test_trainers_come_first_and_numbers_in_order() -> None:
    tracks = ["engine-10", "engine-2", "trainer/rank-1", "engine-2/worker-0", "trainer/rank-0"]
    order = [track.name for track in layout([record("a", 0, 1, track) for track in tracks])]
    assert order == ["trainer/rank-0", "trainer/rank-1", "engine-2", "engine-2/worker-0", "engine-10"]


def test_nonsense_times_spoil_nothing() -> None:
    """Seen red: a time of 1e300 s ended each later trace of that process in an `OverflowError`, and one of -1e308 s
    made its pauses infinite."""
    records = [record("a", math.nan, 1, "t"), record("b", 1, math.inf, "t"), record("c", 5, 4, "t")]
    records += [record("d", 1e300, 1e300, "t"), record("pause", -1e308, 1, "t"), record("resume", 2, 1e308, "t")]
    recorder = Recorder("t")
    recorder.extend(records)
    assert [kept.name for kept in recorder.records()] == ["c"]
    (event,) = (event for event in chrome_trace(records)["traceEvents"] if event["ph"] == "X")
    assert (event["name"], event["ts"], event["dur"]) == ("c", 0, 0)
    assert chrome_trace([])["traceEvents"] == []


def test_the_file_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "timeline.json"
    write_chrome_trace([record("a", 0, 1, "t")], path)
    before = path.read_bytes()
    assert json.loads(before)["displayTimeUnit"] == "ms"

    def fail(self: int, mode: int) -> None:  # when it has been written, in part or whole
        raise OSError("disk full")

    monkeypatch.setattr(os, "fchmod", fail)
    with pytest.raises(OSError, match="disk full"):
        write_chrome_trace([record("b", 0, 1, "t")], path)
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["timeline.json"]


spans = st.builds(
    lambda start_ms, length_ms, track, name: record(
        name, 1.7e9 + start_ms / 1000, 1.7e9 + (start_ms + length_ms) / 1000, track
    ),
    st.floats(min_value=0, max_value=300),
    st.floats(min_value=0, max_value=100),
    st.sampled_from(["a", "a/b", "c"]),
    st.sampled_from(["x", "y", "wait z"]),
)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # other tests may hold the cores
@given(st.lists(spans, max_size=40))
def test_no_two_events_of_a_thread_overlap_and_none_is_lost(records: list[PhaseRecord]) -> None:
    trace = json.loads(json.dumps(chrome_trace(records), allow_nan=False))
    by_thread: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            start, length = round(event["ts"] * 1000), round(event["dur"] * 1000)
            by_thread.setdefault((event["pid"], event["tid"]), []).append((start, start + length))
    assert sum(map(len, by_thread.values())) == len(records)
    for own in by_thread.values():
        own.sort()
        assert all(first[1] <= second[0] for first, second in itertools.pairwise(own))
    for track in layout(records):
        own = [span for lane in track.lanes for span in lane]
        # Some moment needs every lane: no lane is opened while another is free.
        depth = max(sum(other.start_ns <= span.start_ns < other.end_ns for other in own) for span in own)
        assert len(track.lanes) <= max(1, depth + sum(span.start_ns == span.end_ns for span in own))


def test_what_is_no_file_is_written_into(tmp_path: Path) -> None:
    """Seen red: it was replaced by a file, and as root /dev/null would be."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    link = tmp_path / "stdout"
    link.symlink_to(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        for path in (pipe, link):
            write_chrome_trace([record("load", 1.0, 2.0, "engine")], path)
            assert stat.S_ISFIFO(path.stat().st_mode)
            assert json.loads(os.read(reader, 1 << 16))["displayTimeUnit"] == "ms"
        assert link.is_symlink()
    finally:
        os.close(reader)
    assert sorted(tmp_path.iterdir()) == [pipe, link]


@pytest.mark.parametrize("path", ["/dev/stdout", "/dev/stderr"])
def test_the_commands_own_output_is_no_place_for_it(path: str) -> None:
    """Seen red: as root the link was replaced by a file; written into, the words of the command were mixed with it."""
    with pytest.raises(OSError, match="name a file"):
        write_chrome_trace([record("load", 1.0, 2.0, "engine")], path)
