"""The swarm of one read: who is asked for what, and that a bad peer costs a turn elsewhere."""

from __future__ import annotations

import collections
from collections.abc import Iterable

from weightsync.errors import DigestMismatchError, EngineUnreachableError
from weightsync.transfer.relay_pick import Swarm
from weightsync.transfer.relay_standing import Standing
from weightsync.transfer.relay_work import AgentWork, PeerWork
from weightsync.types.relay_messages import RelayPeer, have_bytes

NUM = 20


class Clock:
    def __init__(self) -> None:
        self.now_s = 50.0

    def __call__(self) -> float:
        return self.now_s


def peer(name: str, has: Iterable[int], zone: str | None = None) -> RelayPeer:
    have = have_bytes(sum(1 << number for number in has), NUM)
    return RelayPeer(receiver_id=name, host="10.0.0.1", port=1, zone=zone, tls=False, have=have)


def swarm(wanted: Iterable[int] = range(NUM), *, zone: str | None = None, clock: Clock | None = None) -> Swarm:
    clock = clock or Clock()
    return Swarm(
        NUM, wanted, zone=zone, standing=Standing(clock), size_of=lambda _: 100, first_patience_s=10.0, clock=clock,
        seed=1,
    )  # fmt: skip


def test_the_rarest_block_is_asked_for_first() -> None:
    """Seen to fail with the tiers left out."""
    there = swarm()
    there.told([peer("a", range(NUM)), peer("b", range(1, NUM)), peer("c", range(2, NUM))], [])
    assert there.take_from_peer("a", wait=False) == 0
    assert there.take_from_peer("a", wait=False) == 1


def test_no_block_is_asked_of_two() -> None:
    there = swarm()
    there.told([peer("a", range(NUM)), peer("b", range(NUM))], range(5))
    taken = [there.take_from_agent(wait=False) for _ in range(5)]
    for name in ("a", "b") * NUM:
        taken.append(there.take_from_peer(name, wait=False))
    assert sorted(block for block in taken if block is not None) == list(range(NUM))


def test_the_own_zone_is_asked_first() -> None:
    there = swarm(zone="here")
    order = there.told([peer("far", range(NUM), "there"), peer("near", range(10), "here")], [])
    assert [each.receiver_id for each in order] == ["near", "far"]
    assert {there.take_from_peer("far", wait=False) for _ in range(11)} == {*range(10, NUM), None}


def test_a_wrong_block_ends_the_peer_and_comes_from_elsewhere() -> None:
    there = swarm([3])
    there.told([peer("bad", [3]), peer("good", [3])], [])
    work = PeerWork(there, "bad")
    assert work.take(idle=False) == 3
    work.wrong(3)
    assert not work.busy
    assert isinstance(work.error, DigestMismatchError)
    assert there.error is None
    assert [each.receiver_id for each in there.told([peer("bad", [3]), peer("good", [3])], [])] == ["good"]
    assert there.take_from_peer("good", wait=False) == 3
    there.arrived_from_peer("good", 3)
    assert there.over
    assert (there.num_left, there.peer_bytes, there.num_cut) == (0, 100, 1)


def test_what_only_bad_peers_have_is_stuck() -> None:
    there = swarm()
    there.told([peer("bad", range(4))], [])
    assert there.stuck() == 0
    there.peer_failed("bad")
    assert there.stuck() == 0b1111


def test_peers_that_stand_still_are_asked_once_for_a_block_and_for_a_shorter_time_each() -> None:
    """Seen to fail: asked in turns again and again for ten seconds each, as long as their pauses were shorter than
    that: a version of one block took more than a minute."""
    clock = Clock()
    there = swarm([3], clock=clock)
    told = [peer(name, [3]) for name in ("a", "b", "c")]
    begun_s = clock.now_s
    for name in ("a", "b", "c"):
        assert there.stuck() == 0
        there.told(told, [])
        assert there.take_from_peer(name, wait=False) == 3
        while not there.slow_peers():
            clock.now_s += 0.5
        there.not_from_peer(name, [3])
        there.peer_failed(name)
        clock.now_s += 0.5
    assert clock.now_s - begun_s < 21
    clock.now_s += 1.5  # all of them may be asked again, for other blocks
    there.told(told, [])
    assert there.take_from_peer("a", wait=False) is None
    assert there.stuck() == 1 << 3
    there.agent_failed(EngineUnreachableError("gone"))
    assert there.take_from_peer("a", wait=False) == 3, "it is the only hope"


def test_a_block_that_bad_peers_did_not_give_is_asked_of_a_good_one() -> None:
    """Seen to fail: kept for the agent, which had given it to another host that never came back."""
    there = swarm([3])
    told = [peer(name, [3]) for name in ("a", "b", "good")]
    for name in ("a", "b"):
        there.told(told, [])
        assert there.take_from_peer(name, wait=False) == 3
        there.not_from_peer(name, [3])
        there.peer_failed(name)
    there.told(told, [])
    assert there.stuck() == 0
    assert there.take_from_peer("good", wait=False) == 3


