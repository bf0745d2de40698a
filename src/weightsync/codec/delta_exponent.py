"""One unit in the small mode: changes are coded by the old elements' exponents. docs/delta-format.md has the bytes."""

from __future__ import annotations

import struct

import numpy as np
import numpy.typing as npt

from weightsync.codec import delta_exponent_kernels as kernels
from weightsync.codec.delta_format import Entry, Form
from weightsync.codec.delta_kernels import BAD
from weightsync.codec.delta_planes import (
    Bytes,
    Payload,
    Positions,
    Words,
    pack,
    payload,
    pieces_of,
    shape_of,
    sum_at,
    unpack,
)
from weightsync.codec.delta_units import ElementKind, Unit
from weightsync.errors import DeltaFormatError

_SHIFT_AND_MASK = {
    ElementKind.FLOAT8: (3, 15),
    ElementKind.FLOAT16: (7, 255),
    ElementKind.FLOAT32: (23, 255),
    ElementKind.FLOAT64: (55, 255),
}
"""Where the top bits of a float's magnitude lie. Integers are all of class 0."""

_STRIDE = 16
_TWO = np.zeros(1, np.uint16)
_EIGHT = np.zeros(1, np.uint64)


def exponent_payload(unit: Unit, old: Bytes, new: Bytes, positions: Positions, steps: Words) -> Payload:
    """The form `EXPONENT` of at least one change, from `old` to `new`."""
    number = len(positions)
    shift, mask = _SHIFT_AND_MASK.get(unit.kind, (0, 0))
    classes, model_of_class = np.empty(number, np.uint8), np.empty(256, np.uint8)
    totals = np.zeros(256, np.int64)
    kernels.classes_at(old, positions, shift, mask, steps, classes)
    kernels.count_classes(old, _STRIDE, shift, mask, steps, totals)
    changed = np.bincount(classes, minlength=256).astype(np.int64)
    num_models = kernels.group_classes(changed, totals, model_of_class)
    models = model_of_class[classes]
    gaps = np.empty(number, np.uint32)
    kernels.model_gaps(old, positions, shift, mask, steps, model_of_class, gaps)
    codes, counts = np.empty(2 * number, np.uint16), np.zeros(512 * num_models, np.int64)
    plain = np.empty((4 + unit.kind.width_bytes) * number + 8, np.uint8)
    num_codes, num_plain = kernels.to_symbols(models, gaps, steps, num_models, codes, counts, plain)
    frequencies = np.empty(512 * num_models, np.uint16)
    kernels.to_frequencies(counts, frequencies)
    words = np.empty(num_codes + 2, np.uint16)
    num_words = kernels.write_rans(codes[:num_codes], frequencies, words)
    model = _write_model(model_of_class, np.bincount(models, minlength=num_models), frequencies)
    pieces = (
        plain[:num_plain].tobytes(),
        words[len(words) - num_words :].astype("<u2", copy=False).tobytes(),
        pack(np.frombuffer(model, np.uint8)),
    )
    return payload(
        Form.EXPONENT, pieces, num_changed=number, raw_lengths=(len(model), 0), values=sum_at(unit, new, positions)
    )


def read_exponent(unit: Unit, entry: Entry, body: memoryview, old: Bytes) -> tuple[Positions, Words]:
    """Positions and steps of a unit in the form `EXPONENT`, found in its old bytes.

    Raises:
        DeltaFormatError: the payload is damaged, is not what its table says, or does not fit these old bytes.
    """
    plain, words, model, _ = pieces_of(entry, body)
    number = entry.num_changed
    model_of_class, left, frequencies = _read_model(unpack(model, entry.raw_lengths[0]).tobytes(), number)
    slots = np.empty(len(frequencies) // 256 * kernels.SCALE, np.uint32)
    kernels.to_slots(frequencies, slots)
    positions, steps = np.empty(number, np.uint32), np.empty(number, unit.kind.word)
    shift, mask = _SHIFT_AND_MASK.get(unit.kind, (0, 0))
    found = kernels.read_changes(
        old,
        shift,
        mask,
        model_of_class,
        left,
        slots,
        np.frombuffer(words, np.uint8),
        np.frombuffer(plain, np.uint8),
        positions,
        steps,
        shape_of(unit)[0],
        _TWO,
        _EIGHT,
    )
    if found == BAD:
        raise DeltaFormatError("a unit of a delta does not fit its base")
    return positions, steps


def _write_model(
    model_of_class: Bytes, num_changed: npt.NDArray[np.int64], frequencies: npt.NDArray[np.uint16]
) -> bytes:
    """What a reader has to know before the first change."""
    parts = [bytes([len(num_changed)]), model_of_class.tobytes()]
    tables = frequencies.reshape(-1, 256)
    for model, number in enumerate(num_changed.tolist()):
        parts.append(struct.pack("<I", number))
        for table in tables[2 * model : 2 * model + 2]:
            used = np.flatnonzero(table)
            if len(used):
                first, last = int(used[0]), int(used[-1])
                parts.append(bytes([first, last]))
                parts.append(table[first : last + 1].astype("<u2", copy=False).tobytes())
            elif number:
                parts.append(bytes([1, 0]))
    return b"".join(parts)


def _read_model(data: bytes, num_changed: int) -> tuple[Bytes, npt.NDArray[np.int64], npt.NDArray[np.uint16]]:
    """The inverse, for as many changes in all: models of classes, changes of each model, frequencies.

    Raises:
        DeltaFormatError: it is none, or its numbers do not add up.
    """
    try:
        num_models = data[0]
        model_of_class = np.frombuffer(data, np.uint8, 256, 1)
        left = np.zeros(num_models, np.int64)
        frequencies = np.zeros((2 * num_models, 256), np.uint16)
        at = 257
        for model in range(num_models):
            (left[model],) = struct.unpack_from("<I", data, at)
            at += 4
            for table in frequencies[2 * model : 2 * model + 2] if left[model] else ():
                first, last = data[at], data[at + 1]
                width = max(0, last + 1 - first)
                table[first : first + width] = np.frombuffer(data, "<u2", width, at + 2)
                at += 2 + 2 * width
    except (IndexError, ValueError, struct.error):
        raise DeltaFormatError("the model of a unit of a delta is cut off") from None
    sums = frequencies.sum(axis=1, dtype=np.int64).reshape(-1, 2)
    wanted = np.where(left[:, None] > 0, kernels.SCALE, 0)
    ok = 1 <= num_models <= kernels.MAX_MODELS and at == len(data) and int(left.sum()) == num_changed
    if not ok or int(model_of_class.max()) >= num_models or not (sums == wanted).all():
        raise DeltaFormatError("the model of a unit of a delta has numbers that do not add up")
    return model_of_class, left, frequencies.reshape(-1)
