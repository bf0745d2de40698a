"""Starts SGLang servers for the tests, each as a fork of this process, which has imported SGLang once.

A server is three processes, and importing SGLang takes each of them some ten seconds of a core. Here the server, and
the processes that it starts, are forks: all else is SGLang's own `launch_server`. Reads one JSON object a line, the
server's arguments, environment and log; answers with its process id, which is that of its group, too. Ends with its
input.
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import runpy
import signal
import sys
from typing import NoReturn

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def warm_up() -> None:
    """Imports what the processes of a server would."""

    import weightsync.engine.sglang  # noqa: F401

    multiprocessing.set_start_method("fork", force=True)
    multiprocessing.set_start_method = lambda *_, **__: None  # type: ignore[method-assign,assignment]


def serve(arguments: list[str], log: str, environment: dict[str, str]) -> NoReturn:
    """In the fork: is a server until it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for each in (1, 2):
        os.dup2(output, each)
    os.environ.update(environment)
    sys.argv = ["sglang.launch_server", *arguments]
    try:
        runpy.run_module("sglang.launch_server", run_name="__main__")
    finally:
        os._exit(1)


def main() -> None:
    """Reads orders until there are no more."""
    warm_up()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel forgets servers that have ended,
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)  # and their children
    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if pid == 0:
            serve([*sys.argv[1:], *order["arguments"]], order["log"], order["environment"])
        os.setpgid(pid, pid)  # before anybody looks for the group
        sys.stdout.write(f"{pid}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
