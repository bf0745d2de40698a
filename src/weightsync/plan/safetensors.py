"""The layout of a segment: a safetensors file, byte by byte. Pure: makes and reads headers, and no files.

    u64 little-endian: length n of the header, a multiple of 4096 less 8 | n bytes of JSON, padded with blanks | tensors

Tensors lie one behind the other, as the format wants it; those with larger elements come first, so each is aligned.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from weightsync.errors import InvalidRequestError, UnsupportedError
from weightsync.types import TensorSpec, Version, itemsize_bytes
from weightsync.types.table import SpecTable

_PAGE = 4096
_MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""
_STAMP_BYTES = 1024
_STAMP = "weightsync"
_METADATA = "__metadata__"
_quoted = json.encoder.encode_basestring_ascii
_CODES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0", "uint16": "U16", "int16": "I16", "float16": "F16", "bfloat16": "BF16",
    "uint32": "U32", "int32": "I32", "float32": "F32", "uint64": "U64", "int64": "I64", "float64": "F64",
    "complex64": "C64",
}  # fmt: skip
_DTYPES = {code: dtype for dtype, code in _CODES.items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """Where each part lies in a file.

    Attributes:
        parts: in the order in which they were given, each with its absolute byte `offset`.
        data_start: first byte behind the header, a multiple of 4096.
    """

    parts: SpecTable
    data_start: int
    total_bytes: int

    def header(self, stamp: Version | None, model_id: str) -> bytes:
        """The first `data_start` bytes. The same length whatever the stamp.

        Args:
            stamp: the version whose bytes lie there; None while they are being written.

        Raises:
            InvalidRequestError: run_id and model_id are too long for the room that there is.
        """
        stamp_text = "" if stamp is None else json.dumps([stamp.run_id, stamp.number, model_id])
        if len(stamp_text.encode()) > _STAMP_BYTES // 2:
            raise InvalidRequestError("run_id and model_id are too long to be written into a segment")
        text = self._json(stamp_text)
        return (self.data_start - 8).to_bytes(8, "little") + text.ljust(self.data_start - 8)

    def _json(self, stamp: str) -> bytes:
        return _metadata(stamp) + self._entries

    @functools.cached_property
    def _entries(self) -> bytes:
        """All that follows the metadata, which comes first. Made once: it is the same whatever the stamp."""
        return _entries_of(self.parts, [part.offset - self.data_start for part in self.parts])


def _entries_of(parts: Sequence[TensorSpec], starts: Sequence[int]) -> bytes:
    """The entries of parts whose data begins at these bytes behind the header, and the header's last brace."""
    entries: list[str] = []
    sizes = [part.nbytes for part in parts]
    for index in sorted(range(len(parts)), key=lambda index: (starts[index], sizes[index])):
        part, start = parts[index], starts[index]
        shape = ",".join(map(str, part.shape if part.box is None else part.box.shape))
        entries.append(
            f'{_quoted(entry_name(part))}:{{"dtype":"{_CODES[part.dtype]}","shape":[{shape}],'
            f'"data_offsets":[{start},{start + sizes[index]}]}}'
        )
    return ("".join(f",{entry}" for entry in entries) + "}").encode()


def _metadata(stamp: str) -> bytes:
    """The header's first entry, and its first brace."""
    return json.dumps({_METADATA: {"format": "pt", _STAMP: stamp}}, separators=(",", ":")).encode()[:-1]


def entry_name(part: TensorSpec) -> str:
    """The name of a part in the file: the tensor's own, or with the box behind it."""
    if part.box is None:
        return part.name
    ranges = ",".join(
        f"{start}:{start + extent}" for start, extent in zip(part.box.offset, part.box.shape, strict=True)
    )
    return f"{part.name}@{ranges}"


