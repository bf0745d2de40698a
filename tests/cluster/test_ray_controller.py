"""A controller from one YAML file as a Ray actor: training ranks that are actors take its orders, stock engines load.

A rank that dies is told to the driver and to the controller; the job is started anew, under the same controller.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.actors import OrderedTrainer, Rollout, Trainer, expected
from tests.multiproc.pull_kit import wait_until
from tests.standins.processes import free_port
from tests.unit.handles.sglang_kit import RoutedServers
from weightsync.clients.controller import ControllerClient
from weightsync.cluster.controller_actor import RayController, launch_controller
from weightsync.cluster.fleet import launch_fleet
from weightsync.cluster.launch import launch
from weightsync.cluster.manager import RayWeightSync
from weightsync.cluster.placement import Placement
from weightsync.errors import AuthError, ConfigError, StateError, TrainerRankError
from weightsync.types import Version

pytestmark = pytest.mark.timeout(600)

SMALL = {"CPU": 0.01}
SPREAD = Placement(rank_cpus=0.01, engine_cpus=0.01, spread="SPREAD")
CALL_S = 60.0
PUSH_S = 8.0
TAKEN_OVER_S = 15.0
"""In less than `PUSH_S` and the margin in which ranks may still report."""
SETTINGS: dict[str, Any] = {
    "sync_method": "push",
    "sync_mode": "batch-async",
    "staleness_threshold": 1,
    "transfer": {"transfer_timeout_s": PUSH_S, "join_timeout_s": 8.0, "pause_timeout_s": 2.0},
    "extract": {"dtype": "bfloat16"},
    "inference_service": {"model_tag": "actor"},
    "fleet": {"retries_s": [0.1] * 20, "prepare_timeout_s": 300.0},
}


def written(folder: Path, settings: dict[str, Any]) -> Path:
    path = folder / "sync.yaml"
    path.write_text(yaml.safe_dump({"weight_sync": settings}))
    return path


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("job"), SETTINGS)


@pytest.fixture(scope="module")
def controller(ray_cluster: Any, file: Path) -> Iterator[RayController]:
    with launch_controller(file, placement=SMALL) as found:
        yield found


class Jobs:
    """Two training ranks on two nodes, and an engine; started anew by `start`, under the same controller."""

    def __init__(self, controller: RayController, file: Path) -> None:
        self.controller = controller
        self.closing = contextlib.ExitStack()
        self._file = file
        self.sync: RayWeightSync

    def start(self) -> None:
        self.closing.close()
        self.sync = self.closing.enter_context(
            launch(
                OrderedTrainer, Rollout, num_ranks=2, num_engines=1, config=self._file, controller=self.controller,
                placement=SPREAD,
            )
        )  # fmt: skip
        self.sync.initialize()

    def step(self) -> Any:
        """One training step, which pushes where the controller orders that; what all ranks pushed."""
        first, second = self.sync.run("step", timeout_s=CALL_S)
        assert first == second
        return first

    def check_serves(self, number: int) -> None:
        """The engine does, with the bytes that were trained, and the controller says so."""
        live, version, _ = self.sync.engines["engine-0"].ask("fingerprint", timeout_s=CALL_S)
        assert (live, version) == (expected(number), number)
        wait_until(lambda: self.controller.rollout_service_state("actor").rollout_model_version == number, "it says so")


@pytest.fixture(scope="module")
def jobs(controller: RayController, file: Path) -> Iterator[Jobs]:
    found = Jobs(controller, file)
    with contextlib.closing(found.closing):
        found.start()
        yield found


def test_ranks_on_two_nodes_push_when_the_controller_says_so(jobs: Jobs) -> None:
    assert len({rank.ready(timeout_s=CALL_S).node_id for rank in jobs.sync.ranks}) == 2
    for number in (1, 2, 3):
        assert jobs.step() == number
        jobs.check_serves(number)
    with pytest.raises(StateError, match="pushes in its own step"):
        jobs.sync.sync_weights(4)
    assert jobs.step() == 4, "nothing was broken by that"
    assert jobs.controller.check_rollout_service_status("actor") == "continue"


@pytest.mark.parametrize("rank", [1, 0])
def test_a_rank_is_killed_with_an_order_in_hand_and_the_job_is_started_anew(jobs: Jobs, rank: int) -> None:
    """Rank 0 says of rank 1 how the push ended. Of rank 0 nobody says anything, and whoever starts anew does not wait
    for that. Seen red: with orders that outlive their run."""
    state = jobs.controller.rollout_service_state("actor")
    jobs.sync.run("signal_in_extraction", rank, 3, signal.SIGKILL, timeout_s=CALL_S)
    with pytest.raises(TrainerRankError, match=f"training rank {rank} is gone") as caught:
        jobs.step()
    assert caught.value.rank == rank
    jobs.check_serves(state.rollout_model_version)
    with pytest.raises(TrainerRankError, match="restart the job"):
        jobs.step()
    if rank == 1:
        wait_until(lambda: jobs.controller.rollout_service_state("actor").last_error, "the controller is told", 90.0)
        assert "TrainerRankError" in str(jobs.controller.rollout_service_state("actor").last_error)
    jobs.start()
    began_s = time.monotonic()
    assert jobs.step() == 1
    assert time.monotonic() - began_s < TAKEN_OVER_S
    jobs.check_serves(1)


# --- engines that load what they are told of ---


@pytest.mark.parametrize("method", ["disk", "network"])
def test_a_controller_on_ray_has_the_method_that_its_file_names(ray_cluster: Any, tmp_path: Path, method: str) -> None:
    with contextlib.ExitStack() as stack:
        servers = RoutedServers(tmp_path, stack)
        path = written(tmp_path, {"sync_method": method, "sync_mode": "sync", **servers.settings})
        controller = stack.enter_context(launch_controller(path, placement=SMALL))
        for number in (1, 2):
            version = Version(run_id="r", number=number)
            servers.publish(version)
            state = controller.train_worker_notify_weight_update("w", "actor", "r", number, wait_s=CALL_S)
            assert (state.rollout_model_version, state.last_error) == (number, None)
            servers.check_serve(version)
        stranger = stack.enter_context(contextlib.closing(ControllerClient(controller.url)))
        with pytest.raises(AuthError):
            stranger.status()


def test_the_keys_of_the_fleet_count_there(ray_cluster: Any) -> None:
    """`models`, `port`, `retries_s`, `after_failure`: seen from outside, of a method that is told of no agent."""
    port = free_port()
    config = {
        "sync_method": "pull", "sync_mode": "sync",
        "fleet": {"models": ["a", "b"], "port": port, "retries_s": [0.01, 0.01], "after_failure": "keep"},
    }  # fmt: skip
    with launch_controller(config, placement=SMALL) as controller:
        assert controller.url.endswith(f":{port}")
        assert sorted(controller.status().models) == ["a", "b"]
        controller.train_worker_notify_weight_update("w", "b", "r", 1)
        wait_until(lambda: controller.rollout_service_state("b").overdue, "it gives up after two retries")
        syncs = [each for each in controller.status().syncs if each.model_tag == "b"]
        assert len(syncs) == 3
        assert not controller.rollout_service_state("a").overdue


def test_what_can_not_be_is_told_before_anything_starts(ray_cluster: Any, file: Path) -> None:
    import ray

    free = ray.available_resources()["CPU"]
    wrong: list[tuple[Callable[[], contextlib.AbstractContextManager[Any]], str]] = [
        (lambda: launch_controller({"fleet": {"host": "0.0.0.0"}}), "fleet.host"),
        (lambda: launch_controller({"sync_method": "tinker"}), "set_tinker_service_holder"),
        (lambda: launch_controller({"sync_method": "weaver"}), "set_weaver_service_holder"),
        (lambda: launch_controller({"sync_method": "disk"}), "sync_weight_path"),
        (lambda: launch_controller(file, options={"max_restarts": 1}), "set fleet.port"),
        (lambda: launch_fleet(1, Rollout, {"sync_method": "mock"}), "launch_controller"),  # type: ignore[arg-type]
        (lambda: launch(Trainer, Rollout, num_ranks=1, num_engines=1, config={"sync_method": "mock"}), "launch_fleet"),
    ]
    for begin, words in wrong:
        with pytest.raises(ConfigError, match=words), begin():
            pytest.fail("it can't be")
    wait_until(lambda: ray.available_resources()["CPU"] >= free, "nothing was taken, or it is given back")
