"""The actor of the store's tests: a trainer that publishes into a place, a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import time
from typing import Any

import torch

import weightsync
from tests.multiproc.pull_kit import MODEL, SPARSE, Actor, Service, content, run_of
from tests.standins.processes import Child
from weightsync.errors import WeightSyncError

SEED = SPARSE


def trainer_main(seed: int, kib: int, url: str, options: dict[str, Any], conn: Any) -> None:
    """Publishes versions into a store, when told to."""
    torch.set_num_threads(1)
    weights = content(seed, 0, kib)
    config = {"publish": options.pop("publish", {})}
    try:
        publisher = weightsync.publish(
            weights, MODEL, store=url, run_id=run_of(seed), dtype="keep", port=0, config=config, **options
        )
    except WeightSyncError as error:
        conn.send((type(error).__name__, str(error)))
        os._exit(0)
    conn.send(("ok", None))
    sink = publisher.store
    assert sink is not None
    slowest_s = 0.0
    while (order := conn.recv()) is not None:
        name, args = order
        if name == "step":
            number, wait_s = args
            weights.update(content(seed, number, kib))
            begun_s = time.monotonic()
            report = publisher.step(number)
            slowest_s = max(slowest_s, time.monotonic() - begun_s)
            why = sink.wait_stored(number, timeout_s=wait_s) if wait_s else None
            conn.send(("ok", {"published": report.published, "why": why}))
        elif name == "state":
            conn.send(
                ("ok", {
                    "pid": sink.pid, "newest": sink.newest and sink.newest.number, "error": str(sink.error or ""),
                    "failed": type(sink.failed).__name__ if sink.failed else "", "slowest_s": slowest_s,
                })
            )  # fmt: skip
        elif name == "close":
            publisher.close()
            conn.send(("ok", None))
    os._exit(0)


def in_environment(variables: dict[str, str], function: Any, *args: Any, **conn: Any) -> None:
    """A child's first function: its environment is that of a server that was started before."""
    os.environ.update(variables)
    function(*args, **conn)


class StoreTrainer(Actor):
    """A trainer whose versions go into a store."""

    def __init__(self, start: Any, url: str, *, seed: int = SEED, kib: int = 64, **options: Any) -> None:
        self.name = f"trainer-{seed}"
        self.seed = seed
        self.child: Child = start(trainer_main, seed, kib, url, options, talk=True, name=self.name)
        self.answer(120.0)

    def step(self, number: int, *, wait_s: float = 60.0) -> dict[str, Any]:
        said: dict[str, Any] = self.ask("step", number, wait_s)
        return said

    def state(self) -> dict[str, Any]:
        said: dict[str, Any] = self.ask("state")
        return said


def host_of(start: Any, url: str, *, kib: int = 64, **options: Any) -> Service:
    """A rollout service with one engine that follows a place."""
    return Service(start, ["e"], kib=kib, senders=(url,), poll_s=1.0, pull_timeout_s=30.0, **options)


def serves(host: Service, seed: int, number: int) -> bool:
    version, right = host.serving("e")
    assert right, version
    return version == f"{run_of(seed)}/{number}"


def record(name: str, said: Any) -> None:
    """For whoever wants the figures of a run: a file in the folder of WEIGHTSYNC_FIGURES."""
    folder = os.environ.get("WEIGHTSYNC_FIGURES")
    if folder:
        with contextlib.suppress(OSError), open(os.path.join(folder, name), "w") as file:
            json.dump(said, file)
