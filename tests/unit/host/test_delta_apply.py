"""Deltas onto a staging: any tensors, cut into any parts over any sources; and what is found when one is wrong."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.codec.test_delta_hostile import bounded
from tests.unit.host.test_staging import bytes_of_box, partitions
from weightsync.codec.delta import encode_delta
from weightsync.codec.delta_cost import CostModel
from weightsync.codec.delta_units import plan_units
from weightsync.codec.digest import shard_sum
from weightsync.codec.model_digest import ShardSum
from weightsync.errors import DeltaFormatError, DigestMismatchError
from weightsync.host import delta_apply, delta_pull
from weightsync.host.delta_apply import Changed, DeltaApplier, united
from weightsync.host.delta_pull import fetch_blobs, lay_out_patch, places_to_keep
from weightsync.host.staging import Held, Staging, Target, TargetMap
from weightsync.memory import MappedSegment, folder
from weightsync.plan.boxes import whole_box
from weightsync.plan.safetensors import Layout, plan_layout
from weightsync.tensors import byte_array, tensor_from_bytes
from weightsync.transfer.source import Arrived, Destination
from weightsync.types import Box, HeldTensor, Manifest, TensorSpec, Version, itemsize_bytes
from weightsync.types.publication import DeltaLink, Source
from weightsync.types.transfer_messages import Transport

_V1 = Version(run_id="run", number=1)
_HELD = Held(version=_V1, model_digest="wsd2:" + "0" * 32, digests=("0" * 32,))
_UNIT_BYTES = 64
"""Small, so that units cut through parts."""


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of this test alone, and small units."""
    monkeypatch.setattr(folder, "_path", str(tmp_path))
    monkeypatch.setattr(delta_apply, "plan_units", functools.partial(plan_units, unit_bytes=_UNIT_BYTES))
    yield tmp_path
    assert os.listdir(tmp_path) == []


class Laid:
    """A source's bytes of one version, laid out as a publisher does it."""

    def __init__(self, layout: Layout, wholes: dict[str, bytes]) -> None:
        self.layout = layout
        self.data = np.zeros(layout.total_bytes - layout.data_start, np.uint8)
        total = ShardSum.zero()
        for part in layout.parts:
            box = part.box or whole_box(part.shape)
            raw = np.frombuffer(bytes_of_box(wholes[part.name], part, box), np.uint8)
            start = part.offset - layout.data_start
            self.data[start : start + part.nbytes] = raw
            tensor = tensor_from_bytes(torch.from_numpy(raw.copy()), dtype=part.dtype, shape=box.shape)
            total += shard_sum(HeldTensor(spec=part, box=part.box, tensor=tensor))
        self.digest = f"{total.lane_a:016x}{total.lane_b:016x}"

    @property
    def source(self) -> Source:
        return Source(
            endpoint="http://127.0.0.1:1", segment="weightsync-1", data_start=self.layout.data_start,
            data_end=self.layout.total_bytes, block_bytes=4096,
        )  # fmt: skip

    def fill(self, target: Target) -> TargetMap:
        places = TargetMap(target, self.source, self.layout.parts)
        memory = places.borrow(self.layout.data_start, len(self.data))
        if memory is None:
            places.put(self.layout.data_start, self.data)
        else:
            memory[:] = self.data
        return places

    def delta_to(self, other: Laid) -> bytes:
        ordered = sorted(self.layout.parts, key=lambda part: (part.offset, part.nbytes))
        parts = [(part.offset - self.layout.data_start, part.nbytes, part.dtype) for part in ordered]
        return encode_delta(
            self.data, other.data, plan_units(parts, unit_bytes=_UNIT_BYTES), costs=CostModel(),
            base=bytes.fromhex(self.digest), result=bytes.fromhex(other.digest),
        ).to_bytes()  # fmt: skip


LINK = DeltaLink(
    base=1, version=2, transfer_id="0" * 32, block_checksums="0" * 16,
    blob=Source(
        endpoint="http://h", segment="weightsync-2", data_start=0, data_end=1, block_bytes=4096
    ),
)  # fmt: skip


