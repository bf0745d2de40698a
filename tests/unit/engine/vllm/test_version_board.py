"""The board between vLLM's worker and its API server: what is written is read, and what has no room is unknown."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from weightsync.engine.vllm import version_board
from weightsync.engine.vllm.spans import Edge
from weightsync.engine.vllm.version_board import NUM_SLOTS, SLOT_EDGES, BoardWriter, VersionBoard
from weightsync.memory import Segment


def edge(position: int = 0, version: str | None = "run-1/7", *, leaves: bool = False) -> Edge:
    return Edge(
        stay=(1 << 32) - 1, prompt=b"prompt--", position=position, known=max(0, position - 1), tokens=b"tokens--",
        version=version, leaves=leaves,
    )  # fmt: skip


@pytest.fixture
def board() -> Iterator[VersionBoard]:
    with VersionBoard() as made:
        yield made


def claimed(board: VersionBoard) -> str:
    tag = board.claim()
    assert tag is not None
    return tag


def test_what_is_written_is_read(board: VersionBoard) -> None:
    one, two, writer = claimed(board), claimed(board), BoardWriter()
    edges = [edge(), edge(5, None), edge(9, "r" * 60 + "/123"), edge(12, leaves=True)]
    for each in edges:
        assert writer.write(one, each)
    assert writer.write(two, edge(3))
    assert board.edges(one) == edges
    assert board.edges(two) == [edge(3)]


def test_a_version_whose_name_is_too_long_is_unknown(board: VersionBoard) -> None:
    """Not cut off: that would be another version's name."""
    tag = claimed(board)
    assert BoardWriter().write(tag, edge(1, "é" * 45))
    assert board.edges(tag) == [edge(1, None)]


def test_a_tag_that_is_over_is_written_no_more(board: VersionBoard) -> None:
    """Its slot is another's by now. Seen red with no look at the mark."""
    writer, old = BoardWriter(), claimed(board)
    assert writer.write(old, edge())
    board.release(old)
    assert not writer.write(old, edge(1))
    new = claimed(board)
    assert new.split(":")[1] == old.split(":")[1]
    assert not writer.write(old, edge(2))
    assert board.edges(new) == []
    assert writer.write(new, edge(3))
    assert board.edges(new) == [edge(3)]


def test_a_late_write_that_takes_the_head_makes_all_unknown(board: VersionBoard) -> None:
    """A worker that has looked at the mark, and writes when the slot is another's."""
    writer, old = BoardWriter(), claimed(board)
    writer.write(old, edge())
    start = int(old.split(":")[1]) * version_board._SLOT_BYTES
    head = bytes(board._segment.memory[start : start + version_board._HEAD.size])
    board.release(old)
    new = claimed(board)
    assert new.split(":")[1] == old.split(":")[1]
    board._segment.memory[start : start + len(head)] = head
    assert not writer.write(new, edge(1))
    assert board.edges(new) == []


def test_too_many_edges_make_all_unknown(board: VersionBoard) -> None:
    """The last ones would be missing. Seen red with the first ones told."""
    tag, writer = claimed(board), BoardWriter()
    for position in range(SLOT_EDGES):
        assert writer.write(tag, edge(position))
    assert len(board.edges(tag)) == SLOT_EDGES
    assert not writer.write(tag, edge(SLOT_EDGES))
    assert board.edges(tag) == []
    board.release(tag)
    assert writer.write(again := claimed(board), edge())
    assert board.edges(again) == [edge()]


def test_a_board_that_is_full_gives_no_tag(board: VersionBoard) -> None:
    tags = [claimed(board) for _ in range(NUM_SLOTS)]
    assert board.claim() is None
    assert len(set(tags)) == NUM_SLOTS
    assert BoardWriter().write(tags[0], edge())
    assert BoardWriter().write(tags[-1], edge(1))
    assert (board.edges(tags[0]), board.edges(tags[-1])) == ([edge()], [edge(1)])
    board.release(tags[17])
    assert board.claim() is not None


def test_a_forged_tag_is_written_nowhere(board: VersionBoard) -> None:
    """One request can't write into another's slot, a free one, or any other memory of this user."""
    tag, writer = claimed(board), BoardWriter()
    name, slot, mark = tag.split(":")
    free = str(next(number for number in range(NUM_SLOTS) if str(number) != slot))
    with Segment(1 << 16) as other:
        forged = [
            "", "x", "::", f"{name}:{slot}", f"{name}:{slot}:zz", f"{name}:{slot}:{'0' * 16}", f"{name}:{slot}:",
            f"{name}:{free}:{'0' * 16}", f"{name}:-1:{mark}",
            f"{name}:{NUM_SLOTS}:{mark}", f"{name}:{'9' * 5000}:{mark}",
            f"{other.name}:0:{'0' * 16}", f"{other.name}:{NUM_SLOTS - 1}:{mark}",
            f"../../etc/passwd:0:{mark}", f"nobody:{slot}:{mark}", f"{tag}:{tag}",
        ]  # fmt: skip
        assert [each for each in forged if writer.write(each, edge())] == []
        assert bytes(other.memory) == bytes(1 << 16)
    assert board.edges(tag) == []
    assert writer.write(tag, edge()), "and it is written as before"


def test_several_servers_have_boards_of_their_own() -> None:
    """More than a writer keeps open: it opens them again."""
    writer = BoardWriter()
    boards = [VersionBoard() for _ in range(version_board._MAX_BOARDS + 2)]
    tags = [claimed(board) for board in boards]
    for _ in range(2):
        assert all(writer.write(tag, edge()) for tag in tags)
    assert all(board.edges(tag) == [edge(), edge()] for board, tag in zip(boards, tags, strict=True))
    for board in boards:
        board.close()
