"""EngineServer: an engine behind HTTP, on loopback unless told otherwise, by token where it is not."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Unpack

from starlette.requests import Request
from starlette.responses import Response

from weightsync.errors import InvalidRequestError
from weightsync.handles.compact import COMPACT_HEADER, COMPACT_TYPES, KnownLayouts, expanded, layout_named_in
from weightsync.handles.http import ENGINE_API, TIMEOUT_HEADER
from weightsync.net.guard import LIST_BODY_BYTES, MANIFEST_BODY_BYTES
from weightsync.net.messages import decode, encode
from weightsync.net.server import Api, ServerOptions, ServerSettings, ServerThread
from weightsync.types import REQUEST_TYPES, BeginRequest, EngineHandle, EngineOp, EngineRequest
from weightsync.types.deadline import check_wait_s
from weightsync.types.process import of_one_process

_MAX_CALLS = 64
"""Calls under way at once; a sync of one trainer has at most five."""
_URGENT = frozenset({EngineOp.DESCRIBE, EngineOp.ABORT, EngineOp.RESUME})
"""Steps that never wait behind chunks: they have threads of their own."""
_DEFAULT_TIMEOUT_S = 300.0
_BODY_LIMITS = {
    EngineOp.BEGIN: MANIFEST_BODY_BYTES,
    EngineOp.UPDATE_WEIGHTS: MANIFEST_BODY_BYTES,  # a chunk may be the whole model
    EngineOp.STAGE: MANIFEST_BODY_BYTES,
    EngineOp.ABORT: LIST_BODY_BYTES,  # its reason names what failed on every engine
}


@of_one_process
class EngineServer:
    """Serves one engine's steps: POST /weightsync/v1/{describe,init,begin,update_weights,stage,...}.

    Bodies are JSON of the request types, nothing is unpickled, unknown fields are refused.

    Args:
        engine: usually an `EmbeddedEngine`.
        settings: host, port, token and tls, see `ServerSettings`.

    Raises:
        ConfigError: the host is reachable from elsewhere and there is no token.
    """

    def __init__(self, engine: EngineHandle, **settings: Unpack[ServerOptions]) -> None:
        self._engine = engine
        self._layouts = KnownLayouts()
        self._pool = ThreadPoolExecutor(_MAX_CALLS, thread_name_prefix="weightsync-engine")
        self._urgent = ThreadPoolExecutor(_MAX_CALLS // 4, thread_name_prefix="weightsync-engine-urgent")
        self.app = Api("weightsync engine", ("POST", f"{ENGINE_API}/{{op}}", self._handle))
        self._server = ServerThread(
            self.app,
            ServerSettings(**settings),
            body_limits={f"{ENGINE_API}/{op}": num_bytes for op, num_bytes in _BODY_LIMITS.items()},
        )

    def start(self) -> str:
        """Starts to listen in a thread and returns the URL. Routes added to `app` before are served too."""
        return self._server.start()

    def wait(self) -> None:
        """Blocks until the server ends."""
        self._server.wait()

    def close(self) -> None:
        """Stops listening; does not close the engine. Idempotent."""
        self._server.close()
        for pool in (self._pool, self._urgent):
            pool.shutdown(wait=False, cancel_futures=True)

    async def _handle(self, request: Request) -> Response:
        op = request.path_params["op"]
        try:
            step = EngineOp(op)
        except ValueError:
            raise InvalidRequestError(f"there is no step {op!r}; there are {', '.join(EngineOp)}") from None
        body = await request.body()
        timeout_s = _timeout_s(request.headers.get(TIMEOUT_HEADER))
        layout = request.headers.get(COMPACT_HEADER)
        return await asyncio.get_running_loop().run_in_executor(
            self._urgent if step in _URGENT else self._pool, self._answer, step, body or b"{}", layout, timeout_s
        )

    def _answer(self, step: EngineOp, body: bytes, layout: str | None, timeout_s: float) -> Response:
        """Reads, calls and writes, in a thread: a manifest of 100,000 tensors takes its time to read."""
        message = self._read(step, body, layout)
        reply = self._engine.call(step, message, timeout_s=timeout_s)
        headers = {}
        if layout is None and isinstance(message, BeginRequest):
            headers[COMPACT_HEADER] = self._layouts.keep(message.manifest.table)
        return Response(encode(reply), media_type="application/json", headers=headers)

    def _read(self, step: EngineOp, body: bytes, layout: str | None) -> EngineRequest:
        if layout is None:
            return decode(body, REQUEST_TYPES[step], what=f"the body of {step}")
        if step not in COMPACT_TYPES:
            raise InvalidRequestError(f"{step} has no compact form")
        known = self._layouts.named(layout)
        message = decode(body, COMPACT_TYPES[step], what=f"the compact body of {step}")
        if layout_named_in(message) != layout:
            raise InvalidRequestError("header and body name different layouts")
        return expanded(message, known)


def _timeout_s(header: str | None) -> float:
    try:
        return check_wait_s(TIMEOUT_HEADER, _DEFAULT_TIMEOUT_S if header is None else float(header))
    except ValueError:
        raise InvalidRequestError(f"{TIMEOUT_HEADER} is a number of seconds, not {str(header)[:50]!r}") from None
