"""Gate: an inference client that asks the controller before each request, and waits while rollout has to. No polling.

    gate = Gate("http://control:8700", "actor", token=TOKEN)
    client = openai.AsyncOpenAI(base_url=URL, http_client=httpx.AsyncClient(transport=gate.transport()))
    client = openai.OpenAI(base_url=URL, http_client=httpx.Client(transport=gate.thread_transport()))

or, around any function that sends a request, a coroutine's or a plain one:

    @gate
    async def generate(prompt): ...

Document 5's gating client: "continue" lets a request through, "block" holds it.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import httpx

from weightsync.clients.async_controller import AsyncControllerClient
from weightsync.clients.controller import Answer, ControllerClient
from weightsync.errors import ConfigError, NotServingError, WeightSyncError
from weightsync.types.deadline import check_wait_s

_P = ParamSpec("_P")
_T = TypeVar("_T")

_RETRY_AFTER_S = 1
# One that has passed the gate is sent at once: one that waited for a connection would be sent while the gate is closed.
_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=100)


class Gate:
    """The gate of one model: for the coroutines of one event loop, and for any number of threads.

    Args:
        controller: URL of the controller.
        model_tag: which model the requests are for.
        token, verify: see `JsonClient`; of the controller.
        wait_s: how long a request waits at most until it may proceed.

    Raises:
        InvalidRequestError: `wait_s` is no time one can wait.
        ConfigError: the URL or the token is none.
    """

    def __init__(
        self,
        controller: str,
        model_tag: str,
        *,
        token: str | None = None,
        verify: bool | str = True,
        wait_s: float = 600.0,
    ) -> None:
        self._wait_s = check_wait_s("wait_s", wait_s)
        self._model_tag = model_tag
        self._controller = AsyncControllerClient(controller, token=token, verify=verify)
        self._from_threads = ControllerClient(controller, token=token, verify=verify)

    async def wait(self) -> None:
        """Returns when a request may proceed.

        Raises:
            NotServingError: not within `wait_s`: rollout waits for weights, or for a validation.
            WeightSyncError: the controller does not answer, refuses the token, or has no such model.
        """
        self._check(await self._controller.check_rollout_service_status(self._model_tag, wait_s=self._wait_s))

    def wait_in_thread(self) -> None:
        """As `wait`, for a caller that is no coroutine; its thread waits. From any thread."""
        self._check(self._from_threads.check_rollout_service_status(self._model_tag, wait_s=self._wait_s))

    def __call__(self, send: Callable[_P, _T]) -> Callable[_P, _T]:
        """`send`, which waits at the gate first; raises as `wait`, too.

        Args:
            send: a coroutine function, whose coroutine waits; or a plain function, whose thread does (one that merely
                returns a coroutine, a lambda say, is a plain one).

        Raises:
            ConfigError: it gives out what it has bit by bit (a generator): gate the function that opens the stream.
        """
        if inspect.isasyncgenfunction(send) or inspect.isgeneratorfunction(send):
            raise ConfigError(f"a gate goes around a function that sends one request, not around a generator: {send!r}")
        if not inspect.iscoroutinefunction(send) and not inspect.iscoroutinefunction(type(send).__call__):

            @functools.wraps(send)
            def gated(*args: _P.args, **options: _P.kwargs) -> _T:
                self.wait_in_thread()
                return send(*args, **options)

            return gated

        @functools.wraps(send)
        async def gated_coroutine(*args: _P.args, **options: _P.kwargs) -> Any:
            await self.wait()
            return await cast(Any, send(*args, **options))

        return cast(Callable[_P, _T], gated_coroutine)

    def transport(self, inner: httpx.AsyncBaseTransport | None = None) -> httpx.AsyncBaseTransport:
        """For `httpx.AsyncClient(transport=...)`, and so for every client that takes one: each POST waits at the gate.

        One that may not proceed in time is not sent: the answer is a 503 with `Retry-After` and the typed error as
        JSON, which OpenAI's client tries again by itself. The client's own time-out begins when the gate is open.

        Args:
            inner: what sends, and is closed with the client; an `httpx.AsyncHTTPTransport` with any number of
                connections where not given. The client's own limits, verify and proxies do nothing: they belong here.
        """
        return _GatedTransport(self, inner or httpx.AsyncHTTPTransport(limits=_LIMITS))

    def thread_transport(self, inner: httpx.BaseTransport | None = None) -> httpx.BaseTransport:
        """As `transport`, for `httpx.Client(transport=...)`."""
        return _GatedThreadTransport(self, inner or httpx.HTTPTransport(limits=_LIMITS))

    def _check(self, answer: Answer) -> None:
        if answer != "continue":
            raise NotServingError(
                f"model {self._model_tag!r} was blocked for {self._wait_s:g} s: rollout waits for new weights, or a "
                "validation runs",
                peer=self._controller.url,
                state_left="the request was not sent",
            )

    async def close(self) -> None:
        """Closes the connections to the controller; who waits in a thread is told so. Idempotent."""
        self._from_threads.close()
        await self._controller.close()


class _GatedTransport(httpx.AsyncBaseTransport):
    def __init__(self, gate: Gate, inner: httpx.AsyncBaseTransport) -> None:
        self._gate = gate
        self._inner = inner

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.method == "POST":
            try:
                await self._gate.wait()
            except WeightSyncError as error:
                return _refusal(error, request)
        return await self._inner.handle_async_request(request)

    async def aclose(self) -> None:
        await self._inner.aclose()


class _GatedThreadTransport(httpx.BaseTransport):
    def __init__(self, gate: Gate, inner: httpx.BaseTransport) -> None:
        self._gate = gate
        self._inner = inner

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        if request.method == "POST":
            try:
                self._gate.wait_in_thread()
            except WeightSyncError as error:
                return _refusal(error, request)
        return self._inner.handle_request(request)

    def close(self) -> None:
        self._inner.close()


def _refusal(error: WeightSyncError, request: httpx.Request) -> httpx.Response:
    """What a client sees of a request that was not sent."""
    headers = {"content-type": "application/json", "retry-after": str(_RETRY_AFTER_S)}
    return httpx.Response(503, content=json.dumps(error.to_dict()).encode(), headers=headers, request=request)
