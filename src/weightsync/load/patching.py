"""LivePatch: a change of some elements of live tensors, with what was there before. It is done as a whole, or undone.

Before the pause everything is copied, checked and gathered, and all memory is there. Inside it the change is written,
piece by piece on all cores: an element that is not what was gathered, or not what was written, is a failure.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from operator import itemgetter
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from weightsync.addresses import loops
from weightsync.errors import InvalidRequestError, LoadError, ManifestMismatchError, UnsupportedError
from weightsync.load.live_plan import place
from weightsync.load.spans import overlaps_itself
from weightsync.tensors import byte_array, gpus_of, spec_of, wait_idle
from weightsync.types import Patch, TensorSpec
from weightsync.types.process import num_cores

_PIECE_ELEMENTS = 1 << 16
"""What a thread does at a time at least, of one tensor or of several small ones: under a millisecond."""
_MAX_THREADS = 48
_MAX_TURNS = 8 * _MAX_THREADS
"""Of a large change a thread does more at a time: each turn costs some microseconds in which the others may wait."""
_BITS: dict[int, tuple[torch.dtype, npt.DTypeLike]] = {
    1: (torch.uint8, np.uint8),
    2: (torch.int16, np.uint16),
    4: (torch.int32, np.uint32),
    8: (torch.int64, np.uint64),
}
"""Element bytes -> integers of that width, in torch and in numpy."""

kernels = functools.partial(loops, "weightsync.load.patch_kernels", needs="a patch needs numba")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Change:
    """What a patch does to one tensor.

    Attributes:
        spec: the whole tensor's, in manifest coordinates.
        positions: uint32, 1-D, strictly rising.
        old: 1-D, as many, of the tensor's dtype: what is there, as it was read from the live weights.
        new: likewise, what will be there.
        checked: whether `positions` are the loader's own memory, and were seen to rise there.
    """

    spec: TensorSpec
    positions: torch.Tensor
    old: torch.Tensor
    new: torch.Tensor
    checked: bool = False


class LivePatch:
    """A change of live tensors, its undo record included. One thread at a time; owns copies of what it was given.

    The order: `add` for each tensor, `gather`, `apply`; `undo` at any time after `gather`, whatever of the change was
    written. `close` at the end.
    """

    def __init__(self) -> None:
        self._parts: dict[str, _Part] = {}
        self._turns: list[_Turn] = []
        self._gpus: frozenset[torch.device] = frozenset()
        self._num_threads = 1
        self._pool: ThreadPoolExecutor | None = None

    def add(self, live: torch.Tensor, update: Patch) -> Change:
        """Copies an update and checks it. The live tensor is not touched.

        Returns:
            The copy: the memory that the update came from may be another's by now.

        Raises:
            ManifestMismatchError: the update's dtype or its lengths don't fit.
            InvalidRequestError: its positions don't rise strictly within the tensor.
        """
        positions, values = update.positions, update.values
        _check_kind(live, update)
        where = _checked(positions, live.numel(), update.name)
        new = values.detach().cpu().contiguous().clone()
        return self._add(live, update.name, torch.from_numpy(where), new, checked=True)

    def add_checked(self, live: torch.Tensor, update: Patch) -> Change:
        """As `add`, of uint32 positions that rise, as it has seen of others. Nothing is copied: both tensors are
        contiguous host memory, which nobody writes until `close`.

        Raises:
            WeightSyncError: as `add`.
        """
        _check_kind(live, update)
        if update.positions.numel() and int(update.positions[-1]) >= live.numel():
            raise _not_within(live.numel(), update.name)
        return self._add(live, update.name, update.positions, update.values, checked=False)

    def _add(
        self, live: torch.Tensor, name: str, positions: torch.Tensor, new: torch.Tensor, *, checked: bool
    ) -> Change:
        old = torch.empty(len(positions), dtype=live.dtype)
        change = Change(spec=spec_of(name, live), positions=positions, old=old, new=new, checked=checked)
        self._parts[name] = _Part(live, change)
        return change

    def gather(self) -> None:
        """Reads what is there now: the undo record. Makes ready all that `apply` and `undo` need.

        Raises:
            LoadError: a live tensor was moved, or can't be read.
        """
        self.check_memory()
        self._turns = _turns(self._parts)
        self._gpus = gpus_of(part.live for part in self._parts.values())
        if self._pool is None:
            self._num_threads = min(num_cores(), _MAX_THREADS)
            self._pool = ThreadPoolExecutor(self._num_threads, thread_name_prefix="weightsync-patch")
        self._run("gather")

    def changes(self) -> Iterator[Change]:
        """What it does, tensor by tensor; true after `gather`. Borrowed until `close`."""
        for part in self._parts.values():
            yield part.change

    def apply(self) -> None:
        """Writes the new elements, once what is queued on their GPU's streams has read the old ones.

        Raises:
            LoadError: an element was not the one that was gathered, or is not the one that was written. Some, all or
                none of the change is there: `undo`.
        """
        wait_idle(self._gpus)
        self._run("apply")

    def undo(self) -> None:
        """Writes back what was gathered, and reads it again. Whatever was written before, exactly that is there then.

        Raises:
            LoadError: it is not: some elements are neither.
        """
        self.check_memory()
        self._run("undo")

    def check_memory(self) -> None:
        """Refuses to go on where the live tensors are elsewhere by now.

        Raises:
            LoadError: one was moved. Nothing was written.
        """
        for name, part in self._parts.items():
            if part.moved:
                raise LoadError("the live tensor was moved while a patch was under way", parameter=name)

    def close(self) -> None:
        """Lets go of everything. Idempotent."""
        self._parts = {}
        self._turns = []
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=False)

    def _run(self, step: str) -> None:
        """One step of every piece, on all cores. Returns when no thread touches live weights any more; after an
        error a device may have writes queued, and `undo` is queued behind them.

        Raises:
            Exception: of the turns that failed the first one's, by their order.
        """
        left = deque(enumerate(self._turns))
        failed: list[tuple[int, BaseException]] = []
        calls = []
        try:
            if len(self._turns) <= 1 or self._pool is None:
                _take_all(left, failed, step)
            else:
                try:
                    for _ in range(min(self._num_threads, len(self._turns))):
                        calls.append(self._pool.submit(_take_all, left, failed, step))
                except BaseException as error:  # the call of a thread that can't be started is queued all the same
                    if step != "undo":
                        left.clear()
                    pool, self._pool = self._pool, None
                    pool.shutdown(wait=True, cancel_futures=True)
                    _take_all(left, failed, step)  # of an undo: what no thread has taken
                    if step != "undo" or not isinstance(error, RuntimeError):
                        raise
            for call in calls:
                if not call.cancelled():
                    call.result()
            if failed:
                raise min(failed, key=itemgetter(0))[1]
        finally:
            left.clear()
            for call in calls:
                call.cancel()
            for call in calls:
                if not call.cancelled():
                    call.exception()


class _Part:
    """One tensor's change.

    Attributes:
        change: it.
        piece: what is done, whole: `cuts` are what is done at a time. Each step of one returns how many elements are
            not as they should be; a tensor of it where torch counts them. None: nothing is.
        live: the live tensor.
        on_device: whether the live tensor is not in host memory.
    """

    def __init__(self, live: torch.Tensor, change: Change) -> None:
        self.change = change
        kind: type[_PlainPiece | _StridedPiece] = _PlainPiece if _is_plain(live) else _StridedPiece
        self.piece = kind(live, change) if change.positions.numel() else None
        self.on_device = live.device.type != "cpu"
        self.live = live
        self._place = place(live)

    @property
    def moved(self) -> bool:
        """Whether the live tensor is in other memory than it was."""
        return place(self.live) != self._place


class _PlainPiece:
    """Contiguous host memory: compiled loops over it."""

    def __init__(self, live: torch.Tensor, change: Change) -> None:
        bits = _BITS[live.element_size()][1]
        self._live = byte_array(live).view(bits)
        self._positions: npt.NDArray[np.uint32] = change.positions.numpy()
        self._old, self._new = (byte_array(values).view(bits) for values in (change.old, change.new))

    @property
    def num_elements(self) -> int:
        return len(self._positions)

    def cuts(self, most_elements: int) -> Iterator[_PlainPiece]:
        if self.num_elements <= most_elements:
            yield self
            return
        for start in range(0, self.num_elements, most_elements):
            cut, part = slice(start, start + most_elements), copy.copy(self)
            part._positions, part._old, part._new = self._positions[cut], self._old[cut], self._new[cut]
            yield part

    def gather(self) -> int:
        return int(kernels().gather(self._live, self._positions, self._old))

    def apply(self) -> int:
        before, after = kernels().exchange(self._live, self._positions, self._old, self._new)
        return int(before + after)

    def undo(self) -> int:
        _, after = kernels().exchange(self._live, self._positions, self._old, self._old)
        return int(after)


class _StridedPiece:
    """Any strides, any device, any width: torch's own indexing, all at once. Slower on a CPU, and rare there.

    Positions, old and new elements lie beside the live tensor before the pause: inside it nothing crosses a GPU's bus
    but one number a tensor.
    """

    def __init__(self, live: torch.Tensor, change: Change) -> None:
        reach = 1 + sum((size - 1) * stride for size, stride in zip(live.shape, live.stride(), strict=True))
        words = max(1, live.element_size() // 8)
        bits = _BITS[min(8, live.element_size())][0]
        rest = torch.from_numpy(change.positions.numpy().astype(np.int64))
        where = torch.zeros_like(rest)
        for size, stride in zip(reversed(live.shape), reversed(live.stride()), strict=True):
            where += rest % size * stride
            rest = rest // size
        if words > 1:
            where = (where[:, None] * words + torch.arange(words)).reshape(-1)
        self.num_elements = len(rest)
        self._live = live.detach().as_strided((reach,), (1,)).view(bits)
        self._where = where.to(live.device)
        self._told = change.old.view(bits)
        self._old, self._new = (values.view(bits).to(live.device) for values in (change.old, change.new))

    def cuts(self, most_elements: int) -> Iterator[_StridedPiece]:
        yield self

    def gather(self) -> int:
        self._old.copy_(self._live[self._where])
        self._told.copy_(self._old)
        return 0

    def apply(self) -> torch.Tensor:
        before = self._differs(self._old)
        self._live[self._where] = self._new
        return before + self._differs(self._new)

    def undo(self) -> torch.Tensor:
        self._live[self._where] = self._old
        return self._differs(self._old)

    def _differs(self, values: torch.Tensor) -> torch.Tensor:
        """How many elements are other ones; known when somebody reads it."""
        return (self._live[self._where] != values).sum()


_Piece: TypeAlias = _PlainPiece | _StridedPiece
"""Some elements of one tensor."""
_Turn: TypeAlias = list[tuple[str, _Piece]]
"""What a thread does at a time, with the tensors' names."""


