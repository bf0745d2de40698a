"""The digests: definition, shards, patches, fixed vectors."""

from __future__ import annotations

import math
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.codec import digest_reference as reference
from weightsync.codec import digest as module
from weightsync.codec import model_digest as model_module
from weightsync.codec import tensor_digest as tensor_digest_module
from weightsync.codec.digest import PatchPart, digest_of, patch_sum, patch_sums, shard_sum, shard_sums
from weightsync.codec.model_digest import ShardSum, model_digest, patched_digest
from weightsync.codec.tensor_digest import tensor_digest, tensor_digests
from weightsync.errors import InvalidRequestError, ManifestMismatchError
from weightsync.plan.boxes import split_box, whole_box
from weightsync.tensors import tensor_from_bytes
from weightsync.types import Box, HeldTensor, TensorSpec
from weightsync.types.dtypes import ITEMSIZE_BYTES
from weightsync.types.table import TensorTable

DTYPES = [name for name in ITEMSIZE_BYTES if hasattr(torch, name)]
quick = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])


def counting(dtype: str, shape: tuple[int, ...], start: int = 0) -> torch.Tensor:
    """A tensor whose bytes are start, start + 1, … mod 256."""
    raw = [(start + at) % 256 for at in range(math.prod(shape) * ITEMSIZE_BYTES[dtype])]
    return tensor_from_bytes(torch.tensor(raw, dtype=torch.uint8), dtype=dtype, shape=shape)


