"""SegmentWriter: copies one rank's parts to their places in its host's segment, its own or its leader's, converting on
the way. One copy of each byte.

On CUDA the segment's pages are registered with the driver (pinned), and parts are copied on a stream of their own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import threading
from collections.abc import Callable, Sequence

import numpy as np
import torch

from weightsync.addresses import Int64s
from weightsync.errors import InvalidRequestError
from weightsync.many import MANY, plain_addresses
from weightsync.memory import SharedSegment
from weightsync.memory.folder import path_of
from weightsync.module_walk import picker
from weightsync.plan.safetensors import Layout
from weightsync.tensors import cut_out, has_its_memory, tensor_from_bytes, torch_dtype
from weightsync.trainer.buffer import WriteTurn
from weightsync.transfer.ipc_copy import Copier
from weightsync.types import Box, TensorSpec, Version

_MAX_MAPPED = 6  # a host has three segments at most; beyond that some have been replaced
_MAX_QUEUED_BYTES = 256 << 20
_SMALL_BYTES = 256 << 10
"""Below, a copy costs less than what is done for it; those are handed to torch all at once."""

Place = tuple[str, Box | None]
"""A tensor's name, and which part of it; None: all of it."""

_logger = logging.getLogger(__name__)


@dataclasses.dataclass(kw_only=True)
class _Runs:
    """Places that lie in one piece, as one loop copies them.

    Attributes:
        offsets, sizes: of each, in bytes.
        dtypes, sizes_bytes: what each tensor has to be.
        maybe_complex: whether any is of complex numbers.
        total_bytes: of all.
        pick: takes their tensors out of those of all places.
        others: the places that are not among them.
        seen: the tensors' addresses at the last copy.
    """

    offsets: Int64s
    sizes: Int64s
    total_bytes: int
    dtypes: list[torch.dtype]
    sizes_bytes: list[int]
    maybe_complex: bool
    pick: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]
    others: tuple[int, ...]
    seen: Int64s | None = None


