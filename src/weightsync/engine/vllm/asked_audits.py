"""AskedAudits: a vLLM worker reads its live weights when it is asked, beside whatever vLLM does.

vLLM returns no data and waits for no thread of ours. So an audit has a name that its asker made: each worker keeps how
the last ones ended, its state tells them, and one counts when every worker has ended it.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Iterator, Sequence

import msgspec

from weightsync.errors import EngineError, as_weightsync_error
from weightsync.handles.fanout import in_thread
from weightsync.handles.vllm_messages import VllmAudit
from weightsync.observe import now_s
from weightsync.types import EngineReply

_KEPT = 8
_RANK = {False: 0, None: 1, True: 2}


class AskedAudits:
    """Of one worker. Thread-safe.

    Args:
        verify: see `EngineWorker.verify`; those who ask for the same at the same time share one reading.
    """

    def __init__(self, verify: Callable[[], EngineReply]) -> None:
        self._verify = verify
        self._lock = threading.Lock()
        self._ended: collections.deque[VllmAudit] = collections.deque(maxlen=_KEPT)

    def begin(self, name: str) -> None:
        """Begins one; waits for nothing."""
        in_thread(lambda: self._run(name), name="weightsync-vllm-audit")

    @property
    def ended(self) -> tuple[VllmAudit, ...]:
        """The last ones that have ended here."""
        with self._lock:
            return tuple(self._ended)

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
            said = as_weightsync_error(error, EngineError, "the audit failed")
            ended = VllmAudit(name=name, said=f"{type(said).__name__}: {said}")
        with self._lock:
            self._ended.append(msgspec.structs.replace(ended, began_s=began_s, ended_s=now_s()))


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
