"""`weightsync serve` and `weightsync check` at a shell: help, what works, the likeliest mistakes, Ctrl-C.

What `serve` does to engines, and its Ctrl-C, is in test_verbs.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from typer.testing import CliRunner

import weightsync
from tests.standins.processes import free_port
from weightsync.cli import app
from weightsync.engine.embedded import EmbeddedEngine
from weightsync.engine.server import EngineServer
from weightsync.load.module import ModuleWeightLoader

SECRET = "a-token-for-tests-only"
ENV = {"TERM": "dumb", "NO_COLOR": "1", "COLUMNS": "400", "WEIGHTSYNC_TOKEN": SECRET}


def invoke(*words: str | float | Path, **env: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(word) for word in words], env={**ENV, **env})
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def model(dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    return nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 3)).to(dtype)


@contextlib.contextmanager
def served() -> Iterator[tuple[EmbeddedEngine, str]]:
    engine = EmbeddedEngine.of(ModuleWeightLoader(model()))
    server = EngineServer(engine, token=SECRET)
    yield engine, server.start()
    server.close()


@pytest.fixture(scope="module")
def engine() -> Iterator[str]:
    with served() as (_, url):
        yield url


@pytest.fixture
def own_engine() -> Iterator[tuple[EmbeddedEngine, str]]:
    with served() as made:
        yield made


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    save_file(model(torch.float32).state_dict(), tmp_path / "model.safetensors")
    return tmp_path


def test_help_teaches() -> None:
    code, text = invoke("serve", "--help")
    assert code == 0
    for word in (
        "--engine",
        "MODEL=URL",
        "--from",
        "--lease",
        "--controller",
        "Example: weightsync serve",
        "vllm serve",
    ):
        assert word in text
    code, text = invoke("check", "--help")
    assert code == 0
    for word in ("--model", "--engine", "--dtype", "Exit codes", "Example: weightsync check"):
        assert word in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "serve needs the engines"),
        (("--engine", "vllm+http://127.0.0.1:8000"), "--engine is MODEL=URL"),
        (("--engine", "actor=vlm+http://127.0.0.1:8000"), "did you mean vllm+http://"),
        (("--engine", "actor=127.0.0.1:8000"), "is no engine's URL"),
        (("--engine", "actor=vllm+http://127.0.0.1:1", "--from", "trainer-0:8765"), "starts with http:// or https://"),
        (("--engine", "actor=vllm+http://127.0.0.1:1", "--controller", "http://a:1", "--port", "0"), "a lease"),
        (("--engine", "actor=vllm+http://127.0.0.1:1", "--lease", "/no/such/folder/lease"), "folder /no/such/folder"),
        (("--engine", "actor=vllm+http://127.0.0.1:1", "--name", "\n"), "--name has 1 to 256 printable characters"),
    ],
)
def test_what_serve_refuses_at_once(words: tuple[str, ...], said: str) -> None:
    code, text = invoke("serve", *words)
    assert said in text
    assert code == (1 if "--lease" in words else 2)


def test_a_port_that_is_taken_and_a_host_without_a_token(engine: str) -> None:
    port = engine.rsplit(":", 1)[1]
    code, text = invoke("serve", "--engine", "actor=vllm+http://127.0.0.1:1", "--port", port)
    assert (code, "choose another port" in text) == (2, True)
    code, text = invoke("serve", "--engine", "actor=vllm+http://127.0.0.1:1", "--host", "0.0.0.0", WEIGHTSYNC_TOKEN="")
    assert (code, "give a token" in text) == (2, True)


def test_the_wrong_token_and_the_wrong_model_of_a_source() -> None:
    with weightsync.publish(model(torch.float32), "actor", token=SECRET, port=0) as publisher:
        words = ("serve", "--from", publisher.endpoint, "--port", "0")
        code, text = invoke(*words, "--engine", "actr=vllm+http://127.0.0.1:1")
        assert (code, "did you mean 'actr'" in text) == (2, True)
        code, text = invoke(
            *words, "--engine", "actor=vllm+http://127.0.0.1:1", WEIGHTSYNC_TOKEN="another-token-for-tests"
        )
        assert (code, "AuthError" in text) == (2, True)


def test_serve_makes_the_lease_and_says_how_vllm_is_started(tmp_path: Path, engine: str) -> None:
    lease = tmp_path / "lease"
    port = engine.rsplit(":", 1)[1]  # taken: so it ends
    code, text = invoke("serve", "--engine", "actor=vllm+http://127.0.0.1:1", "--lease", lease, "--port", port)
    assert code == 2
    assert lease.exists()
    assert f"WEIGHTSYNC_LEASE_FILE={lease} VLLM_SERVER_DEV_MODE=1" in text
    assert "--middleware weightsync.engine.vllm.lease_middleware.LeaseMiddleware" in text


def test_check_says_whether_an_engine_would_take_a_checkpoint(engine: str, checkpoint: Path) -> None:
    code, text = invoke("check", "--model", checkpoint, "--engine", engine)
    assert (code, "would take it: 3 tensors, 0.0 MB" in text) == (0, True)
    code, text = invoke("check", "--model", checkpoint / "model.safetensors", "--engine", f"weightsync+{engine}")
    assert code == 0, text


def test_check_takes_the_files_that_an_index_names(engine: str, checkpoint: Path) -> None:
    """Seen red: the same weights in another form, which lay beside them, were tensors that no engine has."""
    save_file({"tok_embeddings.weight": torch.ones(3)}, checkpoint / "consolidated.safetensors")
    index = {"weight_map": dict.fromkeys(model(torch.float32).state_dict(), "model.safetensors")}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    code, text = invoke("check", "--model", checkpoint, "--engine", engine)
    assert code == 0, text


def test_check_names_what_differs(engine: str, checkpoint: Path) -> None:
    state = model(torch.float32).state_dict()
    code, text = invoke("check", "--model", checkpoint, "--engine", engine, "--dtype", "keep")
    assert (code, "the trainer sends float32" in text, "bfloat16" in text) == (1, True, True)
    save_file({f"module.{name}": tensor for name, tensor in state.items()}, checkpoint / "model.safetensors")
    code, text = invoke("check", "--model", checkpoint, "--engine", engine)
    assert (code, "3 tensors differ: the engine's names are these without 'module.': name_map=" in text) == (1, True)
    others = {"1.weighty" if name == "1.weight" else f"module.{name}": tensor for name, tensor in state.items()}
    save_file(others, checkpoint / "model.safetensors")
    code, text = invoke("check", "--model", checkpoint, "--engine", engine)
    assert (code, "closest that it has is '0.weight'" in text, text.count("name_map")) == (1, True, 1)
    assert "6 tensors differ: 1.weighty: " in text, "three of the trainer's, and three of the engine's"
    assert "; 0.weight, 1.bias, 1.weight: the trainer does not send them" in text
    save_file({f"x.{number}": torch.zeros(1) for number in range(20)}, checkpoint / "model.safetensors")
    code, text = invoke("check", "--model", checkpoint, "--engine", engine)
    assert (code, "23 tensors differ: x.0, x.1, x.10 and 17 more: " in text) == (1, True)
    assert text.count("no such tensor") == 1
    save_file({**state, "1.bias": torch.zeros(5)}, checkpoint / "model.safetensors")
    code, text = invoke("check", "--model", checkpoint, "--engine", engine)
    assert (code, "(5,)" in text, "(3,)" in text) == (1, True, True)
    save_file({"0.weight": state["0.weight"]}, checkpoint / "model.safetensors")
    code, text = invoke("check", "--model", checkpoint, "--engine", engine)
    assert (code, "does not send 2 of the model's tensors: 1.bias, 1.weight" in text) == (1, True)


def test_what_check_refuses(engine: str, checkpoint: Path, tmp_path: Path) -> None:
    for words, said, expected in (
        (("--model", "/no/such", "--engine", engine), "is not there", 2),
        (("--model", tmp_path / "..", "--engine", engine), "has no *.safetensors", 2),
        (("--model", checkpoint, "--engine", "vlm+http://a:1"), "did you mean vllm+http://", 2),
        (("--model", checkpoint, "--engine", f"vllm+http://127.0.0.1:{free_port()}"), "EngineUnreachableError", 1),
        (("--model", checkpoint, "--engine", engine, "--dtype", "bf16"), "--dtype is one of", 2),
        (("--model", checkpoint, "--engine", f"vllm+{engine}"), "is an engine server of weightsync", 2),
    ):
        code, text = invoke("check", *words)
        assert said in text
        assert code == expected
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "odd.safetensors").write_bytes(b"this is none")
    code, text = invoke("check", "--model", tmp_path / "odd", "--engine", engine)
    assert (code, "this is no safetensors file" in text) == (2, True)
    code, text = invoke("check", "--model", checkpoint, "--engine", engine, WEIGHTSYNC_TOKEN="another-token-for-tests")
    assert (code, "AuthError" in text) == (2, True)


def test_check_waits_as_long_as_it_is_told(checkpoint: Path) -> None:
    """Seen red: it had no such option."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        code, text = invoke("check", "--model", checkpoint, "--engine", url, "--timeout-s", 0.2)
    assert (code, "did not answer /weightsync/v1/describe within 0.2 s" in text) == (1, True), text


