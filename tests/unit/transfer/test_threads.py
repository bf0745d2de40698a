"""Threads of a read: fewer where no more can be had, and each is waited for."""

from __future__ import annotations

import threading

import pytest

from weightsync.errors import StateError
from weightsync.transfer.threads import start_threads


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the threads that can be started, one each; whoever is not named can not."""
    names: list[str] = []
    start = threading.Thread.start

    def starts(thread: threading.Thread) -> None:
        if thread.name.startswith("read-") and thread.name not in names:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", starts)
    return names


def test_those_that_can_be_had_do_it(room: list[str]) -> None:
    room += ["read-0", "read-1"]
    ran: list[str] = []
    for thread in (threads := start_threads(lambda: ran.append(threading.current_thread().name), 6, name="read")):
        thread.join()
    assert sorted(ran) == room
    assert [thread.name for thread in threads] == room


def test_not_one_can_be_had(room: list[str]) -> None:
    with pytest.raises(StateError, match="no thread can be started to read: can't start new thread"):
        start_threads(lambda: None, 6, name="read")
