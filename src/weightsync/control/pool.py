"""RolloutPool: which rollout services take part, and until when each may answer.

    joining --serves what is current--> live --heartbeat late--> suspect --lease over--> evicted --heartbeat--> joining
                                          └──────────── evict() ────────────────────────────┘

A service heartbeats; the answer lends it a lease. The pool takes a lease for lost only when it has ended here, which
is later than there. Nobody comes in while a version is on its way: it would miss the commit.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import msgspec

from weightsync.control.admission import Admission
from weightsync.control.goals import FleetGoals
from weightsync.control.instance import Instance, Member
from weightsync.control.learning import Learning
from weightsync.errors import ConfigError, StateError
from weightsync.types import Deadline, Version
from weightsync.types.control import InstanceStatus
from weightsync.types.fleet import MAX_LEASE_S, HeartbeatReply, HeartbeatRequest, ModelVersion

_BEATS_A_LEASE = 3.0
_LATE_BEATS = 1.5
_FORGET_LEASES = 60.0
_MAX_INSTANCES = 4096
_LOOK_S = 0.05
_SOON_S = 0.5
_NAMED = 3

_logger = logging.getLogger(__name__)


class RolloutPool:
    """The instances of a controller. Thread-safe.

    Args:
        lease_s: for how long an instance may answer after a heartbeat; one that is cut off refuses after so long, and
            the others wait so long for it.
        models: what instances may have; None: anything.
        clock: seconds; never goes back.

    Raises:
        ConfigError: a lease that can't be.
    """

    def __init__(
        self, *, lease_s: float = 10.0, models: Sequence[str] | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        if not 0.1 <= lease_s <= MAX_LEASE_S:
            raise ConfigError(f"lease_s is between 0.1 and {MAX_LEASE_S:g} seconds, not {lease_s}")
        self.lease_s = lease_s
        self._clock = clock
        self._models = None if models is None else frozenset(models)
        self._changed = threading.Condition()
        self._instances: dict[str, Instance] = {}
        self._goals = FleetGoals(self._is_coming)
        self._digests: dict[str, tuple[Version, str]] = {}  # of what is current, as instances that take part say
        self._syncs: list[dict[str, ModelVersion]] = []  # what each sync that runs brings; empty: nobody knows
        self._learning = Learning(self._goals, clock() + lease_s, lambda versions: self.on_learnt(versions))
        self._admission = Admission(self._goals, self._learning, self._syncs)
        self._left_for_good: dict[tuple[str, str], None] = {}  # the oldest first
        self._listeners: list[Callable[[], None]] = []
        self.on_learnt: Callable[[tuple[ModelVersion, ...]], None] = lambda versions: None
        self.on_members: Callable[[], object] = lambda: None  # see `SyncMethod.attach`

    # --- what instances say ---

    def heartbeat(self, beat: HeartbeatRequest) -> HeartbeatReply:
        """An instance is there; whether it may answer. One that leaves is forgotten: no sync waits for it.

        Raises:
            StateError: another process has its name, and a lease; it has a model that nobody here knows; or a later
                word of the same process was heard before. Nothing is lent.
        """
        if beat.leaving:
            return self._left(beat)
        strangers = {each.model_id for each in beat.serves} | set(beat.lacks)
        if self._models is not None and (strangers := strangers - self._models):
            raise StateError(
                f"this controller has the models {', '.join(sorted(self._models))}; service {beat.instance_id} brings "
                f"{', '.join(sorted(strangers))}: see fleet.models of its configuration",
                state_left="it gets no lease",
            )
        with self._changed:
            now = self._swept()
            known = self._instances.get(beat.instance_id)
            left = (beat.instance_id, beat.incarnation) in self._left_for_good
            if left or (known is not None and known.has_said_more_than(beat)):
                raise StateError(
                    f"a later heartbeat of instance {beat.instance_id!r} was heard before this one",
                    state_left="nothing was changed",
                )
            if known is not None and known.beat.incarnation != beat.incarnation:
                if now < known.lease_end_s:  # also one that was evicted, and may not know
                    raise StateError(
                        f"another process is instance {beat.instance_id!r} and has a lease for "
                        f"{known.lease_end_s - now:.1f} s: give each its own name (--name or service_id), or wait",
                        state_left="the other one goes on",
                    )
                known = None
            if known is None:
                if len(self._instances) >= _MAX_INSTANCES and beat.instance_id not in self._instances:
                    raise StateError(f"this controller knows {_MAX_INSTANCES} instances already", state_left="no lease")
                known = self._instances[beat.instance_id] = Instance(beat=beat, heard_s=now)
                _logger.info("instance %s joins from %s", beat.instance_id, beat.url)
            if now < self._learning.until_s and known.beat.leased:  # it could answer when this controller began
                beat = msgspec.structs.replace(beat, leased=True)
            known.torn = not beat.whole
            if not self._goals.mixes([*beat.lacks, *(each.model_id for each in beat.serves)]):
                beat = msgspec.structs.replace(beat, whole=True)
            was, awaited = known.serves(), bool(known.awaits)
            known.beat, known.heard_s = beat, now
            if not known.takes_part:  # whoever has lent it that
                known.lease_end_s = max(known.lease_end_s, now + beat.left_s)
            if now < self._learning.until_s and known.goes_on:  # it is over before anything is decided here
                self._learning.until_s = max(self._learning.until_s, known.lease_end_s)
            heard = [each.beat for each in self._instances.values() if self._is_fresh(each, now)]
            goals = dict(self._goals.current)
            for each in beat.absent:
                self._goals.deny(each)
            if goals.keys() > self._goals.current.keys() and not self._learning.until_s:
                self._learning.learn(heard)  # nothing is left to serve
            elif goals != self._goals.current and any(each.newest is not None for each in beat.absent):
                self.on_members()  # less is there than was told of
            if not known.takes_part and beat.whole:
                self._goals.returns(known.serves())
            if not known.takes_part and self._admission.held_up(known, now) is not None:
                self._goals.offer(beat.instance_id, known.serves(), (*beat.staged, *beat.serves), now)
            if self._learning.learn_more(beat, heard, answers=known.takes_part) and known.takes_part:
                ahead = self._admission.ahead(known)  # it has no part in that sync
                self._leave(known, f"it serves {ahead}", shown=False)
            reply = self._answer(known, now)
            if known.takes_part:
                self._note_digests(known)
            elif known.serves() != was:
                self.on_members()  # it may have what a sync has failed to bring the others
            elif awaited and not known.awaits:
                self._miss(known)  # it fails
            self._tell()
            return reply

    def _left(self, beat: HeartbeatRequest) -> HeartbeatReply:
        with self._changed:
            self._left_for_good[beat.instance_id, beat.incarnation] = None
            if len(self._left_for_good) > _MAX_INSTANCES:
                del self._left_for_good[next(iter(self._left_for_good))]
            known = self._instances.get(beat.instance_id)
            if known is not None and known.beat.incarnation == beat.incarnation:  # else it is a newer process
                del self._instances[beat.instance_id]
                _logger.info("instance %s leaves", beat.instance_id)
                self._one_less(known)
                self._tell()
        return HeartbeatReply(state="evicted", lease_s=0.0, every_s=self.lease_s, why="it leaves")

    def _answer(self, known: Instance, now: float) -> HeartbeatReply:
        ahead, models = self._admission.ahead(known) if known.takes_part else None, known.serves().keys()
        behind = self._admission.behind(known) or ahead
        if known.beat.leased:
            known.let_in = None
        elif known.takes_part and (ahead or (behind and known.let_in not in (None, known.serves()))):
            # it was let in for what it served before, and has taken no lease
            self._leave(known, f"it serves {behind}", shown=False)
        every_s = self.lease_s / _BEATS_A_LEASE
        if known.takes_part and behind and not any(not goals or goals.keys() & models for goals in self._syncs):
            if not known.doubted:  # its heartbeat may be from before its commit: it gets no more than it has
                known.doubted = True
                left_s = known.lease_end_s - now
                return HeartbeatReply(state="suspect", lease_s=left_s, every_s=min(every_s, 1.0), why=behind)
            self._leave(known, f"it serves {behind}", shown=False)
        known.doubted = False
        if known.state == "evicted":
            known.state = "joining"
        if known.state == "joining" and self._admission.held_up(known, now) is None:
            self._come_in(known)
        if known.takes_part:
            admitted, known.fresh = known.fresh or (known.torn and not self._syncs), False
            known.state = "live"
            known.lease_end_s = max(known.lease_end_s, now + self.lease_s)
            every_s = every_s if known.let_in is None else min(every_s, _SOON_S)
            return HeartbeatReply(state="live", lease_s=self.lease_s, every_s=every_s, admitted=admitted)
        if now < self._learning.until_s and known.goes_on:
            left_s, every_s = known.lease_end_s - now, min(every_s, 1.0, self._learning.until_s - now + _LOOK_S)
            return HeartbeatReply(state="joining", lease_s=left_s, every_s=every_s, why=self._why(known, now))
        if not known.beat.leased:  # this answer may be lost on its way, but what it has is no lease
            known.lease_end_s = min(known.lease_end_s, now)
        wanted = self._goals.tell(known.beat.instance_id, models, self._syncs)
        known_of = {(tag, version): digest for tag, (version, digest) in self._digests.items()}
        digests = {each.model_id: found for each in wanted if (found := known_of.get((each.model_id, each.of)))}
        return HeartbeatReply(
            state="joining", lease_s=0.0, every_s=min(every_s, 1.0), catch_up=wanted, digests=digests,
            why=self._why(known, now) or "it joins",
        )  # fmt: skip

    def _why(self, known: Instance, now: float) -> str | None:
        return self._admission.why(known, now, self._late_s)

    def _let_in(self, now: float, tell: Callable[[], object] | None = None) -> None:
        """Who was heard not long ago, and may come in by now. Its next heartbeat is lent a lease."""
        for each in self._instances.values():
            heard = each.state == "joining" and now - each.heard_s < self.lease_s / 2
            if heard and self._admission.held_up(each, now) is None:
                self._come_in(each, tell)
                each.lease_end_s = max(each.lease_end_s, now + self.lease_s)

    def _come_in(self, known: Instance, tell: Callable[[], object] | None = None) -> None:
        known.state, known.why, known.fresh, known.let_in = "live", None, True, known.serves()
        self._goals.came_in(known.serves())
        (tell or self.on_members)()
        _logger.info("instance %s takes part", known.beat.instance_id)

    # --- what a sync asks ---

    def know_sets(self, sets: Iterable[tuple[str, ...]]) -> None:
        """Which models are served together; all others go by themselves."""
        with self._changed:
            self._goals.know_sets(sets)

    def members(self, models: Sequence[str], *, joining: bool = False) -> tuple[Member, ...]:
        """Who takes part and has any of these models; where `joining`, also who takes none, and was heard of late."""
        with self._changed:
            now = self._swept()
            return tuple(
                each.as_member()
                for each in self._instances.values()
                if (each.takes_part or (joining and self._is_fresh(each, now))) and set(models) & set(each.serves())
            )

    def takes_part(self, member: Member) -> bool:
        """Whether it still does. A sync of many asks this of each, again and again: it looks at that one alone."""
        with self._changed:
            known = self._instances.get(member.instance_id)
            if known is not None and known.takes_part and self._clock() >= known.lease_end_s:
                self._swept()
            return known is not None and known.takes_part and known.beat.incarnation == member.incarnation

    def wait_heard(self, members: Iterable[Member]) -> None:
        """Until each of these was heard once more, or takes part no more: at most a lease."""
        began_s = self._clock()
        self._wait_for(members, lambda known: known.heard_s > began_s, self.lease_s + 1.0)

    def wait_leased(self, members: Iterable[Member]) -> None:
        """Until each of these has said that it may answer, or takes part no more: at most half a lease. One that was
        let in hears of it at its next heartbeat."""
        self._wait_for(members, lambda known: known.let_in is None, self._late_s)

    @contextlib.contextmanager
    def syncing(self, versions: Sequence[ModelVersion] = ()) -> Iterator[None]:
        """While the body runs nobody comes in with anything but these versions, once they are decided. Who joins is
        told of them, fetches them with the others, and comes in at the end: between two syncs there may be no time.

        Args:
            versions: what is brought; where none is given nobody comes in at all.
        """
        goals = {each.model_id: each for each in versions}
        with self._changed:
            self._syncs.append(goals)
            self._learning.brings(versions)
        try:
            yield
        finally:
            with self._changed:
                self._syncs.remove(goals)
                self._let_in(self._swept())
                self._tell()

    def decided(self, versions: Sequence[ModelVersion]) -> None:
        """From now on this is what instances have to serve to come in, or to stay in once the sync has ended. Within a
        run it never goes back."""
        with self._changed:
            self._goals.decide(versions)
            self._tell()

    def claim(self, versions: Sequence[ModelVersion]) -> tuple[Member, ...]:
        """Who takes part and has any of these models. Where nobody does, these are what who comes in has to serve,
        though nobody has fetched them yet: see `FleetGoals`."""
        with self._changed:
            members = self.members([each.model_id for each in versions])
            self._learning.brings(versions)
            if not members:
                self._goals.claim(versions)
                self._tell()
            return members

    def serves(self, versions: Sequence[ModelVersion]) -> bool:
        """Whether the fleet is to serve exactly these, and everybody who takes part does; of each model somebody."""
        with self._changed:
            self._swept()
            wanted = {each.model_id: each.of for each in versions}
            if any(self._goals.current.get(each.model_id) != each for each in versions):
                return False
            found = [pair for each in self._instances.values() if each.takes_part for pair in each.serves().items()]
            return {(name, of) for name, of in found if name in wanted} == set(wanted.items())

    def num_waiting(self, versions: Sequence[ModelVersion]) -> int:
        """How many have exactly these, served or staged, answer nobody, and come in when they are decided."""
        with self._changed:
            return sum(each.has(versions) for name, each in self._instances.items() if self._is_coming(name))

    def current(self, model_id: str) -> ModelVersion | None:
        """What the fleet is to serve of a model."""
        with self._changed:
            return self._goals.current.get(model_id)

    def evict(self, instance_id: str, why: str) -> None:
        """It takes part no more until it has caught up. It may still answer until `fenced`."""
        with self._changed:
            if (known := self._instances.get(instance_id)) is not None and known.takes_part:
                self._leave(known, why)
                self._tell()

    def leave_out(self, model_id: str, instance_ids: Iterable[str] = ()) -> None:
        """Once evicted, these do not come in until the next call, which tells that a sync of that model has ended."""
        with self._changed:
            if self._admission.leave_out(model_id, instance_ids):
                self._let_in(self._swept(), lambda: None)  # a sync that was given up is not tried again for these
                self._tell()

    def fenced(self, instance_id: str) -> bool:
        """Whether one that was evicted answers no more: its lease is over. It may not have heard that it was."""
        with self._changed:
            known = self._instances.get(instance_id)
            return known is None or known.takes_part or known.lease_end_s <= self._clock()

    def unfenced(self, models: Sequence[str]) -> tuple[str, ...]:
        """Who takes part no more, has any of these models, and may still answer."""
        with self._changed:
            self._swept()
            having = [name for name, each in self._instances.items() if set(models) & set(each.serves())]
            return tuple(name for name in having if not self.fenced(name))

    def wait_fenced(self, instance_ids: Sequence[str]) -> None:
        """Until none of these answers with what it was evicted with: at most the lease that it has."""
        with self._changed:
            ends_s = [known.lease_end_s for each in instance_ids if (known := self._instances.get(each)) is not None]
        left_s = max([self.lease_s, *(end_s - self._clock() for end_s in ends_s)])
        self._wait(lambda: all(self.fenced(each) for each in instance_ids), left_s + 1.0)

    def awaited(self, model_ids: Sequence[str]) -> str:
        """What those wait for who join with any of these models; empty: one has failed, or nobody joins."""
        with self._changed:
            self._swept()
            coming = [each for name, each in self._instances.items() if self._is_coming(name)]
            mine = [each for each in coming if set(model_ids) & set(each.serves())]
            found = [words for each in mine for words in each.awaits]
            more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
            return ", ".join(found[:_NAMED]) + more if all(each.awaits for each in mine) else ""

    def wait_learnt(self, model_ids: Sequence[str], within_s: float) -> None:
        """Where this controller has only listened so far, which it does for `lease_s` after it begins: until an
        instance takes part that has any of these models, or it has listened."""
        self._wait(lambda: bool(self.members(model_ids)) or not self._learning.until_s, within_s)

    # --- what users see ---

    def subscribe(self, changed: Callable[[], None]) -> None:
        """Calls `changed` after each change, from any thread; it must be quick."""
        self._listeners.append(changed)

    def status(self, newest: Mapping[str, Version]) -> tuple[InstanceStatus, ...]:
        """Every instance; lags are behind `newest`, by model."""
        with self._changed:
            now = self._swept()
            return tuple(each.status(now, newest, self._why(each, now)) for _, each in sorted(self._instances.items()))

    def _wait_for(self, members: Iterable[Member], done: Callable[[Instance], bool], within_s: float) -> None:
        left = [*members]

        def all_are() -> bool:
            left[:] = [who for who in left if self.takes_part(who) and not done(self._instances[who.instance_id])]
            return not left

        self._wait(all_are, within_s)

    def _wait(self, done: Callable[[], bool], within_s: float) -> None:
        """A lease that ends tells nobody: it is looked at, too."""
        deadline = Deadline(within_s)
        with self._changed:
            while not (done() or deadline.expired):
                self._changed.wait(min(_LOOK_S, deadline.remaining_s))

    # --- under the lock ---

    def _note_digests(self, known: Instance) -> None:
        for each in known.beat.serves:
            digest, current = known.beat.digests.get(each.model_id), self._goals.current.get(each.model_id)
            if digest is not None and current is not None and current.of == each.of:
                self._digests[each.model_id] = each.of, digest

    def _is_coming(self, instance_id: str) -> bool:
        known = self._instances.get(instance_id)
        return known is not None and not known.takes_part and self._is_fresh(known, self._clock())

    @property
    def _late_s(self) -> float:
        return _LATE_BEATS * self.lease_s / _BEATS_A_LEASE

    def _is_fresh(self, known: Instance, now: float) -> bool:
        return now - known.heard_s < self.lease_s

    def _leave(self, known: Instance, why: str, *, shown: bool = True) -> None:
        """`shown`: its status says why; else that says by itself what is so by then."""
        known.state, known.why = "evicted", why if shown else None
        _logger.warning("instance %s is evicted: %s", known.beat.instance_id, why)
        self._one_less(known)

    def _miss(self, awaited: Instance) -> None:
        """One that was told of as about to come does not: a sync says so, where nobody takes part."""
        if not awaited.missed and not awaited.serves().keys() & self._taken():
            awaited.missed = True
            self.on_members()

    def _one_less(self, left: Instance) -> None:
        """Nobody may be left with some model: who comes next can have what is newest alone, so that may be claimed."""
        if left.serves().keys() - self._taken():
            self.on_members()

    def _taken(self) -> set[str]:
        return {model for each in self._instances.values() if each.takes_part for model in each.serves()}

    def _swept(self) -> float:
        """Notes whose heartbeat is late and whose lease is over; the time."""
        now = self._clock()
        if self._learning.until_s and now >= self._learning.until_s:
            self._learning.learn([each.beat for each in self._instances.values()])
            self._let_in(now)  # before a trainer's word finds nobody who takes part
        for name, each in tuple(self._instances.items()):
            silent_s = now - each.heard_s
            if each.takes_part and now >= each.lease_end_s:
                self._leave(each, f"not heard for {silent_s:.1f} s", shown=False)
                self._tell()
            elif each.state in ("live", "joining") and silent_s > self._late_s:
                each.state = "suspect" if each.takes_part else "evicted"
                if each.awaits and not each.takes_part:
                    self._miss(each)
                self._tell()
            elif not each.takes_part and silent_s > _FORGET_LEASES * self.lease_s:
                del self._instances[name]
        return now

    def _tell(self) -> None:
        self._changed.notify_all()
        for listener in tuple(self._listeners):
            listener()