def test_check_leaves_an_engine_alone_that_has_a_trainer(
    checkpoint: Path, own_engine: tuple[EmbeddedEngine, str]
) -> None:
    trained, (engine, url) = model(torch.float32), own_engine
    asked = ("check", "--model", checkpoint, "--engine", url)
    with weightsync.push(trained, url, token=SECRET, run_id="mine") as push:
        for _ in range(2):  # before its first step it is in no group, and a trainer all the same
            code, text = invoke(*asked)
            assert (code, "has weights of mine" in text) == (1, True)
            push.step()
        code, text = invoke(*asked, "--anyway")
        assert code == 0, text
        code, text = invoke(*asked)
        assert (code, "has weights of mine" in text) == (1, True), "a check takes nobody's place"
        push.step()
    assert engine.version is not None
    assert engine.version.number == 3


def test_check_goes_on_where_the_trainer_has_ended_in_order(
    checkpoint: Path, own_engine: tuple[EmbeddedEngine, str]
) -> None:
    trained, (engine, url) = model(torch.float32), own_engine
    asked = ("check", "--model", checkpoint, "--engine", url)
    with weightsync.push(trained, url, token=SECRET, run_id="mine") as push:
        push.step()
    for _ in range(2):
        code, text = invoke(*asked)
        assert code == 0, text
    assert str(engine.version) == "mine/1"
    with weightsync.push(trained, url, token=SECRET, run_id="another"):
        code, text = invoke(*asked)
        assert (code, "has weights of another" in text) == (1, True)


