"""Announcer: tells whoever listens of new versions and ended transfers, over ZMQ."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import threading
from typing import Any

import zmq
import zmq.auth.thread

from weightsync.errors import ConfigError
from weightsync.net.auth import ANNOUNCEMENTS_USER, announcements_password
from weightsync.publish.agent_config import AgentConfig


class Announcer:
    """A PUB socket: new versions and ended transfers, as JSON. Where there is a token, subscribers show who they are.

    ZMQ's PLAIN sends a password in clear, and so it is one that opens nothing else (`announcements_password`).

    Args:
        config: where it listens, and the token.

    Raises:
        ConfigError: it can't listen there.
    """

    def __init__(self, config: AgentConfig) -> None:
        self._context = zmq.Context()
        self._auth: zmq.auth.thread.ThreadAuthenticator | None = None
        self._socket = self._context.socket(zmq.PUB)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._lock = threading.Lock()
        if config.token is not None:
            self._auth = zmq.auth.thread.ThreadAuthenticator(self._context)
            self._auth.start()
            passwords = {ANNOUNCEMENTS_USER: announcements_password(config.token)}
            self._auth.configure_plain(domain="*", passwords=passwords)
            self._socket.plain_server = True
        with contextlib.suppress(ValueError):
            self._socket.ipv6 = ipaddress.ip_address(config.host).version == 6
        host = f"[{config.host}]" if ":" in config.host else config.host
        try:
            self._socket.bind(f"tcp://{host}:{config.news_port or '*'}")
        except zmq.ZMQError as error:
            raise ConfigError(f"can't announce on {config.host}:{config.news_port}: {error}") from error
        self.port = int(self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rsplit(":", 1)[1])
        known = config.advertise or config.host
        self.endpoint = f"tcp://{f'[{known}]' if ':' in known else known}:{self.port}"

    def send(self, kind: str, **facts: Any) -> None:
        """Never waits: a subscriber that is too slow misses news."""
        with self._lock, contextlib.suppress(zmq.ZMQError):
            self._socket.send(json.dumps({"kind": kind, **facts}).encode(), zmq.NOBLOCK)

    def close(self) -> None:
        """Stops listening."""
        with self._lock:
            self._socket.close(0)
            if self._auth is not None:
                self._auth.stop()
            self._context.term()
