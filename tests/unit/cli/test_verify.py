"""`weightsync verify` at a shell: help, proved, wrong, unknown, the likeliest mistakes, Ctrl-C."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from starlette.responses import Response
from torch import nn
from typer.testing import CliRunner

import weightsync
from tests.standins.processes import free_port
from weightsync.cli import app
from weightsync.engine.embedded import EmbeddedEngine
from weightsync.engine.server import EngineServer
from weightsync.load.module import ModuleWeightLoader
from weightsync.net.messages import encode
from weightsync.net.server import Api, ServerThread
from weightsync.types.service import ModelStatus, ServiceStatus

SECRET = "a-token-for-tests-only"
ENV = {"TERM": "dumb", "NO_COLOR": "1", "COLUMNS": "400", "WEIGHTSYNC_TOKEN": SECRET}


verifying = sys.modules["weightsync.cli.verify"]  # the name is the command's


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow machine names nobody whom a quick one would not."""
    monkeypatch.setattr(verifying, "_QUIET_S", 60.0)


def invoke(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["verify", *words], env=ENV)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


@pytest.fixture
def served() -> Iterator[tuple[nn.Linear, str]]:
    module = nn.Linear(3, 4, dtype=torch.bfloat16)
    server = EngineServer(EmbeddedEngine.of(ModuleWeightLoader(module)), token=SECRET)
    yield module, server.start()
    server.close()


def test_help_teaches() -> None:
    code, text = invoke("--help")
    assert code == 0
    for word in ("URL...", "proved", "Exit codes", "--timeout-s", "--token"):
        assert word in text


def test_an_engine_says_what_is_live(served: tuple[nn.Linear, str]) -> None:
    module, url = served
    assert invoke(url) == (3, f"unknown  {url}: nothing was synced yet\n")
    with weightsync.push(nn.Linear(3, 4), url, token=SECRET) as push:
        push.step()
    code, text = invoke(url, url + "/")
    assert code == 0
    assert [line.split()[0] for line in text.splitlines()] == ["proved", "proved"]
    assert f"serves {push.run_id}/1, its live weights have digest " in text
    module.weight.data.view(torch.int16)[0, 0] ^= 1
    code, text = invoke(url)
    assert (code, text.startswith(f"wrong    {url}: DigestMismatchError")) == (1, True), text


def test_one_that_does_not_answer_hides_no_other(served: tuple[nn.Linear, str]) -> None:
    nobody = f"http://127.0.0.1:{free_port()}"
    with weightsync.push(nn.Linear(3, 4), served[1], token=SECRET) as push:
        push.step()
    code, text = invoke(nobody, served[1])
    assert code == 3
    assert [line.split()[0] for line in text.splitlines()] == ["unknown", "proved"]


def test_who_is_waited_for_is_named_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifying, "_QUIET_S", 0.01)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        code, text = invoke(url, "--timeout-s", "1")
    assert (code, text.splitlines()[0]) == (3, f"{url}: no answer yet")


def test_a_wrong_token_is_the_users(served: tuple[nn.Linear, str]) -> None:
    """Seen red with the code 3, as of an engine that nobody can tell of."""
    code, text = invoke(served[1], "--token", "another-token-for-tests")
    assert (code, text.startswith("AuthError: ")) == (2, True), text
    assert text.count("--token or the variable WEIGHTSYNC_TOKEN") == 1, "seen red: token=, which is no option"


@pytest.mark.parametrize("scheme", ["http", "vllm+http", "sglang+http", "weightsync+http"])
def test_a_silent_engine_costs_the_timeout_and_no_more(scheme: str) -> None:
    """As one that was stopped. Seen red: "within 10 s" of a --timeout-s of 1."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        code, text = invoke(f"{scheme}://127.0.0.1:{silent.getsockname()[1]}", "--timeout-s", "1")
    assert code == 3
    told = re.search(r"DeadlineExceededError: .* within (\S+) s", text)
    assert told is not None, text
    assert float(told[1]) <= 1.0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "Missing argument"),
        (("ftp://x",), "ConfigError"),
        (("nothing+http://127.0.0.1:1",), "ConfigError"),
        (("http://127.0.0.1:1", "--timeout-s", "0"), "--timeout-s"),
        (("weightsync+https://127.0.0.1:1", "--verify", "/no/such/file"), "/no/such/file"),
    ],
)
def test_mistakes(words: tuple[str, ...], said: str) -> None:
    code, text = invoke(*words)
    assert (code, said in text) == (2, True), text


def test_a_rollout_service_is_named_as_one_with_its_engines(tmp_path: Path) -> None:
    """By `check` as well. Seen red: it was no engine that can be synced."""
    model = nn.Linear(3, 4, dtype=torch.bfloat16)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    with weightsync.serve({"actor": model}, token=SECRET, port=0) as service:
        code, text = invoke(service.url)
        checked = CliRunner(env=ENV).invoke(app, ["check", "--model", str(tmp_path), "--engine", service.url])
    said = f"{service.url} is a rollout service, and no engine: actor-0 can't be asked from outside"
    assert (code, said in text, f"is in weightsync status {service.url}" in text) == (2, True, True), text
    assert (checked.exit_code, said in checked.output) == (2, True), checked.output


def test_a_rollout_service_of_servers_names_their_urls() -> None:
    models = {"actor": ModelStatus(engines={"http://127.0.0.1:8000": None, "actor-0": None})}
    body = encode(ServiceStatus(models=models))
    app = Api("weightsync rollout service")
    app.answer("GET", "/status", lambda: Response(body, media_type="application/json"))
    with contextlib.closing(ServerThread(app)) as server:
        code, text = invoke(server.start())
    said = "give the URLs of its engines, http://127.0.0.1:8000; actor-0 can't be asked from outside"
    assert (code, said in text) == (2, True), text


def test_ctrl_c_ends_it_while_an_engine_is_silent() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        command = [sys.executable, "-m", "weightsync.cli", "verify", f"http://127.0.0.1:{silent.getsockname()[1]}"]
        with subprocess.Popen(
            command, env={**os.environ, **ENV}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler) and None,
        ) as process:  # fmt: skip
            silent.settimeout(60)
            connection, _ = silent.accept()
            with connection:
                process.send_signal(signal.SIGINT)
                assert process.wait(30) == 130
            assert process.stdout is not None
            assert b"Traceback" not in process.stdout.read()


def test_what_is_none_and_silent_at_its_status_costs_no_more_than_was_given() -> None:
    """Seen red: ten seconds for its status, behind the time that was given."""
    end = threading.Event()
    server = ServerThread(Api("none", ("GET", "/status", lambda: {"waited": end.wait(30.0)})))
    began_s = time.monotonic()
    code, text = invoke(server.start(), "--timeout-s", "3")
    took_s = time.monotonic() - began_s
    end.set()
    server.close()
    assert (code, took_s < 10.0) == (2, True), text
