"""SinkProcess: keeps the writer of an object store running beside the trainer, which never waits for it.

The writer is a receiver of the trainer's agents, in a process of its own: what it does, and how slow its store is,
costs the trainer nothing. A version that it has no time for is passed by.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import threading
import time
import uuid

import msgspec

from weightsync.errors import (
    BusyError,
    DeadlineExceededError,
    StateError,
    StoreUnavailableError,
    WeightSyncError,
    error_from_dict,
)
from weightsync.observe.told_once import ToldOnce
from weightsync.trainer.agent_run import started_beside
from weightsync.types import Version
from weightsync.types.process import of_one_process
from weightsync.types.sink import Begun, Claimed, SinkConfig, SinkEvent, Stored, Trouble

_FIRST_S, _LONGEST_S = 0.5, 15.0
_START_S = 60.0
_MAX_LINE_BYTES = 1 << 20

_logger = logging.getLogger(__name__)


@of_one_process
class SinkProcess:
    """Starts it, hears it, and starts it again when it dies. Thread-safe.

    Attributes:
        newest: the newest version that is in the store; None: none yet.
        error: what went wrong last; None: nothing since the last version.
        failed: why it has ended for good.
    """

    def __init__(self, config: SinkConfig) -> None:
        self._config = msgspec.structs.replace(config, writer=config.writer or uuid.uuid4().hex)
        self._changed = threading.Condition()
        self._claimed = False
        self._closed = False
        self._wait_s = self._until_s = 0.0  # for its claim; until when
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._supervise, name="weightsync-sink", daemon=True)
        self.newest: Version | None = None
        self.error: WeightSyncError | None = None
        self._troubles = ToldOnce(_logger)
        self.failed: WeightSyncError | None = None

    def start(self, *, wait_s: float) -> None:
        """Starts it; `wait_claimed` says whether somebody has to wait for it.

        Args:
            wait_s: how long its claim of the place is worth a wait: a store that is not there may come later.
        """
        # a busy machine takes its time to load torch: that is no silence of the store
        self._wait_s, self._until_s = wait_s, time.monotonic() + _START_S + wait_s
        self._thread.start()

    def wait_claimed(self, timeout_s: float) -> bool:
        """Whether there is nothing to wait for: it has claimed the place, or will not in time, and the trainer goes on.
        Waits for that at most so long.

        Raises:
            RunClaimedError: another trainer writes there.
            WeightSyncError: the store refuses the credential, or the URL is none.
        """
        with self._changed:
            left_s = max(0.0, self._until_s - time.monotonic())
            self._changed.wait_for(lambda: self._claimed or self.error is not None, min(timeout_s, left_s))
            if self.failed is not None:
                raise self.failed
            if not self._claimed:
                if self.error is None and time.monotonic() < self._until_s:
                    return False
                _logger.warning("%s is not claimed yet: the trainer goes on", self._config.store)
            return True

    @property
    def pid(self) -> int | None:
        process = self._process
        return None if process is None else process.pid

    def wait_stored(self, number: int, *, timeout_s: float) -> str | None:
        """Waits until a version, or a newer one, is in the store; why it is not, after so long."""
        with self._changed:
            done = self._changed.wait_for(
                lambda: (self.newest is not None and self.newest.number >= number) or self.failed is not None, timeout_s
            )
            if self.failed is not None:
                return f"{type(self.failed).__name__}: {self.failed}"
            if done:
                return None
            return f"not stored within {timeout_s:g} s" + (f": {self.error}" if self.error is not None else "")

    def close(self, *, timeout_s: float = 5.0) -> None:
        """Ends it. Idempotent.

        Args:
            timeout_s: so long the version that it is at may take; then it is killed, and that one counts for nothing.
        """
        with self._changed:
            self._closed = True
            process = self._process
            self._changed.notify_all()
        if process is not None:
            with contextlib.suppress(OSError, ValueError):
                assert process.stdin is not None
                process.stdin.write(b"end 0\n")
                process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout_s)
            process.kill()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _supervise(self) -> None:
        pause_s = _FIRST_S
        while True:
            begun_s = time.monotonic()
            why = self._run()
            with self._changed:
                if self._closed or self.failed is not None:
                    return
                self.error = self.error or StateError(f"the store's writer {why}")
                pause_s = _FIRST_S if time.monotonic() - begun_s > _LONGEST_S else min(2 * pause_s, _LONGEST_S)
                _logger.warning(
                    "the writer of %s %s; it is started again in %.1f s", self._config.store, why, pause_s
                )  # fmt: skip
                self._changed.wait_for(lambda: self._closed, pause_s)

    def _run(self) -> str:
        """Starts it and hears it until it ends; how it did, in words."""
        try:
            with self._changed:
                if self._closed:
                    return "was closed"
                self._process = process = started_beside(
                    "weightsync.sink.main", str(os.getpid()), stdout=subprocess.PIPE
                )
        except (OSError, RuntimeError) as error:  # no process can be had now
            return f"could not be started: {error}"
        assert process.stdout is not None
        assert process.stdin is not None
        with contextlib.suppress(OSError), process.stdout:
            with contextlib.suppress(ValueError):  # `close` was faster
                process.stdin.write(msgspec.json.encode(self._config) + b"\n")
                process.stdin.flush()
            while line := process.stdout.readline(_MAX_LINE_BYTES):
                self._hear(line)
        process.kill()
        process.wait()
        with contextlib.suppress(OSError):
            process.stdin.close()
        return "died: see what it wrote to stderr"

    def _hear(self, line: bytes) -> None:
        try:
            event = msgspec.json.decode(line, type=SinkEvent)
        except msgspec.DecodeError:
            _logger.error("the store's writer says what is no event: %r", line[:200])
            return
        with self._changed:
            match event:
                case Begun():
                    self._until_s = min(self._until_s, time.monotonic() + self._wait_s)
                case Claimed():
                    self._claimed = True
                case Stored():
                    self.newest, self.error = event.version, None
                    self._troubles.over()
                case Trouble():
                    self.error = error_from_dict(event.error, peer=self._config.store)
                    self._troubles.say(type(self.error), "%s: %s", self._config.store, self.error)
                    passing = isinstance(self.error, StoreUnavailableError | DeadlineExceededError | BusyError)
                    if event.is_last or not (self._claimed or passing):
                        self.failed = self.error
            self._changed.notify_all()
