"""The agent's process: what it tells a trainer that stands still, and how it ends."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from weightsync.agent import main
from weightsync.types import Version
from weightsync.types.agent_messages import Event, NotPublished, Published, TransferBegun, TransferDone


class Channel:
    """A trainer that takes everything."""

    def __init__(self) -> None:
        self.told: list[Event] = []

    def send(self, body: bytes) -> bool:
        self.told.append(msgspec.json.decode(body, type=Event))
        return True


@pytest.fixture
def outbox() -> Iterator[main._Outbox]:
    made = main._Outbox()
    yield made
    os.close(made.fd)


def test_what_became_of_a_version_is_told_behind_any_number_of_transfers(outbox: main._Outbox) -> None:
    """Seen red: a trainer that had stood still waited for a version that was served."""
    one, two = (Version(run_id="r", number=number) for number in (1, 2))
    for _ in range(main._MAX_EVENTS + 1):
        outbox.put(TransferDone(version=one, receiver="x", ok=True))
    outbox.put(Published(version=one))
    outbox.put(NotPublished(version=two, error={}))
    channel: Any = Channel()
    assert not outbox.send(channel)
    assert len(channel.told) == main._MAX_EVENTS + 2
    assert channel.told[-2:] == [Published(version=one), NotPublished(version=two, error={})]


def test_a_transfer_that_was_told_to_begin_has_room_for_its_end(outbox: main._Outbox) -> None:
    """A trainer that hears of no end would wait for the receiver."""
    version = Version(run_id="r", number=1)
    for number in range(main._MAX_EVENTS):
        outbox.put(TransferBegun(version=version, receiver=f"r{number}"))
    for number in range(main._MAX_EVENTS):
        outbox.put(TransferDone(version=version, receiver=f"r{number}", ok=True))
    channel: Any = Channel()
    assert not outbox.send(channel)
    begun = {each.receiver for each in channel.told if isinstance(each, TransferBegun)}
    ended = {each.receiver for each in channel.told if isinstance(each, TransferDone)}
    assert len(begun) == main._MAX_EVENTS // 2
    assert begun <= ended


def test_an_agent_that_can_have_no_thread_ends_with_its_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen red: it stayed, with nobody to tell it anything."""

    def fails(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    ended: list[str] = []
    monkeypatch.setattr(main, "_end", lambda: ended.append("ended"))
    monkeypatch.setattr(threading.Thread, "start", fails)
    main._end_with(iter(()), [lambda: None])
    assert ended == ["ended"]
