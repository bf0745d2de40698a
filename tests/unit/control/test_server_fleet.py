"""What trainers, pools of batches and members of a fleet ask a controller over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest

from tests.unit.control.pool_kit import LEASE_S, made
from weightsync.clients.async_controller import AsyncControllerClient
from weightsync.clients.controller import ControllerClient
from weightsync.control import server as server_module
from weightsync.control.controller import WeightSyncController
from weightsync.control.method import SyncMethod
from weightsync.control.methods.fleet import FleetMethod
from weightsync.control.pool import RolloutPool
from weightsync.control.server import ControllerServer
from weightsync.errors import AuthError, DeadlineExceededError, InvalidRequestError, StateError
from weightsync.handles.fanout import in_thread
from weightsync.net.places import Places
from weightsync.types import Version
from weightsync.types.control import UNNAMED, ValidationRun
from weightsync.types.fleet import HeartbeatRequest, ModelVersion

TOKEN = "a-token-for-tests-only"
LONG_S = 20.0
AGENT = "http://agent"


class Held(SyncMethod):
    """A method that commits when the test lets it, and remembers what it was told."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.go.set()
        self.told: list[tuple[str, str, str | None]] = []

    def trained(self, model_tag: str, version: Version, sender_endpoint: str | None = None) -> None:
        self.told.append((model_tag, str(version), sender_endpoint))

    def sync_weights(self, model_tag: str, version: Version) -> int:
        assert self.go.wait(LONG_S)
        return version.number

    def evict_failed(self, model_tag: str) -> list[str]:
        return []


class Served:
    """A controller with a pool, its server, and a client."""

    def __init__(self) -> None:
        self.method = Held()
        self.pool = RolloutPool(lease_s=6.0)
        config = {"sync_mode": "fully-async"}
        self.controller = WeightSyncController(config, self.method, model_tags=("actor", "critic"))
        self.server = ControllerServer(self.controller, self.pool, token=TOKEN)
        self.url = self.server.start()
        self.client = ControllerClient(self.url, token=TOKEN)

    def waits(self, version: int, *, run_id: str = "r", model: str = "actor", **times: float) -> Any:
        """`AsyncControllerClient.wait`, in a thread and loop of its own."""

        async def wait() -> None:
            client = AsyncControllerClient(self.url, token=TOKEN)
            try:
                await client.wait(run_id, model, version, **{"wait_s": LONG_S, **times})
            finally:
                await client.close()

        return in_thread(lambda: asyncio.run(wait()), name="waits")

    def close(self) -> None:
        self.method.go.set()
        self.client.close()
        self.server.close()
        self.controller.close()


@pytest.fixture
def served() -> Iterator[Served]:
    made = Served()
    yield made
    made.close()


def until(condition: Callable[[], Any], what: str) -> None:
    end = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.005)


def test_a_trainer_tells_and_waits_for_nobody(served: Served) -> None:
    served.method.go.clear()
    state = served.client.notify_version("r", "actor", 1, AGENT)
    assert (state.state, state.train_model_version, state.rollout_model_version) == ("syncing", 1, 0)
    assert served.method.told == [("actor", "r/1", AGENT)]
    served.method.go.set()
    until(lambda: served.controller.serves("r", "actor", 1), "it is served")
    assert not served.controller.serves("r", "actor", 2)
    assert not served.controller.serves("another", "actor", 1)


@contextlib.contextmanager
def agent_of(version: dict[str, Any], heard: list[tuple[str, str | None]], token: str | None = TOKEN) -> Iterator[str]:
    """An agent that says one thing, on this host; its URL. It notes paths and tokens."""

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            given = self.headers["authorization"]
            heard.append((self.path.partition("?")[0], given))
            right = token is None or given == f"Bearer {token}"
            body = json.dumps(version if right else AuthError("not this agent's token").to_dict()).encode()
            self.send_response(200 if right else 401)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        in_thread(server.serve_forever, name="agent")
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def tells(served: Served, **body: Any) -> httpx.Response:
    said = {"model_id": "actor", "version": 1, **body}
    headers = {"authorization": f"Bearer {TOKEN}"}
    return httpx.post(f"{served.url}/notify_version", headers=headers, json=said, timeout=60)


