"""The sum of whole tensors all at once: equal to the sum one by one, whatever the tensors are like."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weightsync.codec import digest as module
from weightsync.codec import model_digest as model_module
from weightsync.codec import whole
from weightsync.codec.digest import digest_of, shard_sum, shard_sums
from weightsync.codec.model_digest import ShardSum, model_digest
from weightsync.codec.whole import whole_digest, whole_sum
from weightsync.errors import ManifestMismatchError
from weightsync.extract.module import ModuleWeightExtractor
from weightsync.tensors import spec_of, tensor_from_bytes
from weightsync.types import HeldTensor, TensorSpec, TensorTable
from weightsync.types.dtypes import ITEMSIZE_BYTES

KINDS = st.tuples(
    st.sampled_from(sorted(ITEMSIZE_BYTES)), st.lists(st.integers(0, 5), max_size=3).map(tuple), st.booleans()
)


def some(dtype: str, shape: tuple[int, ...], strided: bool, seed: int) -> torch.Tensor:
    numel = torch.Size(shape).numel()
    raw = (torch.arange(numel * ITEMSIZE_BYTES[dtype], dtype=torch.int64) * 37 + 11 * seed).to(torch.uint8)
    plain = tensor_from_bytes(raw % 2 if dtype == "bool" else raw, dtype=dtype, shape=shape)
    if not strided or len(shape) < 2:
        return plain
    return torch.empty_strided(shape, (1, *shape[:-1]), dtype=plain.dtype).copy_(plain) if len(shape) == 2 else plain


def table_of(tensors: list[torch.Tensor]) -> TensorTable:
    return TensorTable.of(spec_of(f"layers.{index}.weight", tensor) for index, tensor in enumerate(tensors))


def one_by_one(table: TensorTable, tensors: list[torch.Tensor]) -> ShardSum:
    held = [HeldTensor(spec=spec, box=None, tensor=tensor) for spec, tensor in zip(table, tensors, strict=True)]
    total = sum(map(shard_sum, held), ShardSum.zero())
    assert shard_sums(held) == total
    assert digest_of(held, table) == digest_of(iter(held), table) == model_digest(table, total)
    return total


@settings(max_examples=40, deadline=None)
@given(st.lists(KINDS, min_size=1, max_size=12))
def test_together_is_one_by_one(kinds: list[tuple[str, tuple[int, ...], bool]]) -> None:
    tensors = [some(*kind, seed=index) for index, kind in enumerate(kinds)]
    table = table_of(tensors)
    total = one_by_one(table, tensors)
    assert whole_sum(table, tensors) == total
    assert whole_sum(table, tensors, convert=True) == total
    assert whole_digest(table, tensors) == model_digest(table, total)


def test_small_ones_around_a_large_one_in_many_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole, "_PIECE_BYTES", 100)
    large = torch.rand(100_000)
    small = [torch.full((index % 9,), float(index)) for index in range(300)]
    for tensors in ([*small[:150], large, *small[150:]], small, [large], [torch.empty(0)], [small[0], small[9]]):
        table = table_of(tensors)
        assert whole_sum(table, tensors) == one_by_one(table, tensors)


FLOATS = ("float32", "float16", "bfloat16", "float64")


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from(FLOATS),
    st.lists(st.tuples(st.sampled_from(FLOATS), st.integers(0, 40), st.integers(0, 9)), min_size=1, max_size=20),
)
def test_converted_together_is_what_a_chunk_has(wanted: str, kinds: list[tuple[str, int, int]]) -> None:
    """Also of NaN and of what the other dtype has no room for, wherever it stands in its tensor."""
    model = torch.nn.Module()
    strange = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 1e300, 1e-300, 70000.0, 1e-40, -1.0])
    for index, (dtype, numel, place) in enumerate(kinds):
        values = torch.linspace(-3.0, 3.0, numel, dtype=torch.float64)
        values[place::10] = strange.double()[place % len(strange)]
        model.register_buffer(f"b{index}", values.to(getattr(torch, dtype)))
    model.register_buffer("steps", torch.tensor([3, 4]))
    extractor = ModuleWeightExtractor(model)
    found = extractor.local_whole(wanted)
    assert found is not None
    chunks = {
        name: tensor
        for chunk in extractor.extract_weights(wanted)
        for name, tensor in zip(chunk.names, chunk.tensors, strict=True)
    }
    table, _ = found
    expected = one_by_one(table, [chunks[spec.name] for spec in table])
    assert whole_sum(*found, convert=True) == expected
    assert shard_sums(extractor.local_shards(wanted)) == expected


@pytest.mark.parametrize("piece_bytes", [1 << 12, 1 << 13, 4 << 20])
def test_large_ones_together_are_each_alone(monkeypatch: pytest.MonkeyPatch, piece_bytes: int) -> None:
    """Cores take pieces of all tensors of a list, and neither a piece nor one that is not plain is lost."""
    monkeypatch.setattr(model_module, "_RUN_BYTES", piece_bytes)
    monkeypatch.setattr(module, "_MANY_BYTES", 2048)
    monkeypatch.setattr(whole, "_SMALL_BYTES", 2048)
    torch.manual_seed(0)
    tensors = {
        "exact": torch.randn(4, 1024),
        "more": torch.randn(4097),
        "odd": torch.randint(0, 256, (100_003,), dtype=torch.uint8),
        "empty": torch.empty(0),
        "one": torch.randn(1),
        "turned": torch.randn(70, 90).t(),
        "parameter": torch.nn.Parameter(torch.randn(3000)),
        "bfloat16": torch.randn(40_001).bfloat16(),
    }
    held = [HeldTensor(spec=spec_of(name, tensor), box=None, tensor=tensor) for name, tensor in tensors.items()]
    alone = sum((shard_sum(each) for each in held), ShardSum.zero())
    assert shard_sums(held) == alone
    assert shard_sums(held, together=True) == alone
    table = TensorTable([each.spec for each in held])
    assert whole_sum(table, [tensor.detach() for tensor in tensors.values()]) == alone


def test_what_is_not_the_tables_is_refused() -> None:
    tensors = [torch.ones(3), torch.ones(2, 2), torch.ones(4)]
    table = table_of(tensors)
    for wrong, name in (
        ([tensors[0], torch.ones(4), tensors[2]], "layers.1.weight"),
        ([tensors[0], tensors[1], torch.ones(4, dtype=torch.int32)], "layers.2.weight"),
        (tensors[:2], None),
        ([*tensors, tensors[0]], None),
    ):
        with pytest.raises(ManifestMismatchError) as caught:
            whole_sum(table, wrong)
        assert caught.value.parameter == name
    with pytest.raises(ManifestMismatchError):
        whole_sum(table, [tensors[0], torch.ones(4), tensors[2]], convert=True)


def test_a_list_held_twice_or_in_part_is_refused_as_an_iterator_is() -> None:
    """`digest_of` sums a list together; what it refuses stays the same."""
    tensor = torch.arange(6.0).reshape(2, 3)
    spec = TensorSpec(name="w", dtype="float32", shape=(2, 3))
    held = HeldTensor(spec=spec, box=None, tensor=tensor)
    for parts in ([held, held], []):
        for given_ in (parts, iter(parts)):
            with pytest.raises(ManifestMismatchError):
                digest_of(given_, [spec])
    scalar = TensorSpec(name="s", dtype="float32", shape=())
    with pytest.raises(ManifestMismatchError, match="not held"):
        digest_of([held], [spec, scalar])
    with pytest.raises(ManifestMismatchError):
        digest_of([HeldTensor(spec=spec, box=None, tensor=tensor.double())], [spec])


@pytest.mark.parametrize("source", FLOATS)
@pytest.mark.parametrize("wanted", FLOATS)
def test_nan_is_what_it_is_in_its_own_tensor(source: str, wanted: str) -> None:
    """torch converts the last elements of a tensor in another loop, and some builds write another NaN there."""
    model = torch.nn.Module()
    for index, numel in enumerate((33, 5, 100, 1, 47)):
        model.register_buffer(f"b{index}", torch.full((numel,), float("nan"), dtype=getattr(torch, source)))
    extractor = ModuleWeightExtractor(model)
    found = extractor.local_whole(wanted)
    assert found is not None
    (chunk,) = extractor.extract_weights(wanted)
    assert whole_sum(*found, convert=True) == one_by_one(found[0], list(chunk.tensors))
