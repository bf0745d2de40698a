"""Actors and factories that are not as they should be. Without torch: such processes start in a moment."""

from __future__ import annotations

import os
import signal
from typing import Any

from weightsync.cluster.engine_actor import EngineContext
from weightsync.cluster.trainer_actor import RankContext
from weightsync.errors import EngineError, LoadError


class Garbler:
    """An actor that answers with whatever it was told to."""

    def __init__(self) -> None:
        self._said: object = None

    def say(self, said: object) -> None:
        self._said = said

    def listen(self, loopback: bool) -> object:
        return self._said

    def ask(self, part: str, method: str, args: object, options: object) -> object:
        return self._said


class Stranger:
    """An actor of another kind."""

    def ask(self) -> None: ...


class Mute:
    """An engine that refuses every step."""

    def call(self, op: str, request: object, *, timeout_s: float) -> Any:
        raise EngineError("mute")


def mute_engine(context: EngineContext) -> Mute:
    return Mute()


def broken_engine(context: EngineContext) -> Mute:
    raise LoadError(f"{context.engine_id} has no model", parameter="embed")


def broken_trainer(context: RankContext) -> Any:
    raise ValueError(f"rank {context.rank} has no model")


def dying_trainer(context: RankContext) -> Any:
    """Rank 1 dies; rank 0 waits for it, as in a collective."""
    import torch.distributed as dist

    if context.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
