"""From what a worker recorded of one HTTP request to the spans of each of its answers. Pure.

vLLM's plug-ins in a worker are told no request id. So the worker records, for each stay of a row in its batch, digests
of the tokens that were there; the answers of one request are told apart by these, and by elimination. Where a stay may
be that of several answers, what it says of them is unknown, but where all that is possible says the same.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from weightsync.types.spans import VersionSpan, add_edge, spans_from

DIGEST_BYTES = 8


class Edge(msgspec.Struct, frozen=True, kw_only=True):
    """From `position` on a row of vLLM's batch is sampled with `version`; or there it left the batch.

    Attributes:
        stay: number of the row's stay in the batch; a request that is preempted has several.
        prompt: digest of the row's prompt.
        position: how many tokens the row had.
        known: how many of these the worker knew; the last ones may still have been on their way.
        tokens: digest of the known ones.
        version: as `run_id/number`; None where the worker did not know what it served.
        leaves: whether the row left the batch there; `version` says nothing then.
    """

    stay: int
    prompt: bytes
    position: int
    known: int
    tokens: bytes
    version: str | None
    leaves: bool = False


class Answer(msgspec.Struct, kw_only=True):
    """One choice of a request: its prompt's token ids (None where not told) and its own."""

    prompt: list[int] | None
    tokens: list[int]


def tokens_digest(tokens: Sequence[int]) -> bytes:
    """`DIGEST_BYTES` bytes that stand for token ids."""
    return hashlib.blake2b(array("q", tokens).tobytes(), digest_size=DIGEST_BYTES).digest()


def spans_of(edges: Sequence[Edge], answers: Sequence[Answer]) -> list[list[VersionSpan]]:
    """The spans of each answer.

    Args:
        edges: all that was recorded of the request, in order. One that is missing would make the result wrong.
        answers: all answers of the request, complete. Tokens at the end may have been cut off (a stop string).

    Returns:
        Spans for each answer, from 0 to its number of tokens.
    """
    stays: dict[int, list[Edge]] = {}
    for edge in edges:
        stays.setdefault(edge.stay, []).append(edge)
    may_be = [_stays_of(answer, stays, alone=len(answers) == 1) for answer in answers]
    if set(stays) != set().union(*may_be):  # something else was recorded than what was answered
        return [spans_from([], len(answer.tokens)) for answer in answers]
    if all(answer.tokens for answer in answers):
        _eliminate(may_be, {stay for stay, its in stays.items() if not its[0].position})
    owners = Counter(stay for mine in may_be for stay in mine)
    return [_spans(answer, edges, mine, owners) for answer, mine in zip(answers, may_be, strict=True)]


def _stays_of(answer: Answer, stays: Mapping[int, Sequence[Edge]], *, alone: bool) -> set[int]:
    """The stays that may be this answer's."""
    prompt = None if alone or answer.prompt is None else tokens_digest(answer.prompt)
    digests: dict[int, bytes] = {}

    def fits(edge: Edge) -> bool:
        if prompt not in (None, edge.prompt):
            return False
        if edge.known > len(answer.tokens):
            return True  # perhaps: its end was cut off
        if edge.known not in digests:
            digests[edge.known] = tokens_digest(answer.tokens[: edge.known])
        return digests[edge.known] == edge.tokens

    return {stay for stay, its in stays.items() if all(map(fits, its))}


def _eliminate(may_be: Sequence[set[int]], openings: set[int]) -> None:
    """Each answer has one stay in which it began: one that must be an answer's is no other's. In place."""
    if len(openings) != len(may_be):
        return  # some were preempted before their first token: then there are more
    certain: set[int] = set()
    while True:
        only = {next(iter(mine & openings)) for mine in may_be if len(mine & openings) == 1} - certain
        if not only:
            return
        certain |= only
        for mine in may_be:
            if len(mine & openings) > 1:
                mine -= only


def _spans(answer: Answer, edges: Sequence[Edge], mine: set[int], owners: Mapping[int, int]) -> list[VersionSpan]:
    begins = {edge.stay: edge.version for edge in edges if edge.stay in mine and not edge.position and not edge.leaves}
    versions = set(begins.values())
    starts: list[tuple[int, str | None]] = [(0, versions.pop() if len(versions) == 1 else None)]
    for edge in edges:
        if edge.stay not in mine or edge.leaves:
            continue
        if owners[edge.stay] == 1:
            add_edge(starts, edge.position, edge.version)
        elif edge.position and not (starts[-1][0] <= edge.position and starts[-1][1] == edge.version):
            add_edge(starts, edge.position, None)
    return spans_from(starts, len(answer.tokens))
