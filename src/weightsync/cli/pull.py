"""The commands of the pull path: agent and pull; inspect is beside them."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import sys
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from weightsync.cli.inspect import inspect
from weightsync.cli.shared import MAX_S, Token, Verify, stop_event, told
from weightsync.errors import ConfigError, DeadlineExceededError


def agent(
    folder: Annotated[Path, typer.Argument(help="Checkpoint folder with *.safetensors.", exists=True, file_okay=False)],
    model_id: Annotated[str, typer.Option(help="Name under which receivers ask for it.")] = "model",
    host: Annotated[str, typer.Option(help="Where to listen; beyond loopback only with a token.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 lets the system choose.")] = 8765,
    advertise: Annotated[str | None, typer.Option(help="Host name that receivers reach it by.")] = None,
    token: Token = None,
    dtype: Annotated[str | None, typer.Option(help="Convert floating-point tensors, e.g. bfloat16.")] = None,
    every_s: Annotated[float, typer.Option(min=0.1, max=MAX_S, help="How often to look for a change.")] = 1.0,
) -> None:
    """Serves a checkpoint folder to rollout hosts, and a new version whenever its files change.

    The weights are copied into shared memory once; `weightsync pull` and rollout services fetch them from there, over
    TCP or, on the same host, by mapping them. Write a new checkpoint into the folder (best: aside, then rename), and
    it becomes the next version.

    Example: weightsync agent ./checkpoint --port 8765, then: weightsync pull http://127.0.0.1:8765 --out ./copy
    """
    with told():
        from weightsync.trainer.folder import FolderPublisher
        from weightsync.trainer.publisher import OffloadReport, WeightManager

        stop = stop_event()
        with WeightManager(model_id, dtype=dtype, host=host, port=port, advertise=advertise, token=token) as manager:

            def say(report: OffloadReport) -> None:
                if not report.published:
                    print(f"version {report.version.number} was not published: {report.why}", file=sys.stderr)
                    return
                while not stop.is_set():  # the proof of a large model takes a while, and a signal is not kept waiting
                    with contextlib.suppress(DeadlineExceededError):
                        manager.wait_published(report.version.number, timeout_s=0.2)
                        break
                else:
                    return
                print(
                    f"version {report.version} is published: {report.copied_bytes / 1e6:.1f} MB in "
                    f"{report.seconds:.2f} s",
                    flush=True,
                )

            publisher = FolderPublisher(folder, manager, every_s=every_s)
            report = publisher.publish()
            print(f"serving {folder} as model {model_id!r} at {manager.endpoint}", flush=True)
            say(report)
            publisher.watch(stop, say)


def pull(
    endpoint: Annotated[str, typer.Argument(help="URL of an agent.")],
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
    verify: Verify = None,
) -> None:
    """Fetches the newest version of an agent into a folder; every tensor in it is proved by its digest.

    The file is written aside and renamed, so the folder holds the old version or the new one, and never half of one. A
    manifest.json beside it, where there is one, names its version and every tensor's digest. Only what a pull has
    written is replaced: where another model.safetensors or manifest.json lies there, nothing is fetched.

    Example: weightsync pull http://trainer-0:8765 --out ./weights
    """
    with told():
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

        from weightsync.cli.write_out import prepare, write_out
        from weightsync.clients.agent import AgentClient
        from weightsync.errors import NotRegisteredError
        from weightsync.host.puller import Puller
        from weightsync.types import Deadline
        from weightsync.types.transfer_messages import Transport

        if transport not in (None, *Transport):
            raise ConfigError(f"--transport is tcp or shm, not {transport!r}; leave it out, and the nearest is taken")
        signal.signal(signal.SIGTERM, _ended)  # so that what it holds of /dev/shm is given back
        deadline = Deadline(timeout_s)
        checked: bool | str = verify or True
        if model_id is None:
            client = AgentClient(endpoint, token=token, verify=checked)
            model_id = client.get_version().model_id
            client.close()
        prepare(out)
        puller = Puller(
            endpoint, model_id, receiver_id=_own_name(), token=token, verify=checked,
            transport=None if transport is None else Transport(transport), mode="full", num_streams=streams,
            may_call={each.rstrip("/") for each in source or ()}.__contains__,  # the token goes to nobody else
        )  # fmt: skip
        bar = Progress(
            TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(),
            disable=not sys.stderr.isatty(),
        )  # fmt: skip
        try:
            with bar:
                task = bar.add_task(f"pulling {model_id}", total=None)
                pulled = puller.pull(
                    deadline=deadline, progress=lambda done, total: bar.update(task, completed=done, total=total)
                )
            with pulled:
                path = write_out(pulled, out)
        except NotRegisteredError as error:
            raise ConfigError(f"{error.message}; allow it with --source URL") from error
        finally:
            puller.close()
        print(f"{path}: {pulled.version}, {pulled.manifest.total_bytes / 1e6:.1f} MB by {pulled.transport}")


def _ended(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _own_name() -> str:
    """A receiver_id that nobody else has: two of one name would end each other's transfers."""
    return f"weightsync pull {socket.gethostname()[:100]}/{os.getpid()}/{secrets.token_hex(4)}"


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    for command in (agent, pull, inspect):
        app.command()(command)
