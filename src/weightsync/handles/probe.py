"""probe: asks a server once which engine it is and what it can do, and says in words why it can't do the rest."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias, TypeVar

import msgspec

from weightsync.errors import ConfigError, EngineError, EngineUnreachableError, UnsupportedError
from weightsync.handles.foreign import ForeignClient
from weightsync.handles.releases import since
from weightsync.handles.sglang_messages import ModelInfo, RouterWorkers, ServerInfo
from weightsync.types import Deadline
from weightsync.types.message import learn

EngineKind: TypeAlias = Literal["vllm", "sglang", "sglang-router", "generic"]

_T = TypeVar("_T")
_METHOD_NOT_ALLOWED = 405
_NOT_IMPLEMENTED = 501


class Feature(enum.StrEnum):
    """What a sync method may ask of a server."""

    PUSH = "take pushed weights"
    RELOAD = "load weights from a folder"
    UPDATE = "be told to update its weights"
    VERSION = "say which weights it has"
    CHECKSUM = "sum up its live weights"
    WORKERS = "list its workers"


_ROUTES: Mapping[EngineKind, Mapping[Feature, Sequence[str]]] = {
    "vllm": {
        Feature.PUSH: (
            "/init_weight_transfer_engine", "/start_weight_update", "/update_weights", "/finish_weight_update",
            "/pause", "/resume", "/is_paused", "/reset_prefix_cache", "/get_world_size",
        ),
        Feature.RELOAD: ("/collective_rpc", "/pause", "/resume", "/is_paused", "/reset_prefix_cache"),
        Feature.VERSION: ("/weight_info", "/update_weight_version"),
        Feature.CHECKSUM: ("/weight_checker",),
    },
    "sglang": {
        Feature.PUSH: (
            "/init_weights_update_group", "/update_weights_from_distributed", "/update_weight_version",
            "/pause_generation", "/continue_generation",
        ),
        Feature.RELOAD: ("/update_weights_from_disk", "/pause_generation", "/continue_generation"),
        Feature.VERSION: ("/update_weight_version",),
        Feature.CHECKSUM: ("/weights_checker",),
    },
    "sglang-router": {Feature.WORKERS: ("/workers",)},
    "generic": {Feature.UPDATE: ("/update_weights",)},
}  # fmt: skip
MEANT_FOR: Mapping[EngineKind, frozenset[Feature]] = {kind: frozenset(each) for kind, each in _ROUTES.items()}
"""What each kind can do, in a release that lacks nothing."""
_NAMES = {
    "vllm": "vLLM",
    "sglang": "SGLang",
    "sglang-router": "an SGLang router",
    "generic": "a server of no kind known",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What a server is, and what it can't do.

    Attributes:
        url: which server.
        engine: what it is; "generic" where it is none of the others.
        release: as it says itself; None where it does not.
        lacks: why it can't do something; what is not in here it can do.
    """

    url: str
    engine: EngineKind
    release: str | None
    lacks: Mapping[Feature, str]

    def can(self, feature: Feature) -> bool:
        """Whether it can do that."""
        return feature not in self.lacks

    def need(self, *features: Feature) -> None:
        """Raises where it lacks one of them.

        Raises:
            ConfigError: says why, and what to do. Nothing was changed.
        """
        for feature in features:
            if feature in self.lacks:
                raise ConfigError(
                    f"{self.url} can't {feature}: {self.lacks[feature]}",
                    peer=self.url,
                    state_left="nothing was changed",
                )


