"""Push across hosts: the transfer group by gloo, and partitions in the middle of each phase.

Three hosts: the trainer's, an engine of one worker, an engine of two. What is cut off is the second engine's host.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.hosts.kit import Start, starter_in
from tests.multiproc.pull_hook import Hook
from tests.multiproc.spine import Engine, build, cast_bytes, error_facts, push_of, step
from tests.standins.processes import children
from weightsync.errors import WeightSyncError
from weightsync.testing.hosts import Host, Hosts, why_not
from weightsync.trainer import engines as joined_engines
from weightsync.trainer.push import GRACE_S
from weightsync.transfer.broadcast import BroadcastTransferStrategy

BLOCKS = 6
PATIENT = {"join_timeout_s": 30.0, "transfer_timeout_s": 30.0, "pause_timeout_s": 5.0}
SHORT = {"join_timeout_s": 3.0, "transfer_timeout_s": 5.0, "pause_timeout_s": 1.0}
SLACK_S = 4.0
"""What a busy machine may add to a deadline."""


def trainer_main(urls: dict[str, str], address: str, times: dict[str, float], hooks: list[Hook], conn: Any) -> None:
    """Pushes the versions that it is told, and says how it went and how long it took; 0: leaves the transfer group."""
    for hook in hooks:
        hook.arm()
    joined_engines._SHUN_S = joined_engines._SHUN_BUSY_S = 1.0  # so long who did not join is left out
    model = build(5, blocks=BLOCKS)
    push = push_of(
        model,
        urls,
        fsdp=False,
        strategy=BroadcastTransferStrategy(
            master_addr=address, join_timeout_s=times["join_timeout_s"], transfer_timeout_s=times["transfer_timeout_s"]
        ),
        **times,
    )
    for left in (2, 1, 0):  # the short times may be too short while everything is imported
        try:
            push.initialize()
            break
        except WeightSyncError:
            if not left:
                raise
    conn.send("ready")
    while (version := conn.recv()) is not None:
        began_s = time.monotonic()
        try:
            if version == 0:
                push._engines.group.leave()
                conn.send({"type": "ok"})
                continue
            step(model)
            report = push.sync_weights(version)
            outcome = {"type": "ok", "engines": report.engine_ids, "equal": report.digests_equal}
        except WeightSyncError as error:
            outcome = error_facts(error)
        conn.send({**outcome, "seconds": time.monotonic() - began_s})


@dataclasses.dataclass
class Job:
    """A trainer on one host, engines on two others; versions so far."""

    hosts: Hosts
    trainer: Any
    engines: dict[str, Engine]
    hooks: dict[str, Hook]
    version: int = 0

    @property
    def far(self) -> Host:
        """The host that is cut off."""
        return self.hosts["two"]

    def leave(self) -> None:
        """The next push builds the transfer group anew."""
        self.trainer.conn.send(0)
        assert self.said()["type"] == "ok"

    def tell(self) -> int:
        """Has the next version pushed."""
        self.version += 1
        self.trainer.conn.send(self.version)
        return self.version

    def said(self) -> dict[str, Any]:
        return self.trainer.recv(30.0)

    def sync(self) -> dict[str, Any]:
        self.tell()
        return self.said()

    def sync_until_all(self) -> None:
        """Pushes until every engine takes part: one that was cut off may still wait for its own deadline."""
        end_s = time.monotonic() + 40.0
        for _ in itertools.count():
            said = self.sync()
            if said.get("engines") == tuple(self.engines):
                assert said["equal"] is True
                return
            assert time.monotonic() < end_s, said

    def check_serving(self, engine: Engine, *versions: int) -> int:
        """The engine answers with one of these versions, bit for bit in each of its workers."""
        outcome, text, served = engine.generate()
        assert outcome == "ok", text
        number = int(served.rpartition("/")[2])
        assert number in versions
        for worker in range(engine.world_size):
            assert engine.weights(worker) == expected(number)
        return number


def expected(version: int) -> dict[str, bytes]:
    model = build(5, blocks=BLOCKS)
    for _ in range(version):
        step(model)
    return cast_bytes(model)


PHASES = {
    "init: before they meet": ("trainer", "weightsync.transfer.broadcast:join_group", 1),
    "init: before they connect": ("trainer", "weightsync.transfer.group:_make_group", 1),
    "begin": ("engines", "weightsync.engine.worker:EngineWorker.begin", 1),
    "announce": ("trainer", "weightsync.transfer.broadcast:BroadcastTransferSender.create_request", 3),
    "transfer": ("engines", "weightsync.transfer.group:TransferGroup.broadcast", 3),
    "stage": ("engines", "weightsync.engine.worker:EngineWorker.stage", 1),
    "pause": ("trainer", "weightsync.update.session:UpdateSession.commit", 1),
    "commit": ("engines", "weightsync.engine.worker:EngineWorker.commit", 1),
}
"""Where the link is cut: on which side, before which call, at which of its turns."""


def job_of(start: Start, hosts: Hosts, folder: Path, times: dict[str, float]) -> Job:
    hooks = {
        phase: Hook(at=at, do="wait", path=str(folder / f"hook-{number}"), nth=nth)
        for number, (phase, (_, at, nth)) in enumerate(PHASES.items())
    }
    of_far = [hook for phase, hook in hooks.items() if PHASES[phase][0] == "engines"]
    engines = {}
    for world_size, name in ((1, "one"), (2, "two")):
        host = hosts[name]
        own = of_far if name == "two" else []
        engines[name] = Engine(starter_in(host, start), name, world_size, blocks=BLOCKS, host=host.address, hooks=own)
    urls = {name: engine.url for name, engine in engines.items()}
    of_trainer = [hook for phase, hook in hooks.items() if PHASES[phase][0] == "trainer"]
    at = hosts["trainer"]
    trainer = starter_in(at, start)(trainer_main, urls, at.address, times, of_trainer, talk=True, name="trainer")
    assert trainer.recv(60.0) == "ready"
    return Job(hosts, trainer, engines, hooks)


@pytest.fixture
def start() -> Iterator[Start]:
    with children() as starter:
        yield starter


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """One for all phases: each test leaves it healed."""
    if reason := why_not():
        pytest.skip(reason)
    with Hosts(["trainer", "one", "two"]) as hosts, children() as starter:
        found = job_of(starter, hosts, tmp_path_factory.mktemp("hooks"), SHORT)
        found.sync_until_all()
        yield found


@pytest.mark.parametrize("resolves", ["address", "loopback", "nothing"])
def test_a_push_reaches_engines_of_other_hosts(
    bench: Callable[..., Hosts], start: Start, tmp_path: Path, resolves: str
) -> None:
    """Whatever a host's own name resolves to: gloo's own choice of an address is that, and often one of loopback."""
    job = job_of(start, bench(["trainer", "one", "two"], resolves=resolves), tmp_path, PATIENT)
    for version in (1, 2):
        said = job.sync()
        assert (said["type"], said.get("engines"), said.get("equal")) == ("ok", ("one", "two"), True), said
        for engine in job.engines.values():
            job.check_serving(engine, version)
    assert {host.name: host.traffic().received_bytes > 0 for host in job.hosts} == dict.fromkeys(
        ("trainer", "one", "two"), True
    )


@pytest.mark.parametrize("phase", PHASES)
def test_a_host_is_cut_off_in_the_middle_of_a_phase(job: Job, phase: str) -> None:
    """A typed error in time, no engine with half a model, and the next sync after healing is good and proved."""
    if phase.startswith("init"):
        job.leave()
    before = job.version
    hook = job.hooks[phase].set()
    began_s = time.monotonic()
    version = job.tell()
    hook.reached()
    job.hosts.part([job.far])
    hook.check_cancelled()
    said = job.said()
    assert said["type"] != "ok"
    assert time.monotonic() - began_s < SHORT["transfer_timeout_s"] + GRACE_S + SLACK_S
    may_serve = (before, version) if phase == "commit" else (before,)
    for engine in job.engines.values():
        job.check_serving(engine, *may_serve)
    job.hosts.heal()
    job.sync_until_all()
    for engine in job.engines.values():
        job.check_serving(engine, job.version)
