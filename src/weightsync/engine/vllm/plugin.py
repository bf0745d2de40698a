"""The weight-transfer backend "weightsync" inside vLLM's workers, and the plugin that registers it.

vLLM's loader of plugins calls `register` in every process; `--weight-transfer-config '{"backend":"weightsync"}'` then
makes every worker build a `WeightSyncTransferEngine`, which is an `EngineWorker` behind vLLM's method names. Nothing of
vLLM is patched or subclassed: vLLM looks for methods, and their names have lasted longer than its base class.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import msgspec

from weightsync.engine.vllm import version_board
from weightsync.engine.vllm.asked_audits import AskedAudits, merged_audits
from weightsync.engine.vllm.peers import BackendError, Peers
from weightsync.engine.vllm.quiet_log import keep_told_states_out
from weightsync.errors import (
    EngineError,
    InvalidRequestError,
    StateError,
    UnsupportedError,
    WeightSyncError,
    as_weightsync_error,
    is_consequence,
)
from weightsync.handles.releases import MODEL, since
from weightsync.handles.vllm_messages import (
    BACKEND,
    VllmInitMessage,
    VllmState,
    VllmUpdateMessage,
    error_in_text,
    error_text,
    init_message,
    other_state,
    update_message,
)
from weightsync.net.messages import decode, encode
from weightsync.types import Box, Deadline, Version
from weightsync.types.live_layer import merged_layers

_T = TypeVar("_T")
_logger = logging.getLogger(__name__)
_AGREE_S = 120.0  # for steps outside of a session; joining ends by its own deadline


def register() -> None:
    """Tells vLLM of the backend. Idempotent and cheap: vLLM calls it in every process, and imports the class later."""
    keep_told_states_out()
    try:
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    except ImportError as error:
        advice = since("vLLM", ["/init_weight_transfer_engine"])
        _logger.warning(
            "this vLLM has no weight-transfer backends, %s: %r is not registered: %s", advice, BACKEND, error
        )
        return
    with contextlib.suppress(ValueError):  # registered already
        WeightTransferEngineFactory.register_engine(BACKEND, __name__, "WeightSyncTransferEngine")


class Unreadable:
    """What reading a message gave where it is none of ours. vLLM's worker passes it on like a message."""

    is_checkpoint_format = False  # as of a `VllmUpdateMessage`

    def __init__(self, error: WeightSyncError) -> None:
        self._error = error

    def refuse(self) -> None:
        """Raises what was wrong."""
        raise self._error


