"""One file for the trainer and for the rollout host: a `WeightManager` and a `RolloutService` are made from it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import weightsync
from tests.multiproc.pull_kit import wait_until
from tests.multiproc.spine import build, cast_bytes, step
from tests.standins.processes import Child, children, free_port
from weightsync import (
    EmbeddedEngine,
    ModuleWeightLoader,
    RolloutClient,
    RolloutService,
    WeightManager,
    WeightSyncConfig,
)
from weightsync.engine.server import EngineServer
from weightsync.errors import ConfigError, NotServingError
from weightsync.memory import LeaseReader, ServingLease
from weightsync.tensors import byte_array

_LONG_S = 60.0


def trainer_main(path: str, conn: Any) -> None:
    torch.set_num_threads(1)
    model = build(5)
    manager = WeightManager.from_config(WeightSyncConfig.load(path))
    with contextlib.closing(manager):
        for number in (1, 2):
            step(model)
            manager.offload(model, number)
            conn.send((manager.endpoint, manager.run_id))
            conn.recv()


def host_main(path: str, conn: Any) -> None:
    torch.set_num_threads(1)
    config = WeightSyncConfig.load(path)
    served = build(99, dtype=torch.bfloat16)
    lease = config.serve.lease
    assert lease is not None
    ServingLease(lease).release()  # made before its engines look at it
    engine = EmbeddedEngine.of(ModuleWeightLoader(served), engine_id="e", model_id="actor", lease=LeaseReader(lease))
    service = RolloutService.from_config(config, {"actor": engine}, poll_s=0.2)
    conn.send((service.start(), dataclasses.replace(service.config, lease=None)))
    conn.recv()
    wait_until(lambda: _answers(engine), "its lease is lent", _LONG_S)
    with engine.generation():
        conn.send({name: byte_array(t.detach().contiguous()).tobytes() for name, t in served.state_dict().items()})
    conn.recv()
    service.close()
    ServingLease(lease).release()  # it was given back: nobody else writes it
    conn.send("closed")


def _answers(engine: EmbeddedEngine) -> bool:
    try:
        with engine.generation():
            return True
    except NotServingError:
        return False


def _serves(client: RolloutClient, number: int) -> bool:
    return client.status(timeout_s=5.0).models["actor"].version == number


@pytest.fixture
def start() -> Iterator[Callable[..., Child]]:
    with children() as start:
        yield start


def test_a_manager_and_a_service_are_built_from_one_file(start: Callable[..., Child], tmp_path: Path) -> None:
    """Seen red without `run_id` in the one `from_config`, and without `senders` in the other."""
    agent, host = free_port(), free_port()
    path = tmp_path / "sync.yaml"
    settings = {
        "sync_method": "pull",
        "run_id": "run-of-the-file",
        "inference_service": {"model_tag": "actor"},
        "transfer": {"delta": False, "pause_timeout_s": 4.0, "transfer_timeout_s": 50.0},
        "extract": {"dtype": "bfloat16"},
        "publish": {"port": agent},
        "fleet": {"lease_s": 30.0},
        "serve": {
            "sources": [f"http://127.0.0.1:{agent}"],
            "port": host,
            "service_id": "host-0",
            "lease": str(tmp_path / "lease"),
        },
    }
    path.write_text(yaml.safe_dump({"weight_sync": settings}))
    service = start(host_main, str(path), talk=True, name="host")
    url, config = service.recv()
    assert url == f"http://127.0.0.1:{host}"
    assert (config.service_id, config.mode, config.pause_timeout_s, config.lease_s) == ("host-0", "full", 4.0, 30.0)
    assert config.pull_timeout_s == 50.0
    trainer = start(trainer_main, str(path), talk=True, name="trainer")
    with contextlib.closing(RolloutClient(url)) as client:
        for number in (1, 2):
            assert trainer.recv() == (f"http://127.0.0.1:{agent}", "run-of-the-file")
            serves = functools.partial(_serves, client, number)
            wait_until(serves, f"version {number} is served", _LONG_S)
            trainer.conn.send("on")
        status = client.status(timeout_s=5.0).models["actor"]
        assert (status.run_id, status.version, status.num_deltas) == ("run-of-the-file", 2, 0)
    service.conn.send("what")
    model = build(5)
    step(model)
    step(model)
    assert service.recv() == cast_bytes(model)
    service.conn.send("end")
    assert service.recv() == "closed"


def test_the_inference_service_is_the_engine_where_none_is_named() -> None:
    """Seen red where `base_url` and `backend` were shown, and nobody's."""
    model, served = build(5), build(99, dtype=torch.bfloat16)
    server = EngineServer(EmbeddedEngine.of(ModuleWeightLoader(served), engine_id="e"))
    service = {"backend": "embedded", "base_url": server.start()}
    with contextlib.closing(server):
        with weightsync.push(model, config={"inference_service": service}) as push:
            report = push.step()
            assert report is not None
            assert report.digests_equal
        with pytest.raises(ConfigError, match="is an engine server of weightsync, and its URL says vllm"):
            weightsync.push(model, config={"inference_service": {**service, "backend": "vllm"}})
