"""VersionSpan: which version made which tokens of one answer."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from weightsync.types.manifest import Version
from weightsync.types.message import learn


class VersionSpan(msgspec.Struct, frozen=True, kw_only=True):
    """Output tokens `[start, end)` were made by one version.

    Attributes:
        version: as `run_id/number`; None where it is not known. It is never guessed.
        start: the first token's position in the answer, from 0.
        end: behind the last one.
    """

    version: str | None
    start: int
    end: int


learn(VersionSpan)


def whole_span(version: Version | None, num_tokens: int) -> list[VersionSpan]:
    """The spans of an answer that one version made.

    Args:
        version: what `EmbeddedEngine.generation()` gave; see there.
        num_tokens: of the answer.
    """
    return spans_from([(0, None if version is None else str(version))], num_tokens)


def spans_from(edges: Iterable[tuple[int, str | None]], num_tokens: int) -> list[VersionSpan]:
    """The spans that begin where the edges say, in the order in which they came about.

    Args:
        edges: position from which on a version makes the tokens. A later edge at an earlier position takes back what
            was said of the tokens behind it. Tokens before all edges are of no known version.
        num_tokens: of the answer; what lies behind is left out.

    Returns:
        Spans without gaps from 0 to `num_tokens`, neighbours of different versions; none where there is no token.
    """
    starts: list[tuple[int, str | None]] = [(0, None)]
    for position, version in edges:
        add_edge(starts, position, version)
    starts = [start for start in starts if start[0] < num_tokens]
    ends = [*(position for position, _ in starts[1:]), num_tokens]
    return [
        VersionSpan(version=version, start=start, end=end) for (start, version), end in zip(starts, ends, strict=False)
    ]


def add_edge(starts: list[tuple[int, str | None]], position: int, version: str | None) -> None:
    """Adds an edge to what earlier ones say, in place: positions rise, neighbours differ."""
    while starts and starts[-1][0] >= position:
        starts.pop()
    if not starts or starts[-1][1] != version:
        starts.append((position, version))
