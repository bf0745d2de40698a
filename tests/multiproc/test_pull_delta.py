"""Deltas over the pull path: real trainers, agents and receivers. Whatever is missing, late or wrong, a receiver ends
with the published bytes; and where nothing is wrong it fetches what changed alone.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from tests.multiproc.pull_hook import Hook
from tests.multiproc.pull_kit import (
    MODEL,
    SLACK_S,
    SPARSE,
    Receiver,
    Service,
    Trainer,
    content,
    run_of,
    shm_of,
    third_stands,
    wait_until,
)
from tests.standins.processes import Child, children, run_ranks
from weightsync.clients.agent import AgentClient
from weightsync.extract.fsdp import FSDPWeightExtractor
from weightsync.host.puller import Puller
from weightsync.host.staging import Staging
from weightsync.trainer.publisher import WeightManager
from weightsync.types import Deadline
from weightsync.types.publication import DeltaBase
from weightsync.types.transfer_messages import RegisterRequest, TransferRequest, Transport

Start = Callable[..., Child]
GUARD_S = 0.4
KIB = 4096


@pytest.fixture
def start() -> Iterator[Start]:
    with children() as starter:
        yield starter


_seeds = iter(range(SPARSE, 2 * SPARSE))


def begun(start: Start, **options: object) -> tuple[Trainer, Receiver]:
    """A trainer, and a receiver that has its first version in full: from here on deltas are made."""
    trainer = Trainer(start, next(_seeds), kib=KIB, **{"guard_s": GUARD_S, **options})
    receiver = Receiver(start, kib=KIB)
    trainer.publish(0)
    said = receiver.pull(trainer.endpoint)
    assert (said["right"], said["deltas"], said["version"]) == (True, 0, f"{run_of(trainer.seed)}/0")
    return trainer, receiver


def pull(trainer: Trainer, receiver: Receiver, version: int, **options: object) -> dict[str, object]:
    """That version, right."""
    said = receiver.pull(trainer.endpoint, at_least=(run_of(trainer.seed), version), **options)
    assert said["right"]
    assert said["version"] == f"{run_of(trainer.seed)}/{version}"
    return said


def test_a_delta_moves_what_has_changed_and_says_so(start: Start) -> None:
    """Less than a fiftieth of the bytes, on TCP and out of the same host's memory; positions are there for engines."""
    trainer, receiver = begun(start)
    second = Receiver(start, kib=KIB)
    for version in (1, 2, 3):
        trainer.publish(version)
        report = trainer.ask("delta", version)
        assert (report.base, report.version) == (version - 1, version)
        assert 0 < report.num_changed < report.num_elements / 50
        said = pull(trainer, receiver, version)
        assert (said["deltas"], said["attempts"], said["received"]) == (1, 1, report.nbytes)
        assert said["received"] < KIB * 1024 / 50
        assert said["patched"] == report.num_changed
        other = pull(trainer, second, version, transport=None, mode="delta")
        assert (other["transport"], other["deltas"]) == ("shm", int(version > 1)), "in full where there is no base"
    mapped = pull(trainer, Receiver(start, kib=KIB), 3, transport=None)
    assert (mapped["transport"], mapped["deltas"]) == ("shm", 0), "on one host nothing is faster than mapping it"
    assert pull(trainer, receiver, 3, mode="full")["deltas"] == 0
    assert "libtorch" not in Path(f"/proc/{trainer.agent_pid}/maps").read_text(), "an agent needs none of it"
    trainer.ask("close")
    assert shm_of(trainer.pid, trainer.agent_pid) == []


@pytest.mark.parametrize("device", ["cpu", "cuda:77"])
def test_an_agent_searches_where_it_is_told_to(start: Start, device: str) -> None:
    """On a device: the same deltas ("cpu" runs a GPU's code). Where there is no such device: fulls, and the reason."""
    trainer, receiver = begun(start, delta_device=device)
    trainer.publish(1)
    if device == "cpu":
        assert trainer.ask("delta", 1).base == 0
    said = pull(trainer, receiver, 1)
    assert said["deltas"] == int(device == "cpu")
    agent = AgentClient(trainer.endpoint)
    why = agent.capabilities()["why_no_delta"]
    agent.close()
    assert why is None if device == "cpu" else "can't be loaded" in why


