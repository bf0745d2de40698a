"""RolloutService: one on a rollout host. It asks agents what they have, pulls, proves, and brings engines to it.

Here is its HTTP face. What is done for each model is in `model_updater`, how it works is in `settings`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, TypeVar
from urllib.parse import urlsplit

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from weightsync.config import WeightSyncConfig
from weightsync.errors import (
    BusyError,
    ConfigError,
    DeadlineExceededError,
    InvalidRequestError,
    NoEnginesError,
    NotRegisteredError,
    StateError,
    WeightSyncError,
)
from weightsync.handles.fanout import in_thread
from weightsync.host.agent_state import Claim
from weightsync.host.fleet_model import FleetModel
from weightsync.host.local_lease import LocalLease
from weightsync.host.member import FleetMember
from weightsync.host.model_updater import ModelUpdater
from weightsync.host.relay import relay_of
from weightsync.host.settings import RolloutConfig
from weightsync.host.sync_report import late
from weightsync.memory import reclaim_dead
from weightsync.net.guard import LIST_BODY_BYTES
from weightsync.net.http_edge import checked_url
from weightsync.net.messages import decode
from weightsync.net.places import Places
from weightsync.net.server import Api, ServerSettings, ServerThread, json_of
from weightsync.net.timeline import add_timeline
from weightsync.objects.urls import checked_source, is_store_url
from weightsync.observe import LONG_RUN_BYTES, Metrics, Recorder, now_s
from weightsync.observe.metrics import CONTENT_TYPE
from weightsync.types import Deadline, EngineHandle, Version
from weightsync.types.fleet import CommitVersionsRequest, PrepareRequest, ReleaseRequest
from weightsync.types.process import of_one_process
from weightsync.types.service import NotifyRequest, RegisterSenderRequest, ServiceStatus
from weightsync.types.spec import check_config_id
from weightsync.types.timeline import Timeline

_RECLAIM_EVERY_S = 2.0
_MAX_WAITING = 4096
_MAX_COMMITS = 64
_MAX_ASKING = 64
_T = TypeVar("_T")
_SETS = ("/check_versions", "/prepare_versions", "/commit_versions", "/release_versions")

_logger = logging.getLogger(__name__)


@of_one_process
class RolloutService:
    """Serves `/notify_version`, `/status`, `/availability`, `/register_sender`, `/metrics`, `/healthz`.

    With a `controller` it is a member of that fleet, and serves `/check_versions`, `/prepare_versions`,
    `/commit_versions` and `/release_versions` to it; see `FleetMember`.

    Args:
        engines: of each model, by model_id: handles of the engines of this host (`EmbeddedEngine`, `HttpEngine`,
            `VllmEngine`). They have to reach this host's shared memory.
        config: how it works.
        on_served: told (model_id, version) after every engine serves it; from the model's thread, which waits.

    Raises:
        ConfigError: a sender's URL is none, two engines have one name, or in a fleet one of ours looks at no lease.
        NoEnginesError: a model without engines.
    """

    def __init__(
        self,
        engines: Mapping[str, EngineHandle | Sequence[EngineHandle]],
        config: RolloutConfig | None = None,
        *,
        on_served: Callable[[str, Version], None] | None = None,
    ) -> None:
        if not engines:
            raise NoEnginesError("a rollout service has the engines of at least one model")
        for model_id in engines:
            check_config_id("model_id", model_id)
        config = config or RolloutConfig()
        self.config = config
        self.recorder = Recorder(f"rollout/{config.service_id}", max_bytes=LONG_RUN_BYTES)
        self._metrics = Metrics(self.recorder)
        self._senders = tuple(checked_source(sender, whose="a sender's") for sender in config.senders)
        unleased = [
            engine.engine_id
            for model in engines.values()
            for engine in (model if isinstance(model, Sequence) else [model])
            if getattr(engine, "is_leased", None) is False  # an engine of this process
        ]
        if config.lease is not None and unleased:
            raise ConfigError(
                f"engines of a leased service answer under its lease: {', '.join(unleased)} would answer without one. "
                "Give each EmbeddedEngine.of(loader, lease=LeaseReader(PATH)), with the path of the ServingLease"
            )
        self._closed = threading.Event()
        self._waiting = Places(_MAX_WAITING)
        self._committing = Places(_MAX_COMMITS)
        self._asking = Places(_MAX_ASKING)
        self._member: FleetMember | None = None
        self._local: LocalLease | None = None
        self.app = Api("weightsync rollout service")
        for method, path, handler in (
            ("POST", "/check_versions", self._check),
            ("POST", "/prepare_versions", self._prepare),
            ("POST", "/commit_versions", self._commit),
            ("POST", "/release_versions", self._release),
            ("POST", "/notify_version", self._notify),
            ("POST", "/register_sender", self._register_sender),
            ("GET", "/status", self._status),
            ("GET", "/availability", self._availability),
            ("GET", "/metrics", self._get_metrics),
        ):
            self.app.answer(method, path, handler)
        add_timeline(self.app, self.recorder, self._timeline)
        host = f"[{config.host}]" if ":" in config.host else config.host
        config.url_told(f"http://{host}:{config.port}")  # before anything listens
        advertised = urlsplit(config.advertise or "").hostname
        self._server = ServerThread(
            self.app,
            ServerSettings(host=config.host, port=config.port, token=config.token, tls=config.tls),
            hosts=(advertised,) if advertised else (),
            body_limits=dict.fromkeys(_SETS, LIST_BODY_BYTES),
        )
        kind = ModelUpdater if config.controller is None else FleetModel
        with contextlib.ExitStack() as made:
            self.relay = relay_of(config)  # listens
            if self.relay is not None:
                made.callback(self.relay.close)
            self._models: dict[str, ModelUpdater] = {
                model_id: kind(
                    model_id, list(handles) if isinstance(handles, Sequence) else [handles], config,
                    recorder=self.recorder, metrics=self._metrics, on_served=on_served, relay=self.relay,
                )
                for model_id, handles in engines.items()
            }  # fmt: skip
            for model in self._models.values():
                for sender in self._senders:
                    model.add_sender(sender, lasting=True)
            if config.lease is not None and config.controller is not None:
                fleets = {model_id: model for model_id, model in self._models.items() if isinstance(model, FleetModel)}
                self._member = FleetMember(fleets, config, config.lease)
            elif config.lease is not None:
                self._local = LocalLease(self._models, config.lease, config.lease_s)
            made.pop_all()
        self._lender = self._member or self._local

    @classmethod
    def from_config(
        cls,
        config: WeightSyncConfig | Mapping[str, Any],
        engines: Mapping[str, EngineHandle | Sequence[EngineHandle]],
        *,
        on_served: Callable[[str, Version], None] | None = None,
        **options: Any,
    ) -> Self:
        """A service as `config` says: the configuration that `WeightManager.from_config` is given too.

        Args:
            config, options: see `RolloutConfig.from_config`.
            engines, on_served: as for the constructor. The URLs of `serve.engines` are what `weightsync.serve` reads.

        Raises:
            WeightSyncError: as for both. Nothing is left open.
        """
        settings = RolloutConfig.from_config(config, **options)
        lease = settings.lease if "lease" not in options else None
        with contextlib.ExitStack() as made:
            if lease is not None:
                made.callback(lease.release)
            service = cls(engines, settings, on_served=on_served)
            made.pop_all()
        return service

    def start(self) -> str:
        """Starts to listen; the URL."""
        if self._local is not None:
            self._local.adopt()  # before anything is pulled
        url = self._server.start()
        if self.relay is not None:
            self.relay.start()
        for model in self._models.values():
            model.start()
            for sender in self._senders:
                model.catch_up(sender)
        if self._local is not None:
            self._local.start()
        if self._member is not None:
            self._member.start(url)
        threading.Thread(target=self._keep_house, name="weightsync-rollout-house", daemon=True).start()
        _logger.info("rollout service %s of %s listens at %s", self.config.service_id, ", ".join(self._models), url)
        return url

    def register_sender(self, model_id: str, endpoint: str) -> None:
        """Makes an agent's endpoint known for a model, and asks it what it has. It is given `sender_token`: over HTTP
        this needs a service token where there is one of those, see `RolloutConfig`.

        Raises:
            InvalidRequestError: no such model here.
            ConfigError: the endpoint is no URL.
            StateError: there is no thread left to ask it; it is known.
        """
        model, sender = self._model(model_id), checked_url(endpoint, whose="a sender's")
        model.add_sender(sender)
        model.catch_up(sender)

    def status(self) -> ServiceStatus:
        """What every model's engines serve, and what failed last."""
        models = {model_id: model.status() for model_id, model in self._models.items()}
        lease = None if self._lender is None else self._lender.status
        return ServiceStatus(models=models, controller=self.config.controller, lease=lease)

    def wait(self) -> None:
        """Blocks until the server ends."""
        self._server.wait()

    def close(self) -> None:
        """Ends pulls under way and gives the staging back; loads come to their end, since nobody else resumes engines.
        These go on with what they serve; under its lease for at most `lease_s`, in a fleet no longer. Idempotent."""
        self._closed.set()
        with contextlib.ExitStack() as left:  # from the last one on; what one of them raises keeps none open
            if self.relay is not None:
                left.callback(self.relay.close)
            for model in self._models.values():
                left.callback(model.close)
            ends = [model.end for model in self._models.values()]  # no load begins while something else is waited for
            leaves = () if self._lender is None else (self._lender.close,)
            in_fleet = self.config.controller is not None  # a fleet is told first: it would wait for what was prepared
            for step in (*ends, self._server.close, *leaves) if in_fleet else (self._server.close, *leaves, *ends):
                left.callback(step)

    def _model(self, model_id: str) -> ModelUpdater:
        model = self._models.get(model_id)
        if model is None:
            raise InvalidRequestError(f"there is no model {model_id!r} here; there are {', '.join(self._models)}")
        return model

    def _sender(self, request: NotifyRequest) -> tuple[ModelUpdater, str]:
        """The model, and the endpoint of its sender, which may be called."""
        model = self._model(request.model_id)
        endpoint = checked_url(request.sender_endpoint, whose="a sender's")
        if not model.may_call(endpoint):
            raise NotRegisteredError(
                f"{endpoint} is not registered here for model {request.model_id!r}, so nobody calls it: name it in "
                "`senders`, or POST /register_sender"
            )
        return model, endpoint

    def _run_of(self, request: NotifyRequest) -> str:
        """The run that a notification without one means: its sender is asked."""
        model, endpoint = self._sender(request)
        with contextlib.closing(model.agent_at(endpoint)) as agent:
            return agent.current_run(request.model_id)

    def _noted(self, request: NotifyRequest) -> tuple[ModelUpdater, Claim]:
        """Waits for nobody."""
        model, endpoint = self._sender(request)
        assert request.run_id is not None
        version = Version(run_id=request.run_id, number=request.version)
        grace_s = None if request.wait_s is None else self.config.patience_s
        return model, model.want(version, endpoint, grace_s=grace_s)

    def _check_stranger(self, endpoint: str) -> None:
        """Anybody on this host may call a service without a token; the agents' token is not for anybody.

        Raises:
            NotRegisteredError: that endpoint may not be registered over HTTP.
        """
        config = self.config
        if config.sender_token is None or config.token is not None or endpoint.rstrip("/") in self._senders:
            return
        raise NotRegisteredError(
            f"{endpoint[:200]} would be given the agents' token, and this service asks nobody for one: name it in "
            "`senders`, or give the service a `token`"
        )

    def _keep_house(self) -> None:
        while not self._closed.wait(_RECLAIM_EVERY_S):
            with contextlib.suppress(OSError, WeightSyncError):
                reclaim_dead()

    async def _notify(self, request: Request) -> Response:
        asked = decode(await request.body(), NotifyRequest, what="a notification")
        self._check_alone()
        if asked.evaluate:
            raise InvalidRequestError("a rollout service validates nothing: tell its controller to evaluate")
        if asked.run_id is None:
            ask = functools.partial(self._run_of, asked)
            with self._asking.take(request, leave=lambda: None):  # an agent may take its time
                run_id = await asyncio.wrap_future(in_thread(ask, name="weightsync-asks"))
            asked = msgspec.structs.replace(asked, run_id=run_id)
        model, claim = self._noted(asked)
        if asked.wait_s is not None:
            deadline = Deadline(asked.wait_s)

            def too_late() -> WeightSyncError:
                return late(claim.version, deadline, model.status())

            await self._until(request, lambda: model.settled(claim) or None, [model], too_late, deadline)
        return json_of(model.status())

    def _know_senders(self, asked: PrepareRequest) -> None:
        """Whoever the controller names may be called."""
        for each in asked.versions:
            model, endpoint = self._model(each.model_id), checked_url(each.sender_endpoint, whose="a sender's")
            if not model.may_call(endpoint):
                self._check_stranger(endpoint)
                model.add_sender(endpoint)

    async def _check(self, request: Request) -> Response:
        """Answers when the agents have these versions; what they have not is an error."""
        asked = decode(await request.body(), PrepareRequest, what="versions to ask about")
        member, deadline = self._fleet(), Deadline(asked.wait_s)
        self._know_senders(asked)
        claims = member.begin(asked, prepare=False)

        def too_late() -> WeightSyncError:
            return DeadlineExceededError(f"the agents have not said within {deadline.timeout_s:g} s what they have")

        def all_there() -> bool | None:
            there = [model.is_there(claim) for model, claim in claims]  # each: what one has not is told at once
            return all(there) or None

        await self._until(request, all_there, [model for model, _ in claims], too_late, deadline)
        return json_of({})

    async def _prepare(self, request: Request) -> Response:
        asked = decode(await request.body(), PrepareRequest, what="a set to prepare")
        member, deadline = self._fleet(), Deadline(asked.wait_s)
        self._know_senders(asked)
        claims = member.begin(asked, prepare=True)

        def too_late() -> WeightSyncError:
            missing = [f"{model.model_id} ({model.status().state})" for model, _ in claims]
            return DeadlineExceededError(f"not all of {', '.join(missing)} is staged within {deadline.timeout_s:g} s")

        models = [model for model, _ in claims]
        reply = await self._until(request, lambda: member.prepared(claims), models, too_late, deadline)
        return json_of(reply)

    async def _commit(self, request: Request) -> Response:
        asked = decode(await request.body(), CommitVersionsRequest, what="a set to commit")
        member = self._fleet()
        models = {each.model_id: self._model(each.model_id) for each in asked.versions}
        member.check_may_commit(asked)  # what can't be is told at once, and waits for no other commit
        with self._committing.take(request, lambda: None):
            await asyncio.wrap_future(in_thread(lambda: member.commit(asked), name="weightsync-commit"))
        return json_of(ServiceStatus(models={model_id: model.status() for model_id, model in models.items()}))

    async def _release(self, request: Request) -> Response:
        asked = decode(await request.body(), ReleaseRequest, what="a release")
        for model_id in asked.model_ids:
            self._model(model_id)
        self._fleet().release(asked.model_ids, asked.why)
        return json_of({})

    async def _until(
        self,
        request: Request,
        look: Callable[[], _T | None],
        models: Sequence[ModelUpdater],
        late: Callable[[], WeightSyncError],
        deadline: Deadline,
    ) -> _T:
        """What `look` gives, once it does; asked again after each change of these models. It takes no thread.

        Raises:
            WeightSyncError: what `look` raises; `late()` where the time is over.
            StateError: too many requests wait already.
            BusyError: this one made room for another.
        """
        if (found := look()) is not None:
            return found
        loop, changed = asyncio.get_running_loop(), asyncio.Event()

        def tell() -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(changed.set)

        with self._waiting.take(request, changed.set) as place, contextlib.ExitStack() as stack:
            for model in models:
                stack.enter_context(model.listening(tell))
            while (found := look()) is None:
                if place.lost:
                    raise BusyError(
                        f"{_MAX_WAITING} requests wait here, and this one made room for another: ask again by and by",
                        state_left="what it asked for goes on",
                    )
                try:
                    await asyncio.wait_for(changed.wait(), deadline.remaining_s)
                except TimeoutError:
                    raise late() from None
                changed.clear()
            return found

    def _check_alone(self) -> None:
        """Raises ConfigError in a fleet: a run that is told to one service would take it away from there for good."""
        if self._member is not None:
            raise ConfigError(
                f"this service serves what the controller at {self.config.controller} says: tell that one of versions",
                state_left="the service goes on with its fleet",
            )

    def _fleet(self) -> FleetMember:
        if self._member is None:
            raise StateError("this service is in no fleet: give it a `controller` and a `lease`")
        return self._member

    async def _register_sender(self, request: Request) -> Response:
        asked = decode(await request.body(), RegisterSenderRequest, what="a registration")
        self._check_alone()
        self._check_stranger(asked.sender_endpoint)
        self.register_sender(asked.model_id, asked.sender_endpoint)
        return json_of({})

    async def _status(self) -> Response:
        return json_of(self.status())

    async def _availability(self) -> Response:
        """Whether engines answer generations now, by model; asks them. None does whose lease is over."""
        found = await asyncio.gather(*(asyncio.to_thread(model.engines.available) for model in self._models.values()))
        may = self._lender is None or self._lender.status.why_none is None
        available = [{engine: may and answers for engine, answers in model.items()} for model in found]
        return json_of({"models": dict(zip(self._models, available, strict=True))})

    def _timeline(self) -> Timeline:
        models = self.status().models.values()
        agents = {agent for model in models for agent in (model.sender, *model.sender_errors) if agent is not None}
        peers = tuple(sorted(each for each in {*self._senders, *agents} if not is_store_url(each)))
        return Timeline(kind="service", name=self.config.service_id, now_s=now_s(), peers=peers)

    async def _get_metrics(self) -> Response:
        return Response(self._metrics.render(), media_type=CONTENT_TYPE)
