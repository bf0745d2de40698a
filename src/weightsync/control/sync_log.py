"""SyncLog: what the log says of the syncs of one model, and how they ended."""

from __future__ import annotations

import logging

from weightsync.errors import NoEnginesError, WeightSyncError
from weightsync.types import Version

_logger = logging.getLogger(__name__)


class SyncLog:
    """Of one model; one sync at a time. What waits for who is about to come is told once a version, as no failure."""

    def __init__(self, model_tag: str) -> None:
        self._model_tag = model_tag
        self._awaited: tuple[Version, str] | None = None

    def served(self, version: Version, seconds: float) -> None:
        self._awaited = None
        _logger.info("model %s: %s is served after %.2f s", self._model_tag, version, seconds)

    def failed(self, version: Version, error: WeightSyncError) -> None:
        before, self._awaited = self._awaited, None
        if not (isinstance(error, NoEnginesError) and error.waits):
            _logger.warning("model %s: the sync of %s failed: %s", self._model_tag, version, error)
            return
        self._awaited = version, error.message
        if before != self._awaited:
            _logger.warning("model %s: %s is not served: %s", self._model_tag, version, error.message)

    def lost(self, number: int, error: BaseException) -> None:
        self._awaited = None
        _logger.error("model %s: the sync of version %d was lost: %r", self._model_tag, number, error)

    def given_up(self, version: Version, error: str | None, *, dark: bool) -> None:
        """`dark`: nobody answers."""
        if self._awaited is None:
            then = "nobody answers" if dark else "rollout goes on with what it serves"
            _logger.error(
                "model %s: %s is not served after all retries: %s (%s)", self._model_tag, version, then, error
            )