class SegmentWriter:
    """Aimed at a segment, then given parts. One thread; `let_go` from any."""

    def __init__(self) -> None:
        self._mapped: dict[str, SharedSegment] = {}  # the leader's, by name
        self._flat: torch.Tensor | None = None
        self._places: dict[str, list[TensorSpec]] = {}
        self._parts: Sequence[TensorSpec] | None = None
        # What the driver knows, by address. Held: were it unmapped, other memory could come to lie at that address.
        self._pinned: dict[int, tuple[torch.Tensor, torch.device | None]] = {}
        self._lock = threading.Lock()  # of what `let_go` changes
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._copier = Copier()
        self._queued: list[tuple[torch.Tensor, int]] = []  # what needs no conversion, and its first byte
        self._queued_bytes = 0
        self._places_of: Sequence[Place] = ()
        self._targets: dict[int, list[torch.Tensor]] = {}  # of these places, by the segment's address
        self._runs: _Runs | None = None  # of these places

    def aim(self, segment: str, layout: Layout, turn: WriteTurn | None, model_id: str) -> None:
        """What is written next goes into that segment.

        Args:
            turn: its owner's right to write it, which first takes its stamp away; None on the other ranks.

        Raises:
            SharedMemoryError: it is gone: its owner is.
        """
        if turn is not None:
            memory = turn.segment.memory
            write_header(memory, layout, None, model_id)
        else:
            self._let_go_of_gone()
            if segment not in self._mapped:
                if len(self._mapped) >= _MAX_MAPPED:
                    self.close()
                self._mapped[segment] = SharedSegment(segment)
            memory = self._mapped[segment].memory
        parts = layout.parts
        with self._lock:
            self._flat = torch.frombuffer(memory, dtype=torch.uint8)
        self._queued, self._queued_bytes = [], 0
        if parts is not self._parts:
            self._parts = parts
            self._places = {}
            self._places_of, self._targets, self._runs = (), {}, None
            for part in parts:
                self._places.setdefault(part.name, []).append(part)

    @torch.no_grad()
    def write(self, name: str, box: Box | None, tensor: torch.Tensor) -> int:
        """Copies one part. It is complete, and the tensor may change, after `finish`.

        Args:
            box: which part of it; None: all of it.
            tensor: any dtype that converts to the place's, any strides.

        Returns:
            Bytes that were written.

        Raises:
            InvalidRequestError: the layout has no place for it, or its memory ends before it does.
        """
        target = self._target(name, box)
        if tuple(target.shape) != tuple(tensor.shape):
            raise InvalidRequestError(f"{tuple(tensor.shape)} does not fit {tuple(target.shape)}", parameter=name)
        _check_memory(name, tensor)
        if tensor.is_cuda:
            self._copy_from_cuda(target, tensor)
        elif tensor.dtype == target.dtype and tensor.is_contiguous() and target.is_contiguous():
            assert self._flat is not None
            self._queued.append((tensor, target.data_ptr() - self._flat.data_ptr()))
            self._queued_bytes += target.nbytes
            if self._queued_bytes > _MAX_QUEUED_BYTES:  # what was made for this copy alone must not pile up
                self._flush()
        else:
            target.copy_(tensor)
        return target.nbytes

    @torch.no_grad()
    def write_places(self, places: Sequence[Place], tensors: Sequence[torch.Tensor]) -> int:
        """`write` for many, at the same places again and again: what a place is in a segment is found out once.

        Args:
            places: the same object as before, where nothing has changed.
            tensors: one a place, of its shape.

        Raises:
            InvalidRequestError: the layout has no place for one.
        """
        if not places:  # of a host that holds nothing, which has no segment
            return 0
        assert self._flat is not None
        if places is not self._places_of:
            self._places_of, self._targets, self._runs = places, {}, self._planned_runs(places)
        runs = self._runs
        if runs is None or not self._write_runs(runs, tensors):
            return self._write_each(places, tensors)
        copied_bytes = runs.total_bytes
        for index in runs.others:
            copied_bytes += self.write(*places[index], tensors[index])
        return copied_bytes

    def _write_runs(self, runs: _Runs, tensors: Sequence[torch.Tensor]) -> bool:
        """Copies all of `runs` by one loop; False, and nothing is written, where one of them is not plain memory as it
        is wanted.
        """
        assert self._flat is not None
        tensors = runs.pick(tensors)
        addresses = plain_addresses(
            tensors, dtypes=runs.dtypes, sizes_bytes=runs.sizes_bytes, maybe_complex=runs.maybe_complex
        )
        if addresses is None:
            return False
        new = range(len(tensors)) if runs.seen is None else np.flatnonzero(addresses != runs.seen).tolist()
        if not all(has_its_memory(tensors[index]) for index in new):  # whose address is as before was looked at
            return False
        runs.seen = addresses
        self._copier.copy_runs(runs.offsets + self._flat.data_ptr(), addresses, runs.sizes)
        return True

    def _planned_runs(self, places: Sequence[Place]) -> _Runs | None:
        """Those of `places` that are small, and lie in one piece; None where they are few."""
        indexes: list[int] = []
        parts: list[TensorSpec] = []
        for index, (name, box) in enumerate(places):
            part = self._part(name, box)
            if part.nbytes <= _SMALL_BYTES and (part.box is not None or box is None):
                indexes.append(index)
                parts.append(part)
        if len(indexes) < MANY:
            return None
        taken = set(indexes)
        sizes = np.array([part.nbytes for part in parts], dtype=np.int64)
        dtypes = [torch_dtype(part.dtype) for part in parts]
        return _Runs(
            offsets=np.array([part.offset for part in parts], dtype=np.int64),
            sizes=sizes,
            total_bytes=int(sizes.sum()),
            dtypes=dtypes,
            sizes_bytes=sizes.tolist(),
            maybe_complex=any(dtype.is_complex for dtype in set(dtypes)),
            pick=picker(indexes, len(places)),
            others=tuple(index for index in range(len(places)) if index not in taken),
        )

    def _write_each(self, places: Sequence[Place], tensors: Sequence[torch.Tensor]) -> int:
        assert self._flat is not None
        start = self._flat.data_ptr()
        targets = self._targets.get(start)
        if targets is None:
            targets = self._targets[start] = [self._target(name, box) for name, box in places]
        small: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        copied_bytes = small_bytes = 0
        for place, target, tensor in zip(places, targets, tensors, strict=True):
            nbytes = target.nbytes
            if tensor.is_cuda or nbytes > _SMALL_BYTES:
                copied_bytes += self.write(*place, tensor)
                continue
            _check_memory(place[0], tensor)
            small[0].append(target)
            small[1].append(tensor)
            small_bytes += nbytes
        if small[0]:
            torch._foreach_copy_(*small)
        return copied_bytes + small_bytes

    def finish(self) -> None:
        """Returns when everything has been written."""
        self._flush()
        for stream in self._streams.values():
            stream.synchronize()

    def let_go(self, memory: memoryview) -> None:
        """Lets go of one segment, which is not aimed at again: its memory is about to be given back."""
        address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
        with self._lock:
            if self._flat is not None and self._flat.data_ptr() == address:
                self._flat = None
        self._targets.pop(address, None)
        self._unpin(address)

    def close(self) -> None:
        """Lets go of all segments; it works again afterwards. Idempotent."""
        self._flat = None
        self._targets = {}
        self._queued, self._queued_bytes = [], 0
        for address in list(self._pinned):
            self._unpin(address)
        self._copier.close()
        while self._mapped:
            self._mapped.popitem()[1].close()

    def _let_go_of_gone(self) -> None:
        """Segments that the leader has given back: while their pages are pinned, they stay in use."""
        for name in [name for name in self._mapped if not os.path.exists(path_of(name))]:
            with self._mapped.pop(name) as mapped:
                self.let_go(mapped.memory)

    def _flush(self) -> None:
        queued, self._queued, self._queued_bytes = self._queued, [], 0
        if queued:
            assert self._flat is not None
            self._copier.copy([tensor for tensor, _ in queued], [offset for _, offset in queued], self._flat)

    def _part(self, name: str, box: Box | None) -> TensorSpec:
        """The part of the layout that has room for it."""
        for part in self._places.get(name, ()):
            if part.box is None or part.box == box:
                return part
        raise InvalidRequestError(f"the segment has no place for {box or 'all'} of it", parameter=name)

    def _target(self, name: str, box: Box | None) -> torch.Tensor:
        assert self._flat is not None
        part = self._part(name, box)
        flat = self._flat[part.offset : part.offset + part.nbytes]
        shape = part.shape if part.box is None else part.box.shape
        whole = tensor_from_bytes(flat, dtype=part.dtype, shape=shape)
        if part.box is not None or box is None:
            return whole
        return cut_out(whole, box)

    def _copy_from_cuda(self, target: torch.Tensor, tensor: torch.Tensor) -> None:
        assert self._flat is not None
        stream = self._streams.get(tensor.device)
        if stream is None:
            stream = self._streams[tensor.device] = torch.cuda.Stream(tensor.device)  # type: ignore[no-untyped-call]
        self._pin(self._flat, tensor.device)
        stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(stream):
            # converted on the device, so that half the bytes cross the bus, into memory that the stream then owns
            converted = tensor.to(target.dtype)
            target.copy_(converted, non_blocking=True)
            converted.record_stream(stream)

    def _pin(self, flat: torch.Tensor, device: torch.device) -> None:
        """Registers the segment's pages once: a copy from the device then needs no bounce buffer."""
        address = flat.data_ptr()
        if address in self._pinned:
            return
        code = int(torch.cuda.cudart().cudaHostRegister(address, flat.numel(), 0))  # type: ignore[no-untyped-call]
        if code != 0:
            _logger.warning("the segment could not be pinned (CUDA error %s): copies go through a bounce buffer", code)
            with contextlib.suppress(RuntimeError):  # CUDA keeps the error for the next kernel, which is this one
                torch.ones(1, device=device)
        self._pinned[address] = flat, device if code == 0 else None

    def _unpin(self, address: int) -> None:
        pinned = self._pinned.pop(address, None)
        if pinned is not None and pinned[1] is not None:
            with torch.cuda.device(pinned[1]):  # another thread's own device may be one that this rank never uses
                torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]


def write_header(memory: memoryview, layout: Layout, stamp: Version | None, model_id: str) -> None:
    """Writes a segment's header: with the version that lies there, or, while it is written, with none."""
    header = layout.header(stamp, model_id)
    memory[: len(header)] = header


def _check_memory(name: str, tensor: torch.Tensor) -> None:
    """Raises InvalidRequestError where a tensor's storage was freed or shrunk: what is there now is not published."""
    if not has_its_memory(tensor):
        raise InvalidRequestError(
            "the tensor's memory ends before it does: its storage was freed, or shrunk", parameter=name
        )
