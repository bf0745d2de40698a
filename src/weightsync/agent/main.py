"""The agent's process: `python -m weightsync.agent.main <the trainer's pid>`, started by `AgentProcess`.

It reads how it runs from one line of its standard input, and then takes orders and tells events over a `HostChannel`,
see `types.agent_messages`. It ends when it is told to, or when its trainer is gone: its standard input ends then, and
its parent is another process.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import resource
import sys
import threading
from collections.abc import Callable, Iterator
from typing import NoReturn

import msgspec

from weightsync.agent.api import TransferAgent
from weightsync.errors import InvalidRequestError, WeightSyncError
from weightsync.memory import reclaim_dead
from weightsync.memory.segment import unlink_own
from weightsync.net.host_channel import HostChannel
from weightsync.types.agent_messages import (
    MAX_EVENT_BYTES,
    AgentStart,
    EndOrder,
    Event,
    Failed,
    NotPublished,
    Order,
    Ping,
    Pong,
    PublishOrder,
    ResetOrder,
    TransferBegun,
    TransferDone,
)
from weightsync.types.layout import PublicationLayout
from weightsync.types.process import lines_from

_LAST_RECLAIMS = 20
_MAX_EVENTS = 1000
_PONG = msgspec.json.encode(Pong())

_logger = logging.getLogger(__name__)


def main() -> None:
    """From the line on the standard input to the end."""
    os.dup2(2, 1)  # nobody reads the standard output
    logging.basicConfig(format="%(asctime)s %(name)s %(levelname)s: %(message)s")
    lines = lines_from(0, int(sys.argv[1]))
    if (first := next(lines, None)) is None:
        _end()
    start = msgspec.json.decode(first, type=AgentStart)
    logging.getLogger().setLevel(start.log_level)
    closing: list[Callable[[], None]] = []
    threading.Thread(target=_end_with, args=(lines, closing), name="weightsync-parent", daemon=True).start()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # each connection is a descriptor, and each segment that is read
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with HostChannel[Order](start.socket, Order, max_bytes=start.max_order_bytes, listens_to=None) as channel:
        outbox = _Outbox()
        try:
            agent = TransferAgent(start.config, outbox.put)
            closing.append(agent.close)
            outbox.put(agent.start())
        except WeightSyncError as error:
            channel.send(_encoded(Failed(error=error.to_dict())))
            channel.close()  # when it was sent
            os._exit(1)
        agent.close(in_order=_obey(agent, channel, outbox))
    unlink_own()  # deltas
    os._exit(0)


class _Outbox:
    """Events that wait for the main thread, which alone has the channel. `put` may be called from any.

    Attributes:
        fd: can be read when there is one.
    """

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._events: queue.Queue[Event] = queue.Queue()
        self._next: bytes | None = None

    def put(self, event: Event) -> None:
        most = {TransferBegun: _MAX_EVENTS // 2, TransferDone: _MAX_EVENTS}.get(type(event))  # what is begun can end
        if most is not None and self._events.qsize() >= most:
            return  # a trainer that stands still; what became of its versions it is told, as many as it has ordered
        self._events.put(event)
        os.eventfd_write(self.fd, 1)

    def send(self, channel: HostChannel[Order]) -> bool:
        """Sends all; whether there is something left, which the trainer does not take now."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.fd)
        while True:
            if self._next is None:
                try:
                    self._next = _encoded(self._events.get_nowait())
                except queue.Empty:
                    return False
            if not channel.send(self._next):
                return True
            self._next = None


def _encoded(event: Event) -> bytes:
    body = msgspec.json.encode(event)
    if len(body) > MAX_EVENT_BYTES and hasattr(event, "phases"):
        body = msgspec.json.encode(msgspec.structs.replace(event, phases=()))
    return body


def _obey(agent: TransferAgent, channel: HostChannel[Order], outbox: _Outbox) -> bool:
    """Takes orders until the end; whether that came in order."""
    layout: PublicationLayout | WeightSyncError = InvalidRequestError("no layout was told before it")
    while True:
        is_left = outbox.send(channel)
        channel.wait(outbox.fd, timeout_s=None, to_send=is_left)
        for order in channel.received():
            match order:
                case Ping():  # at once: an agent that loads numba gets few turns
                    channel.send(_PONG)
                    agent.show(order.phases)
                case ResetOrder():
                    agent.reset()
                case PublishOrder():
                    layout = _publish(agent, order, layout, outbox)
                case EndOrder():
                    return order.in_order


def _publish(
    agent: TransferAgent, order: PublishOrder, layout: PublicationLayout | WeightSyncError, outbox: _Outbox
) -> PublicationLayout | WeightSyncError:
    """The layout that stands for the next order: the last that came; or why it is none."""
    try:
        if bytes(order.layout) != b"null":
            try:
                layout = PublicationLayout.read(memoryview(order.layout), order.head.layout)
            except InvalidRequestError as error:
                layout = error
        if isinstance(layout, WeightSyncError):
            raise layout
        publication = layout.publication(order.head)
    except WeightSyncError as error:  # the next one may be better
        _logger.error("version %s can't be served: %s", order.head.version, error)
        outbox.put(NotPublished(version=order.head.version, error=error.to_dict()))
    else:
        agent.publish(publication, order.source)
    return layout


def _end_with(lines: Iterator[bytes], closing: list[Callable[[], None]]) -> None:
    """Ends this process with its trainer. Its ports come free first: who starts the trainer again finds them so."""
    for _ in lines:
        pass
    for close in closing:
        with contextlib.suppress(RuntimeError):  # no thread can be had
            threading.Thread(target=close, daemon=True).start()
    _end()


def _end() -> NoReturn:
    """Where the trainer is gone."""
    for _ in range(_LAST_RECLAIMS):  # its lock comes free, and its segments go
        with contextlib.suppress(OSError, WeightSyncError):
            reclaim_dead()
        threading.Event().wait(0.05)
    unlink_own()  # deltas
    os._exit(0)


if __name__ == "__main__":
    main()
