"""`weightsync.serve`: the engines of this host follow what trainers publish, by themselves.

service = weightsync.serve({"actor": "vllm+http://127.0.0.1:8000"}, sources=["http://trainer-0:8765"], token=TOKEN)
service = weightsync.serve({"actor": model}, sources=["http://trainer-0:8765"])        # a module of this process
with service.generation("actor") as version:
    answer(version)

entry   engines' URLs are asked what they are, sources and a controller whether they have these models; it listens
from then on one request waits at each source until there is something newer; it is fetched, proved, loaded
end     pulls under way end, loads come to their end; engines go on with what they serve, where they look at a lease as
        `close` says
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from weightsync.clients.controller import ControllerClient
from weightsync.clients.store import client_at
from weightsync.clients.whose_status import is_controller
from weightsync.config import WeightSyncConfig
from weightsync.engine.embedded import EmbeddedEngine
from weightsync.errors import AuthError, ConfigError, MissingDependencyError, UnsupportedError, WeightSyncError
from weightsync.handles.fanout import in_thread
from weightsync.host.member import TOKEN_HINT
from weightsync.host.service import RolloutService
from weightsync.host.settings import RolloutConfig
from weightsync.memory import ServingLease
from weightsync.plan.names import did_you_mean
from weightsync.types import EngineHandle, Version
from weightsync.types.closing import Closing
from weightsync.types.process import of_one_process
from weightsync.types.service import ModelStatus, ServiceStatus
from weightsync.verbs.engines import EngineLike, close_all, handle_of, urls_of
from weightsync.verbs.settings import ConfigSource, as_list, check_options, loaded, token_of

POLL_S = 5.0
"""A source where a request can't wait is asked so often."""
_ASK_S = 10.0
_NO_ROUTE = (404, 405)
"""What a server answers that is none of ours. 502 or 503 may be a proxy's, before a controller that is to start."""


