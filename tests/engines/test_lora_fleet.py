"""Two real vLLM servers of one fleet take an adapter's versions together, or not at all, under `commit_policy: all`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

import pytest

from tests.engines.lora_kit import CLOSE, Trainer, adapter_folders, lora_server
from tests.engines.vllm_support import NEEDS_VLLM, PROMPTS, Server, completion, distance, vllm_is_there
from tests.standins.processes import children
from weightsync.clients.controller import ControllerClient
from weightsync.control.controller import WeightSyncController
from weightsync.control.methods.fleet import FleetMethod
from weightsync.control.pool import RolloutPool
from weightsync.control.server import ControllerServer
from weightsync.engine.vllm.lease_middleware import LEASE_FILE_VARIABLE
from weightsync.handles.two_kinds import VllmServerEngine
from weightsync.host.service import RolloutService
from weightsync.host.settings import RolloutConfig
from weightsync.memory import ServingLease

pytestmark = [pytest.mark.timeout(900), pytest.mark.soak]
LEASE = "weightsync.engine.vllm.lease_middleware.LeaseMiddleware"
SLOTS = 3
SYNC_S = 60.0
LEASE_S = 5.0


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[tuple[Server, str]]]:
    """Two servers, each with its lease file."""
    if not vllm_is_there:
        pytest.skip(NEEDS_VLLM)
    with contextlib.ExitStack() as stack:
        made = []
        for number in range(2):
            folder = tmp_path_factory.mktemp(f"lora-{number}")
            lease = str(folder / "lease")
            ServingLease(lease).close()
            server = lora_server(
                folder, max_loras=SLOTS, env={LEASE_FILE_VARIABLE: lease, "VLLM_CPU_OMP_THREADS_BIND": str(number)},
                options=("--middleware", LEASE),
            )  # fmt: skip
            stack.callback(server.stop)
            stack.callback(server.http.close)
            server.start()
            made.append((server, lease))
        for server, _ in made:
            server.wait_until_ready()
        yield made


@pytest.fixture
def client(servers: list[tuple[Server, str]]) -> Iterator[ControllerClient]:
    """Of the fleet's controller; a service beside each server."""
    pool = RolloutPool(lease_s=LEASE_S)
    method = FleetMethod(pool, prepare_timeout_s=SYNC_S, commit_timeout_s=20.0, commit_policy="all")
    controller = WeightSyncController({"sync_mode": "fully-async"}, method, model_tags=("actor",))
    face = ControllerServer(controller, pool)
    url = face.start()
    with contextlib.ExitStack() as stack:
        stack.callback(controller.close)
        stack.callback(face.close)
        for number, (server, lease) in enumerate(servers):
            engine = VllmServerEngine(server.url, engine_id=f"vllm-{number}")
            config = RolloutConfig(service_id=f"host-{number}", controller=url, lease=ServingLease(lease), poll_s=None)
            service = RolloutService({"actor": engine}, config)
            stack.callback(engine.close)
            stack.callback(service.close)
            service.start()
        client = ControllerClient(url)
        stack.callback(client.close)
        yield client


def says(server: Server) -> tuple[str, list[float]] | None:
    """The version that answers, and its scores of the first prompt; None where it refuses."""
    response = server.http.post("/v1/completions", json=completion(PROMPTS[0], model="actor", prompt_logprobs=0))
    if response.status_code != 200:
        return None
    told = response.json()["choices"][0]["prompt_logprobs"][1:]
    return response.headers["x-weightsync-version"], [float(next(iter(each.values()))["logprob"]) for each in told]


def until(condition: Callable[[], object], *, within_s: float = SYNC_S) -> None:
    end = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)  # between two looks


def test_both_serve_a_version_or_none_does(servers: list[tuple[Server, str]], client: ControllerClient) -> None:
    """Both are told. Where one has no slot left, both stay on the old version; when it has one, both go on. One that is
    killed and started again comes back with the fleet's version, and answers nothing before."""
    first, second = (server for server, _ in servers)

    def serve(trainer: Trainer) -> None:
        trainer.publish()
        client.notify_version(trainer.run_id, "actor", trainer.version, trainer.endpoint)

    def all_serve(number: int, *, of: tuple[Server, ...] = (first, second)) -> bool:
        answers = [says(server) for server in of]
        return all(
            told is not None
            and told[0] == f"{trainer.run_id}/{number}"
            and distance([told[1]], trainer.scores[number][:1]) <= CLOSE
            for told in answers
        )

    with children() as start:
        trainer = Trainer(start, "actor", {"rank": 8})
        for number in (1, 2):
            serve(trainer)
            until(lambda: all_serve(number))  # noqa: B023
        folder = next(iter(sorted(adapter_folders())))
        taken = [f"other-{number}" for number in range(SLOTS - 1)]
        for name in taken:
            order = {"lora_name": name, "lora_path": f"/dev/shm/{folder}"}
            assert second.http.post("/v1/load_lora_adapter", json=order).status_code == 200
        serve(trainer)
        until(lambda: any("NoSlotError" in (each.error or "") for each in client.status().syncs))
        assert all_serve(2)
        for name in taken:
            assert second.http.post("/v1/unload_lora_adapter", json={"lora_name": name}).status_code == 200
        until(lambda: all_serve(3))
        second.kill()
        serve(trainer)
        until(lambda: all_serve(4, of=(first,)), within_s=SYNC_S + LEASE_S)
        second.start()
        second.wait_until_ready()
        until(lambda: all_serve(4))