def random_tensor(dtype: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    number = math.prod(shape) * ITEMSIZE_BYTES[dtype]
    raw = torch.randint(
        2 if dtype == "bool" else 256, (number,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )
    return tensor_from_bytes(raw, dtype=dtype, shape=shape)


def spec_for(tensor: torch.Tensor, name: str = "w") -> TensorSpec:
    return TensorSpec(name=name, dtype=str(tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape))


def whole(tensor: torch.Tensor, name: str = "w") -> HeldTensor:
    return HeldTensor(spec=spec_for(tensor, name), box=None, tensor=tensor)


def part_of(tensor: torch.Tensor, box: Box, name: str = "w") -> HeldTensor:
    index = tuple(slice(start, start + extent) for start, extent in zip(box.offset, box.shape, strict=True))
    return HeldTensor(spec=spec_for(tensor, name), box=box, tensor=tensor[index])


def digest_of_tensors(tensors: dict[str, torch.Tensor]) -> str:
    return digest_of(
        (whole(tensor, name) for name, tensor in tensors.items()),
        [spec_for(tensor, name) for name, tensor in tensors.items()],
    )


@st.composite
def tensors(draw: st.DrawFn, min_numel: int = 0) -> torch.Tensor:
    shape = draw(st.lists(st.integers(0, 9), max_size=4).map(tuple).filter(lambda dims: math.prod(dims) >= min_numel))
    return random_tensor(draw(st.sampled_from(DTYPES)), shape, draw(st.integers(0, 2**31)))


@st.composite
def partitions(draw: st.DrawFn, box: Box) -> list[Box]:
    """Random cuts of a box along random axes, empty parts included."""
    if not box.shape or draw(st.integers(0, 3)) == 0:
        return [box]
    axis = draw(st.integers(0, len(box.shape) - 1))
    cut = draw(st.integers(0, box.shape[axis]))
    parts: list[Box] = []
    for start, extent in ((0, cut), (cut, box.shape[axis] - cut)):
        offset, shape = list(box.offset), list(box.shape)
        offset[axis] += start
        shape[axis] = extent
        parts += draw(partitions(Box(offset=tuple(offset), shape=tuple(shape))))
    return parts


# --- the definition ---------------------------------------------------------------------------------------------


@quick
@given(st.data())
def test_a_part_sums_as_the_definition_says(data: st.DataObject) -> None:
    tensor = data.draw(tensors())
    parts = data.draw(partitions(whole_box(tuple(tensor.shape))))
    held = part_of(tensor, data.draw(st.sampled_from(parts)))
    assert held.box is not None
    wanted = reference.sum_of_part("w", held.spec.dtype, tensor.shape, held.box.offset, held.tensor)
    found = shard_sum(held)
    assert (found.lane_a, found.lane_b) == wanted


@quick
@given(st.lists(tensors(), min_size=1, max_size=3))
def test_a_model_digests_as_the_definition_says(model: list[torch.Tensor]) -> None:
    named = {f"layers.{index}.ü": tensor for index, tensor in enumerate(model)}
    expected = reference.digest_of_model({name: (spec_for(tensor).dtype, tensor) for name, tensor in named.items()})
    assert digest_of_tensors(named) == expected


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_dtype_in_odd_shards(dtype: str) -> None:
    tensor = random_tensor(dtype, (7, 13), 5)
    expected = reference.sum_of_part("w", dtype, (7, 13), (0, 0), tensor)
    columns = [part_of(tensor, Box(offset=(0, at), shape=(7, extent))) for at, extent in ((0, 3), (3, 9), (12, 1))]
    copied = [HeldTensor(spec=part.spec, box=part.box, tensor=part.tensor.contiguous()) for part in columns]
    for parts in (columns, copied):
        total = sum((shard_sum(part) for part in parts), ShardSum.zero())
        assert (total.lane_a, total.lane_b) == expected


VECTORS = [
    (
        "model.embed_tokens.weight",
        "bfloat16",
        (3, 5),
        "wsd2:a53ae009061c66253db474ae2fdf044b",
        "xxh3:3aff095d8101ed257acbb0a0182c3b1a",
    ),
    ("lm_head.bias", "float32", (), "wsd2:f59537fe35ec1bccb373bdbaaee0d259", "xxh3:eb70bf5fc779e9e6a6111d53e80a3db5"),
    ("empty", "float16", (0, 4), "wsd2:30605667fca11ab29af67b73733e9e1e", "xxh3:99aa06d3014798d86001c324468d497f"),
    (
        "rotary.inv_freq",
        "float64",
        (3,),
        "wsd2:fed5e719637ed0375a392f50d974b2f2",
        "xxh3:bcb7bbf24fcbfc6148f9b79ee9ca6dac",
    ),
    ("codes", "uint8", (2, 11), "wsd2:6f2621b6dc1412752247279b4d5760eb", "xxh3:0e6de6e1703db8ed8c8390c8c8802fd4"),
    ("fft", "complex128", (2,), "wsd2:79563b45d13ba6c52e6e0b52f927a843", "xxh3:25e7c9b3424ceed2457d9566b6fcd697"),
    ("größe", "int64", (2, 2), "wsd2:5580e73586e8427c4ebcd4e44f772b28", "xxh3:25e7c9b3424ceed2457d9566b6fcd697"),
    (
        "scales",
        "float8_e4m3fn",
        (1, 7),
        "wsd2:6c3e308aac9df2d58b0aa5b785fa772a",
        "xxh3:61ce291bc3a4357ddbb207821e6d5efe",
    ),
    ("half", "complex64", (3,), "wsd2:995ec6165c89ffb3ce8e2ba90a03b21d", "xxh3:bcb7bbf24fcbfc6148f9b79ee9ca6dac"),
]


@pytest.mark.parametrize(("name", "dtype", "shape", "model", "alone"), VECTORS)
def test_fixed_vectors(name: str, dtype: str, shape: tuple[int, ...], model: str, alone: str) -> None:
    tensor = counting(dtype, shape)
    assert digest_of_tensors({name: tensor}) == model
    assert tensor_digest(tensor) == alone


def test_fixed_vector_of_a_model() -> None:
    model = {name: counting(dtype, shape) for name, dtype, shape, _, _ in VECTORS}
    assert digest_of_tensors(model) == "wsd2:0da0905bd9885b18df62b66051678551"


# --- shards -----------------------------------------------------------------------------------------------------


@quick
@given(st.data())
def test_any_partition_adds_up_to_the_whole(data: st.DataObject) -> None:
    tensor = data.draw(tensors())
    boxes = data.draw(partitions(whole_box(tuple(tensor.shape))))
    parts = data.draw(st.permutations([part_of(tensor, box) for box in boxes]))
    assert digest_of(parts, [spec_for(tensor)]) == digest_of([whole(tensor)], [spec_for(tensor)])


@given(st.permutations(["a", "b", "c", "d"]))
def test_the_order_of_tensors_is_irrelevant(order: list[str]) -> None:
    model = {name: random_tensor("bfloat16", (3, 7), index) for index, name in enumerate("abcd")}
    assert digest_of_tensors({name: model[name] for name in order}) == digest_of_tensors(model)


@st.composite
def cut_tensors(draw: st.DrawFn) -> tuple[torch.Tensor, list[Box]]:
    """A tensor, cut along one dimension, and sometimes in smaller parts."""
    tensor = random_tensor(
        draw(st.sampled_from(DTYPES)), tuple(draw(st.lists(st.integers(1, 9), max_size=3))), draw(st.integers(0, 99))
    )
    boxes = split_box(whole_box(tuple(tensor.shape)), draw(st.integers(1, 20)))
    return tensor, [part for box in boxes for part in (draw(partitions(box)) if draw(st.booleans()) else [box])]


@quick
@given(st.lists(cut_tensors(), min_size=1, max_size=3), st.randoms())
def test_parts_together_are_each_alone(model: list[tuple[torch.Tensor, list[Box]]], pick: random.Random) -> None:
    """Rows, columns, empty ones, strided ones and copies of them. Seen red: with all at the start of their tensors."""
    named = {f"w{index}": tensor for index, (tensor, _) in enumerate(model)}
    table = TensorTable.of(spec_for(tensor, name) for name, tensor in named.items())
    held = [part_of(tensor, box, f"w{index}") for index, (tensor, boxes) in enumerate(model) for box in boxes]
    pick.shuffle(held)
    copied = [HeldTensor(spec=part.spec, box=part.box, tensor=part.tensor.clone()) for part in held]
    alone = sum(map(shard_sum, held), ShardSum.zero())
    for parts in (held, copied):
        assert shard_sums(parts) == shard_sums(iter(parts), table) == shard_sums(parts, table, together=True) == alone
        assert digest_of(parts, table) == digest_of_tensors(named)


@pytest.mark.parametrize("together", [False, True])
def test_only_parts_of_several_runs_are_summed_one_by_one(monkeypatch: pytest.MonkeyPatch, together: bool) -> None:
    """Seen red: each part with a box was one by itself."""
    tensor = random_tensor("bfloat16", (300, 700), 3)
    rows = [part_of(tensor, Box(offset=(at, 0), shape=(3, 700))) for at in range(0, 300, 3)]
    columns = [part_of(tensor, Box(offset=(0, at), shape=(300, 350))) for at in (0, 350)]
    large = part_of(random_tensor("uint8", (3, 300_000), 4), Box(offset=(1, 0), shape=(2, 300_000)), "large")
    held = [*rows, *columns, large]
    alone = sum(map(shard_sum, held), ShardSum.zero())
    added: list[Box | None] = []
    add = module.PartSums.add
    monkeypatch.setattr(module.PartSums, "add", lambda sums, each: (added.append(each.box), add(sums, each)))
    assert shard_sums(held, together=together) == alone
    assert added == [each.box for each in (columns if together else [*columns, large])]


def test_a_part_that_does_not_fit_is_refused_before_the_next_is_asked_for() -> None:
    tensor = random_tensor("float32", (4, 3), 0)
    box = Box(offset=(1, 0), shape=(2, 3))
    for spec, wrong in (
        (spec_for(tensor), tensor),
        (spec_for(tensor), tensor[1:3].view(torch.int32)),
        (spec_for(tensor[:2]), tensor[1:3]),
    ):
        asked = iter([HeldTensor(spec=spec, box=box, tensor=wrong), whole(tensor)])
        with pytest.raises(ManifestMismatchError, match="can't be part"):
            shard_sums(asked, together=True)
        assert next(asked, None) is not None


def test_large_tensors_go_through_several_threads_and_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = random_tensor("bfloat16", (1031, 2053), 1)  # 4 MiB, odd rows
    once = shard_sum(whole(tensor))
    alone = tensor_digest(tensor)
    monkeypatch.setattr(model_module, "num_cores", lambda: 7)
    for each in (model_module, tensor_digest_module):
        monkeypatch.setattr(each, "PIECE_BYTES", 99_999)
    assert shard_sum(whole(tensor)) == once
    turned = tensor.t().contiguous().t()
    assert not turned.is_contiguous()
    assert shard_sum(whole(turned)) == once
    assert tensor_digest(turned) == alone
    rows = [Box(offset=(at, 0), shape=(extent, 2053)) for at, extent in ((0, 300), (300, 731))]
    assert shard_sum(part_of(tensor, rows[0])) + shard_sum(part_of(tensor, rows[1])) == once


def test_views_that_share_memory_in_odd_ways() -> None:
    base = random_tensor("float32", (40,), 3)
    for view in (base[1:8].expand(3, 7), base[::3], base[5:6].reshape(()), base[3:3], base.view(5, 8).t()):
        assert shard_sum(whole(view)) == shard_sum(whole(view.clone(memory_format=torch.contiguous_format)))
        assert tensor_digest(view) == tensor_digest(view.clone(memory_format=torch.contiguous_format))
    complex_one = torch.view_as_complex(base.view(20, 2))
    for lazy in (complex_one.conj(), complex_one.conj().imag):
        plain = lazy.resolve_conj().resolve_neg().clone()
        assert tensor_digest(lazy) == tensor_digest(plain)
        assert shard_sum(whole(lazy)) == shard_sum(whole(plain))
    odd = torch.frombuffer(bytearray(range(65)), dtype=torch.uint8)[1:].view(torch.uint8)
    assert shard_sum(whole(odd)) == shard_sum(whole(odd.clone()))


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([Box(offset=(0, 0), shape=(2, 3))], "hold 6 of 12"),
        ([whole_box((4, 3)), Box(offset=(0, 0), shape=(1, 3))], "overlap"),
        ([], "hold 0 of 12"),
    ],
)
def test_what_is_no_partition_is_named(parts: list[Box], message: str) -> None:
    tensor = random_tensor("float32", (4, 3), 0)
    with pytest.raises(ManifestMismatchError, match=message) as caught:
        digest_of([part_of(tensor, box) for box in parts], [spec_for(tensor)])
    assert caught.value.parameter == "w"


