"""The method `tinker`: with the real SDK against a stand-in for the service, and its rules with a holder of ours."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any, NamedTuple

import pytest

from tests.standins.tinker_server import TinkerServer
from weightsync.control.controller import WeightSyncController
from weightsync.control.methods.hosted import ServedWeights
from weightsync.control.methods.tinker import TinkerHolder, TinkerMethod
from weightsync.errors import (
    AuthError,
    DeadlineExceededError,
    EngineError,
    InvalidRequestError,
    StateError,
    UnsupportedError,
    VersionError,
    WeightSyncError,
)
from weightsync.types import Version

LONG_S = 20.0


def v(number: int, run_id: str = "run") -> Version:
    return Version(run_id=run_id, number=number)


# --- with the real SDK ---


class Service:
    """The SDK's clients of a stand-in, the holder over them, and the method."""

    def __init__(self) -> None:
        self.tinker = pytest.importorskip("tinker", reason="the tinker SDK is not installed")
        self.server = TinkerServer()
        url, key = self.server.start(), self.server.api_key
        self.client = self.tinker.ServiceClient(base_url=url, api_key=key)
        self.training = self.client.create_lora_training_client(base_model="tiny", rank=8).result(timeout=LONG_S)
        self.rest = self.tinker.RestClient(base_url=url, api_key=key)
        self.holder = TinkerHolder(self.training, self.client, self.rest)
        self.method = TinkerMethod(self.holder, timeout_s=LONG_S, trainer_waits=True)

    def step(self) -> Any:
        """Submits one step of the optimizer; its future."""
        return self.training.optim_step(self.tinker.types.AdamParams(learning_rate=1e-4))

    def train(self, version: Version) -> None:
        """One step of the trainer, and its notification."""
        self.step()
        self.method.trained("default", version)

    def sampled(self) -> int:
        """Which weights a sample is made with now."""
        assert self.holder.sampler is not None
        kinds = self.tinker.types
        answer = self.holder.sampler.client.sample(
            prompt=kinds.ModelInput.from_ints([1, 2]), num_samples=1, sampling_params=kinds.SamplingParams(max_tokens=1)
        ).result(timeout=LONG_S)
        return int(answer.sequences[0].tokens[0])

    def close(self) -> None:
        self.server.release()
        self.client.close("success").result(timeout=LONG_S)
        self.rest.holder.close()  # its heartbeats would go on, and fail, until the process ends
        self.server.close()


@pytest.fixture
def service() -> Iterator[Service]:
    made = Service()
    yield made
    made.close()


def test_a_sync_changes_over_to_the_weights_of_that_version(service: Service) -> None:
    for number in (1, 2):
        service.train(v(number))
        assert service.method.sync_weights("default", v(number)) == number
        assert service.sampled() == number
        assert service.holder.sampler is not None
        assert service.holder.sampler.served.path == f"tinker://session:train:0/sampler_weights/run-v{number}"
    assert service.server.saves == ["run-v1", "run-v2"]


def test_what_is_served_is_what_was_trained_then_though_the_trainer_has_gone_on(service: Service) -> None:
    service.step().result(timeout=LONG_S)
    go = threading.Event()
    service.training.holder.get_loop().call_soon_threadsafe(go.wait, LONG_S)  # the SDK's loop has much to do
    threading.Timer(0.2, go.set).start()
    service.method.trained("default", v(1))
    service.step().result(timeout=LONG_S)  # the next step ends before the sync begins, and nobody has told of it
    assert service.server.weights == 2
    assert service.method.sync_weights("default", v(1)) == 1
    assert service.sampled() == 1


def test_the_newest_is_served_where_a_newer_one_is_there(service: Service) -> None:
    service.train(v(1))
    service.train(v(2))
    assert service.method.sync_weights("default", v(1)) == 2
    assert service.sampled() == 2


@pytest.mark.parametrize(
    ("step", "fault", "kind"),
    [
        ("save", "fail", EngineError),
        ("save", "refuse", AuthError),
        ("save", "elsewhere", EngineError),
        ("sampler", "refuse", AuthError),
        ("sampler", "elsewhere", VersionError),
        ("sample", "fail", EngineError),
        ("sample", "silent", EngineError),
    ],
)
def test_a_sync_that_fails_is_typed_and_the_old_client_stays(
    service: Service, step: Any, fault: Any, kind: type[WeightSyncError]
) -> None:
    service.train(v(1))
    service.method.sync_weights("default", v(1))
    service.server.arm(step, fault)
    service.train(v(2))
    with pytest.raises(kind) as caught:
        service.method.sync_weights("default", v(2))
    if step == "save" and fault == "refuse":
        return  # the SDK's own rule
    assert caught.value.version == "run/2"
    assert service.sampled() == 1
    assert service.method.sync_weights("default", v(2)) == 2
    assert service.sampled() == 2


def test_a_save_that_takes_too_long_is_waited_for_at_the_next_try_and_not_made_twice(service: Service) -> None:
    service.server.arm("save", "hang")
    hasty = TinkerMethod(service.holder, timeout_s=0.3)
    hasty.trained("default", v(1))
    with pytest.raises(DeadlineExceededError):
        hasty.sync_weights("default", v(1))
    assert service.holder.sampler is None
    service.server.release()
    hasty._timeout_s = LONG_S
    assert hasty.sync_weights("default", v(1)) == 1
    assert service.server.saves == ["run-v1"]


