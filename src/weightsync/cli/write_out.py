"""write_out: a pulled version into a folder, whole or not at all, and nothing in it touched that a pull did not write.

An adapter becomes a folder that PEFT and vLLM load: adapter_model.safetensors, and adapter_config.json beside it.

What a pull wrote is known by what it holds and whose it is, never by its name alone: weights by their stamp, the
manifest by its form, and what a killed writer left by a name that has a checksum.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import secrets
import shutil
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path

import torch

from weightsync.codec.digest import digest_of
from weightsync.codec.tensor_digest import tensor_digests
from weightsync.errors import ConfigError, DigestMismatchError, InvalidRequestError, SharedMemoryError, StorageError
from weightsync.host.staged_version import StagedVersion
from weightsync.memory.folder import open_own
from weightsync.memory.owned import is_own, open_folder
from weightsync.net.messages import decode, encode
from weightsync.plan.safetensors import STAMP_WITHIN_BYTES, read_stamp
from weightsync.tensors import tensor_from_bytes
from weightsync.types import Adapter, ArtifactKind, Deadline, HeldTensor, Manifest

_MANIFEST, _CONFIG = "manifest.json", "adapter_config.json"
_WEIGHTS: dict[ArtifactKind, str] = {"model": "model.safetensors", "lora": "adapter_model.safetensors"}
_ASIDE = ".weightsync-"
_ASIDE_DIGITS = 16
_COPY_BYTES = 16 << 20
_MAX_MANIFEST_BYTES = 1 << 30
_SWAP_S = 10.0
"""Two renames; whoever takes longer stands still."""


def prepare(folder: Path) -> None:
    """Makes the folder where it is not there, and sees that a version can go into it.

    Raises:
        ConfigError: it can't be made or written into, is another user's link, or a file lies in the way that no pull
            of this user has written. Nothing there was changed.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _opened(folder) as fd:
            _check_replaceable(folder, fd)
    except OSError as error:
        raise ConfigError(f"{folder} can't be the folder of a version: {error.strerror}") from error


def write_out(pulled: StagedVersion, folder: Path) -> Path:
    """Copies a version into a folder's model.safetensors, with its manifest.json after it.

    Both are written aside and renamed, so that the folder has the old version or the new one. Several may write into
    one folder at once: the last one to be done stays. Room for all of it is taken before the first byte.

    Raises:
        DigestMismatchError: what was copied is not what was published.
        DeadlineExceededError: another writer stands still between its two renames.
        StorageError: there is no room for it, or it can't be written.
        ConfigError: see `prepare`.
        After any of them the weights in the folder are what they were.
    """
    try:
        with _opened(folder) as fd:
            _sweep(fd)
            _check_replaceable(folder, fd)
            adapter, name = pulled.manifest.adapter, _WEIGHTS[pulled.manifest.artifact]
            with _aside(fd) as (aside, weights), _aside(fd) as (described, text), _aside(fd) as (configured, config):
                _copy(pulled, weights)
                _prove(pulled, weights)
                _write(text, encode(pulled.manifest))
                _write(config, b"" if adapter is None else adapter.config.encode())
                with _locked(folder, fd):
                    _check_replaceable(folder, fd)
                    others = [each for each in _WEIGHTS.values() if each != name]
                    for old in (_MANIFEST, _CONFIG, *others):  # never does one stand beside weights not its own
                        with contextlib.suppress(FileNotFoundError):
                            os.unlink(old, dir_fd=fd)
                    os.replace(aside, name, src_dir_fd=fd, dst_dir_fd=fd)
                    if adapter is not None:
                        os.replace(configured, _CONFIG, src_dir_fd=fd, dst_dir_fd=fd)
                    os.replace(described, _MANIFEST, src_dir_fd=fd, dst_dir_fd=fd)
    except OSError as error:
        raise StorageError(
            f"{folder} could not be written: {error}", state_left="its weights are the old ones"
        ) from error
    return folder / name


# --- what is written ---


def _copy(pulled: StagedVersion, weights: int) -> None:
    with os.fdopen(open_own(pulled.segment, os.O_RDONLY), "rb") as source:
        _take_room(weights, os.fstat(source.fileno()).st_size)
        with os.fdopen(os.dup(weights), "wb") as target:
            shutil.copyfileobj(source, target, _COPY_BYTES)
            target.flush()
            os.fsync(weights)


def _write(fd: int, data: bytes) -> None:
    with os.fdopen(os.dup(fd), "wb") as target:
        target.write(data)
        target.flush()
        os.fsync(fd)


def _take_room(fd: int, size_bytes: int) -> None:
    try:
        os.posix_fallocate(fd, 0, size_bytes)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):  # a file system that takes no room in advance
            raise


