"""The `weightsync` command."""

from __future__ import annotations

import errno
import importlib.metadata
import os
import sys
from typing import Annotated

import typer

from weightsync.cli import check, controller, demo, doctor, export, inspect, pull, serve, status, trace, verify
from weightsync.cli.shared import BROKEN_PIPE, flowing, is_terminal, signals_end_waits

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
    rich_markup_mode="rich" if is_terminal() else None,  # its boxes cut words, and are as wide as a terminal
)


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and end.")] = False,
) -> None:
    """Moves updated weights from a trainer to rollout engines, and says what of it is proved.

    Exit codes: 0: it is done, or all is well. 1: it failed, or something is wrong. 2: what you gave is: an option, a
    file, a URL or a token. 3, of status and verify: nobody can tell. 130: Ctrl-C came before it was done. 141: who
    reads the output has gone.

    Ctrl-C is how serve, controller and agent are ended: they end with 0. status --watch ends with the code of what it
    showed last.
    """
    if version:
        print(f"weightsync {importlib.metadata.version('weightsync')}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        raise typer.Exit(2)


for _command in (
    serve.serve, check.check, doctor.doctor, verify.verify, demo.demo, pull.agent, pull.pull, export.export,
    export.keygen, inspect.inspect, controller.controller, status.status, trace.trace,
):  # fmt: skip
    _help = flowing(_command.__doc__ or "")
    app.command(help=_help, short_help=_help.partition("\n\n")[0])(_command)


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""What writing to a file can fail with; commands give typed errors of all other files."""


def main() -> None:
    """Entry point. Who reads its output may have gone (`| head`): it ends then as by SIGPIPE, without a word."""
    signals_end_waits()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # names that the terminal's encoding can't say
    output = sys.stdout
    if output is None:  # it was closed before this began (`>&-`)
        app()
        return
    before = os.fstat(output.fileno())
    try:
        try:
            app()
        finally:
            output.flush()
            # a pipe that typer or rich found broken has something else in its place, and they end with 1
            if sys.stdout is not output or not os.path.samestat(before, os.fstat(output.fileno())):
                raise BrokenPipeError
    except OSError as error:
        if not isinstance(error, BrokenPipeError) and error.errno not in _FULL:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), output.fileno())  # what is left goes there when Python ends
        if isinstance(error, BrokenPipeError):
            raise SystemExit(BROKEN_PIPE) from None
        raise SystemExit(f"weightsync: the output can't be written: {error.strerror}") from None
