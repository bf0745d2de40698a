"""Staging: the one piece of shared memory that a host's TCP pulls go into, and that its engines load from.

It is a safetensors file of whole tensors, whatever parts they came in. It is dirty from the first byte of a version
until that version was proved, and while it is dirty its stamp is empty, so nobody takes it for one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from weightsync.errors import NoRoomError, SharedMemoryError, StateError
from weightsync.memory import Segment
from weightsync.memory.folder import folder
from weightsync.plan.boxes import box_runs, whole_box
from weightsync.plan.safetensors import Layout, plan_layout
from weightsync.tensors import tensor_from_bytes
from weightsync.types import Manifest, TensorSpec, Version
from weightsync.types.process import of_one_process
from weightsync.types.publication import Source
from weightsync.types.table import SpecTable

_Bytes: TypeAlias = npt.NDArray[np.uint8]

_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Held:
    """What a staging has, proved, and nobody has written since: what a delta may build on.

    Attributes:
        version, model_digest: of the publication.
        digests: of each of its sources, as `SourceProof.digest` has them.
    """

    version: Version
    model_digest: str
    digests: tuple[str, ...]


class Target:
    """The segment of one version while it is filled.

    Attributes:
        layout, segment, offsets: where what lies.
        was: what it had, proved, when it was opened last.
    """

    def __init__(self, layout: Layout, segment: Segment) -> None:
        self.layout = layout
        self.segment = segment
        self._places = {part.name: part for part in layout.parts}
        self.offsets: Mapping[str, int] = {part.name: part.offset for part in layout.parts}
        self._version: Version | None = None
        self._proof = ""
        self._there: set[tuple[int, int]] = set()
        self.was: Held | None = None

    def begin(self, version: Version, proof: str) -> None:
        """What arrives from now on is of that version, and of those checksums; what arrived of others is forgotten."""
        if (version, proof) != (self._version, self._proof):
            self._version, self._proof = version, proof
            self._there.clear()

    def forget(self) -> None:
        """Whatever arrived does not count any more."""
        self._version = None
        self.was = None
        self._there.clear()

    def has(self, version: Version, source: int, block: int) -> bool:
        """Whether that block is there, and was right."""
        return version == self._version and (source, block) in self._there

    def note(self, version: Version, source: int, block: int) -> None:
        """That block has arrived, and is where it belongs."""
        assert version == self._version
        self._there.add((source, block))

    def place(self, name: str) -> TensorSpec:
        """Where a tensor lies."""
        return self._places[name]

    def tensor_of(self, spec: TensorSpec) -> torch.Tensor:
        """The tensor as it lies there."""
        place = self._places[spec.name]
        flat = torch.frombuffer(self.segment.memory, dtype=torch.uint8)[place.offset : place.offset + place.nbytes]
        return tensor_from_bytes(flat, dtype=place.dtype, shape=place.shape)


@of_one_process
class Staging:
    """Holds one segment from pull to pull. One pull at a time; closed by its owner.

    Attributes:
        before_write: called before what is there is written, or forgotten: when it has returned no other host reads it.
            What it raises ends the attempt, with nothing changed.
    """

    def __init__(self) -> None:
        self.before_write: Callable[[], None] = lambda: None
        self._target: Target | None = None
        self._model_id = ""
        self._in_use = False
        self._held: Held | None = None

    @property
    def held(self) -> Held | None:
        """What is there, proved; None from `open` to `verified`, and where nothing is."""
        return self._held

    @property
    def size_bytes(self) -> int:
        """Bytes that it has room for; 0 where there is none yet."""
        return 0 if self._target is None else self._target.layout.total_bytes

    def open(self, manifest: Manifest, proof: str = "") -> Target:
        """The target for a version, dirty. What an earlier, broken attempt at the same version has brought is kept.

        Args:
            manifest: of the version.
            proof: what tells its bytes from others of the same name, e.g. of a trainer that was started again.

        Raises:
            StateError: engines still load from it, or what an earlier pull returned is not closed.
            NoRoomError: no room; nothing was changed but that the old segment is gone.
        """
        if self._in_use:
            raise StateError(
                "the staging is in use: engines load from it, or what an earlier pull returned was not closed; "
                "close() that, or pull in a `with` block",
                state_left="nothing was changed",
            )
        self.before_write()
        layout = manifest.table.derive(plan_layout)
        target = self._target
        if target is not None and target.segment.is_lost:
            _logger.warning("the staging's segment is lost, and replaced: its file in %s was taken away", folder())
            target = None
        if target is None or (target.layout is not layout and target.layout != layout):
            self.close()
            try:
                target = self._target = Target(layout, Segment(max(1, layout.total_bytes), mapped=False))
            except SharedMemoryError as error:
                raise NoRoomError(error.message, state_left="nothing is staged") from error
        target.begin(manifest.version, proof)
        target.was, self._held = self._held, None
        self._model_id = manifest.model_id
        self._stamp(target, None)
        return target

    def verified(self, held: Held) -> None:
        """It holds that version, proved; until `release` nobody may write it."""
        assert self._target is not None
        self._stamp(self._target, held.version)
        self._held = held
        self._in_use = True

    def release(self) -> None:
        """Engines have let go of it, and the next version may come. What is there counts when this one is asked for
        again."""
        self._in_use = False

    def forget(self) -> None:
        """What is there is not what was proved any more: every block is fetched anew."""
        self._held = None
        if self._target is not None:
            self._target.forget()
        self.before_write()  # last: whatever it raises, nobody builds on what is there

    def close(self) -> None:
        """Gives the memory back. Idempotent."""
        with contextlib.suppress(StateError):  # who reads on reads zeros, and finds the checksum wrong
            self.before_write()
        target, self._target = self._target, None
        self._held = None
        self._in_use = False
        if target is not None:
            target.segment.give_back_pages()
            target.segment.close()

    def _stamp(self, target: Target, version: Version | None) -> None:
        header = target.layout.header(version, self._model_id)
        target.segment.memory[: len(header)] = header


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Placed:
    """A source's parts against a target's; found out once for as long as both layouts stay the same.

    Attributes:
        parts: those that have any bytes, as they lie.
        starts: first byte of each.
        shifts: how far parts lie from where the target has them; None among them where one is not whole.
    """

    parts: Sequence[TensorSpec]
    starts: npt.NDArray[np.int64]
    shifts: frozenset[int | None]


def _placed(parts: SpecTable, there: SpecTable) -> _Placed:
    ordered = sorted((part for part in parts if part.nbytes), key=lambda part: part.offset)
    place = {part.name: part.offset for part in there}
    return _Placed(
        parts=ordered,
        starts=np.array([part.offset for part in ordered], dtype=np.int64),
        shifts=frozenset(None if part.box is not None else place[part.name] - part.offset for part in ordered),
    )


class TargetMap:
    """From a source's blocks to their places in the target.

    Where the source's data lies as the target's does, blocks are received where they belong. Else each is received
    aside, and its pieces are copied to their places.
    """

    def __init__(self, target: Target, source: Source, parts: Sequence[TensorSpec]) -> None:
        self._target = target
        self._source = source
        table = parts if isinstance(parts, SpecTable) else SpecTable(parts)
        placed = table.derive(_placed, target.layout.parts)
        self._parts, self._starts = placed.parts, placed.starts
        shift = target.layout.data_start - source.data_start
        alike = target.layout.total_bytes - source.data_end == shift and placed.shifts <= {shift}
        self._shift = shift if alike else None

    def into(self, offset: int, length: int) -> memoryview:
        """See `transfer.source.Destination`."""
        if self._shift is not None:
            return self._target.segment.memory[offset + self._shift : offset + self._shift + length]
        return np.empty(length, np.uint8).data  # `take` is called when all of it was written, and was right

    def take(self, block: int, data: memoryview) -> None:
        """A block has arrived, and was right: its bytes go where they belong."""
        if self._shift is None:
            self.put(self._source.block(block)[0], np.frombuffer(data, dtype=np.uint8))

    def borrow(self, offset: int, length: int) -> _Bytes | None:
        """The target's own memory for a range of the source; None where the range does not lie there in one piece."""
        if self._shift is None:
            return None
        return np.frombuffer(self._target.segment.memory, np.uint8, length, offset + self._shift)

    def get(self, offset: int, length: int) -> _Bytes:
        """A range of the source as the target has it now, copied."""
        data = np.empty(length, np.uint8)
        self._move(offset, data, out=True)
        return data

    def put(self, offset: int, data: _Bytes) -> None:
        """A range of the source goes where it belongs."""
        self._move(offset, data, out=False)

    def parts_in(self, offset: int, length: int) -> Iterator[tuple[TensorSpec, int, int]]:
        """The parts that a range of the source touches, each with the first byte and the end of what it touches."""
        end = offset + length
        first = max(0, int(np.searchsorted(self._starts, offset, side="right")) - 1)
        for part in self._parts[first:]:
            if part.offset >= end:
                return
            low, high = max(offset, part.offset), min(end, part.offset + part.nbytes)
            if low < high:
                yield part, low, high

    def _move(self, offset: int, data: _Bytes, *, out: bool) -> None:
        flat = np.frombuffer(self._target.segment.memory, dtype=np.uint8)
        for part, low, high in self.parts_in(offset, len(data)):
            self._move_part(part, low - part.offset, data[low - offset : high - offset], flat, out=out)

    def _move_part(self, part: TensorSpec, first: int, data: _Bytes, flat: _Bytes, *, out: bool) -> None:
        """Bytes of a part, from its byte `first` on, to (or out of) the runs that its box has in the whole tensor."""

        def move(place: _Bytes, piece: _Bytes) -> None:
            if out:
                piece[:] = place
            else:
                place[:] = piece

        box = part.box or whole_box(part.shape)
        itemsize = part.nbytes // box.numel
        run_elements, offsets = box_runs(part.shape, box)
        run = run_elements * itemsize
        number, within = divmod(first, run)
        last = -(-(first + len(data)) // run)
        starts = self._target.place(part.name).offset + offsets[number:last] * itemsize
        steps = np.diff(starts)
        if len(steps) > 1 and (steps == steps[0]).all():
            # columns: all runs but the first and the last, which may be cut, at once
            head, count = run - within, len(starts) - 2
            middle = np.ndarray((count, run), np.uint8, flat, int(starts[1]), (int(steps[0]), 1))
            move(middle, data[head : head + count * run].reshape(count, run))
            move(flat[starts[0] + within : starts[0] + run], data[:head])
            rest = data[head + count * run :]
            move(flat[starts[-1] : starts[-1] + len(rest)], rest)
            return
        done = 0
        for start in starts:
            size = min(run - within, len(data) - done)
            move(flat[start + within : start + within + size], data[done : done + size])
            done, within = done + size, 0
