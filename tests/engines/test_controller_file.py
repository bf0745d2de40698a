"""A controller from one YAML file, for each `sync_method`; what the engine answers says whether it was synced.

The controller is the command, a process of its own. Where a method needs an object that its user has (the holders of
hosted services), it is what the command is made of: `build_controller` of the same file. The trainers that push and
publish, and the hosts that pull, read the file too.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import yaml
from torch.distributed.fsdp import fully_shard

import weightsync
from tests.engines.conftest import Versions
from tests.engines.vllm_support import Server, build_model, train_step
from tests.multiproc.fleet_kit import MODELS, FleetService, Trainers, digest_at
from tests.multiproc.pull_kit import wait_until
from tests.multiproc.spine import build, step
from tests.multiproc.test_verbs import live_bytes, serves, stepped
from tests.standins.processes import Child, children, free_port, in_gloo_world
from tests.standins.sglang_server import SGLangServer
from tests.standins.sglang_workers import SGLangWorkers
from tests.standins.weaver_server import WeaverHolder, WeaverServer
from tests.unit.control.methods.test_network import Service as ToldStandIn
from tests.unit.control.methods.test_tinker import Service as TinkerStandIn
from tests.unit.handles.sglang_kit import RoutedServers, weights, write_checkpoint
from weightsync.clients.controller import ControllerClient
from weightsync.config import SyncMethodName
from weightsync.control.build import Built, build_controller
from weightsync.control.methods.folder import VersionFolder
from weightsync.control.methods.mock import MockMethod
from weightsync.tensors import byte_array
from weightsync.types import Version

pytestmark = pytest.mark.timeout(600)

LONG_S = 90.0
RUN = "run"


class Case:
    """One method, and what it syncs.

    Args:
        folder: for all files.
        opened: ends what is started.
        need: gives a fixture.

    Attributes:
        settings: of the file, less what all have.
        models: of the controller.
        in_process: the controller is built here.
    """

    in_process = False
    models: tuple[str, ...] = ("actor",)

    def __init__(self, folder: Path, opened: contextlib.ExitStack, need: Callable[[str], Any]) -> None:
        self.folder = folder
        self.opened = opened
        self.need = need
        self.port = free_port()
        self.settings: dict[str, Any] = {}
        self.set_up()

    @property
    def url(self) -> str:
        """Of the controller."""
        return f"http://127.0.0.1:{self.port}"

    def set_up(self) -> None:
        """Starts the engines, and fills `settings`."""

    def begin(self, file: Path, built: Built | None) -> None:
        """The controller is there; starts who reads its file."""

    def publish(self, number: int) -> None:
        """Trains a version and lays it where the method finds it."""

    def step(self, number: int, client: ControllerClient) -> None:
        """Trains a version and tells the controller, which syncs it."""
        self.publish(number)
        client.train_worker_notify_weight_update("worker", "actor", RUN, number, wait_s=LONG_S)

    def check(self, number: int) -> None:
        """What the engine answers is of that version and of no other."""
        raise NotImplementedError


# --- push: two training ranks, a vLLM server ---


def rank_main(rank: int, world_size: int, file: str, conn: Any) -> None:
    """A training rank, which steps when it is told to. Its model is sharded among both."""
    torch.set_num_threads(1)
    model: Any = build_model()
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    with weightsync.push(model, config=file) as push:
        conn.send(push.run_id)
        while (number := conn.recv()) is not None:
            train_step(model, number)
            report = push.step()
            conn.send(None if report is None else report.version.number)


class PushToVllm(Case):
    def set_up(self) -> None:
        self.server: Server = self.need("vllm_server")
        self.settings = {
            "push": {"engines": [f"vllm+{self.server.url}"], "controller": self.url},
            "transfer": {"transfer_timeout_s": 40.0},
        }

    def begin(self, file: Path, built: Built | None) -> None:
        start, port = self.opened.enter_context(children()), free_port()
        self.ranks: list[Child] = [
            start(in_gloo_world, rank, 2, port, rank_main, (str(file),), talk=True, name=f"rank{rank}")
            for rank in range(2)
        ]
        assert self.ranks[0].recv(LONG_S) == self.ranks[1].recv(LONG_S)

    def step(self, number: int, client: ControllerClient) -> None:
        for rank in self.ranks:
            rank.conn.send(number)
        assert [rank.recv(LONG_S) for rank in self.ranks] == [number] * 2

    def check(self, number: int) -> None:
        self.need("serves")(number)


class PushToSGLang(PushToVllm):
    """The same ranks; a server that keeps SGLang's contract, whose two workers receive by torch's own calls."""

    def set_up(self) -> None:
        self.versions: Versions = self.need("versions")
        workers = self.opened.enter_context(contextlib.closing(SGLangWorkers(2)))
        self.sglang = SGLangServer(self.versions.checkpoints[0], workers=workers)
        self.opened.callback(self.sglang.close)
        self.settings = {
            "push": {"engines": [f"sglang+{self.sglang.start()}"], "controller": self.url},
            "transfer": {"transfer_timeout_s": 40.0},
        }

    def check(self, number: int) -> None:
        trained = {name: byte_array(each).tobytes() for name, each in self.versions.weights[number].items()}
        assert {name: each.tobytes() for name, each in self.sglang.weights.items()} == trained
        assert self.sglang.weight_version.endswith(f"/{number}")
        assert self.sglang.paused is None


# --- pull: a host that the controller leads; and a set of models on two hosts ---


def trainer_main(file: str, conn: Any) -> None:
    torch.set_num_threads(1)
    model = build(5)
    with weightsync.publish(model, "actor", config=file) as publisher:
        conn.send(publisher.endpoint)
        while conn.recv() is not None:
            step(model)
            report = publisher.step()
            conn.send((report.version.number, report.published, report.seconds))
    os._exit(0)


def host_main(file: str, conn: Any) -> None:
    torch.set_num_threads(1)
    model = build(99, dtype=torch.bfloat16)
    with weightsync.serve({"actor": model}, config=file) as service:
        conn.send(service.url)
        while conn.recv() is not None:
            with service.generation("actor") as version:
                conn.send((version and version.number, live_bytes(model)))
    os._exit(0)


class Pull(Case):
    def set_up(self) -> None:
        self.settings = {
            "fleet": {"lease_s": 4.0},
            "publish": {"to": [self.url], "port": 0},
            "serve": {"controller": self.url, "lease": str(self.folder / "lease"), "port": 0},
        }

    def begin(self, file: Path, built: Built | None) -> None:
        start = self.opened.enter_context(children())
        self.host: Child = start(host_main, str(file), talk=True, name="host")
        self.trainer: Child = start(trainer_main, str(file), talk=True, name="trainer")
        self.host.recv(LONG_S)
        self.trainer.recv(LONG_S)

    def step(self, number: int, client: ControllerClient) -> None:
        assert stepped(self.trainer) == number
        wait_until(
            lambda: client.rollout_service_state("actor").rollout_model_version == number, "it is served", LONG_S
        )

    def check(self, number: int) -> None:
        assert serves(self.host, number)


class PullOfASet(Case):
    models = MODELS

    def set_up(self) -> None:
        self.settings = {
            "fleet": {"sets": [list(MODELS)], "commit_policy": "all", "lease_s": 4.0},
            "sync_mode": "fully-async",
        }

    def begin(self, file: Path, built: Built | None) -> None:
        start = self.opened.enter_context(children())
        self.services = [FleetService(start, name, self.url, self.folder) for name in ("one", "two")]
        self.trainers = Trainers(start)
        for service in self.services:
            service.ask("url")

    def step(self, number: int, client: ControllerClient) -> None:
        for model in MODELS:
            self.trainers.publish(model, number)
            client.notify_version(self.trainers.run_of(model), model, number, self.trainers.endpoints[model])
        for model in MODELS:
            assert client.wait_version(self.trainers.run_of(model), model, number, wait_s=LONG_S), client.status()
        live = ["live"] * len(self.services)  # a service that still joins is not waited for, and answers nobody
        wait_until(lambda: [each.state for each in client.status().instances] == live, "both have joined", LONG_S)

    def check(self, number: int) -> None:
        for service in self.services:
            assert service.ask("weights") == dict.fromkeys(MODELS, float(number))
            assert service.ask("digests") == dict.fromkeys(MODELS, digest_at(number))


# --- network and disk: a service that is told, vLLM, SGLang ---


class ToldService(Case):
    def set_up(self) -> None:
        self.service = ToldStandIn()
        self.service.start()
        self.opened.callback(self.service.close)
        self.settings = {
            "sync_weight_path": str(self.folder / "newest"),
            "inference_service": {"model": "qwen", "base_url": f"{self.service.url}/v9", "model_tag": "actor"},
        }

    def publish(self, number: int) -> None:
        write_checkpoint(self.folder / "newest", number)

    def check(self, number: int) -> None:
        assert self.service.weights == weights(number)
        assert self.service.calls[-1].body == {
            "model_name": "qwen", "weight_type": "full", "weight_path": str(self.folder / "newest"),
        }  # fmt: skip


class FolderOfVllm(Case):
    """vLLM's own routes; its answers are those of a fresh engine that has loaded the same checkpoint."""

    def set_up(self) -> None:
        self.server: Server = self.need("vllm_server")
        self.versions: Versions = self.need("versions")
        self.settings = {
            "sync_weight_path": str(self.folder / "versions"),
            "inference_service": {"backend": "vllm", "base_url": self.server.url, "model_tag": "actor"},
        }
        self.published = VersionFolder(self.folder / "versions")

    def publish(self, number: int) -> None:
        def write(into: Path) -> None:
            shutil.copytree(self.versions.checkpoints[number], into, dirs_exist_ok=True)

        self.published.publish("actor", Version(run_id=RUN, number=number), write)

    def check(self, number: int) -> None:
        self.need("serves")(number)
        assert self.server.get("/weight_info") == {"weight_version": f"{RUN}/{number}"}


