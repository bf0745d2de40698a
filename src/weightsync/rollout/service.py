"""RolloutService: one on a rollout host. Told of a version, it pulls, proves, and brings the host's engines to it.

For each model: one thread that always goes for the newest version it was told of. Pulling does not disturb generation;
an engine is paused for its own load alone, and one that fails fails alone: it stays on its old version and is tried
again, by and by, with the next version, or when it is told again.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import threading
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec
from fastapi import FastAPI, Request, Response

from weightsync.clients.agent import AgentClient
from weightsync.clients.fanout import in_thread
from weightsync.clients.http_edge import checked_url
from weightsync.errors import (
    AuthError,
    ConfigError,
    DeadlineExceededError,
    InvalidRequestError,
    NoEnginesError,
    StateError,
    SyncFailedError,
    TransferAbortedError,
    WeightSyncError,
    as_weightsync_error,
)
from weightsync.memory import reclaim_dead
from weightsync.net.messages import decode, encode
from weightsync.net.server import ServerThread, TlsFiles, api_app
from weightsync.observe import Metrics, Recorder, now_s
from weightsync.rollout.puller import Pulled, Puller
from weightsync.rollout.staged_load import EngineLoader, LoadReport
from weightsync.rollout.staging import Staging
from weightsync.types import Deadline, EngineHandle, PhaseRecord, Version
from weightsync.types.deadline import check_wait_s
from weightsync.types.publication import (
    ModelStatus,
    NotifyRequest,
    RegisterSenderRequest,
    ServiceStatus,
    Transport,
)

_RECLAIM_EVERY_S = 2.0
_RETRY_S = 0.5
_LONGEST_RETRY_S = 10.0
_DESCRIBE_S = 3.0
_LOOK_EVERY_S = 5.0
_MAX_RUNS_OVER = 1000
_CLOSE_S = 10.0
_MAX_WAITING = 64

_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """How a service works.

    Attributes:
        service_id: name of this host's service, for operators of trainers.
        host, port, token, tls: of its own HTTP face; loopback unless a token is given.
        senders: endpoints of agents that may be called; `/register_sender` adds others.
        sender_token: the agents' bearer token.
        sender_verify: see `AgentClient`.
        pull_timeout_s: deadline of one pull.
        load_timeout_s: deadline of one engine's load, pause included.
        pause_timeout_s: how long an engine may take to finish running generations.
        transport: "tcp" or "shm" alone; chosen by itself where not given.
        num_streams: TCP connections of a pull.
    """

    service_id: str = "rollout"
    host: str = "127.0.0.1"
    port: int = 0
    token: str | None = None
    tls: TlsFiles | None = None
    senders: tuple[str, ...] = ()
    sender_token: str | None = None
    sender_verify: bool | str = True
    pull_timeout_s: float = 120.0
    load_timeout_s: float = 120.0
    pause_timeout_s: float = 10.0
    transport: Transport | None = None
    num_streams: int = 6


class RolloutService:
    """Serves `/notify_version`, `/status`, `/availability`, `/register_sender`, `/metrics`, `/healthz`.

    Args:
        engines: of each model, by model_id: handles of the engines of this host (`EmbeddedEngine`, `HttpEngine`,
            `VllmEngine`). They have to reach this host's shared memory.
        config: how it works.
        on_served: told (model_id, version) after every engine serves it; from the model's thread.

    Raises:
        ConfigError: a setting makes no sense.
        NoEnginesError: a model without engines.
    """

    def __init__(
        self,
        engines: Mapping[str, EngineHandle | Sequence[EngineHandle]],
        config: RolloutConfig = RolloutConfig(),
        *,
        on_served: Callable[[str, Version], None] | None = None,
    ) -> None:
        for name in ("pull_timeout_s", "load_timeout_s", "pause_timeout_s"):
            check_wait_s(name, getattr(config, name))
        if not engines:
            raise NoEnginesError("a rollout service has the engines of at least one model")
        self.config = config
        self.recorder = Recorder(f"rollout/{config.service_id}")
        self._metrics = Metrics(self.recorder)
        self._senders = {checked_url(sender, whose="a sender's") for sender in config.senders}
        self._models = {
            model_id: _Model(
                model_id,
                list(handles) if isinstance(handles, Sequence) else [handles],
                config,
                may_call=self._may_call,
                recorder=self.recorder,
                on_served=on_served,
            )
            for model_id, handles in engines.items()
        }
        self._waiting = ThreadPoolExecutor(_MAX_WAITING, thread_name_prefix="weightsync-notify")
        self._closed = threading.Event()
        self.app: FastAPI = api_app("weightsync rollout service")
        for method, path, handler in (
            ("POST", "/notify_version", self._notify),
            ("POST", "/register_sender", self._register_sender),
            ("GET", "/status", self._status),
            ("GET", "/availability", self._availability),
            ("GET", "/metrics", self._get_metrics),
        ):
            self.app.add_api_route(path, handler, methods=[method])
        self._server = ServerThread(self.app, host=config.host, port=config.port, token=config.token, tls=config.tls)

    def start(self) -> str:
        """Starts to listen; the URL."""
        url = self._server.start()
        for model in self._models.values():
            model.start()
        threading.Thread(target=self._keep_house, name="weightsync-rollout-house", daemon=True).start()
        for sender in tuple(self._senders):
            self._catch_up(sender)
        return url

    def notify(self, request: NotifyRequest) -> ModelStatus:
        """What `/notify_version` does.

        Raises:
            InvalidRequestError: no such model here.
            AuthError: the sender is not registered: it is not called.
            SyncFailedError: with `wait_s`: what failed, per engine. They serve their old versions.
            DeadlineExceededError: with `wait_s`: it takes longer. It goes on.
        """
        model = self._model(request.model_id)
        endpoint = checked_url(request.sender_endpoint, whose="a sender's")
        if not self._may_call(endpoint):
            raise AuthError(
                f"{endpoint} is not registered here, so nobody calls it: name it in `senders`, or POST /register_sender"
            )
        version = Version(run_id=request.run_id, number=request.version)
        ticket = model.want(version, endpoint)
        if request.wait_s is not None:
            model.wait(version, ticket, Deadline(request.wait_s))
        return model.status()

    def register_sender(self, endpoint: str) -> None:
        """Makes an agent's endpoint known. A model that was told of no version yet takes the newest that is there."""
        sender = checked_url(endpoint, whose="a sender's")
        self._senders.add(sender)
        self._catch_up(sender)

    def status(self) -> ServiceStatus:
        """What every model's engines serve, and what failed last."""
        return ServiceStatus(models={model_id: model.status() for model_id, model in self._models.items()})

    def wait(self) -> None:
        """Blocks until the server ends."""
        self._server.wait()

    def close(self) -> None:
        """Ends pulls under way and gives the staging back; engines go on with what they serve. Idempotent."""
        self._closed.set()
        self._server.close()
        for model in self._models.values():
            model.close()
        self._waiting.shutdown(wait=False, cancel_futures=True)

    def _model(self, model_id: str) -> _Model:
        model = self._models.get(model_id)
        if model is None:
            raise InvalidRequestError(f"there is no model {model_id!r} here; there are {', '.join(self._models)}")
        return model

    def _may_call(self, endpoint: str) -> bool:
        return endpoint.rstrip("/") in self._senders

    def _catch_up(self, sender: str) -> None:
        """Asks an agent, in a thread, what it has: a service that was started again serves what engines began with."""

        def ask() -> None:
            client = AgentClient(sender, token=self.config.sender_token, verify=self.config.sender_verify)
            try:
                found = client.get_version(timeout_s=_DESCRIBE_S)
                if found.run_id is not None and found.version is not None and found.model_id in self._models:
                    version = Version(run_id=found.run_id, number=found.version)
                    self._models[found.model_id].catch_up(version, sender)
            except WeightSyncError as error:
                _logger.info("%s says nothing of its newest version yet: %s", sender, error)
            finally:
                client.close()

        threading.Thread(target=ask, name="weightsync-catch-up", daemon=True).start()

    def _keep_house(self) -> None:
        while not self._closed.wait(_RECLAIM_EVERY_S):
            with contextlib.suppress(OSError, WeightSyncError):
                reclaim_dead()

    async def _notify(self, request: Request) -> Response:
        asked = decode(await request.body(), NotifyRequest, what="a notification")
        if asked.wait_s is None:
            return _json(self.notify(asked))
        return _json(await asyncio.get_running_loop().run_in_executor(self._waiting, self.notify, asked))

    async def _register_sender(self, request: Request) -> Response:
        asked = decode(await request.body(), RegisterSenderRequest, what="a registration")
        self._model(asked.model_id)
        self.register_sender(asked.sender_endpoint)
        return _json({})

    async def _status(self) -> Response:
        return _json(self.status())

    async def _availability(self) -> Response:
        """Whether engines answer generations now, by model; asks them."""
        found = await asyncio.gather(*(asyncio.to_thread(model.available) for model in self._models.values()))
        return _json({"models": dict(zip(self._models, found, strict=True))})

    async def _get_metrics(self) -> Response:
        return Response(self._metrics.render(), media_type="text/plain; version=0.0.4")


