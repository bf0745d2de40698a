"""Every command at a shell: it explains itself, says what is wrong with a call in one line, and ends at Ctrl-C."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fastapi import Request
from safetensors.torch import save_file
from typer.main import get_command
from typer.testing import CliRunner

from tests.unit.handles.sglang_kit import write_checkpoint
from tests.unit.handles.vllm_kit import VllmStandIn
from weightsync.cli import app, doctor, serve
from weightsync.clients.controller import ControllerClient
from weightsync.control.methods.folder import VersionFolder
from weightsync.errors import ConfigError
from weightsync.memory import folder
from weightsync.net.server import Api, ServerThread
from weightsync.types import Version
from weightsync.verbs import serving

ENV = {"TERM": "dumb", "NO_COLOR": "1", "COLUMNS": "400", "WEIGHTSYNC_TOKEN": ""}
COMMANDS = (
    "agent", "check", "controller", "demo", "doctor", "export", "inspect", "keygen", "pull", "serve", "status", "trace",
    "verify",
)  # fmt: skip
LISTENS = (
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "signal.signal(signal.SIGHUP, signal.SIG_DFL); "
)
"""To Ctrl-C, and a terminal's end, though whoever started the tests in the background had them ignored."""


def run(*words: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(map(str, words)), env=ENV)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def test_these_are_all() -> None:
    assert tuple(sorted(get_command(app).commands)) == COMMANDS  # type: ignore[attr-defined]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_begins_with_what_it_does_and_shows_how(command: str) -> None:
    code, text = run(command, "--help")
    assert code == 0
    assert f"weightsync {command} " in text.split("Usage", 1)[1].split("\n", 1)[1], "an example"
    assert "--" in text


@pytest.fixture
def yaml(tmp_path: Path) -> Path:
    file = tmp_path / "controller.yaml"
    file.write_text("weight_sync: {sync_method: pull, fleet: {models: [actor], port: 0}}\n")
    return file


def test_mistakes_with_a_controller(yaml: Path, tmp_path: Path) -> None:
    odd = tmp_path / "odd.yaml"
    odd.write_text("weight_sync: {sync_method: pul, fleet: {modls: [actor]}}\n")
    hosted = tmp_path / "hosted.yaml"
    hosted.write_text("weight_sync: {sync_method: weaver, fleet: {port: 0}}\n")
    garbage = tmp_path / "garbage.yaml"
    garbage.write_text("a: [1\n")
    taken = ServerThread(Api("somebody else"))
    port = taken.start().rpartition(":")[2]
    try:
        for words, says in (
            ((), "--config FILE is missing"),
            (("--config", tmp_path / "none.yaml"), "does not exist"),
            (("--config", odd), "ConfigError"),
            (("--config", garbage), "ConfigError"),
            (("--config", hosted), "set_weaver_service_holder"),
            (("--config", yaml, "--host", "0.0.0.0"), "token"),
            (("--config", yaml, "--token", "short"), "16 characters"),
            (("--config", yaml, "--port", port), "choose another port"),
        ):
            code, text = run("controller", *words)
            assert (code, says in text) == (2, True), (words, code, text)
            assert "Traceback" not in text
    finally:
        taken.close()


def test_a_controller_without_a_lease_is_told_the_option() -> None:
    """Seen red: it named classes alone."""
    code, text = run(
        "serve", "--engine", "a=vllm+http://127.0.0.1:9", "--controller", "http://127.0.0.1:9", "--port", 0
    )
    assert (code, "add --lease FILE" in text) == (2, True), text


