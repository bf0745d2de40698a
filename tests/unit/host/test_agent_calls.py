"""Agents: how long a grant may take."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from weightsync.errors import DeadlineExceededError, TransferAbortedError
from weightsync.handles.fanout import in_thread
from weightsync.host import agent_calls
from weightsync.host.agent_calls import _MAX_PATIENCE_S, CALL_S, Agents
from weightsync.types import Deadline

SLOW, LONG_S = "http://slow:1", 10.0


@pytest.fixture
def agents() -> Iterator[Agents]:
    made = Agents(receiver_id="r", model_id="m", token=None, verify=True, transport=None, num_streams=1, stall_s=1.0)
    with contextlib.closing(made):
        yield made


class Slow:
    """An agent whose grant takes `needs_s`, by the test's clock."""

    def __init__(self, now: SimpleNamespace, needs_s: float) -> None:
        self._now = now
        self.needs_s = needs_s
        self.given_s: list[float] = []

    def request_transfer(self, request: Any, *, layouts: Any, timeout_s: float) -> str:
        self.given_s.append(round(timeout_s, 1))
        self._now.s += min(timeout_s, self.needs_s)
        if timeout_s < self.needs_s:
            raise DeadlineExceededError("as told")
        return "a grant"

    def close(self) -> None: ...


def test_a_grant_that_takes_long_is_given_longer(agents: Agents, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen red: the first one of a model of very many tensors was begun anew for ever over a slow link."""
    now = SimpleNamespace(s=0.0)
    slow: Any = Slow(now, 3.5 * CALL_S)
    monkeypatch.setattr(agent_calls, "time", SimpleNamespace(monotonic=lambda: now.s))
    monkeypatch.setattr(agents, "_check_answer", lambda *_: None)
    agents._clients[SLOW] = slow
    agents._registered.add(SLOW)
    for _ in range(2):
        with pytest.raises(DeadlineExceededError):
            agents.grant(SLOW, None, Deadline(1000.0), base=None)
    for needs_s in (3.5 * CALL_S, 0.1, 0.1):
        slow.needs_s = needs_s
        assert str(agents.grant(SLOW, None, Deadline(1000.0), base=None)) == "a grant"
    assert slow.given_s == [CALL_S, 2 * CALL_S, 4 * CALL_S, _MAX_PATIENCE_S, CALL_S], "twice what the last one took"
    slow.needs_s = 1000.0
    slow.given_s.clear()
    for left_s in (1000.0, 1000.0, 5.0, 1000.0, 1000.0, 1000.0):
        with pytest.raises(DeadlineExceededError):
            agents.grant(SLOW, None, Deadline(left_s), base=None)
    assert slow.given_s[2] == 5.0, "never longer than the pull may take"
    assert slow.given_s[3] == 4 * CALL_S, "and what it had no time for is no reason for more"
    assert slow.given_s[4:] == [_MAX_PATIENCE_S] * 2, "in between, another agent may take over"


def test_a_grant_that_is_waited_for_is_given_up_when_its_pull_is_cancelled(agents: Agents) -> None:
    """It may take as long as the pull: who closes the service does not wait for it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(LONG_S)
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        agents._registered.add(url)
        asking = in_thread(lambda: agents.grant(url, None, Deadline(1000.0), base=None), name="ask")
        connection, _ = server.accept()
        with connection:
            connection.settimeout(LONG_S)
            assert connection.recv(1), "it is asked"
            agents.cancel()
            error = asking.exception(CALL_S / 2)
        assert isinstance(error, TransferAbortedError)
        with pytest.raises(TransferAbortedError, match="cancelled"):
            agents.grant(url, None, Deadline(1000.0), base=None)
