"""Timelines on a disk that is really full: the old one stays, nothing is left beside it, the next one is written."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.multiproc.local_user import needs_root

FULL = """
import errno, json, os, subprocess, sys
from pathlib import Path
from weightsync.observe import write_chrome_trace, write_timeline_png
from weightsync.types import PhaseRecord
folder = Path(sys.argv[1])
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], check=True)
def records(num):
    fields = {"name": "load", "track": "engine/0"}
    return [PhaseRecord(**fields, start_s=1.0 * n, end_s=n + 0.5, detail=str(n)) for n in range(num)]
def attempt(write, name, num):
    try:
        write(records(num), folder / name)
    except OSError as error:
        return errno.errorcode[error.errno]
    return "written"
writers = (write_chrome_trace, "t.json", 6000), (write_timeline_png, "t.png", 20)
print([attempt(write, name, 10) for write, name, _ in writers])
old = {each.name: each.read_bytes() for each in folder.iterdir()}
json.loads(old["t.json"])
for left_bytes in (65536, 0):
    room = os.statvfs(folder)
    (folder / "other").write_bytes(bytes(max(0, room.f_bavail * room.f_frsize - left_bytes)))
    print([attempt(write, name, num) for write, name, num in writers if left_bytes == 0 or name == "t.json"])
    (folder / "other").unlink()
    assert {each.name: each.read_bytes() for each in folder.iterdir()} == old
print([attempt(write, name, 10) for write, name, _ in writers])
"""


@needs_root()
def test_a_full_disk_leaves_the_old_timeline(tmp_path: Path) -> None:
    """With some room, and with none."""
    done = subprocess.run(
        ["unshare", "-m", sys.executable, "-c", FULL, tmp_path],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout.splitlines() == [
        "['written', 'written']", "['ENOSPC']", "['ENOSPC', 'ENOSPC']", "['written', 'written']",
    ], done.stderr  # fmt: skip
