"""Linux namespaces, as a bench of hosts needs them: whether there are any, entering them, `ip` and `tc` in them."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from weightsync.errors import StateError, UnsupportedError

_TOOLS = ("ip", "tc", "unshare", "nsenter")
_SETUP_S = 30.0
_KINDS = {"net": 0x40000000, "uts": 0x04000000, "mnt": 0x00020000}
"""Namespaces by their names in /proc, with setns's flags, in the order in which they are entered."""
_BURST_KIB = 256
_FILES = ("hosts", "hostname", "resolv.conf")
_PROBE = """set -e
ip link add probe0 type veth peer name probe1
tc qdisc add dev probe0 root tbf rate 1mbit burst 32k latency 50ms
ip rule add pref 10 from 10.78.0.1 to 10.78.0.2 blackhole
mount -t tmpfs none /dev/shm
hostname probe
"""
_T = TypeVar("_T")


@functools.cache
def why_not() -> str | None:
    """Why no hosts can be made here, for a skip; None where they can."""
    if sys.platform != "linux":
        return "hosts are network namespaces, which Linux has alone"
    if os.geteuid() != 0:
        return "hosts are network namespaces, and this is not root"
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        return f"hosts need {', '.join(missing)}: install iproute2 and util-linux"
    probe = ["unshare", "--net", "--mount", "--uts", "--", "sh", "-c", _PROBE]
    done = subprocess.run(probe, capture_output=True, text=True, timeout=_SETUP_S, check=False)
    return None if done.returncode == 0 else f"the kernel refuses hosts: {done.stderr.strip()[:200]}"


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a host is; it travels to a process that is to live there.

    Args:
        pid: of the process that holds the host's namespaces.
    """

    pid: int

    def enter(self) -> None:
        """Moves this process into the host, for good. It must have one thread; its working directory stays."""
        folder = Path.cwd()
        enter(self.pid, tuple(_KINDS))
        os.chdir(folder)

    def run(self, function: Callable[..., _T], *args: Any, **options: Any) -> _T:
        """Enters, then calls `function`: what a new process is given to do."""
        self.enter()
        return function(*args, **options)


def limit(pid: int, device: str, mbit: float | None) -> None:
    """Gives what leaves by a device in the network of a process a bandwidth; None: no limit."""
    if mbit is None:
        in_network(pid, ["tc", "qdisc", "del", "dev", device, "root"], check=False)  # there may be none
    else:
        shape = f"tbf rate {int(mbit * 1e6)}bit burst {_BURST_KIB}k latency 50ms"
        in_network(pid, ["tc", "qdisc", "replace", "dev", device, "root", *shape.split()])


def furnish(pid: int, name: str, table: Sequence[str], private: Sequence[str]) -> None:
    """Gives the namespaces of a process a host name, a table of names, and folders of its own."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "hosts").write_text("\n".join(["127.0.0.1 localhost", *table, ""]), encoding="ascii")
        Path(folder, "hostname").write_text(name + "\n", encoding="ascii")
        Path(folder, "resolv.conf").write_text("nameserver 127.0.0.1\n", encoding="ascii")  # refuses at once
        script = [
            "set -e",
            'hostname "$1"',
            *(f'mount -t tmpfs -o mode=1777 weightsync-host "{place}"' for place in private),
            *(f'mount --bind "$2/{file}" /etc/{file}' for file in _FILES),  # outlives its folder
        ]
        command = ["nsenter", "--target", str(pid), "--mount", "--uts", "--", "sh", "-c", "\n".join(script)]
        _checked([*command, "sh", name, folder])


def enter(pid: int, kinds: Sequence[str]) -> None:
    """Moves this process, or for "net" alone this thread, into the namespaces of another process.

    Raises:
        UnsupportedError: it can't; a process with several threads can't enter "mnt".
    """
    libc = ctypes.CDLL(None, use_errno=True)
    fds = {kind: os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC) for kind in kinds}
    try:
        for kind, fd in fds.items():
            if libc.setns(fd, _KINDS[kind]) != 0:
                reason = os.strerror(ctypes.get_errno())
                raise UnsupportedError(
                    f"namespace {kind} of process {pid} can't be entered: {reason}; a process that enters a host has "
                    "one thread",
                    state_left="this process may be in some of the host's namespaces: end it",
                )
    finally:
        for fd in fds.values():
            os.close(fd)


def ip(pid: int, lines: Iterable[str]) -> None:
    """Runs lines of `ip` in the network of a process.

    Raises:
        StateError: one failed; those before it have run.
    """
    text = "".join(f"{line}\n" for line in lines)
    if text:
        in_network(pid, ["ip", "-batch", "-"], given=text)


def in_network(pid: int, command: Sequence[str], *, given: str = "", check: bool = True) -> None:
    """Runs a command in the network of a process.

    Raises:
        StateError: it failed, and `check` is given.
    """
    _checked(["nsenter", "--target", str(pid), "--net", "--", *command], given=given, check=check)


def _checked(command: Sequence[str], *, given: str = "", check: bool = True) -> None:
    done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=_SETUP_S, check=False)
    if check and done.returncode:
        raise StateError(
            f"{' '.join(command)[-200:]!r} failed: {done.stderr.strip()[:300]}", state_left="the bench is unusable"
        )
