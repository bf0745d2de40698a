"""AdapterFolder: one version of an adapter as a folder in shared memory, as PEFT, vLLM and SGLang load it.

    adapter_config.json          the publication's, as it was published
    adapter_model.safetensors    its tensors, copied once from the staging or from the trainer's shared memory

The staging is written again for the next version, so the folder has its own bytes. It is filled by one process, sealed,
and never written again.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable

from weightsync.errors import ManifestMismatchError, NoRoomError, SharedMemoryError, UnsupportedError
from weightsync.handles.lora_messages import CONFIG_FILE, MANIFEST_FILE, TENSORS_FILE
from weightsync.memory import MappedSegment, PrivateFolder, host_nonce
from weightsync.net.messages import encode
from weightsync.plan.safetensors import plan_layout
from weightsync.types import (
    AnyUpdateRequest,
    CudaIpcWeightUpdateRequest,
    Manifest,
    PackedCudaIpcWeightUpdateRequest,
    SharedMemoryHandle,
)
from weightsync.types.closing import Closing
from weightsync.types.requests import MemoryHandle


class AdapterFolder(Closing):
    """Made empty; `take` fills it, `sealed` ends that.

    Args:
        manifest: of the version.

    Raises:
        NoRoomError: shared memory is full. Nothing is left.
        SharedMemoryError: it can't be made.
    """

    def __init__(self, manifest: Manifest) -> None:
        assert manifest.adapter is not None
        self._config = manifest.adapter.config
        self._layout = plan_layout(manifest.tensors)
        self._places = {part.name: part for part in self._layout.parts}
        self._missing = {spec.name for spec in manifest.tensors}
        self._nonce = host_nonce()
        self._folder = PrivateFolder(shared=True)
        self._fd = -1
        try:
            path = f"{self._folder.path}/{TENSORS_FILE}"
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            os.posix_fallocate(self._fd, 0, self._layout.total_bytes)
        except OSError as error:
            self.close()
            raise NoRoomError(
                f"an adapter of {self._layout.total_bytes} bytes has no room in shared memory: {error.strerror}",
                state_left="nothing was changed",
            ) from error
        except BaseException:
            self.close()
            raise

    def take(self, update: AnyUpdateRequest) -> None:
        """Copies a chunk's tensors to their places.

        Raises:
            UnsupportedError: its bytes don't lie in shared memory of this host.
            ManifestMismatchError: a tensor that the manifest has not, or has otherwise.
        """
        if isinstance(update, PackedCudaIpcWeightUpdateRequest):
            handle = _shared(update.handles, self._nonce)
            self._copy(handle, zip(update.names, update.dtypes, update.shapes, update.offsets, strict=True))
        elif isinstance(update, CudaIpcWeightUpdateRequest):
            for name, dtype, shape, one in zip(
                update.names, update.dtypes, update.shapes, update.handles[0], strict=True
            ):
                self._copy(_shared((one,), self._nonce), [(name, dtype, shape, 0)])
        else:
            raise _elsewhere()

    def sealed(self, manifest: Manifest, *, with_manifest: bool = False) -> str:
        """Writes what is beside the tensors; the folder's name.

        Args:
            manifest: of what was published.
            with_manifest: it is written, too, for workers that prove what they load.

        Raises:
            ManifestMismatchError: a tensor has not come.
            NoRoomError: shared memory is full.
        """
        if self._missing:
            raise ManifestMismatchError(
                f"{len(self._missing)} tensors have not come",
                parameter=min(self._missing),
                version=str(manifest.version),
            )
        header = self._layout.header(manifest.version, manifest.model_id)
        os.pwrite(self._fd, header, 0)
        self._write(CONFIG_FILE, self._config.encode(), manifest)
        if with_manifest:
            self._write(MANIFEST_FILE, encode(manifest), manifest)
        os.fchmod(self._fd, stat.S_IRUSR)
        os.close(self._fd)
        self._fd = -1
        return self._folder.name

    def hand_over(self) -> None:
        """The server has taken it over."""
        self._folder.hand_over()

    def close(self) -> None:
        """Removes it, unless it was handed over. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self._folder.close()

    def _write(self, file: str, body: bytes, manifest: Manifest) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        opened = os.open(f"{self._folder.path}/{file}", flags, 0o600)
        try:
            left = memoryview(body)
            while left:
                left = left[os.write(opened, left) :]
            os.fchmod(opened, stat.S_IRUSR)
        except OSError as error:
            raise NoRoomError(
                f"an adapter's configuration has no room in shared memory: {error.strerror}",
                version=str(manifest.version),
                state_left="nothing was loaded",
            ) from error
        finally:
            os.close(opened)

    def _copy(self, handle: SharedMemoryHandle, tensors: Iterable[tuple[str, str, tuple[int, ...], int]]) -> None:
        if not handle.size_bytes:
            for name, *_ in tensors:
                self._missing.discard(name)
            return
        with MappedSegment(handle.name, need_bytes=handle.offset_bytes + handle.size_bytes) as segment:
            memory = segment.memory
            for name, dtype, shape, offset in tensors:
                place = self._places.get(name)
                if place is None or (place.dtype, tuple(place.shape)) != (dtype, tuple(shape)):
                    raise ManifestMismatchError("a chunk has what the manifest has not", parameter=name)
                start = handle.offset_bytes + offset
                data, done = memory[start : start + place.nbytes], 0
                while done < place.nbytes:
                    done += os.pwrite(self._fd, data[done:], place.offset + done)
                self._missing.discard(name)
            memory.release()


def _shared(handles: Iterable[MemoryHandle], nonce: str) -> SharedMemoryHandle:
    for each in handles:
        if isinstance(each, SharedMemoryHandle):
            if each.host_nonce != nonce:
                raise SharedMemoryError("the staging lies in shared memory that this process does not see")
            return each
    raise _elsewhere()


def _elsewhere() -> UnsupportedError:
    return UnsupportedError(
        "an adapter goes to an engine through shared memory of its host: publish it and run weightsync serve there, or "
        "push from that host with strategy packed_cuda_ipc",
        state_left="nothing was loaded",
    )
