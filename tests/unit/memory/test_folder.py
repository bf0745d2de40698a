"""The folder of named shared memory: what its file system does with huge pages."""

from __future__ import annotations

from pathlib import Path

import pytest

from weightsync.memory import folder


@pytest.mark.parametrize(
    ("options", "huge"), [("rw,huge=advise", "advise"), ("rw,huge=always,inode64", "always"), ("rw", "never")]
)
def test_the_last_mount_says_who_has_huge_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: str, huge: str
) -> None:
    """Other folders' do not count."""
    mounts = tmp_path / "mounts"
    monkeypatch.setattr(folder, "_MOUNTS", str(mounts))
    monkeypatch.setattr(folder, "_path", "/dev/shm")
    other = "rw" if huge == "advise" else "rw,huge=advise"
    lines = [
        f"tmpfs /dev/shm tmpfs {other} 0 0",
        f"tmpfs /dev/shm tmpfs {options} 0 0",
        f"x /dev tmpfs {other} 0 0",
        "x",
    ]
    mounts.write_text("\n".join(lines))
    assert folder.huge_option() == huge


def test_a_system_that_does_not_say_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder, "_MOUNTS", str(tmp_path / "gone"))
    assert folder.huge_option() == "never"
