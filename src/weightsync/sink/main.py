"""The process of a store's writer: `python -m weightsync.sink.main <the trainer's pid>`, started by
`trainer.sink_process`.

It reads how it runs from the first line of its standard input, and tells events by lines of its standard output. It
ends when its input says "end" or is closed, or its trainer is gone: the version that it is at goes to its end first.
Where the trainer is gone its claim comes free at once, and whoever takes it has the pointer.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import IO

import msgspec

from weightsync.errors import BusyError, RunClaimedError, StateError, VersionError, WeightSyncError, as_weightsync_error
from weightsync.objects.opened import open_store
from weightsync.objects.signing import Signer
from weightsync.observe.told_once import ToldOnce
from weightsync.sink.claim import ClaimKeeper
from weightsync.sink.intake import Intake, time_for
from weightsync.sink.sweep import Sweeper
from weightsync.sink.writer import ChainWriter
from weightsync.types import Deadline, Version
from weightsync.types.process import lines_from
from weightsync.types.scarcity import is_passing
from weightsync.types.sink import Begun, Claimed, SinkConfig, SinkEvent, Stored, Trouble

_WAIT_S = 2.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 15.0

_logger = logging.getLogger("weightsync.sink.main")  # it runs as __main__


def main() -> None:
    """From the first line of the input to the end."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s: %(message)s")
    out = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    lines = lines_from(0, int(sys.argv[1]))
    config = msgspec.json.decode(next(lines, b""), type=SinkConfig)
    ended, until = threading.Event(), [0.0]
    closing: list[Callable[[], None]] = []
    threading.Thread(target=_listen, args=(lines, ended, until, closing), name="weightsync-parent", daemon=True).start()
    os._exit(_run(config, lambda event: _tell(out, event), ended, until, closing))


def _run(
    config: SinkConfig,
    tell: Callable[[SinkEvent], None],
    ended: threading.Event,
    until: list[float],
    closing: list[Callable[[], None]],
) -> int:
    """Runs a writer to its end; the exit code.

    Args:
        closing: is given what is called, from any thread, where the trainer is gone.
    """
    try:
        tell(Begun())
        with _scarcity_told():
            sink = Sink(config, tell)
            closing.append(sink.let_go)
            sink.run(ended, until)
    except Exception as error:
        typed = as_weightsync_error(error, StateError, "the store's writer failed")
        is_last = isinstance(typed, RunClaimedError) or not isinstance(error, WeightSyncError)
        _logger.error("%s", typed, exc_info=None if isinstance(error, WeightSyncError) else error)
        tell(Trouble(error=typed.to_dict(), is_last=is_last))
        return 1
    return 0


@contextlib.contextmanager
def _scarcity_told() -> Iterator[None]:
    """A want of memory, threads or files is a BusyError: others may end it, and what met it is tried again."""
    try:
        yield
    except Exception as error:
        if isinstance(error, WeightSyncError) or not is_passing(error):
            raise
        raise BusyError(f"the store's writer lacks memory, threads or files: {error!r}") from error


def _listen(
    lines: Iterator[bytes], ended: threading.Event, until: list[float], closing: list[Callable[[], None]]
) -> None:
    """Ends the work when told to; "end 12" leaves so many seconds for the newest version."""
    line = next(lines, None)
    with contextlib.suppress(ValueError, IndexError):
        until[0] = time.monotonic() + float((line or b"").split()[1])
    ended.set()
    if line is None:  # an upload may take minutes, and the trainer may be started again
        for close in closing:
            close()


def _tell(out: IO[bytes], event: SinkEvent) -> None:
    with contextlib.suppress(OSError):  # nobody listens any more
        out.write(msgspec.json.encode(event) + b"\n")


class Sink:
    """One writer, from its claim to its end."""

    def __init__(self, config: SinkConfig, tell: Callable[[SinkEvent], None]) -> None:
        self._config = config
        self._tell = tell
        self._store = open_store(config.store, whose="the store's")
        self._signer = None if config.sign_key is None else Signer(config.sign_key)
        self._claim = ClaimKeeper(self._store, run_id=config.run_id, takeover_s=config.takeover_s, writer=config.writer)
        self._intake = Intake(
            config.agents, config.model_id, receiver_id=f"store {config.store[:150]} {config.writer[:8]}",
            token=config.token, verify=config.verify,
        )  # fmt: skip
        self._seen: Version | None = None

    def run(self, ended: threading.Event, until: list[float]) -> None:
        """Writes each newest version until `ended`, and what is the newest then, until the time in `until`.

        Raises:
            RunClaimedError: another writer lives, or has taken over.
            WeightSyncError: the store could not be claimed.
        """
        config = self._config
        self._claim.acquire(ended=ended)
        try:
            writer = ChainWriter(
                self._store, self._claim, signer=self._signer, anchor_every=config.anchor_every,
                anchor_share=config.anchor_share,
            )  # fmt: skip
            writer.begin(deadline=Deadline(config.write_timeout_s))
            self._tell(Claimed(epoch=self._claim.epoch))
            sweeper = Sweeper(self._store, writer, keep_s=config.keep_s, every_s=config.sweep_s)
            pause_s, troubles = _FIRST_PAUSE_S, ToldOnce(_logger)
            while not (last := ended.is_set()) or time.monotonic() < until[0]:
                try:
                    self._claim.check()
                    with _scarcity_told():
                        if wrote := self._turn(writer, wait_s=0.0 if last else _WAIT_S):
                            pause_s = _FIRST_PAUSE_S
                        elif last:
                            break
                        sweeper.sweep()
                        if wrote:
                            troubles.over()
                except RunClaimedError:
                    raise
                except VersionError as error:  # superseded on its way
                    _logger.info("%s", error)
                    ended.wait(_FIRST_PAUSE_S)
                except WeightSyncError as error:
                    troubles.say(type(error), "%s", error)
                    self._tell(Trouble(error=error.to_dict()))
                    if last:
                        time.sleep(min(pause_s, max(0.0, until[0] - time.monotonic())))
                    else:
                        ended.wait(pause_s)
                    pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        finally:
            self._claim.release()
            self._intake.close()

    def let_go(self) -> None:
        """Another writer may take the place now. What is being written goes to its end, and counts where none has."""
        self._claim.release()

    def _turn(self, writer: ChainWriter, *, wait_s: float) -> bool:
        """Writes the newest version, where it is not written yet; whether it did."""
        newest = self._intake.newest(after=self._seen, wait_s=wait_s)
        if newest is None or newest == self._seen:
            return False
        begun_s, deadline = time.monotonic(), Deadline(self._config.write_timeout_s)
        if newest.number <= writer.last_number:
            version, nbytes = newest, writer.finish(newest, deadline=deadline)
            if not nbytes:
                self._seen = newest
                return False
        else:
            taken = self._intake.take(writer.bases, deadline=deadline)
            version, nbytes = taken.version, writer.write(taken, deadline=time_for(taken.nbytes, deadline))
        self._seen = version
        assert writer.current is not None
        seconds = time.monotonic() - begun_s
        self._tell(
            Stored(
                version=version, is_anchor=writer.current.is_anchor, nbytes=nbytes,
                total_bytes=writer.current.total_bytes, seconds=seconds,
            )
        )  # fmt: skip
        _logger.info("%s is in %s: %d bytes in %.3f s", version, self._store.url, nbytes, seconds)
        return True


if __name__ == "__main__":
    main()
