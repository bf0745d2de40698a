"""Another user of the same machine: what he puts under names of ours is not believed, and what he has stays his."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.multiproc.local_user import TIMEOUT_S, UID, as_another, common_folder, needs_root
from weightsync.engine.vllm.lease_middleware import LeaseMiddleware
from weightsync.errors import ConfigError, SharedMemoryError
from weightsync.host.version_path import VersionPath
from weightsync.memory import LeaseReader, ServingLease, boot_s, folder, host_nonce, reclaim_dead
from weightsync.observe import write_chrome_trace
from weightsync.types import PhaseRecord, Version

pytestmark = needs_root()

LEASE = b"wsyncls1" + struct.pack("=ddd", 1e12, 0.0, 1e12) + bytes(8)


@pytest.fixture
def common() -> Iterator[Path]:
    with common_folder() as made:
        yield made


# The lease.


@pytest.mark.parametrize("mode", ["0666", "0644", "0600"])
def test_a_lease_of_another_user_is_nobodys(common: Path, mode: str) -> None:
    """Seen to fail: both sides took it, and its owner could say that the engine may answer, or kill it."""
    path = common / "actor.lease"
    (common / "content").write_bytes(LEASE)
    as_another('cat "$1/content" > "$2"; chmod "$3" "$2"', common, path, mode)
    for kind in (ServingLease, LeaseReader):
        with pytest.raises(SharedMemoryError, match=f"a file of uid {UID}"):
            kind(str(path))
    assert (path.read_bytes(), path.stat().st_uid) == (LEASE, UID), "what lies there was left as it was"


def test_a_lease_that_others_may_write_is_nobodys(common: Path) -> None:
    path = common / "actor.lease"
    ServingLease(str(path)).close()
    for mode in (0o666, 0o664, 0o646):
        path.chmod(mode)
        for kind in (ServingLease, LeaseReader):
            with pytest.raises(SharedMemoryError, match="others may write"):
                kind(str(path))
    path.chmod(0o600)
    LeaseReader(str(path))


@pytest.mark.parametrize("there", [True, False])
def test_a_link_of_another_user_is_not_followed(common: Path, there: bool) -> None:
    """Seen to fail: a link that led nowhere was replaced without a word."""
    path, target = common / "actor.lease", common / "target"
    if there:
        ServingLease(str(target)).close()
    as_another('ln -s "$1" "$2"', target, path)
    for kind in (ServingLease, LeaseReader):
        with pytest.raises(SharedMemoryError, match="is a link"):
            kind(str(path))
    assert path.is_symlink()
    assert target.exists() == there


def test_a_pipe_of_another_user_is_not_waited_for(common: Path) -> None:
    as_another('mkfifo -m 0666 "$1"', common / "actor.lease")
    for kind in (ServingLease, LeaseReader):
        with pytest.raises(SharedMemoryError, match="no regular file"):
            kind(str(common / "actor.lease"))


READS = """
import os, sys
os.setgroups([]); os.setgid(65534); os.setuid(65534)
from weightsync.memory import LeaseReader
print(LeaseReader(sys.argv[1]).refusal())
"""


def test_an_engine_of_another_user_reads_the_lease_of_roots_service(common: Path) -> None:
    """But cannot write it. The modules are read before the user is changed: they may lie where only root reads."""
    with ServingLease(str(common / "actor.lease")) as lease:
        lease.renew(boot_s() + 100.0, seen_s=boot_s() + 100.0)
        script = "import weightsync.memory\n" + READS
        told = subprocess.run(
            [sys.executable, "-c", script, lease.path], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
        assert told.stdout == "None\n", told.stderr
        with pytest.raises(subprocess.CalledProcessError):
            as_another('echo x > "$1"', lease.path)


CUT = """
import sys
from weightsync.memory import LeaseReader, ServingLease, boot_s
lease = ServingLease(sys.argv[1])
reader = LeaseReader(lease.path)
lease.renew(boot_s() + 1e6)
print(reader.refusal(), flush=True)
sys.stdin.readline()
print(reader.refusal(), reader.held, flush=True)
lease.renew(boot_s() + 2e6)
print(reader.refusal(), flush=True)
"""


@pytest.mark.parametrize("size", [0, 20, 39, 100])
def test_a_lease_that_is_cut_off_is_a_refusal(common: Path, size: int) -> None:
    """Seen to fail: both sides were killed by SIGBUS at their next look."""
    path = common / "actor.lease"
    with subprocess.Popen(
        [sys.executable, "-c", CUT, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "None\n"
        os.truncate(path, size)
        out, _ = process.communicate("go on\n", timeout=TIMEOUT_S)
    assert process.returncode == 0
    refused, renewed = out.splitlines()
    assert "damaged, or cut off" in refused
    assert refused.endswith(" False"), "nobody waits for it"
    assert "damaged, or cut off" in renewed, "writing does not make it whole"


def test_a_server_does_not_start_on_a_lease_of_another_user(common: Path) -> None:
    (common / "content").write_bytes(LEASE)
    as_another('cat "$1/content" > "$1/actor.lease"', common)
    middleware = LeaseMiddleware(lambda *_: None, path=str(common / "actor.lease"))  # type: ignore[arg-type, return-value]
    assert isinstance(middleware._why_not, ConfigError)
    assert f"a file of uid {UID}" in str(middleware._why_not)


# The folder of shared memory.


@pytest.fixture
def shared(common: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(folder, "_path", str(common))
    return common


SQUATS = {
    "file": 'printf 0123456789abcdef0123456789abcdef > "$1"; chmod 666 "$1"',
    "link": 'ln -s /etc/hostname "$1"',
    "link to nothing": 'ln -s /nowhere/at/all "$1"',
    "pipe": 'mkfifo -m 666 "$1"',
    "folder": 'mkdir "$1"',
}


@pytest.mark.parametrize("kind", SQUATS)
def test_a_name_that_another_user_took_first_stops_nobody(shared: Path, kind: str) -> None:
    """Seen to fail: no trainer and no engine of root started until somebody removed the file."""
    path = shared / f"weightsync-host-{os.geteuid()}"
    as_another(SQUATS[kind], path)
    one = host_nonce()
    assert len(one) == 32
    assert one != "0123456789abcdef" * 2, "it is not what another user says"
    assert host_nonce() == one
    assert path.lstat().st_uid == UID


def test_a_lock_that_another_user_holds_is_waited_for_shortly(shared: Path) -> None:
    path = shared / f"weightsync-host-{os.geteuid()}"
    as_another(': > "$1"', path)
    holder = subprocess.Popen(
        ["/bin/sh", "-c", 'exec 9<"$1" && flock 9 && echo held && read -r _', "sh", shared],
        user=UID, group=UID, extra_groups=[], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        assert len(host_nonce()) == 32
        holder.communicate(b"\n", timeout=TIMEOUT_S)


def test_files_of_another_user_that_look_like_segments_hold_nothing_up(shared: Path) -> None:
    as_another(
        'cd "$1"; mkfifo weightsync-1-0123456789abcdef; ln -s /root/x weightsync-2-0123456789abcdef; '
        ": > weightsync-3-0123456789abcdef; mkdir weightsync-4-0123456789abcdef; "
        "for i in $(seq 10 400); do : > weightsync-$i-0123456789abcdef; done",
        shared,
    )
    before = sorted(os.listdir(shared))
    assert reclaim_dead() == ()
    assert sorted(os.listdir(shared)) == before


# Folders that engines load from, and files that are written beside others'.


def _pulled() -> Any:
    return SimpleNamespace(version=Version(run_id="run", number=1), segment="weightsync-1-abc")


@pytest.mark.parametrize(
    "script",
    ['mkdir "$1/actor"', 'mkdir "$1/else"; ln -s "$1/else" "$1/actor"', 'mkdir -m 777 "$1/actor"'],
    ids=["folder", "link", "open folder"],
)
def test_a_path_root_where_another_user_made_the_models_folder_is_refused(common: Path, script: str) -> None:
    """Seen to fail: he could put his own weights where the engine loads from."""
    as_another(script, common)
    with pytest.raises(ConfigError, match="name a folder of this user"):
        VersionPath(common, "actor")
    with VersionPath(common, "critic").held(_pulled()) as made:
        assert made.is_dir(), "the root itself may be common to all, where it is sticky as /tmp is"


def test_a_path_root_that_others_may_write_is_refused(common: Path) -> None:
    common.chmod(0o777)
    with pytest.raises(ConfigError, match="not sticky"):
        VersionPath(common, "actor")


def test_a_timeline_in_a_common_folder_follows_no_link(common: Path) -> None:
    """Seen to fail: the file aside had a name that could be foreseen, and was opened as it was found."""
    victim, target = common / "victim", common / "timeline.json"
    victim.write_text("precious")
    as_another('ln -s "$1" "$2"', victim, common / f".timeline.json.{os.getpid()}.partial")
    record = PhaseRecord(name="copy", start_s=1.0, end_s=2.0, track="trainer/rank 0", detail="")
    assert "copy" in write_chrome_trace([record], target).read_text()
    assert victim.read_text() == "precious"
