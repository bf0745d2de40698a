"""A server's processes end with the process that started them, also when that one is killed by force."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from weightsync.types import Deadline

STARTER = """
import sys
from pathlib import Path
from weightsync.demo.vllm_engine import VllmServer

class Family(VllmServer):
    '''A front end and, as vLLM has, a process behind it that says nothing and ends with nobody.'''
    @staticmethod
    def check(): pass
    def _command(self, port): return ("/bin/sh", "-c", "sleep 1000 & echo $!; wait")
    def _wait_until_ready(self):
        while not self._tail().strip(): self.check_alive()
        print(self._process.pid, int(self._tail()), flush=True)

with Family(Path()):
    sys.stdin.read()
"""


@pytest.mark.parametrize("front_end_dies_too", [False, True])
def test_a_server_ends_when_its_starter_is_killed(front_end_dies_too: bool) -> None:
    """Ray kills an actor and its children by force: the processes behind the front end have no parent then.

    Seen to fail: with a death signal to the front end alone, `sleep` went on.
    """
    with subprocess.Popen([sys.executable, "-c", STARTER], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as starter:
        assert starter.stdout is not None
        processes = [psutil.Process(int(pid)) for pid in starter.stdout.readline().split()]
        assert len(processes) == 2
        starter.kill()
        if front_end_dies_too:
            os.kill(processes[0].pid, signal.SIGKILL)
        assert psutil.wait_procs(processes, timeout=30)[1] == []


def test_a_server_that_is_closed_leaves_no_guard_behind() -> None:
    with subprocess.Popen([sys.executable, "-c", STARTER], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as starter:
        assert starter.stdout is not None
        assert starter.stdin is not None
        pids = starter.stdout.readline().split()
        # The shell that starts the guard ends at once: a list of processes made between the two has neither.
        deadline = Deadline(30)
        while not (guards := [each for each in psutil.process_iter() if _guards(each, pids[0].decode())]):
            assert not deadline.expired
        starter.stdin.close()
        assert starter.wait(30) == 0
        assert psutil.wait_procs(guards, timeout=10)[1] == []


def _guards(process: psutil.Process, pid: str) -> bool:
    try:
        return process.cmdline()[-1:] == [pid] and Path(process.cmdline()[0]).name == "sh"
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return False
