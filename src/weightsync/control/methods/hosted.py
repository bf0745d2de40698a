"""HostedMethod: what `tinker` and `weaver` share.

A hosted service has the weights and samples with them. Nothing is moved by us: a sync asks the service, and checks what
it says that it serves.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import ClassVar, Generic, TypeVar

from weightsync.control.method import SyncMethod
from weightsync.errors import (
    AuthError,
    ConfigError,
    DeadlineExceededError,
    EngineError,
    EngineUnreachableError,
    InvalidRequestError,
    VersionError,
    WeightSyncError,
    as_weightsync_error,
)
from weightsync.handles.fanout import in_thread
from weightsync.types import Deadline, Version
from weightsync.types.deadline import check_wait_s

_H = TypeVar("_H")
_T = TypeVar("_T")
_UNREACHABLE = frozenset({"APIConnectionError", "ConnectError", "ConnectionError"})
_REFUSED = frozenset({"AuthenticationError", "PermissionDeniedError", "PermissionError"})


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServedWeights:
    """What a service says that it samples with.

    Attributes:
        run_id, version: which version it is; both None before the first.
        path: under which the service has the weights.
    """

    run_id: str | None
    version: int | None
    path: str | None


class HostedMethod(SyncMethod, Generic[_H]):
    """A `SyncMethod` over a hosted service. Thread-safe.

    Args:
        holders: who holds the service's clients, of the model "default"; or one for each model, by its tag; more by
            `hold`.
        timeout_s: for a whole sync.

    Raises:
        InvalidRequestError: a time one can't wait.
        ConfigError: a holder lacks a call, see `hold`.
    """

    service = "the service"
    calls: ClassVar[tuple[str, ...]] = ()
    """What a holder has to have."""

    def __init__(self, holders: _H | Mapping[str, _H], *, timeout_s: float = 600.0) -> None:
        self._holders: dict[str, _H] = {}
        self._timeout_s = check_wait_s("timeout_s", timeout_s)
        for model_tag, holder in (holders if isinstance(holders, Mapping) else {"default": holders}).items():
            self.hold(model_tag, holder)

    def hold(self, model_tag: str, holder: _H) -> None:
        """From now on this is who holds the service's clients of a model.

        Raises:
            ConfigError: it lacks a call that a sync needs. Nothing was changed.
        """
        lacks = [name for name in self.calls if not callable(getattr(holder, name, None))]
        if lacks:
            raise ConfigError(
                f"{type(holder).__name__} can't hold {self.service}'s clients of model {model_tag!r}: it has no "
                f"{', no '.join(lacks)}; see {self.service.title()}ServiceHolder"
            )
        self._holders[model_tag] = holder

    def sync_weights(self, model_tag: str, version: Version) -> int:
        """See `SyncMethod.sync_weights`.

        Raises:
            InvalidRequestError: there is no holder of this model.
            DeadlineExceededError: no answer in time. What was asked for may still be done.
            VersionError: it serves something else than it was asked for.
            AuthError, EngineUnreachableError, EngineError: what the service, or its client, raised.
        """
        holder = self._holder(model_tag)
        try:
            served = self._update(holder, model_tag, version, Deadline(self._timeout_s))
        except Exception as error:
            typed = self._typed(error)
            typed.version = typed.version if typed.version is not None else str(version)
            if typed is error:
                raise
            raise typed from error
        return self._checked(served, version)

    @abc.abstractmethod
    def _update(self, holder: _H, model_tag: str, version: Version, deadline: Deadline) -> ServedWeights:
        """Has the service serve this version, or a newer one of its run; what it says that it serves."""

    def _holder(self, model_tag: str) -> _H:
        holder = self._holders.get(model_tag)
        if holder is None:
            known = ", ".join(self._holders) or "none"
            raise InvalidRequestError(
                f"{self.service} has no holder of model {model_tag!r}; there are {known}: "
                f"set_{self.service}_service_holder sets it"
            )
        return holder

    def _within(self, deadline: Deadline, what: str, function: Callable[[], _T]) -> _T:
        """Calls a foreign client in a thread, until the deadline.

        Raises:
            DeadlineExceededError: it takes longer; it goes on, and nobody looks at what comes of it.
        """
        deadline.check(what, peer=self.service)
        return self._until(deadline, what, in_thread(function, name=f"weightsync-{self.service}"))

    def _until(self, deadline: Deadline, what: str, call: Future[_T]) -> _T:
        """What comes of a call that is under way."""
        try:
            return call.result(deadline.check(what, peer=self.service))
        except TimeoutError as error:  # ours, or the client's own
            raise DeadlineExceededError(
                f"no {what} within {deadline.said}", peer=self.service, state_left="the old version is sampled"
            ) from error

    def _checked(self, served: object, version: Version) -> int:
        """The number that is served, where that is what was asked for.

        Raises:
            EngineError: what it says is no answer.
            VersionError: it serves another run, or an older version.
        """
        fine = isinstance(served, ServedWeights) and isinstance(served.path, str | None)
        if not fine or not isinstance(served, ServedWeights) or type(served.version) not in (int, type(None)):
            raise EngineError(f"{served!r:.200} does not say what is served", peer=self.service, version=str(version))
        if served.run_id != version.run_id or served.version is None or served.version < version.number:
            raise VersionError(
                f"it answered well and serves {served.run_id}/{served.version}",
                peer=self.service, version=str(version), state_left="another version than was asked for is sampled",
            )  # fmt: skip
        if not served.path:
            raise EngineError("it names no path of what it serves", peer=self.service, version=str(version))
        return served.version

    def _typed(self, error: BaseException) -> WeightSyncError:
        """An error of a foreign client, by the names of its kinds: the client need not be installed here."""
        kinds = {kind.__name__ for kind in type(error).__mro__}
        kind: type[WeightSyncError] = EngineError
        if kinds & _REFUSED:
            kind = AuthError
        elif kinds & _UNREACHABLE:
            kind = EngineUnreachableError
        return as_weightsync_error(error, kind, f"{self.service} failed", peer=self.service)
