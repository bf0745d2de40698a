"""The actors of the spine's tests: an odd model, an engine in its own process, training ranks."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

from tests.standins.faults import FaultyLoader
from weightsync.engine.embedded import EmbeddedEngine
from weightsync.engine.processes import ProcessWorker
from weightsync.engine.server import EngineServer
from weightsync.engine.worker import EngineWorker
from weightsync.errors import WeightSyncError
from weightsync.extract.fsdp import FSDPWeightExtractor
from weightsync.extract.module import ModuleWeightExtractor
from weightsync.handles.fanout import EngineFanout
from weightsync.handles.http import HttpEngine
from weightsync.memory import folder as memory_folder
from weightsync.tensors import byte_array
from weightsync.trainer.push import PushSync
from weightsync.transfer.registry import strategy_named

TOKEN = "a-token-for-tests-only"


class Block(nn.Module):
    """Uneven rows, a single row, and a matrix that is sharded along its columns."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(12, 7)
        self.wide = nn.Linear(7, 12, bias=False)
        self.row = nn.Linear(12, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.wide(torch.tanh(self.up(x))) + self.row(x)


class OddModel(nn.Module):
    """Tied weights, buffers of several dtypes (one not persistent), blocks."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 12)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(12, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.tensor(7))
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("scales", torch.rand(3, 5).to(torch.float8_e4m3fn))
        self.register_buffer("running", torch.rand(4, 3).t())
        self.register_buffer("nothing", torch.empty(0, 4))
        self.register_buffer("scratch", torch.rand(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = block(h)
        return self.head(h)


def build(seed: int, *, dtype: torch.dtype = torch.float32, blocks: int = 3) -> OddModel:
    torch.manual_seed(seed)
    model = OddModel(blocks)
    if dtype != torch.float32:
        for tensor in [*model.parameters(), *model.buffers()]:
            if tensor.dtype == torch.float32:
                tensor.data = tensor.data.to(dtype)
    return model


def cast_bytes(model: nn.Module, dtype: torch.dtype = torch.bfloat16) -> dict[str, bytes]:
    """What the engine must hold, made without any of the library's extraction."""
    return {
        name: byte_array((t.to(dtype) if t.dtype == torch.float32 else t).detach().contiguous()).tobytes()
        for name, t in model.state_dict().items()
    }


def step(model: nn.Module) -> None:
    """A change of every float tensor that is the same on every shard and on the whole."""
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            if tensor.dtype == torch.float32:
                tensor.mul_(1.0625).add_(0.03125)


def shard(model: OddModel, placement: str, world_size: int) -> nn.Module:
    """Every placement that FSDP2 gives."""
    mesh = (
        init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("replicate", "shard"))
        if placement == "hsdp"
        else init_device_mesh("cpu", (world_size,))
    )
    options: dict[str, Any] = {"mesh": mesh}
    if placement == "shard1":
        options["shard_placement_fn"] = lambda p: Shard(1) if p.dim() == 2 and p.shape[1] % world_size == 0 else None
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


# --- the engine's process ---


def make_worker(index: int, options: dict[str, Any]) -> tuple[FaultyLoader, dict[str, Callable[[Any], Any]]]:
    torch.set_num_threads(1)
    model = build(options.get("seed", 99), dtype=torch.bfloat16, blocks=options.get("blocks", 3))
    if surgery := options.get("surgery"):
        surgery(model)
    loader = FaultyLoader(model, in_place=options.get("in_place", False))

    def generate(_: Any) -> list[float]:
        with torch.no_grad():
            return [float(v) for v in model(torch.arange(4)).float().flatten()[:4]]

    def weights(_: Any) -> dict[str, str]:
        return {name: byte_array(t.detach().contiguous()).tobytes().hex() for name, t in model.state_dict().items()}

    def fingerprint(_: Any) -> str:
        return fingerprint_of({name: byte_array(t.detach().contiguous()) for name, t in model.state_dict().items()})

    return loader, {"generate": generate, "weights": weights, "fingerprint": fingerprint, "arm": loader.arm}


def fingerprint_of(weights: Mapping[str, Any]) -> str:
    """One hash of all of a model's bytes, by name."""
    total = xxhash.xxh3_64()
    for name in sorted(weights):
        total.update(name.encode())
        total.update(weights[name])
    return total.hexdigest()


class Hammer:
    """Generates without a break; each answer is the fingerprint of all workers' weights while it ran."""

    def __init__(self, engine: EmbeddedEngine, workers: list[Any]) -> None:
        self.answers: set[tuple[str, str]] = set()
        self._engine = engine
        self._workers = workers
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            with contextlib.suppress(WeightSyncError), self._engine.generation(timeout_s=0.2) as version:
                for worker in self._workers:
                    self.answers.add((str(version), worker.ask("fingerprint", None)))


