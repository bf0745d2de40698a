"""IPC on a CPU: from extracted chunks to the engine's weights through shared memory, over one memcpy.

A trainer process and an engine process, the whole push path between them, as `make demo --strategy cuda_ipc` has it:
chunks are copied into shared memory, announced over HTTP, mapped and loaded. The model is bf16 already, so extraction
hands out the live weights and costs nothing. Measured is the span from the first extraction until the last chunk is
loaded, less the time that the engine's loader takes for the same bytes by itself, when nothing else runs. The load
overlaps with the copy of the next chunks, so the difference says how much longer than a bare load a sync takes.

Digests, of tensors and of the model, are left out of this row, as they have rows of their own; `detail` has the same
span with them (`with_digests`) and the whole sync (begin, digests, stage, pause, commit), both as ratios to the memcpy.
"""

from __future__ import annotations

import itertools
import multiprocessing
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping
from multiprocessing.connection import Connection

import torch

from bench.harness import BenchArgs, Memcpy, Row, facts
from weightsync.codec.base import Codec, Decoder, Encoder
from weightsync.codec.full import FullCodec
from weightsync.engine.embedded import EmbeddedEngine
from weightsync.engine.server import EngineServer
from weightsync.errors import UnsupportedError
from weightsync.extract.module import ModuleWeightExtractor
from weightsync.handles.fanout import EngineFanout
from weightsync.handles.http import HttpEngine
from weightsync.load.module import ModuleWeightLoader
from weightsync.trainer.push import PushSync
from weightsync.transfer.registry import strategy_named
from weightsync.types import Full, HeldTensor, Manifest, PatchBase, Update, Version, WeightChunk

ROWS = {
    "cuda_ipc": "cuda_ipc of CPU tensors, extraction to loaded less the load itself, over one memcpy",
    "packed_cuda_ipc": "the same for packed_cuda_ipc",
}
_TARGET = 1.3
_CHUNK_BYTES = 256 << 20  # each announcement costs milliseconds on busy cores; frameworks take up to 1 GiB with IPC
_HIDDEN = 1024
_MOVING = {"extract", "share", "transfer", "load", "wait for engines"}


class _Layer(torch.nn.Module):
    """The eleven tensors of a dense decoder layer."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        for name, shape in {
            "q_proj": (2 * hidden, hidden), "k_proj": (hidden, hidden), "v_proj": (hidden, hidden),
            "o_proj": (hidden, 2 * hidden), "q_norm": (128,), "k_norm": (128,), "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,), "gate_proj": (3 * hidden, hidden),
            "up_proj": (3 * hidden, hidden), "down_proj": (hidden, 3 * hidden),
        }.items():  # fmt: skip
            parameter = torch.full(shape, 0.5, dtype=torch.bfloat16)
            self.register_parameter(name, torch.nn.Parameter(parameter, requires_grad=False))


def _model(num_bytes: int) -> torch.nn.Module:
    layer_bytes = 2 * 15 * _HIDDEN * _HIDDEN
    return torch.nn.Sequential(*(_Layer(_HIDDEN) for _ in range(max(2, num_bytes // layer_bytes))))


class _NoShardSums(ModuleWeightExtractor):
    """Has nothing to sum: the model's digest, which trainer and engine compute on all cores, has a row of its own."""

    def local_shards(self, dtype: str | None = None) -> Iterator[HeldTensor]:
        return iter(())

    def local_whole(self, dtype: str | None = None) -> None:
        return None


class _NotProved(ModuleWeightLoader):
    """Its live tensors can't be read back."""

    def live_tensors(self) -> Iterator[HeldTensor]:
        raise UnsupportedError("this benchmark proves nothing")


class _NoDigests(Codec, Encoder, Decoder):
    """Passes everything through and proves nothing: for this benchmark alone."""

    name = "none"

    def __init__(self) -> None:
        self._names: list[str] = []

    def encoder(self, base: PatchBase | None = None) -> Encoder:
        return _NoDigests()

    def decoder(self) -> Decoder:
        return _NoDigests()

    def encode(self, chunks: Iterable[WeightChunk]) -> Iterator[WeightChunk]:
        for chunk in chunks:
            self._names += chunk.names
            yield chunk
            del chunk

    def digests(self) -> Mapping[str, str]:
        return dict.fromkeys(self._names, f"xxh3:{0:032x}")  # not taken

    def decode(self, updates: Iterable[Update]) -> Iterator[Update]:
        yield from updates

    def check(self, manifest: Manifest) -> None:
        return


