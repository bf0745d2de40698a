"""AskedAudits: a vLLM worker reads its live weights when it is asked, and now and then by itself, beside whatever vLLM
does.

vLLM returns no data and waits for no thread of ours. So an audit has a name that its asker made: each worker keeps how
the last ones ended, its state tells them, and one counts when every worker has ended it.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import msgspec

from weightsync.errors import EngineError, WeightSyncError, as_weightsync_error
from weightsync.handles.fanout import in_thread
from weightsync.handles.vllm_messages import VllmAudit
from weightsync.observe import now_s
from weightsync.types import EngineReply

EVERY_VARIABLE = "WEIGHTSYNC_AUDIT_EVERY_S"
"""Environment of vLLM: behind a patch, a worker reads all by itself where its last such reading ended so many seconds
ago or more; 0: behind each patch; "never". 600 where it is not set."""
_EVERY_S = 600.0
_KEPT = 8
_logger = logging.getLogger(__name__)
_SLEEPS = "vLLM has sleep mode, which may unmap weights while they are read: without --enable-sleep-mode they can be"
_RANK = {False: 0, None: 1, True: 2}


class AskedAudits:
    """Of one worker. Thread-safe.

    Args:
        verify: see `EngineWorker.verify`; those who ask for the same at the same time share one reading.
        sleeps: vLLM has sleep mode: it may unmap weights at any time, and who reads them then ends the process. So
            nothing is read, and who asks is told so.
    """

    def __init__(self, verify: Callable[[], EngineReply], *, sleeps: bool = False) -> None:
        self._verify = verify
        self._sleeps = sleeps
        self._lock = threading.Lock()
        self._read_s: float | None = None  # when a reading by itself has ended
        self._ended: collections.deque[VllmAudit] = collections.deque(maxlen=_KEPT)

    def begin(self, name: str) -> None:
        """Begins one; waits for nothing.

        Raises:
            EngineError: it can have no thread.
        """
        if self._sleeps:
            return self._note(VllmAudit(name=name, said=_SLEEPS), now_s())
        begun = in_thread(lambda: self._run(name), name="weightsync-vllm-audit")
        if begun.done() and (error := begun.exception()) is not None:
            raise EngineError(f"live weights can't be read: {error}", state_left="nothing was changed") from error
        return None

    @property
    def ended(self) -> tuple[VllmAudit, ...]:
        """The last ones that have ended here."""
        with self._lock:
            return tuple(self._ended)

    def behind(self, session: str, audit: Callable[[str], bool], settle: Callable[[str], None]) -> None:
        """Begins a reading behind a patch, where it is time for one; waits for nothing. One that the next patch ends
        goes on behind that one.

        Args:
            session: that has committed the patch, on all workers.
            audit, settle: see `EngineWorker`; the second where nothing is ever read.
        """
        if self._sleeps:
            in_thread(lambda: settle(session), name="weightsync-vllm-settle")
            return
        every_s, read_s = _every_s(), self._read_s
        if every_s == math.inf or (read_s is not None and time.monotonic() < read_s + every_s):
            return

        def run() -> None:
            began_s, name = now_s(), f"behind {session}"
            try:
                if not audit(session):
                    return
                self._read_s = time.monotonic()
                ended = VllmAudit(name=name, equal=True)
            except WeightSyncError as error:  # its state says so until a full load
                _logger.error("live weights are not what was committed: %s", error)
                ended = VllmAudit(name=name, equal=False, said=f"{type(error).__name__}: {error}")
            except Exception as error:  # nobody waits for this thread
                failure = as_weightsync_error(error, EngineError, "the audit failed")
                _logger.error("live weights could not be read: %s", failure)
                ended = VllmAudit(name=name, said=f"{type(failure).__name__}: {failure}")
            self._note(ended, began_s)

        in_thread(run, name="weightsync-vllm-audit-behind")

    def _run(self, name: str) -> None:
        began_s = now_s()
        try:
            reply = self._verify()
            ended = VllmAudit(
                name=name,
                version=reply.version,
                digest=reply.model_digest,
                equal=reply.digests_equal,
                said=reply.unhealthy if reply.digests_equal is False else reply.unprovable,
            )
        except Exception as error:
            failure = as_weightsync_error(error, EngineError, "the audit failed")
            ended = VllmAudit(name=name, said=f"{type(failure).__name__}: {failure}")
        self._note(ended, began_s)

    def _note(self, ended: VllmAudit, began_s: float) -> None:
        with self._lock:
            self._ended.append(msgspec.structs.replace(ended, began_s=began_s, ended_s=now_s()))


def _every_s() -> float:
    setting = os.environ.get(EVERY_VARIABLE, str(_EVERY_S))
    with contextlib.suppress(ValueError):
        return math.inf if setting == "never" or float(setting) < 0 else float(setting)
    _logger.warning("%s is a number of seconds, or never, not %r: %g are taken", EVERY_VARIABLE, setting, _EVERY_S)
    return _EVERY_S


def merged_audits(workers: Sequence[Sequence[VllmAudit]]) -> Iterator[VllmAudit]:
    """The audits that every worker has ended: wrong where one found it, unknown where one could not tell."""
    for first in workers[0]:
        same = [each for audits in workers for each in audits if each.name == first.name]
        if len(same) < len(workers):
            continue
        worst = min(same, key=lambda each: _RANK[each.equal])
        if not worst.equal:
            yield worst
        elif len({(each.version, each.digest) for each in same}) == 1:
            yield first
        else:
            yield VllmAudit(name=first.name, said="a version came while live weights were read: ask again")
