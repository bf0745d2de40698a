"""Told: one rollout service, or one controller, that is told of each version, by a thread of its own.

Who is down is logged once, and told again every few seconds and with each new version. A controller that was started
again, and has forgotten what it was told, is told again.
"""

from __future__ import annotations

import functools
import logging
import re
import threading
import time
from collections.abc import Sequence

from weightsync.errors import (
    AuthError,
    BusyError,
    ConfigError,
    DeadlineExceededError,
    EngineUnreachableError,
    NotPublishedError,
    NotRegisteredError,
    SyncFailedError,
    WeightSyncError,
)
from weightsync.net.http_edge import OF_A_PROXY
from weightsync.trainer.told_peers import Address, Failures, includes
from weightsync.types import Deadline, Version

FIRST_CALL_S = 10.0
_RETRY_S = 2.0
_ROUND_S = 10.0  # of a wait: so long one request waits at the service
_PAUSE_S = 0.5  # between the first two requests of a wait where the first one came back at once
_LONGEST_PAUSE_S = 8.0  # each makes the host try again: what can't heal must not be tried twice a second
_JOIN_S = 2.0
_MAX_FAILURES = 100  # different ones that are logged before something is served
_MAX_TOLD = 3  # instances of which an error says why they do not serve
_LOOK_S = 5.0  # one that does not serve yet what it was told of is asked so often why
_STILL_S = 15.0  # and one that served it, whether it still does

_logger = logging.getLogger(__name__)