class WeightSyncTransferEngine:
    """One vLLM worker's end. vLLM calls its methods one at a time, on all workers of an engine at once.

    All workers agree on how a call went before anyone answers: they exchange outcomes, each undoes its own part where
    another failed, and the last worker alone raises. vLLM's executor reads the workers' answers in order and stops
    at the first failure; what it has not read then stands in for the answers of the next call, for good.

    Args:
        config: vLLM's weight-transfer config; unused.
        args: what this release of vLLM gives: `(vllm_config, device, model)` from 0.26, `(parallel_config)` or
            `(parallel_config, model)` before. Told apart by what they are.
        kwargs: the same by name.
    """

    init_info_cls = VllmInitMessage
    update_info_cls = VllmUpdateMessage
    supports_draft_weight_update = False
    defers_processing = False

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        given = _Given(*args, *kwargs.values())
        parallel = given.parallel_config
        world_size = int(getattr(parallel, "world_size", 1))
        self._peers = Peers(world_size)
        self._index = self._peers.rank + world_size * int(getattr(parallel, "data_parallel_index", 0) or 0)
        self._updating = False
        self._split = False  # a commit went well in some workers alone: what is live is no one version
        self._session: tuple[str, Deadline] | None = None
        self._odd = False  # an audit found other bytes in a worker
        from weightsync.engine.vllm.lora_worker import WorkerAdapters
        from weightsync.engine.worker import EngineWorker
        from weightsync.load.vllm import VLLMWeightLoader

        self._loader = VLLMWeightLoader(given.model, model_config=given.model_config, vllm_config=given.vllm_config)
        self._worker = EngineWorker(self._loader, index=self._index, track=f"vllm/worker-{self._index}")
        sleeps = bool(getattr(given.model_config, "enable_sleep_mode", False))
        self._audits = AskedAudits(self._worker.verify, sleeps=sleeps)
        self._adapters = WorkerAdapters(given.model, given.vllm_config)
        version_board.served = self._served

    # --- what vLLM calls ---

    def parse_init_info(self, info: dict[str, Any]) -> VllmInitMessage | Unreadable:
        """Reads an `init_info`. Raises nothing: whoever is given the result raises, on the last worker alone."""
        return _parsed(init_message, info)

    def parse_update_info(self, info: dict[str, Any]) -> VllmUpdateMessage | Unreadable:
        """Reads an `update_info`; see `parse_init_info`."""
        return _parsed(update_message, info)

    def init_transfer_engine(self, message: VllmInitMessage | Unreadable) -> None:
        """Joins a group, aborts a session, or tells the state. Called in any state.

        Raises:
            BackendError: with the typed error; on the last worker alone.
        """
        if isinstance(message, Unreadable):
            self._together(message.refuse)
        elif message.init is not None:
            request = message.init
            self._together(
                lambda: self._join(request, in_place=message.in_place),
                wait_s=float(getattr(request.info, "join_timeout_s", 0.0)),
            )
        elif message.abort is not None:
            abort = message.abort
            self._together(lambda: self._worker.abort(abort.session, abort.reason))
        elif message.audit is not None:
            name = message.audit
            self._together(lambda: self._audits.begin(name))
        elif message.adapter is not None:
            order = message.adapter
            self._together(lambda: self._adapters.obey(order, self._base()))
        elif message.step is not None:
            step = message.step
            self._together(lambda: self._step(step), wait_s=self._patience_s(step), of=step)
        else:
            assert message.expect is not None
            self._compare(message.expect, layers=message.layers, written=message.written)

    def start_weight_update(self, *_: Any, **__: Any) -> None:
        """Does nothing: the update that follows says what begins. Notes that vLLM holds an update for active."""
        self._updating = True

    def update_weights(self, info: dict[str, Any]) -> None:
        """One step of a session; see `VllmUpdateMessage`."""
        self.receive_weights(self.parse_update_info(info))

    def receive_weights(
        self, message: VllmUpdateMessage | Unreadable, load_weights: Callable[..., Any] | None = None
    ) -> None:
        """The same, as releases before 0.26 call it; `load_weights` shows the model.

        Raises:
            BackendError: with the typed error; on the last worker alone. The session has failed on all.
        """

        def step() -> None:
            if load_weights is not None:
                self._loader.bind(_model_behind(load_weights))
            if isinstance(message, Unreadable):
                message.refuse()
            else:
                self._step(message)

        try:
            self._together(step, wait_s=self._patience_s(message), of=message)
        except BaseException:
            self._updating = False  # vLLM holds it for ended now, on this worker
            raise

    def finish_weight_update(self) -> None:
        """Ends what vLLM holds for an update.

        Raises:
            BackendError: the engine has one worker, and a session is open that has not committed: nobody's clean-up
                cuts somebody else's sync. With several, sessions don't need vLLM's update.
        """
        session = self._worker.session
        if session is not None and self._peers.alone:
            raise BackendError(StateError(f"session {session} is open and has not committed"))
        self._updating = False

    def drain_pending(self) -> None:
        """Nothing is ever deferred."""

    def set_weight_update_target(self, *_: Any) -> None:
        """Refused: a draft model has no manifest of its own yet.

        Raises:
            BackendError: always; on the last worker alone.
        """
        self._together(Unreadable(UnsupportedError("weightsync does not load draft models")).refuse)

    def reset_weight_update_target(self) -> None:
        """Nothing to reset."""

    def shutdown(self) -> None:
        """Leaves the group and aborts an open session. Idempotent."""
        version_board.served = None
        self._worker.close()

    @staticmethod
    def trainer_send_weights(*_: Any, **__: Any) -> None:
        """Refused: the sending side is `PushSync`.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError("send with weightsync.PushSync over a VllmEngine")

    # --- the steps ---

    def _join(self, request: Any, *, in_place: bool) -> None:
        self._worker.check_may_join(request)  # a run that is over changes nothing
        self._worker.abort(None, f"run {request.run_id} took over")
        self._loader.set_in_place(in_place)
        self._worker.init(request)
        version_board.served = self._served  # `shutdown` ends it, and is vLLM's own way to let a trainer go, too

    def _step(self, message: VllmUpdateMessage) -> None:
        worker = self._worker
        if message.begin is not None:
            worker.begin(message.begin)
            self._session = (message.begin.session, Deadline(message.begin.deadline_s))
        elif message.update is not None:
            worker.update(message.update)
        elif message.stage is not None:
            worker.stage(message.stage)
        else:
            assert message.commit is not None
            worker.commit(message.commit.session)
            for phase in worker.drain_phases():
                _logger.debug("%s %s: %.3f s", phase.name, phase.detail, phase.end_s - phase.start_s)

    def _undo_of(self, message: VllmUpdateMessage | Unreadable) -> Callable[[str], None]:
        """What a worker does whose step went well where another's failed: a patch that was committed is taken back."""
        commit = None if isinstance(message, Unreadable) else message.commit
        if commit is None:
            return lambda reason: self._worker.abort(None, reason)
        return lambda reason: self._worker.rollback(commit.session, reason)

    def _patience_s(self, message: VllmUpdateMessage | Unreadable) -> float:
        """How long the other workers may take: each ends by the session's own deadline."""
        if not isinstance(message, Unreadable) and message.begin is not None:
            return message.begin.deadline_s
        return self._session[1].remaining_s if self._session is not None else 0.0

    def _base(self) -> tuple[Version | None, str | None]:
        """What whole model this worker was given, and its digest; None where it has what it was started with."""
        reply = self._worker.describe()
        return reply.version, reply.model_digest

    def _served(self) -> Version | None:
        """The version that is live in all workers, as far as this one was told; see `EngineWorker.live_version`."""
        return None if self._split or self._odd else self._worker.live_version

    def _note_split(self, of: VllmUpdateMessage | Unreadable | None, *, failed: bool) -> None:
        commits = isinstance(of, VllmUpdateMessage) and of.commit is not None
        if not self._peers.alone and (commits or (failed and of is not None and self._loader.writes_live)):
            self._split = failed

    def _state(self, *, layers: bool = False) -> VllmState:
        reply = self._worker.describe()
        return VllmState(
            audits=self._audits.ended,
            unhealthy=reply.unhealthy,
            group=reply.group,
            run_id=reply.run_id,
            version=reply.version,
            digest=reply.model_digest,
            healthy=reply.serving,
            updating=self._updating,
            session=self._worker.session,
            writes_live=reply.writes_live,
            accepts=reply.accepts if reply.digests_equal or self._loader.takes_patch else ("full",),
            proved=bool(reply.digests_equal),
            unprovable=self._loader.unprovable,
            written=self._loader.written,
            layers=self._loader.layers() if layers else (),
        )

    def _compare(self, expected: VllmState, *, layers: bool = False, written: bool = False) -> None:
        mine: VllmState | WeightSyncError
        try:
            mine = self._state(layers=layers)
        except Exception as error:
            mine = as_weightsync_error(error, EngineError, "the worker can't tell its state", rank=self._index)
        outcomes = [_read(reply) for reply in self._peers.exchange(_said(mine), wait_s=_AGREE_S)]
        states = [each for each in outcomes if isinstance(each, VllmState)]
        self._odd = any(each.unhealthy is not None for each in states)
        errors = [each for each in outcomes if isinstance(each, WeightSyncError)]
        state = _merged(states) if not errors else None
        if state is not None and state.healthy and state.version is not None and state.session is None:
            self._split = False  # whatever failed was taken back: all have the same one again
        if not self._peers.speaks:
            return
        if state is None:
            raise BackendError(errors[0])
        if not written:  # nobody pays for an error in a pause because of that
            state = msgspec.structs.replace(state, written=expected.written)
        if state != expected:
            raise BackendError(other_state(state))

    def _together(
        self, step: Callable[[], None], *, wait_s: float = 0.0, of: VllmUpdateMessage | Unreadable | None = None
    ) -> None:
        """Runs `step` here, hears how it went on the other workers, and raises on the last one where any failed.

        Args:
            step: what to do.
            wait_s: how long the others may take.
            of: the message, where it is one of a session: that ends on all workers where it fails on one.
        """
        stages = isinstance(of, VllmUpdateMessage) and of.stage is not None
        error: WeightSyncError | None = None
        try:
            step()
        except Exception as caught:
            error = as_weightsync_error(caught, EngineError, "the worker failed", rank=self._index)
        mine = _said(error, self._loader.coverage() if stages and error is None else None)
        replies = self._peers.exchange(mine, wait_s=wait_s)
        outcomes = [_read(reply) for reply in replies]
        errors = [each for each in outcomes if isinstance(each, WeightSyncError)]
        self._note_split(of, failed=bool(errors))
        if not errors:
            if stages:
                self._loader.cover([_covered(reply) for reply in replies])
            if isinstance(of, VllmUpdateMessage) and of.commit is not None and self._worker.is_patched:
                self._audits.behind(of.commit.session, self._worker.audit, self._worker.settle)
            return
        first = min(errors, key=is_consequence)
        if of is not None:  # on the last worker vLLM's update ends now, so the session can't go on either
            try:
                self._undo_of(of)(f"a worker failed: {first.message}")
            except Exception:
                _logger.exception("worker %d could not undo its part", self._index)
        if self._peers.speaks:
            raise BackendError(first)
        if error is not None:
            _logger.error("worker %d failed; the last worker tells: %s", self._index, error)