def test_held_tensors_that_do_not_fit_the_manifest() -> None:
    tensor = random_tensor("float32", (4, 3), 0)
    with pytest.raises(ManifestMismatchError, match="does not have"):
        digest_of([whole(tensor, "other")], [spec_for(tensor)])
    with pytest.raises(ManifestMismatchError, match="in the manifest"):
        digest_of([whole(tensor.half())], [spec_for(tensor)])
    with pytest.raises(ManifestMismatchError, match="can't be part"):
        shard_sum(HeldTensor(spec=spec_for(tensor), box=None, tensor=tensor[:2]))
    with pytest.raises(ManifestMismatchError, match="can't be part"):
        shard_sum(HeldTensor(spec=spec_for(tensor), box=None, tensor=tensor.view(torch.int32)))
    with pytest.raises(ManifestMismatchError):
        digest_of([], [TensorSpec(name="step", dtype="int64", shape=())])
    with pytest.raises(ManifestMismatchError):
        digest_of([whole(torch.tensor(1), "step")] * 2, [TensorSpec(name="step", dtype="int64", shape=())])
    with pytest.raises(InvalidRequestError, match="once"):
        model_digest([spec_for(tensor)] * 2, ShardSum.zero())


# --- patches ----------------------------------------------------------------------------------------------------