class InProcess:
    """An `EngineWorker` that can be asked like a `ProcessWorker`."""

    def __init__(self, options: dict[str, Any], track: str) -> None:
        loader, self._asks = make_worker(0, options)
        self._worker = EngineWorker(loader, track=track)
        if options.get("deaf"):
            self._worker.init = lambda request: threading.Event().wait()  # type: ignore[assignment,method-assign]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._worker, name)

    def ask(self, name: str, argument: Any) -> Any:
        return self._asks[name](argument)


def engine_main(engine_id: str, world_size: int, options: dict[str, Any], conn: Any) -> None:
    """Serves until told to stop; answers questions about its workers on `conn`."""
    torch.set_num_threads(1)
    if "shared_memory" in options:  # of another host, so to say
        memory_folder._path = options["shared_memory"]
    for hook in options.get("hooks", ()):
        hook.arm()
    holder: list[EmbeddedEngine] = []
    if world_size == 1:
        workers: list[Any] = [InProcess(options, engine_id)]
    else:
        workers = [
            ProcessWorker(
                make_worker,
                index=i,
                args=(options,),
                track=f"{engine_id}/worker-{i}",
                start_method="fork",
                on_death=lambda why: holder[0].fence(why),
            )
            for i in range(world_size)
        ]
    engine = EmbeddedEngine(workers, engine_id=engine_id)
    holder.append(engine)
    hammer = Hammer(engine, workers) if options.get("hammer") else None
    let_go = threading.Event()

    def hold(seconds: float) -> None:
        with engine.generation():
            holding.set()
            let_go.wait(seconds)

    server = EngineServer(engine, host=options.get("host", "127.0.0.1"), port=options.get("port", 0), token=TOKEN)
    url = server.start()
    conn.send((url, [getattr(worker, "pid", os.getpid()) for worker in workers]))
    while (question := conn.recv()) is not None:
        worker, name, argument = question
        try:
            if name == "hold":
                holding = threading.Event()
                threading.Thread(target=hold, args=(argument,), daemon=True).start()
                conn.send(("ok", holding.wait(5), None))
            elif name == "let go":
                let_go.set()
                conn.send(("ok", None, None))
            elif name == "answers":
                conn.send(("ok", set(hammer.answers) if hammer else set(), None))
            elif name == "generate":
                with engine.generation(timeout_s=0.05) as version:
                    conn.send(("ok", workers[worker].ask(name, argument), str(version)))
            else:
                conn.send(("ok", workers[worker].ask(name, argument), None))
        except Exception as error:
            conn.send((type(error).__name__, str(error), None))
    engine.close()
    os._exit(0)


class Engine:
    """A test's view of an engine process."""

    def __init__(self, start: Callable[..., Any], engine_id: str, world_size: int = 1, **options: Any) -> None:
        self.id = engine_id
        self.world_size = world_size
        self.child = start(engine_main, engine_id, world_size, options, talk=True, name=engine_id)
        self.url, self.worker_pids = self.child.recv(60)

    def ask(self, name: str, argument: Any = None, worker: int = 0) -> Any:
        self.child.conn.send((worker, name, argument))
        outcome, value, _ = self.child.recv(20)
        if outcome != "ok":
            raise AssertionError(f"{outcome}: {value}")
        return value

    def generate(self) -> tuple[str, Any, str | None]:
        """("ok", output, version) or (error type, message, None)."""
        self.child.conn.send((0, "generate", None))
        return self.child.recv(20)

    def weights(self, worker: int = 0) -> dict[str, bytes]:
        return {name: bytes.fromhex(text) for name, text in self.ask("weights", worker=worker).items()}

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.child.conn.send(None)


# --- the trainer's processes ---


def client_of(urls: dict[str, str]) -> EngineFanout:
    return EngineFanout([HttpEngine(url, engine_id=engine_id, token=TOKEN) for engine_id, url in urls.items()])


def push_of(model: nn.Module, urls: dict[str, str], *, fsdp: bool = True, **options: Any) -> PushSync:
    settings: dict[str, Any] = {"chunk_bytes": options.pop("chunk_bytes", 300)}
    if "name_map" in options:
        settings["name_map"] = options.pop("name_map")
    if isinstance(options.get("strategy"), str):
        options["strategy"] = strategy_named(options["strategy"])
    extractor = (FSDPWeightExtractor if fsdp else ModuleWeightExtractor)(model, **settings)
    rank = dist.get_rank() if dist.is_initialized() else 0
    return PushSync(
        extractor,
        client_of(urls) if rank == 0 else None,
        dtype="bfloat16",
        **{"transfer_timeout_s": 20.0, "join_timeout_s": 10.0, "pause_timeout_s": 5.0, **options},
    )


def error_facts(error: BaseException) -> dict[str, Any]:
    """What a test wants to know of an error in another process."""
    causes = getattr(error, "causes", {})
    return {
        "type": type(error).__name__,
        "text": str(error),
        "causes": {who: type(cause).__name__ for who, cause in causes.items()},
        "retry_after_s": getattr(error, "retry_after_s", None),
    }
