"""write_out: a pulled version into a folder, whole or not at all."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import torch

from weightsync.codec.digest import tensor_digest
from weightsync.errors import DigestMismatchError
from weightsync.memory.folder import open_own
from weightsync.net.messages import encode
from weightsync.rollout.pulled import Pulled
from weightsync.tensors import tensor_from_bytes
from weightsync.types import Deadline

_ASIDE = ".weightsync-"
_COPY_BYTES = 16 << 20
_SWAP_S = 10.0
"""Two renames; whoever takes longer stands still."""


def write_out(pulled: Pulled, folder: Path) -> Path:
    """Copies a version into a folder's model.safetensors, with its manifest.json after it.

    Both are written aside and renamed, so that the folder has the old version or the new one. Several may write into
    one folder at once: the last one to be done stays.

    Raises:
        DigestMismatchError: what was copied is not what was published. The folder is as it was.
        DeadlineExceededError: another writer stands still between its two renames. The folder is as it was.
    """
    path, manifest = folder / "model.safetensors", folder / "manifest.json"
    _sweep(folder)
    with _aside(folder) as (aside, weights), _aside(folder) as (described, text):
        source = os.fdopen(open_own(pulled.segment, os.O_RDONLY), "rb")
        with source, os.fdopen(os.dup(weights), "wb") as target:
            shutil.copyfileobj(source, target, _COPY_BYTES)
            target.flush()
            os.fsync(target.fileno())
        flat = torch.from_file(str(aside), shared=False, size=aside.stat().st_size, dtype=torch.uint8)
        for spec in pulled.manifest.tensors:
            start = pulled.offsets[spec.name]
            tensor = tensor_from_bytes(flat[start : start + spec.nbytes], dtype=spec.dtype, shape=spec.shape)
            if tensor_digest(tensor) != pulled.manifest.digest(spec.name):
                raise DigestMismatchError("what was written is not what was published", parameter=spec.name)
        with os.fdopen(os.dup(text), "wb") as opened:
            opened.write(encode(pulled.manifest))
        with _locked(folder):
            manifest.unlink(missing_ok=True)  # at no moment does it stand beside weights that are not its own
            aside.replace(path)
            described.replace(manifest)
    return path


@contextlib.contextmanager
def _aside(folder: Path) -> Iterator[tuple[Path, int]]:
    """A new file of ours alone, and its descriptor; locked while we live, and gone at the end unless it was renamed."""
    path, descriptor = _new_file(folder)
    try:
        yield path, descriptor
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def _new_file(folder: Path) -> tuple[Path, int]:
    while True:
        path = folder / f"{_ASIDE}{secrets.token_hex(8)}"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(descriptor).st_nlink:
                return path, descriptor
        except BlockingIOError:
            pass
        except OSError:  # a file system without locks: nobody can sweep there either
            return path, descriptor
        os.close(descriptor)  # somebody swept it before it was locked, or is about to


def _sweep(folder: Path) -> None:
    """Removes what a killed writer left: files aside that nobody has locked."""
    for path in folder.glob(f"{_ASIDE}*"):
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            finally:
                os.close(descriptor)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Two renames of one writer, and none of another in between."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        deadline, pause = Deadline(_SWAP_S), threading.Event()
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                pause.wait(min(0.01, deadline.check(f"another writer's end in {folder}")))
            except OSError:  # a file system without locks
                break
        yield
    finally:
        os.close(descriptor)
