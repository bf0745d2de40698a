"""The conversation with an engine: one frozen request and one reply for each step, and who holds it.

The steps of one sync, as a push drives them (all run on training rank 0's host):

    describe -> init (once a group) -> begin -> update_weights ... -> stage -> pause -> commit -> resume
                                          any failure -> abort, and the engine serves its old version
                                                         or, if that is lost, nothing

Proving the bytes (`stage`) and serving them (`commit`) are two steps, so that generation is paused for the
second alone, and so that no engine is told to commit before all have answered: with their proof, or with why they
have none.

A session with a base has patches instead of whole tensors: `stage` proves base + change, `commit` writes the change
into the live weights, and after `resume` the engine audits all of them by itself.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Protocol, runtime_checkable

from weightsync.errors import InvalidRequestError, WeightSyncError
from weightsync.types.canary import CanaryReading
from weightsync.types.deadline import check_wait_s
from weightsync.types.init_info import MAX_WORLD_SIZE, AnyInitInfo, TorchDistributedWeightSyncInitInfo, check_world_size
from weightsync.types.live_layer import LiveLayer
from weightsync.types.manifest import ArtifactKind, Manifest, Version, check_model_digest
from weightsync.types.message import Message, learn
from weightsync.types.requests import AnyUpdateRequest

CHECK_RUN = "weightsync-check"
"""A run of a name that begins so looks whether its weights would be taken, and takes no other run's place."""


class DescribeRequest(Message, frozen=True, kw_only=True, omit_defaults=True):
    """Asks an engine what it is. Changes nothing.

    Attributes:
        layers: also which of its tensors take a change where they are live, where it can tell.
        model_id: of which model, where the same server may have several: a base, and adapters.
    """

    layers: bool = False
    model_id: str | None = None


class InitRequest(Message, frozen=True, kw_only=True, omit_defaults=True):
    """Makes an engine's workers build their receivers; a running session of another group is aborted.

    Attributes:
        run_id: the trainer's run; from now on the engine's current one.
        model_id: which model.
        info: made by `WeightTransferStrategy.create_init_info` on training rank 0.
        rank_offset: rank of the engine's first worker in the group (1 + the workers of engines before it).
        artifact: what will come: see `Manifest`.
        returns: the run is taken though another one took over from it: a fleet goes back to it.
    """

    run_id: str
    model_id: str
    info: AnyInitInfo
    rank_offset: int
    artifact: ArtifactKind = "model"
    returns: bool = False

    def __post_init__(self) -> None:
        members = self.info.world_size if isinstance(self.info, TorchDistributedWeightSyncInitInfo) else MAX_WORLD_SIZE
        if not 0 < self.rank_offset < members:  # rank 0 is the trainer
            raise InvalidRequestError(f"rank_offset lies between 1 and {members - 1}, not {self.rank_offset}")


class PatchBase(Message, frozen=True, kw_only=True):
    """What a patch is a change of.

    Attributes:
        version: that the engine has to serve.
        model_digest: of its weights. A version alone would not do: numbers are trusted, bytes are proved.
    """

    version: Version
    model_digest: str

    def __post_init__(self) -> None:
        check_model_digest(self.model_digest, version=str(self.version))


class BeginRequest(Message, frozen=True, kw_only=True):
    """Opens a session. The whole manifest is checked against the model before a byte moves.

    Attributes:
        session: name of this sync, unique.
        manifest: specs in the stream's order, digests not known yet.
        deadline_s: after so many seconds without an end the engine aborts by itself.
        base: this session has patches alone, on exactly that; whole tensors alone where it is None.
    """

    session: str
    manifest: Manifest
    deadline_s: float
    base: PatchBase | None = None

    def __post_init__(self) -> None:
        check_wait_s("deadline_s", self.deadline_s)


class UpdateRequest(Message, frozen=True, kw_only=True):
    """Announces one chunk; answered when the loader has let go of its bytes."""

    update: AnyUpdateRequest


class StageRequest(Message, frozen=True, kw_only=True):
    """Makes the engine prove the bytes: those received by the tensors' digests, those loaded by the model's.

    Attributes:
        session: as in begin.
        manifest: the manifest of begin with every digest filled in.
    """

    session: str
    manifest: Manifest


class CommitRequest(Message, frozen=True, kw_only=True):
    """Makes a staged version the served one. The engine is paused at this moment."""

    session: str


