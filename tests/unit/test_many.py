"""Copies and sums by address touch only tensors that lie where they say; a mistake ends the process, here a child."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from tests.standins.processes import children
from weightsync.codec.digest import shard_sums
from weightsync.codec.tensor_digest import tensor_digests
from weightsync.codec.whole import whole_sum
from weightsync.copying import pack, unpack
from weightsync.errors import WeightSyncError
from weightsync.many import are_plain
from weightsync.tensors import spec_of
from weightsync.types import HeldTensor
from weightsync.types.table import TensorTable

COUNT, BYTES = 40, 256


def made_of_others() -> torch.Tensor:
    """A subclass that wraps two tensors: it calls itself contiguous and on the CPU, and lies at address 0."""
    return TwoTensor(torch.ones(64), torch.zeros(64))


def freed() -> torch.Tensor:
    """Its storage was given back, as sharded parameters' is between two uses."""
    tensor = torch.ones(64)
    tensor.untyped_storage().resize_(0)
    return tensor


def _bucket() -> torch.Tensor:
    return torch.zeros(COUNT * BYTES, dtype=torch.uint8)


def _pack(tensors: list[torch.Tensor]) -> None:
    pack(tensors, [index * BYTES for index in range(COUNT)], _bucket())


def _unpack(tensors: list[torch.Tensor]) -> None:
    unpack(_bucket(), [index * BYTES for index in range(COUNT)], tensors)


def _shard_sums(tensors: list[torch.Tensor]) -> None:
    spec = spec_of("w", torch.ones(64))
    shard_sums(HeldTensor(spec=spec, box=None, tensor=tensor) for tensor in tensors)


def _whole_sum(tensors: list[torch.Tensor]) -> None:
    whole_sum(TensorTable.of(spec_of(f"w{index}", torch.ones(64)) for index in range(COUNT)), tensors)


def _digests(tensors: list[torch.Tensor]) -> None:
    tensor_digests({f"w{index}": tensor for index, tensor in enumerate(tensors * 2)})


def _survives(what: Callable[[list[torch.Tensor]], None], odd: Callable[[], torch.Tensor]) -> str:
    tensors = [torch.ones(64) for _ in range(COUNT)]
    tensors[3] = odd()
    try:
        what(tensors)
    except (WeightSyncError, RuntimeError, NotImplementedError) as error:
        return type(error).__name__
    return "done"


@pytest.mark.parametrize("what", [_pack, _unpack, _shard_sums, _whole_sum, _digests])
def test_a_tensor_without_memory_of_its_own_ends_no_process(what: Any) -> None:
    """Red with signal 11: without the look at types, or at addresses."""
    with children() as start:
        assert isinstance(start(_survives, what, made_of_others).result(60), str)
        assert start(_survives, what, freed).result(60) == "UnsupportedError"


def test_subclasses_are_not_plain_and_parameters_are() -> None:
    assert are_plain([torch.ones(2), torch.nn.Parameter(torch.ones(2))])
    assert not are_plain([torch.ones(2), made_of_others()])
