"""CUDA IPC through the driver's own library: memory of one process, opened by another on the same device.

The driver (`libcuda.so.1`) and not the runtime, because there is one of it in a process, whatever CUDA runtime torch
was built with. Torch's own handles are not used: they need a pickle and torch's reference counting on both ends.

Buckets are allocated by the driver, beside torch's allocator: that works with expandable segments as well, and a handle
opens nothing but the bucket. The driver leaves open what happens to memory that is freed while another process has it
open, so a bucket that has become too small is kept until the lender closes.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from typing import Any

import torch

from weightsync.errors import SharedMemoryError, TransferAbortedError, TransferError, UnsupportedError
from weightsync.transfer.ipc_handles import BLOCK_BYTES, MemoryBorrower, MemoryLender
from weightsync.types import CudaMemoryHandle, MemoryHandle

_HANDLE_BYTES = 64
_NO_HANDLE = "00" * _HANDLE_BYTES  # of a tensor without bytes: never opened
_LAZY_PEER_ACCESS = 1
_INVALID_VALUE, _OUT_OF_MEMORY = 1, 2


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_ubyte * _HANDLE_BYTES),)


class CudaDriver:
    """The six calls that are needed. The calling thread has the device's context (`torch.cuda.device`).

    Raises:
        UnsupportedError: there is no NVIDIA driver.
    """

    def __init__(self) -> None:
        try:
            library: Any = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise UnsupportedError(f"CUDA IPC needs NVIDIA's driver: {error}") from error
        pointer, size = ctypes.c_uint64, ctypes.c_size_t
        for name, kinds in {
            "cuMemAlloc_v2": (ctypes.POINTER(pointer), size),
            "cuMemFree_v2": (pointer,),
            "cuMemGetAddressRange_v2": (ctypes.POINTER(pointer), ctypes.POINTER(size), pointer),
            "cuIpcGetMemHandle": (ctypes.POINTER(_Handle), pointer),
            "cuIpcOpenMemHandle_v2": (ctypes.POINTER(pointer), _Handle, ctypes.c_uint),
            "cuIpcCloseMemHandle": (pointer,),
            "cuGetErrorString": (ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)),
        }.items():
            function = getattr(library, name)
            function.argtypes, function.restype = kinds, ctypes.c_int
        self._library = library

    def allocate(self, size_bytes: int) -> int:
        """New memory of the current device; torch's allocator gives up for it what it keeps and does not use.

        Raises:
            SharedMemoryError: the device has no room.
        """
        found = ctypes.c_uint64()
        code = self._library.cuMemAlloc_v2(ctypes.byref(found), size_bytes)
        if code == _OUT_OF_MEMORY:
            torch.cuda.empty_cache()
            code = self._library.cuMemAlloc_v2(ctypes.byref(found), size_bytes)
        if code:
            free, total = torch.cuda.mem_get_info()
            raise SharedMemoryError(
                f"a bucket of {size_bytes} bytes could not be allocated on the GPU ({self._words(code)}): {free} of "
                f"{total} bytes are left beside what torch's allocator uses. Each of a few buckets is as large as the "
                "largest chunk: lower chunk_bytes where that is more than the largest tensor, or use strategy cuda_ipc",
                state_left="nothing was allocated",
            )
        return found.value

    def free(self, address: int) -> None:
        self._library.cuMemFree_v2(address)

    def extent_of(self, address: int) -> tuple[int, int]:
        """Where the allocation that holds `address` begins, and its bytes."""
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        self._check(
            self._library.cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), address),
            "the allocation that a tensor lies in could not be found",
        )
        return base.value, size.value

    def handle_of(self, base: int) -> str:
        """The handle, in hex, of the allocation that begins at `base`.

        Raises:
            UnsupportedError: it can't be exported: torch's expandable segments, or another pool's memory.
        """
        handle = _Handle()
        code = self._library.cuIpcGetMemHandle(ctypes.byref(handle), base)
        if code == _INVALID_VALUE:
            raise UnsupportedError(
                "the driver can't lend this tensor's memory to another process: it is of torch's expandable segments, "
                "or of a pool. Take expandable_segments out of PYTORCH_CUDA_ALLOC_CONF, or use strategy "
                "packed_cuda_ipc, which copies each chunk into a bucket of its own"
            )
        self._check(code, "no IPC handle for a tensor's memory")
        return bytes(handle.reserved).hex()

    def open(self, handle: str) -> int:
        """Maps another process's allocation; gives its address here."""
        found = ctypes.c_uint64()
        passed = _Handle((ctypes.c_ubyte * _HANDLE_BYTES).from_buffer_copy(bytes.fromhex(handle)))
        self._check(
            self._library.cuIpcOpenMemHandle_v2(ctypes.byref(found), passed, _LAZY_PEER_ACCESS),
            "the trainer's GPU memory could not be opened: it is gone, or both are one process",
        )
        return found.value

    def close(self, address: int) -> None:
        self._library.cuIpcCloseMemHandle(address)

    def _check(self, code: int, what: str) -> None:
        if code:
            raise TransferError(f"{what}: {self._words(code)}")

    def _words(self, code: int) -> str:
        text = ctypes.c_char_p()
        self._library.cuGetErrorString(code, ctypes.byref(text))
        return f"CUDA error {code}, {(text.value or b'unknown').decode()}"


