"""Compiled loops are found on disk as long as nothing of what they were made of has changed, in whatever file it is."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

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
    package = _package(tmp_path)
    assert _said(tmp_path) == ["20", "0"]
    assert _said(tmp_path) == ["20", "1"]
    (package / "part.py").write_text(_PART.replace("number + MORE", "number - MORE"))
    assert _said(tmp_path) == ["0", "0"]
    (package / "more.py").write_text("MORE = 2\n")
    assert _said(tmp_path) == ["-10", "0"]
    assert _said(tmp_path) == ["-10", "1"]


@pytest.mark.parametrize("kind", ["nbi", "nbc"])
def test_a_damaged_file_costs_the_time_to_compile(tmp_path: Path, kind: str) -> None:
    """Seen red: EOFError at each import, for good."""
    _package(tmp_path)
    assert _said(tmp_path) == ["20", "0"]
    kept = list(tmp_path.glob(f"kept/**/*.{kind}"))
    assert len(kept) == 2
    for path in kept:
        path.write_bytes(b"")
    error: list[str] = []
    assert _said(tmp_path, error=error) == ["20", "0"]
    assert len(error) == 1
    assert str(tmp_path / "kept") in error[0]
    assert "EOFError" in error[0]


def test_a_full_disk_keeps_nothing_and_computes(tmp_path: Path) -> None:
    """Seen red: OSError at the import."""
    _package(tmp_path)
    error: list[str] = []
    full = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n"
    assert _said(tmp_path, full, error=error) == ["20", "0"]
    assert len(error) == 1
    assert str(tmp_path / "kept") in error[0]


def test_what_does_not_compile_is_raised(tmp_path: Path) -> None:
    package = _package(tmp_path)
    (package / "part.py").write_text(_PART.replace("number + MORE", "number + MORE.none"))
    with pytest.raises(AssertionError, match="TypingError"):
        _said(tmp_path)


def _package(tmp_path: Path) -> Path:
    """A loop that calls another one."""
    package = tmp_path / "weightsync"
    package.mkdir()
    shutil.copy(str(weightsync.compiled.__file__), package / "compiled.py")
    files = {"__init__": "", "more": "MORE = 1\n", "part": _PART, "whole": _WHOLE}
    for name, source in files.items():
        (package / f"{name}.py").write_text(source)
    return package


def _said(tmp_path: Path, before: str = "", *, error: list[str] | None = None) -> list[str]:
    """What a process prints that has imported it; lines of its standard error are added to `error`."""
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "NUMBA_CACHE_DIR": str(tmp_path / "kept")}
    done = subprocess.run(
        [sys.executable, "-B", "-c", before + _CHILD], cwd=tmp_path, env=environment, capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    if error is not None:
        error += done.stderr.splitlines()
    return done.stdout.split()
