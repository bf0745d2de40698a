"""Training processes of the vLLM tests: they sync what they are told, over a real `VllmEngine`, and can die."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import torch

from tests.engines.vllm_support import build_model, train_step
from tests.multiproc.spine import error_facts
from weightsync.clients.vllm import VllmEngine, VllmHttpApi
from weightsync.errors import WeightSyncError
from weightsync.extract.module import ModuleWeightExtractor
from weightsync.publish.push import PushSync
from weightsync.testing.processes import Child

SECONDS = {"transfer_timeout_s": 10.0, "join_timeout_s": 6.0, "pause_timeout_s": 6.0}
CHUNK_BYTES = 20_000  # some 14 chunks


class Mortal:
    """A `VllmApi` whose caller dies right after the answer to one step: "begin", "stage", "pause" or "commit"."""

    def __init__(self, api: VllmHttpApi) -> None:
        self._api = api
        self.dies_after: str | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._api, name)

    def update(self, info: dict[str, Any], *, timeout_s: float) -> None:
        self._api.update(info, timeout_s=timeout_s)
        if self.dies_after in info:
            os.kill(os.getpid(), signal.SIGKILL)

    def pause(self, mode: str, *, clear_cache: bool, timeout_s: float) -> None:
        self._api.pause(mode, clear_cache=clear_cache, timeout_s=timeout_s)
        if self.dies_after == "pause":
            os.kill(os.getpid(), signal.SIGKILL)


def trainer_main(url: str, options: dict[str, Any], conn: Any) -> None:
    """Takes orders: {"version": n, "steps": k} syncs the model after k training steps as version n."""
    torch.set_num_threads(1)
    handle = options.get("handle", {})
    api = Mortal(VllmHttpApi(url))
    engine = VllmEngine(api, engine_id="vllm", **handle)  # type: ignore[arg-type]
    model, steps = build_model(), 0
    extractor = ModuleWeightExtractor(model, chunk_bytes=CHUNK_BYTES)
    push = PushSync(
        extractor,
        engine,
        dtype=options.get("dtype", "bfloat16"),
        **{**SECONDS, **options.get("push", {})},
    )
    while (order := conn.recv()) is not None:
        started = time.monotonic()
        try:
            if order == "initialize":
                push.initialize()
                outcome: dict[str, Any] = {"type": "ok"}
            else:
                if order["steps"] < steps:
                    model.load_state_dict(build_model().state_dict())
                    steps = 0
                while steps < order["steps"]:
                    steps += 1
                    train_step(model, steps)
                api.dies_after = order.get("dies_after")
                with _at_chunk(extractor, order, conn):
                    report = push.sync_weights(order["version"])
                outcome = {
                    "type": "ok", "version": str(report.version), "paused_s": report.paused_s,
                    "unprovable": dict(report.unprovable), "num_chunks": report.num_chunks,
                }  # fmt: skip
        except WeightSyncError as error:
            outcome = error_facts(error)
        conn.send({**outcome, "seconds": time.monotonic() - started})
    os._exit(0)


@contextlib.contextmanager
def _at_chunk(extractor: ModuleWeightExtractor, order: dict[str, Any], conn: Any) -> Iterator[None]:
    """Kills somebody ("kills": 0 is this process), or waits, when chunk 5 is asked for; earlier ones are in flight."""
    victim: int | None = order.get("kills")
    extract = extractor.extract_weights

    def watched(dtype: str | None) -> Any:
        for count, chunk in enumerate(extract(dtype)):
            if count == 5 and victim == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            if count == 5 and victim:
                os.killpg(victim, signal.SIGKILL)
            if count == 5 and order.get("waits"):
                conn.send("session is open")
                assert conn.recv() == "go on"
            yield chunk

    extractor.extract_weights = watched  # type: ignore[method-assign]
    try:
        yield
    finally:
        extractor.extract_weights = extract  # type: ignore[method-assign]


class Trainer:
    """A test's view of a training process."""

    def __init__(self, start: Any, url: str, **options: Any) -> None:
        self.child: Child = start(trainer_main, url, options, talk=True, name="trainer")
        self.child.conn.send("initialize")
        self.started = self.child.recv(30)

    def sync(self, version: int, steps: int, **order: Any) -> dict[str, Any]:
        """Syncs, and says how it went."""
        self.send(version, steps, **order)
        outcome: dict[str, Any] = self.child.recv(40)
        return outcome

    def send(self, version: int, steps: int, **order: Any) -> None:
        """Tells it to sync."""
        self.child.conn.send({"version": version, "steps": steps, **order})