def _prove(pulled: StagedVersion, weights: int) -> None:
    """Every digest that will stand beside it is of the bytes in the file."""
    manifest = pulled.manifest
    mapped = mmap.mmap(weights, os.fstat(weights).st_size, access=mmap.ACCESS_COPY)  # goes with its last tensor
    flat = torch.frombuffer(mapped, dtype=torch.uint8)
    tensors = {
        spec.name: tensor_from_bytes(
            flat[pulled.offsets[spec.name] : pulled.offsets[spec.name] + spec.nbytes],
            dtype=spec.dtype,
            shape=spec.shape,
        )
        for spec in manifest.tensors
    }
    found = tensor_digests(tensors)
    held = (HeldTensor(spec=spec, box=None, tensor=tensors[spec.name]) for spec in manifest.tensors)
    whole = digest_of(held, manifest.tensors)
    wrong = next((spec.name for spec in manifest.tensors if found[spec.name] != manifest.digest(spec.name)), None)
    if wrong is not None or whole != manifest.model_digest:
        raise DigestMismatchError(
            "what was written is not what was published",
            parameter=wrong,
            version=str(manifest.version),
            state_left="the folder is as it was",
        )


# --- whose it is ---


@contextlib.contextmanager
def _opened(folder: Path) -> Iterator[int]:
    try:
        fd = open_folder(str(folder))
    except SharedMemoryError as error:
        raise ConfigError(error.message) from error
    try:
        yield fd
    finally:
        os.close(fd)


def _check_replaceable(folder: Path, fd: int) -> None:
    """Raises ConfigError where something lies in the way that no pull of this user has written; weights of another name
    too, since who loads the folder could take those, or mix them."""
    others = [name for name in os.listdir(fd) if name.endswith((".safetensors", ".safetensors.index.json"))]
    if strange := sorted(name for name in others if name not in _WEIGHTS.values() and not name.startswith(_ASIDE)):
        raise ConfigError(
            f"{folder / strange[0]} is part of a checkpoint that is there: beside it nobody could tell which weights "
            "count; nothing was changed. Name another folder"
        )
    # a configuration came with a pulled adapter, which is refused with it too; without one it is nobody's
    is_config = _is_config if _WEIGHTS["lora"] in others else None
    weights = ((each, _has_stamp) for each in _WEIGHTS.values())
    for name, is_ours in (*weights, (_MANIFEST, _is_manifest), (_CONFIG, is_config)):
        try:
            if is_own(os.lstat(name, dir_fd=fd)) and is_ours is not None and is_ours(name, fd):
                continue
        except FileNotFoundError:  # or another writer has taken it away just now
            continue
        raise ConfigError(
            f"{folder / name} was not written by a pull of this user: it stays, and nothing was changed; move it away, "
            "or name another folder"
        )


def _has_stamp(name: str, fd: int) -> bool:
    try:
        return read_stamp(memoryview(_head(name, fd, STAMP_WITHIN_BYTES))) is not None
    except InvalidRequestError:
        return False


def _is_manifest(name: str, fd: int) -> bool:
    try:
        decode(_head(name, fd, _MAX_MANIFEST_BYTES), Manifest, what=name)
    except InvalidRequestError:
        return False
    return True


def _is_config(name: str, fd: int) -> bool:
    try:
        Adapter(config=_head(name, fd, _MAX_MANIFEST_BYTES).decode())
    except (InvalidRequestError, UnicodeDecodeError):
        return False
    return True


def _head(name: str, fd: int, num_bytes: int) -> bytes:
    opened = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=fd)
    with os.fdopen(opened, "rb") as file:
        return file.read(num_bytes)


# --- files aside ---


def aside_name() -> str:
    """A new name for a file aside; `is_aside` knows it again, and nobody calls a file of his own so by chance."""
    digits = secrets.token_hex(_ASIDE_DIGITS // 2)
    return f"{_ASIDE}{digits}-{zlib.crc32(digits.encode()):08x}"


def is_aside(name: str) -> bool:
    """Whether `aside_name` made it."""
    digits, _, check = name.removeprefix(_ASIDE).partition("-")
    return (
        name.startswith(_ASIDE)
        and len(digits) == _ASIDE_DIGITS
        and check == f"{zlib.crc32(digits.encode('utf-8', 'surrogateescape')):08x}"
    )


@contextlib.contextmanager
def _aside(fd: int) -> Iterator[tuple[str, int]]:
    """A new file of ours alone, and its descriptor; locked while we live, and gone at the end unless it was renamed."""
    name, descriptor = _new_file(fd)
    try:
        yield name, descriptor
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=fd)
        os.close(descriptor)


def _new_file(fd: int) -> tuple[str, int]:
    while True:
        name = aside_name()
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(name, flags, 0o644, dir_fd=fd)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(descriptor).st_nlink:
                return name, descriptor
        except BlockingIOError:
            pass
        except OSError:  # a file system without locks: nobody can sweep there either
            return name, descriptor
        os.close(descriptor)  # somebody swept it before it was locked, or is about to


def _sweep(fd: int) -> None:
    """Removes what a killed writer of this user left: files aside that nobody has locked."""
    for name in os.listdir(fd):
        if not is_aside(name):
            continue
        with contextlib.suppress(OSError):
            descriptor = os.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=fd)
            try:
                if is_own(os.fstat(descriptor)):
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    os.unlink(name, dir_fd=fd)
            finally:
                os.close(descriptor)


@contextlib.contextmanager
def _locked(folder: Path, fd: int) -> Iterator[None]:
    """Two renames of one writer, and none of another in between."""
    descriptor = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=fd)
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
