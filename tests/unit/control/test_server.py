"""The controller over HTTP: real requests; the gate wakes its waiters, and nobody polls."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import httpx
import numpy as np
import pytest

from tests.multiproc.pull_kit import wait_until
from tests.standins.threads import fail_starts
from weightsync.clients.async_controller import AsyncControllerClient
from weightsync.clients.controller import ControllerClient
from weightsync.control.controller import WeightSyncController
from weightsync.control.method import SyncMethod
from weightsync.control.server import ControllerServer
from weightsync.errors import AuthError, EngineUnreachableError, InvalidRequestError, VersionError, WeightSyncError
from weightsync.handles.fanout import in_thread
from weightsync.net.places import Places
from weightsync.types import Version
from weightsync.types.control import ValidationRun

TOKEN = "a-token-for-tests-only"
LONG_S = 20.0


class Held(SyncMethod):
    """A method that commits when the test lets it."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.go.set()

    def sync_weights(self, model_tag: str, version: Version) -> int:
        assert self.go.wait(LONG_S)
        return version.number

    def evict_failed(self, model_tag: str) -> list[str]:
        return []


class Served:
    """A controller of two models, its server, and a client."""

    def __init__(self, **config: Any) -> None:
        self.method = Held()
        self.controller = WeightSyncController(config, self.method, model_tags=("actor", "verifier"))
        self.server = ControllerServer(self.controller, token=TOKEN)
        self.url = self.server.start()
        self.client = ControllerClient(self.url, token=TOKEN)

    def close(self) -> None:
        self.method.go.set()
        self.client.close()
        self.server.close()
        self.controller.close()


@pytest.fixture
def served() -> Iterator[Served]:
    made = Served(validate_freq=2)
    yield made
    made.close()


def test_a_step_over_http(served: Served) -> None:
    client = served.client
    assert client.check_rollout_service_status("actor") == "continue"
    assert client.trajectory_pool_notify_batch_ready("actor").blocked
    assert client.check_rollout_service_status("actor") == "block"
    state = client.train_worker_notify_weight_update("w", "actor", "run", 1, wait_s=LONG_S)
    assert (state.state, state.rollout_model_version, state.blocked) == ("running", 1, False)
    assert client.check_rollout_service_status("actor") == "continue"
    client.train_worker_notify_weight_update("w", "actor", "run", 2, wait_s=LONG_S)
    status = client.status().models
    assert status["actor"].waiting_for_validation == ValidationRun(run_id="run", version=2, stands_for=(2,))
    assert status["verifier"].train_model_version == 0
    assert client.end_validate("actor").waiting_for_validation is None
    assert client.sync_weight_to_rollout_service("actor")


