"""What torch's tensors, wherever and however they lie, add to a model's digest, see `codec.model_digest`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from weightsync.codec.model_digest import (
    NARROW,
    ShardSum,
    added,
    block_lanes,
    blocks_of,
    change_sum,
    keys_of,
    model_digest,
    seeds_of,
    sum_of_runs,
)
from weightsync.codec.tensor_digest import host_bytes
from weightsync.errors import InvalidRequestError, ManifestMismatchError
from weightsync.many import addresses, are_plain, sizes_bytes
from weightsync.plan.boxes import box_runs, check_partition, split_box, whole_box
from weightsync.tensors import byte_view, cut_out, torch_dtype
from weightsync.threads import PIECE_BYTES, SMALL_BYTES, map_all
from weightsync.types import Box, HeldTensor, TensorSpec, dtype_name, itemsize_bytes
from weightsync.types.process import num_cores
from weightsync.types.table import TensorTable

if TYPE_CHECKING:
    from weightsync.codec.device_digest import DeviceSum

_MANY_BYTES = 256 << 10
"""Tensors of at most so many bytes are summed by the batch; any that the caller has together."""

_BATCH_BYTES = 16 << 20
_BATCH_TENSORS = 8192
_MOST_GAPS = 8
"""A device sums the gaps between a shard's rows as well: up to so many times the shard."""

_keys_of = attrgetter("key_1", "key_2")


def shard_sum(held: HeldTensor) -> ShardSum:
    """What one held part adds to the model's digest, on all cores; of a GPU's tensor on that GPU, where it can be.

    Any box, any strides, any device; bytes that are not contiguous host memory are copied in pieces of at
    most `PIECE_BYTES` a thread. The tensor must not be written until this returns.

    Raises:
        ManifestMismatchError: the tensor is not of the spec's dtype or the box's shape.
    """
    return _sum_of((held,))


class PartSums:
    """`shard_sum` of parts as they come, together. One thread at a time.

    A part may be written again behind `add`, on the stream that was the current one. Parts on a GPU are summed there,
    many at a time: the GPU is waited for once in 512 MiB, and at the end.
    """

    def __init__(self) -> None:
        self._on_host = ShardSum.zero()
        self._on_devices: dict[torch.device, DeviceSum] = {}

    def add(self, held: HeldTensor) -> None:
        """Adds a part.

        Raises:
            ManifestMismatchError: as for `shard_sum`; nothing was added.
        """
        spec, tensor = held.spec, held.tensor
        box = whole_box(spec.shape) if held.box is None else held.box
        if tuple(tensor.shape) != box.shape or dtype_name(tensor.dtype) != spec.dtype or not box.fits(spec.shape):
            raise ManifestMismatchError(
                f"a tensor of {dtype_name(tensor.dtype)} {tuple(tensor.shape)} can't be part {box} "
                f"of {spec.dtype} {spec.shape}",
                parameter=spec.name,
            )
        if _sums_itself(tensor):
            plain = tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
            if plain and held.box is None:
                seeds = seeds_of(spec.name, spec.dtype, spec.shape)
                self._on(tensor.device).add_run(byte_view(tensor), 0, seeds.key_1, seeds.key_2)
                return
            step = box.numel if plain else PIECE_BYTES // itemsize_bytes(spec.dtype)
            for block in split_box(box, max(1, step)):
                part = cut_out(tensor, block, origin=box.offset)
                if not self._added_there(spec, block, part):
                    self._add_on_host(spec, block, part)
        else:
            self._add_on_host(spec, box, tensor)

    def total(self) -> ShardSum:
        """The sum of all parts so far."""
        return self._on_host + added(there.total() for there in self._on_devices.values())

    def _add_on_host(self, spec: TensorSpec, box: Box, tensor: torch.Tensor) -> None:
        def one(block: Box) -> tuple[int, int]:
            return block_lanes(host_bytes(cut_out(tensor, block, origin=box.offset)), spec, block)

        self._on_host += added(map_all(one, blocks_of(box, spec)))

    def _added_there(self, spec: TensorSpec, box: Box, tensor: torch.Tensor) -> bool:
        """Whether it was added on its device: its runs of bytes lie evenly apart, as those of a tensor that was cut
        along one dimension do, and not so far that the device would sum more of the gaps than the host copies."""
        run_elements, offsets = box_runs(spec.shape, box)
        pitch = int(offsets[1] - offsets[0]) if len(offsets) > 1 else run_elements
        if pitch > _MOST_GAPS * run_elements or (len(offsets) > 2 and not (np.diff(offsets) == pitch).all()):
            return False
        if run_elements:
            size_bytes, seeds = itemsize_bytes(spec.dtype), seeds_of(spec.name, spec.dtype, spec.shape)
            data = byte_view(tensor.resolve_conj().resolve_neg().contiguous())
            self._on(tensor.device).add(
                data.view(len(offsets), run_elements * size_bytes), int(offsets[0]) * size_bytes, pitch * size_bytes,
                seeds.key_1, seeds.key_2,
            )  # fmt: skip
        return True

    def _on(self, device: torch.device) -> DeviceSum:
        from weightsync.codec.device_digest import DeviceSum  # with numba, as `kernels`

        there = self._on_devices.get(device)
        if there is None:
            there = self._on_devices[device] = DeviceSum(device)
        return there


