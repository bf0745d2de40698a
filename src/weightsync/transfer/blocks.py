"""The frames of a TCP pull, byte by byte (docs/wire-format.md has them with test vectors), and a block's checksum.

    hello    client -> server, once      8s magic | 16s transfer id
    ask      client -> server, any times 4s "WSAK" | u32 block
    answer   server -> client, each ask  4s "WSBK" | u16 format | u16 code | u32 block | u64 offset | u64 length,
             then the payload (code 0; for every other code there is none, and the connection ends)

All integers are little-endian. `offset` is the block's first byte in the source's segment.
"""

from __future__ import annotations

import dataclasses
import enum
import struct

import xxhash

from weightsync.errors import TransferError

MAGIC = b"WSPULL1\n"
FORMAT = 1
HELLO = struct.Struct("<8s16s")
ASK = struct.Struct("<4sI")
ANSWER = struct.Struct("<4sHHIQQ")
_ASK_MAGIC, _ANSWER_MAGIC = b"WSAK", b"WSBK"


class Code(enum.IntEnum):
    """How an answer begins."""

    OK = 0
    ENDED = 1
    """The transfer is over: finished, superseded, or not taken up in time."""
    BAD_REQUEST = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    code: Code
    block: int
    offset: int
    length: int


def checksum(data: memoryview) -> str:
    """xxh3-64 of a block, 16 hex digits. It reads memory at its own speed and lets go of the GIL."""
    return xxhash.xxh3_64_hexdigest(data)


def ask_bytes(block: int) -> bytes:
    return ASK.pack(_ASK_MAGIC, block)


def answer_bytes(answer: Answer) -> bytes:
    return ANSWER.pack(_ANSWER_MAGIC, FORMAT, answer.code, answer.block, answer.offset, answer.length)


def parse_ask(data: bytes) -> int | None:
    """The block that is asked for; None where this is no ask."""
    magic, block = ASK.unpack(data)
    return int(block) if magic == _ASK_MAGIC else None


def parse_answer(data: bytes) -> Answer:
    """The head of an answer.

    Raises:
        TransferError: it is none. Nothing that follows it can be trusted.
    """
    magic, version, code, block, offset, length = ANSWER.unpack(data)
    if magic != _ANSWER_MAGIC or version != FORMAT or code not in set(Code):
        raise TransferError(f"what came is no answer of a block server of format {FORMAT}: {data[:8]!r}")
    return Answer(code=Code(code), block=block, offset=offset, length=length)
