"""An engine's handle from its URL, against real servers of each kind that can run here."""

from __future__ import annotations

import contextlib
import http.server
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.standins.processes import free_port
from tests.unit.handles.sglang_kit import write_checkpoint
from tests.unit.handles.vllm_kit import VllmStandIn
from weightsync.engine.embedded import EmbeddedEngine
from weightsync.engine.server import EngineServer
from weightsync.errors import AuthError, ConfigError, DeadlineExceededError, EngineError, EngineUnreachableError
from weightsync.handles.by_url import engine_at, read_engine_url
from weightsync.handles.http import HttpEngine
from weightsync.handles.vllm import VllmEngine
from weightsync.load.module import ModuleWeightLoader
from weightsync.types import EngineOp, EngineReply, EngineRequest

SECRET = "a-token-for-tests-only"


@pytest.fixture(scope="module")
def ours() -> Iterator[str]:
    engine = EmbeddedEngine.of(ModuleWeightLoader(nn.Linear(2, 2, dtype=torch.bfloat16)))
    server = EngineServer(engine, token=SECRET)
    yield server.start()
    server.close()


@pytest.fixture(scope="module")
def stranger() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("vlm+http://a:1", "did you mean vllm\\+http://"),
        ("htp://a:1", "did you mean http://"),
        ("127.0.0.1:8000", "write http://127.0.0.1:8000"),
        ("vllm+http://", "names no host"),
        ("vllm+http://user:secret@a:1", "it has an '@'|has an '@'"),
    ],
)
def test_a_text_that_is_no_url_is_refused_in_words(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        read_engine_url(text)
    assert "secret" not in str(caught.value)


def test_a_plain_url_is_asked_what_it_is(ours: str) -> None:
    handle = engine_at(ours, token=SECRET)
    assert isinstance(handle, HttpEngine)
    handle.close()
    engine_at(f"weightsync+{ours}", token=SECRET).close()  # type: ignore[attr-defined]


def test_a_wrong_token_is_the_engines_own_error(ours: str) -> None:
    with pytest.raises(AuthError, match="the token that the engine was started with"):
        engine_at(ours, token="another-token-for-tests")


def test_what_is_no_engine_is_refused(stranger: str) -> None:
    with pytest.raises(ConfigError, match="is no engine that can be synced"):
        engine_at(stranger)
    with pytest.raises(ConfigError, match="is no engine that can be synced"):
        engine_at(f"vllm+{stranger}")
    with pytest.raises(ConfigError, match="an engine's URL ends before the /v1"):
        engine_at(f"{stranger}/v1")


def test_our_own_engine_under_another_kinds_url_is_named(ours: str) -> None:
    with pytest.raises(
        ConfigError, match=f"is an engine server of weightsync, .* says vllm: write weightsync\\+{ours}"
    ):
        engine_at(f"vllm+{ours}", token=SECRET)


def test_a_vllm_under_our_own_kinds_url_is_named(tmp_path: Path, stranger: str) -> None:
    """Seen red: EngineError, "answered /weightsync/v1/describe with status 404"."""
    server = VllmStandIn(write_checkpoint(tmp_path, 0))
    with contextlib.closing(server):
        url = server.start()
        with pytest.raises(ConfigError, match=f"{url} is vllm, and its URL says weightsync: write vllm\\+{url}"):
            engine_at(f"weightsync+{url}")
    with pytest.raises(ConfigError, match="is no engine that can be synced"):
        engine_at(f"weightsync+{stranger}")


class Failing:
    engine_id = "failing"

    def call(self, op: EngineOp, request: EngineRequest, *, timeout_s: float) -> EngineReply:
        raise EngineError("its workers lost each other")


@pytest.mark.parametrize("kind", ["", "weightsync+", "vllm+"])
def test_an_engine_server_of_ours_that_fails_says_why_itself(kind: str) -> None:
    """Seen red: "is no engine that can be synced"."""
    server = EngineServer(Failing())
    try:
        with pytest.raises(EngineError, match="its workers lost each other"):
            engine_at(kind + server.start())
    finally:
        server.close()


def test_a_silent_server_is_asked_for_as_long_as_was_said_and_once() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        with pytest.raises(DeadlineExceededError, match="did not answer /weightsync/v1/describe"):
            engine_at(f"http://127.0.0.1:{silent.getsockname()[1]}", timeout_s=1.0)


@pytest.mark.parametrize(("status", "comes"), [(502, True), (503, True), (500, False)])
def test_an_engine_whose_proxy_answers_for_it_is_not_there_yet(status: int, comes: bool) -> None:
    """Seen red: `weightsync serve` ended where a sidecar said that vLLM was still starting."""

    class Proxy(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_POST = do_OPTIONS = do_GET  # noqa: N815

    proxy = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Proxy)
    threading.Thread(target=proxy.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{proxy.server_port}"
    try:
        for text, must_answer in ((f"vllm+{url}", True), (url, False)):
            with pytest.raises(EngineError):
                engine_at(text, must_answer=must_answer)
        with contextlib.nullcontext() if comes else pytest.raises(EngineError):
            engine_at(f"vllm+{url}", must_answer=False).close()  # type: ignore[attr-defined]
    finally:
        proxy.shutdown()
        proxy.server_close()


def test_an_engine_that_is_not_there_yet() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(EngineUnreachableError, match="vllm\\+http"):
        engine_at(url, must_answer=False)
    with pytest.raises(EngineUnreachableError):
        engine_at(f"vllm+{url}")
    handle = engine_at(f"vllm+{url}", must_answer=False)
    assert isinstance(handle, VllmEngine)
    assert handle.engine_id == url
    handle.close()


@pytest.mark.parametrize("kind", ["", "vllm+", "weightsync+"])
def test_https_where_no_tls_is_spoken_is_told_the_cure(ours: str, kind: str) -> None:
    """Seen red: OpenSSL's WRONG_VERSION_NUMBER, and the advice to write vllm+https://."""
    secure = ours.replace("http", "https")
    with pytest.raises(EngineUnreachableError) as caught:
        engine_at(f"{kind}{secure}")
    assert str(caught.value) == f"can't connect to {secure}: what answers there speaks no TLS: write {ours}"


@pytest.mark.parametrize("kind", ["", "vllm+"])
def test_a_name_that_is_not_known_is_told_as_such(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen red: it was asked whether an engine runs there, and advised to write vllm+http://."""

    def unknown(*_: object, **__: object) -> object:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "create_connection", unknown)
    with pytest.raises(EngineUnreachableError) as caught:
        engine_at(f"{kind}http://nowhere.example:1")
    assert "the name 'nowhere.example' is not known here (" in str(caught.value)
    assert not any(words in str(caught.value) for words in ("run there", "sglang", "start it"))
    if kind:
        engine_at(f"{kind}http://nowhere.example:1", must_answer=False).close()  # type: ignore[attr-defined]
