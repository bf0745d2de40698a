"""The test's own threads beside others of its process, which go on: what they log; some that can't be started."""

from __future__ import annotations

import logging
import threading

import pytest


def logged_here(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """What this thread has logged: one that another test has left may still write."""
    return [record for record in caplog.records if record.thread == threading.get_ident()]


def fail_starts(patched: pytest.MonkeyPatch, *names: str, times: int | None = None) -> list[str]:
    """The next threads whose names begin so can't be started; who they were.

    Args:
        patched: takes it back.
        names: beginnings of names.
        times: how many; None: all.
    """
    original, failed = threading.Thread.start, []

    def start(thread: threading.Thread) -> None:
        if thread.name.startswith(names) and (times is None or len(failed) < times):
            failed.append(thread.name)
            raise RuntimeError("can't start new thread")
        original(thread)

    patched.setattr(threading.Thread, "start", start)
    return failed
