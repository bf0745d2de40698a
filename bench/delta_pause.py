"""How long is an embedded engine paused for a delta of 1 % of its elements, undo record included? Row `delta_pause`.

A bf16 model of `--gib`, random elements, new values: base, patch and proofs are as a pull leaves them, and the load is
the library's own (`EngineUpdate` over `EmbeddedEngine`, one worker in this process). The pause is what the engine's own
phases say: from the start of its "pause" to the end of its "resume", everything in between included. Over one memcpy
of the model's bytes, timed in turns with it.

`detail` also has: the whole load of the patch and its parts before the pause (`load_s`, `stage_s`: gathering what is
there, and the sum of the change); a rollback (`undo_s`); the audit on one core behind generation (`audit_s`); and what
others do, a pause in which the model is reloaded in place from a safetensors file in /dev/shm (`reload_pause_s`:
mapped, and copied over the live tensors).
"""

from __future__ import annotations

import contextlib
import os
import queue
import statistics
import time
from collections.abc import Iterator

import safetensors.torch
import torch

from bench.digest import _model
from bench.harness import BenchArgs, Memcpy, Row, facts
from bench.staged import StagedVersions
from weightsync.engine.embedded import EmbeddedEngine
from weightsync.engine.worker import EngineWorker
from weightsync.host.engine_update import EngineUpdate
from weightsync.host.staged_version import StagedVersion
from weightsync.load.module import ModuleWeightLoader
from weightsync.memory import MappedSegment
from weightsync.memory.folder import path_of
from weightsync.observe import Recorder, paused_s
from weightsync.types import Deadline, Patch

ROWS = {"delta_pause": "pause of an embedded engine for a 1 % delta, with undo, over one memcpy of the model"}
_TARGET = 0.4
_SHARE = 0.01
_TIMEOUT_S = 120.0


def run(args: BenchArgs) -> list[Row]:
    """Measures the row."""
    flat, model = _model(args.num_bytes)
    memcpy = Memcpy(flat)
    module = torch.nn.Module()
    for name, tensor in model.items():
        module.register_buffer(_inner(name), tensor)
    loader = ModuleWeightLoader(module, in_place=True, name_map=_inner)
    recorder = Recorder("bench")
    worker = EngineWorker(loader)
    embedded = EmbeddedEngine([worker])
    audits: queue.Queue[float] = queue.Queue()
    worker.recorder.subscribe(lambda each: audits.put(each.end_s - each.start_s) if each.name == "audit" else None)
    engine = EngineUpdate(embedded, "bench", recorder=recorder)
    with StagedVersions(model, (_SHARE,)) as versions:
        num_changed = sum(len(where) for _, where, _ in versions.elements(_SHARE, back=False))
        engine.load(versions.whole(), deadline=Deadline(_TIMEOUT_S))
        recorder.drain()
        times: dict[str, list[float]] = {}

        def note(name: str, seconds: float) -> None:
            times.setdefault(name, []).append(seconds)

        for turn in range(args.repeats + 1):
            before = time.perf_counter()
            memcpy()
            copied = time.perf_counter()
            report = engine.load(versions.changed(_SHARE, back=turn % 2 == 1), deadline=Deadline(_TIMEOUT_S))
            loaded = time.perf_counter()
            assert report.patched
            records = recorder.drain()
            if turn:
                note("memcpy", copied - before)
                note("patch", loaded - copied)
                note("pause", paused_s(records))
                for name in ("load", "verify", "commit"):
                    note(name, sum(each.end_s - each.start_s for each in records if each.name == name))
            note("audit", audits.get(timeout=_TIMEOUT_S))  # nothing else runs beside what is measured next
        embedded.close()
        undo = _undo(loader, versions.changed(_SHARE, back=args.repeats % 2 == 0), args.repeats)
        reload = _reload(module, model, args.repeats)
    seconds = {name: statistics.median(values) for name, values in times.items()}
    seconds |= {"undo": undo, "reload_pause": reload}
    return [
        Row(
            row="delta_pause",
            ratio=seconds["pause"] / seconds["memcpy"],
            target=_TARGET,
            detail={
                **facts(args),
                "num_tensors": len(model),
                "changed_elements": num_changed,
                "pause_s": round(seconds["pause"], 5),
                "commit_s": round(seconds["commit"], 5),
                "load_s": round(seconds["load"], 5),
                "stage_s": round(seconds["verify"], 5),
                "whole_load_s": round(seconds["patch"], 5),
                "undo_s": round(undo, 5),
                "audit_s": round(seconds["audit"], 5),
                "memcpy_s": round(seconds["memcpy"], 5),
                "reload_pause_s": round(reload, 5),
                "reload_pause_ratio": round(reload / seconds["memcpy"], 3),
            },
        )
    ]


def _inner(name: str) -> str:
    return name.replace(".", "_")


def _undo(loader: ModuleWeightLoader, pulled: StagedVersion, repeats: int) -> float:
    """Seconds of a rollback, after a commit of the same patch."""
    assert pulled.patch is not None
    times = []
    with MappedSegment(pulled.patch.segment, need_bytes=1) as mapped:
        memory = torch.frombuffer(mapped.memory, dtype=torch.uint8)

        def patches() -> Iterator[Patch]:
            assert pulled.patch is not None
            for each in pulled.patch.tensors:
                where = memory[each.positions_offset : each.positions_offset + 4 * each.count]
                values = memory[each.values_offset : each.values_offset + 2 * each.count]
                yield Patch(name=each.name, positions=where.view(torch.uint32), values=values.view(torch.bfloat16))

        for _ in range(repeats + 1):
            loader.begin_patch(pulled.manifest)
            loader.load_weights(patches())
            list(loader.prepare_patch())
            loader.commit(pulled.version)
            begin = time.perf_counter()
            loader.rollback()
            times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])


def _reload(module: torch.nn.Module, model: dict[str, torch.Tensor], repeats: int) -> float:
    """Seconds in which nothing is generated while all is loaded over the live tensors from a file in memory."""
    path = path_of("weightsync-bench-reload")
    times = []
    try:
        safetensors.torch.save_file({name: tensor.clone() for name, tensor in model.items()}, path)
        for _ in range(max(2, repeats // 2) + 1):
            begin = time.perf_counter()
            loaded = safetensors.torch.load_file(path)
            for name, tensor in loaded.items():
                module.get_buffer(_inner(name)).copy_(tensor)
            del loaded
            times.append(time.perf_counter() - begin)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
    return statistics.median(times[1:])
