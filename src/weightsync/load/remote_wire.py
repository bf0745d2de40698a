"""What a `RemoteWeightLoader` and a `RemoteLoadServer` say to each other.

Every step is a POST of JSON, but for a chunk: there four bytes with the length of a JSON head are followed by the head
and by the bytes that it announces, piece after piece. A piece is a run of one tensor's bytes in row-major order, so a
tensor may be larger than a request. Nothing is a pickle.
"""

from __future__ import annotations

import struct

import msgspec
import torch
import xxhash

from weightsync.errors import InvalidRequestError
from weightsync.net.messages import encode
from weightsync.tensors import byte_array
from weightsync.types import Box, Manifest, TensorSpec, Version

LOAD_API = "/weightsync/v1/load"
CHUNK_TYPE = "application/x-weightsync-chunk"
LENGTH = struct.Struct(">I")
MAX_HEAD_BYTES = 4 << 20
MAX_PIECE_BYTES = 128 << 20
"""The most tensor bytes of one request or answer."""
MAX_PIECES = 4096
"""The most pieces of one request: their names fit the head."""


class _Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The base of all messages: immutable, keyword-only, unknown fields refused."""


class _InSession(_Message, frozen=True, kw_only=True):
    """A step of one bracket.

    Attributes:
        session: the bracket's name, chosen by the client.
    """

    session: str

    def __post_init__(self) -> None:
        if not 16 <= len(self.session) <= 64:
            raise InvalidRequestError("a session has 16 to 64 characters")


class OpenLoad(_InSession, frozen=True, kw_only=True):
    """Begin."""

    manifest: Manifest


class Piece(_Message, frozen=True, kw_only=True):
    """A run of one tensor's bytes.

    Attributes:
        name: in manifest coordinates.
        offset: first byte; the pieces of a tensor come one after the other.
        nbytes: how many.
    """

    name: str
    offset: int
    nbytes: int

    def __post_init__(self) -> None:
        if self.offset < 0 or not 0 <= self.nbytes <= MAX_PIECE_BYTES:
            raise InvalidRequestError(
                f"a piece has 0 to {MAX_PIECE_BYTES} bytes and an offset from 0 on", parameter=self.name
            )


class ChunkHead(_InSession, frozen=True, kw_only=True):
    """What the bytes behind it are.

    Attributes:
        index: of this request within the session, from 0 on.
        pieces: in the order of the bytes.
        last: whether the loader's chunk is complete with it: what has come since the one before is loaded now.
    """

    index: int
    pieces: tuple[Piece, ...]
    last: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.pieces) > MAX_PIECES or self.total_bytes > MAX_PIECE_BYTES:
            raise InvalidRequestError(f"a request has at most {MAX_PIECES} pieces and {MAX_PIECE_BYTES} bytes in them")

    @property
    def total_bytes(self) -> int:
        """Bytes of all pieces."""
        return sum(piece.nbytes for piece in self.pieces)


class VerifyLoad(_InSession, frozen=True, kw_only=True):
    """Everything was sent."""


class CommitLoad(_InSession, frozen=True, kw_only=True):
    """Serve it."""

    version: Version


class AbortLoad(_InSession, frozen=True, kw_only=True):
    """Give it up."""

    reason: str


class LoadReply(_Message, frozen=True, kw_only=True):
    """How the remote loader is, after a step.

    Attributes:
        session: whose step was answered; None where none was asked for.
        version: of the session's manifest; after a commit the version that is served.
        healthy, writes_live: the loader's.
        num_received: tensors of this session that the loader was given.
        digests: of what the commit will serve, by name; whole tensors alone. After a verify.
        unprovable: why there are no digests.
    """

    session: str | None
    version: Version | None
    healthy: bool
    writes_live: bool
    num_received: int = 0
    digests: dict[str, str] | None = None
    unprovable: str | None = None


class LiveTensor(_Message, frozen=True, kw_only=True):
    """A tensor that serves, without its bytes; see `HeldTensor`."""

    spec: TensorSpec
    box: Box | None

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the part that is held."""
        return self.spec.shape if self.box is None else self.box.shape

    @property
    def nbytes(self) -> int:
        """Of the part that is held."""
        return msgspec.structs.replace(self.spec, box=self.box).nbytes


class LiveReply(_Message, frozen=True, kw_only=True):
    """What serves.

    Attributes:
        epoch: which state of the loader this is; reads name it, and fail once a step has been taken since.
        tensors: in the loader's order.
    """

    epoch: int
    tensors: tuple[LiveTensor, ...]


class LiveRead(_Message, frozen=True, kw_only=True):
    """Bytes of one of these tensors, please; they are the answer's body."""

    epoch: int
    tensor: int
    offset: int
    nbytes: int

    def __post_init__(self) -> None:
        if self.tensor < 0 or self.offset < 0 or not 0 <= self.nbytes <= MAX_PIECE_BYTES:
            raise InvalidRequestError(f"a read is of at most {MAX_PIECE_BYTES} bytes, from 0 on")


def framed(head: ChunkHead, parts: list[memoryview]) -> bytes:
    """A chunk's request."""
    told = encode(head)
    return b"".join((LENGTH.pack(len(told)), told, *parts))


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """A tensor's bytes in row-major order; its own memory where that is contiguous and on the host."""
    return byte_array(tensor.detach().contiguous()).data


def digest_of_bytes(data: memoryview) -> str:
    """A tensor's digest, of the format that manifests carry."""
    return f"xxh3:{xxhash.xxh3_128_hexdigest(data)}"
