"""A publication, and what is said about it between an agent and its receivers.

Over 400 lines: every message of the pull path, each with what its fields mean and what is refused.
"""

from __future__ import annotations

import enum
import math
from typing import cast

import msgspec

from weightsync.errors import InvalidRequestError
from weightsync.types.deadline import check_wait_s
from weightsync.types.manifest import Manifest
from weightsync.types.spec import MAX_NBYTES, TensorSpec, check_id
from weightsync.types.table import DIGEST_BYTES, SpecTable, TensorTable, written_digest

MAX_SOURCES = 4096
MODES = ("auto", "full", "delta")
MAX_LAYOUTS = 16
_CHECKSUM_DIGITS = 16
_MAX_DELTAS = 256


class _Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The base of all messages: immutable, keyword-only, unknown fields refused."""


class Source(_Message, frozen=True, kw_only=True):
    """One place that a publication lies in: a segment of one trainer host, served by that host's agent.

    Attributes:
        endpoint: the agent's URL.
        segment: name of the segment in the host's shared memory; a safetensors file.
        data_start: first byte of tensors in it (what is before is the header).
        data_end: its size in bytes.
        block_bytes: what one checksum covers; blocks are cut from `data_start` on.
    """

    endpoint: str
    segment: str
    data_start: int
    data_end: int
    block_bytes: int

    def __post_init__(self) -> None:
        if not self.endpoint.startswith(("http://", "https://")):
            raise InvalidRequestError(f"a source's endpoint is an http URL, not {self.endpoint!r}")
        if not 0 <= self.data_start <= self.data_end <= MAX_NBYTES or self.data_start >= 1 << 40:
            raise InvalidRequestError(f"a source can't hold bytes {self.data_start} to {self.data_end}")
        if not 4096 <= self.block_bytes <= 64 << 20:
            raise InvalidRequestError(f"a block has between 4 KiB and 64 MiB, not {self.block_bytes} bytes")

    @property
    def num_blocks(self) -> int:
        """Number of blocks; the last may be shorter."""
        return math.ceil((self.data_end - self.data_start) / self.block_bytes)

    def block(self, index: int) -> tuple[int, int]:
        """First byte and length of a block, within the segment."""
        start = self.data_start + index * self.block_bytes
        return start, min(self.block_bytes, self.data_end - start)


class Publication(_Message, frozen=True, kw_only=True):
    """One immutable version: what it is, and where each part of it lies.

    Attributes:
        manifest: whole tensors, in the stream's order, without digests (see `SourceProof`).
        parts: which part of which tensor lies where: `source` is an index into `sources`, `offset` a byte within that
            source's segment. Over all sources they cover every tensor exactly once.
        sources: one a trainer host; each holds its parts one behind the other, and nothing else.
    """

    manifest: Manifest
    parts: tuple[TensorSpec, ...]
    sources: tuple[Source, ...]

    def __post_init__(self) -> None:
        if not 1 <= len(self.sources) <= MAX_SOURCES:
            raise InvalidRequestError(f"a publication has 1 to {MAX_SOURCES} sources, not {len(self.sources)}")
        if type(self.parts) is not SpecTable:
            msgspec.structs.force_setattr(self, "parts", SpecTable(self.parts))
        extents = tuple((source.data_start, source.data_end) for source in self.sources)
        self.table.derive(check_parts, self.manifest.table, extents)

    @property
    def table(self) -> SpecTable:
        """`parts`, with what follows from them."""
        return cast(SpecTable, self.parts)

    def parts_of(self, source: int) -> tuple[TensorSpec, ...]:
        """The parts that lie in one source, in order."""
        return self.table.derive(_parts_of, source)


def check_parts(parts: SpecTable, tensors: TensorTable, extents: tuple[tuple[int, int], ...]) -> bool:
    """Checks that parts are of these tensors, and that each source has its parts one behind the other and nothing else.

    Args:
        parts, tensors: of a publication.
        extents: first byte of tensors and size of each source.

    Raises:
        InvalidRequestError: they are not.
    """
    specs = tensors.by_name
    for part in parts:
        spec = specs.get(part.name)
        if spec is None or (spec.dtype, spec.shape) != (part.dtype, part.shape):
            raise InvalidRequestError("a part is not of the manifest's tensor", parameter=part.name)
        if part.source >= len(extents):
            raise InvalidRequestError(f"there is no source {part.source}", parameter=part.name)
        start, end = extents[part.source]
        if part.offset < start or part.offset + part.nbytes > end:
            raise InvalidRequestError("a part lies outside its source", parameter=part.name)
    ends = [start for start, _ in extents]
    for part in sorted(parts, key=lambda part: (part.offset, part.nbytes)):
        if part.offset != ends[part.source]:
            raise InvalidRequestError("a source's parts overlap, or leave a hole", parameter=part.name)
        ends[part.source] += part.nbytes
    if any(found != end for found, (_, end) in zip(ends, extents, strict=True)):
        raise InvalidRequestError("a source has more bytes than its parts")
    return True


def _parts_of(parts: SpecTable, source: int) -> tuple[TensorSpec, ...]:
    if all(part.source == source for part in parts):
        return parts
    return SpecTable(part for part in parts if part.source == source)


class SourceProof(_Message, frozen=True, kw_only=True):
    """What an agent has computed over its source's bytes.

    Attributes:
        block_checksums: xxh3-64 of each block, 16 hex digits each, one behind the other.
        part_digests: XXH3-128 of each part of this source (`codec.digest.tensor_digest`), 16 bytes each, in the order
            of `Publication.parts_of`.
        lane_a, lane_b: the sum of this source's parts towards the model's digest (`codec.digest.ShardSum`).
    """

    block_checksums: str
    part_digests: bytes
    lane_a: int
    lane_b: int

    def check_fits(self, publication: Publication, source: int) -> None:
        """Raises InvalidRequestError where it is not of that source."""
        if len(self.block_checksums) != _CHECKSUM_DIGITS * publication.sources[source].num_blocks:
            raise InvalidRequestError("there is not one checksum a block")
        if len(self.part_digests) != DIGEST_BYTES * len(publication.parts_of(source)):
            raise InvalidRequestError("there is not one digest a part")

    def digest_of(self, index: int) -> str:
        """Digest of one part, as `codec.digest.tensor_digest` writes it."""
        return written_digest(self.part_digests, index)

    @property
    def digest(self) -> str:
        """Both lanes as 32 hex digits: what `DeltaBase` has of a source."""
        return f"{self.lane_a:016x}{self.lane_b:016x}"

    def checksum(self, block: int) -> str:
        """Checksum of one block."""
        return self.block_checksums[_CHECKSUM_DIGITS * block : _CHECKSUM_DIGITS * (block + 1)]


class DeltaBase(_Message, frozen=True, kw_only=True):
    """What a receiver holds of one source, proved: what a delta may build on.

    Attributes:
        run_id, version: of the publication that it is.
        digest: the sum of that source's parts (both lanes of `SourceProof`, 32 hex digits).
    """

    run_id: str
    version: int
    digest: str

    def __post_init__(self) -> None:
        check_id("run_id", self.run_id)
        if self.version < 0:
            raise InvalidRequestError(f"a version is not negative, got {self.version}")
        if len(self.digest) != 32 or set(self.digest) - set("0123456789abcdef"):
            raise InvalidRequestError("a base's digest has 32 hex digits")


class DeltaLink(_Message, frozen=True, kw_only=True):
    """One delta of a chain: a blob that turns a source's bytes of one version into those of a later one.

    Attributes:
        base, version: numbers within the run.
        blob: where it lies; its bytes are what docs/delta-format.md says.
        block_checksums: as of `SourceProof`, over the blob.
        transfer_id: the right to read it.
    """

    base: int
    version: int
    blob: Source
    block_checksums: str
    transfer_id: str

    def __post_init__(self) -> None:
        if not 0 <= self.base < self.version:
            raise InvalidRequestError(f"a delta leads to a later version, not from {self.base} to {self.version}")
        if len(self.block_checksums) != _CHECKSUM_DIGITS * self.blob.num_blocks:
            raise InvalidRequestError("there is not one checksum a block")
        _check_transfer_id(self.transfer_id)

    def checksum(self, block: int) -> str:
        """Checksum of one block."""
        return self.block_checksums[_CHECKSUM_DIGITS * block : _CHECKSUM_DIGITS * (block + 1)]


class Transport(enum.StrEnum):
    """How bytes get from a source to a receiver."""

    TCP = "tcp"
    SHM = "shm"


class RegisterRequest(_Message, frozen=True, kw_only=True):
    """A receiver makes itself known to an agent, which serves nobody else.

    Attributes:
        receiver_id: a name that tells an operator who it is.
    """

    receiver_id: str

    def __post_init__(self) -> None:
        check_id("receiver_id", self.receiver_id)


class TransferRequest(_Message, frozen=True, kw_only=True):
    """Asks for one version's bytes.

    Attributes:
        receiver_id: as registered.
        model_id: which model.
        run_id: the run that the caller expects; None takes the agent's.
        version: number of the version; None takes the newest. Anything but the newest is refused as superseded.
        host_nonce: of the caller's shared memory (`memory.host_nonce`): where it is the agent's own, the segment may
            be mapped. None asks for TCP.
        mode: "full"; "delta" where there is one from `base`, else full; "auto" for what is cheapest.
        base: what the caller holds of this agent's source; None: nothing.
        layouts: digests of the layouts that the caller holds (`types.layout`): a grant names one of these and leaves it
            out. None: the caller knows no layouts, and every grant has its publication whole.
    """

    receiver_id: str
    model_id: str
    run_id: str | None = None
    version: int | None = None
    host_nonce: str | None = None
    mode: str = "auto"
    base: DeltaBase | None = None
    layouts: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        check_id("receiver_id", self.receiver_id)
        check_id("model_id", self.model_id)
        if self.run_id is not None:
            check_id("run_id", self.run_id)
        if self.layouts is not None and len(self.layouts) > MAX_LAYOUTS:
            raise InvalidRequestError(f"a receiver names at most {MAX_LAYOUTS} layouts")
        if self.mode not in MODES:
            raise InvalidRequestError(f"mode is one of {', '.join(MODES)}, not {self.mode!r}")


class GrantFacts(_Message, frozen=True, kw_only=True):
    """What a grant says besides its publication.

    Attributes:
        transfer_id: 32 hex digits: the right to read this publication's bytes, until it is finished.
        source: which of them this agent is.
        proof: what this agent has computed over its own source.
        seal: `types.seal.seal_of` these and the publication, so that damage on the way is seen.
        transport: "shm" where the caller may map the segment.
        host, port: of the block server, for "tcp".
        take_up_s: a transfer that is neither read nor renewed for so long is over.
        life: see `AgentVersion`.
        base: what `delta` builds on, as it was asked.
        delta: blobs that lead from `base` to this version, in order; none where `base` is this version. None: there is
            no delta, the source's own bytes are to be read.
    """

    transfer_id: str
    source: int
    proof: SourceProof
    seal: str
    transport: Transport
    host: str
    port: int
    take_up_s: float
    life: str | None = None
    base: DeltaBase | None = None
    delta: tuple[DeltaLink, ...] | None = None


class TransferGrant(GrantFacts, frozen=True, kw_only=True):
    """What an agent answers: one version, proved, and how to get it.

    Attributes:
        publication: the whole, with all its sources.
    """

    publication: Publication

    def __post_init__(self) -> None:
        _check_transfer_id(self.transfer_id)
        if not 0 <= self.source < len(self.publication.sources):
            raise InvalidRequestError(f"there is no source {self.source}")
        if not 0 <= self.port < 1 << 16:
            raise InvalidRequestError(f"{self.port} is no port")
        check_wait_s("take_up_s", self.take_up_s)
        self.proof.check_fits(self.publication, self.source)
        if self.delta is not None:
            if len(self.delta) > _MAX_DELTAS:
                raise InvalidRequestError(f"a grant has at most {_MAX_DELTAS} deltas, not {len(self.delta)}")
            version = self.publication.manifest.version
            if self.base is None or self.base.run_id != version.run_id:
                raise InvalidRequestError("a delta names its base, which is of the same run")
            numbers = [self.base.version, *(link.version for link in self.delta)]
            if numbers[-1] != version.number or numbers[:-1] != [link.base for link in self.delta]:
                raise InvalidRequestError(f"these deltas do not lead from {self.base.version} to {version}")


def _check_transfer_id(transfer_id: str) -> None:
    if len(transfer_id) != 32 or set(transfer_id) - set("0123456789abcdef"):
        raise InvalidRequestError("a transfer_id has 32 hex digits")


class RenewRequest(_Message, frozen=True, kw_only=True):
    """The receiver is at work on a transfer, though it reads nothing yet.

    Attributes:
        transfer_id: as granted; of deltas that were granted together, one of them.
    """

    transfer_id: str

    def __post_init__(self) -> None:
        _check_transfer_id(self.transfer_id)


class FinishRequest(_Message, frozen=True, kw_only=True):
    """The receiver's own word that it needs nothing more of a transfer.

    Attributes:
        transfer_id: as granted.
        ok: whether it has everything.
    """

    transfer_id: str
    ok: bool


class AgentVersion(_Message, frozen=True, kw_only=True):
    """What `/get_version` answers; `run_id` and `version` are None before the first publication.

    Attributes:
        life: of the publisher: two of one `run_id` (a trainer that was started again under the same) differ in it, and
            their versions of one number are not the same. None: it does not say.
        model_digest: of that version; None: its publisher has more than one host, and no agent knows all of it.
        coming_run_id, coming: of the publication that it was given and has not proved yet; None: there is none.
    """

    model_id: str
    run_id: str | None = None
    version: int | None = None
    life: str | None = None
    model_digest: str | None = None
    coming_run_id: str | None = None
    coming: int | None = None


class EndedTransfer(_Message, frozen=True, kw_only=True):
    """A transfer that an agent granted and that is over.

    Attributes:
        number: they rise by 1, from 1 on, for one agent process.
        run_id, version: what was granted.
        receiver_id: to whom.
        ok: whether the receiver has said that it has everything.
    """

    number: int
    run_id: str
    version: int
    receiver_id: str
    ok: bool


class EndedTransfers(_Message, frozen=True, kw_only=True):
    """What `/get_transfers` answers.

    Attributes:
        ended: the last ones after the number that was asked for, in order.
        newest: number of the last one that has ended; 0: none has.
    """

    ended: tuple[EndedTransfer, ...]
    newest: int


class NotifyRequest(_Message, frozen=True, kw_only=True):
    """Tells a rollout service of a new version.

    Attributes:
        run_id, model_id, version: of which publication.
        sender_endpoint: URL of the agent that has it; one that was registered here.
        wait_s: answer when the version (or a newer one of the run) is served, at most after so many seconds; None
            answers at once.
    """

    run_id: str
    model_id: str
    version: int
    sender_endpoint: str
    wait_s: float | None = None

    def __post_init__(self) -> None:
        check_id("run_id", self.run_id)
        check_id("model_id", self.model_id)
        if self.version < 0:
            raise InvalidRequestError(f"a version is not negative, got {self.version}")
        if self.wait_s is not None:
            check_wait_s("wait_s", self.wait_s)


class RegisterSenderRequest(_Message, frozen=True, kw_only=True):
    """Makes an agent's endpoint known to a rollout service, which calls nobody else."""

    model_id: str
    sender_endpoint: str

    def __post_init__(self) -> None:
        check_id("model_id", self.model_id)
        if not self.sender_endpoint.startswith(("http://", "https://")) or len(self.sender_endpoint) > 2048:
            raise InvalidRequestError(f"an endpoint is an http URL, not {self.sender_endpoint[:100]!r}")


