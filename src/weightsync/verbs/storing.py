"""What `weightsync.publish` does with an object store: the writer's settings, its start, and the wait for the last
version. The writer is a process of its own (`trainer.sink_process`); rank 0 has it."""

from __future__ import annotations

import logging
import time

import msgspec

from weightsync.config import WeightSyncConfig
from weightsync.errors import ConfigError
from weightsync.objects.urls import checked_store_url
from weightsync.trainer.publisher import WeightManager
from weightsync.trainer.sink_process import SinkProcess
from weightsync.types import Version
from weightsync.types.sink import SinkConfig

_CLAIM_S = 15.0
_OF_A_STORE = ("sign_key", "anchor_every", "keep_s")

_logger = logging.getLogger(__name__)


def sink_config(
    config: WeightSyncConfig,
    *,
    store: str | None,
    sign_key: str | None,
    model_id: str,
    token: str | None,
    certificate: str | None,
) -> SinkConfig | None:
    """How the store's writer runs; None: there is no store. Its run and its agents are known later.

    Args:
        config: `publish` counts.
        store, sign_key: they win.
        model_id, token: of the trainer.
        certificate: of its agents, which the writer takes.

    Raises:
        ConfigError: the URL names no place in a store; or there is none, and something was said of it.
    """
    chosen = config.publish
    place = store or chosen.store
    if place is None:
        said = {key for key, _ in config.asked()} & {f"publish.{key}" for key in _OF_A_STORE}
        if unread := sorted(said | ({"sign_key="} if sign_key is not None else set())):
            raise ConfigError(f"{', '.join(unread)}: read where there is a store alone: say store= or publish.store")
        return None
    url = checked_store_url(place, whose="the store's")
    if url.startswith("memory://"):  # the writer is a process of its own: nobody else would ever see it
        raise ConfigError(
            f"the store's URL is of one process's memory, and a trainer's store is for others: {url[:200]!r}"
        )
    return SinkConfig(
        store=url, model_id=model_id, run_id="", agents=(), token=token,
        verify=certificate or True, sign_key=sign_key or chosen.sign_key, anchor_every=chosen.anchor_every,
        keep_s=chosen.keep_s, sweep_s=max(1.0, chosen.keep_s / 10),
    )  # fmt: skip


class Storing:
    """Every rank has one, and calls it in the same order.

    Args:
        manager: started before `begin`.
        config: see `sink_config`.

    Attributes:
        sink: the writer, on rank 0.
    """

    def __init__(self, manager: WeightManager, config: SinkConfig) -> None:
        self._manager = manager
        self._config = config
        self.sink: SinkProcess | None = None

    def begin(self) -> None:
        """Starts the writer, and waits for its claim of the place.

        Raises:
            RunClaimedError: another trainer writes into this place. On every rank.
            WeightSyncError: the store refuses the credential, or the key can't be read.
        """

        def claimed(seconds: float) -> bool:
            if self.sink is None:
                manager = self._manager
                config = msgspec.structs.replace(self._config, run_id=manager.run_id, agents=manager.endpoints)
                self.sink = SinkProcess(config)
                self.sink.start(wait_s=_CLAIM_S + config.takeover_s)
            return self.sink.wait_claimed(seconds)

        self._manager.wait_for_first_rank(claimed)

    def wait(self, newest: Version, *, timeout_s: float) -> None:
        """Until a version is in the store; a warning says why it is not, after so long."""
        until_s = time.monotonic() + timeout_s
        why: list[str | None] = [None]

        def done(seconds: float) -> bool:
            assert self.sink is not None
            why[0] = self.sink.wait_stored(newest.number, timeout_s=seconds)
            return why[0] is None or self.sink.failed is not None or time.monotonic() >= until_s

        self._manager.wait_for_first_rank(done)
        if why[0] is not None:
            _logger.warning("%s is not in %s: %s", newest, self._config.store, why[0])

    def close(self) -> None:
        """Ends the writer: what it is at goes to its end, for a moment. Idempotent."""
        if self.sink is not None:
            self.sink.close()
