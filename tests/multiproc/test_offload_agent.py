"""The agent's process beside a manager: stopped, hung, short of descriptors, asked for its metrics."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import torch

from tests.multiproc.pull_hook import Hook
from tests.multiproc.pull_kit import Receiver, RefusedError, Trainer, shm_of, wait_until
from tests.multiproc.test_pull_attacks import check_bytes
from tests.standins.processes import ChildFailedError, children
from weightsync.clients.agent import AgentClient
from weightsync.errors import EngineUnreachableError, InvalidRequestError, StateError
from weightsync.host.puller import Puller
from weightsync.memory import Lock, Reader
from weightsync.trainer import agent_process
from weightsync.trainer.publisher import WeightManager
from weightsync.types import Deadline
from weightsync.types.transfer_messages import RegisterRequest, TransferRequest, Transport

TOKEN = "a-token-for-tests-only"


def weights(version: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full((300, 1000), float(version))}


def published(manager: WeightManager, version: int) -> None:
    assert manager.offload(weights(version).items(), version).published
    manager.wait_published(version, timeout_s=30)


def pulled(manager: WeightManager, version: int, transport: Transport = Transport.TCP) -> None:
    with (
        contextlib.closing(
            Puller(manager.endpoint, "m", receiver_id=f"r-{transport}", token=TOKEN, transport=transport)
        ) as puller,
        puller.pull(deadline=Deadline(20)) as got,
    ):
        assert got.version.number == version
        check_bytes(got, weights(version))


@pytest.mark.parametrize("level", [logging.WARNING, logging.INFO])
def test_an_agent_logs_what_its_trainer_would(capfd: pytest.CaptureFixture[str], level: int) -> None:
    """Seen red: lines of INFO for each version, in the terminal of a trainer that had set up no logging."""
    logger = logging.getLogger("weightsync")
    before = logger.level
    logger.setLevel(level)
    try:
        with WeightManager("m", token=TOKEN) as manager:
            published(manager, 1)
            pulled(manager, 1)
    finally:
        logger.setLevel(before)
    assert (" INFO: " in capfd.readouterr().err) == (level == logging.INFO)


def test_who_takes_several_deltas_has_fetched_one_version() -> None:
    """Seen red: each counted as a version, and a slower receiver as one that does not keep up: nobody waited for it."""

    def publish(version: int) -> None:
        model = torch.zeros(300, 1000)
        model[:version] = 1.0
        assert manager.offload({"w": model}.items(), version).published
        manager.wait_published(version, timeout_s=60)

    with WeightManager("m", token=TOKEN) as manager, contextlib.ExitStack() as opened:
        manager.start(deltas=True)
        quick, slow = (
            opened.enter_context(
                contextlib.closing(
                    Puller(manager.endpoint, "m", receiver_id=name, token=TOKEN, transport=Transport.TCP, mode="delta")
                )
            )
            for name in ("quick", "slow")
        )
        publish(1)
        for puller in (quick, slow):
            with puller.pull(deadline=Deadline(20)):
                pass
        publish(2)
        publish(3)
        with quick.pull(deadline=Deadline(20)) as got:
            assert (got.version.number, got.num_deltas) == (3, 2)
        wait_until(lambda: manager.receivers_behind(3) == ("slow",), "the slower one is waited for")


# --- an agent that stands still ---


def test_an_agent_that_was_stopped_is_killed_and_started_again() -> None:
    """Seen to fail: a stopped agent is not dead, and nobody noticed. It comes back on its port with what it served."""
    with WeightManager("m", token=TOKEN, agent_timeout_s=3.0) as manager:
        published(manager, 1)
        pid, endpoint = manager.agent_pid, manager.endpoint
        assert pid is not None
        num_before = len(manager.recorder.records())  # one that loads torch may be silent for so long
        os.kill(pid, signal.SIGSTOP)
        published(manager, 2)
        assert manager.agent_pid != pid
        assert manager.endpoint == endpoint
        pulled(manager, 2)
        names = [record.name for record in manager.recorder.records()[num_before:]]
        assert names.count("agent hung") == names.count("agent restarted") == 1
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_an_agent_that_answers_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where this process itself stood still for longer than it gives the agent: nothing was read meanwhile."""
    looks: list[float] = []
    waited = threading.Semaphore(0)

    class Clock:
        """Jumps ahead by a minute whenever it is looked at."""

        @staticmethod
        def monotonic() -> float:
            looks.append(60.0)
            waited.release()
            return sum(looks)

    monkeypatch.setattr(agent_process, "time", Clock)
    with WeightManager("m", token=TOKEN, agent_timeout_s=5.0) as manager:
        published(manager, 1)
        pid = manager.agent_pid
        for _ in range(8):
            assert waited.acquire(timeout=20)
        assert manager.agent_pid == pid
        pulled(manager, 1)


