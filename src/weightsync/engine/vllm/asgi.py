"""What the ASGI middlewares of vLLM's server share: messages, bodies, headers, and who may send what."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any, TypeAlias

from weightsync.errors import ForbiddenError, WeightSyncError

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


def is_of_another_page(scope: Scope) -> bool:
    """Whether a web page of another origin sent it: its browser says so. vLLM asks nobody for a token on its control
    routes, and some of them take all they need from the address: a page needs to know the port alone."""
    fields = dict(scope.get("headers", ()))
    origin, host = (fields.get(name, b"").decode("latin-1").lower() for name in (b"origin", b"host"))
    return bool(origin) and origin.partition("://")[2] != host


def foreign() -> ForbiddenError:
    """The answer to such a page."""
    return ForbiddenError(
        "a web page of another origin sent this, and this engine's control routes obey none",
        state_left="nothing was done",
    )


def told(error: WeightSyncError) -> dict[str, Any]:
    """The error as clients of OpenAI's interface read it, and as ours do."""
    shown = {"message": error.message, "type": type(error).__name__, "param": None, "code": error.http_status}
    return {"error": shown, "weightsync": error.to_dict()}


async def body_of(receive: Receive, read: list[Message], *, max_bytes: int) -> bytes | None:
    """The request's body; None where it is too long, or the client has left. `read` has what came."""
    parts, size = [], 0
    while size <= max_bytes:
        read.append(message := await receive())
        if message["type"] != "http.request":
            return None
        parts.append(bytes(message.get("body", b"")))
        size += len(parts[-1])
        if not message.get("more_body", False):
            return b"".join(parts)
    return None


def again(read: list[Message], receive: Receive) -> Receive:
    """What was read comes again, then what comes."""
    left = iter(read)

    async def heard() -> Message:
        message = next(left, None)
        return await receive() if message is None else message

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


async def answer(send: Send, status: int, body: bytes, headers: Headers | None = None) -> None:
    """A whole answer in JSON."""
    fields = [(b"content-type", b"application/json"), *(headers or ())]
    await send({"type": "http.response.start", "status": status, "headers": with_length(fields, len(body))})
    await send({"type": "http.response.body", "body": body})