@pytest.mark.parametrize("advertise", ["host-0:9000", "http://[::1"])
def test_a_service_advertises_a_url(advertise: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen red: it ran, and no heartbeat could be sent; or it ended with a traceback."""
    monkeypatch.setattr(serve, "_watch", lambda *_: None)
    code, text = run("serve", "--engine", "a=weightsync+http://127.0.0.1:9", "--port", 0, "--advertise", advertise)
    assert (code, "ConfigError: advertise's URL" in text) == (2, True), text


@pytest.mark.parametrize(
    "words",
    [
        "pull http://127.0.0.1:9 --out OUT",
        "export http://127.0.0.1:9 OUT",
        "serve --engine a=weightsync+http://127.0.0.1:9 --from http://127.0.0.1:9",
        "serve --engine a=weightsync+http://127.0.0.1:9",
    ],
)
def test_a_key_for_what_is_not_signed_is_refused(words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen red: it was not opened, and what an agent has was taken from anybody. By the variable it may stand for all
    that a host runs."""

    def begins(*_: object, **__: object) -> None:
        raise ConfigError("it begins")

    monkeypatch.setattr(serving, "serve", begins)
    named = words.replace("OUT", str(tmp_path / "out")).split()
    code, text = run(*named, "--trust-key", "no-such-file")
    assert (code, "--trust-key would do nothing: an agent's versions are not signed" in text) == (2, True), text
    monkeypatch.setenv("WEIGHTSYNC_TRUST_KEY", "no-such-file")
    assert "would do nothing" not in run(*named)[1]


def test_an_example_needs_no_configuration() -> None:
    """Seen red: its help said that --config is required."""
    assert run("controller", "--example")[0] == 0
    assert "[required]" not in run("controller", "--help")[1]


@pytest.mark.parametrize("out", [".", "..", "/", "a/.."])
def test_an_export_needs_a_folder_with_a_name(out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen red: it was all fetched, and the end was a ValueError; or, of "..", it lay somewhere else."""
    monkeypatch.chdir(tmp_path)
    code, text = run("export", "http://127.0.0.1:9", out)
    assert (code, f"{out} is no name of a new folder" in text) == (2, True), text


def test_an_export_into_a_link_is_refused_before_anything_is_fetched(tmp_path: Path) -> None:
    """Seen red: it failed behind the whole download."""
    (tmp_path / "real").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "real")
    code, output = run("export", "http://127.0.0.1:1", tmp_path / "out")
    assert (code, "is a link" in output) == (2, True), output


@pytest.mark.parametrize(
    "words",
    [
        ("export", "http://127.0.0.1:1", "out", "--shard-gb", "nan"),
        ("export", "http://127.0.0.1:1", "out", "--shard-gb", "inf"),
        ("agent", ".", "--every-s", "nan"),
        ("status", "http://127.0.0.1:1", "--timeout-s", "nan"),
        ("doctor", "--model-gb", "nan"),
    ],
)
def test_what_is_no_number_is_in_no_range(words: tuple[str, ...]) -> None:
    """Seen red with inf: a traceback behind the download."""
    code, output = run(*words)
    assert code == 2, output
    assert "Input should be" in output


def test_a_dtype_override_names_tensors_and_a_dtype() -> None:
    for text in ("float32", "=float32", "*bias="):
        code, output = run("agent", ".", "--dtype-override", text)
        assert (code, "--dtype-override is GLOB=DTYPE" in output) == (2, True), output


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_what_the_terminal_has_no_letters_for_is_spelled_out(encoding: str, tmp_path: Path) -> None:
    """Seen red: a UnicodeEncodeError with a traceback, when all was done."""
    words = [sys.executable, "-m", "weightsync", "keygen", "schl\u00fcssel-\u9375"]
    env = {**os.environ, "PYTHONIOENCODING": encoding, "PYTHONUTF8": "1"}
    ended = subprocess.run(words, capture_output=True, timeout=60, check=False, cwd=tmp_path, env=env)
    assert (ended.returncode, ended.stderr) == (0, b"")
    assert b"-\\u9375.secret is the trainer's" in ended.stdout


def test_python_runs_it_by_the_name_of_the_package() -> None:
    """Seen red without `weightsync/__main__.py`."""
    words = [sys.executable, "-m", "weightsync", "--version"]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout.split()[0]) == (0, "weightsync"), ended.stderr


def test_mistakes_with_a_doctor() -> None:
    for words, code, says in (
        (("--model-gb", "-1"), 2, "--model-gb"),
        (("--modelgb", "1"), 2, "No such option"),
        (("127.0.0.1:8000",), 1, "is no engine's URL"),
        (("vlm+http://127.0.0.1:8000",), 1, "did you mean vllm+http://"),
        (("http://127.0.0.1:9",), 1, "start it, or write vllm+http://127.0.0.1:9"),
    ):
        found, text = run("doctor", *words)
        assert (found, says in text) == (code, True), (words, found, text)


@pytest.mark.parametrize(
    ("switch", "option", "mark", "says"),
    [
        ("never", "rw,size=1g", "note", "mount -o remount,huge=advise /dev/shm"),
        ("advise", "rw", "note", "mount -o remount,huge=advise /dev/shm"),
        ("never", "rw,huge=advise", "ok", "advise for /dev/shm"),
        ("never", "rw,huge=within_size", "ok", "within_size for /dev/shm"),
        ("force", "rw", "ok", "force for /dev/shm"),
        ("deny", "rw,huge=always", "note", "denied by"),
    ],
)
def test_a_doctor_names_the_switch_of_huge_pages_that_counts(
    switch: str, option: str, mark: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """docs/huge-pages.md. Seen red: it looked at, and advised, the switch that does not count for /dev/shm."""
    words = ("always", "within_size", "advise", "never", "deny", "force")
    (tmp_path / "switch").write_text(" ".join(f"[{word}]" if word == switch else word for word in words))
    (tmp_path / "mounts").write_text(f"tmpfs /dev/shm tmpfs rw,huge=always 0 0\ntmpfs /dev/shm tmpfs {option} 0 0\n")
    monkeypatch.setattr(doctor, "_THP", tmp_path / "switch")
    monkeypatch.setattr(folder, "_MOUNTS", str(tmp_path / "mounts"))
    found = doctor._huge_pages()
    assert (found.mark, says in f"{found.found}: {found.advice}") == (mark, True), found


@contextlib.contextmanager
def silent() -> Iterator[tuple[str, socket.socket]]:
    """A server that takes connections, and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(60)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", listener


def started(*words: object, before: str = "", stdout: Any = subprocess.PIPE) -> subprocess.Popen[str]:
    code = f"{LISTENS}\n{before}from weightsync.cli import main; main()"
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, words)], stdout=stdout, stderr=subprocess.PIPE, text=True,
        env={**os.environ, **ENV},
    )  # fmt: skip


