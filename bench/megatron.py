"""Document 2's benchmarks, on a real megatron-core model: fused projections, packing, memory, each over its baseline.

A trainer process has a GPTModel of megatron-core in float32 (one rank, on the CPU), whose q, k and v are one parameter,
as are gate and up. It is exported under Hugging Face's names, so taken apart, in bfloat16. An engine process beside it
serves the same model. 267 tensors, 160 MB.

`qkv_fusion`: a whole sync into an engine that has q, k and v in one parameter again, as vLLM and SGLang have
(`SGLangWeightLoader` and a module with `load_weights`): q, k and v of a layer in one chunk, over one chunk a tensor.

`megatron_packing`: from the first extraction until the last chunk is loaded, by packed_cuda_ipc with buckets, over
cuda_ipc with one chunk and one handle a tensor.

`push_memory`: what a sync by packed_cuda_ipc adds to the trainer's physical memory at its peak, over what the sender of
document 2 takes: every chunk is kept until the last, then all are joined in one tensor. From the kernel's mark (VmHWM).

`detail` has the seconds of each, and extraction alone over one memcpy of the model's bytes.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import importlib.util
import itertools
import multiprocessing
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from bench.harness import BenchArgs, Memcpy, Row, facts
from weightsync.engine.embedded import EmbeddedEngine
from weightsync.engine.server import EngineServer
from weightsync.extract.megatron import MegatronWeightExtractor
from weightsync.extract.megatron_export import MegatronCoreExporter
from weightsync.handles.fanout import EngineFanout
from weightsync.handles.http import HttpEngine
from weightsync.load.module import ModuleWeightLoader
from weightsync.load.sglang import FUSED, SGLangWeightLoader
from weightsync.trainer.push import PushSync
from weightsync.transfer.registry import strategy_named
from weightsync.types import TensorSpec

ROWS = {
    "qkv_fusion": "a sync of a Megatron model into fused projections, q, k and v in one chunk, over a chunk a tensor",
    "megatron_packing": "its packed buckets by IPC, extraction to loaded, over a chunk and a handle a tensor",
    "push_memory": "memory that a sync adds to its trainer, over keeping all chunks and joining them",
}
_TARGETS = {"qkv_fusion": 0.5, "megatron_packing": 0.5, "push_memory": 0.5}
_CHUNK_BYTES = 16 << 20
_MOVING = {"extract", "share", "transfer", "load", "wait for engines"}
_SHAPE = SimpleNamespace(
    num_hidden_layers=24, hidden_size=512, intermediate_size=1536, num_attention_heads=8, num_key_value_heads=4,
    head_dim=64, rms_norm_eps=1e-6, vocab_size=4096, max_position_embeddings=128, rope_parameters={"rope_theta": 10000},
    tie_word_embeddings=False,
)  # fmt: skip
if importlib.util.find_spec("megatron") is None:  # so `bench` says that this file was skipped
    raise ImportError("megatron-core is not installed")

_Measured = dict[str, Any]


def run(args: BenchArgs) -> list[Row]:
    """Measures the rows that are wanted. The model's size is fixed."""
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    trainer = context.Process(target=_trainer, args=(theirs, args.repeats))
    trainer.start()
    rows = []
    try:
        for name in ROWS:
            if name in args.rows:
                mine.send(name)
                measured: _Measured = mine.recv()
                ratio = measured.pop("ratio")
                rows.append(Row(row=name, ratio=ratio, target=_TARGETS[name], detail={**facts(args), **measured}))
        mine.send(None)
        trainer.join(30)
    finally:
        trainer.kill()
    return rows


def _trainer(conn: Connection, repeats: int) -> None:
    """The trainer's process. One torch thread: it shares the machine's cores with an engine."""
    warnings.filterwarnings("ignore")  # Megatron's, of packages for GPUs
    torch.set_num_threads(1)
    model_of = importlib.import_module("tests.multiproc.megatron_cpu").megatron_model  # Megatron without a GPU
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        torch.manual_seed(0)
        bench = _Bench(model_of(_SHAPE, 1), repeats)
        steps = {"qkv_fusion": bench.fusion, "megatron_packing": bench.packing, "push_memory": bench.memory}
        while (name := conn.recv()) is not None:
            conn.send(steps[name]())
        dist.destroy_process_group()


