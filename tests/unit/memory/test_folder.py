"""The folder of named shared memory: what its file system does with huge pages."""

from __future__ import annotations

from pathlib import Path

import pytest

from weightsync.memory import folder


@pytest.mark.parametrize(
    ("options", "asks"),
    [("rw,huge=advise", True), ("rw,nosuid,huge=advise,inode64", True), ("rw,huge=always", False), ("rw", False)],
)
def test_who_has_to_ask_for_huge_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: str, asks: bool
) -> None:
    """The last mount at the folder counts; other folders' do not."""
    mounts = tmp_path / "mounts"
    monkeypatch.setattr(folder, "_MOUNTS", str(mounts))
    monkeypatch.setattr(folder, "_path", "/dev/shm")
    other = "rw" if asks else "rw,huge=advise"
    lines = [
        f"tmpfs /dev/shm tmpfs {other} 0 0",
        f"tmpfs /dev/shm tmpfs {options} 0 0",
        f"x /dev tmpfs {other} 0 0",
        "x",
    ]
    mounts.write_text("\n".join(lines))
    assert folder.huge_to_who_asks() == asks


def test_a_system_that_does_not_say_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder, "_MOUNTS", str(tmp_path / "gone"))
    assert not folder.huge_to_who_asks()
