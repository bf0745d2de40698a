"""The delta codec: what changed between two versions of a source's bytes, as a blob, and back.

The sending half is here, `encode_delta`; the receiving half is `DeltaReader`. Both know bytes and units, no tensors, no
versions and no transport. The design is design/0010-deltas.md, the blob's bytes are docs/delta-format.md.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from weightsync.codec.delta_cost import CostModel, Work
from weightsync.codec.delta_format import Form, write_head
from weightsync.codec.delta_reader import coding
from weightsync.codec.delta_units import MAX_UNIT_BYTES, Unit
from weightsync.errors import DeltaTooLargeError, InvalidRequestError
from weightsync.threads import map_all

if TYPE_CHECKING:
    from weightsync.codec.delta_planes import Found, Payload, Scratch

Search = Callable[[npt.NDArray[np.uint8], npt.NDArray[np.uint8], Unit, int, npt.NDArray[np.uint8]], "Found | None"]
"""What finds changes: (old, new, unit, room, scratch) -> them, or None where there are more than `room`.
By default `delta_planes.find_changes`; beside a GPU `device_search.DeviceSearch`."""


class EncodedDelta:
    """A delta in private memory, ready to be written into a segment. Immutable.

    Attributes:
        units: the line of each unit in its table, in order.
        num_changed: elements that differ; of a full unit all, as nobody counted them to the end.
        base: what it starts from; `result`: what it ends in, or None.
    """

    def __init__(
        self, units: Sequence[Unit], payloads: Sequence[Payload], *, base: bytes, result: bytes | None, seconds: float
    ) -> None:
        self._pieces = [write_head(units, [payload.entry for payload in payloads], base=base, result=result)]
        self._pieces += [piece for payload in payloads for piece in payload.pieces]
        self.nbytes = sum(len(piece) for piece in self._pieces)
        self.units = tuple(payload.entry for payload in payloads)
        self.num_elements = sum(unit.num_elements for unit in units)
        self.num_changed = sum(unit.num_changed for unit in self.units)
        self.base, self.result, self.seconds = base, result, seconds

    def write_into(self, memory: memoryview) -> None:
        """Writes the blob.

        Args:
            memory: writable bytes, exactly `nbytes` of them.

        Raises:
            InvalidRequestError: it is not of that size. Nothing was written.
        """
        target = memory.cast("B")
        if target.nbytes != self.nbytes or target.readonly:
            raise InvalidRequestError(f"a delta of {self.nbytes} bytes needs that many writable ones")
        at = 0
        for piece in self._pieces:
            target[at : at + len(piece)] = piece
            at += len(piece)

    def to_bytes(self) -> bytes:
        return b"".join(self._pieces)


def encode_delta(
    old: npt.NDArray[np.uint8],
    new: npt.NDArray[np.uint8],
    units: Sequence[Unit],
    *,
    costs: CostModel,
    base: bytes,
    result: bytes | None = None,
    check_cancelled: Callable[[], None] = lambda: None,
    max_bytes: int | None = None,
    search: Search | None = None,
) -> EncodedDelta:
    """What makes `new` of `old`, on all cores.

    Neither may be written until this returns or raises. Memory on top: the blob, and for each core a few bytes an
    element of one unit.

    Args:
        old: the source's bytes before, 1-D and contiguous, of any alignment; byte 0 is the source's data start.
        new: as many bytes, after.
        units: what they are cut into, in order; bytes outside of all units are not looked at.
        costs: what decides each unit's form; it learns from this call.
        base: 16 bytes that name `old`.
        result: 16 bytes that name `new`, where they are known.
        check_cancelled: called before each unit, from several threads; what it raises ends the call.
        max_bytes: payloads of more bytes than this end the call.
        search: what finds the changes; the compiled loop where not given.

    Raises:
        InvalidRequestError: sizes do not fit.
        DeltaTooLargeError: more than `max_bytes` would be needed.
        MissingDependencyError: numba or zstandard is not installed.
        Exception: what `check_cancelled` raised. In every case no thread touches `old` or `new` any more, and nothing
            is left.
    """
    _check_request(old, new, units, base, result)
    started = time.perf_counter()
    scratch: Scratch = coding().Scratch(units)
    lock = threading.Lock()
    total = 0

    def one(unit: Unit) -> Payload:
        nonlocal total
        check_cancelled()
        room = scratch.take()
        payload = _encode_unit(old[unit.start : unit.end], new[unit.start : unit.end], unit, costs, room, search)
        scratch.put(room)
        with lock:
            total += payload.entry.nbytes
            if max_bytes is not None and total > max_bytes:
                raise DeltaTooLargeError(f"a delta takes more than the {max_bytes} bytes that it may have")
        return payload

    payloads = map_all(one, units)
    return EncodedDelta(units, payloads, base=base, result=result, seconds=time.perf_counter() - started)


def _encode_unit(
    old: npt.NDArray[np.uint8],
    new: npt.NDArray[np.uint8],
    unit: Unit,
    costs: CostModel,
    room: npt.NDArray[np.uint8],
    search: Search | None,
) -> Payload:
    from weightsync.codec import delta_planes

    changes = (search or delta_planes.find_changes)(old, new, unit, costs.most_changed(unit), room)
    started = time.thread_time()
    if changes is None:
        return _encode_full(new, unit, costs)
    number = len(changes.positions)
    if not number:
        return delta_planes.payload(Form.UNCHANGED, ())
    payload = delta_planes.planes_payload(unit, changes)
    costs.observe_encode(Work.SPARSE, number, time.thread_time() - started)
    costs.observe_planes(unit, number, payload.entry.nbytes)
    return _encode_full(new, unit, costs) if costs.prefers_full(unit, number, payload.entry.nbytes) else payload


def _encode_full(new: npt.NDArray[np.uint8], unit: Unit, costs: CostModel) -> Payload:
    from weightsync.codec import delta_planes

    started = time.thread_time()
    if not costs.packs_full(unit):
        payload = delta_planes.full_payload(unit, new)
        costs.observe_encode(Work.FULL, unit.nbytes, time.thread_time() - started)
        return payload
    payload = delta_planes.packed_payload(unit, new)
    costs.observe_encode(Work.PACKED, unit.nbytes, time.thread_time() - started)
    costs.observe_packed(unit, payload.entry.nbytes)
    return payload


def _check_request(
    old: npt.NDArray[np.uint8], new: npt.NDArray[np.uint8], units: Sequence[Unit], base: bytes, result: bytes | None
) -> None:
    for data in (old, new):
        if data.dtype != np.uint8 or data.ndim != 1 or not data.flags.c_contiguous or len(data) != len(old):
            raise InvalidRequestError("a delta is made of two equally long, contiguous arrays of bytes")
    if len(base) != 16 or (result is not None and len(result) != 16):
        raise InvalidRequestError("base and result of a delta are 16 bytes each")
    end = 0
    for unit in units:
        whole = 0 < unit.nbytes <= MAX_UNIT_BYTES and unit.nbytes % unit.kind.width_bytes == 0
        if not whole or unit.start < end or unit.end > len(old):
            raise InvalidRequestError(f"unit {unit} does not fit {len(old)} bytes, or is out of order")
        end = unit.end


def warm_up() -> None:
    """Loads the compiled kernels, once a process: half a second, and where no cache on disk has them some
    12 seconds, which whoever first encodes or decodes would pay otherwise.

    Raises:
        ImportError: numba or zstandard is not installed.
    """
    from weightsync.codec import delta_planes  # noqa: F401
