"""What the log says of a model's syncs: who is awaited is told once a version, and a failure is never kept back."""

from __future__ import annotations

import logging

import pytest

from tests.standins.threads import logged_here
from weightsync.control.sync_log import SyncLog
from weightsync.errors import NoEnginesError, StateError
from weightsync.types import Version


def awaited(whom: str) -> NoEnginesError:
    error = NoEnginesError(f"waits for {whom}")
    error.waits = True
    return error


def said(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    """Level and words of each line since the last look."""
    found = [(record.levelname, record.getMessage()) for record in logged_here(caplog)]
    caplog.clear()
    return found


def test_who_is_awaited_is_told_once_a_version_and_no_error_is_kept_back(caplog: pytest.LogCaptureFixture) -> None:
    """Seen red: what failed behind a wait was given up without an error; a later version's wait was told nobody."""
    caplog.set_level(logging.INFO)
    log, first, second = SyncLog("actor"), *(Version(run_id="r", number=number) for number in (1, 2))
    for _ in range(3):
        log.failed(first, awaited("a"))
    assert said(caplog) == [("WARNING", "model actor: r/1 is not served: waits for a")]
    log.given_up(first, "waits for a", dark=True)
    assert said(caplog) == []
    log.failed(second, awaited("a"))
    assert said(caplog) == [("WARNING", "model actor: r/2 is not served: waits for a")]
    log.failed(second, StateError("no memory"))
    log.given_up(second, "no memory", dark=True)
    assert [level for level, _ in said(caplog)] == ["WARNING", "ERROR"]
    log.failed(second, NoEnginesError("nobody takes part"))
    log.given_up(second, "nobody takes part", dark=False)
    assert [level for level, _ in said(caplog)] == ["WARNING", "ERROR"]


@pytest.mark.parametrize("over", ["served", "lost"])
def test_what_was_awaited_is_over(over: str, caplog: pytest.LogCaptureFixture) -> None:
    log, version = SyncLog("actor"), Version(run_id="r", number=1)
    log.failed(version, awaited("a"))
    if over == "served":
        log.served(version, 0.5)
    else:
        log.lost(1, OSError("no thread"))
    caplog.clear()
    log.given_up(version, "why", dark=True)
    assert said(caplog) == [("ERROR", "model actor: r/1 is not served after all retries: nobody answers (why)")]
