"""PushSync: training ranks push a version into every engine, and the engines prove it where they can.

One sync, and who waits for whom (rank 0; the other ranks take part in extraction and agreement alone):

    agree on the version -> engines described, group built where it has to be -> begin on every engine
    -> chunks: extraction thread || pack || broadcast || engines load      (two chunks in flight)
    -> stage: each engine proves its bytes against digests made from the trainer's shards, or says why it can't
    -> pause -> commit -> resume -> agree on the outcome

Any failure: engines abort (they serve their old version, or nothing), the group is dropped and built anew for
the next sync, and every training rank raises.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import uuid
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

import msgspec

from weightsync.codec.base import Codec
from weightsync.codec.full import FullCodec
from weightsync.codec.model_digest import warm_up
from weightsync.config import WeightSyncConfig
from weightsync.errors import (
    ConfigError,
    DeltaTooLargeError,
    ExtractError,
    InvalidRequestError,
    StateError,
    SyncFailedError,
    SyncInProgressError,
    TransferError,
    VersionError,
    WeightSyncError,
    as_weightsync_error,
    is_consequence,
)
from weightsync.extract.base import WeightExtractor
from weightsync.extract.grouping import PlannedChunk
from weightsync.extract.registry import check_extractor
from weightsync.handles.fanout import EngineFanout
from weightsync.observe import Recorder
from weightsync.trainer.checks import check_run_id
from weightsync.trainer.engines import DESCRIBE_TIMEOUT_S, JoinedEngines
from weightsync.trainer.extraction import LockstepExtraction
from weightsync.trainer.push_session import PushSession, SyncParts
from weightsync.trainer.ranks import TrainingRanks
from weightsync.transfer.base import WeightTransferStrategy
from weightsync.transfer.broadcast import BroadcastTransferStrategy
from weightsync.transfer.registry import strategy_for
from weightsync.types import Deadline, EngineHandle, InferenceEngineClient, SyncReport, TensorSpec, Version
from weightsync.types.deadline import check_wait_s
from weightsync.types.process import of_one_process
from weightsync.types.spec import check_config_id

_logger = logging.getLogger(__name__)

GRACE_S = 2.0
"""So long after its deadline a failed sync may still be: engines are told to abort, and the group is given up."""

TIME_OUTS = ("transfer_timeout_s", "join_timeout_s", "pause_timeout_s")
_AFTER_A_FAILURE = "engines serve their old version or refuse to serve; the next sync goes on with those that answer"
_SETTLE_MARGIN_S = 5.0  # how much longer than a sync ranks wait for each other to say how it ended


@of_one_process
class PushSync:
    """A `Push`. Every training rank makes one and calls its methods in the same order.

    Args:
        extractor: of this rank's model.
        client: the engines, or a single one; rank 0 alone needs it, other ranks' is ignored.
        strategy: how bytes move; a gloo broadcast on loopback where not given. Every rank names the same one:
            `CudaIpcTransferStrategy` and `PackedCudaIpcTransferStrategy` lend each rank's own memory.
        codec: what travels: whole tensors, or with `ChangesCodec()` what has changed since the version that every
            engine serves. An object of its own for each PushSync; a sharing strategy takes whole tensors alone.
        dtype: the engine's dtype; None keeps the trainer's.
        run_id: name of this trainer's run; rank 0 makes one where not given.
        model_id: which model.
        transfer_timeout_s: deadline of one whole sync, from the moment at which every training rank has called it. A
            failed one returns `GRACE_S` later at the latest, unless a training rank hangs.
        join_timeout_s: how long building the group may take, within that.
        pause_timeout_s: how long an engine may take to finish running generations, within `transfer_timeout_s`.
        require_all_engines: fail when an engine doesn't answer before the sync; otherwise go on without it
            (it is reported as lost, and taken in again when it answers before a later sync).
        alone: this process pushes by itself, whatever group of `torch.distributed` it is in: its extractor has whole
            tensors.
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
        alone: bool = False,
        recorder: Recorder | None = None,
    ) -> None:
        _check_kinds(extractor, client, strategy, codec)
        for name, seconds in (("transfer", transfer_timeout_s), ("join", join_timeout_s), ("pause", pause_timeout_s)):
            check_wait_s(f"{name}_timeout_s", seconds)
        check_config_id("model_id", model_id)
        check_run_id(run_id)
        self.run_id = run_id
        self._transfer_timeout_s = transfer_timeout_s
        self._join_timeout_s = join_timeout_s
        self._alone = alone
        self.recorder = recorder or Recorder("trainer/rank-0")
        strategy = strategy or BroadcastTransferStrategy(
            join_timeout_s=join_timeout_s, transfer_timeout_s=transfer_timeout_s
        )
        codec = codec or FullCodec()
        codec.claim(self)
        extractor.alone = alone
        sharer = strategy.create_sharer()
        if sharer is not None and not codec.passes_through:
            sharer.close()
            raise ConfigError(
                f"strategy {strategy.name} lends whole tensors where they lie, codec {codec.name} makes others: use "
                "strategy broadcast, or the full codec"
            )
        self._strategy_name = strategy.name
        self._engines = JoinedEngines(
            _as_client(client), strategy, model_id=model_id, join_timeout_s=join_timeout_s, recorder=self.recorder
        )
        self._parts = SyncParts(
            extractor=extractor,
            engines=self._engines,
            codec=codec,
            dtype=dtype,
            model_id=model_id,
            pause_timeout_s=pause_timeout_s,
            require_all_engines=require_all_engines,
            recorder=self.recorder,
            sharer=sharer,
        )
        self._busy = threading.Lock()
        self._closed = False
        self._ranks: TrainingRanks | None = None
        self._extraction: LockstepExtraction | None = None
        self._last: Version | None = None
        self._said: tuple[Sequence[TensorSpec], Sequence[PlannedChunk], dict[str, str]] | None = None

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
            config: its `transfer` section, the dtype of `extract`, `run_id` and the `model_tag` of `inference_service`
                count.
            extractor: as for the constructor; what `config` says of chunks has to be its own.
            client: as for the constructor.
            options: further arguments of the constructor.

        Raises:
            ConfigError: the config asks for what nobody would read: another sync_method and its keys, a sync_mode that
                a controller would have to keep, validation, engines beside `client`, chunks that the extractor has not.
        """
        config = _as_read(config)
        _check_kinds(extractor, client, None, None)
        check_extractor(config, extractor)
        said = {key: options.pop(key) for key in TIME_OUTS if key in options}
        config = config.model_copy(update={"transfer": config.transfer.model_copy(update=said)})
        if config.transfer.delta:
            options.setdefault("codec", _changes_codec())
            if options["codec"].passes_through:
                raise ConfigError(f"transfer.delta is true, and codec {options['codec'].name} sends whole tensors")
        values = {key: getattr(config.transfer, key) for key in TIME_OUTS}
        values |= {"model_id": config.inference_service.model_tag, "run_id": config.run_id}
        return cls(
            extractor, client, **{"strategy": strategy_for(config), "dtype": config.extract.dtype, **values, **options}
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
                    deadline = self._entry_deadline()
                    self._engines.ready(
                        deadline,
                        run_id=self.run_id,
                        require_all=require_all,
                        artifact="model" if self._parts.extractor.adapter is None else "lora",
                    )
            except Exception as caught:
                error = as_weightsync_error(caught, TransferError, "initialising failed")
            replies = ranks.settle(error, run_id=self.run_id)
            self.run_id = str(replies[0]["run_id"])

    def check(self) -> None:
        """Asks every engine whether the model's names, shapes and dtypes are its own; every training rank, after
        `initialize`. Nothing moves; the first sync builds the transfer group anew.

        Raises:
            SyncFailedError: an engine's model is another; `causes` says what differs. It goes on serving.
            WeightSyncError: an engine is gone, or another rank failed.
        """
        with self._exclusive():
            ranks = self._training_ranks()
            error: WeightSyncError | None = None
            try:
                if ranks.rank == 0:
                    goal = Version(run_id=str(self.run_id), number=0)
                    PushSession(self._parts, ranks, goal, self._entry_deadline()).check()
            except Exception as caught:
                error = as_weightsync_error(caught, SyncFailedError, "the engines could not be checked")
            finally:
                self._engines.group.leave()
            ranks.settle(error)

    def sync_weights(self, version: int, *, error: WeightSyncError | None = None) -> SyncReport:
        """Pushes the model's present weights as `version`. Every training rank calls it; all return the same.

        Args:
            version: rises from call to call; repeating the last one is allowed while the bytes are the same.
            error: what this rank has found to be wrong before: every rank raises it, and nothing is sent.

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
            self._agree_on_start(ranks, version, error)
            deadline = Deadline(self._transfer_timeout_s)  # behind what all come to: it ends on all ranks at once
            goal = Version(run_id=str(self.run_id), number=version)
            run = PushSession(self._parts, ranks, goal, deadline)
            try:
                report = self._sync_once(run)
            except WeightSyncError as error:
                if not _all_is_too_large(ranks.told):
                    cause = _cause_of(error, ranks.told)
                    if cause is error:
                        raise
                    raise cause from error
                run = PushSession(self._parts, ranks, goal, deadline, sent_bytes=run.sent_bytes, why_full=error.message)
                report = self._sync_once(run)
            self._last = goal
            return report

    def _sync_once(self, run: PushSession) -> SyncReport:
        """One try; every rank returns the same report, or raises.

        Raises:
            DeltaTooLargeError: every rank has it; the codec sends the next one in full.
        """
        ranks = self._training_ranks()
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
        finally:
            self._extraction = run.extraction
            run.end(error)
        replies = ranks.settle(error, report=None if report is None else msgspec.to_builtins(report))
        return msgspec.convert(replies[0]["report"], SyncReport)

    def close(self) -> None:
        """Leaves the transfer group and gives shared memory back. Idempotent; engines go on serving.

        Raises:
            SyncInProgressError: a sync is running; it goes on.
        """
        with self._exclusive():
            self._closed = True
            self._engines.close()
            self._parts.codec.close()
            if self._parts.sharer is not None:
                self._parts.sharer.close()
            if self._ranks is not None:
                self._ranks.close()

    def _stream_said(self, specs: Sequence[TensorSpec], plan: Sequence[PlannedChunk]) -> dict[str, str]:
        """What ranks compare of the stream. Specs and plans never change: the same objects say the same."""
        if self._said is None or self._said[0] is not specs or self._said[1] is not plan:
            if not specs:
                raise InvalidRequestError("the model has no weights to sync")
            tensors = _digest_of(f"{spec.name}:{spec.dtype}:{spec.shape}" for spec in specs)
            chunks = _digest_of(" ".join(spec.name for spec in chunk.specs) for chunk in plan)
            self._said = specs, plan, {"tensors": tensors, "chunks": chunks}
        return self._said[2]

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[None]:
        if not self._busy.acquire(blocking=False):
            raise SyncInProgressError("another call of this PushSync is running", state_left="it goes on")
        try:
            yield
        finally:
            self._busy.release()

    def _training_ranks(self) -> TrainingRanks:
        if self._closed:
            raise StateError("this PushSync is closed")
        if self._ranks is None:
            self._ranks = TrainingRanks(timeout_s=self._transfer_timeout_s + _SETTLE_MARGIN_S, alone=self._alone)
        return self._ranks

    def _entry_deadline(self) -> Deadline:
        """Of rank 0 outside a sync: it ends before the other ranks, which wait for its word, take it for gone."""
        return Deadline(min(self._join_timeout_s, self._transfer_timeout_s) + DESCRIBE_TIMEOUT_S)

    def _agree_on_start(self, ranks: TrainingRanks, version: int, error: WeightSyncError | None) -> None:
        """Every rank has the same version, strategy, tensors and chunks, or nobody starts."""
        start: dict[str, Any] = {"version": version, "strategy": self._strategy_name, "tensors": "", "chunks": ""}
        try:
            if self.run_id is None:
                raise StateError("call initialize() on every rank first")
            if self._last is not None and version < self._last.number:
                raise VersionError(f"{self._last} was synced already; versions rise within a run", version=version)
            extractor, dtype = self._parts.extractor, self._parts.dtype
            start.update(self._stream_said(extractor.metadata(dtype), extractor.chunk_plan(dtype)))
        except Exception as caught:
            message = "reading the model's tensors failed"
            error = error or as_weightsync_error(caught, ExtractError, message, rank=ranks.rank)
        for rank, reply in enumerate(ranks.settle(error, start=start)):
            other = reply.get("start")
            if other is None:
                raise StateError(
                    f"training rank {rank} is at another step of a sync: ranks call sync_weights in one order, and "
                    "again after an error",
                    rank=rank,
                )
            differs = [
                f"{what} {other.get(what)}, here {mine}" for what, mine in start.items() if other.get(what) != mine
            ]
            if differs:
                raise ConfigError(f"training rank {rank} means another sync: it has {'; '.join(differs)}", rank=rank)


