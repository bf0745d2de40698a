"""What the tests of a real SGLang share: its versions, a server, a trainer that publishes, a service beside it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.engines.sglang_support import (
    DIFFERENT,
    SAME,
    Server,
    Starter,
    Truth,
    build_model,
    distance,
    save_checkpoint,
    told_by_a_fresh_server,
)
from tests.engines.vllm_support import train_step
from weightsync.clients.host import RolloutClient
from weightsync.handles.sglang import SGLangEngine
from weightsync.handles.sglang_api import SGLangApi
from weightsync.host.service import RolloutService
from weightsync.host.settings import RolloutConfig
from weightsync.trainer.publisher import WeightManager
from weightsync.types.service import ModelStatus, NotifyRequest
from weightsync.types.transfer_messages import Transport

SYNC_S = 60.0


def model_after(steps: int) -> nn.Module:
    """The model after so many real optimiser steps; always the same."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    model = build_model()
    for number in range(1, steps + 1):
        train_step(model, number)
    torch.set_num_threads(threads)
    return model


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """A running server, and what fresh ones of each version answer. A test that kills the server starts it again."""

    server: Server
    truths: tuple[Truth, ...]

    def serves(self, steps: int) -> None:
        """Asserts that it answers as a fresh server of that version, and as no other, and has the same checksum."""
        told = self.server.truth()
        near = [distance(told.logprobs, truth.logprobs) for truth in self.truths]
        assert near[steps] <= SAME, near
        assert all(far >= DIFFERENT for number, far in enumerate(near) if number != steps), near
        cached = [distance(told.next, truth.next) for truth in self.truths]
        assert cached[steps] <= SAME, f"keys and values of other weights were used: {cached}"
        assert told.checksum == self.checksum(steps)

    def checksum(self, steps: int) -> str:
        """Of a server that was started from that version's checkpoint."""
        return self.truths[steps].checksum


@contextlib.contextmanager
def place(folder: Path, *, tp: int = 1) -> Iterator[Place]:
    """Starts a fresh server of each of two versions, one after the other; the first one stays."""
    checkpoints = [save_checkpoint(folder / f"v{number}", model_after(number)) for number in range(2)]
    with contextlib.ExitStack() as stack:
        starter = Starter()
        stack.callback(starter.close)
        others = [told_by_a_fresh_server(starter, each, folder / each.name, tp=tp) for each in checkpoints[1:]]
        server = Server(starter, checkpoints[0], folder / "server", tp=tp)
        stack.callback(server.close)
        server.start()
        server.wait_until_ready()
        yield Place(server=server, truths=(server.truth(), *others))


class Pulls:
    """A trainer that publishes, and a rollout service that brings the server to what was published."""

    def __init__(
        self, server: Server, *, transport: Transport = Transport.SHM, mode: str = "auto", **handle: Any
    ) -> None:
        self._stack = contextlib.ExitStack()
        self.manager = self._stack.enter_context(WeightManager("m", dtype="float32", delta_budget_bytes=1 << 30))
        self.manager.start(deltas=mode != "full")
        self._version = 0
        self.engine = SGLangEngine(SGLangApi(server.url), engine_id="sglang", **handle)
        self._stack.callback(self.engine.close)
        config = RolloutConfig(senders=(self.manager.endpoint,), transport=transport, mode=mode)
        self.service = RolloutService({"m": self.engine}, config)
        self._stack.callback(self.service.close)
        self._client = RolloutClient(self.service.start())
        self._stack.callback(self._client.close)

    def publish(self, steps: int | nn.Module) -> None:
        """The model after so many steps, or one that is given."""
        self._version += 1
        model = steps if isinstance(steps, nn.Module) else model_after(steps)
        assert self.manager.offload(model.named_parameters(), self._version).published
        self.manager.wait_published(self._version, timeout_s=120)

    def sync(self, *, wait_s: float = SYNC_S) -> ModelStatus:
        """Returns when the server serves what was published last."""
        notice = NotifyRequest(
            run_id=self.manager.run_id, model_id="m", version=self._version, sender_endpoint=self.manager.endpoint,
            wait_s=wait_s,
        )  # fmt: skip
        status = self._client.notify_version(notice)
        assert (status.run_id, status.version, status.errors) == (self.manager.run_id, self._version, {})
        return status

    def close(self) -> None:
        self._stack.close()
