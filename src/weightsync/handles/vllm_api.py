"""The calls that vLLM itself offers for weight updates, over HTTP or on an offline `LLM` of this process."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any, TypeVar
from urllib.parse import urlencode

import msgspec

from weightsync.errors import (
    AuthError,
    ConfigError,
    DeadlineExceededError,
    EngineError,
    UnsupportedError,
    WeightSyncError,
)
from weightsync.handles.fanout import in_thread
from weightsync.handles.releases import since
from weightsync.handles.vllm_messages import BACKEND, error_in_text
from weightsync.net.client import JsonClient
from weightsync.net.messages import encode
from weightsync.types import Deadline, in_seconds
from weightsync.types.fleet import LEASE_PATH

_LOOK_S = 0.5
_T = TypeVar("_T")
_HEAD = 1000  # characters of a foreign error's text that are kept
_FIRST_ROUTES = ("/get_world_size", "/is_paused", "/start_weight_update")  # asked before anything is changed
HOW_TO_START = (
    f'start vLLM with VLLM_SERVER_DEV_MODE=1 and --weight-transfer-config \'{{"backend":"{BACKEND}"}}\', '
    "in an environment where weightsync is installed"
)


class VllmHttpApi(JsonClient):
    """A vLLM server's development routes. Thread-safe. Each call blocks until it is answered, at most `timeout_s`, and
    raises typed errors alone.

    Args:
        url: e.g. "http://127.0.0.1:8000".
        token: bearer token, for a proxy that asks for one: vLLM's own `--api-key` does not guard these routes.
        connect_timeout_s, verify: see `JsonClient`.
    """

    def __init__(
        self, url: str, *, token: str | None = None, connect_timeout_s: float = 3.0, verify: bool | str = True
    ) -> None:
        super().__init__(url, runs="a vLLM server", token=token, connect_timeout_s=connect_timeout_s, verify=verify)
        if self.url.endswith("/v1"):
            raise ConfigError(f"a vLLM server's URL ends before /v1: {self.url.removesuffix('/v1')}, not {url!r}")

    @property
    def name(self) -> str:
        return self.url

    def world_size(self, *, timeout_s: float) -> int:
        """Workers of the engine: TP x PP x DP."""
        body = self._call("GET", "/get_world_size", timeout_s, params={"include_dp": True})
        return int(_field(body, "world_size", int, self.name))

    def is_paused(self, *, timeout_s: float) -> bool:
        """Whether generation is paused, by whomever."""
        return bool(_field(self._call("GET", "/is_paused", timeout_s), "is_paused", bool, self.name))

    def weight_version(self, *, timeout_s: float) -> str | None:
        """What was set at the last finish; None where this release has no such thing."""
        try:
            body = self._call("GET", "/weight_info", timeout_s)
        except UnsupportedError:
            return None
        return str(_field(body, "weight_version", str, self.name))

    def set_weight_version(self, version: str, *, timeout_s: float) -> None:
        """Names the version without loading anything."""
        self._call("POST", "/update_weight_version", timeout_s, json={"new_version": version})

    def looks_at_lease(self, *, timeout_s: float) -> bool:
        """Whether our lease middleware stands before it."""
        try:
            self._call("GET", LEASE_PATH, timeout_s)
        except UnsupportedError:
            return False
        return True

    def init_engine(self, info: dict[str, Any], *, timeout_s: float) -> None:
        """Passes `info` to every worker's backend, in any state."""
        self._call("POST", "/init_weight_transfer_engine", timeout_s, json={"init_info": info})

    def start_update(self, *, timeout_s: float) -> None:
        """Opens an update; the flag is for releases that would prepare a load of their own otherwise."""
        self._call("POST", "/start_weight_update", timeout_s, json={"is_checkpoint_format": False})

    def update(self, info: dict[str, Any], *, timeout_s: float) -> None:
        self._call("POST", "/update_weights", timeout_s, json={"update_info": info})

    def finish_update(self, version: str | None, *, timeout_s: float) -> None:
        """Closes an update; names the version, where given."""
        body = {} if version is None else {"weight_version": version}
        self._call("POST", "/finish_weight_update", timeout_s, json=body)

    def pause(self, mode: str, *, clear_cache: bool, timeout_s: float) -> None:
        """Stops generation; returns when it stands."""
        self._call("POST", "/pause", timeout_s, params={"mode": mode, "clear_cache": clear_cache})

    def resume(self, *, timeout_s: float) -> bool:
        """Goes on with generation; False where vLLM sleeps, and goes on when all its memory is there again. Releases
        whose wake-up does not say so, or leaves out scheduling, have `/resume` alone.
        """
        deadline = Deadline(timeout_s)
        with contextlib.suppress(UnsupportedError, AuthError):
            said = self._call("POST", "/wake_up", deadline.remaining_s, params={"tags": "scheduling"}).get("status")
            if said in ("awake", "sleeping"):
                return bool(said == "awake")
        self._call("POST", "/resume", deadline.check("answer"))
        return True

    def reset_prefix_cache(self, *, timeout_s: float) -> bool:
        """Drops every prefix and KV entry, running requests' too (they are computed anew); whether it worked."""
        params = {"reset_running_requests": True, "reset_external": True}
        body = self._call("POST", "/reset_prefix_cache", timeout_s, params=params)
        return bool(body.get("success", True))  # releases that answer without a body raise where it fails

    def _call(
        self, method: str, path: str, timeout_s: float, *, json: Any = None, params: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        query = {
            name: str(value).lower() if isinstance(value, bool) else value for name, value in (params or {}).items()
        }
        body = self.answer(
            method,
            f"{path}?{urlencode(query)}" if query else path,
            content=None if json is None else encode(json),
            deadline=Deadline(timeout_s),
        ).body
        with contextlib.suppress(msgspec.DecodeError):
            return msgspec.json.decode(body or b"{}", type=dict[str, Any])
        raise EngineError(f"{self.url} answered {path} with 200 and no JSON", peer=self.url)

    def _error_in(self, status: int, body: bytes, path: str) -> WeightSyncError:
        path = path.partition("?")[0]
        if status in (404, 405):
            return UnsupportedError(
                f"{self.name} has no route {path}: {HOW_TO_START}; where it is, {since('vLLM', [path])}",
                peer=self.name,
                state_left="nothing was changed" if path in _FIRST_ROUTES else None,
            )
        if status in (401, 403):
            return AuthError(f"{self.name} refuses the token for {path}", peer=self.name)
        text = body.decode("utf-8", "replace")
        return error_of(text, f"{self.name} answered {path} with status {status}", peer=self.name)


class LlmLock:
    """Who uses an `LLM`: one thread at a time, which may enter it again, or one call. Calls go first, and behind one
    that has paused the `LLM` only calls get it: what is generated meanwhile would never end.

    Args:
        asleep: whether the `LLM` sleeps; asked where nobody uses it.

    Attributes:
        paused: whether a call has paused the `LLM`. Set by whoever has the lock.
    """

    def __init__(self, asleep: Callable[[], bool]) -> None:
        self.paused = False
        self._asleep = asleep
        self._changed = threading.Condition()
        self._user: int | None = None  # the thread that has it
        self._depth = 0  # how often it has entered
        self._called = False  # a call has it
        self._waiting = 0  # calls that want it

    def __enter__(self) -> None:
        thread = threading.get_ident()
        self._look()
        while not self._entered(thread):
            self._look()

    def _entered(self, thread: int) -> bool:
        """Whether that thread has got it within `_LOOK_S`."""
        with self._changed:
            free = lambda: self._user == thread or not (self._is_taken or self._waiting or self.paused)  # noqa: E731
            if not self._changed.wait_for(free, _LOOK_S):
                return False
            self._user = thread
            self._depth += 1
            return True

    def _look(self) -> None:
        """Asks whether it sleeps yet, where nobody uses it: who wakes it up by hand tells nobody. As a call, and so
        without the condition: an engine that hangs keeps no call from its deadline.
        """
        with self._changed:
            if self._is_taken or self._waiting or not self.paused:
                return
            self._called = True
        paused = True
        try:
            paused = self._asleep()
        finally:
            with self._changed:
                self.paused = paused
                self._called = False
                self._changed.notify_all()

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._depth -= 1
            if not self._depth:
                self._user = None
                self._changed.notify_all()

    def take(self, timeout_s: float) -> bool:
        """Whether a call has got it in time; `give_back` ends that, in any thread."""
        with self._changed:
            self._waiting += 1
            try:
                taken = self._changed.wait_for(lambda: not self._is_taken, timeout_s)
                self._called |= taken
                return taken
            finally:
                self._waiting -= 1
                self._changed.notify_all()

    def give_back(self) -> None:
        with self._changed:
            self._called = False
            self._changed.notify_all()

    @property
    def _is_taken(self) -> bool:
        return self._user is not None or self._called


class OfflineVllmApi:
    """A `vllm.LLM` of this process, with the calls of `VllmHttpApi`, made one at a time, each in a thread of its own.

    vLLM's `LLM` is not made for several threads: call `generate` with `lock` held where a sync may run, or where a
    rollout service has the engine, which looks at it now and then. So nothing generates during a call or between a
    pause and its resume, and every pause mode means the same. Who holds it keeps a sync waiting: hold it for one
    `generate`.

    Args:
        llm: made with `weight_transfer_config={"backend": "weightsync"}`.
        name: for messages.

    Attributes:
        lock: held by every call; `with lock` waits for the end of a pause, too.
    """

    def __init__(self, llm: Any, *, name: str = "vllm-offline") -> None:
        self._llm = llm
        self.name = name
        self.lock = LlmLock(lambda: bool(llm.llm_engine.is_sleeping()))

    def world_size(self, *, timeout_s: float) -> int:
        parallel = self._llm.llm_engine.vllm_config.parallel_config
        return int(getattr(parallel, "world_size_across_dp", parallel.world_size))

    def is_paused(self, *, timeout_s: float) -> bool:
        return self._call("is_sleeping", lambda: bool(self._llm.llm_engine.is_sleeping()), timeout_s)

    def weight_version(self, *, timeout_s: float) -> str | None:
        if not hasattr(self._llm, "get_weight_version"):
            return None
        return str(self._call("get_weight_version", self._llm.get_weight_version, timeout_s))

    def set_weight_version(self, version: str, *, timeout_s: float) -> None:
        self._call("update_weight_version", lambda: self._llm.update_weight_version(version), timeout_s)

    def init_engine(self, info: dict[str, Any], *, timeout_s: float) -> None:
        message = {"init_info": info}
        self._call("init_weight_transfer_engine", lambda: self._llm.init_weight_transfer_engine(message), timeout_s)

    def start_update(self, *, timeout_s: float) -> None:
        self._call("start_weight_update", lambda: self._llm.start_weight_update(), timeout_s)

    def update(self, info: dict[str, Any], *, timeout_s: float) -> None:
        self._call("update_weights", lambda: self._llm.update_weights({"update_info": info}), timeout_s)

    def finish_update(self, version: str | None, *, timeout_s: float) -> None:
        self._call("finish_weight_update", lambda: self._llm.finish_weight_update(version), timeout_s)

    def pause(self, mode: str, *, clear_cache: bool, timeout_s: float) -> None:
        """Stops scheduling (vLLM's sleep at level 0). What was enqueued and not stepped stays, but under "abort"."""
        kept = "abort" if mode == "abort" else "keep"  # a wait would need somebody who steps the engine

        def sleep() -> None:
            try:
                self._llm.sleep(level=0, mode=kept)
            finally:  # it may fail half-way
                self.lock.paused = bool(self._llm.llm_engine.is_sleeping())

        self._call("sleep", sleep, timeout_s)

    def resume(self, *, timeout_s: float) -> bool:
        """See `VllmHttpApi.resume`."""

        def wake_up() -> bool:
            is_awake = self._llm.wake_up(tags=["scheduling"]) is not False  # older releases say nothing
            self.lock.paused = False  # whoever put it to sleep has to get the lock to wake it up
            return is_awake

        return self._call("wake_up", wake_up, timeout_s)

    def reset_prefix_cache(self, *, timeout_s: float) -> bool:
        def reset() -> bool:
            is_done = bool(self._llm.reset_prefix_cache(reset_running_requests=True, reset_connector=True))
            if hasattr(self._llm.llm_engine, "reset_encoder_cache"):  # of images: its `sleep` at level 0 keeps them
                self._llm.llm_engine.reset_encoder_cache()
            return is_done

        return self._call("reset_prefix_cache", reset, timeout_s)

    def close(self) -> None:
        """Does nothing: the `LLM` is the caller's."""

    def _call(self, what: str, function: Callable[[], _T], timeout_s: float) -> _T:
        deadline = Deadline(timeout_s)
        if not self.lock.take(timeout_s):
            raise DeadlineExceededError(
                f"{self.name} was in use: {what} did not get its lock within {in_seconds(timeout_s)}", peer=self.name
            )
        call = in_thread(function, name=f"weightsync-{what}")
        call.add_done_callback(lambda _: self.lock.give_back())
        try:
            return call.result(deadline.remaining_s)
        except TimeoutError as error:
            if call.done():  # vLLM's own
                raise error_of(str(error), f"{what} failed", peer=self.name) from error
            raise DeadlineExceededError(
                f"{self.name} did not return from {what} within {in_seconds(timeout_s)}", peer=self.name
            ) from None
        except AttributeError as error:
            raise UnsupportedError(
                f"this vLLM has no {what}, {since('vLLM', [what])}: {error}", peer=self.name
            ) from error
        except WeightSyncError:
            raise
        except Exception as error:
            raise error_of(str(error), f"{what} failed with {type(error).__name__}", peer=self.name) from error


def error_of(text: str, what: str, *, peer: str) -> WeightSyncError:
    """The typed error in an exception's text, or one that says what vLLM said."""
    typed = error_in_text(text, peer=peer)
    if typed is not None:
        return typed
    if "Weight transfer not configured" in text or "Invalid init_info" in text or "Invalid update_info" in text:
        return UnsupportedError(
            f"{peer} has another weight-transfer backend, or none: {HOW_TO_START}; it said: {text[:_HEAD]}", peer=peer
        )
    return EngineError(f"{what}: {text[:_HEAD]}", peer=peer)


def _field(body: dict[str, Any], name: str, kind: type[Any], peer: str) -> Any:
    value = body.get(name)
    if not isinstance(value, kind):
        raise EngineError(f"{peer} answered without a {name}: is this a vLLM server?", peer=peer)
    return value
