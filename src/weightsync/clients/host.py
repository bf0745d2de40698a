"""RolloutClient: a trainer's or controller's view of a `RolloutService`. No torch."""

from __future__ import annotations

from typing import Any

from weightsync.net.client import JsonClient
from weightsync.types.fleet import CommitVersionsRequest, PrepareReply, PrepareRequest, ReleaseRequest
from weightsync.types.service import ModelStatus, NotifyRequest, RegisterSenderRequest, ServiceStatus

_MARGIN_S = 5.0


class RolloutClient(JsonClient):
    """The service's endpoints; see `JsonClient` for arguments and errors."""

    def __init__(
        self, url: str, *, token: str | None = None, verify: bool | str = True,
        runs: str = "a weightsync rollout service",
    ) -> None:  # fmt: skip
        super().__init__(url, runs=runs, token=token, verify=verify)

    def notify_version(self, request: NotifyRequest, *, timeout_s: float = 10.0) -> ModelStatus:
        """Tells it of a version; returns at once, or, with `wait_s`, when its engines serve it.

        Raises:
            NotRegisteredError: the sender's endpoint is not registered there.
            SyncFailedError: with `wait_s`: it failed; engines serve their old version, or refuse to serve.
            DeadlineExceededError: with `wait_s`: it takes longer. It goes on.
        """
        timeout_s = timeout_s if request.wait_s is None else request.wait_s + _MARGIN_S
        return self.call("POST", "/notify_version", ModelStatus, message=request, timeout_s=timeout_s)

    def check_versions(self, request: PrepareRequest) -> None:
        """Of a fleet's service: returns when the agents have these versions, as they say; nothing is pulled.

        Raises:
            NotPublishedError: an agent has not what it was said to have.
            StateError: the service is in no fleet.
            DeadlineExceededError: it takes longer.
        """
        self.call("POST", "/check_versions", dict[str, Any], message=request, timeout_s=request.wait_s + _MARGIN_S)

    def prepare_versions(self, request: PrepareRequest) -> PrepareReply:
        """Of a fleet's service: returns when these versions are staged there.

        Raises:
            StateError: the service is in no fleet.
            NotPublishedError: an agent has not what it was said to have; what was served is served.
            SyncFailedError: it failed; what was served is served.
            DeadlineExceededError: it takes longer. It goes on.
        """
        return self.call(
            "POST", "/prepare_versions", PrepareReply, message=request, timeout_s=request.wait_s + _MARGIN_S
        )

    def commit_versions(self, request: CommitVersionsRequest) -> ServiceStatus:
        """Returns when what was prepared is served.

        Raises:
            StateError: something of it is not staged. Nothing was changed.
            SyncFailedError: see `FleetMember.commit`.
            DeadlineExceededError: it takes longer. It goes on.
        """
        return self.call(
            "POST", "/commit_versions", ServiceStatus, message=request, timeout_s=request.wait_s + _MARGIN_S
        )

    def release_versions(self, request: ReleaseRequest, *, timeout_s: float = 10.0) -> None:
        """What is staged is let go."""
        self.call("POST", "/release_versions", dict[str, Any], message=request, timeout_s=timeout_s)

    def register_sender(self, request: RegisterSenderRequest, *, timeout_s: float = 10.0) -> None:
        """Makes an agent's endpoint known."""
        self.call("POST", "/register_sender", dict[str, Any], message=request, timeout_s=timeout_s)

    def status(self, *, timeout_s: float = 10.0) -> ServiceStatus:
        """What every model's engines serve, and what failed last."""
        return self.call("GET", "/status", ServiceStatus, timeout_s=timeout_s)

    def availability(self, *, timeout_s: float = 10.0) -> dict[str, dict[str, bool]]:
        """Whether engines answer generations now, by model and engine."""
        kind = dict[str, dict[str, dict[str, bool]]]
        return self.call("GET", "/availability", kind, timeout_s=timeout_s)["models"]
