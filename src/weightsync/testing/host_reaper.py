"""Ends what lives in a bench's hosts, also where the process that made the bench was killed.

`start` runs this file as a process of its own: it reads the bench's namespaces from its input, and when that ends,
because the bench is closed or its owner is gone, it kills every process in them. Where the reaper was killed too,
`sweep` finds by their environment the keepers whose owner is gone, and does the same. This file imports nothing of
the library, so that the reaper starts in a few milliseconds.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

KEEPER = "WEIGHTSYNC_HOST_KEEPER_OF"
"""The variable by which a keeper is known; its value is the owner."""
_END_S = 10.0
_LOOK_S = 0.5
_PAUSE_S = 0.002


def start() -> subprocess.Popen[bytes]:
    """Starts a reaper for the process that calls. It outlives ^C, and ends when told or when its caller is gone."""
    return subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )


def watch(reaper: subprocess.Popen[bytes], pid: int) -> None:
    """Tells the reaper of one more keeper."""
    assert reaper.stdin is not None
    reaper.stdin.write(f"{network_of(pid)}\n".encode())
    reaper.stdin.flush()


def end(reaper: subprocess.Popen[bytes]) -> None:
    """Has the reaper do its work, and waits for it."""
    assert reaper.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        reaper.stdin.close()
    reaper.wait(2 * _END_S)


def keep(namespaces: Sequence[str]) -> subprocess.Popen[bytes]:
    """Starts a process that does nothing but hold new namespaces; returns when it has them."""
    owner = f"{os.getpid()}-{_birth_of(os.getpid())}"
    keeper = subprocess.Popen(
        ["unshare", *namespaces, "--", "sh", "-c", "echo; exec sleep infinity"],
        env={**os.environ, KEEPER: owner},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert keeper.stdout is not None
    if not keeper.stdout.readline():
        raise OSError(f"a process with namespaces of its own can't be made: unshare ended with {keeper.wait(_END_S)}")
    return keeper


def sweep() -> None:
    """Ends the hosts of owners that are gone."""
    orphans = set()
    for pid in _pids():
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/comm").read_bytes() != b"sleep\n":
                continue
            for word in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                if word.startswith(f"{KEEPER}=".encode()):
                    owner, _, birth = word.decode().partition("=")[2].partition("-")
                    if _birth_of(int(owner)) != birth:
                        orphans.add(network_of(pid))
    _end_all(orphans)


def pids_in(networks: Iterable[str]) -> list[int]:
    """The processes in these networks, except zombies."""
    wanted, found = set(networks), []
    for pid in _pids():
        with contextlib.suppress(OSError):  # it is gone, or a zombie
            if network_of(pid) in wanted:
                found.append(pid)
    return found


def network_of(pid: int) -> str:
    """The name by which the kernel knows the network of a process, e.g. net:[4026532281]."""
    return os.readlink(f"/proc/{pid}/ns/net")


def _end_all(networks: set[str]) -> None:
    end_s = time.monotonic() + _END_S
    while (pids := pids_in(networks)) and time.monotonic() < end_s:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_PAUSE_S)


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _birth_of(pid: int) -> str:
    """When a process began, in clock ticks since the machine's start; empty where there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
    except OSError:
        return ""


def _main(owner: int) -> None:
    text = b""
    while True:
        gone = os.getppid() != owner  # a forked child of the owner may hold the pipe open
        if select.select([0], [], [], 0.0 if gone else _LOOK_S)[0]:
            more = os.read(0, 4096)
            text += more
            if more:
                continue
        elif not gone:
            continue
        break
    _end_all({line.decode() for line in text.splitlines()} - {network_of(os.getpid())})


if __name__ == "__main__":
    _main(int(sys.argv[1]))
