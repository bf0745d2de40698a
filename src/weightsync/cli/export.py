"""The commands export and keygen: a stored version as a checkpoint of its own, and keys to sign what is stored."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from weightsync.cli.shared import MAX_S, Token, TrustKey, Verify, refuse_trust_key, told


def export(
    context: typer.Context,
    source: Annotated[str, typer.Argument(help="A place in a store, s3://bucket/run; or the URL of an agent.")],
    out: Annotated[Path, typer.Argument(help="Folder to write; it is made, and must be empty.", file_okay=False)],
    version: Annotated[int | None, typer.Option(min=0, help="Which version of a store; the newest.")] = None,
    like: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            exists=True,
            file_okay=False,
            help="Checkpoint whose config.json, tokenizer and other small files are copied.",
        ),
    ] = None,
    shard_gb: Annotated[float, typer.Option(min=0.00001, max=1e6, help="Size of a file at most, in 10^9 bytes.")] = 5.0,
    model_id: Annotated[str | None, typer.Option(help="Which model; what is there where not given.")] = None,
    token: Token = None,
    timeout_s: Annotated[float, typer.Option(min=1.0, max=MAX_S, help="Seconds that it may take.")] = 3600.0,
    trust_key: TrustKey = None,
    verify: Verify = None,
) -> None:
    """Writes a version as a Hugging Face checkpoint: safetensors files, an index where there are several.

    It is fetched as a rollout host fetches it, from the newest full and the changes since, and proved tensor by tensor.
    No trainer has to be alive for one in a store. The folder comes by one rename: it is there whole or not at all.

    Example: weightsync export s3://bucket/run ./step-40 --version 40 --like ./base-model
    """
    with told():
        from weightsync.cli.checkpoint import check_out, write_checkpoint
        from weightsync.cli.fetch import fetched

        refuse_trust_key(context, (source,))
        check_out(out)
        with fetched(
            source, model_id, token=token, verify=verify or True, trust_key=trust_key, sources=(), transport=None,
            num_streams=6, timeout_s=timeout_s, version=version,
        ) as pulled:  # fmt: skip
            names = write_checkpoint(pulled, out, like=like, shard_bytes=int(shard_gb * 1e9))
        print(f"{out}: {pulled.version}, {pulled.manifest.total_bytes / 1e6:.1f} MB in {len(names)} safetensors files")


def keygen(name: Annotated[Path, typer.Argument(help="The files are NAME.secret and NAME.public.")]) -> None:
    """Makes a pair of ed25519 keys: a trainer signs with NAME.secret, hosts take what NAME.public proves.

    Give the secret one to the trainer alone (publish.sign_key), the public one to each host (serve.trust_key). Then
    whoever else can write into the store can stop hosts from following, and can give them nothing.

    Example: weightsync keygen ./run-key
    """
    with told():
        from weightsync.objects.signing import make_keys

        make_keys(f"{name}.secret", f"{name}.public")
        print(f"{name}.secret is the trainer's (publish.sign_key), {name}.public the hosts' (serve.trust_key)")
