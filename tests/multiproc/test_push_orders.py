"""Pushes that a controller orders: two training ranks, an engine behind HTTP, a controller, each a process of its own.

What may die is killed: the controller, and a rank.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import weightsync
from tests.multiproc.pull_kit import wait_until
from tests.multiproc.spine import TOKEN, build, shard, step
from tests.multiproc.test_verbs import engine_main, serves
from tests.standins.processes import Child, children, free_port, in_gloo_world, run_ranks
from weightsync.clients.controller import ControllerClient
from weightsync.control.build import build_controller
from weightsync.engine.embedded import EmbeddedEngine
from weightsync.errors import TrainerRankError, WeightSyncError
from weightsync.load.module import ModuleWeightLoader

PUSH_S = 6.0


def controller_main(config: dict[str, Any], conn: Any) -> None:
    with build_controller(config, token=TOKEN) as built:
        conn.send(built.url)
        conn.recv()


def config(port: int = 0, **options: Any) -> dict[str, Any]:
    return {
        "sync_method": "push",
        "transfer": {"transfer_timeout_s": PUSH_S},
        "fleet": {"port": port, "models": ["actor"], "retries_s": [0.1] * 50, "prepare_timeout_s": 60.0},
        **options,
    }


def rank_main(rank: int, world_size: int, engine: str, controller: str, conn: Any) -> None:
    """Steps when it is told to, and says what the step gave."""
    torch.set_num_threads(1)
    model = shard(build(5), "shard0", world_size)
    url = controller if rank == 0 else None  # rank 0 alone reads it
    settings = {"transfer": {"transfer_timeout_s": PUSH_S, "join_timeout_s": 5.0}, "sync_mode": "batch-async"}
    with weightsync.push(model, engine, token=TOKEN, model_id="actor", controller=url, config=settings) as push:
        conn.send("ready")
        while (order := conn.recv()) is not None:
            step(model)
            try:
                report = push.step()
                conn.send(None if report is None else report.version.number)
            except WeightSyncError as error:
                conn.send(type(error).__name__)
            if order == "last":
                break
    os._exit(0)


class Job:
    def __init__(self, start: Callable[..., Child], controller: str) -> None:
        self._start, self._controller = start, controller
        self.engine = start(engine_main, 0, talk=True, name="engine")
        self._url = self.engine.recv()
        self.start_ranks()

    def start_ranks(self) -> None:
        args, port = (self._url, self._controller), free_port()
        self.ranks = [
            self._start(in_gloo_world, rank, 2, port, rank_main, args, talk=True, name=f"rank{rank}")
            for rank in range(2)
        ]
        for each in self.ranks:
            assert each.recv() == "ready"

    def step(self) -> Any:
        """What both ranks said."""
        for each in self.ranks:
            each.conn.send("step")
        first, second = (each.recv() for each in self.ranks)
        assert first == second
        return first


@pytest.fixture
def start() -> Iterator[Callable[..., Child]]:
    with children() as started:
        yield started


def test_the_controller_says_when_and_the_ranks_where(start: Callable[..., Child]) -> None:
    """It is killed between two steps: the trainer trains on, and pushes again when it is back."""
    port = free_port()
    controller = start(controller_main, config(port), talk=True, name="controller")
    url = controller.recv()
    job, client = Job(start, url), ControllerClient(url, token=TOKEN)
    for number in (1, 2):
        assert job.step() == number
        assert client.sync_weight_to_rollout_service("actor", wait_s=10.0)
        assert client.rollout_service_state("actor").rollout_model_version == number
        assert serves(job.engine, number)
    os.kill(controller.pid, signal.SIGKILL)
    assert job.step() is None
    assert job.step() is None
    assert serves(job.engine, 2)
    assert start(controller_main, config(port), talk=True, name="controller again").recv() == url
    assert job.step() == 5
    assert serves(job.engine, 5)
    assert client.sync_weight_to_rollout_service("actor", wait_s=10.0)
    client.close()


def test_steps_that_no_order_was_given_for_push_nothing(start: Callable[..., Child]) -> None:
    """A batch starts with each step, and rollout may lag by two: the third step is pushed."""
    settings = config(sync_mode="batch-async", staleness_threshold=3)
    url = start(controller_main, settings, talk=True, name="controller").recv()
    job, client = Job(start, url), ControllerClient(url, token=TOKEN)
    pushed = [job.step() for _ in range(6)]
    assert None in pushed
    newest = max(number for number in pushed if number is not None)
    assert serves(job.engine, newest)
    assert client.rollout_service_state("actor").rollout_model_version == newest
    client.close()


def test_the_end_of_the_block_brings_the_last_version(start: Callable[..., Child]) -> None:
    """Seen red: a run whose last step was not due ended with engines of an older one."""
    settings = config(sync_mode="batch-async", staleness_threshold=3)
    url = start(controller_main, settings, talk=True, name="controller").recv()
    job, client = Job(start, url), ControllerClient(url, token=TOKEN)
    last = next(number for number in range(1, 9) if job.step() is None)
    for each in job.ranks:
        each.conn.send(None)
    for each in job.ranks:
        each.process.join(30)
        assert each.process.exitcode == 0
    assert serves(job.engine, last)
    assert client.rollout_service_state("actor").rollout_model_version == last
    client.close()


def test_a_rank_that_is_killed_fails_the_sync_and_the_other_says_who(start: Callable[..., Child]) -> None:
    """Then the job is started anew. Seen red: with orders that outlive their run."""
    url = start(controller_main, config(), talk=True, name="controller").recv()
    job, client = Job(start, url), ControllerClient(url, token=TOKEN)
    assert job.step() == 1
    os.kill(job.ranks[1].pid, signal.SIGKILL)
    job.ranks[0].conn.send("last")
    assert job.ranks[0].recv(90.0) == TrainerRankError.__name__

    def failed() -> bool:
        state = client.rollout_service_state("actor")
        return state.num_failed > 0 and state.last_error is not None

    wait_until(failed, "the controller knows")
    assert "TrainerRankError" in str(client.rollout_service_state("actor").last_error)
    assert serves(job.engine, 1)
    for each in job.ranks:
        each.kill()
    job.start_ranks()
    for number in (1, 2):
        assert job.step() == number, "a job that is started anew is ordered at once, though nobody took the last order"
        assert serves(job.engine, number)
    assert client.sync_weight_to_rollout_service("actor", wait_s=10.0)
    client.close()


def alone_main(rank: int, world_size: int, engine: str, controller: str) -> int | None:
    torch.distributed.barrier()  # all are connected: gloo ends a rank whose peer has left before
    if rank > 0:
        return None
    settings = {"transfer": {"transfer_timeout_s": PUSH_S, "join_timeout_s": 5.0}}
    with weightsync.push(
        build(5), engine, token=TOKEN, model_id="actor", controller=controller, alone=True, config=settings
    ) as push:
        report = push.step()
    return None if report is None else report.version.number


def test_a_rank_that_pushes_alone_waits_for_no_other(start: Callable[..., Child]) -> None:
    """As TRL and SkyRL do. Seen red: whoever asks the controller made a group of all ranks."""
    url = start(controller_main, config(), talk=True, name="controller").recv()
    engine = start(engine_main, 0, talk=True, name="engine").recv()
    assert run_ranks(alone_main, 2, engine, url) == [1, None]


def refused_main(rank: int, world_size: int, engine: str, controller: str, token: str, model_id: str) -> str:
    model = shard(build(5), "shard0", world_size)
    os.environ["WEIGHTSYNC_TOKEN"] = token
    try:
        weightsync.push(model, engine, model_id=model_id, controller=controller)
    except WeightSyncError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def same_ids_main(rank: int, world_size: int) -> tuple[str, float]:
    engines = [EmbeddedEngine.of(ModuleWeightLoader(build(99))) for _ in range(2)]
    begun_s = time.monotonic()
    with pytest.raises(WeightSyncError) as raised:
        weightsync.push(shard(build(5), "shard0", world_size), engines)
    return f"{type(raised.value).__name__}: {raised.value}", time.monotonic() - begun_s


def test_what_rank_0_alone_can_know_of_the_engines_fails_every_rank_at_once() -> None:
    """Seen red: the others waited 305 s for a rank that had raised."""
    for said, seconds in run_ranks(same_ids_main, 2):
        assert said.startswith("ConfigError: engine ids are not unique")
        assert seconds < 30.0


@pytest.mark.parametrize(
    ("method", "model_id", "says"),
    [("push", "critic", "no model 'critic'"), ("mock", "actor", "set sync_method to 'push'")],
)
def test_a_controller_that_orders_no_such_push_fails_every_rank_on_entry(
    start: Callable[..., Child], method: str, model_id: str, says: str
) -> None:
    fleet = {"port": 0, "models": ["actor"]}
    url = start(controller_main, {"sync_method": method, "fleet": fleet}, talk=True, name="controller").recv()
    engine = start(engine_main, 0, talk=True, name="engine").recv()
    for said in run_ranks(refused_main, 2, engine, url, TOKEN, model_id):
        assert said.startswith("ConfigError")
        assert says in said
