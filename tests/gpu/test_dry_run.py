"""The GPU script runs without a GPU too, on small sizes: so it works the first time that it meets one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.prove import PARTS

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(400)
def test_every_part_of_the_script_runs_on_a_cpu(tmp_path: Path) -> None:
    """Red with a wrong byte in any part: each compares what it moved with what it should be."""
    out = tmp_path / "results.json"
    done = subprocess.run(
        [ROOT / "tests/gpu/run.sh", "--device", "cpu", "--mib", "1", "--out", out],
        env={**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=380,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(out.read_text())
    assert report["dry_run"]
    assert set(report["parts"]) == set(PARTS)
    assert all(part["ok"] for part in report["parts"].values())
    rows = {row["row"]: row["ratio"] for row in report["rows"]}
    assert {"cuda_ipc", "push_packed_cuda_ipc", "offload", "shard_digest", "changes_of_a_push", "patch_apply"} <= set(
        rows
    )
    assert all(ratio > 0 for ratio in rows.values())


def test_what_is_missing_is_named_with_the_command_that_fetches_it(tmp_path: Path) -> None:
    """As on a bare machine: an interpreter without this project's packages."""
    done = subprocess.run(
        [ROOT / "tests/gpu/run.sh", "--device", "cpu"],
        env={"PATH": os.environ["PATH"], "PYTHON": f"{sys.base_prefix}/bin/python3", "PYTHONNOUSERSITE": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert "missing: " in done.stderr
    assert "msgspec" in done.stderr
    assert "pip download" in done.stderr
