"""SGLangEngine: an `EngineHandle` for an SGLang server, in SGLang's own calls.

    init    init_weights_update_group; a pause that a dead trainer left behind ends
    begin   nothing: SGLang's begin touches live weights
    pause   pause_generation, update_weight_version "loading", begin_weight_update
    update  update_weights_from_distributed {flattened_bucket}, one after the other in the order of seq
    stage   end_weight_update
    commit  update_weight_version
    resume  continue_generation
    abort   end_weight_update; the old version goes on where nothing was loaded, else the server stays paused

SGLang loads into live weights and has no undo, so it is paused from before the first chunk. It knows neither sessions
nor leases: what this handle believes of it is written into its weight version, where the next trainer reads it.

A trainer takes `SGLangTransferStrategy` for it, whose sender joins SGLang's process group and packs as SGLang unpacks.
"""

from __future__ import annotations

import contextlib
from typing import get_args

import msgspec

from weightsync.clients.chunk_turns import OpenSession
from weightsync.clients.phase_log import PhaseLog
from weightsync.clients.sglang_api import SGLangApi, SGLangRouter
from weightsync.clients.sglang_messages import InitGroup, ModelInfo, PauseMode, UpdateFromDistributed
from weightsync.clients.vllm import KvCachePolicy
from weightsync.clients.vllm_messages import version_in
from weightsync.errors import (
    ConfigError,
    DeadlineExceededError,
    EngineError,
    EngineUnreachableError,
    StateError,
    TransferAbortedError,
    UnsupportedError,
    WeightSyncError,
)
from weightsync.types import (
    AbortRequest,
    AnyUpdateRequest,
    BeginRequest,
    BroadcastWeightUpdateRequest,
    CommitRequest,
    Deadline,
    DescribeRequest,
    EngineOp,
    EngineReply,
    EngineRequest,
    InitRequest,
    PauseRequest,
    ResumeRequest,
    StageRequest,
    TorchDistributedWeightSyncInitInfo,
    UpdateRequest,
    Version,
)

__all__ = ["SGLangApi", "SGLangEngine", "SGLangRouter"]

_STRATEGY = "sglang"  # `SGLangTransferStrategy.name`
LOADING = "weightsync: loading"
"""What SGLang's weights are called while they are of no version."""
_ALREADY = "already open"  # SGLang's words
_UNPROVABLE = "SGLang fuses and shards weights, so live bytes can't be read back in the manifest's coordinates"