def _sums_itself(tensor: torch.Tensor) -> bool:
    """Whether its device sums it."""
    return tensor.is_cuda


def shard_sums(held: Iterable[HeldTensor], table: TensorTable | None = None, *, together: bool = False) -> ShardSum:
    """The sum of `shard_sum` of each, on all cores.

    Args:
        held: taken one after the other; small ones are held until there are many, at most 16 MiB of them together.
        table: has the specs of all of them; what is derived from a name is then kept there.
        together: whether the caller has all of them in memory anyway. Large ones too are then held until there are
            many, and cores need not wait for each other after every tensor.

    Raises:
        ManifestMismatchError: a tensor is not of its spec's dtype or its box's shape.
    """
    total, sums = ShardSum.zero(), PartSums()
    batch: list[HeldTensor] = []
    batch_bytes = 0
    for each in held:
        num_bytes, there = each.tensor.nbytes, _sums_itself(each.tensor)
        large = num_bytes > _MANY_BYTES and not (together and are_plain((each.tensor,)))
        if each.box is not None or large or there:
            sums.add(each)
            continue
        batch.append(each)
        batch_bytes += num_bytes
        if (batch_bytes > _BATCH_BYTES and not together) or len(batch) == _BATCH_TENSORS:
            total += _batch_sum(batch, table)
            batch, batch_bytes = [], 0
    return total + _batch_sum(batch, table) + sums.total()


def _batch_sum(batch: list[HeldTensor], table: TensorTable | None) -> ShardSum:
    if not batch:
        return ShardSum.zero()
    tensors: list[torch.Tensor] = [each.tensor for each in batch]
    if not are_plain(tensors):
        return _sum_of(batch)
    for each, tensor in zip(batch, tensors, strict=True):
        spec = each.spec
        if tensor.shape != spec.shape or tensor.dtype is not torch_dtype(spec.dtype):
            raise ManifestMismatchError(
                f"a tensor of {tensor.dtype} {tuple(tensor.shape)} can't be all of {spec.dtype} {spec.shape}",
                parameter=spec.name,
            )
    if table is not None:
        keys = table.derive(keys_of)[:, [table.index_of[each.spec.name] for each in batch]]
    else:
        seeds = [seeds_of(each.spec.name, each.spec.dtype, each.spec.shape) for each in batch]
        keys = np.array(list(map(_keys_of, seeds)), dtype=np.uint64).T
    keys_1, keys_2 = np.ascontiguousarray(keys)
    return sum_of_runs(addresses(tensors), sizes_bytes(tensors), np.zeros(len(batch), np.int64), keys_1, keys_2)


