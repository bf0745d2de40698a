"""A real vLLM beside `weightsync serve`: a trainer of six lines, a host of one command, and both are killed once."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import weightsync
from tests.engines.vllm_support import PACKS, Server, build_model, train_step
from tests.multiproc.pull_kit import wait_until
from tests.multiproc.test_verbs import command
from tests.standins.processes import children, free_port
from tests.unit.cli.test_status import run
from weightsync.cli import app
from weightsync.errors import ConfigError, NoEnginesError, SyncFailedError

TOKEN = "a-token-for-tests-only"
_LONG_S = 90.0

pytestmark = pytest.mark.timeout(600)


def trainer_main(port: int, conn: Any) -> None:
    torch.set_num_threads(1)
    model = build_model()
    steps = 0
    with weightsync.publish(model, "actor", token=TOKEN, port=port) as publisher:
        conn.send("started")
        while conn.recv() is not None:
            steps += 1
            train_step(model, steps)
            conn.send(publisher.step().published)
    conn.send("left")
    os._exit(0)


def test_one_command_beside_vllm_and_either_may_be_killed(vllm_server: Server, serves: Callable[[int], None]) -> None:
    port = free_port()
    words = ("--engine", f"actor=vllm+{vllm_server.url}", "--from", f"http://127.0.0.1:{port}", "--port", "0")
    with children() as start:
        trainer = start(trainer_main, port, talk=True, name="trainer")
        assert trainer.recv(_LONG_S) == "started"
        with command(*words) as host:
            host.line("^actor at http")
            trainer.conn.send("step")
            assert trainer.recv(_LONG_S)
            host.line("actor serves run-[0-9a-f]+/1: .* MB mapped")
            serves(1)
            host.process.kill()
        trainer.conn.send("step")  # nobody is there
        assert trainer.recv(_LONG_S)
        with command(*words) as again:
            again.line("actor serves run-[0-9a-f]+/2")
            serves(2)
            vllm_server.kill()
            vllm_server.start()
            vllm_server.wait_until_ready()  # with the weights of its checkpoint
            wait_until(lambda: vllm_server.get("/weight_info")["weight_version"].endswith("/2"), "loaded", _LONG_S)
            serves(2)
            trainer.conn.send(None)
            assert trainer.recv(_LONG_S) == "left"


def test_check_and_push_name_what_a_vllm_has_not(vllm_server: Server, serves: Callable[[int], None]) -> None:
    model = build_model()
    for scheme in ("sglang", "weightsync"):
        with pytest.raises(ConfigError, match="write vllm\\+http"):
            weightsync.push(model, f"{scheme}+{vllm_server.url}")
    with pytest.raises(ConfigError, match=r"engines are not told of versions, and fetch none\. weightsync\.push"):
        weightsync.publish(model, "actor", to=vllm_server.url, token=TOKEN, port=0)
    with pytest.raises(SyncFailedError, match=r"tensors differ: the engine's names are these without 'module\.'"):
        weightsync.push(model, vllm_server.url, name_map=lambda name: f"module.{name}")

    def checked(*more: str) -> int:
        words = ("check", "--model", str(vllm_server.checkpoint), "--engine", f"vllm+{vllm_server.url}", *more)
        return CliRunner().invoke(app, words).exit_code

    with weightsync.push(model, vllm_server.url) as push:  # it is asked what it is
        report = push.step()
        assert (checked(), checked("--anyway"), checked()) == (1, 0, 1), "it is left alone, or comes through"
        assert push.step() is not None
    assert (report.version.number, report.digests_equal) == (1, None if PACKS else True)
    assert (checked(), checked()) == (0, 0), "the trainer has ended in order"
    serves(0)
    with weightsync.push(model, vllm_server.url) as push:
        assert push.step() is not None
    serves(0)


def test_a_push_goes_on_with_a_vllm_that_was_killed_and_started_again(
    vllm_server: Server, serves: Callable[[int], None]
) -> None:
    model = build_model()
    with weightsync.push(model, f"vllm+{vllm_server.url}") as push:
        assert push.step() is not None
        vllm_server.kill()
        train_step(model, 1)
        with pytest.raises(NoEnginesError):
            push.step()
        vllm_server.start()
        vllm_server.wait_until_ready()
        report = push.step()
    assert report is not None
    assert report.version.number == 3, "a number that failed is not used again"
    serves(1)


def test_a_vllm_that_stays_paused_is_wrong_until_the_next_push(vllm_server: Server) -> None:
    """Nobody will resume it: `status` says so. Seen red: "paused or refusing", and 0."""
    url = f"vllm+{vllm_server.url}"
    assert run(url)[0] == 0
    assert vllm_server.http.post("/pause", params={"mode": "keep", "clear_cache": False}).status_code == 200
    code, text, _ = run(url)
    assert (code, f"curl -X POST {vllm_server.url}/resume" in " ".join(text.split())) == (1, True), text
    with weightsync.push(build_model(), url) as push:
        push.step()
    assert run(url)[0] == 0
    assert vllm_server.get("/is_paused") == {"is_paused": False}