def _all_is_too_large(errors: Sequence[WeightSyncError]) -> bool:
    """Whether nothing else has failed on any rank than that a change was too large. Every rank was told the same."""
    causes = [error for error in errors if not is_consequence(error)]
    return bool(causes) and all(isinstance(error, DeltaTooLargeError) for error in causes)


def _cause_of(error: WeightSyncError, errors: Sequence[WeightSyncError]) -> WeightSyncError:
    """What to raise: a change that was too large is the reason for nothing, where something else has failed too."""
    others = [other for other in errors if not isinstance(other, DeltaTooLargeError) and not is_consequence(other)]
    return others[0] if isinstance(error, DeltaTooLargeError) and others else error


def _changes_codec() -> Codec:
    """Imported where it is wanted: it imports numba's kernels."""
    from weightsync.codec.changes import ChangesCodec

    return ChangesCodec()


def _digest_of(lines: Iterable[str]) -> str:
    return uuid.uuid5(uuid.NAMESPACE_OID, "\n".join(lines)).hex


def _as_client(client: InferenceEngineClient | EngineHandle | None) -> InferenceEngineClient | None:
    """A single engine is a fan-out of one."""
    if client is not None and not hasattr(client, "describe"):
        return EngineFanout([client])
    return cast("InferenceEngineClient | None", client)