# --- a trainer that is killed while a third segment is made for it ---


def test_a_trainer_that_is_killed_while_its_third_segment_is_made_leaves_nothing(tmp_path: Path) -> None:
    hook = Hook(at="weightsync.memory:Segment.pin", do="kill", path=str(tmp_path / "third"), nth=3, after=True)
    with children() as start:
        trainer = Trainer(start, 1, hook=hook.set(), guard_s=20.0)
        trainer.publish(0)
        (first,) = shm_of(trainer.pid)
        with Lock(first, Reader.MAPPED):
            trainer.publish(1)
            trainer.tell("offload", 2)
            with pytest.raises(ChildFailedError):
                trainer.answer()
            wait_until(lambda: not shm_of(trainer.pid), "its segments go")


# --- who waits for a proof ---


def test_closing_wakes_whoever_waits_for_a_proof() -> None:
    """Seen to fail: the wait went on until its own end."""
    manager = WeightManager("m", token=TOKEN)
    published(manager, 1)
    manager._newest = 2  # as if its proof were under way
    said: list[BaseException] = []
    waits = threading.Event()

    def wait() -> None:
        waits.set()
        try:
            manager.wait_published(2, timeout_s=60)
        except StateError as error:
            said.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    assert waits.wait(20)
    manager.close()
    thread.join(10)
    assert not thread.is_alive()
    assert "closed" in str(said[0])
    with pytest.raises(StateError, match="closed"):
        manager.wait_published(2, timeout_s=60)


# --- metrics ---


def metrics(manager: WeightManager) -> dict[str, float]:
    """By sample, labels as they stand."""
    answer = httpx.get(
        f"{manager.endpoint}/metrics", headers={"Authorization": f"Bearer {TOKEN}"}, trust_env=False, timeout=10
    )
    assert answer.status_code == 200
    lines = (line.rpartition(" ") for line in answer.text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, _, value in lines}


def test_metrics_say_what_was_published_sent_and_refused() -> None:
    """Seen to fail: families of syncs that an agent never does, all of them zero."""
    with WeightManager("m", token=TOKEN) as manager:
        manager.start()
        before = metrics(manager)
        assert before['weightsync_agent_transfers_total{event="ok",transport="tcp"}'] == 0
        assert not any(name.startswith(("weightsync_sync", "weightsync_pause", "weightsync_phase")) for name in before)
        for version in (7, 8):
            published(manager, version)
        pulled(manager, 8)
        with contextlib.closing(Puller(manager.endpoint, "m", receiver_id="shm", token=TOKEN)) as puller:
            got = puller.pull(deadline=Deadline(20))
            assert got.transport is Transport.SHM
            said = metrics(manager)
            assert said["weightsync_agent_leased_segments"] == 1
            got.release()
        client = AgentClient(manager.endpoint, token=TOKEN)
        client.register(RegisterRequest(receiver_id="idle"))
        client.request_transfer(TransferRequest(receiver_id="idle", model_id="m"))
        assert httpx.get(f"{manager.endpoint}/metrics", trust_env=False).status_code == 401
        wait_until(lambda: metrics(manager)["weightsync_agent_leased_segments"] == 0, "the lease is over")
        said = metrics(manager)
        assert said["weightsync_agent_version"] == 8
        assert said["weightsync_agent_publication_bytes"] == 1_200_000
        assert said["weightsync_agent_published_timestamp_seconds"] > 1.7e9
        assert said['weightsync_agent_publications_total{outcome="ok"}'] == 2
        assert said["weightsync_agent_proof_seconds_count"] == 2
        assert said['weightsync_agent_transfers_total{event="ok",transport="tcp"}'] == 1
        assert said['weightsync_agent_transfers_total{event="ok",transport="shm"}'] == 1
        assert said['weightsync_agent_transfers_total{event="begun",transport="tcp"}'] == 2
        assert said["weightsync_agent_active_transfers"] == 1
        assert said["weightsync_agent_sent_bytes_total"] == 1_200_000
        assert said["weightsync_agent_auth_failures_total"] == 1


