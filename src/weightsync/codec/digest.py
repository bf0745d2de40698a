"""Digests: one of each tensor's bytes, and one of a whole model that does not depend on its sharding.

They detect accidents (a lost, late, swapped, torn or mis-placed byte), NOT an adversary: whoever may choose
the bytes can build two models with one digest. The definition of both, the reasons and the test vectors are in
design/0002-digests.md and docs/digests.md; the formats "xxh3:" and "wsd2:" never change meaning.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any, cast

import msgspec
import numpy as np
import numpy.typing as npt
import torch
import xxhash

from weightsync.codec.tensor_digest import PIECE_BYTES, SMALL_BYTES, cut_out, host_bytes
from weightsync.codec.threads import map_all, num_workers
from weightsync.errors import InvalidRequestError, ManifestMismatchError
from weightsync.many import Int64s, addresses, are_plain, check_addresses, loops, sizes_bytes
from weightsync.plan.boxes import box_runs, check_partition, split_box, whole_box
from weightsync.tensors import byte_view, torch_dtype
from weightsync.types import Box, HeldTensor, TensorSpec, dtype_name, itemsize_bytes
from weightsync.types.manifest import MODEL_DIGEST_PREFIX, check_model_digest
from weightsync.types.table import TensorTable

_MANY_BYTES = 256 << 10
"""Tensors of at most so many bytes are summed by the batch; any that the caller has together."""

_BATCH_BYTES = 16 << 20
_BATCH_TENSORS = 8192
_RUN_TENSORS = 1024
_RUN_BYTES = 4 << 20
"""What one thread sums at a time of a batch: at most so many tensors, and twice so many bytes."""

_MASK = (1 << 64) - 1
kernels = functools.partial(loops, "weightsync.codec.kernels", needs="the model digest needs numba")
_keys_of = attrgetter("key_1", "key_2")
_NARROW: dict[int, tuple[npt.DTypeLike, int]] = {1: (np.uint8, 3), 2: (np.uint16, 2), 4: (np.uint32, 1)}
"""Element bytes -> (numpy dtype, log2 of the elements in a word)."""


class ShardSum(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What some parts of a model, or a change, add to the model's digest: two lanes, each mod 2^64.

    Sums of disjoint parts add up, in any order. A sum says nothing by itself: `model_digest` closes it.

    Attributes:
        lane_a: 0 to 2^64 - 1.
        lane_b: 0 to 2^64 - 1.
    """

    lane_a: int
    lane_b: int

    def __post_init__(self) -> None:
        if not (0 <= self.lane_a <= _MASK and 0 <= self.lane_b <= _MASK):
            raise InvalidRequestError("a lane of a ShardSum lies between 0 and 2^64 - 1")

    def __add__(self, other: ShardSum) -> ShardSum:
        return ShardSum(lane_a=(self.lane_a + other.lane_a) & _MASK, lane_b=(self.lane_b + other.lane_b) & _MASK)

    @classmethod
    def zero(cls) -> ShardSum:
        """The sum of nothing."""
        return cls(lane_a=0, lane_b=0)


