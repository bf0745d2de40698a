"""`demo --lora` as users run it, by both paths: each version of the adapter is proved and served on its base."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.multiproc.family import run_family


@pytest.mark.timeout(300)
@pytest.mark.parametrize("path", ["push", "pull"])
def test_every_version_of_the_adapter_is_served(path: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "weightsync.cli", "demo", "--lora", "--size", "tiny", "--steps", "3"]
    ran, family = run_family([*command, "--path", path, "--json", str(tmp_path / "summary.json")], timeout_s=280)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["problems"] == []
    assert [row["version"] for row in summary["rows"]] == [1, 2, 3]
    losses = {row["trainer_loss"] for row in summary["rows"]}
    assert len(losses) == 3  # it trains
    assert all(row["proved"] and row["bytes"] == summary["rows"][0]["bytes"] for row in summary["rows"])
    assert family.segments() == []


def test_what_it_is_not(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "weightsync.cli", "demo", "--lora", "--out", str(tmp_path)]
    ran, _ = run_family(command, timeout_s=120)
    assert ran.returncode == 2
    assert "--lora runs one trainer" in ran.stderr
