"""`weightsync inspect`: what a publication holds, and what a delta changes."""

from __future__ import annotations

import contextlib
import itertools
import mmap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from weightsync.cli.shared import Token, Verify, plain, told
from weightsync.errors import ConfigError, InvalidRequestError
from weightsync.types import Manifest, TensorSpec

Shown = tuple[str, Sequence[tuple[TensorSpec, str | None]], dict[str, Any]]
"""A title, tensors and their digests where they are known, and further facts by name."""


def inspect(
    what: Annotated[str, typer.Argument(help="URL of an agent, a safetensors file, or a folder that `pull` wrote.")],
    token: Token = None,
    verify: Verify = None,
    delta: Annotated[
        bool, typer.Option("--delta", help="Of an agent: what its newest delta changes, tensor by tensor.")
    ] = False,
    picture: Annotated[
        Path | None, typer.Option(metavar="PNG", help="With --delta: draw how much of each tensor changes.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Shows what a publication holds: version, tensors, sizes, digests, and where each part lies.

    With --delta it shows what leads from the version before to the newest one: how many elements of each tensor
    change, and how small that is on the wire. An agent has deltas while receivers ask for them.

    Example: weightsync inspect http://127.0.0.1:8765 --delta --picture heat.png
    """
    with told():
        if delta:
            from weightsync.cli.inspect_delta import show_delta

            show_delta(what, token=token, verify=verify or True, picture=picture, as_json=json)
            return
        if picture is not None:
            raise ConfigError("--picture draws a delta: give --delta as well")
        _show(manifest_of(what, token, verify or True), as_json=json)


def _show(shown: Shown, *, as_json: bool) -> None:
    from rich.text import Text

    from weightsync.cli.tables import console, table
    from weightsync.net.messages import encode

    title, tensors, facts = shown
    if as_json:
        told_of = [{**msgspec.to_builtins(spec), "digest": digest} for spec, digest in tensors]
        print(encode({**facts, "tensors": told_of}).decode())
        return
    rows = (
        (
            spec.name, spec.dtype, "x".join(map(str, spec.shape)) or "scalar", f"{spec.nbytes / 1e6:.3f}",
            str(spec.source), (digest or "-").removeprefix("xxh3:")[:16],
        )
        for spec, digest in tensors
    )  # fmt: skip
    heads = ("tensor", "dtype", "shape", "MB", "source", "digest")
    out = console()
    out.print(table(title, heads, rows, right=("MB", "source")))
    out.print(f"{len(tensors)} tensors, {sum(spec.nbytes for spec, _ in tensors) / 1e6:.1f} MB", highlight=False)
    for name, value in facts.items():
        out.print(Text(f"{plain(name)}: {plain(str(value))}"), soft_wrap=True)


def manifest_of(what: str, token: str | None, verify: bool | str) -> Shown:
    """What an agent, a folder or a file holds.

    Raises:
        ConfigError: it is none of these.
        WeightSyncError: the agent does not answer.
    """
    from weightsync.net.messages import decode

    if what.startswith(("http://", "https://")):
        return _of_agent(what, token, verify)
    path = Path(what)
    if (path / "manifest.json").is_file():
        manifest = decode((path / "manifest.json").read_bytes(), Manifest, what=f"{path}/manifest.json")
        facts = {"version": str(manifest.version), "model_id": manifest.model_id, "model_digest": manifest.model_digest}
        facts |= _kind_of(manifest)
        shown = [(spec, manifest.digest(spec.name)) for spec in manifest.tensors]
        return f"{manifest.model_id} {manifest.version} in {path}", shown, facts
    file = path / "model.safetensors" if path.is_dir() else path
    if not file.is_file():
        store = f"; fetch a store's version first: weightsync pull {what} --out FOLDER" if "://" in what else ""
        raise ConfigError(
            f"{what} is no agent's URL (http://HOST:PORT), no safetensors file, and no folder with one{store}"
        )
    tensors, metadata = header_of(file)
    return str(file), [(spec, None) for spec in tensors.values()], dict(metadata)


def header_of(file: Path) -> tuple[Mapping[str, TensorSpec], Mapping[str, str]]:
    """The tensors of a safetensors file by name, with absolute offsets, and its metadata.

    Raises:
        ConfigError: it is none.
        OSError: it can't be read.
    """
    from weightsync.plan.safetensors import read_header

    if file.stat().st_size == 0:
        raise ConfigError(f"{file} is empty, no safetensors file: fetch or write it again")
    with (
        file.open("rb") as opened,
        mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
        memoryview(mapped) as view,
    ):
        try:
            return read_header(view)[1:]
        except InvalidRequestError as error:
            raise ConfigError(f"{file}: {error.message}") from None


def _kind_of(manifest: Manifest) -> dict[str, str]:
    """What it is, and of an adapter its rank and what it is bound to."""
    found: dict[str, str] = {"artifact": manifest.artifact}
    if (adapter := manifest.adapter) is not None:
        modules = adapter.config_dict["target_modules"]
        some = ", ".join(modules[:8]) + (", ..." if len(modules) > 8 else "")
        found["adapter"] = f"rank {adapter.max_rank}, on {some}"
        found["base"] = "bound to none" if adapter.base is None else str(adapter.base)
    return found


def _of_agent(url: str, token: str | None, verify: bool | str) -> Shown:
    from weightsync.clients.agent import AgentClient

    with contextlib.closing(AgentClient(url, token=token, verify=verify)) as client:
        now = client.manifest()
    now.proof.check_fits(now.publication, now.source)
    manifest = now.publication.manifest
    own = (now.proof.digest_of(index) for index in itertools.count())
    parts = [(part, next(own) if part.source == now.source else None) for part in now.publication.parts]
    facts: dict[str, Any] = {
        "version": str(manifest.version),
        "model_id": manifest.model_id,
        "sources": [source.endpoint for source in now.publication.sources],
        **_kind_of(manifest),
    }
    return f"{manifest.model_id} {manifest.version} at {url}", parts, facts
