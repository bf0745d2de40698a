"""A proof of a segment, without the segment: what is in it, and how often it is asked whether to go on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from tests.standins.stored import file_of, published
from weightsync.agent import proof as module
from weightsync.transfer.blocks import checksum


@pytest.mark.parametrize(("cores", "at_once"), [(1, 4), (2, 8), (3, 12)])
def test_many_cores_get_enough_blocks_at_a_time(monkeypatch: pytest.MonkeyPatch, cores: int, at_once: int) -> None:
    """Seen red: more cores than blocks at a time had nothing to do."""
    publication, wanted = published(1)
    where = msgspec.structs.replace(publication.sources[0], block_bytes=4096)
    publication = msgspec.structs.replace(publication, sources=(where,))
    sums = [checksum(file_of(1)[start : start + size]) for start, size in map(where.block, range(where.num_blocks))]
    asked, taken = list[int](), list[int]()
    map_all = module.map_all

    @contextlib.contextmanager
    def mapped(name: str, *, need_bytes: int) -> Iterator[Any]:
        yield type("Mapped", (), {"memory": file_of(1)[:need_bytes]})

    monkeypatch.setattr(module, "MappedSegment", mapped)
    monkeypatch.setattr(module, "_PIECE", 2)
    monkeypatch.setattr(module, "num_cores", lambda: cores)
    monkeypatch.setattr(module, "map_all", lambda one, blocks: (taken.append(len(blocks)), map_all(one, blocks))[1])
    proved = module.prove(publication, 0, check_cancelled=lambda: asked.append(1))
    assert proved == msgspec.structs.replace(wanted, block_checksums="".join(sums))
    full, rest = divmod(where.num_blocks, at_once)
    assert full, "the case is one"
    assert taken == [at_once] * full + [rest] * (rest > 0)
    assert len(asked) > len(taken)
