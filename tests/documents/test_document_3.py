"""Document 3, "WeightManager": its calls and call sequences as they stand there, on real bytes and real processes.

What is typed here from the document is marked with its section. Its names come from `adapters.compat`.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.documents.actors import Dataflow, RaaS, Ranks, small_model
from tests.multiproc.pull_kit import wait_until
from tests.standins.processes import Child, children
from weightsync.adapters.compat.dataflow import RaaSPool
from weightsync.adapters.compat.weight_manager import (
    ReceiverAgentConfig,
    ReceiverInfo,
    SenderAgentConfig,
    TCPTransferEngine,
    TransferAgent,
    TransferBuffer,
    TransferEngineConfig,
    TransferStatus,
    WeightManager,
    WeightManagerConfig,
)
from weightsync.clients.agent import AgentClient
from weightsync.clients.controller import ControllerClient
from weightsync.control.controller import WeightSyncController
from weightsync.control.methods.mock import MockMethod
from weightsync.engine.embedded import EmbeddedEngine
from weightsync.errors import ConfigError
from weightsync.host.service import RolloutService
from weightsync.load.module import ModuleWeightLoader
from weightsync.memory import MappedSegment
from weightsync.types import Deadline
from weightsync.types.transfer_messages import RegisterRequest

Start = Callable[..., Child]
RUN = "default-run"


@pytest.fixture(scope="module")
def start() -> Iterator[Start]:
    with children() as starter:
        yield starter


class Trained:
    """A trainer, and the number of its newest version."""

    def __init__(self, start: Start) -> None:
        self.ranks = Ranks(start)
        self.version = 0

    def step(self) -> dict[str, bytes]:
        self.version += 1
        return self.ranks.step(self.version)


@pytest.fixture(scope="module")
def trained(start: Start) -> Trained:
    return Trained(start)


# --- Design principle; Weight sync flow; Single training step ---


def test_a_training_step_and_the_weight_sync_flow(start: Start, trained: Trained, tmp_path: Path) -> None:
    """train_step | offload | save | wait_delta_ready | notify_version_async | get_batch | train_step.

    Red where the notification names another version, and where the gate opens before the engines serve it.
    """
    dataflow = Dataflow(start)
    raas = RaaS(start, "raas-0", tmp_path, controller=dataflow.url)
    dataflow.ask("catchup", "raas-0")
    trained.ranks.ask("connect", dataflow.url)
    for _ in range(3):
        truth = trained.step()
        trained.ranks.ask("notify_async", trained.version)
        assert trained.ranks.ask("get_batch", trained.version)[0] is True, "service_version >= trainer_version"
        assert raas.serving() == (f"{RUN}/{trained.version}", truth)
    dataflow.child.kill()
    raas.child.kill()


# --- notify_version_async: "Neither trainer blocks on weight transfer" ---


def test_a_trainer_never_waits_for_a_service_that_stands_still(start: Start, trained: Trained, tmp_path: Path) -> None:
    """The Dataflow process is stopped: steps and notifications go on; once it goes on, the newest version is served.

    Red with a call that waits for its answer: some seconds a step.
    """
    dataflow = Dataflow(start)
    raas = RaaS(start, "raas-1", tmp_path, controller=dataflow.url)
    dataflow.ask("catchup", "raas-1")
    trained.ranks.ask("connect", dataflow.url)
    dataflow.child.stop()
    for _ in range(3):
        truth = trained.step()
        assert trained.ranks.ask("notify_async", trained.version)[0] < 5.0
    dataflow.child.cont()
    assert trained.ranks.ask("get_batch", trained.version)[0] is True
    assert raas.serving() == (f"{RUN}/{trained.version}", truth)
    dataflow.child.kill()
    trained.step()
    assert trained.ranks.ask("notify_async", trained.version)[0] < 5.0, "nor for one that is gone"
    raas.child.kill()


# --- Sender agent HTTP API; Transfer modes; TCPTransferEngine; TransferBuffer ---


def test_the_sender_agents_http_api(trained: Trained) -> None:
    """Each row of its table."""
    truth = trained.step()
    url, version = trained.ranks.endpoint, trained.version
    with httpx.Client(base_url=url, timeout=10) as http:
        said = http.get("/get_version").json()
        assert (said["model_id"], said["run_id"], said["version"]) == ("default", RUN, version)
        info = http.get("/get_buffer_info").json()
        assert {part["name"] for part in info["tensors"]} == set(truth)
        assert info["total_bytes"] - info["data_start"] >= sum(map(len, truth.values()))
        able = http.get("/get_capabilities").json()
        assert {"full", "delta"} <= set(able["modes"])
        assert isinstance(able["delta_ready"], bool)
        refused = http.post("/request_transfer", json={"receiver_id": "raas-9", "model_id": "default", "mode": "full"})
        assert (refused.status_code, refused.json()["error"]) == (403, "NotRegisteredError")
        assert http.post("/register_sglang_instance", json={"receiver_id": "raas-9"}).status_code == 200
        for mode in ("full", "delta"):  # whoever holds nothing is given a version in full
            body = {"receiver_id": "raas-9", "model_id": "default", "mode": mode}
            grant = http.post("/request_transfer", json=body).json()
            assert (grant["transport"], grant.get("delta")) == ("tcp", None)
            assert grant["publication"]["manifest"]["version"] == {"run_id": RUN, "number": version}
            ended = http.post("/finish_transfer", json={"transfer_id": grant["transfer_id"], "ok": True})
            assert ended.status_code == 200
        bad = http.post("/request_transfer", json={"receiver_id": "raas-9", "model_id": "default", "mode": "half"})
        assert bad.status_code == 422


def test_a_receiver_pulls_in_full_and_then_what_has_changed(trained: Trained) -> None:
    """Six streams into a buffer; the agent says who had what. Red where the receiver is not counted, and where a delta
    is taken in full."""
    engine, buffer = TCPTransferEngine(TransferEngineConfig("raas-7")), TransferBuffer()
    assert engine.num_parallel_streams == 6
    receiver = engine.receiver(trained.ranks.endpoint, "default", buffer, mode="delta")
    with contextlib.closing(receiver), contextlib.closing(AgentClient(trained.ranks.endpoint)) as agent:
        sizes = []
        for _ in range(6):
            truth = trained.step()
            with receiver.pull(deadline=Deadline(30)) as pulled:
                assert str(pulled.version) == f"{RUN}/{trained.version}"
                with MappedSegment(pulled.segment, need_bytes=1) as mapped:
                    for name, content in truth.items():
                        offset = pulled.offsets[name]
                        assert bytes(mapped.memory[offset : offset + len(content)]) == content
                sizes.append((pulled.num_deltas, pulled.received_bytes))
            if pulled.num_deltas:
                break
        whole = sum(map(len, truth.values()))
        assert sizes[0][0] == 0
        assert sizes[0][1] >= whole
        assert sizes[-1][0] == 1
        assert sizes[-1][1] < whole / 10, "the changed elements alone"
        (found,) = (each for each in agent.receivers().receivers if each.receiver_id.startswith("raas-7-"))
    assert isinstance(found, ReceiverInfo)
    assert (found.version, found.num_transfers, found.num_failed) == (f"{RUN}/{trained.version}", len(sizes), 0)
    assert found.received_bytes >= sizes[0][1]
    assert found.bytes_per_s is not None
    assert found.bytes_per_s > 0
    assert found.since_s <= found.seen_s
    buffer.close()


def test_receivers_of_one_configuration_do_not_end_each_others_transfers(trained: Trained) -> None:
    """The second one pulls when the first has its grant. Seen red: they had one name, and each grant ended the other's
    transfer."""
    engine, trained_now = TCPTransferEngine(TransferEngineConfig("raas-8")), trained.step()
    receivers, buffers = [], [TransferBuffer(), TransferBuffer()]
    with contextlib.ExitStack() as stack:
        for buffer in buffers:
            receivers.append(engine.receiver(trained.ranks.endpoint, "default", buffer))
            stack.enter_context(contextlib.closing(receivers[-1]))
        attempts: list[int] = []

        def other_pulls(_: object) -> None:
            if not attempts:
                with receivers[1].pull(deadline=Deadline(30)) as pulled:
                    attempts.append(pulled.num_attempts)

        with receivers[0].pull(deadline=Deadline(30), granted=other_pulls) as pulled:
            assert pulled.received_bytes >= sum(map(len, trained_now.values()))
            attempts.append(pulled.num_attempts)
        assert attempts == [1, 1]
    for buffer in buffers:
        buffer.close()


# --- POST /notify_version, on each RaaS ---


def test_each_call_carries_model_id_version_and_sender_endpoint(start: Start, trained: Trained, tmp_path: Path) -> None:
    """The body as the document spells it, to a rollout service. Red where a run has to be named."""
    config = ReceiverAgentConfig("127.0.0.1", 30000, [("127.0.0.1", httpx.URL(trained.ranks.endpoint).port or 0)])
    raas = RaaS(start, "raas-2", tmp_path, senders=config.rollout_config().senders)
    truth = trained.step()
    body = {"model_id": "default", "version": trained.version, "sender_endpoint": trained.ranks.endpoint}
    assert httpx.post(f"{raas.url}/notify_version", json=body, timeout=10).status_code == 200
    wait_until(lambda: raas.ask("status", "default")[0] == f"{RUN}/{trained.version}", "it is served")
    assert raas.serving() == (f"{RUN}/{trained.version}", truth)
    raas.child.kill()


# --- Multi-model training; Multi-RaaS; Eval steps ---


def test_two_models_pass_the_barrier_together_and_every_raas_follows(
    start: Start, trained: Trained, tmp_path: Path
) -> None:
    """The verifier's trainer is later: nobody loads before; then RaaSPool.notify_version returns, a RaaS that joins
    catches up before it takes part, and one that was killed is told of as failed.

    Red without the set (one model is served before the other), and where a killed instance counts as served.
    """
    verifier = Ranks(start, "verifier")
    dataflow = Dataflow(start, models=["default", "verifier"], sets=[["default", "verifier"]])
    both = ("default", "verifier")
    raas = RaaS(start, "raas-3", tmp_path, both, controller=dataflow.url)
    dataflow.ask("catchup", "raas-3")
    truths = {"default": trained.step()}
    number = trained.version
    truths["verifier"] = verifier.step(number)
    url = f"{dataflow.url}/notify_version"
    first = {"model_id": "default", "version": number, "sender_endpoint": trained.ranks.endpoint}
    assert httpx.post(url, json=first, timeout=10).json()["train_model_version"] == number
    with contextlib.closing(ControllerClient(dataflow.url)) as client:
        wait_until(lambda: client.status().barriers, "the set waits for the verifier")
        assert client.status().barriers[0].waits_for == ("verifier",)
    assert raas.ask("status", "default")[0] is None, "nobody loads before both have published"
    assert dataflow.ask("notify", "verifier", number, verifier.endpoint) == {"raas-3": TransferStatus.SUCCESS}
    for model in both:
        assert raas.serving(model) == (f"{model}-run/{number}", truths[model])

    second = RaaS(start, "raas-4", tmp_path, both, controller=dataflow.url)
    caught_up = {model: f"{model}-run/{number}" for model in both}
    assert dataflow.ask("catchup", "raas-4") == caught_up
    for model in both:
        assert second.serving(model) == (f"{model}-run/{number}", truths[model])

    raas.child.kill()
    trained.step()
    verifier.step(trained.version)
    first["version"] = trained.version
    assert httpx.post(url, json=first, timeout=10).status_code == 200
    told = dataflow.ask("notify", "verifier", trained.version, verifier.endpoint)
    assert told == {"raas-3": TransferStatus.FAILURE, "raas-4": TransferStatus.SUCCESS}
    for each in (second, dataflow, *verifier.ranks):
        each.child.kill()


def test_an_evaluation_step_waits_for_its_result(start: Start, trained: Trained, tmp_path: Path) -> None:
    """notify_version(sync, eval): barrier, load and evaluation, then the result. Red where it returns before."""
    dataflow = Dataflow(start)
    raas = RaaS(start, "raas-5", tmp_path, controller=dataflow.url)
    dataflow.ask("catchup", "raas-5")
    trained.ranks.ask("connect", dataflow.url)
    trained.step()
    for rank in trained.ranks.ranks:
        rank.tell("notify_eval", trained.version)
    with contextlib.closing(ControllerClient(dataflow.url)) as client:
        wait_until(lambda: client.rollout_service_state("default").waiting_for_validation, "it is validated")
        assert client.rollout_service_state("default").rollout_model_version == trained.version
        assert not trained.ranks.ranks[0].child.conn.poll(0.2), "it waits for the result"
        client.end_validate("default", {"reward": 0.5})
    assert [rank.answer() for rank in trained.ranks.ranks] == [{"reward": 0.5}, None]
    dataflow.child.kill()
    raas.child.kill()


# --- Project structure: the exported names, and what they refuse ---


def test_the_configurations_say_the_same_to_ours() -> None:
    engine = TransferEngineConfig(local_hostname="127.0.0.1", handshake_port=0)
    sender = SenderAgentConfig(trainer_global_rank=0, trainer_world_size=1, engine_configs=[engine], http_bind_port=0)
    with WeightManager(WeightManagerConfig(sender_config=sender, strategies=["full"], model_id="m")) as wm:
        assert (wm._config.host, wm._config.port, wm._config.delta_budget_bytes) == ("127.0.0.1", 0, 0)
        wm.offload(small_model().named_parameters(), 1, 0, 1)
        assert wm.wait_delta_ready() is None, "strategies without delta"
        with contextlib.closing(AgentClient(wm.endpoint)) as agent:
            able = agent.register(RegisterRequest(receiver_id="r"))
            assert (able["delta_ready"], able["modes"]) == (False, ["auto", "full"])
        with pytest.raises(ConfigError, match="default group says"):
            wm.offload(small_model().named_parameters(), 2, 1, 2)
    for wrong in (
        dataclasses.replace(sender, trainer_global_rank=1),
        dataclasses.replace(sender, trainer_world_size=2),
    ):
        with WeightManager(WeightManagerConfig(wrong)) as wm, pytest.raises(ConfigError, match="default group says"):
            wm.offload(small_model().named_parameters(), 1)
    both = WeightManager(WeightManagerConfig(sender, strategies=("full", "delta")), guard_s=0.5)
    assert (both.model_id, both._config.delta_budget_bytes, both._guard_s) == ("default", None, 0.5)
    assert TransferAgent.__name__ == "TransferAgent"
    receiver = ReceiverAgentConfig("h", 30000, [("t", 18861)], TransferEngineConfig("127.0.0.1", 9000))
    config = receiver.rollout_config(service_id="raas")
    assert (receiver.engine_url, config.senders) == ("sglang+http://h:30000", ("http://t:18861",))
    assert (config.host, config.port, config.service_id) == ("127.0.0.1", 9000, "raas")
    service = RolloutService({"m": EmbeddedEngine.of(ModuleWeightLoader(small_model()))}, config)
    service.close()
    block_server = TCPTransferEngine(engine).sender()
    block_server.start()
    assert block_server.port > 0
    block_server.close()
    assert (TransferStatus.SUCCESS, TransferStatus.FAILURE) == (0, 1)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: SenderAgentConfig(0, 1, []), "one engine_config"),
        (lambda: SenderAgentConfig(0, 1, [TransferEngineConfig()], num_engines_per_group=2), "not 1 and 2"),
        (lambda: ReceiverAgentConfig("h", 1, []), "at least one sender"),
        (lambda: ReceiverAgentConfig("h", 1, [("t", 1)], num_engines=3), "num_engines=1"),
        (lambda: WeightManagerConfig(SenderAgentConfig(0, 1, [TransferEngineConfig()]), ["delta"]), "in full"),
        (lambda: WeightManagerConfig(SenderAgentConfig(0, 1, [TransferEngineConfig()]), ["full", "lora"]), "lora"),
        (lambda: RaaSPool(WeightSyncController({}, MockMethod())), "has no pool"),
        (
            lambda: WeightManager(
                WeightManagerConfig(SenderAgentConfig(0, 1, [TransferEngineConfig("0.0.0.0")], http_bind_port=0))
            ),
            "token",
        ),
    ],
)
def test_what_ours_can_not_do_is_refused_before_anything_starts(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()
