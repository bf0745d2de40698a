"""HttpEngine: an engine behind HTTP."""

from __future__ import annotations

import contextlib
import ssl
from typing import Any

import httpx

from weightsync.errors import (
    ConfigError,
    DeadlineExceededError,
    EngineError,
    EngineUnreachableError,
    InvalidRequestError,
    WeightSyncError,
    error_from_dict,
)
from weightsync.net.auth import bearer_headers
from weightsync.net.messages import decode, encode
from weightsync.types import Deadline, EngineOp, EngineReply, EngineRequest

ENGINE_API = "/weightsync/v1"
"""Every step of `EngineOp` is a POST to this path + "/" + its name."""
MAX_REPLY_BYTES = 64 << 20
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
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"an engine's URL starts with http:// or https://, not {url!r}")
        self.url = url.rstrip("/")
        self._engine_id = engine_id or self.url
        self._connect_timeout_s = connect_timeout_s
        self._client = httpx.Client(
            base_url=self.url,
            headers=bearer_headers(token),
            verify=ssl.create_default_context(cafile=verify) if isinstance(verify, str) else verify,
            trust_env=False,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=8),
        )

    @property
    def engine_id(self) -> str:
        """Name of the engine."""
        return self._engine_id

    def call(self, op: EngineOp, request: EngineRequest, *, timeout_s: float) -> EngineReply:
        """Posts one step; see `EngineHandle.call` for what it raises."""
        timeout = httpx.Timeout(timeout_s, connect=min(timeout_s, self._connect_timeout_s))
        deadline = Deadline(timeout_s)
        try:
            with self._client.stream(
                "POST",
                f"{ENGINE_API}/{op}",
                content=encode(request),
                headers={TIMEOUT_HEADER: str(timeout_s)},
                timeout=timeout,
            ) as response:
                body = read_body(response, deadline, what=f"{self.url}'s answer to {op}", peer=self._engine_id)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise EngineUnreachableError(
                f"can't connect to {self.url}: {error}; does the engine run there?", peer=self._engine_id
            ) from error
        except httpx.TimeoutException as error:
            raise DeadlineExceededError(
                f"{self.url} did not answer {op} within {timeout_s:g} s", peer=self._engine_id
            ) from error
        except httpx.HTTPError as error:
            raise EngineUnreachableError(
                f"the connection to {self.url} broke during {op}: {type(error).__name__}: {error}", peer=self._engine_id
            ) from error
        if response.status_code != 200:
            raise self._error_in(response.status_code, body, op)
        try:
            return decode(body, EngineReply, what="the reply")
        except InvalidRequestError as error:
            raise EngineError(
                f"{self.url} answered {op} with 200 and a body that is no reply: {error}", peer=self._engine_id
            ) from error

    def close(self) -> None:
        """Closes the connections. Idempotent."""
        self._client.close()

    def _error_in(self, status: int, body: bytes, op: EngineOp) -> WeightSyncError:
        with contextlib.suppress(InvalidRequestError):
            told = decode(body, dict[str, Any], what="the error")
            if "error" in told:
                return error_from_dict(told, peer=self._engine_id)
        return EngineError(
            f"{self.url} answered {op} with status {status}: {body[:200]!r}; is this a weightsync engine server?",
            peer=self._engine_id,
        )


def read_body(response: httpx.Response, deadline: Deadline, *, what: str, peer: str) -> bytes:
    """The body, as long as it is small and comes in time: httpx's own timeout starts anew with every byte.

    Raises:
        DeadlineExceededError: it is not whole in time.
        EngineError: it is longer than `MAX_REPLY_BYTES`.
    """
    body = bytearray()
    for part in response.iter_raw():
        body += part
        deadline.check(f"end of {what}", peer=peer)
        if len(body) > MAX_REPLY_BYTES:
            raise EngineError(f"{what} has over {MAX_REPLY_BYTES} bytes", peer=peer)
    return bytes(body)
