"""The rows of the pull path run to their end; their figures are `make bench`'s."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROWS = ["offload", "shm_pull", "tcp_pull"]


@pytest.mark.soak
def test_its_rows_are_measured(tmp_path: Path) -> None:
    """Red where a transport that an agent does not offer is asked of it."""
    command = [sys.executable, "-m", "bench", *ROWS, "--gib", "0.02", "--repeats", "1", "--out", str(tmp_path)]
    subprocess.run(command, cwd=Path(__file__).parents[2], check=True, timeout=280, stdin=subprocess.DEVNULL)
    rows = json.loads((tmp_path / "latest.json").read_text())
    assert sorted(row["row"] for row in rows) == ROWS
    assert all(row["ratio"] > 0 for row in rows)
