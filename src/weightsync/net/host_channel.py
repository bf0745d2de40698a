"""HostChannel: typed messages between a process and one that it has started on this host. See design/0023.

A ZMQ PAIR over a socket file: no port, and nobody on the network. The kernel says which process connects, and no other
than the one that is meant is let in. Queues and sizes are bounded: who does not read makes the other's `send` say so.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import msgspec
import zmq

from weightsync.errors import ConfigError, WeightSyncError
from weightsync.types.closing import Closing

_QUEUE = 16
"""Messages that wait on either side."""
_GOODBYE_MS = 2000
_NUM_DESCRIPTORS = 16
"""What libzmq needs to begin with. Where it finds none it ends the whole process, so they are looked for before."""

_T = TypeVar("_T")

_logger = logging.getLogger(__name__)


class HostChannel(Closing, Generic[_T]):
    """One end. One thread.

    Args:
        path: of the socket file, in a folder that nobody else can look into.
        receives: type of the messages that come.
        max_bytes: the longest of them. The connection of who sends a longer one is cut.
        listens_to: id of the process that may connect; None: this end connects.

    Raises:
        ConfigError: it can't listen there, or the process has no descriptors left.
    """

    def __init__(self, path: str, receives: Any, *, max_bytes: int, listens_to: int | None) -> None:
        self._decoder: msgspec.json.Decoder[_T] = msgspec.json.Decoder(receives)
        self._ends_context = listens_to is None  # which waits until all was sent
        try:
            self._context = _new_context() if self._ends_context else _context_of(os.getpid())
            self._socket: zmq.Socket[bytes] = self._context.socket(zmq.PAIR)
        except (zmq.ZMQError, OSError) as error:
            raise ConfigError(f"no channel can be opened: {error}") from error
        try:
            self._socket.setsockopt(zmq.SNDHWM, _QUEUE)
            self._socket.setsockopt(zmq.RCVHWM, _QUEUE)
            self._socket.setsockopt(zmq.MAXMSGSIZE, max_bytes)
            self._socket.setsockopt(zmq.LINGER, 0 if listens_to is not None else _GOODBYE_MS)
            if listens_to is None:
                self._socket.setsockopt(zmq.RECONNECT_IVL, -1)  # whoever listens there later is somebody else
                self._socket.connect(f"ipc://{path}")
            else:
                self._socket.setsockopt(zmq.IPC_FILTER_PID, listens_to)
                self._socket.bind(f"ipc://{path}")
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(f"no channel can be opened at {path}: {error}") from error

    def send(self, body: bytes) -> bool:
        """Sends one message; False, and nothing is sent, where the other side does not read. Never waits."""
        try:
            self._socket.send(body, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def received(self) -> Iterator[_T]:
        """What has come by now. Never waits. What is no message is logged, and dropped."""
        while True:
            try:
                frame = self._socket.recv(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            try:
                yield self._decoder.decode(frame.buffer)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, WeightSyncError) as error:
                _logger.error("what came over the channel is no message, and is dropped: %s", error)

    def wait(self, *fds: int, timeout_s: float | None, to_send: bool = False) -> None:
        """Until something has come, or one of the descriptors can be read, or the time is over.

        Args:
            fds: of others.
            timeout_s: None: for ever.
            to_send: also until something can be sent.
        """
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN | (zmq.POLLOUT if to_send else 0))
        for fd in fds:
            poller.register(fd, zmq.POLLIN)
        poller.poll(None if timeout_s is None else max(0, round(timeout_s * 1000)))

    def close(self) -> None:
        """Lets go; the end that connected waits some seconds until what it has sent is on its way. Idempotent."""
        self._socket.close()
        if self._ends_context:
            self._context.term()


def _new_context() -> zmq.Context[zmq.Socket[bytes]]:
    """Its threads start here, and not at a time when there may be no room for them."""
    with contextlib.ExitStack() as stack:
        for _ in range(_NUM_DESCRIPTORS):
            stack.callback(os.close, os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    context = zmq.Context()
    context.socket(zmq.PAIR).close()
    return context


@functools.cache
def _context_of(_pid: int) -> zmq.Context[zmq.Socket[bytes]]:
    """One for all ends of this process that listen, for as long as it lives: an agent that is started again costs no
    more than a socket, which fails in words."""
    return _new_context()
