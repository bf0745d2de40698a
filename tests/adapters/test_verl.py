"""verl's own manager and rollout workers, on Ray and CPUs, with our checkpoint engine in them."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-verl" / "bin" / "python"
SOURCE = "VERL_SOURCE"
"""The variable that names a checkout of verl's source: its tests are not in its package."""
NUM_VERSIONS, NUM_WORKERS = 10, 2
pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not PYTHON.exists(), reason="needs verl: make engines-verl"),
]


def versions_of(mode: str) -> list[dict[str, Any]]:
    """What a job says of each of its versions."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [str(PYTHON), "-m", "tests.adapters.verl_job", str(NUM_VERSIONS), mode]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300, check=False)
    lines = done.stdout.splitlines()
    assert lines, done.stderr[-4000:]
    assert lines[-1] == "done", done.stdout[-2000:] + done.stderr[-4000:]
    return [json.loads(line) for line in lines if line.startswith("{")]


@pytest.mark.parametrize("mode", ["auto", "delta"])
def test_rollout_workers_get_what_two_sharded_ranks_have_trained(mode: str) -> None:
    """To the bit, after each step; one more worker comes in the middle. Deltas where they were asked for."""
    told = versions_of(mode)
    assert [each["version"] for each in told] == list(range(1, NUM_VERSIONS + 1))
    for each in told:
        (published,) = set(each["published"])
        num_there = NUM_WORKERS + (each["version"] >= NUM_VERSIONS // 2)
        received = each["received"][:num_there]
        assert [digest for digest, _, _ in received] == [published] * num_there, each
        if mode == "delta" and each["version"] > NUM_VERSIONS // 2:
            assert all(num_deltas == 1 and size < each["weightsync/bytes"] / 4 for _, size, num_deltas in received), (
                each
            )
    assert len({each["published"][0] for each in told}) == NUM_VERSIONS, "each step changes something"


@pytest.mark.skipif(SOURCE not in os.environ, reason=f"needs verl's source: {SOURCE}=<a checkout of v0.9.0>")
def test_its_own_test_passes_with_our_name_put_in(tmp_path: Path) -> None:
    """Three updates from two FSDP2 ranks of its own to two workers, each compared with the checkpoint by verl."""
    source = Path(os.environ[SOURCE]).resolve()
    command = [str(PYTHON), str(ROOT / "tests/adapters/verl_own_job.py"), str(source), str(tmp_path)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout.endswith("done\n"), (done.stdout + done.stderr)[-4000:]