class AbortRequest(Message, frozen=True, kw_only=True):
    """Ends a session badly. Idempotent; an unknown session is no error.

    Attributes:
        session: its name. Or the name of the transfer group that was joined last: its trainer has ended in order, and
            the engine has none from then on. That ends no session.
        reason: for the log.
    """

    session: str
    reason: str


class PauseRequest(Message, frozen=True, kw_only=True):
    """Stops generation: new requests wait, running ones finish within `timeout_s`.

    Attributes:
        session: who pauses; the same resumes.
        timeout_s: how long to wait for running generations.
        lease_s: after so many seconds without a resume the engine resumes by itself (if it may serve).
    """

    session: str
    timeout_s: float
    lease_s: float

    def __post_init__(self) -> None:
        check_wait_s("timeout_s", self.timeout_s)
        check_wait_s("lease_s", self.lease_s)


class ResumeRequest(Message, frozen=True, kw_only=True):
    """Starts generation again; refused where the weights are half-loaded."""

    session: str


class AuditRequest(Message, frozen=True, kw_only=True):
    """Makes an engine read all of its live weights, beside what it generates, and compare them with what was committed.
    The reply's `digests_equal` is True, or False: then it refuses to serve until a full load, where it has a gate; or
    None: `unprovable` says why nobody can tell. Its `version` and `model_digest` are what was read."""


EngineRequest = (
    DescribeRequest
    | AuditRequest
    | InitRequest
    | BeginRequest
    | UpdateRequest
    | StageRequest
    | CommitRequest
    | AbortRequest
    | PauseRequest
    | ResumeRequest
)


class EngineOp(enum.StrEnum):
    """The names of the steps, as they stand in URLs."""

    DESCRIBE = "describe"
    AUDIT = "audit"
    INIT = "init"
    BEGIN = "begin"
    UPDATE_WEIGHTS = "update_weights"
    STAGE = "stage"
    COMMIT = "commit"
    ABORT = "abort"
    PAUSE = "pause"
    RESUME = "resume"


REQUEST_TYPES: dict[EngineOp, type[EngineRequest]] = {
    EngineOp.DESCRIBE: DescribeRequest,
    EngineOp.AUDIT: AuditRequest,
    EngineOp.INIT: InitRequest,
    EngineOp.BEGIN: BeginRequest,
    EngineOp.UPDATE_WEIGHTS: UpdateRequest,
    EngineOp.STAGE: StageRequest,
    EngineOp.COMMIT: CommitRequest,
    EngineOp.ABORT: AbortRequest,
    EngineOp.PAUSE: PauseRequest,
    EngineOp.RESUME: ResumeRequest,
}


class PhaseRecord(Message, frozen=True, kw_only=True):
    """One phase as an engine timed it.

    Attributes:
        name: "transfer", "load", "verify", "pause", "commit", "resume"; "undo" and "audit" of a patch.
        start_s: seconds since the epoch.
        end_s: seconds since the epoch.
        track: who, e.g. "engine-0/worker-1".
        detail: e.g. the chunk's number.
    """

    name: str
    start_s: float
    end_s: float
    track: str
    detail: str = ""


class EngineReply(Message, frozen=True, kw_only=True, omit_defaults=True):
    """What an engine answers to every step that went well.

    Attributes:
        engine_id: who answers.
        world_size: number of its workers (TP x PP x DP).
        serving: whether it answers generations.
        version: the version whose bytes it serves; None before the first commit, and where `unhealthy` says that
            its bytes are those of no version.
        writes_live: whether loading touches live weights, so that it has to be paused before the first chunk.
        pauses_first: whether that holds for a session of changes too: it takes no step of one while it generates.
        group: name of the transfer group that all its workers are in; None where there is none (any more).
        run_id: the run that last made it join; None before the first, and where its trainer has ended in order.
        digests_equal: at stage: True, or None with `unprovable` where live bytes can't be read back.
            A mismatch is never a reply but a DigestMismatchError. At describe of a worker: False behind an audit that
            has found other bytes.
        model_digest: at stage: the digest computed from the memory that commit will serve; later that of
            the version served.
        unprovable: why `digests_equal` is None.
        checksum: at stage and commit: the engine's own, of its live weights; engines of one kind and size that were
            given the same version have the same. None where it has none.
        accepts: at describe: the kinds of updates that every worker of it takes, of "full" and "patch".
        artifacts: at describe: the kinds of publications that it takes, of "model" and "lora"; it refuses others at
            begin, before anything is changed.
        unhealthy: at describe: why it refuses to serve until the next full load, where an audit of its live weights
            has found other bytes than it committed.
        written: how many elements of the checkpoint its last commit has written in place; None where that was all of
            them, or it does not say.
        layers: at describe, where it was asked: see `LiveLayer`; empty where it can't tell (yet).
        canary: of an engine that is asked one: what it answered last.
        intact: at describe: whether its live weights are those of `version`, whole, whoever may be answered now.
        left_paused: at describe: whether it is paused with whole weights and no session open, where no lease would end
            that. Behind a commit it is so for a moment; beyond that nobody is known who would resume it.
        leased: at describe: whether it answers under a serving lease alone; None: it does not say.
        phases: what the engine timed since its last reply that carried phases.
    """

    engine_id: str
    world_size: int = 1
    serving: bool = True
    version: Version | None = None
    writes_live: bool = False
    pauses_first: bool = False
    group: str | None = None
    run_id: str | None = None
    digests_equal: bool | None = None
    model_digest: str | None = None
    unprovable: str | None = None
    checksum: str | None = None
    accepts: tuple[str, ...] = ("full",)
    artifacts: tuple[str, ...] = ("model",)
    unhealthy: str | None = None
    written: int | None = None
    layers: tuple[LiveLayer, ...] = ()
    canary: CanaryReading | None = None
    intact: bool = True
    left_paused: bool = False
    leased: bool | None = None
    phases: tuple[PhaseRecord, ...] = ()

    def __post_init__(self) -> None:
        check_world_size(self.world_size)


