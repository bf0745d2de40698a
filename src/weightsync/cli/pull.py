"""The commands agent and pull."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Annotated

import typer

from weightsync.cli.shared import (
    MAX_S,
    Token,
    TrustKey,
    Verify,
    announce,
    refuse_trust_key,
    sigterm_raises,
    stop_event,
    told,
)
from weightsync.errors import ConfigError, DeadlineExceededError


def agent(
    folder: Annotated[Path, typer.Argument(help="Checkpoint folder with *.safetensors.", exists=True, file_okay=False)],
    model_id: Annotated[str, typer.Option(help="Name under which receivers ask for it.")] = "model",
    host: Annotated[str, typer.Option(help="Where to listen; beyond loopback only with a token.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 lets the system choose.")] = 8765,
    advertise: Annotated[str | None, typer.Option(help="Host name that receivers reach it by, without a port.")] = None,
    token: Token = None,
    dtype: Annotated[str | None, typer.Option(help="Convert floating-point tensors, e.g. bfloat16.")] = None,
    dtype_override: Annotated[
        list[str] | None,
        typer.Option(
            help="GLOB=DTYPE: tensors of these names in another dtype, e.g. '*expert_bias*=float32'; repeatable."
        ),
    ] = None,
    every_s: Annotated[float, typer.Option(min=0.1, max=MAX_S, help="How often to look for a change.")] = 1.0,
) -> None:
    """Serves a checkpoint folder to rollout hosts, and a new version whenever its files change.

    The weights are copied into shared memory once; `weightsync pull` and rollout services fetch them from there, over
    TCP or, on the same host, by mapping them. Write a new checkpoint into the folder (one file: aside, then rename),
    and it becomes the next version as soon as nothing in the folder has changed for two looks; for ten where it has
    several files. Only a swap at once is safe for several: write another folder, and rename a link to it over FOLDER,
    which is a link. What lies there at the start is published at once: don't start it during a copy.

    Example: weightsync agent ./checkpoint --port 8765, then: weightsync pull http://127.0.0.1:8765 --out ./copy
    """
    with told():
        from weightsync.trainer.folder import FolderPublisher
        from weightsync.trainer.publisher import OffloadReport, WeightManager

        overrides = dict(map(_override, dtype_override or ()))
        sigterm_raises()  # as Ctrl-C does, until the first version is there: its copy may take minutes
        with WeightManager(model_id, dtype=dtype, host=host, port=port, advertise=advertise, token=token) as manager:

            def say(report: OffloadReport) -> None:
                if not report.published:
                    announce(f"version {report.version.number} was not published: {report.why}", file=sys.stderr)
                    return
                while not stop.is_set():  # the proof of a large model takes a while, and a signal is not kept waiting
                    with contextlib.suppress(DeadlineExceededError):
                        manager.wait_published(report.version.number, timeout_s=0.2)
                        break
                else:
                    return
                announce(
                    f"version {report.version} is published: {report.copied_bytes / 1e6:.1f} MB in "
                    f"{report.seconds:.2f} s"
                )

            publisher = FolderPublisher(folder, manager, every_s=every_s, dtype_overrides=overrides)
            report = publisher.publish()
            stop = stop_event()
            announce(f"serving {folder} as model {model_id!r} at {manager.endpoint}")
            say(report)
            publisher.watch(stop, say)


def _override(text: str) -> tuple[str, str]:
    glob, equals, dtype = text.rpartition("=")
    if not (glob and equals and dtype):
        raise ConfigError(f"--dtype-override is GLOB=DTYPE, e.g. '*expert_bias*=float32', not {text!r}")
    return glob, dtype


def pull(
    context: typer.Context,
    endpoint: Annotated[str, typer.Argument(help="URL of an agent, or a place in a store: s3://bucket/run.")],
    out: Annotated[Path, typer.Option(help="Folder to write model.safetensors into; it is made.")],
    model_id: Annotated[str | None, typer.Option(help="Which model; the agent's own where not given.")] = None,
    token: Token = None,
    source: Annotated[
        list[str] | None,
        typer.Option(metavar="URL", help="Another agent of the same trainer that may be called, one a trainer host."),
    ] = None,
    transport: Annotated[str | None, typer.Option(help="tcp or shm; chosen by itself where not given.")] = None,
    streams: Annotated[int, typer.Option(min=1, max=64, help="TCP connections.")] = 6,
    timeout_s: Annotated[float, typer.Option(min=1.0, max=MAX_S, help="Seconds that it may take.")] = 600.0,
    trust_key: TrustKey = None,
    verify: Verify = None,
) -> None:
    """Fetches the newest version of an agent, or of an object store, into a folder, proved tensor by tensor.

    The file is written aside and renamed, so the folder holds the old version or the new one, and never half of one. A
    manifest.json beside it, where there is one, names its version and every tensor's digest. Only what a pull has
    written is replaced: where another model.safetensors or manifest.json lies there, nothing is fetched.

    Example: weightsync pull http://trainer-0:8765 --out ./weights
    """
    with told():
        from weightsync.cli.fetch import fetched
        from weightsync.cli.write_out import prepare, write_out
        from weightsync.types.transfer_messages import Transport

        if transport not in (None, Transport.TCP, Transport.SHM):
            raise ConfigError(f"--transport is tcp or shm, not {transport!r}; leave it out, and the nearest is taken")
        refuse_trust_key(context, (endpoint,))
        prepare(out)
        with fetched(
            endpoint, model_id, token=token, verify=verify or True, trust_key=trust_key, sources=source or (),
            transport=None if transport is None else Transport(transport), num_streams=streams, timeout_s=timeout_s,
        ) as pulled:  # fmt: skip
            path = write_out(pulled, out)
        print(f"{path}: {pulled.version}, {pulled.manifest.total_bytes / 1e6:.1f} MB by {pulled.transport}")
