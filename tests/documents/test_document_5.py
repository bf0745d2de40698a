"""Document 5, "Weight Synchronization": its calls, states and configurations as they stand there.

What is typed here from the document is marked with its section; of the configurations only paths and addresses are of
this machine. Its names come from `adapters.compat.controller`. The servers are processes of their own.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import omegaconf
import pytest

from tests.multiproc.pull_kit import Actor, _act, wait_until
from tests.standins.processes import Child, children
from tests.standins.sglang_server import SGLangRouterServer, SGLangServer
from tests.standins.tinker_server import TinkerServer
from tests.unit.handles.sglang_kit import weights, write_checkpoint
from weightsync.adapters.compat.controller import ModelTag, RolloutServiceState, WeightSyncController
from weightsync.clients.controller import ControllerClient
from weightsync.control.methods.folder import VersionFolder
from weightsync.control.methods.hosted import ServedWeights
from weightsync.control.methods.tinker import TinkerHolder
from weightsync.control.server import ControllerServer
from weightsync.errors import InvalidRequestError
from weightsync.handles.fanout import in_thread
from weightsync.types import Version
from weightsync.types.control import UNNAMED

LONG_S = 30.0
Start = Callable[..., Child]


@pytest.fixture
def start() -> Iterator[Start]:
    with children() as starter:
        yield starter


class Module:
    """A dataloader, or a trajectory pool: what the controller locks."""

    def __init__(self) -> None:
        self.locked: set[ModelTag] = set()

    def lock(self, model_tag: ModelTag) -> None:
        self.locked.add(model_tag)

    def unlock(self, model_tag: ModelTag) -> None:
        self.locked.discard(model_tag)


class NexRLController:
    """The document's "Integration Example", as it stands."""

    def __init__(self, config: omegaconf.DictConfig, holder: Any = None) -> None:
        self.dataloader, self.trajectory_pool = Module(), Module()
        self.tinker_service_holder = self.weaver_service_holder = holder
        # In NexRLController.__init__
        self.weight_sync_controller = WeightSyncController(config.weight_sync_controller)

        # Set module references
        self.weight_sync_controller.set_module_references(
            dataloader=self.dataloader, trajectory_pool=self.trajectory_pool
        )

        # For Tinker backend
        if config.inference_service.backend == "tinker":
            self.weight_sync_controller.set_tinker_service_holder(self.tinker_service_holder)

        # For Weaver backend
        if config.inference_service.backend == "weaver":
            self.weight_sync_controller.set_weaver_service_holder(self.weaver_service_holder)


@pytest.fixture
def integrated() -> Iterator[Callable[..., NexRLController]]:
    made: list[NexRLController] = []

    def make(section: str, *, holder: Any = None, backend: str = "sglang") -> NexRLController:
        whole = omegaconf.OmegaConf.create(section)
        whole.inference_service = {"backend": backend}
        made.append(NexRLController(whole, holder))
        return made[-1]

    yield make
    for each in made:
        each.weight_sync_controller.close()


Make = Callable[..., NexRLController]

# --- Synchronization modes ---

MOCK = '\n  sync_method: "mock"\n'
SYNC = """
weight_sync_controller:
  sync_mode: "sync"
"""
FULLY_ASYNC = """
weight_sync_controller:
  sync_mode: "fully-async"
"""
BATCH_ASYNC = """
weight_sync_controller:
  sync_mode: "batch-async"
  staleness_threshold: 2  # Block if behind by 2+ versions
"""


@pytest.mark.parametrize(
    ("section", "blocks", "versions"),
    [
        (SYNC, ["block"] * 6, [1, 2, 3, 4, 5, 6]),
        (BATCH_ASYNC, ["continue", "block"] * 3, [0, 2, 2, 4, 4, 6]),
        (FULLY_ASYNC, ["continue"] * 6, None),
    ],
    ids=["sync", "batch-async", "fully-async"],
)
def test_who_blocks_in_each_mode_and_which_version_is_served(
    integrated: Make, section: str, blocks: list[str], versions: list[int] | None
) -> None:
    """A batch is ready, a step is trained, the worker tells: the document's three calls, without a run or a number."""
    made = integrated(section.rstrip() + MOCK)
    controller, pool = made.weight_sync_controller, made.trajectory_pool
    seen, served = [], []
    for number in range(1, 7):
        controller.trajectory_pool_notify_batch_ready("default")
        seen.append(controller.check_rollout_service_status("default"))
        due = seen[-1] == "block"
        assert (pool.locked == {"default"}) == due, "need_sync locks the trajectory pool"
        assert made.dataloader.locked == set()
        state = controller.rollout_service_state("default")
        assert (state.state, state.train_model_version) == ("need_sync" if due else state.state, number - 1)
        controller.train_worker_notify_weight_update("worker-0", "default")
        state = controller.rollout_service_state("default")
        assert state.train_model_version == number
        served.append(state.rollout_model_version)
        assert controller.check_rollout_service_status("default") == "continue"
    assert seen == blocks
    if versions is None:
        wait_until(lambda: controller.rollout_service_state("default").rollout_model_version == 6, "it follows")
    else:
        assert served == versions
    wait_until(lambda: pool.locked == set(), "it is unlocked")


