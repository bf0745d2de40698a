"""Byte views: every dtype, 0-d, empty; they share memory, or refuse."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weightsync.errors import InvalidRequestError, UnsupportedError
from weightsync.tensors import (
    byte_array,
    byte_view,
    has_its_memory,
    spec_of,
    tensor_from_bytes,
    torch_dtype,
    write_counter,
)
from weightsync.types.dtypes import ITEMSIZE_BYTES

DTYPES = sorted(ITEMSIZE_BYTES)
SHAPES = [(), (1,), (7,), (3, 5), (0,), (0, 4), (2, 0, 3), (1, 1, 1)]


def some(dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    numel = int(np.prod(shape, dtype=np.int64))
    raw = torch.arange(numel * ITEMSIZE_BYTES[dtype], dtype=torch.int64).to(torch.uint8)
    if dtype == "bool":
        raw = raw % 2
    return tensor_from_bytes(raw, dtype=dtype, shape=shape)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bytes_and_back(dtype: str, shape: tuple[int, ...]) -> None:
    tensor = some(dtype, shape)
    assert tensor.dtype is torch_dtype(dtype)
    assert tuple(tensor.shape) == shape
    view = byte_view(tensor)
    assert view.dtype == torch.uint8
    assert view.dim() == 1
    assert view.numel() == tensor.nbytes
    again = tensor_from_bytes(view.clone(), dtype=dtype, shape=shape)
    assert byte_array(again).tobytes() == byte_array(tensor).tobytes()
    spec = spec_of("a", tensor)
    assert (spec.dtype, spec.shape, spec.nbytes) == (dtype, shape, tensor.nbytes)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_view_shares_its_tensors_memory(dtype: str) -> None:
    tensor = some(dtype, (2, 3))
    view, array = byte_view(tensor), byte_array(tensor)
    assert view.data_ptr() == tensor.data_ptr() == array.ctypes.data
    view[0] ^= 1
    assert array[0] == byte_array(tensor)[0] == view[0]


def test_one_element_cut_out_of_others_has_bytes() -> None:
    """It is contiguous whatever its stride, and torch does not view it as another dtype."""
    several = torch.arange(6, dtype=torch.bfloat16)
    one = several[3::2][:1]
    assert one.is_contiguous()
    assert one.stride() == (2,)
    assert byte_array(one).tobytes() == byte_array(torch.tensor([3], dtype=torch.bfloat16)).tobytes()
    assert byte_view(one).data_ptr() == one.data_ptr()


def test_a_view_of_a_parameter_is_no_part_of_its_graph() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    assert not byte_view(parameter).requires_grad
    assert byte_view(parameter).data_ptr() == parameter.data_ptr()
    assert byte_array(parameter * 2).nbytes == 12


@pytest.mark.parametrize(
    "tensor",
    [torch.ones(3, 4).t(), torch.ones(4)[::2], torch.ones(1).expand(3), torch.ones(4, 4)[:, 1]],
    ids=["transposed", "strided", "expanded", "column"],
)
def test_what_does_not_lie_in_one_piece_is_refused(tensor: torch.Tensor) -> None:
    with pytest.raises(UnsupportedError, match="contiguous"):
        byte_view(tensor)
    with pytest.raises(UnsupportedError, match="contiguous"):
        byte_array(tensor)


def test_a_part_in_the_middle_is_fine() -> None:
    whole = torch.arange(12, dtype=torch.int32).reshape(4, 3)
    assert byte_array(whole[1:3]).tobytes() == np.arange(3, 9, dtype=np.int32).tobytes()


def test_a_tensor_has_its_memory_as_far_as_its_last_element_goes() -> None:
    whole = torch.arange(64.0).reshape(8, 8)
    cases = [whole, whole.t(), whole[2:, 1::4], whole[:1].expand(4, 8), whole[7, 7], whole[8:]]
    assert all(map(has_its_memory, cases))
    whole.untyped_storage().resize_(4 * 63)
    assert list(map(has_its_memory, cases)) == [False, False, True, True, False, True]


def test_a_lazy_conjugate_is_refused_not_sent_unconjugated() -> None:
    """`conj()` only sets a bit: the memory holds the other numbers."""
    lazy = torch.tensor([1 + 2j]).conj()
    for tensor in (lazy, lazy.imag):
        with pytest.raises((UnsupportedError, RuntimeError)):
            byte_view(tensor)


@settings(deadline=None)
@given(st.sampled_from(DTYPES), st.binary(min_size=0, max_size=64))
def test_any_bytes_pass_unchanged(dtype: str, data: bytes) -> None:
    """NaN payloads, denormals and bools that are neither 0 nor 1 included: they are bytes, not numbers."""
    data = data[: len(data) // ITEMSIZE_BYTES[dtype] * ITEMSIZE_BYTES[dtype]]
    buffer = torch.from_numpy(np.frombuffer(data, dtype=np.uint8).copy())
    tensor = tensor_from_bytes(buffer, dtype=dtype, shape=(len(data) // ITEMSIZE_BYTES[dtype],))
    assert byte_array(tensor).tobytes() == data


def test_a_buffer_of_another_size_is_refused() -> None:
    with pytest.raises(RuntimeError):
        tensor_from_bytes(torch.zeros(7, dtype=torch.uint8), dtype="float32", shape=(2,))
    with pytest.raises(RuntimeError):
        tensor_from_bytes(torch.zeros(8, dtype=torch.uint8), dtype="float32", shape=(3,))


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(InvalidRequestError):
        torch_dtype("nn")


def test_a_dtype_that_this_torch_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    torch_dtype.cache_clear()
    monkeypatch.delattr(torch, "float8_e8m0fnu")
    with pytest.raises(UnsupportedError, match="float8_e8m0fnu"):
        torch_dtype("float8_e8m0fnu")


def test_writes_are_counted_where_torch_counts_them() -> None:
    """Seen red with `is_inference` alone: a tensor of inference mode that was given other data is none, and has no
    counter."""
    tensor = torch.zeros(3)
    before = write_counter(tensor) or 0
    tensor.add_(1)
    assert (write_counter(tensor) or 0) > before
    with torch.inference_mode():
        frozen = torch.zeros(3)
    assert write_counter(frozen) is None
    frozen.data = tensor
    assert write_counter(frozen) is None
