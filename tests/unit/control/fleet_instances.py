"""Services of a fleet that answer over HTTP as they are told to."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from weightsync.control.methods.fleet import FleetMethod
from weightsync.control.pool import RolloutPool
from weightsync.errors import WeightSyncError
from weightsync.handles.fanout import in_thread
from weightsync.net.messages import decode, encode
from weightsync.net.server import Api, ServerThread
from weightsync.types import Version
from weightsync.types.fleet import (
    CommitVersionsRequest,
    HeartbeatRequest,
    ModelVersion,
    PrepareReply,
    PrepareRequest,
    ReleaseRequest,
)
from weightsync.types.service import ModelStatus, ServiceStatus

LONG_S = 15.0
LEASE_S = 6.0
PAIR = ("actor", "critic")
SENDER = "http://agent"
Does = Callable[[Any], Awaitable[Any] | Any]


def v(number: int, run_id: str = "r") -> Version:
    return Version(run_id=run_id, number=number)


class Instance:
    """A service of a fleet: stages and commits at once, or does what the test says. It heartbeats while it beats."""

    def __init__(self, pool: RolloutPool, name: str, models: tuple[str, ...]) -> None:
        self.pool, self.name, self.models = pool, name, models
        self.calls: list[tuple[str, Any]] = []
        self.num_beats = 0
        self.served: dict[str, ModelVersion] = {}
        self.on_prepare: Does = lambda asked: None
        self.on_commit: Does = lambda asked: None
        self.on_check: Does = lambda asked: None
        self.whole = True
        self.learns = True  # from what a heartbeat tells it to catch up with
        self._stop = threading.Event()
        app = Api("instance")
        app.answer("POST", "/prepare_versions", self._prepare)
        app.answer("POST", "/commit_versions", self._commit)
        app.answer("POST", "/check_versions", self._check)
        app.answer("POST", "/release_versions", self._release)
        self.server = ServerThread(app)
        self.url = self.server.start()
        self._beats: Any = None

    def beat_once(self, incarnation: str = "1", *, leased: bool = True) -> float:
        self.num_beats += 1
        served = tuple(self.served.values())
        lacks = tuple(model for model in self.models if model not in self.served)
        reply = self.pool.heartbeat(
            HeartbeatRequest(
                instance_id=self.name, incarnation=incarnation, url=self.url, serves=served, lacks=lacks, leased=leased
            )
        )
        if not reply.lease_s and self.learns:
            self.served |= {each.model_id: each for each in reply.catch_up}
        return reply.lease_s

    def beat(self) -> Instance:
        def run() -> None:
            while not self._stop.wait(0.02):
                self.beat_once()

        self._stop.clear()
        self._beats = in_thread(run, name="beats")
        until(lambda: self.state == "live", "it is live")
        return self

    def silent(self) -> None:
        self._stop.set()
        self._beats.result(LONG_S)

    def close(self) -> None:
        if self._beats is not None:
            self.silent()
        self.server.close()

    @property
    def state(self) -> str:
        return {each.instance_id: each.state for each in self.pool.status({})}.get(self.name, "unknown")

    def names(self) -> list[str]:
        return [name for name, _ in self.calls]

    async def _prepare(self, request: Request) -> Response:
        asked = decode(await request.body(), PrepareRequest, what="a set")
        self.calls.append(("prepare", asked.versions))
        said = await _done(self.on_prepare(asked))
        return said or answer(PrepareReply(versions=asked.versions, models={}))

    async def _commit(self, request: Request) -> Response:
        asked = decode(await request.body(), CommitVersionsRequest, what="a set")
        self.calls.append(("commit", asked.versions))
        said = await _done(self.on_commit(asked))
        if said is None:
            self.served |= {each.model_id: each for each in asked.versions}
        return said or served(*asked.versions)

    async def _check(self, request: Request) -> Response:
        asked = decode(await request.body(), PrepareRequest, what="a set")
        self.calls.append(("check", asked.versions))
        return await _done(self.on_check(asked)) or Response(b"{}", media_type="application/json")

    async def _release(self, request: Request) -> Response:
        asked = decode(await request.body(), ReleaseRequest, what="a release")
        self.calls.append(("release", asked.model_ids))
        return Response(b"{}", media_type="application/json")


def answer(message: Any) -> Response:
    return Response(encode(message), media_type="application/json")


async def _done(found: Any) -> Any:
    return await found if asyncio.iscoroutine(found) else found


def served(*versions: ModelVersion) -> Response:
    return answer(
        ServiceStatus(
            models={
                each.model_id: ModelStatus(run_id=each.run_id, version=each.version, load_s=0.25, paused_s=0.125)
                for each in versions
            }
        )
    )


def raises(error: WeightSyncError) -> Does:
    def does(_: Any) -> None:
        raise error

    return does


def status_500(_: Any) -> Response:
    return Response(b"<html>", status_code=500)


def until(condition: Callable[[], Any], what: str) -> None:
    end = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.005)


class World:
    """A pool, a method over it, and instances."""

    def __init__(self) -> None:
        self.pool = RolloutPool(lease_s=LEASE_S)
        self.pool._learning.until_s = time.monotonic()  # nobody served anything before
        self.instances: list[Instance] = []
        self.steps: list[tuple[str, str]] = []

    def method(self, policy: str = "each", sets: tuple[tuple[str, ...], ...] = (), **times: Any) -> FleetMethod:
        times = {
            "barrier_timeout_s": 5.0,
            "prepare_timeout_s": 10.0,
            "commit_timeout_s": 5.0,
            "straggler_s": 0.1,
            **times,
        }
        return FleetMethod(
            self.pool, sets=sets, commit_policy=policy, hook=lambda at, who: self.steps.append((at, who)), **times
        )

    def instance(self, name: str, models: tuple[str, ...] = ("actor",)) -> Instance:
        self.instances.append(Instance(self.pool, name, models))
        return self.instances[-1]

    def three(self, models: tuple[str, ...] = ("actor",)) -> list[Instance]:
        return [self.instance(name, models).beat() for name in ("a", "b", "c")]

    def close(self) -> None:
        for each in self.instances:
            each.close()


def bring(method: FleetMethod, number: int, model: str = "actor", run_id: str = "r") -> int:
    method.trained(model, v(number, run_id), SENDER)
    return method.sync_weights(model, v(number, run_id))