@quick
@given(st.data())
def test_a_patch_equals_the_recomputed_digest(data: st.DataObject) -> None:
    old = data.draw(tensors(min_numel=1))
    spec = spec_for(old)
    chosen = sorted(data.draw(st.sets(st.integers(0, old.numel() - 1))))
    positions = torch.tensor(chosen, dtype=torch.int64)
    values = random_tensor(spec.dtype, (len(chosen),), 77)
    new = old.clone()
    size = old.element_size()
    new.view(-1).view(torch.uint8).view(-1, size)[positions] = values.view(torch.uint8).view(-1, size)
    before = old.view(-1).view(torch.uint8).view(-1, size)[positions].view(-1).view(old.dtype)
    change = patch_sum(spec, positions, before, values)
    assert change == patch_sum(spec, positions.to(torch.uint32), before, values)
    assert patched_digest(digest_of([whole(old)], [spec]), change) == digest_of([whole(new)], [spec])


def test_a_large_patch_goes_through_several_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "num_cores", lambda: 7)
    monkeypatch.setattr(module, "SMALL_BYTES", 8000)
    old = random_tensor("bfloat16", (1 << 20,), 1)
    positions = torch.arange(0, 1 << 20, 2)
    new = old.clone()
    new[positions] = random_tensor("bfloat16", (len(positions),), 2)
    for kind in (torch.uint8, torch.bfloat16, torch.int32, torch.int64, torch.complex128):
        a, b = old.view(torch.uint8).view(kind), new.view(torch.uint8).view(kind)
        places = torch.arange(a.numel())
        change = patch_sum(spec_for(a), places, a, b)
        assert shard_sum(whole(a)) + change == shard_sum(whole(b))