@settings(deadline=None, max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_change_of_any_parts(data: st.DataObject) -> None:
    """Bytes, sum, and what is laid out for engines. Seen to fail: places of a box taken for places of the tensor."""
    chance = np.random.default_rng(data.draw(st.integers(0, 9999)))
    num_sources, num_versions = data.draw(st.integers(1, 2)), data.draw(st.integers(2, 4))
    density = data.draw(st.sampled_from([0.0, 0.02, 0.3, 1.0]))
    specs, held = [], [[] for _ in range(num_sources)]
    wholes: list[dict[str, bytes]] = [{} for _ in range(num_versions)]
    for number in range(data.draw(st.integers(1, 3))):
        dtype = data.draw(st.sampled_from(["int8", "bfloat16", "float32", "int64", "complex64", "bool"]))
        shape = data.draw(st.lists(st.integers(0, 9), max_size=3).map(tuple))
        spec = TensorSpec(name=f"w{number}", dtype=dtype, shape=shape)
        specs.append(spec)
        width = itemsize_bytes(dtype)
        most = 2 if dtype == "bool" else 256
        now = chance.integers(0, most, (spec.nbytes // width, width), dtype=np.uint8)
        for version in wholes:
            version[spec.name] = now.tobytes()
            rows = chance.random(len(now)) < density
            now = now.copy()
            now[rows, 0] = chance.integers(0, most, int(rows.sum()), dtype=np.uint8)
        boxes = data.draw(partitions(shape))
        for box in boxes if spec.nbytes else []:
            whole = len(boxes) == 1 and data.draw(st.booleans())
            part = TensorSpec(name=spec.name, dtype=dtype, shape=shape, box=None if whole else box)
            held[data.draw(st.integers(0, num_sources - 1))].append(part)
    manifest = Manifest(version=_V1, model_id="m", tensors=tuple(specs))
    staging = Staging()
    try:
        target = staging.open(manifest)
        changes: list[delta_apply.Changed] = []
        for index, parts in enumerate(held):
            layout = plan_layout(parts, source=index)
            versions = [Laid(layout, whole) for whole in wholes]
            places = versions[0].fill(target)
            applier = DeltaApplier(versions[0].source, layout.parts, places, versions[0].digest, keep_at_most=1_000_000)
            for old, new in itertools.pairwise(versions):
                applier.apply(memoryview(old.delta_to(new)), LINK)
                applier.check_result(new.digest)
            applier.check_result(versions[-1].digest)
            found = applier.changed
            assert found is not None
            changes += found
        for spec in specs:
            assert byte_array(target.tensor_of(spec)).tobytes() == wholes[-1][spec.name], spec
        check_patch(changes, target, {spec.name: spec for spec in specs}, wholes)
    finally:
        staging.close()


def check_patch(
    changes: list[delta_apply.Changed], target: Target, specs: dict[str, TensorSpec], wholes: list[dict[str, bytes]]
) -> None:
    """Its positions are those at which any version differed from the one before, its values the last ones."""
    laid_out = lay_out_patch(changes, target, _HELD, 1 << 20)
    assert laid_out is not None
    patch, segment = laid_out
    named = {tensor.name: tensor for tensor in patch.tensors}
    with segment, MappedSegment(patch.segment, need_bytes=1) as mapped:
        for name, spec in specs.items():
            width = itemsize_bytes(spec.dtype)
            rows = [np.frombuffer(whole[name], np.uint8).reshape(-1, width) for whole in wholes]
            differ = np.zeros(len(rows[0]), bool)
            for old, new in itertools.pairwise(rows):
                differ |= (old != new).any(axis=1)
            expected = np.flatnonzero(differ)
            assert (name in named) == bool(len(expected))
            if not len(expected):
                continue
            tensor = named[name]
            assert tensor.count == len(expected)
            positions = np.frombuffer(mapped.memory, np.uint32, tensor.count, tensor.positions_offset)
            assert (positions == expected).all()
            start = tensor.values_offset
            assert bytes(mapped.memory[start : start + width * tensor.count]) == rows[-1][expected].tobytes()


def made(wrong: str, count: int = 100) -> tuple[Staging, DeltaApplier, bytes]:
    spec = TensorSpec(name="w", dtype="bfloat16", shape=(count,))
    layout = plan_layout([spec])
    before = np.arange(count, dtype=np.uint16)
    after = before.copy()
    after[::7] += 1
    old, new = (Laid(layout, {"w": words.tobytes()}) for words in (before, after))
    staging = Staging()
    places = old.fill(staging.open(Manifest(version=_V1, model_id="m", tensors=(spec,))))
    blob = old.delta_to(new)
    if wrong == "an element that changes":
        places.put(layout.data_start + 14, np.full(1, 77, np.uint8))
    elif wrong == "the base's name":
        old.digest = "1" * 32
    elif wrong == "the result's name":
        new.digest = "1" * 32
        blob = old.delta_to(new)
    return staging, DeltaApplier(old.source, layout.parts, places, old.digest, keep_at_most=5), blob


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ("an element that changes", DeltaFormatError),
        ("the base's name", DigestMismatchError),
        ("the result's name", DigestMismatchError),
    ],
)
def test_what_is_not_as_the_sender_had_it_is_found(wrong: str, error: type[Exception]) -> None:
    """Seen to fail: differences add up, so a sum of them does not see a wrong bit of the base."""
    staging, applier, blob = made(wrong)
    try:
        with pytest.raises(error):
            applier.apply(memoryview(blob), LINK)
    finally:
        staging.close()


def test_more_changes_than_are_wanted_are_not_kept() -> None:
    staging, applier, blob = made("nothing")
    applier.apply(memoryview(blob), LINK)
    assert applier.changed is None
    with pytest.raises(DigestMismatchError):
        applier.check_result("2" * 32)
    staging.close()


@pytest.mark.parametrize(
    ("dtypes", "num_deltas", "most"),
    [
        (["bfloat16"], 1, 100), (["bfloat16", "int8"], 1, 120), (["float32"], 1, 75), (["complex64"], 1, 100),
        (["bfloat16"], 2, 150),
    ],
)  # fmt: skip
def test_no_more_places_are_kept_than_fit(dtypes: list[str], num_deltas: int, most: int) -> None:
    """Into 600 bytes with their values. Seen red: as many were kept as fit without."""
    tensors = [TensorSpec(name=dtype, dtype=dtype, shape=(9,)) for dtype in dtypes]
    assert places_to_keep(tensors, 600, num_deltas) == most


def test_nothing_is_kept_of_a_delta_that_says_that_it_is_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen red: all were kept until there were too many."""
    monkeypatch.setattr(f"{__name__}._UNIT_BYTES", 1 << 13)
    monkeypatch.setattr(delta_apply, "plan_units", functools.partial(plan_units, unit_bytes=1 << 13))
    staging, applier, blob = made("nothing", count=7 << 12)
    applier._keep_at_most = 4095  # of 4096
    monkeypatch.setattr(delta_apply, "Changed", lambda **_: pytest.fail("places were kept"))
    applier.apply(memoryview(blob), LINK)
    assert applier.changed is None
    staging.close()


def test_a_place_that_is_kept_takes_four_bytes() -> None:
    """Seen red: eight."""
    staging, applier, blob = made("nothing")
    applier._keep_at_most = 15
    applier.apply(memoryview(blob), LINK)
    for found in (applier.changed, applier.changed):
        assert found is not None
        assert [(each.places.tolist(), each.places.dtype) for each in found] == [([*range(0, 100, 7)], np.uint32)]
    staging.close()


def test_a_part_of_a_tensor_with_too_many_elements_gives_no_patch() -> None:
    """Seen red: the part's own elements were counted, and its places went out modulo 2**32: 5 and 9."""
    half = 1 << 32
    part = TensorSpec(name="w", dtype="uint8", shape=(2, half), box=Box(offset=(1, 0), shape=(1, half)), source=1)
    change = Changed(spec=part, places=np.array([half + 5, half + 9]), width_bytes=1)
    staging = SimpleNamespace(
        segment=SimpleNamespace(memory=bytes(1)), place=lambda _: SimpleNamespace(offset=0, nbytes=0)
    )
    assert lay_out_patch([change], staging, _HELD, 1 << 20) is None  # type: ignore[arg-type]


@settings(deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 1 << 40) | st.integers(0, 30), max_size=12), min_size=1, max_size=5),
    st.booleans(),
    st.sampled_from([1, 2, 8]),
)
def test_any_finds_are_one_that_rises(finds: list[list[int]], rising: bool, each: int) -> None:
    """Of one delta, of several, of several sources; none, one, the same ones, in any order. Seen red: with finds put
    behind each other and not looked at; and two parts of a complex number were two elements."""
    pieces = [np.array(sorted(set(find)) if rising else find, np.int64) for find in finds]
    expected = np.unique(np.concatenate(pieces))
    found = united(pieces)
    assert found.dtype == np.int64
    assert found.tolist() == expected.tolist()
    assert delta_pull._elements(found, each).tolist() == np.unique(expected // each).tolist()


def test_finds_of_one_delta_are_not_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A microsecond an element, on one core. Seen red: of a tensor with several units, and of complex numbers."""
    monkeypatch.setattr(np, "unique", lambda *_: pytest.fail("places that rise were hashed"))
    spec = TensorSpec(name="w", dtype="complex64", shape=(40, 10))
    before = np.arange(800, dtype=np.uint32)
    after = before.copy()
    after[::3] += 1
    staging = Staging()
    try:
        target = staging.open(Manifest(version=_V1, model_id="m", tensors=(spec,)))
        changes = []
        for row in (20, 0):  # the source that has the last rows comes first
            part = TensorSpec(name="w", dtype="complex64", shape=(40, 10), box=Box(offset=(row, 0), shape=(20, 10)))
            layout = plan_layout([part])
            old, new = (Laid(layout, {"w": words.tobytes()}) for words in (before, after))
            applier = DeltaApplier(old.source, layout.parts, old.fill(target), old.digest, keep_at_most=1000)
            applier.apply(memoryview(old.delta_to(new)), LINK)
            assert applier.changed is not None
            changes += applier.changed
        check_patch(changes, target, {"w": spec}, [{"w": words.tobytes()} for words in (before, after)])
    finally:
        staging.close()


def test_a_blobs_memory_is_written_by_what_comes_alone() -> None:
    """Seen red: all of it was filled with zeros first, and no other thread ran meanwhile."""
    size_bytes = 256 << 20
    blob = Source(
        endpoint="http://h", segment="weightsync-2", data_start=0, data_end=size_bytes, block_bytes=64 << 20
    )  # fmt: skip
    link = DeltaLink(base=1, version=2, transfer_id="0" * 32, block_checksums="0" * 64, blob=blob)
    granted = SimpleNamespace(
        endpoint="http://h",
        grant=SimpleNamespace(
            delta=(link,), source=0, publication=SimpleNamespace(sources=(blob,)), transport=Transport.TCP
        ),
    )
    agents = SimpleNamespace(shelf=None, blob=lambda *_: SimpleNamespace(close=lambda: None))

    def read(_source: object, blocks: list[int], into: Destination, arrived: Arrived) -> None:
        for block in blocks:
            memory = into(*blob.block(block))
            memory[:2] = bytes([block, 7])
            arrived(block, memory)

    with bounded():
        (found,) = fetch_blobs(agents, granted, read, lambda _: None)  # type: ignore[arg-type]
    assert (len(found), found.format, found.readonly) == (size_bytes, "B", False)
    assert [bytes(found[start : start + 2]) for start in range(0, size_bytes, 64 << 20)] == [
        bytes([block, 7]) for block in range(4)
    ]
