"""A job on Ray, real actors on a cluster of two nodes: every sync is proved, every death is told to the driver.

Seen red: with the driver's wait left without its look at dead actors, with loopback as the meeting address whatever the
nodes, with one concurrency group for all of an engine's calls.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.cluster.actors import Rollout, Trainer, expected
from weightsync.cluster.actors import Address
from weightsync.cluster.launch import launch
from weightsync.cluster.manager import RayWeightSync
from weightsync.cluster.placement import Placement
from weightsync.cluster.ray_calls import here
from weightsync.errors import (
    AuthError,
    DeadlineExceededError,
    EngineUnreachableError,
    SyncFailedError,
    SyncInProgressError,
    TrainerRankError,
    WeightSyncError,
)
from weightsync.handles.fanout import in_thread
from weightsync.handles.http import HttpEngine
from weightsync.types import Deadline, DescribeRequest, EngineOp, SyncReport

pytestmark = pytest.mark.timeout(600)

TRANSFER = {"transfer_timeout_s": 15.0, "join_timeout_s": 10.0, "pause_timeout_s": 2.0}
CONFIG = {"transfer": TRANSFER, "extract": {"dtype": "bfloat16"}}
SPREAD = Placement(rank_cpus=0.01, engine_cpus=0.01, spread="SPREAD")
CALL_S = 30.0
LATE_S = 30.0  # how much later than the ranks' deadline the driver raises: its margin, and the grace of a first failure


class Job:
    """A launched job and what its trainer has done so far."""

    def __init__(self, sync: RayWeightSync) -> None:
        self.sync = sync
        self.version = 0

    def next(self) -> SyncReport:
        """One step and one sync."""
        self.version += 1
        self.sync.run("step", timeout_s=CALL_S)
        return self.sync.sync_weights(self.version)

    def ask(self, engine: int, method: str, *args: Any) -> Any:
        return self.sync.engines[f"engine-{engine}"].ask(method, *args, timeout_s=CALL_S)

    def served(self, engine: int) -> int | None:
        """The version that an engine serves, once its bytes are seen to be that version's."""
        live, version, _ = self.ask(engine, "fingerprint")
        if version is not None:
            assert live == expected(version), "what it serves is what the trainer published"
        return version  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def job(ray_cluster: Any) -> Iterator[Job]:
    """Two training ranks and two engines, one of each on either node."""
    with launch(Trainer, Rollout, num_ranks=2, num_engines=2, config=CONFIG, placement=SPREAD) as sync:
        sync.initialize()
        yield Job(sync)


def test_engines_on_two_nodes_hold_the_trainers_bytes(job: Job) -> None:
    """Several versions; the group meets at the node's address, since not everybody is on one node."""
    places = [engine.ready(timeout_s=CALL_S) for engine in job.sync.engines.values()]
    ranks = [rank.ready(timeout_s=CALL_S) for rank in job.sync.ranks]
    assert len({place.node_id for place in places}) == 2
    assert len({place.node_id for place in ranks}) == 2
    assert job.sync.run("master_addr", timeout_s=CALL_S) == [ranks[0].node_ip] * 2
    for _ in range(3):
        report = job.next()
        assert (report.version.number, report.engine_ids, report.lost) == (job.version, ("engine-0", "engine-1"), {})
        assert report.digests_equal is True
        assert report.num_chunks >= 3
        assert [job.served(engine) for engine in (0, 1)] == [job.version, job.version]
        digests = {job.ask(engine, "fingerprint")[2] for engine in (0, 1)}
        assert len(digests) == 1


