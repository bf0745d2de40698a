"""A real vLLM server in a fleet: it answers under its service's lease, and with no version that was left behind."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from tests.engines.conftest import Versions
from tests.engines.test_pull_vllm import publisher_main
from tests.engines.vllm_support import (
    DIFFERENT,
    MODEL_NAME,
    NEEDS_VLLM,
    PROMPTS,
    SAME,
    START_S,
    Oracle,
    Server,
    build_model,
    completion,
    distance,
    train_step,
    vllm_is_there,
)
from tests.standins.processes import Child, children, free_port
from weightsync.clients.controller import ControllerClient
from weightsync.clients.host import RolloutClient
from weightsync.control.controller import WeightSyncController
from weightsync.control.methods.fleet import FleetMethod
from weightsync.control.pool import RolloutPool
from weightsync.control.server import ControllerServer
from weightsync.engine.embedded import EmbeddedEngine
from weightsync.engine.vllm.lease_middleware import LEASE_FILE_VARIABLE
from weightsync.handles.by_url import engine_at
from weightsync.handles.vllm import VllmEngine, VllmHttpApi
from weightsync.host.service import RolloutService
from weightsync.host.settings import RolloutConfig
from weightsync.load.module import ModuleWeightLoader
from weightsync.memory import LeaseReader, ServingLease
from weightsync.types import DescribeRequest, EngineOp
from weightsync.types.transfer_messages import Transport

pytestmark = [pytest.mark.timeout(600), pytest.mark.skipif(not vllm_is_there, reason=NEEDS_VLLM)]
LEASE_S = 4.0
SLACK_S = 15.0
"""What two busy cores may add."""
SYNC_S = 40.0
MIDDLEWARE = "weightsync.engine.vllm.lease_middleware.LeaseMiddleware"
TOKEN = "a-token-for-tests-only"
OUTLASTS = 16000
"""Tokens of a generation that goes on when a lease ends."""


def service_main(vllm: str, controller: str | None, lease: str, senders: tuple[str, ...], conn: Any) -> None:
    """The rollout service of the vLLM server's host; without a controller it lends the lease itself."""
    engine = VllmEngine(VllmHttpApi(vllm), engine_id="vllm", pause_mode="abort")
    config = RolloutConfig(
        service_id="vllm", controller=controller, lease=ServingLease(lease), transport=Transport.TCP, poll_s=None,
        senders=senders,
    )  # fmt: skip
    service = RolloutService({"m": engine}, config)
    conn.send(service.start())
    conn.recv()
    service.close()
    os._exit(0)


@pytest.fixture(scope="module")
def guarded(versions: Versions, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, str]]:
    """A server with the middleware, that may not answer yet, and its lease file."""
    folder = tmp_path_factory.mktemp("guarded")
    lease = str(folder / "lease")
    ServingLease(lease).close()  # it stays, lent to nobody
    server = Server(
        versions.checkpoints[0], folder, env={LEASE_FILE_VARIABLE: lease}, options=("--middleware", MIDDLEWARE)
    )
    server.start()
    try:
        yield server, lease
    finally:
        server.http.close()
        server.stop()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fleet:
    """A controller, the vLLM server's service in a process of its own, and one with another engine in this one."""

    client: ControllerClient
    service: Child
    trainer: Child
    run_id: str
    endpoint: str

    def states(self) -> dict[str, str]:
        return {each.instance_id: each.state for each in self.client.status().instances}

    def wait_states(self, expected: dict[str, str]) -> None:
        end = time.monotonic() + SYNC_S
        while self.states() != expected:
            assert time.monotonic() < end, self.client.status().instances
            time.sleep(0.05)  # between two looks

    def publish(self, version: int) -> None:
        self.trainer.conn.send((version, version, False))
        assert self.trainer.recv(60) == version
        self.client.notify_version(self.run_id, "m", version, self.endpoint)

    def sync(self, version: int) -> None:
        """Returns when every live instance serves it."""
        self.publish(version)
        end = time.monotonic() + SYNC_S
        while self.client.status().models["m"].rollout_model_version < version:
            assert time.monotonic() < end, self.client.status()
            time.sleep(0.05)  # between two looks


@pytest.fixture
def fleet(guarded: tuple[Server, str], tmp_path: Path) -> Iterator[Fleet]:
    server, lease = guarded
    pool = RolloutPool(lease_s=LEASE_S)
    method = FleetMethod(pool, prepare_timeout_s=SYNC_S, commit_timeout_s=20.0)
    controller = WeightSyncController({"sync_mode": "fully-async"}, method, model_tags=("m",))
    face = ControllerServer(controller, pool)
    url = face.start()
    other = ServingLease(str(tmp_path / "other"))
    embedded = EmbeddedEngine.of(ModuleWeightLoader(build_model().bfloat16()), lease=LeaseReader(other.path))
    beside = RolloutService({"m": embedded}, RolloutConfig(service_id="other", controller=url, lease=other))
    client = ControllerClient(url)
    with children() as start:
        trainer = start(publisher_main, talk=True, name="publisher")
        run_id, endpoint = trainer.recv(START_S)
        server.wait_until_ready()
        service = start(service_main, server.url, url, lease, (), talk=True, name="service")
        service.recv(START_S)
        beside.start()
        yield Fleet(client=client, service=service, trainer=trainer, run_id=run_id, endpoint=endpoint)
        beside.close()
        client.close()
        face.close()
        controller.close()


