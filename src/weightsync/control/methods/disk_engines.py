"""How each engine loads a version from a folder: `SGLangDisk` and `VllmDisk`, one object a server.

    load      pause -> load the folder -> drop what was cached -> name the version, and look whether it has that name
    checksum  of the live weights, by the engine's own means
    resume    generation goes on

What fails before the load leaves the old version serving. What fails from then on leaves the engine paused: nobody can
say from outside which weights are there, and the next load that succeeds lets it go on.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import hashlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar, get_args

from weightsync.errors import EngineError, UnsupportedError, VersionError, WeightSyncError
from weightsync.handles.sglang_api import SGLangApi
from weightsync.handles.sglang_messages import PauseMode, UpdateFromDisk
from weightsync.handles.stepped import check_choice
from weightsync.handles.vllm_api import VllmHttpApi
from weightsync.types import Deadline, Version

_A = TypeVar("_A", bound=SGLangApi | VllmHttpApi)
Running = Literal["keep", "abort"]
KvCache = Literal["clear", "keep"]

_logger = logging.getLogger(__name__)

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
        check_choice("running", self.running, get_args(Running))
        check_choice("kv_cache", self.kv_cache, get_args(KvCache))

    @property
    def clear(self) -> bool:
        """Whether caches are dropped."""
        return self.kv_cache == "clear"


class DiskEngine(abc.ABC, Generic[_A]):
    """A server that loads from a folder. Thread-safe; one load at a time.

    Args:
        api: of that server; closed with this.
        settings: how it loads.
        sums: whether it can say checksums of its live weights.
    """

    def __init__(self, api: _A, settings: DiskSettings, *, sums: bool) -> None:
        self._api = api
        self._settings = settings
        self._sums = sums
        self.name = api.url

    def load(self, path: Path, version: Version, *, deadline: Deadline) -> None:
        """Loads a version; it is paused then. After an error the error's `state_left` says what it is."""
        try:
            self._pause(deadline)
        except UnsupportedError as error:  # there is no such route
            error.state_left = _OLD
            raise
        except WeightSyncError as error:  # the pause that failed is ended; where that fails too, it may be paused
            error.state_left = f"{_OLD}; it is paused, perhaps"
            try:
                self._resume(Deadline(_RESUME_S))
                error.state_left = _OLD
            except WeightSyncError as failed:
                _logger.warning("%s was paused in vain, and could not be resumed: %s", self.name, failed)
            raise
        with _left(_UNKNOWN):
            self._load(str(path), str(version), deadline)

    def checksum(self, *, deadline: Deadline) -> tuple[str, ...] | None:
        """One for each worker; None where it has no such means. Engines of one kind and size compare."""
        if not self._sums:
            return None
        with _left(_UNKNOWN):
            return self._checksum(deadline.check("checksum"))

    def resume(self, *, deadline: Deadline) -> None:
        """Goes on with generation."""
        with _left(_NEW):
            is_awake = self._resume(deadline)
            if is_awake and self._is_paused(deadline):
                raise EngineError("it answered resume well, and is paused", peer=self.name)

    def close(self) -> None:
        """Closes the connections. Idempotent."""
        self._api.close()

    @abc.abstractmethod
    def _pause(self, deadline: Deadline) -> None: ...

    @abc.abstractmethod
    def _load(self, path: str, version: str, deadline: Deadline) -> None:
        """Loads, drops what was cached, names the version, and looks whether it has that name."""

    @abc.abstractmethod
    def _checksum(self, timeout_s: float) -> tuple[str, ...]: ...

    def _resume(self, deadline: Deadline) -> bool:
        """False where it sleeps: whoever put it to sleep ends that."""
        return self._api.resume(timeout_s=deadline.check("time to resume")) is not False

    def _is_paused(self, deadline: Deadline) -> bool:
        """Whether it says so, where it can be asked."""
        return False

    def _check_name(self, named: str | None, version: str) -> None:
        if named != version:
            raise VersionError(f"it was told to load {version}, and says that it has {named}", peer=self.name)


