"""The demo's fleet as users run it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.multiproc.family import run_family


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_a_fleet_goes_on_without_who_is_killed(tmp_path: Path) -> None:
    """Two trainers, three services, one killed and one added: every answer is of a version that its trainer made."""
    command = [sys.executable, "-m", "weightsync.cli", "demo", "--fleet", "3", "--models", "2", "--mode", "batch-async"]
    ran, family = run_family(
        [*command, "--size", "tiny", "--steps", "6", "--json", str(tmp_path / "summary.json")], timeout_s=560
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["problems"] == []
    assert summary["loss_gap_max"] < 0.005
    assert summary["served"].keys() == {"actor", "verifier"}
    for model in summary["models"]:
        assert summary["served"][model][-1] == 6
    assert (summary["killed"], summary["added"]) == ("service-1", "service-3")
    assert summary["states"]["service-1"] in ("evicted", "suspect")
    assert {name for name, state in summary["states"].items() if state == "live"} == {
        "service-0", "service-2", "service-3",
    }  # fmt: skip
    assert len(family.processes) > 6
    assert family.segments() == []


def test_what_a_fleet_is_not(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "weightsync.cli", "demo", "--fleet", "3", "--ray"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (ran.returncode, "--ray would do nothing" in ran.stderr) == (2, True)
