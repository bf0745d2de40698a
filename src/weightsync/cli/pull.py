"""The commands of the pull path: agent, pull, inspect."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weightsync.errors import ConfigError, DeadlineExceededError, DigestMismatchError, WeightSyncError

if TYPE_CHECKING:
    from weightsync.rollout.pulled import Pulled

TOKEN_VARIABLE = "WEIGHTSYNC_TOKEN"

_Token = Annotated[
    str | None,
    typer.Option(envvar=TOKEN_VARIABLE, help="Bearer token, at least 16 characters; better by the variable."),
]


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """Typed errors as one line on standard error, and the exit code: 2 for what the user gave, else 1."""
    try:
        yield
    except WeightSyncError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        raise typer.Exit(2 if isinstance(error, ConfigError) else 1) from None
    except ImportError as error:
        print(f"this command needs torch: pip install 'weightsync[torch]' ({error})", file=sys.stderr)
        raise typer.Exit(2) from None
    except OSError as error:  # a disk that is full, a file that is not there
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        raise typer.Exit(1) from None


def agent(
    folder: Annotated[Path, typer.Argument(help="Checkpoint folder with *.safetensors.", exists=True, file_okay=False)],
    model_id: Annotated[str, typer.Option(help="Name under which receivers ask for it.")] = "model",
    host: Annotated[str, typer.Option(help="Where to listen; beyond loopback only with a token.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 lets the system choose.")] = 8765,
    advertise: Annotated[str | None, typer.Option(help="Host name that receivers reach it by.")] = None,
    token: _Token = None,
    dtype: Annotated[str | None, typer.Option(help="Convert floating-point tensors, e.g. bfloat16.")] = None,
    every_s: Annotated[float, typer.Option(min=0.1, help="How often to look for a change.")] = 1.0,
) -> None:
    """Serves a checkpoint folder to rollout hosts, and a new version whenever its files change.

    The weights are copied into shared memory once; `weightsync pull` and rollout services fetch them from there, over
    TCP or, on the same host, by mapping them. Write a new checkpoint into the folder (best: aside, then rename), and
    it becomes the next version.

    Example: weightsync agent ./checkpoint --port 8765, then: weightsync pull http://127.0.0.1:8765 --out ./copy
    """
    with _told():
        from weightsync.publish.folder import FolderPublisher
        from weightsync.publish.manager import OffloadReport, WeightManager

        stop = threading.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: stop.set())
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
    token: _Token = None,
    source: Annotated[
        list[str] | None,
        typer.Option(metavar="URL", help="Another agent of the same trainer that may be called, one a trainer host."),
    ] = None,
    transport: Annotated[str | None, typer.Option(help="tcp or shm; chosen by itself where not given.")] = None,
    streams: Annotated[int, typer.Option(min=1, max=64, help="TCP connections.")] = 6,
    timeout_s: Annotated[float, typer.Option(min=1.0, help="Seconds that it may take.")] = 600.0,
    verify: Annotated[
        str | None, typer.Option(metavar="FILE", help="PEM file of the authority of an https agent.")
    ] = None,
) -> None:
    """Fetches the newest version of an agent into a folder; every tensor in it is proved by its digest.

    The file is written aside and renamed, so the folder holds the old version or the new one, and never half of one. A
    manifest.json beside it, where there is one, names its version and every tensor's digest.
    """
    with _told():
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

        from weightsync.clients.agent import AgentClient
        from weightsync.errors import NotRegisteredError
        from weightsync.rollout.puller import Puller
        from weightsync.types import Deadline
        from weightsync.types.publication import Transport

        if transport not in (None, *Transport):
            raise ConfigError(f"--transport is tcp or shm, not {transport!r}")
        deadline = Deadline(timeout_s)
        checked: bool | str = verify or True
        if model_id is None:
            client = AgentClient(endpoint, token=token, verify=checked)
            model_id = client.get_version().model_id
            client.close()
        out.mkdir(parents=True, exist_ok=True)
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


def _own_name() -> str:
    """A receiver_id that nobody else has: two of one name would end each other's transfers."""
    return f"weightsync pull {socket.gethostname()[:100]}/{os.getpid()}/{secrets.token_hex(4)}"


