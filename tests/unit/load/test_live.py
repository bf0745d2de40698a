"""ShardPatch: a change in the checkpoint's coordinates enters parts of it that are live elsewhere, and leaves again."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weightsync.errors import InvalidRequestError, LoadError, ManifestMismatchError
from weightsync.load import live as module
from weightsync.load.live import ShardPatch
from weightsync.load.live_plan import LivePiece, LivePlan
from weightsync.types import Box, Patch

DTYPES = {name: getattr(torch, name) for name in ("int8", "bfloat16", "float32", "int64", "complex64")}


class Shards:
    """Tensors whose boxes are live in fused parameters, turned or not; a rank has some of them."""

    def __init__(self, seed: int, dtype: str) -> None:
        random = np.random.default_rng(seed)
        self.base: dict[str, torch.Tensor] = {}
        pieces: dict[str, tuple[LivePiece, ...]] = {}
        for number in range(4):
            name = f"t{number}"
            shape = tuple(int(size) for size in random.integers(1, 9, random.integers(1, 4)))
            count = int(np.prod(shape))
            self.base[name] = torch.from_numpy(random.integers(-99, 99, count)).to(DTYPES[dtype]).reshape(shape)
            boxes = []
            for _ in range(int(random.integers(0, 2)) + int(number < 2)):
                offset = tuple(int(random.integers(0, size)) for size in shape)
                box = Box(
                    offset=offset,
                    shape=tuple(int(random.integers(1, n - at + 1)) for n, at in zip(shape, offset, strict=True)),
                )
                boxes.append(box if random.random() < 0.7 else Box(offset=(0,) * len(shape), shape=shape))
            found = []
            for box in boxes:
                turned = bool(random.random() < 0.5)
                fused = torch.zeros((3, *(reversed(box.shape) if turned else box.shape)), dtype=DTYPES[dtype])
                live = fused[1].permute(*reversed(range(len(box.shape)))) if turned else fused[1]
                live.copy_(self.base[name][cut(box)])
                found.append(LivePiece(name=name, box=box, live=live, owner=f"fused {name}"))
            pieces[name] = tuple(found)
        self.plan = LivePlan(pieces=pieces, marked={}, _places={})
        self.random = random

    def change(self) -> tuple[list[Patch], dict[str, torch.Tensor]]:
        after = {name: tensor.clone() for name, tensor in self.base.items()}
        patches = []
        for name, tensor in after.items():
            flat = tensor.view(-1)
            where = np.flatnonzero(self.random.random(len(flat)) < 0.4)
            if len(where):
                values = (flat[torch.from_numpy(where)] + 1).to(tensor.dtype)
                patches.append(Patch(name=name, positions=torch.from_numpy(where).to(torch.uint32), values=values))
                flat[torch.from_numpy(where)] = values
        return patches, after

    def holds(self, whole: dict[str, torch.Tensor]) -> bool:
        return self.plan.compare(whole) == {}


def cut(box: Box) -> tuple[slice, ...]:
    return tuple(slice(at, at + size) for at, size in zip(box.offset, box.shape, strict=True))


@given(seed=st.integers(0, 10**6), dtype=st.sampled_from(sorted(DTYPES)))
def test_what_changes_is_what_the_whole_change_says(seed: int, dtype: str) -> None:
    """In each live part, nothing beside it; taken back to the bit; and the base follows what stays."""
    shards = Shards(seed, dtype)
    before = {name: tensor.clone() for name, tensor in shards.base.items()}
    patches, after = shards.change()
    patch = ShardPatch(shards.plan, shards.base)
    for each in patches:
        patch.add(each)
    patch.gather()
    assert {change.spec.name for change in patch.changes()} == {each.name for each in patches}
    for change in patch.changes():
        where = change.positions.to(torch.int64)
        assert torch.equal(change.old, before[change.spec.name].view(-1)[where])
        assert torch.equal(change.new, after[change.spec.name].view(-1)[where])
    assert shards.holds(before)
    patch.apply()
    assert shards.holds(after)
    assert all(torch.equal(shards.base[name], before[name]) for name in before), "not before it stays"
    patch.undo()
    assert shards.holds(before)
    patch.apply()
    patch.follow()
    patch.close()
    assert shards.holds(after)
    assert all(torch.equal(shards.base[name], after[name]) for name in after)


def test_live_elements_that_are_not_the_bases_are_seen_before_anything_is_written() -> None:
    shards = Shards(3, "bfloat16")
    patches, _ = shards.change()
    name = next(each.name for each in patches if shards.plan.pieces[each.name])
    piece = shards.plan.pieces[name][0]
    piece.live.add_(1)
    patch = ShardPatch(shards.plan, shards.base)
    for each in patches:
        patch.add(each)
    odd = piece.live.clone()
    with pytest.raises(LoadError, match="not those of the version that is served") as caught:
        patch.gather()
    assert caught.value.parameter == name
    assert torch.equal(piece.live, odd)


def test_what_was_proved_is_what_is_written_though_its_memory_has_another_owner_by_now() -> None:
    """Seen to fail: pieces were cut from the memory that the update had come in, not from the copy that was checked."""
    base = torch.zeros(8)
    live = base.clone()
    piece = LivePiece(name="t", box=Box(offset=(0,), shape=(8,)), live=live, owner="t")

    class Reused:
        """The update's memory, whose owner writes something else as soon as it was read once."""

        name = "t"

        def __init__(self) -> None:
            self.reads = 0

        positions = torch.tensor([1, 5], dtype=torch.uint32)

        @property
        def values(self) -> torch.Tensor:
            self.reads += 1
            return torch.tensor([100.0, 200.0]) if self.reads < 2 else torch.tensor([666.0, 667.0])

    patch = ShardPatch(LivePlan(pieces={"t": (piece,)}, marked={}, _places={}), {"t": base})
    patch.add(Reused())  # type: ignore[arg-type]
    patch.gather()
    patch.apply()
    assert [change.new.tolist() for change in patch.changes()] == [[100.0, 200.0]]
    assert live[[1, 5]].tolist() == [100.0, 200.0]
    patch.close()


