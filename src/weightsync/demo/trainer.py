"""One training rank of the demo: train, push, compare; rank 0 tells the launcher in JSON lines.

Started by `demo.launch`. This is also the example of a trainer: what a user's own loop needs is `PushSync`,
an extractor and two calls.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import httpx
import msgspec
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from weightsync.clients.host import RolloutClient
from weightsync.config import WeightSyncConfig
from weightsync.demo.data import NUM_HELD_OUT_ROWS, ByteText
from weightsync.demo.engine import MODEL_ID, TOKEN_VARIABLE
from weightsync.demo.model import ServedCopy, TrainLoop, apply_fsdp2, build_model, model_size
from weightsync.demo.sglang_engine import sglang_handle
from weightsync.demo.summary import StepRow
from weightsync.demo.vllm_engine import vllm_handle
from weightsync.errors import WeightSyncError
from weightsync.extract.base import WeightExtractor
from weightsync.extract.fsdp import FSDPWeightExtractor
from weightsync.handles.fanout import EngineFanout
from weightsync.handles.http import HttpEngine
from weightsync.net.auth import bearer_headers
from weightsync.observe import Recorder, phases_s
from weightsync.trainer.publisher import DeltaReport, WeightManager
from weightsync.trainer.push import PushSync
from weightsync.types import EngineHandle, PhaseRecord, SyncReport
from weightsync.types.service import NotifyRequest, RegisterSenderRequest

_PUSHED_GROWTH = 3  # a changed element has 2 bytes (all of the model is bfloat16) and is pushed with 4 of position
_CHUNK_BYTES = 1 << 20
_FULL_EVERY = 5  # with deltas every so many versions is published in full, so that pauses can be compared


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainerOptions:
    """How one rank trains and pushes; the same on every rank but for `rank`.

    Attributes:
        rank: of the trainer's job.
        world_size: ranks of the job.
        size: name of the model's size.
        strategy: how bytes move.
        deadline_s: of one sync.
        step_timeout_s: how long the other ranks, or an engine's report, may take.
        path: "push", or "pull": publish, and let engines fetch.
        delta_learning_rate: where given, each version is one update at this rate, and deltas move.
    """

    rank: int
    world_size: int
    size: str
    strategy: str
    deadline_s: float
    step_timeout_s: float
    path: str = "push"
    delta_learning_rate: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Seat:
    """One engine as rank 0 sees it: the handle that takes weights, the service that fetches them for it, and a way to
    ask what it makes of them."""

    handle: EngineHandle
    service_url: str
    report: Callable[[], dict[str, Any]]


class DemoTrainer:
    """One rank: model, optimizer, and what moves its weights. The default process group is there already.

    Args:
        options: see `TrainerOptions`.
        push: makes the `PushSync` from an extractor; None where weights are published and pulled.
    """

    push: PushSync

    def __init__(
        self, options: TrainerOptions, push: Callable[[WeightExtractor, Recorder], PushSync] | None = None
    ) -> None:
        torch.set_num_threads(1)
        text, size = ByteText(), model_size(options.size)
        if options.delta_learning_rate is not None:
            size = dataclasses.replace(
                size, learning_rate=options.delta_learning_rate, updates_per_step=1, warmup_updates=1
            )
        mesh = init_device_mesh("cpu", (options.world_size,))
        self._model = apply_fsdp2(build_model(options.size), mesh)
        self._loop = TrainLoop(self._model, text, size, rank=options.rank)
        self._served = ServedCopy(options.size)
        self._held_out = text.held_out(num_rows=NUM_HELD_OUT_ROWS, row_length=size.row_length)
        self.recorder = Recorder(f"trainer/rank-{options.rank}")
        self.seen_s: dict[str, float] = {}  # of each phase, when the last row was told
        self.extractor = FSDPWeightExtractor(self._model, chunk_bytes=_CHUNK_BYTES)
        if push is not None:
            self.push = push(self.extractor, self.recorder)

    def train(self, step: int) -> float:
        """One step of every rank; the seconds it took."""
        started = time.monotonic()
        with self.recorder.phase("train"):
            self._loop.step(step)
        return time.monotonic() - started

    def evaluate(self) -> float:
        """Loss on the held-out text of what engines get. A collective of all ranks."""
        with self.recorder.phase("evaluate"):
            return self._served.loss(self._model, self._held_out)

    def phases(self) -> list[dict[str, Any]]:
        """All that this rank timed, as plain data."""
        phases: list[dict[str, Any]] = msgspec.to_builtins(self.recorder.records())
        return phases


def config_of(options: TrainerOptions) -> WeightSyncConfig:
    """How the demo's weights move."""
    return WeightSyncConfig.load(
        {
            "transfer": {
                "strategy": options.strategy,
                "transfer_timeout_s": options.deadline_s,
                "delta": options.delta_learning_rate is not None,
            },
            "extract": {"dtype": "bfloat16"},
        }
    )


