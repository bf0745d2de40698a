"""Compiled loops are found on disk as long as nothing of what they were made of has changed, in whatever file it is."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import weightsync.compiled

_PART = """
from numba import int64
from weightsync.more import MORE
from weightsync.compiled import compiled

@compiled(int64(int64))
def part(number):
    return number + MORE
"""
_WHOLE = """
from numba import int64
from weightsync.part import (
    part,
)
from weightsync.compiled import compiled

@compiled(int64(int64))
def whole(number):
    return 10 * part(number)
"""
_CHILD = """
from weightsync.whole import whole
print(whole(1), sum(whole.stats.cache_hits.values()))
"""


def test_a_change_in_another_file_makes_a_loop_anew(tmp_path: Path) -> None:
    """Red with 20 and a hit after each edit, where numba's own look at the caller's file is all."""
    package = tmp_path / "weightsync"
    package.mkdir()
    shutil.copy(str(weightsync.compiled.__file__), package / "compiled.py")
    files = {"__init__": "", "more": "MORE = 1\n", "part": _PART, "whole": _WHOLE}
    for name, source in files.items():
        (package / f"{name}.py").write_text(source)

    def said() -> list[str]:
        environment = {**os.environ, "PYTHONPATH": str(tmp_path), "NUMBA_CACHE_DIR": str(tmp_path / "kept")}
        done = subprocess.run(
            [sys.executable, "-B", "-c", _CHILD], cwd=tmp_path, env=environment, capture_output=True, text=True,
            timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout.split()

    assert said() == ["20", "0"]
    assert said() == ["20", "1"]
    (package / "part.py").write_text(_PART.replace("number + MORE", "number - MORE"))
    assert said() == ["0", "0"]
    (package / "more.py").write_text("MORE = 2\n")
    assert said() == ["-10", "0"]
    assert said() == ["-10", "1"]
