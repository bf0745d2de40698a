"""NetworkMethod: new weights reach engines over the network, by a push or by telling a server where they are.

A push moves the bytes through a process group, in the engine's own update protocol: the handles of the push's engines
(`VllmEngine`, `SGLangEngine`) speak it, and their arguments say how generation is paused and what becomes of caches.
A told service is document 5's: one POST says which model, which kind of weights, and where they are.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import msgspec

from weightsync.clients.foreign import ForeignClient
from weightsync.control.method import ModelSync
from weightsync.control.methods.folder import VersionFolder
from weightsync.errors import (
    ConfigError,
    DeadlineExceededError,
    EngineError,
    EngineUnreachableError,
    InvalidRequestError,
    NoEnginesError,
    SyncFailedError,
    VersionError,
)
from weightsync.types import SyncReport, Version
from weightsync.types.deadline import check_wait_s

_UNNAMED = "unnamed"
"""What a controller calls a run that no trainer has named."""


class Push(Protocol):
    """What has the trainer's weights and the engines' handles: a `PushSync` of this process, or its stand-in on Ray."""

    def sync_weights(self, version: int) -> SyncReport:
        """See `SyncMethod.sync_weights`."""
        ...


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


msgspec.json.Decoder(WeightsUpdated)  # learnt once, under the import lock; see types/engine.py


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToldService:
    """A service that loads weights when it is told where they are.

    Attributes:
        base_url: POST {base_url}/update_weights.
        model_name: the model as the service knows it.
        weights: the folder of versions, or a path that always has the newest weights.
        weight_type: kind of weights.
        token: bearer token.
        timeout_s: how long it may take.
    """

    base_url: str
    model_name: str
    weights: VersionFolder | str
    weight_type: str = "full"
    token: str | None = dataclasses.field(default=None, repr=False)
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
                told = client.call("POST", "/update_weights", WeightsUpdated, message=message, timeout_s=self.timeout_s)
            except (EngineUnreachableError, DeadlineExceededError) as error:
                error.state_left = "it serves its old version, or the new one if it heard the call"
                raise
        if told.success is not True:
            raise EngineError(
                f"{self.base_url} answered well, and says that it failed: {told.message or 'no reason'}",
                peer=self.base_url,
                version=str(version),
            )
        if told.version not in (None, version.number, str(version.number), str(version)):
            raise VersionError(f"{self.base_url} was told of {version}, and serves {told.version}", peer=self.base_url)
        return version.number

    def _client(self) -> ForeignClient:
        needs = "a told service answers POST /update_weights"
        return ForeignClient(self.base_url, runs="an inference service", needs=needs, token=self.token)

    @contextlib.contextmanager
    def _path(self, model_tag: str, version: Version) -> Iterator[str]:
        if isinstance(self.weights, str):
            yield self.weights
            return
        with self.weights.held(model_tag, version) as path:
            yield str(path)


class NetworkMethod(ModelSync):
    """A `ModelSync` over the network. Thread-safe.

    A push succeeds where its report says that every engine serves the version; engines that were left out make it a
    failure, until `evict_failed` goes on without them. A told service succeeds where it says so.

    Args:
        models: by model: a push, or a told service.
        allow_lost: engines that a push left out are no failure.

    Raises:
        NoEnginesError: there is no model.
        ConfigError: one of them is neither.
    """

    def __init__(self, models: Mapping[str, Push | ToldService], *, allow_lost: bool = False) -> None:
        if not models:
            raise NoEnginesError("method network needs a push or a service for each model")
        for tag, each in models.items():
            if not isinstance(each, ToldService) and not callable(getattr(each, "sync_weights", None)):
                raise ConfigError(f"model {tag!r} has {each!r:.80}, which is no push and no ToldService")
        self._models = dict(models)
        self._allow_lost = allow_lost
        self._lock = threading.Lock()
        self._failed: dict[str, set[str]] = {}  # by model, of its last sync
        self._evicted: dict[str, set[str]] = {}  # by model

    def sync(self, model_tag: str, version: Version) -> int:
        """See `ModelSync.sync`.

        Raises:
            InvalidRequestError: there is no such model.
            SyncFailedError: engines failed or were left out; `causes`, or the message, says which and why.
            VersionError: another version is served than was asked for.
            WeightSyncError: as the push or the service raises it.
        """
        model = self._models.get(model_tag)
        if model is None:
            raise InvalidRequestError(f"there is no model {model_tag!r} here: {', '.join(self._models)}")
        if isinstance(model, ToldService):
            return model.update(model_tag, version)
        with self._lock:
            self._failed.pop(model_tag, None)
        try:
            report = model.sync_weights(version.number)
        except SyncFailedError as error:
            with self._lock:
                self._failed[model_tag] = set(error.causes)
            raise
        return self._checked(model_tag, version, report)

    def evict_failed(self, model_tag: str) -> Sequence[str]:
        """See `ModelSync.evict_failed`. A push leaves out by itself who does not answer; from now on that is no failure
        for these.
        """
        with self._lock:
            failed = self._failed.pop(model_tag, set())
            self._evicted.setdefault(model_tag, set()).update(failed)
        return sorted(failed)

    def readmit(self, model_tag: str, engine_id: str) -> None:
        """An engine is missed again where it is left out."""
        with self._lock:
            self._evicted.get(model_tag, set()).discard(engine_id)

    def _checked(self, model_tag: str, version: Version, report: SyncReport) -> int:
        """The number that is served, by what the report says, whatever it was asked for."""
        served = report.version
        if served.number < version.number or version.run_id not in (_UNNAMED, served.run_id):
            raise VersionError(
                f"the push reports {served}, and {version} was asked for: does the trainer that notifies push it, and "
                "under its push's run_id?",
                version=str(version),
            )
        if not report.engine_ids:
            raise NoEnginesError("the push reports a success on no engine", version=str(version))
        with self._lock:
            missed = set(report.lost) - self._evicted.get(model_tag, set())
            self._failed[model_tag] = missed
        if missed and not self._allow_lost:
            raise SyncFailedError(
                f"the push left engines out: {'; '.join(f'{who}: {report.lost[who]}' for who in sorted(missed))}",
                causes={who: EngineError(report.lost[who], peer=who) for who in sorted(missed)},
                version=str(version),
                state_left=f"{', '.join(report.engine_ids)} serve it; the others serve an older version, or nothing",
            )
        return served.number
