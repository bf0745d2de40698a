"""What the delta's compiled loops are made of: loads, stores and comparisons that plain numba has no words for.

All take bytes (1-D C arrays of uint8) and a byte offset of any alignment. None checks bounds: their callers do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types, uint64
from numba.extending import intrinsic

WORDS = (types.uint8, types.uint16, types.uint32, types.uint64)
"""The types of an element's bits."""


def _address(context: Any, builder: Any, array_type: Any, array: Any, at: Any, item: Any) -> Any:
    data = context.make_array(array_type)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [at]), item.as_pointer())


def _load(typing: Any, data: Any, at: Any, like: Any) -> Any:
    """Intrinsic: the element at byte `at` of `data`, of the type of the array `like`, as uint64."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        item = ir.IntType(signature.args[2].dtype.bitwidth)
        value = builder.load(_address(context, builder, signature.args[0], arguments[0], arguments[1], item))
        value.align = 1
        return value if item.width == 64 else builder.zext(value, ir.IntType(64))

    return uint64(data, at, like), generate


def _store(typing: Any, data: Any, at: Any, value: Any) -> Any:
    """Intrinsic: writes `value`, an unsigned integer of any width, at byte `at` of `data`."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        item = ir.IntType(signature.args[2].bitwidth)
        place = _address(context, builder, signature.args[0], arguments[0], arguments[1], item)
        builder.store(arguments[2], place).align = 1
        return context.get_dummy_value()

    return types.void(data, at, value), generate


def _differing(typing: Any, old: Any, new: Any, at: Any, like: Any) -> Any:
    """Intrinsic: of the 64 bytes at byte `at` of both, a bit for each element that differs, the first one lowest."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        width = signature.args[3].dtype.bitwidth
        vector = ir.VectorType(ir.IntType(width), 512 // width)
        values = []
        for which in (0, 1):
            place = _address(context, builder, signature.args[which], arguments[which], arguments[2], vector)
            value = builder.load(place)
            value.align = 1
            values.append(value)
        bits = builder.bitcast(builder.icmp_unsigned("!=", *values), ir.IntType(512 // width))
        return bits if width == 8 else builder.zext(bits, ir.IntType(64))

    return uint64(old, new, at, like), generate


def _lowest_bit(typing: Any, bits: Any) -> Any:
    """Intrinsic: the number of the lowest bit that is set in `bits`, which is not 0."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 0))

    return types.int64(uint64), generate


load = cast(Callable[[Any, Any, Any], Any], intrinsic(_load))
store = cast(Callable[[Any, Any, Any], None], intrinsic(_store))
differing = cast(Callable[[Any, Any, Any, Any], Any], intrinsic(_differing))
lowest_bit = cast(Callable[[Any], Any], intrinsic(_lowest_bit))
