"""The documents' own setting: their actors are Ray's, their requests cross by Ray's calls."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from tests.documents.call_graph_actors import InferenceActor, TrainingActor
from tests.documents.kit import config
from weightsync.adapters.compat.skyrl import BroadcastTransferStrategy, InferenceEngineClient, WeightSyncManager
from weightsync.errors import EngineError, SyncFailedError

pytestmark = pytest.mark.timeout(600)


class Inference(InferenceActor):
    async def pid(self) -> int:
        return os.getpid()


def test_the_call_graph_with_rays_actors(ray_cluster: Any) -> None:
    """Two engines have the trainer's bytes after each sync; one that was killed fails the next, by name.

    Seen red with an actor's answer that is taken for a success before it came.
    """
    import ray

    trainer = ray.remote(num_cpus=0)(TrainingActor).remote(1)
    engines = [ray.remote(num_cpus=0)(Inference).remote(seed) for seed in (2, 3)]
    try:
        manager = WeightSyncManager([trainer], InferenceEngineClient(engines), BroadcastTransferStrategy(), config())
        manager.initialize()
        for version in (1, 2):
            expected = ray.get(trainer.train.remote(), timeout=60)
            assert manager.sync_weights().endswith("proved")
            for engine in engines:
                assert ray.get(engine.weights.remote(), timeout=60) == expected
                assert ray.get(engine.version.remote(), timeout=60) == version
        os.kill(ray.get(engines[1].pid.remote(), timeout=60), signal.SIGKILL)
        with pytest.raises(Exception, match="actor-1") as caught:
            manager.sync_weights()
        cause = caught.value.cause if hasattr(caught.value, "cause") else caught.value
        assert isinstance(cause, SyncFailedError | EngineError)
        assert ray.get(engines[0].weights.remote(), timeout=60) == expected
    finally:
        for actor in (trainer, *engines):
            ray.kill(actor)
