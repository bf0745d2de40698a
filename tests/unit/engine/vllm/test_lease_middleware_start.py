"""LeaseMiddleware: no server starts without a lease file; websockets; what it imports."""

from __future__ import annotations

import asyncio
import contextlib
import math
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI, WebSocket

from tests.unit.engine.vllm.test_lease_middleware import LEASE_S, SAID, check_refused
from weightsync.engine.vllm.lease_middleware import LEASE_FILE_VARIABLE, LeaseMiddleware
from weightsync.memory import ServingLease, boot_s


def start(app: Any, lifespan: str) -> tuple[uvicorn.Server, threading.Thread]:
    """A server as vLLM's: it asks the application whether it can start. Returns when it knows."""
    config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="critical", lifespan=lifespan)  # type: ignore[arg-type]
    server = uvicorn.Server(config)

    def run() -> None:
        with contextlib.suppress(SystemExit):  # so it ends where the application can't start
            asyncio.run(server.serve())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    end = time.monotonic() + 10
    while thread.is_alive() and not server.started:
        assert time.monotonic() < end
        time.sleep(0.005)  # between two looks
    return server, thread


def url_of(server: uvicorn.Server) -> str:
    return "127.0.0.1:" + str(server.servers[0].sockets[0].getsockname()[1])


def fault(name: str, folder: Path) -> str | None:
    (folder / "other").write_text("something else")
    return {"no variable": None, "no file": str(folder / "none"), "another file": str(folder / "other")}[name]


@pytest.mark.parametrize("name", ["no variable", "no file", "another file"])
def test_no_server_starts_without_a_lease_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    monkeypatch.delenv(LEASE_FILE_VARIABLE, raising=False)
    if (path := fault(name, tmp_path)) is not None:
        monkeypatch.setenv(LEASE_FILE_VARIABLE, path)
    app = FastAPI()
    app.add_middleware(LeaseMiddleware)
    server, thread = start(app, "auto")
    thread.join(10)
    assert not server.started
    assert LEASE_FILE_VARIABLE in caplog.text


def test_a_server_that_does_not_ask_answers_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(LEASE_FILE_VARIABLE, raising=False)
    app = FastAPI()
    app.add_api_route("/v1/completions", lambda: SAID, methods=["POST"])
    app.add_middleware(LeaseMiddleware)
    server, thread = start(app, "off")
    check_refused(httpx.post(f"http://{url_of(server)}/v1/completions"))
    server.should_exit = True
    thread.join(10)


def test_a_server_starts_with_a_lease_file_and_keeps_its_own_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = ServingLease(str(tmp_path / "lease"))
    monkeypatch.setenv(LEASE_FILE_VARIABLE, lease.path)
    lease.renew(boot_s() + LEASE_S, seen_s=math.inf)
    begun = threading.Event()

    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        begun.set()
        yield

    app = FastAPI(lifespan=contextlib.asynccontextmanager(lifespan))
    app.add_api_route("/v1/completions", lambda: SAID, methods=["POST"])
    app.add_middleware(LeaseMiddleware)
    server, thread = start(app, "auto")
    assert httpx.post(f"http://{url_of(server)}/v1/completions").json() == SAID
    assert begun.is_set()
    server.should_exit = True
    thread.join(10)


# --- websockets ---


def test_a_websocket_is_refused_and_cut(tmp_path: Path) -> None:
    client = pytest.importorskip("websockets.sync.client")
    exceptions = pytest.importorskip("websockets.exceptions")
    lease = ServingLease(str(tmp_path / "lease"))
    app = FastAPI()

    async def talk(websocket: WebSocket) -> None:
        await websocket.accept()
        while True:
            await websocket.send_text(await websocket.receive_text())

    app.add_api_websocket_route("/v1/realtime", talk)
    app.add_middleware(LeaseMiddleware, path=lease.path)
    server, thread = start(app, "auto")
    url = f"ws://{url_of(server)}/v1/realtime"
    with pytest.raises(exceptions.InvalidStatus), client.connect(url):
        pass
    lease.renew(boot_s() + LEASE_S, seen_s=math.inf)
    with client.connect(url) as connection:
        connection.send(SAID)
        assert connection.recv(10) == SAID
        lease.revoke()
        connection.send(SAID)
        with pytest.raises(exceptions.ConnectionClosedError) as caught:
            connection.recv(10)
        assert caught.value.rcvd.code == 1013
    server.should_exit = True
    thread.join(10)


def test_it_imports_no_torch() -> None:
    code = (
        "import sys, weightsync.engine.vllm.lease_middleware as m; print('torch' in sys.modules, 'vllm' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.split() == ["False", "False"], done.stderr
