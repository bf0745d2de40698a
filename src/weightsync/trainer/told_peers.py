"""Who is behind a URL in `to=`, a rollout service or a controller: how either is told of a version, asked whether it
serves one, and asked why not."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from weightsync.clients.controller import ControllerClient
from weightsync.clients.host import RolloutClient
from weightsync.clients.whose_status import is_controller
from weightsync.errors import ConfigError, EngineError, NotRegisteredError, UnsupportedError, VersionError
from weightsync.trainer.engine_in_to import instead, refuse_an_engine
from weightsync.trainer.fleet_failures import failures_of
from weightsync.types import Version
from weightsync.types.service import NotifyRequest, RegisterSenderRequest, ServiceStatus

CALL_S = 5.0

Failures = Mapping[str, str]
"""Why what was published is not served, by whose failure it is; "": the sync's."""


class HostPeer:
    """A rollout service. Thread-safe.

    Args:
        failed: is told of what has failed there, as the service says when it is told.
    """

    def __init__(self, client: RolloutClient, model_id: str, *, failed: Callable[[Failures], None]) -> None:
        self._client, self._model_id, self._failed = client, model_id, failed
        self._introduced = False
        self._follows: str | None = None  # a run, when it was `seen` last
        self._followed: str | None = None  # the last run that it is known to have followed

    def tell(self, version: Version, endpoints: Sequence[str]) -> None:
        """There is that version, at these agents."""
        self._notify(version, endpoints, None)

    def serves(self, version: Version, endpoints: Sequence[str], wait_s: float, *, is_newest: bool) -> bool:
        """Waits until it does; raises where it does not."""
        self._notify(version, endpoints, wait_s)
        return True

    def seen(self, *, all_of_them: bool) -> tuple[Version | None, Failures]:
        """What it serves, and what has failed there."""
        model = self._client.call("GET", "/status", ServiceStatus, timeout_s=CALL_S).models.get(self._model_id)
        if model is None:  # it was started anew with other models, which the next notification says
            return None, {}
        self._follows = model.wanted_run_id
        self._followed = self._follows or self._followed
        return version_of(model.run_id, model.version), {**model.sender_errors, **model.errors}

    def has_forgotten(self, told: Version | None) -> bool:
        """Whether it was started again: it follows nobody, and followed this run. One that knows its agents by its own
        configuration asks them itself, and loses nothing by being told."""
        if told is None or self._follows is not None or self._followed != told.run_id:
            return False
        self._introduced = False
        return True

    def troubled(self) -> None:
        """It could not be told: it may have been started again."""
        self._introduced = False

    def _notify(self, version: Version, endpoints: Sequence[str], wait_s: float | None) -> None:
        self._introduce(endpoints)
        notice = NotifyRequest(
            run_id=version.run_id, model_id=self._model_id, version=version.number, sender_endpoint=endpoints[0],
            wait_s=wait_s,
        )  # fmt: skip
        try:
            status = self._client.notify_version(notice, timeout_s=CALL_S)
        except NotRegisteredError:  # it was started again, or knows these agents by another name
            self._introduced = False
            raise
        self._followed = version.run_id
        self._failed(status.errors)

    def _introduce(self, endpoints: Sequence[str]) -> None:
        """Makes the agents known to it; one that knows them by its own configuration refuses."""
        if self._introduced:
            return
        for endpoint in endpoints:
            request = RegisterSenderRequest(model_id=self._model_id, sender_endpoint=endpoint)
            with contextlib.suppress(NotRegisteredError):
                self._client.register_sender(request, timeout_s=CALL_S)
        self._introduced = True


