"""A rollout service of the demo's fleet: an engine for each model, which generate all the time while they may.

Started by `demo.fleet`; prints one JSON line for each version of each model that it has answered with, and ends when
its standard input closes.
"""

from __future__ import annotations

import os
import sys
import threading
import time

from weightsync.demo.engine import DemoEngine
from weightsync.demo.processes import TOKEN_VARIABLE, given, tell
from weightsync.errors import WeightSyncError
from weightsync.host.service import RolloutService
from weightsync.host.settings import RolloutConfig
from weightsync.memory import LeaseReader, ServingLease

_LOOK_S = 0.05
_REST_S = 0.5


def main() -> None:
    options = given()
    token = os.environ[TOKEN_VARIABLE]
    lease = ServingLease(options.lease)
    engines = {
        model: DemoEngine(f"{options.service_id}/{model}", options.size, lease=LeaseReader(lease.path), rest_s=_REST_S)
        for model in options.models
    }
    service = RolloutService(
        {model: demo.engine for model, demo in engines.items()},
        RolloutConfig(
            service_id=options.service_id, token=token, sender_token=token, controller=options.controller,
            controller_token=token, lease=lease,
        ),
    )  # fmt: skip
    service.start()
    ended = threading.Event()
    for model, demo in engines.items():
        demo.start()
        threading.Thread(target=_report, args=(options.service_id, model, demo, ended), daemon=True).start()
    tell({"ready": options.service_id})
    sys.stdin.read()
    ended.set()
    service.close()
    for demo in engines.values():
        demo.close()
    lease.remove()


def _report(service_id: str, model: str, demo: DemoEngine, ended: threading.Event) -> None:
    """Answers on the held-out text once a version, and says what came of it and when."""
    last: object = ()
    while not ended.wait(_LOOK_S):
        version = demo.engine.version
        if version is None or version == last:
            continue
        began_s = time.monotonic()
        try:
            report = demo.report()
        except WeightSyncError:
            continue  # it may not answer now
        if report["version"] != version.number:
            continue
        last = version
        tell({
            "served": model, "service": service_id, "run_id": version.run_id, "version": version.number,
            "loss": report["loss"], "began_s": began_s, "ended_s": time.monotonic(), "sample": report["sample"],
        })  # fmt: skip


if __name__ == "__main__":
    main()
