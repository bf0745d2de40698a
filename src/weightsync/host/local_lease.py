"""LocalLease: a service without a controller lends its own engines the right to answer with what it has given them.

A server that was started again has the weights of its checkpoint, and would answer with them until its service has
loaded it. Its lease says since when every engine is known to serve what it was given: one that has started since then
refuses by itself. Before the first version every engine refuses.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping

from weightsync.errors import SharedMemoryError
from weightsync.handles.fanout import in_thread
from weightsync.host.model_updater import ModelUpdater
from weightsync.memory import ServingLease, boot_s
from weightsync.types.service import LeaseStatus

_EVERY_S = 0.25
_STOP_S = 5.0

_logger = logging.getLogger(__name__)


class LocalLease:
    """Of one service, from `start` to `close`.

    Args:
        models: by model_id.
        lease: what engines look at. What is there stays lent: their service was started again, and they were not.
        lease_s: for how long engines answer after their service was last alive.
    """

    def __init__(self, models: Mapping[str, ModelUpdater], lease: ServingLease, lease_s: float) -> None:
        self._models = models
        self._lease = lease
        self._lease_s = lease_s
        self._stop = threading.Event()
        self._failed = False
        self._thread = threading.Thread(target=self._run, name="weightsync-local-lease", daemon=True)

    def adopt(self) -> None:
        """Takes for served what engines were given by the service before this one. Waits for their answers."""
        asked = [in_thread(model.adopt_any, name="weightsync-adopt") for model in self._models.values()]
        for name, each in zip(self._models, asked, strict=True):
            if (error := each.exception()) is not None:  # a bug: whoever can't be asked now is loaded
                _logger.error("model %s: engines could not be asked what they serve", name, exc_info=error)

    def start(self) -> None:
        """Starts to lend. Without a controller there are no sets, so nobody lifts a hold of one later."""
        if self._lease.torn:
            self._lease.lift()
        self._thread.start()

    def close(self) -> None:
        """Engines answer until the lease is over, or another service of this file is there. Idempotent."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(_STOP_S)
        self._lease.release()

    @property
    def status(self) -> LeaseStatus:
        """What engines answer under."""
        left_s, why = self._lease.left_s, None
        if self._lease.damaged:
            return LeaseStatus(left_s=left_s, why_none=self._lease.damage, failed=True)
        if left_s <= 0 or min(model.engines.seen_s() for model in self._models.values()) <= 0:
            why = "not every engine is known to serve what this service gave it"
            if any(model.is_anew for model in self._models.values()):
                why = "what is served was published anew by another life of its trainer"
        return LeaseStatus(left_s=left_s, why_none=why)

    def _run(self) -> None:
        while True:
            seen_s = min(model.engines.loaded_s() for model in self._models.values())
            if any(model.is_anew for model in self._models.values()):
                self._revoke()
            elif seen_s > 0:
                self._renew(boot_s() + self._lease_s, seen_s)
            if self._stop.wait(_EVERY_S):
                return

    def _revoke(self) -> None:
        """What is served is not what the living trainer published under that name, or it never published it."""
        try:
            self._lease.revoke()
        except SharedMemoryError as error:
            _logger.warning("the lease can't be revoked, engines refuse when it is over: %s", error)

    def _renew(self, until_s: float, seen_s: float) -> None:
        try:
            self._lease.renew(until_s, seen_s=seen_s)
            self._failed = False
        except SharedMemoryError as error:
            if not self._failed:
                _logger.warning("no lease can be lent, engines refuse when it is over: %s", error)
            self._failed = True
