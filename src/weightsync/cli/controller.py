"""`weightsync controller`: a controller in a process of its own, with the method that its file names."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weightsync.cli.shared import Token, Verify, announce, next_signal_ends, stop_event, told
from weightsync.errors import ConfigError

if TYPE_CHECKING:
    from weightsync.control.build import Built

_SERVICE_TOKEN = "WEIGHTSYNC_SERVICE_TOKEN"


_EXAMPLE = """\
# One model, served by any number of rollout services.
weight_sync:
  sync_method: pull
  sync_mode: batch-async        # sync, fully-async: a sync after each version; batch-async: fewer
  staleness_threshold: 2        # versions behind at which the newest is synced, and rollout waits for it
  validate_freq: 0
  fleet:
    models: [actor]             # [actor, verifier] for two, and
    sets: []                    # [[actor, verifier]] where nobody may serve one without the other
    commit_policy: each         # each | all | quorum(n)
    lease_s: 10.0               # a service that is cut off answers no longer than this
    after_failure: evict        # after the last retry: keep | evict
    port: 8700
"""


def _print_example(wanted: bool) -> None:
    if wanted:
        print(_EXAMPLE, end="")
        raise typer.Exit


def controller(
    config: Annotated[
        Path | None,
        typer.Option(help="YAML, needed but for --example; its keys are in docs/configuration-keys.md.", exists=True),
    ] = None,
    example: Annotated[
        bool,
        typer.Option("--example", help="Print a configuration to begin with.", callback=_print_example, is_eager=True),
    ] = False,
    host: Annotated[str | None, typer.Option(help="Where to listen instead; beyond loopback with a token.")] = None,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="Another port; 0 lets the system choose.")] = None,
    token: Token = None,
    service_token: Annotated[
        str | None, typer.Option(envvar=_SERVICE_TOKEN, help="The rollout services' token; --token where not given.")
    ] = None,
    certificate: Annotated[Path | None, typer.Option(help="PEM file, for https.", exists=True)] = None,
    key: Annotated[Path | None, typer.Option(help="PEM file of its key.", exists=True)] = None,
    verify: Verify = None,
) -> None:
    """Decides when each model is synced; its file's sync_method says how: by training ranks that push, rollout services
    that pull, or engines that load what they are told of.

    Trainers tell it of each version (POST /notify_version), rollout services join by their heartbeats
    (RolloutConfig(controller=URL)), inference clients and batch loaders ask its gates. Its page is at /, what it says
    as JSON at /status, metrics at /metrics; `weightsync status URL` shows it in a terminal.

    Example: weightsync controller --example > controller.yaml, then: weightsync controller --config controller.yaml
    """
    with told():
        from weightsync.config import WeightSyncConfig
        from weightsync.control.build import build_controller, check_stands_alone, waits_for
        from weightsync.net.server import TlsFiles

        if config is None:
            raise ConfigError("--config FILE is missing; weightsync controller --example prints one to begin with")
        if (certificate is None) != (key is None):
            lacks = "--key" if key is None else "--certificate"
            raise ConfigError(f"https needs a certificate and its key: {lacks} is missing; name its PEM file")
        settings = WeightSyncConfig.load(config)
        check_stands_alone(settings)
        changes = {name: value for name, value in (("host", host), ("port", port)) if value is not None}
        settings = settings.model_copy(update={"fleet": settings.fleet.model_copy(update=changes)})
        tls = None if certificate is None else TlsFiles(certificate=str(certificate), key=str(key))
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s: %(message)s")
        stop = stop_event()
        with build_controller(
            settings, token=token, service_token=service_token, verify=verify or True, tls=tls
        ) as built:
            models = ", ".join(built.controller.model_tags)
            announce(f"controller of {models} at {built.url} (process {os.getpid()})")
            announce(f"sync_method {settings.sync_method}: waits for {waits_for(settings, built.url)}")
            stop.wait()
            try:
                announce("stopped by a signal")
            finally:  # a Ctrl-C ends whoever reads its lines, too
                if built.controller.method.end_within_s:
                    _let_end(built)


def _let_end(built: Built) -> None:
    """Closes it; a sync that runs comes to its end, since nobody else would resume the engines that it has paused."""
    next_signal_ends()
    built.close()
    controller, most_s = built.controller, built.controller.method.end_within_s
    if controller.wait_ended(timeout_s=0.0):
        return
    syncs = [each for each in controller.records() if each.outcome == "running"]
    whose = ", ".join(f"version {each.version} of {each.model_tag}" for each in syncs)
    with contextlib.suppress(BrokenPipeError):
        announce(
            f"waits {most_s:.0f} s at most for the sync of {whose}, which has engines paused; a second signal ends at "
            "once, and leaves them paused",
            file=sys.stderr,
        )
    if not controller.wait_ended(timeout_s=most_s):
        announce("that sync has not ended: its engines may stand paused until the next one", file=sys.stderr)
