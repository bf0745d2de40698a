"""Every failure of the push path with the IPC strategies: typed, within its deadline, nothing mixed, nothing left.

The pattern is that of test_push_faults.py: a good sync of version 1, the fault at version 2, then version 3.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.multiproc.spine import Engine
from tests.multiproc.test_push_faults import Trainer, _wait_until_stopped, check_serving, setup
from tests.multiproc.test_push_ipc import STRATEGIES, of_process, segments
from tests.standins.processes import children
from weightsync.memory import Segment, reclaim_dead

DEADLINE_S = 15.0
QUICK = {"transfer_timeout_s": 5.0, "join_timeout_s": 5.0, "pause_timeout_s": 3.0}
"""For what costs a deadline."""
PATIENT = {**QUICK, "transfer_timeout_s": 30.0}
AT_ONCE_S = 10.0  # far from the deadline, also on a busy machine


@pytest.fixture
def start() -> Iterator[Any]:
    """Children; in the end nothing of theirs lies in shared memory but what a dead process could not unlink itself."""
    mine: list[Any] = []
    with children() as starter:

        def started(*args: Any, **options: Any) -> Any:
            mine.append(starter(*args, **options))
            return mine[-1]

        yield started
    reclaim_dead()
    assert {name for child in mine for name in of_process(child.pid)} == set()


def mapped(pid: int) -> set[str]:
    """The segments that a process has mapped."""
    return set(re.findall(r"weightsync-\d+-[0-9a-f]+", Path(f"/proc/{pid}/maps").read_text()))


def push_with(strategy: str, **options: Any) -> dict[str, Any]:
    return {**PATIENT, "strategy": strategy, **options}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_engine_raises_at_a_chunk(start: Any, strategy: str, ranks: int) -> None:
    """At once, by name, on every rank; both engines keep version 1; version 3 reaches both, over new memory."""
    one, two, trainer = setup(start, ranks=ranks, push=push_with(strategy))
    before = of_process(trainer.ranks[0].pid)
    two.ask("arm", {"at": "load", "chunk": 3, "do": "raise"}, worker=1)
    for said in trainer.order(2):
        assert said["type"] == "SyncFailedError"
        assert said["causes"] == {"two": "LoadError"}
        assert said["seconds"] < AT_ONCE_S, "an error ends the sync at once, not at its deadline"
    assert of_process(trainer.ranks[0].pid) == set(), "what an engine may be reading still is never written again"
    check_serving(one, 1, 1)
    check_serving(two, 1, 1)
    assert trainer.order(3)[0]["engines"] == ("one", "two")
    assert of_process(trainer.ranks[0].pid).isdisjoint(before)
    check_serving(one, 3, 3)
    check_serving(two, 3, 3)
    assert [said["type"] for said in trainer.order("close")] == ["ok"] * ranks
    assert [of_process(rank.pid) for rank in trainer.ranks] == [set()] * ranks


@pytest.mark.parametrize(("strategy", "at"), [("cuda_ipc", "load"), ("packed_cuda_ipc", "commit")])
def test_an_engine_is_killed(start: Any, strategy: str, at: str) -> None:
    """While it has the trainer's memory mapped: the survivor goes on, and the memory is not held by the dead."""
    one, two, trainer = setup(start, push=push_with(strategy))
    fault = {"at": at, "do": "kill"} | ({"chunk": 2} if at == "load" else {})
    one.ask("arm", fault)
    said = trainer.sync(2)
    assert said["type"] in {"SyncFailedError", "TransferError"}
    assert said["seconds"] < AT_ONCE_S
    said = trainer.sync(3)
    assert (said["engines"], said["lost"]) == (("two",), ("one",))
    check_serving(two, 3, 3)


def test_a_worker_is_killed_while_it_reads(start: Any) -> None:
    """One of two worker processes: its engine refuses to serve, the other one goes on."""
    one, two, trainer = setup(start, push=push_with("cuda_ipc"))
    two.ask("arm", {"at": "load", "chunk": 1, "do": "kill"}, worker=1)
    said = trainer.sync(2)
    assert said["type"] == "SyncFailedError"
    assert said["seconds"] < AT_ONCE_S
    check_serving(one, 1, 1)
    assert two.generate()[0] == "NotServingError"
    assert trainer.sync(3)["engines"] == ("one",)
    check_serving(one, 3, 3)


