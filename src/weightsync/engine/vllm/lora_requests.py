"""Clients' requests as `lora_middleware` reads them: whole, soon, and before the engine sees them.

None passes unread: an engine may answer it by its base (SGLang does so where it does not know a model's name), or by an
adapter that is not committed.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from typing import Any

from weightsync.engine.vllm.asgi import Bodies, Message, Receive
from weightsync.errors import BusyError, DeadlineExceededError, InvalidRequestError

_MAX_BYTES = 64 << 20
"""Of a body. Reading its JSON holds up all answers: a second or so where all of it is brackets."""
_MAX_COMING_BYTES = 8 * _MAX_BYTES
_READ_S = 60.0
_LEFT = "not answered"


class Requests:
    """One event loop."""

    def __init__(self) -> None:
        self._bodies = Bodies()

    async def read(self, receive: Receive, read: deque[Message]) -> dict[str, Any] | None:
        """A request; None where the engine is to say what is wrong with it, or the client has left. `done` comes after.

        Args:
            receive: what gives it.
            read: takes what came.

        Raises:
            InvalidRequestError: it is too long, or nested too deeply.
            BusyError: too much is coming at once.
            DeadlineExceededError: it does not come.
        """
        try:
            async with asyncio.timeout(_READ_S):
                body = await self._bodies.read(receive, read, max_bytes=_MAX_BYTES, max_coming_bytes=_MAX_COMING_BYTES)
        except TimeoutError:
            raise DeadlineExceededError(f"a request did not come within {_READ_S:g} s", state_left=_LEFT) from None
        if read and read[-1]["type"] != "http.request":
            return None
        if sum(len(message.get("body", b"")) for message in read) > _MAX_BYTES:
            raise InvalidRequestError(f"a request has at most {_MAX_BYTES >> 20} MiB", state_left=_LEFT)
        if body is None:
            raise BusyError("too many long requests come at once: try again", state_left=_LEFT)
        try:
            request = json.loads(body)
        except RecursionError:
            raise InvalidRequestError("a request's JSON is nested too deeply", state_left=_LEFT) from None
        except ValueError:
            return None
        return request if isinstance(request, dict) else None

    def again(self, read: deque[Message], receive: Receive) -> Receive:
        """See `Bodies.again`."""
        return self._bodies.again(read, receive)

    def done(self, read: deque[Message]) -> None:
        """See `Bodies.done`."""
        self._bodies.done(read)
