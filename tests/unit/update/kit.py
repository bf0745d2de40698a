"""Engines that answer every step of an update well, but where a test says otherwise."""

from __future__ import annotations

from typing import Any

from tests.unit.host.fakes import manifest
from weightsync.types import EngineOp, EngineReply, EngineRequest

MANIFEST = manifest(2, seed=1)
VERSION = MANIFEST.version


class Engine:
    """Remembers what it was asked.

    Args:
        engine_id: its name.
        world_size: its workers.
        **replies: by step, what it answers besides, or an error.
    """

    def __init__(self, engine_id: str = "e", *, world_size: int = 1, **replies: Any) -> None:
        self.engine_id = engine_id
        self.world_size = world_size
        self.replies: dict[str, Any] = {
            "stage": {"digests_equal": True, "model_digest": MANIFEST.model_digest},
            "commit": {"version": VERSION},
            **replies,
        }
        self.asked: list[tuple[str, Any]] = []
        self.group: str | None = None

    @property
    def steps(self) -> list[str]:
        return [op for op, _ in self.asked]

    def call(self, op: EngineOp, request: EngineRequest, *, timeout_s: float) -> EngineReply:
        self.asked.append((str(op), request))
        reply = self.replies.get(op, {})
        if isinstance(reply, Exception):
            raise reply
        if op is EngineOp.INIT:
            self.group = request.info.group_name  # type: ignore[union-attr]
        return EngineReply(engine_id=self.engine_id, world_size=self.world_size, group=self.group, **reply)
