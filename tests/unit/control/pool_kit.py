"""A pool with a clock of its own, and the heartbeats of its instances."""

from __future__ import annotations

from typing import Any

from weightsync.control.pool import RolloutPool
from weightsync.types.fleet import HeartbeatRequest, ModelVersion

LEASE_S = 12.0
MODELS = ("m", "n")


class Clock:
    """Time that passes when told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def at(version: int, *, model: str = "m", run_id: str = "r") -> ModelVersion:
    return ModelVersion(model_id=model, run_id=run_id, version=version, sender_endpoint="http://agent")


def beat(name: str = "a", *serves: ModelVersion, incarnation: str = "1", **fields: Any) -> HeartbeatRequest:
    lacks = () if serves else MODELS
    fields = {"lacks": lacks, **fields}
    return HeartbeatRequest(instance_id=name, incarnation=incarnation, url=f"http://{name}", serves=serves, **fields)


def made(*, learnt: bool = True) -> tuple[RolloutPool, Clock]:
    clock = Clock()
    pool = RolloutPool(lease_s=LEASE_S, clock=clock)
    if learnt:
        clock.now += LEASE_S
    return pool, clock


def states(pool: RolloutPool) -> dict[str, str]:
    return {each.instance_id: each.state for each in pool.status({})}
