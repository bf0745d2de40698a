"""`weightsync serve`: the rollout service of a host, beside its engines."""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weightsync.cli.shared import (
    Token,
    TrustKey,
    Verify,
    announce,
    next_signal_ends,
    refuse_trust_key,
    sigterm_raises,
    stop_event,
    told,
)
from weightsync.control.web.headline import seconds_text
from weightsync.errors import ConfigError

if TYPE_CHECKING:
    from weightsync.types.service import ModelStatus
    from weightsync.verbs.serving import Service

_SOURCE_TOKEN = "WEIGHTSYNC_SOURCE_TOKEN"
_ENGINE_TOKEN = "WEIGHTSYNC_ENGINE_TOKEN"
_CONTROLLER_TOKEN = "WEIGHTSYNC_CONTROLLER_TOKEN"
_LOOK_S = 0.5
_PROGRESS_S = 2.0
"""What takes longer says how far it is."""
_FIRST_S, _LONGEST_S = 30.0, 600.0
"""What stays wrong is said after so long, and then every so long at the latest."""


def serve(
    context: typer.Context,
    engine: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MODEL=URL",
            help="An engine of this host: vllm+http://..., sglang+http://..., weightsync+http://..., or http://..., "
            "which is asked what it is. Again for each further one.",
        ),
    ] = None,
    source: Annotated[
        list[str] | None,
        typer.Option(
            "--from",
            metavar="URL",
            help="A trainer's agent, http://trainer-0:8765, one a trainer host; or a place in a store, s3://bucket/run.",
        ),
    ] = None,
    token: Token = None,
    source_token: Annotated[
        str | None, typer.Option(envvar=_SOURCE_TOKEN, help="The agents' token; --token where not given.")
    ] = None,
    engine_token: Annotated[
        str | None, typer.Option(envvar=_ENGINE_TOKEN, help="The engines' token; --token where not given.")
    ] = None,
    controller_token: Annotated[
        str | None, typer.Option(envvar=_CONTROLLER_TOKEN, help="The controller's token; --token where not given.")
    ] = None,
    host: Annotated[str | None, typer.Option(help="Where to listen: 127.0.0.1, beyond loopback with a token.")] = None,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="9000; 0 lets the system choose.")] = None,
    lease: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Serving lease: engines answer while this service is alive. It is made."),
    ] = None,
    controller: Annotated[
        str | None, typer.Option(metavar="URL", help="Controller whose fleet this host is part of; needs --lease.")
    ] = None,
    advertise: Annotated[
        str | None, typer.Option(metavar="URL", help="URL by which the controller reaches this service.")
    ] = None,
    delta: Annotated[
        bool | None,
        typer.Option(
            "--delta/--full",
            help="What changed alone is fetched on the trainer's own host too, and written into engines that take "
            "changes; or never. By itself over the network alone.",
        ),
    ] = None,
    trust_key: TrustKey = None,
    relay: Annotated[
        bool | None,
        typer.Option(
            "--relay/--no-relay",
            help="Blocks are taken from other rollout hosts, and served to them. By itself where it listens beyond "
            "loopback.",
        ),
    ] = None,
    zone: Annotated[
        str | None, typer.Option(metavar="NAME", help="Rack or data centre: relays of one ask each other first.")
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="The service's name; this host's, with -PORT if not 9000 (random if 0).")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="YAML; options win over it.", exists=True, dir_okay=False)] = None,
    verify: Verify = None,
) -> None:
    """Keeps the engines of this host at the newest version that a trainer has published.

    It waits at each --from until there is something newer, fetches it, proves every tensor, and loads it into the
    engines; generation pauses for the load alone. Trainers may come later, and be started again; so may engines whose
    URL says what they are (vllm+http://, sglang+http://, weightsync+http://): of others the command has to ask.
    From a store (s3://, gs://, az://, file:///) no trainer has to be alive: the newest full and what changed since.

    Without --from a trainer has to name this service: weightsync.publish(..., to=["http://THIS-HOST:9000"]). With
    --controller it has to name the controller: weightsync.publish(..., to="http://CONTROLLER:8700").

    A vLLM is started so, and needs no code:

      VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --host 127.0.0.1 --weight-transfer-config '{"backend": "weightsync"}'

    With --lease a vLLM that was started again, or whose service has died, refuses to answer with old weights: the
    command prints what to start it with.

    With --delta the pause of an engine that takes changes is that of the changes, not of the model: also where the
    trainer's memory is at hand, which is mapped otherwise and loaded in full. What it costs is in docs/deltas.md.

    Example: weightsync serve --engine actor=vllm+http://127.0.0.1:8000 --from http://trainer-0:8765

    How it is: weightsync status with the URL that it prints.
    """
    with told():
        from weightsync.config import WeightSyncConfig
        from weightsync.types.spec import check_config_id
        from weightsync.verbs.serving import serve as begin

        for option, value in (("--name", name), ("--zone", zone)):
            if value is not None:
                check_config_id(option, value)
        models = _models(engine or ())
        settings = WeightSyncConfig() if config is None else WeightSyncConfig.load(config)
        refuse_trust_key(context, source or settings.serve.sources)
        lease = lease or settings.serve.lease
        logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s %(levelname)s: %(message)s")
        sigterm_raises()  # as Ctrl-C does, while it starts
        if lease is not None:
            _print_lease(lease)
        options: dict[str, Any] = {} if delta is None else {"mode": "delta" if delta else "full"}
        options |= {key: value for key, value in (("relay", relay), ("zone", zone)) if value is not None}
        running = begin(
            models or None, sources=source or None, token=token, source_token=source_token,
            engine_token=engine_token, controller_token=controller_token, host=host, port=port, lease=lease,
            controller=controller, advertise=advertise, service_id=name, config=settings, verify=verify or True,
            trust_key=trust_key,
            **options,
        )  # fmt: skip
        with running:
            stop = stop_event()
            status, followed = running.status(), source or list(settings.serve.sources)
            whom = f"following {', '.join(followed)}" if followed else "waiting for a trainer that names this service"
            if status.controller is not None:
                whom = f"in the fleet of {status.controller}, which says what is served"
            try:
                announce(f"{', '.join(status.models)} at {running.url} (process {os.getpid()}), {whom}")
                _watch(running, stop)
            finally:  # a Ctrl-C ends whoever reads its lines, too
                unsure = _let_end(running)
        left = "go on with what they serve"
        if status.controller is not None:
            left = "answer nothing: they are in no fleet now"
        elif status.lease is not None:
            left += ", those that look at its lease for as long as it was lent"
        if unsure:
            left += f"; some of {', '.join(unsure)}, whose load has not ended well, may stand paused until the next one"
        announce(f"stopped by a signal; engines {left}")