def test_a_batch_that_could_not_be_counted_is_not_counted_later(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen red: there was no thread, the caller heard of an error, said it again, and it counted twice."""
    told: list[str] = []
    monkeypatch.setattr(served.controller, "trajectory_pool_notify_batch_ready", told.append)
    with monkeypatch.context() as patched:
        fail_starts(patched, "asyncio", "weightsync-told")
        with pytest.raises(WeightSyncError):
            served.client.trajectory_pool_notify_batch_ready("actor")
    served.client.trajectory_pool_notify_batch_ready("actor")
    served.client.end_validate("actor")  # behind whatever is done late
    assert told == ["actor"]


def test_a_step_that_gives_nothing_is_told_over_http(served: Served) -> None:
    client = served.client
    client.trajectory_pool_notify_batch_ready("actor")
    assert client.trajectory_pool_notify_batch_ready("actor").blocked
    assert client.trajectory_pool_notify_batch_dropped("actor", 1).blocked
    assert not client.trajectory_pool_notify_batch_dropped("actor").blocked
    with pytest.raises(InvalidRequestError, match="num_batches"):
        client.trajectory_pool_notify_batch_dropped("actor", 0)


def test_an_end_of_another_validation_is_none(served: Served) -> None:
    client = served.client
    client.train_worker_notify_weight_update("w", "actor", "run", 1, wait_s=LONG_S)
    client.train_worker_notify_weight_update("w", "actor", "run", 2, wait_s=LONG_S)
    assert client.end_validate("actor", version=1).waiting_for_validation is not None
    assert client.end_validate("actor", version=2).waiting_for_validation is None


def test_a_score_of_numpy_is_a_number_to_the_controller_and_any_other_is_refused_in_words(served: Served) -> None:
    """Seen red: TypeError, no error of ours: the validator died of it, and rollout waited an hour for it."""
    client = served.client
    client.train_worker_notify_weight_update("w", "actor", "run", 2, wait_s=LONG_S)
    ended = client.end_validate("actor", {"reward": np.float64(0.5), "n": np.int64(3), "of": np.float32(2)})
    assert ended.last_validation is not None
    assert ended.last_validation.result == {"reward": 0.5, "n": 3, "of": 2}
    with pytest.raises(InvalidRequestError, match=r"can't be told to another process: .*numpy\.int64"):
        client.end_validate("actor", version=np.int64(2))  # type: ignore[arg-type]


def test_what_a_validation_of_this_process_says_is_said_in_json() -> None:
    """Seen red: the status, and each answer to a trainer, was an internal error until the next validation ended."""

    class Wordless:
        def __str__(self) -> str:
            raise RuntimeError("as told")

    served = Served(validate_freq=1)
    try:
        served.client.train_worker_notify_weight_update("w", "actor", "run", 1, wait_s=LONG_S)
        said = {"a": np.float32(1), "b": {"c": 1}, 3: True, "big": 1 << 70, "nan": float("nan"), "text": "\ud800",
                "none": None, "whole": -(1 << 63), "wordless": Wordless(), "long": ["x" * 2000]}  # fmt: skip
        served.controller.end_validate("actor", said)
        ended = served.client.status().models["actor"].last_validation
        assert ended is not None
        assert ended.result is not None
        assert len(str(ended.result.pop("long"))) == 1000
        assert ended.result == {
            "a": 1.0, "b": "{'c': 1}", "3": True, "big": str(1 << 70), "nan": "nan", "text": "\\ud800",
            "none": None, "whole": -(1 << 63), "wordless": "a Wordless",
        }  # fmt: skip
        state = served.client.train_worker_notify_weight_update("w", "actor", "run", 2, wait_s=LONG_S)
        assert state.rollout_model_version == 2
    finally:
        served.close()


def test_a_notification_waits_no_longer_than_it_was_told_to(served: Served) -> None:
    served.method.go.clear()
    state = served.client.train_worker_notify_weight_update("w", "actor", "run", 1)
    assert (state.state, state.blocked) == ("syncing", True)
    assert not served.client.sync_weight_to_rollout_service("actor", wait_s=0.05)
    served.method.go.set()
    assert served.client.sync_weight_to_rollout_service("actor", wait_s=LONG_S)


def test_the_gate_opens_when_the_sync_ends(served: Served) -> None:
    served.client.trajectory_pool_notify_batch_ready("actor")
    began = time.monotonic()
    assert served.client.check_rollout_service_status("actor", wait_s=0.2) == "block"
    assert time.monotonic() - began >= 0.2
    waiting = in_thread(lambda: served.client.check_rollout_service_status("actor", wait_s=LONG_S), name="waits")
    served.client.train_worker_notify_weight_update("w", "actor", "run", 1)
    assert waiting.result(LONG_S) == "continue"


def test_a_gate_looks_at_no_instance(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen red: with a thousand waiters and a thousand instances the loop stood still for seconds."""
    looks: list[None] = []
    monkeypatch.setattr(served.method, "instances", lambda: (looks.append(None), ())[1])
    assert served.client.check_rollout_service_status("actor") == "continue"
    assert served.client.status().models["actor"].num_answering is None  # there is no fleet
    assert len(looks) == 1


def test_hundreds_wait_at_the_gate_without_a_thread_or_a_poll(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each looks when it comes and when its model changes; what happens to other models wakes nobody."""
    looks = 0
    real = served.controller.check_rollout_service_status

    def counted(model_tag: str) -> Any:
        nonlocal looks
        looks += model_tag == "actor"
        return real(model_tag)

    monkeypatch.setattr(served.controller, "check_rollout_service_status", counted)
    served.client.trajectory_pool_notify_batch_ready("actor")
    number, others = 300, threading.active_count()

    async def all_wait() -> list[str]:
        client = AsyncControllerClient(served.url, token=TOKEN)
        try:
            waiters = [
                asyncio.ensure_future(client.check_rollout_service_status("actor", wait_s=LONG_S))
                for _ in range(number)
            ]
            while looks < number:
                await asyncio.sleep(0.01)
            before, threads = looks, threading.active_count()
            for version in (1, 2):
                await asyncio.to_thread(
                    served.client.train_worker_notify_weight_update, "w", "verifier", "run", version, wait_s=LONG_S
                )
            assert looks == before
            assert threads - others < 60
            await asyncio.to_thread(served.client.train_worker_notify_weight_update, "w", "actor", "run", 1)
            return await asyncio.gather(*waiters)
        finally:
            await client.close()

    assert asyncio.run(all_wait()) == ["continue"] * number
    assert looks <= 4 * number, "some looks for each change of the model, and no more"


def test_what_can_not_be_is_refused_in_types(served: Served) -> None:
    client = served.client
    with pytest.raises(InvalidRequestError, match="no model 'other'"):
        client.check_rollout_service_status("other", wait_s=1.0)
    client.train_worker_notify_weight_update("w", "actor", "run", 3, wait_s=LONG_S)
    with pytest.raises(VersionError, match="new run_id"):
        client.train_worker_notify_weight_update("w", "actor", "run", 2)
    with pytest.raises(AuthError):
        ControllerClient(served.url).status()
    post = httpx.Client(base_url=served.url, headers={"Authorization": f"Bearer {TOKEN}"}).post
    for body in (b"", b"{}", b'{"model_tag": ""}', b'{"model_tag": "actor", "wait_s": -1}', b'{"model_tag": 3}',
                 b'{"model_tag": "actor", "wait_s": 1e99}', b'{"model_tag": "actor", "more": 1}', b"\xff"):  # fmt: skip
        answer = post("/check_rollout_service_status", content=body)
        assert (answer.status_code, answer.json()["error"]) == (422, "InvalidRequestError"), body
    for version in (-1, 1 << 60, True, 1.5, "1"):
        body = {"model_tag": "actor", "worker_name": "w", "version": version}  # type: ignore[assignment]
        assert post("/train_worker_notify_weight_update", json=body).status_code == 422, version
    assert client.status().models["actor"].train_model_version == 3


def test_a_controller_that_is_gone_is_a_typed_error(served: Served) -> None:
    waiting = None
    served.client.trajectory_pool_notify_batch_ready("actor")

    async def gone() -> None:
        client = AsyncControllerClient(served.url, token=TOKEN)
        try:
            await client.check_rollout_service_status("actor", wait_s=LONG_S)
        finally:
            await client.close()

    waiting = in_thread(lambda: asyncio.run(gone()), name="waits")
    while not served.server._changed:
        time.sleep(0.01)
    served.server.close()
    with pytest.raises(EngineUnreachableError):
        waiting.result(LONG_S)


def crowd_of(served: Served, path: str, peer: str, **body: Any) -> Future[httpx.Response]:
    """A request from that address of this host, which waits."""

    def ask() -> httpx.Response:
        transport = httpx.HTTPTransport(local_address=peer)
        headers = {"authorization": f"Bearer {TOKEN}"}
        with httpx.Client(transport=transport, headers=headers, timeout=2 * LONG_S) as http:
            return http.post(f"{served.url}{path}", json={"model_tag": "actor", "wait_s": LONG_S, **body})

    return in_thread(ask, name="crowd")


def until_taken(places: Places, num: int) -> None:
    end_s = time.monotonic() + LONG_S
    while places.num_taken < num:
        assert time.monotonic() < end_s
        time.sleep(0.01)


def test_a_crowd_at_the_gates_makes_room_itself(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen to fail: any number waited, until no descriptor was left for anybody."""
    places = Places(3, clock=lambda: 0.0)
    monkeypatch.setattr(served.server, "_at_gates", places)
    crowd = []
    for number in range(3):
        crowd.append(crowd_of(served, "/wait_version", "127.0.0.2", run_id="run", version=1))
        until_taken(places, number + 1)
    honest = crowd_of(served, "/wait_version", "127.0.0.1", run_id="run", version=1)
    assert crowd[0].result(LONG_S).json()["answer"] == "block", "who made room asks again"
    assert crowd_of(served, "/wait_version", "127.0.0.2", run_id="run", version=1).result(LONG_S).status_code == 409
    assert not honest.done()
    served.client.train_worker_notify_weight_update("w", "actor", "run", 1, wait_s=LONG_S)
    assert [each.result(LONG_S).json()["answer"] for each in (honest, *crowd[1:])] == ["continue"] * 3


def test_a_crowd_that_waits_for_syncs_makes_room_and_keeps_no_thread(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    places, others = Places(2, clock=lambda: 0.0), set(threading.enumerate())
    monkeypatch.setattr(served.server, "_waiting", places)
    served.method.go.clear()
    served.client.train_worker_notify_weight_update("w", "actor", "run", 1)
    crowd = []
    for number in range(2):
        crowd.append(crowd_of(served, "/sync_weight_to_rollout_service", "127.0.0.2"))
        until_taken(places, number + 1)
    honest = crowd_of(served, "/sync_weight_to_rollout_service", "127.0.0.1")
    lost = crowd[0].result(LONG_S)
    assert (lost.status_code, lost.json()["error"]) == (503, "BusyError")
    assert not honest.done()

    def num_waiting() -> int:
        return sum(each.name == "weightsync-waits" and each not in others for each in threading.enumerate())

    wait_until(lambda: num_waiting() <= 2, "a thread ends behind its answer", LONG_S / 2)
    served.method.go.set()
    assert honest.result(LONG_S).json() == crowd[1].result(LONG_S).json() == {"up_to_date": True}
