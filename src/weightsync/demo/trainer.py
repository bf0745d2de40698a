"""One training rank of the demo: train, push, compare; rank 0 tells the launcher in JSON lines.

Started by `demo.launch`. This is also the example of a trainer: what a user's own loop needs is `PushSync`,
an extractor and two calls.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import msgspec
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from weightsync.clients.host import RolloutClient
from weightsync.config import WeightSyncConfig
from weightsync.demo.data import ByteText
from weightsync.demo.engine import MODEL_ID
from weightsync.demo.model import ServedCopy, TrainLoop, apply_fsdp2, build_model, model_size
from weightsync.demo.processes import TOKEN_VARIABLE, given, tell
from weightsync.demo.sglang_engine import SERVED
from weightsync.demo.summary import StepRow
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
class DemoOptions:
    """How the demo runs.

    Attributes:
        steps: how often it trains and pushes; versions of an adapter; of a fleet, steps of each trainer.
        ranks: training processes.
        engines: engine processes.
        engine: what generates: "embedded" (a torch module of ours), "vllm" or "sglang" (a server of that).
        path: "push": the trainer brings weights to engines; "pull": it publishes them, and engines fetch them.
        delta: whether what changed alone moves; the trainer then makes one small update a step.
        learning_rate: of these updates.
        strategy: how bytes are pushed: "broadcast", "cuda_ipc" or "packed_cuda_ipc".
        ray: whether trainers and engines are Ray actors.
        size: "medium" (55 million parameters), "small" (2.8 million) or "tiny". Where not given: small; medium for
            deltas into a vLLM, so that its pause shows what they save.
        out: folder for timeline.json and timeline.png.
        json: where to write the summary; None writes none.
        deadline_s: of one sync.
        step_timeout_s: how long the start may take, and each step; the run may take as long as it has steps. So long
            may a fleet's gate be closed.
        services: of a fleet: rollout services at the start.
        models: of a fleet: trainers, each of a model of its own; all are served together.
        mode: of a fleet: see `WeightSyncConfig.sync_mode`.
        rank: of an adapter.
    """

    steps: int = 10
    ranks: int = 2
    engines: int = 1
    engine: str = "embedded"
    path: str = "push"
    delta: bool = False
    learning_rate: float = 2e-6
    strategy: str = "broadcast"
    ray: bool = False
    size: str = ""
    out: Path = Path("demo-output")
    json: Path | None = None
    deadline_s: float = 30.0
    step_timeout_s: float = 300.0
    services: int = 3
    models: int = 2
    mode: str = "batch-async"
    rank: int = 8

    def __post_init__(self) -> None:
        if not self.size:
            object.__setattr__(self, "size", "medium" if self.delta and self.engine == "vllm" else "small")


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
        push: makes the `PushSync` from an extractor; None where weights are published and pulled.
    """

    push: PushSync

    def __init__(
        self, options: DemoOptions, rank: int, push: Callable[[WeightExtractor, Recorder], PushSync] | None = None
    ) -> None:
        torch.set_num_threads(1)
        text, size = ByteText(), model_size(options.size)
        if options.delta:
            size = dataclasses.replace(size, learning_rate=options.learning_rate, updates_per_step=1, warmup_updates=1)
        mesh = init_device_mesh("cpu", (options.ranks,))
        self._model = apply_fsdp2(build_model(options.size), mesh)
        self._loop = TrainLoop(self._model, text, size, rank=rank)
        self._served = ServedCopy(options.size)
        self._held_out = text.held_out(row_length=size.row_length)
        self.recorder = Recorder(f"trainer/rank-{rank}")
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
        phases: list[dict[str, Any]] = msgspec.to_builtins(self.recorder.records())
        return phases


def config_of(options: DemoOptions) -> WeightSyncConfig:
    return WeightSyncConfig.load(
        {
            "transfer": {
                "strategy": "sglang" if options.engine == "sglang" else options.strategy,
                "transfer_timeout_s": options.deadline_s,
                "delta": options.delta,
            },
            "extract": {"dtype": "bfloat16"},
        }
    )


def row_of(report: Mapping[str, Any], number: int, **known: Any) -> StepRow:
    """What an engine says of itself, beside what the trainer knows of that version.

    Raises:
        WeightSyncError: the engine refused generations, or serves another version.
    """
    if report["num_refused"]:
        raise WeightSyncError(f"an engine refused {report['num_refused']} generations of healthy syncs")
    if report["version"] != number:
        raise WeightSyncError(f"an engine serves {report['version']} and not version {number}")
    return StepRow(version=number, engine_loss=report["loss"], sample=report["sample"], **known)


def pushed_row(report: SyncReport, engine_report: Mapping[str, Any], *, trainer_loss: float, train_s: float) -> StepRow:
    """See `row_of`; of a version that was pushed."""
    return row_of(
        engine_report,
        report.version.number,
        trainer_loss=trainer_loss,
        total_bytes=report.total_bytes,
        phases_s=dict(report.phases_s),
        paused_s=report.paused_s,
        digests_equal=report.digests_equal,
        train_s=train_s,
        received_bytes=report.sent_bytes if report.num_deltas else None,
        density=report.sent_bytes / _PUSHED_GROWTH / report.total_bytes if report.num_deltas else None,
        sync_s=report.seconds,
        unprovable="; ".join(sorted(set(report.unprovable.values()))),
    )