class FolderOfSGLang(Case):
    """Two servers behind their router, by SGLang's contract."""

    def set_up(self) -> None:
        self.servers = RoutedServers(self.folder, self.opened)
        self.settings = self.servers.settings

    def publish(self, number: int) -> None:
        self.servers.publish(Version(run_id=RUN, number=number))

    def check(self, number: int) -> None:
        self.servers.check_serve(Version(run_id=RUN, number=number))


# --- hosted services, and the mock ---


class Tinker(Case):
    """The real SDK against a stand-in for the service."""

    in_process = True

    def set_up(self) -> None:
        self.service = TinkerStandIn()
        self.opened.callback(self.service.close)
        self.settings = {"inference_service": {"backend": "tinker", "model_tag": "actor"}}

    def begin(self, file: Path, built: Built | None) -> None:
        assert built is not None
        built.controller.set_tinker_service_holder(self.service.holder)

    def publish(self, number: int) -> None:
        self.service.step()

    def check(self, number: int) -> None:
        assert self.service.sampled() == number
        sampler = self.service.holder.sampler
        assert sampler is not None
        assert (sampler.served.run_id, sampler.served.version) == (RUN, number)
        assert self.service.holder.served_path(sampler.client, timeout_s=LONG_S) == sampler.served.path


class Weaver(Case):
    in_process = True

    def set_up(self) -> None:
        self.server = WeaverServer()
        self.opened.callback(self.server.close)
        self.holder = WeaverHolder(self.server.start())
        self.opened.callback(self.holder.close)
        self.settings = {"inference_service": {"backend": "weaver", "model_tag": "actor"}}

    def begin(self, file: Path, built: Built | None) -> None:
        assert built is not None
        built.controller.set_weaver_service_holder(self.holder, "actor")

    def publish(self, number: int) -> None:
        self.server.trained = number

    def check(self, number: int) -> None:
        assert self.holder.sample() == number
        assert self.holder.served_weights("actor", timeout_s=LONG_S).path == f"weaver://actor/{RUN}/{number}"