def row_of(report: SyncReport, said: Mapping[str, Any], *, trainer_loss: float, train_s: float) -> StepRow:
    """What an engine says of itself, beside what the trainer knows.

    Raises:
        WeightSyncError: the engine refused generations, or serves another version than was pushed.
    """
    if said["num_refused"]:
        raise WeightSyncError(f"an engine refused {said['num_refused']} generations of healthy syncs")
    if said["version"] != report.version.number:
        raise WeightSyncError("an engine serves another version than it committed", version=str(report.version))
    return StepRow(
        version=said["version"],
        trainer_loss=trainer_loss,
        engine_loss=said["loss"],
        total_bytes=report.total_bytes,
        phases_s=dict(report.phases_s),
        paused_s=report.paused_s,
        digests_equal=report.digests_equal,
        sample=said["sample"],
        train_s=train_s,
        received_bytes=report.sent_bytes if report.num_deltas else None,
        density=report.sent_bytes / _PUSHED_GROWTH / report.total_bytes if report.num_deltas else None,
        sync_s=report.seconds,
        unprovable="; ".join(sorted(set(report.unprovable.values()))),
    )


def seat_over_http(told: Mapping[str, str], token: str, *, timeout_s: float) -> Seat:
    """The engine that said where it is; see `demo.engine.main`. Its report may take `timeout_s`."""

    def report() -> dict[str, Any]:
        response = httpx.get(told["report_url"], headers=bearer_headers(token), timeout=timeout_s, trust_env=False)
        response.raise_for_status()
        said: dict[str, Any] = response.json()
        return said

    handle: EngineHandle = HttpEngine(told["url"], engine_id=told["engine_id"], token=token)
    if told["kind"] == "vllm":
        handle = vllm_handle(told["url"], told["engine_id"])
    elif told["kind"] == "sglang":
        handle = sglang_handle(told["url"], told["engine_id"])
    return Seat(handle=handle, service_url=told["service_url"], report=report)


def _publish(options: TrainerOptions, seats: Sequence[Seat], num_steps: int) -> None:
    """The same over the pull path: each version is published, and engines fetch it while the next step trains."""
    trainer = DemoTrainer(options)
    token = os.environ[TOKEN_VARIABLE]
    by_deltas = options.delta_learning_rate is not None
    with WeightManager(
        MODEL_ID, dtype="bfloat16", token=token, full_sync_interval=_FULL_EVERY if by_deltas else 0,
        recorder=trainer.recorder,
    ) as manager:  # fmt: skip
        manager.start(deltas=by_deltas)
        services = [RolloutClient(seat.service_url, token=token) for seat in seats if options.rank == 0]
        for service in services:
            sender = RegisterSenderRequest(model_id=MODEL_ID, sender_endpoint=manager.endpoint)
            service.register_sender(sender)
        due: _Due | None = None
        for step in range(num_steps):
            train_s = trainer.train(step)
            if due is not None:
                _collect(due, trainer, services, seats, options.deadline_s)
            report = manager.offload(trainer.extractor, step + 1, options.rank, options.world_size)
            if not report.published:
                raise WeightSyncError(f"version {step + 1} was not published: {report.why}")
            notice = NotifyRequest(
                run_id=manager.run_id, model_id=MODEL_ID, version=step + 1, sender_endpoint=manager.endpoint
            )
            for service in services:
                service.notify_version(notice)
            delta = None
            if options.delta_learning_rate is not None and options.rank == 0:
                with trainer.recorder.phase("wait for the delta"):
                    delta = manager.wait_delta_ready(timeout_s=options.deadline_s)
            due = _Due(notice=notice, offload_s=report.seconds, train_s=train_s, loss=trainer.evaluate(), delta=delta)
        if due is not None:
            _collect(due, trainer, services, seats, options.deadline_s)
        if options.rank == 0:
            _tell({"phases": trainer.phases()})


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Due:
    """A version that engines were told of."""

    notice: NotifyRequest
    offload_s: float
    train_s: float
    loss: float
    delta: DeltaReport | None