@pytest.mark.parametrize(
    "words",
    [
        "status URL",
        "trace URL",
        "inspect URL",
        "pull URL --out OUT",
        "export URL OUT",
        "doctor URL",
        "serve --engine actor=URL --port 0",
    ],
)
def test_ctrl_c_ends_what_waits_for_an_answer(words: str, tmp_path: Path) -> None:
    """Seen red of `serve`: it asked on, 10 s for each engine, and ended with 1."""
    with silent() as (url, listener):
        process = started(*(word.replace("URL", url).replace("OUT", str(tmp_path / "x")) for word in words.split()))
        try:
            connection, _ = listener.accept()
            with connection:  # one that is dropped is closed, and the command ends by itself
                process.send_signal(signal.SIGINT)
                _, said = process.communicate(timeout=30)
        finally:
            process.kill()
    assert process.returncode == 130
    assert "Traceback" not in said
    assert not (tmp_path / "x").exists() or not os.listdir(tmp_path / "x"), "nothing is left of it"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_an_agent_ends_at_a_signal_while_it_copies(number: signal.Signals, code: int, tmp_path: Path) -> None:
    """Nothing stays in /dev/shm. Seen red: it copied to the end first, for minutes where the checkpoint is large; and
    SIGHUP killed it (-1)."""
    save_file({"w": torch.zeros(4)}, tmp_path / "model.safetensors")
    copies = (
        "from weightsync.trainer.folder import FolderPublisher; import threading\n"
        "publish = FolderPublisher.publish\n"
        "def copies(self): publish(self); print('copies', flush=True); threading.Event().wait()\n"
        "FolderPublisher.publish = copies\n"
    )
    process = started("agent", tmp_path, "--port", 0, before=copies)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "copies\n"
        process.send_signal(number)
        _, said = process.communicate(timeout=30)
    finally:
        process.kill()
    assert (process.returncode, "Traceback" in said) == (code, False), said
    assert [name for name in os.listdir("/dev/shm") if f"-{process.pid}-" in name] == []