def test_document_3s_body_names_no_run_and_its_agent_is_asked(served: Served) -> None:
    """Red where the version went on without a run: no instance can be asked for it."""
    heard: list[tuple[str, str | None]] = []
    with agent_of(
        {"model_id": "actor", "run_id": "old", "version": 7, "coming_run_id": "new", "coming": 1}, heard
    ) as own:
        assert tells(served, sender_endpoint=own).status_code == 200
        nameless = ("actor", f"{UNNAMED}/1", own)
        assert (served.method.told, heard) == ([nameless], []), "a method without agents needs no run"
        served.method.asks_agents = True  # type: ignore[misc]
        assert tells(served, sender_endpoint=own).json()["run_id"] == "new"
        assert served.method.told == [nameless, ("actor", "new/1", own)]
        assert heard == [("/get_version", f"Bearer {TOKEN}")], "the caller's own token"
        assert tells(served, model_id="other", sender_endpoint=own).status_code == 422
        assert tells(served, model_id="critic", sender_endpoint=own).json()["error"] == "NotPublishedError"
        assert served.client.notify_version("new", "actor", 2, AGENT).train_model_version == 2
        assert len(heard) == 2, "who names a run is believed"


def test_nobody_else_is_called_for_a_version_without_a_run(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red where a name passed with one address of its two, and a path was called: with the services' token."""
    look_up = socket.getaddrinfo

    def two(host: Any, *rest: Any, **more: Any) -> Any:
        if host == "two.example":
            return [*look_up("127.0.0.2", *rest, **more), *look_up("127.0.0.1", *rest, **more)]
        return look_up(host, *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", two)
    served.method.asks_agents = True  # type: ignore[misc]
    heard: list[tuple[str, str | None]] = []
    with agent_of({"model_id": "actor", "run_id": "r", "version": 1}, heard) as own:
        port = own.rpartition(":")[2]
        for other in (
            "http://192.0.2.7:8765", "http://no-such-host.invalid", f"http://127.0.0.2:{port}",
            f"http://two.example:{port}", f"{own}/some/path", f"{own}?a=b", own.replace("http:", "https:"),
        ):  # fmt: skip
            refused = tells(served, sender_endpoint=other)
            assert (refused.status_code, "name run_id" in refused.json()["message"]) == (422, True), other
            with pytest.raises(InvalidRequestError, match="name run_id"):
                served.client.train_worker_notify_weight_update("w", "actor", None, 1, sender_endpoint=other)
        assert (heard, served.method.told) == ([], [])
        assert tells(served, sender_endpoint=own.replace("127.0.0.1", "localhost")).status_code == 200


def test_an_agent_with_another_token_is_not_asked_with_the_services_one(served: Served) -> None:
    served.method.asks_agents = True  # type: ignore[misc]
    heard: list[tuple[str, str | None]] = []
    with agent_of({}, heard, token="the-services-token") as own:
        refused = tells(served, sender_endpoint=own)
    assert (refused.status_code, "name run_id" in refused.json()["message"]) == (422, True)
    assert {given for _, given in heard} == {f"Bearer {TOKEN}"}


def test_agents_that_do_not_answer_hold_up_nobody_else(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen red with the loop's own threads, which are few: batches and ends of validations waited for the agents."""
    served.method.asks_agents = True  # type: ignore[misc]
    go, asked = threading.Event(), threading.Semaphore(0)

    def run_of(*_: object, **__: object) -> str:
        asked.release()
        assert go.wait(60)
        return "r"

    monkeypatch.setattr(server_module, "run_of_caller", run_of)
    crowd = [in_thread(lambda: tells(served, sender_endpoint=AGENT), name="crowd") for _ in range(40)]
    try:
        assert all(asked.acquire(timeout=20) for _ in crowd), "all of them are under way"
        served.client.trajectory_pool_notify_batch_ready("actor", timeout_s=20)
    finally:
        go.set()
    assert {each.result(60).status_code for each in crowd} == {200}
    assert served.server._asking.num_taken == 0


def test_a_batch_waits_until_its_version_is_served(served: Served) -> None:
    served.method.go.clear()
    waiting = [served.waits(2) for _ in range(3)]
    served.client.notify_version("r", "critic", 2, AGENT)
    served.client.notify_version("r", "actor", 2, AGENT)
    with pytest.raises(DeadlineExceededError, match="model actor: version 2 is not served by every live instance"):
        served.waits(2, wait_s=0.2).result(LONG_S)
    assert not any(each.done() for each in waiting)
    served.method.go.set()
    for each in waiting:
        assert each.result(LONG_S) is None
    assert served.waits(1, wait_s=0.0).result(LONG_S) is None, "an older one of that run"
    for other in ({"version": 3}, {"version": 2, "run_id": "another"}):
        with pytest.raises(DeadlineExceededError):
            served.waits(**{"wait_s": 0.05, **other}).result(LONG_S)  # type: ignore[arg-type]


def test_what_can_not_be_waited_for(served: Served) -> None:
    with pytest.raises(InvalidRequestError, match="no model 'other'"):
        served.waits(1, model="other").result(LONG_S)

    async def no_token() -> None:
        client = AsyncControllerClient(served.url)
        try:
            await client.wait("r", "actor", 1, wait_s=LONG_S)
        finally:
            await client.close()

    with pytest.raises(AuthError):
        asyncio.run(no_token())


def test_an_evaluation_is_waited_for_until_its_end(served: Served) -> None:
    asked = in_thread(
        lambda: served.client.notify_version("r", "actor", 3, AGENT, evaluate=True, wait_s=LONG_S), name="evaluates"
    )
    until(lambda: served.client.status().models["actor"].waiting_for_validation, "it is validated")
    running = served.client.status().models["actor"].waiting_for_validation
    assert running == ValidationRun(run_id="r", version=3, stands_for=())
    assert not asked.done()
    served.client.end_validate("actor", {"reward": 0.5})
    state = asked.result(LONG_S)
    assert state.waiting_for_validation is None
    assert state.last_validation is not None
    assert state.last_validation.result == {"reward": 0.5}


def test_an_evaluation_that_takes_longer_goes_on(served: Served) -> None:
    with pytest.raises(InvalidRequestError, match="give wait_s"):
        served.client.notify_version("r", "actor", 3, AGENT, evaluate=True)
    with pytest.raises(DeadlineExceededError, match="was not validated"):
        served.client.notify_version("r", "actor", 3, AGENT, evaluate=True, wait_s=0.1)
    until(lambda: served.client.rollout_service_state("actor").waiting_for_validation, "it is validated")
    with pytest.raises(InvalidRequestError, match="no model 'stranger'"):
        served.client.rollout_service_state("stranger")


def test_any_number_of_workers_may_wait_for_an_evaluation(served: Served) -> None:
    """Seen to fail: each of them held a thread of the server, and the call that ends it found none."""

    def tells(worker: str) -> int:
        client = ControllerClient(served.url, token=TOKEN)
        try:
            return client.train_worker_notify_weight_update(
                worker, "actor", "r", 1, sender_endpoint=AGENT, evaluate=True, wait_s=LONG_S
            ).rollout_model_version
        finally:
            client.close()

    asked = [in_thread(functools.partial(tells, f"w{number}"), name="evaluates") for number in range(40)]
    until(lambda: served.controller.rollout_service_state("actor").waiting_for_validation, "it is validated")
    until(lambda: len(served.method.told) == 40, "all have told")
    began_s = time.monotonic()
    served.client.end_validate("actor")
    for each in asked:
        assert each.result(LONG_S) == 1
    assert time.monotonic() - began_s < LONG_S / 2


def test_only_so_many_may_wait(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who would wait beyond that is told so, and all others are heard. Seen to fail: each held a thread for ever."""
    monkeypatch.setattr(served.server, "_waiting", Places(3, clock=lambda: 0.0))

    def asks(version: int) -> Any:
        return in_thread(
            lambda: served.client.notify_version("r", "actor", version, AGENT, evaluate=True, wait_s=LONG_S),
            name="asks",
        )

    asked = [asks(1) for _ in range(3)]
    until(lambda: served.server._waiting.num_taken == 3, "they wait")
    until(lambda: len(served.method.told) == 3, "all have told")
    until(lambda: served.client.status().models["actor"].waiting_for_validation, "it is validated")
    for call in (
        lambda: served.client.notify_version("r", "actor", 2, AGENT, evaluate=True, wait_s=LONG_S),
        lambda: served.client.sync_weight_to_rollout_service("actor", wait_s=LONG_S),
    ):
        with pytest.raises(StateError, match=r"is busy, try again: 3 requests wait here already.*nothing was"):
            call()
    assert served.method.told == [("actor", "r/1", AGENT)] * 3
    beat = HeartbeatRequest(instance_id="a", incarnation="1", url="http://a", lacks=("actor",))
    assert served.client.heartbeat(beat).state
    assert served.client.notify_version("r", "critic", 2, AGENT).train_model_version == 2
    assert served.client.sync_weight_to_rollout_service("actor", wait_s=0.0)
    served.client.end_validate("actor")
    for each in asked:
        assert each.result(LONG_S).rollout_model_version == 1
    again = asks(2)
    until(lambda: served.client.status().models["actor"].waiting_for_validation, "there is room again")
    served.client.end_validate("actor")
    assert again.result(LONG_S).rollout_model_version == 2
    assert served.server._waiting.num_taken == 0


def test_heartbeats_over_http(served: Served) -> None:
    beat = HeartbeatRequest(instance_id="a", incarnation="1", url="http://a", lacks=("actor",))
    until(lambda: served.client.heartbeat(beat).lease_s, "it takes part")
    with pytest.raises(StateError, match="another process is instance 'a'"):
        served.client.heartbeat(HeartbeatRequest(instance_id="a", incarnation="2", url="http://b", lacks=("actor",)))
    alone = ControllerServer(served.controller, token=TOKEN)
    client = ControllerClient(alone.start(), token=TOKEN)
    with pytest.raises(StateError, match="has no pool"):
        client.heartbeat(beat)
    client.close()
    alone.close()


def test_a_version_that_came_before_any_service_is_served_when_one_is_there() -> None:
    """Seen to fail: its sync was given up, and its gate stayed shut until the next version."""
    pool = RolloutPool(lease_s=6.0)
    controller = WeightSyncController(
        {"sync_mode": "fully-async"}, FleetMethod(pool), model_tags=["actor"], retries_s=()
    )
    controller.train_worker_notify_weight_update("trainer", "actor", "r", 1, sender_endpoint=AGENT)
    until(lambda: controller.rollout_service_state("actor").overdue, "nobody is there: it was given up")
    served = ModelVersion(model_id="actor", run_id="r", version=1, sender_endpoint=AGENT)
    until(
        lambda: (
            pool.heartbeat(HeartbeatRequest(instance_id="a", incarnation="1", url="http://a", serves=(served,))).lease_s
        ),
        "it takes part",
    )
    assert controller.wait_version("r", "actor", 1, timeout_s=LONG_S)
    controller.close()


def test_a_version_that_is_not_due_is_what_who_comes_back_can_have() -> None:
    """Its agent has no older one. Seen red: the trainer waited for batches, and rollout for the version before."""
    pool, clock = made()
    config = {"sync_mode": "batch-async", "staleness_threshold": 9}
    controller = WeightSyncController(config, FleetMethod(pool), model_tags=["actor"], retries_s=())
    served = ModelVersion(model_id="actor", run_id="r", version=1, sender_endpoint=AGENT)
    beat = HeartbeatRequest(instance_id="a", incarnation="1", url="http://a", serves=(served,))
    until(lambda: pool.heartbeat(beat).lease_s, "it takes part")
    pool.decided([served])
    for version in (2, 3):
        controller.train_worker_notify_weight_update("trainer", "actor", "r", version, sender_endpoint=AGENT)
        if version == 2:
            assert pool.current("actor") == served, "it is not due"
            clock.now += LEASE_S
            until(lambda: not pool.members(["actor"]), "nobody takes part any more")
        until(lambda: (goal := pool.current("actor")) and goal.version == version, "it is what newcomers are to serve")  # noqa: B023
    controller.close()
