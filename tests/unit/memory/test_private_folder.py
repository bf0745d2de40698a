"""PrivateFolder: nobody else looks into it, and it goes with its owner, however that ends."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from weightsync.memory import PrivateFolder, reclaim_dead
from weightsync.memory import folder as memory_folder

OWNER = """
import sys
from weightsync.memory import PrivateFolder
folder = PrivateFolder()
open(folder.path + "/socket", "w").close()
print(folder.path, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def owner() -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def path_of(owner: subprocess.Popen[str]) -> Path:
    assert owner.stdout is not None
    return Path(owner.stdout.readline().strip())


def test_it_is_this_users_alone_and_goes_with_close() -> None:
    old = os.umask(0)
    try:
        with PrivateFolder() as folder:
            facts = os.stat(folder.path)
            assert (stat.S_IMODE(facts.st_mode), facts.st_uid) == (0o700, os.geteuid())
            assert len(folder.path) < 100, "a socket's address has 107 bytes"
            Path(folder.path, "socket").touch()
            reclaim_dead()
            assert os.path.isdir(folder.path), "its owner lives"
        assert not os.path.exists(folder.path)
        folder.close()
    finally:
        os.umask(old)


def test_it_goes_with_a_folder_that_somebody_made_in_it(tmp_path: Path) -> None:
    """And with links, not with what they lead to. Seen red with `unlink` of every name."""
    (tmp_path / "kept").touch()
    with PrivateFolder() as folder:
        inner = Path(folder.path, "inner", "more")
        inner.mkdir(parents=True)
        (inner / "file").touch()
        (inner / "link").symlink_to(tmp_path)
    assert not os.path.exists(folder.path)
    assert (tmp_path / "kept").exists()


def test_one_that_nobody_has_any_more_goes_with_its_descriptor() -> None:
    """Seen red: it was removed, and the descriptor with its lock stayed."""
    path = PrivateFolder().path
    gc.collect()
    assert not os.path.exists(path)
    links = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # another thread has closed it meanwhile
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
    assert not [link for link in links if link.startswith(path)]


def test_it_goes_when_its_owner_ends_without_a_word(owner: subprocess.Popen[str]) -> None:
    with owner:
        path = path_of(owner)
        assert path.is_dir()
    assert not path.exists()


def test_it_is_removed_by_others_when_its_owner_is_killed(owner: subprocess.Popen[str]) -> None:
    with owner:
        path = path_of(owner)
        owner.kill()
    reclaim_dead()
    assert not path.exists()


def test_a_forked_child_neither_keeps_nor_removes_it(owner: subprocess.Popen[str]) -> None:
    folder = PrivateFolder()
    ready, far = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            folder.close()
            del folder
            gc.collect()
            os.write(far, b"x")
            signal.pause()
        finally:
            os._exit(0)
    try:
        assert os.read(ready, 1) == b"x"
        path = folder.path
        assert os.path.isdir(path)
        folder._forget()  # as if this process had been killed: the child's copy must not hold the lock
        reclaim_dead()
        assert not os.path.exists(path)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(ready)
        os.close(far)
        owner.kill()
        with owner:
            pass


def test_what_others_can_look_into_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_folder, "_path", str(tmp_path))
    lookalikes = [tmp_path / "weightsync-ipc-1-0123456789abcdef", tmp_path / "weightsync-ipc-1-0123456789abcde0"]
    lookalikes[0].mkdir()
    lookalikes[0].chmod(0o755)
    lookalikes[1].symlink_to(lookalikes[0])
    reclaim_dead()
    assert all(path.exists() for path in lookalikes)


STARVED = """
import os, resource, sys
from weightsync.errors import SharedMemoryError
from weightsync.memory import PrivateFolder
PrivateFolder().close()
if sys.argv[1] == "descriptors":
    held = [os.open(os.devnull, os.O_RDONLY)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (held[0] + 1, held[0] + 1))
else:
    os.umask(0o777)
    os.setegid(65534)
    os.seteuid(65534)  # root opens whatever it likes
try:
    PrivateFolder()
    print("made")
except SharedMemoryError as error:
    print(error)
if sys.argv[1] == "descriptors":
    os.close(held[0])
    PrivateFolder().close()
print(sum(name.startswith(f"weightsync-ipc-{os.getpid()}-") for name in os.listdir("/dev/shm")))
"""


@pytest.mark.parametrize("lacks", ["descriptors", "rights"])
def test_what_can_not_be_opened_is_told_and_not_made_again_and_again(lacks: str) -> None:
    """50,000 folders a second (seen)."""
    if lacks == "rights" and os.geteuid() != 0:
        pytest.skip("needs root, which becomes another user")
    done = subprocess.run(
        [sys.executable, "-c", STARVED, lacks], stdout=subprocess.PIPE, text=True, timeout=60, check=True
    )
    why, left = done.stdout.splitlines()
    assert "can't be made" in why
    assert left == "0"
