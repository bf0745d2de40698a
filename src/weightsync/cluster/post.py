"""The way of init infos: training rank 0 -> controller -> engines.

Rank 0 lays init requests into its `Mailbox`. The controller's `Postman` fetches them by a call that waits until there
are some, calls the engines, and brings their answers back. A driver has no address that an actor could call, so it is
always the driver who calls.
"""

from __future__ import annotations

import itertools
import logging
import threading
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Protocol

import msgspec

from weightsync.clients.fanout import in_thread
from weightsync.cluster.wire import answer, read_answer, refusal
from weightsync.errors import (
    DeadlineExceededError,
    EngineUnreachableError,
    InvalidRequestError,
    StateError,
    TrainerRankError,
)
from weightsync.types import EngineHandle, EngineOp, InitRequest

_CLOSE_S = 1.0
_RETRY_S = 1.0

_logger = logging.getLogger(__name__)


class Letter(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An init request on its way.

    Attributes:
        number: of this letter in its mailbox.
        engine_id: for whom.
        request: what.
        timeout_s: how long the sender waits for the answer.
    """

    number: int
    engine_id: str
    request: InitRequest
    timeout_s: float


class Mailbox:
    """Rank 0's end. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._numbers = itertools.count(1)
        self._outgoing: list[Letter] = []
        self._waiting: dict[int, Future[bytes]] = {}
        self._controllers: list[str] = []  # the last one that came is the one that is served
        self._num_takes = 0
        self._closed = False

    def send(self, engine_id: str, request: InitRequest, *, timeout_s: float) -> bytes:
        """Sends a request by way of the controller and blocks until the engine's answer is back.

        Raises:
            DeadlineExceededError: no answer in time; where the controller has not even fetched it, it never will.
            EngineUnreachableError: the mailbox is closed.
        """
        reply: Future[bytes] = Future()
        with self._changed:
            if self._closed:
                raise EngineUnreachableError("the controller has closed the way to the engines", peer=engine_id)
            letter = Letter(number=next(self._numbers), engine_id=engine_id, request=request, timeout_s=timeout_s)
            self._outgoing.append(letter)
            self._waiting[letter.number] = reply
            self._changed.notify_all()
        try:
            return reply.result(timeout_s)
        except TimeoutError:
            with self._changed:
                fetched = letter not in self._outgoing
                if not fetched:
                    self._outgoing.remove(letter)
            who = "it was fetched, and no answer came back" if fetched else "the controller did not fetch it"
            raise DeadlineExceededError(f"no answer to init within {timeout_s:g} s: {who}", peer=engine_id) from None
        finally:
            with self._changed:
                self._waiting.pop(letter.number, None)

    def take(self, timeout_s: float, *, controller: str) -> bytes:
        """The letters that lie there, as soon as there is one; none where none comes in time, or after `close`.

        A newer take ends older ones, whose callers may be gone: they would swallow letters.

        Args:
            timeout_s: how long to wait.
            controller: who asks. The latest to come takes over from those before it.

        Raises:
            StateError: another controller has taken over.
        """
        with self._changed:
            if controller not in self._controllers:
                self._controllers.append(controller)
            if controller != self._controllers[-1]:
                raise StateError("another controller of these ranks has taken over their init requests")
            self._num_takes += 1
            mine = self._num_takes
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._outgoing or self._closed or self._num_takes != mine, timeout_s)
            if self._num_takes != mine:
                return answer([])
            letters, self._outgoing = self._outgoing, []
            return answer(letters)

    def deliver(self, number: int, body: bytes) -> None:
        """The engine's answer to a letter; one that nobody waits for any more is dropped."""
        with self._changed:
            reply = self._waiting.pop(number, None)
        if reply is not None:
            reply.set_result(body)

    def close(self) -> None:
        """Sends nothing more, and ends a `take` that waits. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class Rank0(Protocol):
    """What the postman asks of training rank 0's actor."""

    def fetch(self, controller: str, closed: Callable[[], bool]) -> bytes | None:
        """Waits for letters for this controller; None once `closed`, or when the cluster is left.

        Raises:
            TrainerRankError: rank 0 is gone.
            WeightSyncError: no answer in time, or not a readable one.
        """
        ...

    def deliver(self, number: int, body: bytes) -> None:
        """Brings an answer."""
        ...


class Postman:
    """The controller's end: a thread that hands init requests on, from start to close.

    Args:
        rank_0: the actor of training rank 0.
        engines: by id.

    Attributes:
        handed_on: the latest init request that each engine was handed.
    """

    def __init__(self, rank_0: Rank0, engines: Mapping[str, EngineHandle]) -> None:
        self._rank_0 = rank_0
        self._engines = engines
        self._id = uuid.uuid4().hex
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="weightsync-postman", daemon=True)
        self.handed_on: dict[str, InitRequest] = {}

    def start(self) -> None:
        """Starts to fetch."""
        self._thread.start()

    def close(self) -> None:
        """Stops, and waits a moment until the thread has left Ray; a request under way is finished. Idempotent."""
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                body = self._rank_0.fetch(self._id, self._closed.is_set)
                if body is None:
                    return
                letters = read_answer(body, list[Letter], peer="training rank 0", what="fetch")
            except (TrainerRankError, StateError):
                return  # rank 0 is gone, which everybody who waits for it is told by Ray; or another one has taken over
            except Exception:  # one late or broken answer; whoever misses a letter is told at its deadline
                _logger.warning("fetching init requests failed; it is tried again", exc_info=True)
                self._closed.wait(_RETRY_S)
                continue
            for letter in letters:
                in_thread(lambda letter=letter: self._carry(letter), name=f"weightsync-init-{letter.engine_id}")  # type: ignore[misc]

    def _carry(self, letter: Letter) -> None:
        engine = self._engines.get(letter.engine_id)
        try:
            if engine is None:
                raise InvalidRequestError(f"the controller knows no engine {letter.engine_id!r}", peer=letter.engine_id)
            self.handed_on[letter.engine_id] = letter.request
            body = answer(engine.call(EngineOp.INIT, letter.request, timeout_s=letter.timeout_s))
        except Exception as error:
            body = refusal(error, "init failed", peer=letter.engine_id)
        self._rank_0.deliver(letter.number, body)
