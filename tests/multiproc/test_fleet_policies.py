"""Commit policies: a failure at every step of the protocol on one of three instances: an error, kill -9, SIGSTOP."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.multiproc.fleet_kit import (
    MODELS,
    Fleet,
    FleetService,
    Trainers,
    check_records,
    digest_at,
    read_records,
    step,
)
from tests.multiproc.pull_kit import wait_until
from tests.standins.processes import Child, children
from weightsync.types.transfer_messages import Transport

Start = Callable[..., Child]
VICTIM = "b"
STEPS = ("prepare", "prepared", "decide", "commit", "committed")
FAULTS = ("raise", "kill", "stop")


@pytest.fixture
def start() -> Iterator[Start]:
    with children() as starter:
        yield starter


class Injected:
    """A fault that fires once, when the controller comes to a step of the protocol with the victim."""

    def __init__(self) -> None:
        self.armed: tuple[str, str] | None = None
        self.fired: list[str] = []
        self.decided_s: list[float] = []
        self.victim: FleetService | None = None
        self._lock = threading.Lock()

    def __call__(self, at: str, instance_id: str) -> None:
        if at == "decide":
            self.decided_s.append(time.monotonic())
        with self._lock:
            if self.armed is None or self.armed[0] != at or instance_id not in (VICTIM, ""):
                return
            (_, what), self.armed = self.armed, None
            self.fired.append(f"{at} {what}")
        assert self.victim is not None
        if what == "raise":
            raise RuntimeError(f"injected at {at}")
        os.kill(self.victim.pid, signal.SIGKILL if what == "kill" else signal.SIGSTOP)


class Three:
    """Three services under a policy, and what brings the victim back."""

    def __init__(self, start: Start, folder: Path, policy: str) -> None:
        self.injected = Injected()
        self.fleet = Fleet(policy=policy, hook=self.injected)
        self.trainers = Trainers(start)
        self._start, self._folder = start, folder
        self.services = {name: self._service(name, 0) for name in ("a", VICTIM, "c")}
        self.all_live()

    def _service(self, name: str, incarnation: int) -> FleetService:
        url = self.fleet.server_url
        return FleetService(self._start, name, url, self._folder, incarnation=incarnation, transport=Transport.TCP)

    def all_live(self) -> None:
        urls = {name: service.ask("url") for name, service in self.services.items()}
        wait_until(
            lambda: {e.instance_id: e.url for e in self.fleet.client.status().instances if e.state == "live"} == urls,
            "all are live",
            20.0,
        )

    def live_digests(self, what: str = "") -> dict[str, dict[str, str]]:
        """Of the live weights of every instance in the pool, but a victim that was killed or stopped and can't say."""
        mute = {VICTIM} if what in ("kill", "stop") else set()
        live = [
            name for name, state in self.fleet.states().items() if state in ("live", "suspect") and name not in mute
        ]
        return {name: self.services[name].ask("digests") for name in live}

    def bring_back(self, what: str) -> None:
        victim = self.services[VICTIM]
        if what == "kill":
            victim.child.kill()
            self.services[VICTIM] = self._service(VICTIM, victim.incarnation + 1)
        elif what == "stop":
            os.kill(victim.pid, signal.SIGCONT)
        self.all_live()


@pytest.mark.timeout(300)
def test_all_commit_or_none_whatever_fails_where(start: Start, tmp_path: Path) -> None:
    """After each: every instance in the pool serves the same version, by digests of live weights."""
    three = Three(start, tmp_path, "all")
    fleet, injected = three.fleet, three.injected
    version, gates = 1, []
    decided: dict[int, float] = {}
    step(fleet, three.trainers, version)
    for at in STEPS:
        for what in FAULTS:
            version += 1
            num_decided = len(injected.decided_s)
            injected.victim, injected.armed = three.services[VICTIM], (at, what)
            gates += step(fleet, three.trainers, version)
            assert injected.fired[-1:] == [f"{at} {what}"]
            decided[version] = injected.decided_s[num_decided]
            found = three.live_digests(what)
            assert found  # where the machine stands still, one that nothing was done to may be out for a moment
            assert found == dict.fromkeys(found, dict.fromkeys(MODELS, digest_at(version))), (at, what)
            three.bring_back(what)
    assert three.live_digests() == dict.fromkeys(three.services, dict.fromkeys(MODELS, digest_at(version)))
    fleet.close()
    answers = read_records(tmp_path)
    check_records(answers, gates)
    first: dict[int, float] = {}
    for answer in answers:
        first.setdefault(answer.version, answer.began_s)
    for number, decided_s in decided.items():
        assert first[number] >= decided_s, "nobody commits before the commit point"


LOADER = [
    {"at": "load", "chunk": 0, "do": "raise"},
    {"at": "load", "chunk": 0, "do": "corrupt"},
    {"at": "commit", "do": "raise"},
    {"at": "commit", "do": "kill"},
    {"at": "loaded", "chunk": 0, "do": "stop"},
]


@pytest.mark.timeout(200)
def test_all_commit_or_none_whatever_fails_in_an_engine(start: Start, tmp_path: Path) -> None:
    three = Three(start, tmp_path, "all")
    version, gates = 1, []
    step(three.fleet, three.trainers, version)
    for fault in LOADER:
        version += 1
        three.services[VICTIM].ask("arm", MODELS[1], fault)
        gates += step(three.fleet, three.trainers, version)
        found = three.live_digests(str(fault["do"]))
        assert found == dict.fromkeys(found, dict.fromkeys(MODELS, digest_at(version))), fault
        three.bring_back(str(fault["do"]))
    three.fleet.close()
    check_records(read_records(tmp_path), gates)


def test_a_quorum_goes_on_without_who_is_late(start: Start, tmp_path: Path) -> None:
    """Two of three have staged: they commit, and the third answers no more before it has caught up."""
    three = Three(start, tmp_path, "quorum(2)")
    gates = step(three.fleet, three.trainers, 1)
    os.kill(three.services[VICTIM].pid, signal.SIGSTOP)
    gates += step(three.fleet, three.trainers, 2)
    assert three.fleet.states()[VICTIM] == "evicted"
    three.bring_back("stop")
    gates += step(three.fleet, three.trainers, 3)
    assert three.live_digests() == dict.fromkeys(three.services, dict.fromkeys(MODELS, digest_at(3)))
    three.fleet.close()
    check_records(read_records(tmp_path), gates)
