"""What torch's tensors, wherever and however they lie, add to a model's digest, see `codec.model_digest`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from weightsync.codec.model_digest import (
    NARROW,
    Places,
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
from weightsync.codec.tensor_digest import host_bytes, is_plain, wait_filled
from weightsync.errors import InvalidRequestError, ManifestMismatchError
from weightsync.many import addresses, are_plain, sizes_bytes
from weightsync.plan.boxes import box_runs, check_partition, one_run, split_box, whole_box
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
_TURNS_EACH = 4
"""How often each core takes some of a change: one that is late leaves the rest to others."""
_MOST_GAPS = 8
"""A device sums the gaps between a shard's rows as well: up to so many times the shard."""

PatchPart: TypeAlias = tuple[TensorSpec, torch.Tensor, torch.Tensor, torch.Tensor, bool]
"""What `patch_sum` takes; and whether positions were seen to rise already, in memory that nobody else writes."""

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

        wait_filled([tensor])
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
    places: list[int] = []
    batch_bytes = 0
    for each in held:
        num_bytes, there = each.tensor.nbytes, _sums_itself(each.tensor)
        large = num_bytes > _MANY_BYTES and not (together and are_plain((each.tensor,)))
        place = None if large or there else 0 if each.box is None else _place(each, each.box)
        if place is None:
            sums.add(each)
            continue
        batch.append(each)
        places.append(place)
        batch_bytes += num_bytes
        if (batch_bytes > _BATCH_BYTES and not together) or len(batch) == _BATCH_TENSORS:
            total += _batch_sum(batch, places, table)
            batch, places, batch_bytes = [], [], 0
    return total + _batch_sum(batch, places, table) + sums.total()


def _place(held: HeldTensor, box: Box) -> int | None:
    """First byte in the whole tensor of a plain part that is one run of it; None of any other, and of a wrong one."""
    spec, tensor = held.spec, held.tensor
    if tensor.shape != box.shape or dtype_name(tensor.dtype) != spec.dtype or not are_plain((tensor,)):
        return None
    run = one_run(spec.shape, box)
    return None if run is None else run[0] * itemsize_bytes(spec.dtype)


def _batch_sum(batch: list[HeldTensor], places: list[int], table: TensorTable | None) -> ShardSum:
    """Of parts that begin so many bytes into their whole tensors; `_place` has checked those with a box."""
    if not batch:
        return ShardSum.zero()
    tensors: list[torch.Tensor] = [each.tensor for each in batch]
    if not are_plain(tensors):
        return _sum_of(batch)
    for each, tensor in zip(batch, tensors, strict=True):
        spec = each.spec
        if each.box is None and (tensor.shape != spec.shape or tensor.dtype is not torch_dtype(spec.dtype)):
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
    return sum_of_runs(addresses(tensors), sizes_bytes(tensors), np.array(places, np.int64), keys_1, keys_2)


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
    return patch_sums([(spec, positions, old_values, new_values, False)])[0]


def patch_sums(changes: Iterable[PatchPart]) -> list[ShardSum]:
    """`patch_sum` of each, on all cores: no core waits for the others behind each tensor.

    Args:
        changes: their memory is kept, and not written, until this returns.

    Raises:
        InvalidRequestError: as for `patch_sum`, before another change is taken.
    """
    sums: list[ShardSum] = []
    waiting: list[_Elements] = []
    for spec, positions, old, new, rising in changes:
        plain = is_plain(positions) and is_plain(old) and is_plain(new)
        if not plain:  # the host's copy of one such change at a time
            sums += _sums_of(waiting)
            waiting = []
        waiting.append(_elements(spec, positions, old, new, rising=rising))
        if not plain:
            sums += _sums_of(waiting)
            waiting = []
    return sums + _sums_of(waiting)


@dataclasses.dataclass(frozen=True)
class _Elements:
    """A change that was checked; `words_each`: items of `old` and `new` to a position."""

    spec: TensorSpec
    width_bytes: int
    words_each: int
    where: Places
    old: npt.NDArray[Any]
    new: npt.NDArray[Any]

    def sum_of(self, cut: slice) -> ShardSum:
        items = slice(cut.start * self.words_each, cut.stop * self.words_each)
        return change_sum(self.spec, self.width_bytes, self.where[cut], self.old[items], self.new[items])


def _elements(
    spec: TensorSpec, positions: torch.Tensor, old: torch.Tensor, new: torch.Tensor, *, rising: bool
) -> _Elements:
    where = _checked_positions(spec, positions, old, new, rising=rising)
    size_bytes = itemsize_bytes(spec.dtype)
    kind, words_each = (NARROW[size_bytes][0], 1) if size_bytes in NARROW else (np.uint64, size_bytes // 8)
    was, becomes = (np.require(host_bytes(values).view(kind), requirements="A") for values in (old, new))
    return _Elements(spec, size_bytes, words_each, where, was, becomes)


def _sums_of(changes: Sequence[_Elements]) -> list[ShardSum]:
    """One for each. A thread takes as many elements as another, of one change or of several."""
    counts = [len(each.where) for each in changes]
    step = max(SMALL_BYTES // 8, -(-sum(counts) // (_TURNS_EACH * num_cores())))

    def one(turn: list[tuple[int, slice]]) -> list[tuple[int, ShardSum]]:
        return [(index, changes[index].sum_of(cut)) for index, cut in turn]

    sums = [ShardSum.zero()] * len(changes)
    for found in map_all(one, _turns(counts, step)):
        for index, part in found:
            sums[index] += part
    return sums


def _turns(counts: Sequence[int], step: int) -> Iterator[list[tuple[int, slice]]]:
    """Cuts of things with so many elements, in their order: `step` elements together, and what is left over."""
    turn: list[tuple[int, slice]] = []
    room = step
    for index, count in enumerate(counts):
        start = 0
        while start < count:
            stop = min(count, start + room)
            turn.append((index, slice(start, stop)))
            room -= stop - start
            start = stop
            if not room:
                yield turn
                turn, room = [], step
    if turn:
        yield turn


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
    spec: TensorSpec, positions: torch.Tensor, old: torch.Tensor, new: torch.Tensor, *, rising: bool
) -> Places:
    """As they are; `rising`: somebody has seen to that."""
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
    where: Places = np.require(as_they_are, requirements="A")
    in_order = rising or count == 0 or (where[0] >= 0 and bool((where[1:] > where[:-1]).all()))
    if not in_order or (count and where[-1] >= whole_box(spec.shape).numel):
        raise InvalidRequestError("positions of a patch rise strictly and lie within the tensor", parameter=spec.name)
    return where
