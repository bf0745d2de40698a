"""What `weightsync serve` prints while it runs: what stays wrong, and how a version came."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from weightsync.cli import app, serve
from weightsync.cli.serve import _how, _Trouble, _watch
from weightsync.cli.shared import announce
from weightsync.errors import ConfigError
from weightsync.types.progress import TransferProgress
from weightsync.types.service import ModelStatus, ServiceStatus
from weightsync.verbs import serving


def test_what_stays_wrong_is_said_again_and_again_and_rarer(capsys: pytest.CaptureFixture[str]) -> None:
    now_s = [0.0]
    trouble = _Trouble(lambda: now_s[0])
    said: list[tuple[float, str]] = []
    for _ in range(2 * 3600):
        trouble.look("actor", "refused")
        said += [(now_s[0], line) for line in capsys.readouterr().out.splitlines()]
        now_s[0] += 0.5
    assert said[0] == (30.0, "actor, for 30 s now: refused")
    assert [at_s for at_s, _ in said] == [30.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1560.0, 2160.0, 2760.0, 3360.0]


def test_what_came_right_is_not_said_and_begins_anew(capsys: pytest.CaptureFixture[str]) -> None:
    now_s = [0.0]
    trouble = _Trouble(lambda: now_s[0])
    for at_s, what in ((0.0, "refused"), (29.0, ""), (29.5, "refused"), (59.0, "refused")):
        now_s[0] = at_s
        trouble.look("actor", what)
    assert capsys.readouterr().out == ""
    now_s[0] = 59.5
    trouble.look("actor", "refused")
    assert capsys.readouterr().out == "actor, for 30 s now: refused\n"


def test_what_was_said_to_be_wrong_is_said_to_be_over_once(capsys: pytest.CaptureFixture[str]) -> None:
    """Seen red: "engines answer nobody, for 30 s now" was the last word of a host that answered again."""
    now_s = [0.0]
    trouble = _Trouble(lambda: now_s[0])
    for at_s, what in ((0.0, "no lease"), (30.0, "no lease"), (31.0, ""), (32.0, ""), (33.0, "no lease"), (34.0, "")):
        now_s[0] = at_s
        trouble.look("engines answer nobody", what, over="engines answer again")
    assert capsys.readouterr().out == "engines answer nobody, for 30 s now: no lease\nengines answer again\n"


def test_a_reason_is_told_once() -> None:
    status = ModelStatus(version=1, pull_s=0.1, transport="tcp", unprovable={"vllm-0": "it quantises"})
    told: dict[tuple[str, str], str] = {}
    assert _how(status, told).endswith("; vllm-0 is unproved: it quantises")
    assert _how(status, told).endswith("; vllm-0 is unproved, as before")
    other = msgspec.structs.replace(status, unprovable={"vllm-0": "it packs"})
    assert _how(other, told).endswith("; vllm-0 is unproved: it packs")


def test_a_version_has_no_figures_of_one_that_was_fetched_behind_it() -> None:
    status = ModelStatus(run_id="r", version=5, fetched="r/6", pull_s=0.1, received_bytes=7, transport="tcp")
    assert _how(status, {}) == "and r/6 was fetched since"
    assert _how(msgspec.structs.replace(status, fetched="r/5"), {}).startswith("0.0 MB by tcp in 0.10 s")


def test_what_is_mapped_moves_no_bytes() -> None:
    """Seen red: "0.0 MB by shm"."""
    status = ModelStatus(version=1, pull_s=0.1, transport="shm", total_bytes=500_000)
    assert _how(status, {}).startswith("0.5 MB mapped in 0.10 s, loaded in ")


def test_each_token_goes_where_it_belongs(monkeypatch: pytest.MonkeyPatch) -> None:
    """By option or variable. Seen red: two of them swapped."""
    given: dict[str, Any] = {}

    def serve(models: Any, **options: Any) -> None:
        given.update(options)
        raise ConfigError("enough")

    monkeypatch.setattr(serving, "serve", serve)
    found = CliRunner().invoke(
        app,
        ["serve", "--engine", "actor=http://127.0.0.1:1", "--token", "t" * 16, "--engine-token", "e" * 16],
        env={"WEIGHTSYNC_SOURCE_TOKEN": "s" * 16, "WEIGHTSYNC_CONTROLLER_TOKEN": "c" * 16},
    )
    assert found.exit_code == 2
    names = ("token", "engine_token", "source_token", "controller_token")
    assert {name: given[name] for name in names} == {name: name[0] * 16 for name in names}


def test_how_far_a_transfer_is_is_said_of_one_that_takes_long(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Seen red: where versions came every 0.3 s, one of them was said to be half there every other second."""
    monkeypatch.setattr(serve, "_PROGRESS_S", -1.0)
    took_s = iter((0.1, 2.5))

    class Running:
        def status(self) -> ServiceStatus:
            moved = TransferProgress(done_bytes=40_000_000, total_bytes=80_000_000, seconds=next(took_s))
            return ServiceStatus(models={"actor": ModelStatus(state="pulling", progress=moved)})

    class Stop:
        num_looks = 0

        def wait(self, _: float) -> bool:
            self.num_looks += 1
            return self.num_looks > 2

    running: Any = Running()
    stop: Any = Stop()
    _watch(running, stop)
    assert capsys.readouterr().out == "actor: 40 of 80 MB (50 %), 16 MB/s, 2.5 s to go\n"


def test_what_can_not_be_written_is_lost_and_a_reader_that_has_gone_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen red: a disk that was full for a moment ended the service."""
    read, write = os.pipe()
    os.close(read)
    went_on = False
    with contextlib.suppress(OSError), open("/dev/full", "w") as full, monkeypatch.context() as patched:
        patched.setattr("sys.stdout", full)
        trouble = _Trouble(iter((0.0, 30.0)).__next__)
        trouble.look("actor", "refused")
        trouble.look("actor", "refused")
        went_on = True
    assert went_on
    with contextlib.suppress(OSError), os.fdopen(write, "w") as gone, monkeypatch.context() as patched:
        patched.setattr("sys.stdout", gone)
        with pytest.raises(BrokenPipeError):
            announce("it runs")
