"""Tables for a terminal: others' text in them moves no cursor and styles nothing."""

from __future__ import annotations

import sys
from collections.abc import Container, Iterable, Sequence
from typing import TYPE_CHECKING

from weightsync.cli.shared import plain

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_WIDTH_OF_A_PIPE = 160

Cell = str | tuple[str | None, str] | None
"""A text, or a text and its style."""


def console() -> Console:
    """Standard output: as wide as the terminal, or as a log bears."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else _WIDTH_OF_A_PIPE)


def table(title: str, heads: Sequence[str], rows: Iterable[Sequence[Cell]], *, right: Container[str] = ()) -> Table:
    """A table with a bold first column.

    Args:
        title: above it.
        heads: of the columns.
        rows: of cells.
        right: heads of the columns whose cells stand at the right.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    made = Table(
        title=Text(plain(title), style="bold"), title_justify="left", header_style="dim", box=box.SIMPLE_HEAD,
        show_edge=False, pad_edge=False, padding=(0, 1, 0, 0),
    )  # fmt: skip
    for index, head in enumerate(heads):
        made.add_column(
            plain(head), justify="right" if head in right else "left", overflow="fold", style="" if index else "bold"
        )
    for row in rows:
        styled = [cell if isinstance(cell, tuple) else (cell, "") for cell in row]
        made.add_row(*(Text(plain(text or ""), style=style) for text, style in styled))
    return made
