"""SGLangEngine: an `EngineHandle` for an SGLang server, in SGLang's own calls.

    init    how weights get in (`sglang_loads`) follows from it; a pause that a dead trainer left behind ends
    begin   nothing: SGLang's begin touches live weights
    pause   pause_generation, update_weight_version "loading", begin_weight_update
    update  update_weights_from_..., one after the other in the order of seq
    stage   all is there: end_weight_update, or the file is loaded; weights_checker
    commit  model_info and weights_checker: is it still that server, with those weights; update_weight_version
    resume  continue_generation
    abort   end_weight_update; the old version goes on where nothing was loaded, else the server stays paused

SGLang loads into live weights and has no undo, so it is paused from before the first chunk. It knows neither sessions
nor leases: what this handle believes of it is written into its weight version, where the next trainer reads it.

A trainer takes `SGLangTransferStrategy` for it, whose sender joins SGLang's process group and packs as SGLang unpacks;
a rollout service beside it has it read the staged file.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import threading
from collections.abc import Iterator
from typing import Literal, TypeAlias, get_args

import msgspec

from weightsync.errors import (
    ConfigError,
    DeadlineExceededError,
    DigestMismatchError,
    EngineError,
    EngineUnreachableError,
    StateError,
    TransferAbortedError,
    UnsupportedError,
    WeightSyncError,
)
from weightsync.handles.releases import since
from weightsync.handles.sglang_api import SGLangApi, SGLangRouter
from weightsync.handles.sglang_loads import FileLoad, GroupLoad, MappedLoad, SGLangLoad
from weightsync.handles.sglang_messages import ModelInfo, PauseMode, WeightsChecked
from weightsync.handles.stepped import SteppedEngine, check_choice
from weightsync.handles.vllm import KvCachePolicy
from weightsync.handles.vllm_messages import version_in
from weightsync.types import (
    AbortRequest,
    AnyUpdateRequest,
    BeginRequest,
    CommitRequest,
    Deadline,
    EmptyWeightSyncInitInfo,
    EngineReply,
    InitRequest,
    PauseRequest,
    ResumeRequest,
    StageRequest,
    TorchDistributedWeightSyncInitInfo,
    Version,
)

__all__ = ["SGLangApi", "SGLangEngine", "SGLangRouter"]

_logger = logging.getLogger(__name__)

_STRATEGY = "sglang"  # `SGLangTransferStrategy.name`
LOADING = "weightsync: loading"
"""What SGLang's weights are called while they are of no version."""
_WHOLE_IN_EACH = ("input_layernorm.weight", "post_attention_layernorm.weight", "model.norm.weight")
"""Tensors that every tensor-parallel worker has whole: norms of the hidden size."""

LoadBy: TypeAlias = Literal["file", "tensor"]
_CLOSE_S = 5.0