def test_the_states_of_a_sync(integrated: Make) -> None:
    """running, need_sync, syncing, running, as `RolloutServiceState.state` says them; "block" in the two between."""
    made = integrated(SYNC.rstrip() + MOCK)
    controller = made.weight_sync_controller
    go, at_it = threading.Event(), threading.Event()
    method = controller.method
    real = method.sync_weights

    def held(model_tag: str, version: Version) -> int:
        at_it.set()
        assert go.wait(LONG_S)
        return real(model_tag, version)

    method.sync_weights = held  # type: ignore[method-assign]
    seen = [(controller.rollout_service_state("default").state, controller.check_rollout_service_status("default"))]
    controller.trajectory_pool_notify_batch_ready("default")
    seen.append((controller.rollout_service_state("default").state, controller.check_rollout_service_status("default")))
    told = in_thread(lambda: controller.train_worker_notify_weight_update("worker-0", "default"), name="tells")
    assert at_it.wait(LONG_S)
    seen.append((controller.rollout_service_state("default").state, controller.check_rollout_service_status("default")))
    assert not told.done(), "synchronous"
    go.set()
    told.result(LONG_S)
    seen.append((controller.rollout_service_state("default").state, controller.check_rollout_service_status("default")))
    assert seen == [("running", "continue"), ("need_sync", "block"), ("syncing", "block"), ("running", "continue")]


# --- RolloutServiceState; Configuration reference ---

REFERENCE = """
weight_sync_controller:
  type: "weight_sync_controller"

  # Synchronization mode
  sync_mode: "sync"  # "sync" | "fully-async" | "batch-async"

  # Staleness threshold (for batch-async mode)
  staleness_threshold: 2

  # Weight sync method
  sync_method: "disk"  # "network" | "disk" | "tinker" | "weaver" | "mock"

  # Weight path (for network/disk methods)
  sync_weight_path: "/path/to/weights"

  # Validation frequency (0 = disabled)
  validate_freq: 5

  # Inference service config (model info)
  inference_service:
    model_tag: "default"
    model: "model-name"
    weight_type: "full"
    backend: "sglang"
    base_url: "http://localhost:8000"
"""


def test_the_service_state_has_the_documents_fields_and_the_configurations_values(
    integrated: Make, tmp_path: Path
) -> None:
    """Red where a service field is lost on the way from the file."""

    @dataclasses.dataclass
    class Documents:
        # State tracking
        state: str = "running"
        rollout_model_version: int = 0
        train_model_version: int = 0

        # Service info
        model_name: str = ""
        weight_type: str = ""
        weight_path: str = ""
        backend: str = ""
        base_url: str = ""

    ours, names = RolloutServiceState(), [field.name for field in dataclasses.fields(Documents)]
    assert {name: getattr(ours, name) for name in names} == dataclasses.asdict(Documents())
    folder = str(tmp_path / "weights")
    made = integrated(REFERENCE.replace("/path/to/weights", folder))
    state = made.weight_sync_controller.rollout_service_state("default")
    assert {name: getattr(state, name) for name in names} == dataclasses.asdict(
        Documents(
            model_name="model-name", weight_type="full", weight_path=folder, backend="sglang",
            base_url="http://localhost:8000",
        )
    )  # fmt: skip
    policy = made.weight_sync_controller._models["default"].policy
    assert (policy.mode, policy.staleness_threshold, policy.validate_freq) == ("sync", 2, 5)


# --- Validation coordination ---

VALIDATE = """
weight_sync_controller:
  validate_freq: 5  # Run validation every 5 training steps
"""


