"""Huge pages for shared memory: one version written, mapped, read and patched, over the same on pages of 4 KiB.

Two processes run the very same code, in turns: `Segment` and `MappedSegment` of the library, which ask for huge pages.
The kernel is told to give the second one none (`PR_SET_THP_DISABLE`). Steps, of `--gib`:

- make: a segment is made, its pages there (the first offload of a manager, a receiver's first pull)
- write: one copy into it (an offload)
- map: it is mapped again, as an agent, an engine or a receiver on the same host does
- read: xxh3 of that mapping (a proof)
- patch: 1 % of its 2-byte elements are written, at random places (a delta)

The row is write + map + read + patch, since a segment is made once. `detail` has each step's ratio, and two pieces of
advice that the library does not give: map and read after MADV_SEQUENTIAL, and after MADV_WILLNEED, each over map and
read without it.

/dev/shm grants huge pages only where it is mounted with `huge=advise`. As root this mounts such a one for itself alone;
where none is granted there is no row.
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import xxhash

from bench.harness import BenchArgs, Row, facts
from weightsync.memory import MappedSegment, Segment
from weightsync.memory.advice import Advice, advise

ROWS = {"huge_pages": "a version written, mapped, read and patched in shared memory, over the same without huge pages"}
_TARGET = 1.0
_COUNTED = ("write", "map", "read", "patch")
_BLOCK_BYTES = 4 << 20
_PR_SET_THP_DISABLE = 41
_MOUNT = 'mount -t tmpfs -o huge=advise,size="$1" tmpfs /dev/shm && shift && exec "$@"'


def run(args: BenchArgs) -> list[Row]:
    """Measures the row, where huge pages are granted."""
    command = [sys.executable, "-m", "bench.pages", str(args.num_bytes), str(args.repeats)]
    if os.geteuid() == 0:
        command = ["unshare", "-m", "sh", "-c", _MOUNT, "sh", str(4 * args.num_bytes + (64 << 20)), *command]
    told = subprocess.run(command, capture_output=True, text=True, check=False)
    if told.returncode != 0:
        print(f"huge_pages was skipped: {told.stderr.strip()[-300:]}", file=sys.stderr)
        return []
    found: dict[str, dict[str, float]] = json.loads(told.stdout)
    huge, small = found["huge"], found["small"]
    if not huge["huge_share"] > 0.5 > small["huge_share"]:
        print("huge_pages was skipped: /dev/shm grants none; mount it with huge=advise", file=sys.stderr)
        return []
    ratios = {step: round(huge[step] / small[step], 3) for step in ("make", *_COUNTED)}
    for kind, steps in found.items():
        ratios |= {
            f"{name}, {kind} pages": round(steps[name] / (steps["map"] + steps["read"]), 3)
            for name in ("sequential", "willneed")
        }
    return [
        Row(
            row="huge_pages",
            ratio=sum(huge[step] for step in _COUNTED) / sum(small[step] for step in _COUNTED),
            target=_TARGET,
            detail={
                **facts(args),
                "ratios": ratios,
                "seconds": {kind: {name: round(value, 5) for name, value in found[kind].items()} for kind in found},
            },
        )
    ]


def _main(num_bytes: int, repeats: int) -> None:
    """Both processes, in turns; says medians as JSON."""
    context = multiprocessing.get_context("spawn")
    pipes: dict[str, Connection] = {}
    for kind in ("huge", "small"):
        pipes[kind], theirs = context.Pipe()
        context.Process(target=_worker, args=(theirs, kind, num_bytes), daemon=True).start()
    rounds: dict[str, list[dict[str, float]]] = {kind: [] for kind in pipes}
    for turn in range(repeats + 1):
        for kind, pipe in pipes.items():
            pipe.send("go")
            took = pipe.recv()
            if turn:
                rounds[kind].append(took)
    medians = {
        kind: {step: statistics.median(each[step] for each in all_took) for step in all_took[0]}
        for kind, all_took in rounds.items()
    }
    print(json.dumps(medians))


def _worker(conn: Connection, kind: str, num_bytes: int) -> None:
    source = torch.full((num_bytes // 2,), 7, dtype=torch.int16)
    places = torch.randperm(num_bytes // 2)[: num_bytes // 200].sort().values
    values = torch.full_like(places, 3, dtype=torch.int16)
    if kind == "small":
        assert ctypes.CDLL(None).prctl(_PR_SET_THP_DISABLE, 1, 0, 0, 0) == 0
    while conn.recv() == "go":
        conn.send(_round(source, places, values))


def _round(source: torch.Tensor, places: torch.Tensor, values: torch.Tensor) -> dict[str, float]:
    """Seconds of each step, and which share of the segment lies on huge pages."""
    took: dict[str, Any] = {}

    def timed(step: str, function: Callable[[], Any]) -> Any:
        begin = time.perf_counter()
        result = function()
        took[step] = time.perf_counter() - begin
        return result

    with timed("make", lambda: Segment(source.nbytes)) as segment:
        memory = torch.frombuffer(segment.memory, dtype=torch.int16)
        timed("write", lambda: memory.copy_(source))
        with timed("map", lambda: MappedSegment(segment.name, need_bytes=source.nbytes)) as mapped:
            timed("read", lambda: _read(mapped.memory))
        timed("patch", lambda: memory.index_put_((places,), values))
        for name, advice in (("sequential", Advice.SEQUENTIAL), ("willneed", Advice.WILLNEED)):
            begin = time.perf_counter()
            with MappedSegment(segment.name, need_bytes=source.nbytes) as mapped:
                advise(mapped._map, advice)
                _read(mapped.memory)
                took[name] = time.perf_counter() - begin
        took["huge_share"] = _huge_bytes_of(segment.name) / source.nbytes
    return took


def _read(memory: memoryview) -> None:
    for start in range(0, len(memory), _BLOCK_BYTES):
        xxhash.xxh3_128_digest(memory[start : start + _BLOCK_BYTES])


def _huge_bytes_of(name: str) -> int:
    """Bytes of this process's mappings of a segment that lie on huge pages."""
    parts = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE)
    ours = "".join(part for part in parts if name in part.partition("\n")[0])
    return 1024 * sum(map(int, re.findall(r"^(?:Shmem|File)PmdMapped: +(\d+) kB", ours, re.MULTILINE)))


if __name__ == "__main__":
    _main(int(sys.argv[1]), int(sys.argv[2]))