class _OpenApi(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a server's description that is read: its routes."""

    paths: dict[str, msgspec.Raw]


class _Release(msgspec.Struct, frozen=True, kw_only=True):
    """What vLLM answers to `/version`."""

    version: str


class _Model(msgspec.Struct, frozen=True, kw_only=True):
    """A model that an OpenAI-style server lists."""

    id: str


class _Models(msgspec.Struct, frozen=True, kw_only=True):
    """What it answers to `/v1/models`."""

    data: list[_Model]


learn(_OpenApi, _Release, _Models)


def probe(url: str, *, token: str | None = None, verify: bool | str = True, timeout_s: float = 10.0) -> Capabilities:
    """Asks a server what it is. Changes nothing there.

    Args:
        url: of a server, or of a router.
        token: bearer token.
        verify: see `JsonClient`.
        timeout_s: for all that is asked.

    Raises:
        EngineUnreachableError: nobody answers.
        AuthError: the token is refused.
        EngineError: it is there, and fails.
        DeadlineExceededError: it takes longer.
    """
    with contextlib.closing(_Asker(url, token=token, verify=verify, deadline=Deadline(timeout_s))) as asker:
        return asker.capabilities()


def served_models(
    url: str, *, token: str | None = None, verify: bool | str = True, timeout_s: float = 10.0
) -> tuple[str, ...] | None:
    """The names under which a server, or those behind a router, serve models; None where it lists none. Arguments and
    errors are those of `probe`.
    """
    with contextlib.closing(_Asker(url, token=token, verify=verify, deadline=Deadline(timeout_s))) as asker:
        return asker.models()


class _Asker(ForeignClient):
    """One probe."""

    def __init__(self, url: str, *, token: str | None, verify: bool | str, deadline: Deadline) -> None:
        super().__init__(url, runs="an engine", needs="another one was expected", token=token, verify=verify)
        self._deadline = deadline

    def capabilities(self) -> Capabilities:
        """What it is, by what it alone answers: a router passes the questions of SGLang on to its workers."""
        described = self._answer("/openapi.json", _OpenApi)
        routes = None if described is None else frozenset(described.paths)
        if self._answer("/workers", RouterWorkers) is not None:
            return self._of("sglang-router", None, routes)
        if self._first(("/model_info", "/get_model_info"), ModelInfo) is not None:
            info = self._first(("/server_info", "/get_server_info"), ServerInfo)
            return self._of("sglang", None if info is None else info.version, routes)
        version = self._answer("/version", _Release)
        if version is None:
            return self._of("generic", None, routes)
        return self._of("vllm", version.version, routes)

    def models(self) -> tuple[str, ...] | None:
        listed = self._answer("/v1/models", _Models)
        return None if listed is None or not listed.data else tuple(each.id for each in listed.data)

    def _of(self, engine: EngineKind, release: str | None, routes: frozenset[str] | None) -> Capabilities:
        wanted = {route for each in _ROUTES[engine].values() for route in each}
        there = {route for route in wanted if (self._has(route) if routes is None else route in routes)}
        if engine == "sglang-router":
            there.add("/workers")
        lacks: dict[Feature, str] = {}
        for feature in Feature:
            needed = _ROUTES[engine].get(feature)
            missing = sorted(set(needed or ()) - there)
            if needed is None:
                lacks[feature] = f"it is {_NAMES[engine]}, which does nothing of the kind"
            elif missing:
                lacks[feature] = _why(engine, release, missing, nothing=not there)
        return Capabilities(url=self.url, engine=engine, release=release, lacks=lacks)

    def _first(self, paths: Sequence[str], kind: type[_T]) -> _T | None:
        for path in paths:
            if (answer := self._answer(path, kind)) is not None:
                return answer
        return None

    def _answer(self, path: str, kind: type[_T]) -> _T | None:
        """What it answers there; None where there is no such route, or it answers something else."""
        try:
            return self.call("GET", path, kind, timeout_s=self._deadline.check(f"answer to {path}", peer=self.url))
        except (EngineUnreachableError, UnsupportedError, EngineError) as error:
            if isinstance(error, EngineUnreachableError) or _fails(error):
                raise
            return None

    def _has(self, path: str) -> bool:
        """Whether there is such a route, of a server that does not describe itself: OPTIONS runs nothing."""
        try:
            self.call("OPTIONS", path, msgspec.Raw, timeout_s=self._deadline.check(f"answer to {path}", peer=self.url))
        except UnsupportedError as error:
            return _status(error) == _METHOD_NOT_ALLOWED
        except EngineError as error:
            if isinstance(error, EngineUnreachableError) or _fails(error):
                raise
            return _status(error) == 0  # an answer, if no JSON
        return True


def _why(engine: EngineKind, release: str | None, missing: Sequence[str], *, nothing: bool) -> str:
    if engine == "vllm" and nothing:
        return (
            "vLLM serves its weight-update routes only with VLLM_SERVER_DEV_MODE=1: start it so, on an address that "
            "nobody else reaches"
        )
    name = f"{_NAMES[engine]} {release}" if release else _NAMES[engine]
    return f"{name} has no {', '.join(missing)}: {since(_NAMES[engine], missing)}"


def _fails(error: Any) -> bool:
    """Whether it is the server that fails; one that knows no such method is just another server."""
    return _status(error) >= 500 and _status(error) != _NOT_IMPLEMENTED


def _status(error: Any) -> int:
    return int(error.details.get("status", 0))
