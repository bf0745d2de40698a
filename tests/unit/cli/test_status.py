"""`weightsync status`: what it shows, and the exit codes that scripts live on."""

from __future__ import annotations

import contextlib
import itertools
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from tests.standins.processes import free_port
from tests.unit.control import statuses
from tests.unit.control.statuses import HOSTILE, StatusServer, instance, model, status, sync
from weightsync.cli.shared import in_words
from weightsync.cli.status import status as command
from weightsync.errors import AuthError, SignatureError, StoreAuthError, WeightSyncError
from weightsync.net.messages import decode
from weightsync.types.control import ControllerStatus

TOKEN = "a-token-for-tests-only"
LISTENS = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
"""To Ctrl-C, though whoever started the tests in the background had it ignored."""
CALL = "import typer; from weightsync.cli.status import status; a = typer.Typer(); a.command()(status); a()"


def run(*words: str, **env: str) -> tuple[int, str, str]:
    app = typer.Typer()
    app.command()(command)
    plain = {"COLUMNS": "200", "TERM": "dumb", "NO_COLOR": "1", "WEIGHTSYNC_TOKEN": "", **env}
    result = CliRunner().invoke(app, list(words), env={name: value or None for name, value in plain.items()})
    return result.exit_code, result.stdout, result.stderr


def test_help_teaches() -> None:
    code, text, _ = run("--help")
    assert code == 0
    for word in ("--watch", "--json", "--token-file", "Exit codes", "no controller answers", "jq"):
        assert word in text


def test_all_is_well() -> None:
    with StatusServer(status()) as server:
        code, text, error = run(server.url)
    assert (code, error) == (0, "")
    assert text.startswith("All 3 instances serve actor 12, verifier 12\n")
    for word in ("Models", "batch-async", statuses.RUN, "Fleet", "inst-2", "4.6 s", "Last syncs", "actor 12"):
        assert word in text
    assert "Sets that wait" not in text
    assert "transfer inst-2 1.2 s, trainer actor 0.5 s, barrier verifier 0.4 s" in text


@pytest.mark.parametrize(
    ("now", "code"),
    [
        (statuses.nothing_yet(), 0),
        (statuses.waiting(), 0),
        (status(instances=(instance("a", 12, state="joining"),)), 0),
        (statuses.failed(), 1),
        (statuses.evicted(), 1),
        (statuses.dark(), 1),
        (statuses.hundred(), 1),
        (status(instances=(instance("a", 12, state="suspect"),)), 1),
        (status(instances=(instance("a", 12, gone=("e1",)),)), 1),
        (status(models={"actor": model(14, 12, overdue=True)}), 1),
        (status(syncs=(sync(12, outcome="failed"),)), 1),
        (statuses.hostile(), 1),
    ],
)
def test_exit_codes(now: ControllerStatus, code: int) -> None:
    with StatusServer(now) as server:
        assert run(server.url)[0] == code
        found, text, _ = run(server.url, "--json")
    assert found == code, "the same in JSON"
    assert decode(text.encode(), ControllerStatus, what="it") == now


def test_what_is_wrong_is_shown_first_and_in_full() -> None:
    with StatusServer(statuses.failed()) as server:
        text = run(server.url)[1]
    assert text.startswith(
        "actor: the sync of version 13 failed 2 times, rollout waits (next try in 2.0 s: EngineError"
    )
    assert "sync is due, failed 2 in a row" in text
    with StatusServer(statuses.hundred()) as server:
        lines = run(server.url)[1].splitlines()
    fleet = lines[next(index for index, line in enumerate(lines) if line.startswith("Fleet")) :]
    names = [found[1] for line in fleet if (found := re.match(r" *(rollout-[0-9]+) ", line))]
    assert len(names) == 100
    assert names[:3] == ["rollout-63", "rollout-17", "rollout-40"]
    assert "11, 1 behind" in fleet[3]
    assert "run-old/9" in fleet[5]
    with StatusServer(statuses.waiting()) as server:
        text = run(server.url)[1]
    assert "Waiting for verifier to publish 13 (4.0 s of 60 s)" in text
    assert "actor 13, verifier 12" in text