class SGLangEngine:
    """Thread-safe. One handle a trainer; others may describe at any time.

    Args:
        api: of the server.
        engine_id: name for messages; its URL where not given.
        pause_mode: what SGLang does with running requests at a pause. "retract": they wait, and are computed anew on
            the new weights; "in_place": they stand still, and go on with keys and values of the old weights; "abort":
            they end with what they have.
        kv_cache: "clear": nothing computed on old weights is used after a commit; "keep": prefixes are.

    Raises:
        ConfigError: an unknown mode or policy, or requests that are kept in place while the cache is cleared.
    """

    def __init__(
        self,
        api: SGLangApi,
        *,
        engine_id: str | None = None,
        pause_mode: PauseMode = "retract",
        kv_cache: KvCachePolicy = "clear",
    ) -> None:
        for name, value, allowed in (
            ("pause_mode", pause_mode, get_args(PauseMode)),
            ("kv_cache", kv_cache, get_args(KvCachePolicy)),
        ):
            if value not in allowed:
                raise ConfigError(f"{name} is one of {', '.join(allowed)}, not {value!r}")
        if (pause_mode, kv_cache) == ("in_place", "clear"):
            raise ConfigError(
                "SGLang can't clear its cache under requests that stand still (in_place): take pause_mode 'retract', "
                "or kv_cache 'keep'"
            )
        self._api = api
        self._engine_id = engine_id or api.url
        self._pause_mode: PauseMode = pause_mode
        self._clear = kv_cache == "clear"
        self._session = OpenSession()
        self._group: str | None = None
        self._groups: list[str] = []  # that the server may still have
        self._run_id: str | None = None
        self._world_size = 1
        self._called: str | None = None  # the weights, as this handle has last seen or named them
        self._before: str | None = None  # the same, before the session that is loading
        self._paused_by: str | None = None
        self._touched = False  # chunks were announced to a bracket that is open
        self._log = PhaseLog(self._engine_id)

    @property
    def engine_id(self) -> str:
        """Name of the engine."""
        return self._engine_id

    def call(self, op: EngineOp, request: EngineRequest, *, timeout_s: float) -> EngineReply:
        """Runs one step; see `EngineHandle.call`."""
        deadline = Deadline(timeout_s)
        try:
            match request:
                case DescribeRequest():
                    self._describe(deadline)
                case InitRequest():
                    self._init(request, deadline)
                case BeginRequest():
                    self._begin(request)
                case UpdateRequest(update=update):
                    self._update(update, deadline)
                case StageRequest():
                    return self._stage(request, deadline)
                case PauseRequest():
                    self._pause(request, deadline)
                case CommitRequest():
                    self._commit(request, deadline)
                case ResumeRequest():
                    self._resume(request, deadline)
                case AbortRequest():
                    self._abort(request, deadline)
                case _:
                    raise StateError(f"an engine has no step {op}")
        except WeightSyncError as error:
            if isinstance(error, (EngineUnreachableError, DeadlineExceededError)):
                self._group = None
            if error.peer in (None, self._api.url):
                error.peer = self._engine_id
            raise
        return self._reply(drain=not isinstance(request, DescribeRequest | UpdateRequest))

    def close(self) -> None:
        """Closes connections; changes nothing on the engine. Idempotent."""
        self._api.close()

    # --- the steps ---

    def _describe(self, deadline: Deadline) -> None:
        self._count_workers(deadline)
        former = self._called
        if self._look(deadline).weight_version != former:
            self._group = None  # it was started again, or somebody else has loaded something

    def _init(self, request: InitRequest, deadline: Deadline) -> None:
        info = request.info
        if not isinstance(info, TorchDistributedWeightSyncInitInfo):
            raise UnsupportedError(f"SGLang takes pushed weights through a process group, not by {info.strategy}")
        if info.strategy != _STRATEGY:
            raise UnsupportedError(
                f"SGLang's workers don't meet a sender of strategy {info.strategy!r}: push to SGLang servers with "
                "SGLangTransferStrategy(), or transfer.strategy: sglang"
            )
        self._session.end(TransferAbortedError("a trainer joins anew"))
        self._count_workers(deadline)
        self._group = None
        group = InitGroup(
            master_address=info.master_addr,
            master_port=info.master_port,
            rank_offset=request.rank_offset,
            world_size=info.world_size,
            group_name=info.group_name,
            backend=info.backend,
        )
        self._api.init_group(group, timeout_s=deadline.check("time to join"))
        self._look(deadline)
        if self._whole:
            self._api.resume(timeout_s=deadline.check("answer"))
            self._paused_by = None
        self._group, self._run_id = info.group_name, request.run_id
        former, self._groups = self._groups, [info.group_name]
        for name in former:
            with contextlib.suppress(WeightSyncError):  # it was started again, say
                self._api.destroy_group(name, timeout_s=deadline.check("answer"))

    def _begin(self, request: BeginRequest) -> None:
        version = request.manifest.version
        if request.base is not None:
            raise UnsupportedError("SGLang takes whole tensors alone", version=str(version))
        if self._group is None:
            raise StateError("the engine is in no transfer group: join first", version=str(version))
        self._session.start(request.session, version)

    def _pause(self, request: PauseRequest, deadline: Deadline) -> None:
        self._session.turns(request.session)
        with self._log.phase("pause"):
            self._paused_by = request.session
            self._before = self._look(deadline).weight_version
            self._api.pause(self._pause_mode, timeout_s=min(request.timeout_s, deadline.check("answer")))
            self._name(LOADING, deadline)
            try:
                self._api.begin_update(timeout_s=deadline.check("answer"))
            except EngineError as error:
                if _ALREADY not in error.message:
                    raise
                # a trainer that died has left its bracket open
                self._api.end_update(timeout_s=deadline.check("answer"))
                self._api.begin_update(timeout_s=deadline.check("answer"))

    def _update(self, update: AnyUpdateRequest, deadline: Deadline) -> None:
        session = self._session.turns(update.session)
        if not isinstance(update, BroadcastWeightUpdateRequest) or not _is_dense(update):
            raise UnsupportedError(
                "SGLang takes broadcasts whose tensors lie one behind the other, without padding: this sender packs "
                "otherwise",
                state_left="nothing of this chunk was loaded",
            )
        with session.turn(update.seq, deadline), self._log.phase("load", f"chunk {update.seq}"):
            if self._paused_by != update.session:
                raise StateError("chunks go into live weights while this session holds the pause; it does not")
            self._touched = True
            message = UpdateFromDistributed(
                names=update.names,
                dtypes=update.dtypes,
                shapes=update.shapes,
                group_name=self._group or "",
                load_format="flattened_bucket",
                flush_cache=self._clear,
                abort_all_requests=False,
            )
            self._api.update_from_distributed(message, timeout_s=deadline.check("time to load"))

    def _stage(self, request: StageRequest, deadline: Deadline) -> EngineReply:
        self._session.turns(request.session)
        with self._log.phase("verify"):
            self._api.end_update(timeout_s=deadline.check("answer"))
        return msgspec.structs.replace(self._reply(), unprovable=_UNPROVABLE)

    def _commit(self, request: CommitRequest, deadline: Deadline) -> None:
        session = self._session.turns(request.session)
        if self._paused_by != request.session:
            raise StateError("commit comes while the session holds the pause; it does not", state_left="not committed")
        with self._log.phase("commit"):
            self._name(str(session.version), deadline)
            if (told := self._look(deadline).weight_version) != str(session.version):
                raise EngineError(f"it was told that it has {session.version}, and says {told}", state_left="paused")
            self._touched = False
        self._session.end()

    def _resume(self, request: ResumeRequest, deadline: Deadline) -> None:
        self._look(deadline)
        if not self._whole:
            raise StateError("can't resume: the weights are half-loaded", state_left="paused")
        if self._paused_by in (None, request.session):
            with self._log.phase("resume"):
                self._api.resume(timeout_s=deadline.check("answer"))
            self._paused_by = None

    def _abort(self, request: AbortRequest, deadline: Deadline) -> None:
        if self._session.end(TransferAbortedError(f"aborted: {request.reason}"), name=request.session):
            self._group = None  # a worker may sit in a broadcast still: the next sync builds another
        if self._paused_by != request.session:
            return
        if self._called == LOADING:
            with contextlib.suppress(EngineError):  # it was ended already
                self._api.end_update(timeout_s=deadline.check("answer"))
        if self._touched or self._before == LOADING:  # half-loaded: it stays paused, under a name that says so
            if self._called != LOADING:
                self._name(LOADING, deadline)
            return
        if self._called == LOADING:
            self._name(self._before or "default", deadline)
        self._api.resume(timeout_s=deadline.check("answer"))
        self._paused_by = None

    # --- what the steps share ---

    @property
    def _whole(self) -> bool:
        """Whether the live weights are those of one version, or those it was started with."""
        return self._called != LOADING

    @property
    def _version(self) -> Version | None:
        return version_in(self._called)

    def _look(self, deadline: Deadline) -> ModelInfo:
        info = self._api.model_info(timeout_s=deadline.check("answer"))
        if info.weight_version is None:
            raise UnsupportedError(f"{self._api.url} has no weight version: take SGLang 0.5.23 or newer")
        self._called = info.weight_version
        return info

    def _name(self, version: str, deadline: Deadline) -> None:
        self._api.set_version(version, timeout_s=deadline.check("answer"))
        self._called = version

    def _count_workers(self, deadline: Deadline) -> None:
        info = self._api.server_info(timeout_s=deadline.check("answer"))
        if info.tp_size < 1 or info.dp_size != 1 or info.pp_size != 1:
            raise UnsupportedError(
                f"{self._api.url} has tp {info.tp_size}, dp {info.dp_size}, pp {info.pp_size}: SGLang gives ranks of a "
                "transfer group to tensor-parallel workers alone; run each replica as a server of its own"
            )
        self._world_size = info.tp_size

    def _reply(self, *, drain: bool = True) -> EngineReply:
        return EngineReply(
            engine_id=self._engine_id,
            world_size=self._world_size,
            serving=self._whole and self._paused_by is None,
            version=self._version,
            writes_live=True,
            group=self._group,
            run_id=self._run_id,
            phases=self._log.drain() if drain else (),
        )


def _is_dense(update: BroadcastWeightUpdateRequest) -> bool:
    """Whether tensors lie in the bucket as SGLang unpacks it."""
    end = 0
    for offset, size in zip(update.offsets, update.tensor_bytes(), strict=True):
        if offset != end:
            return False
        end += size
    return update.bucket_bytes == end
