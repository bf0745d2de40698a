"""The handles that a verb makes of URLs and modules, and how it closes them."""

from __future__ import annotations

import logging
import threading

import pytest
import torch

from weightsync.errors import EngineError
from weightsync.types import EngineHandle
from weightsync.verbs.engines import close_all, handle_of


class Closed:
    """A handle whose `close` waits for the other's."""

    def __init__(self, engine_id: str, together: threading.Barrier) -> None:
        self.engine_id = engine_id
        self._together = together

    def close(self) -> None:
        self._together.wait(20.0)


class Failing(Closed):
    def close(self) -> None:
        super().close()
        raise EngineError("its folder is gone")


def test_all_are_closed_at_the_same_time(caplog: pytest.LogCaptureFixture) -> None:
    """Seen red: engines that did not answer took 10 s each, one behind the other."""
    both = threading.Barrier(2)
    handles: list[EngineHandle] = [Closed("same", both), Failing("same", both)]  # type: ignore[list-item]
    with caplog.at_level(logging.WARNING):
        close_all(handles)
    assert [record.getMessage() for record in caplog.records] == [
        "an engine's handle was not closed: its folder is gone [peer=same#1]"
    ]


def test_what_is_made_here_is_ours_to_close_and_a_handle_is_its_users() -> None:
    made: list[EngineHandle] = []
    module = handle_of(torch.nn.Linear(2, 2), name="module-0", token=None, verify=True, made=made)
    given = handle_of(module, name="module-1", token=None, verify=True, made=made)
    assert (given, made) == (module, [module])
    close_all(made)
    close_all(made)


def test_where_no_thread_can_be_started_they_are_closed_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """As at the end of Python 3.12. Seen red: none was closed, and a vLLM that stood paused was left so."""
    alone = threading.Barrier(1)
    handles: list[EngineHandle] = [Closed("a", alone), Failing("b", alone)]  # type: ignore[list-item]

    def none(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    closed: list[str] = []
    monkeypatch.setattr(Closed, "close", lambda handle: closed.append(handle.engine_id))
    monkeypatch.setattr(threading.Thread, "start", none)
    close_all(handles)
    assert closed == ["a", "b"]
