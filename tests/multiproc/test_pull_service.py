"""A rollout service at work: what it is told, whom it believes, and what becomes of engines that fail."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.multiproc.pull_hook import Hook
from tests.multiproc.pull_kit import (
    MODEL,
    RECOVERY_S,
    EngineActor,
    Service,
    Trainer,
    content,
    run_of,
    shm_of,
    wait_until,
)
from tests.standins.processes import Child, children
from weightsync.errors import (
    InvalidRequestError,
    NotRegisteredError,
    StateError,
    SyncFailedError,
    TransferAbortedError,
    VersionError,
)
from weightsync.host.puller import Puller
from weightsync.types import Deadline
from weightsync.types.service import RegisterSenderRequest
from weightsync.types.transfer_messages import Transport

Start = Callable[..., Child]

_versions = itertools.count()


@pytest.fixture
def start() -> Iterator[Start]:
    with children() as starter:
        yield starter


@pytest.fixture(scope="module")
def trainer() -> Iterator[Trainer]:
    """One for all tests; each goes on at the next version."""
    with children() as starter:
        yield Trainer(starter, 1)


def publish(trainer: Trainer) -> int:
    """The next version, proved."""
    version = next(_versions)
    assert trainer.publish(version)["published"]
    return version


def text(seed: int, version: int) -> str:
    return f"{run_of(seed)}/{version}"


# --- whom it believes ---


def test_what_a_service_is_told(start: Start, trainer: Trainer) -> None:
    """Unknown models and senders are refused; a notification that comes late changes nothing; a run that another one
    took over from is not taken up again, and who waits for it hears of that at once.
    """
    service = Service(start, ["a"])
    first, second = publish(trainer), publish(trainer)
    with pytest.raises(InvalidRequestError, match="critic"):
        service.notify(trainer.endpoint, 1, second, model_id="critic")
    with pytest.raises(NotRegisteredError, match="not registered"):
        service.notify(trainer.endpoint, 1, second)
    service.register(trainer.endpoint)
    assert service.notify(trainer.endpoint, 1, second).version == second
    status = service.notify(trainer.endpoint, 1, first)
    assert (status.version, status.wanted, status.num_pulled) == (second, second, 1)

    other = Trainer(start, 31)
    other.publish(0)
    service.register(other.endpoint)
    with ThreadPoolExecutor(1) as pool:
        waiter = pool.submit(service.notify, trainer.endpoint, 1, second + 1000, wait_s=40.0)
        wait_until(lambda: service.status().wanted == second + 1000, "the wish of the old run")
        assert service.notify(other.endpoint, 31, 0).run_id == run_of(31)
        with pytest.raises(TransferAbortedError, match="taken over"):
            waiter.result(20)
    with pytest.raises(TransferAbortedError, match="taken over"):
        service.notify(trainer.endpoint, 1, second + 1)
    assert service.serving("a") == (text(31, 0), True)
    publish(trainer)


def test_a_false_run_shuts_nobody_out(start: Start, trainer: Trainer) -> None:
    """A run that its sender does not have is never taken up, whoever announces it; the real one goes on meanwhile."""
    service = Service(start, ["a"], senders=(trainer.endpoint,), pull_timeout_s=6.0)
    version = publish(trainer)
    service.notify(trainer.endpoint, 1, version)
    with ThreadPoolExecutor(1) as pool:
        false = pool.submit(service.notify, trainer.endpoint, 666, 5, wait_s=20.0)
        newer = publish(trainer)
        status = service.notify(trainer.endpoint, 1, newer)
        assert (status.version, status.wanted_run_id, status.errors) == (newer, run_of(1), {})
        with pytest.raises(VersionError, match="did not have it"):
            false.result(20)
    last = publish(trainer)
    assert service.notify(trainer.endpoint, 1, last).version == last


def test_whoever_cleans_dev_shm_costs_a_host_one_try(start: Start, trainer: Trainer) -> None:
    """Its staging lost its name. Seen red: engines could not open it, with any version, until the service was started
    again."""
    service = Service(start, ["a"], senders=(trainer.endpoint,), transport=Transport.TCP)
    service.notify(trainer.endpoint, 1, publish(trainer))
    lost = shm_of(service.child.pid)
    for name in lost:
        os.unlink(f"/dev/shm/{name}")
    version = publish(trainer)
    assert service.notify(trainer.endpoint, 1, version).version == version
    assert service.serving("a") == (text(1, version), True)
    assert lost


def test_a_false_run_that_comes_first_gives_way(start: Start, trainer: Trainer) -> None:
    service = Service(start, ["a"])
    version = publish(trainer)
    service.register(trainer.endpoint)
    service.notify(trainer.endpoint, 666, 5, wait_s=None)
    assert service.notify(trainer.endpoint, 1, version).version == version
    assert service.serving("a") == (text(1, version), True)


def test_a_false_number_shuts_nobody_out(start: Start, trainer: Trainer) -> None:
    """A version that never comes is waited for, and then the newest that is there is served; and the next, too."""
    service = Service(start, ["a"], senders=(trainer.endpoint,), patience_s=0.5)
    service.notify(trainer.endpoint, 1, publish(trainer))
    service.notify(trainer.endpoint, 1, 10**9, wait_s=None)
    for _ in range(2):
        version = publish(trainer)
        service.notify(trainer.endpoint, 1, version)
        assert service.serving("a") == (text(1, version), True)
    status = service.status()
    assert status.wanted == 10**9
    wait_until(lambda: "was announced" in (service.status().retrying or ""), "status says what it waits for")
    assert service.status().since_s <= time.time()


def test_a_sender_is_registered_for_one_model(start: Start, trainer: Trainer) -> None:
    service = Service(start, ["a"], also_model="critic")
    version = publish(trainer)
    service.client.register_sender(RegisterSenderRequest(model_id="critic", sender_endpoint=trainer.endpoint))
    with pytest.raises(NotRegisteredError, match="'actor'"):
        service.notify(trainer.endpoint, 1, version)


def test_a_run_id_that_is_used_twice(start: Start) -> None:
    """A trainer that was started again under its run_id: its low numbers are no success, and it goes on above them."""
    trainer, service = Trainer(start, 71), Service(start, ["a"])
    trainer.publish(5)
    service.register(trainer.endpoint)
    service.notify(trainer.endpoint, 71, 5)
    trainer.ask("close")
    trainer.begin(71)
    service.register(trainer.endpoint)
    trainer.publish(3)
    with pytest.raises(VersionError, match="published anew"):
        service.notify(trainer.endpoint, 71, 3)
    trainer.publish(6)
    assert service.notify(trainer.endpoint, 71, 6).version == 6
    assert service.serving("a") == (text(71, 6), True)


def test_a_takeover_ends_a_pull_that_stands_still(start: Start, tmp_path: Path) -> None:
    """The old run's agent was stopped in mid-transfer: nobody waits for it until the pull's deadline."""
    sent = Hook(at="weightsync.transfer.tcp_server:BlockServer._send", do="stop", path=str(tmp_path / "hook"), nth=2)
    old, new = Trainer(start, 41, agent_hooks=[sent.set()]), Trainer(start, 42)
    old.publish(3)
    new.publish(0)
    service = Service(start, ["a"], senders=(), transport="tcp", pull_timeout_s=60.0)
    service.register(old.endpoint)
    with pytest.raises(Exception, match=r"served within"):
        service.notify(old.endpoint, 41, 3, wait_s=1.0)
    service.register(new.endpoint)  # not before: a service follows the first run that an agent names
    assert service.notify(new.endpoint, 42, 0).run_id == run_of(42)
    assert service.serving("a") == (text(42, 0), True)


def test_any_number_may_wait(start: Start, trainer: Trainer) -> None:
    """Waiters take no thread, and no notification waits behind them."""
    service = Service(start, ["a"], senders=(trainer.endpoint,))
    first = publish(trainer)
    service.notify(trainer.endpoint, 1, first)
    missing = next(_versions)
    with ThreadPoolExecutor(100) as pool:
        waiters = [pool.submit(service.notify, trainer.endpoint, 1, missing, wait_s=30.0) for _ in range(100)]
        wait_until(lambda: service.status().wanted == missing, "the wish")
        trainer.publish(missing)
        assert {waiter.result(20).version for waiter in waiters} == {missing}


def test_a_puller_is_closed_in_mid_pull(start: Start, tmp_path: Path) -> None:
    """The pull ends at once by a typed error, the staging is gone after it, and the trainer is kept by nobody."""
    sent = Hook(at="weightsync.transfer.tcp_server:BlockServer._send", do="wait", path=str(tmp_path / "hook"), nth=3)
    trainer = Trainer(start, 51, agent_hooks=[sent.set()])
    trainer.publish(0)
    others = set(shm_of(os.getpid()))
    puller = Puller(trainer.endpoint, MODEL, receiver_id="r", transport=Transport.TCP)
    with ThreadPoolExecutor(1) as pool:
        pull = pool.submit(puller.pull, deadline=Deadline(60.0))
        sent.reached()
        with pytest.raises(StateError, match="one pull at a time"):
            puller.pull(deadline=Deadline(1.0))
        puller.close()
        with pytest.raises(TransferAbortedError):
            pull.result(5)
    assert set(shm_of(os.getpid())) <= others
    with pytest.raises(TransferAbortedError, match="cancelled"):
        puller.pull(deadline=Deadline(1.0))
    sent.check_cancelled()
    for version in (1, 2, 3):
        assert trainer.publish(version)["published"]


# --- engines that fail ---


@pytest.mark.parametrize("point", ["begin", "loaded", "commit"])
def test_one_engine_fails(start: Start, trainer: Trainer, point: str) -> None:
    """The other serves the new version; the failed one what it served, or nothing, no mixture; it is brought back."""
    service = Service(start, ["a", "b"], senders=(trainer.endpoint,))
    old = publish(trainer)
    service.notify(trainer.endpoint, 1, old)
    service.ask("arm", "a", {"at": point, "do": "raise"})
    new = publish(trainer)
    with pytest.raises(SyncFailedError, match=r"^a: .*injected"):
        service.notify(trainer.endpoint, 1, new)
    version, right = service.serving("a", 10.0)  # the pause of the next attempt may have come
    assert right
    before = text(1, old) if point == "begin" else None
    assert version in {before, text(1, new)}  # it is tried again at once
    assert service.serving("b") == (text(1, new), True)
    wait_until(lambda: service.serving("a") == (text(1, new), True), "the failed engine is brought back")
    wait_until(lambda: service.status().errors == {}, "the error is over")
    assert service.status().version == new


def test_an_engine_was_started_again(start: Start, trainer: Trainer) -> None:
    """It serves nothing, and nobody tells the service: it looks, and brings it back."""
    service = Service(start, ["a", "b"], senders=(trainer.endpoint,))
    version = publish(trainer)
    service.notify(trainer.endpoint, 1, version)
    service.ask("renew", "a")  # it has nothing now, until the service looks
    wait_until(lambda: service.serving("a") == (text(1, version), True), "it is brought back")
    assert service.serving("b") == (text(1, version), True)


def test_nothing_is_pulled_for_dead_engines(start: Start, trainer: Trainer) -> None:
    """All engines are dead: the next versions are not fetched; the status says why."""
    engine = EngineActor(start, "e")
    service = Service(start, urls={"e": engine.url}, senders=(trainer.endpoint,), transport="tcp")
    service.notify(trainer.endpoint, 1, publish(trainer))
    engine.child.kill()
    with pytest.raises(SyncFailedError, match="e: "):
        service.notify(trainer.endpoint, 1, publish(trainer))
    num_pulled = service.status().num_pulled
    for _ in range(3):
        with pytest.raises(SyncFailedError, match="e: EngineUnreachableError"):
            service.notify(trainer.endpoint, 1, publish(trainer))
    assert service.status().num_pulled == num_pulled
    assert service.status().state in {"waiting", "idle"}


def test_an_engine_that_failed_is_loaded_again_without_the_network(
    start: Start, trainer: Trainer, tmp_path: Path
) -> None:
    """The staging has the version still: only its grant is asked for."""
    blocks = Hook(at="weightsync.transfer.tcp:TcpSource.read", do="raise", path=str(tmp_path / "hook"), nth=2)
    service = Service(start, ["a"], hook=blocks.set(), transport="tcp")
    version = publish(trainer)
    service.ask("arm", "a", {"at": "loaded", "do": "raise"})
    service.register(trainer.endpoint)
    wait_until(lambda: service.serving("a") == (text(1, version), True), "it is brought back")
    wait_until(lambda: service.status().num_pulled == 2, "pulled twice")
    assert (tmp_path / "hook").exists(), "no block was asked for again"


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_an_engine_may_load_from_a_path(start: Start, trainer: Trainer, tmp_path: Path, transport: str) -> None:
    """While a version is loaded, and only then, its path is a safetensors file of exactly its bytes."""
    loading = Hook(at="weightsync.host.engine_group:EngineGroup.load", do="wait", path=str(tmp_path / "hook"), nth=2)
    root = tmp_path / "root"
    (root / "actor" / "left-over-1").mkdir(parents=True)
    (root / "actor" / "left-over-1" / "model.safetensors").symlink_to("/dev/shm/weightsync-1-gone")
    first = publish(trainer)  # before the service, or what it catches up with is one load more
    service = Service(
        start, ["a"], hook=loading.set(), senders=(trainer.endpoint,), transport=transport, path_root=str(root)
    )
    service.notify(trainer.endpoint, 1, first)
    assert list((root / "actor").iterdir()) == []
    version = publish(trainer)
    service.notify(trainer.endpoint, 1, version, wait_s=None)
    loading.reached()
    (folder,) = (root / "actor").iterdir()
    assert folder.name == f"{run_of(1)}-{version}"
    found, expected = load_file(folder / "model.safetensors"), content(1, version)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    loading.check_cancelled()
    assert service.notify(trainer.endpoint, 1, version).version == version
    assert list((root / "actor").iterdir()) == []


# --- what it says ---


def test_what_it_counts(start: Start, trainer: Trainer) -> None:
    """Every sync is in the metrics, and the status says when, from whom and how."""
    service = Service(start, ["a"], senders=(trainer.endpoint,))
    began = time.time()
    version = publish(trainer)
    status = service.notify(trainer.endpoint, 1, version)
    assert status.sender == trainer.endpoint
    assert began - 1 < status.served_s < time.time() + 1
    wait_until(lambda: service.status().state == "idle", "it is done", timeout_s=RECOVERY_S)
    counted = service.metrics()
    assert counted['weightsync_version{model_id="actor"}'] == version
    assert counted['weightsync_syncs_total{outcome="ok"}'] >= 1
    size = sum(tensor.nbytes for tensor in content(1, version).values())
    assert counted["weightsync_bytes_total"] == size * counted['weightsync_syncs_total{outcome="ok"}']
    assert counted["weightsync_sync_seconds_count"] == counted['weightsync_syncs_total{outcome="ok"}']
    service.ask("arm", "a", {"at": "begin", "do": "raise"})
    newer = publish(trainer)
    with pytest.raises(SyncFailedError):
        service.notify(trainer.endpoint, 1, newer)
    assert service.metrics()['weightsync_syncs_total{outcome="failed"}'] == 1
