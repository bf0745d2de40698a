"""VersionBoard: shared memory in which vLLM's worker tells vLLM's API server which version made which tokens.

    API server: claim() --> a slot and its tag --> the tag travels with the request
    worker: BoardWriter.write(tag, edge), before it samples
    API server: edges() of the slot, when the answer is there --> release()

A worker writes before it samples the token, so what is answered was written before. One worker writes a slot; a tag
that is over is written no more. Memory is fixed: `NUM_SLOTS` requests at once, `SLOT_EDGES` edges each; what has no
room is unknown. Imports neither torch nor vLLM.
"""

from __future__ import annotations

import contextlib
import secrets
import struct
from collections import OrderedDict
from collections.abc import Callable

from weightsync.engine.vllm.spans import DIGEST_BYTES, Edge
from weightsync.errors import WeightSyncError
from weightsync.memory import Segment, SharedSegment
from weightsync.types import Version
from weightsync.types.closing import Closing

TAG = "weightsync_tag"
"""Key of the tag in a request's `vllm_xargs`."""
NUM_SLOTS = 1024
SLOT_EDGES = 255
_MAX_BOARDS = 16
_HEAD = struct.Struct("<8sII112x")  # whose it is; number of edges; whether one had no room
_EDGE = struct.Struct(f"<8s{DIGEST_BYTES}s{DIGEST_BYTES}sIIIHH88s")
_SLOT_BYTES = _HEAD.size + SLOT_EDGES * _EDGE.size
_UNKNOWN, _LEAVES = 0xFFFF, 1
_NOBODY = bytes(8)

served: Callable[[], Version | None] | None = None
"""What this worker serves now; None where no weight-transfer engine of ours is there. Set by the plug-in."""


class VersionBoard(Closing):
    """The API server's end. Not thread-safe: one event loop.

    Raises:
        SharedMemoryError: there is no room.
    """

    def __init__(self) -> None:
        self._segment = Segment(NUM_SLOTS * _SLOT_BYTES)
        self._free = list(range(NUM_SLOTS))

    def claim(self) -> str | None:
        """A tag for a request; None where all slots are taken."""
        if not self._free:
            return None
        slot, mark = self._free.pop(), secrets.token_bytes(8)
        _HEAD.pack_into(self._segment.memory, slot * _SLOT_BYTES, mark, 0, 0)
        return f"{self._segment.name}:{slot}:{mark.hex()}"

    def edges(self, tag: str) -> list[Edge]:
        """What was recorded under a tag that is claimed; nothing where some of it had no room."""
        _, slot, mark = _parsed(tag)
        memory, start = self._segment.memory, slot * _SLOT_BYTES
        _, num_edges, lost = _HEAD.unpack_from(memory, start)
        found = []
        for index in range(0 if lost else min(num_edges, SLOT_EDGES)):
            packed = _EDGE.unpack_from(memory, start + _HEAD.size + index * _EDGE.size)
            theirs, prompt, tokens, stay, position, known, flags, size, version = packed
            if theirs == mark:
                version_text = None if size == _UNKNOWN else version[:size].decode()
                found.append(
                    Edge(
                        stay=stay, prompt=prompt, position=position, known=known, tokens=tokens, version=version_text,
                        leaves=bool(flags & _LEAVES),
                    )
                )  # fmt: skip
        return found

    def release(self, tag: str) -> None:
        """Gives a tag back; nothing is written under it any more."""
        _, slot, _ = _parsed(tag)
        _HEAD.pack_into(self._segment.memory, slot * _SLOT_BYTES, _NOBODY, 0, 0)
        self._free.append(slot)

    def close(self) -> None:
        """Gives the memory back. Idempotent."""
        self._segment.close()


class BoardWriter:
    """The worker's end: it writes into any board of this user that a tag names. One thread."""

    def __init__(self) -> None:
        self._boards: OrderedDict[str, SharedSegment | None] = OrderedDict()

    def write(self, tag: str, edge: Edge) -> bool:
        """Writes an edge; False where the tag is over or none of ours: nothing was written."""
        try:
            name, slot, mark = _parsed(tag)
        except ValueError:
            return False
        board = self._board(name)
        if board is None or not 0 <= slot < NUM_SLOTS:
            return False
        memory, start = board.memory, slot * _SLOT_BYTES
        theirs, num_edges, lost = _HEAD.unpack_from(memory, start)
        if theirs != mark or mark == _NOBODY:
            return False
        if num_edges >= SLOT_EDGES:
            _HEAD.pack_into(memory, start, mark, num_edges, 1)
            return False
        version = b"" if edge.version is None else edge.version.encode()
        size = _UNKNOWN if edge.version is None or len(version) > 88 else len(version)
        _EDGE.pack_into(
            memory, start + _HEAD.size + num_edges * _EDGE.size,
            mark, edge.prompt, edge.tokens, edge.stay, edge.position, edge.known, _LEAVES * edge.leaves, size,
            b"" if size == _UNKNOWN else version,
        )  # fmt: skip
        _HEAD.pack_into(memory, start, mark, num_edges + 1, lost)
        return True

    def _board(self, name: str) -> SharedSegment | None:
        if name not in self._boards:
            board: SharedSegment | None = None
            with contextlib.suppress(WeightSyncError):
                board = SharedSegment(name, exact_bytes=NUM_SLOTS * _SLOT_BYTES)
            self._boards[name] = board
            if len(self._boards) > _MAX_BOARDS:
                _, oldest = self._boards.popitem(last=False)
                if oldest is not None:
                    oldest.close()
        return self._boards[name]


def _parsed(tag: str) -> tuple[str, int, bytes]:
    name, slot, mark = tag.split(":")
    return name, int(slot), bytes.fromhex(mark)
