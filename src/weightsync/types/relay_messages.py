"""What hosts and an agent say to each other about relaying: who has proved which blocks of what, and serves them."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable

import msgspec

from weightsync.errors import InvalidRequestError
from weightsync.types.manifest import Version
from weightsync.types.message import Message, learn
from weightsync.types.publication import Source, check_transfer_id
from weightsync.types.spec import check_id

MAX_HOLDINGS = 64
MAX_PEERS = 32
"""No more peers are named in one answer."""
_MAX_HAVE_BYTES = 2 << 20
_MAX_WAIT_S = 5.0
_MAX_WANT = 1024
_KEY = re.compile("[0-9a-f]{64}")


def content_id(version: Version, model_id: str, source: Source, checksums: str) -> str:
    """The name of a row of blocks: 32 hex digits over what version it is of and what bytes it has. Whoever was granted
    it computes the same, and nobody has to be believed about it.

    Args:
        version, model_id: of the publication.
        source: where its blocks are cut; a publication's source, or a delta's blob.
        checksums: of all its blocks, as the agent says them.
    """
    encoded = msgspec.json.encode(
        [version.run_id, version.number, model_id, source.data_end - source.data_start, source.block_bytes, checksums]
    )
    return hashlib.sha256(encoded).hexdigest()[:32]


def set_of(blocks: Iterable[int]) -> int:
    """A set of blocks, as an integer: bit 0 is block 0."""
    bits = bytearray()
    for block in blocks:
        if block >> 3 >= len(bits):
            bits.extend(bytes((block >> 3) + 1 - len(bits) + len(bits) // 2))
        bits[block >> 3] |= 1 << (block & 7)
    return int.from_bytes(bits, "little")


def have_bytes(have: int, num_blocks: int) -> bytes:
    """A set of blocks as it travels: bit 0 of byte 0 is block 0."""
    return have.to_bytes(-(-num_blocks // 8), "little")


def have_of(bits: bytes, num_blocks: int) -> int:
    """The set of blocks; bits beyond the last block do not count."""
    return int.from_bytes(bits, "little") & ((1 << num_blocks) - 1)


def _check_host(host: str) -> None:
    try:
        right = 0 < len(host) <= 255 and host.isprintable() and bool(host.encode("idna"))
    except UnicodeError:  # what `socket` can't look up either
        right = False
    if not right:
        raise InvalidRequestError("a relay's host is a name or an address")


def _check_port(port: int) -> None:
    if not 0 < port < 1 << 16:
        raise InvalidRequestError(f"{port} is no port")


class RelayFace(Message, frozen=True, kw_only=True):
    """Where a host serves blocks that it has proved.

    Attributes:
        host: its name or address; None: the one that the agent sees it by.
        port: of its block server.
        zone: rack, room or data centre; hosts of one zone ask each other first. None: it was not told.
        tls: whether it speaks TLS.
    """

    host: str | None
    port: int
    zone: str | None = None
    tls: bool = False

    def __post_init__(self) -> None:
        _check_port(self.port)
        if self.host is not None:
            _check_host(self.host)
        if self.zone is not None:
            check_id("zone", self.zone)


class Holding(Message, frozen=True, kw_only=True):
    """Blocks of one content that a host has proved, and serves.

    Attributes:
        content: see `content_id`.
        have: which, see `have_bytes`.
    """

    content: str
    have: bytes

    def __post_init__(self) -> None:
        check_transfer_id(self.content)
        if len(self.have) > _MAX_HAVE_BYTES:
            raise InvalidRequestError(f"a holding has at most {_MAX_HAVE_BYTES} bytes")


class RelayReport(Message, frozen=True, kw_only=True):
    """A host says what it has, and asks who has what it lacks. One request carries both.

    Attributes:
        receiver_id: as registered.
        face: where it serves its holdings; None: it serves nobody.
        holdings: all that it serves now; what is not named is not there any more.
        transfer_id: of the grant that it is at work on, which is renewed; None: on none.
        content: what it fetches now; None: nothing.
        fetched: which blocks of that it has, whether or not it serves them.
        stuck: which blocks of that no peer gives it: the agent gives them itself.
        want: so many blocks more it could take from the agent now.
        wait_s: the answer waits so long for news.
    """

    receiver_id: str
    face: RelayFace | None = None
    holdings: tuple[Holding, ...] = ()
    transfer_id: str | None = None
    content: str | None = None
    fetched: bytes = b""
    stuck: bytes = b""
    want: int = 0
    wait_s: float = 0.0

    def __post_init__(self) -> None:
        check_id("receiver_id", self.receiver_id)
        if len(self.holdings) > MAX_HOLDINGS:
            raise InvalidRequestError(f"a host names at most {MAX_HOLDINGS} holdings")
        if self.transfer_id is not None:
            check_transfer_id(self.transfer_id)
        if self.content is not None:
            check_transfer_id(self.content)
        if max(len(self.fetched), len(self.stuck)) > _MAX_HAVE_BYTES:
            raise InvalidRequestError(f"a set of blocks has at most {_MAX_HAVE_BYTES} bytes")
        if not 0 <= self.want <= _MAX_WANT or not 0 <= self.wait_s <= _MAX_WAIT_S:
            raise InvalidRequestError(f"want is 0 to {_MAX_WANT}, wait_s 0 to {_MAX_WAIT_S:g}")


class RelayPeer(Message, frozen=True, kw_only=True):
    """A host that serves blocks of what is asked for.

    Attributes:
        receiver_id: as registered.
        host, port, zone, tls: see `RelayFace`.
        have: which blocks.
    """

    receiver_id: str
    host: str
    port: int
    zone: str | None
    tls: bool
    have: bytes

    def __post_init__(self) -> None:
        check_id("receiver_id", self.receiver_id)
        _check_host(self.host)
        _check_port(self.port)


class RelayAnswer(Message, frozen=True, kw_only=True):
    """What the agent answers to a report.

    Attributes:
        keys: of each content that the host named and the agent grants: the secret that readers show to peers, and peers
            look for. 64 hex digits. What has none is superseded.
        seen_as: the host of the face, as the agent hands it out.
        peers: who has what is fetched.
        take: blocks that the host is to take from the agent now: nobody else was told to.
        again_s: the next report comes no sooner.
    """

    keys: dict[str, str]
    seen_as: str
    peers: tuple[RelayPeer, ...] = ()
    take: tuple[int, ...] = ()
    again_s: float = 0.1

    def __post_init__(self) -> None:
        if len(self.peers) > MAX_PEERS or not 0 <= self.again_s <= 60:
            raise InvalidRequestError("this is no answer to a report of a relay")
        if not all(_KEY.fullmatch(key) for key in self.keys.values()):
            raise InvalidRequestError("a content's key has 64 hex digits")


learn(RelayReport, RelayAnswer)