class _Given:
    """What a release of vLLM gives to a backend's constructor, told apart by what it is and not by its place."""

    def __init__(self, *values: Any) -> None:
        from torch import nn

        models = [value for value in values if isinstance(value, nn.Module)]
        configs = [value for value in values if hasattr(value, "parallel_config")]
        parallels = [value for value in values if hasattr(value, "world_size") and value not in configs]
        self.model = models[0] if models else None
        self.vllm_config: Any = configs[0] if configs else None
        self.parallel_config = getattr(self.vllm_config, "parallel_config", parallels[0] if parallels else None)
        self.model_config = getattr(self.vllm_config, "model_config", None)


def _said(outcome: VllmState | WeightSyncError | None, covered: Mapping[str, list[Box]] | None = None) -> bytes:
    if isinstance(outcome, WeightSyncError):
        return encode({"error": error_text(outcome)})
    if covered is not None:
        return encode({"covered": covered})
    return encode({} if outcome is None else {"state": outcome})


def _covered(reply: bytes) -> dict[str, list[Box]]:
    fields = decode(reply, dict[str, Any], what="another worker's live parts")
    return msgspec.convert(fields.get("covered", {}), dict[str, list[Box]])


def _read(reply: bytes) -> VllmState | WeightSyncError | None:
    fields = decode(reply, dict[str, Any], what="another worker's outcome")
    if "error" in fields:
        return error_in_text(fields["error"]) or EngineError(str(fields["error"]))
    return msgspec.convert(fields["state"], VllmState) if "state" in fields else None