def seat_over_http(message: Mapping[str, str], token: str, *, timeout_s: float) -> Seat:
    """The engine that said where it is; see `demo.engine.main`. Its report may take `timeout_s`."""

    def report() -> dict[str, Any]:
        response = httpx.get(message["report_url"], headers=bearer_headers(token), timeout=timeout_s, trust_env=False)
        response.raise_for_status()
        reply: dict[str, Any] = response.json()
        return reply

    handle: EngineHandle = HttpEngine(message["url"], engine_id=message["engine_id"], token=token)
    if message["kind"] in SERVED:
        handle = SERVED[message["kind"]].server.handle(message["url"], message["engine_id"])
    return Seat(handle=handle, service_url=message["service_url"], report=report)


def _publish(options: DemoOptions, rank: int, seats: Sequence[Seat]) -> None:
    """The same over the pull path: each version is published, and engines fetch it while the next step trains."""
    trainer = DemoTrainer(options, rank)
    token = os.environ[TOKEN_VARIABLE]
    with WeightManager(
        MODEL_ID, dtype="bfloat16", token=token, full_sync_interval=_FULL_EVERY if options.delta else 0,
        recorder=trainer.recorder,
    ) as manager:  # fmt: skip
        manager.start(deltas=options.delta)
        services = [RolloutClient(seat.service_url, token=token) for seat in seats if rank == 0]
        for service in services:
            sender = RegisterSenderRequest(model_id=MODEL_ID, sender_endpoint=manager.endpoint)
            service.register_sender(sender)
        collect: Callable[[], None] | None = None
        for step in range(options.steps):
            train_s = trainer.train(step)
            if collect is not None:
                collect()
            report = manager.offload(trainer.extractor, step + 1, rank, options.ranks)
            if not report.published:
                raise WeightSyncError(f"version {step + 1} was not published: {report.why}")
            notice = NotifyRequest(
                run_id=manager.run_id, model_id=MODEL_ID, version=step + 1, sender_endpoint=manager.endpoint
            )
            for service in services:
                service.notify_version(notice)
            delta = None
            if options.delta and rank == 0:
                with trainer.recorder.phase("wait for the delta"):
                    delta = manager.wait_delta_ready(timeout_s=options.deadline_s)
            waiting = msgspec.structs.replace(notice, wait_s=options.deadline_s)
            collect = functools.partial(
                _collect, trainer, services, seats, waiting, delta, offload_s=report.seconds, train_s=train_s,
                trainer_loss=trainer.evaluate(),
            )  # fmt: skip
        if collect is not None:
            collect()
        if rank == 0:
            tell({"phases": trainer.phases()})


def _collect(
    trainer: DemoTrainer,
    services: Sequence[RolloutClient],
    seats: Sequence[Seat],
    notice: NotifyRequest,
    delta: DeltaReport | None,
    *,
    offload_s: float,
    train_s: float,
    trainer_loss: float,
) -> None:
    """Rank 0: waits until the engines serve a version that they were told of, and tells what they make of it."""
    rows = []
    for service, seat in zip(services, seats, strict=False):
        with trainer.recorder.phase("wait for engine's report"):
            status = service.notify_version(notice)
            report = seat.report()
        trainer.recorder.extend(msgspec.convert(report["phases"], tuple[PhaseRecord, ...]))
        spans = phases_s(trainer.recorder.records())
        before, trainer.seen_s = trainer.seen_s, spans
        rows.append(
            row_of(
                report,
                notice.version,
                trainer_loss=trainer_loss,
                total_bytes=sum(spec.nbytes for spec in trainer.extractor.metadata("bfloat16")),
                phases_s={name: seconds - before.get(name, 0.0) for name, seconds in spans.items()},
                paused_s=status.paused_s or 0.0,
                digests_equal=None if status.unprovable else True,
                train_s=train_s,
                received_bytes=status.received_bytes if status.num_deltas else None,
                density=delta.num_changed / delta.num_elements if delta and status.num_deltas else None,
                sync_s=offload_s + (status.pull_s or 0.0) + (status.load_s or 0.0),
                unprovable="; ".join(sorted(set(status.unprovable.values()))),
            )
        )
    if rows:
        tell({"row": dataclasses.asdict(rows[0])})


def _run(options: DemoOptions, rank: int, seats: Sequence[Seat]) -> None:
    """All steps of this rank; rank 0 tells what came of each."""

    def push(extractor: WeightExtractor, recorder: Recorder) -> PushSync:
        engines = EngineFanout([seat.handle for seat in seats]) if rank == 0 else None
        return PushSync.from_config(config_of(options), extractor, engines, recorder=recorder)

    trainer = DemoTrainer(options, rank, push)
    trainer.push.initialize()
    for step in range(options.steps):
        train_s = trainer.train(step)
        report = trainer.push.sync_weights(step + 1)
        loss = trainer.evaluate()
        if rank == 0:
            rows = []
            for seat in seats:
                with trainer.recorder.phase("wait for engine's report"):
                    engine_report = seat.report()
                trainer.recorder.extend(msgspec.convert(engine_report["phases"], tuple[PhaseRecord, ...]))
                rows.append(pushed_row(report, engine_report, trainer_loss=loss, train_s=train_s))
            tell({"row": dataclasses.asdict(rows[0])})
    if rank == 0:
        tell({"phases": trainer.phases()})
    trainer.push.close()


def main() -> None:
    arguments = given()
    options, rank = DemoOptions(**arguments.options), arguments.rank
    dist.init_process_group(
        "gloo",
        init_method=f"file://{arguments.rendezvous}",
        rank=rank,
        world_size=options.ranks,
        timeout=timedelta(seconds=options.step_timeout_s),
    )
    try:
        seats = [
            seat_over_http(each, os.environ[TOKEN_VARIABLE], timeout_s=options.step_timeout_s)
            for each in arguments.engines
        ]
        (_publish if options.path == "pull" else _run)(options, rank, seats)
    except WeightSyncError as error:
        tell({"error": error.to_dict(), "rank": rank})
        os._exit(1)  # a broken process group must not hang the exit
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
