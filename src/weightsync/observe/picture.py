"""The records as a picture: one lane a track, bars by phase, and who waited for whom."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from weightsync.observe.aside import written_whole
from weightsync.observe.events import pauses, usable
from weightsync.observe.lanes import Track, layout, origin_s
from weightsync.observe.palette import PAUSED_COLOR, WAIT, Style, is_wait, label, styles
from weightsync.optional import imported
from weightsync.types import PhaseRecord

_WIDTH_INCHES = 15.0
_DPI = 110
_LANE_INCHES = 0.34
_CHAR_INCHES = 0.078
_BAR_HEIGHT = 0.84
_MOST_INCHES = 60.0
_NAME_CHARS = 60
_READ_ME = "One row a process or thread, time runs to the right. Hatched grey: it only waits, and for whom."
_READ_PAUSE = " Dark red line: this engine answers no requests."


def write_timeline_png(
    records: Iterable[PhaseRecord],
    path: str | os.PathLike[str],
    *,
    title: str = "weightsync: who did what, and who waited for whom",
    focus_s: tuple[float, float] | None = None,
    marks: Sequence[tuple[float, str]] = (),
) -> Path:
    """Draws the records; overlapping phases of one track get sub-lanes, so bars never cover each other.

    Args:
        records: of any number of tracks; those whose times are not finite are left out.
        path: of the PNG.
        title: above the picture.
        focus_s: start and end (seconds since the epoch) of a part that a second panel enlarges.
        marks: (time in seconds since the epoch, text): vertical lines, e.g. where a version was committed.

    Returns:
        `path`.

    Raises:
        MissingDependencyError: matplotlib is not installed.
        OSError: the file can't be written.
    """
    kept = usable(records)
    panels = [_Panel(kept, title="The whole run" if focus_s else "", marks=marks)]
    if focus_s is not None:
        inside = [record for record in kept if record.end_s > focus_s[0] and record.start_s < focus_s[1]]
        panels.append(_Panel(inside, title="One sync, enlarged", marks=marks, window_s=focus_s))
    looks = styles(record.name for record in kept)
    heights = [panel.num_lanes * _LANE_INCHES + 0.75 for panel in panels]
    height = sum(heights) + 1.5
    figure = _figure(_WIDTH_INCHES, height, facecolor="white")
    axes = figure.subplots(len(panels), 1, squeeze=False, gridspec_kw={"height_ratios": heights})

    for panel, (axis,) in zip(panels, axes, strict=True):
        panel.draw(axis, looks)
    has_pauses = any(panel.paused for panel in panels)
    figure.text(0.012, 1 - 0.12 / height, title, ha="left", va="top", fontsize=14, fontweight="bold")
    note = _READ_ME + (_READ_PAUSE if has_pauses else "")
    figure.text(0.012, 1 - 0.44 / height, note, ha="left", va="top", fontsize=9.5, color="#444444")
    handles = _legend(looks, has_pauses)
    if handles:
        figure.legend(
            handles=handles, loc="lower left", bbox_to_anchor=(0.008, 0), ncol=13, frameon=False, fontsize=9.5,
            handlelength=1.6, columnspacing=1.4,
        )  # fmt: skip
    # The layout stays inside this box; marks are written above it, so a first panel with marks needs more room.
    top = 0.86 if marks else 0.7
    figure.tight_layout(rect=(0, 0.42 / height, 1, 1 - top / height), h_pad=1.2)
    return _saved(figure, path)


def write_heat_png(shares: Sequence[tuple[str, float]], path: str | os.PathLike[str], *, title: str) -> Path:
    """Draws how much of each of many things it is, one bar each, in order.

    Args:
        shares: (name, share between 0 and 1).
        path: of the PNG.
        title: above the picture.

    Raises:
        MissingDependencyError: matplotlib is not installed.
        OSError: the file can't be written.
    """
    names = [name for name, _ in shares]
    values = [100 * share for _, share in shares]
    most = max(values, default=0.0) or 1.0
    figure = _figure(_WIDTH_INCHES * 0.7, min(_MOST_INCHES, 1.2 + 0.2 * len(shares)), layout="constrained")
    from matplotlib import colormaps

    axes = figure.add_subplot()
    axes.barh(range(len(values)), values, color=[colormaps["cividis"](value / most) for value in values], height=0.9)
    every = max(1, len(names) // 120)  # the names of a very deep model would lie over each other
    axes.set_yticks(range(0, len(names), every), [_short(name) for name in names[::every]], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("% of its elements")
    axes.set_title(title, fontsize=10, loc="left")
    axes.margins(y=0.01)
    return _saved(figure, path)


def _figure(width: float, height: float, **options: Any) -> Any:
    needs = "the picture needs matplotlib: pip install 'weightsync[demo]'"
    figure = imported("matplotlib.figure", needs).Figure(figsize=(width, height), dpi=_DPI, **options)
    imported("matplotlib.backends.backend_agg", needs).FigureCanvasAgg(figure)
    return figure


def _saved(figure: Any, path: str | os.PathLike[str]) -> Path:
    with written_whole(path) as file:
        figure.savefig(file, format="png")
    return Path(path)


def _short(name: str) -> str:
    """The end of a long name, which tells tensors of one model apart; `$` would begin a formula."""
    shown = name if len(name) <= _NAME_CHARS else "…" + name[-_NAME_CHARS:]
    return shown.replace("$", r"\$")


class _Panel:
    """One time axis with all tracks on it."""

    def __init__(
        self,
        records: Sequence[PhaseRecord],
        *,
        title: str,
        marks: Sequence[tuple[float, str]],
        window_s: tuple[float, float] | None = None,
    ) -> None:
        self.title = title
        self.tracks: tuple[Track, ...] = layout(records)
        self.num_lanes = max(1, sum(len(track.lanes) for track in self.tracks))
        self.zero_s = origin_s(records)
        last_s = max((record.end_s for record in records), default=self.zero_s)
        start_s, end_s = window_s or (self.zero_s, last_s)
        # Times are shown from 0 at the window's start, so bars begin left of 0 where the window cuts them.
        self.shift_s = self.zero_s - start_s
        self.length_s = max(end_s - start_s, 1e-6)
        self.start_s = start_s
        self.in_ms = self.length_s < 2.0
        self.scale = 1000.0 if self.in_ms else 1.0
        self.marks = [(at_s - start_s, text) for at_s, text in marks if start_s <= at_s <= end_s]
        self.paused: Mapping[str, tuple[tuple[float, float], ...]] = pauses(records)

    def draw(self, axis: Any, looks: Mapping[str, Style]) -> None:
        """Fills one matplotlib Axes, which is Any because matplotlib is optional."""
        axis.set_xlim(0, self.length_s * self.scale)
        row, ticks, names = 0, [], []
        for index, track in enumerate(self.tracks):
            if index % 2:
                axis.axhspan(row - 0.5, row + len(track.lanes) - 0.5, color="#F5F5F5", zorder=0, linewidth=0)
            if index:
                axis.axhline(row - 0.5, color="#CCCCCC", linewidth=0.8, zorder=1)
            ticks.append(row + (len(track.lanes) - 1) / 2)
            names.append(track.name)
            top = row
            for lane in track.lanes:
                self._draw_lane(axis, row, lane, looks)
                row += 1
            for start_s, end_s in self.paused.get(track.name, ()):
                at = [(start_s - self.start_s) * self.scale, (end_s - self.start_s) * self.scale]
                axis.plot(at, [top - 0.46, top - 0.46], color=PAUSED_COLOR, linewidth=2.6, zorder=6,
                          solid_capstyle="butt")  # fmt: skip
        axis.set_ylim(self.num_lanes - 0.5, -0.58)
        axis.set_yticks(ticks, names, fontsize=10)
        axis.tick_params(axis="y", length=0)
        axis.tick_params(axis="x", labelsize=9)
        axis.grid(axis="x", color="#DDDDDD", linewidth=0.6, zorder=0.5)
        axis.set_axisbelow(True)
        axis.set_xlabel("milliseconds" if self.in_ms else "seconds", fontsize=9.5, labelpad=2)
        for side in ("top", "right", "left"):
            axis.spines[side].set_visible(False)
        if self.title:
            axis.set_title(self.title, loc="left", fontsize=11, fontweight="bold", pad=16 if self.marks else 6)
        self._draw_marks(axis)
        if not self.tracks:
            axis.text(0.5, 0.5, "nothing was recorded", transform=axis.transAxes, ha="center", va="center")

    def _draw_lane(self, axis: Any, row: int, lane: Sequence[Any], looks: Mapping[str, Style]) -> None:
        char = self.length_s * self.scale * _CHAR_INCHES / (_WIDTH_INCHES * 0.9)
        for span in lane:
            style = looks[span.record.name]
            start = (span.start_ns / 1e9 + self.shift_s) * self.scale
            width = (span.end_ns - span.start_ns) / 1e9 * self.scale
            waits = is_wait(span.record.name)
            axis.broken_barh(
                [(start, width)], (row - _BAR_HEIGHT / 2, _BAR_HEIGHT), facecolor=style.color, hatch=style.hatch,
                edgecolor="#A0A0A0" if waits else "#222222", linewidth=0.4 if width > 0.6 * char else 0.0, zorder=3,
            )  # fmt: skip
            seen_start, seen_end = max(0.0, start), min(self.length_s * self.scale, start + width)
            text = self._fitting(span, (seen_end - seen_start) / char)
            if text:
                box = {"boxstyle": "square,pad=0.12", "facecolor": style.color, "edgecolor": "none"}
                axis.text(
                    (seen_start + seen_end) / 2, row, text, ha="center", va="center", fontsize=8.5, zorder=5,
                    color=style.text_color, bbox=box if style.hatch else None, clip_on=True,
                )  # fmt: skip

    @staticmethod
    def _fitting(span: Any, num_chars: float) -> str:
        """The longest text that fits a bar of `num_chars` characters."""
        name = label(span.record.name)
        seconds = (span.end_ns - span.start_ns) / 1e9
        took = f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.0f} ms"
        return next((text for text in (f"{name} {took}", name) if len(text) + 1 <= num_chars), "")

    def _draw_marks(self, axis: Any) -> None:
        written_to = -1.0
        for at_s, text in sorted(self.marks):
            at = at_s * self.scale
            axis.axvline(at, color="#333333", linewidth=0.9, linestyle=(0, (3, 2)), zorder=4)
            half = (len(text) + 1) * _CHAR_INCHES / (_WIDTH_INCHES * 0.9) * self.length_s * self.scale / 2
            if at - half >= written_to:
                axis.annotate(
                    text, (at, 1), xycoords=("data", "axes fraction"), xytext=(0, 2), textcoords="offset points",
                    ha="center", va="bottom", fontsize=8.5, color="#333333", annotation_clip=False,
                )  # fmt: skip
                written_to = at + half


def _legend(looks: Mapping[str, Style], has_pauses: bool) -> list[Any]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = [
        Patch(facecolor=style.color, hatch=style.hatch, edgecolor="#222222", linewidth=0.4, label=name)
        for name, style in looks.items()
        if not is_wait(name)
    ]
    if any(is_wait(name) for name in looks):
        handles.append(
            Patch(facecolor=WAIT.color, hatch=WAIT.hatch, edgecolor="#A0A0A0", linewidth=0.4, label="waiting")
        )
    if has_pauses:
        handles.append(Line2D([], [], color=PAUSED_COLOR, linewidth=2.6, label="generation paused"))
    return handles