def _check_kinds(extractor: object, client: object, strategy: object, codec: object) -> None:
    """Names and URLs are taken by configs; here they would fail late and in words of Python's."""
    if not isinstance(extractor, WeightExtractor):
        raise ConfigError(f"extractor is a WeightExtractor, e.g. ModuleWeightExtractor(model), not {extractor!r:.80}")
    if client is not None and not (hasattr(client, "engine_id") or hasattr(client, "engine_ids")):
        raise ConfigError(f"client is an engine's handle or EngineFanout([...]), not {client!r:.80}")
    if strategy is not None and not isinstance(strategy, WeightTransferStrategy):
        raise ConfigError(
            f"strategy is an object such as PackedCudaIpcTransferStrategy(), not {strategy!r:.80}; names are for "
            "PushSync.from_config"
        )
    if codec is not None and not isinstance(codec, Codec):
        raise ConfigError(f"codec is an object such as ChangesCodec(), not {codec!r:.80}")


def _as_read(config: WeightSyncConfig) -> WeightSyncConfig:
    """A setting that nothing would read is refused: silence would be taken for obedience."""
    config = config.for_method("push")
    asked = {
        "sync_mode": (config.sync_mode, config.sync_mode == "sync"),
        "validate_freq": (config.validate_freq, not config.validate_freq),
        "push.engines": (list(config.push.engines), not config.push.engines),
        "push.controller": (config.push.controller, not config.push.controller),
    }
    unread = {key: value for key, (value, fine) in asked.items() if not fine}
    if unread:
        raise ConfigError(
            f"a PushSync does not read {', '.join(f'{key}: {value!r}' for key, value in unread.items())}: it is given "
            "its engines, and syncs whenever sync_weights is called. weightsync.push(model, config=...) reads the "
            "engines and the controller, and a controller the rest",
            keys=list(unread),
        )
    return config