def test_a_peer_that_is_slow_is_named() -> None:
    """After blocks have come fast elsewhere its patience is a second; before any, the stream's."""
    clock = Clock()
    there = swarm(clock=clock)
    there.told([peer("slow", range(NUM)), peer("fast", range(NUM))], [])
    assert there.take_from_peer("slow", wait=False) is not None
    clock.now_s += 9
    assert there.slow_peers() == []
    block = there.take_from_peer("fast", wait=False)
    assert block is not None
    there.arrived_from_peer("fast", block)
    assert there.slow_peers() == ["slow"]


def test_standing_lasts_longer_each_time_and_is_forgiven() -> None:
    clock = Clock()
    standing = Standing(clock)
    pauses = []
    for _ in range(4):
        standing.strike("a")
        begun_s = clock.now_s
        while not standing.usable("a"):
            clock.now_s += 0.25
        pauses.append(clock.now_s - begun_s)
    assert pauses == [0.5, 1.0, 2.0, 4.0]
    standing.gave("a", 100, 1.0)
    standing.strike("a")
    clock.now_s += 0.5
    assert standing.usable("a")
    standing.strike("a", wrong=True)
    clock.now_s += 100
    assert not standing.usable("a")


def test_not_every_name_is_kept() -> None:
    standing = Standing(Clock())
    for number in range(5000):
        standing.strike(f"host-{number}")
        standing.gave(f"host-{number}", 100, 1.0)
    assert max(len(standing._until_s), len(standing._rates)) < 4100
    assert not standing.usable("host-4999")


def test_slow_peers_come_last() -> None:
    standing = Standing(Clock())
    standing.gave("slow", 100, 10.0)
    standing.gave("fast", 100, 0.1)
    assert standing.fast_first(["slow", "new", "fast"]) == ["new", "fast", "slow"]


def test_without_the_agent_peers_may_have_all_of_it() -> None:
    there = swarm([1, 2])
    there.told([peer("a", [1, 2])], [])
    AgentWork(there).fail(EngineUnreachableError("gone"))
    there.check_hope()
    assert there.error is None
    for _ in range(2):
        block = there.take_from_peer("a", wait=False)
        assert block is not None
        there.arrived_from_peer("a", block)
    assert there.over
    assert there.error is None


def test_what_a_peer_is_asked_for_is_asked_of_no_other_when_the_agent_is_gone() -> None:
    """The agent's answer named it too. Seen to fail where that ended its flight: two streams would write one place."""
    there = swarm([3])
    there.told([peer("a", [3]), peer("b", [3])], [])
    assert there.take_from_peer("a", wait=False) == 3
    there.told([peer("a", [3]), peer("b", [3])], [3])
    AgentWork(there).fail(EngineUnreachableError("gone"))
    assert there.take_from_peer("b", wait=False) is None


def test_what_was_asked_of_an_agent_that_is_gone_comes_from_peers() -> None:
    """Put back by another stream than the one that found out, and named by a later answer. Seen to fail where such
    blocks waited for the agent: the read hung."""
    there = swarm([3, 4])
    there.told([peer("a", [3, 4])], [3])
    assert there.take_from_agent(wait=False) == 3
    AgentWork(there).fail(EngineUnreachableError("gone"))
    AgentWork(there).put_back(collections.deque([3]))
    there.told([peer("a", [3, 4])], [4])
    assert {there.take_from_peer("a", wait=False) for _ in range(2)} == {3, 4}


def test_a_peer_may_fail_for_days() -> None:
    """Its port is closed by a firewall, and it reports. Seen to fail without a bound: the number is no float."""
    clock = Clock()
    standing = Standing(clock)
    for _ in range(1100):
        standing.strike("a")
    clock.now_s += 60
    assert standing.usable("a")


def test_without_agent_and_peers_there_is_no_hope() -> None:
    there = swarm([1, 2])
    there.told([peer("a", [1])], [])
    AgentWork(there).fail(EngineUnreachableError("gone"))
    there.check_hope()
    assert isinstance(there.error, EngineUnreachableError)


def test_alone_everything_is_the_agents() -> None:
    there = swarm([1, 2])
    there.go_alone()
    work = AgentWork(there)
    assert {work.take(idle=False), work.take(idle=False)} == {1, 2}
    work.wrong(1)
    assert work.take(idle=False) == 1
    work.wrong(1)
    work.take(idle=False)
    work.wrong(1)
    assert isinstance(there.error, DigestMismatchError)
    assert "the agent did not say" in there.because()
