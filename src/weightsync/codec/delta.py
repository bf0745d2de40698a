"""The delta codec: what changed between two versions of a source's bytes, as a blob, and back.

The sending half is here: `encode_delta`, and `compose`, which makes one delta of two. The receiving half is
`DeltaReader`. Both know bytes and units, no tensors, no versions and no transport. The design is
design/0010-deltas.md, the blob's bytes are docs/delta-format.md.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from weightsync.codec.delta_cost import CostModel, Work
from weightsync.codec.delta_format import Form, write_head
from weightsync.codec.delta_reader import DeltaReader, UnitChange, coding
from weightsync.codec.delta_units import MAX_UNIT_BYTES, UNIT_BYTES, ElementKind, Unit, plan_units
from weightsync.codec.threads import map_all
from weightsync.errors import DeltaTooLargeError, InvalidRequestError

if TYPE_CHECKING:
    from weightsync.codec.delta_planes import Payload, Scratch

Mode = Literal["auto", "planes", "exponent"]

Search = Callable[
    [npt.NDArray[np.uint8], npt.NDArray[np.uint8], Unit, int, npt.NDArray[np.uint8]],
    "tuple[npt.NDArray[np.uint32], npt.NDArray[Any]] | None",
]
"""What finds changes: (old, new, unit, room, scratch) -> positions and steps, or None where there are more than `room`.
By default `delta_planes.find_changes`; beside a GPU `device_search.DeviceSearch`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class UnitStats:
    """What became of one unit.

    Attributes:
        form: how it is written.
        num_changed: elements that differ; all of them in a full form, where nobody counted to the end.
        nbytes: bytes of its payload.
    """

    form: Form
    num_changed: int
    nbytes: int


class EncodedDelta:
    """A delta in private memory, ready to be written into a segment. Immutable.

    Attributes:
        nbytes: bytes of the blob.
        units: what became of each unit, in order.
        num_elements: elements of all units.
        num_changed: those that differ; of full units all.
        seconds: wall time of making it.
        base: what it starts from; `result`: what it ends in, or None.
    """

    def __init__(
        self, units: Sequence[Unit], payloads: Sequence[Payload], *, base: bytes, result: bytes | None, seconds: float
    ) -> None:
        self._pieces = [write_head(units, [payload.entry for payload in payloads], base=base, result=result)]
        self._pieces += [piece for payload in payloads for piece in payload.pieces]
        self.nbytes = sum(len(piece) for piece in self._pieces)
        self.units = tuple(
            UnitStats(form=entry.form, num_changed=entry.num_changed, nbytes=entry.nbytes) for entry, _ in payloads
        )
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
        """The blob."""
        return b"".join(self._pieces)


