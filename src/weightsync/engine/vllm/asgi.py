"""What the ASGI middlewares of vLLM's server share: messages, bodies, headers, and who may send what."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any, TypeAlias

from weightsync.errors import BusyError, ForbiddenError, NotServingError, WeightSyncError
from weightsync.net.origin import ALLOWED_HOSTS_VARIABLE, is_foreign_page

Scope: TypeAlias = MutableMapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
App: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers: TypeAlias = list[tuple[bytes, bytes]]


def route_of(scope: Scope) -> str:
    """The path as the application's router looks it up."""
    path, root = str(scope["path"]), str(scope.get("root_path", ""))
    return path.removeprefix(root) if root and path.startswith(f"{root}/") else path


def is_of_another_page(scope: Scope, names: frozenset[str]) -> bool:
    """Whether a web page of another origin sent it, or one by a name that is not this server's: its browser says so.
    vLLM asks nobody for a token on its control routes, and some of them take all they need from the address: a page
    needs to know the port alone.

    Args:
        scope: of the request.
        names: of the server, by `net.origin.host_names`.
    """
    fields = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope.get("headers", ())}
    return is_foreign_page(fields, names)


def foreign() -> ForbiddenError:
    """The answer to such a page."""
    return ForbiddenError(
        "a web page of another origin sent this, or one by a name that is not this engine's; its control routes obey "
        f"none: name the engine's own in {ALLOWED_HOSTS_VARIABLE}",
        state_left="nothing was done",
    )


def told(error: WeightSyncError) -> dict[str, Any]:
    """The error as clients of OpenAI's interface read it, and as ours do."""
    shown = {"message": error.message, "type": type(error).__name__, "param": None, "code": error.http_status}
    return {"error": shown, "weightsync": error.to_dict()}


class Bodies:
    """Requests' bodies that are read before the application sees them, and how much of them is kept at once. One event
    loop."""

    def __init__(self) -> None:
        self.coming_bytes = 0

    async def read(
        self, receive: Receive, read: deque[Message], *, max_bytes: int, max_coming_bytes: int
    ) -> bytes | None:
        """A body; None where it is too long, there is no room for it, or the client has left. `done` comes after.

        Args:
            receive: what gives it.
            read: takes what came.
            max_bytes: of this one.
            max_coming_bytes: of all that are read at once.
        """
        num_bytes, more = 0, True
        while more:
            if num_bytes > max_bytes or self.coming_bytes > max_coming_bytes:
                return None
            message = await receive()
            read.append(message)
            num_bytes += (size := _num_bytes([message]))
            self.coming_bytes += size
            if message["type"] != "http.request":
                return None
            more = message.get("more_body", False)
        return b"".join(message.get("body", b"") for message in read)

    def again(self, read: deque[Message], receive: Receive) -> Receive:
        """What was read comes again, then what comes. What was handed on is not kept: an answer may take minutes."""

        async def heard() -> Message:
            if not read:
                return await receive()
            message = read.popleft()
            self.coming_bytes -= _num_bytes([message])
            return message

        return heard

    def done(self, read: deque[Message]) -> None:
        """What is left of it is not kept any more."""
        self.coming_bytes -= _num_bytes(read)
        read.clear()


def _num_bytes(messages: Iterable[Message]) -> int:
    return sum(len(message.get("body", b"")) for message in messages)


def first(body: bytes, receive: Receive) -> Receive:
    """A whole body, then what comes."""
    left: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def heard() -> Message:
        return left.pop() if left else await receive()

    return heard


def request_in(body: bytes) -> dict[str, Any] | None:
    """The request; None where vLLM is to say what is wrong with it."""
    try:
        request = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(request, dict) or not isinstance(request.get("vllm_xargs") or {}, dict):
        return None
    return request


def with_length(headers: Iterable[tuple[bytes, bytes]], size_bytes: int) -> Headers:
    """The headers of a body that was rewritten."""
    kept = [(name, value) for name, value in headers if name.lower() not in (b"content-length", b"transfer-encoding")]
    return [*kept, (b"content-length", str(size_bytes).encode())]


def with_length_of(scope: Scope, body: bytes) -> Scope:
    """A request's scope, with the length of its rewritten body."""
    return {**scope, "headers": with_length(scope["headers"], len(body))}


async def refuse(send: Send, error: WeightSyncError) -> None:
    """Answers with an error; who may try again soon is told when."""
    headers = [(b"retry-after", b"1")] if isinstance(error, NotServingError | BusyError) else []
    await answer(send, error.http_status, json.dumps(told(error)).encode(), headers)


async def answer(send: Send, status: int, body: bytes, headers: Headers | None = None) -> None:
    """A whole answer in JSON."""
    fields = [(b"content-type", b"application/json"), *(headers or ())]
    await send({"type": "http.response.start", "status": status, "headers": with_length(fields, len(body))})
    await send({"type": "http.response.body", "body": body})


class Rewritten:
    """An answer that a subclass changes on its way out: kept until it is whole, or part by part.

    Args:
        send: where it goes.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self._start: Message | None = None  # of one that is kept: its length will be another one
        self._parts: list[bytes] = []

    def begun(self, start: Message) -> tuple[Message, bool]:
        """The start as the client gets it, and whether the body is kept."""
        return start, True

    def whole(self, body: bytes) -> bytes:
        """A kept body, as the client gets it."""
        return body

    def part(self, body: bytes, *, last: bool) -> bytes:
        """What goes on of another one, now that this part of it has come."""
        return body

    async def send(self, message: Message) -> None:
        """Takes a message of the application's, and sends what the client gets."""
        if message["type"] == "http.response.start":
            start, kept = self.begun(message)
            if kept:
                self._start = start
            else:
                await self._send(start)
            return
        if message["type"] != "http.response.body":
            await self._send(message)
            return
        body, last = message.get("body", b""), not message.get("more_body", False)
        if self._start is None:
            await self._send({**message, "body": self.part(body, last=last)})
            return
        self._parts.append(body)
        if last:
            body = self.whole(b"".join(self._parts))
            await self._send({**self._start, "headers": with_length(self._start.get("headers", ()), len(body))})
            await self._send({**message, "body": body})
