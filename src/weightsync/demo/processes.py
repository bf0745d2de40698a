"""The demo's processes: started together, read line by line, and ended together; and how long one step is waited for.

A run has no limit: a slow machine takes longer.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import secrets
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, Self

import torch

from weightsync.errors import WeightSyncError

TOKEN_VARIABLE = "WEIGHTSYNC_DEMO_TOKEN"
_LOOK_S = 1.0
_FIRST_WORD_S = 5.0
_turn = threading.Lock()


def tell(message: dict[str, Any]) -> None:
    """Says something to who started this process: a JSON object, on a line of its own. From any thread."""
    with _turn:
        sys.stdout.write(json.dumps(message) + "\n")
        sys.stdout.flush()


def given() -> SimpleNamespace:
    """What `Processes.start` gave this process."""
    return SimpleNamespace(**json.loads(sys.argv[1]))


class DemoError(WeightSyncError):
    """A process of the demo failed; says which, and shows the end of what it wrote."""


class Processes:
    """Starts processes of the demo, hands out what they say, a JSON object a line, and leaves nobody behind.

    Args:
        step_timeout_s: how long nobody may say anything.
        say: told what is waited for, where that takes long.
    """

    def __init__(self, *, step_timeout_s: float, say: Callable[[str], None]) -> None:
        self._patience = Patience(step_timeout_s, say)
        self._stack = contextlib.ExitStack()
        self._lines: queue.SimpleQueue[tuple[str, str | None]] = queue.SimpleQueue()
        self.running: dict[str, subprocess.Popen[str]] = {}
        self._logs: dict[str, IO[str]] = {}
        self._killed: set[str] = set()
        self.token = secrets.token_urlsafe(24)
        self._environment = {
            **os.environ,
            TOKEN_VARIABLE: self.token,
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
        }

    def __enter__(self) -> Self:
        self.folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="weightsync-demo-")))
        self._stack.callback(self._end_all)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def next(self, waiting_for: str, *, look: Callable[[], None] | None = None) -> tuple[str, dict[str, Any]]:
        """Who says something next, and what; {"ended": True} of one that ended well, or was killed by `kill`.

        Args:
            waiting_for: for the error.
            look: called every second while nobody says anything; the answer is ("", {}) then.

        Raises:
            DemoError: nobody within the time, or one ended by itself that should not have.
        """
        while True:
            try:
                name, line = self._lines.get(timeout=_LOOK_S)
                break
            except queue.Empty:
                if self._patience.wait(waiting_for):
                    raise DemoError(f"no {waiting_for} within {self._patience.timeout_s:g} s {here()}") from None
                if look is not None:
                    look()
                    return "", {}
        self._patience.renew()
        if line is not None:
            return name, json.loads(line)
        code = self.running[name].wait()
        if name in self._killed:
            return name, {"ended": True}
        if code != 0 or name.startswith("engine"):
            self._logs[name].seek(0)
            tail = "".join(self._logs[name].readlines()[-15:])
            raise DemoError(f"{name} ended with code {code}; it wrote:\n{tail}", peer=name)
        return name, {"ended": True}

    def kill(self, name: str) -> None:
        """SIGKILL, as a node that dies."""
        self._killed.add(name)
        self.running[name].kill()

    def start(self, name: str, module: str, **given: Any) -> None:
        """Starts `python -m module`, which reads `given()`; its standard input closes when it has to end."""
        log = self._stack.enter_context((self.folder / f"{name}.log").open("w+"))
        process = subprocess.Popen(
            [sys.executable, "-m", module, json.dumps(given, default=str)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=self._environment,
        )
        self._patience.renew()
        self.running[name] = process
        self._logs[name] = log
        threading.Thread(target=self._read, args=(name, process), daemon=True).start()

    def _read(self, name: str, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                self._lines.put((name, line))
        self._lines.put((name, None))

    def _end_all(self) -> None:
        for process in self.running.values():
            if process.stdin is not None:
                with contextlib.suppress(OSError):
                    process.stdin.close()  # an engine ends by this
        for name, process in self.running.items():
            if name.startswith("trainer"):
                process.terminate()
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


class Patience:
    """The time that one step may take, and a word now and then while it is waited for.

    Args:
        timeout_s: of one step.
        say: gets the words: after 5 s, 10 s, 20 s and so on.
        clock: in seconds.
    """

    def __init__(
        self, timeout_s: float, say: Callable[[str], None], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.timeout_s = timeout_s
        self._say = say
        self._clock = clock
        self.renew()

    def renew(self) -> None:
        """A step was done; the next one has all the time again."""
        self._began_s = self._clock()
        self._next_word_s = _FIRST_WORD_S

    def wait(self, waiting_for: str) -> bool:
        """Says, where it is time to, what is waited for and for how long; whether that was too long."""
        waited_s = self._clock() - self._began_s
        if waited_s >= self._next_word_s:
            self._next_word_s *= 2
            self._say(f"waiting for {waiting_for}: {waited_s:.0f} s so far {here()}")
        return waited_s >= self.timeout_s


@contextlib.contextmanager
def patiently(waiting_for: str, say: Callable[[str], None]) -> Iterator[None]:
    """Says now and then what is waited for, beside a call that blocks and has a limit of its own."""
    patience, ended = Patience(float("inf"), say), threading.Event()

    def watch() -> None:
        while not ended.wait(1.0):
            patience.wait(waiting_for)

    thread = threading.Thread(target=watch, name="weightsync-demo-patience", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(5)


def here() -> str:
    """What may make a step slow on this machine, in brackets."""
    num_cores = len(os.sched_getaffinity(0))
    vectors = torch.backends.cpu.get_cpu_capability()
    if "AVX512" not in vectors:
        vectors += ", no AVX-512"
    return f"({num_cores} core{'s' * (num_cores > 1)}, {vectors}; load {os.getloadavg()[0]:.1f})"
