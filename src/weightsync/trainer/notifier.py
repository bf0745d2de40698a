"""Notifier: tells rollout services, or a controller, of each version, and waits for nobody until it is asked to.

One thread for each of them. Who is down is logged once, and told again every few seconds and with each new version. A
controller that was started again, and has forgotten what it was told, is told again. The services find versions without
this, too, where they know an agent (`sources`): a notification only wakes them.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import re
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from typing import Any

from weightsync.clients.controller import ControllerClient
from weightsync.clients.host import RolloutClient
from weightsync.clients.whose_status import is_controller
from weightsync.errors import (
    AuthError,
    ConfigError,
    DeadlineExceededError,
    EngineError,
    EngineUnreachableError,
    NotPublishedError,
    NotRegisteredError,
    SyncFailedError,
    UnsupportedError,
    VersionError,
    WeightSyncError,
)
from weightsync.handles.fanout import in_thread
from weightsync.trainer.engine_in_to import instead, refuse_an_engine
from weightsync.trainer.fleet_failures import failures_of
from weightsync.types import Deadline, Version
from weightsync.types.service import NotifyRequest, RegisterSenderRequest, ServiceStatus

_CALL_S = 5.0
_FIRST_CALL_S = 10.0
_RETRY_S = 2.0
_ROUND_S = 10.0  # of a wait: so long one request waits at the service
_PAUSE_S = 0.5  # between the first two requests of a wait where the first one came back at once
_LONGEST_PAUSE_S = 8.0  # each makes the host try again: what can't heal must not be tried twice a second
_AWAY_S = 1.0  # of a wait for one that did not serve the version before
_JOIN_S = 2.0
_MAX_FAILURES = 100  # different ones that are logged before something is served
_MAX_TOLD = 3  # instances of which an error says why they do not serve
_LOOK_S = 5.0  # one that does not serve yet what it was told of is asked so often why

_logger = logging.getLogger(__name__)


class Notifier:
    """Tells all of them. Training rank 0 alone has one. Thread-safe.

    Args:
        urls: of rollout services, or of controllers; each is asked which it is.
        token, verify: see `JsonClient`.

    Raises:
        ConfigError: a URL is none.
    """

    def __init__(self, urls: Sequence[str], *, model_id: str, token: str | None, verify: bool | str) -> None:
        self._hosts = [_Told(url, model_id=model_id, token=token, verify=verify) for url in urls]

    @property
    def urls(self) -> tuple[str, ...]:
        return tuple(host.url for host in self._hosts)

    def meet(self) -> None:
        """Asks each once who it is, for some seconds at most; who does not answer is logged.

        Raises:
            AuthError: one refuses the token.
            ConfigError: one has no such model, or is neither a rollout service nor a controller.
        """
        asked = [in_thread(host.meet, name="weightsync-meet") for host in self._hosts]
        wait_for(asked, timeout=_FIRST_CALL_S + 1.0)
        for each in asked:
            error = each.exception() if each.done() else None
            if error is not None:
                raise error

    def start(self, endpoints: Sequence[str]) -> None:
        """From here on they are told of versions.

        Args:
            endpoints: of the trainer's agents, the first rank's host's first.
        """
        for host in self._hosts:
            host.start(endpoints)

    def announce(self, version: Version) -> None:
        """There is a new version. Returns at once."""
        for host in self._hosts:
            host.announce(version)

    def why_not(self) -> dict[str, str]:
        """Why who was told does not serve it, or can't be told, as each was found last, by URL. It does not wait."""
        return {host.url: why for host in self._hosts if (why := host.why_not) is not None}

    def serving(self, version: Version) -> frozenset[str]:
        """URLs of those who served that version, or a newer one of its run, when they were asked last."""
        return frozenset(host.url for host in self._hosts if _includes(host.served, version))

    def begin_wait(
        self, version: Version, timeout_s: float, *, away: Collection[str] = ()
    ) -> Callable[[float], Mapping[str, str] | None]:
        """Begins to wait until those who are alive serve that version, or a newer one of its run.

        Args:
            version: which.
            timeout_s: for each of them.
            away: URLs of those who get a second.

        Returns:
            What waits for the outcome, for at most the seconds that it is given: why each of the others does not serve
            it, by URL; None where that is not known yet. It is known after `timeout_s`, and some seconds.
        """
        waits: dict[str, Future[str | None]] = {}
        for host in self._hosts:
            seconds = min(_AWAY_S, timeout_s) if host.url in away else timeout_s
            wait = functools.partial(host.wait_served, version, Deadline(seconds))
            waits[host.url] = in_thread(wait, name="weightsync-wait")

        def outcome(seconds: float) -> Mapping[str, str] | None:
            if wait_for(waits.values(), timeout=seconds).not_done:
                return None
            return {url: why for url, wait in waits.items() if (why := _outcome(wait)) is not None}

        return outcome

    def close(self) -> None:
        """Ends what is under way. Idempotent."""
        for host in self._hosts:
            host.close()


