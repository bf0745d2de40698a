"""`weightsync agent`, `pull` and `inspect` as a user runs them."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from tests.standins.processes import free_port
from weightsync.cli import app
from weightsync.cli.write_out import aside_name, write_out
from weightsync.host.puller import Puller
from weightsync.trainer.publisher import WeightManager
from weightsync.types import Deadline
from weightsync.types.transfer_messages import Transport

TOKEN = "a-token-for-tests-only"
ENV = {"TERM": "dumb", "NO_COLOR": "1", "COLUMNS": "200"}


def start(*words: str | Path, **env: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "weightsync.cli", *map(str, words)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True,
        env={**os.environ, **ENV, **env}, start_new_session=True,
    )  # fmt: skip


def end(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Exit code and what it wrote."""
    try:
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    return process.returncode, out, err


def invoke(*words: str | Path, **env: str) -> tuple[int, str, str]:
    """The same within this process: torch is imported already."""
    result = CliRunner().invoke(app, [str(word) for word in words], env={**ENV, **env})
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


class AgentCommand:
    """A running `weightsync agent`."""

    def __init__(self, folder: Path, *words: str, **env: str) -> None:
        self.process = start("agent", folder, "--port", "0", "--every-s", "0.1", *words, **env)
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()
        self.url = self.line(r"serving .* at (http\S+)")

    def line(self, pattern: str) -> str:
        """The first group of the next line that fits."""
        while True:
            found = re.search(pattern, self._lines.get(timeout=60))
            if found:
                return found[1]

    def stop(self) -> int:
        """As Ctrl-C at a terminal does: the whole group."""
        os.killpg(self.process.pid, signal.SIGINT)
        return self.process.wait(20)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)


@contextlib.contextmanager
def serving(folder: Path, *words: str, **env: str) -> Iterator[AgentCommand]:
    agent = AgentCommand(folder, *words, **env)
    try:
        yield agent
    finally:
        agent.process.kill()
        agent.process.wait()