def test_a_receiver_that_missed_versions_catches_up(start: Start) -> None:
    """By every number of versions up to and past the chain, which has a budget in bytes."""
    trainer, receiver = begun(start, delta_budget_bytes=4_000)
    version = 0
    lengths = []
    for missed in range(1, 8):
        for _ in range(missed):
            version += 1
            trainer.publish(version)
        said = pull(trainer, receiver, version)
        with_client = AgentClient(trainer.endpoint)
        kept = with_client.capabilities()["deltas"]
        with_client.close()
        assert sum(delta["nbytes"] for delta in kept) <= 4_000
        assert [delta["version"] for delta in kept] == list(range(version - len(kept) + 1, version + 1))
        assert said["deltas"] == (missed if missed <= len(kept) else 0), (missed, len(kept))
        lengths.append(said["deltas"])
    assert 3 in lengths, "the budget has room for some"
    assert 0 in lengths, "and not for all"


def test_a_chain_has_an_end_however_small_its_deltas(start: Start) -> None:
    """Each is a segment of its own, with descriptors: of a model that hardly changes thousands would have fitted."""
    trainer, receiver = begun(start)
    for version in range(1, 37):
        trainer.publish(version)
        if version % 12 == 0:
            pull(trainer, receiver, version)
    client = AgentClient(trainer.endpoint)
    kept = client.capabilities()["deltas"]
    client.close()
    assert [delta["version"] for delta in kept] == list(range(5, 37))


def test_versions_that_have_to_go_out_in_full(start: Start) -> None:
    trainer, receiver = begun(start, full_sync_interval=3)
    deltas = []
    for version in range(1, 8):
        trainer.publish(version)
        deltas.append(pull(trainer, receiver, version)["deltas"])
    assert deltas == [1, 1, 0, 1, 1, 0, 1]


def test_none_are_made_where_none_are_wanted(start: Start) -> None:
    """Without a budget; and without receivers that could take them."""
    trainer, receiver = begun(start, delta_budget_bytes=0)
    trainer.publish(1)
    assert trainer.ask("delta", 1) is None
    assert pull(trainer, receiver, 1)["deltas"] == 0
    lonely = Trainer(start, next(_seeds), kib=KIB)
    for version in range(3):
        lonely.publish(version)
        assert lonely.ask("delta", version) is None


