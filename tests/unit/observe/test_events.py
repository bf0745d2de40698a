from __future__ import annotations

import logging
import threading
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.standins.threads import logged_here
from weightsync.errors import InvalidRequestError, TransferError
from weightsync.observe import Recorder, now_s, paused_s, pauses, phases_s
from weightsync.observe.events import _size_bytes
from weightsync.types import PhaseRecord


def record(name: str, start_s: float, end_s: float, track: str = "engine-0") -> PhaseRecord:
    return PhaseRecord(name=name, start_s=start_s, end_s=end_s, track=track)


def test_a_phase_is_timed_in_seconds_since_the_epoch() -> None:
    recorder = Recorder("trainer")
    before = time.time()
    with recorder.phase("extract", detail="chunk 3"):
        time.sleep(0.02)
    (seen,) = recorder.records()
    assert (seen.name, seen.track, seen.detail) == ("extract", "trainer", "chunk 3")
    assert 0.02 <= seen.end_s - seen.start_s < 10
    assert abs(seen.start_s - before) < 10


def test_a_body_that_raises_is_recorded_and_its_error_passes() -> None:
    recorder = Recorder("trainer")
    with pytest.raises(TransferError), recorder.phase("transfer", detail="chunk 1"):
        raise TransferError("cut")
    with pytest.raises(KeyboardInterrupt), recorder.phase("transfer"):
        raise KeyboardInterrupt
    assert [seen.detail for seen in recorder.records()] == [
        "chunk 1, failed: TransferError",
        "failed: KeyboardInterrupt",
    ]


def test_a_wall_clock_set_back_makes_no_negative_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder("trainer")
    with recorder.phase("extract"):
        monkeypatch.setattr(time, "time", lambda: 0.0)
    (seen,) = recorder.records()
    assert seen.end_s >= seen.start_s > 1e9
    assert now_s() >= seen.end_s


def test_drain_hands_out_each_record_once_and_records_keeps_them() -> None:
    recorder = Recorder("trainer")
    recorder.add(record("load", 1, 2))
    recorder.extend([record("load", 2, 3), record("load", 3, 4)])
    assert len(recorder.records()) == 3
    assert [seen.start_s for seen in recorder.drain()] == [1, 2, 3]
    assert recorder.drain() == recorder.records() == ()


def test_the_oldest_records_go_and_are_counted() -> None:
    recorder = Recorder("trainer", max_bytes=3 * _size_bytes(record("load", 0, 1)))
    recorder.extend(record("load", index, index + 1) for index in range(5))
    assert [seen.start_s for seen in recorder.records()] == [2, 3, 4]
    assert recorder.num_dropped == 2


def test_memory_is_bounded_by_bytes_whatever_texts_there_are() -> None:
    recorder = Recorder("trainer", max_bytes=20_000)
    for index in range(100):
        recorder.extend(record("load", index, index + 1) for _ in range(10))
        recorder.add(PhaseRecord(name="x" * 5000, start_s=index, end_s=index, track="t"))
        kept = recorder.records()
        assert sum(len(each.name) for each in kept) <= 20_000
        assert kept[-1].start_s == index, "the newest is kept"
    assert len(recorder.records()) + recorder.num_dropped == 1100
    recorder.add(PhaseRecord(name="x" * 100_000, start_s=0, end_s=0, track="t"))
    assert len(recorder.drain()) == 1
    recorder.extend(record("load", 0, 1) for _ in range(20))
    assert len(recorder.records()) == 20, "what was drained takes no room"


@pytest.mark.parametrize("arguments", [{"track": ""}, {"track": "x", "max_bytes": 0}])
def test_a_senseless_recorder_is_refused(arguments: dict[str, object]) -> None:
    with pytest.raises(InvalidRequestError):
        Recorder(**arguments)  # type: ignore[arg-type]


def test_a_failing_subscriber_breaks_nothing_and_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorder("trainer")
    seen: list[str] = []

    def fail(_: PhaseRecord) -> None:
        raise ValueError("a bug of theirs")

    recorder.subscribe(fail)
    recorder.subscribe(lambda one: seen.append(one.name))
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            with recorder.phase("extract"):
                pass
    assert seen == ["extract"] * 3
    assert len(recorder.records()) == 3
    (said,) = [each.getMessage() for each in logged_here(caplog) if each.name.startswith("weightsync")]
    assert "trainer" in said


def test_unsubscribing_ends_it_and_twice_is_harmless() -> None:
    recorder = Recorder("trainer")
    seen: list[PhaseRecord] = []
    stop = recorder.subscribe(seen.append)
    recorder.add(record("load", 0, 1))
    stop()
    stop()
    recorder.add(record("load", 1, 2))
    assert len(seen) == 1


def test_a_subscriber_may_use_the_recorder() -> None:
    recorder = Recorder("trainer")
    sizes: list[int] = []
    recorder.subscribe(lambda _: sizes.append(len(recorder.records())))
    recorder.add(record("load", 0, 1))
    assert sizes == [1]


def test_many_threads_lose_nothing() -> None:
    recorder = Recorder("trainer")
    told: list[PhaseRecord] = []
    recorder.subscribe(told.append)
    taken: list[PhaseRecord] = []
    go = threading.Barrier(5)

    def work() -> None:
        go.wait()
        for _ in range(200):
            with recorder.phase("load"):
                pass

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    go.wait()
    while any(thread.is_alive() for thread in threads):
        taken += recorder.drain()
    taken += recorder.drain()
    assert len(taken) + recorder.num_dropped == len(told) == 800


def test_phases_are_summed_by_name() -> None:
    assert phases_s([record("load", 0, 1), record("load", 5, 5.5), record("pack", 9, 8)]) == {"load": 1.5, "pack": 0.0}


def test_a_pause_lasts_to_the_end_of_resume_and_the_worst_track_counts() -> None:
    records = [
        record("resume", 4, 5, "b"),
        record("pause", 1, 2, "b"),
        record("commit", 2, 4, "b"),
        record("pause", 1, 1.5, "a"),
        record("resume", 1.5, 2, "a"),
        record("pause", 10, 11, "a"),
        record("resume", 11, 12.5, "a"),
    ]
    assert pauses(records) == {"a": ((1, 2), (10, 12.5)), "b": ((1, 5),)}
    assert paused_s(records) == 4
    assert paused_s([]) == 0
    assert paused_s([record("resume", 1, 2)]) == 0


def test_a_pause_without_a_resume_lasts_as_long_as_its_track() -> None:
    records = [record("pause", 1, 2), record("load", 2, 7), record("pause", 3, 4), record("load", 0, 99, "other")]
    assert paused_s(records) == 6


times = st.floats(min_value=0, max_value=1e6, allow_nan=False)
any_record = st.builds(
    lambda name, start, length, track: record(name, start, start + length, track),
    st.sampled_from(["pause", "resume", "commit"]),
    times,
    st.floats(min_value=0, max_value=100),
    st.sampled_from(["a", "b"]),
)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # other tests may hold the cores
@given(st.lists(any_record, max_size=30), st.randoms())
def test_pauses_are_disjoint_within_the_track_and_know_no_order(records: list[PhaseRecord], random: object) -> None:
    found = pauses(records)
    for track, spans in found.items():
        own = [one for one in records if one.track == track]
        assert all(start <= end for start, end in spans)
        assert spans[0][0] == min(one.start_s for one in own if one.name == "pause")
        assert max(end for _, end in spans) <= max(one.end_s for one in own)
        assert [start for start, _ in spans] == sorted(start for start, _ in spans)
    assert set(found) == {one.track for one in records if one.name == "pause"}
    assert paused_s(records) >= 0