learn(*REQUEST_TYPES.values(), EngineReply)


@runtime_checkable
class EngineHandle(Protocol):
    """One engine, wherever it runs. An implementation is one way to reach it: in-process, HTTP, an actor."""

    @property
    def engine_id(self) -> str:
        """A name that tells an operator which engine this is."""

    def call(self, op: EngineOp, request: EngineRequest, *, timeout_s: float) -> EngineReply:
        """Runs one step and blocks until it is answered. Safe to call from several threads.

        Raises:
            EngineUnreachableError: nobody answered.
            DeadlineExceededError: no answer within `timeout_s`.
            WeightSyncError: what the engine raised, typed; the engine has then left its old version
                serving, or refuses to serve.
        """


class InferenceEngineClient(Protocol):
    """A sender's or a method's view of any number of engines.

    It fans out, collects one reply per engine, and never turns a failure into a wait: as soon as one engine
    fails, a blocking call raises `SyncFailedError` with the causes so far, without waiting for the slow
    ones. Training rank 0 alone holds one.
    """

    @property
    def engine_ids(self) -> Sequence[str]:
        """The engines that take part now, in the order of their rank offsets."""

    def describe(self, *, timeout_s: float) -> tuple[Mapping[str, EngineReply], Mapping[str, WeightSyncError]]:
        """Asks every engine what it is; never raises: replies, and errors of those that gave none."""

    def get_world_sizes(self, *, timeout_s: float) -> Mapping[str, int]:
        """The number of workers that each engine itself reports.

        Raises:
            NoEnginesError: there is no engine.
            SyncFailedError: one did not answer.
        """

    def only(self, engine_ids: Sequence[str]) -> InferenceEngineClient:
        """The same engines, less those not named."""

    def init(self, requests: Mapping[str, InitRequest], *, timeout_s: float) -> Future[Mapping[str, EngineReply]]:
        """Sends each engine its own init request and returns at once: the sender joins meanwhile."""

    def begin(self, request: BeginRequest, *, timeout_s: float) -> Mapping[str, EngineReply]:
        """Opens a session on every engine."""

    def update_weights(self, request: AnyUpdateRequest, *, timeout_s: float) -> Future[Mapping[str, EngineReply]]:
        """Announces a chunk and returns at once; the future fails as soon as one engine fails."""

    def stage(self, request: StageRequest, *, timeout_s: float) -> Mapping[str, EngineReply]:
        """Stages on every engine."""

    def commit(self, request: CommitRequest, *, timeout_s: float) -> Mapping[str, EngineReply]:
        """Commits on every engine."""

    def abort(self, request: AbortRequest, *, timeout_s: float) -> Mapping[str, WeightSyncError]:
        """Aborts on every engine, best effort; returns what failed instead of raising."""

    def pause(self, request: PauseRequest, *, timeout_s: float) -> Mapping[str, EngineReply]:
        """Pauses generation on every engine."""

    def resume(self, request: ResumeRequest, *, timeout_s: float) -> Mapping[str, EngineReply]:
        """Resumes generation on every engine."""
