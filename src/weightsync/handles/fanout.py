"""EngineFanout: one `InferenceEngineClient` over any number of engine handles, whatever reaches them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from typing import TypeVar

from weightsync.errors import (
    ConfigError,
    DeadlineExceededError,
    EngineError,
    EngineUnreachableError,
    NoEnginesError,
    SyncFailedError,
    WeightSyncError,
    as_weightsync_error,
    is_consequence,
)
from weightsync.types import (
    AbortRequest,
    AnyUpdateRequest,
    BeginRequest,
    CommitRequest,
    DescribeRequest,
    EngineHandle,
    EngineOp,
    EngineReply,
    EngineRequest,
    InitRequest,
    PauseRequest,
    ResumeRequest,
    StageRequest,
    UpdateRequest,
    in_seconds,
)

_T = TypeVar("_T")
_CAUSE_GRACE_S = 1.0


@contextlib.contextmanager
def own_words() -> Iterator[None]:
    """Around calls to one engine: raises what it says, not that one engine of one has failed."""
    try:
        yield
    except SyncFailedError as error:
        if not error.causes:
            raise
        raise next(iter(error.causes.values())) from error


class EngineFanout:
    """Calls all engines at once, each in a thread of its own, and fails as soon as one fails.

    Args:
        engines: handles, e.g. `HttpEngine`s; their ids are unique. The order is that of the rank offsets.
    """

    def __init__(self, engines: Sequence[EngineHandle]) -> None:
        self._engines = {engine.engine_id: engine for engine in engines}
        if len(self._engines) != len(engines):
            raise ConfigError(f"engine ids are not unique: {[engine.engine_id for engine in engines]}")

    @property
    def engine_ids(self) -> Sequence[str]:
        """The engines, in the order of their rank offsets."""
        return tuple(self._engines)

    def only(self, engine_ids: Sequence[str]) -> EngineFanout:
        """The same engines, less those not named."""
        named = set(engine_ids)
        return EngineFanout([engine for engine_id, engine in self._engines.items() if engine_id in named])

    def describe(self, *, timeout_s: float) -> tuple[Mapping[str, EngineReply], Mapping[str, WeightSyncError]]:
        """Asks every engine what it is; see the protocol."""
        if not self._engines:
            return {}, {}
        return self._all_settled(EngineOp.DESCRIBE, DescribeRequest(), timeout_s)

    def get_world_sizes(self, *, timeout_s: float) -> Mapping[str, int]:
        """World sizes by engine id; see the protocol."""
        replies = self._call(EngineOp.DESCRIBE, DescribeRequest(), timeout_s)
        return {engine_id: reply.world_size for engine_id, reply in replies.items()}

    def init(self, requests: Mapping[str, InitRequest], *, timeout_s: float) -> Future[Mapping[str, EngineReply]]:
        """Sends each engine its own init request; see the protocol. The future fails at the latest after `timeout_s`:
        whoever joins a group looks at it to know when to give up."""
        return self._whole(EngineOp.INIT, self._each(EngineOp.INIT, requests, timeout_s), timeout_s, settles=True)

    def begin(self, request: BeginRequest, *, timeout_s: float) -> Mapping[str, EngineReply]:
        return self._call(EngineOp.BEGIN, request, timeout_s)

    def update_weights(self, request: AnyUpdateRequest, *, timeout_s: float) -> Future[Mapping[str, EngineReply]]:
        op = EngineOp.UPDATE_WEIGHTS
        return self._whole(op, self._each(op, self._same(UpdateRequest(update=request)), timeout_s), timeout_s)

    def stage(self, request: StageRequest, *, timeout_s: float) -> Mapping[str, EngineReply]:
        return self._call(EngineOp.STAGE, request, timeout_s)

    def commit(self, request: CommitRequest, *, timeout_s: float) -> Mapping[str, EngineReply]:
        """Commits on every engine and waits for all of them: which have committed must be known."""
        replies, errors = self._all_settled(EngineOp.COMMIT, request, timeout_s)
        if errors:
            raise SyncFailedError(
                f"commit failed on {', '.join(sorted(errors))}",
                causes=errors,
                state_left=_after_commit(replies, errors),
            )
        return replies

    def abort(self, request: AbortRequest, *, timeout_s: float) -> Mapping[str, WeightSyncError]:
        return self._all_settled(EngineOp.ABORT, request, timeout_s)[1] if self._engines else {}

    def pause(self, request: PauseRequest, *, timeout_s: float) -> Mapping[str, EngineReply]:
        return self._call(EngineOp.PAUSE, request, timeout_s)

    def resume(self, request: ResumeRequest, *, timeout_s: float) -> Mapping[str, EngineReply]:
        return self._call(EngineOp.RESUME, request, timeout_s)

    def _same(self, request: EngineRequest) -> dict[str, EngineRequest]:
        return dict.fromkeys(self._engines, request)

    def _call(self, op: EngineOp, request: EngineRequest, timeout_s: float) -> Mapping[str, EngineReply]:
        calls = self._each(op, self._same(request), timeout_s)
        try:
            return self._whole(op, calls, timeout_s).result(timeout_s)
        except TimeoutError:
            silent = [engine_id for engine_id, call in calls.items() if not call.done()]
            raise DeadlineExceededError(
                f"no answer to {op} from {', '.join(silent)} within {in_seconds(timeout_s)}", peer=", ".join(silent)
            ) from None

    def _whole(
        self, op: EngineOp, calls: Mapping[str, Future[EngineReply]], timeout_s: float, *, settles: bool = False
    ) -> Future[Mapping[str, EngineReply]]:
        """One future for all: done with every reply, or failed with the first failure's `SyncFailedError`; where it
        `settles`, with that of an engine that is silent for `timeout_s` too."""
        whole: Future[Mapping[str, EngineReply]] = Future()
        lock = threading.Lock()
        replies: dict[str, EngineReply] = {}
        errors: dict[str, WeightSyncError] = {}

        def fail() -> None:
            with lock:
                if not whole.done():
                    causes = {who: error for who, error in errors.items() if not is_consequence(error)} or errors
                    whole.set_exception(SyncFailedError(f"{op} failed on {', '.join(causes)}", causes=causes))

        def expire() -> None:
            with lock:
                for who in set(calls) - set(replies) - set(errors):
                    errors[who] = DeadlineExceededError(f"no answer to {op} within {in_seconds(timeout_s)}", peer=who)
            fail()

        def settle(engine_id: str, call: Future[EngineReply]) -> None:
            error = call.exception()
            with lock:
                if error is None:
                    replies[engine_id] = call.result()
                else:
                    errors[engine_id] = _typed(error, engine_id)
                settled = len(replies) + len(errors) == len(calls)
                if settled and not errors and not whole.done():
                    whole.set_result({name: replies[name] for name in calls})
            if errors and (settled or (error is not None and not is_consequence(errors[engine_id]))):
                fail()
            elif error is not None:  # a broken connection: whoever broke it will say why in a moment
                timer = threading.Timer(min(_CAUSE_GRACE_S, timeout_s), fail)
                timer.daemon = True
                timer.start()

        for engine_id, call in calls.items():
            call.add_done_callback(lambda done, name=engine_id: settle(name, done))  # type: ignore[misc]
        if settles:
            timer = threading.Timer(timeout_s, expire)
            timer.daemon = True
            whole.add_done_callback(lambda done: timer.cancel())
            timer.start()
        return whole

    def _all_settled(
        self, op: EngineOp, request: EngineRequest, timeout_s: float
    ) -> tuple[dict[str, EngineReply], dict[str, WeightSyncError]]:
        return collect(self._each(op, self._same(request), timeout_s), timeout_s=timeout_s, late=f"no answer to {op}")

    def _each(
        self, op: EngineOp, requests: Mapping[str, EngineRequest], timeout_s: float
    ) -> dict[str, Future[EngineReply]]:
        if not requests:
            raise NoEnginesError(f"there is no engine to call {op} on")

        def caller(engine: EngineHandle, request: EngineRequest) -> Callable[[], EngineReply]:
            return lambda: engine.call(op, request, timeout_s=timeout_s)

        return {
            engine_id: self._start_call(caller(self._engines[engine_id], request), f"weightsync-{op}-{engine_id}")
            for engine_id, request in requests.items()
        }

    def _start_call(self, call: Callable[[], EngineReply], name: str) -> Future[EngineReply]:
        return in_thread(call, name=name)


class DirectEngine(EngineFanout):
    """One engine, called in the caller's own thread: whoever lends it memory knows by the end of the call that it has
    let go of that, however late."""

    def __init__(self, engine: EngineHandle) -> None:
        super().__init__([engine])

    def _start_call(self, call: Callable[[], EngineReply], name: str) -> Future[EngineReply]:
        future: Future[EngineReply] = Future()
        try:
            future.set_result(call())
        except Exception as error:
            future.set_exception(error)
        return future


def _after_commit(replies: Mapping[str, EngineReply], errors: Mapping[str, WeightSyncError]) -> str:
    unknown = [
        who for who, error in errors.items() if isinstance(error, (DeadlineExceededError, EngineUnreachableError))
    ]
    refused = sorted(set(errors) - set(unknown))
    facts = {"serve the new version": sorted(replies), "do not": refused, "did not say": sorted(unknown)}
    return "; ".join(f"{', '.join(who)} {what}" for what, who in facts.items() if who)


def in_thread(function: Callable[[], _T], *, name: str) -> Future[_T]:
    """Runs `function` in a daemon thread of its own: a call that hangs never keeps the process from ending. Where no
    thread can be started the future has failed: whoever starts several waits for those that did start. It can't be
    cancelled: whoever gives up a wait for it (asyncio does) ends the wait alone."""
    future: Future[_T] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            result = function()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    try:
        threading.Thread(target=run, name=name, daemon=True).start()
    except RuntimeError as error:
        future.set_exception(error)
    return future


def call_all(
    calls: Mapping[str, Callable[[], _T]], *, what: str, timeout_s: float
) -> tuple[dict[str, _T], dict[str, WeightSyncError]]:
    """Makes all calls at once, each in a thread of its own: what each gave, and why others failed. One that takes
    longer has missed its deadline, and goes on.

    Args:
        calls: by peer.
        what: is asked for, for messages.
        timeout_s: how long to wait for all of them.
    """
    running = {peer: in_thread(call, name=f"weightsync-{what}-{peer}") for peer, call in calls.items()}
    return collect(running, timeout_s=timeout_s, late=f"no answer to {what}")


def collect(
    calls: Mapping[str, Future[_T]], *, timeout_s: float, late: str = "no answer"
) -> tuple[dict[str, _T], dict[str, WeightSyncError]]:
    """As `call_all`, of calls that are under way.

    Args:
        calls: by peer.
        timeout_s: how long to wait for all of them.
        late: how the error of one that takes longer begins.
    """
    wait_for(calls.values(), timeout=timeout_s)
    replies: dict[str, _T] = {}
    errors: dict[str, WeightSyncError] = {}
    for peer, call in calls.items():
        if not call.done():
            errors[peer] = DeadlineExceededError(f"{late} within {in_seconds(timeout_s)}", peer=peer)
        elif (error := call.exception()) is not None:
            errors[peer] = _typed(error, peer)
        else:
            replies[peer] = call.result()
    return replies, errors


def _typed(error: BaseException, peer: str) -> WeightSyncError:
    typed = as_weightsync_error(error, EngineError, "the call failed", peer=peer)
    if typed.peer is None:
        typed.peer = peer
    return typed