def run(args: BenchArgs) -> list[Row]:
    """Measures both rows."""
    return [_measure(row, args) for row in ROWS if row in args.rows]


def _measure(strategy: str, args: BenchArgs) -> Row:
    model = _model(args.num_bytes)
    flat = torch.cat([parameter.reshape(-1) for parameter in model.parameters()])
    memcpy, memcpys = Memcpy(flat), []
    spans: dict[str, list[float]] = {"plain": [], "with_digests": []}
    loads: list[float] = []
    syncs: list[float] = []
    context = multiprocessing.get_context("spawn")
    versions = itertools.count(1)
    for kind, codec in (("plain", _NoDigests()), ("with_digests", FullCodec())):
        mine, theirs = context.Pipe()
        engine = context.Process(target=_engine, args=(theirs, args.num_bytes, codec.name), daemon=True)
        engine.start()
        extracts = ModuleWeightExtractor if isinstance(codec, FullCodec) else _NoShardSums
        extractor = extracts(model, chunk_bytes=_CHUNK_BYTES)
        client = EngineFanout([HttpEngine(mine.recv(), engine_id="engine")])
        push = PushSync(extractor, client, strategy=strategy_named(strategy), codec=codec)
        try:
            push.initialize()
            for turn in range(args.repeats + 2):  # the first sync makes the buckets, the second the loader's other set
                push.recorder.drain()
                begin = time.perf_counter()
                report = push.sync_weights(next(versions))
                took = time.perf_counter() - begin
                records = [record for record in push.recorder.drain() if record.name in _MOVING]
                span = max(record.end_s for record in records) - min(record.start_s for record in records)
                mine.send("load")
                load = mine.recv()
                begin = time.perf_counter()
                memcpy()
                copied = time.perf_counter() - begin
                if turn > 1:
                    spans[kind].append(span)
                    loads.append(load)
                    memcpys.append(copied)
                    if kind == "with_digests":
                        syncs.append(took)
            push.close()
        finally:
            engine.kill()
    one = statistics.median(memcpys)
    load = statistics.median(loads)
    plain, proved = statistics.median(spans["plain"]), statistics.median(spans["with_digests"])
    return Row(
        row=strategy,
        ratio=(plain - load) / one,
        target=_TARGET,
        detail={
            **facts(args),
            "num_chunks": report.num_chunks,
            "bytes": report.total_bytes,
            "load_ratio": round(load / one, 3),
            "span_ratio": round(plain / one, 3),
            "with_digests_ratio": round(proved / one, 3),
            "whole_sync_ratio": round(statistics.median(syncs) / one, 3),
            "seconds": {"memcpy": round(one, 5), "load": round(load, 5), "span": round(plain, 5)},
        },
    )


def _engine(conn: Connection, num_bytes: int, codec: str) -> None:
    """The engine's process: serves; between syncs it times its loader on bytes of its own.

    One torch thread: trainer and engine share the machine's cores, and loads of chunks overlap with their copies.
    """
    torch.set_num_threads(1)
    proved = codec == FullCodec.name
    loader = (ModuleWeightLoader if proved else _NotProved)(_model(num_bytes))
    server = EngineServer(EmbeddedEngine.of(loader, codec=FullCodec() if proved else _NoDigests()))
    conn.send(server.start())
    source = _model(num_bytes)
    extractor = ModuleWeightExtractor(source, chunk_bytes=_CHUNK_BYTES)
    manifest = Manifest(version=Version(run_id="load", number=1), model_id="m", tensors=extractor.metadata())
    while conn.recv() == "load":
        loader.begin(manifest)
        begin = time.perf_counter()
        for chunk in extractor.extract_weights():
            loader.load_weights([Full(name=n, tensor=t) for n, t in zip(chunk.names, chunk.tensors, strict=True)])
        took = time.perf_counter() - begin
        loader.abort("it was a measurement")
        conn.send(took)
