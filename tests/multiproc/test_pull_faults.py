"""The faults that systems of this kind have had, by their number in the project's list: ours has none of them."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.multiproc.pull_hook import Hook
from tests.multiproc.pull_kit import (
    RECOVERY_S,
    SLACK_S,
    Receiver,
    RefusedError,
    Service,
    Trainer,
    run_of,
    shm_of,
    third_stands,
    wait_until,
)
from tests.standins.processes import Child, children, free_port
from weightsync.errors import NotPublishedError, SyncFailedError, TransferAbortedError

Start = Callable[..., Child]
GUARD_S = 0.4


@pytest.fixture
def start() -> Iterator[Start]:
    with children() as starter:
        yield starter


@pytest.fixture(scope="module")
def trainer() -> Iterator[Trainer]:
    """One for the tests that need nothing but its publications; each goes on at the next version."""
    with children() as starter:
        yield Trainer(starter, 1, guard_s=GUARD_S)


_versions = iter(range(1_000_000))


def publish(trainer: Trainer) -> int:
    """The next version, proved."""
    version = next(_versions)
    assert trainer.publish(version)["published"]
    return version


WHERE = {
    "between grant and bytes": ("weightsync.transfer.tcp:TcpSource.read", "tcp"),
    "between grant and lease": ("weightsync.transfer.shm:ShmSource.__init__", "shm"),
    "between two blocks": ("weightsync.host.staging:Target.note", "tcp"),
    "bytes in the sockets": ("weightsync.host.staging:TargetMap.into", "tcp"),
}


@pytest.mark.parametrize("where", WHERE)
def test_two_publications_during_a_pull(start: Start, where: str, tmp_path: Path) -> None:
    """Faults 1, 2 and 18: whatever is published while a pull stands still, it never reports the old version with other
    bytes. It begins anew at the newest; and the trainer that wanted the segment has waited, but not beyond its guard.
    """
    at, transport = WHERE[where]
    hook = Hook(at=at, do="wait", path=str(tmp_path / "hook")).set()
    guard_s = 2.0  # a quarter of it is left to whoever lets go of what is read
    trainer, receiver = Trainer(start, guard_s=guard_s, hook=third_stands(tmp_path)), Receiver(start, hook=hook)
    trainer.publish(0)
    receiver.pull(trainer.endpoint, transport=transport, wait=False)
    hook.reached()
    trainer.publish(1)
    said = trainer.publish(2)
    assert said["published"]
    assert 0.5 * guard_s < said["waited_s"] < guard_s + SLACK_S, "a segment that is read is not written at once"
    hook.check_cancelled()
    said = receiver.answer()
    assert said["right"]
    assert said["version"] == f"{run_of(1)}/2"
    assert said["attempts"] > 1


def test_a_lease_keeps_its_bytes(start: Start, trainer: Trainer) -> None:
    """Faults 2 and 18 on one host: what was taken under a lease stays what it was, however much is published."""
    receiver = Receiver(start)
    publish(trainer)
    assert receiver.pull(trainer.endpoint, transport=None, hold=True)["right"]
    waits = [trainer.offload(next(_versions))["waited_s"] for _ in range(6)]
    assert max(waits) < GUARD_S + SLACK_S
    assert receiver.ask("release"), "the bytes under a lease were written"


def test_a_proof_is_not_taken_for_a_reader_of_old_versions(start: Start, tmp_path: Path) -> None:
    """Fault 8: the newest version is still being proved while a receiver that stands still reads the one before it. The
    trainer gets the segment of the older one, and the proof goes on.
    """
    proof = Hook(at="weightsync.memory:MappedSegment.__init__", do="wait", path=str(tmp_path / "proof"))
    still = Hook(at="weightsync.host.staging:TargetMap.into", do="wait", path=str(tmp_path / "still"))
    trainer = Trainer(start, 41, guard_s=GUARD_S, hook=third_stands(tmp_path), agent_hooks=[proof])
    receiver = Receiver(start, hook=still.set())
    trainer.publish(0)
    receiver.pull(trainer.endpoint, wait=False)
    still.reached()
    proof.set()
    assert trainer.offload(1)["published"]
    proof.reached()
    said = trainer.offload(2)
    assert said["published"]
    assert said["waited_s"] < GUARD_S + SLACK_S
    assert not trainer.offload(3)["published"], "both segments are taken: one is proved, one waits for its proof"
    proof.check_cancelled()
    still.check_cancelled()
    said = receiver.answer()
    assert (said["version"] in (f"{run_of(41)}/1", f"{run_of(41)}/2"), said["right"]) == (True, True)
    assert receiver.pull(trainer.endpoint, at_least=(run_of(41), 2))["right"]
    assert trainer.publish(4)["published"]


def test_the_version_that_came_is_recorded(start: Start, trainer: Trainer, tmp_path: Path) -> None:
    """Fault 4: told of one version and given the next, the service and its engines say the next."""
    hook = Hook(at="weightsync.host.agent_calls:Agents.grant", do="wait", path=str(tmp_path / "hook")).set()
    service = Service(start, ["a"], hook=hook, senders=(trainer.endpoint,))
    told = publish(trainer)
    service.notify(trainer.endpoint, 1, told, wait_s=None)
    hook.reached()
    came = publish(trainer)
    hook.check_cancelled()
    status = service.notify(trainer.endpoint, 1, told)
    assert (status.run_id, status.version, status.engines) == (run_of(1), came, {"a": f"{run_of(1)}/{came}"})
    assert service.serving("a") == (f"{run_of(1)}/{came}", True)
    assert service.ask("served") == [f"{run_of(1)}/{came}"]


def test_a_wait_that_ends_loads_nothing(start: Start, trainer: Trainer) -> None:
    """Fault 5: a version that does not come is an error, and nothing is loaded in its place; late, it is served."""
    service = Service(start, ["a"], senders=(trainer.endpoint,), pull_timeout_s=6.0)
    first = publish(trainer)
    num_committed = service.notify(trainer.endpoint, 1, first).num_committed
    missing = next(_versions)
    with pytest.raises(NotPublishedError, match=f"did not have it: it has {run_of(1)}/{first}"):
        service.notify(trainer.endpoint, 1, missing)
    assert service.serving("a") == (f"{run_of(1)}/{first}", True)
    assert service.status().num_committed == num_committed
    trainer.publish(missing)
    wait_until(lambda: service.serving("a") == (f"{run_of(1)}/{missing}", True), "the version that came late")


def test_a_trainer_that_was_started_again(start: Start) -> None:
    """Fault 6: a new run at a lower version, at the same address, is followed; and so is an agent that has forgotten
    everybody: who was registered with it registers again.
    """
    port = free_port()
    trainer = Trainer(start, 11, port=port)
    receiver, service = Receiver(start), Service(start, ["a"], senders=(trainer.endpoint,))
    trainer.publish(7)
    service.notify(trainer.endpoint, 11, 7)
    assert receiver.pull(trainer.endpoint)["version"] == f"{run_of(11)}/7"
    os.kill(trainer.agent_pid, signal.SIGKILL)
    began = time.monotonic()
    said = receiver.pull(trainer.endpoint)
    assert (said["version"], said["right"]) == (f"{run_of(11)}/7", True)
    assert time.monotonic() - began < RECOVERY_S
    trainer.child.kill()
    fresh = Trainer(start, None)
    wait_until(lambda: _begun(fresh, 12, port), "the port comes free")
    fresh.publish(2)
    said = receiver.pull(fresh.endpoint, at_least=(run_of(12), 0))
    assert (said["version"], said["right"]) == (f"{run_of(12)}/2", True)
    service.notify(fresh.endpoint, 12, 2)
    assert service.serving("a") == (f"{run_of(12)}/2", True)
    with pytest.raises(TransferAbortedError, match="taken over"):
        service.notify(fresh.endpoint, 11, 8)
    assert service.status().wanted == 2


def _begun(trainer: Trainer, seed: int, port: int) -> bool:
    try:
        trainer.begin(seed, port=port)
    except RefusedError as error:
        if error.kind != "ConfigError":
            raise
        return False
    return True


def test_a_failed_transfer_is_forgotten(start: Start, trainer: Trainer, tmp_path: Path) -> None:
    """Fault 7: a transfer that failed fails no later one, neither at the puller nor at the service."""
    at = "weightsync.transfer.tcp:TcpSource._receive"
    receiver = Receiver(start, hook=Hook(at=at, do="raise", path=str(tmp_path / "one"), nth=3).set())
    publish(trainer)
    with pytest.raises(RefusedError, match="injected"):
        receiver.pull(trainer.endpoint)
    assert receiver.pull(trainer.endpoint)["right"]

    fired = tmp_path / "two"
    hook = Hook(at="weightsync.host.puller:Puller._copied", do="raise", path=str(fired)).set()
    service = Service(start, ["a"], hook=hook, senders=(trainer.endpoint,), transport="tcp")
    with contextlib.suppress(SyncFailedError):  # unless the service, catching up at its start, has met it already
        service.notify(trainer.endpoint, 1, publish(trainer))
    assert not fired.exists(), "it was injected"
    version = publish(trainer)
    assert service.notify(trainer.endpoint, 1, version).errors == {}
    assert service.serving("a") == (f"{run_of(1)}/{version}", True)


def test_nothing_is_left_in_shared_memory(start: Start) -> None:
    """Fault 15: never more than three segments, none after the end; a model that changed takes its old ones along."""
    trainer, receiver = Trainer(start, 21), Receiver(start)
    service = Service(start, ["a"], senders=(trainer.endpoint,), transport="tcp")
    for version in range(10):
        trainer.publish(version)
        receiver.pull(trainer.endpoint, transport=("tcp", None)[version % 2])
        wait_until(lambda: len(shm_of(trainer.pid)) <= 2, "a third is there only beside a reader")
    service.notify(trainer.endpoint, 21, 9)
    assert len(shm_of(service.pid)) == 1, "the staging"
    assert len(shm_of(receiver.pid)) == 1
    trainer.ask("resize", 256)
    trainer.publish(10)
    assert len(shm_of(trainer.pid)) == 1, "the old model's segments are gone"
    trainer.ask("close")
    assert shm_of(trainer.pid) == []
    service.ask("close")
    receiver.ask("close")
    assert shm_of(service.pid, receiver.pid, trainer.agent_pid) == []