def test_engines_are_called_by_http_at_their_nodes_with_tokens_of_their_own(job: Job) -> None:
    """What rank 0 does by the addresses that Ray gave it, anybody may do who has them, and nobody else."""
    job.next()
    replies, errors = job.sync.describe(timeout_s=CALL_S)
    assert not errors
    (group,) = {reply.group for reply in replies.values()}
    assert group is not None, "both are in the group that rank 0 made"
    addresses = [engine.address(timeout_s=CALL_S) for engine in job.sync.engines.values()]
    assert len({token for _, token in addresses}) == 2
    for (url, token), engine in zip(addresses, job.sync.engines.values(), strict=True):
        assert urlsplit(url).hostname == engine.ready(timeout_s=CALL_S).node_ip
        assert token not in repr(Address(url, token))
        with contextlib.closing(HttpEngine(url, token=token)) as known:
            assert known.call(EngineOp.DESCRIBE, DescribeRequest(), timeout_s=CALL_S) == replies[engine.engine_id]
        for wrong in (None, addresses[0].token if token != addresses[0].token else addresses[1].token):
            with contextlib.closing(HttpEngine(url, token=wrong)) as stranger, pytest.raises(AuthError):
                stranger.call(EngineOp.DESCRIBE, DescribeRequest(), timeout_s=CALL_S)


def test_generation_and_syncs_do_not_wait_for_each_other(job: Job) -> None:
    """All threads for the user's calls are taken, and a sync goes through: it has threads of its own."""
    waits = [in_thread(lambda: job.ask(1, "wait", 28.0), name="generation") for _ in range(8)]
    urgent = functools.partial(job.sync.engines["engine-1"].urgent, "ask", "")  # by threads that no generation takes
    deadline = Deadline(CALL_S)
    while urgent("waiting", (), {}, kind=int, timeout_s=CALL_S) < 8:
        deadline.check("generations to begin")
    report = job.next()
    assert report.digests_equal is True
    assert not any(wait.done() for wait in waits), "the generations were still running"
    urgent("let_go", (), {}, kind=type(None), timeout_s=CALL_S)
    assert [wait.result(CALL_S) for wait in waits] == [True] * 8


@pytest.mark.parametrize("phase", ["begin", "update_weights", "stage", "pause", "commit"])
def test_an_engine_is_killed_in_each_phase(job: Job, phase: str) -> None:
    """The driver is told who died, at once; the survivor goes on; the engine comes back as another actor."""
    job.next()
    before = job.version
    if phase == "update_weights":
        job.ask(1, "arm", {"at": "load", "chunk": 3, "do": "kill"})
    else:
        job.ask(1, "die_at", phase)
    started = time.monotonic()
    with pytest.raises(WeightSyncError) as caught:
        job.next()
    assert time.monotonic() - started < TRANSFER["transfer_timeout_s"]
    assert isinstance(caught.value, SyncFailedError)
    assert isinstance(caught.value.causes["engine-1"], EngineUnreachableError)
    assert job.served(0) == (job.version if phase == "commit" else before)
    report = job.next()
    assert (report.engine_ids, report.lost_engine_ids) == (("engine-0",), ("engine-1",))
    assert job.served(0) == job.version
    job.sync.restart_engine("engine-1", timeout_s=100)
    assert job.ask(1, "fingerprint")[1] is None, "it serves what its factory built"
    assert job.next().engine_ids == ("engine-0", "engine-1")
    assert job.served(1) == job.version


def test_one_call_at_a_time(job: Job) -> None:
    with job.sync._busy, pytest.raises(SyncInProgressError):
        job.next()
    job.version -= 1


def test_a_step_that_fails_on_one_rank_is_told_with_the_rank(job: Job) -> None:
    with pytest.raises(WeightSyncError, match="a step that fails") as caught:
        job.sync.run("fail", 1, timeout_s=CALL_S)
    assert caught.value.rank == 1
    with pytest.raises(WeightSyncError, match="no public method '_hidden'"):
        job.sync.run("_hidden", timeout_s=CALL_S)
    assert job.next().digests_equal is True


def check_death_in_extraction(job: Job, rank: int) -> None:
    """A training rank is killed: the driver is told which, in time; later calls say so at once; engines go on."""
    served = [job.served(engine) for engine in (0, 1)]
    job.sync.run("signal_in_extraction", rank, 3, signal.SIGKILL, timeout_s=CALL_S)
    started = time.monotonic()
    with pytest.raises(TrainerRankError, match=f"training rank {rank} is gone") as caught:
        job.next()
    assert time.monotonic() - started < TRANSFER["transfer_timeout_s"]
    assert caught.value.rank == rank
    started = time.monotonic()
    with pytest.raises(TrainerRankError, match="is gone"):
        job.sync.sync_weights(job.version + 1)
    with pytest.raises(TrainerRankError, match="is gone"):
        job.sync.run("step", timeout_s=CALL_S)
    assert time.monotonic() - started < 12
    assert [job.served(engine) for engine in (0, 1)] == served