class _Model:
    """One model of a service: its lock, its newest wish, and the thread that goes for it."""

    def __init__(
        self,
        model_id: str,
        engines: Iterable[EngineHandle],
        config: RolloutConfig,
        *,
        may_call: Callable[[str], bool],
        recorder: Recorder,
        on_served: Callable[[str, Version], None] | None,
    ) -> None:
        self._model_id = model_id
        self._config = config
        self._may_call = may_call
        self._recorder = recorder
        self._on_served = on_served
        self._loaders = [
            EngineLoader(engine, model_id, pause_timeout_s=config.pause_timeout_s, recorder=recorder)
            for engine in engines
        ]
        if not self._loaders:
            raise NoEnginesError(f"model {model_id!r} has no engine")
        names = [loader.engine_id for loader in self._loaders]
        if len(set(names)) != len(names):
            raise ConfigError(f"engines of model {model_id!r} share a name: {', '.join(names)}")
        self._changed = threading.Condition()
        self._wanted: tuple[Version, str] | None = None
        self._num_wishes = 0
        self._num_done = 0
        self._served: dict[str, Version | None] = dict.fromkeys(names)
        self._runs_over: dict[str, None] = {}
        self._status = ModelStatus(engines=dict.fromkeys(names))
        self._staging = Staging()
        self._receiver_id = f"{config.service_id}-{uuid.uuid4().hex[:8]}/{model_id}"  # two of one name end each other's
        self._puller: Puller | None = None
        self._thread = threading.Thread(target=self._run, name=f"weightsync-pull-{model_id}", daemon=True)
        self._closed = False

    def start(self) -> None:
        self._thread.start()

    def want(self, version: Version, endpoint: str) -> int:
        """Notes a wish; the number of it. A run that another one took over from is not taken up again."""
        with self._changed:
            if self._closed:
                raise StateError("this service is closing")
            if version.run_id in self._runs_over:
                raise TransferAbortedError(f"run {version.run_id} was taken over by another one", version=str(version))
            before = self._wanted
            if before is not None and before[0].run_id == version.run_id and before[0].is_newer_than(version):
                version, endpoint = before  # told late
            if before is not None and before[0].run_id != version.run_id:
                self._runs_over[before[0].run_id] = None
                while len(self._runs_over) > _MAX_RUNS_OVER:
                    del self._runs_over[next(iter(self._runs_over))]
            self._wanted = (version, endpoint)
            self._num_wishes += 1
            self._changed.notify_all()
            return self._num_wishes

    def catch_up(self, version: Version, endpoint: str) -> None:
        """A wish like any other, where there is none yet."""
        with self._changed:
            if self._wanted is None and not self._closed:
                self.want(version, endpoint)

    def wait(self, version: Version, ticket: int, deadline: Deadline) -> None:
        """Until every engine serves that version or a newer one of its run, or the attempt at it has failed."""
        with self._changed:
            while not self._serves(version):
                if self._closed:
                    raise StateError("this service is closing", version=str(version))
                if version.run_id in self._runs_over:
                    raise TransferAbortedError(
                        f"run {version.run_id} was taken over by another one", version=str(version)
                    )
                if self._num_done >= ticket and self._status.errors:
                    raise SyncFailedError(
                        "; ".join(f"{who}: {why}" for who, why in self._status.errors.items()),
                        causes={},
                        version=str(version),
                        state_left="engines that failed serve their old version, or refuse to serve",
                    )
                if not self._changed.wait(deadline.remaining_s) and deadline.expired:
                    raise DeadlineExceededError(
                        f"{version} is not served within {deadline.timeout_s:g} s; it is still tried",
                        version=str(version),
                    )

    def status(self) -> ModelStatus:
        with self._changed:
            return msgspec.structs.replace(
                self._status,
                wanted=None if self._wanted is None else self._wanted[0].number,
                engines={who: None if version is None else str(version) for who, version in self._served.items()},
            )

    def available(self) -> dict[str, bool]:
        """Whether each engine serves, as it says itself."""

        def asked(loader: EngineLoader) -> bool:
            with contextlib.suppress(WeightSyncError):
                return loader.describe(timeout_s=_DESCRIBE_S).serving
            return False

        return {loader.engine_id: asked(loader) for loader in self._loaders}

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            puller = self._puller
        if puller is not None:
            puller.close()
        if self._thread.is_alive():
            self._thread.join(_CLOSE_S)
        if not self._thread.is_alive():  # else engines read the staging: it is unlinked when this process ends
            self._staging.close()

    # --- the thread ---

    def _serves(self, version: Version) -> bool:
        return all(
            served is not None and served.run_id == version.run_id and not version.is_newer_than(served)
            for served in self._served.values()
        )

    def _run(self) -> None:
        retry_s = _RETRY_S
        while True:
            with self._changed:
                told = self._changed.wait_for(lambda: self._closed or self._has_work(), _LOOK_EVERY_S)
                if self._closed:
                    return
                wanted, ticket = self._wanted, self._num_wishes
            if wanted is None:
                continue
            if not told:
                self._look()
                continue
            try:
                errors = self._sync(*wanted)
            except Exception as error:  # a bug, or a caller's: this thread must outlive it
                _logger.exception("model %s: %s was not brought to its engines", self._model_id, wanted[0])
                errors = {"service": f"{type(error).__name__}: {error}"}
            with self._changed:
                self._num_done = max(self._num_done, ticket)
                self._status = msgspec.structs.replace(self._status, state="idle", errors=errors)
                self._changed.notify_all()
                if not errors:
                    retry_s = _RETRY_S
                elif self._num_wishes == ticket:  # the failed ones are tried again, by and by, or at the next wish
                    self._changed.wait_for(lambda: self._closed or self._num_wishes > ticket, retry_s)  # noqa: B023
                    retry_s = min(2 * retry_s, _LONGEST_RETRY_S)

    def _look(self) -> None:
        """Asks engines what they serve: one that was started again by itself serves something else than we believe."""
        for loader in self._loaders:
            before = self._served[loader.engine_id]
            try:
                reply = loader.describe(timeout_s=_DESCRIBE_S)
                now = reply.version  # whether it is paused, and by whom, is not our business
            except Exception:
                now = None
            if now != before:
                _logger.warning("engine %s serves %s, not %s: it is brought back", loader.engine_id, now, before)
                with self._changed:
                    self._served[loader.engine_id] = now
                    self._changed.notify_all()

    def _has_work(self) -> bool:
        return self._wanted is not None and not self._serves(self._wanted[0])

    def _sync(self, version: Version, endpoint: str) -> dict[str, str]:
        """One attempt at a version or a newer one; what failed, by engine or "pull"."""
        self._note(state="pulling")
        begun_s = now_s()
        try:
            pulled = self._pulls_from(endpoint).pull(
                deadline=Deadline(self._config.pull_timeout_s), at_least=lambda: self._still_wanted(endpoint)
            )
        except Exception as error:
            typed = as_weightsync_error(error, SyncFailedError, "the pull failed")
            _logger.warning("model %s: %s could not be pulled: %s", self._model_id, version, typed)
            self._event("pull failed", begun_s, type(typed).__name__)
            return {"pull": f"{type(typed).__name__}: {typed}"}
        with pulled:
            pull_s = now_s() - begun_s
            self._note(
                state="loading", num_pulled=self._status.num_pulled + 1, pull_s=pull_s, transport=pulled.transport
            )
            begun_s = now_s()
            errors, paused_s = self._load(pulled)
        if not errors:
            self._note(
                run_id=pulled.version.run_id, version=pulled.version.number, load_s=now_s() - begun_s,
                paused_s=paused_s, num_committed=self._status.num_committed + 1,
            )  # fmt: skip
            self._tell(pulled.version)
        return errors

    def _tell(self, version: Version) -> None:
        if self._on_served is not None:
            try:
                self._on_served(self._model_id, version)
            except Exception:
                _logger.exception("on_served failed for %s of model %s", version, self._model_id)

    def _still_wanted(self, endpoint: str) -> Version:
        """What a pull under way has to bring by now.

        Raises:
            TransferAbortedError: another sender was named meanwhile.
        """
        with self._changed:
            if self._closed or self._wanted is None or self._wanted[1] != endpoint:
                raise TransferAbortedError("another sender was named meanwhile, or the service is closing")
            return self._wanted[0]

    def _load(self, pulled: Pulled) -> tuple[dict[str, str], float]:
        """Loads every engine that does not serve the version yet, all at once; what failed, and the longest pause."""
        deadline = Deadline(self._config.load_timeout_s)
        todo = [loader for loader in self._loaders if self._served[loader.engine_id] != pulled.version]

        def bound(loader: EngineLoader) -> Callable[[], LoadReport]:
            return lambda: loader.load(pulled, deadline=deadline)

        calls = [in_thread(bound(loader), name=f"weightsync-load-{loader.engine_id}") for loader in todo]
        errors: dict[str, str] = {}
        paused_s = 0.0
        for loader, call in zip(todo, calls, strict=True):
            begun_s = now_s()
            try:
                report = call.result()  # each ends by its own deadline; the staging must not go before
            except Exception as error:
                typed = as_weightsync_error(error, SyncFailedError, "the load failed")
                _logger.warning("engine %s: %s was not loaded: %s", loader.engine_id, pulled.version, typed)
                self._event("load failed", begun_s, loader.engine_id)
                errors[loader.engine_id] = f"{type(typed).__name__}: {typed}"
                with self._changed:
                    self._served[loader.engine_id] = None
                continue
            paused_s = max(paused_s, report.paused_s)
            with self._changed:
                self._served[loader.engine_id] = report.version
                unprovable = {who: why for who, why in self._status.unprovable.items() if who != loader.engine_id}
                if report.unprovable:
                    unprovable[loader.engine_id] = report.unprovable
                self._status = msgspec.structs.replace(self._status, unprovable=unprovable)
        return errors, paused_s

    def _pulls_from(self, endpoint: str) -> Puller:
        if self._puller is None or self._puller.endpoint != endpoint:
            if self._puller is not None:
                self._puller.close()
            puller = Puller(
                endpoint,
                self._model_id,
                receiver_id=self._receiver_id,
                token=self._config.sender_token,
                verify=self._config.sender_verify,
                may_call=self._may_call,
                transport=self._config.transport,
                num_streams=self._config.num_streams,
                staging=self._staging,
                recorder=self._recorder,
            )
            with self._changed:
                self._puller = puller
        return self._puller

    def _note(self, **changes: object) -> None:
        with self._changed:
            self._status = msgspec.structs.replace(self._status, **changes)
            self._changed.notify_all()

    def _event(self, name: str, begun_s: float, detail: str) -> None:
        track = self._recorder.track
        self._recorder.add(PhaseRecord(name=name, start_s=begun_s, end_s=now_s(), track=track, detail=detail))


def _json(message: object) -> Response:
    return Response(encode(message), media_type="application/json")
