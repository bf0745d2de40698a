"""LongPoll: who is between two requests when an agent ends. Without a server."""

from __future__ import annotations

import asyncio

import pytest
from starlette.requests import Request

from weightsync.agent import long_poll
from weightsync.agent.long_poll import LongPoll
from weightsync.handles.fanout import in_thread

HOST, OTHER = "10.0.0.1", "10.0.0.2"


async def forever() -> dict[str, str]:
    """What a client says that stays."""
    await asyncio.Event().wait()
    return {}


def asks(waiting: LongPoll, *followers: tuple[str, int]) -> None:
    """A request of each, from its address and port; they wait, and are answered at the same moment."""

    async def ask() -> None:
        news = asyncio.Event()
        waits = [
            asyncio.create_task(
                waiting.until(news.is_set, Request({"type": "http", "client": each}, forever), wait_s=30.0)
            )
            for each in followers
        ]
        await asyncio.sleep(0)  # each has begun
        news.set()
        waiting.changed()
        await asyncio.gather(*waits)

    asyncio.run(ask())


def test_a_follower_comes_back_by_another_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen red: it was known by its port, so nobody was seen to come back, and each end took two seconds."""
    monkeypatch.setattr(long_poll, "_BACK_S", 3600.0)
    waiting = LongPoll()
    asks(waiting, (HOST, 1), (HOST, 2), (OTHER, 1))
    waiting.close()
    closing = in_thread(waiting.close_for_followers, name="closes")
    asks(waiting, (OTHER, 2))
    asks(waiting, (HOST, 3))
    with pytest.raises(TimeoutError):  # two of one address were answered
        closing.result(0.1)
    asks(waiting, (HOST, 4))
    closing.result(20)


def test_nobody_who_is_gone_keeps_an_end_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_poll, "_BACK_S", 0.0)
    waiting = LongPoll()
    asks(waiting, (HOST, 1))
    waiting.close_for_followers()
