"""The demo's table: a line a step, in a terminal and in a log alike."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from weightsync.demo.summary import StepRow

PHASES = ("extract", "pack", "share", "transfer", "load", "verify", "commit")
PULL_PHASES = ("offload", "prove", "pull", "load", "verify", "commit")
DELTA_PHASES = ("offload", "prove", "pull", "load", "commit")
_NARROW = 170
"""A terminal with fewer columns shows the time of the whole sync in place of the phases."""
_DELTA_HEADS = ("changed %", "sent %")
_NOTE = "Losses are of the same held-out text. Phases are summed over processes, and they overlap."


class StepTable:
    """Shows a row for each step as it comes.

    Args:
        phases: which phases have a column.
        deltas: whether there are columns for what deltas save.
    """

    def __init__(self, console: Console, *, phases: tuple[str, ...] = PHASES, deltas: bool = False) -> None:
        self.console = console
        narrow = self.console.is_terminal and self.console.width < _NARROW
        self._phases = ("sync",) if narrow else phases
        self._deltas = deltas
        self._wrote_header = False

    def add(self, row: StepRow) -> None:
        if not self._wrote_header:
            self.status(_NOTE)
            self._print(Text(header(self._phases, deltas=self._deltas), style="bold"))
            self._wrote_header = True
        self._print(line(row, self._phases, deltas=self._deltas))

    def status(self, text: str) -> None:
        self.console.print(Text(text, style="dim"), soft_wrap=True, highlight=False)

    def _print(self, text: Text) -> None:
        """A terminal's line ends where it does, a log's where the text does."""
        if self.console.is_terminal:
            self.console.print(text, soft_wrap=False, no_wrap=True, overflow="ellipsis", highlight=False)
        else:
            self.console.print(text, soft_wrap=True, highlight=False)


def header(phases: tuple[str, ...] = PHASES, *, deltas: bool = False) -> str:
    timed = "".join(f"{name + ' ms':>12}" for name in phases)
    saved = "".join(f"{name:>11}" for name in _DELTA_HEADS) if deltas else ""
    head = f"{'version':>7}{'trainer loss':>14}{'engine loss':>13}{'gap':>8}{'MB':>8}"
    return f"{head}{saved}{timed}{'paused ms':>11}  {'digests':<11}sample"


def line(row: StepRow, phases: tuple[str, ...] = PHASES, *, deltas: bool = False) -> Text:
    """One row; the phase "sync" is the whole sync."""
    times_s = {"sync": row.sync_s, **row.phases_s}
    timed = "".join(f"{_ms(times_s.get(name)):>12}" for name in phases)
    head = f"{row.version:>7}{row.trainer_loss:>14.3f}{row.engine_loss:>13.3f}{row.loss_gap:>8.4f}"
    saved = "".join(f"{text:>11}" for text in _of_delta(row)) if deltas else ""
    digests = digest_text(row.digests_equal)
    digests.pad_right(11 - len(digests))
    before = f"{head}{row.total_bytes / 1e6:>8.1f}{saved}{timed}{_ms(row.paused_s):>11}  "
    return Text.assemble(before, digests, one_line(row.sample))


def digest_text(digests_equal: bool | None) -> Text:
    """The answer as a word that also has a colour."""
    if digests_equal is None:
        return Text("unprovable", style="yellow")
    return Text("yes", style="green") if digests_equal else Text("NO", style="bold white on red")


def one_line(text: str) -> str:
    """The text with every control character made visible, so that a model's output can't move the cursor."""
    return "".join(char if char.isprintable() else _visible(char) for char in text)


def _visible(char: str) -> str:
    return {"\n": "⏎", "\t": "→"}.get(char, char.encode("unicode_escape").decode("ascii"))


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.1f}" if seconds < 0.01 else f"{seconds * 1000:.0f}"


def _of_delta(row: StepRow) -> tuple[str, str]:
    """What changed and what was sent, in percent of the model."""
    if row.density is None or row.received_bytes is None:
        return "-", "full"
    return f"{100 * row.density:.3f}", f"{100 * row.received_bytes / row.total_bytes:.3f}"
