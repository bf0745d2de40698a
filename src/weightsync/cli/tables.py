"""Tables for a terminal: others' text in them moves no cursor, styles nothing, and is never cut."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from weightsync.cli.shared import is_terminal, plain

_ANY_WIDTH = 1 << 20
"""Of what is no terminal: each row, and each sentence, is one line."""

Cell = str | tuple[str | None, str] | None
"""A text, or a text and its style."""


class _Table(Table):
    """One whose words are wider than the terminal is a list of its rows instead, a line for each cell.

    Args:
        heading: above it, and as wide as it is.
    """

    def __init__(self, heading: Text, **options: Any) -> None:
        super().__init__(**options)
        self._heading = heading

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self._heading
        if Measurement.get(console, options.update_width(_ANY_WIDTH), self).minimum <= options.max_width:
            yield from super().__rich_console__(console, options)
            return
        heads = [str(column.header) for column in self.columns]
        wide = max(map(len, heads))
        for row in zip(*(column.cells for column in self.columns), strict=True):
            yield Text("─" * options.max_width, style="dim")
            for head, cell in zip(heads, row, strict=True):
                if str(cell):
                    yield Text.assemble((head.ljust(wide + 2), "dim"), cell)


def console() -> Console:
    """Standard output: as wide as the terminal; of a pipe no line is broken. No text is taken for a style."""
    return Console(width=None if is_terminal() else _ANY_WIDTH, markup=False, highlight=False)


def table(title: str, heads: Sequence[str], rows: Iterable[Sequence[Cell]], *, right: Container[str] = ()) -> Table:
    """A table with a bold first column.

    Args:
        title: above it.
        heads: of the columns.
        rows: of cells.
        right: heads of the columns whose cells stand at the right.
    """
    made = _Table(
        Text(plain(title), style="bold"), header_style="dim", box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False,
        padding=(0, 1, 0, 0),
    )  # fmt: skip
    for index, head in enumerate(heads):
        made.add_column(
            plain(head), justify="right" if head in right else "left", overflow="fold", style="" if index else "bold"
        )
    for row in rows:
        styled = [cell if isinstance(cell, tuple) else (cell, "") for cell in row]
        made.add_row(*(Text(plain(text or ""), style=style) for text, style in styled))
    return made