class _Bench:
    def __init__(self, model: torch.nn.Module, repeats: int) -> None:
        self._model = model
        self._repeats = repeats
        self._bridge = MegatronCoreExporter(vocab_size=_SHAPE.vocab_size)
        self._specs = tuple(self._extractor(None).metadata("bfloat16"))

    def fusion(self) -> _Measured:
        with self._pushes("broadcast", fused=True) as (grouped, alone):
            return {**_compared(self._in_turns(grouped, alone, whole=True)), **self._extraction()}

    def packing(self) -> _Measured:
        with self._pushes("packed_cuda_ipc", baseline="cuda_ipc") as (packed, alone):
            return {**_compared(self._in_turns(packed, alone, whole=False)), **self._extraction()}

    def memory(self) -> _Measured:
        """The second sync's, and the first's in `detail`: that one takes the memory that stays."""
        assert ctypes.CDLL(None).mallopt(-3, 1 << 16) == 1  # what is freed goes back to the kernel at once
        model_bytes = sum(spec.nbytes for spec in self._specs)
        with _engine(self._specs, fused=False) as engine:
            push = self._push(engine, "packed_cuda_ipc", _CHUNK_BYTES)
            added = [_added_bytes(functools.partial(push.sync_weights, version)) for version in (1, 2, 3)]
            push.close()
        kept = [_added_bytes(self._keep_and_join) for _ in range(3)]
        return {
            "ratio": max(added) / statistics.median(kept),
            "of_the_model": {
                "push, at most": round(max(added) / model_bytes, 3),
                "baseline": round(statistics.median(kept) / model_bytes, 3),
            },
            "bytes": {"model": model_bytes, "push": added, "baseline": kept},
        }

    def _keep_and_join(self) -> None:
        chunks = list(self._extractor(None).extract_weights("bfloat16"))
        joined = torch.cat([tensor.flatten() for chunk in chunks for tensor in chunk.tensors])
        assert joined.numel()

    def _extractor(self, chunk_bytes: int | None) -> MegatronWeightExtractor:
        return MegatronWeightExtractor(self._model, bridge=self._bridge, chunk_bytes=chunk_bytes)

    def _push(self, engine: str, strategy: str, chunk_bytes: int | None) -> PushSync:
        client = EngineFanout([HttpEngine(engine, engine_id="engine")])
        push = PushSync(self._extractor(chunk_bytes), client, strategy=strategy_named(strategy), dtype="bfloat16")
        push.initialize()
        return push

    @contextlib.contextmanager
    def _pushes(
        self, strategy: str, *, baseline: str | None = None, fused: bool = False
    ) -> Iterator[tuple[PushSync, PushSync]]:
        """By chunks, and the baseline by tensors; each has an engine of its own."""
        with _engine(self._specs, fused=fused) as one, _engine(self._specs, fused=fused) as other:
            pushes = self._push(one, strategy, _CHUNK_BYTES), self._push(other, baseline or strategy, None)
            yield pushes
            for push in pushes:
                push.close()

    def _in_turns(self, ours: PushSync, baseline: PushSync, *, whole: bool) -> dict[str, list[float]]:
        """Seconds of each sync, whole or until the last chunk is loaded; the first two of each do not count."""
        taken: dict[str, list[float]] = {"ours": [], "baseline": []}
        versions = itertools.count(1)
        for turn in range(self._repeats + 2):
            version = next(versions)
            for name, push in (("ours", ours), ("baseline", baseline)):
                push.recorder.drain()
                begin = time.perf_counter()
                report = push.sync_weights(version)
                took = time.perf_counter() - begin
                assert report.digests_equal, report.unprovable
                records = [record for record in push.recorder.drain() if record.name in _MOVING]
                if not whole:
                    took = max(record.end_s for record in records) - min(record.start_s for record in records)
                if turn > 1:
                    taken[name].append(took)
        return taken

    def _extraction(self) -> _Measured:
        """Extraction alone, which takes fused parameters apart and converts, over one memcpy of what comes out."""
        extractor = self._extractor(_CHUNK_BYTES)
        memcpy = Memcpy(torch.full((sum(spec.nbytes for spec in self._specs) // 2,), 1, dtype=torch.bfloat16))
        pairs = [(_seconds(memcpy), _seconds(lambda: self._drained(extractor))) for _ in range(self._repeats + 1)][1:]
        return {
            "num_tensors": len(self._specs),
            "extract_over_memcpy": round(statistics.median(took / copied for copied, took in pairs), 3),
        }

    def _drained(self, extractor: MegatronWeightExtractor) -> None:
        for chunk in extractor.extract_weights("bfloat16"):
            del chunk


def _compared(taken: dict[str, list[float]]) -> _Measured:
    medians = {name: statistics.median(seconds) for name, seconds in taken.items()}
    return {
        "ratio": medians["ours"] / medians["baseline"],
        "seconds": {name: round(value, 5) for name, value in medians.items()},
    }


def _seconds(function: Callable[[], object]) -> float:
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def _added_bytes(function: Callable[[], object]) -> int:
    """What this process's physical memory grows by while it runs, at the peak."""
    Path("/proc/self/clear_refs").write_text("5")  # the mark begins anew
    before = _status_bytes("VmRSS")
    function()
    return _status_bytes("VmHWM") - before


def _status_bytes(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


@contextlib.contextmanager
def _engine(specs: tuple[TensorSpec, ...], *, fused: bool) -> Iterator[str]:
    """An engine's process; gives its URL."""
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    engine = context.Process(target=_serve, args=(theirs, specs, fused), daemon=True)
    engine.start()
    try:
        yield mine.recv()
    finally:
        mine.send("end")
        engine.join(10)
        engine.kill()


def _serve(conn: Connection, specs: tuple[TensorSpec, ...], fused: bool) -> None:
    torch.set_num_threads(1)
    loader = SGLangWeightLoader(_FusedModel(specs)) if fused else ModuleWeightLoader(_Model(specs))
    server = EngineServer(EmbeddedEngine.of(loader))
    conn.send(server.start())
    conn.recv()
    server.close()
    os._exit(0)


class _Model(torch.nn.Module):
    """Has the tensors under their names."""

    def __init__(self, specs: Iterable[TensorSpec]) -> None:
        super().__init__()
        for spec in specs:
            self._add(spec.name, spec.shape)

    def _add(self, name: str, shape: tuple[int, ...]) -> None:
        *path, own = name.split(".")
        holder: torch.nn.Module = self
        for part in path:
            if part not in holder._modules:
                holder.add_module(part, torch.nn.Module())
            holder = holder.get_submodule(part)
        parameter = torch.nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16), requires_grad=False)
        holder.register_parameter(own, parameter)


class _FusedModel(_Model):
    """As vLLM and SGLang have it: q, k and v are rows of one parameter, gate and up of another."""

    def __init__(self, specs: Iterable[TensorSpec]) -> None:
        shapes: dict[str, tuple[int, ...]] = {}
        self._rows: dict[str, tuple[str, int]] = {}
        for spec in specs:
            target = _fused_name(spec.name)
            before = shapes.get(target)
            start = 0 if before is None else before[0]
            self._rows[spec.name] = target, start
            shapes[target] = (start + spec.shape[0], *spec.shape[1:])
        super().__init__(TensorSpec(name=name, dtype="bfloat16", shape=shape) for name, shape in shapes.items())

    def load_weights(self, pairs: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Each checkpoint's tensor goes to its rows."""
        loaded = set()
        for name, tensor in pairs:
            target, start = self._rows[name]
            self.get_parameter(target)[start : start + len(tensor)].copy_(tensor)
            loaded.add(target)
        return loaded


def _fused_name(name: str) -> str:
    path = name.split(".")
    for fused, parts in FUSED.items():
        if len(path) > 1 and path[-2] in parts:
            return ".".join((*path[:-2], fused, path[-1]))
    return name
