"""write_checkpoint: a version that is here, as a folder in Hugging Face's form."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from pathlib import Path

import torch

from weightsync.codec.tensor_digest import tensor_digest
from weightsync.errors import ConfigError, DigestMismatchError, StorageError
from weightsync.host.staged_version import StagedVersion
from weightsync.memory import MappedSegment
from weightsync.plan.safetensors import plan_layout
from weightsync.tensors import tensor_from_bytes
from weightsync.types import TensorSpec

_MAX_COPIED_BYTES = 64 << 20
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")


def check_out(out: Path) -> None:
    """Raises ConfigError where something lies there, or it has no name of its own to be renamed to."""
    if out.name in ("", ".."):
        raise ConfigError(f"{out} is no name of a new folder: give one, as in {out / 'checkpoint'}")
    if out.is_symlink():
        raise ConfigError(f"{out} is a link: give the folder that it leads to. Nothing was touched")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} is there already, and has something in it: nothing was touched")


def write_checkpoint(pulled: StagedVersion, out: Path, *, like: Path | None, shard_bytes: int) -> list[str]:
    """Writes the folder aside, and renames it.

    Args:
        pulled: the version; its bytes are proved again as they are written.
        out: the folder.
        like: where small files that are no weights come from.
        shard_bytes: of tensors in one file at most; a larger tensor has one of its own.

    Returns:
        Names of the files with weights.

    Raises:
        ConfigError: it is an adapter. Nothing was written.
        StorageError: it can't be written. Nothing is left.
        DigestMismatchError: the bytes are not those that were published.
    """
    if pulled.manifest.artifact != "model":
        raise ConfigError(
            f"{pulled.version} is an adapter, and no whole model: `weightsync pull` with --out {out} writes it as PEFT "
            "reads it",
            state_left="nothing was written",
        )
    aside = out.with_name(f".{out.name}-{secrets.token_hex(6)}")
    try:
        aside.mkdir(parents=True)
        try:
            if like is not None:
                _copy_small(like, aside)
            names = _write(pulled, aside, shard_bytes)
            if out.is_dir():
                out.rmdir()
            os.rename(aside, out)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    except OSError as error:
        raise StorageError(f"{out} could not be written: {error}", state_left="nothing is left of it") from error
    return names


def _copy_small(like: Path, folder: Path) -> None:
    for each in sorted(like.iterdir()):
        odd = each.name.startswith(".") or each.name.endswith((*_WEIGHTS, ".index.json"))
        if each.is_file() and not odd and each.stat().st_size <= _MAX_COPIED_BYTES:
            shutil.copyfile(each, folder / each.name)


def _write(pulled: StagedVersion, folder: Path, shard_bytes: int) -> list[str]:
    shards, num_bytes = list[list[TensorSpec]]([[]]), 0
    for spec in pulled.manifest.tensors:
        if shards[-1] and num_bytes + spec.nbytes > shard_bytes:
            shards.append([])
            num_bytes = 0
        shards[-1].append(spec)
        num_bytes += spec.nbytes
    count = len(shards)
    names = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    if count == 1:
        names = ["model.safetensors"]
    with MappedSegment(pulled.segment, need_bytes=1) as mapped:
        for name, specs in zip(names, shards, strict=True):
            _write_shard(pulled, folder / name, specs, mapped.memory)
    if count > 1:
        index = {
            "metadata": {"total_size": pulled.manifest.total_bytes},
            "weight_map": {spec.name: name for name, specs in zip(names, shards, strict=True) for spec in specs},
        }
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    return names


def _write_shard(pulled: StagedVersion, path: Path, specs: list[TensorSpec], memory: memoryview) -> None:
    layout = plan_layout(specs)
    with open(path, "xb") as file:
        file.write(layout.header(pulled.version, pulled.manifest.model_id))
        for spec in sorted(layout.parts, key=lambda part: (part.offset, part.nbytes)):
            data = memory[pulled.offsets[spec.name] : pulled.offsets[spec.name] + spec.nbytes]
            _prove(pulled, spec, data)
            assert file.tell() == spec.offset
            file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _prove(pulled: StagedVersion, spec: TensorSpec, data: memoryview) -> None:
    flat = torch.frombuffer(data, dtype=torch.uint8) if spec.nbytes else torch.empty(0, dtype=torch.uint8)
    tensor = tensor_from_bytes(flat, dtype=spec.dtype, shape=spec.shape)
    if tensor_digest(tensor) != pulled.manifest.digest(spec.name):
        raise DigestMismatchError(
            "what was to be written is not what was published", parameter=spec.name, version=str(pulled.version),
            state_left="nothing is left of it",
        )  # fmt: skip
