"""Which bar goes where: tracks in a readable order, and lanes in which no two phases overlap."""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Iterable, Sequence

from weightsync.observe.events import usable
from weightsync.types import PhaseRecord

_TRAINER = re.compile(r"^(trainer|rank|publisher)", re.IGNORECASE)
_DIGITS = re.compile(r"(\d+)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Span:
    """A phase on the common time axis, in whole nanoseconds, so that lanes are exact.

    Attributes:
        start_ns: since the earliest record.
        end_ns: as above, never below `start_ns`.
    """

    record: PhaseRecord
    start_ns: int
    end_ns: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Track:
    """One track's phases, spread over lanes.

    Attributes:
        name: e.g. "engine-0/worker-1".
        lanes: at least one; the spans of a lane rise and don't overlap (they may touch).
    """

    name: str
    lanes: tuple[tuple[Span, ...], ...]


def origin_s(records: Iterable[PhaseRecord]) -> float:
    """The earliest start, seconds since the epoch; 0 where there are no records."""
    return min((record.start_s for record in records), default=0.0)


def layout(records: Iterable[PhaseRecord]) -> tuple[Track, ...]:
    """Tracks, trainers first, then by name with numbers in numeric order; each with its lanes."""
    kept = usable(records)
    zero_s = origin_s(kept)
    by_track: dict[str, list[Span]] = {}
    for record in kept:
        start_ns = round((record.start_s - zero_s) * 1e9)
        end_ns = max(start_ns, round((record.end_s - zero_s) * 1e9))
        by_track.setdefault(record.track, []).append(Span(record=record, start_ns=start_ns, end_ns=end_ns))
    return tuple(Track(name=name, lanes=_lanes(by_track[name])) for name in sorted(by_track, key=_order))


def _lanes(spans: Sequence[Span]) -> tuple[tuple[Span, ...], ...]:
    """The fewest lanes. Of those that are free, a phase takes the one where most of its kind are."""
    lanes: list[list[Span]] = []
    num_of_kind: list[collections.Counter[str]] = []
    for span in sorted(spans, key=lambda span: (span.start_ns, -span.end_ns)):
        name = span.record.name
        free = [index for index, lane in enumerate(lanes) if lane[-1].end_ns <= span.start_ns]
        if free:
            index = max(free, key=lambda index: (num_of_kind[index][name], -index))
        else:
            index = len(lanes)
            lanes.append([])
            num_of_kind.append(collections.Counter())
        lanes[index].append(span)
        num_of_kind[index][name] += 1
    return tuple(tuple(lane) for lane in lanes)


def _order(track: str) -> tuple[bool, list[tuple[int, int, str]]]:
    parts = [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in _DIGITS.split(track)]
    return _TRAINER.match(track) is None, parts