def test_an_error_is_said_once_and_rows_have_room() -> None:
    """Seen red: one dead engine gave the same nested errors, with all facts, in each of eight rows."""
    gone = "EngineUnreachableError: can't connect to http://127.0.0.1:8000: refused; does an engine run there?"
    facts = "[peer=e] [peer=http://127.0.0.1:9000, version=r/2, state_left=engines that failed serve their old version]"
    error = f"SyncFailedError: 1 of 1 instances failed: one: SyncFailedError: e: {gone} {facts}"
    syncs = tuple(sync(version, outcome="failed", error=error) for version in (5, 4, 3))
    other = sync(2, outcome="failed", error="NoEnginesError: no rollout service takes part")
    late = model(5, 1, overdue=True, last_error=error)
    there = instance("one", 1, why=f"{gone} {facts}; {error}")
    now = status(models={"actor": late}, instances=(there,), syncs=(*syncs, other, syncs[0], sync(1), sync(0)))
    with StatusServer(now) as server:
        first, _, rows = run(server.url, COLUMNS="400")[1].partition("\n\n")
    assert "state_left" not in first
    lines = [line.rstrip() for line in rows.splitlines() if "─" not in line]
    ends = [line for line in lines if line.startswith("actor 5 ")]
    assert all("1 of 1 instances failed: one: e: EngineUnreachableError: can't connect" in end for end in ends)
    assert len(ends) == 2
    assert [line.endswith("as before") for line in lines if re.match("actor [0-9] ", line)] == [
        False, True, True, False, False, False, False,
    ]  # fmt: skip
    assert "state_left" not in rows
    assert max(map(len, lines)) <= 260
    with StatusServer(now) as server:
        assert run(server.url, "--json")[1].count("state_left") == 7


def test_nothing_of_a_run_is_behind_by_all_of_it() -> None:
    """Seen red: trained 3, served none, behind 4."""
    with StatusServer(status(models={"actor": model(3, -1)})) as server:
        assert re.search(r"actor +batch-async +run-a1b2c3 +3 +none +all +running", run(server.url)[1])


def test_of_a_dark_fleet_nothing_goes_on() -> None:
    with StatusServer(statuses.dark()) as server:
        text = run(server.url)[1]
    assert text.startswith("actor: nobody answers\n")
    assert re.search(r"overdue +nobody answers", text)
    assert "goes on" not in text


def test_names_can_not_move_the_cursor_or_style_the_table() -> None:
    bad = "\x1b[2J\x07[red]red[/red]\r\n"
    now = status(instances=(instance(bad, 12, why=bad),), models={bad: model(12, last_error=bad)})
    with StatusServer(now) as server:
        _, text, _ = run(server.url)
    assert not any(char in text for char in "\x1b\x07\r")
    assert "[red]" in text
    with StatusServer(statuses.hostile()) as server:
        assert HOSTILE in run(server.url)[1]


def test_no_controller_is_3_and_a_wrong_call_is_2(tmp_path: Path) -> None:
    with StatusServer(status()) as server:
        code, text, _ = run(server.url, "--json", "--watch")
        assert (code, text) == (2, "")
    code, text, error = run(server.url)
    assert (code, text) == (3, "")
    assert "does a weightsync controller, rollout service, agent or engine run there?" in error
    assert run("localhost:80")[0] == 2
    assert run(server.url, "--every-s", "0", "--watch")[0] == 2
    with StatusServer(status()) as server:  # something else answers there
        code, _, error = run(f"{server.url}/page.js#")
        assert code == 3, error


def test_a_place_without_a_scheme_is_told_what_to_write() -> None:
    """Seen red: it was told how a URL begins."""
    code, _, error = run("127.0.0.1:18100")
    assert (code, error.strip().endswith("not '127.0.0.1:18100': write http://127.0.0.1:18100")) == (2, True), error


