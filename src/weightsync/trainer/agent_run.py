"""AgentRun: one agent process and the channel to it, from its start to its end. See design/0023."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec

from weightsync.clients.agent import MAX_PUBLICATION_BYTES
from weightsync.errors import EngineUnreachableError, StateError, error_from_dict
from weightsync.memory import PrivateFolder
from weightsync.net.host_channel import HostChannel
from weightsync.net.messages import encode
from weightsync.types.agent_config import AgentConfig
from weightsync.types.agent_messages import (
    MAX_EVENT_BYTES,
    AgentStart,
    EndOrder,
    Event,
    Failed,
    Order,
    PublishOrder,
    Ready,
)
from weightsync.types.closing import Closing
from weightsync.types.deadline import Deadline
from weightsync.types.layout import PublicationLayout
from weightsync.types.publication import Publication

MAX_ORDER_BYTES = MAX_PUBLICATION_BYTES + (1 << 20)
_LAST_WORDS_S = 0.5
"""What a process has said just before its end may come so much later."""
_LOOK_EVERY_S = 0.2
"""Where the kernel knows no process descriptors: how often the process's end is looked for."""


class AgentRun(Closing):
    """Starts a process. One thread.

    Args:
        wake_fd: an eventfd that ends a `wait`, and is taken back by it.
        closed: where it is set, nothing is waited for.
    """

    def __init__(self, config: AgentConfig, *, wake_fd: int, closed: threading.Event) -> None:
        self.order_bytes = 0  # of the last version that it was told of
        self._wake_fd = wake_fd
        self._closed = closed
        self._layout: PublicationLayout | None = None  # that it was told of last
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(PrivateFolder())
            process = self._process = started_beside(
                "weightsync.agent.main", str(os.getpid()), stdout=subprocess.DEVNULL
            )
            stack.callback(_ended, process)
            start = AgentStart(
                config=config, socket=f"{folder.path}/agent", max_order_bytes=MAX_ORDER_BYTES,
                log_level=logging.getLogger("weightsync.agent").getEffectiveLevel(),
            )  # fmt: skip
            self._channel: HostChannel[Event] = stack.enter_context(
                HostChannel(start.socket, Event, max_bytes=MAX_EVENT_BYTES, listens_to=process.pid)
            )
            self._death_fd: int | None = None
            with contextlib.suppress(OSError, AttributeError):
                self._death_fd = os.pidfd_open(process.pid)
                stack.callback(os.close, self._death_fd)
            with contextlib.suppress(OSError):  # it has ended already: `ready` says so
                assert process.stdin is not None
                os.write(process.stdin.fileno(), msgspec.json.encode(start) + b"\n")
            self._folder = folder
            self._stack = stack.pop_all()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def ready(self, timeout_s: float) -> Ready:
        """Waits until it serves. From then on nobody can reach the channel by a name.

        Raises:
            WeightSyncError: what it says of itself: it can't listen, say.
            EngineUnreachableError: it ended without a word, or takes longer.
        """
        deadline = Deadline(timeout_s)
        while not (deadline.expired or self._closed.is_set()):
            has_ended = self.has_ended
            self.wait(deadline.remaining_s)
            for event in self._channel.received():
                if isinstance(event, Failed):
                    raise error_from_dict(event.error, peer="agent")
                if isinstance(event, Ready):
                    self._folder.close()
                    return event
            if has_ended:
                raise EngineUnreachableError("the agent ended before it could serve; see what it wrote to stderr")
        raise EngineUnreachableError(f"the agent did not start within {timeout_s:g} s")

    def wait(self, timeout_s: float, *, to_send: bool = False) -> None:
        """Until it says something or ends, or this is woken, or the time is over; see `HostChannel.wait`."""
        if self.has_ended:
            self._channel.wait(timeout_s=min(timeout_s, _LAST_WORDS_S))
        elif self._death_fd is not None:
            self._channel.wait(self._wake_fd, self._death_fd, timeout_s=timeout_s, to_send=to_send)
        else:
            self._channel.wait(self._wake_fd, timeout_s=min(timeout_s, _LOOK_EVERY_S), to_send=to_send)
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)

    def events(self) -> Iterator[Event]:
        return self._channel.received()

    def publish(self, publication: Publication, source: int) -> bool:
        """Tells it of a version, and of its layout where another was told last; see `send`.

        Raises:
            StateError: it can't be told.
        """
        try:
            layout = PublicationLayout.of(publication)
            raw = b"null" if layout is self._layout else layout.encode()  # once: the next versions only name it
            order = PublishOrder(head=layout.head(publication), source=source, layout=msgspec.Raw(raw))
            body = encode(order)
        except Exception as error:
            raise StateError(f"it can't be told to the agent: {type(error).__name__}: {error}") from error
        if len(body) > MAX_ORDER_BYTES:
            raise StateError(
                f"it can't be told to the agent: {len(body)} bytes are said of it, and an agent takes "
                f"{MAX_ORDER_BYTES}. Publish the model in pieces, each with a model_id and a WeightManager of its own"
            )
        if not self._channel.send(body):
            return False
        self.order_bytes, self._layout = len(body), layout
        return True

    def send(self, order: Order) -> bool:
        """Gives it an order; False where it does not read. Never waits."""
        return self._channel.send(msgspec.json.encode(order))

    def end(self, timeout_s: float, *, in_order: bool) -> None:
        """Has it end by itself; `close` kills it where it does not."""
        if self.send(EndOrder(in_order=in_order)):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout_s)

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> None:
        """Kills the process, and takes the channel away. Idempotent."""
        self._stack.close()


def started_beside(module: str, *arguments: str, stdout: int) -> subprocess.Popen[bytes]:
    """A process of the library's own beside the trainer; its standard input is a pipe."""
    # -P: what lies in the trainer's working directory is none of its modules; where we lie, it looks.
    found = os.pathsep.join(filter(None, (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH"))))
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module, *arguments],
        stdin=subprocess.PIPE,
        stdout=stdout,
        stderr=None if _has_stderr() else subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": found},
        process_group=0,  # Ctrl-C at a terminal is the trainer's; this one ends with it
    )


def _has_stderr() -> bool:
    """Whether a child gets this process's standard error: where that was closed (`2>&-`), another file may be there."""
    try:
        return os.get_inheritable(2)
    except OSError:
        return False


def _ended(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    with process:  # closes its input, and takes note of its end
        pass