def _let_end(running: Service) -> list[str]:
    """Closes it; a load that runs comes to its end, since nobody else would resume the engines that it has paused.

    Returns:
        Models whose load has failed meanwhile, or has not ended.
    """
    from weightsync.handles.fanout import in_thread
    from weightsync.host.commit_gate import NOT_COMMITTED
    from weightsync.host.model_updater import CLOSE_S

    def loading() -> list[str]:
        return [model_id for model_id, status in running.status().models.items() if status.state == "loading"]

    loads, said = set(loading()), False
    closing = in_thread(running.close, name="weightsync-close")
    while not closing.done():
        concurrent.futures.wait([closing], _LOOK_S)
        loads.update(now := loading())
        if now and not said and not closing.done():
            said = True
            next_signal_ends()
            with contextlib.suppress(BrokenPipeError):
                announce(
                    f"waits {running.rollout.config.load_timeout_s + CLOSE_S:.0f} s at most for the load of "
                    f"{', '.join(now)}, which may have engines paused; a second signal ends at once, and may leave "
                    "them paused",
                    file=sys.stderr,
                )
    with contextlib.suppress(RuntimeError):  # no thread could be had: it is closed behind this
        closing.result()
    models = running.status().models
    return [
        model_id
        for model_id in sorted(loads)
        if models[model_id].state == "loading"
        or any(NOT_COMMITTED not in why for why in models[model_id].errors.values())
    ]


def _models(pairs: Sequence[str]) -> dict[str, list[str]]:
    """Engines by model.

    Raises:
        ConfigError: one is no MODEL=URL.
    """
    models: dict[str, list[str]] = {}
    for pair in pairs:
        model_id, equals, url = pair.partition("=")
        if not equals or "://" in model_id:
            raise ConfigError(f"--engine is MODEL=URL, e.g. actor=vllm+http://127.0.0.1:8000, not {pair!r}")
        models.setdefault(model_id, []).append(url)
    return models


