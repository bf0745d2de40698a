"""FleetMethod: brings a set of models to the instances of a pool, all at once.

    barrier        the trainers of the set have published the same number
    prepare        every instance: fetch, prove, stage, and wait; generation goes on
    commit point   `each`: none, an instance commits when it has staged; `all`, `quorum(n)`: so many have staged
    commit         those that have staged serve the set; who fails is told again, then evicted
    the end        every instance that takes part serves the set, and those that do not answer no more

Before the commit point a failure changes nothing: what is staged is released. After it there is no way back.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import msgspec

from weightsync.clients.agent import AgentClient
from weightsync.control.barrier import VersionBarrier
from weightsync.control.instance import Member
from weightsync.control.method import Peers, SyncMethod
from weightsync.control.methods.claims import Once, asking_about, failed_error, named
from weightsync.control.methods.instance_calls import Hook, InstanceCalls, Set
from weightsync.control.methods.spans import Spans
from weightsync.control.policy import CommitPolicy
from weightsync.control.pool import RolloutPool
from weightsync.errors import (
    DeadlineExceededError,
    EngineUnreachableError,
    InvalidRequestError,
    NoEnginesError,
    NotPublishedError,
    SyncFailedError,
    TransferAbortedError,
    WeightSyncError,
    as_weightsync_error,
)
from weightsync.handles.fanout import in_thread
from weightsync.types import Deadline, Version
from weightsync.types.control import UNNAMED, BarrierStatus, InstanceStatus, SyncSpan
from weightsync.types.deadline import check_wait_s
from weightsync.types.fleet import ModelVersion, PrepareRequest

_LOOK_S = 0.25
_ASK_S = 5.0
_OVER = "another run has taken over"

_logger = logging.getLogger(__name__)


class FleetMethod(SyncMethod):
    """A `SyncMethod` over a `RolloutPool`. Thread-safe.

    Args:
        pool: the instances.
        sets: models that are served together; others go by themselves.
        commit_policy: "each", "all" or "quorum(n)".
        token: bearer token of the instances' services, and of agents that are asked for their run.
        verify: see `JsonClient`.
        barrier_timeout_s: how long the models of a set wait for each other.
        prepare_timeout_s: how long an instance may take to fetch and stage.
        commit_timeout_s: how long it may take to pause and commit, all tries counted.
        straggler_s: with a quorum: how long the others may take when enough have staged.
        hook: told (step, instance_id) before each step of the protocol, for tests and traces.

    Raises:
        ConfigError: a policy or a set that can't be.
        InvalidRequestError: a time that nobody can wait.
    """

    asks_agents = True
    pool: RolloutPool

    def __init__(
        self,
        pool: RolloutPool,
        *,
        sets: Sequence[Sequence[str]] = (),
        commit_policy: str = "each",
        token: str | None = None,
        verify: bool | str = True,
        barrier_timeout_s: float = 600.0,
        prepare_timeout_s: float = 120.0,
        commit_timeout_s: float = 30.0,
        straggler_s: float = 2.0,
        hook: Hook = lambda step, instance_id: None,
    ) -> None:
        self.pool = pool
        self.policy = CommitPolicy.parse(commit_policy)
        self.barrier = VersionBarrier(sets)
        pool.know_sets(self.barrier.sets)
        self.agent_client = functools.partial(AgentClient, token=token, verify=verify)
        self._barrier_timeout_s = check_wait_s("barrier_timeout_s", barrier_timeout_s)
        self._prepare_timeout_s = check_wait_s("prepare_timeout_s", prepare_timeout_s)
        self._commit_timeout_s = check_wait_s("commit_timeout_s", commit_timeout_s)
        self._straggler_s = check_wait_s("straggler_s", straggler_s, may_be_0=True)
        self._lock = threading.Condition()
        self._running: dict[tuple[str, ...], tuple[Set, Future[None]]] = {}
        self._peers = Peers()
        self._spans: dict[str, Spans] = {}
        self._calls = InstanceCalls(
            pool, self._lock, token=token, verify=verify, prepare_timeout_s=self._prepare_timeout_s, hook=hook
        )
        pool.subscribe(self._wake)

    # --- SyncMethod ---

    def trained(self, model_tag: str, version: Version, sender_endpoint: str | None = None) -> None:
        """See `SyncMethod.trained`. A set waits for this of each of its models. No agent has a run without a name."""
        sender = sender_endpoint or self._sender_of(model_tag)
        if sender and version.run_id != UNNAMED:
            self.barrier.arrive(_named(model_tag, version, sender))
            self._wake()

    def sync_weights(self, model_tag: str, version: Version) -> int:
        """See `SyncMethod.sync_weights`. Of a set, one call does the work, and the others wait for it.

        Raises:
            InvalidRequestError: nobody said which agent has this model.
            NoEnginesError: no instance takes part.
            NotPublishedError: the agent says that it has no such version, or it is gone, as all instances say. Nothing
                was committed.
            TransferAbortedError: another run took over, and nothing was committed.
            SyncFailedError: nothing was committed; `causes` says why, by instance.
            DeadlineExceededError: the other models of the set were not published in time.
        """
        sender = self._sender_of(model_tag)
        if not sender:
            raise InvalidRequestError(
                f"nobody said which agent has model {model_tag!r}: give train_worker_notify_weight_update (or POST "
                "/notify_version) its sender_endpoint"
            )
        self._peers.note_failed(model_tag)
        spans = self._spans[model_tag] = Spans()
        wanted = _named(model_tag, version, sender)
        versions: Set = (wanted,)
        try:
            if self._is_there_apart(wanted):
                return version.number
            with spans.of("barrier"), asking_about(wanted, self.barrier, self._asks, self._barrier_timeout_s) as check:
                versions = self.barrier.wait(wanted, self._barrier_timeout_s, check)
            return self._sync(model_tag, versions, spans)
        except NotPublishedError as error:
            denied = next((each for each in versions if str(each.of) == error.version), None)
            if denied is None:
                raise
            self.barrier.deny(denied, error.newest)
            if denied.model_id != model_tag:  # this model's is there: it waits for the others of its set
                raise SyncFailedError(str(error), causes={denied.model_id: error}, version=str(version)) from error
            newest = error.newest if len(versions) == 1 else None
            if newest is None or newest < version.number or denied.of == version:
                raise
            # more was announced meanwhile than is there; what was asked for is
            return self._sync(model_tag, (msgspec.structs.replace(wanted, version=newest),), spans)
        finally:
            self.pool.leave_out(model_tag)

    def _is_there_apart(self, wanted: ModelVersion) -> bool:
        """Whether it is of a set, and served already, with other numbers of the others: who has it has none of these,
        or a controller that was started again has not heard of them. Nobody is waited for, as nothing is brought."""
        models = self.barrier.set_of(wanted.model_id)
        if len(models) == 1:
            return False
        self.pool.wait_learnt(models, self._prepare_timeout_s)
        with self._lock:
            running = any(set(key) & set(models) and not run.done() for key, (_, run) in self._running.items())
        served = self.pool.current(wanted.model_id)  # by whichever of its agents
        return served is not None and served.of == wanted.of and not running and self._is_served((served,))

    def _asks(self, wanted: ModelVersion, wait_s: float | None = None) -> bool:
        """Some instance asks the agent whether it has that version, maybe one that joins; False: nobody is there."""
        if found := self.pool.members([wanted.model_id]) or self.pool.members([wanted.model_id], joining=True):
            request = PrepareRequest(versions=(wanted,), wait_s=wait_s or self._prepare_timeout_s)
            self._calls.client(found[0].url).check_versions(request)
        return bool(found)

    def _sync(self, model_id: str, versions: Set, spans: Spans) -> int:
        key = tuple(each.model_id for each in versions)
        with self._lock:
            before = self._running.get(key)
            if before is not None and before[0] == versions:
                mine, run = None, before[1]
            else:
                mine = run = Future()
                self._running[key] = (versions, run)
        if mine is not None:
            try:
                if before is not None:
                    before[1].exception(self._prepare_timeout_s + self._commit_timeout_s)
                self._bring(versions, spans)
            except BaseException as error:
                with self._lock:
                    if self._running.get(key) == (versions, mine):  # else a newer one waits for this
                        del self._running[key]
                mine.set_exception(error)
                raise
            mine.set_result(None)
        else:
            with spans.of("transfer", who="the other models of the set"):
                run.result(self._prepare_timeout_s + self._commit_timeout_s + self.pool.lease_s)
        return next(each.version for each in versions if each.model_id == model_id)

    def evict_failed(self, model_tag: str) -> Sequence[str]:
        """The model's next sync goes on without them, where anybody is left; they come in again when it has ended and
        they have caught up. Returns when they answer no more."""
        failed = self._peers.take_failed(model_tag)
        if {member.instance_id for member in self.pool.members([model_tag])} - set(failed):
            self.pool.leave_out(model_tag, failed)  # where all have failed they go on with what they have
        for instance_id in failed:
            self.pool.evict(instance_id, "it failed all retries of a sync")
        self.pool.wait_fenced(failed)
        return failed

    def spans(self, model_tag: str) -> tuple[SyncSpan, ...]:
        spans = self._spans.get(model_tag)
        return () if spans is None else spans.so_far()

    def instances(self) -> tuple[InstanceStatus, ...]:
        return self.pool.status({tag: each.of for tag, each in self.barrier.published().items()})

    def barriers(self) -> tuple[BarrierStatus, ...]:
        return self.barrier.status()

    # --- the protocol ---

    def _bring(self, versions: Set, spans: Spans) -> None:
        if self._is_served(versions):
            return
        models = [each.model_id for each in versions]
        self._check_members(versions)  # before who joins is told of them: it may be on its way to an older claim
        with self.pool.syncing(versions):
            members = self._check_members(versions)
            if self.policy.kind == "each":
                self._each(versions, members, spans)
            else:
                self._together(versions, members, spans)
            # whoever was evicted, now or before, may answer with an older version until its lease is over
            self.pool.wait_fenced(self.pool.unfenced(models))
        self.pool.wait_leased(members)

    def _is_served(self, versions: Set) -> bool:
        """Whether all who take part serve it. Returns when nobody answers with anything else."""
        if not self.pool.serves(versions):
            return False
        models = [each.model_id for each in versions]
        self.pool.wait_fenced(self.pool.unfenced(models))
        self.pool.wait_leased(self.pool.members(models))
        return True

    def _check_members(self, versions: Set) -> Sequence[Member]:
        """Who takes part. Where nobody does, who comes in is to serve these, unless a joiner hears of a denial."""
        if members := self.pool.claim(versions):
            return members
        for each in versions:
            try:
                self._asks(each, _ASK_S)
            except WeightSyncError as error:
                if isinstance(error, NotPublishedError):
                    raise
                _logger.info("model %s: nobody says whether %s is there: %s", each.model_id, each.of, error)
        self.pool.wait_learnt([each.model_id for each in versions], self._prepare_timeout_s)
        if members := self.pool.claim(versions):  # it came in meanwhile: nobody tells of that once more
            return members
        if awaited := self.pool.awaited([each.model_id for each in versions]):
            nobody = NoEnginesError(f"no rollout service takes part yet: waits for {awaited}")
            nobody.waits = True
            raise nobody
        raise NoEnginesError("no rollout service takes part: the controller's status says why of each")

    def _each(self, versions: Set, members: Sequence[Member], spans: Spans) -> None:
        decided = Once()

        def both(member: Member) -> None:
            self._calls.prepare(member, versions, spans)
            if not self.pool.takes_part(member):  # it was not waited for, and the fleet may have gone on
                raise EngineUnreachableError("it left the pool meanwhile", peer=member.instance_id)
            # once, before one commits: who comes in from now on has to serve it
            if not decided.set(True, lambda: self.pool.decided(versions)):
                raise TransferAbortedError(_OVER, version=named(versions), state_left="what was served is served")
            self._calls.commit(member, versions, Deadline(self._commit_timeout_s), spans)

        done, failed = self._at_once(members, both, unless=lambda: self._is_over(versions) and decided.set(False))
        if not done:
            decided.set(False)  # one that left and came back has still to answer: it must not decide behind this
            self._note_failed(versions, failed)
            if all(self.pool.current(each.model_id) == each for each in versions):  # it was let go, and nobody is left
                self._evict(failed)
            raise failed_error(versions, failed, len(members))
        self._evict(failed)

    def _together(self, versions: Set, members: Sequence[Member], spans: Spans) -> None:
        need = self.policy.num_needed(len(members))
        staged, failed = self._at_once(
            members, lambda member: self._calls.prepare(member, versions, spans),
            enough=need, patience_s=self._straggler_s, unless=lambda: self._is_over(versions),
        )  # fmt: skip
        staged = {who for who in staged if self.pool.takes_part(who)}
        late = {who for who in members if who not in staged and who not in failed}
        if self.policy.kind == "all":  # one that left the pool meanwhile fails alone
            enough = bool(staged) and all(who in staged or not self.pool.takes_part(who) for who in members)
        else:
            enough = self._are_enough(staged, versions, need)
        if not enough:
            self._release(members, versions, "not enough instances have staged it")
            self._note_failed(versions, failed)
            raise failed_error(versions, failed, len(members), num_needed=need)
        self._calls.hook("decide", "")
        self.pool.decided(versions)
        deadline = Deadline(self._commit_timeout_s)
        done, lost = self._at_once(
            sorted(staged, key=lambda who: who.instance_id),
            lambda member: self._calls.commit(member, versions, deadline, spans),
        )
        outside = lost | failed | {who: DeadlineExceededError("it had not staged it in time") for who in late}
        self._evict(outside)
        if not done:
            raise failed_error(versions, lost, len(members))

    def _are_enough(self, staged: set[Member], versions: Set, need: int) -> bool:
        """Whether so many have staged it, those counted that wait to come in: their next heartbeat is told of it."""
        deadline = Deadline(self._straggler_s)
        while here := [who for who in staged if self.pool.takes_part(who)]:
            enough = len(here) + self.pool.num_waiting(versions) >= need
            if enough or deadline.expired or self._is_over(versions):
                return enough
            with self._lock:
                self._lock.wait(min(_LOOK_S, deadline.remaining_s))
        return False

    def _is_over(self, versions: Set) -> bool:
        """Whether another run of one of these models has taken over: nobody wants these any more."""
        published = self.barrier.published()
        return any(published[each.model_id].run_id != each.run_id for each in versions if each.model_id in published)

    def _release(self, members: Sequence[Member], versions: Set, why: str) -> None:
        """Who does not hear it lets go by itself, by its deadline."""
        self._at_once(members, lambda member: self._calls.release(member, versions, why))

    def _evict(self, failed: dict[Member, WeightSyncError]) -> None:
        for member, error in failed.items():
            self.pool.evict(member.instance_id, f"{type(error).__name__}: {error}"[:500])

    def _note_failed(self, versions: Set, failed: dict[Member, WeightSyncError]) -> None:
        for each in versions:
            self._peers.note_failed(each.model_id, [member.instance_id for member in failed])

    def _at_once(
        self,
        members: Sequence[Member],
        call: Callable[[Member], Any],
        *,
        enough: int = 0,
        patience_s: float = 0.0,
        unless: Callable[[], bool] = lambda: False,
    ) -> tuple[set[Member], dict[Member, WeightSyncError]]:
        """Calls all at once; who did it, and why others did not. One that leaves the pool is not waited for.

        Args:
            members: whom.
            call: what.
            enough: with a quorum: from so many on the rest is waited for `patience_s` only, and is in neither.
            patience_s: see there.
            unless: whether nobody is waited for any more: who has not done it by then has failed.
        """
        calls = {member: in_thread(functools.partial(call, member), name="weightsync-fleet") for member in members}
        for future in calls.values():
            future.add_done_callback(lambda _: self._wake())
        done: set[Member] = set()
        failed: dict[Member, WeightSyncError] = {}
        patience: Deadline | None = None
        limit = Deadline(self._prepare_timeout_s + self._commit_timeout_s + self.pool.lease_s)
        while True:
            for member, future in calls.items():
                if member in done or member in failed:
                    continue
                if future.done():
                    error = future.exception()
                    if error is None:
                        done.add(member)
                    else:
                        failed[member] = as_weightsync_error(
                            error, SyncFailedError, "it failed", peer=member.instance_id
                        )
                elif not self.pool.takes_part(member):
                    failed[member] = EngineUnreachableError("it left the pool meanwhile", peer=member.instance_id)
                elif limit.expired:
                    failed[member] = DeadlineExceededError("it did not answer in time", peer=member.instance_id)
            if len(done) + len(failed) == len(calls):
                # what could not be reached has left by then, or is there
                self.pool.wait_heard(who for who, error in failed.items() if isinstance(error, EngineUnreachableError))
                return done, failed
            if unless():
                return done, failed | {
                    member: TransferAbortedError(_OVER, peer=member.instance_id)
                    for member in calls
                    if member not in done and member not in failed
                }
            if self.policy.kind == "quorum" and enough and len(done) >= enough:
                patience = patience or Deadline(patience_s)
                if patience.expired:
                    return done, failed
            with self._lock:
                self._lock.wait(_LOOK_S)  # a lease that ends tells nobody

    def _sender_of(self, model_id: str) -> str | None:
        published = self.barrier.published().get(model_id)
        return None if published is None else published.sender_endpoint

    def _wake(self) -> None:
        with self._lock:
            self._lock.notify_all()


def _named(model_id: str, version: Version, sender: str) -> ModelVersion:
    return ModelVersion(model_id=model_id, run_id=version.run_id, version=version.number, sender_endpoint=sender)