# --- what many ask for is encoded once ---


def test_each_grant_says_the_whole_publication() -> None:
    with WeightManager("m", token=TOKEN) as manager:
        published(manager, 1)
        client = AgentClient(manager.endpoint, token=TOKEN)
        client.register(RegisterRequest(receiver_id="r"))
        grants = [client.request_transfer(TransferRequest(receiver_id="r", model_id="m")) for _ in range(2)]
        now = client.manifest()
        assert grants[0].publication == grants[1].publication == now.publication
        assert grants[0].proof == grants[1].proof == now.proof
        assert grants[0].transfer_id != grants[1].transfer_id
        now.proof.check_fits(now.publication, now.source)


# --- an agent that gets no CPU ---


def hung(manager: WeightManager) -> int:
    return sum(record.name == "agent hung" for record in manager.recorder.records())


@pytest.mark.alone  # it takes a CPU away from everybody
def test_an_agent_that_gets_no_cpu_is_left_alone() -> None:
    """Seen to fail: it was killed and started again, again and again, which took the host what CPU it had."""
    cpus = os.sched_getaffinity(0)
    limit_s = 0.2
    with WeightManager("m", token=TOKEN, agent_timeout_s=limit_s) as manager, contextlib.ExitStack() as stack:
        published(manager, 1)
        pid, watched = manager.agent_pid, manager._agent
        assert pid is not None
        assert watched is not None
        num_hung = hung(manager)  # one that loads torch may be silent for so long
        one_cpu = {min(cpus)}
        if len(cpus) == 1:
            pytest.skip("needs a CPU for the agent and one for the trainer")
        busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
        stack.callback(busy.kill)
        stack.callback(os.sched_setaffinity, 0, cpus)
        os.sched_setaffinity(0, cpus - one_cpu)
        os.sched_setaffinity(busy.pid, one_cpu)
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(int(thread), one_cpu)
        try:  # the kernel leaves others a twentieth of each second
            os.sched_setscheduler(busy.pid, os.SCHED_FIFO, os.sched_param(1))
        except PermissionError:
            pytest.skip("needs the right to take the CPU away from a process")
        longest_s = 0.0

        def silent_for_long() -> bool:
            nonlocal longest_s
            longest_s = max(longest_s, watched._patience.elapsed_s)
            return longest_s > 3 * limit_s or manager.agent_pid != pid

        wait_until(silent_for_long, "it has answered nothing for three times as long as it may", timeout_s=40)
        stack.close()
        assert manager.agent_pid == pid
        pulled(manager, 1)
        assert hung(manager) == num_hung


# --- an agent that dies of what it is told ---


