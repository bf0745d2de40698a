"""Who samples by a holder, while a controller changes what is sampled and while the service dies: kill -9, and again.

The service is a stand-in in a process of its own; tinker's holder is over the real SDK.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.multiproc.pull_kit import wait_until
from tests.standins.processes import Child, children, free_port
from tests.standins.tinker_server import TinkerServer
from tests.standins.weaver_server import WeaverHolder, WeaverServer
from weightsync.control.build import build_controller
from weightsync.control.controller import WeightSyncController
from weightsync.control.methods.tinker import Sampler, TinkerHolder, TinkerMethod
from weightsync.control.methods.weaver import WeaverMethod
from weightsync.errors import ConfigError, StateError

LONG_S = 30.0
SYNC_S = 2.0
RETRIES_S = (0.2,) * 100


@pytest.fixture
def start() -> Iterator[Callable[..., Child]]:
    with children() as started:
        yield started


def serve_main(kind: type[TinkerServer] | type[WeaverServer], port: int, conn: Any) -> None:
    """A service, whose attributes are set as told: (name, value)."""
    server = kind(port=port)
    conn.send(server.start())
    while (order := conn.recv()) is not None:
        setattr(server, *order)
        conn.send("done")


def tell(service: Child, name: str, value: int) -> None:
    service.conn.send((name, value))
    assert service.recv() == "done"


# --- tinker ---


class Samples:
    """Samples all the time by a holder, and notes what it got: the version that the holder says, and the token."""

    def __init__(self, tinker: Any, holder: TinkerHolder) -> None:
        self._kinds = tinker.types
        self._holder = holder
        self.seen: list[tuple[int, int]] = []
        self._stop = threading.Event()
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def token(self, sampler: Sampler) -> int:
        answer = sampler.client.sample(
            prompt=self._kinds.ModelInput.from_ints([1, 2]), num_samples=1,
            sampling_params=self._kinds.SamplingParams(max_tokens=1),
        ).result(timeout=LONG_S)  # fmt: skip
        return int(answer.sequences[0].tokens[0])

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                if (sampler := self._holder.sampler) is not None:
                    assert sampler.served.version is not None
                    self.seen.append((sampler.served.version, self.token(sampler)))
        except Exception as error:
            self._failure = error

    def end(self) -> list[tuple[int, int]]:
        self._stop.set()
        self._thread.join(LONG_S)
        assert self._failure is None
        return self.seen


class TinkerJob:
    """The SDK's clients of a service, a holder, and a controller that has it."""

    def __init__(self, url: str, opened: contextlib.ExitStack) -> None:
        self.tinker = pytest.importorskip("tinker", reason="the tinker SDK is not installed")
        key = "tml-for-tests-only"
        service = self.tinker.ServiceClient(base_url=url, api_key=key)
        self.training = service.create_lora_training_client(base_model="tiny", rank=8).result(timeout=LONG_S)
        rest = self.tinker.RestClient(base_url=url, api_key=key)
        for client in (service, rest):
            opened.callback(client.holder.close)  # its heartbeats would go on, and fail, until the process ends
        self.holder = TinkerHolder(self.training, service, rest)
        config = {"sync_method": "tinker", "sync_mode": "sync", "fleet": {"port": 0, "retries_s": list(RETRIES_S)}}
        self.controller = opened.enter_context(build_controller(config)).controller
        self.controller.set_tinker_service_holder(self.holder, "default")

    def step(self, number: int) -> None:
        self.training.optim_step(self.tinker.types.AdamParams(learning_rate=1e-4)).result(timeout=LONG_S)
        self.controller.train_worker_notify_weight_update("w", "default", "run", number, timeout_s=LONG_S)