def check_patchable(name: str, live: torch.Tensor) -> None:
    """Refuses a live tensor whose elements can't be written one by one.

    Raises:
        UnsupportedError: says why.
    """
    if live.layout != torch.strided or live.is_meta or live.is_conj() or live.is_neg():
        raise UnsupportedError("a patch needs a plain strided tensor", parameter=name)
    if overlaps_itself(live):
        raise UnsupportedError("elements of this live tensor share memory: it can't be patched", parameter=name)


def _is_plain(live: torch.Tensor) -> bool:
    plain = live.device.type == "cpu" and live.is_contiguous() and live.element_size() in _BITS
    return plain and live.data_ptr() % live.element_size() == 0


def _check_kind(live: torch.Tensor, update: Patch) -> None:
    positions, values = update.positions, update.values
    if values.dtype != live.dtype or values.dim() != 1 or positions.shape != values.shape:
        raise ManifestMismatchError(
            f"got {positions.dtype} {tuple(positions.shape)} and {values.dtype} {tuple(values.shape)} for the "
            f"elements of a {live.dtype}",
            parameter=update.name,
        )


def _checked(positions: torch.Tensor, numel: int, name: str) -> npt.NDArray[np.uint32]:
    """A copy of them as uint32, after every check: the memory they come from may change at any time."""
    if positions.dtype not in (torch.uint32, torch.int64):
        raise InvalidRequestError(f"positions are uint32 or int64, not {positions.dtype}", parameter=name)
    where: npt.NDArray[Any] = positions.detach().cpu().contiguous().numpy().copy()
    if len(where):
        rising = bool((where[1:] > where[:-1]).all())
        if not rising or int(where[0]) < 0 or int(where[-1]) >= min(numel, 1 << 32):
            raise _not_within(numel, name)
    return where.astype(np.uint32, copy=False)


