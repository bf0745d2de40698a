"""One host whose /dev/shm is small, and filled to the brim in the middle of a run; prints what became of whom.

A mount namespace of its own is needed: `unshare -m python full_shm.py`.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from weightsync.engine.embedded import EmbeddedEngine
from weightsync.errors import WeightSyncError
from weightsync.host.puller import Puller
from weightsync.host.service import RolloutService
from weightsync.host.settings import RolloutConfig
from weightsync.load.module import ModuleWeightLoader
from weightsync.trainer.publisher import WeightManager
from weightsync.types import Deadline
from weightsync.types.transfer_messages import Transport

SHM_BYTES = 24 << 20
SIZE = 1 << 20
"""Elements of float32: 4 MiB."""
WAIT_S = 60.0
FILL = Path("/dev/shm/somebody-elses")


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(SIZE))


def weights(number: int, size: int = SIZE) -> dict[str, torch.Tensor]:
    return {"w": torch.full((size,), float(number))}


def fill() -> None:
    """Leaves less than a page or two."""
    with FILL.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(1 << 16))
    facts = os.statvfs("/dev/shm")
    assert facts.f_bavail * facts.f_frsize < 1 << 16, facts


def until(done: Callable[[], Any]) -> Any:
    end_s = time.monotonic() + WAIT_S
    while not (found := done()):
        if time.monotonic() > end_s:
            raise AssertionError("it did not come about")
        time.sleep(0.02)
    return found


def typed(call: Callable[[], Any]) -> str:
    try:
        call()
    except WeightSyncError as error:
        return f"{type(error).__name__}: {'has no room' in str(error)}"
    return "no error"


def main() -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SHM_BYTES}", "tmpfs", "/dev/shm"], check=True)
    said: dict[str, Any] = {}
    module = Model()
    engine = EmbeddedEngine.of(ModuleWeightLoader(module), engine_id="e", model_id="m")
    config = RolloutConfig(transport=Transport.TCP, poll_s=0.1)
    with WeightManager("m", run_id="run") as manager:
        for number in (1, 2):  # both segments are there
            manager.offload(weights(number).items(), number)
            manager.wait_published(number, timeout_s=WAIT_S)
        with contextlib.closing(RolloutService({"m": engine}, config)) as service:
            service.start()
            fill()
            service.register_sender("m", manager.endpoint)
            errors = until(lambda: service.status().models["m"].errors)
            said["receiver"] = errors["pull"].split(":")[0]
            said["staged nothing"] = service.status().models["m"].version
            said["a puller"] = typed(lambda: pull(manager))
            # the trainer has its segments: it goes on
            said["trainer"] = manager.offload(weights(3).items(), 3).published
            manager.wait_published(3, timeout_s=WAIT_S)
            FILL.unlink()
            until(lambda: service.status().models["m"].version == 3)
            said["served"] = float(module.w.detach()[7])
            fill()
            said["trainer again"] = manager.offload(weights(5).items(), 5).published
            manager.wait_published(5, timeout_s=WAIT_S)
            until(lambda: service.status().models["m"].version == 5)  # the staging is there already
            said["served again"] = float(module.w.detach()[7])
            # another layout has to be made room for; the old one's room is not enough
            said["a larger model"] = typed(lambda: manager.offload(weights(6, 8 * SIZE).items(), 6))
            said["serves on"] = (service.status().models["m"].version, float(module.w.detach()[7]))
            FILL.unlink()
            said["after it"] = manager.offload(weights(7).items(), 7).published
            until(lambda: service.status().models["m"].version == 7)
            said["served at last"] = float(module.w.detach()[7])
    said["left"] = [name for name in os.listdir("/dev/shm") if "host" not in name]
    sys.stdout.write(json.dumps(said))


def pull(manager: WeightManager) -> None:
    with (
        contextlib.closing(Puller(manager.endpoint, "m", receiver_id="p", transport=Transport.TCP)) as puller,
        puller.pull(deadline=Deadline(10.0)),
    ):
        pass


if __name__ == "__main__":
    main()
    sys.exit(0)