def test_a_client_and_its_version_belong_together_whenever_they_are_taken(start: Callable[..., Child]) -> None:
    """Seen red: with the version noted before the client is changed."""
    with contextlib.ExitStack() as opened:
        job = TinkerJob(start(serve_main, TinkerServer, 0, talk=True, name="tinker").recv(), opened)
        assert job.holder.sampler is None, "there is nothing to sample with before the first sync"
        samples = Samples(job.tinker, job.holder)
        taken = []
        for number in range(1, 6):
            job.step(number)
            assert job.controller.rollout_service_state("default").rollout_model_version == number
            assert job.holder.sampler is not None
            taken.append(job.holder.sampler)
            wait_until(lambda: samples.seen and samples.seen[-1][0] == number, "it was sampled")  # noqa: B023
        seen = samples.end()
        assert all(version == token for version, token in seen)
        assert [version for version, _ in seen] == sorted(version for version, _ in seen)
        assert [samples.token(sampler) for sampler in taken] == [1, 2, 3, 4, 5], "old clients stay usable"


# --- weaver ---


def test_a_service_that_is_killed_in_an_update_is_told_and_synced_when_it_is_back(start: Callable[..., Child]) -> None:
    """The first sync of version 2 hangs in the service, which dies of it; what comes back knows nothing."""
    port = free_port()
    service = start(serve_main, WeaverServer, port, talk=True, name="weaver")
    holder = WeaverHolder(service.recv())
    controller = WeightSyncController(
        {"sync_method": "weaver", "sync_mode": "sync"}, WeaverMethod(holder, timeout_s=LONG_S), retries_s=RETRIES_S
    )
    with contextlib.closing(holder), contextlib.closing(controller):
        tell(service, "trained", 1)
        controller.train_worker_notify_weight_update("w", "default", "run", 1, timeout_s=LONG_S)
        assert holder.sample() == 1
        tell(service, "num_hanging", 1)
        tell(service, "trained", 2)
        controller.train_worker_notify_weight_update("w", "default", "run", 2, timeout_s=0.1)
        assert holder.sample() == 1, "what is sampled changes with the update alone"
        os.kill(service.pid, signal.SIGKILL)

        def told() -> bool:
            error = controller.rollout_service_state("default").last_error
            return error is not None and error.startswith("EngineUnreachableError")

        wait_until(told, "the controller knows why")
        assert controller.check_rollout_service_status("default") == "block", "nothing serves what was trained"
        again = start(serve_main, WeaverServer, port, talk=True, name="weaver again")
        again.recv()
        assert controller.await_rollout_service("default", timeout_s=LONG_S) == "continue"
        assert controller.rollout_service_state("default").rollout_model_version == 2
        assert holder.served_weights("default", timeout_s=LONG_S).version == 2


# --- both ---


@pytest.mark.parametrize(("own", "other"), [("tinker", "weaver"), ("weaver", "tinker")])
def test_a_holder_is_taken_by_its_own_method_alone(own: str, other: str) -> None:
    with build_controller({"sync_method": own, "fleet": {"port": 0}}) as built:
        with pytest.raises(ConfigError, match="can't hold"):
            getattr(built.controller, f"set_{own}_service_holder")(object())
        with pytest.raises(StateError, match=f"{'TinkerMethod' if own == 'tinker' else 'WeaverMethod'}"):
            getattr(built.controller, f"set_{other}_service_holder")(object())


def test_a_service_of_tinkers_that_is_killed_leaves_the_old_client_and_is_synced_when_it_is_back(
    start: Callable[..., Child],
) -> None:
    port = free_port()
    service = start(serve_main, TinkerServer, port, talk=True, name="tinker")
    with contextlib.ExitStack() as opened:
        job = TinkerJob(service.recv(), opened)
        assert isinstance(job.controller.method, TinkerMethod)
        job.step(1)
        old = job.holder.sampler
        assert old is not None
        job.controller.method._timeout_s = SYNC_S
        os.kill(service.pid, signal.SIGKILL)
        job.controller.train_worker_notify_weight_update("w", "default", "run", 2, timeout_s=0.1)
        said = wait_until(lambda: job.controller.rollout_service_state("default").last_error, "it is told", 10.0)
        assert said.startswith(("DeadlineExceededError", "EngineUnreachableError")), said
        assert job.holder.sampler is old
        again = start(serve_main, TinkerServer, port, talk=True, name="tinker again")
        again.recv()
        tell(again, "weights", 2)
        assert job.controller.await_rollout_service("default", timeout_s=LONG_S) == "continue"
        assert job.holder.sampler is not None
        assert job.holder.sampler.served.version == 2
