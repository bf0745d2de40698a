"""The main job as a user runs it, at its small size: the command, its exit code, and what it writes."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.multiproc.family import run_family

COMMAND = [sys.executable, "-m", "weightsync.cli", "demo", "--size", "tiny"]


@pytest.mark.parametrize("strategy", ["broadcast", pytest.param("packed_cuda_ipc", marks=pytest.mark.soak)])
def test_the_demo_proves_every_version(tmp_path: Path, strategy: str) -> None:
    """Two ranks, two engines: digests equal, losses agree, the engine's loss falls, the files are there."""
    files = ["--json", str(tmp_path / "summary.json"), "--out", str(tmp_path)]
    ran, family = run_family(
        [*COMMAND, "--steps", "4", "--engines", "2", "--strategy", strategy, *files], timeout_s=280
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["versions"] == list(range(1, 5))
    assert summary["digests_equal"] is True
    assert summary["loss_gap_max"] < 0.01
    assert summary["steps"][-1]["engine_loss"] < summary["steps"][0]["engine_loss"] - 0.2
    for step in summary["steps"]:
        assert step["paused_s"] > 0
        assert step["bytes"] > 50_000
        packed = "pack" if strategy == "broadcast" else "share"
        assert {"extract", packed, "transfer", "load", "verify", "pause", "commit", "resume"} <= set(step["phases"])
    trace = json.loads((tmp_path / "timeline.json").read_text())
    assert {"train", "generate", "transfer", "commit"} <= {event["name"] for event in trace["traceEvents"]}
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
    assert len(family.processes) > 3
    assert family.segments() == []


def test_the_demo_publishes_and_trains_on(tmp_path: Path) -> None:
    """Over the pull path: every version is proved and served, and may be fetched while the trainer is in its next step.

    Seen red with a trainer that waits for each version before it trains on.
    """
    files = ["--json", str(tmp_path / "summary.json"), "--out", str(tmp_path)]
    ran, family = run_family([*COMMAND, "--path", "pull", "--steps", "4", *files], timeout_s=280)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["versions"] == list(range(1, 5))
    assert summary["digests_equal"] is True
    assert summary["loss_gap_max"] < 0.01
    assert summary["steps"][-1]["engine_loss"] < summary["steps"][0]["engine_loss"] - 0.2
    for step in summary["steps"]:
        assert {"offload", "prove", "pull", "load", "verify", "pause", "commit", "resume"} <= set(step["phases"])
    events = [event for event in json.loads((tmp_path / "timeline.json").read_text())["traceEvents"] if "dur" in event]
    spans = {
        name: sorted((event["ts"], event["ts"] + event["dur"]) for event in events if event["name"] == name)
        for name in ("train", "offload", "wait for engine's report")
    }
    # What the trainer does, in its own order, whoever is slow: it trains the next step before it asks for this version.
    trained, published, asked = spans["train"], spans["offload"], spans["wait for engine's report"]
    assert len(trained) == len(published) == len(asked) == 4
    for this, following in itertools.pairwise(range(4)):
        assert published[this][1] <= trained[following][0] < trained[following][1] <= asked[this][0]
    assert len(family.processes) > 3
    assert family.segments() == []


@pytest.mark.parametrize("path", ["pull", pytest.param("push", marks=pytest.mark.soak)])
def test_the_demo_moves_deltas(tmp_path: Path, path: str) -> None:
    """At a learning rate of reinforcement learning: a few percent change, less is sent, and the loss falls."""
    files = ["--json", str(tmp_path / "summary.json"), "--out", str(tmp_path)]
    ran = subprocess.run(
        [*COMMAND, "--path", path, "--delta", "--steps", "4", *files],
        capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "came as deltas" in ran.stdout
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["versions"], summary["digests_equal"]) == ([1, 2, 3, 4], True)
    first, *later = summary["steps"]
    assert (first["density"], first["received_bytes"]) == (None, None)
    for step in later:
        assert 0.001 < step["density"] < 0.1
        a_change_bytes = {"pull": 2, "push": 6}[path]  # coded; or position and value as they are
        assert step["received_bytes"] <= 1.001 * a_change_bytes * step["density"] * step["bytes"] / 2
    if path == "pull":
        assert any("commit" in step["phases"] and "apply delta" in step["phases"] for step in later)
    losses = [step["engine_loss"] for step in summary["steps"]]
    assert losses == sorted(losses, reverse=True)


@pytest.mark.parametrize("options", [["--strategy", "cuda_ipc"], ["--engine", "vllm"]], ids=str)
def test_deltas_that_cannot_be_pushed_are_refused_before_anything_starts(options: list[str]) -> None:
    ran = subprocess.run([*COMMAND, "--delta", *options], capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 2
    assert "--path pull" in ran.stderr


@pytest.mark.soak
def test_an_engine_that_dies_ends_the_demo_in_words(tmp_path: Path) -> None:
    """kill -9 of the engine in the middle: exit code 1, the error by name, no process left behind."""
    demo = subprocess.Popen(
        [*COMMAND, "--steps", "500", "--out", str(tmp_path), "--deadline-s", "5"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert demo.stdout is not None
    for line in demo.stdout:
        if line.split()[:1] == ["2"]:
            break
    family = psutil.Process(demo.pid).children(recursive=True)
    (engine,) = [child for child in family if "weightsync.demo.engine" in " ".join(child.cmdline())]
    os.kill(engine.pid, signal.SIGKILL)
    _, errors = demo.communicate(timeout=60)
    assert demo.returncode == 1
    assert "engine-0" in errors
    assert not psutil.wait_procs(family, timeout=10)[1]


def test_ctrl_c_ends_the_demo_and_leaves_nobody_behind(tmp_path: Path) -> None:
    """As at a terminal: every process of its group hears it."""
    listens = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"  # runners may have it ignored
    demo = subprocess.Popen(
        [
            *(sys.executable, "-c", f"{listens}; from weightsync.cli import main; main()", *COMMAND[3:]),
            *("--steps", "500", "--out", str(tmp_path)),
        ],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0,
    )  # fmt: skip
    assert demo.stdout is not None
    for line in demo.stdout:
        if line.split()[:1] == ["2"]:
            break
    family = psutil.Process(demo.pid).children(recursive=True)
    os.killpg(demo.pid, signal.SIGINT)
    _, errors = demo.communicate(timeout=60)
    assert demo.returncode == 130
    assert "Traceback" not in errors
    assert not psutil.wait_procs(family, timeout=10)[1]