def serve(
    models: Mapping[str, EngineLike | Sequence[EngineLike]] | None = None,
    *,
    sources: str | Sequence[str] | None = None,
    token: str | None = None,
    source_token: str | None = None,
    engine_token: str | None = None,
    controller_token: str | None = None,
    trust_key: str | None = None,
    host: str | None = None,
    port: int | None = None,
    lease: str | None = None,
    controller: str | None = None,
    advertise: str | None = None,
    service_id: str | None = None,
    on_served: Callable[[str, Version], None] | None = None,
    config: ConfigSource = None,
    verify: bool | str = True,
    **options: Any,
) -> Service:
    """Starts a rollout service of this host, which finds new versions by itself. Returns at once.

    Where an argument is not given, `config` says it, and where that does not, the default.

    Args:
        models: of each model, by name, its engines: URLs, torch modules of this process, or handles. Modules have the
            dtype that is published, and are generated with inside `Service.generation`.
        sources: URLs of the trainers' agents, one a trainer host; or a place in an object store (s3://bucket/run).
            Those that are not there yet are asked again; a trainer that names this service in its `to` needs none.
        token: bearer token of this service, of the agents, the engines and the controller; the variable
            WEIGHTSYNC_TOKEN where not given.
        source_token, engine_token, controller_token: where these have others.
        trust_key: file with the public key whose manifests are taken from stores; anybody's where not given.
        host: where the service listens; "127.0.0.1", beyond loopback only with a token.
        port: of its HTTP; 9000, 0: the system's choice.
        lease: file by which engines see that this service is alive and has given them weights; made where it is not
            there. A vLLM beside it reads it by a middleware, see docs/fleet-vllm.md.
        controller: URL of the controller whose fleet it is part of; needs `lease`.
        advertise: URL by which the controller reaches it.
        service_id: its name, for operators; this host's, with the port behind it where that is not 9000.
        on_served: told (model_id, version) after every engine serves it; the model's thread waits for it.
        config: a YAML file, a mapping or a `WeightSyncConfig`.
        verify: see `JsonClient`, of agents, engines and the controller.
        options: further arguments of `RolloutConfig`: transport, mode, pause_timeout_s, tls, path_root, ...

    Raises:
        ConfigError: a setting makes no sense; a URL has no engine that can be loaded; a source has another model; the
            controller is none, or has not one of these models; the port is taken.
        AuthError: a source, an engine or the controller refuses its token.
        EngineUnreachableError: nobody answers at an engine's URL that does not say what it is.
        SharedMemoryError: the lease's file can't be made or taken: its folder is missing, it is another user's, or
            another service has it.
        MissingDependencyError: what reads a source's store is not installed.
    """
    check_options(serve, options, RolloutConfig)
    settings = loaded(config).for_method("pull")
    chosen = settings.serve
    given: Mapping[str, Any] = _engines_of(settings) if models is None else models
    if not isinstance(given, Mapping) or not given:
        raise ConfigError(
            "serve needs the engines of each model, e.g. {'actor': 'vllm+http://127.0.0.1:8000'} (or "
            "serve.engines of the "
            "YAML file)"
        )
    urls = as_list(sources, chosen.sources, name="sources")
    token = token_of(token)
    source_token = token if source_token is None else token_of(source_token)
    controller_token = token if controller_token is None else token_of(controller_token)
    lease = lease or chosen.lease
    opened = contextlib.ExitStack()
    try:
        held = None if lease is None else ServingLease(lease)
        if held is not None:
            opened.callback(held.release)
        engine_token = token if engine_token is None else engine_token
        made: list[EngineHandle] = []
        opened.callback(close_all, made)
        engines = {
            model_id: _handles(model_id, served, token=engine_token, verify=verify, lease=lease, made=made)
            for model_id, served in given.items()
        }
        trust_key = trust_key or chosen.trust_key
        _ask(urls, tuple(engines), token=source_token, verify=verify, trust_key=trust_key)
        arguments = {
            "host": host, "port": port, "controller": controller, "advertise": advertise, "service_id": service_id,
        }  # fmt: skip
        config_of_service = RolloutConfig.from_config(
            settings,
            **{"poll_s": POLL_S, **{key: value for key, value in arguments.items() if value is not None}, **options},
            token=token,
            senders=tuple(urls),
            sender_token=source_token,
            sender_verify=verify,
            trust_key=trust_key,
            controller_token=controller_token,
            controller_verify=verify,
            lease=held,
        )
        if config_of_service.controller is not None:
            _ask_controller(config_of_service.controller, tuple(engines), token=controller_token, verify=verify)
        service = RolloutService(engines, config_of_service, on_served=on_served)
    except BaseException:
        opened.close()
        raise
    running = Service(service, engines, opened=opened)
    running.begin()
    return running


@of_one_process
class Service(Closing):
    """What `serve` gives: it follows until `close`. Thread-safe. A context manager."""

    def __init__(
        self, service: RolloutService, engines: Mapping[str, Sequence[EngineHandle]], *, opened: contextlib.ExitStack
    ) -> None:
        self._service = service
        self._engines = engines
        self._opened = opened
        self.url = ""

    @property
    def rollout(self) -> RolloutService:
        """What is below, for those who need more."""
        return self._service

    def begin(self) -> None:
        """Listens and follows; `serve` calls it.

        Raises:
            ConfigError: it can't listen there. Everything is closed.
        """
        try:
            self.url = self._service.start()
        except BaseException:
            self.close()
            raise

    @contextlib.contextmanager
    def generation(self, model_id: str, *, timeout_s: float = 30.0) -> Iterator[Version | None]:
        """Surround each generation of a module with this; gives the version that it runs on, None before the first.

        Raises:
            NotServingError: half-loaded, without a lease, or paused for over `timeout_s`: do not generate. Behind the
                body: the lease was lost meanwhile; throw away what was generated.
            ConfigError: the model has another engine than one module of this process.
        """
        engines = self._engines.get(model_id)
        if engines is None:
            raise ConfigError(_no_such_model(model_id, self._engines))
        if len(engines) != 1 or not isinstance(engines[0], EmbeddedEngine):
            raise ConfigError(
                f"model {model_id!r} has {len(engines)} engines, generation() is for one torch module of this "
                "process: ask "
                f"{', '.join(engine.engine_id for engine in engines)}"
            )
        with engines[0].generation(timeout_s=timeout_s) as version:
            yield version

    def status(self) -> ServiceStatus:
        """What every model's engines serve, and what failed last."""
        return self._service.status()

    def model_status(self, model_id: str) -> ModelStatus:
        """That of one model.

        Raises:
            ConfigError: there is no such model here.
        """
        if model_id not in self._engines:
            raise ConfigError(_no_such_model(model_id, self._engines))
        return self._service.status().models[model_id]

    def wait(self) -> None:
        """Blocks until the service is closed."""
        self._service.wait()

    def close(self) -> None:
        """Ends pulls under way. A load comes to its end, since nobody else resumes the engines that it has paused: that
        takes `load_timeout_s` (120 s) and 15 s at most. Engines go on with what they serve; those that look at its
        lease for at most `lease_s` (60 s), in a fleet no longer. Idempotent."""
        with self._opened:
            self._service.close()


