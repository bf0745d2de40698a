"""What every benchmark shares: sizes, medians, the memcpy yardstick, rows and where they are written.

The yardstick is ONE memcpy: one plain `destination.copy_(source)` of torch, as a user would write it, of the
same number of bytes, between two buffers that were allocated and touched before. It uses as many threads as
torch does by itself. It is timed in turns with what is measured, so that a machine that slows down slows both.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import os
import resource
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchArgs:
    """What the command line asks of every benchmark.

    Attributes:
        gib: size of the model in GiB.
        repeats: how often each thing is timed; the median counts.
        rows: the rows that are wanted; a module may skip the others.
    """

    gib: float = 1.0
    repeats: int = 7
    rows: frozenset[str] = frozenset()

    @property
    def num_bytes(self) -> int:
        """Size of the model in bytes."""
        return int(self.gib * (1 << 30))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One measured row.

    Attributes:
        row: its name in the speed table.
        ratio: what was measured over its yardstick; smaller is better.
        target: the ratio that it must not exceed.
        detail: further JSON-able facts: seconds, sizes, variants.
    """

    row: str
    ratio: float
    target: float
    detail: dict[str, Any]

    @property
    def ok(self) -> bool:
        """Whether the target is met."""
        return self.ratio <= self.target

    def to_dict(self) -> dict[str, Any]:
        """As it stands in latest.json."""
        return {"row": self.row, "ratio": round(self.ratio, 4), "target": self.target, "detail": self.detail}


def medians_s(functions: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median seconds of each function. They run in turns, after one round that does not count."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(repeats + 1):
        for name, function in functions.items():
            begin = time.perf_counter()
            function()
            if turn:
                times[name].append(time.perf_counter() - begin)
    return {name: statistics.median(values) for name, values in times.items()}


class Memcpy:
    """The yardstick: copies `source` (its bytes) into a buffer of its own.

    Args:
        source: 1-D, contiguous, on the CPU, already filled.
    """

    def __init__(self, source: torch.Tensor) -> None:
        self._source = source
        self._destination = torch.empty_like(source)
        self._destination.fill_(1)  # touched: page faults are no part of a memcpy

    def __call__(self) -> None:
        """One copy."""
        self._destination.copy_(self._source)


def facts(args: BenchArgs) -> dict[str, Any]:
    """What a reader needs to judge a row."""
    return {
        "gib": args.gib,
        "repeats": args.repeats,
        "num_cores": len(os.sched_getaffinity(0)),
        "cpu": _cpu(),
        "torch_threads": torch.get_num_threads(),
        "peak_rss_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20), 2),
        "measured_utc": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }


def _cpu() -> str:
    """Family and model of the processor, as the kernel says it: ratios differ between makes."""
    found: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            found.setdefault(name.strip(), value.strip())
    return " ".join(found.get(name, "?") for name in ("vendor_id", "cpu family", "model"))


def write_results(rows: Sequence[Row], folder: Path = RESULTS) -> Path:
    """Writes `latest.json` and a copy with today's date.

    Rows of an earlier `latest.json` that were not measured now stay; `detail.measured_utc` tells them apart.
    """
    folder.mkdir(parents=True, exist_ok=True)
    latest = folder / "latest.json"
    kept: dict[str, Any] = {entry["row"]: entry for entry in json.loads(latest.read_text())} if latest.exists() else {}
    kept.update({row.row: row.to_dict() for row in rows})
    text = json.dumps(list(kept.values()), indent=2) + "\n"
    today = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
    for path in (latest, folder / f"{today}.json"):
        path.write_text(text)
    return latest
