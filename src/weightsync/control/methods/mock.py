"""MockMethod: for tests and dry runs of a controller. NOTHING IS MOVED: no weights, no engines, no network."""

from __future__ import annotations

import collections
import dataclasses
import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Literal

from weightsync.control.method import Peers, SyncMethod
from weightsync.errors import (
    DeadlineExceededError,
    EngineError,
    InvalidRequestError,
    NoEnginesError,
    SyncFailedError,
    TransferAbortedError,
)
from weightsync.types import Version
from weightsync.types.deadline import check_wait_s

_MAX_ASKED = 10_000
_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MockCall:
    """What a `MockMethod` was asked.

    Attributes:
        call: which method.
        model_tag: of which model.
        version: None for "evict_failed".
        outcome: the number that is served, the names that were evicted, or the error's kind.
    """

    call: Literal["sync_weights", "trained", "evict_failed"]
    model_tag: str
    version: Version | None
    outcome: str


class MockMethod(SyncMethod):
    """A `SyncMethod` that says it has served what it was asked for. Nothing is moved. Thread-safe.

    A sync that is told to fail fails at the last instance that takes part; `evict_failed` takes that one out.

    Args:
        num_instances: how many there are, called "mock-0", "mock-1", ...
        delay_s: how long a sync takes.
        failures: by version's number, how many of its syncs fail, in any run.
        timeout_s: a sync that takes longer has failed.

    Raises:
        NoEnginesError: no instance.
        InvalidRequestError: a time one can't wait, or a negative number of failures.
    """

    peers: Peers

    def __init__(
        self,
        num_instances: int = 1,
        *,
        delay_s: float = 0.0,
        failures: Mapping[int, int] | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        if num_instances < 1:
            raise NoEnginesError("a mock has at least one instance to say that it serves")
        self._delay_s = check_wait_s("delay_s", delay_s) if delay_s else 0.0
        self._timeout_s = check_wait_s("timeout_s", timeout_s)
        self._failures = dict(failures or {})
        if any(number < 0 for number in self._failures.values()):
            raise InvalidRequestError("failures are numbers of syncs that fail")
        self._names = tuple(f"mock-{index}" for index in range(num_instances))
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._asked: collections.deque[MockCall] = collections.deque(maxlen=_MAX_ASKED)
        self._served: dict[str, Version] = {}
        self.peers = Peers()
        _logger.warning("sync method 'mock': nothing is moved, whatever is said to be served")

    @property
    def asked(self) -> tuple[MockCall, ...]:
        """The last calls, 10,000 at most, in the order in which they ended."""
        with self._lock:
            return tuple(self._asked)

    def served(self, model_tag: str) -> Version | None:
        """What it has said that it serves."""
        with self._lock:
            return self._served.get(model_tag)

    def live(self, model_tag: str) -> tuple[str, ...]:
        """The instances of this model that take part."""
        return self.peers.live(model_tag, self._names)

    def fail(self, number: int, times: int = 1) -> None:
        """The next `times` syncs of this version fail."""
        with self._lock:
            self._failures[number] = times

    def sync_weights(self, model_tag: str, version: Version) -> int:
        """See `SyncMethod.sync_weights`.

        Raises:
            NoEnginesError: every instance was evicted.
            SyncFailedError: it was told to.
            DeadlineExceededError: the delay is longer than the deadline.
            TransferAbortedError: it was closed meanwhile.
        """
        try:
            number = self._sync(model_tag, version)
        except Exception as error:
            self._note("sync_weights", model_tag, version, type(error).__name__)
            raise
        self._note("sync_weights", model_tag, version, str(number))
        return number

    def evict_failed(self, model_tag: str) -> Sequence[str]:
        names = super().evict_failed(model_tag)
        self._note("evict_failed", model_tag, None, ", ".join(names))
        return names

    def trained(self, model_tag: str, version: Version, sender_endpoint: str | None = None) -> None:
        self._note("trained", model_tag, version, "")

    def close(self) -> None:
        """Ends the syncs that are waiting. Idempotent."""
        self._closed.set()

    def _sync(self, model_id: str, version: Version) -> int:
        if self._delay_s and self._closed.wait(min(self._delay_s, self._timeout_s)):
            raise TransferAbortedError("the mock was closed", version=str(version))
        if self._delay_s > self._timeout_s:
            raise DeadlineExceededError(f"the mock takes longer than {self._timeout_s:g} s", version=str(version))
        with self._lock:
            live = self.live(model_id)
            if not live:
                raise NoEnginesError(f"every instance of model {model_id!r} was evicted")
            if self._failures.get(version.number, 0):
                self._failures[version.number] -= 1
                self.peers.note_failed(model_id, live[-1:])
                raise SyncFailedError(
                    f"1 of {len(live)} mock instances was told to fail",
                    causes={live[-1]: EngineError("told to fail", peer=live[-1])}, version=str(version),
                    state_left="nothing was moved",
                )  # fmt: skip
            self.peers.note_failed(model_id)
            before = self._served.get(model_id)
            if before is None or before.run_id != version.run_id or version.is_newer_than(before):
                self._served[model_id] = version
            return self._served[model_id].number

    def _note(
        self,
        call: Literal["sync_weights", "trained", "evict_failed"],
        model_id: str,
        version: Version | None,
        outcome: str,
    ) -> None:
        with self._lock:
            self._asked.append(MockCall(call=call, model_tag=model_id, version=version, outcome=outcome))
