"""PushSync: training ranks push a version into every engine, and the engines prove it.

One sync, and who waits for whom (rank 0; the other ranks take part in extraction and agreement alone):

    agree on the version -> engines described, group built where it has to be -> begin on every engine
    -> chunks: extraction thread || pack || broadcast || engines load      (two chunks in flight)
    -> stage: every engine proves its bytes against digests made from the trainer's shards
    -> pause -> commit -> resume -> agree on the outcome

Any failure: engines abort (they serve their old version, or nothing), the group is dropped and built anew for
the next sync, and every training rank raises.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import msgspec

from weightsync.clients.fanout import EngineFanout
from weightsync.codec.base import Codec
from weightsync.codec.digest import ShardSum, model_digest, shard_sum, warm_up
from weightsync.codec.full import FullCodec
from weightsync.config import WeightSyncConfig
from weightsync.errors import (
    ConfigError,
    DeadlineExceededError,
    DigestMismatchError,
    EngineError,
    ExtractError,
    GroupJoinError,
    InvalidRequestError,
    NoEnginesError,
    StateError,
    SyncFailedError,
    SyncInProgressError,
    TransferError,
    UnsupportedError,
    VersionError,
    WeightSyncError,
    as_weightsync_error,
    is_consequence,
)
from weightsync.extract.base import WeightExtractor
from weightsync.observe import Recorder, now_s, paused_s, phases_s
from weightsync.publish.extraction import LockstepExtraction
from weightsync.publish.ranks import TrainingRanks
from weightsync.tensors import spec_of
from weightsync.transfer.base import WeightTransferSender, WeightTransferStrategy, init_requests
from weightsync.transfer.broadcast import BroadcastTransferStrategy
from weightsync.transfer.registry import strategy_for
from weightsync.types import (
    AbortRequest,
    BeginRequest,
    CommitRequest,
    Deadline,
    EngineHandle,
    EngineReply,
    HeldTensor,
    InferenceEngineClient,
    InitRequest,
    Manifest,
    PauseRequest,
    PhaseRecord,
    ResumeRequest,
    StageRequest,
    SyncReport,
    Version,
    WeightChunk,
)
from weightsync.types.deadline import check_wait_s

_logger = logging.getLogger(__name__)

_ABORT_TIMEOUT_S = 2.0
_DESCRIBE_TIMEOUT_S = 3.0
_SHUN_S, _SHUN_LONGEST_S = 30.0, 600.0  # how long an engine that did not join is left out
_SHUN_BUSY_S = 5.0  # how long one is left out that is still busy with an earlier sync
_COMMIT_LEASE_S = 10.0  # how long a commit may take before paused engines go on without it
_AFTER_A_FAILURE = "engines serve their old version or refuse to serve; the next sync goes on with those that answer"
_SETTLE_MARGIN_S = 5.0  # how much longer than a sync ranks wait for each other to say how it ended


class PushSync:
    """A `SyncMethod`. Every training rank makes one and calls its methods in the same order.

    Args:
        extractor: of this rank's model.
        client: the engines, or a single one; rank 0 alone needs it, other ranks' is ignored.
        strategy: how bytes move; a gloo broadcast on loopback where not given.
        codec: how weights are encoded; the engines use the same.
        dtype: the engine's dtype; None keeps the trainer's.
        run_id: name of this trainer's run; rank 0 makes one where not given.
        model_id: which model.
        transfer_timeout_s: deadline of one whole sync.
        join_timeout_s: how long building the group may take, within that.
        pause_timeout_s: how long an engine may take to finish running generations.
        require_all_engines: fail when an engine doesn't answer before the sync; otherwise go on without it
            (it is reported as lost, and taken in again when it answers before a later sync).
        recorder: where phases go; an own one where not given.
    """

    def __init__(
        self,
        extractor: WeightExtractor,
        client: InferenceEngineClient | EngineHandle | None = None,
        *,
        strategy: WeightTransferStrategy | None = None,
        codec: Codec | None = None,
        dtype: str | None = None,
        run_id: str | None = None,
        model_id: str = "default",
        transfer_timeout_s: float = 300.0,
        join_timeout_s: float = 30.0,
        pause_timeout_s: float = 30.0,
        require_all_engines: bool = False,
        recorder: Recorder | None = None,
    ) -> None:
        self._extractor = extractor
        self._all_engines = _as_client(client)
        for name, seconds in (("transfer", transfer_timeout_s), ("join", join_timeout_s), ("pause", pause_timeout_s)):
            check_wait_s(f"{name}_timeout_s", seconds)
        self._strategy = strategy or BroadcastTransferStrategy(
            join_timeout_s=join_timeout_s, transfer_timeout_s=transfer_timeout_s
        )
        self._codec = codec or FullCodec()
        self._dtype = dtype
        self.run_id = run_id
        self._model_id = model_id
        self._transfer_timeout_s = transfer_timeout_s
        self._join_timeout_s = join_timeout_s
        self._pause_timeout_s = pause_timeout_s
        self._require_all_engines = require_all_engines
        self._busy = threading.Lock()
        self._ranks: TrainingRanks | None = None
        self._extraction: LockstepExtraction | None = None
        self._last: Version | None = None
        # rank 0 alone
        self._sender: WeightTransferSender | None = None
        self._sender_group: str | None = None
        self._client: InferenceEngineClient | None = None
        self._shunned: dict[str, _Shunned] = {}
        self._lost_before: set[str] = set()
        self.recorder = recorder or Recorder("trainer/rank-0")

    @classmethod
    def from_config(
        cls,
        config: WeightSyncConfig,
        extractor: WeightExtractor,
        client: InferenceEngineClient | EngineHandle | None = None,
        **options: Any,
    ) -> PushSync:
        """A push as `config` says; `extract.registry.extractor_for` makes the extractor from the same config.

        Args:
            config: its `transfer` section and the dtype of `extract` count.
            extractor: as for the constructor.
            client: as for the constructor.
            options: further arguments of the constructor.

        Raises:
            UnsupportedError: the config asks for what a push is not or this build has not: another sync_method, a
                sync_mode that a controller would have to keep, validation, a strategy.
        """
        _refuse_what_is_not_read(config)
        transfer = config.transfer
        return cls(
            extractor,
            client,
            strategy=strategy_for(config),
            dtype=config.extract.dtype,
            transfer_timeout_s=transfer.transfer_timeout_s,
            join_timeout_s=transfer.join_timeout_s,
            pause_timeout_s=transfer.pause_timeout_s,
            **options,
        )

    def initialize(self, *, require_all: bool = True) -> None:
        """Meets the engines and builds the transfer group. Every training rank calls it once, first.

        From here on this run is the engines' current one; they refuse a trainer of a run that they had before.

        Args:
            require_all: fail where an engine does not answer: its address or token may be wrong. With False the
                trainer starts without it, as a restarted one may have to.

        Raises:
            NoEnginesError: no engine answers.
            SyncFailedError: some do not, and `require_all`; `causes` says why.
            GroupJoinError: an engine did not join. `initialize` may be called again.
            WeightSyncError: another rank failed.
        """
        with self._exclusive():
            ranks = self._training_ranks()
            error: WeightSyncError | None = None
            try:
                warm_up()
                if ranks.rank == 0:
                    self.run_id = self.run_id or f"run-{uuid.uuid4().hex[:12]}"
                    deadline = Deadline(self._join_timeout_s + _DESCRIBE_TIMEOUT_S)
                    self._ready_sender(deadline, require_all=require_all)
            except Exception as caught:
                error = as_weightsync_error(caught, TransferError, "initialising failed")
            said = ranks.settle(error, run_id=self.run_id)
            self.run_id = str(said[0]["run_id"])

    def sync_weights(self, version: int) -> SyncReport:
        """Pushes the model's present weights as `version`. Every training rank calls it; all return the same.

        Args:
            version: rises from call to call; repeating the last one is allowed while the bytes are the same.

        Raises:
            SyncInProgressError: another sync of this object runs. It is not disturbed.
            SyncFailedError: engines failed; `causes` says which and why. They serve their old version, or
                refuse to serve. The next call starts over with those that answer.
            WeightSyncError: as for its kind; the same holds.
        """
        with self._exclusive():
            ranks = self._training_ranks()
            if self._extraction is not None and self._extraction.hangs:
                raise StateError(
                    "the extraction of an earlier sync still hangs in a collective: restart the training job",
                    rank=ranks.rank,
                )
            if not isinstance(version, int) or isinstance(version, bool) or version < 0:
                raise InvalidRequestError(f"a version is a whole number from 0 on, not {version!r}")
            deadline = Deadline(self._transfer_timeout_s)
            self._agree_on_start(ranks, version)
            run = _Sync(self, ranks, version, deadline)
            report: SyncReport | None = None
            error: WeightSyncError | None = None
            try:
                report = run.run()
            except BaseException as caught:
                error = as_weightsync_error(caught, SyncFailedError, "the sync failed")
                error.version = error.version or str(run.version)
                error.state_left = error.state_left or _AFTER_A_FAILURE
                run.fail(error)
                if error is ranks.agreed_error or not isinstance(caught, Exception):
                    raise  # every rank knows already and settles no more; or this process was told to end
            told = ranks.settle(error, report=None if report is None else msgspec.to_builtins(report))
            self._last = run.version
            return msgspec.convert(told[0]["report"], SyncReport)

    def close(self) -> None:
        """Leaves the transfer group. Idempotent; engines go on serving.

        Raises:
            SyncInProgressError: a sync is running; it goes on.
        """
        with self._exclusive():
            self._drop_sender()
            if self._ranks is not None:
                self._ranks.close()

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[None]:
        if not self._busy.acquire(blocking=False):
            raise SyncInProgressError("another call of this PushSync is running", state_left="it goes on")
        try:
            yield
        finally:
            self._busy.release()

    def _training_ranks(self) -> TrainingRanks:
        if self._ranks is None:
            self._ranks = TrainingRanks(timeout_s=self._transfer_timeout_s + _SETTLE_MARGIN_S)
        return self._ranks

    def _agree_on_start(self, ranks: TrainingRanks, version: int) -> None:
        """Every rank has the same version and the same tensors, or nobody starts."""
        error: WeightSyncError | None = None
        names: list[str] = []
        try:
            if self.run_id is None:
                raise StateError("call initialize() on every rank first")
            if self._last is not None and version < self._last.number:
                raise VersionError(f"{self._last} was synced already; versions rise within a run", version=version)
            names = [f"{spec.name}:{spec.dtype}:{spec.shape}" for spec in self._extractor.metadata(self._dtype)]
            if not names:
                raise InvalidRequestError("the model has no weights to sync")
        except Exception as caught:
            error = as_weightsync_error(caught, ExtractError, "reading the model's tensors failed", rank=ranks.rank)
        fingerprint = [version, uuid.uuid5(uuid.NAMESPACE_OID, "\n".join(names)).hex]
        for rank, said in enumerate(ranks.settle(error, start=fingerprint)):
            if said["start"] != fingerprint:
                raise ConfigError(
                    f"training rank {rank} syncs version {said['start'][0]}, this one {version}, or other tensors",
                    rank=rank,
                )

    # Rank 0 alone, below.

    def _ready_sender(
        self, deadline: Deadline, *, require_all: bool
    ) -> tuple[InferenceEngineClient, dict[str, WeightSyncError]]:
        """A client of the engines that answer, all in one transfer group with a usable sender."""
        if self._all_engines is None:
            raise NoEnginesError("training rank 0 needs a client of the engines")
        lost = {who: shunned.error for who, shunned in self._shunned.items() if shunned.now}
        asked = self._all_engines.only([who for who in self._all_engines.engine_ids if who not in lost])
        replies, errors = asked.describe(timeout_s=min(_DESCRIBE_TIMEOUT_S, deadline.check("time to ask the engines")))
        for who, error in errors.items():
            if isinstance(error, DeadlineExceededError):  # a hung engine would cost every sync that time
                self._shun(who, error, _SHUN_BUSY_S)
        lost.update(errors)
        here = [who for who in asked.engine_ids if who in replies]
        if not here:
            why = "; ".join(f"{who}: {error}" for who, error in lost.items())
            raise NoEnginesError(f"no engine answers: {why or 'none is known'}")
        if lost and require_all:
            raise SyncFailedError(
                f"{', '.join(sorted(lost))} can't take part: check address and token, or go on without "
                "(require_all=False)",
                causes=lost,
                state_left="nothing was changed",
            )
        for who in lost:
            if who not in self._lost_before:
                _logger.warning("syncing without engine %s: %s", who, lost[who])
            self.recorder.add(PhaseRecord(name="engine lost", start_s=now_s(), end_s=now_s(), track=who))
        self._lost_before = set(lost)
        client = self._all_engines.only(here)
        same = self._client is not None and list(self._client.engine_ids) == here
        joined = all(replies[who].group == self._sender_group for who in here)
        if not (same and joined and self._sender is not None and self._sender.usable):
            self._drop_sender()
            with self.recorder.phase("join group"):
                self._join(client, {who: replies[who].world_size for who in here}, deadline)
        self._client = client
        return client, lost

    def _join(self, client: InferenceEngineClient, world_sizes: Mapping[str, int], deadline: Deadline) -> None:
        info, token = self._strategy.create_init_info(world_sizes)
        requests = init_requests(info, world_sizes, run_id=str(self.run_id), model_id=self._model_id)
        timeout_s = min(self._join_timeout_s + 1.0, deadline.check("time to build the group"))
        joined = client.init(requests, timeout_s=timeout_s)
        try:
            sender = self._strategy.create_sender(info, token, joined=joined, record=self.recorder.add)
            try:
                joined.result(timeout_s)
            except BaseException:
                sender.close()
                raise
        except BaseException as error:
            typed = as_weightsync_error(error, GroupJoinError, "engines did not join")
            self._shun_missing(typed, requests, world_sizes)
            raise typed from error
        self._sender = sender
        self._sender_group = info.group_name

    def _shun_missing(
        self, error: WeightSyncError, requests: Mapping[str, InitRequest], world_sizes: Mapping[str, int]
    ) -> None:
        """Leaves engines that did not join out of the next syncs, for a time that doubles."""
        missing = set(error.details.get("missing_ranks", ()))
        for who, request in requests.items():
            ranks = range(request.rank_offset, request.rank_offset + world_sizes[who])
            causes = error.causes if isinstance(error, SyncFailedError) else {}
            if missing.intersection(ranks) or (who in causes and not is_consequence(causes[who])):
                self._shun(who, error, _SHUN_S)

    def _shun_busy(self, error: WeightSyncError) -> None:
        """Leaves engines out whose loader still sits in an earlier sync: one of them must not fail every sync."""
        for who, cause in (error.causes if isinstance(error, SyncFailedError) else {}).items():
            if isinstance(cause, (SyncInProgressError, StateError)):
                self._shun(who, cause, _SHUN_BUSY_S)

    def _shun(self, who: str, error: WeightSyncError, for_s: float) -> None:
        self._shunned[who] = _Shunned(error=error, before=self._shunned.get(who), for_s=for_s)

    def _drop_sender(self) -> None:
        if self._sender is not None:
            self._sender.close()
        self._sender = None
        self._sender_group = None


class _Shunned:
    """An engine that answered and did not take part: left out for a time that doubles from failure to failure."""

    def __init__(self, *, error: WeightSyncError, before: _Shunned | None, for_s: float) -> None:
        self.error = error
        self._for_s: float = min(_SHUN_LONGEST_S, 2 * before._for_s) if before else for_s
        self._until = Deadline(self._for_s)

    @property
    def now(self) -> bool:
        """Whether it is still left out."""
        return not self._until.expired


class _Sync:
    """One sync, from agreement to outcome."""

    def __init__(self, push: PushSync, ranks: TrainingRanks, version: int, deadline: Deadline) -> None:
        self._push = push
        self._ranks = ranks
        self._deadline = deadline
        self.version = Version(run_id=str(push.run_id), number=version)
        self._session = f"{self.version}#{uuid.uuid4().hex[:8]}"
        self._client: InferenceEngineClient | None = None
        self._recorder = push.recorder
        self._records: list[PhaseRecord] = []
        self._of_engines: list[PhaseRecord] = []
        self._extraction: LockstepExtraction | None = None

    def run(self) -> SyncReport | None:
        """Runs the sync; a report on rank 0."""
        if self._ranks.rank == 0:
            return self._lead()
        self._ranks.settle(None)
        extraction = self._start_extraction(keep=False)
        self._exchange_sums(extraction.finish())
        return None

    def fail(self, error: WeightSyncError) -> None:
        """Leaves everything as it was before: engines abort, the group goes, the extraction stops."""
        if self._extraction is not None:
            self._extraction.stop(error)
        if self._client is not None:
            request = AbortRequest(session=self._session, reason=error.message[:500])
            with contextlib.suppress(Exception), self._recorder.phase("abort", detail=type(error).__name__):
                self._client.abort(request, timeout_s=_ABORT_TIMEOUT_S)  # the ranks still have to learn of `error`
        if self._ranks.rank == 0:
            self._push._drop_sender()
        if self._extraction is not None:
            with contextlib.suppress(WeightSyncError):
                self._extraction.finish()
            if self._extraction.hangs:  # it may still be inside `agree`: nobody else may use that group now
                self._ranks.give_up("the extraction hangs in a collective")

    def _lead(self) -> SyncReport:
        unsubscribe = self._recorder.subscribe(self._records.append)
        try:
            return self._steps()
        finally:
            unsubscribe()

    def _steps(self) -> SyncReport:
        push, deadline = self._push, self._deadline
        error: WeightSyncError | None = None
        lost: dict[str, WeightSyncError] = {}
        try:
            client, lost = push._ready_sender(deadline, require_all=push._require_all_engines)
            manifest = Manifest(
                version=self.version,
                model_id=push._model_id,
                tensors=push._extractor.metadata(push._dtype),
            )
            self._client = client
            replies = self._call(
                "begin",
                lambda left: client.begin(
                    BeginRequest(session=self._session, manifest=manifest, deadline_s=left), timeout_s=left
                ),
            )
            paused_early = any(reply.writes_live for reply in replies.values())
            if paused_early:  # before the other ranks start to extract: a failure is told by this settle
                self._pause(client, lease_s=deadline.remaining_s)
        except Exception as caught:
            error = as_weightsync_error(caught, SyncFailedError, "the sync did not start")
            push._shun_busy(error)
        self._ranks.settle(error)
        for who in client.engine_ids:
            push._shunned.pop(who, None)
        num_chunks, digests, total = self._transfer(client)
        proved = manifest.with_digests(digests, model_digest(manifest.tensors, total))
        staged = self._call(
            "stage",
            lambda left: client.stage(StageRequest(session=self._session, manifest=proved), timeout_s=left),
        )
        _check_proofs(staged, proved)
        if not paused_early:
            self._pause(client, lease_s=push._pause_timeout_s + _COMMIT_LEASE_S)
        committed = self._call(
            "commit", lambda left: client.commit(CommitRequest(session=self._session), timeout_s=left)
        )
        _check_versions(committed, self.version)
        self._call("resume", lambda left: client.resume(ResumeRequest(session=self._session), timeout_s=left))
        unprovable = {who: reply.unprovable for who, reply in staged.items() if reply.unprovable}
        return SyncReport(
            version=self.version,
            engine_ids=tuple(staged),
            lost={who: str(cause) for who, cause in lost.items()},
            total_bytes=manifest.total_bytes,
            num_chunks=num_chunks,
            seconds=deadline.timeout_s - deadline.remaining_s,
            paused_s=paused_s(self._of_engines),
            phases_s=phases_s(self._records),
            digests_equal=None if unprovable else True,
            unprovable=unprovable,
        )

    def _transfer(self, client: InferenceEngineClient) -> tuple[int, dict[str, str], ShardSum]:
        """Moves all chunks; gives their number, each tensor's digest, and the sum over all shards."""
        sender = self._push._sender
        assert sender is not None
        encoder = self._push._codec.encoder()
        extraction = self._start_extraction(keep=True)
        summed = _Summed(extraction.chunks(), self._push._extractor)
        num_chunks = sender.send_chunks(encoder.encode(summed), client, session=self._session, deadline=self._deadline)
        mine = extraction.finish()
        total = self._exchange_sums(mine)
        return num_chunks, dict(encoder.digests()), summed.total if total is None else total

    def _start_extraction(self, *, keep: bool) -> LockstepExtraction:
        extraction = LockstepExtraction(
            self._push._extractor,
            dtype=self._push._dtype,
            ranks=self._ranks,
            deadline=self._deadline,
            recorder=self._recorder,
            keep=keep,
        )
        self._extraction = self._push._extraction = extraction
        extraction.start()
        return extraction

    def _exchange_sums(self, mine: ShardSum | None) -> ShardSum | None:
        """The sum of every rank's shards; None where shards can't be summed without communication."""
        said = self._ranks.settle(None, lanes=None if mine is None else [mine.lane_a, mine.lane_b])
        if any(what["lanes"] is None for what in said):
            return None
        total = ShardSum.zero()
        for what in said:
            total = total + ShardSum(lane_a=what["lanes"][0], lane_b=what["lanes"][1])
        return total

    def _pause(self, client: InferenceEngineClient, *, lease_s: float) -> None:
        """Pauses every engine; should this trainer die, they go on by themselves after `lease_s`."""
        timeout_s = self._push._pause_timeout_s
        self._call(
            "pause",
            lambda left: client.pause(
                PauseRequest(session=self._session, timeout_s=min(timeout_s, left), lease_s=min(lease_s, left)),
                timeout_s=left,
            ),
        )

    def _call(self, name: str, step: Callable[[float], Mapping[str, EngineReply]]) -> Mapping[str, EngineReply]:
        with self._recorder.phase(f"wait for {name}"):  # the phases of that name are the engines' own
            replies = step(self._deadline.check(f"time to {name}"))
        for reply in replies.values():
            self._of_engines.extend(reply.phases)
            self._recorder.extend(reply.phases)
        return replies