def _print_lease(path: str) -> None:
    """Made before vLLM starts, which refuses to without it."""
    from weightsync.memory import ServingLease
    from weightsync.types.fleet import LEASE_MIDDLEWARE

    path = os.path.abspath(path)
    if not os.path.exists(path):
        ServingLease(path).release()
    announce(
        f"lease file {path}; start vLLM with these beside its other options:\n"
        f"  WEIGHTSYNC_LEASE_FILE={path} VLLM_SERVER_DEV_MODE=1\n"
        f"  --middleware {LEASE_MIDDLEWARE}"
    )


def _watch(running: Service, stop: threading.Event) -> None:
    """Prints what is served, how far a long pull is, and what stays wrong, until it is told to stop. What goes wrong is
    in the log the moment it does."""
    troubles: dict[str, _Trouble] = {}
    served: dict[str, str] = {}
    reasons: dict[tuple[str, str], str] = {}
    last_s = time.monotonic()
    while not stop.wait(_LOOK_S):
        seen = running.status()
        lacks = None if seen.lease is None else seen.lease.why_none
        troubles.setdefault("", _Trouble()).look("engines answer nobody", lacks or "", over="engines answer again")
        for model_id, status in seen.models.items():
            now = f"{status.run_id}/{status.version}" if status.version is not None and status.state == "idle" else ""
            if now and served.get(model_id) != now:
                served[model_id] = now
                announce(f"{model_id} serves {now}: {_how(status, reasons)}")
            troubles.setdefault(model_id, _Trouble()).look(
                model_id, _trouble(status), over=f"{model_id}: it came right"
            )
            moved = status.progress
            if moved is not None and moved.is_long and time.monotonic() - last_s > _PROGRESS_S:
                last_s = time.monotonic()
                announce(f"{model_id}: {moved}")


class _Trouble:
    """What does not come right: said after a while, and again after twice as long.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since_s: float | None = None
        self._next_s = _FIRST_S

    def look(self, whose: str, trouble: str, *, over: str = "") -> None:
        """What is wrong now; empty: nothing is, and `over` is said where it was said before."""
        now_s = self._clock()
        if not trouble:
            if over and self._next_s > _FIRST_S:
                announce(over)
            self._since_s, self._next_s = None, _FIRST_S
            return
        self._since_s = now_s if self._since_s is None else self._since_s
        if (lasts_s := now_s - self._since_s) >= self._next_s:
            announce(f"{whose}, for {seconds_text(lasts_s)} now: {trouble}")
            self._next_s = lasts_s + min(lasts_s, _LONGEST_S)


def _trouble(status: ModelStatus) -> str:
    told_of = {**status.sender_errors, **status.errors}
    return "; ".join(f"{who}: {why}" for who, why in told_of.items())


def _how(status: ModelStatus, reasons: dict[tuple[str, str], str]) -> str:
    """How a version came; a reason that was told with the one before is not told again."""

    def why(who: str, what: str, because: str) -> str:
        known = reasons.get((who, what)) == because
        reasons[who, what] = because
        return f"; {who} {what}{', as before' if known else f': {because}'}"

    deltas = f" in {status.num_deltas} delta{'s' * (status.num_deltas > 1)}" if status.num_deltas else ""
    peers = status.received_from.get("peer", 0)
    if status.pull_s is None:
        return "from its life before, by its record"
    if status.fetched not in (None, f"{status.run_id}/{status.version}"):
        return f"and {status.fetched} was fetched since"
    moved = f"{status.received_bytes / 1e6:.1f} MB by {status.transport}{deltas}"
    if status.total_bytes and not status.received_bytes and not deltas:  # on the same host nothing has to move
        moved = f"{status.total_bytes / 1e6:.1f} MB mapped"
    return (
        f"{moved} in {status.pull_s:.2f} s, loaded in {status.load_s or 0:.2f} s, "
        f"paused {1e3 * (status.paused_s or 0):.0f} ms"
        + (f", {100 * peers // status.received_bytes} % from other hosts" if peers else "")
        + (", changes alone were written" if status.num_patched else "")
        + "".join(why(who, "loaded all of it", because) for who, because in status.full_because.items())
        + "".join(why(who, "is unproved", because) for who, because in status.unprovable.items())
    )