def _not_within(numel: int, name: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"positions rise strictly within the tensor's {numel} elements; these do not",
        parameter=name,
        state_left="nothing was written",
    )


def _turns(parts: Mapping[str, _Part]) -> list[_Turn]:
    """All pieces, small ones together. Those on a device are one turn: one thread queues all of its work."""
    turns: list[_Turn] = []
    on_devices: _Turn = []
    room = 0
    most_elements = max(_PIECE_ELEMENTS, sum(part.change.positions.numel() for part in parts.values()) // _MAX_TURNS)
    for name, part in parts.items():
        if part.piece is None:
            continue
        if part.on_device:
            on_devices.append((name, part.piece))
            continue
        for piece in part.piece.cuts(most_elements):
            if piece.num_elements > room:
                turns.append([])
                room = most_elements
            turns[-1].append((name, piece))
            room -= piece.num_elements
    return [on_devices, *turns] if on_devices else turns


def _take_all(left: deque[tuple[int, _Turn]], failed: list[tuple[int, BaseException]], step: str) -> None:
    """Turn after turn of what is left, which other threads take from too. One that fails is the last of all, but of an
    undo: as much is undone as can be."""
    while True:
        try:
            index, turn = left.popleft()
        except IndexError:
            return
        try:
            _take(turn, step)
        except BaseException as error:
            if step != "undo":
                left.clear()
            failed.append((index, error))


def _take(turn: Iterable[tuple[str, _Piece]], step: str) -> None:
    """One step of each, as far as the first that fails; of those whose elements torch counts all, asked once.

    Raises:
        LoadError: elements are not what they should be.
    """
    counted: dict[str, torch.Tensor] = {}
    for name, piece in turn:
        different = getattr(piece, step)()
        if isinstance(different, torch.Tensor):
            counted[name] = different
        else:
            _check(name, different, step)
    if counted:
        device = next(iter(counted.values())).device
        counts = torch.stack([different.to(device) for different in counted.values()]).tolist()
        for name, different in zip(counted, counts, strict=True):
            _check(name, different, step)


def _check(name: str, different: int, step: str) -> None:
    if different:
        raise LoadError(
            f"{different} elements are not what they should be at {step}: something else writes the live weights",
            parameter=name,
        )