def checkpoint(folder: Path, seed: int) -> dict[str, torch.Tensor]:
    """Two files and an index, each put in its place by a rename."""
    folder.mkdir(exist_ok=True)
    made = torch.Generator().manual_seed(seed)
    tensors = {
        "first": torch.randn(300, 70, generator=made).to(torch.bfloat16),
        "second": torch.randn(33, generator=made),
        "steps": torch.tensor(seed),
    }
    files = {"one.safetensors": ("first", "steps"), "two.safetensors": ("second",)}
    for file, names in files.items():
        save_file({name: tensors[name] for name in names}, folder / "aside")
        (folder / "aside").replace(folder / file)
    index = {"weight_map": {name: file for file, names in files.items() for name in names}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return tensors


def same(file: Path, tensors: dict[str, torch.Tensor]) -> bool:
    found = load_file(file)
    return found.keys() == tensors.keys() and all(torch.equal(found[name], tensors[name]) for name in tensors)


def test_a_folder_is_served_fetched_shown_and_served_again_when_it_changes(tmp_path: Path) -> None:
    folder, out = tmp_path / "checkpoint", tmp_path / "copies"
    tensors = checkpoint(folder, 1)
    with serving(folder, "--model-id", "actor", WEIGHTSYNC_TOKEN=TOKEN) as agent:
        agent.line(r"version (\S+/1) is published")
        code, told, err = end(
            start("pull", agent.url, "--out", out / "tcp", "--transport", "tcp", WEIGHTSYNC_TOKEN=TOKEN)
        )
        assert code == 0, err
        assert "by tcp" in told
        code, told, err = invoke("pull", agent.url, "--out", out / "shm", WEIGHTSYNC_TOKEN=TOKEN)
        assert code == 0, err
        assert "by shm" in told, "chosen by itself"
        for transport in ("tcp", "shm"):
            assert same(out / transport / "model.safetensors", tensors)
            assert sorted(path.name for path in (out / transport).iterdir()) == ["manifest.json", "model.safetensors"]
        digests = base64.b64decode(json.loads((out / "tcp" / "manifest.json").read_text())["digests"])
        for code, told, err in (invoke("inspect", agent.url, WEIGHTSYNC_TOKEN=TOKEN), invoke("inspect", out / "tcp")):
            assert code == 0, err
            assert "first" in told
            assert "300x70" in told
            assert "/1" in told
            assert digests[:8].hex() in told
        _, told, _ = invoke("inspect", agent.url, "--json", "--token", TOKEN)
        assert {spec["name"] for spec in json.loads(told)["tensors"]} == {"first", "second", "steps"}
        assert "300x70" in invoke("inspect", folder / "one.safetensors")[1]

        os.kill(agent.process.pid, signal.SIGSTOP)  # one file of two is no checkpoint, if it is seen twice
        tensors = checkpoint(folder, 2)
        os.kill(agent.process.pid, signal.SIGCONT)
        said = agent.line(r"version (\S+/[2-9]) is published")
        assert said in invoke("pull", agent.url, "--out", out / "tcp", WEIGHTSYNC_TOKEN=TOKEN)[1]
        assert same(out / "tcp" / "model.safetensors", tensors)
        pid = agent.process.pid
        assert agent.stop() == 0
        assert agent.process.stderr is not None
        assert "Traceback" not in agent.process.stderr.read()
    assert not [name for name in os.listdir("/dev/shm") if name.startswith(f"weightsync-{pid}-")]


def test_what_goes_wrong_is_one_line_and_an_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # of this process
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "checkpoint"
    checkpoint(folder, 1)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty.safetensors").touch()
    (tmp_path / "garbage.safetensors").write_bytes(b"\xff" * 999)
    nowhere = f"http://127.0.0.1:{free_port()}"
    with serving(folder, "--token", TOKEN) as agent:
        cases = {
            ("pull", nowhere, "--out", "x"): (1, "EngineUnreachableError"),
            ("pull", agent.url, "--out", "x"): (2, "AuthError"),
            ("pull", agent.url, "--out", "x", "--token", TOKEN, "--model-id", "another"): (1, "serves model 'model'"),
            ("pull", agent.url, "--out", "x", "--transport", "pigeon"): (2, "tcp or shm"),
            ("pull", agent.url, "--out", str(folder / "one.safetensors"), "--token", TOKEN): (2, "can't be the folder"),
            ("pull", "ftp://h", "--out", "x"): (2, "http:// or https://"),
            ("pull", "http://[", "--out", "x"): (2, "URL can't be read"),
            ("pull", "https://127.0.0.1:1", "--out", "x", "--verify", "no.pem"): (2, "no.pem"),
            ("agent", str(tmp_path / "empty")): (2, "no *.safetensors file"),
            ("agent", str(folder), "--host", "0.0.0.0"): (2, "token"),
            ("agent", str(folder), "--token", "short"): (2, "16 characters"),
            ("agent", str(folder), "--port", agent.url.rpartition(":")[2]): (2, "can't listen"),
            ("agent", str(folder), "--dtype", "float17", "--port", "0"): (2, "float17"),
            ("inspect", nowhere): (1, "EngineUnreachableError"),
            ("inspect", "nothing-of-the-kind"): (2, "no agent's URL"),
            ("inspect", str(tmp_path / "empty.safetensors")): (2, "is empty"),
            ("inspect", str(tmp_path / "garbage.safetensors")): (2, "garbage.safetensors: this is no safetensors file"),
        }
        code, _, err = end(start("pull", agent.url, "--out", tmp_path / "x"))
        assert (code, len(err.strip().splitlines())) == (2, 1), err
        for words, (code, text) in cases.items():
            got, _, err = invoke(*words)
            assert got == code, (words, got, err)
            assert text in err, (words, err)
            assert len(err.strip().splitlines()) == 1, (words, err)


def test_two_pulls_into_one_folder_do_not_meet(tmp_path: Path) -> None:
    """Not even with one process id, as in containers; what a killed one left is swept, what is not ours stays."""
    folder, out = tmp_path / "checkpoint", tmp_path / "out"
    tensors = checkpoint(folder, 3)
    out.mkdir()
    (out / aside_name()).write_text("of a killed one")
    (out / "notes.txt").write_text("mine")
    with serving(folder, "--token", TOKEN) as agent:
        agent.line(r"version (\S+/1) is published")
        pullers = [Puller(agent.url, "model", receiver_id=f"r{number}", token=TOKEN) for number in range(4)]
        with contextlib.ExitStack() as stack:
            held = [stack.enter_context(puller.pull(deadline=Deadline(20.0))) for puller in pullers]
            with ThreadPoolExecutor(4) as pool:
                for done in [pool.submit(write_out, pulled, out) for pulled in held * 5]:
                    done.result()
        for puller in pullers:
            puller.close()
    assert same(out / "model.safetensors", tensors)
    assert sorted(path.name for path in out.iterdir()) == ["manifest.json", "model.safetensors", "notes.txt"]


def test_names_are_shown_as_they_are(tmp_path: Path) -> None:
    """No markup, and nothing that moves a terminal's cursor."""
    names = ["blk[q].w", "blk[k].w", "a[/b]", "red\x1b[31m"]
    save_file({name: torch.ones(2) for name in names}, tmp_path / "odd.safetensors", metadata={"[/x]": "[bold]"})
    code, told, err = invoke("inspect", tmp_path / "odd.safetensors")
    assert code == 0, err
    for name in ("blk[q].w", "blk[k].w", "a[/b]", "red\\x1b[31m", "[/x]: [bold]"):
        assert name in told
    assert "\x1b" not in told


def test_a_delta_is_shown(tmp_path: Path) -> None:
    """How much of each tensor it changes: as a table, as JSON, as a picture."""
    tensors = {"first": torch.zeros(300, 70, dtype=torch.bfloat16), "second": torch.zeros(400), "none": torch.zeros(0)}
    with WeightManager("actor") as manager:
        manager.start(deltas=True)
        manager.offload(tensors.items(), 0)
        manager.wait_published(0, timeout_s=30)
        told = invoke("inspect", manager.endpoint, "--delta")[2]
        assert "no receiver has asked" in told
        assert "mode 'delta'" in told
        puller = Puller(manager.endpoint, "actor", receiver_id="r", transport=Transport.TCP)
        puller.pull(deadline=Deadline(20.0)).release()
        tensors["first"][::3, 5] = 1.0
        tensors["second"][7:11] = 2.0
        manager.offload(tensors.items(), 1)
        report = manager.wait_delta_ready(timeout_s=20)
        assert report is not None
        assert report.num_changed == 104
        code, told, err = invoke("inspect", manager.endpoint, "--delta", "--picture", tmp_path / "heat.png")
        assert code == 0, err
        assert "104 of 21400 elements" in told
        assert "0.4762" in told, "100 of 21000"
        assert "1.0000" in told, "4 of 400"
        assert (tmp_path / "heat.png").read_bytes().startswith(b"\x89PNG")
        gone = tmp_path / "no" / "heat.png"
        code, _, err = invoke("inspect", manager.endpoint, "--delta", "--picture", gone)
        # seen red: 1, and the name of a file that nobody gave
        assert (code, f"--picture {gone} can't be written: No such file or directory" in err) == (2, True), err
        _, told, _ = invoke("inspect", manager.endpoint, "--delta", "--json")
        found = {part["name"]: part["num_changed"] for part in json.loads(told)["tensors"]}
        assert found == {"first": 100, "second": 4, "none": 0}
        puller.close()
    assert invoke("inspect", str(tmp_path), "--delta")[0] == 2


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("agent", ("Example: weightsync agent", "--port", "WEIGHTSYNC_TOKEN", "new version whenever", "loopback")),
        ("pull", ("--out", "--transport", "--streams", "proved", "old version or the new one", "WEIGHTSYNC_TOKEN")),
        ("inspect", ("URL of an agent", "--json", "digests", "--delta", "--picture", "WEIGHTSYNC_TOKEN")),
    ],
)
def test_help_teaches(command: str, words: tuple[str, ...]) -> None:
    result = CliRunner().invoke(app, [command, "--help"], env=ENV)
    assert result.exit_code == 0
    said = " ".join(re.sub(r"[│╭╮╰╯─]", " ", result.output).split())
    for word in words:
        assert word in said, word
