"""VllmEngine: an `EngineHandle` for a vLLM server or an offline `LLM` whose weight-transfer backend is ours.

What each step becomes, in vLLM's own calls (design/0006-vllm.md has the reasons):

    init    init_weight_transfer_engine {init}; a pause that a dead trainer left behind ends
    begin   start_weight_update, update_weights {begin}  (with several workers all steps travel by init: `_several`)
    update  update_weights {update}, one after the other in the order of seq
    stage   update_weights {stage}
    pause   pause(mode, clear_cache)
    commit  update_weights {commit}, finish_weight_update(version), reset_prefix_cache
    resume  resume
    abort   init_weight_transfer_engine {abort}, finish_weight_update where vLLM still holds an update for active
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
from typing import Any, Literal, get_args

import msgspec

from weightsync.errors import (
    DeadlineExceededError,
    EngineError,
    InvalidRequestError,
    StateError,
    SyncInProgressError,
    TransferAbortedError,
    WeightSyncError,
)
from weightsync.handles.mending import Mending
from weightsync.handles.stepped import SteppedEngine, check_choice
from weightsync.handles.vllm_api import OfflineVllmApi, VllmHttpApi
from weightsync.handles.vllm_messages import (
    UNPROVABLE,
    VllmInitMessage,
    VllmState,
    VllmUpdateMessage,
    as_info,
    state_in,
    version_in,
)
from weightsync.types import (
    AbortRequest,
    AnyUpdateRequest,
    BeginRequest,
    CommitRequest,
    Deadline,
    EngineReply,
    InitRequest,
    LiveLayer,
    PauseRequest,
    ResumeRequest,
    StageRequest,
    Version,
)
from weightsync.types.engine import CHECK_RUN

__all__ = ["OfflineVllmApi", "VllmEngine", "VllmHttpApi"]

_logger = logging.getLogger(__name__)

_ALREADY = "already active"  # vLLM's words
_AUDIT_POLL_S = 0.3
_WRITTEN_S = 2.0
"""A paused vLLM says at once how much it has written; where it does not, nobody stands still for that."""
_MEND_MARGIN_S = 300.0  # beyond the pause's lease

PauseMode = Literal["keep", "wait", "abort"]
KvCachePolicy = Literal["clear", "keep"]


class VllmEngine(SteppedEngine):
    """Thread-safe. One handle a trainer; others may describe at any time.

    Args:
        api: a `VllmHttpApi` or an `OfflineVllmApi`.
        engine_id: name for messages; the api's where not given.
        pause_mode: what vLLM does with running requests at a pause. "keep": they stand still and go on afterwards, on
            the new weights; "wait": they finish first, within `pause_timeout_s`; "abort": they end with what they have.
        kv_cache: "clear": nothing computed on old weights is ever used after a commit; requests that were kept are
            computed anew. "keep": prefixes and kept requests go on with keys and values of the old weights: cheaper,
            and no longer what the new weights would have said.
        in_place: load into live weights: no staging memory, but vLLM is paused for the whole transfer, and an abort
            leaves it out of service until the next sync. By default updates are staged beside them.

    Raises:
        ConfigError: an unknown pause_mode or kv_cache.
    """

    def __init__(
        self,
        api: VllmHttpApi | OfflineVllmApi,
        *,
        engine_id: str | None = None,
        pause_mode: PauseMode = "keep",
        kv_cache: KvCachePolicy = "clear",
        in_place: bool = False,
    ) -> None:
        check_choice("pause_mode", pause_mode, get_args(PauseMode))
        check_choice("kv_cache", kv_cache, get_args(KvCachePolicy))
        super().__init__(api.name, engine_id)
        self._api = api
        self._pause_mode = pause_mode
        self._clear = kv_cache == "clear"
        self._in_place = in_place
        self._state = VllmState()
        self._digest: str | None = None  # of what the open session brings
        self._patches = False  # whether the open session brings a change alone
        self._joined: str | None = None  # group of the latest init, whatever became of that
        self._pause_ends: Deadline | None = None  # until when to mend a pause of ours, if an abort could not
        self._mending = Mending(self._engine_id, self._abort_once)
        self._stale_cache = False  # what is cached may be of other weights than those that serve
        self._committed: str | None = None  # the session that has, and has not resumed
        self._audits_seen: set[str] = set()

    def close(self) -> None:
        session = self._paused_by  # whose abort could not end its pause
        self._mending.close(None if session is None else AbortRequest(session=session, reason="its handle is closed"))
        self._api.close()

    # --- the steps ---

    def _describe(self, deadline: Deadline) -> EngineReply:
        self._world_size = self._api.world_size(timeout_s=deadline.check("answer"))
        paused = self._api.is_paused(timeout_s=deadline.check("answer"))
        state = self._look(deadline)
        return msgspec.structs.replace(
            self._reply(drain=False),
            serving=state.healthy and not paused,
            intact=state.healthy,
            left_paused=paused and state.healthy and state.session is None,
            group=state.group if state.group == self._group else None,
            run_id=state.run_id,
        )

    def _layers(self, deadline: Deadline) -> tuple[LiveLayer, ...]:
        return self._look(deadline, layers=True).layers

    def _audit(self, deadline: Deadline) -> EngineReply:
        name, before = secrets.token_hex(8), self._look(deadline)
        self._send_init(VllmInitMessage(audit=name), deadline)
        while (ended := next((each for each in self._look(deadline).audits if each.name == name), None)) is None:
            run_id, version = self._state.run_id, self._state.version
            restarted = (run_id, version) == (None, None) != (before.run_id, before.version)
            if restarted or run_id not in (None, before.run_id):  # None: its trainer has ended
                raise StateError("it was started again, or another run took over, while it read: ask again")
            deadline.check("read its live weights")
            threading.Event().wait(_AUDIT_POLL_S)
        return msgspec.structs.replace(
            self._describe(deadline),
            version=ended.version,
            model_digest=ended.digest,
            digests_equal=ended.equal,
            unprovable=ended.said if ended.equal is None else None,
            unhealthy=ended.said if ended.equal is False else None,
        )

    def _init(self, request: InitRequest, deadline: Deadline) -> None:
        self._group, self._joined = None, request.info.group_name
        self._mending.stop()
        self._session.end(TransferAbortedError("a trainer joins anew"))
        self._world_size = self._api.world_size(timeout_s=deadline.check("answer"))
        self._send_init(VllmInitMessage(init=request, in_place=self._in_place), deadline)
        self._run_id = request.run_id
        self._believe(group=request.info.group_name, run_id=request.run_id, session=None, writes_live=self._in_place)
        state = self._look(deadline)
        self._name_version(state, deadline)
        is_a_check = request.run_id.startswith(CHECK_RUN)  # which changes nothing
        if state.healthy and not is_a_check and self._api.is_paused(timeout_s=deadline.check("answer")):
            self._stale_cache = self._clear
            self._go_on(deadline)
        self._group = request.info.group_name

    def _begin(self, request: BeginRequest, deadline: Deadline) -> None:
        with self._mending.none(deadline.check("answer")):
            state = self._look(deadline)
            if state.session is not None:
                raise SyncInProgressError(f"session {state.session} is open", version=str(request.manifest.version))
            if state.writes_live != self._in_place:
                raise StateError(
                    f"the engine loads {'in place' if state.writes_live else 'beside live weights'}, in another way "
                    "than this handle asked for: join again",
                    version=str(request.manifest.version),
                    state_left="nothing was changed",
                )
            self._end_update(state, deadline)
            self._start_update(deadline)
            try:
                self._send_update(VllmUpdateMessage(begin=request), deadline)
                self._believe(session=request.session)
                self._digest, self._patches = request.manifest.model_digest, request.base is not None
            except WeightSyncError:
                with contextlib.suppress(WeightSyncError):
                    self._end_update(self._look(deadline), deadline)
                raise
            self._session.end(TransferAbortedError("the engine has none open"))
            self._session.start(request.session, request.manifest.version)

    def _update(self, update: AnyUpdateRequest, deadline: Deadline) -> None:
        if self._in_place and update.seq == 0 and not self._api.is_paused(timeout_s=deadline.check("answer")):
            raise StateError(
                "chunks go into live weights while vLLM is paused, and somebody ended the pause",
                state_left="nothing was loaded",
            )
        self._send_update(VllmUpdateMessage(update=update), deadline)

    def _stage(self, request: StageRequest, deadline: Deadline) -> EngineReply:
        with self._log.phase("verify"):
            self._send_update(VllmUpdateMessage(stage=request), deadline)
        self._digest = request.manifest.model_digest
        if self._patches and self._state.proved:  # a worker that answers well has proved the change on live weights
            return msgspec.structs.replace(self._reply(), digests_equal=True, model_digest=self._digest)
        return msgspec.structs.replace(
            self._reply(), digests_equal=None, unprovable=self._state.unprovable or UNPROVABLE
        )

    def _pause(self, request: PauseRequest, deadline: Deadline) -> None:
        self._mending.stop()
        try:
            with self._mending.none(min(request.timeout_s, deadline.check("answer"))):
                pass
        finally:  # from now on this session's abort ends whatever pause there is
            self._paused_by, self._pause_ends = request.session, Deadline(request.lease_s + _MEND_MARGIN_S)
        patience_s = min(request.timeout_s, deadline.check("answer"))
        with self._log.phase("pause"):
            try:
                self._api.pause(self._pause_mode, clear_cache=self._clear, timeout_s=patience_s)
                self._session.turns(request.session)  # else the resume of its abort may have come before this pause
            except WeightSyncError as error:
                with contextlib.suppress(WeightSyncError):
                    patience = Deadline(max(1.0, deadline.remaining_s))
                    if self._is_ours(self._look(patience), request.session):
                        self._go_on(patience)
                if isinstance(error, DeadlineExceededError):
                    raise DeadlineExceededError(
                        f"vLLM did not stand still within {patience_s:g} s (pause_mode {self._pause_mode}): raise "
                        "pause_timeout_s, or keep running requests instead of waiting for them",
                        state_left="told to go on" if self._paused_by is None else "paused, perhaps",
                    ) from error
                raise

    def _commit(self, request: CommitRequest, version: Version, deadline: Deadline) -> None:
        if self._paused_by != request.session or not self._api.is_paused(timeout_s=deadline.check("answer")):
            raise StateError("commit comes while the session holds the pause; it does not", state_left="not committed")
        with self._log.phase("commit"):
            self._stale_cache = self._clear
            self._send_update(VllmUpdateMessage(commit=request), deadline)
            self._believe(version=version, digest=self._digest, session=None, healthy=True, written=None)
            if not self._patches:  # a proof is the version's before, until a look says more
                self._believe(proved=False, unprovable=UNPROVABLE)
            if self._several:
                self._name_version(self._state, deadline)
            else:
                self._api.finish_update(str(version), timeout_s=deadline.check("answer"))
                self._believe(updating=False)
            self._drop_stale_cache(deadline)
        self._committed = request.session
        self._session.end()

    def _resume(self, request: ResumeRequest, deadline: Deadline) -> None:
        committed, self._committed = self._committed, None
        if committed != self._paused_by or committed != request.session:
            self._look(deadline)
        elif not self._patches:  # all workers have just said that they serve it, perhaps written where it differs
            with contextlib.suppress(WeightSyncError), self._log.phase("look"):
                # now: behind its resume vLLM computes kept requests anew, and answers nothing meanwhile
                self._look(Deadline(min(_WRITTEN_S, deadline.check("answer"))), written=True)
        state = self._state
        if not self._is_ours(state):
            raise StateError(
                f"can't resume: run {state.run_id} or its session {state.session} has the engine now",
                state_left="as whoever took over left it",
            )
        if not state.healthy:
            raise StateError(
                "can't resume: the weights are half-loaded, or differ between workers", state_left="paused"
            )
        if self._paused_by in (None, request.session):
            with self._log.phase("resume"):
                self._go_on(deadline)

    def _abort(self, request: AbortRequest, deadline: Deadline) -> None:
        if self._paused_by is not None and request.session == self._joined:
            return  # a pause of this handle's run is to be ended yet: that run is not over, and goes on mending
        self._mending.stop()
        try:
            self._abort_once(request, deadline)
        except WeightSyncError:
            if self._paused_by == request.session and self._pause_ends is not None:
                self._mending.begin(request, self._pause_ends)
            raise

    def _abort_once(self, request: AbortRequest, deadline: Deadline, stop: threading.Event | None = None) -> None:
        ours = self._session.end(TransferAbortedError(f"aborted: {request.reason}"), name=request.session)
        self._send_init(VllmInitMessage(abort=request), deadline)
        if ours:
            self._believe(session=None, group=None)
        state = self._look(deadline)
        if not self._is_ours(state) or (stop is not None and stop.is_set()):
            return
        self._end_update(state, deadline)
        if self._paused_by == request.session and state.healthy:
            self._name_version(state, deadline)
            self._go_on(deadline)

    # --- what the steps share ---

    def _look(self, deadline: Deadline, *, layers: bool = False, written: bool = False) -> VllmState:
        """The workers' state: vLLM returns no data, so they are told what we believe, and object with the truth."""
        expected = self._state
        try:
            self._send_init(VllmInitMessage(expect=expected, layers=layers, written=written), deadline)
        except StateError as error:
            try:
                state = state_in(error)
            except InvalidRequestError as odd:
                raise EngineError(f"the engine told an odd state: {odd}", peer=self._engine_id) from odd
            if state is None:
                raise
            if self._state is expected:  # else a step has changed it meanwhile, and this may be older
                self._state = state
            expected = state
        self._note_audits(expected)
        return expected

    def _note_audits(self, state: VllmState) -> None:
        """Readings of live weights that have ended on every worker, whoever asked for them: each once."""
        for audit in state.audits:
            if audit.name not in self._audits_seen:
                self._log.add(audit.phase(self._engine_id))
        self._audits_seen = {audit.name for audit in state.audits}

    def _is_ours(self, state: VllmState, session: str | None = None) -> bool:
        """Whether the engine is in this handle's own run still, with no session open but `session`: only then are its
        pause and its update this handle's to end."""
        if state.run_id != self._run_id:
            self._paused_by = None
            return False
        return state.session in (None, session)

    def _name_version(self, state: VllmState, deadline: Deadline) -> None:
        """Gives vLLM the name of what it serves: whoever committed it may not have come to that."""
        if state.version is not None:
            named = self._api.weight_version(timeout_s=deadline.check("answer"))
            if named is not None and version_in(named) != state.version:
                self._api.set_weight_version(str(state.version), timeout_s=deadline.check("answer"))

    def _believe(self, **changes: Any) -> None:
        """Notes what a step has changed. Whatever is wrong in it the next `_look` corrects, at the price of an error in
        vLLM's log."""
        self._state = msgspec.structs.replace(self._state, **changes)

    @property
    def _several(self) -> bool:
        """Whether the engine has several workers. vLLM's own check of "an update is active" raises on each of them, and
        its executor never recovers from two failures of one call. So their steps travel by init, which is served in
        any state, and vLLM's start and finish stay out of it: nobody else's can come between."""
        return self._world_size > 1

    def _start_update(self, deadline: Deadline) -> None:
        if self._several:
            return
        try:
            self._api.start_update(timeout_s=deadline.check("answer"))
        except EngineError as error:
            if _ALREADY not in error.message:
                raise
            # releases in which a failed update stays active; ours would know of any other
            self._believe(updating=True)
            self._end_update(self._state, deadline)
            self._api.start_update(timeout_s=deadline.check("answer"))
        self._believe(updating=True)

    def _end_update(self, state: VllmState, deadline: Deadline) -> None:
        """Clears vLLM's "update already active", which a failed sync leaves behind."""
        if not state.updating or self._several:
            return
        with contextlib.suppress(WeightSyncError):  # workers that had ended it already object; the others end it
            self._api.finish_update(None, timeout_s=deadline.check("answer"))
        self._believe(updating=False)

    def _go_on(self, deadline: Deadline) -> None:
        self._drop_stale_cache(deadline)
        if not self._api.resume(timeout_s=deadline.check("answer")):
            _logger.info(
                "engine %s sleeps: it goes on when whoever put it to sleep has woken all of it", self._engine_id
            )
        self._paused_by = None

    def _drop_stale_cache(self, deadline: Deadline) -> None:
        if not self._stale_cache:
            return
        if not self._api.reset_prefix_cache(timeout_s=deadline.check("answer")):
            raise EngineError(
                "vLLM could not drop its prefix cache: it would answer from keys and values of the old weights",
                state_left="paused",
            )
        self._stale_cache = False

    def _send_init(self, message: VllmInitMessage, deadline: Deadline) -> None:
        self._api.init_engine(as_info(message), timeout_s=deadline.check("answer"))

    def _send_update(self, message: VllmUpdateMessage, deadline: Deadline) -> None:
        if self._several:
            self._send_init(VllmInitMessage(step=message), deadline)
            return
        self._api.update(as_info(message), timeout_s=deadline.check("answer"))

    def _reply(self, *, drain: bool = True) -> EngineReply:
        return EngineReply(
            engine_id=self._engine_id,
            world_size=self._world_size,
            serving=self._state.healthy and self._paused_by is None,
            version=self._state.version,
            model_digest=self._state.digest,
            digests_equal=True if self._state.proved else None,
            unprovable=self._state.unprovable,
            accepts=self._state.accepts,
            unhealthy=self._state.unhealthy,
            writes_live=self._state.writes_live,
            written=self._state.written,
            phases=self._log.drain() if drain else (),
        )