COMMAND = """
import signal, threading
signal.signal(signal.SIGINT, signal.default_int_handler)  # who starts tests in the background has it ignored
{before}
from weightsync.cli import main
main()
"""
ELSEWHERE = """
threading.Thread(target=threading.Event().wait, daemon=True).start()
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # so that the other thread is given it
"""


@pytest.mark.parametrize("before", ["", ELSEWHERE], ids=["it waits", "uninterrupted"])
def test_ctrl_c_ends_a_check_that_waits(checkpoint: Path, before: str) -> None:
    """Also where it comes just before the wait, or another thread is given it. Seen red: it waited for 30 s."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        process = subprocess.Popen(
            [sys.executable, "-c", COMMAND.format(before=before), "check", "--model", str(checkpoint), "--engine", url],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, **ENV},
        )  # fmt: skip
        silent.settimeout(60)
        connection, _ = silent.accept()
        with connection:
            process.send_signal(signal.SIGINT)
            said, _ = process.communicate(timeout=20)
    assert process.returncode == 130
    assert "Traceback" not in said


# --- doctor ---


def test_doctor_looks_at_this_machine_and_at_an_engine(engine: str) -> None:
    code, text = invoke("doctor", "--help")
    assert (code, "Example: weightsync doctor" in text) == (0, True)
    code, text = invoke("doctor", engine)
    assert code == 0, text
    for word in ("CPU", "memory", "/dev/shm", "huge pages", "open files", "torch ", "takes whole tensors and patches"):
        assert word in text


@pytest.mark.parametrize(
    ("words", "said", "expected"),
    [
        (("--model-gb", "1000000"), "enlarge it", 1),
        (("--model-gb", "-1"), "model-gb", 2),
        (("vlm+http://a:1",), "did you mean vllm+http://", 1),
        (("127.0.0.1:8000",), "is no engine's URL", 1),
        ((f"vllm+http://127.0.0.1:{1}",), "EngineUnreachableError", 1),
    ],
)
def test_what_doctor_finds_wrong(words: tuple[str, ...], said: str, expected: int) -> None:
    code, text = invoke("doctor", *words)
    assert said in text
    assert code == expected