def test_validation_every_five_steps(integrated: Make) -> None:
    """At version 5 locks are kept, on dataloader and trajectory pool; `end_validate` releases both; not at others.

    Red where a sync locks the dataloader, and where a validation leaves it free.
    """
    made = integrated(VALIDATE.rstrip() + MOCK)
    controller, locked = made.weight_sync_controller, (made.dataloader, made.trajectory_pool)
    for number in range(1, 11):
        controller.trajectory_pool_notify_batch_ready("default")
        assert [each.locked for each in locked] == [set(), {"default"}]
        controller.train_worker_notify_weight_update("worker-0", "default")
        waiting = controller.rollout_service_state("default").waiting_for_validation
        if number % 5:
            assert waiting is None
        else:
            assert waiting is not None
            assert waiting.version == number
            wait_until(lambda: made.dataloader.locked, "it is locked")
            assert [each.locked for each in locked] == [{"default"}] * 2
            assert controller.check_rollout_service_status("default") == "continue", "validation generates"
            controller.end_validate("default")
        wait_until(lambda: not any(each.locked for each in locked), "both are unlocked")
    assert controller.rollout_service_state("default").waiting_for_validation is None


# --- Weight sync methods ---


def sglang_main(checkpoint: str, num: int, conn: Any) -> None:
    """SGLang servers behind a router; they hold real bytes."""
    servers = [SGLangServer(Path(checkpoint)) for _ in range(num)]
    router = SGLangRouterServer([server.start() for server in servers])
    router.start()
    held = lambda: [{name: each.tobytes() for name, each in server.weights.items()} for server in servers]  # noqa: E731
    orders = {
        "router": lambda: router.url,
        "server": lambda: servers[0].url,
        "held": held,
        "versions": lambda: [(server.weight_version, server.paused) for server in servers],
        "lose": lambda: router.urls.append("http://127.0.0.1:9"),  # a worker that is gone
        "find": lambda: router.urls.pop(),
    }
    _act(conn, orders)


def trainer_main(root: str, conn: Any) -> None:
    """Publishes checkpoints into the weight path."""
    folder = VersionFolder(root)

    def publish(number: int) -> str:
        version = Version(run_id=UNNAMED, number=number)
        return str(folder.publish("default", version, lambda into: write_checkpoint(into, number)))

    _act(conn, {"publish": publish})


DISK = """
weight_sync_controller:
  sync_method: "disk"
  sync_weight_path: "/path/to/weights"
"""
NETWORK = """
weight_sync_controller:
  sync_method: "network"
  sync_weight_path: "/path/to/weights"
"""
SERVICE = """  inference_service:
    model_tag: "default"
    model: "model-name"
    weight_type: "full"
    backend: "sglang"
    base_url: "http://localhost:8000"
"""


@pytest.mark.parametrize(("section", "place", "num"), [(DISK, "router", 2), (NETWORK, "server", 1)])
def test_disk_and_network_move_real_bytes_into_sglang(
    integrated: Make, start: Start, tmp_path: Path, section: str, place: str, num: int
) -> None:
    """disk: the router is asked for its workers, and all of them load. `sync_weight_to_rollout_service` is True then,
    and False where one can't. Red where a worker is left out, and where an answer of 200 is taken for loaded."""
    servers = Actor(start, sglang_main, str(write_checkpoint(tmp_path / "start", 0)), num, name="sglang")
    trainer = Actor(start, trainer_main, str(tmp_path / "weights"), name="trainer")
    filled = (section + SERVICE).replace("/path/to/weights", str(tmp_path / "weights"))
    filled += "  fleet: {retries_s: []}\n"
    controller = integrated(filled.replace("http://localhost:8000", servers.ask(place))).weight_sync_controller
    for number in (1, 2):
        controller.trajectory_pool_notify_batch_ready("default")
        trainer.ask("publish", number)
        controller.train_worker_notify_weight_update("worker-0", "default")
        assert controller.rollout_service_state("default").rollout_model_version == number
        assert servers.ask("held") == [weights(number)] * num
        assert servers.ask("versions") == [(f"{UNNAMED}/{number}", None)] * num
    assert controller.sync_weight_to_rollout_service("default") is True
    if place == "server":
        return
    servers.ask("lose")
    trainer.ask("publish", 3)
    controller.train_worker_notify_weight_update("worker-0", "default")
    assert controller.sync_weight_to_rollout_service("default") is False
    servers.ask("find")
    assert controller.sync_weight_to_rollout_service("default") is True
    assert servers.ask("held") == [weights(3)] * num


TINKER = """
weight_sync_controller:
  sync_method: "tinker"
"""
WEAVER = """
weight_sync_controller:
  sync_method: "weaver"
"""


def tinker_main(conn: Any) -> None:
    server = TinkerServer()
    url = server.start()
    _act(conn, {"where": lambda: (url, server.api_key)})


