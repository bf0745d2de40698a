"""The command line explains itself."""

from __future__ import annotations

from typer.testing import CliRunner

from weightsync.cli import app


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


def test_version() -> None:
    code, text = run("--version")
    assert code == 0
    assert text.startswith("weightsync ")


def test_bad_options_are_refused_before_anything_starts() -> None:
    assert run("demo", "--steps", "0")[0] == 2
    code, text = run("demo", "--size", "huge")
    assert code == 2
    assert "small, tiny" in text
