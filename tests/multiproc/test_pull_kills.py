"""kill -9 of everybody in every phase of their work: the rest recover in time, nothing is left, the next sync is good.

Each phase once in the normal run; twenty times each in the long form.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.multiproc.pull_hook import Hook
from tests.multiproc.pull_kit import (
    RECOVERY_S,
    SLACK_S,
    SPARSE,
    EngineActor,
    Receiver,
    Service,
    Trainer,
    run_of,
    shm_of,
    wait_until,
)
from tests.standins.processes import Child, ChildFailedError, children, free_port
from weightsync.clients.agent import AgentClient
from weightsync.errors import EngineUnreachableError

Start = Callable[..., Child]
GUARD_S = 0.4
NUM_TENSORS = 4
NUM_STEPS = 6
"""Of a load into an engine that is loaded in place: begin, pause, update, stage, commit, resume."""

TRAINER = {
    "waits for a segment": Hook(at="weightsync.trainer.buffer:PublicationBuffer.acquire", do="kill", path="", nth=2),
    "begins to copy": Hook(  # it knows some of its places in the second segment
        at="weightsync.trainer.segment_writer:SegmentWriter._target",
        do="kill",
        path="",
        nth=NUM_TENSORS + 2,
        after=True,
    ),
    "has copied, and not stamped": Hook(
        at="weightsync.trainer.segment_writer:SegmentWriter.write_places", do="kill", path="", nth=2, after=True
    ),
    "has stamped": Hook(
        at="weightsync.trainer.buffer:PublicationBuffer.written", do="kill", path="", nth=2, after=True
    ),
    "has told its agent": Hook(
        at="weightsync.trainer.agent_process:AgentProcess.publish", do="kill", path="", nth=2, after=True
    ),
    "is read": None,
}
AGENT = {
    "is told": "weightsync.agent.api:TransferAgent.publish",
    "proves": "weightsync.memory:MappedSegment.__init__",
    "announces": "weightsync.agent.long_poll:LongPoll.changed",
    "registers": "weightsync.agent.api:TransferAgent._register",
    "grants": "weightsync.agent.api:TransferAgent._grant",
    "sends": "weightsync.transfer.tcp_server:BlockServer._send",
    "makes a delta": "weightsync.codec.delta:_encode_unit",
    "keeps a delta": "weightsync.agent.delta_file:store",
    "hears the acknowledgement": "weightsync.agent.api:TransferAgent._finish_transfer",
}
RECEIVER = {
    "asks": ("weightsync.host.agent_calls:Agents.grant", False, "tcp"),
    "was granted": ("weightsync.host.agent_calls:Agents.grant", True, "tcp"),
    "connects": ("weightsync.transfer.tcp:TcpSource.read", False, "tcp"),
    "receives": ("weightsync.host.staging:Target.note", True, "tcp"),
    "fetches a delta": ("weightsync.host.agent_calls:Agents.blob", False, "tcp"),
    "applies a delta": ("weightsync.host.delta_apply:DeltaApplier._apply_unit", True, "tcp"),
    "has applied a delta": ("weightsync.host.delta_apply:DeltaApplier.check_result", True, "tcp"),
    "has proved": ("weightsync.host.agent_calls:Agents.acknowledge", False, "tcp"),
    "has acknowledged": ("weightsync.host.agent_calls:Agents.acknowledge", True, "tcp"),
    "takes a lease": ("weightsync.transfer.shm:ShmSource.__init__", True, "shm"),
    "holds a lease": ("weightsync.host.puller:Puller._mapped", True, "shm"),
}
SERVICE = {
    "asks": Hook(at="weightsync.host.agent_calls:Agents.grant", do="kill", path="", nth=2),
    "receives": Hook(at="weightsync.host.staging:Target.note", do="kill", path="", nth=10),
    "applies a delta": Hook(at="weightsync.host.delta_apply:DeltaApplier._apply_unit", do="kill", path="", after=True),
    "has pulled": Hook(at="weightsync.host.puller:Puller.pull", do="kill", path="", nth=2, after=True),
    "asks its engine": Hook(at="weightsync.host.engine_update:EngineUpdate._ready", do="kill", path="", nth=2),
    **{
        f"comes to step {step} of the load": Hook(  # the first load has an init too
            at="weightsync.handles.fanout:DirectEngine._start_call", do="kill", path="", nth=1 + NUM_STEPS + step
        )
        for step in range(1, NUM_STEPS + 1)
    },
    "has committed": Hook(at="weightsync.host.engine_update:EngineUpdate.load", do="kill", path="", nth=2, after=True),
}


@pytest.fixture
def start() -> Iterator[Start]:
    with children() as starter:
        yield starter


def _set(hook: Hook, path: Path) -> Hook:
    return Hook(at=hook.at, do=hook.do, path=str(path), nth=hook.nth, after=hook.after).set()


def kill_trainers(start: Start, folder: Path, rounds: int) -> None:
    """The service goes on with what it serves; the agent ends, the segments go; the next trainer is followed."""
    phases = [phase for _ in range(rounds) for phase in TRAINER]
    service = Service(start, ["a"])
    still = Hook(at="weightsync.host.staging:TargetMap.into", do="wait", path=str(folder / "still"))
    for number, phase in enumerate(phases):
        hook = TRAINER[phase]
        trainer = Trainer(start, number, guard_s=GUARD_S, hook=hook and _set(hook, folder / f"trainer-{number}"))
        trainer.publish(0)
        service.register(trainer.endpoint)
        service.notify(trainer.endpoint, number, 0)
        assert service.serving("a") == (f"{run_of(number)}/0", True), phase
        if hook is None:
            receiver = Receiver(start, hook=still.set())
            receiver.pull(trainer.endpoint, wait=False)
            still.reached()
            trainer.child.kill()
        else:
            trainer.tell("offload", 1)
            with pytest.raises(ChildFailedError):
                trainer.answer()
        wait_until(lambda pids=(trainer.pid, trainer.agent_pid): not shm_of(*pids), f"{phase}: segments go")
        wait_until(lambda pid=trainer.agent_pid: not Path(f"/proc/{pid}").exists(), f"{phase}: the agent ends")
        may_serve = {f"{run_of(number)}/0"}
        if phase == "has told its agent":  # which may be quicker than the news of its trainer's death
            may_serve.add(f"{run_of(number)}/1")
        served, right = service.serving("a")
        assert (served in may_serve, right) == (True, True), (phase, served)
        if hook is None:
            receiver.child.kill()
    last = Trainer(start, len(phases))
    last.publish(0)
    service.register(last.endpoint)
    service.notify(last.endpoint, len(phases), 0)
    service.ask("close")
    assert shm_of(service.pid) == []


def kill_agents(start: Start, folder: Path, rounds: int) -> None:
    """The trainer sees no error, receivers get the version that was under way from the next agent."""
    hooks = {phase: Hook(at=at, do="kill", path=str(folder / phase)) for phase, at in AGENT.items()}
    # Of a port that the system gives to nobody else, while the agent is dead.
    trainer = Trainer(start, SPARSE, guard_s=GUARD_S, port=free_port(), agent_hooks=list(hooks.values()))
    receiver = Receiver(start)
    pids = [trainer.agent_pid]
    trainer.publish(0)
    receiver.pull(trainer.endpoint)
    version = 0
    for phase in (phase for _ in range(rounds) for phase in AGENT):
        if "delta" in phase:
            trainer.await_delta_codec()
            version = _until_a_delta(trainer, receiver, version)
        version += 1
        hooks[phase].set()
        began = time.monotonic()
        said = trainer.offload(version)
        assert said["published"], phase
        assert said["seconds"] < GUARD_S + SLACK_S, phase
        asks = Receiver(start) if phase == "registers" else receiver
        said = asks.pull(trainer.endpoint, at_least=(run_of(SPARSE), version))
        hooks[phase].reached(RECOVERY_S)  # after its last word to this receiver, perhaps
        assert said["right"], phase
        version += 1
        assert trainer.publish(version)["published"], phase
        assert receiver.pull(trainer.endpoint, at_least=(run_of(SPARSE), version))["right"], phase
        assert time.monotonic() - began < RECOVERY_S, phase
        pids.append(trainer.ask("agent"))
        assert pids[-1] != pids[-2], f"{phase}: the agent was not killed"
    trainer.ask("close")
    assert shm_of(trainer.pid, *pids) == []


def _until_a_delta(trainer: Trainer, receiver: Receiver, version: int) -> int:
    """Publishes until a version has one, which agents behind one that died of a delta rest from; gives its number."""
    with contextlib.closing(AgentClient(trainer.endpoint)) as agent:
        for _ in range(6):
            if agent.capabilities()["why_no_delta"] is None:
                return version
            version += 1
            assert trainer.publish(version)["published"]
            assert receiver.pull(trainer.endpoint, at_least=(run_of(SPARSE), version))["right"]
        raise AssertionError(agent.capabilities()["why_no_delta"])


def kill_receivers(start: Start, folder: Path, rounds: int) -> None:
    """The trainer and the other receivers notice nothing; a lease ends with its holder."""
    trainer, other = Trainer(start, SPARSE, guard_s=GUARD_S), Receiver(start)
    version, pids = 0, []
    trainer.publish(version)
    for number, phase in enumerate(phase for _ in range(rounds) for phase in RECEIVER):
        at, after, transport = RECEIVER[phase]
        hook = Hook(at=at, do="kill", path=str(folder / f"receiver-{number}"), after=after).set()
        receiver = Receiver(start, hook=hook)
        if "a delta" in phase:
            assert receiver.pull(trainer.endpoint)["right"], phase
            version += 1
            trainer.publish(version)
        receiver.pull(trainer.endpoint, transport=transport, wait=False)
        with pytest.raises(ChildFailedError):
            receiver.answer()
        pids.append(receiver.pid)
        for _ in range(3):
            version += 1
            said = trainer.publish(version)
            assert said["published"], phase
            assert said["seconds"] < GUARD_S + SLACK_S, phase
        said = other.pull(trainer.endpoint, transport=(None, "tcp")[number % 2], at_least=(run_of(SPARSE), version))
        assert said["right"], phase
        assert trainer.ask("segments") <= 3, phase
    wait_until(lambda: trainer.ask("segments") == 2, "the third goes with its readers")
    wait_until(lambda: not shm_of(*pids), "what the killed have left goes")
    trainer.ask("close")
    assert shm_of(trainer.pid) == []


def kill_services(start: Start, folder: Path, rounds: int) -> None:
    """The engine, a process of its own, serves whole versions or nothing; the next service brings it to the newest."""
    trainer, engine = Trainer(start, SPARSE, guard_s=GUARD_S), EngineActor(start, "a")
    version, pids = 0, []
    trainer.publish(version)
    settings = {"urls": {"a": engine.url}, "senders": (trainer.endpoint,), "transport": "tcp"}
    for number, phase in enumerate(phase for _ in range(rounds) for phase in SERVICE):
        service = Service(start, hook=_set(SERVICE[phase], folder / f"service-{number}"), **settings)
        began = time.monotonic()
        service.notify(trainer.endpoint, SPARSE, version)
        assert time.monotonic() - began < RECOVERY_S, phase
        assert engine.serving() == (f"{run_of(SPARSE)}/{version}", True), phase
        version += 1
        trainer.publish(version)
        with contextlib.suppress(EngineUnreachableError):  # it may be dead before it has answered
            service.notify(trainer.endpoint, SPARSE, version, wait_s=None)
        wait_until(lambda service=service: not service.child.process.is_alive(), phase)
        pids.append(service.pid)
        served, right = engine.serving()
        assert right, phase
        assert served in (None, f"{run_of(SPARSE)}/{version - 1}", f"{run_of(SPARSE)}/{version}"), phase
    last = Service(start, **settings)
    last.notify(trainer.endpoint, SPARSE, version)
    assert engine.serving() == (f"{run_of(SPARSE)}/{version}", True)
    wait_until(lambda: not shm_of(*pids), "what the killed have left goes")
    last.ask("close")
    trainer.ask("close")
    assert shm_of(trainer.pid, last.pid, engine.pid) == []


EVERYBODY = {"trainer": kill_trainers, "agent": kill_agents, "receiver": kill_receivers, "service": kill_services}


@pytest.mark.parametrize("who", EVERYBODY)
def test_somebody_is_killed(start: Start, tmp_path: Path, who: str) -> None:
    EVERYBODY[who](start, tmp_path, 1)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("who", EVERYBODY)
def test_somebody_is_killed_again_and_again(start: Start, tmp_path: Path, who: str) -> None:
    EVERYBODY[who](start, tmp_path, 20)
