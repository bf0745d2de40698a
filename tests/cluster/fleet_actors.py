"""What the Ray fleet's tests run inside actors: models that generate all the time, made of their version's number."""

from __future__ import annotations

import os
import signal
import threading

import torch

from tests.multiproc.fleet_kit import _NUM_ELEMENTS
from weightsync.cluster.service_actor import FleetEngineContext
from weightsync.codec.tensor_digest import tensor_digest
from weightsync.engine.embedded import EmbeddedEngine
from weightsync.errors import LoadError, NotServingError
from weightsync.load.module import ModuleWeightLoader

_PAUSE_S = 0.005


class Model:
    """What the factory builds: an engine, and what a test asks of it."""

    def __init__(self, context: FleetEngineContext) -> None:
        torch.set_num_threads(1)
        self._module = torch.nn.Module()
        self._module.register_buffer("weight", torch.zeros(_NUM_ELEMENTS))
        self.engine = EmbeddedEngine.of(
            ModuleWeightLoader(self._module), engine_id=context.engine_id, model_id=context.model_id,
            lease=context.lease,
        )  # fmt: skip
        self._answered: list[tuple[int, float]] = []
        self._stop = threading.Event()
        threading.Thread(target=self._generate_always, daemon=True).start()

    def generate(self) -> tuple[int, float]:
        """The version that the engine says it answers with, and what the weights are."""
        with self.engine.generation(timeout_s=2.0) as version:
            weights = self._weights()
            first = float(weights[0])
            same = torch.equal(weights, torch.full_like(weights, first))
        return (-1 if version is None else version.number), (first if same else -2.0)

    def answered(self) -> list[tuple[int, float]]:
        """All different answers so far, in their order."""
        return list(dict.fromkeys(self._answered))

    def digest(self) -> str:
        """Of the live weights."""
        return tensor_digest(self._weights())

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def close(self) -> None:
        self._stop.set()

    def _weights(self) -> torch.Tensor:
        return self._module.get_buffer("weight")

    def _generate_always(self) -> None:
        while not self._stop.wait(_PAUSE_S):
            try:
                self._answered.append(self.generate())
            except NotServingError:
                continue


def broken(context: FleetEngineContext) -> Model:
    raise LoadError(f"{context.engine_id} has no model", parameter="embed")
