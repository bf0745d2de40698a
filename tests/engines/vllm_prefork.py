"""vLLM's processes of tests, forked from one that has imported vLLM: an import takes 8 s of a core, a fork nothing.

    test -- order: module, arguments, environment, files --> `main` -- fork --> what `python -m MODULE ...` would be

Each process that starts engines (a worker of pytest-xdist) keeps one to fork from; it ends with that process. An
environment that differs in what is read while vLLM is imported starts an interpreter of its own.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).parents[2]
IMPORTS = ("vllm.entrypoints.openai.api_server", "vllm.v1.worker.cpu_worker", "vllm.v1.worker.cpu_model_runner")
READ_LATE = ("VLLM_", "WEIGHTSYNC_", "PYTHONPATH", "PYTEST_CURRENT_TEST")
"""Beginnings of variables that nothing has read before the fork."""
READ_EARLY = ("VLLM_LOGGING_", "VLLM_CONFIGURE_LOGGING", "VLLM_TARGET_DEVICE", "VLLM_PLUGINS")
_MAX_ORDER = 1 << 20


class Process:
    """What `subprocess.Popen` would be of it, as far as tests need that. It leads a group of its own.

    Args:
        channel: its parent says its number here, with a pidfd, and how it ended.
        stdin: writes into its standard input.
    """

    def __init__(self, channel: socket.socket, stdin: IO[str] | None) -> None:
        self._channel = channel
        self.stdin = stdin
        said, fds, _, _ = socket.recv_fds(channel, 64, 1)
        self.pid = int(said)
        self.returncode: int | None = None
        (self._ended,) = fds  # its parent's: by now it may have ended, and its number be another one's

    def poll(self) -> int | None:
        """How it ended; None: it runs."""
        return self._look(0.0)

    def wait(self, timeout: float) -> int:
        """How it ended.

        Raises:
            subprocess.TimeoutExpired: it has not.
        """
        code = self._look(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout)
        return code

    def terminate(self) -> None:
        """SIGTERM."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._ended, signal.SIGTERM)

    def _look(self, timeout_s: float) -> int | None:
        if self.returncode is None and select.select([self._channel], [], [], timeout_s)[0]:
            said = self._channel.recv(64)
            self.returncode = int(said) if said else -signal.SIGKILL  # nobody is left to say it
            self._channel.close()
            os.close(self._ended)
            if self.stdin is not None:
                self.stdin.close()
        return self.returncode


class _Parent:
    """The process to fork from."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self.early = _early(env)
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.engines.vllm_prefork", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                process_group=0,
                cwd=ROOT,
                env={**env, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])},
            )
        atexit.register(self._end)

    def fork(self, words: Sequence[str], output: IO[Any], stdin: int, env: Mapping[str, str]) -> Process:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with contextlib.ExitStack() as stack:
            stack.enter_context(theirs)
            writes = None
            if stdin == subprocess.PIPE:
                reads, end = os.pipe()
                writes = os.fdopen(end, "w")
            else:
                reads = os.open(os.devnull, os.O_RDONLY)
            stack.callback(os.close, reads)
            order = json.dumps({"words": list(words), "env": dict(env)}).encode()
            socket.send_fds(self._socket, [order], [theirs.fileno(), reads, output.fileno()])
        return Process(ours, writes)

    def _end(self) -> None:
        self._socket.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        self._process.kill()


_parents: list[_Parent] = []


def start(
    words: Sequence[str], output: IO[Any], *, env: Mapping[str, str], stdin: int = subprocess.DEVNULL
) -> Process | subprocess.Popen[str]:
    """Starts `python -m` of these words, in the repository's folder, and in a process group of its own.

    Args:
        words: a module, and its arguments.
        output: takes what it writes.
        env: its whole environment.
        stdin: `subprocess.DEVNULL` or `subprocess.PIPE`.
    """
    if not _parents:
        _parents.append(_Parent(env))
    if _parents[0].early == _early(env):
        return _parents[0].fork(words, output, stdin, env)
    return subprocess.Popen(
        [sys.executable, "-m", *words], stdout=output, stderr=subprocess.STDOUT, stdin=stdin, text=True,
        process_group=0,  # a session of its own would be scheduled as a group of its own: see demo.vllm_engine
        cwd=ROOT, env=env,
    )  # fmt: skip


def _early(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if name.startswith(READ_EARLY) or not name.startswith(READ_LATE)}


# --- in the process to fork from ---


def main(orders: socket.socket) -> list[str] | None:
    """Forks until nobody gives orders any more. Returns in each child, with the words of its order; else None."""
    for name in IMPORTS:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a collection in a child would copy what they share
    awake, wake = socket.socketpair()
    awake.setblocking(False)
    wake.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    channels: dict[int, socket.socket] = {}
    while True:
        ready, _, _ = select.select([orders, awake], [], [])
        if awake in ready:
            with contextlib.suppress(BlockingIOError):
                awake.recv(4096)
            _say_who_ended(channels)
        if orders not in ready:
            continue
        said, fds, _, _ = socket.recv_fds(orders, _MAX_ORDER, 3)
        if not said:
            return None
        order, channel = json.loads(said), socket.socket(fileno=fds[0])
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for each in (orders, awake, wake, channel, *channels.values()):
                each.close()
            return _become(order, stdin=fds[1], output=fds[2])
        with contextlib.suppress(PermissionError, ProcessLookupError):
            os.setpgid(pid, pid)
        channels[pid] = channel
        ended = os.pidfd_open(pid)
        socket.send_fds(channel, [str(pid).encode()], [ended])
        for fd in (ended, fds[1], fds[2]):
            os.close(fd)


def _say_who_ended(channels: dict[int, socket.socket]) -> None:
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG)) != (0, 0):
            pid, status = found
            if (channel := channels.pop(pid, None)) is not None:
                with channel, contextlib.suppress(OSError):
                    channel.send(str(os.waitstatus_to_exitcode(status)).encode())


def _become(order: dict[str, Any], *, stdin: int, output: int) -> list[str]:
    with contextlib.suppress(PermissionError):
        os.setpgid(0, 0)
    for number, fd in ((0, stdin), (1, output), (2, output)):
        os.dup2(fd, number)
    os.close(stdin)
    os.close(output)
    os.environ.clear()
    os.environ.update(order["env"])
    paths = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:0] = [path for path in paths if path not in sys.path]
    importlib.invalidate_caches()
    words: list[str] = order["words"]
    return words


if __name__ == "__main__":
    _words = main(socket.socket(fileno=int(sys.argv[1])))
    if _words is not None:
        sys.argv = list(_words)
        runpy.run_module(_words[0], run_name="__main__", alter_sys=True)
