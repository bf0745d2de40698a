"""SGLangApi and SGLangRouter: SGLang's own routes, and its router's, typed and checked."""

from __future__ import annotations

import contextlib
from typing import Any, TypeVar

from weightsync.errors import (
    AuthError,
    ConfigError,
    EngineError,
    EngineUnreachableError,
    NoEnginesError,
    UnsupportedError,
)
from weightsync.handles.foreign import ForeignClient
from weightsync.handles.sglang_messages import (
    Done,
    GenerationDone,
    InitGroup,
    ModelInfo,
    PauseMode,
    RouterWorkers,
    ServerInfo,
    UpdateFromDisk,
    UpdateFromDistributed,
    UpdateFromTensor,
    WeightsChecked,
)
from weightsync.net.http_edge import checked_url
from weightsync.types import Deadline

_T = TypeVar("_T")
_UNAVAILABLE = 503
_NEEDS = "weightsync speaks the routes of SGLang 0.5.23; is this an SGLang server, and as new as that?"


class SGLangApi(ForeignClient):
    """One SGLang server. Thread-safe.

    A call returns when the server has done it, and raises an `EngineError` with the server's words where it has not:
    also where it answers with status 200 and says in the body that it failed.

    Args:
        url: e.g. "http://127.0.0.1:30000".
        token: the server's `--admin-api-key`, or its `--api-key`.
        verify: see `JsonClient`.
    """

    def __init__(self, url: str, *, token: str | None = None, verify: bool | str = True) -> None:
        super().__init__(url, runs="an SGLang server", needs=_NEEDS, token=token, verify=verify)

    # --- what it is ---

    def model_info(self, *, timeout_s: float) -> ModelInfo:
        """The model's path, and what its weights are called."""
        return self._newest("/model_info", "/get_model_info", ModelInfo, timeout_s)

    def server_info(self, *, timeout_s: float) -> ServerInfo:
        """How many workers it has."""
        return self._newest("/server_info", "/get_server_info", ServerInfo, timeout_s)

    def checksum(self, *, timeout_s: float) -> WeightsChecked:
        """Checksums of the live weights, by SGLang's own means."""
        return self._done("/weights_checker", {"action": "checksum"}, timeout_s, WeightsChecked)

    # --- generation ---

    def pause(self, mode: PauseMode, *, timeout_s: float) -> None:
        """Stops generation; see `PauseMode`. There is no lease: it lasts until `resume`."""
        self._generation("/pause_generation", {"mode": mode}, timeout_s)

    def resume(self, *, timeout_s: float) -> None:
        """Goes on with generation; no error where nothing was paused."""
        self._generation("/continue_generation", {}, timeout_s)

    def is_paused(self, *, timeout_s: float) -> bool:
        """Whether generation is paused, by whomever, or it starts, or is unhealthy: it tells these apart nowhere. False
        where this release says nothing."""
        try:
            self.answer("GET", "/ready", deadline=Deadline(timeout_s))
        except (UnsupportedError, AuthError):
            return False
        except EngineUnreachableError:
            raise
        except EngineError as error:
            return error.details.get("status") == _UNAVAILABLE
        return False

    # --- weights ---

    def init_group(self, request: InitGroup, *, timeout_s: float) -> None:
        """Joins a process group; answered when all its members have joined."""
        self._done("/init_weights_update_group", request, timeout_s)

    def destroy_group(self, group_name: str, *, timeout_s: float) -> None:
        """Leaves a process group."""
        self._done("/destroy_weights_update_group", {"group_name": group_name}, timeout_s)

    def begin_update(self, *, timeout_s: float) -> None:
        """Opens the bracket around updates. Live weights are touched from here on."""
        self._done("/begin_weight_update", {"selector": "all"}, timeout_s)

    def end_update(self, *, timeout_s: float) -> None:
        """Closes it."""
        self._done("/end_weight_update", {}, timeout_s)

    def update_from_distributed(self, request: UpdateFromDistributed, *, timeout_s: float) -> None:
        """Receives and loads tensors, within the bracket; answered when they are loaded."""
        self._done("/update_weights_from_distributed", request, timeout_s)

    def update_from_tensor(self, request: UpdateFromTensor, *, timeout_s: float) -> None:
        """Hands tensors to a loader in each worker, within the bracket. Where that raises, the server ends."""
        self._done("/update_weights_from_tensor", request, timeout_s)

    def update_from_disk(self, request: UpdateFromDisk, *, timeout_s: float) -> None:
        """Loads a checkpoint. After an error live weights may be partly the new ones."""
        self._done("/update_weights_from_disk", request, timeout_s)

    def set_version(self, version: str, *, timeout_s: float) -> None:
        """Names the weights that are there."""
        self._done("/update_weight_version", {"new_version": version, "abort_all_requests": False}, timeout_s)

    # --- how ---

    def _newest(self, path: str, former: str, kind: type[_T], timeout_s: float) -> _T:
        """Asks at the route of today, and where there is none at that of earlier releases."""
        deadline = Deadline(timeout_s)
        with contextlib.suppress(UnsupportedError):
            return self.call("GET", path, kind, timeout_s=timeout_s)
        return self.call("GET", former, kind, timeout_s=deadline.check("answer", peer=self.url))

    def _generation(self, path: str, message: Any, timeout_s: float) -> None:
        reply = self.call("POST", path, GenerationDone, message=message, timeout_s=timeout_s)
        if reply.status != "ok":
            raise EngineError(f"{self.url} answered {path} with {reply.status!r}: {reply.message}", peer=self.url)

    def _done(self, path: str, message: Any, timeout_s: float, kind: type[_T] = Done) -> _T:  # type: ignore[assignment]
        reply: Any = self.call("POST", path, kind, message=message, timeout_s=timeout_s)
        if reply.success is not True:
            raise EngineError(
                f"{self.url} answered {path} well, and says that it failed: {reply.message or 'no reason'}",
                peer=self.url,
            )
        return reply  # type: ignore[no-any-return]


class SGLangRouter(ForeignClient):
    """A router in front of SGLang servers. Thread-safe; see `SGLangApi` for arguments."""

    def __init__(self, url: str, *, token: str | None = None, verify: bool | str = True) -> None:
        needs = "is this an SGLang router, and as new as its GET /workers?"
        super().__init__(url, runs="an SGLang router", needs=needs, token=token, verify=verify)

    def workers(self, *, timeout_s: float) -> tuple[str, ...]:
        """The URLs of its workers, each once.

        Raises:
            NoEnginesError: it has none.
            EngineError: it names what is no URL.
        """
        reply = self.call("GET", "/workers", RouterWorkers, timeout_s=timeout_s)
        if ranks := [worker.url for worker in reply.workers if "@" in worker.url]:
            raise EngineError(
                f"{self.url} lists {', '.join(ranks)}: parts of data-parallel servers, which load as a whole; give the "
                "servers' own URLs, or run the router without --dp-aware",
                peer=self.url,
            )
        try:
            urls = tuple(dict.fromkeys(checked_url(worker.url, whose="a worker's") for worker in reply.workers))
        except ConfigError as error:
            raise EngineError(
                f"{self.url} lists a worker that can't be called: {error.message}", peer=self.url
            ) from error
        if not urls:
            raise NoEnginesError(f"the router {self.url} has no workers: nothing would be synced", peer=self.url)
        return urls