@pytest.mark.parametrize("ranks", [2])
def test_an_engine_hangs_in_the_middle(start: Any, ranks: int) -> None:
    """It costs every rank the deadline; when it wakes up it reads old memory on, aborts and serves version 1."""
    one, two, trainer = setup(start, ranks=ranks, push=push_with("packed_cuda_ipc", **QUICK))
    one.ask("arm", {"at": "load", "chunk": 2, "do": "stop"})
    for said in trainer.order(2):
        assert said["type"] in {"DeadlineExceededError", "SyncFailedError"}
        assert said["seconds"] < DEADLINE_S
    check_serving(two, 1, 1)
    one.child.cont()
    check_serving(one, 1, 1)
    end = time.monotonic() + 60
    version = 3
    while trainer.order(version)[0].get("engines") != ("one", "two"):
        assert time.monotonic() < end
        version += 1
    check_serving(one, version, version)
    check_serving(two, version, version)


def test_a_late_reader_reads_what_was_lent_to_it_and_commits_nothing(start: Any) -> None:
    """A slow engine sits in version 2 while another one fails it and version 3 is pushed to that one alone.

    That it reads the old bytes is in unit/transfer/test_ipc.py.
    """
    one, two, trainer = setup(start, push=push_with("packed_cuda_ipc", transfer_timeout_s=8.0))
    one.ask("arm", {"at": "load", "chunk": 1, "do": "stop"})
    two.ask("arm", {"at": "load", "chunk": 1, "do": "raise"}, worker=0)
    trainer.ranks[0].conn.send(2)
    _wait_until_stopped(one.worker_pids[0])
    assert trainer.ranks[0].recv(30)["causes"] == {"two": "LoadError"}
    assert trainer.sync(3)["engines"] == ("two",)
    one.child.cont()
    check_serving(one, 1, 1)
    check_serving(two, 3, 3)


@pytest.mark.parametrize(("strategy", "ranks", "victim"), [("cuda_ipc", 2, 0), ("packed_cuda_ipc", 2, 1)])
def test_a_training_rank_is_killed(start: Any, strategy: str, ranks: int, victim: int) -> None:
    """The other rank raises, engines keep version 1, and the next process that lends unlinks the dead one's."""
    one, two, trainer = setup(start, ranks=ranks, push=push_with(strategy, **QUICK))
    lent = of_process(trainer.ranks[0].pid)
    assert len(lent) == 3
    trainer.order("die in extraction", [victim])
    for rank in trainer.ranks:
        rank.conn.send(2)
    said = trainer.ranks[1 - victim].recv(30)
    assert said["type"] in {"TrainerRankError", "ExtractError", "TransferAbortedError"}
    assert said["seconds"] < DEADLINE_S
    trainer.ranks[victim].process.join(5)
    check_serving(one, 1, 1)
    fresh = Trainer(start, {"one": one.url, "two": two.url}, **push_with(strategy))
    assert fresh.sync("initialize")["type"] == "ok"
    assert fresh.sync(0)["engines"] == ("one", "two")
    assert not lent & segments(), "either unlinked by their owner after the failure, or reclaimed from the dead"
    check_serving(one, 0, 1)
    check_serving(two, 0, 1)


def test_the_trainer_dies_and_engines_abort_by_their_deadline(start: Any) -> None:
    """Nobody tells them; then they let go of its memory. What is half-loaded is not served; a new trainer heals."""
    one, two, trainer = setup(start, in_place=True, push=push_with("cuda_ipc", **QUICK))
    assert mapped(one.worker_pids[0])
    trainer.order("die in extraction")
    trainer.ranks[0].conn.send(2)
    trainer.ranks[0].process.join(10)
    end = time.monotonic() + QUICK["transfer_timeout_s"] + 15
    while mapped(one.worker_pids[0]) or any(mapped(pid) for pid in two.worker_pids):
        assert time.monotonic() < end, "memory of a dead trainer stays mapped"
        assert one.generate()[0] == "NotServingError"
    fresh = Trainer(start, {"one": one.url, "two": two.url}, **push_with("cuda_ipc"))
    assert fresh.sync("initialize")["type"] == "ok"
    assert fresh.sync(7)["engines"] == ("one", "two")
    check_serving(one, 7, 1)
    check_serving(two, 7, 1)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_bit_flips_on_the_way(start: Any, strategy: str) -> None:
    """A reader writes where it should read: found by the digest, seen by nobody else, gone at the next sync."""
    one, two, trainer = setup(start, push=push_with(strategy))
    two.ask("arm", {"at": "load", "chunk": 1, "do": "corrupt"}, worker=0)
    assert trainer.sync(2)["causes"] == {"two": "DigestMismatchError"}
    check_serving(one, 1, 1)
    check_serving(two, 1, 1)
    assert trainer.sync(3)["equal"] is True
    check_serving(one, 3, 3)
    check_serving(two, 3, 3)


