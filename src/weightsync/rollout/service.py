"""RolloutService: one on a rollout host. Told of a version, it pulls, proves, and brings the host's engines to it.

Here is its HTTP face. What is done for each model is in `follower`, how it works is in `settings`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar
from urllib.parse import urlsplit

from fastapi import FastAPI, Request, Response

from weightsync.clients.http_edge import checked_url
from weightsync.errors import (
    ConfigError,
    DeadlineExceededError,
    InvalidRequestError,
    NoEnginesError,
    NotRegisteredError,
    StateError,
    WeightSyncError,
)
from weightsync.memory import reclaim_dead
from weightsync.net.guard import LIST_BODY_BYTES
from weightsync.net.messages import decode, encode
from weightsync.net.server import ServerThread, api_app
from weightsync.observe import LONG_RUN_BYTES, Metrics, Recorder
from weightsync.observe.metrics import CONTENT_TYPE
from weightsync.rollout.engine import EmbeddedEngine
from weightsync.rollout.follower import Follower, late
from weightsync.rollout.local_lease import LocalLease
from weightsync.rollout.member import FleetMember
from weightsync.rollout.sender import Ticket
from weightsync.rollout.settings import RolloutConfig
from weightsync.types import Deadline, EngineHandle, Version
from weightsync.types.fleet import CommitVersionsRequest, PrepareRequest, ReleaseRequest
from weightsync.types.process import of_one_process
from weightsync.types.publication import ModelStatus, NotifyRequest, RegisterSenderRequest, ServiceStatus
from weightsync.types.spec import check_config_id

_RECLAIM_EVERY_S = 2.0
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
        senders = [checked_url(sender, whose="a sender's") for sender in config.senders]
        self._models = {
            model_id: Follower(
                model_id,
                list(handles) if isinstance(handles, Sequence) else [handles],
                config,
                recorder=self.recorder,
                metrics=self._metrics,
                on_served=on_served,
            )
            for model_id, handles in engines.items()
        }
        for model in self._models.values():
            for sender in senders:
                model.add_sender(sender)
        unleased = [
            engine.engine_id
            for model in engines.values()
            for engine in (model if isinstance(model, Sequence) else [model])
            if isinstance(engine, EmbeddedEngine) and not engine.is_leased
        ]
        if config.lease is not None and unleased:
            raise ConfigError(
                f"engines of a leased service answer under its lease: {', '.join(unleased)} would answer without one. "
                "Give each EmbeddedEngine.of(loader, lease=LeaseReader(PATH)), with the path of the ServingLease"
            )
        self._senders = tuple(senders)
        self._closed = threading.Event()
        self._member: FleetMember | None = None
        self._local: LocalLease | None = None
        if config.lease is not None and config.controller is not None:
            self._member = FleetMember(self._models, config, config.lease)
        elif config.lease is not None:
            self._local = LocalLease(self._models, config.lease, config.lease_s)
        self.app: FastAPI = api_app("weightsync rollout service")
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
            self.app.add_api_route(path, handler, methods=[method])
        advertised = urlsplit(config.advertise or "").hostname
        self._server = ServerThread(
            self.app,
            host=config.host,
            port=config.port,
            token=config.token,
            tls=config.tls,
            hosts=(advertised,) if advertised else (),
            body_limits=dict.fromkeys(_SETS, LIST_BODY_BYTES),
        )

    def start(self) -> str:
        """Starts to listen; the URL."""
        if self._local is not None:
            self._local.adopt()  # before anything is pulled
        url = self._server.start()
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

    def notify(self, request: NotifyRequest) -> ModelStatus:
        """What `/notify_version` does.

        Raises:
            InvalidRequestError: no such model here.
            NotRegisteredError: the sender is not registered: it is not called.
            TransferAbortedError: another run took over from that one.
            VersionError: with `wait_s`: another run is served, and the sender never had this one.
            SyncFailedError: with `wait_s`: what failed, per engine. They serve their old versions.
            DeadlineExceededError: with `wait_s`: it takes longer. It goes on.
        """
        model, ticket = self._noted(request)
        if request.wait_s is not None:
            model.wait(ticket, Deadline(request.wait_s))
        return model.status()

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
        return ServiceStatus(models={model_id: model.status() for model_id, model in self._models.items()})

    def wait(self) -> None:
        """Blocks until the server ends."""
        self._server.wait()

    def close(self) -> None:
        """Ends pulls under way and gives the staging back; engines go on with what they serve. Idempotent."""
        self._closed.set()
        if self._member is not None:
            self._member.close()
        if self._local is not None:
            self._local.close()
        self._server.close()
        for model in self._models.values():
            model.close()

    def _model(self, model_id: str) -> Follower:
        model = self._models.get(model_id)
        if model is None:
            raise InvalidRequestError(f"there is no model {model_id!r} here; there are {', '.join(self._models)}")
        return model

    def _noted(self, request: NotifyRequest) -> tuple[Follower, Ticket]:
        """Waits for nobody."""
        model = self._model(request.model_id)
        endpoint = checked_url(request.sender_endpoint, whose="a sender's")
        if not model.may_call(endpoint):
            raise NotRegisteredError(
                f"{endpoint} is not registered here for model {request.model_id!r}, so nobody calls it: name it in "
                "`senders`, or POST /register_sender"
            )
        version = Version(run_id=request.run_id, number=request.version)
        return model, model.want(version, endpoint, waits=request.wait_s is not None)

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
        model, ticket = self._noted(asked)
        if asked.wait_s is not None:
            deadline = Deadline(asked.wait_s)
            await _until(lambda: model.settled(ticket) or None, [model], lambda: late(ticket, deadline), deadline)
        return _json(model.status())

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
        self._fleet()
        deadline = Deadline(asked.wait_s)
        self._know_senders(asked)
        tickets = [
            (self._model(each.model_id), self._model(each.model_id).ask_about(each.of, each.sender_endpoint))
            for each in asked.versions
        ]

        def too_late() -> WeightSyncError:
            return DeadlineExceededError(f"the agents have not said within {deadline.timeout_s:g} s what they have")

        def all_there() -> bool | None:
            there = [model.is_there(ticket) for model, ticket in tickets]  # each: what one has not is told at once
            return all(there) or None

        await _until(all_there, [model for model, _ in tickets], too_late, deadline)
        return _json({})

    async def _prepare(self, request: Request) -> Response:
        asked = decode(await request.body(), PrepareRequest, what="a set to prepare")
        member, deadline = self._fleet(), Deadline(asked.wait_s)
        self._know_senders(asked)
        tickets = member.begin_prepare(asked)

        def too_late() -> WeightSyncError:
            missing = [f"{model.model_id} ({model.status().state})" for model, _ in tickets]
            return DeadlineExceededError(f"not all of {', '.join(missing)} is staged within {deadline.timeout_s:g} s")

        reply = await _until(lambda: member.prepared(tickets), [model for model, _ in tickets], too_late, deadline)
        return _json(reply)

    async def _commit(self, request: Request) -> Response:
        asked = decode(await request.body(), CommitVersionsRequest, what="a set to commit")
        member = self._fleet()
        models = {each.model_id: self._model(each.model_id) for each in asked.versions}
        await asyncio.to_thread(member.commit, asked)
        return _json(ServiceStatus(models={model_id: model.status() for model_id, model in models.items()}))

    async def _release(self, request: Request) -> Response:
        asked = decode(await request.body(), ReleaseRequest, what="a release")
        for model_id in asked.model_ids:
            self._model(model_id)
        self._fleet().release(asked.model_ids, asked.why)
        return _json({})

    def _fleet(self) -> FleetMember:
        if self._member is None:
            raise StateError("this service is in no fleet: give it a `controller` and a `lease`")
        return self._member

    async def _register_sender(self, request: Request) -> Response:
        asked = decode(await request.body(), RegisterSenderRequest, what="a registration")
        self._check_stranger(asked.sender_endpoint)
        self.register_sender(asked.model_id, asked.sender_endpoint)
        return _json({})

    async def _status(self) -> Response:
        return _json(self.status())

    async def _availability(self) -> Response:
        """Whether engines answer generations now, by model; asks them."""
        found = await asyncio.gather(*(asyncio.to_thread(model.available) for model in self._models.values()))
        return _json({"models": dict(zip(self._models, found, strict=True))})

    async def _get_metrics(self) -> Response:
        return Response(self._metrics.render(), media_type=CONTENT_TYPE)


_T = TypeVar("_T")


async def _until(
    look: Callable[[], _T | None], models: Sequence[Follower], late: Callable[[], WeightSyncError], deadline: Deadline
) -> _T:
    """What `look` gives, once it does; asked again after each change of these models. No thread: any number may wait.

    Raises:
        WeightSyncError: what `look` raises; `late()` where the time is over.
    """
    loop, changed = asyncio.get_running_loop(), asyncio.Event()

    def tell() -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(changed.set)

    with contextlib.ExitStack() as stack:
        for model in models:
            stack.enter_context(model.listening(tell))
        while (found := look()) is None:
            try:
                await asyncio.wait_for(changed.wait(), deadline.remaining_s)
            except TimeoutError:
                raise late() from None
            changed.clear()
        return found


def _json(message: object) -> Response:
    return Response(encode(message), media_type="application/json")
