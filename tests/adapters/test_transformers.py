"""The callback for `transformers.Trainer`: alone, and with two ranks by DDP. Sharded ranks are in `test_trl.py`."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
JOB = ROOT / "tests" / "adapters" / "transformers_job.py"
pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        importlib.util.find_spec("accelerate") is None, reason="needs accelerate: pip install weightsync[engines-cpu]"
    ),
]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_trainer_publishes_its_steps(tmp_path: Path, ranks: int) -> None:
    """Every second one, to the bit as it is then; and the last. Two ranks by DDP."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--standalone"]
    command = [*(torchrun if ranks > 1 else [sys.executable]), str(JOB), str(tmp_path)]
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}"}
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    told = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"rank"')]
    assert sorted(each["rank"] for each in told) == list(range(ranks))
    assert {each["last"] for each in told} == {5}
    assert next(each["right"] for each in told if each["rank"] == 0) == [2, 4]
