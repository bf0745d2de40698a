"""LastVersion where nobody is in `to`: whoever pulls is waited for, by what this host's agent tells."""

from __future__ import annotations

from typing import Any

import pytest

from weightsync.trainer import publish_tracker
from weightsync.trainer.publish_tracker import PublishTracker
from weightsync.types import Version
from weightsync.types.agent_messages import Published, TransferBegun, TransferDone
from weightsync.verbs import last_version
from weightsync.verbs.last_version import LastVersion

VERSION = Version(run_id="run", number=1)


class Manager:
    """The part of a WeightManager that is asked, which its tracker answers."""

    def __init__(self) -> None:
        self.tracker = PublishTracker()
        self.wait_published = self.tracker.wait
        self.receivers_behind = self.tracker.behind


class Nobody:
    urls = ()


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> Manager:
    monkeypatch.setattr(last_version, "_FIRST_S", 0.0)
    made = Manager()
    made.tracker.hear(Published(version=VERSION))
    return made


def waited(manager: Any, *, timeout_s: float = 60.0) -> LastVersion:
    notifier: Any = Nobody()
    return LastVersion(manager, notifier, VERSION, timeout_s=timeout_s)


def test_it_ends_where_nobody_pulls(manager: Manager) -> None:
    assert waited(manager).outcome(0.001) == {}


def test_a_first_pull_that_is_under_way_is_waited_for(manager: Manager) -> None:
    """Seen red: the version was withdrawn in the middle of it, three seconds behind its proof, and all was well."""
    manager.tracker.hear(TransferBegun(version=VERSION, receiver="host"))
    last = waited(manager)
    assert [last.outcome(0.001) for _ in range(3)] == [None] * 3
    manager.tracker.hear(TransferDone(version=VERSION, receiver="host", ok=True))
    assert last.outcome(60.0) == {}


def test_one_that_fails_may_begin_once_more(manager: Manager) -> None:
    last = waited(manager)
    manager.tracker.hear(TransferBegun(version=VERSION, receiver="host"))
    assert last.outcome(0.001) is None
    manager.tracker.hear(TransferDone(version=VERSION, receiver="host", ok=False))
    assert last.outcome(0.001) is None
    manager.tracker.hear(TransferDone(version=VERSION, receiver="host", ok=True))
    assert last.outcome(60.0) == {}


def test_one_that_does_not_end_is_named(manager: Manager) -> None:
    manager.tracker.hear(TransferBegun(version=VERSION, receiver="host"))
    assert waited(manager, timeout_s=0.0).outcome(0.001) == {"host": "not fetched within 0 s"}


def test_one_that_has_failed_and_does_not_come_again_is_named(
    manager: Manager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen red: nobody had it, and all was well."""
    last = waited(manager)
    for who in ("host", "other"):
        manager.tracker.hear(TransferBegun(version=VERSION, receiver=who))
    assert last.outcome(0.001) is None
    manager.tracker.hear(TransferDone(version=VERSION, receiver="other", ok=True))
    monkeypatch.setattr(publish_tracker, "_AGAIN_S", 0.0)
    manager.tracker.hear(TransferDone(version=VERSION, receiver="host", ok=False))
    assert last.outcome(0.001) == {"host": "its first pull failed, and it has not come again"}


@pytest.mark.parametrize("names", [("h-00000001/m", "h-0000000a/m"), ("pull h/7/00000001", "pull h/9/0000000b")])
def test_one_that_was_started_again_in_its_first_pull_has_it(
    manager: Manager, monkeypatch: pytest.MonkeyPatch, names: tuple[str, str]
) -> None:
    """Under another name. Seen red: it was named."""
    last = waited(manager)
    manager.tracker.hear(TransferBegun(version=VERSION, receiver=names[0]))
    assert last.outcome(0.001) is None
    monkeypatch.setattr(publish_tracker, "_AGAIN_S", 0.0)
    manager.tracker.hear(TransferDone(version=VERSION, receiver=names[0], ok=False))
    manager.tracker.hear(TransferDone(version=VERSION, receiver=names[1], ok=True))
    assert last.outcome(0.001) == {}