def patch_sum(
    spec: TensorSpec, positions: torch.Tensor, old_values: torch.Tensor, new_values: torch.Tensor
) -> ShardSum:
    """What a change of some elements adds to the model's digest, in time proportional to the change.

    Args:
        positions: int64 or uint32, 1-D, strictly rising: flat indices into the contiguous global tensor.
        old_values: 1-D, of the spec's dtype, as many: the elements before. They must be the true ones;
            otherwise the digest goes wrong, which is what it is for.
        new_values: likewise, after.

    Raises:
        InvalidRequestError: lengths or dtypes don't fit, or positions do not rise within the tensor.
    """
    where = _checked_positions(spec, positions, old_values, new_values)
    size_bytes = itemsize_bytes(spec.dtype)
    kind, words_each = (NARROW[size_bytes][0], 1) if size_bytes in NARROW else (np.uint64, size_bytes // 8)
    old, new = (np.require(host_bytes(values).view(kind), requirements="A") for values in (old_values, new_values))

    def one(cut: slice) -> ShardSum:
        items = slice(cut.start * words_each, cut.stop * words_each)
        return change_sum(spec, size_bytes, where[cut], old[items], new[items])

    step = max(SMALL_BYTES // 8, -(-len(where) // num_cores()))
    cuts = (slice(start, min(start + step, len(where))) for start in range(0, len(where), step))
    return sum(map_all(one, cuts), ShardSum.zero())


def digest_of(held: Iterable[HeldTensor], specs: Iterable[TensorSpec]) -> str:
    """The model's digest where one process holds all of it, on all cores.

    Args:
        held: parts that cover every tensor of `specs` exactly once. Of an iterator each is used up before the next is
            taken, so it may reuse its memory (a GPU's on the current stream); a list is read in whatever order is fast.
        specs: every tensor of the model.

    Raises:
        ManifestMismatchError: a part of an unknown tensor, of another dtype or shape than its spec says,
            held twice, or missing. Without this, a replica counted twice would look like a wrong byte.
    """
    by_name = specs.by_name if isinstance(specs, TensorTable) else {spec.name: spec for spec in specs}
    whole: set[str] = set()
    boxes: dict[str, list[Box]] = {}  # of those that do not lie here once and whole

    def checked() -> Iterator[HeldTensor]:
        for part in held:
            name, spec = part.spec.name, by_name.get(part.spec.name)
            if spec is None:
                raise ManifestMismatchError("a tensor is held that the manifest does not have", parameter=name)
            if spec.dtype != part.spec.dtype or spec.shape != part.spec.shape:
                raise ManifestMismatchError(
                    f"held as {part.spec.dtype} {part.spec.shape}, in the manifest {spec.dtype} {spec.shape}",
                    parameter=name,
                )
            if part.box is None and name not in whole and name not in boxes:
                whole.add(name)
            else:
                before = [whole_box(spec.shape)] if name in whole else []
                boxes.setdefault(name, before).append(whole_box(spec.shape) if part.box is None else part.box)
            yield part

    together = isinstance(held, Sequence)
    table = specs if isinstance(specs, TensorTable) else None
    total = shard_sums(checked(), table, together=True) if together else _sum_of(checked())
    for name, spec in by_name.items():
        if name in whole and name not in boxes:
            continue
        if not spec.shape and name not in boxes:
            raise ManifestMismatchError("the tensor is not held", parameter=name)
        check_partition(spec.shape, boxes.get(name, []), parameter=name)
    return model_digest(specs if isinstance(specs, TensorTable) else by_name.values(), total)


def _sum_of(held: Iterable[HeldTensor]) -> ShardSum:
    sums = PartSums()
    for each in held:
        sums.add(each)
    return sums.total()


def _checked_positions(
    spec: TensorSpec, positions: torch.Tensor, old: torch.Tensor, new: torch.Tensor
) -> npt.NDArray[np.int64]:
    count = positions.numel()
    if positions.dtype not in (torch.int64, torch.uint32) or positions.dim() != 1:
        raise InvalidRequestError("positions of a patch are int64 or uint32 and 1-D", parameter=spec.name)
    for values in (old, new):
        if tuple(values.shape) != (count,) or dtype_name(values.dtype) != spec.dtype:
            raise InvalidRequestError(
                f"{count} positions of {spec.dtype} don't go with {values.dtype} values of shape {tuple(values.shape)}",
                parameter=spec.name,
            )
    as_they_are = host_bytes(positions).view(np.int64 if positions.dtype == torch.int64 else np.uint32)
    where: npt.NDArray[np.int64] = np.require(as_they_are, dtype=np.int64, requirements="A")
    rising = count == 0 or (where[0] >= 0 and bool((where[1:] > where[:-1]).all()))
    if not rising or (count and where[-1] >= whole_box(spec.shape).numel):
        raise InvalidRequestError("positions of a patch rise strictly and lie within the tensor", parameter=spec.name)
    return where
