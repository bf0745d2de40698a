"""What the Ray tests run inside actors: the spine's odd model, as trainer and as engine."""

from __future__ import annotations

import functools
import os
import signal
import threading
from typing import Any

import torch

import weightsync
from tests.multiproc.spine import build, cast_bytes, fingerprint_of, shard, step
from tests.standins.faults import FaultyLoader
from weightsync.cluster.engine_actor import EngineContext
from weightsync.cluster.trainer_actor import RankContext
from weightsync.engine.embedded import EmbeddedEngine
from weightsync.errors import LoadError
from weightsync.extract.fsdp import FSDPWeightExtractor
from weightsync.tensors import byte_array
from weightsync.types import DescribeRequest, EngineOp, EngineReply, EngineRequest

BLOCKS = 6


class Faulty(EmbeddedEngine):
    """An engine whose process is killed when it is asked for a step, if so armed."""

    def __init__(self, loader: FaultyLoader, *, engine_id: str) -> None:
        from weightsync.engine.worker import EngineWorker

        super().__init__([EngineWorker(loader, track=engine_id)], engine_id=engine_id)
        self.die_at: str | None = None

    def call(self, op: EngineOp, request: EngineRequest, *, timeout_s: float) -> EngineReply:
        if op == self.die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().call(op, request, timeout_s=timeout_s)


class Rollout:
    """What the engine factory builds: an engine, and what a test asks of it."""

    def __init__(self, context: EngineContext) -> None:
        torch.set_num_threads(1)
        self._model = build(99, dtype=torch.bfloat16, blocks=BLOCKS)
        self._loader = FaultyLoader(self._model)
        self.engine = Faulty(self._loader, engine_id=context.engine_id)
        self._let_go = threading.Event()
        self._waiting: list[threading.Event] = []

    def fingerprint(self) -> tuple[str, int | None, str]:
        """Hash of the live bytes, the version they are served as, and the digest that the engine proved."""
        with self.engine.generation(timeout_s=20.0) as version:
            live = fingerprint_of(
                {name: byte_array(t.detach().contiguous()) for name, t in self._model.state_dict().items()}
            )
        reply = self.engine.call(EngineOp.DESCRIBE, DescribeRequest(), timeout_s=20.0)
        return live, None if version is None else version.number, str(reply.model_digest)

    def arm(self, fault: dict[str, Any]) -> None:
        self._loader.arm(fault)

    def die_at(self, op: str) -> None:
        self.engine.die_at = op

    def where(self) -> tuple[int, str | None]:
        """Process id, and the GPUs that Ray shows this process."""
        return os.getpid(), os.environ.get("CUDA_VISIBLE_DEVICES")

    def fail(self, typed: bool) -> None:
        raise LoadError("typed", parameter="p") if typed else ValueError("plain")

    def wait(self, seconds: float) -> bool:
        """Blocks until the next `let_go`."""
        mine = self._let_go
        self._waiting.append(mine)
        try:
            return mine.wait(seconds)
        finally:
            self._waiting.remove(mine)

    def waiting(self) -> int:
        """How many wait for the next `let_go`."""
        return self._waiting.count(self._let_go)

    def let_go(self) -> None:
        ended, self._let_go = self._let_go, threading.Event()
        ended.set()

    def unreadable(self, how: str) -> object:
        """What can't be pickled here, or can't be unpickled there."""
        return threading.Lock() if how == "here" else Unreadable()

    def _hidden(self) -> None: ...


class Unreadable:
    """Fails when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return int, ("no number",)


class Trainer:
    """What the trainer factory builds: an FSDP2 model whose step every shard computes alike."""

    def __init__(self, context: RankContext) -> None:
        torch.set_num_threads(1)
        self._rank = context.rank
        self._config = context.config
        self._model = shard(build(5, blocks=BLOCKS), "shard0", context.world_size)
        self._extractor = FSDPWeightExtractor(self._model, chunk_bytes=300)
        self.push = self._pushed_by(context)

    def _pushed_by(self, context: RankContext) -> Any:
        return context.push(self._extractor)

    def step(self) -> Any:
        step(self._model)
        return self._rank

    def where(self) -> tuple[int, str | None]:
        return os.getpid(), os.environ.get("CUDA_VISIBLE_DEVICES")

    def master_addr(self) -> str:
        return self._config.transfer.master_addr

    def signal_in_extraction(self, rank: int, chunk: int, what: signal.Signals) -> None:
        """That rank gets a signal while it extracts chunk `chunk` of the next sync."""
        if rank != self._rank:
            return
        extract = self._extractor.extract_weights

        def faulty(dtype: str | None) -> Any:
            for count, each in enumerate(extract(dtype)):
                if count == chunk:
                    os.kill(os.getpid(), what)
                yield each

        self._extractor.extract_weights = faulty  # type: ignore[method-assign]

    def _hidden(self) -> None: ...

    def fail(self, rank: int) -> None:
        if rank == self._rank:
            raise ValueError("a step that fails")


class OrderedTrainer(Trainer):
    """The same, whose own step pushes where a controller orders that."""

    def _pushed_by(self, context: RankContext) -> Any:
        return weightsync.push(self._extractor, context.engines, config=context.config, token=context.token)

    def step(self) -> Any:
        """The version that was pushed; None: none was ordered."""
        super().step()
        report = self.push.step()
        return None if report is None else report.version.number


@functools.cache
def expected(steps: int) -> str:
    """The fingerprint of what an engine must hold after so many steps; made without the library."""
    model = build(5, blocks=BLOCKS)
    for _ in range(steps):
        step(model)
    return fingerprint_of(cast_bytes(model))