class ModelStatus(_Message, frozen=True, kw_only=True):
    """What a rollout service knows of one model.

    Attributes:
        run_id, version: what its engines serve; None before the first version.
        served_s: since when, in seconds since the epoch.
        state: "idle", "pulling", "loading"; "waiting", after a failure, for the next try.
        since_s: since when it is in that state, in seconds since the epoch.
        sender: whom it pulls from.
        wanted_run_id, wanted: the newest version that it was told of.
        engines: version that each engine serves, as "run/number"; None where none is known.
        staged: in a fleet: what every engine has staged and waits with, as "run/number".
        sender_errors: why agents could not be asked what they have, by endpoint; without those that could.
        errors: what failed last, per engine, or "pull"; empty after a version was served everywhere.
        retrying: why the pull under way was begun anew, and is still tried.
        num_pulled, num_committed: since the service started.
        pull_s, load_s, paused_s: seconds of the last version: fetching it, loading it, no generation could start.
        transport: how the last version came.
        num_deltas: how many deltas brought it; 0: it came in full.
        received_bytes: that were sent for it.
        num_patched: engines that were given its changed elements alone.
        unprovable: why engines could not prove their live bytes, by engine.
    """

    run_id: str | None = None
    version: int | None = None
    served_s: float | None = None
    state: str = "idle"
    since_s: float | None = None
    sender: str | None = None
    wanted_run_id: str | None = None
    wanted: int | None = None
    engines: dict[str, str | None] = {}
    staged: str | None = None
    sender_errors: dict[str, str] = {}
    errors: dict[str, str] = {}
    retrying: str | None = None
    num_pulled: int = 0
    num_committed: int = 0
    pull_s: float | None = None
    load_s: float | None = None
    paused_s: float | None = None
    transport: Transport | None = None
    num_deltas: int = 0
    received_bytes: int = 0
    num_patched: int = 0
    unprovable: dict[str, str] = {}


class ServiceStatus(_Message, frozen=True, kw_only=True):
    """What `/status` of a rollout service answers, by model_id."""

    models: dict[str, ModelStatus]


# See types.engine: msgspec has to learn its types before threads use them.
for _kind in (
    RegisterRequest, TransferRequest, TransferGrant, FinishRequest, AgentVersion, NotifyRequest, RegisterSenderRequest,
    ServiceStatus, Publication, EndedTransfers, RenewRequest,
):  # fmt: skip
    msgspec.json.Decoder(_kind)
