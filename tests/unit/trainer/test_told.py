"""Told: what the trainer's log says of who can't be told, or does not serve what was published."""

from __future__ import annotations

import types

import pytest

from tests.standins.threads import logged_here
from tests.unit.host.service_kit import wait_until
from weightsync.clients.controller import ControllerClient
from weightsync.clients.host import RolloutClient
from weightsync.errors import BusyError, EngineError, EngineUnreachableError, NotRegisteredError
from weightsync.trainer import told as told_module
from weightsync.trainer.notifier import Notifier
from weightsync.trainer.told import Told
from weightsync.trainer.told_peers import ControllerPeer, HostPeer
from weightsync.types import Deadline, Version
from weightsync.types.control import ControllerStatus, InstanceStatus, RolloutServiceState
from weightsync.types.service import ModelStatus, NotifyRequest, ServiceStatus


def test_who_can_be_told_again_is_said_to_be(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Seen red: no word in the log said that what it had warned of was over."""
    failures = iter([EngineUnreachableError("nobody there"), EngineUnreachableError("nobody there"), None])

    def tells(*_: object) -> None:
        if (error := next(failures, None)) is not None:
            raise error

    monkeypatch.setattr(told_module, "_RETRY_S", 0.01)
    url = "http://127.0.0.91:9"  # of this test alone: another one's notifier may still write
    notifier = Notifier([url], model_id="m", token=None, verify=True)
    (its,) = notifier._hosts
    monkeypatch.setattr(its._address, "found", types.SimpleNamespace(tell=tells, troubled=lambda: None))
    monkeypatch.setattr(its, "_look", lambda: None)
    with caplog.at_level("INFO", logger="weightsync.trainer.told"):
        notifier.start(["http://agent"])
        notifier.announce(Version(run_id="r", number=1))
        again = f"{url} can be told of new versions again: it was told of r/1"
        wait_until(lambda: again in caplog.text, "it is told, and that is said")
    notifier.close()
    assert caplog.text.count(f"{url} can't be told") == 1


def test_a_failure_that_comes_back_is_said_again_where_versions_come_faster_than_it_looks(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Seen red: it asked whether what it had told of just now was served, which it never was; so nothing was over."""
    now_s, told_at = 0.0, dict[int, float]()
    monkeypatch.setattr(told_module, "time", types.SimpleNamespace(monotonic=lambda: now_s))
    told = Told("http://127.0.0.1:9", model_id="m", token=None, verify=True)
    told._endpoints = ("http://127.0.0.1:8",)
    client = RolloutClient(told.url)
    told._address.found = HostPeer(client, "m", failed=told._log_failures)

    class Trainer:
        """A version each six seconds, and an end; in place of the condition that the thread waits on."""

        def __enter__(self) -> None: ...

        def __exit__(self, *_: object) -> None: ...

        def wait_for(self, _: object, timeout: float | None) -> None:
            nonlocal now_s
            now_s += 6.0
            number = 1 if told._newest is None else told._newest.number + 1
            told._newest, told._closed = Version(run_id="r", number=number), number > 20

    def status(*_: object, **__: object) -> ServiceStatus:
        """A host that serves each version a second later; its engine is away twice."""
        errors = {"e": "EngineUnreachableError: nobody there"} if 20 <= now_s < 40 or 70 <= now_s < 90 else {}
        served = max((number for number, at in told_at.items() if at + 1.0 <= now_s), default=None)
        model = ModelStatus(run_id="r", version=None if errors else served, errors=errors)
        return ServiceStatus(models={"m": model})

    def notify(notice: NotifyRequest, **_: object) -> ModelStatus:
        told_at[notice.version] = now_s
        return ModelStatus(run_id="r")

    monkeypatch.setattr(told, "_changed", Trainer())
    for name, stand_in in {"call": status, "notify_version": notify, "register_sender": lambda *_, **__: None}.items():
        monkeypatch.setattr(client, name, stand_in)
    told._run()
    assert [each.getMessage().partition(": ")[2] for each in logged_here(caplog)] == [
        "what was published is not served there: e: EngineUnreachableError: nobody there"
    ] * 2


@pytest.mark.parametrize(
    ("error", "goes_on"),
    [
        (BusyError("full"), True),
        (NotRegisteredError("who is that"), True),
        (EngineError("503: away", status=503), True),
        (EngineError("500: a bug", status=500), False),
        (EngineUnreachableError("gone"), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_wait_goes_on_where_a_host_lives(error: Exception, goes_on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen red: one that made room for another request, or did not know these agents yet, never got the last one."""
    monkeypatch.setattr(told_module, "_PAUSE_S", 0.01)
    told = Told("http://127.0.0.1:9", model_id="m", token=None, verify=True)
    errors = iter([error])

    def serves(*_: object) -> bool:
        if (first := next(errors, None)) is not None:
            raise first
        return True

    monkeypatch.setattr(told, "_serves", serves)
    assert (told.wait_served(Version(run_id="r", number=1), Deadline(20.0)) is None) == goes_on


def test_a_trainer_is_told_of_instances_that_have_its_model_and_of_three_at_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Seen red: an instance of another model was said not to serve what it never has."""
    told = Told("http://127.0.0.1:9", model_id="actor", token=None, verify=True)
    told._newest = Version(run_id="r", number=3)

    def instance(name: str, model: str) -> InstanceStatus:
        why = "LoadError: it has no room"
        return InstanceStatus(
            instance_id=name, url="http://h", state="joining", models={model: None}, why=why, failed=True
        )

    instances = (instance("other", "critic"), *(instance(f"a{index}", "actor") for index in range(5)))
    status = ControllerStatus(models={"actor": RolloutServiceState(run_id="r")}, instances=instances)
    client = ControllerClient(told.url)
    told._address.found = ControllerPeer(client, "actor")
    monkeypatch.setattr(client, "status", lambda **_: status)
    assert told._because() == f": {'; '.join(f'a{index}: LoadError: it has no room' for index in range(3))}; and 2 more"