# --- which elements of a change lie in a part ---


@st.composite
def positions_and_box(draw: st.DrawFn) -> tuple[list[int], tuple[int, ...], Box]:
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=4)))
    cuts = [sorted((draw(st.integers(0, size)), draw(st.integers(0, size)))) for size in shape]
    box = Box(offset=tuple(a for a, _ in cuts), shape=tuple(b - a for a, b in cuts))
    if draw(st.booleans()):  # a shard along the first dimension
        box = Box(offset=(box.offset[0], *[0] * (len(shape) - 1)), shape=(box.shape[0], *shape[1:]))
    chosen = draw(st.sets(st.integers(0, int(np.prod(shape)) - 1)))
    return sorted(chosen), shape, box


@given(positions_and_box())
def test_a_part_has_the_elements_that_numpy_finds_in_it(case: tuple[list[int], tuple[int, ...], Box]) -> None:
    positions, shape, box = case
    chosen, local = module._within(np.array(positions, dtype=np.uint32), shape, box)
    flat = np.arange(int(np.prod(shape))).reshape(shape)
    inside = flat[cut(box)].reshape(-1).tolist()
    expected = [at for at in positions if at in inside]
    assert local.dtype == np.uint32
    assert [inside[at] for at in local.tolist()] == expected
    assert torch.tensor(positions, dtype=torch.int64)[chosen].tolist() == expected


@pytest.mark.parametrize("rows", [(0, 1), (3, 2), (4, 1), (7, 1)], ids=str)
def test_parts_behind_the_places_that_have_numbers_have_no_change(rows: tuple[int, int]) -> None:
    """A tensor of 2^33 elements, of which a patch reaches the first half."""
    shape, positions = (8, 1 << 30), np.array([0, 5, 1 << 30, (3 << 30) + 7, (1 << 32) - 1], dtype=np.uint32)
    chosen, local = module._within(positions, shape, Box(offset=(rows[0], 0), shape=(rows[1], 1 << 30)))
    first, end = rows[0] << 30, sum(rows) << 30
    assert (local.astype(np.int64) + first).tolist() == [int(at) for at in positions if first <= at < end]
    assert positions[chosen].tolist() == (local.astype(np.int64) + first).tolist()


def test_a_part_that_is_one_run_is_a_slice_of_the_change() -> None:
    """Seen red: all of it was copied, twice as wide, for each part; and checked again."""
    base = torch.arange(60.0).reshape(12, 5)
    boxes = [Box(offset=(0, 0), shape=(12, 5)), Box(offset=(4, 0), shape=(4, 5))]
    pieces = tuple(LivePiece(name="t", box=box, live=base[cut(box)].clone(), owner="t") for box in boxes)
    patch = ShardPatch(LivePlan(pieces={"t": pieces}, marked={}, _places={}), {"t": base})
    where = torch.tensor([1, 19, 20, 33, 39, 40], dtype=torch.uint32)
    patch.add(Patch(name="t", positions=where, values=torch.arange(6.0) + 100))
    [change], (whole, rows) = list(patch.changes()), list(patch._live.changes())
    assert whole.positions.data_ptr() == change.positions.data_ptr()
    assert rows.positions.tolist() == [0, 13, 19]
    assert whole.new.data_ptr() == change.new.data_ptr()
    assert rows.new.data_ptr() == change.new[2:].data_ptr()
    assert rows.old.data_ptr() != change.old.data_ptr(), "what is live is read, and compared with the base"
    patch.gather()
    patch.apply()
    assert pieces[0].live.view(-1)[where.long()].tolist() == [100, 101, 102, 103, 104, 105]
    assert pieces[1].live.view(-1)[[0, 13, 19]].tolist() == [102, 103, 104]
    patch.close()


def test_a_part_of_another_size_or_dtype_than_its_box_is_not_written() -> None:
    base = torch.zeros(8)
    update = Patch(name="t", positions=torch.tensor([1, 7]), values=torch.ones(2))
    for live, kind in ((torch.zeros(7), InvalidRequestError), (torch.zeros(8).half(), ManifestMismatchError)):
        piece = LivePiece(name="t", box=Box(offset=(0,), shape=(8,)), live=live, owner="t")
        patch = ShardPatch(LivePlan(pieces={"t": (piece,)}, marked={}, _places={}), {"t": base})
        with pytest.raises(kind) as caught:
            patch.add(update)
        assert caught.value.parameter == "t[0]"
