"""The main job on Ray: the same trainers and engines as actors, driven by the controller's calls."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from weightsync.cluster.engine_actor import EngineContext
from weightsync.cluster.launch import launch
from weightsync.cluster.trainer_actor import RankContext
from weightsync.demo.engine import DemoEngine, start_engine
from weightsync.demo.processes import patiently
from weightsync.demo.trainer import DemoOptions, DemoTrainer, config_of, pushed_row
from weightsync.demo.vllm_engine import VllmDemoEngine
from weightsync.optional import imported

_OBJECT_STORE_BYTES = 200 << 20


class RayJob:
    """Starts Ray on this machine, the actors on it, and says what rank 0 of the processes would say.

    Args:
        say: told what is waited for, where that takes long.
    """

    def __init__(self, options: DemoOptions, *, say: Callable[[str], None]) -> None:
        self._options = options
        self._say = say
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> RayJob:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        # Ray runs actors at nice 15: on a busy machine an engine that starts in one was seen to starve.
        os.environ.setdefault("RAY_worker_niceness", "0")
        ray = imported("ray", "--ray needs Ray: pip install 'weightsync[ray]'")
        options = self._options
        ray.init(
            address="local",
            num_cpus=options.ranks + options.engines,  # bookkeeping: the demo's actors share what there is
            include_dashboard=False,
            object_store_memory=_OBJECT_STORE_BYTES,
            log_to_driver=False,
            logging_level="ERROR",
            runtime_env={"env_vars": {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}},
        )
        self._stack.callback(ray.shutdown)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def messages(self) -> Iterator[dict[str, Any]]:
        """A row for each step, then what rank 0 and the engines timed."""
        options, limit_s = self._options, self._options.step_timeout_s
        phases: list[dict[str, Any]] = []
        sync = self._stack.enter_context(
            launch(
                functools.partial(_trainer, options),
                functools.partial(_engine, options.engine, options.size),
                num_ranks=options.ranks,
                num_engines=options.engines,
                config=config_of(options),
                start_timeout_s=limit_s,
            )
        )
        sync.initialize()
        for engine in sync.engines.values():
            engine.ask("start", timeout_s=limit_s)
        for step in range(options.steps):
            with patiently(f"training step {step + 1}", self._say):
                train_s = sync.run("train", step, timeout_s=limit_s)[0]
            report = sync.sync_weights(step + 1)
            with patiently("evaluation", self._say):
                loss = sync.run("evaluate", timeout_s=limit_s)[0]
                reports = [engine.ask("report", timeout_s=limit_s) for engine in sync.engines.values()]
            rows = [pushed_row(report, each, trainer_loss=loss, train_s=train_s) for each in reports]
            phases += [phase for each in reports for phase in each["phases"]]
            yield {"row": dataclasses.asdict(rows[0])}
        phases += sync.run("phases", timeout_s=limit_s)[0]
        yield {"phases": msgspec.to_builtins(phases)}
        for engine in sync.engines.values():
            engine.ask("close", timeout_s=limit_s)


def _engine(kind: str, size: str, context: EngineContext) -> DemoEngine | VllmDemoEngine:
    return start_engine(kind, context.engine_id, size)


def _trainer(options: DemoOptions, context: RankContext) -> DemoTrainer:
    return DemoTrainer(options, context.rank, lambda extractor, recorder: context.push(extractor, recorder=recorder))