def shard_sum(held: HeldTensor) -> ShardSum:
    """What one held part adds to the model's digest, on all cores; of a GPU's tensor on that GPU, where it can be.

    Any box, any strides, any device; bytes that are not contiguous host memory are copied in pieces of at
    most `PIECE_BYTES` a thread. The tensor must not be written until this returns.

    Raises:
        ManifestMismatchError: the tensor is not of the spec's dtype or the box's shape.
    """
    spec, tensor = held.spec, held.tensor
    box = whole_box(spec.shape) if held.box is None else held.box
    if tuple(tensor.shape) != box.shape or dtype_name(tensor.dtype) != spec.dtype or not box.fits(spec.shape):
        raise ManifestMismatchError(
            f"a tensor of {dtype_name(tensor.dtype)} {tuple(tensor.shape)} can't be part {box} "
            f"of {spec.dtype} {spec.shape}",
            parameter=spec.name,
        )
    size_bytes = itemsize_bytes(spec.dtype)
    seeds = seeds_of(spec.name, spec.dtype, spec.shape)

    def one(block: Box) -> tuple[int, int]:
        run_elements, offsets = box_runs(spec.shape, block)
        if tensor.is_cuda and len(offsets) == 1:
            there = byte_view(cut_out(tensor, block, origin=box.offset).resolve_conj().resolve_neg().contiguous())
            place = int(offsets[0]) * size_bytes
            return _on_device(there, place, seeds.key_1, seeds.key_2)
        data = host_bytes(cut_out(tensor, block, origin=box.offset))
        lanes = kernels().runs_sum(data, run_elements * size_bytes, offsets * size_bytes, seeds.key_1, seeds.key_2)
        return cast(tuple[int, int], lanes)

    piece_bytes = min(PIECE_BYTES, max(SMALL_BYTES, -(-box.numel * size_bytes // num_workers())))
    return _added(map_all(one, split_box(box, piece_bytes // size_bytes)))


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
    total = ShardSum.zero()
    batch: list[HeldTensor] = []
    batch_bytes = 0
    for each in held:
        num_bytes = each.tensor.nbytes
        if each.box is not None or (num_bytes > _MANY_BYTES and not (together and are_plain((each.tensor,)))):
            total += shard_sum(each)
            continue
        batch.append(each)
        batch_bytes += num_bytes
        if (batch_bytes > _BATCH_BYTES and not together) or len(batch) == _BATCH_TENSORS:
            total += _batch_sum(batch, table)
            batch, batch_bytes = [], 0
    return total + _batch_sum(batch, table)


def _batch_sum(batch: list[HeldTensor], table: TensorTable | None) -> ShardSum:
    """The sum of small whole tensors."""
    if not batch:
        return ShardSum.zero()
    tensors: list[torch.Tensor] = [each.tensor for each in batch]
    if not are_plain(tensors):
        return sum(map(shard_sum, batch), ShardSum.zero())
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


def sum_of_runs(
    addresses: Int64s,
    sizes: Int64s,
    places: Int64s,
    keys_1: npt.NDArray[np.uint64],
    keys_2: npt.NDArray[np.uint64],
) -> ShardSum:
    """What runs of bytes add to the model's digest, on all cores.

    Args:
        addresses, sizes: first byte and bytes of each, in memory that the caller keeps.
        places: where each run lies in its whole tensor, in bytes.
        keys_1, keys_2: of its tensor, see `keys_of`.

    Raises:
        UnsupportedError: as for `check_addresses`.
    """
    check_addresses(addresses, sizes)
    if int(sizes.max(initial=0)) > _RUN_BYTES:  # a sum of a run is that of its pieces
        num_pieces = np.maximum(1, -(-sizes // _RUN_BYTES))
        of = np.repeat(np.arange(len(sizes)), num_pieces)
        starts = _RUN_BYTES * (np.arange(len(of)) - np.repeat(np.cumsum(num_pieces) - num_pieces, num_pieces))
        addresses, places, keys_1, keys_2 = addresses[of] + starts, places[of] + starts, keys_1[of], keys_2[of]
        sizes = np.minimum(sizes[of] - starts, _RUN_BYTES)
    ends = np.cumsum(sizes)
    cuts = {
        *range(0, len(sizes), _RUN_TENSORS),
        *np.searchsorted(ends, np.arange(_RUN_BYTES, int(sizes.sum()), _RUN_BYTES)).tolist(),
        len(sizes),
    }

    def run(cut: slice) -> tuple[int, int]:
        lanes = kernels().runs_of_many(addresses[cut], sizes[cut], places[cut], keys_1[cut], keys_2[cut])
        return cast(tuple[int, int], lanes)

    return _added(map_all(run, (slice(start, end) for start, end in itertools.pairwise(sorted(cuts)))))


def patch_sum(
    spec: TensorSpec, positions: torch.Tensor, old_values: torch.Tensor, new_values: torch.Tensor
) -> ShardSum:
    """What a change of some elements adds to the model's digest, in time proportional to the change.

    Args:
        spec: the whole tensor's spec.
        positions: int64 or uint32, 1-D, strictly rising: flat indices into the contiguous global tensor.
        old_values: 1-D, of the spec's dtype, as many: the elements before. They must be the true ones;
            otherwise the digest goes wrong, which is what it is for.
        new_values: likewise, after.

    Raises:
        InvalidRequestError: lengths or dtypes don't fit, or positions do not rise within the tensor.
    """
    where = _checked_positions(spec, positions, old_values, new_values)
    size_bytes = itemsize_bytes(spec.dtype)
    seeds = seeds_of(spec.name, spec.dtype, spec.shape)
    kind, number = _NARROW.get(size_bytes, (np.uint64, size_bytes // 8))
    old, new = (np.require(host_bytes(values).view(kind), requirements="A") for values in (old_values, new_values))
    words_each = 1 if size_bytes in _NARROW else number
    kernel = kernels().patch_sum_narrow if size_bytes in _NARROW else kernels().patch_sum_wide

    def one(cut: slice) -> tuple[int, int]:
        items = slice(cut.start * words_each, cut.stop * words_each)
        lanes = kernel(where[cut], old[items], new[items], number, seeds.key_1, seeds.key_2)
        return cast(tuple[int, int], lanes)

    step = max(SMALL_BYTES // 8, -(-len(where) // num_workers()))
    return _added(map_all(one, (slice(start, min(start + step, len(where))) for start in range(0, len(where), step))))


def change_sum(
    spec: TensorSpec, width_bytes: int, places: npt.NDArray[np.int64], old: npt.NDArray[Any], new: npt.NDArray[Any]
) -> ShardSum:
    """As `patch_sum`, of pieces of 1, 2, 4 or 8 bytes whatever the dtype, on the caller's thread.

    Args:
        spec: the whole tensor's spec.
        width_bytes: size of a piece; the tensor's bytes are a multiple of it.
        places: which pieces of the whole, contiguous tensor; the caller has checked them.
        old, new: unsigned integers of that width, as many.
    """
    seeds = seeds_of(spec.name, spec.dtype, spec.shape)
    if width_bytes in _NARROW:
        _, shift = _NARROW[width_bytes]
        lanes = kernels().patch_sum_narrow(places, old, new, shift, seeds.key_1, seeds.key_2)
    else:
        lanes = kernels().patch_sum_wide(places, old, new, 1, seeds.key_1, seeds.key_2)
    return _added([lanes])


def model_digest(specs: Iterable[TensorSpec], total: ShardSum) -> str:
    """Closes the sum of all parts with one term for each tensor: empty tensors and names count too.

    Args:
        specs: every tensor of the model in any order; of each, name, dtype and global shape count.
        total: sum of `shard_sum` over an exact partition of every tensor.

    Returns:
        "wsd2:" and 32 hex digits: lane A, then lane B.

    Raises:
        InvalidRequestError: two specs have one name.
    """
    terms = specs.derive(_terms) if isinstance(specs, TensorTable) else _terms(specs)
    total += terms
    return f"{MODEL_DIGEST_PREFIX}{total.lane_a:016x}{total.lane_b:016x}"


def _terms(specs: Iterable[TensorSpec]) -> ShardSum:
    """The terms of all tensors; nothing is kept of each."""
    seen: set[str] = set()
    lane_a = lane_b = 0
    for spec in specs:
        if spec.name in seen:
            raise InvalidRequestError("a model names every tensor once", parameter=spec.name)
        seen.add(spec.name)
        seeds = _seeds(spec.name, spec.dtype, spec.shape)
        lane_a += seeds.term_a
        lane_b += seeds.term_b
    return ShardSum(lane_a=lane_a & _MASK, lane_b=lane_b & _MASK)


def patched_digest(digest: str, change: ShardSum) -> str:
    """The model's digest after a change, from the one before it and the sum of `patch_sum`.

    Raises:
        InvalidRequestError: `digest` is not of the form that `model_digest` gives, or of another release's.
    """
    check_model_digest(digest)
    digits = digest.removeprefix(MODEL_DIGEST_PREFIX)
    if not digest.startswith(MODEL_DIGEST_PREFIX) or len(digits) != 32 or set(digits) - set("0123456789abcdef"):
        raise InvalidRequestError(f"{digest[:64]!r} is no model digest of the form wsd2:<32 hex>")
    after = ShardSum(lane_a=int(digits[:16], 16), lane_b=int(digits[16:], 16)) + change
    return f"{MODEL_DIGEST_PREFIX}{after.lane_a:016x}{after.lane_b:016x}"


def digest_of(held: Iterable[HeldTensor], specs: Iterable[TensorSpec]) -> str:
    """The model's digest where one process holds all of it, on all cores.

    Args:
        held: parts that cover every tensor of `specs` exactly once. Of an iterator each is used up before the next is
            taken, so it may reuse its memory; a list is read in whatever order is fast.
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
    total = shard_sums(checked(), table, together=True) if together else sum(map(shard_sum, checked()), ShardSum.zero())
    for name, spec in by_name.items():
        if name in whole and name not in boxes:
            continue
        if not spec.shape and name not in boxes:
            raise ManifestMismatchError("the tensor is not held", parameter=name)
        check_partition(spec.shape, boxes.get(name, []), parameter=name)
    return model_digest(specs if isinstance(specs, TensorTable) else by_name.values(), total)


def warm_up() -> None:
    """Loads the compiled kernels, once a process: about a second that the first sync would pay otherwise."""
    kernels()


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Seeds:
    key_1: int
    key_2: int
    term_a: int
    term_b: int


@functools.lru_cache(maxsize=1 << 18)  # of who asks tensor by tensor; a table keeps its own (`keys_of`)
def seeds_of(name: str, dtype: str, shape: tuple[int, ...]) -> _Seeds:
    """As `_seeds`, kept."""
    return _seeds(name, dtype, shape)


def keys_of(specs: Sequence[TensorSpec]) -> npt.NDArray[np.uint64]:
    """The keys of each tensor: two rows, one entry a tensor."""
    keys = np.empty((2, len(specs)), dtype=np.uint64)
    for place, spec in enumerate(specs):
        seeds = _seeds(spec.name, spec.dtype, spec.shape)
        keys[:, place] = seeds.key_1, seeds.key_2
    return keys


def _seeds(name: str, dtype: str, shape: tuple[int, ...]) -> _Seeds:
    """What a tensor's keys and its own term start from. Depends on nothing but the arguments."""
    text = f"wsd2\n{dtype}\n{','.join(map(str, shape))}\n{name}".encode()
    keys, terms = (xxhash.xxh3_128_intdigest(text, seed=seed) for seed in (0, 1))
    return _Seeds(key_1=keys & _MASK, key_2=keys >> 64, term_a=terms & _MASK, term_b=terms >> 64)


def _on_device(data: torch.Tensor, place: int, key_1: int, key_2: int) -> tuple[int, int]:
    from weightsync.codec.device_digest import run_sum  # with numba, as `kernels`

    with torch.cuda.device(data.device):
        return run_sum(data, place, key_1, key_2)


def lanes_of_whole(
    addresses: Int64s, sizes: Int64s, keys_1: npt.NDArray[np.uint64], keys_2: npt.NDArray[np.uint64]
) -> tuple[int, int]:
    """As `sum_of_runs` of whole tensors, on the caller's thread alone, without the GIL."""
    check_addresses(addresses, sizes)
    lanes = kernels().runs_of_many(addresses, sizes, np.zeros(len(sizes), np.int64), keys_1, keys_2)
    return cast(tuple[int, int], lanes)


def _added(lanes: Iterable[tuple[int, int]]) -> ShardSum:
    pairs = list(lanes)
    return ShardSum(lane_a=sum(a for a, _ in pairs) & _MASK, lane_b=sum(b for _, b in pairs) & _MASK)


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
