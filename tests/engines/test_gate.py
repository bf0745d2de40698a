"""Gate: requests of an OpenAI-style client wait while rollout has to. A real controller, and a server that answers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
from starlette.requests import Request
from starlette.responses import Response

from weightsync.clients.async_controller import AsyncControllerClient
from weightsync.clients.controller import ControllerClient
from weightsync.clients.gate import Gate
from weightsync.control.build import Built, build_controller
from weightsync.control.method import SyncMethod
from weightsync.errors import (
    AuthError,
    ConfigError,
    EngineUnreachableError,
    InvalidRequestError,
    NotServingError,
    WeightSyncError,
)
from weightsync.net.server import Api, ServerThread
from weightsync.types import Version

TOKEN = "a-token-for-tests-only"
LONG_S = 20.0


class Held(SyncMethod):
    """A sync takes until it is let go."""

    def __init__(self) -> None:
        self.let_go = threading.Event()

    def sync_weights(self, model_tag: str, version: Version) -> int:
        assert self.let_go.wait(LONG_S)
        return version.number


@pytest.fixture
def method() -> Iterator[Held]:
    held = Held()
    yield held
    held.let_go.set()


@pytest.fixture
def built(method: Held) -> Iterator[Built]:
    config = {"sync_mode": "sync", "fleet": {"models": ["actor"], "port": 0}}
    with build_controller(config, method=method, token=TOKEN) as controller:
        yield controller


@pytest.fixture
def server() -> Iterator[tuple[str, list[str]]]:
    """Speaks as OpenAI does, for one route, and notes what was asked."""
    asked: list[str] = []
    app = Api("an inference server")

    async def complete(request: Request) -> Response:
        asked.append(json.loads(await request.body())["messages"][0]["content"])
        message = {"role": "assistant", "content": "well"}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        said = {"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
        return Response(json.dumps(said), media_type="application/json")

    async def models() -> Response:
        return Response('{"object": "list", "data": []}', media_type="application/json")

    app.answer("POST", "/v1/chat/completions", complete)
    app.answer("GET", "/v1/models", models)
    thread = ServerThread(app)
    yield thread.start(), asked
    thread.close()


@contextlib.asynccontextmanager
async def client_of(gate: Gate, url: str, *, max_retries: int = 0) -> AsyncIterator[openai.AsyncOpenAI]:
    async with httpx.AsyncClient(transport=gate.transport()) as http:
        yield openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", http_client=http, max_retries=max_retries)
    await gate.close()


async def say(client: openai.AsyncOpenAI, content: str) -> str | None:
    said = await client.chat.completions.create(model="m", messages=[{"role": "user", "content": content}])
    return said.choices[0].message.content


def blocked(built: Built) -> None:
    built.controller.train_worker_notify_weight_update("w", "actor", "r", 1, timeout_s=0.0)
    assert built.controller.check_rollout_service_status("actor") == "block"


def eventually(there: Callable[[], bool]) -> None:
    until = time.monotonic() + LONG_S
    while not there():
        assert time.monotonic() < until
        time.sleep(0.005)


def test_requests_wait_until_the_sync_has_ended(built: Built, method: Held, server: tuple[str, list[str]]) -> None:
    url, asked = server

    async def run() -> list[str | None]:
        gate = Gate(built.url, "actor", token=TOKEN, wait_s=LONG_S)
        async with client_of(gate, url) as client:
            assert await say(client, "before") == "well"
            await asyncio.to_thread(blocked, built)
            waiting = [asyncio.create_task(say(client, str(number))) for number in range(20)]
            assert [model async for model in client.models.list()] == [], "what only looks is not held"
            assert asked == ["before"]
            method.let_go.set()
            return await asyncio.gather(*waiting)

    assert asyncio.run(run()) == ["well"] * 20
    assert sorted(asked[1:], key=int) == [str(number) for number in range(20)]


def test_one_that_may_not_proceed_in_time_is_not_sent(built: Built, server: tuple[str, list[str]]) -> None:
    url, asked = server
    blocked(built)

    async def run() -> None:
        gate = Gate(built.url, "actor", token=TOKEN, wait_s=0.05)
        with pytest.raises(NotServingError, match=r"was blocked for 0\.05 s"):
            await gate.wait()
        async with client_of(gate, url) as client:
            with pytest.raises(openai.APIStatusError) as caught:
                await say(client, "never")
            assert (caught.value.status_code, caught.value.response.headers["retry-after"]) == (503, "1")
            assert caught.value.response.json()["error"] == "NotServingError"

    asyncio.run(run())
    assert asked == []


def test_openais_client_tries_again_by_itself(built: Built, method: Held, server: tuple[str, list[str]]) -> None:
    url, asked = server
    blocked(built)

    async def run() -> str | None:
        gate = Gate(built.url, "actor", token=TOKEN, wait_s=0.05)
        async with client_of(gate, url, max_retries=20) as client:
            waiting = asyncio.create_task(say(client, "again"))
            with pytest.raises(NotServingError):
                await gate.wait()
            method.let_go.set()
            return await waiting

    assert asyncio.run(run()) == "well"
    assert asked == ["again"]


def test_a_coroutine_is_gated_and_what_can_not_be_asked_is_typed(built: Built, method: Held) -> None:
    async def run() -> str:
        with pytest.raises(InvalidRequestError, match="wait_s"):
            Gate(built.url, "actor", wait_s=float("nan"))
        for url, token, model, error in (
            (built.url, "another-token-for-tests", "actor", AuthError),
            (built.url, TOKEN, "critic", InvalidRequestError),
            ("http://127.0.0.1:9", TOKEN, "actor", EngineUnreachableError),
        ):
            wrong = Gate(url, model, token=token, wait_s=0.2)
            with pytest.raises(error):
                await wrong.wait()
            await wrong.close()
        gate = Gate(built.url, "actor", token=TOKEN, wait_s=LONG_S)

        @gate
        async def generate(prompt: str, *, suffix: str) -> str:
            """What it says."""
            return prompt + suffix

        assert generate.__doc__ == "What it says."
        await asyncio.to_thread(blocked, built)
        waiting = asyncio.ensure_future(generate("a", suffix="b"))
        method.let_go.set()
        said = await waiting
        await gate.close()
        return said

    assert asyncio.run(run()) == "ab"


def test_threads_of_openais_plain_client_wait_too(
    built: Built, method: Held, server: tuple[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen to fail: a transport that does not wait."""
    url, asked = server
    calls, call = [], ControllerClient.call
    monkeypatch.setattr(ControllerClient, "call", lambda *given, **more: (calls.append(1), call(*given, **more))[1])
    gate = Gate(built.url, "actor", token=TOKEN, wait_s=LONG_S)
    with httpx.Client(transport=gate.thread_transport()) as http, ThreadPoolExecutor(4) as threads:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", http_client=http, max_retries=0)

        def say(content: str) -> str | None:
            told = client.chat.completions.create(model="m", messages=[{"role": "user", "content": content}])
            return told.choices[0].message.content

        assert say("before") == "well"
        blocked(built)
        calls.clear()
        waiting = [threads.submit(say, str(number)) for number in range(4)]
        eventually(lambda: len(calls) == 4)
        assert [model.id for model in client.models.list()] == [], "what only looks is not held"
        assert asked == ["before"]
        method.let_go.set()
        assert [each.result(LONG_S) for each in waiting] == ["well"] * 4
    assert sorted(asked[1:]) == ["0", "1", "2", "3"]


