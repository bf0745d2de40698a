"""HttpEngine: an engine behind HTTP."""

from __future__ import annotations

from weightsync.errors import UnknownLayoutError, WeightSyncError
from weightsync.handles.compact import COMPACT_HEADER, ToldLayout, layout_named_in
from weightsync.net.client import JsonClient
from weightsync.net.http_edge import answer_in, answered_error
from weightsync.net.messages import encode
from weightsync.types import Deadline, EngineOp, EngineReply, EngineRequest

ENGINE_API = "/weightsync/v1"
"""Every step of `EngineOp` is a POST to this path + "/" + its name."""
TIMEOUT_HEADER = "weightsync-timeout-s"
"""How long the caller waits for the answer: the engine does not work longer for nobody."""


class HttpEngine:
    """An `EngineHandle` that speaks to an `EngineServer`. Thread-safe.

    Args:
        url: e.g. "http://127.0.0.1:8123".
        engine_id: name for messages; the URL where not given.
        token, connect_timeout_s, verify: see `JsonClient`.
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
        self._client = _EngineClient(
            url, runs="an engine", token=token, connect_timeout_s=connect_timeout_s, verify=verify, peer=engine_id
        )
        self.url = self._client.url
        self._layout = ToldLayout()

    @property
    def engine_id(self) -> str:
        return self._client.peer

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
        timeout_s = deadline.check(f"time to ask for {op}", peer=self.engine_id)
        answer = self._client.answer(
            "POST",
            f"{ENGINE_API}/{op}",
            content=body,
            headers={TIMEOUT_HEADER: str(timeout_s), **headers},
            deadline=deadline,
        )
        reply = answer_in(
            answer.status, answer.body, EngineReply, op, url=self.url, peer=self.engine_id, runs="an engine"
        )
        return reply, answer.headers.get(COMPACT_HEADER)

    def close(self) -> None:
        """Ends what is under way. Idempotent."""
        self._client.close()


class _EngineClient(JsonClient):
    def _error_in(self, status: int, body: bytes, path: str) -> WeightSyncError:
        runs = "a weightsync engine server (vLLM's own takes a VllmEngine)"
        return answered_error(status, body, path, url=self.url, peer=self.peer, runs=runs)
