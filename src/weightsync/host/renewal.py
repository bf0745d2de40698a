"""Renewal: tells agents that this receiver is at work on what they granted, while it reads nothing of it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping

from weightsync.errors import TransferAbortedError, WeightSyncError
from weightsync.host.agent_calls import Agents, Granted
from weightsync.host.progress import Progress
from weightsync.types.transfer_messages import Transport

_EVERY_S = 0.5
"""A lease that nobody reads or renews for a second is the first that a trainer takes back."""
_SHARE = 0.25

_logger = logging.getLogger(__name__)


class Renewal:
    """Renews grants from `keep` to `close`, in a thread: an agent's while no bytes arrive, a store's all the time. One
    for each attempt.

    Making room for a large model, or asking several agents with long manifests, takes longer than an agent waits for a
    receiver that says nothing.

    Args:
        agents: who granted.
        granted: what is to be renewed; its owner adds to it, and empties it.
    """

    def __init__(self, agents: Agents, granted: Mapping[int, Granted]) -> None:
        self._agents = agents
        self._granted = granted
        self._moved_s = time.monotonic()
        self._over = threading.Event()
        self._every_s = min([_EVERY_S, *(_SHARE * each.grant.take_up_s for each in granted.values())])
        self._thread = threading.Thread(target=self._run, name="weightsync-renewal", daemon=True)

    def start(self) -> None:
        """Begins. Where there is no thread left nothing is renewed, and the agent's own patience counts."""
        try:
            self._thread.start()
        except RuntimeError as error:
            _logger.warning("grants can't be renewed: %s", error)

    def moved(self) -> None:
        """Bytes have come, so the agent knows."""
        self._moved_s = time.monotonic()

    def told_too(self, progress: Progress | None) -> Progress:
        """Hears of bytes before `progress` does."""

        def moved(done: int, total: int) -> None:
            self.moved()
            if progress is not None:
                progress(done, total)

        return moved

    def close(self) -> None:
        """Ends soon. Idempotent."""
        self._over.set()

    def _run(self) -> None:
        lost: set[int] = set()
        while not self._over.wait(self._every_s):
            reads = time.monotonic() - self._moved_s < self._every_s
            for index, each in tuple(self._granted.items()):
                if reads and each.grant.transport is not Transport.STORE:  # nobody at a store sees what is read of it
                    continue
                if index not in lost and not self._over.is_set():
                    try:
                        self._agents.renew(each)
                    except TransferAbortedError:  # who reads it is told so
                        lost.add(index)
                    except WeightSyncError as error:  # the next turn tries again
                        _logger.debug("%s did not renew a grant: %s", each.endpoint, error)
