"""The demo with everything exchanged: Ray actors, a real vLLM server, shared memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.engines import vllm_faults
from tests.engines.vllm_support import NEEDS_VLLM, PACKS, as_the_cpu_is, vllm_is_there
from tests.engines.vllm_unpacked import VARIABLE
from tests.multiproc.family import run_family


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.skipif(not vllm_is_there, reason=NEEDS_VLLM)
def test_ray_actors_train_and_vllm_follows(tmp_path: Path) -> None:
    """vLLM's own log-probabilities of unseen text agree with the trainer's, version by version, and improve.

    The model's output layer is its embedding. Seen to fail: without repacking tied layers the losses differ by 3.
    """
    command = [sys.executable, "-m", "weightsync.cli", "demo", "--ray", "--engine", "vllm", "--strategy", "cuda_ipc"]
    ran, family = run_family(
        [*command, "--size", "tiny", "--steps", "3", "--json", str(tmp_path / "summary.json"), "--out", str(tmp_path)],
        timeout_s=560,
        env=as_the_cpu_is(),
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["versions"] == [1, 2, 3]
    assert summary["loss_gap_max"] < 0.005
    assert summary["steps"][-1]["engine_loss"] < summary["steps"][0]["engine_loss"] - 0.2
    assert all(("fuses" in (step["unprovable"] or "")) == PACKS for step in summary["steps"])
    trace = json.loads((tmp_path / "timeline.json").read_text())
    assert {"train", "share", "generate", "commit"} <= {event["name"] for event in trace["traceEvents"]}
    assert len(family.processes) > 6
    assert family.segments() == []
    assert family.alive() == []


def by_deltas(folder: Path, *options: str, timeout_s: float) -> dict[str, Any]:
    """What a demo with deltas into a vLLM says of itself that keeps its weights as they were loaded, as on a GPU."""
    command = [sys.executable, "-m", "weightsync.cli", "demo", "--path", "pull", "--delta", "--engine", "vllm"]
    ran = subprocess.run(
        [*command, *options, "--json", str(folder / "summary.json"), "--out", str(folder)],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        env={**as_the_cpu_is(), **vllm_faults.install(folder), VARIABLE: "1"},
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    assert summary["digests_equal"] is True
    return summary


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.skipif(not vllm_is_there, reason=NEEDS_VLLM)
def test_vllm_follows_by_deltas(tmp_path: Path) -> None:
    """At a learning rate of reinforcement learning: what changed alone is fetched, written in place, and proved."""
    summary = by_deltas(tmp_path, "--size", "tiny", "--steps", "3", timeout_s=280)
    assert summary["versions"] == [1, 2, 3]
    assert summary["loss_gap_max"] < 0.005
    first, *later = summary["steps"]
    assert first["density"] is None
    for step in later:
        assert 0.001 < step["density"] < 0.2
        assert step["received_bytes"] < step["bytes"] / 4


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.skipif(not vllm_is_there, reason=NEEDS_VLLM)
def test_its_pause_shows_what_a_delta_saves(tmp_path: Path) -> None:
    """Of its own choice the model is large enough. Every fifth version comes whole; vLLM itself reloads the first
    alone, the others are written where they differ, which is as quick on some machines."""
    summary = by_deltas(tmp_path, "--steps", "16", timeout_s=800)
    came = [step["density"] is not None for step in summary["steps"]]
    assert came == [bool(number > 1 and number % 5) for number in range(1, 17)]
    assert summary["steps"][0]["bytes"] > 100e6
    assert summary["paused_delta_s"] < 0.6 * summary["paused_first_s"], summary
