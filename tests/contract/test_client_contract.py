"""The library's own clients keep the client's contract, in this process and over HTTP."""

from __future__ import annotations

from collections.abc import Sequence

from weightsync.engine.server import EngineServer
from weightsync.handles.fanout import EngineFanout
from weightsync.handles.http import HttpEngine
from weightsync.testing.contracts import InferenceEngineClientContract
from weightsync.types import EngineHandle, InferenceEngineClient

TOKEN = "0123456789abcdef"


class TestFanoutInProcess(InferenceEngineClientContract):
    def make_client(self, engines: Sequence[EngineHandle]) -> InferenceEngineClient:
        return EngineFanout(engines)


class TestFanoutOverHttp(InferenceEngineClientContract):
    def make_client(self, engines: Sequence[EngineHandle]) -> InferenceEngineClient:
        self.servers = [EngineServer(engine, token=TOKEN) for engine in engines]
        return EngineFanout(
            [
                HttpEngine(server.start(), engine_id=engine.engine_id, token=TOKEN)
                for server, engine in zip(self.servers, engines, strict=True)
            ]
        )

    def close_all(self) -> None:
        for server in self.servers:
            server.close()