@st.composite
def changes_of(draw: st.DrawFn) -> tuple[PatchPart, ShardSum]:
    """Some elements of a tensor, or none; and what the whole tensor adds after, without what it added before."""
    old = draw(tensors())
    name = draw(st.sampled_from("abc"))
    chosen = sorted(draw(st.sets(st.integers(0, old.numel() - 1)))) if old.numel() else []
    positions = torch.tensor(chosen, dtype=torch.int64)
    size = old.element_size()
    values = random_tensor(str(old.dtype).removeprefix("torch."), (len(chosen),), 77)
    new = old.clone()
    bits = [whole.view(-1).view(torch.uint8).view(-1, size) for whole in (old, new)]
    bits[1][positions] = values.view(torch.uint8).view(-1, size)
    before = bits[0][positions].view(-1).view(old.dtype)
    if draw(st.booleans()):  # what is not one piece of memory
        before, values = (torch.stack([part, part], dim=1)[:, 1] for part in (before, values))
    kind = draw(st.sampled_from([torch.int64, torch.uint32]))
    was, becomes = shard_sum(whole(old, name)), shard_sum(whole(new, name))
    change = ShardSum(
        lane_a=(becomes.lane_a - was.lane_a) % (1 << 64), lane_b=(becomes.lane_b - was.lane_b) % (1 << 64)
    )
    return (spec_for(old, name), positions.to(kind), before, values, draw(st.booleans())), change


@quick
@given(changes=st.lists(changes_of(), max_size=6), step=st.integers(1, 9))
def test_many_changes_sum_as_the_tensors_do(changes: list[tuple[PatchPart, ShardSum]], step: int) -> None:
    """All dtypes, no element or some, cut anywhere and several in one cut, on threads."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, "num_cores", lambda: 100)
        patched.setattr(module, "SMALL_BYTES", 8 * step)
        assert patch_sums(part for part, _ in changes) == [change for _, change in changes]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "complex64", "complex128"])
def test_positions_of_32_bits_are_those_of_64(dtype: str) -> None:
    """Behind 2**31, too. Seen red: taken as negative ones."""
    places = np.array([2**31 - 1, 2**31, 2**32 - 1])
    old, new = (random_tensor(dtype, (3,), seed) for seed in (1, 2))
    spec = TensorSpec(name="w", dtype=dtype, shape=(2**32,))
    wide, narrow = (torch.from_numpy(places.astype(kind)) for kind in (np.int64, np.uint32))
    assert patch_sum(spec, narrow, old, new) == patch_sum(spec, wide, old, new)


@pytest.mark.parametrize("kind", [torch.int64, torch.uint32], ids=str)
def test_positions_are_summed_where_they_lie(kind: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen red: uint32 ones, which is what travels, were copied as int64: three times their bytes."""
    positions = torch.arange(0, 3000, 3).to(kind)
    seen: list[np.ndarray[Any, Any]] = []
    real = module.change_sum

    def noted(spec: TensorSpec, width: int, places: Any, *values: Any) -> ShardSum:
        seen.append(places)
        return real(spec, width, places, *values)

    monkeypatch.setattr(module, "change_sum", noted)
    for dtype in ("bfloat16", "complex128"):
        old, new = (random_tensor(dtype, (1000,), seed) for seed in (1, 2))
        patch_sum(TensorSpec(name="w", dtype=dtype, shape=(3000,)), positions, old, new)
    assert len(seen) == 2
    assert all(np.shares_memory(places, positions.numpy()) for places in seen)


