"""How each engine loads a version from a folder: `SGLangDisk` and `VllmDisk`, one object a server.

    load      pause -> load the folder -> drop what was cached -> name the version, and look whether it has that name
    checksum  of the live weights, by the engine's own means
    resume    generation goes on

What fails before the load leaves the old version serving. What fails from then on leaves the engine paused: nobody can
say from outside which weights are there, and the next load that succeeds lets it go on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, Protocol

from weightsync.clients.sglang_api import SGLangApi
from weightsync.clients.sglang_messages import PauseMode, UpdateFromDisk
from weightsync.clients.vllm_api import VllmHttpApi
from weightsync.errors import ConfigError, EngineError, UnsupportedError, VersionError, WeightSyncError
from weightsync.types import Deadline, Version

Running = Literal["keep", "abort"]
KvCache = Literal["clear", "keep"]

_OLD = "it serves its old version"
_UNKNOWN = "it is paused, with the old weights, the new ones or parts of both; the next sync that succeeds resumes it"
_NEW = "it has the new weights; it is paused, perhaps"
_RESUME_S = 5.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class DiskSettings:
    """How engines load.

    Attributes:
        running: what becomes of requests that run. "keep": they stand still and go on afterwards, on the new weights;
            "abort": they end with what they have.
        kv_cache: "clear": nothing computed on old weights is used afterwards; "keep": prefixes and kept requests go on
            with keys and values of the old weights.
        load_format: of SGLang: how files are read; None: as at the server's start.
    """

    running: Running = "keep"
    kv_cache: KvCache = "clear"
    load_format: str | None = None

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("running", self.running, ("keep", "abort")),
            ("kv_cache", self.kv_cache, ("clear", "keep")),
        ):
            if value not in allowed:
                raise ConfigError(f"{name} is one of {', '.join(allowed)}, not {value!r}")

    @property
    def clear(self) -> bool:
        """Whether caches are dropped."""
        return self.kv_cache == "clear"


class DiskEngine(Protocol):
    """A server that loads from a folder. Thread-safe; one load at a time."""

    @property
    def name(self) -> str:
        """Its URL."""
        ...

    def load(self, path: Path, version: Version, *, deadline: Deadline) -> None:
        """Loads a version; it is paused then. After an error the error's `state_left` says what it is."""
        ...

    def checksum(self, *, deadline: Deadline) -> tuple[str, ...] | None:
        """One for each worker; None where it has no such means. Engines of one kind and size compare."""
        ...

    def resume(self, *, deadline: Deadline) -> None:
        """Goes on with generation."""
        ...

    def close(self) -> None: ...


class SGLangDisk:
    """A `DiskEngine` for SGLang.

    Args:
        api: of one server; closed with this.
        settings: how it loads.
        sums: whether it has `/weights_checker`.
    """

    def __init__(self, api: SGLangApi, settings: DiskSettings, *, sums: bool) -> None:
        self._api = api
        self._settings = settings
        self._sums = sums
        kept: PauseMode = "retract" if settings.clear else "in_place"
        self._mode: PauseMode = kept if settings.running == "keep" else "abort"

    @property
    def name(self) -> str:
        """See `DiskEngine`."""
        return self._api.url

    def load(self, path: Path, version: Version, *, deadline: Deadline) -> None:
        """See `DiskEngine`."""
        with _undone(lambda left_s: self._api.resume(timeout_s=left_s)):
            self._api.pause(self._mode, timeout_s=deadline.check("time to pause"))
        request = UpdateFromDisk(
            model_path=str(path),
            load_format=self._settings.load_format,
            weight_version=str(version),
            flush_cache=self._settings.clear,
            abort_all_requests=False,  # the pause has seen to them
        )
        with _left(_UNKNOWN):
            self._api.update_from_disk(request, timeout_s=deadline.check("time to load"))
            info = self._api.model_info(timeout_s=deadline.check("answer"))
            _check_name(info.weight_version, version, self.name)
            if info.model_path != str(path):
                raise EngineError(f"it loaded {path}, and says that it has {info.model_path}", peer=self.name)

    def checksum(self, *, deadline: Deadline) -> tuple[str, ...] | None:
        """See `DiskEngine`."""
        if not self._sums:
            return None
        with _left(_UNKNOWN):
            told = self._api.checksum(timeout_s=deadline.check("checksum"))
            if not told.ranks:
                raise EngineError("it answered with a checksum of nothing", peer=self.name)
            return tuple(rank.per_gpu_checksum for rank in told.ranks)

    def resume(self, *, deadline: Deadline) -> None:
        """See `DiskEngine`."""
        with _left(_NEW):
            self._api.resume(timeout_s=deadline.check("time to resume"))

    def close(self) -> None:
        """Closes the connections. Idempotent."""
        self._api.close()


