"""Upstream: asks agents what they have, each in a thread of its own, with one request that waits there until there is
something newer. What is asked, and what an answer means, is in `followed`."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Callable

from weightsync.clients.agent import AgentClient
from weightsync.clients.store import StoreClient
from weightsync.errors import DeadlineExceededError, EngineUnreachableError, StateError
from weightsync.handles.fanout import in_thread
from weightsync.host.agent_state import SHORTEST_S, Ask
from weightsync.host.followed import FollowedRun
from weightsync.types.transfer_messages import AgentVersion

_ANSWER_S = 3.0
_GONE = (EngineUnreachableError, DeadlineExceededError)

_logger = logging.getLogger(__name__)


@dataclasses.dataclass(kw_only=True, eq=False)
class _Line:
    """The thread of one agent.

    Attributes:
        client: its connection; None: it has to be made anew.
        asked_s: when its last request began.
        ends_s: until when that one waits there; None: it does not.
    """

    client: AgentClient | StoreClient | None = None
    asked_s: float = 0.0
    ends_s: float | None = None

    def interrupt(self) -> AgentClient | StoreClient | None:
        """Its client, to be closed: that ends the request under way, whose answer does not count."""
        client, self.client, self.ends_s = self.client, None, None
        return client


class Upstream:
    """The agents of one model. Thread-safe, under its owner's lock.

    Args:
        model_id: that agents have to have.
        run: decides what is asked.
        changed: the owner's lock; notified when agents are to be looked at.
        connect: makes a client of an agent.
        on_answer: called without the lock after each answer, or failure.
        clock: that of `run`.
    """

    def __init__(
        self,
        model_id: str,
        run: FollowedRun,
        changed: threading.Condition,
        *,
        connect: Callable[[str], AgentClient | StoreClient],
        on_answer: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._model_id = model_id
        self._run = run
        self._changed = changed
        self._connect = connect
        self._told = on_answer
        self._clock = clock
        self._lines: dict[str, _Line] = {}
        self._closed = False

    def look(self) -> None:
        """There may be a reason to ask somebody: a thread is started where there is none, and a request that would wait
        for too long is ended. Under the lock.

        Raises:
            StateError: no thread can be started; the next call tries again.
        """
        with contextlib.ExitStack() as last:  # one that can have no thread keeps no other from being asked
            last.callback(self._changed.notify_all)
            for endpoint in () if self._closed else tuple(self._run.agents):
                ask, line = self._run.next_ask(endpoint), self._lines.get(endpoint)
                if ask is None:
                    continue
                if line is None:
                    last.callback(self._start, endpoint)
                elif line.ends_s is not None and max(ask.at_s, self._clock()) + ask.wait_s < line.ends_s - SHORTEST_S:
                    client = line.interrupt()
                    if isinstance(client, StoreClient):  # closing it takes a call, and this is under the lock
                        in_thread(client.close, name=f"weightsync-let-go-{self._model_id}")
                    elif client is not None:
                        client.close()

    def close(self) -> None:
        """Ends the requests under way, and the threads soon. Idempotent."""
        with self._changed:
            self._closed = True
            clients = [line.interrupt() for line in self._lines.values()]
            self._changed.notify_all()
        for client in clients:
            if client is not None:
                client.close()

    def _start(self, endpoint: str) -> None:
        line = self._lines[endpoint] = _Line()
        name = f"weightsync-ask-agent-{self._model_id}"
        try:
            threading.Thread(target=self._ask_on, args=(endpoint, line), name=name, daemon=True).start()
        except RuntimeError as error:
            del self._lines[endpoint]
            raise StateError(f"{endpoint} can't be asked what it has: {error}") from error

    def _ask_on(self, endpoint: str, line: _Line) -> None:
        while (ask := self._next(endpoint, line)) is not None:
            try:
                self._turn(endpoint, line, ask)
                self._told()
                with self._changed:
                    self.look()
            except StateError as error:  # nobody is here to be told
                _logger.warning("model %s: %s", self._model_id, error)
            except Exception:  # a bug: who waits for this agent's word must not wait for ever
                _logger.exception("model %s: what %s answered could not be taken", self._model_id, endpoint)
                with self._changed:
                    self._run.not_heard(endpoint, "its answer could not be taken")
        self._told()  # the time of a claim may be over

    def _next(self, endpoint: str, line: _Line) -> Ask | None:
        """The next request, when its time has come; None: this thread ends."""
        made: AgentClient | StoreClient | None = None
        while True:
            with self._changed:
                line.client, made = line.client or made, None
                while not self._closed and (ask := self._run.next_ask(endpoint)) is not None:
                    if (left_s := ask.at_s - self._clock()) > 0:
                        self._changed.wait(left_s)
                        continue
                    if line.client is None:
                        break  # to make one takes a call where it is a store's
                    line.asked_s = self._clock()
                    line.ends_s = line.asked_s + ask.wait_s if ask.wait_s else None
                    return ask
                else:
                    del self._lines[endpoint]
                    client = line.interrupt()
                    break
            try:
                made = self._connect(endpoint)
            except Exception as error:  # no URL, no store client installed, a store that is away: it may come
                with self._changed:
                    self._run.not_heard(endpoint, f"{type(error).__name__}: {error}")
        if client is not None:
            client.close()
        return None

    def _turn(self, endpoint: str, line: _Line, ask: Ask) -> None:
        client, why, gone = line.client, "", False
        accepted: AgentVersion | None = None
        try:
            if client is not None:
                answer = client.get_version(after=ask.after, wait_s=ask.wait_s, timeout_s=_ANSWER_S)
                why = f"{endpoint} serves model {answer.model_id!r}, not {self._model_id!r}"
                accepted = answer if answer.model_id == self._model_id else None
        except Exception as error:  # whatever it is: who waits for this agent's word is told why there is none
            why, gone = f"{type(error).__name__}: {error}", isinstance(error, _GONE)
        with self._changed:
            line.ends_s = None
            if accepted is not None:
                self._run.heard(endpoint, accepted, asked=ask, asked_s=line.asked_s)
            elif client is not None and client is line.client:  # else somebody has ended this request
                self._run.not_heard(endpoint, why, gone=gone)
