"""What tests of another local user share: commands that run as one, and folders that one reaches."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

UID = 65534
TIMEOUT_S = 30


def needs_root() -> pytest.MarkDecorator:
    return pytest.mark.skipif(os.geteuid() != 0, reason="another user's files can be made by root alone")


def as_another(script: str, *words: str | Path) -> None:
    """Runs a shell script as another user; `words` are `$1`, `$2` ..."""
    subprocess.run(
        ["/bin/sh", "-euc", script, "sh", *map(str, words)],
        user=UID, group=UID, extra_groups=[], timeout=TIMEOUT_S, check=True,
    )  # fmt: skip


@contextlib.contextmanager
def common_folder(mode: int = 0o1777) -> Iterator[Path]:
    """A folder that every user of the machine may write into, as /tmp and /dev/shm are."""
    folder = Path(tempfile.mkdtemp(prefix="weightsync-test-"))
    folder.chmod(mode)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)