def test_tokens(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    with StatusServer(status(), token=TOKEN) as server:
        code, text, error = run(server.url)
        assert (code, text) == (2, "")
        assert "AuthError" in error
        assert TOKEN not in error
        assert "; give it by --token or the variable WEIGHTSYNC_TOKEN" in error, "seen red: how was not said"
        assert run(server.url, "--token", "another-token-that-is-wrong")[0] == 2
        assert run(server.url, "--token-file", str(file))[0] == 0
        assert run(server.url, WEIGHTSYNC_TOKEN=TOKEN)[0] == 0
        file.write_text("")
        assert run(server.url, "--token-file", str(file))[0] == 2
        assert run(server.url, "--token-file", str(tmp_path / "none"))[0] == 2


@pytest.mark.parametrize("error", [StoreAuthError("it is refused"), SignatureError("it is not signed")], ids=repr)
def test_what_no_token_mends_is_given_none(error: WeightSyncError) -> None:
    """Seen red: whose cloud credential had expired was told to give it by --token."""
    assert "--token" not in in_words(error)
    assert "--token" in in_words(AuthError("it is refused"))


def test_watch_into_a_pipe_shows_one_look_after_the_other_and_ends_with_its_reader() -> None:
    """Seen red: it said nothing until Ctrl-C, and went on when its reader had gone."""
    with StatusServer(status()) as server:
        command = [sys.executable, "-m", "weightsync.cli", "status", server.url, "--watch", "--every-s", "0.1"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert process.stderr is not None
        looks = [line for line in itertools.islice(process.stdout, 60) if line.startswith("All 3 instances serve")]
        assert len(looks) >= 2
        process.stdout.close()
        assert process.wait(60) == 141
        assert process.stderr.read() == ""
        process.stderr.close()


class Watched:
    """`weightsync status --watch` on a terminal."""

    def __init__(self, url: str) -> None:
        self._screen, theirs = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", LISTENS + CALL, url, "--watch", "--every-s", "0.1"],
            stdin=theirs, stdout=theirs, stderr=theirs,
            env={**os.environ, "COLUMNS": "160", "TERM": "xterm"},
        )  # fmt: skip
        os.close(theirs)
        self._text = ""

    def until(self, words: str, *, timeout_s: float = 30.0) -> None:
        """Reads until the words come; what came before is forgotten."""
        end = time.monotonic() + timeout_s
        while words not in self._text:
            left_s = end - time.monotonic()
            assert left_s > 0, f"no {words!r} in {self._text!r}"
            if select.select([self._screen], [], [], left_s)[0]:
                self._text += os.read(self._screen, 65536).decode(errors="replace")
        self._text = self._text.split(words, 1)[1]

    def close(self) -> int:
        """As Ctrl-C does. A terminal reads on: one that is full stops whoever writes to it."""
        self.process.send_signal(signal.SIGINT)
        end = time.monotonic() + 30
        try:
            while (code := self.process.poll()) is None:
                assert time.monotonic() < end, "it goes on"
                if select.select([self._screen], [], [], 0.1)[0]:
                    with contextlib.suppress(OSError):  # it has been closed there
                        os.read(self._screen, 65536)
            return code
        finally:
            self.process.kill()
            os.close(self._screen)


def test_watching_follows_the_controller_and_its_loss() -> None:
    port = free_port()
    with StatusServer(status(), port=port) as server:
        watched = Watched(server.url)
        watched.until("All 3 instances serve actor 12")
        server.now = statuses.evicted()
        watched.until("1 of 3 instances is evicted: inst-2")
    watched.until("No answer since")
    watched.until("1 of 3 instances is evicted: inst-2")
    with StatusServer(status(), port=port):
        watched.until("All 3 instances serve actor 12")
        assert watched.close() == 0


def test_watching_ends_with_the_code_of_what_it_showed() -> None:
    with StatusServer(statuses.evicted()) as server:
        first, second = Watched(server.url), Watched(server.url)
        for watched in (first, second):
            watched.until("1 of 3 instances is evicted: inst-2")
        assert first.close() == 1
    second.until("No answer since")
    assert second.close() == 3
