"""AsyncControllerClient: the gates of a controller for coroutines, over httpx. No torch."""

from __future__ import annotations

import asyncio

import httpx

from weightsync.clients.controller import RUNS, Answer, rounds
from weightsync.errors import DeadlineExceededError, EngineError, EngineUnreachableError, WeightSyncError
from weightsync.net.auth import bearer_headers
from weightsync.net.exchange import trusted
from weightsync.net.http_edge import NO_ENCODING, answer_in, answered_error, broken_exchange, checked_url
from weightsync.net.messages import encode
from weightsync.types import Deadline
from weightsync.types.control import GateReply, ModelRequest, WaitVersionRequest

_MAX_ANSWER_BYTES = 1 << 20

_IDLE_S = 2.0  # a server closes a connection that is idle for 5 s: a request that meets that would fail


class AsyncControllerClient:
    """The gates for coroutines: of inference clients, and of whoever takes batches. One event loop.

    Args:
        url, token, verify: see `JsonClient`.
    """

    def __init__(self, url: str, *, token: str | None = None, verify: bool | str = True) -> None:
        self.url = checked_url(url, whose=f"{RUNS}'s")
        self._client = httpx.AsyncClient(
            base_url=self.url,
            headers={**bearer_headers(token), **NO_ENCODING},
            verify=trusted(verify),
            trust_env=False,
            limits=httpx.Limits(max_connections=None, keepalive_expiry=_IDLE_S),
        )

    async def check_rollout_service_status(
        self, model_tag: str, *, wait_s: float = 0.0, timeout_s: float = 10.0
    ) -> Answer:
        return await self._gate("/check_rollout_service_status", ModelRequest(model_tag=model_tag), wait_s, timeout_s)

    async def wait(
        self, run_id: str, model_id: str, version: int, *, wait_s: float = 600.0, timeout_s: float = 10.0
    ) -> None:
        """Returns when every live instance serves that version of the model, or a newer one of its run: what
        `get_batch` waits for before it serves a batch to a trainer that is at `version`. Woken, not polling.

        Raises:
            DeadlineExceededError: not within `wait_s`.
        """
        message = WaitVersionRequest(model_tag=model_id, run_id=run_id, version=version)
        if await self._gate("/wait_version", message, wait_s, timeout_s) != "continue":
            raise DeadlineExceededError(
                f"model {model_id}: version {version} is not served by every live instance within {wait_s:g} s",
                version=f"{run_id}/{version}",
            )

    async def close(self) -> None:
        """Closes the connections. Idempotent."""
        await self._client.aclose()

    async def _gate(self, path: str, message: ModelRequest, wait_s: float, timeout_s: float) -> Answer:
        for asked, this_s in rounds(message, wait_s):
            reply = await self._call(path, encode(asked), Deadline(timeout_s + this_s))
            if reply.answer == "continue":
                break
        return reply.answer

    async def _call(self, path: str, content: bytes, deadline: Deadline) -> GateReply:
        try:
            async with asyncio.timeout(deadline.timeout_s):  # httpx's own begins anew with each byte
                status, body = await self._exchange(path, content, deadline)
        except WeightSyncError:
            raise
        except httpx.LocalProtocolError:  # its words may be a header's
            raise EngineUnreachableError(
                f"{self.url} could not be asked for {path}: no such request can be sent", peer=self.url
            ) from None
        except Exception as error:  # a host that can't be looked up, a client that was closed, no memory, ...
            raise self._typed(error, path, deadline) from error
        if status != 200:
            raise answered_error(status, body, path, url=self.url, peer=self.url, runs=RUNS)
        return answer_in(status, body, GateReply, path, url=self.url, peer=self.url, runs=RUNS)

    def _typed(self, error: Exception, path: str, deadline: Deadline) -> WeightSyncError:
        if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
            return EngineUnreachableError(
                f"can't connect to {self.url}: {error}; does {RUNS} run there?", peer=self.url
            )
        late = isinstance(error, TimeoutError | httpx.TimeoutException)
        broke = isinstance(error, httpx.HTTPError)
        return broken_exchange(error, path, url=self.url, peer=self.url, deadline=deadline, late=late, broke=broke)

    async def _exchange(self, path: str, content: bytes, deadline: Deadline) -> tuple[int, bytes]:
        """The status and the body of the answer; not more of it than an answer has."""
        headers, timeout_s = {"content-type": "application/json"}, deadline.remaining_s
        async with self._client.stream("POST", path, content=content, timeout=timeout_s, headers=headers) as response:
            body = bytearray()
            async for part in response.aiter_raw():
                body += part
                if len(body) > _MAX_ANSWER_BYTES:
                    raise EngineError(
                        f"{self.url}'s answer to {path} has over {_MAX_ANSWER_BYTES} bytes", peer=self.url
                    )
            return response.status_code, bytes(body)