def _collect(
    due: _Due, trainer: DemoTrainer, services: Sequence[RolloutClient], seats: Sequence[Seat], deadline_s: float
) -> None:
    """Rank 0: waits until the engines serve it, and tells what they make of it."""
    rows = []
    for service, seat in zip(services, seats, strict=False):
        with trainer.recorder.phase("wait for engine's report"):
            status = service.notify_version(msgspec.structs.replace(due.notice, wait_s=deadline_s))
            said = seat.report()
        trainer.recorder.extend(msgspec.convert(said["phases"], tuple[PhaseRecord, ...]))
        if said["num_refused"]:
            raise WeightSyncError(f"an engine refused {said['num_refused']} generations of healthy syncs")
        if said["version"] != due.notice.version:
            raise WeightSyncError(f"an engine serves {said['version']} and not version {due.notice.version}")
        spans = phases_s(trainer.recorder.records())
        before, trainer.seen_s = trainer.seen_s, spans
        rows.append(
            StepRow(
                version=said["version"],
                trainer_loss=due.loss,
                engine_loss=said["loss"],
                total_bytes=sum(spec.nbytes for spec in trainer.extractor.metadata("bfloat16")),
                phases_s={name: seconds - before.get(name, 0.0) for name, seconds in spans.items()},
                paused_s=status.paused_s or 0.0,
                digests_equal=None if status.unprovable else True,
                sample=said["sample"],
                train_s=due.train_s,
                received_bytes=status.received_bytes if status.num_deltas else None,
                density=due.delta.num_changed / due.delta.num_elements if due.delta and status.num_deltas else None,
                sync_s=due.offload_s + (status.pull_s or 0.0) + (status.load_s or 0.0),
                unprovable="; ".join(sorted(set(status.unprovable.values()))),
            )
        )
    if rows:
        _tell({"row": dataclasses.asdict(rows[0])})


def _run(options: TrainerOptions, seats: Sequence[Seat], num_steps: int) -> None:
    """All steps of this rank; rank 0 tells what came of each."""

    def push(extractor: WeightExtractor, recorder: Recorder) -> PushSync:
        engines = EngineFanout([seat.handle for seat in seats]) if options.rank == 0 else None
        return PushSync.from_config(config_of(options), extractor, engines, recorder=recorder)

    trainer = DemoTrainer(options, push)
    trainer.push.initialize()
    for step in range(num_steps):
        train_s = trainer.train(step)
        report = trainer.push.sync_weights(step + 1)
        loss = trainer.evaluate()
        if options.rank == 0:
            rows = []
            for seat in seats:
                with trainer.recorder.phase("wait for engine's report"):
                    said = seat.report()
                trainer.recorder.extend(msgspec.convert(said["phases"], tuple[PhaseRecord, ...]))
                rows.append(row_of(report, said, trainer_loss=loss, train_s=train_s))
            _tell({"row": dataclasses.asdict(rows[0])})
    if options.rank == 0:
        _tell({"phases": trainer.phases()})
    trainer.push.close()


def _tell(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Runs one rank: all steps, then what it timed."""
    parser = argparse.ArgumentParser(description="One training rank of the demo; `weightsync demo` starts it.")
    parser.add_argument("--options", required=True, help="TrainerOptions as JSON")
    parser.add_argument("--rendezvous", required=True)
    parser.add_argument("--engine", action="append", required=True, help="what an engine's process said, as JSON")
    parser.add_argument("--steps", type=int, required=True)
    arguments = parser.parse_args()
    options = TrainerOptions(**json.loads(arguments.options))
    dist.init_process_group(
        "gloo",
        init_method=f"file://{arguments.rendezvous}",
        rank=options.rank,
        world_size=options.world_size,
        timeout=timedelta(seconds=options.step_timeout_s),
    )
    try:
        seats = [
            seat_over_http(json.loads(told), os.environ[TOKEN_VARIABLE], timeout_s=options.step_timeout_s)
            for told in arguments.engine
        ]
        (_publish if options.path == "pull" else _run)(options, seats, arguments.steps)
    except WeightSyncError as error:
        _tell({"error": error.to_dict(), "rank": options.rank})
        os._exit(1)  # a broken process group must not hang the exit
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
