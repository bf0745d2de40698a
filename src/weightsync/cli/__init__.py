"""The `weightsync` command."""

from __future__ import annotations

import importlib.metadata
import os
import sys
from typing import Annotated

import typer

from weightsync.cli import check, controller, demo, doctor, pull, serve, status, trace, verify
from weightsync.cli.shared import BROKEN_PIPE, flowing

app = typer.Typer(
    help="Moves updated weights from a trainer to rollout engines, and says what of it is proved.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and end.")] = False,
) -> None:
    """Moves updated weights from a trainer to rollout engines, and says what of it is proved."""
    if version:
        print(f"weightsync {importlib.metadata.version('weightsync')}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        raise typer.Exit(2)


for _command in (serve, check, doctor, verify, demo, pull, controller, status, trace):
    _command.register(app)
for _known in app.registered_commands:
    assert _known.callback is not None
    _known.help = flowing(_known.callback.__doc__ or "")


def main() -> None:
    """Entry point. Who reads its output may have gone (`| head`): it ends then as by SIGPIPE, without a word."""
    try:
        try:
            app()
        finally:
            if sys.stdout is not None:  # it was closed before this began (`>&-`)
                sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left goes there when Python ends
        raise SystemExit(BROKEN_PIPE) from None


if __name__ == "__main__":
    main()