def write_out(pulled: Pulled, folder: Path) -> Path:
    """Copies a version into a folder's model.safetensors, whole or not at all, with its manifest.json after it.

    Raises:
        DigestMismatchError: what was copied is not what was published. The folder is as it was.
    """
    import shutil

    import torch

    from weightsync.codec.digest import tensor_digests
    from weightsync.memory.folder import open_own
    from weightsync.net.messages import encode
    from weightsync.tensors import tensor_from_bytes

    path, aside = folder / "model.safetensors", folder / f".model.safetensors.{os.getpid()}"
    manifest, described = folder / "manifest.json", folder / f".manifest.json.{os.getpid()}"
    try:
        with os.fdopen(open_own(pulled.segment, os.O_RDONLY), "rb") as source, aside.open("wb") as target:
            shutil.copyfileobj(source, target, 16 << 20)
            target.flush()
            os.fsync(target.fileno())
        flat = torch.from_file(str(aside), shared=False, size=aside.stat().st_size, dtype=torch.uint8)
        for spec in pulled.manifest.tensors:
            start = pulled.offsets[spec.name]
            tensor = tensor_from_bytes(flat[start : start + spec.nbytes], dtype=spec.dtype, shape=spec.shape)
            if tensor_digests({spec.name: tensor})[spec.name] != spec.digest:
                raise DigestMismatchError("what was written is not what was published", parameter=spec.name)
        described.write_bytes(encode(pulled.manifest))
        manifest.unlink(missing_ok=True)  # at no moment does it stand beside weights that are not its own
        aside.replace(path)
        described.replace(manifest)
    finally:
        aside.unlink(missing_ok=True)
        described.unlink(missing_ok=True)
    return path


def inspect(
    what: Annotated[str, typer.Argument(help="URL of an agent, a safetensors file, or a folder that `pull` wrote.")],
    token: _Token = None,
    verify: Annotated[
        str | None, typer.Option(metavar="FILE", help="PEM file of the authority of an https agent.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Shows what a publication holds: version, tensors, sizes, digests, and where each part lies."""
    with _told():
        from rich.console import Console
        from rich.table import Table

        from weightsync.net.messages import encode

        title, tensors, facts = _manifest_of(what, token, verify or True)
        if json:
            print(encode({**facts, "tensors": tensors}).decode())
            return
        table = Table(title=title, title_justify="left", box=None, pad_edge=False)
        for head, right in (
            ("tensor", False),
            ("dtype", False),
            ("shape", False),
            ("MB", True),
            ("source", True),
            ("digest", False),
        ):
            table.add_column(
                head, justify="right" if right else "left", overflow="fold" if head == "tensor" else "ellipsis"
            )
        for spec in tensors:
            table.add_row(
                spec.name, spec.dtype, "x".join(map(str, spec.shape)) or "scalar", f"{spec.nbytes / 1e6:.3f}",
                str(spec.source), (spec.digest or "-").removeprefix("xxh3:")[:16],
            )  # fmt: skip
        console = Console(width=None if sys.stdout.isatty() else 160)
        console.print(table)
        total = sum(spec.nbytes for spec in tensors)
        console.print(f"{len(tensors)} tensors, {total / 1e6:.1f} MB", highlight=False)
        for name, value in facts.items():
            console.print(f"{name}: {value}", highlight=False, soft_wrap=True)


def _manifest_of(what: str, token: str | None, verify: bool | str):  # type: ignore[no-untyped-def]
    import msgspec

    from weightsync.clients.agent import AgentClient
    from weightsync.net.messages import decode
    from weightsync.plan.safetensors import read_header
    from weightsync.types import Manifest

    if what.startswith(("http://", "https://")):
        client = AgentClient(what, token=token, verify=verify)
        now = client.manifest()
        client.close()
        manifest = now.publication.manifest
        own = iter(now.proof.part_digests)
        parts = [
            msgspec.structs.replace(part, digest=next(own)) if part.source == now.source else part
            for part in now.publication.parts
        ]
        facts: dict[str, Any] = {
            "version": str(manifest.version), "model_id": manifest.model_id,
            "sources": [source.endpoint for source in now.publication.sources],
        }  # fmt: skip
        return f"{manifest.model_id} {manifest.version} at {what}", parts, facts
    path = Path(what)
    if (path / "manifest.json").is_file():
        manifest = decode((path / "manifest.json").read_bytes(), Manifest, what=f"{path}/manifest.json")
        facts = {"version": str(manifest.version), "model_id": manifest.model_id, "model_digest": manifest.model_digest}
        return f"{manifest.model_id} {manifest.version} in {path}", list(manifest.tensors), facts
    file = path / "model.safetensors" if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(f"{what} is no URL of an agent, no safetensors file, and no folder with one")
    if file.stat().st_size == 0:
        raise ConfigError(f"{file} is empty")
    import mmap

    with (
        file.open("rb") as opened,
        mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
        memoryview(mapped) as view,
    ):
        _, tensors, metadata = read_header(view)
    return str(file), list(tensors.values()), dict(metadata)


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    for command in (agent, pull, inspect):
        app.command()(command)
