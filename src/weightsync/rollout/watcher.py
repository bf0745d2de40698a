"""Watcher: one request an agent that waits there until the agent has something newer."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from weightsync.clients.agent import AgentClient
from weightsync.errors import StateError
from weightsync.types import Version

_WAIT_S = 30.0
_ANSWER_S = 5.0

_logger = logging.getLogger(__name__)


class Watcher:
    """Watches agents, each in a thread of its own, from `watch` to `close`.

    Args:
        connect: makes a client of an agent.
        found: told of an endpoint that has another version than before; from its thread.
        pause_s: between two requests where an agent does not wait, or does not answer.
        name: of the threads.
    """

    def __init__(
        self, connect: Callable[[str], AgentClient], found: Callable[[str], None], *, pause_s: float, name: str
    ) -> None:
        self._connect = connect
        self._found = found
        self._pause_s = pause_s
        self._name = name
        self._lock = threading.Lock()
        self._clients: dict[str, AgentClient] = {}
        self._closed = threading.Event()

    def watch(self, endpoint: str) -> None:
        """Begins to watch an agent. Idempotent.

        Raises:
            StateError: no thread can be started for it; the next call tries again.
            ConfigError: the endpoint is no URL.
        """
        with self._lock:
            if self._closed.is_set() or endpoint in self._clients:
                return
            client = self._connect(endpoint)
            try:
                threading.Thread(target=self._run, args=(endpoint, client), name=self._name, daemon=True).start()
            except RuntimeError as error:
                client.close()
                raise StateError(f"{endpoint} can't be watched: {error}") from error
            self._clients[endpoint] = client

    def close(self) -> None:
        """Ends the requests under way, and the threads soon. Idempotent."""
        self._closed.set()
        with self._lock:
            for client in self._clients.values():
                client.close()

    def _run(self, endpoint: str, client: AgentClient) -> None:
        seen: Version | None = None
        while not self._closed.is_set():
            began_s = time.monotonic()
            try:
                said = client.get_version(after=seen, wait_s=_WAIT_S, timeout_s=_ANSWER_S)
                known = said.run_id is not None and said.version is not None
                now = Version(run_id=said.run_id or "", number=said.version or 0) if known else None
                if now is not None and now != seen:
                    seen = now
                    self._found(endpoint)
                    continue
            except Exception as error:  # why it does not answer is told by whoever asks it again and again
                _logger.debug("%s can't be watched now: %r", endpoint, error)
            self._closed.wait(max(0.0, min(self._pause_s, began_s + _WAIT_S - time.monotonic())))
