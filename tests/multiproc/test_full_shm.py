"""A /dev/shm that fills up in the middle of a run: errors say so, engines serve on, and all goes on with the room."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.multiproc.local_user import needs_root

PROGRAM = Path(__file__).with_name("full_shm.py")


@needs_root()
def test_a_full_shm_is_told_and_got_over(tmp_path: Path) -> None:
    """One run for all of it: each process that loads torch takes seconds."""
    root = str(PROGRAM.parents[2])
    done = subprocess.run(
        ["unshare", "-m", sys.executable, PROGRAM], capture_output=True, text=True, timeout=120, check=False,
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout) == {
        "receiver": "NoRoomError",
        "staged nothing": None,
        "a puller": "NoRoomError: True",
        "trainer": True,
        "served": 3.0,
        "trainer again": True,
        "served again": 5.0,
        "a larger model": "SharedMemoryError: True",
        "serves on": [5, 5.0],
        "after it": True,
        "served at last": 7.0,
        "left": [],
    }
