"""`weightsync trace`: one file of all faces, their clocks aligned; who is missing; where a token goes."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import typer
from starlette.middleware.base import BaseHTTPMiddleware
from typer.testing import CliRunner

from weightsync.cli.trace import trace
from weightsync.engine.embedded import EmbeddedEngine
from weightsync.engine.server import EngineServer
from weightsync.load.module import ModuleWeightLoader
from weightsync.net.server import Api, ServerSettings, ServerThread
from weightsync.net.timeline import add_timeline
from weightsync.observe import Recorder, now_s
from weightsync.types import PhaseRecord
from weightsync.types.timeline import Timeline

TOKEN = "a-token-for-tests-only"
NOBODY = "http://127.0.0.1:9"


def run(*words: object, **env: str) -> tuple[int, str, str]:
    app = typer.Typer()
    app.command()(trace)
    plain = {"COLUMNS": "200", "TERM": "dumb", "NO_COLOR": "1", "WEIGHTSYNC_TOKEN": "", **env}
    result = CliRunner().invoke(app, list(map(str, words)), env={name: value or None for name, value in plain.items()})
    return result.exit_code, result.stdout, result.stderr


@contextlib.contextmanager
def face(
    kind: str, name: str, *peers: str, ahead_s: float = 0.0, token: str | None = None, at_s: float | None = None,
    seen: list[str | None] | None = None,
) -> Iterator[str]:  # fmt: skip
    """A server whose clock is ahead, and which did something at `at_s` of ours."""
    recorder = Recorder(f"{kind}/{name}")
    began_s = (now_s() if at_s is None else at_s) + ahead_s
    recorder.add(PhaseRecord(name="work", start_s=began_s, end_s=began_s + 1.0, track=f"{kind}/{name}"))
    app = Api(f"weightsync {kind}")
    said = Timeline(kind=kind, name=name, now_s=0.0, peers=peers)  # type: ignore[arg-type]

    async def note(request: Any, call_next: Any) -> Any:
        if seen is not None:
            seen.append(request.headers.get("authorization"))
        return await call_next(request)

    app.add_middleware(BaseHTTPMiddleware, dispatch=note)
    add_timeline(app, recorder, lambda: msgspec.structs.replace(said, now_s=now_s() + ahead_s))
    server = ServerThread(app, ServerSettings(token=token))
    try:
        yield server.start()
    finally:
        server.close()


def events(path: Path) -> dict[str, float]:
    """When each process began its work, in seconds since the epoch by our clock."""
    found = json.loads(path.read_text())
    names = {e["pid"]: e["args"]["name"] for e in found["traceEvents"] if e["name"] == "process_name"}
    start_s = found["otherData"]["start_s"]
    return {names[e["pid"]].split()[0]: start_s + e["ts"] / 1e6 for e in found["traceEvents"] if e["ph"] == "X"}


def test_a_controller_leads_to_services_and_these_to_agents_and_clocks_are_aligned(tmp_path: Path) -> None:
    """What happened at one moment lies at one place, though the clocks are a minute apart, within the bound."""
    at_s, out = now_s(), tmp_path / "trace.json"
    with (
        face("agent", "actor", ahead_s=60.0, at_s=at_s) as agent,
        face("service", "host-0", agent, agent, ahead_s=-60.0, at_s=at_s) as service,
        face("controller", "actor", service, at_s=at_s) as controller,
    ):
        code, text, error = run(controller, "--out", out)
    assert (code, error) == (0, "")
    began = events(out)
    assert set(began) == {"controller", "service", "agent"}
    clocks = {each["process"].split()[0]: each for each in json.loads(out.read_text())["otherData"]["clocks"]}
    for name, ahead_s in (("agent", 60.0), ("service", -60.0), ("controller", 0.0)):
        bound = clocks[name]["error_s"] + 1e-3
        assert clocks[name]["ahead_s"] == pytest.approx(ahead_s, abs=bound)
        assert began[name] == pytest.approx(at_s, abs=bound)
    assert "3 phases of 3 processes" in text


def test_who_is_missing_is_named_and_the_file_has_the_others(tmp_path: Path) -> None:
    out = tmp_path / "trace.json"
    with face("service", "host-0", NOBODY) as service:
        code, text, _ = run(service, "--out", out)
    assert code == 1
    assert f"missing: {NOBODY}: EngineUnreachableError" in text
    assert [each["url"] for each in json.loads(out.read_text())["otherData"]["unreachable"]] == [NOBODY]
    assert set(events(out)) == {"service"}


def test_who_is_too_many_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen red: it was left out without a word, and the exit code said that everybody is in the file."""
    monkeypatch.setattr("weightsync.cli.trace._MOST_FACES", 2)
    out = tmp_path / "trace.json"
    with (
        face("service", "host-0", NOBODY) as first, face("service", "host-1") as second,
        face("controller", "actor", first, second, NOBODY) as controller,
    ):  # fmt: skip
        code, text, _ = run(controller, "--out", out)
    assert code == 1
    for url in (second, NOBODY):
        assert f"missing: {url}: StateError: it was not asked: a trace has at most 2 processes" in text
    assert [each["url"] for each in json.loads(out.read_text())["otherData"]["unreachable"]] == [second, NOBODY]
    assert set(events(out)) == {"controller", "service"}


