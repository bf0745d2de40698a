"""Points in the library at which a test makes a process die, stop or wait, each once. No torch: agents import it."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import itertools
import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

_ENV = "PULL_HOOK"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hook:
    """What happens where.

    Attributes:
        at: "module:function" or "module:Class.method".
        do: "kill" (SIGKILL of this process), "stop" (SIGSTOP), "wait" (until the test says `check_cancelled`), "raise".
        path: a file that `set` made: it is gone when the hook was reached, so it fires once over all processes.
        nth: at which call.
        after: behind the call instead of before it.
    """

    at: str
    do: str
    path: str
    nth: int = 1
    after: bool = False

    def set(self) -> Hook:
        """The test's side: from now on the hook fires."""
        Path(self.path).write_text("")
        return self

    def reached(self, timeout_s: float = 20.0) -> None:
        """The test's side: waits until some process has come there."""
        end = time.monotonic() + timeout_s
        while os.path.exists(self.path):
            assert time.monotonic() < end, f"nobody came to {self.at}"
            time.sleep(0.002)

    def check_cancelled(self) -> None:
        """The test's side: whoever waits there goes on."""
        Path(self.path + ".go").write_text("")

    def arm(self) -> None:
        """The process's side: wraps the function."""
        module, _, name = self.at.partition(":")
        owner: Any = importlib.import_module(module)
        *parents, last = name.split(".")
        for parent in parents:
            owner = getattr(owner, parent)
        function = getattr(owner, last)
        calls, fired = itertools.count(1), threading.Event()

        @functools.wraps(function)
        def hooked(*args: Any, **options: Any) -> Any:
            number = next(calls)
            if not self.after:
                self._come(number, fired)
            result = function(*args, **options)
            if self.after:
                self._come(number, fired)
            return result

        setattr(owner, last, hooked)

    def _come(self, number: int, fired: threading.Event) -> None:
        if number < self.nth:
            return
        try:
            os.unlink(self.path)
        except FileNotFoundError:
            if self.do == "wait" and fired.is_set():
                self._wait()  # the other threads stand still as well
            return
        fired.set()
        match self.do:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)  # at once: this thread goes no further
            case "wait":
                self._wait()
            case "raise":
                raise RuntimeError(f"injected at {self.at}")

    def _wait(self) -> None:
        while not os.path.exists(self.path + ".go"):
            time.sleep(0.002)


def agents_env(hooks: list[Hook]) -> dict[str, str]:
    """The environment in which `python -m tests.multiproc.pull_hook` runs an agent with these hooks."""
    return {_ENV: json.dumps([dataclasses.asdict(hook) for hook in hooks])}


if __name__ == "__main__":
    for said in json.loads(os.environ[_ENV]):
        Hook(**said).arm()
    importlib.import_module("weightsync.agent.main").main()