def device_uuid(device: torch.device) -> str:
    """The GPU's name for itself: the same in every process, whatever index it has there."""
    return str(torch.cuda.get_device_properties(device).uuid)


class CudaLender(MemoryLender):
    """Lends memory of one GPU: buckets, and tensors where they lie.

    Args:
        device: with an index.
    """

    lends_in_place = True
    outlives_failure = True  # engines may have the buckets open still

    def __init__(self, device: torch.device, num_slots: int, *, driver: CudaDriver | None = None) -> None:
        self._device = device
        self._driver = driver or CudaDriver()
        self._uuid = device_uuid(device)
        self.place = f"GPU {self._uuid}"
        self._buckets: list[tuple[int, int, str] | None] = [None] * num_slots  # address, bytes, handle
        self._outgrown: list[int] = []

    def bucket(self, slot: int, nbytes: int) -> torch.Tensor:
        with torch.cuda.device(self._device):
            _bind(self._device)
            held = self._buckets[slot]
            if held is None or held[1] < nbytes:
                size = -(-max(nbytes, *(other[1] for other in self._buckets if other), 0) // BLOCK_BYTES) * BLOCK_BYTES
                address = self._driver.allocate(size)
                try:
                    handle = self._driver.handle_of(address)
                except BaseException:
                    self._driver.free(address)  # nobody has it
                    raise
                if held is not None:
                    self._outgrown.append(held[0])
                held = self._buckets[slot] = (address, size, handle)
            return _tensor_at(held[0], nbytes, self._device)

    def handle(self, slot: int, offset_bytes: int, size_bytes: int) -> CudaMemoryHandle:
        """See the base class; waits for the copies into the bucket."""
        held = self._buckets[slot]
        assert held is not None
        torch.cuda.current_stream(self._device).synchronize()
        return CudaMemoryHandle(
            device_uuid=self._uuid, handle=held[2], offset_bytes=offset_bytes, size_bytes=size_bytes
        )

    def in_place(self, tensor: torch.Tensor) -> CudaMemoryHandle:
        """See the base class; waits for whatever still writes the tensor on this thread's stream."""
        if tensor.nbytes == 0:
            return CudaMemoryHandle(device_uuid=self._uuid, handle=_NO_HANDLE, offset_bytes=0, size_bytes=0)
        with torch.cuda.device(self._device):
            torch.cuda.current_stream(self._device).synchronize()
            address = tensor.data_ptr()
            base, _ = self._driver.extent_of(address)
            return CudaMemoryHandle(
                device_uuid=self._uuid,
                handle=self._driver.handle_of(base),
                offset_bytes=address - base,
                size_bytes=tensor.nbytes,
            )

    def close(self) -> None:
        addresses = [*self._outgrown, *(held[0] for held in self._buckets if held is not None)]
        self._outgrown, self._buckets = [], [None] * len(self._buckets)
        if addresses:
            with torch.cuda.device(self._device):
                _bind(self._device)
                for address in addresses:
                    self._driver.free(address)


class CudaBorrower(MemoryBorrower):
    """Opens allocations of other processes on one GPU, each once.

    Buckets stay open until it closes. Allocations of the trainer's allocator, whose tensors are lent where they lie,
    are let go of with their chunk: they come and go over there, and what is open here keeps them from being freed.

    Args:
        device: of this worker, with an index.
    """

    def __init__(self, device: torch.device, *, driver: CudaDriver | None = None) -> None:
        self._device = device
        self._driver = driver or CudaDriver()
        self._uuid = device_uuid(device)
        self.place = f"GPU {self._uuid}"
        self._held: set[str] | None = set()

    def can_open(self, handle: MemoryHandle) -> bool:
        return isinstance(handle, CudaMemoryHandle) and handle.device_uuid == self._uuid

    def open(self, handle: MemoryHandle, *, keep: bool) -> torch.Tensor:
        assert isinstance(handle, CudaMemoryHandle)
        if self._held is None:
            raise TransferAbortedError("this receiver was closed")
        if handle.size_bytes == 0:
            return torch.empty(0, dtype=torch.uint8, device=self._device)
        with torch.cuda.device(self._device):
            _bind(self._device)
            if not keep:
                _OPENED.take(self._driver, handle.handle)
            elif handle.handle not in self._held:
                _OPENED.take(self._driver, handle.handle)
                self._held.add(handle.handle)
            try:
                base, size = _OPENED.extent(handle.handle)
                if handle.offset_bytes + handle.size_bytes > size:
                    raise TransferError(
                        f"a handle ends at byte {handle.offset_bytes + handle.size_bytes} of an allocation of {size}"
                    )
                return _tensor_at(base + handle.offset_bytes, handle.size_bytes, self._device)
            except BaseException:
                if not keep:
                    _OPENED.give_back(self._driver, handle.handle)
                raise

    def finish_reading(self) -> None:
        torch.cuda.current_stream(self._device).synchronize()

    def let_go(self, handles: Sequence[MemoryHandle]) -> None:
        with torch.cuda.device(self._device):
            _bind(self._device)
            for handle in handles:
                if isinstance(handle, CudaMemoryHandle) and handle.size_bytes:
                    _OPENED.give_back(self._driver, handle.handle)

    def close(self) -> None:
        """See the base class; called when no chunk is borrowed any more."""
        held, self._held = self._held, None
        if not held:
            return  # the first call of a process on a GPU makes a context there, of hundreds of megabytes
        with torch.cuda.device(self._device):
            _bind(self._device)
            for handle in held:
                _OPENED.give_back(self._driver, handle)


class _Opened:
    """What this process has open: a handle can be opened once in a process, and receivers come and go."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: dict[str, list[int]] = {}  # handle -> address, bytes, number of borrowers

    def take(self, driver: CudaDriver, handle: str) -> None:
        with self._lock:
            entry = self._entries.get(handle)
            if entry is None:
                address = driver.open(handle)
                try:
                    nbytes = driver.extent_of(address)[1]
                except BaseException:
                    driver.close(address)
                    raise
                entry = self._entries[handle] = [address, nbytes, 0]
            entry[2] += 1

    def extent(self, handle: str) -> tuple[int, int]:
        address, nbytes, _ = self._entries[handle]
        return address, nbytes

    def give_back(self, driver: CudaDriver, handle: str) -> None:
        with self._lock:
            entry = self._entries[handle]
            entry[2] -= 1
            if entry[2] == 0:
                del self._entries[handle]
                driver.close(entry[0])


_OPENED = _Opened()


class _Array:
    """Raw memory in the words of the CUDA array interface; torch makes a tensor of it without a copy."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3, "strides": None,
        }  # fmt: skip


def _tensor_at(address: int, nbytes: int, device: torch.device) -> torch.Tensor:
    return torch.as_tensor(_Array(address, nbytes), device=device)


def _bind(device: torch.device) -> None:
    """Makes the device's context that of this thread, as every call of the driver needs it."""
    torch.cuda.current_stream(device).synchronize()
