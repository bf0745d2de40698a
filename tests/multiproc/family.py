"""A command whose processes are known, so that a test sees what they leave behind, whoever else runs here."""

from __future__ import annotations

import contextlib
import subprocess
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil

from tests.multiproc.pull_kit import shm_of

_LOOK_S = 0.1


class Family:
    """All processes that one command has started, if they lived for a moment."""

    def __init__(self) -> None:
        self.processes: dict[int, psutil.Process] = {}

    def look(self) -> None:
        """Notes the children that those of before have now."""
        parents = dict(_processes())
        new = [pid for pid in self.processes if pid in parents]
        while new:
            new = [pid for pid, parent in parents.items() if parent in new and pid not in self.processes]
            for pid in new:
                with contextlib.suppress(psutil.NoSuchProcess):
                    self.processes[pid] = psutil.Process(pid)

    def segments(self) -> list[str]:
        """What lies in shared memory under their names."""
        return shm_of(*self.processes)

    def alive(self, patience_s: float = 10.0) -> list[psutil.Process]:
        """Those that do not end within so long."""
        return psutil.wait_procs(list(self.processes.values()), timeout=patience_s)[1]


def run_family(
    command: list[str], *, timeout_s: float, env: Mapping[str, str] | None = None
) -> tuple[subprocess.CompletedProcess[str], Family]:
    """Runs a command to its end, as `subprocess.run` does; says which processes it was too."""
    family = Family()
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        family.processes[process.pid] = psutil.Process(process.pid)
        try:
            with _watched(family):
                out, errors = process.communicate(timeout=timeout_s)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, errors), family


@contextlib.contextmanager
def _watched(family: Family) -> Iterator[None]:
    over = threading.Event()

    def watch() -> None:
        while not over.wait(_LOOK_S):
            family.look()

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _processes() -> Iterator[tuple[int, int]]:
    """Every process of this machine and its parent."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):  # it has ended
                yield int(folder.name), int((folder / "stat").read_text().rpartition(")")[2].split()[1])