class Mock(Case):
    """Nothing is moved: what it says that it serves is all there is."""

    in_process = True

    def begin(self, file: Path, built: Built | None) -> None:
        assert built is not None
        assert isinstance(built.controller.method, MockMethod)
        self.method = built.controller.method

    def check(self, number: int) -> None:
        assert self.method.served("actor") == Version(run_id=RUN, number=number)


CASES: dict[str, type[Case]] = {
    "push/vllm": PushToVllm,
    "push/sglang": PushToSGLang,
    "pull": Pull,
    "pull/set": PullOfASet,
    "network": ToldService,
    "network/vllm": FolderOfVllm,
    "network/sglang": FolderOfSGLang,
    "disk/vllm": FolderOfVllm,
    "disk/sglang": FolderOfSGLang,
    "tinker": Tinker,
    "weaver": Weaver,
    "mock": Mock,
}
"""By method, and by what it syncs."""


def command(file: Path, case: Case) -> str:
    """Starts `weightsync controller`; its first line."""
    process = subprocess.Popen(
        [sys.executable, "-m", "weightsync.cli", "controller", "--config", str(file)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    case.opened.callback(process.wait, 20)
    case.opened.callback(process.terminate)
    assert process.stdout is not None
    line = process.stdout.readline()
    threading.Thread(target=process.stdout.read, daemon=True).start()  # it has somewhere to write to
    return line


def test_every_method_of_the_schema_is_in_the_table() -> None:
    assert {name.partition("/")[0] for name in CASES} == set(get_args(SyncMethodName))


@pytest.mark.parametrize("name", CASES)
def test_one_file_drives_it_and_the_engine_says_so(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Seen red: with `network` that posts the generic body whatever `backend` says, with a sync that does nothing."""
    with contextlib.ExitStack() as opened:
        case = CASES[name](tmp_path, opened, request.getfixturevalue)
        own = {"sync_method": name.partition("/")[0], "sync_mode": "sync"}
        fleet = {"models": list(case.models), "port": case.port, "retries_s": [0.5, 1.0, 2.0]}
        settings = {**own, **case.settings, "fleet": {**fleet, **case.settings.get("fleet", {})}}
        settings.setdefault("inference_service", {"model_tag": "actor"})
        file = tmp_path / "sync.yaml"
        file.write_text(yaml.safe_dump({"weight_sync": settings}))
        built: Built | None = None
        if case.in_process:
            built = opened.enter_context(build_controller(file))
        else:
            assert f"controller of {', '.join(case.models)} at {case.url}" in command(file, case)
        client = opened.enter_context(contextlib.closing(ControllerClient(case.url)))
        case.begin(file, built)
        for number in (1, 2):
            case.step(number, client)
            for model in case.models:
                state = client.rollout_service_state(model)
                assert (state.rollout_model_version, state.last_error) == (number, None)
            case.check(number)
