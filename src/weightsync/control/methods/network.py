"""NetworkMethod: an inference service is told over HTTP where new weights are. The call is document 5's: one POST says
which model, which kind of weights, and where they are.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping

import msgspec

from weightsync.control.method import SyncMethod
from weightsync.control.methods.folder import VersionFolder
from weightsync.errors import (
    ConfigError,
    DeadlineExceededError,
    EngineError,
    EngineUnreachableError,
    InvalidRequestError,
    NoEnginesError,
    VersionError,
)
from weightsync.handles.foreign import ForeignClient
from weightsync.types import Version
from weightsync.types.deadline import check_wait_s
from weightsync.types.message import learn


class UpdateWeights(msgspec.Struct, frozen=True, kw_only=True):
    """What a told service is sent, under document 5's names."""

    model_name: str
    weight_type: str
    weight_path: str


class WeightsUpdated(msgspec.Struct, frozen=True, kw_only=True):
    """What it answers.

    Attributes:
        success: whether the weights are served.
        message: why not.
        version: which weights they are, as "run/number" or a number, where it says so.
    """

    success: bool
    message: str = ""
    version: str | int | None = None


learn(WeightsUpdated)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToldService:
    """A service that loads weights when it is told where they are.

    Attributes:
        base_url: POST {base_url}/update_weights.
        model_name: the model as the service knows it.
        weights: the folder of versions, or a path that always has the newest weights.
        weight_type: kind of weights.
        token: bearer token.
        verify: see `JsonClient`.
        timeout_s: how long it may take.
    """

    base_url: str
    model_name: str
    weights: VersionFolder | str
    weight_type: str = "full"
    token: str | None = dataclasses.field(default=None, repr=False)
    verify: bool | str = True
    timeout_s: float = 300.0

    def __post_init__(self) -> None:
        if not (self.model_name and self.weight_type and self.weights):
            raise ConfigError("a told service has a model_name, a weight_type and a place of its weights")
        check_wait_s("timeout_s", self.timeout_s)
        self._client().close()

    def update(self, model_tag: str, version: Version) -> int:
        """Tells it, and waits for its answer; the number of the version that it serves.

        Raises:
            EngineError: it says that it failed, or its answer is none.
            VersionError: it says that it serves something else, or the version is not in the folder.
            WeightSyncError: it can't be reached, or takes too long.
        """
        client = self._client()
        with contextlib.closing(client), self._path(model_tag, version) as path:
            message = UpdateWeights(model_name=self.model_name, weight_type=self.weight_type, weight_path=path)
            try:
                reply = client.call(
                    "POST", "/update_weights", WeightsUpdated, message=message, timeout_s=self.timeout_s
                )
            except (EngineUnreachableError, DeadlineExceededError) as error:
                error.state_left = "it serves its old version, or the new one if it heard the call"
                raise
        if reply.success is not True:
            raise EngineError(
                f"{self.base_url} answered well, and says that it failed: {reply.message or 'no reason'}",
                peer=self.base_url,
                version=str(version),
            )
        if reply.version not in (None, version.number, str(version.number), str(version)):
            raise VersionError(f"{self.base_url} was told of {version}, and serves {reply.version}", peer=self.base_url)
        return version.number

    def _client(self) -> ForeignClient:
        needs = "a told service answers POST /update_weights"
        return ForeignClient(
            self.base_url, runs="an inference service", needs=needs, token=self.token, verify=self.verify
        )

    @contextlib.contextmanager
    def _path(self, model_tag: str, version: Version) -> Iterator[str]:
        if isinstance(self.weights, str):
            yield self.weights
            return
        with self.weights.held(model_tag, version) as path:
            yield str(path)


class NetworkMethod(SyncMethod):
    """A `SyncMethod` over services that are told where weights are. Thread-safe.

    Args:
        services: by model.

    Raises:
        NoEnginesError: there is no model.
        ConfigError: one of them is no `ToldService`.
    """

    def __init__(self, services: Mapping[str, ToldService]) -> None:
        if not services:
            raise NoEnginesError("method network needs a service for each model")
        for tag, each in services.items():
            if not isinstance(each, ToldService):
                raise ConfigError(f"model {tag!r} has {each!r:.80}, which is no ToldService; PushMethod takes pushes")
        self._services = dict(services)

    def sync_weights(self, model_tag: str, version: Version) -> int:
        """See `SyncMethod.sync_weights`, and `ToldService.update` for errors.

        Raises:
            InvalidRequestError: there is no such model.
        """
        service = self._services.get(model_tag)
        if service is None:
            raise InvalidRequestError(f"there is no model {model_tag!r} here: {', '.join(self._services)}")
        return service.update(model_tag, version)