def test_many_changes_are_one_work_for_all_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen red: of many tensors each was a work of its own, whose end all cores waited for."""
    works: list[int] = []
    real = module.map_all

    def noted(function: Any, items: Any) -> Any:
        given_ = list(items)
        works.append(len(given_))
        return real(function, given_)

    monkeypatch.setattr(module, "num_cores", lambda: 4)
    monkeypatch.setattr(module, "SMALL_BYTES", 800)
    monkeypatch.setattr(module, "map_all", noted)
    old, new = (random_tensor("bfloat16", (50,), seed) for seed in (1, 2))
    spec = TensorSpec(name="w", dtype="bfloat16", shape=(50,))
    sums = patch_sums((spec, torch.arange(50), old, new, False) for _ in range(8))
    assert sums == [patch_sum(spec, torch.arange(50), old, new)] * 8
    assert works[0] == 4  # 100 elements each
    works.clear()
    apart = torch.stack([new, new], dim=1)[:, 0]
    assert patch_sums((spec, torch.arange(50), old, apart, False) for _ in range(3)) == sums[:3]
    assert [num for num in works if num] == [1, 1, 1], "of what does not lie in one piece there is one copy at a time"


def test_positions_that_were_seen_to_rise_are_not_looked_at_again() -> None:
    spec = TensorSpec(name="w", dtype="float32", shape=(3, 4))
    falling, old, new = torch.tensor([5, 2]), torch.zeros(2), torch.ones(2)
    assert patch_sums([(spec, falling, old, new, True)]) == [patch_sum(spec, falling.flip(0), old, new)]
    with pytest.raises(InvalidRequestError, match="rise"):
        patch_sums([(spec, falling, old, new, False)])
    with pytest.raises(InvalidRequestError, match="lie within"):
        patch_sums([(spec, torch.tensor([5, 12]), old, new, True)])


@pytest.mark.parametrize("positions", [[0, 0], [1, 0], [-1, 0], [0, 12]])
def test_positions_that_do_not_rise_within_the_tensor_are_refused(positions: list[int]) -> None:
    spec = TensorSpec(name="w", dtype="float32", shape=(3, 4))
    with pytest.raises(InvalidRequestError, match="rise"):
        patch_sum(spec, torch.tensor(positions), torch.zeros(2), torch.ones(2))


def test_patches_of_the_wrong_kind_are_refused() -> None:
    spec = TensorSpec(name="w", dtype="float32", shape=(3, 4))
    for positions, old, new in (
        (torch.tensor([0], dtype=torch.int32), torch.zeros(1), torch.ones(1)),
        (torch.tensor([[0]]), torch.zeros(1), torch.ones(1)),
        (torch.tensor([0]), torch.zeros(2), torch.ones(1)),
        (torch.tensor([0]), torch.zeros(1), torch.ones(1).double()),
    ):
        with pytest.raises(InvalidRequestError):
            patch_sum(spec, positions, old, new)
    for text in ("", "wsd2:12", "wsd:" + "0" * 32, "wsd2:" + "G" * 32, "wsd2:" + "-" + "0" * 31):
        with pytest.raises(InvalidRequestError, match="no model digest"):
            patched_digest(text, ShardSum.zero())


# --- the digest of one tensor -----------------------------------------------------------------------------------


@quick
@given(st.lists(tensors(), max_size=6))
def test_many_tensors_digest_as_each_alone(model: list[torch.Tensor]) -> None:
    named = {str(index): tensor for index, tensor in enumerate(model)}
    assert list(tensor_digests(named).items()) == [(name, tensor_digest(tensor)) for name, tensor in named.items()]


def test_large_and_small_tensors_together() -> None:
    sizes = [3 << 20, 10, 0, 2 << 20, 600_000, 600_000, 1]
    named = {str(index): random_tensor("uint8", (size,), index) for index, size in enumerate(sizes)}
    assert list(tensor_digests(named).items()) == [(name, tensor_digest(tensor)) for name, tensor in named.items()]


def test_many_threads_at_once_agree() -> None:
    model = {str(index): random_tensor("bfloat16", (1200, 1024), index) for index in range(3)}
    expected = digest_of_tensors(model), tensor_digests(model)
    with ThreadPoolExecutor(8) as pool:
        found = [pool.submit(lambda: (digest_of_tensors(model), tensor_digests(model))) for _ in range(24)]
        assert all(future.result(30) == expected for future in found)


def test_lanes_are_checked() -> None:
    with pytest.raises(InvalidRequestError):
        ShardSum(lane_a=-1, lane_b=0)
    with pytest.raises(InvalidRequestError):
        ShardSum(lane_a=0, lane_b=1 << 64)
    top = ShardSum(lane_a=(1 << 64) - 1, lane_b=1)
    assert top + ShardSum(lane_a=2, lane_b=3) == ShardSum(lane_a=1, lane_b=4)


def test_blocks_of_a_part_keep_its_place() -> None:
    tensor = random_tensor("uint8", (64, 33), 9)
    box = Box(offset=(5, 4), shape=(50, 20))
    blocks = [part_of(tensor, block) for block in split_box(box, 100)]
    assert sum((shard_sum(block) for block in blocks), ShardSum.zero()) == shard_sum(part_of(tensor, box))
