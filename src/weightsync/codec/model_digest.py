"""Digest of a whole model that does not depend on its sharding: what bytes, changes and names add to it. No torch.

It detects accidents (a lost, late, swapped, torn or mis-placed byte), NOT an adversary: whoever may choose the bytes
can build two models with one digest. The definition, the reasons and the test vectors are in design/0002-digests.md and
docs/digests.md; the format "wsd2:" never changes meaning. `codec.digest` has the same for torch's tensors.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias, cast

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from weightsync.addresses import Int64s, check_addresses, loops
from weightsync.errors import InvalidRequestError
from weightsync.plan.boxes import box_runs, split_box, whole_box
from weightsync.threads import PIECE_BYTES, SMALL_BYTES, map_all
from weightsync.types import Box, TensorSpec, itemsize_bytes
from weightsync.types.manifest import MODEL_DIGEST_PREFIX, check_model_digest
from weightsync.types.process import num_cores
from weightsync.types.table import TensorTable

Bytes = npt.NDArray[np.uint8]
Places: TypeAlias = npt.NDArray[np.int64] | npt.NDArray[np.uint32]

_RUN_TENSORS = 1024
_RUN_BYTES = 4 << 20
"""What one thread sums at a time of a batch: at most so many tensors, and twice so many bytes."""

_MASK = (1 << 64) - 1
kernels = functools.partial(loops, "weightsync.codec.kernels", needs="the model digest needs numba")
NARROW: dict[int, tuple[npt.DTypeLike, int]] = {1: (np.uint8, 3), 2: (np.uint16, 2), 4: (np.uint32, 1)}
"""Element bytes -> (numpy dtype, log2 of the elements in a word)."""


class ShardSum(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What some parts of a model, or a change, add to the model's digest: two lanes, each mod 2^64.

    Sums of disjoint parts add up, in any order. A sum says nothing by itself: `model_digest` closes it.

    Attributes:
        lane_a, lane_b: 0 to 2^64 - 1.
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
        return cls(lane_a=0, lane_b=0)


def box_sum(data: Bytes, spec: TensorSpec, box: Box | None) -> ShardSum:
    """What one held part adds to the model's digest, on all cores.

    Args:
        data: its bytes, 1-D and contiguous, in the box's row-major order.
        box: which part; None: all of it.
    """
    blocks = blocks_of(whole_box(spec.shape) if box is None else box, spec)
    ends = np.cumsum([block.numel for block in blocks]) * itemsize_bytes(spec.dtype)

    def one(index: int) -> tuple[int, int]:  # a block is a contiguous part of its box, and they follow one another
        return block_lanes(data[(ends[index - 1] if index else 0) : ends[index]], spec, blocks[index])

    return added(map_all(one, range(len(blocks))))


def blocks_of(box: Box, spec: TensorSpec) -> list[Box]:
    """What threads take at a time of a part of a tensor, in its row-major order; at most `PIECE_BYTES` each."""
    size_bytes = itemsize_bytes(spec.dtype)
    piece_bytes = min(PIECE_BYTES, max(SMALL_BYTES, -(-box.numel * size_bytes // num_cores())))
    return list(split_box(box, piece_bytes // size_bytes))


def block_lanes(data: Bytes, spec: TensorSpec, block: Box) -> tuple[int, int]:
    """What a block's bytes add, on the caller's thread, without the GIL."""
    size_bytes, seeds = itemsize_bytes(spec.dtype), seeds_of(spec.name, spec.dtype, spec.shape)
    run_elements, offsets = box_runs(spec.shape, block)
    lanes = kernels().runs_sum(data, run_elements * size_bytes, offsets * size_bytes, seeds.key_1, seeds.key_2)
    return cast(tuple[int, int], lanes)


def sum_of_runs(
    addresses: Int64s, sizes: Int64s, places: Int64s, keys_1: npt.NDArray[np.uint64], keys_2: npt.NDArray[np.uint64]
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

    return added(map_all(run, (slice(start, end) for start, end in itertools.pairwise(sorted(cuts)))))


def lanes_of_whole(
    addresses: Int64s, sizes: Int64s, keys_1: npt.NDArray[np.uint64], keys_2: npt.NDArray[np.uint64]
) -> tuple[int, int]:
    """As `sum_of_runs` of whole tensors, on the caller's thread alone, without the GIL."""
    check_addresses(addresses, sizes)
    lanes = kernels().runs_of_many(addresses, sizes, np.zeros(len(sizes), np.int64), keys_1, keys_2)
    return cast(tuple[int, int], lanes)


def added(lanes: Iterable[tuple[int, int]]) -> ShardSum:
    """The sum of pairs of lanes as kernels give them, which may have more than 64 bits together."""
    pairs = list(lanes)
    return ShardSum(lane_a=sum(a for a, _ in pairs) & _MASK, lane_b=sum(b for _, b in pairs) & _MASK)


def change_sum(
    spec: TensorSpec, width_bytes: int, places: Places, old: npt.NDArray[Any], new: npt.NDArray[Any]
) -> ShardSum:
    """As `patch_sum`, of pieces of 1, 2, 4 or a multiple of 8 bytes whatever the dtype, on the caller's thread.

    Args:
        width_bytes: size of a piece; the tensor's bytes are a multiple of it.
        places: which pieces of the whole, contiguous tensor; the caller has checked them.
        old, new: unsigned integers of that width, as many; of wider pieces all words of 8 bytes.
    """
    seeds = seeds_of(spec.name, spec.dtype, spec.shape)
    if width_bytes in NARROW:
        _, shift = NARROW[width_bytes]
        lanes = kernels().patch_sum_narrow(places, old, new, shift, seeds.key_1, seeds.key_2)
    else:
        lanes = kernels().patch_sum_wide(places, old, new, width_bytes // 8, seeds.key_1, seeds.key_2)
    return added([lanes])


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