def _merged(states: list[VllmState]) -> VllmState:
    """What all agree on; what they don't is nobody's."""
    groups = {state.group for state in states}
    versions = {(state.version, state.digest) for state in states}
    one = len(versions) == 1
    version, digest = versions.pop() if one else (None, None)
    return VllmState(
        group=groups.pop() if len(groups) == 1 else None,
        run_id=states[0].run_id,
        healthy=all(state.healthy for state in states) and one,
        version=version,
        digest=digest,
        updating=any(state.updating for state in states),
        session=next((state.session for state in states if state.session is not None), None),
        writes_live=any(state.writes_live for state in states),
        accepts=tuple(sorted(set.intersection(*(set(state.accepts) for state in states)))),
        proved=all(state.proved for state in states),
        audits=tuple(merged_audits([state.audits for state in states])),
        unhealthy=next((state.unhealthy for state in states if state.unhealthy), None),
        unprovable=next((state.unprovable for state in states if state.unprovable), None),
        written=states[0].written if len({state.written for state in states}) == 1 else None,
        layers=merged_layers(state.layers for state in states),
    )


def _parsed(read: Callable[[dict[str, Any]], _T], info: dict[str, Any]) -> _T | Unreadable:
    try:
        return read(info)
    except WeightSyncError as error:
        return Unreadable(error)
    except Exception as error:
        return Unreadable(as_weightsync_error(error, InvalidRequestError, "the info can't be read"))


def _model_behind(load_weights: Callable[..., Any]) -> Any:
    """The model whose loader this is: its bound method, or a function that vLLM made around the model."""
    from torch import nn

    def candidates() -> Iterator[Any]:
        yield getattr(load_weights, "__self__", None)
        if inspect.isfunction(load_weights):
            yield from inspect.getclosurevars(load_weights).nonlocals.values()

    for value in candidates():
        if isinstance(value, nn.Module):
            return value
    raise UnsupportedError(
        f"this release of vLLM does not show its model to a weight-transfer backend: {since('vLLM', [MODEL])}"
    )