@pytest.mark.parametrize("of_threads", [False, True], ids=["coroutines", "threads"])
def test_none_waits_for_a_connection_behind_the_gate(built: Built, of_threads: bool) -> None:
    """It would be sent while the gate is closed. Seen red: 100 of 120 were under way, httpx's own limit."""
    num = 120

    async def run() -> list[int]:
        all_came = asyncio.Barrier(num)

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            await all_came.wait()
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            await writer.drain()
            writer.close()

        gate = Gate(built.url, "actor", token=TOKEN, wait_s=LONG_S)
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        timeout = httpx.Timeout(LONG_S)
        plain = httpx.Client(transport=gate.thread_transport(), timeout=timeout)
        with ThreadPoolExecutor(num) as threads, plain:
            async with server, httpx.AsyncClient(transport=gate.transport(), timeout=timeout) as client:
                loop = asyncio.get_running_loop()
                said: list[Awaitable[httpx.Response]] = [
                    loop.run_in_executor(threads, plain.post, url) if of_threads else client.post(url)
                    for _ in range(num)
                ]
                answers = await asyncio.gather(*said)
        await gate.close()
        return [each.status_code for each in answers]

    assert asyncio.run(run()) == [200] * num


def test_a_plain_function_is_gated_and_a_generator_is_not(built: Built, method: Held) -> None:
    blocked(built)
    late = Gate(built.url, "actor", token=TOKEN, wait_s=0.05)
    sent: list[str] = []

    def generate(prompt: str, *, suffix: str = "") -> str:
        """What it says."""
        sent.append(prompt)
        return prompt + suffix

    with pytest.raises(NotServingError, match=r"was blocked for 0\.05 s"):
        late(generate)("a")
    assert sent == []
    with httpx.Client(transport=late.thread_transport()) as http:
        refused = http.post(f"{built.url}/anything")
        assert (refused.status_code, refused.json()["error"]) == (503, "NotServingError")
    gate = Gate(built.url, "actor", token=TOKEN, wait_s=LONG_S)
    assert gate(generate).__doc__ == "What it says."
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(gate(generate), "a", suffix="b")
        method.let_go.set()
        assert waiting.result(LONG_S) == "ab"

    def stream() -> Iterator[str]:
        yield "a"

    async def async_stream() -> AsyncIterator[str]:
        yield "a"

    for each in (stream, async_stream):
        with pytest.raises(ConfigError, match="not around a generator"):
            gate(each)

    class Callee:
        async def __call__(self) -> str:
            return "called"

    assert asyncio.run(gate(Callee())()) == "called"


def test_closing_a_gate_ends_the_waits_of_its_threads(built: Built) -> None:
    blocked(built)
    gate = Gate(built.url, "actor", token=TOKEN, wait_s=LONG_S)
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(gate.wait_in_thread)
        eventually(lambda: bool(gate._from_threads._open))
        asyncio.run(gate.close())
        with pytest.raises(WeightSyncError):
            waiting.result(LONG_S / 2)


def test_one_that_waits_asks_once(built: Built, method: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    """The controller wakes it. Seen to fail: with waits in rounds of 0.05 s."""
    calls, call = [], AsyncControllerClient._call
    monkeypatch.setattr(AsyncControllerClient, "_call", lambda *given: (calls.append(1), call(*given))[1])
    blocked(built)

    async def run() -> None:
        gate = Gate(built.url, "actor", token=TOKEN, wait_s=LONG_S)
        waiting = asyncio.create_task(gate.wait())
        done, _ = await asyncio.wait({waiting}, timeout=0.5)
        assert not done
        method.let_go.set()
        await waiting
        await gate.close()

    asyncio.run(run())
    assert len(calls) == 1
