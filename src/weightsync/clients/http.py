"""HttpEngine: an engine behind HTTP."""

from __future__ import annotations

import ssl

import httpx

from weightsync.clients.compact import COMPACT_HEADER, ToldLayout, layout_named_in
from weightsync.clients.http_edge import NO_ENCODING, checked_url, cut_at, read_body, told_error, typed_errors
from weightsync.errors import EngineError, InvalidRequestError, UnknownLayoutError, WeightSyncError
from weightsync.net.auth import bearer_headers
from weightsync.net.messages import decode, encode
from weightsync.types import Deadline, EngineOp, EngineReply, EngineRequest

ENGINE_API = "/weightsync/v1"
"""Every step of `EngineOp` is a POST to this path + "/" + its name."""
TIMEOUT_HEADER = "weightsync-timeout-s"
"""How long the caller waits for the answer: the engine does not work longer for nobody."""


class HttpEngine:
    """An `EngineHandle` that speaks to a `rollout.server.EngineServer`. Thread-safe.

    Args:
        url: e.g. "http://127.0.0.1:8123".
        engine_id: name for messages; the URL where not given.
        token: bearer token of the server.
        connect_timeout_s: how long to try to connect.
        verify: whether to check an https server's certificate; or the PEM file of the authority that signed it.
    """

    def __init__(
        self,
        url: str,
        *,
        engine_id: str | None = None,
        token: str | None = None,
        connect_timeout_s: float = 3.0,
        verify: bool | str = True,
    ) -> None:
        self.url = checked_url(url, whose="an engine's")
        self._engine_id = engine_id or self.url
        self._connect_timeout_s = connect_timeout_s
        self._layout = ToldLayout()
        self._client = httpx.Client(
            base_url=self.url,
            headers={**bearer_headers(token), **NO_ENCODING},
            verify=ssl.create_default_context(cafile=verify) if isinstance(verify, str) else verify,
            trust_env=False,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),  # see cut_at
        )

    @property
    def engine_id(self) -> str:
        """Name of the engine."""
        return self._engine_id

    def call(self, op: EngineOp, request: EngineRequest, *, timeout_s: float) -> EngineReply:
        """Posts one step; see `EngineHandle.call` for what it raises."""
        deadline = Deadline(timeout_s)
        short = self._layout.shortened(request)
        if short is not None:
            try:
                return self._post(op, encode(short), deadline, {COMPACT_HEADER: layout_named_in(short)})[0]
            except WeightSyncError as error:
                self._layout.forget()  # whatever it was: what comes after this is said in full once
                if not isinstance(error, UnknownLayoutError):  # which says that the server has started anew
                    raise
        reply, kept = self._post(op, encode(request), deadline, {})
        self._layout.answered(request, kept)
        return reply

    def _post(
        self, op: EngineOp, body: bytes, deadline: Deadline, headers: dict[str, str]
    ) -> tuple[EngineReply, str | None]:
        """The answer, and which layout the server says to keep."""
        timeout_s = deadline.check(f"time to ask for {op}", peer=self._engine_id)
        timeout = httpx.Timeout(timeout_s, connect=min(timeout_s, self._connect_timeout_s))
        with (
            typed_errors(deadline, url=self.url, what=op, peer=self._engine_id, runs="the engine"),
            cut_at(deadline) as trace,
            self._client.stream(
                "POST",
                f"{ENGINE_API}/{op}",
                content=body,
                headers={TIMEOUT_HEADER: str(timeout_s), "content-type": "application/json", **headers},
                timeout=timeout,
                extensions={"trace": trace},
            ) as response,
        ):
            body = read_body(response, deadline, what=f"{self.url}'s answer to {op}", peer=self._engine_id)
        if response.status_code != 200:
            raise self._error_in(response.status_code, body, op)
        try:
            return decode(body, EngineReply, what="the reply"), response.headers.get(COMPACT_HEADER)
        except InvalidRequestError as error:
            raise EngineError(
                f"{self.url} answered {op} with 200 and a body that is no reply: {error}", peer=self._engine_id
            ) from error

    def close(self) -> None:
        """Closes the connections. Idempotent."""
        self._client.close()

    def _error_in(self, status: int, body: bytes, op: EngineOp) -> WeightSyncError:
        return told_error(body, peer=self._engine_id) or EngineError(
            f"{self.url} answered {op} with status {status}: {body[:200]!r}; is this a weightsync engine server? "
            "(vLLM's own takes a VllmEngine)",
            peer=self._engine_id,
        )
