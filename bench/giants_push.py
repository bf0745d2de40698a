"""A push of 100,000 small tensors: what each tensor costs where its bytes cost nothing.

A mixture of experts with a trillion parameters has 70,000 to 150,000 tensors. Here they are of 1 KiB each, in a module
tree as deep as a real one's, so that what is measured is the work a tensor and not its bytes. A trainer process in
float32 and an engine process in bfloat16 beside it, over HTTP, one torch thread each; the whole of `sync_weights`, with
every check and digest on both sides.

The row is in seconds, of the median sync from the second on, over a limit of 5 s: the ratio is seconds / 5. `detail`
has the first sync, which plans and allocates, the seconds of a bare loop of `copy_` over the same tensors, and the same
figures for packed_cuda_ipc.
"""

from __future__ import annotations

import multiprocessing
import resource
import statistics
import time
from multiprocessing.connection import Connection
from typing import Any

import torch

from bench.harness import BenchArgs, Row, facts
from weightsync.engine.embedded import EmbeddedEngine
from weightsync.engine.server import EngineServer
from weightsync.extract.module import ModuleWeightExtractor
from weightsync.handles.fanout import EngineFanout
from weightsync.handles.http import HttpEngine
from weightsync.load.module import ModuleWeightLoader
from weightsync.trainer.push import PushSync
from weightsync.transfer.registry import strategy_named

ROWS = {"push_100k": "seconds of a push of 100,000 small tensors, over 5 s"}
_TARGET = 1.0
_LIMIT_S = 5.0
_NUM_TENSORS = 100_000
_LAYER_TENSORS = 400
_SHAPE = (16, 32)
_CHUNK_BYTES = 64 << 20
_SYNCS = 4


class _Leaf(torch.nn.Module):
    """One weight, as a linear layer has it."""

    def __init__(self, dtype: torch.dtype, shape: tuple[int, ...] = _SHAPE) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full(shape, 0.5, dtype=dtype))


def giant(num_tensors: int, dtype: torch.dtype) -> torch.nn.Module:
    """Decoder layers of 400 tensors: 130 experts of three, and ten besides."""
    experts = (_LAYER_TENSORS - 10) // 3
    dense = {"self_attn": ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"), "mlp": ("gate", "shared_gate")}

    def layer() -> torch.nn.Module:
        parts = {name: torch.nn.ModuleDict({leaf: _Leaf(dtype) for leaf in leaves}) for name, leaves in dense.items()}
        parts["mlp"]["experts"] = torch.nn.ModuleList(
            torch.nn.ModuleDict({leaf: _Leaf(dtype) for leaf in ("gate_proj", "up_proj", "down_proj")})
            for _ in range(experts)
        )
        norms = {name: _Leaf(dtype, (64,)) for name in ("input_layernorm", "post_attention_layernorm")}
        return torch.nn.ModuleDict({**parts, **norms})

    return torch.nn.ModuleDict({"layers": torch.nn.ModuleList(layer() for _ in range(num_tensors // _LAYER_TENSORS))})


def run(args: BenchArgs) -> list[Row]:
    """Measures the row. The number of tensors and their size are fixed."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # trainer and engine share the machine's cores
    try:
        model = giant(_NUM_TENSORS, torch.float32)
        taken = {name: _measure(name, model) for name in ("broadcast", "packed_cuda_ipc")}
        copied_s = _bare_loop_s(model)
    finally:
        torch.set_num_threads(threads)
    steady_s = taken["broadcast"]["steady_s"]
    return [
        Row(
            row="push_100k",
            ratio=steady_s / _LIMIT_S,
            target=_TARGET,
            detail={
                **facts(args),
                "what": f"the ratio is the seconds of a push over {_LIMIT_S:g} s",
                "num_tensors": _NUM_TENSORS,
                "seconds": {"limit": _LIMIT_S, "copy_loop": round(copied_s, 4)},
                **taken,
            },
        )
    ]


def _measure(strategy: str, model: torch.nn.Module) -> dict[str, Any]:
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    engine = context.Process(target=engine_process, args=(theirs, _NUM_TENSORS), daemon=True)
    engine.start()
    syncs: list[float] = []
    cpu: list[float] = []
    try:
        url = mine.recv()
        begin = time.perf_counter()
        extractor = ModuleWeightExtractor(model, chunk_bytes=_CHUNK_BYTES)
        push = PushSync(
            extractor,
            EngineFanout([HttpEngine(url, engine_id="engine")]),
            strategy=strategy_named(strategy),
            dtype="bfloat16",
        )
        push.initialize()
        made_s = time.perf_counter() - begin
        for version in range(1, _SYNCS + 1):
            _train(model)
            mine.send("cpu")
            used, begin = mine.recv() + _cpu_s(), time.perf_counter()
            report = push.sync_weights(version)
            syncs.append(time.perf_counter() - begin)
            mine.send("cpu")
            cpu.append(mine.recv() + _cpu_s() - used)
        push.close()
    finally:
        engine.kill()
    assert report.digests_equal
    return {
        "construct_s": round(made_s, 3),
        "first_s": round(syncs[0], 3),
        "steady_s": round(statistics.median(syncs[1:]), 3),
        "cpu_s": {"first": round(cpu[0], 3), "steady": round(statistics.median(cpu[1:]), 3)},
        "num_chunks": report.num_chunks,
        "phases_s": {name: round(value, 3) for name, value in report.phases_s.items()},
    }


@torch.no_grad()
def _train(model: torch.nn.Module) -> None:
    """A step that changes every tensor."""
    torch._foreach_add_(list(model.parameters()), 0.25)


@torch.no_grad()
def _bare_loop_s(model: torch.nn.Module) -> float:
    """Seconds of one `copy_` a tensor into tensors that are there, median of three."""
    sources = list(model.parameters())
    copies = [torch.empty_like(source, dtype=torch.bfloat16) for source in sources]
    times = []
    for _ in range(4):
        begin = time.perf_counter()
        for copy, source in zip(copies, sources, strict=True):
            copy.copy_(source)
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def engine_process(conn: Connection, num_tensors: int) -> None:
    """The engine's process: serves until it is killed."""
    torch.set_num_threads(1)
    model = giant(num_tensors, torch.bfloat16)
    server = EngineServer(EmbeddedEngine.of(ModuleWeightLoader(model)))
    conn.send(server.start())
    while conn.recv() == "cpu":
        conn.send(_cpu_s())
