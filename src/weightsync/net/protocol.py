"""GuardedH11: uvicorn's HTTP protocol as our servers speak it, one a connection."""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from starlette.types import Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from weightsync.errors import InvalidRequestError
from weightsync.net.door import Visit
from weightsync.net.guard import BODY_BYTES, VISIT, error_body
from weightsync.net.log import logger

REQUEST_WITHIN_S = 10.0
"""How long a connection may go without a whole request."""


class GuardedH11(H11Protocol):
    """uvicorn's own protocol, and:

    - a connection is cut whose request does not come, or which does not take its answer;
    - a body that nobody reads, and which was answered already, is not read on for long: it may have no end;
    - what is no HTTP is answered with a typed error, and written to the log once a while.

    Args:
        config, server_state, app_state, loop: uvicorn's.
        visit: the connection, as the door knows it.
        has_token: whether the server asks for one.
    """

    def __init__(
        self,
        *,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        loop: asyncio.AbstractEventLoop,
        visit: Visit,
        has_token: bool,
    ) -> None:
        super().__init__(config=config, server_state=server_state, app_state=app_state, _loop=loop)
        self.logger = logger
        self._visit = visit
        self._has_token = has_token
        self._too_slow: asyncio.TimerHandle | None = None
        self._unsent = 0
        self._discarded_bytes = 0
        guarded = self.app

        async def visited(scope: Scope, receive: Receive, send: Send) -> None:
            scope[VISIT] = visit
            await guarded(scope, receive, send)

        self.app = visited

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._visit.connected(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        if self.conn.our_state is h11.DONE and self.conn.their_state is h11.SEND_BODY:
            self._discarded_bytes += len(data)
            if self._discarded_bytes > BODY_BYTES:
                self.transport.close()
                return
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._visit.ended()
        self._unwatch()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        self._discarded_bytes = 0
        super().on_response_complete()
        self._unwatch()
        self._watch()

    def send_400_response(self, msg: str) -> None:
        """What came is no HTTP."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.abort()  # within an answer, or after one that ended the connection
            return
        if self.cycle is not None:
            self.cycle.disconnected = True  # an app that is at work has nobody to answer
            self.cycle.message_event.set()
        is_head = self.conn.our_state is h11.SEND_RESPONSE and self.scope["method"] == "HEAD"
        body = error_body(InvalidRequestError("this is no HTTP request that can be understood"))
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        response = h11.Response(status_code=400, headers=[*headers, (b"connection", b"close")], reason=b"Bad Request")
        for event in (response, h11.Data(data=b"" if is_head else body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _watch(self) -> None:
        """Nobody waits for ever: for a request, or for an answer to be taken."""
        cycle = self.cycle
        answering = cycle is not None and not cycle.response_complete
        protected = answering and (self._visit.known if self._has_token else not cycle.more_body)
        self._visit.wait(not protected)
        if answering and (protected or not self._has_token):  # a body that does not come is the guard's to end
            self._unwatch()
        elif self._too_slow is None:
            self._too_slow = self.loop.call_later(REQUEST_WITHIN_S, self._give_up)

    def _unwatch(self) -> None:
        if self._too_slow is not None:
            self._too_slow.cancel()
            self._too_slow = None

    def _give_up(self) -> None:
        self._too_slow = None
        if self._visit.known and self.cycle is not None and not self.cycle.response_complete:
            return  # shown since
        unsent = self.transport.get_write_buffer_size()
        if unsent and unsent != self._unsent:  # it takes its answer, slowly
            self._unsent = unsent
            self._too_slow = self.loop.call_later(REQUEST_WITHIN_S, self._give_up)
            return
        self._visit.cut()
