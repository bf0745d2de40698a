"""How large and how fast are deltas of real AdamW updates? Rows `delta_encode`, `delta_bytes` and
`delta_decode`.

The data is `bench.delta_data`'s: bf16 weights before and after one update of a training run. Reported are those of
learning rate 1e-6 in the late phase, tiled to `--gib`; a table over all learning rates and phases, of one copy of the
trained model each, is in the detail of `delta_bytes`.

The bound, empirical and of the whole model at once, is *order 0*: entropy of the gaps between changed elements plus
entropy of the zigzag differences of ranks (one step in the order of the reals is 1 or 2), each as if its symbols were
drawn independently. It does not count the model (the frequencies) that a coder has to send. It is no floor for a coder
that adapts to places: `order0_by_unit` in the detail is the same, taken in each unit by itself.

References (numpy and zstd, one core) are decoded and compared as well: absolute int32 indices and values, as many
libraries send them; XOR of everything through zstd-1; 16-bit gaps and XORs through zstd-1.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import zstandard

from bench.delta_data import PHASES, Bits, Trained, tiled, trained
from bench.harness import BenchArgs, Memcpy, Row, facts
from weightsync.codec.delta import EncodedDelta, encode_delta
from weightsync.codec.delta_cost import CostModel
from weightsync.codec.delta_reader import DeltaReader, UnitChange
from weightsync.codec.delta_units import Unit, plan_units
from weightsync.memory import Segment
from weightsync.threads import map_all

ROWS = {
    "delta_encode": "diff and encode one real AdamW update, all cores, over one memcpy of the model",
    "delta_bytes": "bytes of that delta over the order-0 entropy of its gaps and differences",
    "delta_decode": "decode it and write it into a staging, all cores, over one memcpy of the model",
}
_TARGETS = {"delta_encode": 2.0, "delta_bytes": 1.05, "delta_decode": 1.0}
_REPORTED = (1e-6, "late")
_DENSE = (0.015, 0.04)
_BASE = bytes(16)
_CHUNK = 1 << 24
_MOST_GAP = 1 << 16
_SLOW_LINK = 1e6
_LINKS = {"0.01 GB/s": 1e7, "0.1 GB/s": 1e8, "1 GB/s": 1e9, "10 GB/s": 1e10}
_TILES = (
    "each tile of the model has the rows of every tensor (of a vector: its elements) in an order of its own, the same "
    "for old and new, so that no tile repeats the bytes of another; the last tile is cut off"
)
Positions: TypeAlias = npt.NDArray[np.int64]
Bytes: TypeAlias = npt.NDArray[np.uint8]


def run(args: BenchArgs) -> list[Row]:
    """Measures the rows that are wanted."""
    wanted = [row for row in ROWS if row in args.rows]
    data = trained()
    case = Case(data, args.num_bytes)
    try:
        return _rows(args, wanted, data, case)
    finally:
        case.close()


def _rows(args: BenchArgs, wanted: list[str], data: Trained, case: Case) -> list[Row]:
    bounds = Bounds(case.old, case.new, case.units)
    rows = []
    for name in wanted:
        delta = case.encode()
        case.check(delta)
        each = delta.nbytes / max(1, bounds.num_changed)
        measured: dict[str, Any] = {}
        if name == "delta_encode":
            measured = _times(case, {"encode": functools.partial(_timed, case.encode)}, args.repeats)
            ratio = measured["ratios"]["encode"]
            measured["numpy_diff"] = _numpy_diff(case, args.repeats)
        elif name == "delta_decode":
            measured = _times(case, {"decode": functools.partial(case.decode_s, delta)}, args.repeats)
            ratio = measured["ratios"]["decode"]
            measured["is_not_in_it"] = "the sum of the change, which a receiver takes as well"
        else:
            ratio = each / bounds.order0
            measured["references"] = _references(case.old, case.new, case.memcpy, min(3, args.repeats))
            measured["table"] = list(_table(data))
        detail = {
            **facts(args),
            "data": _told(data),
            "learning_rate": _REPORTED[0],
            "phase": _REPORTED[1],
            "density": _short(bounds.density),
            "num_changed": bounds.num_changed,
            "bytes": delta.nbytes,
            "bytes_a_change": _short(each),
            "bounds": bounds.to_dict(),
            "forms": _forms(delta),
            **measured,
        }
        rows.append(Row(row=name, ratio=ratio, target=_TARGETS[name], detail=detail))
    if rows and rows[0].row == "delta_encode":
        rows[0].detail["denser"] = _denser(data, case, args.repeats)  # last: it overwrites the model
    return rows


class Case:
    """A model of any size before and after a real update, and what is done with it.

    Attributes:
        old: bits of the elements before; `new`: after. Touched, ordinary memory.
        units: what the codec cuts them into.
        memcpy: copies the new model once.
    """

    def __init__(self, data: Trained, num_bytes: int, which: tuple[float, str] = _REPORTED) -> None:
        self._data = data
        number = max(1, num_bytes // 2)
        self.old = torch.zeros(number, dtype=torch.uint16).numpy()
        self.new = torch.zeros(number, dtype=torch.uint16).numpy()
        self.fill(which)
        self.memcpy = Memcpy(torch.from_numpy(self.new))
        self._staging: Segment | None = None

    def fill(self, which: tuple[float, str]) -> None:
        """Takes another update in place of the one that is there."""
        parts = tiled(self._data.pair(*which), self._data.shapes, len(self.old), old=self.old, new=self.new)
        at, runs = 0, []
        for _, count in parts:
            runs.append((2 * at, 2 * count, "bfloat16"))
            at += count
        self.units = plan_units(runs)

    def encode(self, costs: CostModel | None = None) -> EncodedDelta:
        """The delta. Without costs no unit is written in full to spare time."""
        costs = costs or CostModel(link_bytes_per_s=_SLOW_LINK, fixed=True)
        old, new = self.old.view(np.uint8), self.new.view(np.uint8)
        return encode_delta(old, new, self.units, costs=costs, base=_BASE)

    def check(self, delta: EncodedDelta) -> None:
        """Decodes every unit, and compares it with the new bytes.

        Raises:
            RuntimeError: one is another.
        """
        reader = DeltaReader(delta.to_bytes(), self.units)
        old, new = self.old.view(np.uint8), self.new.view(np.uint8)

        def one(index: int) -> bool:
            unit = self.units[index]
            copy = old[unit.start : unit.end].copy()
            change = reader.decode(index, copy, write=True)
            if change is not None and change.positions is None:
                change.apply(copy)
            return np.array_equal(copy, new[unit.start : unit.end])

        wrong = [index for index, right in enumerate(map_all(one, range(len(self.units)))) if not right]
        if wrong:
            raise RuntimeError(f"units {wrong} of a delta do not decode to the new bytes")

    def decode_s(self, delta: EncodedDelta) -> float:
        """Seconds of decoding a delta without full units and writing it into a staging in shared memory. The staging is
        put back afterwards."""
        blob, staging = delta.to_bytes(), self._staged()

        def one(index: int, reader: DeltaReader) -> UnitChange | None:
            unit = self.units[index]
            memory = staging[unit.start : unit.end]
            change = reader.decode(index, memory, write=True)
            if change is not None and change.positions is None:
                change.apply(memory)
            return change

        begin = time.perf_counter()
        changes = map_all(functools.partial(one, reader=DeltaReader(blob, self.units)), range(len(self.units)))
        took = time.perf_counter() - begin
        for unit, change in zip(self.units, changes, strict=True):
            if change is not None:
                staging[unit.start : unit.end] = self.old.view(np.uint8)[unit.start : unit.end]
        return took

    def _staged(self) -> Bytes:
        if self._staging is None:
            self._staging = Segment(self.old.nbytes)
            np.frombuffer(self._staging.memory, np.uint8)[:] = self.old.view(np.uint8)
        return np.frombuffer(self._staging.memory, np.uint8)

    def close(self) -> None:
        """Gives the staging back."""
        if self._staging is not None:
            with contextlib.suppress(BufferError):
                self._staging.close()


class Bounds:
    """Entropies of what changed between two arrays of bf16 bits, in bytes a changed element.

    Attributes:
        num_changed: elements that differ; `density`: their share.
        gaps: order-0 entropy of the gaps between them; `steps`: of the zigzag differences of ranks.
        order0: both.
        order0_by_unit: both, taken in each unit by itself and added up; None without units.
    """

    def __init__(self, old: Bits, new: Bits, units: tuple[Unit, ...] = ()) -> None:
        positions = changed_positions(old, new)
        steps = zigzag_steps(old[positions], new[positions])
        self.num_changed = len(positions)
        self.density = self.num_changed / max(1, len(old))
        bytes_each = 1 / (8 * max(1, self.num_changed))
        self.gaps = entropy_bits(np.diff(positions, prepend=-1)) * bytes_each
        self.steps = entropy_bits(steps) * bytes_each
        self.order0 = self.gaps + self.steps
        self.order0_by_unit: float | None = None
        if units:
            self.order0_by_unit = sum(_unit_bits(positions, steps, unit) for unit in units) * bytes_each

    def to_dict(self) -> dict[str, float]:
        """For JSON."""
        found = {"gaps": self.gaps, "steps": self.steps, "order0": self.order0}
        if self.order0_by_unit is not None:
            found["order0_by_unit"] = self.order0_by_unit
        return {name: _short(value) for name, value in found.items()}


def changed_positions(old: Bits, new: Bits) -> Positions:
    """Where they differ, rising."""
    return np.flatnonzero(old != new)


def zigzag_steps(old: Bits, new: Bits) -> Bits:
    """Differences of ranks in the order of the reals, modulo 2^16: 1 is one down, 2 is one up, and so on."""
    step = (_ranks(new) - _ranks(old)).view(np.int16)
    return ((step << 1) ^ (step >> 15)).view(np.uint16)


def _ranks(bits: Bits) -> Bits:
    return np.where(bits & 0x8000, ~bits, bits | 0x8000).astype(np.uint16)


def entropy_bits(values: npt.NDArray[Any]) -> float:
    """Bits of all values together, by how often each of them occurs; whole numbers from 0 on."""
    if not len(values):
        return 0.0
    dense = int(values.max()) < _CHUNK
    counts = np.bincount(values) if dense else np.unique(values, return_counts=True)[1]
    counts = counts[counts > 0].astype(np.float64)
    return float(len(values) * np.log2(len(values)) - (counts * np.log2(counts)).sum())


def _unit_bits(positions: Positions, steps: Bits, unit: Unit) -> float:
    low, high = np.searchsorted(positions, (unit.start // 2, unit.end // 2))
    gaps = np.diff(positions[low:high], prepend=unit.start // 2 - 1)
    return entropy_bits(gaps) + entropy_bits(steps[low:high])


def absolute_encode(old: Bits, new: Bits) -> list[bytes]:
    """Reference: int32 indices and values, as they are."""
    positions = changed_positions(old, new)
    return [positions.astype(np.int32).tobytes(), new[positions].tobytes()]


def absolute_decode(old: Bits, pieces: list[bytes]) -> Bits:
    """Its inverse."""
    found = old.copy()
    found[np.frombuffer(pieces[0], np.int32)] = np.frombuffer(pieces[1], np.uint16)
    return found


def xor_encode(old: Bits, new: Bits) -> list[bytes]:
    """Reference: the XOR of everything through zstd-1."""
    return [_zstd1(old ^ new)]


def xor_decode(old: Bits, pieces: list[bytes]) -> Bits:
    """Its inverse."""
    found: Bits = np.frombuffer(zstandard.ZstdDecompressor().decompress(pieces[0]), np.uint16) ^ old
    return found


def gap16_encode(old: Bits, new: Bits) -> list[bytes]:
    """Reference: 16-bit gaps (0 is the next element) and XORs, each through zstd-1. A gap that is too long is cut by
    XORs of 0."""
    positions = changed_positions(old, new)
    gaps = np.diff(positions, prepend=-1) - 1
    fill = gaps // _MOST_GAP
    at = np.cumsum(fill + 1) - 1
    short = np.full(int(at[-1]) + 1 if len(at) else 0, _MOST_GAP - 1, np.uint16)
    xors = np.zeros(len(short), np.uint16)
    short[at] = gaps - fill * _MOST_GAP
    xors[at] = old[positions] ^ new[positions]
    return [_zstd1(short), _zstd1(xors)]


def _zstd1(data: Bits) -> bytes:
    packer: Any = zstandard.ZstdCompressor(level=1)
    packed: bytes = packer.compress(data.view(np.uint8))
    return packed


def gap16_decode(old: Bits, pieces: list[bytes]) -> Bits:
    """Its inverse."""
    short, xors = (np.frombuffer(zstandard.ZstdDecompressor().decompress(piece), np.uint16) for piece in pieces)
    found = old.copy()
    found[np.cumsum(short.astype(np.int64) + 1) - 1] ^= xors
    return found


REFERENCES: dict[str, tuple[Callable[[Bits, Bits], list[bytes]], Callable[[Bits, list[bytes]], Bits]]] = {
    "absolute_int32": (absolute_encode, absolute_decode),
    "xor_zstd1": (xor_encode, xor_decode),
    "gap16_xor_zstd1": (gap16_encode, gap16_decode),
}


def _references(old: Bits, new: Bits, memcpy: Memcpy | None, repeats: int) -> dict[str, dict[str, float]]:
    """Bytes a changed element of each reference, after it was decoded and compared; with a memcpy also its time."""
    number = max(1, len(changed_positions(old, new)))
    found: dict[str, dict[str, float]] = {}
    for name, (encode, decode) in REFERENCES.items():
        pieces = encode(old, new)
        if not np.array_equal(decode(old, pieces), new):
            raise RuntimeError(f"the reference {name} does not decode to the new bytes")
        found[name] = {"bytes_a_change": _short(sum(map(len, pieces)) / number)}
        if memcpy is not None:
            taken = _medians(
                {"memcpy": functools.partial(_timed, memcpy), name: functools.partial(_timed, encode, old, new)},
                repeats,
            )
            found[name] |= {"encode_s": _short(taken[name]), "encode_ratio": _short(taken[name] / taken["memcpy"])}
    return found


def _numpy_diff(case: Case, repeats: int) -> dict[str, Any]:
    """What only finding the changes takes with numpy, on one core."""

    def diff() -> object:
        return changed_positions(case.old, case.new)

    return _times(case, {"diff": lambda: _timed(diff)}, min(3, repeats))


def _times(case: Case, timers: dict[str, Callable[[], float]], repeats: int) -> dict[str, Any]:
    """Median seconds of a memcpy and of each timer, in turns, and their ratios to the memcpy."""
    taken = _medians({"memcpy": functools.partial(_timed, case.memcpy), **timers}, repeats)
    return {
        "seconds": {name: round(seconds, 5) for name, seconds in taken.items()},
        "ratios": {name: round(taken[name] / taken["memcpy"], 4) for name in timers},
    }


def _medians(timers: dict[str, Callable[[], float]], repeats: int) -> dict[str, float]:
    """As `harness.medians_s`, of functions that time themselves."""
    times: dict[str, list[float]] = {name: [] for name in timers}
    for turn in range(repeats + 1):
        for name, timer in timers.items():
            took = timer()
            if turn:
                times[name].append(took)
    return {name: statistics.median(values) for name, values in times.items()}


def _timed(function: Callable[..., object], *arguments: Any) -> float:
    begin = time.perf_counter()
    function(*arguments)
    return time.perf_counter() - begin


def _denser(data: Trained, case: Case, repeats: int) -> list[dict[str, Any]]:
    """Encoding times of the other updates of about 2 to 3 % (the row's target is for 1 to 3 %)."""
    found = []
    for pair in data.pairs:
        density = np.count_nonzero(pair.old != pair.new) / len(pair.old)
        which = (pair.learning_rate, pair.phase)
        if which == _REPORTED or not _DENSE[0] <= density <= _DENSE[1]:
            continue
        case.fill(which)
        taken = _times(case, {"encode": functools.partial(_timed, case.encode)}, min(3, repeats))
        found.append({"learning_rate": which[0], "phase": which[1], "density": _short(density), **taken})
    return found


def _table(data: Trained) -> Iterator[dict[str, Any]]:
    """Sizes and bounds of every learning rate and phase, of one copy of the trained model each."""
    num_bytes = data.pairs[0].old.nbytes
    for phase in PHASES:
        for pair in data.pairs:
            if pair.phase != phase:
                continue
            case = Case(data, num_bytes, (pair.learning_rate, phase))
            bounds = Bounds(case.old, case.new)
            planes = case.encode()
            chosen = {
                name: case.encode(CostModel(link_bytes_per_s=speed, fixed=True)) for name, speed in _LINKS.items()
            }
            for delta in (planes, *chosen.values()):
                case.check(delta)
            number = max(1, bounds.num_changed)
            yield {
                "learning_rate": pair.learning_rate,
                "phase": phase,
                "density": _short(bounds.density),
                "planes": _short(planes.nbytes / number),
                "planes_over_order0": _short(planes.nbytes / number / bounds.order0),
                "order0": _short(bounds.order0),
                "planes_over_model": _short(planes.nbytes / num_bytes),
                "planes_forms": _forms(planes),
                "chosen_forms": {name: _forms(delta) for name, delta in chosen.items()},
                **{
                    name: each["bytes_a_change"]
                    for name, each in _references(case.old, case.new, memcpy=None, repeats=0).items()
                },
            }


def _forms(delta: EncodedDelta) -> dict[str, int]:
    """How many units have each form."""
    return dict(Counter(unit.form.name.lower() for unit in delta.units))


def _told(data: Trained) -> dict[str, Any]:
    return {
        "what": "bf16 casts of fp32 weights before and after one AdamW update of a small Qwen3 on Python sources",
        "betas": [0.9, 0.95],
        "num_parameters": len(data.pairs[0].old),
        "updates_of_a_run": len(next(iter(data.densities.values()))),
        "tiles": _TILES,
        "losses": data.losses,
        "densities": {f"{rate:g}": found for rate, found in data.densities.items()},
        "training_s": round(data.seconds, 1),
    }


def _short(value: float) -> float:
    return float(f"{value:.4g}")