def _as_client(client: InferenceEngineClient | EngineHandle | None) -> InferenceEngineClient | None:
    """A single engine is a fan-out of one."""
    if client is not None and not hasattr(client, "describe"):
        return EngineFanout([client])
    return cast("InferenceEngineClient | None", client)


def _refuse_what_is_not_read(config: WeightSyncConfig) -> None:
    """A setting that nothing would read is refused: silence would be taken for obedience."""
    asked = {
        "sync_method": (config.sync_method, config.sync_method in (None, "push")),
        "sync_mode": (config.sync_mode, config.sync_mode == "sync"),
        "validate_freq": (config.validate_freq, not config.validate_freq),
    }
    unread = [f"{key}: {value!r}" for key, (value, fine) in asked.items() if not fine]
    if unread:
        raise UnsupportedError(
            f"a push does not do {', '.join(unread)}: that needs a controller or a method that this build has not. "
            "A PushSync syncs whenever sync_weights is called (sync_method push, sync_mode sync, validate_freq 0)"
        )


def _check_proofs(staged: Mapping[str, EngineReply], manifest: Manifest) -> None:
    """An engine that answered 'well' has proved it, or says why it can't; anything else is a failure."""
    for who, reply in staged.items():
        proved = reply.digests_equal is True and reply.model_digest == manifest.model_digest
        if not proved and not (reply.digests_equal is None and reply.unprovable):
            raise DigestMismatchError(
                f"it answered stage without a proof: digests_equal {reply.digests_equal}, model_digest "
                f"{reply.model_digest}; published was {manifest.model_digest}",
                peer=who,
                version=str(manifest.version),
            )


def _check_versions(committed: Mapping[str, EngineReply], version: Version) -> None:
    for who, reply in committed.items():
        if reply.version != version:
            raise EngineError(f"it answered commit well and serves {reply.version}", peer=who, version=str(version))


class _Summed:
    """Chunks on their way to the encoder; sums whole tensors where shards can't be summed without communication."""

    def __init__(self, chunks: Iterator[WeightChunk], extractor: WeightExtractor) -> None:
        self._chunks = chunks
        self._needed = not extractor.can_shard_locally()
        self.total = ShardSum.zero()

    def __iter__(self) -> Iterator[WeightChunk]:
        for chunk in self._chunks:
            if self._needed:
                for name, tensor in zip(chunk.names, chunk.tensors, strict=True):
                    self.total = self.total + shard_sum(HeldTensor(spec=spec_of(name, tensor), box=None, tensor=tensor))
            yield chunk
            del chunk
