"""The callback for `transformers.Trainer`, in an environment that has what it needs: alone, and with two ranks."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.adapters.test_verl import PYTHON, ROOT

JOB = ROOT / "tests" / "adapters" / "transformers_job.py"
pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not PYTHON.exists(), reason="needs accelerate, which verl brings: make engines-verl"),
]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_trainer_publishes_its_steps(tmp_path: Path, ranks: int) -> None:
    """Every second one, to the bit as it is then; and the last. Two ranks by DDP."""
    torchrun = [str(PYTHON), "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--standalone"]
    command = [*(torchrun if ranks > 1 else [str(PYTHON)]), str(JOB), str(tmp_path)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    told = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"rank"')]
    assert sorted(each["rank"] for each in told) == list(range(ranks))
    assert {each["last"] for each in told} == {5}
    assert next(each["right"] for each in told if each["rank"] == 0) == [2, 4]