def test_an_agent_that_can_not_be_started_costs_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen red: after four starts without a process to be had the version was given up, of which no agent had died."""
    fails = iter([True] * 6)
    start = agent_process.AgentRun

    def scarce(*args: Any, **options: Any) -> Any:
        if next(fails, False):
            raise BlockingIOError("no process is to be had")
        return start(*args, **options)

    for pause in ("_RESTART_S", "_LONGEST_RESTART_S"):
        monkeypatch.setattr(agent_process, pause, 0.01)
    with WeightManager("m", token=TOKEN) as manager:
        published(manager, 1)
        pid = manager.agent_pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        assert manager.offload(weights(2).items(), 2).published
        monkeypatch.setattr(agent_process, "AgentRun", scarce)
        os.kill(pid, signal.SIGKILL)
        manager.wait_published(2, timeout_s=60)
        assert next(fails, None) is None, "they failed"


def test_a_version_that_agents_die_of_is_given_up(tmp_path: Path) -> None:
    """Seen to fail: one agent after the other, for ever. The version before is served again, and the next one, too."""
    hooks = [
        Hook(at="weightsync.agent.api:TransferAgent.publish", do="kill", path=str(tmp_path / f"death-{number}"))
        for number in range(8)
    ]
    with children() as start:
        trainer = Trainer(start, 1, agent_hooks=hooks)
        trainer.publish(0)
        for hook in hooks:
            hook.set()
        with pytest.raises(RefusedError, match="given up: the agent died 4 times") as caught:
            trainer.publish(1)
        assert caught.value.kind == "StateError"
        deaths = sum(not os.path.exists(hook.path) for hook in hooks)
        assert deaths == 4
        for hook in hooks:
            Path(hook.path).unlink(missing_ok=True)
        client = AgentClient(trainer.endpoint)
        wait_until(lambda: version_of(client) == 0, "the version before is served again", timeout_s=30)
        receiver = Receiver(start)
        assert receiver.pull(trainer.endpoint)["version"] == "seed-1/0"
        trainer.publish(2)
        assert receiver.pull(trainer.endpoint)["version"] == "seed-1/2"


def version_of(client: AgentClient) -> int | None:
    with contextlib.suppress(EngineUnreachableError):
        return client.get_version(timeout_s=5).version
    return None


def test_a_version_that_can_t_come_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen to fail: the wait took all of its time, and said no more than that. The versions: one that was never
    offloaded, one that `offload` failed to tell the agent of, and one before a version that is there."""
    with WeightManager("m", token=TOKEN) as manager:
        manager.start()
        for wait in (manager.wait_published, manager.wait_delta_ready):
            with pytest.raises(StateError, match="never offloaded, so nobody proves it: nothing was so far"):
                wait(1, timeout_s=60)
        published(manager, 3)
        manager.wait_published(2, timeout_s=60)
        begun = time.monotonic()
        with pytest.raises(StateError, match=r"version 4 was never offloaded.* the newest that was is 3; offload it"):
            manager.wait_published(4, timeout_s=60)
        assert manager._agent is not None

        def no_pipe(*_: object) -> None:
            raise OSError("no pipe")

        with monkeypatch.context() as patched:
            patched.setattr(manager._agent, "publish", no_pipe)
            with pytest.raises(OSError, match="no pipe"):
                manager.offload(weights(4).items(), 4)
        with pytest.raises(StateError, match="version 4 was not published: offload failed: no pipe"):
            manager.wait_published(4, timeout_s=60)
        assert time.monotonic() - begun < 20
        published(manager, 5)


def test_a_name_that_no_text_has_is_refused_before_anything_changes() -> None:
    """Seen to fail: the agent could not be told of it, and was killed as silent, again and again."""
    with WeightManager("m", token=TOKEN) as manager:
        published(manager, 1)
        pid = manager.agent_pid
        for name in ("\ud800", "layer\udcff.weight"):
            with pytest.raises(InvalidRequestError, match="UTF-8"):
                manager.offload([(name, torch.ones(3))], 2)
        pulled(manager, 1)
        published(manager, 2)
        pulled(manager, 2)
        assert manager.agent_pid == pid


def test_what_can_t_be_told_to_an_agent_is_given_up_at_once() -> None:
    """Whatever gets past the checks: that version alone, in words, and the agent lives on."""
    with WeightManager("m", token=TOKEN) as manager:
        published(manager, 1)
        watched, pid = manager._agent, manager.agent_pid
        assert watched is not None
        assert watched._publication is not None
        publication = watched._publication.publication
        spec = msgspec.structs.replace(publication.parts[0])
        msgspec.structs.force_setattr(spec, "name", "\ud800")
        broken = msgspec.structs.replace(publication)
        msgspec.structs.force_setattr(broken, "parts", (spec,))
        version = msgspec.structs.replace(publication.manifest.version, number=2)
        msgspec.structs.force_setattr(
            broken, "manifest", msgspec.structs.replace(publication.manifest, version=version)
        )
        watched.publish(broken, 0)
        manager._newest = 2  # as `offload` leaves it
        with pytest.raises(StateError, match="can't be told to the agent"):
            manager.wait_published(2, timeout_s=30)
        published(manager, 3)
        pulled(manager, 3)
        assert manager.agent_pid == pid