class SGLangDisk(DiskEngine[SGLangApi]):
    """SGLang; it has `/weights_checker`, or says no checksums."""

    def _pause(self, deadline: Deadline) -> None:
        kept: PauseMode = "retract" if self._settings.clear else "in_place"
        mode: PauseMode = kept if self._settings.running == "keep" else "abort"
        self._api.pause(mode, timeout_s=deadline.check("time to pause"))

    def _load(self, path: str, version: str, deadline: Deadline) -> None:
        request = UpdateFromDisk(
            model_path=path,
            load_format=self._settings.load_format,
            weight_version=version,
            flush_cache=self._settings.clear,
            abort_all_requests=False,  # the pause has seen to them
        )
        self._api.update_from_disk(request, timeout_s=deadline.check("time to load"))
        info = self._api.model_info(timeout_s=deadline.check("answer"))
        self._check_name(info.weight_version, version)
        if info.model_path != path:
            raise EngineError(f"it loaded {path}, and says that it has {info.model_path}", peer=self.name)

    def _checksum(self, timeout_s: float) -> tuple[str, ...]:
        reply = self._api.checksum(timeout_s=timeout_s)
        if not reply.ranks:
            raise EngineError("it answered with a checksum of nothing", peer=self.name)
        return tuple(rank.per_gpu_checksum for rank in reply.ranks)


class VllmReloadApi(VllmHttpApi):
    """vLLM's development routes, and what loading from a folder needs of them."""

    def reload_weights(self, path: str, *, timeout_s: float) -> None:
        """Every worker loads the checkpoint in that folder. After an error live weights may be anything."""
        body = {"method": "reload_weights", "kwargs": {"weights_path": path}}
        reply = self._call("POST", "/collective_rpc", timeout_s, json=body)
        results = reply.get("results")
        if not isinstance(results, list) or not results or any(each is not None for each in results):
            raise EngineError(f"{self.name} answered reload_weights with {results!r:.300}", peer=self.name)

    def checksums(self, *, timeout_s: float) -> dict[str, str]:
        """vLLM's own checksums of live weights, by its own names."""
        sums: Any = self._call("POST", "/weight_checker", timeout_s, json={"action": "checksum"}).get("checksums")
        if not isinstance(sums, dict) or not sums or not all(isinstance(each, str) for each in sums.values()):
            raise EngineError(f"{self.name} answered with no checksums", peer=self.name)
        return sums


class VllmDisk(DiskEngine[VllmReloadApi]):
    """A vLLM server in development mode; it has `/weight_checker`, or says no checksums."""

    def _pause(self, deadline: Deadline) -> None:
        clear = self._settings.clear
        self._api.pause(self._settings.running, clear_cache=clear, timeout_s=deadline.check("time to pause"))
        if not self._is_paused(deadline):
            raise EngineError("it answered pause well, and is not paused", peer=self.name)

    def _load(self, path: str, version: str, deadline: Deadline) -> None:
        self._api.reload_weights(path, timeout_s=deadline.check("time to load"))
        if self._settings.clear and not self._api.reset_prefix_cache(timeout_s=deadline.check("answer")):
            raise EngineError("it could not drop what it cached of the old weights", peer=self.name)
        if self._api.weight_version(timeout_s=deadline.check("answer")) is not None:  # older releases have no names
            self._api.set_weight_version(version, timeout_s=deadline.check("answer"))
            self._check_name(self._api.weight_version(timeout_s=deadline.check("answer")), version)

    def _checksum(self, timeout_s: float) -> tuple[str, ...]:
        sums = self._api.checksums(timeout_s=timeout_s)
        return (hashlib.sha256(repr(sorted(sums.items())).encode()).hexdigest(),)

    def _is_paused(self, deadline: Deadline) -> bool:
        return self._api.is_paused(timeout_s=deadline.check("answer"))


@contextlib.contextmanager
def _left(state: str) -> Iterator[None]:
    """Says in an error what state was left."""
    try:
        yield
    except WeightSyncError as error:
        error.state_left = state
        raise
