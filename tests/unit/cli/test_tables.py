"""Tables: no word is cut, at a terminal of 80 columns or in a pipe."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from weightsync.cli.tables import console, table

RUN = "run-0123456789ab/12"
WHY = "EngineUnreachableError: can't connect to http://trainer-0.some.where.example:8765: refused; does it run there?"
HEADS = ("model", "served", "from", "state", "engines", "last error")
ROWS = [
    ("actor", RUN, "http://trainer-0.example:8765", "idle", f"http://127.0.0.1:8000 {RUN}", WHY),
    ("verifier", None, None, ("pulling", "yellow"), "", None),
]


def shown(width: int, title: str = "Models") -> list[str]:
    out = Console(file=io.StringIO(), width=width, markup=False)
    out.print(table(title, HEADS, ROWS))
    assert isinstance(out.file, io.StringIO)
    return [line.rstrip() for line in out.file.getvalue().splitlines()]


def test_a_terminal_that_is_too_narrow_has_a_line_for_each_cell() -> None:
    """Seen red with a run's id on two lines, in a column of 14."""
    lines = shown(80)
    assert max(map(len, lines)) <= 80
    assert lines[0] == "Models"
    for word in (RUN, "http://trainer-0.example:8765", "http://trainer-0.some.where.example:8765:", "verifier"):
        assert any(word in line for line in lines), word
    assert [line.split() for line in lines if line.startswith("state")] == [["state", "idle"], ["state", "pulling"]]
    assert sum(line.startswith("from") for line in lines) == 1, "an empty cell has no line"


def test_a_wide_one_has_columns() -> None:
    lines = shown(400)
    assert lines[1].split() == ["model", "served", "from", "state", "engines", "last", "error"]
    assert WHY in lines[3]


def test_a_title_is_as_wide_as_it_is() -> None:
    """Seen red: it was broken at the width of the table below it."""
    out = Console(file=io.StringIO(), width=400)
    out.print(table(f"{RUN} in /a/folder/of/a/long/name", ("a", "b"), [("1", "2")]))
    assert isinstance(out.file, io.StringIO)
    assert out.file.getvalue().splitlines()[0] == f"{RUN} in /a/folder/of/a/long/name"


def test_a_pipe_has_a_line_for_each_sentence_and_takes_no_text_for_a_style(capsys: pytest.CaptureFixture[str]) -> None:
    """Seen red: lines ended after 160 columns."""
    text = f"{WHY} [peer=x] " * 20
    out = console()
    out.print(text)
    out.print(table("Models", HEADS, [("actor", RUN, "", "idle", "", text)]))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].rstrip() == text.rstrip()
    assert lines[-1].split(" idle")[1].strip() == text.rstrip()
