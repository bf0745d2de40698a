"""SinkProcess: what becomes of a writer that can't be started. The rest is in `tests/multiproc/test_store.py`."""

from __future__ import annotations

import time

import msgspec
import pytest

from tests.standins.threads import logged_here
from weightsync.errors import BusyError, StateError, StoreAuthError, WeightSyncError
from weightsync.trainer import sink_process
from weightsync.trainer.sink_process import SinkProcess
from weightsync.types import Version
from weightsync.types.sink import Claimed, SinkConfig, Stored, Trouble


def test_a_writer_that_can_not_be_started_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Seen red: nothing was stored any more, and nothing said why."""
    tried: list[str] = []

    def none_left(module: str, *_: object, **__: object) -> None:
        tried.append(module)
        raise BlockingIOError("no more processes")

    monkeypatch.setattr(sink_process, "started_beside", none_left)
    monkeypatch.setattr(sink_process, "_FIRST_S", 0.01)
    monkeypatch.setattr(sink_process, "_START_S", 0.1)
    sink = SinkProcess(SinkConfig(store="file:///nowhere", model_id="m", run_id="r", agents=()))
    sink.start(wait_s=0.0)
    try:
        end = time.monotonic() + 20
        while len(tried) < 3:
            assert time.monotonic() < end
            time.sleep(0.01)  # between two looks
        assert "no more processes" in str(sink.error)
        assert "no more processes" in (sink.wait_stored(1, timeout_s=0.1) or "")
    finally:
        sink.close()
    assert "could not be started: no more processes; it is started again in" in caplog.text
    assert not sink._thread.is_alive()


@pytest.mark.parametrize(("error", "is_over"), [(BusyError("no memory"), False), (StateError("broken"), True)])
def test_a_writer_that_lacked_memory_before_its_claim_is_started_again(error: WeightSyncError, is_over: bool) -> None:
    """Seen red: it counted as failed for good, as every trouble that is not the store's silence."""
    sink = SinkProcess(SinkConfig(store="file:///nowhere", model_id="m", run_id="r", agents=()))
    sink._hear(msgspec.json.encode(Trouble(error=error.to_dict())))
    assert isinstance(sink.error, type(error))
    assert (sink.failed is not None) == is_over


def test_a_store_that_refuses_for_weeks_is_one_line_until_it_takes_a_version(caplog: pytest.LogCaptureFixture) -> None:
    """Seen red: one each 15 s."""
    sink = SinkProcess(SinkConfig(store="file:///nowhere", model_id="m", run_id="r", agents=()))
    refused = Trouble(error=StoreAuthError("expired").to_dict())
    stored = Stored(version=Version(run_id="r", number=1), is_anchor=True, nbytes=1, total_bytes=1, seconds=0.1)
    for event in (Claimed(epoch=1), refused, refused, refused, stored, refused, refused):
        sink._hear(msgspec.json.encode(event))
    assert len([record for record in logged_here(caplog) if record.levelname == "WARNING"]) == 2