@pytest.fixture
def is_version(oracle: Oracle, versions: Versions) -> Callable[[list[list[float]], int], None]:
    """Asserts that these answers to all prompts, or the first ones, are those of a fresh engine of that version."""

    def check(told: list[list[float]], version: int) -> None:
        fresh = [oracle.logprobs(checkpoint)[: len(told)] for checkpoint in versions.checkpoints]
        distances = [distance(told, each) for each in fresh]
        assert distances[version] <= SAME, distances
        assert all(far >= DIFFERENT for number, far in enumerate(distances) if number != version), distances

    return check


def ask(server: Server) -> httpx.Response:
    return server.http.post("/v1/completions", json=completion(PROMPTS[0], prompt_logprobs=0))


def told_by(response: httpx.Response) -> list[list[float]]:
    scored = response.json()["choices"][0]["prompt_logprobs"]
    return [[float(next(iter(each.values()))["logprob"]) for each in scored[1:] if each]]


def check_refused(response: httpx.Response) -> None:
    assert response.status_code == 503, response.text
    assert response.json()["error"]["type"] == "NotServingError"
    assert int(response.headers["retry-after"]) >= 1


def test_a_server_that_has_just_started_answers_with_nothing_but_what_its_service_has_given_it(
    guarded: tuple[Server, str],
    oracle: Oracle,
    versions: Versions,
    is_version: Callable[[list[list[float]], int], None],
) -> None:
    """Without a controller. From its first answer on, though it has a checkpoint; and its service may be started again
    when the trainer has ended."""
    server, lease = guarded
    oracle.learn(versions.checkpoints)
    with children() as start:
        trainer = start(publisher_main, talk=True, name="publisher")
        run_id, endpoint = trainer.recv(START_S)
        trainer.conn.send((1, 1, False))
        assert trainer.recv(60) == 1
        service = start(service_main, server.url, None, lease, (endpoint,), talk=True, name="service")
        service.recv(START_S)
        refused, end = 0, time.monotonic() + START_S
        while True:
            assert time.monotonic() < end, server.tail()
            with contextlib.suppress(httpx.TransportError):
                answer = ask(server)
                if answer.status_code == 200:
                    break
                check_refused(answer)
                refused += 1
            time.sleep(0.01)  # between two requests
        is_version(told_by(answer), 1)
        assert refused > 0, "it was asked before it had been given anything"
        with contextlib.closing(engine_at(f"vllm+{server.url}", leased=True)) as handle:
            assert handle.call(EngineOp.DESCRIBE, DescribeRequest(), timeout_s=START_S).leased
        trainer.kill()
        service.kill()
        is_version(told_by(ask(server)), 1)
        again = start(service_main, server.url, None, lease, (endpoint,), talk=True, name="service")
        client = RolloutClient(again.recv(START_S))
        end = time.monotonic() + SYNC_S
        while (status := client.status().models["m"]).version != 1:
            assert time.monotonic() < end, status
            time.sleep(0.05)  # between two looks
        assert (status.run_id, status.num_pulled) == (run_id, 0)
        is_version(told_by(ask(server)), 1)
        client.close()


def test_a_stopped_service_is_not_answered_for(
    guarded: tuple[Server, str],
    fleet: Fleet,
    oracle: Oracle,
    versions: Versions,
    is_version: Callable[[list[list[float]], int], None],
) -> None:
    """Its stream is cut, its completions are refused within the lease, and what it answers first is the fleet's."""
    server, _ = guarded
    oracle.learn(versions.checkpoints)
    fleet.wait_states({"vllm": "live", "other": "live"})
    fleet.sync(1)
    end = time.monotonic() + SYNC_S
    while (answer := ask(server)).status_code == 503:  # its service came in without asking, and asks for its lease now
        assert time.monotonic() < end, fleet.client.status().instances
    is_version(told_by(answer), 1)

    body = completion(PROMPTS[0], max_tokens=OUTLASTS, stream=True, ignore_eos=True)
    stopped_s, lines = 0.0, 0
    with server.http.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        with pytest.raises(httpx.RemoteProtocolError):  # noqa: PT012
            for line in response.iter_lines():
                assert "[DONE]" not in line
                lines += 1
                if not stopped_s:
                    fleet.service.stop()
                    stopped_s = time.monotonic()
    assert lines > 0
    assert time.monotonic() - stopped_s < LEASE_S + SLACK_S
    check_refused(ask(server))
    assert server.http.get("/health").status_code == 200
    assert server.get("/v1/models")["data"][0]["id"] == MODEL_NAME

    fleet.sync(2)  # by the other one alone
    assert fleet.states()["vllm"] in ("evicted", "joining")
    check_refused(ask(server))
    assert server.get("/weight_info")["weight_version"].endswith("/1")

    fleet.service.cont()
    end = time.monotonic() + SYNC_S
    while (answer := ask(server)).status_code != 200:
        check_refused(answer)
        assert time.monotonic() < end, fleet.client.status()
        time.sleep(0.01)  # between two requests
    is_version(told_by(answer), 2)
    is_version(server.logprobs(), 2)
    fleet.wait_states({"vllm": "live", "other": "live"})


