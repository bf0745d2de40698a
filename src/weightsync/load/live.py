"""ShardPatch: a change of a model whose live tensors are parts of the checkpoint's, at other places.

The whole version that is served lies in host memory too (the base). The change is proved there, in the checkpoint's
coordinates, and written into the live parts in the pause, through a `LivePlan`; the base follows after the pause.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from weightsync.errors import LoadError
from weightsync.load.live_plan import LivePlan
from weightsync.load.patching import Change, LivePatch
from weightsync.plan.boxes import one_run
from weightsync.tensors import byte_view
from weightsync.types import Box, Patch

_MOST = (1 << 32) - 1
_Chosen: TypeAlias = slice | torch.Tensor
"""Which elements of a change: a slice of them, or their numbers as int64."""


class ShardPatch:
    """As `LivePatch`, with the same order of calls, and `follow` or `close` at the end.

    Args:
        plan: where the checkpoint's tensors are live in this worker.
        base: whole tensors of what is served, by the checkpoint's name; not written before `follow`.

    Attributes:
        marked: tensors that change and are marked in the plan: they are written by `follow` alone.
        followed: whether the base may have the change.
    """

    def __init__(self, plan: LivePlan, base: Mapping[str, torch.Tensor]) -> None:
        self._plan = plan
        self._base = base
        self._whole = LivePatch()
        self._live = LivePatch()
        self._parts: dict[str, tuple[str, _Chosen]] = {}  # piece -> its tensor, which of its elements that change
        self.marked: list[str] = []
        self.followed = False

    def add(self, update: Patch) -> None:
        """Copies an update and checks it.

        Raises:
            WeightSyncError: as `LivePatch.add`.
        """
        whole = self._base[update.name]
        change = self._whole.add(whole, update)
        if update.name in self._plan.marked and change.positions.numel():
            self.marked.append(update.name)
        positions = change.positions.numpy()
        for index, piece in enumerate(self._plan.pieces.get(update.name, ())):
            chosen, local = _within(positions, tuple(whole.shape), piece.box)
            if not len(local):
                continue
            key = f"{update.name}[{index}]"
            part = Patch(name=key, positions=torch.from_numpy(local), values=change.new[chosen])
            self._live.add_checked(piece.live, part)
            self._parts[key] = update.name, chosen

    def gather(self) -> None:
        """Reads what is there now. Where no live element changes, some are looked at all the same: vLLM's sleep leaves
        other bytes at the same places.

        Raises:
            LoadError: a live element is not the base's, or can't be read.
        """
        self._whole.gather()
        self._live.gather()
        if not self._parts and (odd := self._plan.glance(self._base)) is not None:
            raise LoadError("live elements are not those of the version that is served", parameter=odd)
        before = {change.spec.name: change.old for change in self._whole.changes()}
        for change in self._live.changes():
            name, chosen = self._parts[change.spec.name]
            expected = before[name][chosen]
            if not torch.equal(change.old.view(torch.uint8), expected.view(torch.uint8)):
                raise LoadError("live elements are not those of the version that is served", parameter=name)

    def changes(self) -> Iterator[Change]:
        """What it does, in the checkpoint's coordinates; true after `gather`."""
        return self._whole.changes()

    @property
    def num_elements(self) -> int:
        """How many elements of the checkpoint change."""
        return sum(change.positions.numel() for change in self.changes())

    def check_memory(self) -> None:
        self._live.check_memory()

    def apply(self) -> None:
        """See `LivePatch.apply`: the live parts alone."""
        self._live.apply()

    def undo(self) -> None:
        """See `LivePatch.undo`: of the live parts, and of the base where it has followed."""
        try:
            self._live.undo()
        finally:
            if self.followed:
                self._whole.undo()
                self.followed = False

    def follow(self) -> None:
        """The base takes the change. Outside of the pause, where the change stays; or in it, for what is `marked`.

        Raises:
            LoadError: the base is not what it was. It is of no version then.
        """
        self.followed = True
        self._whole.apply()

    def into_base(self) -> None:
        """Writes what was added into the base, whatever is there: it is of no version until the rest has come."""
        for change in self._whole.changes():
            there = byte_view(self._base[change.spec.name]).view(-1, change.new.element_size())
            there[change.positions.to(torch.int64)] = byte_view(change.new).view(-1, change.new.element_size())

    def close(self) -> None:
        """Lets go of everything. Idempotent."""
        self._whole.close()
        self._live.close()
        self._parts = {}


def _within(
    positions: npt.NDArray[np.uint32], shape: tuple[int, ...], box: Box
) -> tuple[_Chosen, npt.NDArray[np.uint32]]:
    """Which of these positions of a tensor lie in a box, and where in the box; both rise. Positions rise too, so that
    those in a box of one run follow one another."""
    if box.shape == shape:
        return slice(0, len(positions)), positions
    run = one_run(shape, box)
    if run is not None:
        first, count = run
        low, high = bisect_left(positions, first), bisect_left(positions, first + count)
        return slice(low, high), positions[low:high] - np.uint32(first & _MOST)  # none is there where it is cut
    rest, step = positions.astype(np.int64), 1
    for size in shape:
        step *= size
    inside = np.ones(len(positions), dtype=bool)
    local = np.zeros(len(positions), dtype=np.int64)
    for size, start, extent in zip(shape, box.offset, box.shape, strict=True):
        step //= size
        place, rest = np.divmod(rest, step) if step > 1 else (rest, np.zeros_like(rest))
        place = place - start
        inside &= (place >= 0) & (place < extent)
        local = local * extent + place
    chosen = np.flatnonzero(inside)
    return torch.from_numpy(chosen), local[chosen].astype(np.uint32)