def test_tinker_is_wired_by_its_holder(integrated: Make, start: Start) -> None:
    """With the SDK itself, against a service in another process: what is sampled is what was trained."""
    tinker = pytest.importorskip("tinker", reason="the tinker SDK is not installed")
    url, key = Actor(start, tinker_main, name="tinker").ask("where")
    client = tinker.ServiceClient(base_url=url, api_key=key)
    training = client.create_lora_training_client(base_model="tiny", rank=8).result(timeout=LONG_S)
    holder = TinkerHolder(training, client, tinker.RestClient(base_url=url, api_key=key))
    controller = integrated(TINKER, holder=holder, backend="tinker").weight_sync_controller
    for number in (1, 2):
        controller.trajectory_pool_notify_batch_ready("default")
        training.optim_step(tinker.types.AdamParams(learning_rate=1e-4)).result(timeout=LONG_S)
        controller.train_worker_notify_weight_update("worker-0", "default")
        assert controller.rollout_service_state("default").rollout_model_version == number
        assert holder.sampler is not None
        asked = holder.sampler.client.sample(
            prompt=tinker.types.ModelInput.from_ints([1, 2]), num_samples=1,
            sampling_params=tinker.types.SamplingParams(max_tokens=1),
        )  # fmt: skip
        assert int(asked.result(timeout=LONG_S).sequences[0].tokens[0]) == number


class Weaver:
    """A holder; the service has no public client."""

    def __init__(self) -> None:
        self.served = ServedWeights(run_id=None, version=None, path=None)

    def update_weights(self, model_tag: str, run_id: str, version: int, *, timeout_s: float) -> object:
        self.served = ServedWeights(run_id=run_id, version=version, path=f"weaver://{model_tag}/{version}")
        return None

    def served_weights(self, model_tag: str, *, timeout_s: float) -> ServedWeights:
        return self.served


def test_weaver_is_wired_by_its_holder(integrated: Make) -> None:
    holder = Weaver()
    controller = integrated(WEAVER, holder=holder, backend="weaver").weight_sync_controller
    controller.trajectory_pool_notify_batch_ready("default")
    controller.train_worker_notify_weight_update("worker-0", "default")
    assert holder.served.path == "weaver://default/1"
    assert controller.rollout_service_state("default").rollout_model_version == 1


@pytest.mark.parametrize("service", ["tinker", "weaver"])
def test_a_dry_run_of_the_integration_example(integrated: Make, service: str) -> None:
    """Whatever the backend is, "mock" moves nothing; the holder stays unused. Seen red: `set_tinker_service_holder`
    and `set_weaver_service_holder` raised.
    """
    section = SYNC.rstrip() + MOCK + f'  inference_service:\n    backend: "{service}"\n'
    controller = integrated(section, holder=object(), backend=service).weight_sync_controller
    controller.trajectory_pool_notify_batch_ready("default")
    controller.train_worker_notify_weight_update("worker-0", "default")
    assert controller.rollout_service_state("default").rollout_model_version == 1
    with pytest.raises(InvalidRequestError, match="stranger"):
        getattr(controller, f"set_{service}_service_holder")(object(), "stranger")


# --- check_rollout_service_status, called before each request, from another process ---


def inference_client_main(url: str, conn: Any) -> None:
    """The document's InferenceServiceClient: proceeds, or blocks and asks again."""
    client = ControllerClient(url)

    def request() -> tuple[list[str], int]:
        answers = [client.check_rollout_service_status("default")]
        while answers[-1] == "block":
            answers.append(client.check_rollout_service_status("default", wait_s=LONG_S))
        return answers, client.rollout_service_state("default").rollout_model_version

    _act(conn, {"request": request})


def test_an_inference_client_blocks_until_the_weights_are_served(integrated: Make, start: Start) -> None:
    """Red where the gate opens before the sync has ended: it would see version 0."""
    controller = integrated(SYNC.rstrip() + MOCK).weight_sync_controller
    server = ControllerServer(controller)
    client = Actor(start, inference_client_main, server.start(), name="inference")
    assert client.ask("request") == (["continue"], 0)
    controller.trajectory_pool_notify_batch_ready("default")
    client.tell("request")
    assert not client.child.conn.poll(0.3), "blocked"
    controller.train_worker_notify_weight_update("worker-0", "default")
    assert client.answer() == (["block", "continue"], 1)
    server.close()


def test_two_workers_of_one_version_count_once(integrated: Make) -> None:
    """`train_worker_notify_weight_update` of each worker; several workers name run and version to be counted once."""
    controller = integrated(SYNC.rstrip() + MOCK).weight_sync_controller
    for worker in ("worker-0", "worker-1"):
        controller.train_worker_notify_weight_update(worker, "default", "run", 1)
    assert controller.rollout_service_state("default").train_model_version == 1
