"""Packed broadcast against one broadcast a tensor, between the same two processes, in the same run.

Both move the same model of 300 tensors from a trainer process into a module in an engine process, over gloo on
loopback, from extraction to loaded weights:

- reference: for each tensor one broadcast into a fresh tensor and one copy into the module, as a plain
  implementation does it. No announcement, no digest, no commit: all but the bytes is left out, in its favour.
- packed: the same span of a `sync_weights`: from the first extraction until the last chunk is loaded: chunks packed,
  announced over HTTP, broadcast, digested by tensor on both sides, loaded.

The ratio is packed over reference. `detail` also has the whole sync, which the reference has no counterpart for:
begin, the model's digest on both sides, stage, pause, commit, resume.
"""

from __future__ import annotations

import itertools
import multiprocessing
import statistics
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from bench.harness import BenchArgs, Row, facts, medians_s
from weightsync.engine.embedded import EmbeddedEngine
from weightsync.engine.server import EngineServer
from weightsync.extract.module import ModuleWeightExtractor
from weightsync.handles.fanout import EngineFanout
from weightsync.handles.http import HttpEngine
from weightsync.load.module import ModuleWeightLoader
from weightsync.tensors import byte_view
from weightsync.trainer.push import PushSync
from weightsync.transfer.broadcast import BroadcastTransferStrategy
from weightsync.transfer.group import TransferGroup, join_group
from weightsync.types import Deadline

ROWS = {"broadcast": "packed broadcast of 300 tensors, extraction to loaded, over one broadcast a tensor"}
_TARGET = 0.5
_MOVING = {"extract", "pack", "transfer", "load", "wait for engines"}
_LAYERS = 27
_HIDDEN = 128
_CHUNK_BYTES = 8 << 20
_TIMEOUT_S = 300.0  # of one reference


class _Layer(torch.nn.Module):
    """The eleven tensors of a Qwen3 decoder layer."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        for name, shape in {
            "q_proj": (hidden, hidden), "k_proj": (hidden // 2, hidden), "v_proj": (hidden // 2, hidden),
            "o_proj": (hidden, hidden), "q_norm": (64,), "k_norm": (64,), "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,), "gate_proj": (3 * hidden, hidden),
            "up_proj": (3 * hidden, hidden), "down_proj": (hidden, 3 * hidden),
        }.items():  # fmt: skip
            self.register_parameter(name, torch.nn.Parameter(torch.randn(shape)))


def _model(dtype: torch.dtype) -> torch.nn.Module:
    """27 layers of 11 tensors, an embedding, a final norm and a head: 300 tensors."""
    torch.manual_seed(0)
    layers = [torch.nn.Embedding(1024, _HIDDEN), *(_Layer(_HIDDEN) for _ in range(_LAYERS))]
    return torch.nn.Sequential(
        *layers, torch.nn.LayerNorm(_HIDDEN, bias=False), torch.nn.Linear(_HIDDEN, 1024, False)
    ).to(dtype)


def run(args: BenchArgs) -> list[Row]:
    """Measures the row. The model's size is fixed: what counts is the number of tensors."""
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    engine = context.Process(target=_engine, args=(theirs,), daemon=True)
    engine.start()
    try:
        return [_measure(mine, args)]
    finally:
        engine.kill()


def _measure(conn: Connection, args: BenchArgs) -> Row:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # trainer and engine share the machine's cores
    model = _model(torch.float32)
    extractor = ModuleWeightExtractor(model, chunk_bytes=_CHUNK_BYTES)
    push = PushSync(extractor, EngineFanout([HttpEngine(conn.recv(), engine_id="engine")]), dtype="bfloat16")
    push.initialize()
    info, store = BroadcastTransferStrategy().create_init_info({"engine": 1})
    conn.send(info)
    group = join_group(info, rank=0, store=store)  # type: ignore[arg-type]
    versions = itertools.count(1)

    def one_broadcast_a_tensor() -> None:
        conn.send("reference")
        _in_group(group, send_all)
        conn.recv()

    def send_all(bare: Any) -> None:
        for chunk in ModuleWeightExtractor(model, chunk_bytes=None).extract_weights("bfloat16"):
            bare.broadcast([byte_view(chunk.tensors[0])], _from_rank_0()).wait()

    moved_s: list[float] = []

    def whole_sync() -> None:
        push.recorder.drain()
        push.sync_weights(next(versions))
        records = [record for record in push.recorder.drain() if record.name in _MOVING]
        moved_s.append(max(record.end_s for record in records) - min(record.start_s for record in records))

    taken = medians_s({"reference": one_broadcast_a_tensor, "whole_sync": whole_sync}, 3 * args.repeats)
    taken["packed"] = statistics.median(moved_s[1:])
    report = push.sync_weights(next(versions))
    push.close()
    torch.set_num_threads(threads)
    return Row(
        row="broadcast",
        ratio=taken["packed"] / taken["reference"],
        target=_TARGET,
        detail={
            **facts(args),
            "num_tensors": len(extractor.metadata("bfloat16")),
            "num_chunks": report.num_chunks,
            "bytes": report.total_bytes,
            "whole_sync_ratio": round(taken["whole_sync"] / taken["reference"], 4),
            "seconds": {name: round(value, 5) for name, value in taken.items()},
            "phases_ms": {name: round(1e3 * value, 2) for name, value in report.phases_s.items()},
        },
    )


def _in_group(group: TransferGroup, job: Callable[[Any], None]) -> None:
    """Runs `job` with the bare process group, in the thread that holds it."""
    group._thread.call(lambda held: job(held["group"]), deadline=Deadline(_TIMEOUT_S))


def _from_rank_0() -> dist.BroadcastOptions:
    options = dist.BroadcastOptions()
    options.rootRank = 0
    return options


def _engine(conn: Connection) -> None:
    """The engine's process: serves, and takes part in the reference."""
    torch.set_num_threads(1)
    model = _model(torch.bfloat16)
    server = EngineServer(EmbeddedEngine.of(ModuleWeightLoader(model)))
    conn.send(server.start())
    group = join_group(conn.recv(), rank=1)
    specs = ModuleWeightExtractor(model).metadata()

    def receive_all(bare: Any) -> None:
        parameters = dict(model.named_parameters())
        with torch.no_grad():
            for spec in specs:
                arrived = torch.empty(spec.shape, dtype=torch.bfloat16)
                bare.broadcast([byte_view(arrived)], _from_rank_0()).wait()
                parameters[spec.name].copy_(arrived)

    while conn.recv() == "reference":
        _in_group(group, receive_all)
        conn.send("done")
