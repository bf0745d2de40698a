"""A trainer of the demo's fleet: one model, one rank. It publishes each step's weights to the controller, and takes the
next batch when the gate lets it.

Started by `demo.fleet`; prints one JSON line a version.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from types import SimpleNamespace

import torch

from weightsync.clients.async_controller import AsyncControllerClient
from weightsync.clients.controller import ControllerClient
from weightsync.demo.data import ByteText
from weightsync.demo.model import ServedCopy, TrainLoop, build_model, model_size
from weightsync.demo.processes import TOKEN_VARIABLE, given, tell
from weightsync.errors import DeadlineExceededError, WeightSyncError
from weightsync.verbs.publishing import publish


def main() -> None:
    options = given()
    token = os.environ[TOKEN_VARIABLE]
    try:
        asyncio.run(_train(options, token))
    except WeightSyncError as error:
        tell({"error": error.to_dict()})
        sys.exit(1)


async def _train(options: SimpleNamespace, token: str) -> None:
    torch.set_num_threads(1)
    text, size = ByteText(), model_size(options.size)
    model = build_model(options.size, seed=options.seed)
    served = ServedCopy(options.size)
    held_out = text.held_out(row_length=size.row_length)
    loop = TrainLoop(model, text, size, rank=options.seed)
    controller = ControllerClient(options.controller, token=token)
    gate = AsyncControllerClient(options.controller, token=token)
    controller.trajectory_pool_notify_batch_dropped(options.model_id)  # of a trainer that died in its step
    with publish(model, options.model_id, to=options.controller, token=token, port=0, last_wait_s=0) as publisher:
        for version in range(1, options.steps + 1):
            waited_s = time.monotonic()
            if options.mode == "fully-async":
                if version > 1:
                    await gate.wait(publisher.run_id, options.model_id, version - 1, wait_s=options.wait_s)
            elif await gate.check_rollout_service_status(options.model_id, wait_s=options.wait_s) != "continue":
                raise DeadlineExceededError(f"the gate of model {options.model_id} is closed for {options.wait_s:g} s")
            waited_s = time.monotonic() - waited_s
            controller.trajectory_pool_notify_batch_ready(options.model_id)
            loop.step(version - 1)
            report = publisher.step()
            if not report.published:
                raise WeightSyncError(f"version {version} was not published: {report.why}")
            loss = served.loss(model, held_out)
            tell({
                "trained": options.model_id, "run_id": publisher.run_id, "version": version, "loss": loss,
                "waited_s": waited_s, "offload_s": report.seconds,
            })  # fmt: skip
        tell({"done": options.model_id, "run_id": publisher.run_id})
        sys.stdin.read()  # engines may still fetch the last version
    controller.close()
    await gate.close()


if __name__ == "__main__":
    main()
