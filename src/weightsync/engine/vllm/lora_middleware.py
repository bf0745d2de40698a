"""LoraMiddleware: requests for a model's name are answered by the version of its LoRA adapter that is current when they
come, and an old version is unloaded when its last request has ended.

    VLLM_ALLOW_RUNTIME_LORA_UPDATING=True vllm ... --enable-lora --max-loras 4 \
        --middleware weightsync.engine.vllm.lora_middleware.LoraMiddleware

    request, model "actor" --> model "actor@run/12#..." --> vLLM --> answer, model "actor", weight_versions: run/12

The rollout service loads each version under a name of its own, proves it there, and commits it (`handles.vllm_lora`);
the switch is one assignment in this event loop. There is one: vLLM refuses to take adapters at run time with more than
one API server. vLLM's cache of prefixes goes by an adapter's name and folder, so a new version finds nothing of an old
one's. Imports no torch.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
from collections import deque
from collections.abc import Coroutine
from typing import Any

from weightsync.engine.vllm.adapter_table import AdapterTable, Held
from weightsync.engine.vllm.answers import ROUTES, hides_tokens, num_choices
from weightsync.engine.vllm.asgi import (
    App,
    Bodies,
    Message,
    Receive,
    Scope,
    Send,
    answer,
    first,
    foreign,
    is_of_another_page,
    refuse,
    route_of,
    with_length_of,
)
from weightsync.engine.vllm.lease_middleware import LeaseMiddleware
from weightsync.engine.vllm.lora_answers import Completions, Models, Renamed
from weightsync.engine.vllm.lora_calls import Inside, VllmFacts
from weightsync.engine.vllm.lora_requests import Requests
from weightsync.errors import (
    ConfigError,
    DeadlineExceededError,
    EngineError,
    InvalidRequestError,
    NotServingError,
    UnsupportedError,
    WeightSyncError,
    as_weightsync_error,
)
from weightsync.handles.lora_messages import (
    COMMIT_PATH,
    DROP_PATH,
    LOAD_PATH,
    SCORE_PATH,
    STATE_PATH,
    AdapterState,
    CommitAdapter,
    DropAdapter,
    LoadAdapter,
    ScoreAdapter,
    Scored,
)
from weightsync.memory import PrivateFolder
from weightsync.net.messages import decode, encode
from weightsync.net.origin import host_names
from weightsync.types import Deadline, in_seconds

EXPECTED_VARIABLE = "WEIGHTSYNC_ADAPTERS"
"""Models, by commas, whose requests are refused (503) before they have an adapter, e.g. after a restart: vLLM itself
would say that there is no such model."""
_GENERATES = (
    *("/v1/", "/inference/", "/generate", "/tokenize", "/detokenize"),
    *("/score", "/rerank", "/pooling", "/classify"),
)
_METHODS = ("POST", "PUT")  # SGLang takes either
_OWN_ROUTES = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")
_MAX_ORDER_BYTES = 1 << 20
_UNLOAD_RETRY_S = 1.0
_CALL_S = 60.0

_logger = logging.getLogger(__name__)


class LoraMiddleware:
    """ASGI middleware. One event loop. A `LeaseMiddleware` stands outside of it (behind it on the command line): a
    request that waits for a set of models is given the adapter that is current when it goes on. SGLang's differs in
    the first methods (`engine.sglang_lora`).

    Args:
        app: what answers.
        expected: see `EXPECTED_VARIABLE`.
    """

    def __init__(self, app: App, *, expected: str | None = None) -> None:
        self._app = app
        text = os.environ.get(EXPECTED_VARIABLE, "") if expected is None else expected
        self._expected = frozenset(name.strip() for name in text.split(",") if name.strip())
        self._table = AdapterTable(self.slots_advice)
        self._loading = asyncio.Lock()  # vLLM loads and unloads one at a time
        self._tasks: set[asyncio.Task[Any]] = set()
        self._wrong_order = _has_lease(app)
        self._names = host_names((socket.gethostname(),))
        self._requests = Requests()
        self._service: Scope = {}  # of the last order that was allowed: what leaves is unloaded in its name

    # --- what is the engine's ---

    slots_advice = "Start vLLM with a greater --max-loras"
    generates: tuple[str, ...] = _GENERATES
    own_routes: tuple[str, ...] = _OWN_ROUTES

    def _inside(self, scope: Scope) -> Inside:
        return Inside(self._app, scope)

    def _facts(self, scope: Scope) -> VllmFacts:
        return VllmFacts(scope["app"])

    def _check_client(self, scope: Scope) -> None:
        """Raises AuthError where the engine refuses the client whatever it asks: no more is read of it."""

    def _asked(self, request: dict[str, Any], path: str) -> str | None:
        """The name that a request asks for; None: for none that may be ours.

        Raises:
            UnsupportedError: it names one of ours in a way that the engine would not answer by that adapter.
        """
        model = request.get("model")
        return model if isinstance(model, str) else None

    def _given(
        self, request: dict[str, Any], path: str, held: Held, model: str, send: Send
    ) -> tuple[dict[str, Any], Send]:
        """The request as the engine gets it, and what takes its answer."""
        asked = bool(request.get("return_token_ids"))
        if not isinstance(request.get("vllm_xargs") or {}, dict):
            raise InvalidRequestError("vllm_xargs is an object", state_left="not answered")
        given = {**request, "model": held.name}
        if not path.endswith(ROUTES):
            return given, Renamed(send, held, held.name, model).send
        if not hides_tokens(given):
            given["return_token_ids"] = True
        return given, Completions(send, held, model, asked=asked, number=num_choices(given)).send

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes what is not its business."""
        if scope["type"] == "lifespan" and self._wrong_order:
            await self._refuse_start(receive, send)
            return
        path = route_of(scope) if scope["type"] == "http" else ""
        if path == STATE_PATH or path.startswith(f"{STATE_PATH}/"):
            await self._ordered(scope, path, receive, send)
        elif path == "/v1/models" and scope["method"] == "GET":
            await self._app(scope, receive, Models(send, self._table).send)
        elif scope.get("method") in _METHODS and path.startswith(self.generates) and path not in self.own_routes:
            await self._answered(scope, path, receive, send)
        else:
            await self._app(scope, receive, send)

    # --- clients' requests ---

    async def _answered(self, scope: Scope, path: str, receive: Receive, send: Send) -> None:
        read: deque[Message] = deque()
        request: dict[str, Any] | None = None
        model = ""
        held: Held | None = None
        try:
            try:
                self._check_client(scope)
                request = await self._requests.read(receive, read)
                model = (None if request is None else self._asked(request, path)) or ""
            except WeightSyncError as error:
                await refuse(send, error)
                return
            named = self._table.named(model)
            if named is not None and (named.leaving or named.state == "staged"):
                # by vLLM's own name for it: it is not proved yet, or vLLM would read a folder that goes, and end
                await refuse(send, NotServingError(f"{model} is {named.state}", state_left="not answered"))
                return
            # the switch: nothing is awaited between this look and the count
            held = self._table.begin(model) if model else None
            if held is None and model in self._expected:
                await refuse(send, NotServingError(f"{model} has no adapter yet", state_left="not loaded"))
                return
            if held is None or request is None:
                request = None  # an answer may take minutes
                await self._app(scope, self._requests.again(read, receive), send)
                return
        finally:
            self._requests.done(read)
        try:
            try:
                given, out = self._given(request, path, held, model, send)
            except InvalidRequestError as error:
                await refuse(send, error)
                return
            rewritten = json.dumps(given).encode()
            scope, receive = with_length_of(scope, rewritten), first(rewritten, receive)
            del request, given, rewritten
            await self._app(scope, receive, out)
        finally:
            self._table.end(held)
            self._sweep()

    # --- the service's orders ---

    async def _ordered(self, scope: Scope, path: str, receive: Receive, send: Send) -> None:
        try:
            if is_of_another_page(scope, self._names):
                raise foreign()
            inside, facts = self._inside(scope), self._facts(scope)
            await inside.check_allowed()
            self._service = scope
            if (scope["method"], path) == ("GET", STATE_PATH):
                reply: AdapterState | Scored = self._state(facts)
            elif scope["method"] == "POST":
                body = await Bodies().read(
                    receive, deque(), max_bytes=_MAX_ORDER_BYTES, max_coming_bytes=_MAX_ORDER_BYTES
                )
                if body is None:
                    raise InvalidRequestError(f"an order has at most {_MAX_ORDER_BYTES} bytes")
                reply = await self._obey(path, body, inside, facts)
            else:
                raise UnsupportedError(f"there is no {scope['method']} {path}")
        except Exception as error:
            typed = as_weightsync_error(error, EngineError, "the order failed")
            await answer(send, typed.http_status, encode(typed.to_dict()))
            return
        await answer(send, 200, encode(reply))

    async def _obey(self, path: str, body: bytes, inside: Inside, facts: VllmFacts) -> AdapterState | Scored:
        if path == LOAD_PATH:
            await self._load(decode(body, LoadAdapter, what="the order"), inside, facts)
        elif path == SCORE_PATH:
            return await self._score(decode(body, ScoreAdapter, what="the order"), inside)
        elif path == COMMIT_PATH:
            self._table.commit(decode(body, CommitAdapter, what="the order").session)
        elif path == DROP_PATH:
            self._table.drop(decode(body, DropAdapter, what="the order").session)
        else:
            raise UnsupportedError(f"there is no order {path}")
        self._sweep()
        return self._state(facts)

    def _state(self, facts: VllmFacts) -> AdapterState:
        mine = {each.name for each in self._table}
        return AdapterState(
            max_loras=facts.max_loras, max_cpu_loras=facts.max_cpu_loras, max_lora_rank=facts.max_lora_rank,
            num_replicas=facts.num_replicas, updating=facts.updating, others=len(facts.names() - mine),
            adapters=self._table.told(),
        )  # fmt: skip

    async def _load(self, order: LoadAdapter, inside: Inside, facts: VllmFacts) -> None:
        facts.check()
        if order.model_id in facts.base_names():
            raise ConfigError(
                f"the base is served as {order.model_id!r}, which is this adapter's model: start the engine with "
                "another --served-model-name, or publish under another model_id",
                state_left="nothing was changed",
            )
        self._table.expire()
        for each in self._table:  # a session that its service has forgotten
            if each.load.model_id == order.model_id and each.state == "staged":
                self._table.drop(each.load.session)
        self._sweep()
        deadline = Deadline(order.deadline_s)
        await self._settled(facts, deadline)
        held = Held(load=order, folder=PrivateFolder.taken_over(order.folder), until=deadline, loading=True)
        try:
            others = len(facts.names() - {each.name for each in self._table})
            self._table.add(held, max_loras=facts.max_loras, others=others)
        except WeightSyncError:
            held.folder.hand_over()  # it is the service's still
            raise
        asyncio.get_running_loop().call_later(order.deadline_s + 0.1, self._expire)
        loading = self._spawn(self._load_now(held, inside, facts))
        done, _ = await asyncio.wait({loading}, timeout=deadline.remaining_s)
        if not done:
            self._table.drop(order.session)
            raise DeadlineExceededError(
                f"{inside.engine} did not load {held.name} within {in_seconds(order.deadline_s)}"
            )
        loading.result()

    async def _load_now(self, held: Held, inside: Inside, facts: VllmFacts) -> None:
        async with self._loading:
            try:
                held.unprovable = await inside.load(held.name, held.folder.path)
            except BaseException:
                self._table.remove(held)
                held.folder.close()
                raise
            held.lora_id = facts.lora_id(held.name)
            held.loading = False

    async def _score(self, order: ScoreAdapter, inside: Inside) -> Scored:
        held = self._table.of_session(order.session)
        if held is None or self._table.begin(held.name) is None:
            raise InvalidRequestError(f"session {order.session} has no adapter here")
        try:
            return Scored(logprobs=await inside.score(held.name, order.tokens, order.replica))
        finally:
            self._table.end(held)
            self._sweep()

    # --- what leaves ---

    def _expire(self) -> None:
        self._table.expire()
        self._sweep()

    def _sweep(self) -> None:
        """Begins to unload what nobody needs any more. Whose request was the last may not be allowed to unload."""
        for held in self._table.over():
            inside, facts = self._inside(self._service), self._facts(self._service)
            self._spawn(self._unload(held, inside, facts))

    async def _unload(self, held: Held, inside: Inside, facts: VllmFacts) -> None:
        """Out of vLLM's list, out of its workers, and then the folder: a worker that is asked for an adapter which it
        has not reads the folder, and ends vLLM where there is none."""
        while True:
            try:
                await facts.ended(held.name, Deadline(_CALL_S))  # none begins any more; others may be loaded meanwhile
                async with self._loading:
                    await inside.unload(held.name)
                    if held.lora_id is not None:
                        await inside.drop(held.lora_id)
                break
            except Exception as error:
                _logger.warning("adapter %s could not be unloaded yet: %s", held.name, error)
                await asyncio.sleep(_UNLOAD_RETRY_S)
        held.folder.close()
        self._table.remove(held)

    async def _settled(self, facts: VllmFacts, deadline: Deadline) -> None:
        """There is a slot; or none of those that are taken is being unloaded; or the time is over."""
        while any(each.leaving for each in self._table) and not deadline.expired:
            if len(facts.names() | {each.name for each in self._table}) < facts.max_loras:
                return
            await asyncio.sleep(0.005)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _refuse_start(self, receive: Receive, send: Send) -> None:
        why = "ConfigError: on the command line --middleware ...LeaseMiddleware stands behind ...LoraMiddleware"
        _logger.error("this server does not start: %s", why)
        await receive()
        await send({"type": "lifespan.startup.failed", "message": why})


def _has_lease(app: Any) -> bool:
    """Whether a lease is looked at behind this middleware: a request would be given its adapter before it waits."""
    seen = 0
    while app is not None and seen < 100:
        if isinstance(app, LeaseMiddleware):
            return True
        app, seen = getattr(app, "app", None) or getattr(app, "_app", None), seen + 1
    return False
