"""The `weightsync` command."""

from __future__ import annotations

import importlib.metadata
from typing import Annotated

import typer

from weightsync.cli import check, controller, demo, doctor, pull, serve, status, trace, verify
from weightsync.cli.shared import flowing

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
    """Entry point."""
    app()


if __name__ == "__main__":
    main()
