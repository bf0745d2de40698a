"""`weightsync demo --lora --engine sglang`: its own checks are the test."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engines.sglang_support import NEEDS_SGLANG, SERVE, sglang_is_there
from tests.engines.vllm_support import as_the_cpu_is

pytestmark = pytest.mark.timeout(500)


@pytest.mark.soak
@pytest.mark.skipif(not sglang_is_there, reason=NEEDS_SGLANG)
def test_each_version_is_served_and_says_what_the_trainer_says(tmp_path: Path) -> None:
    command = [
        *(sys.executable, "-m", "weightsync.cli", "demo", "--lora", "--engine", "sglang", "--size", "tiny"),
        *("--steps", "3", "--json", str(tmp_path / "out.json")),
    ]
    env = {**as_the_cpu_is(), "WEIGHTSYNC_SGLANG": os.environ.get("WEIGHTSYNC_SGLANG", str(SERVE))}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads((tmp_path / "out.json").read_text())
    assert [row["version"] for row in told["rows"]] == [1, 2, 3]
    assert not told["problems"]