def test_an_engine_on_another_host_is_told_so(start: Any, tmp_path: Path) -> None:
    """It sees other shared memory: refused in words, by name; nothing is half-loaded, and broadcast is named."""
    one = Engine(start, "one", 1, blocks=6)
    far = Engine(start, "far", 1, blocks=6, shared_memory=str(tmp_path))
    trainer = Trainer(start, {"one": one.url, "far": far.url}, **push_with("cuda_ipc"))
    assert trainer.sync("initialize")["type"] == "ok"
    said = trainer.sync(1)
    assert said["type"] == "SyncFailedError"
    assert said["causes"] == {"far": "UnsupportedError"}
    assert "broadcast" in said["text"]
    assert said["seconds"] < AT_ONCE_S
    assert one.generate() == ("ok", one.generate()[1], "None")


@pytest.mark.parametrize("full", [0, 1])
def test_shared_memory_is_full(start: Any, tmp_path: Path, full: int) -> None:
    """The system refuses more on one rank's host: typed, on every rank, with what is left; then there is room again.

    Rank 1 is on "another host" with engine two, so both ranks lend.
    """
    one = Engine(start, "one", 1, blocks=6)
    two = Engine(start, "two", 2, blocks=6, shared_memory=str(tmp_path))
    trainer = Trainer(
        start, {"one": one.url, "two": two.url}, 2, **push_with("packed_cuda_ipc", shared_memory={1: str(tmp_path)})
    )
    assert [said["type"] for said in trainer.order("initialize")] == ["ok", "ok"]
    trainer.order("no room", [full])
    for said in trainer.order(1):
        assert said["type"] == "SharedMemoryError"
        assert "left" in said["text"]
        assert said["seconds"] < AT_ONCE_S
    assert one.generate()[2] == "None"
    trainer.order("room", [full])
    assert trainer.order(4)[0]["engines"] == ("one", "two")
    check_serving(one, 4, 2)
    check_serving(two, 4, 2)
    assert [said["type"] for said in trainer.order("close")] == ["ok", "ok"]
    assert not [name for name in os.listdir(tmp_path) if not name.startswith("weightsync-host-")]


@pytest.mark.parametrize("ranks", [1, 2])
def test_shared_memory_is_full_where_one_rank_lends(start: Any, ranks: int) -> None:
    """After a failure it needs new segments, and there are none; the other rank learns it by the next agreement.

    Seen to fail: without that agreement the two ranks met in different collectives.
    """
    one, two, trainer = setup(start, ranks=ranks, push=push_with("cuda_ipc"))
    two.ask("arm", {"at": "load", "chunk": 0, "do": "raise"})
    assert trainer.order(2)[0]["type"] == "SyncFailedError"
    trainer.order("no room", [0])
    for said in trainer.order(3):
        assert said["type"] == "SharedMemoryError"
        assert said["seconds"] < AT_ONCE_S
    check_serving(one, 1, 1)
    trainer.order("room", [0])
    assert trainer.order(4)[0]["engines"] == ("one", "two")
    check_serving(two, 4, 4)


def test_a_stale_segment_of_a_dead_process_is_no_obstacle(start: Any) -> None:
    """One whose owner was killed goes when the trainer makes its own; one whose owner lives stays."""
    with Segment(1 << 20) as mine:
        dead = start(_hold_a_segment, talk=True)
        stale = dead.recv(30)
        assert stale in segments()
        os.kill(dead.pid, signal.SIGKILL)  # from here on whoever makes a segment on this host may take it away
        dead.process.join(5)
        setup(start, push=push_with("cuda_ipc"))
        assert stale not in segments()
        assert mine.name in segments()


def _hold_a_segment(conn: Any) -> None:
    with Segment(1 << 20) as segment:
        conn.send(segment.name)
        conn.recv()
