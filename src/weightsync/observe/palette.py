"""Colours and hatches of the phases: told apart by colour-blind readers, and in print by hatch and label."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable


@dataclasses.dataclass(frozen=True, kw_only=True)
class Style:
    """How one phase is drawn.

    Attributes:
        color: "#rrggbb".
        hatch: a matplotlib hatch, "" for none.
        text_color: readable on `color`.
    """

    color: str
    hatch: str = ""
    text_color: str = "#000000"


WAIT = Style(color="#E4E4E4", hatch="////", text_color="#333333")
PAUSED_COLOR = "#B2182B"

# Okabe and Ito's palette; the order is the order of the legend.
_KNOWN = {
    "train": Style(color="#56B4E9"),
    "extract": Style(color="#E69F00"),
    "digest": Style(color="#CC79A7", hatch="..."),
    "pack": Style(color="#F0E442"),
    "share": Style(color="#F0E442", hatch="..."),
    "transfer": Style(color="#0072B2", text_color="#FFFFFF"),
    "load": Style(color="#009E73", text_color="#FFFFFF"),
    "verify": Style(color="#CC79A7"),
    "pause": Style(color="#7A3B00", text_color="#FFFFFF"),
    "commit": Style(color="#D55E00"),
    "resume": Style(color="#7A3B00", hatch="..", text_color="#FFFFFF"),
    "join group": Style(color="#999999"),
    "abort": Style(color="#000000", text_color="#FFFFFF"),
    "generate": Style(color="#BFE3C9"),
    "evaluate": Style(color="#D6D0F0"),
}
_SPARE = tuple(
    dataclasses.replace(style, hatch=hatch)
    for hatch in ("xx", "--", "++")
    for style in (_KNOWN["train"], _KNOWN["extract"], _KNOWN["load"], _KNOWN["verify"], _KNOWN["pack"])
)


def is_wait(name: str) -> bool:
    """Whether a phase is somebody waiting: "wait" or "wait engines"."""
    return name == "wait" or name.startswith("wait ")


def styles(names: Iterable[str]) -> dict[str, Style]:
    """A style for each name, in the order of the legend: known phases, then others by name, then waits."""
    seen = set(names)
    found = {name: style for name, style in _KNOWN.items() if name in seen}
    others = sorted(name for name in seen if name not in _KNOWN and not is_wait(name))
    found.update({name: _SPARE[index % len(_SPARE)] for index, name in enumerate(others)})
    found.update({name: WAIT for name in sorted(seen) if is_wait(name)})
    return found


def label(name: str) -> str:
    """What stands in a bar: "wait for engines" reads better than "wait engines"."""
    return f"wait for {name[5:]}" if name.startswith("wait ") and not name.startswith("wait for ") else name
