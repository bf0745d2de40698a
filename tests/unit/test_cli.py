"""The command line explains itself."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from weightsync.cli import app
from weightsync.cli.shared import flowing


def run(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(words), env={"COLUMNS": "200", "TERM": "dumb", "NO_COLOR": "1"})
    return result.exit_code, result.output


def test_help_names_every_command_and_option() -> None:
    code, text = run("--help")
    assert code == 0
    assert "demo" in text
    code, text = run("demo", "--help")
    assert code == 0
    for word in ("--steps", "--json", "--out", "--engines", "--ranks", "--size", "exits with 1"):
        assert word in text


def test_a_demo_is_not_run_for_a_file_that_cannot_be_written() -> None:
    """Seen red after all its steps."""
    code, text = run("demo", "--json", "/no/such/folder/summary.json")
    assert (code, "there is no folder /no/such/folder" in text) == (2, True)


def test_a_mistake_is_said_without_a_box_in_a_pipe() -> None:
    """Seen red: a path that is longer than a line was cut."""
    path = "/a/folder/of/a/very/long/name/indeed/that/no/line/holds/and/another/one/no-such-file.yaml"
    command = [sys.executable, "-m", "weightsync.cli", "controller", "--config", path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == f"Error: Invalid value for '--config': path '{path}' does not exist."


def test_version() -> None:
    code, text = run("--version")
    assert code == 0
    assert text.startswith("weightsync ")


def test_bad_options_are_refused_before_anything_starts() -> None:
    assert run("demo", "--steps", "0")[0] == 2
    code, text = run("demo", "--size", "huge")
    assert code == 2
    assert "small, tiny" in text


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("demo --models 3", "--models"),
        ("demo --models 2", "--models"),
        ("demo --mode sync", "--mode"),
        ("demo --lr 0.1", "--lr"),
        ("demo --fleet 3 --ray", "--ray"),
        ("demo --fleet 3 --out x --ranks 2", "--ranks, --out"),
        ("demo --fleet 3 --deadline-s 5", "--deadline-s"),
        ("status http://127.0.0.1:9 --every-s 2", "--every-s"),
    ],
)
def test_an_option_that_would_do_nothing_is_refused_by_its_name(words: str, named: str) -> None:
    """Seen to fail: the demo ran on without a word, for minutes, as if it had not been given."""
    code, text = run(*words.split())
    assert code == 2
    assert f"ConfigError: {named} would do nothing" in text
    assert f"leave out {named}" in text


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("controller --config FILE --key FILE", "--certificate is missing"),
        ("controller --config FILE --certificate FILE", "--key is missing"),
        ("demo --fleet 1", "--fleet 2 or more, not 1"),
        ("status http://127.0.0.1:9 --token 0123456789abcdef --token-file x", "give one of them"),
    ],
)
def test_a_refusal_says_what_to_do(words: str, says: str) -> None:
    code, text = run(*(__file__ if word == "FILE" else word for word in words.split()))
    assert code == 2
    assert says in text


def test_the_demo_leaves_the_log_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever ran it in a process of theirs heard no warning any more."""
    levels: list[int] = []
    logger = logging.getLogger("weightsync")
    before = logger.level
    monkeypatch.setattr("weightsync.demo.fleet.run_fleet", lambda options: levels.append(logger.level) or 0)
    assert run("demo", "--fleet", "2")[0] == 0
    assert (levels, logger.level) == ([logging.ERROR], before)


STOPS = """
import os, signal, sys, threading
from weightsync.cli.shared import stop_event

for turn in range(300):
    stop = {made}
    threading.Timer(0.001, lambda: os.kill(os.getpid(), signal.SIGTERM)).start()  # while it waits
    while not stop.wait(0.0):
        pass
    os.write(1, b".")
"""
"""A wait that a signal ends, again and again; it comes at any of the wait's own steps."""


def test_a_signal_ends_a_wait_wherever_it_finds_it() -> None:
    """Seen to hang with an event that the handler itself sets: it waits for the lock that the wait holds."""
    done = subprocess.run(
        [sys.executable, "-c", STOPS.format(made="stop_event()")], capture_output=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, b"." * 300), done.stderr[-2000:]


ELSEWHERE = """
import os, signal, threading
from weightsync.cli.shared import stop_event

stop = stop_event()
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # so that another thread is given it
threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGTERM)).start()
print(stop.wait(20))
"""


def test_a_signal_ends_a_wait_that_the_system_does_not_interrupt() -> None:
    """As one that comes the moment before the wait begins, or that another thread is given."""
    done = subprocess.run([sys.executable, "-c", ELSEWHERE], capture_output=True, timeout=60, check=False)
    assert done.stdout == b"True\n", done.stderr[-2000:]


