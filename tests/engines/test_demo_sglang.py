"""The demo with a real SGLang server, pushed to and pulling."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engines.sglang_support import NEEDS_SGLANG, SERVE, sglang_is_there
from tests.engines.vllm_support import as_the_cpu_is


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.skipif(not sglang_is_there, reason=NEEDS_SGLANG)
@pytest.mark.parametrize("path", [["--path", "push"], ["--path", "pull", "--delta"]], ids=["push", "pull"])
def test_sglang_follows_the_trainer(tmp_path: Path, path: list[str]) -> None:
    """SGLang's own log-probabilities of unseen text agree with the trainer's, version by version."""
    command = [sys.executable, "-m", "weightsync.cli", "demo", "--engine", "sglang", *path, "--size", "tiny"]
    ran = subprocess.run(
        [*command, "--steps", "3", "--json", str(tmp_path / "summary.json"), "--out", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=380,
        check=False,
        env={**as_the_cpu_is(), "WEIGHTSYNC_SGLANG": os.environ.get("WEIGHTSYNC_SGLANG", str(SERVE))},
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["versions"] == [1, 2, 3]
    assert summary["loss_gap_max"] < 0.005
    assert all("SGLang fuses" in step["unprovable"] for step in summary["steps"])
    if "--delta" in path:
        assert all(step["received_bytes"] < step["bytes"] / 4 for step in summary["steps"][1:])
