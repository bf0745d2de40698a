"""What hosts that relay say: sets of blocks travel as they are, and hostile ones are refused."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from weightsync.errors import InvalidRequestError
from weightsync.types import Version
from weightsync.types.publication import Source
from weightsync.types.relay_messages import (
    Holding,
    RelayAnswer,
    RelayFace,
    RelayPeer,
    RelayReport,
    content_id,
    have_bytes,
    have_of,
    set_of,
)


@given(st.sets(st.integers(0, 999)))
def test_a_set_of_blocks_travels(blocks: set[int]) -> None:
    there = have_of(have_bytes(set_of(blocks), 1000), 1000)
    assert {block for block in range(1000) if there >> block & 1} == blocks


def test_blocks_that_there_are_not_do_not_count() -> None:
    assert have_of(b"\xff" * 100, 10) == 0b1111111111


def source(end: int = 1 << 20) -> Source:
    return Source(endpoint="http://a", segment="weightsync-1", data_start=0, data_end=end, block_bytes=1 << 16)


def test_a_contents_name_tells_what_differs() -> None:
    version = Version(run_id="r", number=1)
    names = {
        content_id(version, "m", source(), "00"),
        content_id(version, "m", source(), "01"),
        content_id(version, "n", source(), "00"),
        content_id(version, "m", source(1 << 19), "00"),
        content_id(Version(run_id="r", number=2), "m", source(), "00"),
    }
    assert len(names) == 5
    moved = Source(endpoint="http://b", segment="weightsync-2", data_start=0, data_end=1 << 20, block_bytes=1 << 16)
    assert content_id(version, "m", moved, "00") in names, "where it lies does not matter"


@pytest.mark.parametrize(
    "made",
    [
        lambda: RelayFace(host=None, port=0),
        lambda: RelayFace(host="", port=1),
        lambda: RelayFace(host="a\nb", port=1),
        lambda: RelayFace(host="a" * 64, port=1),
        lambda: RelayFace(host="a..b", port=1),
        lambda: RelayPeer(receiver_id="r", host="a..b", port=1, zone=None, tls=False, have=b""),
        lambda: RelayPeer(receiver_id="r", host="a", port=1 << 16, zone=None, tls=False, have=b""),
        lambda: RelayAnswer(keys={"ab" * 16: "no hex"}, seen_as="x"),
        lambda: RelayFace(host=None, port=1, zone="a b\n"),
        lambda: Holding(content="x", have=b""),
        lambda: Holding(content="ab" * 16, have=bytes(3 << 20)),
        lambda: RelayReport(receiver_id="r", want=-1),
        lambda: RelayReport(receiver_id="r", want=1 << 20),
        lambda: RelayReport(receiver_id="r", wait_s=float("nan")),
        lambda: RelayReport(receiver_id="r", content="../x"),
        lambda: RelayReport(receiver_id="r", fetched=bytes(3 << 20)),
        lambda: RelayReport(receiver_id="r", holdings=(Holding(content="ab" * 16, have=b""),) * 65),
        lambda: RelayAnswer(keys={}, seen_as="x", again_s=1e9),
    ],
)
def test_hostile_messages_are_refused(made: Any) -> None:
    with pytest.raises(InvalidRequestError):
        made()