def test_ctrl_c_ends_a_controller_well(yaml: Path) -> None:
    process = started("controller", "--config", yaml)
    assert process.stdout is not None
    try:
        assert process.stdout.readline().startswith("controller of actor at http://127.0.0.1:")
        assert process.stdout.readline().startswith("sync_method pull: waits for")
        process.send_signal(signal.SIGINT)
        out, said = process.communicate(timeout=30)
    finally:
        process.kill()
    assert (process.returncode, out) == (0, "stopped by a signal\n")
    assert "Traceback" not in said


class SlowVllm(VllmStandIn):
    """Loads no sooner than it is let."""

    def __init__(self, checkpoint: Path) -> None:
        super().__init__(checkpoint)
        self.loads, self.may_load = threading.Event(), threading.Event()

    async def _rpc(self, request: Request) -> dict[str, Any]:
        self.loads.set()
        await asyncio.to_thread(self.may_load.wait, 30.0)
        return await super()._rpc(request)


@pytest.mark.parametrize("then", ["nothing", "a second signal", "nobody reads its lines", "its terminal is closed"])
def test_a_controller_that_is_ended_within_a_load_waits_for_it_and_at_a_second_signal_does_not(
    then: str, tmp_path: Path
) -> None:
    """Nobody else resumes the engines. Seen red: it ended at once, and they were paused for good; so they were where a
    Ctrl-C had ended the `tee` that read its lines, too, and where SIGHUP came."""
    engine = SlowVllm(write_checkpoint(tmp_path / "start", 0))
    version = Version(run_id="run", number=1)
    VersionFolder(tmp_path / "versions").publish("actor", version, lambda into: write_checkpoint(into, 1))
    config = tmp_path / "disk.yaml"
    service = f"{{base_url: '{engine.start()}', model_tag: actor}}"
    config.write_text(
        f"weight_sync: {{sync_method: disk, sync_mode: fully-async, sync_weight_path: {tmp_path / 'versions'}, "
        f"inference_service: {service}, fleet: {{port: 0}}}}\n"
    )
    process = started("controller", "--config", config)
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        url = process.stdout.readline().split()[4]
        with contextlib.closing(ControllerClient(url)) as client:
            client.train_worker_notify_weight_update("trainer", "actor", "run", 1)
        assert engine.loads.wait(30.0)
        if then == "nobody reads its lines":
            process.stdout.close()
        number = signal.SIGHUP if then == "its terminal is closed" else signal.SIGTERM
        process.send_signal(number)
        said = next((line for line in process.stderr if line.startswith("waits ")), "it ended")
        assert re.fullmatch(r"waits \d+ s at most for the sync of version 1 of actor, which has engines .*\n", said)
        if then == "a second signal":
            process.send_signal(signal.SIGTERM)
        else:
            process.send_signal(signal.SIGHUP)  # that of a terminal, or a shell's second one, is no second signal
            engine.may_load.set()
        process.wait(timeout=30)
    finally:
        engine.may_load.set()
        process.kill()
        engine.close()
    assert process.returncode == {"a second signal": -signal.SIGTERM, "nobody reads its lines": 141}.get(then, 0)
    assert (engine.called()[-1] == "/resume") == (then != "a second signal")
    assert engine.paused == ("keep" if then == "a second signal" else None)


LOADS = """
import os
from types import SimpleNamespace
from weightsync.types.service import ModelStatus, ServiceStatus
from weightsync.verbs import serving

class Loads:
    url, rollout = "http://127.0.0.1:1", SimpleNamespace(config=SimpleNamespace(load_timeout_s=120.0))
    now = ModelStatus(state="loading")

    def status(self):
        return ServiceStatus(models={{"actor": self.now}})

    def close(self):
        if self.now.state == "loading":
            os.close(os.open({pipe!r}, os.O_RDONLY))
            self.now = ModelStatus(errors={errors})

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

serving.serve = lambda *_, **__: Loads()
"""
"""A service with a load that ends when somebody opens `pipe` to write."""


