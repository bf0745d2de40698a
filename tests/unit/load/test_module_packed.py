"""ModuleWeightLoader with packed chunks: as tensor by tensor, and nothing is written before all are checked."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from weightsync.copying import pack
from weightsync.errors import ManifestMismatchError, StateError
from weightsync.load.module import ModuleWeightLoader
from weightsync.plan.buckets import plan_bucket
from weightsync.tensors import PackedUpdates
from weightsync.testing.contracts import bytes_of, manifest_of
from weightsync.types import dtype_name

NUM = 60
modes = pytest.mark.parametrize("in_place", [False, True], ids=["staged", "in place"])


class Model(nn.Module):
    """Enough small tensors for the compiled loop, one of strides of its own, an empty one, and a large one."""

    def __init__(self) -> None:
        super().__init__()
        self.small = nn.ParameterList(nn.Parameter(torch.zeros(index % 4, 3)) for index in range(NUM))
        self.register_buffer("turned", torch.zeros(4, 6, dtype=torch.int16).t())
        self.register_buffer("large", torch.zeros(100_000))


def weights(seed: int) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    found = {f"small.{index}": torch.rand(index % 4, 3, generator=made) for index in range(NUM)}
    found["turned"] = torch.randint(-9, 9, (6, 4), generator=made, dtype=torch.int16)
    return {**found, "large": torch.rand(100_000, generator=made)}


def packed(tensors: dict[str, torch.Tensor]) -> PackedUpdates:
    sizes = tuple(tensor.nbytes for tensor in tensors.values())
    layout = plan_bucket(sizes)
    bucket = torch.full((layout.total_bytes,), 0xEE, dtype=torch.uint8)
    pack(list(tensors.values()), layout.offsets, bucket)
    return PackedUpdates(
        names=tuple(tensors),
        dtypes=tuple(dtype_name(tensor.dtype) for tensor in tensors.values()),
        shapes=tuple(tuple(tensor.shape) for tensor in tensors.values()),
        offsets=layout.offsets,
        sizes=sizes,
        bucket=bucket,
    )


def state(model: nn.Module) -> dict[str, bytes]:
    return {name: bytes_of(tensor) for name, tensor in model.state_dict().items()}


@modes
def test_packed_chunks_become_the_weights(in_place: bool) -> None:
    model = Model()
    loader = ModuleWeightLoader(model, in_place=in_place)
    for number in (1, 2, 3):
        tensors = weights(number)
        manifest = manifest_of(tensors, number)
        loader.begin(manifest)
        names = list(tensors)
        for part in (names[:10], names[10:]):
            updates = packed({name: tensors[name] for name in part})
            loader.load_weights(updates)
            updates.bucket.fill_(0x11)  # the transport has it back
        loader.verify()
        held = {held.spec.name: bytes_of(held.tensor) for held in loader.live_tensors()}
        assert held == {name: bytes_of(tensor) for name, tensor in tensors.items()}
        loader.commit(manifest.version)
        assert state(model) == held


@modes
@pytest.mark.parametrize("wrong", ["dtype", "shape", "unknown", "again", "twice"])
def test_a_chunk_with_one_wrong_tensor_writes_nothing(in_place: bool, wrong: str) -> None:
    model = Model()
    loader = ModuleWeightLoader(model, in_place=in_place)
    loader.begin(manifest_of(weights(1)))
    before = state(model)
    updates = packed({name: tensor for name, tensor in weights(1).items() if name != "large"})
    at = 50
    if wrong == "dtype":
        kinds = list(updates.dtypes)
        kinds[at] = "int32"
        updates = dataclasses.replace(updates, dtypes=tuple(kinds))
    elif wrong == "shape":
        shapes = list(updates.shapes)
        shapes[at] = (3, 2)
        updates = dataclasses.replace(updates, shapes=tuple(shapes))
    elif wrong in ("unknown", "twice"):
        names = list(updates.names)
        names[at] = "nobody" if wrong == "unknown" else names[at - 4]
        updates = dataclasses.replace(updates, names=tuple(names))
    else:
        loader.load_weights(packed({"small.50": weights(1)["small.50"]}))
        before = state(model)
    with pytest.raises(ManifestMismatchError):
        loader.load_weights(updates)
    assert state(model) == before
    assert loader.healthy is not in_place if wrong == "again" else loader.healthy
    with pytest.raises(ManifestMismatchError, match="did not arrive"):
        loader.verify()


@modes
def test_names_that_are_ignored_are_left_out_of_a_packed_chunk(in_place: bool) -> None:
    model = Model()
    loader = ModuleWeightLoader(model, in_place=in_place, ignore=["extra"])
    tensors = {"extra": torch.ones(3), **weights(1)}
    manifest = manifest_of(tensors)
    loader.begin(manifest)
    loader.load_weights(packed(tensors))
    loader.verify()
    loader.commit(manifest.version)
    assert state(model) == {name: bytes_of(tensor) for name, tensor in weights(1).items()}


def test_no_chunk_without_a_bracket() -> None:
    with pytest.raises(StateError):
        ModuleWeightLoader(Model()).load_weights(packed(weights(1)))