FORKS = """
import os, signal
from weightsync.cli.shared import stop_event

stop = stop_event()
listens, says = os.pipe()
if not (child := os.fork()):
    os.write(says, b".")
    signal.sigwait([signal.SIGUSR1])
    os._exit(0)
os.read(listens, 1)
os.kill(child, signal.SIGTERM)
os.kill(child, signal.SIGUSR1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM, stop.is_set())
"""


def test_a_signal_to_a_child_that_was_forked_ends_the_child_alone() -> None:
    """Seen red: the child wrote into its parent's pipe, went on, and the parent ended."""
    done = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, timeout=60, check=False)
    assert done.stdout == b"True False\n", done.stderr[-2000:]


FORKS_AT_ONCE = """
import os, signal
at_once = lambda: os.kill(os.getpid(), signal.SIGTERM)
os.register_at_fork(after_in_child=at_once)  # the first of all: before the child has handlers of its own
from weightsync.cli.shared import stop_event

stop = stop_event()
if not (child := os.fork()):
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM, stop.wait(0.2))
at_once()
print(stop.wait(20))
"""


def test_a_signal_to_a_child_at_its_first_moment_ends_the_child_alone() -> None:
    """Seen red: it came before the child had let go of its parent's pipe."""
    done = subprocess.run([sys.executable, "-c", FORKS_AT_ONCE], capture_output=True, timeout=60, check=False)
    assert done.stdout == b"True False\nTrue\n", done.stderr[-2000:]


@pytest.mark.parametrize(
    "words", [("--version",), ("--help",), ("doctor",), ("controller", "--example"), ("inspect", "weights.safetensors")]
)
def test_a_reader_that_has_gone_is_no_error(words: tuple[str, ...], tmp_path: Path) -> None:
    """`weightsync ... | head`. Seen red with a traceback, and with 1, which means that something is wrong."""
    save_file({"a": torch.zeros(1)}, tmp_path / "weights.safetensors")
    reads, writes = os.pipe()
    os.close(reads)
    with open(writes, "wb") as nobody:
        command = [sys.executable, "-m", "weightsync.cli", *words]
        done = subprocess.run(command, stdout=nobody, stderr=subprocess.PIPE, timeout=120, check=False, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.parametrize(
    ("words", "code"),
    [(("--version",), 0), (("status", "http://127.0.0.1:9"), 3), (("inspect", "weights.safetensors"), 0)],
)
def test_an_output_that_was_closed_changes_no_exit_code(words: tuple[str, ...], code: int, tmp_path: Path) -> None:
    """`weightsync ... >&-`. Seen red: 1, with an AttributeError."""
    save_file({"a": torch.zeros(1)}, tmp_path / "weights.safetensors")
    shell = ["/bin/sh", "-c", 'exec "$@" >&-', "sh", sys.executable, "-m", "weightsync.cli", *words]
    done = subprocess.run(shell, stderr=subprocess.PIPE, timeout=120, check=False, cwd=tmp_path)
    assert (done.returncode, b"Traceback" in done.stderr) == (code, False), done.stderr[-2000:]


def test_an_agent_serves_though_its_standard_error_was_closed(tmp_path: Path) -> None:
    """As a supervisor may start it, or a trainer. Seen red: "the agent ended before it could serve"."""
    save_file({"a": torch.zeros(1)}, tmp_path / "weights.safetensors")
    command = [sys.executable, "-m", "weightsync.cli", "agent", str(tmp_path), "--port", "0"]
    shell = ["/bin/sh", "-c", 'exec "$@" 2>&-', "sh", *command]
    with subprocess.Popen(shell, stdout=subprocess.PIPE, text=True) as process:
        late = threading.Timer(120.0, process.kill)
        late.start()
        assert process.stdout is not None
        try:
            assert process.stdout.readline().startswith(f"serving {tmp_path} as model 'model' at http://")
            assert " is published: " in process.stdout.readline()
            process.terminate()
            assert process.wait(60) == 0
        finally:
            late.cancel()
            process.kill()


CHILD_GONE = """
import subprocess
from weightsync.cli.shared import told
with told():
    child = subprocess.Popen(["true"], stdin=subprocess.PIPE, bufsize=0)
    child.wait()
    child.stdin.write(b".")
"""


def test_a_pipe_to_a_child_that_has_gone_is_told() -> None:
    """As of the demo to an engine. Seen red: it ended with 141, as if its own reader had gone, and without a word."""
    done = subprocess.run([sys.executable, "-c", CHILD_GONE], capture_output=True, timeout=60, check=False)
    assert b"BrokenPipeError: [Errno 32] Broken pipe" in done.stderr


def test_help_flows_in_a_narrow_terminal() -> None:
    """Seen red: a docstring's own line breaks stayed, and every second line was a few words."""
    assert flowing("One\nline.\n\n  $ code\n  $ more\n\nTwo\nlines.") == "One line.\n\n  $ code\n  $ more\n\nTwo lines."
    for command in app.registered_commands:
        for part in str(command.help).split("\n\n"):
            assert "\n" not in part or part.startswith(" "), part