class _Told:
    """One rollout service, or one controller."""

    def __init__(self, url: str, *, model_id: str, token: str | None, verify: bool | str) -> None:
        if "+" in url.partition("://")[0] and "@" not in url:
            raise ConfigError(f"{url} in to= is an engine: {instead(url, model_id)}")
        runs = "a weightsync rollout service or controller"
        self._service = RolloutClient(url, token=token, verify=verify, runs=runs)
        self._controller = ControllerClient(url, token=token, verify=verify)
        self.url = self._service.url
        self._token, self._verify = token, verify
        self._model_id = model_id
        self._endpoints: tuple[str, ...] = ()
        self._is_controller: bool | None = None
        self._changed = threading.Condition()
        self._newest: Version | None = None
        self._done: Version | None = None
        self._introduced = False
        self._troubles: str | None = None
        self._looked_s = time.monotonic()
        self._behind = False  # it did not serve the newest when it was looked at last
        self._failing: set[str] = set()  # what was logged, until the newest is served there
        self.why_not: str | None = None  # why it does not serve what it was told of, or can't be told, when asked last
        self._waited_for: Version | None = None  # and is served there
        self.served: Version | None = None  # when it was asked last
        self._knows: Version | None = None  # a controller, of what trainers have told, when it was asked last
        self._known_run: str | None = None  # whose trainer has told it something last
        self._refused: Version | None = None  # by a controller, as another run has taken over
        self._told_again: Version | None = None  # because it knew less
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="weightsync-notify", daemon=True)

    def meet(self) -> None:
        """Learns who it is; that nobody answers is logged, and no error: it may come later.

        Raises:
            AuthError: it refuses the token.
            ConfigError: it is something else, or has no such model.
        """
        try:
            self._learn(_FIRST_CALL_S)
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
            except (SyncFailedError, NotPublishedError) as error:  # it tries again by itself, and so it may come right
                why = str(error)
            except EngineUnreachableError as error:
                return str(error)  # who is gone is not waited for
            except WeightSyncError as error:
                return f"{type(error).__name__}: {error}"
            with self._changed:
                self._changed.wait_for(lambda: self._closed, min(pause_s, deadline.remaining_s))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return why or f"it does not serve it within {deadline.said}{self._because()}"

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._service.close()
        self._controller.close()
        if self._thread.is_alive():
            self._thread.join(_JOIN_S)

    # --- the thread ---

    def _run(self) -> None:
        failed: Version | None = None
        while True:
            wait_s = _RETRY_S if failed is not None else _LOOK_S if self._behind else None
            with self._changed:
                self._changed.wait_for(functools.partial(self._has_work, failed, wait_s), wait_s)
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
                if newest == self._refused and not self._may_be_taken(newest):
                    failed = newest
                    continue
                self._tell(newest)
            except WeightSyncError as error:
                failed, self._refused = newest, newest if type(error) is VersionError else self._refused
                self._trouble(error)
                continue
            with self._changed:
                self._done, self._known_run, failed = newest, newest.run_id, None
            if self._troubles is not None:
                self._troubles = self.why_not = None
                _logger.info("%s can be told of new versions again: it was told of %s", self.url, newest)
            self._behind = True

    def _has_work(self, failed: Version | None, wait_s: float | None) -> bool:
        return self._closed or self._newest not in (self._done, failed) or (wait_s is None and self._behind)

    def _trouble(self, error: WeightSyncError) -> None:
        """Logged once, until it can be told again."""
        self._introduced = False
        self.why_not = f"{type(error).__name__}: {error}"
        if self._closed or self._troubles == type(error).__name__:
            return
        self._troubles = type(error).__name__
        _logger.warning("%s can't be told of new versions, it is tried again; the trainer goes on: %s", self.url, error)

    # --- what is said ---

    def _tell(self, version: Version) -> None:
        if self._learn(_CALL_S):
            self._controller.notify_version(version.run_id, self._model_id, version.number, self._endpoints[0])
            return
        self._introduce()
        self._notify(version, None)

    def _serves(self, version: Version, wait_s: float) -> bool:
        if self._learn(_CALL_S):
            if version == self._newest:  # it may not have heard of it: then all that it knows is served
                self._tell(version)
            self._controller.sync_weight_to_rollout_service(self._model_id, wait_s=wait_s)
            return self._controller.wait_version(version.run_id, self._model_id, version.number, wait_s=0.0)
        self._introduce()
        self._notify(version, wait_s)
        return True

    def _notify(self, version: Version, wait_s: float | None) -> None:
        notice = NotifyRequest(
            run_id=version.run_id, model_id=self._model_id, version=version.number, sender_endpoint=self._endpoints[0],
            wait_s=wait_s,
        )  # fmt: skip
        try:
            status = self._service.notify_version(notice, timeout_s=_CALL_S)
        except NotRegisteredError:  # it was started again, or knows these agents by another name
            self._introduced = False
            raise
        self._log_failures(status.errors)

    def _look(self) -> None:
        """Logs why what it was told of is not served there; by and by, from the notifier's own thread."""
        self._looked_s = time.monotonic()
        try:
            failures = self._seen()
        except WeightSyncError as error:  # whoever can't be asked can't be told either, which is logged
            _logger.debug("%s does not say what is served there: %s", self.url, error)
            return
        served = _includes(self.served, self._done) or self._done == self._waited_for
        with self._changed:
            self._behind = not served
            if not served and self._is_controller and self._has_forgotten():
                self._done = None  # it is told at once
        reasons = "; ".join(_of(who, why) for who, why in failures.items())
        self.why_not = None if served or not reasons else reasons
        self._log_failures({} if served else failures)
        if served:
            self._failing.clear()

    def _has_forgotten(self) -> bool:
        """Whether that controller was started again: it knows less than it was told, and no trainer of another run has
        told it anything since. A lower number may be one that was denied, too: of that it is told again once."""
        told, knows = self._done, self._knows
        if told is None or self._known_run != told.run_id:
            return False
        if knows is None:
            return True
        self._known_run = knows.run_id
        if _includes(knows, told) or knows.run_id != told.run_id or told == self._told_again:
            return False
        self._told_again = told
        return True

    def _may_be_taken(self, refused: Version) -> bool:
        """Whether that controller may take a version that it has refused, as another run had taken over: where that one
        was given up. One that was started again knows of no run, and is left to the other's trainer.

        Raises:
            WeightSyncError: it does not say.
        """
        of = self._controller.status(timeout_s=_CALL_S).models.get(self._model_id)
        return of is not None and (of.run_id == refused.run_id or (of.overdue and of.rollout_model_version < 0))

    def _log_failures(self, failures: Mapping[str, str]) -> None:
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

    def _seen(self, *, all_of_them: bool = False) -> Mapping[str, str]:
        """What has failed there, by whose it is ("": the sync); of a fleet with all that it says of its services,
        whether anything has failed or not. Notes what is `served`."""
        if not self._learn(_CALL_S):
            service = self._service.call("GET", "/status", ServiceStatus, timeout_s=_CALL_S).models.get(self._model_id)
            if service is None:  # it was started anew with other models, which the next notification says
                self.served = None
                return {}
            self.served = _version(service.run_id, service.version)
            return {**service.sender_errors, **service.errors}
        status = self._controller.status(timeout_s=_CALL_S)
        model = status.models.get(self._model_id)
        if model is None:
            self.served = None
            return {}
        self.served = _version(model.run_id, model.rollout_model_version)
        self._knows = _version(model.run_id, model.train_model_version)
        mine = [each for each in status.instances if self._model_id in each.models]
        return failures_of(mine, model.last_error, all_of_them=all_of_them)

    def _introduce(self) -> None:
        """Makes the agents known to a service; one that knows them by its own configuration refuses."""
        if self._introduced:
            return
        for endpoint in self._endpoints:
            request = RegisterSenderRequest(model_id=self._model_id, sender_endpoint=endpoint)
            with contextlib.suppress(NotRegisteredError):
                self._service.register_sender(request, timeout_s=_CALL_S)
        self._introduced = True

    def _learn(self, timeout_s: float) -> bool:
        """Whether it is a controller. Asked once."""
        if self._is_controller is None:
            refuse = functools.partial(
                refuse_an_engine, self.url, self._model_id, token=self._token, verify=self._verify, timeout_s=_CALL_S
            )
            try:
                status = self._service.call("GET", "/status", dict[str, Any], timeout_s=timeout_s)
            except UnsupportedError as error:  # one of our faces, and neither of the two
                refuse()
                raise ConfigError(f"{self.url} is no rollout host and no controller: {error.message}") from error
            except EngineError as error:
                if type(error) is not EngineError:
                    raise
                refuse()
                raise EngineError(  # or what stands before one that is being started
                    f"{error.message} If an engine is to run there: {instead('URL', self._model_id)}", peer=self.url
                ) from error
            if (controller := status.get("controller")) is not None:
                raise ConfigError(
                    f"{self.url} is one service of the fleet of {controller}: tell that controller, to={controller!r}"
                )
            self._is_controller = is_controller(self.url, status, [self._model_id])
        return self._is_controller


def _version(run_id: str | None, number: int | None) -> Version | None:
    return None if run_id is None or number is None or number < 0 else Version(run_id=run_id, number=number)


def _includes(served: Version | None, version: Version | None) -> bool:
    """Whether that is the version, or a newer one of its run."""
    if served is None or version is None:
        return False
    return served.run_id == version.run_id and served.number >= version.number


def _outcome(wait: Future[str | None]) -> str | None:
    error = wait.exception()
    return wait.result() if error is None else str(error) or type(error).__name__


def _of(who: str, why: str) -> str:
    return f"{who}: {why}" if who else why
