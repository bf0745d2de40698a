"""The records as a trace that chrome://tracing and ui.perfetto.dev open."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from weightsync.observe.aside import written_whole
from weightsync.observe.events import usable
from weightsync.observe.lanes import layout, origin_s
from weightsync.types import PhaseRecord

_NOTHING: Mapping[str, Any] = {}


def chrome_trace(records: Iterable[PhaseRecord], *, about: Mapping[str, Any] = _NOTHING) -> dict[str, Any]:
    """The records in the Trace Event Format: complete events ("X") and the names of processes and threads.

    Times are microseconds since the earliest record; `otherData.start_s` says when that was. Phases of one
    track that overlap go to threads of their own ("worker-0 (2)"), because viewers draw them wrongly
    otherwise. Records whose times are not finite are left out. `about` is what `otherData` says besides.
    """
    kept = usable(records)
    events: list[dict[str, Any]] = []
    pids: dict[str, int] = {}
    tid = 0
    for track in layout(kept):
        process, _, thread = track.name.partition("/")  # engine-0/worker-1; a bare name is of a main thread
        if process not in pids:
            pids[process] = len(pids) + 1
            events += _named("process", process, pids[process], 0)
        pid = pids[process]
        for number, lane in enumerate(track.lanes, start=1):
            tid += 1
            name = thread or "main"
            events += _named("thread", name if number == 1 else f"{name} ({number})", pid, tid)
            for span in lane:
                record = span.record
                events.append(
                    {
                        "name": record.name,
                        "cat": "wait" if record.name.startswith("wait") else "phase",
                        "ph": "X",
                        "ts": span.start_ns / 1000,
                        "dur": (span.end_ns - span.start_ns) / 1000,
                        "pid": pid,
                        "tid": tid,
                        "args": {"detail": record.detail} if record.detail else {},
                    }
                )
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"producer": "weightsync", "start_s": origin_s(kept), **about},
    }


def write_chrome_trace(
    records: Iterable[PhaseRecord], path: str | os.PathLike[str], *, about: Mapping[str, Any] = _NOTHING
) -> Path:
    """Writes `chrome_trace` to `path`, whole or not at all.

    Raises:
        OSError: the file can't be written; an older file at `path` is left as it was.
    """
    with written_whole(path) as file:
        file.write(json.dumps(chrome_trace(records, about=about), allow_nan=False).encode())
    return Path(path)


def _named(what: str, name: str, pid: int, tid: int) -> list[dict[str, Any]]:
    order = pid if what == "process" else tid
    return [
        {"name": f"{what}_name", "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}},
        {"name": f"{what}_sort_index", "ph": "M", "pid": pid, "tid": tid, "args": {"sort_index": order}},
    ]