def test_another_layout_has_no_delta(start: Start) -> None:
    trainer, receiver = begun(start)
    trainer.publish(1)
    assert pull(trainer, receiver, 1)["deltas"] == 1
    trainer.ask("resize", KIB // 2)
    trainer.publish(2)
    assert trainer.ask("delta", 2) is None
    small = Receiver(start, kib=KIB // 2)
    assert pull(trainer, small, 2)["deltas"] == 0


WHERE = {
    "between the grant and the delta": "weightsync.host.agent_calls:Agents.blob",
    "between the delta and the staging": "weightsync.host.staging:Staging.open",
    "within the staging": "weightsync.host.delta_apply:DeltaApplier._apply_unit",
}


@pytest.mark.parametrize("where", WHERE)
def test_publications_while_a_delta_is_taken(start: Start, where: str, tmp_path: Path) -> None:
    """Fault 1: the base was checked, then two versions came. What is taken is the version that was granted, or a newer
    one, and never a mixture.
    """
    trainer, _ = begun(start)
    hook = Hook(at=WHERE[where], do="wait", path=str(tmp_path / "hook"))
    receiver = Receiver(start, kib=KIB, hook=hook)
    pull(trainer, receiver, 0)
    hook.set()
    trainer.publish(1)
    receiver.pull(trainer.endpoint, wait=False)
    hook.reached()
    for version in (2, 3):
        said = trainer.publish(version)
        assert said["published"]
        assert said["waited_s"] < GUARD_S + SLACK_S
    hook.check_cancelled()
    said = receiver.answer()
    assert said["right"]
    assert said["deltas"] >= 1
    assert pull(trainer, receiver, 3)["right"]


def test_a_base_that_rotted_is_found(start: Start) -> None:
    """A bit of the staging flips between two pulls, in an element that the delta changes: a full comes, by itself."""
    trainer, receiver = begun(start)
    trainer.publish(1)
    before, after = (content(trainer.seed, version, KIB)["words"].flatten() for version in (0, 1))
    first = int((before != after).nonzero()[0])
    receiver.ask("damage", "words", 8 * first + 7)
    said = pull(trainer, receiver, 1)
    assert (said["deltas"], said["attempts"]) == (0, 2)
    trainer.publish(2)
    assert pull(trainer, receiver, 2)["deltas"] == 1, "and the next one is a delta again"


def test_the_trainer_comes_first(start: Start, tmp_path: Path) -> None:
    """It wants the segment that a delta is being made from: it waits no longer than its guard, and that version has no
    delta. After a rest deltas are made again.
    """
    diff = Hook(at="weightsync.codec.delta:_encode_unit", do="wait", path=str(tmp_path / "diff"))
    kib = 36 << 10  # several units
    third = third_stands(tmp_path)
    trainer = Trainer(start, next(_seeds), kib=kib, guard_s=GUARD_S, hook=third, agent_hooks=[diff])
    receiver = Receiver(start, kib=kib)
    trainer.publish(0)
    pull(trainer, receiver, 0)
    diff.set()
    assert trainer.offload(1)["published"]
    diff.reached()
    said = trainer.offload(2)
    assert said["waited_s"] < GUARD_S + SLACK_S
    assert not said["published"], "a diff that stands still keeps its base until it looks up"
    diff.check_cancelled()
    third.check_cancelled()
    assert trainer.ask("delta", 1) is None, "what was begun is dropped"
    assert trainer.publish(3)["published"]
    pull(trainer, receiver, 3)
    made = []
    for version in range(4, 10):
        trainer.publish(version)
        made.append(trainer.ask("delta", version) is not None)
        assert pull(trainer, receiver, version)["right"]
    assert made[-1]


def test_nobody_waits_for_kernels_that_are_being_compiled(start: Start, tmp_path: Path) -> None:
    """Seen to fail where the first diff loaded the codec: for 12 s it kept the segment that the trainer wanted."""
    load = Hook(at="weightsync.codec.delta:warm_up", do="wait", path=str(tmp_path / "load"))
    guard_s = 6.0  # it waited for all of it
    trainer, receiver = Trainer(start, 5, kib=KIB, guard_s=guard_s, agent_hooks=[load.set()]), Receiver(start, kib=KIB)
    for version in range(4):
        said = trainer.publish(version)
        assert (said["published"], said["waited_s"] < guard_s / 2) == (True, True)
        assert pull(trainer, receiver, version)["deltas"] == 0
        load.reached()
    load.check_cancelled()


def test_an_agent_that_was_killed_has_no_chain_and_makes_a_new_one(start: Start) -> None:
    trainer, receiver = begun(start)
    trainer.publish(1)
    assert pull(trainer, receiver, 1)["deltas"] == 1
    os.kill(trainer.agent_pid, signal.SIGKILL)
    wait_until(lambda: trainer.ask("agent") != trainer.agent_pid, "another agent")
    assert pull(trainer, receiver, 1, timeout_s=20.0)["right"]
    pull(trainer, receiver, 1, mode="delta")  # the new agent loads the codec because somebody has asked
    version = 1

    def another_is_a_delta() -> bool:
        nonlocal version
        version += 1
        trainer.publish(version)
        return pull(trainer, receiver, version)["deltas"] == 1

    wait_until(another_is_a_delta, "the new agent makes deltas")
    wait_until(lambda: shm_of(trainer.agent_pid) == [], "what the killed agent kept goes")


def test_what_is_asked_wrongly_is_refused(start: Start) -> None:
    """A base of another run, of other bytes, of a version that never was: a full, as for one without a base."""
    trainer, _ = begun(start)
    trainer.publish(1)
    client = AgentClient(trainer.endpoint)
    client.register(RegisterRequest(receiver_id="r"))
    asked = TransferRequest(receiver_id="r", model_id=MODEL, mode="delta")
    proof = client.manifest().proof
    run = run_of(trainer.seed)
    for base in (
        DeltaBase(run_id="another", version=0, digest="0" * 32),
        DeltaBase(run_id=run, version=0, digest="0" * 32),
        DeltaBase(run_id=run, version=0, digest=proof.digest),
        DeltaBase(run_id=run, version=77, digest=proof.digest),
    ):
        assert client.request_transfer(msgspec.structs.replace(asked, base=base)).delta is None
    same = DeltaBase(run_id=run, version=1, digest=proof.digest)
    assert client.request_transfer(msgspec.structs.replace(asked, base=same)).delta == ()
    client.close()


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_engines_are_given_what_changed_alone(start: Start, transport: str) -> None:
    """From the second version on; one that was made anew, and one that missed a version, are loaded in full."""
    trainer = Trainer(start, next(_seeds), kib=KIB, guard_s=GUARD_S)
    service = Service(
        start, ["a", "b"], kib=KIB, senders=(trainer.endpoint,), transport=transport,
        mode="auto" if transport == "tcp" else "delta",
    )  # fmt: skip
    patched = []
    for version in range(6):
        trainer.publish(version)
        if version == 3:
            service.ask("renew", "b")  # the service finds out by itself, or is told by b that it has no base
        if version == 4:
            service.ask("arm", "a", {"at": "commit", "do": "raise"})
        said = service.notify(trainer.endpoint, trainer.seed, version)
        patched.append((said.num_deltas, said.num_patched))
        for engine in ("a", "b"):
            assert service.serving(engine) == (f"{run_of(trainer.seed)}/{version}", True), version
    assert patched[:3] == [(0, 0), (1, 2), (1, 2)]
    assert patched[4:] == [(1, 1), (1, 2)], "a commit that failed was undone, and that engine loaded in full"
    service.ask("close")
    trainer.ask("close")
    assert shm_of(trainer.pid, trainer.agent_pid, service.pid) == []


def _pulled_on_one_staging(rank: int, _world_size: int) -> list[tuple[int, int | None, str | None]]:
    """Two ranks as two hosts, which both change in each version; rank 0 pulls three, from the second on with a new
    puller. Of each version: deltas, elements of the patch, and why there is none."""
    model = fully_shard(torch.nn.Linear(128, 128, bias=False))
    kept, found = Staging(), []

    with WeightManager(MODEL, run_id="run", guard_s=20.0, host_group="ab"[rank]) as manager:
        manager.start(deltas=True)

        def puller() -> Puller:
            return Puller(
                manager.endpoint, MODEL, receiver_id="r", may_call=lambda _: True, transport=Transport.TCP,
                patch_limit=lambda: 0.5, staging=kept,
            )  # fmt: skip

        used = puller()
        for version in (1, 2, 3):
            report = manager.offload(FSDPWeightExtractor(model), version)
            manager.wait_published(version, timeout_s=30)
            manager.wait_delta_ready(version, timeout_s=30)
            dist.barrier()
            if rank == 0:
                with used.pull(deadline=Deadline(30), at_least=lambda wanted=report.version: wanted) as pulled:
                    counts = None if pulled.patch is None else sum(each.count for each in pulled.patch.tensors)
                    found.append((pulled.num_deltas, counts, pulled.no_patch_because))
                if version == 1:
                    used.close()
                    used = puller()
            dist.barrier()
            with torch.no_grad():
                model.weight.to_local().view(-1)[:8] += 1.0
        used.close()
    kept.close()
    return found


def test_a_version_that_comes_partly_in_full_gives_no_patch() -> None:
    """Seen red: the patch had the changes of the other source alone, and every engine refused it by its digest."""
    found = run_ranks(_pulled_on_one_staging, 2)[0]
    assert found == [
        (0, None, "it came in full"),
        (1, None, "a part of it came in full: what has changed there is not known"),
        (2, 16, None),
    ]