def plan_layout(parts: Sequence[TensorSpec], *, source: int = 0) -> Layout:
    """Lays parts out.

    Args:
        parts: any order; their offsets are not looked at.

    Raises:
        UnsupportedError: the format has no name for a dtype, or can't tell two parts apart by name.
    """
    names = {_METADATA}
    for part in parts:
        if part.dtype not in _CODES:
            raise UnsupportedError(f"safetensors has no dtype {part.dtype}", parameter=part.name)
        name = entry_name(part)
        if name in names:
            raise UnsupportedError(f"a safetensors file can't have another entry {name!r}", parameter=part.name)
        names.add(name)
    order = sorted(range(len(parts)), key=lambda index: -itemsize_bytes(parts[index].dtype))
    offsets, end = [0] * len(parts), 0
    for index in order:
        offsets[index] = end
        end += parts[index].nbytes
    # how long the header is depends on the digits of the offsets in it, which don't depend on where data starts
    entries = _entries_of(parts, offsets)
    room = 8 + len(_metadata("")) + len(entries) + _STAMP_BYTES
    if room > _MAX_HEADER_BYTES:
        raise UnsupportedError(f"{len(parts)} tensors are more than a safetensors header can name")
    data_start = -(-room // _PAGE) * _PAGE
    layout = Layout(
        parts=_placed(parts, offsets, data_start, source), data_start=data_start, total_bytes=data_start + end
    )
    layout.__dict__["_entries"] = entries
    return layout


def _placed(parts: Sequence[TensorSpec], offsets: Sequence[int], start: int, source: int) -> SpecTable:
    return SpecTable(
        TensorSpec(
            name=part.name, dtype=part.dtype, shape=part.shape, box=part.box, source=source, offset=start + offset
        )
        for part, offset in zip(parts, offsets, strict=True)
    )


def read_header(memory: memoryview) -> tuple[int, Mapping[str, TensorSpec], Mapping[str, str]]:
    """Reads any safetensors header.

    Args:
        memory: the file, or at least its header.

    Returns:
        First byte of the data, the tensors by name with absolute offsets, and the metadata.

    Raises:
        InvalidRequestError: it is none, or claims what can't be.
    """
    length = int.from_bytes(memory[:8], "little") if len(memory) >= 8 else 0
    if not 2 <= length <= _MAX_HEADER_BYTES or 8 + length > len(memory):
        raise InvalidRequestError("this is no safetensors file: its header has an odd length, or is cut off")
    try:
        entries = json.loads(bytes(memory[8 : 8 + length]))
        metadata = {str(key): str(value) for key, value in (entries.pop(_METADATA, None) or {}).items()}
        tensors = {name: _entry(name, entry, 8 + length) for name, entry in entries.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InvalidRequestError(f"this safetensors header can't be read: {error!r:.200}") from error
    end = 8 + length
    for spec in sorted(tensors.values(), key=lambda spec: (spec.offset, spec.nbytes)):
        if spec.offset != end:
            raise InvalidRequestError(
                f"it lies at byte {spec.offset}, not where the last one ends", parameter=spec.name
            )
        end += spec.nbytes
    return 8 + length, tensors, metadata


def _entry(name: str, entry: dict[str, Any], data_start: int) -> TensorSpec:
    """One entry of a foreign header; raises all that a header of the wrong form makes raise."""
    name.encode()  # a lone surrogate can't go on to anybody
    (start, end), shape = entry["data_offsets"], entry["shape"]
    if not all(type(number) is int for number in (start, end, *shape)):
        raise TypeError(f"{name!r} has numbers that are none")
    spec = TensorSpec(name=name, dtype=_DTYPES[entry["dtype"]], shape=tuple(shape), offset=data_start + max(0, start))
    if start < 0 or end - start != spec.nbytes:
        raise InvalidRequestError(f"it says {start} to {end} for {spec.nbytes} bytes", parameter=name)
    return spec


STAMP_WITHIN_BYTES = 8 + 2 * _STAMP_BYTES
"""So much of a segment is enough for `read_stamp`."""


def read_stamp(memory: memoryview) -> tuple[Version, str] | None:
    """The version and model whose bytes lie in a segment; None while they are being written.

    Raises:
        InvalidRequestError: it has no header of ours.
    """
    length = int.from_bytes(memory[:8], "little") if len(memory) >= 8 else 0
    head = bytes(memory[8 : 8 + min(length, 2 * _STAMP_BYTES)])
    # the metadata is the first entry: a header of a hundred thousand tensors need not be read for it
    try:
        found, _ = json.JSONDecoder().raw_decode(head[head.index(b":") + 1 :].decode("utf-8", "ignore"))
        stamp = found[_STAMP]
        if stamp == "":
            return None
        run_id, number, model_id = json.loads(stamp)
        if (type(run_id), type(number), type(model_id)) != (str, int, str):
            raise TypeError("it names no version")
        return Version(run_id=run_id, number=number), model_id
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise InvalidRequestError(f"this segment has no stamp: {error!r:.200}") from error