def _handles(
    model_id: str, served: object, *, token: str | None, verify: bool | str, lease: str | None, made: list[EngineHandle]
) -> list[EngineHandle]:
    return [
        handle_of(
            each, name=f"{model_id}-{number}", token=token, verify=verify, made=made, must_answer=False, lease=lease
        )
        for number, each in enumerate(served if isinstance(served, list | tuple) else [served])
    ]


def _engines_of(config: WeightSyncConfig) -> dict[str, list[str]]:
    """Of each model the URLs of its engines; one that none is listed for has the inference service's own."""
    service = config.inference_service
    listed = config.serve.engines or {service.model_tag: ()}
    return {model_id: urls for model_id, each in listed.items() if (urls := urls_of(service, each))}


def _ask(
    urls: Sequence[str], models: Sequence[str], *, token: str | None, verify: bool | str, trust_key: str | None
) -> None:
    """Asks every source once whether it has one of these models; whoever is not there comes later.

    Raises:
        AuthError: one refuses the token.
        ConfigError: one has another model, or is no agent.
        MissingDependencyError: what reads that store is not installed.
    """
    asked = [
        in_thread(functools.partial(_model_at, url, token, verify, trust_key), name="weightsync-ask-source")
        for url in urls
    ]
    for url, each in zip(urls, asked, strict=True):
        error = each.exception()
        if isinstance(error, AuthError | ConfigError | MissingDependencyError):
            raise error
        if isinstance(error, UnsupportedError):  # one of our own faces, and no agent's
            raise ConfigError(
                f"{url} is no trainer's agent: {error.message} (a controller is given as controller=, --controller)"
            ) from error
        if error is None and (found := each.result()) not in models:
            raise ConfigError(f"{url} publishes model {found!r}. {_no_such_model(found, models)}")


def _ask_controller(url: str, models: Sequence[str], *, token: str | None, verify: bool | str) -> None:
    """Asks it once whether it has these models; one that is not there comes later.

    Raises:
        AuthError: it refuses the token.
        ConfigError: it is no controller, or has not one of them.
    """
    with contextlib.closing(ControllerClient(url, token=token, verify=verify)) as client:
        try:
            status = client.call("GET", "/status", dict[str, Any], timeout_s=_ASK_S)
        except UnsupportedError as error:  # one of our own faces
            raise ConfigError(f"{url} is no controller: {error.message}") from error
        except AuthError as error:
            raise AuthError(f"the controller at {url} lends no lease: {error.message}{TOKEN_HINT}", peer=url) from error
        except ConfigError:
            raise
        except WeightSyncError as error:
            if error.details.get("status") in _NO_ROUTE:
                raise ConfigError(
                    f"{url} answers, and is no weightsync controller: it has no /status; look at --controller "
                    "(a proxy says so, too, before its server has started)"
                ) from error
            return  # the first heartbeat says so
    if not is_controller(url, status, models, controller=True):
        raise ConfigError(f"{url} is a rollout service, and no controller: look at the port of --controller")


def _model_at(url: str, token: str | None, verify: bool | str, trust_key: str | None) -> str:
    with contextlib.closing(client_at(url, token=token, verify=verify, trust_key=trust_key)) as client:
        return client.get_version(timeout_s=_ASK_S).model_id


def _no_such_model(model_id: str, known: Any) -> str:
    return (
        f"There is no model {model_id!r} here:{did_you_mean(model_id, known)} there are {', '.join(map(repr, known))}"
    )