class VllmReloadApi(VllmHttpApi):
    """vLLM's development routes, and what loading from a folder needs of them."""

    def reload_weights(self, path: str, *, timeout_s: float) -> None:
        """Every worker loads the checkpoint in that folder. After an error live weights may be anything."""
        body = {"method": "reload_weights", "kwargs": {"weights_path": path}}
        told = self._call("POST", "/collective_rpc", timeout_s, json=body)
        results = told.get("results")
        if not isinstance(results, list) or not results or any(each is not None for each in results):
            raise EngineError(f"{self.name} answered reload_weights with {results!r:.300}", peer=self.name)

    def checksums(self, *, timeout_s: float) -> dict[str, str]:
        """vLLM's own checksums of live weights, by its own names."""
        told: Any = self._call("POST", "/weight_checker", timeout_s, json={"action": "checksum"}).get("checksums")
        if not isinstance(told, dict) or not told or not all(isinstance(each, str) for each in told.values()):
            raise EngineError(f"{self.name} answered with no checksums", peer=self.name)
        return told


class VllmDisk:
    """A `DiskEngine` for a vLLM server in development mode.

    Args:
        api: of one server; closed with this.
        settings: how it loads.
        sums: whether it has `/weight_checker`.
    """

    def __init__(self, api: VllmReloadApi, settings: DiskSettings, *, sums: bool) -> None:
        self._api = api
        self._settings = settings
        self._sums = sums

    @property
    def name(self) -> str:
        """See `DiskEngine`."""
        return self._api.name

    def load(self, path: Path, version: Version, *, deadline: Deadline) -> None:
        """See `DiskEngine`."""
        with _undone(lambda left_s: self._api.resume(timeout_s=left_s)):
            clear = self._settings.clear
            self._api.pause(self._settings.running, clear_cache=clear, timeout_s=deadline.check("time to pause"))
            if not self._api.is_paused(timeout_s=deadline.check("answer")):
                raise EngineError("it answered pause well, and is not paused", peer=self.name)
        with _left(_UNKNOWN):
            self._api.reload_weights(str(path), timeout_s=deadline.check("time to load"))
            if clear and not self._api.reset_prefix_cache(timeout_s=deadline.check("answer")):
                raise EngineError("it could not drop what it cached of the old weights", peer=self.name)
            if self._api.weight_version(timeout_s=deadline.check("answer")) is not None:  # older releases have no names
                self._api.set_weight_version(str(version), timeout_s=deadline.check("answer"))
                _check_name(self._api.weight_version(timeout_s=deadline.check("answer")), version, self.name)

    def checksum(self, *, deadline: Deadline) -> tuple[str, ...] | None:
        """See `DiskEngine`."""
        if not self._sums:
            return None
        with _left(_UNKNOWN):
            told = self._api.checksums(timeout_s=deadline.check("checksum"))
        return (hashlib.sha256(repr(sorted(told.items())).encode()).hexdigest(),)

    def resume(self, *, deadline: Deadline) -> None:
        """See `DiskEngine`."""
        with _left(_NEW):
            self._api.resume(timeout_s=deadline.check("time to resume"))
            if self._api.is_paused(timeout_s=deadline.check("answer")):
                raise EngineError("it answered resume well, and is paused", peer=self.name)

    def close(self) -> None:
        """Closes the connections. Idempotent."""
        self._api.close()


def _check_name(told: str | None, version: Version, peer: str) -> None:
    if told != str(version):
        raise VersionError(f"it was told to load {version}, and says that it has {told}", peer=peer)


@contextlib.contextmanager
def _left(state: str) -> Iterator[None]:
    """Says in an error what state was left."""
    try:
        yield
    except WeightSyncError as error:
        error.state_left = state
        raise


@contextlib.contextmanager
def _undone(resume: Callable[[float], None]) -> Iterator[None]:
    """A pause that failed is ended; where that fails too, it may be paused."""
    try:
        yield
    except UnsupportedError as error:  # there is no such route
        error.state_left = _OLD
        raise
    except WeightSyncError as error:
        error.state_left = f"{_OLD}; it is paused, perhaps"
        with contextlib.suppress(WeightSyncError):
            resume(_RESUME_S)
            error.state_left = _OLD
        raise
