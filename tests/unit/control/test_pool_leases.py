"""Leases in every interleaving: they end at the service before they end at the pool, and nobody comes in behind."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.unit.control.pool_kit import LEASE_S, MODELS, at, beat, made, states
from weightsync.control.pool import RolloutPool
from weightsync.errors import StateError
from weightsync.types.fleet import HeartbeatReply, HeartbeatRequest, ModelVersion

NAMES = ("a", "b")


@dataclasses.dataclass(eq=False)
class Exchange:
    """A heartbeat on its way, there or back."""

    sent_s: float
    beat: HeartbeatRequest
    reply: HeartbeatReply | None = None
    answered: bool = False


class Process:
    """One life of a service, with its own view of its lease."""

    def __init__(self, name: str, incarnation: str) -> None:
        self.name, self.incarnation = name, incarnation
        self.alive = True
        self.lease_end_s = 0.0
        self.serves = dict.fromkeys(MODELS, 0)  # 0: nothing
        self.whole = True
        self.catch_up: tuple[ModelVersion, ...] = ()
        self.exchange: Exchange | None = None

    def request(self, now_s: float) -> HeartbeatRequest:
        serves = tuple(at(version, model=model) for model, version in self.serves.items() if version)
        lacks = tuple(model for model, version in self.serves.items() if not version)
        left_s = max(0.0, self.lease_end_s - now_s)
        return beat(
            self.name, *serves, incarnation=self.incarnation, lacks=lacks, whole=self.whole, left_s=left_s,
            leased=left_s > 0,
        )  # fmt: skip

    def heard(self, reply: HeartbeatReply, sent_s: float) -> None:
        if reply.state == "joining" and reply.lease_s:
            return  # what it was lent before stays until it is over
        if reply.lease_s <= 0:
            self.lease_end_s = 0.0
        elif reply.admitted:
            self.whole = True
        if reply.lease_s:
            self.lease_end_s = max(self.lease_end_s, sent_s + reply.lease_s)
        self.catch_up = reply.catch_up

    def catches_up(self) -> None:
        for each in self.catch_up:
            self.serves[each.model_id] = max(self.serves[each.model_id], each.version)


class Leases(RuleBasedStateMachine):
    """Heartbeats are sent, lost and late in any order, while versions are synced; and services die, or are started
    twice, and so does the controller. A process that is dead leaves engines behind that answer until their lease is
    over."""

    @initialize()
    def begin(self) -> None:
        self.pool, self.clock = made()
        self.lives = itertools.count(1)
        self.processes = {name: self.start(name) for name in NAMES}
        self.gone: list[Process] = []
        self.late: list[HeartbeatRequest] = []
        self.version, self.started_again = 0, False
        self.least: dict[str, int] | None = dict.fromkeys(MODELS, 0)  # None: the controller listens
        self.sync: Any = None
        self.members: list[Any] = []
        self.done: set[str] = set()
        self.evicted: list[str] = []
        for name in NAMES:
            self.is_quick(name)

    def start(self, name: str) -> Process:
        return Process(name, str(next(self.lives)))

    # --- heartbeats ---

    @rule(name=st.sampled_from(NAMES))
    def sends(self, name: str) -> None:
        process = self.processes[name]
        if process.exchange is None:
            process.exchange = Exchange(self.clock.now, process.request(self.clock.now))

    @rule(name=st.sampled_from(NAMES))
    def arrives(self, name: str) -> None:
        exchange = self.processes[name].exchange
        if exchange is not None and not exchange.answered:
            exchange.reply, exchange.answered = self.answer(exchange.beat), True

    @rule(name=st.sampled_from(NAMES))
    def is_heard(self, name: str) -> None:
        process = self.processes[name]
        exchange = process.exchange
        if exchange is not None and exchange.answered:
            process.exchange = None
            if exchange.reply is not None:
                process.heard(exchange.reply, exchange.sent_s)

    @rule(name=st.sampled_from(NAMES))
    def is_quick(self, name: str) -> None:
        self.sends(name)
        self.arrives(name)
        self.is_heard(name)

    @rule(name=st.sampled_from(NAMES), comes_later=st.booleans())
    def is_lost(self, name: str, comes_later: bool) -> None:
        process = self.processes[name]
        if process.exchange is not None and not process.exchange.answered and comes_later:
            self.late.append(process.exchange.beat)
        process.exchange = None

    @precondition(lambda self: self.late)
    @rule()
    def arrives_late(self) -> None:
        self.answer(self.late.pop(0))

    def answer(self, request: HeartbeatRequest) -> HeartbeatReply | None:
        before = request.instance_id in {each.instance_id for each in self.pool.members(MODELS)}
        try:
            reply = self.pool.heartbeat(request)
        except StateError:
            return None
        if reply.lease_s and reply.state == "live" and not before:
            assert self.sync is None, "nobody comes in while a sync runs"
            for model in MODELS:
                current = self.pool.current(model)
                served = {each.model_id: each.version for each in request.serves}.get(model, 0)
                assert current is None or served >= current.version, "nobody comes in behind what is current"
        return reply

    # --- processes ---

    @rule(name=st.sampled_from(NAMES))
    def catches_up(self, name: str) -> None:
        self.processes[name].catches_up()

    @rule(name=st.sampled_from(NAMES), dies=st.booleans())
    def another_of_its_name(self, name: str, dies: bool) -> None:
        """The one before is dead, or goes on as it is, and sends nothing more but what is on its way."""
        before = self.processes[name]
        self.gone.append(before)
        if before.exchange is not None and not before.exchange.answered:
            self.late.append(before.exchange.beat)
        if not dies and before.exchange is not None and before.exchange.reply is not None:
            before.heard(before.exchange.reply, before.exchange.sent_s)
        self.processes[name] = self.start(name)

    @rule(seconds=st.sampled_from([0.0, 1.0, 2.0, 4.0, 7.0, LEASE_S]))
    def time_passes(self, seconds: float) -> None:
        self.clock.now += seconds

    @rule()
    def the_controller_is_started_again(self) -> None:
        """It knows nothing, and a sync of the one before ends where it was. Heartbeats on their way reach this one."""
        self.pool = RolloutPool(lease_s=LEASE_S, clock=self.clock)
        self.least, self.sync, self.started_again = None, None, True

    # --- syncs ---

    @precondition(lambda self: self.sync is None and self.pool.members(MODELS))
    @rule()
    def a_sync_begins(self) -> None:
        self.sync = self.pool.syncing()
        self.sync.__enter__()
        self.members = list(self.pool.members(MODELS))
        self.done, self.evicted, self.decided = set(), [], False

    @precondition(lambda self: self.sync is None and len(self.pool.members(MODELS)) == len(NAMES))
    @rule(index=st.integers(0, 1))
    def the_controller_dies_in_a_sync(self, index: int) -> None:
        """All have served one version, and one of them has the next."""
        for both in (True, False):
            if len(self.pool.members(MODELS)) < len(NAMES):
                return  # one of them had died
            self.a_sync_begins()
            self.is_decided()
            self.commits(index, halfway=False)
            if both:
                self.commits(1 - index, halfway=False)
                self.the_sync_ends()
        self.the_controller_is_started_again()

    @precondition(lambda self: self.sync is not None and not self.decided and self.members)
    @rule()
    def is_decided(self) -> None:
        self.version += 1
        self.decided = True
        self.least = dict.fromkeys(MODELS, self.version)
        self.pool.decided([at(self.version, model=model) for model in MODELS])

    @precondition(lambda self: self.sync is not None and self.decided)
    @rule(index=st.integers(0, 1), halfway=st.booleans())
    def commits(self, index: int, halfway: bool) -> None:
        member = self.members[index % len(self.members)]
        process = self.processes[member.instance_id]
        if process.incarnation != member.incarnation or member.instance_id in self.done | set(self.evicted):
            return
        process.serves["m"] = self.version
        process.whole = not halfway
        if halfway:
            self.evicts(index)
        elif self.pool.takes_part(member):
            process.serves["n"] = self.version
            self.done.add(member.instance_id)

    @precondition(lambda self: self.sync is not None and self.members)
    @rule(index=st.integers(0, 1))
    def evicts(self, index: int) -> None:
        name = self.members[index % len(self.members)].instance_id
        if name not in self.done:
            self.pool.evict(name, "as told")
            self.evicted.append(name)

    @precondition(lambda self: self.sync is not None)
    @rule()
    def the_sync_ends(self) -> None:
        """As a method ends it: whoever has not committed is evicted, and its lease is over."""
        if self.decided:
            for index, member in enumerate(self.members):
                if member.instance_id not in self.done:
                    self.evicts(index)
            while self.pool.unfenced(MODELS):
                self.clock.now += 1.0
        self.sync.__exit__(None, None, None)
        self.sync = None

    # --- what must hold ---

    def holders(self) -> list[Process]:
        return [each for each in [*self.processes.values(), *self.gone] if each.lease_end_s > self.clock.now]

    def listens(self) -> bool:
        if self.least is None:
            self.pool.members(MODELS)
            if not self.pool._learning.until_s:
                current = {model: self.pool.current(model) for model in MODELS}
                self.least = {model: 0 if found is None else found.version for model, found in current.items()}
        return self.least is None

    @invariant()
    def who_is_taken_for_lost_has_no_lease(self) -> None:
        if self.listens():
            return
        for name in NAMES:
            found = [each for each in self.holders() if each.name == name]
            live = [member for member in self.pool.members(MODELS) if member.instance_id == name]
            if not live:
                assert not (found and self.pool.fenced(name)), f"{name} is fenced, and still answers"
            for process in found:
                assert not live or process.incarnation == live[0].incarnation, (
                    f"two processes of the name {name} have a lease"
                )

    @invariant()
    def nobody_answers_with_an_old_version(self) -> None:
        if self.sync is None and not self.listens():
            assert self.least is not None
            for process in self.holders():
                if process.whole:  # else its engines refuse by themselves
                    assert all(process.serves[model] >= self.least[model] for model in MODELS), process.name

    def teardown(self) -> None:
        """Who keeps its heartbeats and catches up comes in, whatever was before."""
        if not hasattr(self, "pool"):
            return
        if self.sync is not None:
            self.the_sync_ends()
        self.clock.now += LEASE_S
        if self.started_again:
            self.pool.decided([at(self.version + 1, model=model) for model in MODELS])  # a trainer's next word
        for _ in range(4):
            for name, process in self.processes.items():
                process.exchange = None
                self.is_quick(name)
                process.catches_up()
            self.clock.now += 1.0
            self.who_is_taken_for_lost_has_no_lease()
        assert states(self.pool) == dict.fromkeys(NAMES, "live")
        assert {each.name for each in self.holders()} == set(NAMES)
        assert all(process.whole for process in self.processes.values())


TestLeases = Leases.TestCase
TestLeases.settings = settings(max_examples=250, stateful_step_count=50, deadline=None)