class ControllerPeer:
    """A controller. Thread-safe: what it knew when it was asked last is one reference each."""

    def __init__(self, client: ControllerClient, model_id: str) -> None:
        self._client, self._model_id = client, model_id
        self._knows: Version | None = None  # of what trainers have told it
        self._known_run: str | None = None  # whose trainer has told it something last
        self._refused: tuple[Version, VersionError] | None = None  # as another run has taken over
        self._told_again: Version | None = None  # because it knew less

    def tell(self, version: Version, endpoints: Sequence[str]) -> None:
        """There is that version.

        Raises:
            VersionError: another run has taken over. It is not told again of that version before that run is given up.
        """
        refused = self._refused
        if refused is not None and refused[0] == version and not self._may_be_taken(version):
            raise refused[1].with_traceback(None)
        try:
            self._client.notify_version(version.run_id, self._model_id, version.number, endpoints[0])
        except VersionError as error:
            if type(error) is VersionError:
                self._refused = version, error
            raise
        self._refused, self._known_run = None, version.run_id

    def serves(self, version: Version, endpoints: Sequence[str], wait_s: float, *, is_newest: bool) -> bool:
        """Whether all that it knows is served, within that time, and that version is among it."""
        if is_newest:  # it may not have heard of it: then all that it knows is served
            self.tell(version, endpoints)
        self._client.sync_weight_to_rollout_service(self._model_id, wait_s=wait_s)
        return self._client.wait_version(version.run_id, self._model_id, version.number, wait_s=0.0)

    def seen(self, *, all_of_them: bool) -> tuple[Version | None, Failures]:
        """What its fleet serves, and what has failed there.

        Args:
            all_of_them: with all that it says of its services, whether anything has failed or not.
        """
        status = self._client.status(timeout_s=CALL_S)
        model = status.models.get(self._model_id)
        if model is None:
            return None, {}
        self._knows = version_of(model.run_id, model.train_model_version)
        mine = [each for each in status.instances if self._model_id in each.models]
        served = version_of(model.run_id, model.rollout_model_version)
        return served, failures_of(mine, model.last_error, all_of_them=all_of_them)

    def has_forgotten(self, told: Version | None) -> bool:
        """Whether it was started again: when it was `seen` it knew less than it was told, and no trainer of another run
        has told it anything since. A lower number may be one that was denied, too: of that it is told again once.
        """
        knows = self._knows
        if told is None or self._known_run != told.run_id:
            return False
        if knows is None:
            return True
        self._known_run = knows.run_id
        if includes(knows, told) or knows.run_id != told.run_id or told == self._told_again:
            return False
        self._told_again = told
        return True

    def troubled(self) -> None:
        """It could not be told."""

    def _may_be_taken(self, refused: Version) -> bool:
        """Whether it may take a version that it has refused, as another run had taken over: where that one was given
        up. One that was started again knows of no run, and is left to the other's trainer.

        Raises:
            WeightSyncError: it does not say.
        """
        of = self._client.status(timeout_s=CALL_S).models.get(self._model_id)
        return of is not None and (of.run_id == refused.run_id or (of.overdue and of.rollout_model_version < 0))


class Address:
    """A URL in `to`, which is asked once who answers there.

    Args:
        failed: see `HostPeer`.

    Raises:
        ConfigError: it is none, or an engine's.
    """

    def __init__(
        self, url: str, *, model_id: str, token: str | None, verify: bool | str, failed: Callable[[Failures], None]
    ) -> None:
        if "+" in url.partition("://")[0] and "@" not in url:
            raise ConfigError(f"{url} in to= is an engine: {instead(url, model_id)}")
        runs = "a weightsync rollout service or controller"
        self._host = RolloutClient(url, token=token, verify=verify, runs=runs)
        self._controller = ControllerClient(url, token=token, verify=verify)
        self.url = self._host.url
        self._model_id, self._token, self._verify, self._failed = model_id, token, verify, failed
        self.found: HostPeer | ControllerPeer | None = None

    def who(self, timeout_s: float = CALL_S) -> HostPeer | ControllerPeer:
        """Who answers there.

        Raises:
            AuthError: it refuses the token.
            ConfigError: it is something else, or has no such model.
            WeightSyncError: nobody does, now.
        """
        if self.found is None:
            is_one = self._is_a_controller(timeout_s)
            self.found = (
                ControllerPeer(self._controller, self._model_id) if is_one
                else HostPeer(self._host, self._model_id, failed=self._failed)
            )  # fmt: skip
        return self.found

    def close(self) -> None:
        """Ends what is under way. Idempotent."""
        self._host.close()
        self._controller.close()

    def _is_a_controller(self, timeout_s: float) -> bool:
        try:
            status = self._host.call("GET", "/status", dict[str, Any], timeout_s=timeout_s)
        except UnsupportedError as error:  # one of our faces, and neither of the two
            self._refuse_an_engine()
            raise ConfigError(f"{self.url} is no rollout host and no controller: {error.message}") from error
        except EngineError as error:
            if type(error) is not EngineError:
                raise
            self._refuse_an_engine()
            raise EngineError(  # or what stands before one that is being started
                f"{error.message} If an engine is to run there: {instead('URL', self._model_id)}", peer=self.url
            ) from error
        if (controller := status.get("controller")) is not None:
            raise ConfigError(
                f"{self.url} is one service of the fleet of {controller}: tell that controller, to={controller!r}"
            )
        return is_controller(self.url, status, [self._model_id])

    def _refuse_an_engine(self) -> None:
        refuse_an_engine(self.url, self._model_id, token=self._token, verify=self._verify, timeout_s=CALL_S)


def version_of(run_id: str | None, number: int | None) -> Version | None:
    """What a status names; None where that run serves nothing yet."""
    return None if run_id is None or number is None or number < 0 else Version(run_id=run_id, number=number)


def includes(served: Version | None, version: Version | None) -> bool:
    """Whether that is the version, or a newer one of its run."""
    if served is None or version is None:
        return False
    return served.run_id == version.run_id and served.number >= version.number
