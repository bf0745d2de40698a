"""PullMethod over services that answer as they are told to: who was evicted takes part again."""

from __future__ import annotations

import threading
from typing import cast

import pytest

from tests.unit.control.fleet_instances import until
from weightsync.clients.host import RolloutClient
from weightsync.control.methods.pull import PullMethod
from weightsync.errors import EngineUnreachableError, NoEnginesError, SyncFailedError
from weightsync.types import Version
from weightsync.types.service import ModelStatus, NotifyRequest

LONG_S = 10.0


class Told:
    """A service that serves what it is told of, or can't be reached, or takes its time."""

    def __init__(self) -> None:
        self.is_well = True
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.notices: list[int] = []

    def notify_version(self, notice: NotifyRequest) -> ModelStatus:
        self.notices.append(notice.version)
        assert self.may_answer.wait(LONG_S)
        if not self.is_well:
            raise EngineUnreachableError("no answer")
        return ModelStatus(state="idle", run_id=notice.run_id, version=notice.version)


def v(number: int) -> Version:
    return Version(run_id="r", number=number)


def two() -> tuple[dict[str, Told], PullMethod]:
    services = {"a": Told(), "b": Told()}
    return services, PullMethod(cast("dict[str, RolloutClient]", services), {"m": "http://agent"}, timeout_s=LONG_S)


def fail(method: PullMethod, services: dict[str, Told], *names: str) -> None:
    """Version 1 fails at these, for all retries: they are evicted, and are well again later."""
    for name in names:
        services[name].is_well = False
    for _ in range(2):
        with pytest.raises(SyncFailedError):
            method.sync_weights("m", v(1))
    assert method.evict_failed("m") == list(names)


def test_where_everybody_was_evicted_all_take_part_in_the_next_version() -> None:
    """Seen red: NoEnginesError for each version of the rest of the run."""
    services, method = two()
    fail(method, services, "a", "b")
    with pytest.raises(NoEnginesError):
        method.sync_weights("m", v(1))
    until(lambda: not method._told, "nobody is told now")
    for each in services.values():
        each.is_well = True
    assert method.sync_weights("m", v(2)) == 2
    assert method.live("m") == ("a", "b")


def test_one_that_was_evicted_is_told_of_later_versions_and_takes_part_when_it_serves_one() -> None:
    """Seen red: it was told of none, and went on with its old weights."""
    services, method = two()
    fail(method, services, "b")
    assert method.sync_weights("m", v(1)) == 1, "nobody waits for it, nor fails by it"
    until(lambda: not method._told, "nobody is told now")
    services["b"].is_well = True
    before = len(services["b"].notices)
    assert method.sync_weights("m", v(2)) == 2
    until(lambda: method.live("m") == ("a", "b"), "it takes part again")
    assert services["b"].notices[before:] == [2]
    services["b"].is_well = False
    with pytest.raises(SyncFailedError):
        method.sync_weights("m", v(3))


def test_one_that_was_evicted_and_hangs_holds_up_nobody_and_is_told_once_at_a_time() -> None:
    """Seen red: without the note of who is told now each sync left one more thread behind."""
    services, method = two()
    fail(method, services, "b")
    services["b"].is_well = True
    services["b"].may_answer.clear()
    before = len(services["b"].notices)
    for number in (2, 3, 4):
        assert method.sync_weights("m", v(number)) == number
        until(lambda: services["b"].notices[before:] == [2], "it is told")
    assert method.live("m") == ("a",)
    services["b"].may_answer.set()
    until(lambda: method.live("m") == ("a", "b"), "it takes part again")
    assert services["b"].notices[before:] == [2, 4], "it takes part with what the others serve"
