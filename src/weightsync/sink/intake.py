"""Intake: takes a version from the trainer's agents into this process's memory: its deltas where there are any.

The bytes are copied out of the trainer's memory at once, so that a slow store never holds a segment of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from weightsync.errors import NotRegisteredError, UnsupportedError, VersionError
from weightsync.host.agent_calls import Agents, Granted
from weightsync.host.renewal import Renewal
from weightsync.host.staged_version import check_whole
from weightsync.plan.safetensors import plan_layout
from weightsync.transfer.source import RangedSource
from weightsync.types import Deadline, Version
from weightsync.types.publication import DeltaBase, DeltaLink, Publication, SourceProof

_CALL_S = 10.0
_SLOWEST_BYTES_S = 5e6
"""A version may be taken, and may be written, as slowly as that: a link of 40 Mbit/s."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Taken:
    """One version. Either `fulls` or `deltas`, one entry a source.

    Attributes:
        fulls: each source's safetensors file.
        deltas: each source's deltas in order, with their bytes.
    """

    publication: Publication
    incarnation: str | None
    proofs: tuple[SourceProof, ...]
    fulls: tuple[memoryview, ...] | None = None
    deltas: tuple[tuple[tuple[DeltaLink, memoryview], ...], ...] | None = None

    @property
    def version(self) -> Version:
        return self.publication.manifest.version

    @property
    def nbytes(self) -> int:
        """Of all that is to be written of it."""
        deltas = (data for each in self.deltas or () for _, data in each)
        return sum(len(data) for data in (*(self.fulls or ()), *deltas))


def time_for(nbytes: int, deadline: Deadline) -> Deadline:
    """`deadline`, or a later one where so many bytes need it: a large version is not begun anew for ever."""
    needed_s = nbytes / _SLOWEST_BYTES_S
    return deadline if needed_s <= deadline.remaining_s else Deadline(needed_s)


class Intake:
    """One thread.

    Args:
        agents: URLs, that of the first source first; nobody else is called.
    """

    def __init__(
        self, agents: Sequence[str], model_id: str, *, receiver_id: str, token: str | None, verify: bool | str
    ) -> None:
        self._endpoints = tuple(url.rstrip("/") for url in agents)
        self._agents = Agents(
            receiver_id=receiver_id, model_id=model_id, token=token, verify=verify, transport=None, num_streams=4,
            stall_s=10.0,
        )  # fmt: skip
        self._source_of: dict[str, int] = {}

    def newest(self, *, after: Version | None, wait_s: float) -> Version | None:
        """What the first agent has; see `AgentClient.get_version`."""
        return self._agents.newest(self._endpoints[0], timeout_s=_CALL_S, after=after, wait_s=wait_s)

    def take(self, bases: Sequence[DeltaBase] | None, *, deadline: Deadline) -> Taken:
        """The newest version.

        Args:
            bases: of each source what the store has; None: a full is wanted.
            deadline: of the grants, and of the bytes where `time_for` them says so.

        Raises:
            VersionError: it was superseded meanwhile: ask again.
            NotRegisteredError: it lies at an agent that was not named too.
            WeightSyncError: see `Agents.grant` and `RangedSource.read`.
        """
        granted: dict[int, Granted] = {}
        renewal: Renewal | None = None
        try:
            first = self._grant(self._endpoints[0], None, bases, deadline)
            granted[first.grant.source] = first
            renewal = Renewal(self._agents, granted)
            renewal.start()
            publication = first.grant.publication
            check_whole(publication)
            for index, source in enumerate(publication.sources):
                if index in granted:
                    continue
                if source.endpoint.rstrip("/") not in self._endpoints:
                    raise NotRegisteredError(f"{publication.manifest.version} lies at {source.endpoint} too: not named")
                each = self._grant(source.endpoint, publication.manifest.version, bases, deadline, index=index)
                granted[index] = each
                answer = each.grant.publication, each.grant.source, each.grant.incarnation
                if answer != (publication, index, first.grant.incarnation):
                    raise VersionError(f"{source.endpoint} tells another story of {publication.manifest.version}")
            self._source_of = {each.endpoint: index for index, each in granted.items()}
            ordered = [granted[index] for index in range(len(publication.sources))]
            if bases is not None and any(each.grant.delta is None for each in ordered):
                if any(each.grant.delta is not None for each in ordered):
                    self._agents.give_up(granted)
                    granted.clear()
                    return self.take(None, deadline=deadline)  # a chain has all sources
                bases = None
            deadline = time_for(
                sum(each.data_end for each in publication.sources) if bases is None
                else sum(link.blob.data_end for each in ordered for link in each.grant.delta or ()),
                deadline,
            )  # fmt: skip
            taken = Taken(
                publication=publication,
                incarnation=first.grant.incarnation,
                proofs=tuple(each.grant.proof for each in ordered),
                fulls=None if bases is not None else tuple(self._full(each, deadline) for each in ordered),
                deltas=None if bases is None else tuple(self._deltas(each, deadline) for each in ordered),
            )
            self._agents.acknowledge(granted)
            return taken
        finally:
            if renewal is not None:
                renewal.close()
            self._agents.give_up(granted)

    def close(self) -> None:
        """Closes connections. Idempotent."""
        self._agents.close()

    def _grant(
        self,
        endpoint: str,
        version: Version | None,
        bases: Sequence[DeltaBase] | None,
        deadline: Deadline,
        *,
        index: int | None = None,
    ) -> Granted:
        at = self._source_of.get(endpoint) if index is None else index
        base = None if bases is None or at is None or at >= len(bases) else bases[at]
        grant = self._agents.grant(endpoint, version, deadline, mode="delta", base=base)
        return Granted(endpoint=endpoint, grant=grant)

    def _full(self, granted: Granted, deadline: Deadline) -> memoryview:
        grant = granted.grant
        publication, index = grant.publication, grant.source
        where, manifest = publication.sources[index], publication.manifest
        layout = plan_layout(publication.parts_of(index), source=index)
        if (layout.data_start, layout.total_bytes) != (where.data_start, where.data_end) or any(
            mine.offset != theirs.offset for mine, theirs in zip(layout.parts, publication.parts_of(index), strict=True)
        ):
            raise UnsupportedError(f"{manifest.version} lies in another way than a release of this kind lays it out")
        memory = np.empty(where.data_end, np.uint8).data  # the header, and blocks that all have come
        memory[: where.data_start] = layout.header(manifest.version, manifest.model_id)
        self._read(self._agents.source(granted), where.num_blocks, memory, deadline)
        return memory

    def _deltas(self, granted: Granted, deadline: Deadline) -> tuple[tuple[DeltaLink, memoryview], ...]:
        found = []
        for link in granted.grant.delta or ():
            raw = np.empty(link.blob.data_end, np.uint8)
            raw[: link.blob.data_start] = 0  # no block has it, and it is stored with them
            memory = raw.data
            self._read(self._agents.blob(granted, link), link.blob.num_blocks, memory, deadline)
            found.append((link, memory))
        return tuple(found)

    @staticmethod
    def _read(source: RangedSource, num_blocks: int, memory: memoryview, deadline: Deadline) -> None:
        try:
            source.read(
                list(range(num_blocks)),
                lambda offset, length: memory[offset : offset + length],
                lambda block, data: None,
                deadline=deadline,
            )
        finally:
            source.close()