def test_training_rank_0_is_killed(job: Job) -> None:
    """The last test with this job: nothing comes after it."""
    check_death_in_extraction(job, 0)


def test_a_training_rank_that_hangs_costs_the_deadline(ray_cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGSTOP: no connection breaks, and the driver is told who is silent; then the rank dies between syncs."""
    timeout_s = 5.0  # the ranks' first meeting has it too, and 5 s more: they come when their processes have started
    config = {**CONFIG, "transfer": {**TRANSFER, "transfer_timeout_s": timeout_s}}
    with launch(Trainer, Rollout, num_ranks=2, num_engines=1, config=config, placement=SPREAD) as sync:
        sync.initialize()
        pids = [pid for pid, _ in sync.run("where", timeout_s=CALL_S)]
        sync.run("signal_in_extraction", 1, 2, signal.SIGSTOP, timeout_s=CALL_S)
        started = time.monotonic()
        with monkeypatch.context() as patch:
            patch.setattr("weightsync.cluster.ranks._GRACE_S", 1.0)
            with pytest.raises((DeadlineExceededError, TrainerRankError)) as caught:
                sync.sync_weights(1)
        assert time.monotonic() - started < timeout_s + LATE_S
        assert caught.value.details["silent_ranks"] == [1]
        os.kill(pids[1], signal.SIGKILL)
        with pytest.raises(TrainerRankError, match="training rank 1 is gone"):
            sync.sync_weights(2)


@pytest.mark.parametrize(("strategy", "dies"), [("cuda_ipc", 1), ("packed_cuda_ipc", 0)])
def test_colocated_actors_share_a_bundle(ray_cluster: Any, strategy: str, dies: int) -> None:
    """Rank i and engine i see the same GPU by Ray's books, and another one than rank 1 - i; all meet on loopback."""
    placement = Placement(
        colocated=True, rank_cpus=0.01, engine_cpus=0.01, rank_gpus=0.5, engine_gpus=0.5, spread="STRICT_PACK"
    )
    config = {**CONFIG, "transfer": {**TRANSFER, "colocated": True, "strategy": strategy}}
    with launch(Trainer, Rollout, num_ranks=2, num_engines=2, config=config, placement=placement) as sync:
        job = Job(sync)
        ranks = sync.run("where", timeout_s=CALL_S)
        engines = [job.ask(engine, "where") for engine in (0, 1)]
        assert [gpu for _, gpu in ranks] == [gpu for _, gpu in engines]
        assert len({gpu for _, gpu in ranks}) == 2
        assert sync.run("master_addr", timeout_s=CALL_S) == ["127.0.0.1"] * 2
        driver_is_there = {rank.ready(timeout_s=CALL_S).node_id for rank in sync.ranks} == {here()[0]}
        for engine in sync.engines.values():
            assert (urlsplit(engine.address(timeout_s=CALL_S).url).hostname == "127.0.0.1") is driver_is_there
        sync.initialize()
        for _ in range(2):
            report = job.next()
            assert (report.digests_equal, report.lost) == (True, {})
            assert [job.served(engine) for engine in (0, 1)] == [job.version, job.version]
        job.ask(1, "arm", {"at": "load", "chunk": 3, "do": "kill"})
        with pytest.raises(SyncFailedError) as caught:
            job.next()
        assert isinstance(caught.value.causes["engine-1"], EngineUnreachableError)
        sync.restart_engine("engine-1", timeout_s=100)
        assert job.next().engine_ids == ("engine-0", "engine-1")
        check_death_in_extraction(job, dies)
    left = [name for name in os.listdir("/dev/shm") if any(f"-{pid}-" in name for pid, _ in ranks)]
    assert left == [], "shared memory of the rank that was closed, and of the one that was killed"