def test_nobody_answers(tmp_path: Path) -> None:
    code, _, error = run(NOBODY, "--out", tmp_path / "trace.json")
    assert code == 1
    assert "EngineUnreachableError" in error
    assert not (tmp_path / "trace.json").exists()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("ftp://host", "ConfigError"),
        ("", "Missing argument"),
        ("http://127.0.0.1:9 --out /nowhere/at/all.json", "EngineUnreachableError"),
        ("http://127.0.0.1:9 --timeout-s 0", "--timeout-s"),
        ("http://127.0.0.1:9 --verfy x", "No such option"),
    ],
)
def test_mistakes(words: str, says: str) -> None:
    code, text, error = run(*words.split())
    assert code in (1, 2)
    assert says in text + error


def test_an_engine_names_what_traces_a_push(tmp_path: Path) -> None:
    """Seen red: "there is no GET /timeline/clock here"."""
    server = EngineServer(EmbeddedEngine.of(ModuleWeightLoader(torch.nn.Linear(3, 4))), token=TOKEN)
    with contextlib.closing(server):
        url = server.start()
        for given in (url, f"weightsync+{url}"):
            code, _, error = run(given, "--out", tmp_path / "t.json", "--token", TOKEN)
            assert (code, "write_chrome_trace(push.sync.recorder.records()" in error) == (2, True), error
    assert not (tmp_path / "t.json").exists()


def test_a_file_that_cannot_be_written_is_named_as_it_was_given(tmp_path: Path) -> None:
    """Seen red: it named a file beside it that nobody knows, and ended with 1."""
    with face("controller", "actor") as controller:
        code, _, error = run(controller, "--out", tmp_path / "none" / "t.json")
    assert (code, error) == (
        2,
        f"ConfigError: --out {tmp_path}/none/t.json can't be written: No such file or directory\n",
    )


def test_a_wrong_token_is_said(tmp_path: Path) -> None:
    with face("controller", "actor", token=TOKEN) as controller:
        code, _, error = run(controller, "--out", tmp_path / "t.json", "--token", "another-token-for-tests")
    assert code == 2
    assert "AuthError" in error


def test_the_token_goes_on_from_who_asks_for_it_and_from_nobody_else(tmp_path: Path) -> None:
    """Anybody may have told a face without a token whom to name."""
    seen: list[str | None] = []
    with face("agent", "a", seen=seen) as agent:
        with face("service", "s", agent) as open_service:
            assert run(open_service, "--out", tmp_path / "t.json", "--token", TOKEN)[0] == 0
        assert set(seen) == {None}
        seen.clear()
        with face("service", "s", agent, token=TOKEN) as guarded:
            assert run(guarded, "--out", tmp_path / "t.json", "--token", TOKEN)[0] == 0
        assert f"Bearer {TOKEN}" in seen


def test_not_followed(tmp_path: Path) -> None:
    with face("service", "host-0", NOBODY) as service:
        assert run(service, "--out", tmp_path / "t.json", "--no-follow")[0] == 0