def encode_delta(
    old: npt.NDArray[np.uint8],
    new: npt.NDArray[np.uint8],
    units: Sequence[Unit],
    *,
    costs: CostModel,
    mode: Mode = "auto",
    base: bytes,
    result: bytes | None = None,
    go_on: Callable[[], None] = lambda: None,
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
        mode: "planes" or "exponent" for every unit that is not better in full, or "auto": the better of both.
        base: 16 bytes that name `old`.
        result: 16 bytes that name `new`, where they are known.
        go_on: called before each unit, from several threads; what it raises ends the call.
        max_bytes: payloads of more bytes than this end the call.
        search: what finds the changes; the compiled loop where not given.

    Raises:
        InvalidRequestError: sizes do not fit.
        DeltaTooLargeError: more than `max_bytes` would be needed.
        MissingDependencyError: numba or zstandard is not installed.
        Exception: what `go_on` raised. In every case no thread touches `old` or `new` any more, and nothing is left.
    """
    _check_request(old, new, units, mode, base, result)
    started = time.perf_counter()
    scratch: Scratch = coding().Scratch(units)
    lock = threading.Lock()
    total = 0

    def one(unit: Unit) -> Payload:
        nonlocal total
        go_on()
        room = scratch.take()
        payload = _encode_unit(old[unit.start : unit.end], new[unit.start : unit.end], unit, costs, mode, room, search)
        scratch.put(room)
        with lock:
            total += payload.entry.nbytes
            if max_bytes is not None and total > max_bytes:
                raise DeltaTooLargeError(f"a delta takes more than the {max_bytes} bytes that it may have")
        return payload

    payloads = map_all(one, units)
    return EncodedDelta(units, payloads, base=base, result=result, seconds=time.perf_counter() - started)


def compose(first: DeltaReader, second: DeltaReader, after: npt.NDArray[np.uint8]) -> EncodedDelta | None:
    """One delta that does what `first` and then `second` do, made without the base.

    Steps of both are added, those that cancel disappear; a unit that is full in one of them is full. It is written
    in the plain mode.

    Args:
        first: a delta.
        second: one that starts from what the first ends in.
        after: the source's bytes after both, as `new` of `encode_delta`.

    Returns:
        None where a unit of the small mode meets another change: its positions are known only beside its base.

    Raises:
        InvalidRequestError: `second` does not start where `first` ends, or they are of other units.
        DeltaFormatError: a payload is damaged.
    """
    started = time.perf_counter()
    if first.units != second.units or (first.result is not None and first.result != second.base):
        raise InvalidRequestError("a delta follows another where it starts from what that one ends in")
    coding()
    payloads = map_all(lambda index: _compose_unit(first, second, index, after), range(len(first.units)))
    found = [payload for payload in payloads if payload is not None]
    if len(found) < len(payloads):
        return None
    seconds = time.perf_counter() - started
    return EncodedDelta(first.units, found, base=first.base, result=second.result, seconds=seconds)


def _encode_unit(
    old: npt.NDArray[np.uint8],
    new: npt.NDArray[np.uint8],
    unit: Unit,
    costs: CostModel,
    mode: Mode,
    room: npt.NDArray[np.uint8],
    search: Search | None,
) -> Payload:
    from weightsync.codec import delta_planes

    changes = (search or delta_planes.find_changes)(old, new, unit, costs.most_changed(unit), room)
    started = time.thread_time()
    if changes is None:
        return _encode_full(new, unit, costs)
    positions, steps = changes
    number = len(positions)
    if not number:
        return delta_planes.payload(Form.UNCHANGED, ())
    payload: Payload | None = None
    estimate = costs.planes_bytes(unit, number)
    if mode != "exponent":
        payload = delta_planes.planes_payload(unit, new, positions, steps)
        costs.observe_encode(Work.SPARSE, number, time.thread_time() - started)
        costs.observe_planes(unit, number, payload.entry.nbytes)
        estimate = payload.entry.nbytes
    if payload is None or (mode == "auto" and costs.prefers_exponent(unit, number, payload.entry.nbytes)):
        from weightsync.codec.delta_exponent import exponent_payload

        started = time.thread_time()
        smaller = exponent_payload(unit, old, new, positions, steps)
        costs.observe_encode(Work.EXPONENT, unit.nbytes, time.thread_time() - started)
        costs.observe_exponent(round(estimate), smaller.entry.nbytes)
        if payload is None or smaller.entry.nbytes < payload.entry.nbytes:
            payload = smaller
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


def _compose_unit(first: DeltaReader, second: DeltaReader, index: int, after: npt.NDArray[np.uint8]) -> Payload | None:
    from weightsync.codec import delta_planes

    unit = first.units[index]
    forms = (first.form(index), second.form(index))
    if Form.UNCHANGED in forms or forms[1].is_full:
        reader = first if forms[1] is Form.UNCHANGED else second
        body = reader.payload(index)
        delta_planes.pieces_of(reader.entry(index), body)
        return delta_planes.Payload(reader.entry(index), (bytes(body),))
    if forms[0].is_full:
        bytes_between = delta_planes.read_full(unit, first.entry(index), first.payload(index)).copy()
        change = second.decode(index, bytes_between)
        assert change is not None
        change.apply(bytes_between)
        full = delta_planes.full_payload if forms[0] is Form.FULL else delta_planes.packed_payload
        return full(unit, bytes_between)
    if Form.EXPONENT in forms:
        return None
    nothing = np.empty(0, np.uint8)
    positions, steps = delta_planes.added(unit, first.steps(index, nothing), second.steps(index, nothing))
    if not len(positions):
        return delta_planes.payload(Form.UNCHANGED, ())
    return delta_planes.planes_payload(unit, after[unit.start : unit.end], positions, steps)


def _check_request(
    old: npt.NDArray[np.uint8],
    new: npt.NDArray[np.uint8],
    units: Sequence[Unit],
    mode: str,
    base: bytes,
    result: bytes | None,
) -> None:
    for data in (old, new):
        if data.dtype != np.uint8 or data.ndim != 1 or not data.flags.c_contiguous or len(data) != len(old):
            raise InvalidRequestError("a delta is made of two equally long, contiguous arrays of bytes")
    if mode not in ("auto", "planes", "exponent"):
        raise InvalidRequestError(f"{mode!r} is no mode of a delta: auto, planes or exponent")
    if len(base) != 16 or (result is not None and len(result) != 16):
        raise InvalidRequestError("base and result of a delta are 16 bytes each")
    end = 0
    for unit in units:
        whole = 0 < unit.nbytes <= MAX_UNIT_BYTES and unit.nbytes % unit.kind.width_bytes == 0
        if not whole or unit.start < end or unit.end > len(old):
            raise InvalidRequestError(f"unit {unit} does not fit {len(old)} bytes, or is out of order")
        end = unit.end


__all__ = [
    "UNIT_BYTES",
    "CostModel",
    "DeltaReader",
    "ElementKind",
    "EncodedDelta",
    "Form",
    "Mode",
    "Search",
    "Unit",
    "UnitChange",
    "UnitStats",
    "compose",
    "encode_delta",
    "plan_units",
    "warm_up",
]


def warm_up() -> None:
    """Loads the compiled kernels of both modes, once a process: half a second, and where no cache on disk has them some
    12 seconds, which whoever first encodes or decodes would pay otherwise.

    Raises:
        ImportError: numba or zstandard is not installed.
    """
    from weightsync.codec import delta_exponent, delta_planes  # noqa: F401
