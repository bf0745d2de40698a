"""The manifest of a version that is here: digests of whole parts as agents say, of tensors in several parts as read."""

from __future__ import annotations

import random
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weightsync import threads
from weightsync.codec import tensor_digest as digests
from weightsync.codec.model_digest import ShardSum, model_digest
from weightsync.codec.tensor_digest import tensor_digest
from weightsync.host.staged_version import proved_manifest
from weightsync.plan.safetensors import plan_layout
from weightsync.tensors import tensor_from_bytes
from weightsync.types import Box, Manifest, TensorSpec, Version
from weightsync.types.publication import Publication, Source
from weightsync.types.table import packed_digest

DTYPES = ["bool", "int8", "bfloat16", "float32", "complex64"]


def packed(tensors: dict[str, torch.Tensor]) -> bytes:
    return b"".join(packed_digest(tensor_digest(tensor)) for tensor in tensors.values())


def halves(spec: TensorSpec) -> list[TensorSpec]:
    """Two parts of a tensor, cut in its first dimension."""
    first, rest = spec.shape[0], spec.shape[1:]
    cuts = ((0, first // 2), (first // 2, first - first // 2))
    return [
        TensorSpec(
            name=spec.name,
            dtype=spec.dtype,
            shape=spec.shape,
            box=Box(offset=(start, *(0,) * len(rest)), shape=(size, *rest)),
        )
        for start, size in cuts
    ]


def granted_of(tensors: dict[str, torch.Tensor], specs: list[TensorSpec], held: list[list[TensorSpec]]) -> Any:
    """What agents have granted of these parts, by source; a part that is no whole has a digest that nobody asks for."""
    parts: list[TensorSpec] = []
    sources, told = [], []
    for index, those in enumerate(held):
        layout = plan_layout(those, source=index)
        parts += layout.parts
        sources.append(
            Source(
                endpoint="http://127.0.0.1:1", segment=f"weightsync-{index}", data_start=layout.data_start,
                data_end=layout.total_bytes, block_bytes=4096,
            )
        )  # fmt: skip
        told.append(
            b"".join(
                packed_digest(tensor_digest(tensors[part.name])) if part.box is None else b"?" * 16
                for part in layout.parts
            )
        )
    manifest = Manifest(version=Version(run_id="run", number=1), model_id="m", tensors=tuple(specs))
    publication = Publication(manifest=manifest, parts=tuple(parts), sources=tuple(sources))
    return {
        index: SimpleNamespace(
            grant=SimpleNamespace(
                publication=publication, proof=SimpleNamespace(part_digests=own, lane_a=index + 1, lane_b=7)
            )
        )
        for index, own in enumerate(told)
    }


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_each_tensor_has_the_digest_of_its_bytes(data: st.DataObject) -> None:
    """Whichever lie in parts, are empty, or are whole. Seen red: with the digests of parts in another order."""
    chance = random.Random(data.draw(st.integers(0, 999)))
    num_sources = data.draw(st.integers(1, 3))
    held: list[list[TensorSpec]] = [[] for _ in range(num_sources)]
    specs, tensors = [], dict[str, torch.Tensor]()
    for number in range(data.draw(st.integers(1, 6))):
        shape = tuple(data.draw(st.lists(st.integers(0, 9), max_size=3)))
        spec = TensorSpec(name=f"w{number}", dtype=data.draw(st.sampled_from(DTYPES)), shape=shape)
        specs.append(spec)
        memory = bytearray(chance.choices((0, 1), k=spec.nbytes) or 1)
        flat = torch.frombuffer(memory, dtype=torch.uint8)[: spec.nbytes]
        tensors[spec.name] = tensor_from_bytes(flat, dtype=spec.dtype, shape=shape)
        in_parts = shape and shape[0] > 1 and spec.nbytes and data.draw(st.booleans())
        for part in halves(spec) if in_parts else [spec] if spec.nbytes else []:
            held[data.draw(st.integers(0, num_sources - 1))].append(part)
    granted = granted_of(tensors, specs, held)
    found = proved_manifest(granted, lambda spec: tensors[spec.name])
    assert found.digests == packed(tensors)
    total = ShardSum(lane_a=sum(range(num_sources + 1)), lane_b=7 * num_sources)
    assert found.model_digest == model_digest(specs, total)


def test_without_memory_that_could_be_read_a_tensor_in_no_part_is_empty() -> None:
    specs = [TensorSpec(name="w", dtype="int8", shape=(3,)), TensorSpec(name="none", dtype="int8", shape=(0, 4))]
    tensors = {"w": torch.ones(3, dtype=torch.int8), "none": torch.empty(0, 4, dtype=torch.int8)}
    found = proved_manifest(granted_of(tensors, specs, [specs[:1]]), None)
    assert found.digests == packed(tensors)


def test_tensors_in_parts_are_read_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen red: the thread that pulls read one after the other."""
    specs = [TensorSpec(name=name, dtype="float32", shape=(300_000,)) for name in "ab"]
    tensors = {spec.name: torch.rand(spec.shape) for spec in specs}
    granted = granted_of(tensors, specs, [[halves(spec)[side] for spec in specs] for side in (0, 1)])
    both, true_digest = threading.Barrier(2, timeout=10), digests.tensor_digest

    def meets(tensor: torch.Tensor) -> str:
        both.wait()
        return true_digest(tensor)

    with monkeypatch.context() as patch:
        patch.setattr(threads, "num_cores", lambda: 2)
        patch.setattr(threads, "_pool", None)
        patch.setattr(digests, "tensor_digest", meets)
        patch.setattr("weightsync.host.staged_version.tensor_digest", meets, raising=False)
        found = proved_manifest(granted, lambda spec: tensors[spec.name])
        pool = threads._pool
        assert pool is not None
        pool.shutdown()
    assert found.digests == packed(tensors)
