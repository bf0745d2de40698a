"""ControllerServer: a `WeightSyncController` over HTTP.

Who waits at the gate costs no thread and no polling: a waiter is a coroutine, woken when its model changes. Who waits
for the end of a sync or of a validation costs a thread. Of both only so many may, see `Places`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from collections.abc import Awaitable, Callable
from typing import TypeVar, Unpack, cast

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from weightsync.control.callers_run import run_of_caller
from weightsync.control.controller import WeightSyncController
from weightsync.control.metrics import ControllerMetrics
from weightsync.control.pool import RolloutPool
from weightsync.control.push_orders import PushOrders
from weightsync.control.web.page import OPEN_PATHS, add_page
from weightsync.errors import BusyError, StateError, error_from_dict
from weightsync.handles.fanout import in_thread
from weightsync.net.guard import LIST_BODY_BYTES
from weightsync.net.messages import decode
from weightsync.net.places import Places, end_now, peer_of
from weightsync.net.server import Api, Route, ServerOptions, ServerSettings, ServerThread, json_of
from weightsync.net.timeline import add_timeline
from weightsync.observe import now_s
from weightsync.observe.metrics import CONTENT_TYPE
from weightsync.types import PhaseRecord, SyncReport
from weightsync.types.control import (
    BatchDroppedRequest,
    ControllerStatus,
    EndValidateRequest,
    GateReply,
    ModelRequest,
    RolloutServiceState,
    SyncReply,
    TrainedRequest,
    WaitVersionRequest,
)
from weightsync.types.fleet import HeartbeatReply, HeartbeatRequest
from weightsync.types.process import of_one_process
from weightsync.types.push_orders import NextPushReply, NextPushRequest, PushDoneReply, PushDoneRequest
from weightsync.types.service import NotifyRequest
from weightsync.types.timeline import Timeline

_MAX_WAITING = 256
_MAX_AT_GATES = 16_384
_MAX_ASKING = 64
"""Announcements without a run, whose agents are asked: each has a thread of its own meanwhile."""
_SHOWN_S = 5.0
"""So long a rank waits until a push that it reports is counted."""
_T = TypeVar("_T")
_M = TypeVar("_M")


@of_one_process
class ControllerServer:
    """Serves document 5's calls under their names, `/notify_version`, `/wait_version`, `/heartbeat`, `/status` and
    `/healthz`, from `start` to `close`.

    Args:
        controller: whose calls these are. It stays the caller's.
        pool: whose heartbeats are taken; the method's own where not given.
        settings: host, port, token and tls, see `ServerSettings`.

    Raises:
        ConfigError: the host is reachable from elsewhere and there is no token.
    """

    def __init__(
        self, controller: WeightSyncController, pool: RolloutPool | None = None, **settings: Unpack[ServerOptions]
    ) -> None:
        self._controller = controller
        self._pool = pool or controller.method.pool
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False
        self._changed: dict[str, asyncio.Event] = {}
        self._waiting = Places(_MAX_WAITING)
        self._at_gates = Places(_MAX_AT_GATES)
        self._asking = Places(_MAX_ASKING)
        self._unsubscribe: Callable[[], None] = lambda: None
        self._metrics = ControllerMetrics(controller.status, controller.records)
        self.app = Api(
            "weightsync controller",
            _post("/check_rollout_service_status", ModelRequest, self._check),
            _post("/trajectory_pool_notify_batch_ready", ModelRequest, self._batch_ready),
            _post("/trajectory_pool_notify_batch_dropped", BatchDroppedRequest, self._batch_dropped),
            _post("/train_worker_notify_weight_update", TrainedRequest, self._trained),
            _post("/notify_version", NotifyRequest, self._notified),
            _post("/wait_version", WaitVersionRequest, self._wait_version),
            _post("/heartbeat", HeartbeatRequest, self._heartbeat),
            _post("/sync_weight_to_rollout_service", ModelRequest, self._sync),
            _post("/end_validate", EndValidateRequest, self._end_validate),
            _post("/push/next", NextPushRequest, self._next_push),
            _post("/push/done", PushDoneRequest, self._push_done),
            ("GET", "/status", self._status),
            ("GET", "/metrics", self._get_metrics),
        )
        self._plot = add_page(self.app, controller.status)
        add_timeline(self.app, controller.recorder, self._timeline)
        self._server = ServerThread(
            self.app,
            ServerSettings(**settings),
            open_paths=OPEN_PATHS,
            body_limits={
                "/heartbeat": LIST_BODY_BYTES,
                "/end_validate": LIST_BODY_BYTES,
                "/push/done": LIST_BODY_BYTES,
            },
            name="weightsync-controller",
        )

    def start(self) -> str:
        """Starts to listen; the URL."""
        self._unsubscribe = self._controller.subscribe(self._changed_model)
        return self._server.start()

    def close(self) -> None:
        """Stops listening; who waits at the gate is told to ask again. Idempotent."""
        self._closed = True
        self._unsubscribe()
        self._unsubscribe = lambda: None
        for model_tag in self._controller.model_tags:
            self._wake(model_tag)
        self._server.close()

    def _changed_model(self, model_tag: str) -> None:
        self._wake(model_tag)
        self._metrics.look()
        self._plot(self._controller.status())

    def _wake(self, model_tag: str) -> None:
        """From any thread: those who wait for this model look again."""
        loop = self._loop
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # the server has ended
                loop.call_soon_threadsafe(self._wake_here, model_tag)

    def _wake_here(self, model_tag: str) -> None:
        event = self._changed.pop(model_tag, None)
        if event is not None:
            event.set()

    async def _check(self, request: Request, asked: ModelRequest) -> GateReply:
        return await self._gate(
            request, asked, lambda: self._controller.check_rollout_service_status(asked.model_tag) == "continue"
        )

    async def _wait_version(self, request: Request, asked: WaitVersionRequest) -> GateReply:
        return await self._gate(
            request, asked, lambda: self._controller.serves(asked.run_id, asked.model_tag, asked.version)
        )

    async def _gate(self, request: Request, asked: ModelRequest, opened: Callable[[], bool]) -> GateReply:
        """Answers when it has opened, or the caller's time is over, or to make room for another one's request."""
        self._controller.rollout_service_state(asked.model_tag, counted=False)  # there is such a model
        self._loop = asyncio.get_running_loop()
        changed = self._change_of(asked.model_tag)  # before the look: nothing is missed
        through = opened()
        if not through and asked.wait_s:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(asked.wait_s) as limit:
                    with self._at_gates.take(request, functools.partial(end_now, limit)):
                        while not through and not self._closed:
                            await changed.wait()
                            changed = self._change_of(asked.model_tag)
                            through = opened()
        state = self._controller.rollout_service_state(asked.model_tag, counted=False)
        return GateReply(
            answer="continue" if through else "block",
            run_id=state.run_id,
            rollout_model_version=state.rollout_model_version,
        )

    def _change_of(self, model_tag: str) -> asyncio.Event:
        """Set at this model's next change."""
        return self._changed.setdefault(model_tag, asyncio.Event())

    async def _batch_ready(self, _: Request, asked: ModelRequest) -> RolloutServiceState:
        await _in_thread(self._controller.trajectory_pool_notify_batch_ready, asked.model_tag)
        return self._controller.rollout_service_state(asked.model_tag)

    async def _batch_dropped(self, _: Request, asked: BatchDroppedRequest) -> RolloutServiceState:
        await _in_thread(self._controller.trajectory_pool_notify_batch_dropped, asked.model_tag, asked.num_batches)
        return self._controller.rollout_service_state(asked.model_tag)

    async def _trained(self, request: Request, asked: TrainedRequest) -> RolloutServiceState:
        if self._controller.method.asks_agents and asked.run_id is None and asked.version is not None:
            asked = await self._with_run(request, asked)
        await self._in_a_thread_of_its_own(
            request,
            asked,
            lambda given_up: self._controller.train_worker_notify_weight_update(
                asked.worker_name, asked.model_tag, asked.run_id, asked.version, sender_endpoint=asked.sender_endpoint,
                evaluate=asked.evaluate, timeout_s=asked.wait_s or 0.0, given_up=given_up,
            ),
        )  # fmt: skip
        return self._controller.rollout_service_state(asked.model_tag)

    async def _with_run(self, request: Request, asked: TrainedRequest) -> TrainedRequest:
        """With the run that its sender's agent has, where one is named."""
        self._controller.rollout_service_state(asked.model_tag, counted=False)  # there is such a model
        if asked.sender_endpoint is None:
            return asked
        header = request.headers.get("authorization", "")
        ask = functools.partial(
            run_of_caller, asked.model_tag, asked.sender_endpoint, peer=peer_of(request), header=header
        )
        with self._asking.take(request, leave=lambda: None):
            run_id = await asyncio.wrap_future(in_thread(ask, name="weightsync-asks"))
        return msgspec.structs.replace(asked, run_id=run_id)

    async def _notified(self, request: Request, asked: NotifyRequest) -> RolloutServiceState:
        trained = TrainedRequest(
            worker_name="trainer", model_tag=asked.model_id, run_id=asked.run_id, version=asked.version,
            sender_endpoint=asked.sender_endpoint, evaluate=asked.evaluate, wait_s=asked.wait_s,
        )  # fmt: skip
        return await self._trained(request, trained)

    async def _sync(self, request: Request, asked: ModelRequest) -> SyncReply:
        done = await self._in_a_thread_of_its_own(
            request,
            asked,
            lambda given_up: self._controller.sync_weight_to_rollout_service(
                asked.model_tag, timeout_s=asked.wait_s or 0.0, given_up=given_up
            ),
        )
        return SyncReply(up_to_date=done)

    async def _in_a_thread_of_its_own(
        self,
        request: Request,
        asked: ModelRequest,
        call: Callable[[threading.Event], _T],
        *,
        look_again: Callable[[], None] | None = None,
    ) -> _T:
        """For calls that wait: those of the loop's own executor are few, and what ends the wait needs one.

        Raises:
            StateError: too many wait already.
            BusyError: it made room for another one's call.
        """
        given_up = threading.Event()

        def give_up() -> None:
            given_up.set()
            (look_again or functools.partial(self._controller.look_again, asked.model_tag))()

        with contextlib.ExitStack() as stack:
            place = stack.enter_context(self._waiting.take(request, give_up)) if asked.wait_s else None
            done = await asyncio.wrap_future(in_thread(lambda: call(given_up), name="weightsync-waits"))
        if place is not None and place.lost:
            raise BusyError(
                f"{_MAX_WAITING} calls wait here, and this one made room for another: ask again by and by",
                state_left="what it asked for goes on",
            )
        return done

    async def _end_validate(self, _: Request, asked: EndValidateRequest) -> RolloutServiceState:
        end = functools.partial(self._controller.end_validate, version=asked.version)
        await _in_thread(end, asked.model_tag, asked.result)
        return self._controller.rollout_service_state(asked.model_tag)

    async def _next_push(self, request: Request, asked: NextPushRequest) -> NextPushReply:
        orders = self._orders_of(asked)
        order = await self._in_a_thread_of_its_own(
            request,
            asked,
            lambda given_up: orders.next(
                asked.version, asked.run_id, taker=asked.taker, wait_s=asked.wait_s or 0.0, given_up=given_up
            ),
            look_again=orders.look_again,
        )  # fmt: skip
        return NextPushReply(order=order)

    async def _push_done(self, _: Request, asked: PushDoneRequest) -> PushDoneReply:
        """Answers when the model's state shows it: who asks behind `push.step` sees what the engines serve."""
        orders, error = self._orders_of(asked), None if asked.error is None else error_from_dict(asked.error)

        def report() -> bool:
            return orders.done(asked.order_id, error or cast(SyncReport, asked.report))

        ended = functools.partial(self._controller.ended_by, asked.model_tag, report, timeout_s=_SHOWN_S)
        await asyncio.wrap_future(in_thread(ended, name="weightsync-push-done"))
        return PushDoneReply()

    def _orders_of(self, asked: ModelRequest) -> PushOrders:
        self._controller.rollout_service_state(asked.model_tag, counted=False)  # there is such a model
        orders = self._controller.method.orders.get(asked.model_tag)
        if orders is None:
            raise StateError("this controller orders no pushes: set sync_method to 'push' in its configuration")
        return orders

    async def _heartbeat(self, _: Request, asked: HeartbeatRequest) -> HeartbeatReply:
        if self._pool is None:
            raise StateError("this controller has no pool: its method calls services that it was given")
        return self._pool.heartbeat(asked)

    async def _status(self) -> Response:
        return json_of(self._controller.status())

    def _timeline(self) -> Timeline:
        status, now = self._controller.status(), now_s()
        return Timeline(
            kind="controller", name=", ".join(status.models), now_s=now, phases=phases_of(status, now_s=now),
            peers=tuple(each.url for each in status.instances),
        )  # fmt: skip

    async def _get_metrics(self) -> Response:
        return Response(self._metrics.render(), media_type=CONTENT_TYPE)


