"""The demo's live table, and plain lines where there is no terminal."""

from __future__ import annotations

from types import TracebackType

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from weightsync.demo.summary import StepRow

PHASES = ("extract", "pack", "share", "transfer", "load", "verify", "commit")
PULL_PHASES = ("offload", "prove", "pull", "load", "verify", "commit")
DELTA_PHASES = ("offload", "prove", "pull", "load", "commit")
_PHASES_FROM_COLUMNS = 118
_DELTA_HEADS = ("changed\n%", "sent\n%")
_NOTE = "Losses are of the same held-out text. Phases are summed over processes, and they overlap."


class StepTable:
    """Shows a row for each step as it comes. A context manager.

    On a terminal one table is redrawn in place; elsewhere (a pipe, a log) each row is one line.

    Args:
        console: where to write; by default standard output.
        phases: which phases have a column.
        deltas: whether there are columns for what deltas save.
    """

    def __init__(
        self, console: Console | None = None, *, phases: tuple[str, ...] = PHASES, deltas: bool = False
    ) -> None:
        self.console = console or Console()
        self._phases = phases
        self._deltas = deltas
        self._rows: list[StepRow] = []
        self._status = ""
        self._live: Live | None = None
        self._wrote_header = False

    def __enter__(self) -> StepTable:
        if self.console.is_terminal:
            self._live = Live(console=self.console, get_renderable=self._render, refresh_per_second=4)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._status = ""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def add(self, row: StepRow) -> None:
        """Shows one more step; what was going on before it is over."""
        self._rows.append(row)
        self._status = ""
        if self._live is not None:
            self._live.refresh()
            return
        if not self._wrote_header:
            self._print(plain_header(self._phases, deltas=self._deltas))
            self._wrote_header = True
        self._print(plain_line(row, self._phases, deltas=self._deltas))

    def status(self, text: str) -> None:
        """Shows what is going on now, below the table; in a log, as a line."""
        self._status = text
        if self._live is not None:
            self._live.refresh()
        else:
            self._print(text)

    def _print(self, line: str) -> None:
        self.console.print(Text(line), soft_wrap=True, highlight=False)

    def _render(self) -> Group:
        table = build_table(self._rows, width=self.console.width, phases=self._phases, deltas=self._deltas)
        parts: list[Table | Text] = [table]
        parts.append(Text(self._status or _NOTE, style="dim"))
        return Group(*parts)


def build_table(rows: list[StepRow], *, width: int, phases: tuple[str, ...] = PHASES, deltas: bool = False) -> Table:
    """The table of all rows; on narrow terminals one column, the whole sync, stands for the phases."""
    wide = width >= _PHASES_FROM_COLUMNS
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    heads = {"ver": 3, "trainer\nloss": 7, "engine\nloss": 6, "gap": 6, "MB": 6}
    heads |= dict.fromkeys(_DELTA_HEADS if deltas else (), 7)
    heads |= {f"{name}\nms": max(5, len(name)) for name in (phases if wide else ("sync",))}
    heads |= {"paused\nms": 6}
    # Rich would shrink every column for the sake of a long sample, so widths are ours and the sample gets the rest.
    for head, columns in heads.items():
        table.add_column(head, justify="right", no_wrap=True, width=columns)
    table.add_column("digests\nequal", no_wrap=True, width=10)
    rest = max(8, width - sum(heads.values()) - 10 - 2 * (len(heads) + 2))
    table.add_column("engine\nwrites", no_wrap=True, overflow="ellipsis", width=rest)
    for row in rows:
        timed = [_ms(row.phases_s.get(name)) for name in phases] if wide else [_ms(row.sync_s)]
        table.add_row(
            str(row.version), f"{row.trainer_loss:.3f}", f"{row.engine_loss:.3f}", f"{row.loss_gap:.4f}",
            _mb(row), *(_of_delta(row) if deltas else ()), *timed, _ms(row.paused_s),
            digest_text(row.digests_equal), Text(one_line(row.sample)),
        )  # fmt: skip
    return table


def digest_text(digests_equal: bool | None) -> Text:
    """The answer as a word that also has a colour."""
    if digests_equal is None:
        return Text("unprovable", style="yellow")
    return Text("yes", style="green") if digests_equal else Text("NO", style="bold white on red")


def plain_header(phases: tuple[str, ...] = PHASES, *, deltas: bool = False) -> str:
    """The header over `plain_line`s."""
    timed = "".join(f"{name + ' ms':>12}" for name in phases)
    head = f"{'version':>7}{'trainer loss':>14}{'engine loss':>13}{'gap':>8}{'MB':>8}"
    saved = "".join(f"{' '.join(name.split()):>11}" for name in _DELTA_HEADS) if deltas else ""
    return f"{head}{saved}{timed}{'paused ms':>11}  {'digests':<11}sample"


def plain_line(row: StepRow, phases: tuple[str, ...] = PHASES, *, deltas: bool = False) -> str:
    """One row as one line of text."""
    timed = "".join(f"{_ms(row.phases_s.get(name)):>12}" for name in phases)
    head = f"{row.version:>7}{row.trainer_loss:>14.3f}{row.engine_loss:>13.3f}{row.loss_gap:>8.4f}{_mb(row):>8}"
    paused = f"{_ms(row.paused_s):>11}"
    saved = "".join(f"{text:>11}" for text in _of_delta(row)) if deltas else ""
    return f"{head}{saved}{timed}{paused}  {digest_text(row.digests_equal).plain:<11}{one_line(row.sample)}"


def one_line(text: str) -> str:
    """The text with every control character made visible, so that a model's output can't move the cursor."""
    return "".join(char if char.isprintable() else _visible(char) for char in text)


def _visible(char: str) -> str:
    escaped = char.encode("unicode_escape").decode("ascii")
    return {"\n": "⏎", "\t": "→"}.get(char, escaped)


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.1f}" if seconds < 0.01 else f"{seconds * 1000:.0f}"


def _of_delta(row: StepRow) -> tuple[str, str]:
    """What changed and what was sent, in percent of the model."""
    if row.density is None or row.received_bytes is None:
        return "-", "full"
    return f"{100 * row.density:.3f}", f"{100 * row.received_bytes / row.total_bytes:.3f}"


def _mb(row: StepRow) -> str:
    return f"{row.total_bytes / 1e6:.1f}"