def test_under_a_controller(service: Service) -> None:
    controller = WeightSyncController({"sync_mode": "sync"}, service.method)
    for number in (1, 2, 3):
        service.step()
        controller.train_worker_notify_weight_update("worker", "default", "run", number, timeout_s=LONG_S)
        assert controller.rollout_service_state("default").rollout_model_version == number
        assert service.sampled() == number
    controller.close()


# --- its rules ---


class Saved(NamedTuple):
    path: str


class Holder:
    """Saves and samples in this process; what fails is put into `fails`."""

    def __init__(self) -> None:
        self.saves: list[str] = []
        self.fails: list[Exception] = []
        self.path = "tinker://m/{}"
        self.used: list[tuple[Any, ServedWeights]] = []

    def save_weights_for_sampler(self, name: str) -> Future[Any]:
        self.saves.append(name)
        future: Future[Any] = Future()
        if self.fails:
            future.set_exception(self.fails.pop())
        else:
            future.set_result(Saved(self.path.format(name)))
        return future

    def create_sampling_client(self, model_path: str) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(model_path)
        return future

    def served_path(self, client: Any, *, timeout_s: float) -> str:
        return str(client)

    def use(self, client: Any, served: ServedWeights) -> None:
        self.used.append((client, served))


def test_a_save_is_submitted_when_a_version_was_trained_and_once() -> None:
    holder = Holder()
    method = TinkerMethod(holder)
    method.trained("default", v(1))
    method.trained("default", v(1))
    assert holder.saves == ["run-v1"]
    method.sync_weights("default", v(1))
    method.sync_weights("default", v(1))
    assert holder.saves == ["run-v1"]
    method.trained("nobody", v(1))


def test_a_save_that_failed_is_not_made_of_a_later_step_unless_the_trainer_waits() -> None:
    holder = Holder()
    method = TinkerMethod(holder)
    holder.fails = [RuntimeError("lost")]
    method.trained("default", v(1))
    for _ in range(2):
        with pytest.raises(EngineError, match="lost"):
            method.sync_weights("default", v(1))
    assert holder.saves == ["run-v1"]
    with pytest.raises(StateError, match="gone on"):
        method.sync_weights("default", v(2))  # nobody told of it
    assert holder.used == []
    method.trained("default", v(2))  # that was too early: now
    assert method.sync_weights("default", v(2)) == 2
    method.trained("default", v(3))
    assert method.sync_weights("default", v(2)) == 3


def test_a_save_that_failed_is_submitted_again_where_the_trainer_waits() -> None:
    holder = Holder()
    method = TinkerMethod(holder, trainer_waits=True)
    holder.fails = [RuntimeError("lost")]
    method.trained("default", v(1))
    with pytest.raises(EngineError, match="lost"):
        method.sync_weights("default", v(1))
    assert method.sync_weights("default", v(1)) == 1
    assert holder.saves == ["run-v1", "run-v1"]


def test_a_timeout_of_the_service_itself_is_not_one_of_ours_to_wait_for() -> None:
    holder = Holder()
    method = TinkerMethod(holder, trainer_waits=True)
    holder.fails = [TimeoutError("the service gave up")]
    with pytest.raises(DeadlineExceededError):
        method.sync_weights("default", v(1))
    assert method.sync_weights("default", v(1)) == 1


def test_a_run_that_another_has_taken_over_from_is_not_served_again() -> None:
    holder = Holder()
    method = TinkerMethod(holder)
    method.trained("default", v(5, "old"))
    method.trained("default", v(1, "new"))
    with pytest.raises(VersionError, match="new/1"):
        method.sync_weights("default", v(5, "old"))
    assert holder.used == []
    assert method.sync_weights("default", v(1, "new")) == 1


def test_names_keep_runs_apart_and_are_plain() -> None:
    holder = Holder()
    method = TinkerMethod({"a": holder, "b": holder, "c": holder}, trainer_waits=True)
    for tag, run in (("a", "x/y"), ("b", "x:y"), ("c", "é" * 200)):
        method.sync_weights(tag, v(1, run))
    assert len(set(holder.saves)) == 3
    assert all(name.isascii() and "/" not in name and len(name) < 120 for name in holder.saves)


@pytest.mark.parametrize("path", ["", "/etc/passwd", "tinker://m/another", None, 5])
def test_a_path_that_is_not_of_this_save_is_not_sampled(path: Any) -> None:
    holder = Holder()
    future: Future[Any] = Future()
    future.set_result(Saved(path))
    holder.save_weights_for_sampler = lambda name: future  # type: ignore[method-assign]
    with pytest.raises(EngineError):
        TinkerMethod(holder, trainer_waits=True).sync_weights("default", v(1))
    assert holder.used == []


def test_a_model_without_a_holder_and_a_method_without_any() -> None:
    with pytest.raises(InvalidRequestError, match="default"):
        TinkerMethod(Holder()).sync_weights("verifier", v(1))
    method = TinkerMethod({}, trainer_waits=True)
    with pytest.raises(InvalidRequestError, match="set_tinker_service_holder"):
        method.sync_weights("default", v(1))
    method.hold("default", Holder())
    assert method.sync_weights("default", v(1)) == 1


def test_a_client_that_does_not_say_which_sampler_it_has_is_not_believed() -> None:
    class Other:
        def get_sampler_handle(self) -> str:
            return "e30="  # {}

    for client in (Other(), object()):
        with pytest.raises(UnsupportedError):
            TinkerHolder(None, None, None).served_path(client, timeout_s=1.0)


def test_nobody_is_evicted() -> None:
    assert TinkerMethod(Holder()).evict_failed("default") == ()