def phases_of(status: ControllerStatus, *, now_s: float) -> tuple[PhaseRecord, ...]:
    """What each sync waited for, the oldest sync first.

    Args:
        status: whose `syncs` these are; they are told by its wall clock.
        now_s: the same moment by the clock of the phases.
    """
    ahead_s = now_s - status.now_s
    return tuple(
        PhaseRecord(
            name=span.name,
            start_s=sync.started_s + ahead_s + span.start_s,
            end_s=sync.started_s + ahead_s + span.start_s + span.seconds,
            track=f"waits of {sync.model_tag}",
            detail=f"version {sync.version}{f', {span.who}' if span.who else ''}",
        )
        for sync in reversed(status.syncs)
        for span in sync.spans
    )


async def _in_thread(call: Callable[..., None], *args: object) -> None:
    """In a thread of its own. Where none can be had this raises, and nothing is done. The loop's executor would raise,
    and do it later: whoever says it again has said it twice."""
    await asyncio.wrap_future(in_thread(functools.partial(call, *args), name="weightsync-told"))


def _post(path: str, kind: type[_M], answer: Callable[[Request, _M], Awaitable[msgspec.Struct]]) -> Route:
    async def handler(request: Request) -> Response:
        asked = decode(await request.body(), kind, what=f"the body of {path}")
        return json_of(await answer(request, asked))

    return "POST", path, handler
