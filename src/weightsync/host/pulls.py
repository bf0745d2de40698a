"""Pulls: one model's pulls, one after another, from whichever agent has it, into one staging."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

from weightsync.errors import StateError, WeightSyncError
from weightsync.host.agent_state import is_in
from weightsync.host.puller import Puller
from weightsync.host.relay import Relay
from weightsync.host.settings import RolloutConfig
from weightsync.host.staged_version import StagedVersion
from weightsync.host.staging import Staging
from weightsync.host.version_path import VersionPath
from weightsync.observe import Recorder
from weightsync.types import Deadline, Version

_logger = logging.getLogger(__name__)


class Pulls:
    """One pull at a time; the rest from any thread.

    Args:
        model_id: which model.
        config: of the service.
        recorder: where phases go.
        may_call: which other endpoints a publication may name.
        holders: loads that have not ended: what they read must not change.
        patch_limit, relay: see `Puller`.

    Raises:
        ConfigError: see `VersionPath`.
    """

    def __init__(
        self,
        model_id: str,
        config: RolloutConfig,
        *,
        recorder: Recorder,
        may_call: Callable[[str], bool],
        holders: Callable[[], Sequence[Future[Any]]],
        patch_limit: Callable[[], float],
        relay: Relay | None = None,
    ) -> None:
        self._model_id = model_id
        self._config = config
        self._recorder = recorder
        self._may_call = may_call
        self._holders = holders
        self._patch_limit = patch_limit
        self._relay = relay
        # two services of one name would end each other's transfers
        self._receiver_id = f"{config.service_id}-{uuid.uuid4().hex[:8]}/{model_id}"
        self._lock = threading.Lock()
        self._staging = Staging()
        self._paths = None if config.path_root is None else VersionPath(config.path_root, model_id)
        self._puller: Puller | None = None
        self._bytes: tuple[int, int] | None = None
        self._moving = False
        self._granted: tuple[Version, float, float] | None = None  # what agents had; asked since, had at; monotonic
        self._closed = False

    @property
    def progress(self) -> tuple[int, int] | None:
        """How many bytes of how many have come of the version that comes; None: nothing yet, or none comes."""
        with self._lock:
            return self._bytes

    @property
    def moving(self) -> bool:
        """Whether a version that agents have granted comes, or is here and in use."""
        with self._lock:
            return self._moving

    def waited_s(self, version: Version, since_s: float) -> float:
        """Seconds after `since_s` that agents were asked for that version, or a newer one of its run, before all of
        them had it."""
        with self._lock:
            granted = self._granted
        if granted is None or not is_in(version, granted[0]):
            return 0.0
        return max(0.0, granted[2] - max(granted[1], since_s))

    @contextlib.contextmanager
    def pulled(
        self, endpoint: str, *, at_least: Callable[[], Version], retrying: Callable[[WeightSyncError], None]
    ) -> Iterator[StagedVersion]:
        """What comes, see `Puller.pull`, there while the body runs, and as long as an engine reads it."""
        asked_s = time.monotonic()

        def moved(done: int, total: int) -> None:
            with self._lock:
                self._bytes = done, total

        def granted(version: Version) -> None:
            with self._lock:
                self._moving, self._bytes = True, None  # what has come so far was of another attempt
                if self._granted is None or self._granted[0] != version:  # else begun anew: the agent had it before
                    self._granted = version, asked_s, time.monotonic()

        def failed(error: WeightSyncError) -> None:
            self._moves_no_more()
            retrying(error)

        with contextlib.ExitStack() as stack:
            stack.callback(self._moves_no_more)
            found = self._puller_at(endpoint).pull(
                deadline=Deadline(self._config.pull_timeout_s),
                at_least=at_least,
                progress=moved,
                retrying=failed,
                granted=granted,
            )
            stack.callback(self._give_back, found)
            if self._paths is not None:
                stack.enter_context(self._paths.held(found))
            yield found

    def _moves_no_more(self) -> None:
        with self._lock:
            self._moving, self._bytes = False, None

    def _give_back(self, pulled: StagedVersion) -> None:
        """Gives a version's memory back; where an engine reads on, past its deadline, only when it has ended, and what
        is pulled next goes elsewhere."""
        if not (holders := self._holders()):
            pulled.release()
            return
        with self._lock:
            left, self._staging = self._staging, Staging()
            puller, self._puller = self._puller, None
        if puller is not None:
            puller.close()

        missing, lock = set(range(len(holders))), threading.Lock()

        def ended(number: int) -> None:
            with lock:
                missing.discard(number)
                if missing:
                    return
            pulled.release()
            left.close()

        _logger.warning(
            "model %s: an engine still reads %s: its memory is kept until then", self._model_id, pulled.version
        )
        for number, holder in enumerate(holders):  # without a thread: where none can be had, one may hang in an engine
            holder.add_done_callback(lambda _, number=number: ended(number))  # type: ignore[misc]

    def forget(self) -> None:
        """What is staged is wrong: nothing builds on it."""
        with contextlib.suppress(StateError):  # a host that can't be cut reads on: nothing is written before it ends
            self._staging.forget()

    def cancel(self) -> None:
        """Ends a pull under way soon. The next one is a new one."""
        with self._lock:
            puller = self._puller
        if puller is not None:
            puller.cancel()

    def end(self) -> None:
        """Ends a pull under way soon, and every later one at once. Gives nothing back."""
        with self._lock:
            self._closed = True
        self.cancel()

    def close(self) -> None:
        """Gives the staging back; nobody reads it any more. Idempotent."""
        self.end()
        with self._lock:
            puller = self._puller
        if puller is not None:
            puller.close()
        self._staging.close()

    def _puller_at(self, endpoint: str) -> Puller:
        with self._lock:
            before = self._puller
        if before is not None and before.endpoint == endpoint and not before.cancelled:
            return before
        if before is not None:
            before.close()
        puller = Puller(
            endpoint,
            self._model_id,
            receiver_id=self._receiver_id,
            token=self._config.sender_token,
            verify=self._config.sender_verify,
            may_call=self._may_call,
            transport=self._config.transport,
            mode=self._config.mode,
            patch_limit=self._patch_limit,
            num_streams=self._config.num_streams,
            trust_key=self._config.trust_key,
            staging=self._staging,
            recorder=self._recorder,
            relay=self._relay,
        )
        with self._lock:
            self._puller, closed = puller, self._closed
        if closed:
            puller.cancel()
        return puller
