"""What a receiver and an agent say to each other: registration, grants, renewals, and what has ended."""

from __future__ import annotations

import enum

from weightsync.errors import InvalidRequestError
from weightsync.types.deadline import check_wait_s
from weightsync.types.message import Message, learn
from weightsync.types.publication import DeltaBase, DeltaLink, Publication, SourceProof, check_transfer_id
from weightsync.types.spec import check_id

MODES = ("auto", "full", "delta")


MAX_LAYOUTS = 16


_MAX_DELTAS = 256


class Transport(enum.StrEnum):
    """How bytes get from a source to a receiver."""

    TCP = "tcp"
    SHM = "shm"
    STORE = "store"


class RegisterRequest(Message, frozen=True, kw_only=True):
    """A receiver makes itself known to an agent, which serves nobody else.

    Attributes:
        receiver_id: a name that tells an operator who it is.
    """

    receiver_id: str

    def __post_init__(self) -> None:
        check_id("receiver_id", self.receiver_id)


class TransferRequest(Message, frozen=True, kw_only=True):
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


class GrantFacts(Message, frozen=True, kw_only=True):
    """What a grant says besides its publication.

    Attributes:
        transfer_id: 32 hex digits: the right to read this publication's bytes, until it is finished.
        source: which of them this agent is.
        proof: what this agent has computed over its own source.
        seal: `types.seal.seal_of` these and the publication, so that damage on the way is seen.
        transport: "shm" where the caller may map the segment.
        host, port: of the block server, for "tcp".
        take_up_s: a transfer that is neither read nor renewed for so long is over.
        incarnation: see `AgentVersion`.
        base: what `delta` builds on, as it was asked.
        delta: blobs that lead from `base` to this version, in order; none where `base` is this version. None: there is
            no delta, the source's own bytes are to be read.
        leads_to: number of the version that is wanted, where this one is its chain's anchor: whoever has it asks again.
    """

    transfer_id: str
    source: int
    proof: SourceProof
    seal: str
    transport: Transport
    host: str
    port: int
    take_up_s: float
    incarnation: str | None = None
    base: DeltaBase | None = None
    delta: tuple[DeltaLink, ...] | None = None
    leads_to: int | None = None


class TransferGrant(GrantFacts, frozen=True, kw_only=True):
    """What an agent answers: one version, proved, and how to get it.

    Attributes:
        publication: the whole, with all its sources.
    """

    publication: Publication

    def __post_init__(self) -> None:
        stored = [each.endpoint for each in self.publication.sources if not each.endpoint.startswith("http")]
        if stored and self.transport is not Transport.STORE:  # no agent sends its receivers to a store, or to a file
            raise InvalidRequestError(f"an agent's grant names {stored[0]!r}, which is no agent")
        check_transfer_id(self.transfer_id)
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


class RenewRequest(Message, frozen=True, kw_only=True):
    """The receiver is at work on a transfer, though it reads nothing yet.

    Attributes:
        transfer_id: as granted; of deltas that were granted together, one of them.
    """

    transfer_id: str

    def __post_init__(self) -> None:
        check_transfer_id(self.transfer_id)


class FinishRequest(Message, frozen=True, kw_only=True):
    """The receiver's own word that it needs nothing more of a transfer.

    Attributes:
        transfer_id: as granted.
        ok: whether it has everything.
    """

    transfer_id: str
    ok: bool


class AgentVersion(Message, frozen=True, kw_only=True):
    """What `/get_version` answers; `run_id` and `version` are None before the first publication.

    Attributes:
        incarnation: of the publisher: two of one `run_id` (a trainer that was started again under the same) differ in
            it, and their versions of one number are not the same. None: it does not say.
        model_digest: of that version; None: its publisher has more than one host, and no agent knows all of it.
        coming_run_id, coming: of the publication that it was given and has not proved yet; None: there is none.
        ending: its trainer has closed it in order: it answers no more after this.
    """

    model_id: str
    run_id: str | None = None
    version: int | None = None
    incarnation: str | None = None
    model_digest: str | None = None
    coming_run_id: str | None = None
    coming: int | None = None
    ending: bool = False


class EndedTransfer(Message, frozen=True, kw_only=True):
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


class EndedTransfers(Message, frozen=True, kw_only=True):
    """What `/get_transfers` answers.

    Attributes:
        ended: the last ones after the number that was asked for, in order.
        newest: number of the last one that has ended; 0: none has.
    """

    ended: tuple[EndedTransfer, ...]
    newest: int


class ReceiverInfo(Message, frozen=True, kw_only=True):
    """A receiver that is registered with an agent. Document 3's name.

    Attributes:
        receiver_id: who.
        version: what it has had last, whole, as "run/number"; None: nothing yet.
        num_transfers, num_failed: that it has had, and that ended early. A delta is one, too.
        received_bytes: sent to it in all; what it maps on the same host is not sent.
        bytes_per_s: of the last one that was sent, from its grant to its end; None: none was.
        since_s, seen_s: seconds since the epoch: when it was registered first, and heard of last.
    """

    receiver_id: str
    version: str | None
    num_transfers: int
    num_failed: int
    received_bytes: int
    bytes_per_s: float | None
    since_s: float
    seen_s: float


class Receivers(Message, frozen=True, kw_only=True):
    """What `/receivers` answers.

    Attributes:
        receivers: those that were heard of last, the latest first.
        num_registered: how many there are.
    """

    receivers: tuple[ReceiverInfo, ...]
    num_registered: int


learn(RegisterRequest, TransferRequest, TransferGrant, FinishRequest, RenewRequest)
learn(AgentVersion, EndedTransfers, Receivers)
