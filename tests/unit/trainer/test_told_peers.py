"""HostPeer, ControllerPeer, Address: a controller that was started again is told of what it has forgotten."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping

import pytest

from tests.standins.processes import free_port
from tests.unit.host.service_kit import wait_until
from weightsync.clients.controller import ControllerClient
from weightsync.control.controller import WeightSyncController
from weightsync.control.methods.fleet import FleetMethod
from weightsync.control.pool import RolloutPool
from weightsync.control.server import ControllerServer
from weightsync.errors import ConfigError
from weightsync.trainer import told
from weightsync.trainer.notifier import Notifier
from weightsync.trainer.told import Told
from weightsync.trainer.told_peers import ControllerPeer
from weightsync.types import Version


class Controllers:
    """Controllers without engines, one after the other at the same address, and a notifier of model "m"."""

    def __init__(self) -> None:
        self._stack, self._port = contextlib.ExitStack(), free_port()
        self.told = Notifier([f"http://127.0.0.1:{self._port}"], model_id="m", token=None, verify=True)
        self.told.start(["http://127.0.0.1:1"])

    def start(self) -> WeightSyncController:
        self._stack.close()
        method = FleetMethod(RolloutPool(lease_s=0.3))
        made = WeightSyncController({}, method, model_tags=("m",), retries_s=(60.0,))
        server = ControllerServer(made, port=self._port)
        self._stack.callback(made.close)
        self._stack.callback(server.close)
        server.start()
        return made

    def close(self) -> None:
        self.told.close()
        self._stack.close()


@pytest.fixture
def controllers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Controllers]:
    monkeypatch.setattr(told, "_RETRY_S", 0.05)
    monkeypatch.setattr(told, "_LOOK_S", 0.05)
    with contextlib.closing(Controllers()) as made:
        yield made


@pytest.fixture
def tells(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers that a controller was told of."""
    numbers, tell = list[int](), ControllerClient.notify_version

    def notify(self: ControllerClient, run_id: str, model_id: str, version: int, sender_endpoint: str) -> None:
        numbers.append(version)
        tell(self, run_id, model_id, version, sender_endpoint)

    monkeypatch.setattr(ControllerClient, "notify_version", notify)
    return numbers


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """One for each time that the notifier has asked why a version is not served."""
    found, look = list[None](), Told._look

    def counted(self: Told) -> None:
        look(self)
        found.append(None)

    monkeypatch.setattr(Told, "_look", counted)
    return found


def wait_looks(looks: list[None], num: int = 4) -> None:
    before = len(looks)
    wait_until(lambda: len(looks) >= before + num, "it is not served there, and asked why")


def test_a_controller_that_was_started_again_is_told_of_what_it_has_forgotten(
    controllers: Controllers, tells: list[int], looks: list[None]
) -> None:
    """Before another version comes. Seen red: told to one that died before it was served, it was told no more."""
    first = controllers.start()
    controllers.told.announce(Version(run_id="r", number=8))
    wait_looks(looks)
    assert first.rollout_service_state("m").train_model_version == 8
    assert tells == [8], "one that knows it is told once"
    for _ in range(2):
        again = controllers.start()
        wait_until(lambda state=again.rollout_service_state: state("m").train_model_version == 8, "it is told again")  # type: ignore[misc]


def test_a_controller_that_has_learnt_less_or_was_denied_it_is_told_again_once(
    controllers: Controllers, tells: list[int], looks: list[None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen red: at each look, as long as nothing newer came."""
    controllers.start()
    controllers.told.announce(Version(run_id="r", number=8))
    wait_looks(looks)
    seen = ControllerPeer.seen

    def less(self: ControllerPeer, **how: bool) -> tuple[Version | None, Mapping[str, str]]:
        found = seen(self, **how)
        self._knows = Version(run_id="r", number=7)
        return found

    monkeypatch.setattr(ControllerPeer, "seen", less)
    wait_until(lambda: tells == [8, 8], "it may have been started again")
    wait_looks(looks)
    assert tells == [8, 8]


def test_a_trainer_that_another_one_has_taken_over_from_does_not_take_a_new_controller(
    controllers: Controllers, tells: list[int], looks: list[None]
) -> None:
    """Which does not know who is over. Seen red: it was told again there, and the living one was refused."""
    controller = controllers.start()
    controllers.told.announce(Version(run_id="r", number=8))
    wait_looks(looks)
    controller.train_worker_notify_weight_update("w", "m", "s", 1, sender_endpoint="http://127.0.0.1:1", timeout_s=0.0)
    wait_looks(looks)
    controllers.start()
    wait_looks(looks)
    assert tells == [8]


@pytest.fixture
def asks(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """One for each time that the notifier has asked whether a refused version may be told."""
    found, ask = list[None](), ControllerPeer._may_be_taken

    def counted(self: ControllerPeer, refused: Version) -> bool:
        answer = ask(self, refused)
        found.append(None)
        return answer

    monkeypatch.setattr(ControllerPeer, "_may_be_taken", counted)
    return found


def test_a_version_that_was_refused_for_another_run_does_not_take_a_new_controller(
    controllers: Controllers, tells: list[int], asks: list[None]
) -> None:
    """Seen red: its retry took the controller that was started again, and the living trainer was refused for good."""
    _refused(controllers.start(), controllers, tells)
    wait_looks(asks)
    controllers.start()
    wait_looks(asks)
    assert tells == [8, 9]
    (why,) = (controllers.told.begin_wait(Version(run_id="r", number=9), 5.0)(20.0) or {}).values()
    assert "taken over by s" in why
    assert tells == [8, 9], "seen red: who waited for it told it again"
    controllers.told.announce(Version(run_id="r", number=10))
    wait_until(lambda: tells == [8, 9, 10], "a newer one is told")


def test_a_version_that_was_refused_for_a_run_that_is_given_up_is_told_again(
    controllers: Controllers, tells: list[int]
) -> None:
    controller = controllers.start()
    _refused(controller, controllers, tells)
    model = controller._models["m"]
    with model._changed:  # its retries have ended
        model.state = dataclasses.replace(model.state, overdue=True)
    wait_until(lambda: controller.rollout_service_state("m").run_id == "r", "nothing of the other was ever served")
    assert tells == [8, 9, 9]


def _refused(controller: WeightSyncController, controllers: Controllers, tells: list[int]) -> None:
    """A trainer that is told to be over, by the first word of another one."""
    controllers.told.announce(Version(run_id="r", number=8))
    wait_until(lambda: controller.rollout_service_state("m").train_model_version == 8, "it is told")
    assert tells == [8]
    controller.train_worker_notify_weight_update("w", "m", "s", 1, sender_endpoint="http://127.0.0.1:1", timeout_s=0.0)
    controllers.told.announce(Version(run_id="r", number=9))
    wait_until(lambda: "taken over by s" in (controllers.told._hosts[0].why_not or ""), "it is refused")


def test_an_engine_in_to_names_all_that_may_stand_there() -> None:
    """Seen red: a host alone, of a user who had a controller."""
    with pytest.raises(ConfigError, match=r"weightsync\.push.* that host, or the controller of its fleet"):
        Notifier(["vllm+http://127.0.0.1:9"], model_id="m", token=None, verify=True)
