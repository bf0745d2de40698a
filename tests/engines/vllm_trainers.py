"""Training processes of the vLLM tests: they sync what they are told, over a real `VllmEngine`, and can die."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.engines.vllm_support import build_model, nudge, train_step
from tests.multiproc.spine import error_facts
from tests.standins.processes import Child, ChildFailedError
from weightsync.codec.changes import ChangesCodec
from weightsync.errors import WeightSyncError
from weightsync.extract.module import ModuleWeightExtractor
from weightsync.handles.vllm import VllmEngine, VllmHttpApi
from weightsync.trainer.push import PushSync

SECONDS = {"transfer_timeout_s": 10.0, "join_timeout_s": 6.0, "pause_timeout_s": 9.0}
CHUNK_BYTES = 20_000
LAST_CHUNK = 13


class Mortal:
    """A `VllmHttpApi` whose caller dies right after the answer to one step: "begin", "stage", "pause" or "commit"; or
    waits before the pause until it is told to go on."""

    def __init__(self, api: VllmHttpApi, conn: Any) -> None:
        self._api = api
        self._conn = conn
        self.dies_after: str | None = None
        self.waits_at_pause = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._api, name)

    def update(self, info: dict[str, Any], *, timeout_s: float) -> None:
        self._api.update(info, timeout_s=timeout_s)
        if self.dies_after in info:
            os.kill(os.getpid(), signal.SIGKILL)

    def pause(self, mode: str, *, clear_cache: bool, timeout_s: float) -> None:
        if self.waits_at_pause:
            self._conn.send("the pause is next")
            assert self._conn.recv() == "go on"
        self._api.pause(mode, clear_cache=clear_cache, timeout_s=timeout_s)
        if self.dies_after == "pause":
            os.kill(os.getpid(), signal.SIGKILL)


def trainer_main(url: str, conn: Any) -> None:
    """Takes orders: {"version": n, "steps": k} syncs the model after k training steps as version n.

    Further keys: "few" changes a few elements besides; "setup", see `_setup` (another one begins a new run);
    "dies_after" and "waits_at": "pause", see `Mortal`; and those of `_at_chunk`.
    """
    torch.set_num_threads(1)
    model, steps, nudged = build_model(), 0, False
    extractor = ModuleWeightExtractor(model, chunk_bytes=CHUNK_BYTES)
    api = Mortal(VllmHttpApi(url), conn)
    setup: dict[str, Any] | None = None
    push: PushSync | None = None
    while (order := conn.recv()) is not None:
        started = time.monotonic()
        try:
            if push is None or order.get("setup", {}) != setup:
                setup = order.get("setup", {})
                push = _setup(api, extractor, **setup)
                push.initialize()
            if order["steps"] < steps or nudged:
                model.load_state_dict(build_model().state_dict())
                steps = 0
            while steps < order["steps"]:
                steps += 1
                train_step(model, steps)
            nudged = bool(order.get("few"))
            if nudged:
                nudge(model)
            api.dies_after = order.get("dies_after")
            api.waits_at_pause = order.get("waits_at") == "pause"
            with _at_chunk(extractor, order, conn):
                report = push.sync_weights(order["version"])
            outcome: dict[str, Any] = {
                "type": "ok", "version": str(report.version), "paused_s": report.paused_s,
                "unprovable": dict(report.unprovable), "num_chunks": report.num_chunks,
                "num_deltas": report.num_deltas, "why_full": report.full_because,
            }  # fmt: skip
        except WeightSyncError as error:
            outcome = error_facts(error)
        conn.send({**outcome, "seconds": time.monotonic() - started})
    os._exit(0)


def _setup(
    api: Any,
    extractor: ModuleWeightExtractor,
    *,
    dtype: str | None = "bfloat16",
    changes: bool = False,
    pause_timeout_s: float = SECONDS["pause_timeout_s"],
    transfer_timeout_s: float = SECONDS["transfer_timeout_s"],
    **handle: Any,
) -> PushSync:
    codec = ChangesCodec() if changes else None
    seconds = {**SECONDS, "pause_timeout_s": pause_timeout_s, "transfer_timeout_s": transfer_timeout_s}
    return PushSync(extractor, VllmEngine(api, engine_id="vllm", **handle), dtype=dtype, codec=codec, **seconds)


@contextlib.contextmanager
def _at_chunk(extractor: ModuleWeightExtractor, order: dict[str, Any], conn: Any) -> Iterator[None]:
    """Kills somebody ("kills": 0 is this process) when chunk 5 is asked for, with earlier ones in flight. Waits at
    chunk "waits_at" until told to go on."""
    victim: int | None = order.get("kills")
    extract = extractor.extract_weights

    def watched(dtype: str | None) -> Any:
        for count, chunk in enumerate(extract(dtype)):
            if count == 5 and victim == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            if count == 5 and victim:
                os.killpg(victim, signal.SIGKILL)
            if count == order.get("waits_at"):
                conn.send("session is open")
                assert conn.recv() == "go on"
            yield chunk

    extractor.extract_weights = watched  # type: ignore[method-assign]
    try:
        yield
    finally:
        extractor.extract_weights = extract  # type: ignore[method-assign]


class Trainers:
    """A test's view of the training process; when one is killed, the next order starts its heir."""

    def __init__(self, start: Any, url: str) -> None:
        self._start = start
        self._url = url
        self._child: Child | None = None
        self._version = 0

    @property
    def child(self) -> Child:
        """The process that lives now."""
        if self._child is None:
            self._child = self._start(trainer_main, self._url, talk=True, name="trainer")
        return self._child

    def sync(self, steps: int, **order: Any) -> dict[str, Any]:
        """Syncs the weights after so many steps as the next version, and says how it went."""
        self.send(steps, **order)
        outcome: dict[str, Any] = self.child.recv(90)
        return outcome

    def good(self, steps: int, **order: Any) -> dict[str, Any]:
        """The same, and it has to go well."""
        outcome = self.sync(steps, **order)
        assert outcome["type"] == "ok", outcome
        return outcome

    def send(self, steps: int, **order: Any) -> None:
        """Tells it to sync."""
        self._version += 1
        self.child.conn.send({"version": self._version, "steps": steps, **order})

    def dies(self, steps: int, **order: Any) -> None:
        """Tells it to sync and to die on the way; returns when it is gone."""
        self.send(steps, **order)
        with pytest.raises(ChildFailedError, match="-9"):
            self.child.recv(60)
        self._child = None