class SGLangEngine(SteppedEngine):
    """Thread-safe. One handle a trainer; others may describe at any time.

    Args:
        api: of the server.
        engine_id: name for messages; its URL where not given.
        pause_mode: what SGLang does with running requests at a pause. "retract": they wait, and are computed anew on
            the new weights; "in_place": they stand still, and go on with keys and values of the old weights; "abort":
            they end with what they have.
        kv_cache: "clear": nothing computed on old weights is used after a commit; "keep": prefixes are.
        load_by: how bytes of this host get in. "file": SGLang reads the file that a rollout service has staged;
            "tensor": its workers map the memory, of the host or of CUDA, and prove what they read. For that SGLang
            is started with `--custom-weight-loader weightsync.engine.sglang.load_weights`, and what it is sent is a
            pickle, since its interface takes nothing else: none is sent where this is not said.
        checksums: whether SGLang is asked for checksums of its live weights after each load, to be compared among
            workers and engines.

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
        load_by: LoadBy = "file",
        checksums: bool = True,
    ) -> None:
        check_choice("load_by", load_by, get_args(LoadBy))
        check_choice("pause_mode", pause_mode, get_args(PauseMode))
        check_choice("kv_cache", kv_cache, get_args(KvCachePolicy))
        if (pause_mode, kv_cache) == ("in_place", "clear"):
            raise ConfigError(
                "SGLang can't clear its cache under requests that stand still (in_place): take pause_mode 'retract', "
                "or kv_cache 'keep'"
            )
        super().__init__(api.url, engine_id)
        self._api = api
        self._pause_mode: PauseMode = pause_mode
        self._clear = kv_cache == "clear"
        self._load_by: LoadBy = load_by
        self._checksums = checksums
        self._load: SGLangLoad | None = None  # of the latest init
        self._begun: BeginRequest | None = None
        self._called: str | None = None  # the weights, as this handle has last seen or named them
        self._unsure = False  # whether it has heard that it is being loaded
        self._before: str | None = None  # the same, before the session that is loading
        self._checksum: str | None = None  # of what was loaded last
        self._digest: tuple[str, str | None] | None = None  # the same: its version, and the publication's digest
        self._turning = threading.Lock()  # held while a session is paused for, or taken back

    def close(self) -> None:
        if isinstance(self._load, (FileLoad, MappedLoad)):
            self._load.leave(Deadline(_CLOSE_S))
        self._api.close()

    # --- the steps ---

    def _describe(self, deadline: Deadline) -> EngineReply:
        self._count_workers(deadline)
        former = self._called
        if self._look(deadline).weight_version != former:
            self._group = None  # it was started again, or somebody else has loaded something
        paused, reply = self._api.is_paused(timeout_s=deadline.check("answer")), self._reply(drain=False)
        left = paused and self._whole and self._paused_by is None
        return msgspec.structs.replace(reply, leased=False, serving=reply.serving and not paused, left_paused=left)

    def _init(self, request: InitRequest, deadline: Deadline) -> None:
        load = self._load_for(request)
        self._session.end(TransferAbortedError("a trainer joins anew"))
        self._count_workers(deadline)
        self._group = None
        load.join(self._world_size, deadline)
        try:
            self._look(deadline)
            if self._whole:
                self._api.resume(timeout_s=deadline.check("answer"))
                self._paused_by = None
        except WeightSyncError:
            load.leave(Deadline(_CLOSE_S))
            raise
        self._group, self._run_id = load.name, request.run_id
        former, self._load = self._load, load
        if former is not None:
            former.leave(deadline)

    def _load_for(self, request: InitRequest) -> SGLangLoad:
        info = request.info
        if isinstance(info, EmptyWeightSyncInitInfo):
            kind: type[SGLangLoad] = FileLoad if self._load_by == "file" else MappedLoad
            return kind(self._api, clear=self._clear, request=request)
        if not isinstance(info, TorchDistributedWeightSyncInitInfo) or info.strategy != _STRATEGY:
            raise UnsupportedError(
                f"SGLang's workers don't meet a sender of strategy {info.strategy!r}: push to SGLang servers with "
                "SGLangTransferStrategy(), or transfer.strategy: sglang"
            )
        return GroupLoad(self._api, clear=self._clear, request=request)

    def _begin(self, request: BeginRequest, deadline: Deadline) -> None:
        version = request.manifest.version
        if request.base is not None and not self._takes_patches:
            raise UnsupportedError("SGLang takes whole tensors alone, as it is loaded", version=str(version))
        if self._group is None:
            raise StateError("the engine is in no transfer group: join first", version=str(version))
        self._session.start(request.session, version)
        self._begun = request

    def _pause(self, request: PauseRequest, deadline: Deadline) -> None:
        with self._alone(deadline), self._log.phase("pause"):
            self._session.turns(request.session)
            self._paused_by, self._checksum, self._before = request.session, None, self._called
            try:
                self._before = self._look(deadline).weight_version
                self._api.pause(self._pause_mode, timeout_s=min(request.timeout_s, deadline.check("answer")))
                self._session.turns(request.session)
                self._name(LOADING, deadline)
                self._way.open(self._open_request, deadline)
                self._session.turns(request.session)
            except WeightSyncError:
                if not self._session.has(request.session):  # its abort could not wait, or had nothing yet to take back
                    self._paused_by = request.session
                    late = AbortRequest(session=request.session, reason="its pause came too late")
                    with contextlib.suppress(WeightSyncError):
                        self._take_back(late, Deadline(max(1.0, deadline.remaining_s)))
                raise

    @contextlib.contextmanager
    def _alone(self, deadline: Deadline) -> Iterator[None]:
        """No session is paused for, or taken back, while another one is."""
        if not self._turning.acquire(timeout=deadline.check("answer")):
            raise DeadlineExceededError(
                f"a pause of this engine, or its end, took longer than {deadline.said}",
                state_left="as that leaves it: a pause whose session was aborted is taken back when it has answered",
            )
        try:
            yield
        finally:
            self._turning.release()

    def _update(self, update: AnyUpdateRequest, deadline: Deadline) -> None:
        if self._paused_by != update.session:
            raise StateError("chunks go into live weights while this session holds the pause; it does not")
        self._way.update(update, deadline)

    def _stage(self, request: StageRequest, deadline: Deadline) -> EngineReply:
        with self._log.phase("verify"):
            proof = self._way.stage(request, deadline)
            self._checksum = self._sum(deadline) if self._way.touched else None
        return msgspec.structs.replace(
            self._reply(),
            digests_equal=proof.digests_equal,
            model_digest=proof.model_digest,
            unprovable=proof.unprovable,
        )

    def _commit(self, request: CommitRequest, version: Version, deadline: Deadline) -> None:
        if self._paused_by != request.session:
            raise StateError("commit comes while the session holds the pause; it does not", state_left="not committed")
        with self._log.phase("commit"):
            self._check_same(deadline)
            self._way.commit(request, deadline)
            staged, live = self._checksum, self._sum(deadline)
            if None not in (staged, live) and staged != live:
                raise EngineError(
                    "its live weights are no longer those that it loaded: their checksum is another",
                    state_left="paused, of no version",
                )
            self._checksum = staged or live
            self._check_same(deadline)
            self._name(str(version), deadline)
            if (named := self._look(deadline).weight_version) != str(version):
                raise EngineError(f"it was told that it has {version}, and says {named}", state_left="paused")
            self._way.touched = False
            self._digest = str(version), self._open_request.manifest.model_digest
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
        ends = self._load is not None and self._load.name == request.session  # its trainer does
        if ends or self._paused_by == request.session:
            with self._alone(deadline):  # who takes back what a pause did needs the load for it
                load, self._load = self._load, None if ends else self._load
                if ends and load is not None:
                    self._group = None
                    load.leave(deadline)
                self._take_back(request, deadline)

    def _take_back(self, request: AbortRequest, deadline: Deadline) -> None:
        """Ends what a session has done to the server."""
        if self._paused_by != request.session:
            return
        if self._unsure:
            self._look(deadline)
            self._unsure = False
        if self._called == LOADING and self._load is not None:
            self._load.abort(request, deadline)
            if not self._load.touched and self._look(deadline).weight_version != LOADING:
                self._lose()  # it was started again: the former name would be wrong
                return
        touched = self._load is not None and self._load.touched
        if touched or self._before == LOADING:  # half-loaded: it stays paused, under a name that says so
            if self._called != LOADING:
                self._name(LOADING, deadline)
            return
        if self._called == LOADING:
            self._name(self._before or "default", deadline)
        self._api.resume(timeout_s=deadline.check("answer"))
        self._paused_by = None

    # --- what the steps share ---

    @property
    def _way(self) -> SGLangLoad:
        if self._load is None:
            raise StateError("the engine is in no transfer group: join first")
        return self._load

    @property
    def _open_request(self) -> BeginRequest:
        assert self._begun is not None
        return self._begun

    def _check_same(self, deadline: Deadline) -> None:
        """It is the server that was paused, with what was loaded since.

        Raises:
            EngineError: its weights have another name than the pause gave them.
        """
        if (named := self._look(deadline).weight_version) != LOADING:
            self._lose()
            raise EngineError(
                f"it was restarted in the middle of the update, or somebody else named its weights: they are "
                f"{named!r}, not {LOADING!r}",
                state_left="what it was started with; the next sync brings it back",
            )

    def _lose(self) -> None:
        """What this session has done to the server is gone: there is nothing to take back, and no pause to end."""
        self._group = self._paused_by = self._checksum = None
        if self._load is not None:
            self._load.touched = False

    def _sum(self, deadline: Deadline) -> str | None:
        """SGLang's checksum of its live weights; None where it is not asked, or can't say one."""
        if not self._checksums:
            return None
        try:
            checked = self._api.checksum(timeout_s=deadline.check("checksum"))
        except EngineUnreachableError:
            raise
        except (EngineError, UnsupportedError) as error:
            _logger.warning("engine %s says no checksum of its live weights: %s", self._engine_id, error)
            return None
        return checksum_of(checked)

    @property
    def _whole(self) -> bool:
        """Whether the live weights are those of one version, or those it was started with."""
        return self._called != LOADING

    @property
    def _takes_patches(self) -> bool:
        is_ours = self._digest is not None and self._digest[0] == self._called
        return is_ours and isinstance(self._load, MappedLoad) and self._load.takes_patches

    @property
    def _version(self) -> Version | None:
        return version_in(self._called)

    def _look(self, deadline: Deadline) -> ModelInfo:
        former = self._called
        info = self._api.model_info(timeout_s=deadline.check("answer"))
        if info.weight_version is None:
            raise UnsupportedError(f"{self._api.url} has no weight version: {since('SGLang', ['weight_version'])}")
        if self._called == former:  # else a step has named it meanwhile, and this may be older
            self._called = info.weight_version
        return info

    def _name(self, version: str, deadline: Deadline) -> None:
        self._unsure = version == LOADING
        self._api.set_version(version, timeout_s=deadline.check("answer"))
        self._called, self._unsure = version, False

    def _count_workers(self, deadline: Deadline) -> None:
        info = self._api.server_info(timeout_s=deadline.check("answer"))
        if info.tp_size < 1 or info.dp_size != 1 or info.pp_size != 1:
            raise UnsupportedError(
                f"{self._api.url} has tp {info.tp_size}, dp {info.dp_size}, pp {info.pp_size}: SGLang gives ranks of a "
                "transfer group to tensor-parallel workers alone; run each replica as a server of its own"
            )
        if info.tokenizer_worker_num != 1:
            raise UnsupportedError(
                f"{self._api.url} has {info.tokenizer_worker_num} tokenizer workers, each with a weight version of its "
                "own, by which half-loaded weights are known: start it with --tokenizer-worker-num 1"
            )
        self._world_size = info.tp_size

    def _reply(self, *, drain: bool = True) -> EngineReply:
        return EngineReply(
            engine_id=self._engine_id,
            world_size=self._world_size,
            serving=self._whole and self._paused_by is None,
            version=self._version,
            writes_live=True,
            pauses_first=True,
            group=self._group,
            run_id=self._run_id,
            checksum=self._checksum,
            model_digest=self._digest[1] if self._digest is not None and self._takes_patches else None,
            accepts=("full", "patch") if self._takes_patches else ("full",),
            phases=self._log.drain() if drain else (),
        )


def checksum_of(checked: WeightsChecked) -> str:
    """One checksum of all workers, in their order.

    Raises:
        EngineError: it is one of nothing.
        DigestMismatchError: workers have other tensors, or differ in one that each has whole.
    """
    if not checked.ranks or not all(rank.checksums for rank in checked.ranks):
        raise EngineError("it answered with a checksum of nothing", state_left="paused")
    first = checked.ranks[0].checksums
    for number, rank in enumerate(checked.ranks):
        if rank.checksums.keys() != first.keys():
            raise DigestMismatchError("its workers have other tensors", rank=number, state_left="paused")
        wrong = next((n for n, sum_ in rank.checksums.items() if n.endswith(_WHOLE_IN_EACH) and sum_ != first[n]), None)
        if wrong is not None:
            raise DigestMismatchError(
                "its workers differ in a tensor that each has whole", rank=number, parameter=wrong, state_left="paused"
            )
    together = hashlib.sha256("".join(rank.per_gpu_checksum for rank in checked.ranks).encode()).hexdigest()
    return f"{len(checked.ranks)}:{together[:32]}"