def test_a_server_that_starts_anew_answers_what_its_fleet_serves(
    guarded: tuple[Server, str],
    fleet: Fleet,
    oracle: Oracle,
    versions: Versions,
    is_version: Callable[[list[list[float]], int], None],
) -> None:
    """Its service lives on, and it starts with weights that nobody published."""
    server, _ = guarded
    oracle.learn(versions.checkpoints)
    fleet.wait_states({"vllm": "live", "other": "live"})
    fleet.sync(1)
    server.stop()
    server.start()
    end = time.monotonic() + START_S
    while True:
        assert time.monotonic() < end, fleet.client.status()
        with contextlib.suppress(httpx.TransportError):
            answer = ask(server)
            if answer.status_code == 200:
                break
            check_refused(answer)
        time.sleep(0.01)  # between two requests
    is_version(told_by(answer), 1)
    fleet.sync(2)
    is_version(server.logprobs(), 2)
    fleet.wait_states({"vllm": "live", "other": "live"})


PAGE = Path(__file__).parents[2] / "docs" / "fleet.md"


def page_blocks(controller: str, vllm: str) -> tuple[str, str]:
    """The trainer's and the host's lines of the page, as they stand but for the addresses."""
    trainer, host = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    for block in (trainer, host):
        assert len([line for line in block.splitlines() if line.strip() and "import" not in line]) <= 12
    return tuple(
        block.replace("http://127.0.0.1:8700", controller).replace("http://127.0.0.1:8000", vllm)
        for block in (trainer, host)
    )  # type: ignore[return-value]


def page_trainer_main(code: str) -> None:
    """A trainer of one's own: its steps are those that the oracle knows."""
    os.environ["WEIGHTSYNC_TOKEN"] = TOKEN
    torch.set_num_threads(1)
    steps = iter((1, 2))
    scope = {"model": build_model(), "train_step": lambda model: train_step(model, next(steps)), "num_steps": 2}
    exec(code, scope)  # noqa: S102


def page_host_main(code: str, lease: str, conn: Any) -> None:
    os.environ |= {"WEIGHTSYNC_TOKEN": TOKEN, "WEIGHTSYNC_LEASE_FILE": lease}
    exec(code, {})  # noqa: S102
    conn.send("started")
    conn.recv()
    os._exit(0)


def test_the_pages_lines_work(
    guarded: tuple[Server, str], is_version: Callable[[list[list[float]], int], None], tmp_path: Path
) -> None:
    """docs/fleet.md: a trainer of one's own and a vLLM, ten lines each, with the controller's command."""
    server, lease = guarded
    port = free_port()
    (tmp_path / "c.yaml").write_text(f"weight_sync: {{sync_method: pull, fleet: {{models: [actor], port: {port}}}}}")
    command = [sys.executable, "-m", "weightsync.cli", "controller", "--config", str(tmp_path / "c.yaml")]
    running = subprocess.Popen(command, env={**os.environ, "WEIGHTSYNC_TOKEN": TOKEN}, stdout=subprocess.PIPE)
    with contextlib.ExitStack() as stack:
        start = stack.enter_context(children())
        stack.callback(running.wait, 10)
        stack.callback(running.terminate)
        assert running.stdout is not None
        assert b"controller of actor" in running.stdout.readline()
        trainer, host = page_blocks(f"http://127.0.0.1:{port}", server.url)
        server.wait_until_ready()
        serving = start(page_host_main, host, lease, talk=True, name="host")
        assert serving.recv(START_S) == "started"
        start(page_trainer_main, trainer, name="trainer").result(START_S)
        end = time.monotonic() + SYNC_S
        while ask(server).status_code != 200:
            assert time.monotonic() < end
            time.sleep(0.05)  # between two requests
        is_version(server.logprobs(), 2)


@pytest.mark.soak
def test_a_server_without_a_lease_file_does_not_start(versions: Versions, tmp_path: Path) -> None:
    """It ends by itself, and says why."""
    server = Server(
        versions.checkpoints[0],
        tmp_path,
        env={LEASE_FILE_VARIABLE: str(tmp_path / "none")},
        options=("--middleware", MIDDLEWARE),
    )
    server.start()
    assert server.process is not None
    try:
        server.process.wait(120)
        assert "ConfigError: WEIGHTSYNC_LEASE_FILE" in server.tail()
        with pytest.raises(httpx.ConnectError):
            server.http.get("/health")
    finally:
        server.http.close()
        server.kill()