@pytest.mark.parametrize("then", ["nothing", "a second signal", "nobody reads its lines", "it fails", "it was staged"])
def test_a_host_that_is_ended_within_a_load_waits_for_it_and_at_a_second_signal_does_not(
    then: str, tmp_path: Path
) -> None:
    """Nobody else resumes its engines. Seen red: it said nothing, whatever came of the load, and heard no second
    signal."""
    os.mkfifo(pipe := str(tmp_path / "pipe"))
    held = "TransferAbortedError: it was not committed: the service ends"
    errors = {"vllm-0": {"it fails": "it has failed", "it was staged": held}[then]} if then.startswith("it ") else {}
    process = started("serve", "--engine", "actor=http://127.0.0.1:9", before=LOADS.format(pipe=pipe, errors=errors))
    assert process.stdout is not None
    assert process.stderr is not None
    late = threading.Timer(60.0, process.kill)
    late.start()
    try:
        assert process.stdout.readline().startswith("actor at http://127.0.0.1:1 ")
        if then == "nobody reads its lines":
            process.stdout.close()
        process.send_signal(signal.SIGTERM)
        said = next((line for line in process.stderr if line.startswith("waits ")), "it ended")
        assert said.startswith("waits 135 s at most for the load of actor, which may have engines paused; a second si")
        if then == "a second signal":
            process.send_signal(signal.SIGTERM)
        else:
            with open(pipe, "w"):
                pass
        process.wait(timeout=30)
    finally:
        late.cancel()
        process.kill()
    assert process.returncode == {"a second signal": -signal.SIGTERM, "nobody reads its lines": 141}.get(then, 0)
    if not process.stdout.closed:
        assert ("; some of actor, whose load has not ended well, may stand paused" in process.stdout.read()) == (
            then == "it fails"
        )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
@pytest.mark.parametrize("command", ["serve", "agent"])
def test_ctrl_c_ends_these_well_too(command: str, number: signal.Signals, tmp_path: Path) -> None:
    """As `weightsync --help` says; and so does a terminal that is closed. Seen red where it says 130 of every command,
    and with SIGHUP, of which nothing was closed."""
    save_file({"w": torch.zeros(4)}, tmp_path / "model.safetensors")
    options = {"serve": ("--engine", "actor=weightsync+http://127.0.0.1:9"), "agent": (tmp_path,)}
    process = started(command, *options[command], "--port", 0)
    assert process.stdout is not None
    try:
        assert re.search(r" at http://127\.0\.0\.1:\d+", process.stdout.readline())
        process.send_signal(number)
        _, said = process.communicate(timeout=30)
    finally:
        process.kill()
    assert (process.returncode, "Traceback" in said) == (0, False), said
    assert "Ctrl-C is how serve, controller and agent are ended: they end with 0" in run("--help")[1]


def test_under_nohup_a_terminal_s_end_is_none() -> None:
    """Seen red with a handler for SIGHUP whatever was there before."""
    ignored = "signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"  # as nohup leaves it
    process = started("serve", "--engine", "actor=weightsync+http://127.0.0.1:9", "--port", 0, before=ignored)
    assert process.stdout is not None
    try:
        assert re.search(r" at http://127\.0\.0\.1:\d+", process.stdout.readline())
        found = re.search(r"SigIgn:\s*([0-9a-f]+)", Path(f"/proc/{process.pid}/status").read_text())
        assert found is not None
        assert int(found[1], 16) & 1 << signal.SIGHUP - 1
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 0


@pytest.mark.parametrize("words", [["--version"], ["inspect", "--help"]], ids=" ".join)
def test_a_disk_that_is_full_is_one_line(words: list[str]) -> None:
    """Seen red: a traceback."""
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "weightsync.cli", *words], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60
        )
    assert ended.returncode == 1
    assert ended.stderr == "weightsync: the output can't be written: No space left on device\n"


def test_a_host_goes_on_where_its_log_is_full() -> None:
    """Engines are not to lose their service for it. Seen red: it ended at its first line."""
    watches = (
        "import sys; from weightsync.cli import serve; watch = serve._watch\n"
        "def watches(*now): print('watches', file=sys.stderr, flush=True); watch(*now)\n"
        "serve._watch = watches\n"
    )
    with open("/dev/full", "w") as full:
        options = ("--engine", "actor=weightsync+http://127.0.0.1:9", "--port", 0)
        process = started("serve", *options, before=watches, stdout=full)
    assert process.stderr is not None
    try:
        assert process.stderr.readline() == "watches\n"
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=30)
    finally:
        process.kill()
    assert (process.returncode, said) == (0, "")
