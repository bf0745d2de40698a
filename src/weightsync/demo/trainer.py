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
from datetime import timedelta
from typing import Any

import httpx
import msgspec
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from weightsync.clients.fanout import EngineFanout
from weightsync.clients.http import HttpEngine
from weightsync.demo.data import ByteText
from weightsync.demo.engine import NUM_HELD_OUT_ROWS, REPORT_PATH, TOKEN_VARIABLE
from weightsync.demo.model import TrainLoop, apply_fsdp2, build_model, held_out_loss, model_size
from weightsync.demo.summary import StepRow
from weightsync.errors import WeightSyncError
from weightsync.extract.fsdp import FSDPWeightExtractor
from weightsync.net.auth import bearer_headers
from weightsync.observe import Recorder
from weightsync.publish.push import PushSync
from weightsync.types import PhaseRecord, SyncReport

_CHUNK_BYTES = 1 << 20
_REPORT_TIMEOUT_S = 60.0


def train(options: argparse.Namespace) -> None:
    """Runs all steps on this rank; all ranks run it together."""
    token = os.environ[TOKEN_VARIABLE]
    text = ByteText()
    size = model_size(options.size)
    mesh = init_device_mesh("cpu", (options.world_size,))
    model = apply_fsdp2(build_model(options.size), mesh)
    loop = TrainLoop(model, text, size, rank=options.rank)
    held_out = text.held_out(num_rows=NUM_HELD_OUT_ROWS, row_length=size.row_length)
    engines = EngineFanout([HttpEngine(url, engine_id=name, token=token) for name, url in _engines(options).items()])
    recorder = Recorder(f"trainer/rank-{options.rank}")

    push = PushSync(
        FSDPWeightExtractor(model, chunk_bytes=_CHUNK_BYTES),
        engines,
        dtype="bfloat16",
        transfer_timeout_s=options.deadline_s,
        recorder=recorder,
    )
    push.initialize()
    for step in range(options.steps):
        started = time.monotonic()
        with recorder.phase("train"):
            loop.step(step)
        trained = time.monotonic()
        report = push.sync_weights(step + 1)
        with recorder.phase("evaluate"):
            loss = held_out_loss(model, held_out)
        if options.rank == 0:
            for row in _rows(options, token, report, loss, trained - started, recorder):
                _tell({"row": dataclasses.asdict(row)})
    if options.rank == 0:
        _tell({"phases": msgspec.to_builtins(recorder.records())})
    push.close()


def _rows(
    options: argparse.Namespace, token: str, report: SyncReport, loss: float, train_s: float, recorder: Recorder
) -> list[StepRow]:
    """What each engine says of itself, beside what the trainer knows."""
    rows = []
    for url in _engines(options).values():
        with recorder.phase("wait for engine's report"):
            response = httpx.get(
                f"{url}{REPORT_PATH}", headers=bearer_headers(token), timeout=_REPORT_TIMEOUT_S, trust_env=False
            )
        response.raise_for_status()
        said: dict[str, Any] = response.json()
        recorder.extend(msgspec.convert(said["phases"], tuple[PhaseRecord, ...]))
        if said["num_refused"]:
            raise WeightSyncError(f"an engine refused {said['num_refused']} generations of healthy syncs")
        if said["version"] != report.version.number:
            raise WeightSyncError("an engine serves another version than it committed", version=str(report.version))
        rows.append(
            StepRow(
                version=said["version"],
                trainer_loss=loss,
                engine_loss=said["loss"],
                total_bytes=report.total_bytes,
                phases_s=dict(report.phases_s),
                paused_s=report.paused_s,
                digests_equal=report.digests_equal,
                sample=said["sample"],
                train_s=train_s,
                sync_s=report.seconds,
                unprovable="; ".join(report.unprovable.values()),
            )
        )
    return rows[:1]


def _engines(options: argparse.Namespace) -> dict[str, str]:
    return {f"engine-{index}": url for index, url in enumerate(options.engine_url)}


def _tell(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Runs one rank."""
    parser = argparse.ArgumentParser(description="One training rank of the demo; `weightsync demo` starts it.")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--world-size", type=int, required=True)
    parser.add_argument("--rendezvous", required=True)
    parser.add_argument("--engine-url", action="append", required=True)
    parser.add_argument("--size", required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--deadline-s", type=float, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{options.rendezvous}",
        rank=options.rank,
        world_size=options.world_size,
        timeout=timedelta(seconds=60),
    )
    try:
        train(options)
    except WeightSyncError as error:
        _tell({"error": error.to_dict(), "rank": options.rank})
        os._exit(1)  # a broken process group must not hang the exit
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