class Told:
    """Tells one of them, and waits for it. Thread-safe.

    Args:
        url, model_id, token, verify: see `Address`.

    Raises:
        ConfigError: the URL is none, or an engine's.
    """

    def __init__(self, url: str, *, model_id: str, token: str | None, verify: bool | str) -> None:
        self._address = Address(url, model_id=model_id, token=token, verify=verify, failed=self._log_failures)
        self.url = self._address.url
        self._endpoints: tuple[str, ...] = ()
        self._changed = threading.Condition()
        self._newest: Version | None = None
        self._done: Version | None = None
        self._troubles: str | None = None
        self._looked_s = time.monotonic()
        self._behind = False  # it did not serve the newest when it was looked at last
        self._failing: set[str] = set()  # what was logged, until the newest is served there
        self.why_not: str | None = None  # why it does not serve what it was told of, or can't be told, when asked last
        self._waited_for: Version | None = None  # and is served there
        self.served: Version | None = None  # when it was asked last
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="weightsync-notify", daemon=True)

    def meet(self) -> None:
        """Learns who it is; that nobody answers is logged, and no error: it may come later.

        Raises:
            AuthError: it refuses the token.
            ConfigError: it is something else, or has no such model.
        """
        try:
            self._address.who(FIRST_CALL_S)
        except (AuthError, ConfigError):
            raise
        except WeightSyncError as error:
            self._trouble(error)

    def start(self, endpoints: Sequence[str]) -> None:
        self._endpoints = tuple(endpoints)
        self._thread.start()

    def announce(self, version: Version) -> None:
        with self._changed:
            self._newest = version
            self._changed.notify_all()

    def wait_served(self, version: Version, deadline: Deadline) -> str | None:
        """Why it does not serve that version; None where it does."""
        why = self._waited(version, deadline)
        if why is not None:
            with self._changed:
                self._behind, self._waited_for = True, None  # what was seen before is over; it is looked at
                self._changed.notify_all()
        return why

    def _waited(self, version: Version, deadline: Deadline) -> str | None:
        why, pause_s, self.served = None, _PAUSE_S, None  # what was seen before says nothing of now
        while not deadline.expired and not self._closed:
            try:
                if self._serves(version, min(_ROUND_S, max(0.1, deadline.remaining_s))):
                    self._waited_for = self.served = version
                    self.why_not = None
                    return None
            except DeadlineExceededError as error:
                why = error.message
            except (SyncFailedError, NotPublishedError, BusyError, NotRegisteredError) as error:
                why = str(error)  # it may come right: it tries again by itself, has room, or learns of these agents
            except EngineUnreachableError as error:
                return str(error)  # who is gone is not waited for
            except WeightSyncError as error:
                why = f"{type(error).__name__}: {error}"
                if error.details.get("status") not in OF_A_PROXY:
                    return why
            with self._changed:
                self._changed.wait_for(lambda: self._closed, min(pause_s, deadline.remaining_s))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return why or f"it does not serve it within {deadline.said}{self._because()}"

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._address.close()
        if self._thread.is_alive():
            self._thread.join(_JOIN_S)

    # --- the thread ---

    def _run(self) -> None:
        failed: Version | None = None
        while True:
            behind = self._behind
            wait_s = _RETRY_S if failed is not None else _LOOK_S if behind else _STILL_S
            with self._changed:
                self._changed.wait_for(functools.partial(self._has_work, failed, behind), wait_s)
                newest = self._newest
                if self._closed:
                    return
            if newest is None:
                continue
            if newest == self._done:
                self._look()
                continue
            if self._done is not None and time.monotonic() - self._looked_s >= _LOOK_S:
                self._look()  # versions may come so fast that it never waits; the newest is not served at once
            try:
                self._address.who().tell(newest, self._endpoints)
            except WeightSyncError as error:
                failed = newest
                self._trouble(error)
                continue
            with self._changed:
                self._done, failed = newest, None
            if self._troubles is not None:
                self._troubles = self.why_not = None
                _logger.info("%s can be told of new versions again: it was told of %s", self.url, newest)
            self._behind = True

    def _has_work(self, failed: Version | None, behind: bool) -> bool:
        return self._closed or self._newest not in (self._done, failed) or (self._behind and not behind)

    def _trouble(self, error: WeightSyncError) -> None:
        """Logged once, until it can be told again."""
        if (peer := self._address.found) is not None:
            peer.troubled()
        self.why_not = f"{type(error).__name__}: {error}"
        if self._closed or self._troubles == type(error).__name__:
            return
        self._troubles = type(error).__name__
        _logger.warning("%s can't be told of new versions, it is tried again; the trainer goes on: %s", self.url, error)

    def _serves(self, version: Version, wait_s: float) -> bool:
        return self._address.who().serves(version, self._endpoints, wait_s, is_newest=version == self._newest)

    def _look(self) -> None:
        """Logs why what it was told of is not served there; by and by, from the notifier's own thread."""
        self._looked_s = time.monotonic()
        try:
            failures = self._seen()
        except WeightSyncError as error:  # whoever can't be asked can't be told either, which is logged
            _logger.debug("%s does not say what is served there: %s", self.url, error)
            return
        served = includes(self.served, self._done)
        with self._changed:
            if not served and self._address.who().has_forgotten(self._done):
                self._done = self._waited_for = None  # it is told at once
            else:
                served = served or self._done == self._waited_for
            self._behind = not served
        reasons = "; ".join(_of(who, why) for who, why in failures.items())
        self.why_not = None if served or not reasons else reasons
        self._log_failures({} if served else failures)
        if served:
            self._failing.clear()

    def _log_failures(self, failures: Failures) -> None:
        """Each once: one that differs in numbers alone, as a version's, is the same."""
        for text in (_of(who, why) for who, why in failures.items()):
            words = re.sub(r"\d+", "", text)
            if words not in self._failing and len(self._failing) < _MAX_FAILURES and not self._closed:
                self._failing.add(words)
                _logger.warning("%s: what was published is not served there: %s", self.url, text)

    def _because(self) -> str:
        """What it says of that itself, behind a colon; empty where it says nothing."""
        try:
            failures = self._seen(all_of_them=True)
        except WeightSyncError:
            return ""
        reasons = [_of(who, why) for who, why in failures.items()]
        more = [f"and {len(reasons) - _MAX_TOLD} more"] if len(reasons) > _MAX_TOLD else []
        return f": {'; '.join(reasons[:_MAX_TOLD] + more)}" if reasons else ""

    def _seen(self, *, all_of_them: bool = False) -> Failures:
        """What has failed there; see `ControllerPeer.seen`. Notes what is `served`."""
        self.served, failures = self._address.who().seen(all_of_them=all_of_them)
        return failures


def _of(who: str, why: str) -> str:
    return f"{who}: {why}" if who else why
