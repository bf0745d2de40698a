"""FleetMember: what a rollout service does as a member of a controller's fleet.

    prepare   every model: pull, prove, stage; wait there, with generation going on
    commit    [two models or more: nobody answers from here ...] pause, commit, resume each [... to here]
    release   what is staged is let go
    heartbeat the controller lends it the right to answer; one that it refuses catches up first

A thread sends heartbeats, the last of which says that it leaves. A lease counts from before its heartbeat was sent, so
that it is never longer here than there.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import uuid
from collections.abc import Mapping

import msgspec

from weightsync.clients.controller import ControllerClient
from weightsync.errors import AuthError, StateError, SyncFailedError, WeightSyncError
from weightsync.host.agent_state import Claim
from weightsync.host.catching_up import CatchingUp
from weightsync.host.commit_gate import gave_way
from weightsync.host.fleet_model import FleetModel
from weightsync.host.settings import RolloutConfig
from weightsync.memory import ServingLease, boot_s
from weightsync.objects.urls import is_store_url
from weightsync.types import Deadline, Version
from weightsync.types.fleet import (
    MAX_GONE,
    MAX_LEASE_S,
    MAX_WORDS,
    CommitVersionsRequest,
    HeartbeatReply,
    HeartbeatRequest,
    ModelVersion,
    PrepareReply,
    PrepareRequest,
)
from weightsync.types.service import LeaseStatus

TOKEN_HINT = "; it was sent --controller-token or --token, or their variables, or RolloutConfig(controller_token=)"
_FIRST_EVERY_S = 0.5
_HEARTBEAT_S = 5.0
_LEAVE_S = 1.0
_STOP_S = 5.0
_SOON_S = 0.5
_LOOK_S = 0.05
_MAX_WANTED = 16

_logger = logging.getLogger(__name__)


class FleetMember:
    """Of one service. Thread-safe.

    Args:
        models: by model_id.
        config: of the service; it has a controller.
        lease: what engines look at.
    """

    def __init__(self, models: Mapping[str, FleetModel], config: RolloutConfig, lease: ServingLease) -> None:
        assert config.controller is not None
        self._models = models
        self._config = config
        self._lease = lease
        self._incarnation = uuid.uuid4().hex
        self._numbers = itertools.count(1)
        torn = lease.torn
        lease.revoke()  # what is there was lent to another life, for weights that may be gone with it
        self._client = ControllerClient(
            config.controller, token=config.controller_token, verify=config.controller_verify
        )
        self._set = threading.Lock()
        # models of sets that are not committed as a whole
        self._broken: frozenset[str] = frozenset(models) if torn else frozenset()
        self._sound = {model_id: model.served for model_id, model in models.items()}  # what it served as one last
        self._wanted: tuple[dict[str, Version | None], ...] = ()  # what it was told to serve as one: comes by model
        self._num_commits = 0
        self._committed: dict[str, Version] = {}  # what its fleet has decided last
        self._asks = False  # that was brought to it while it held no lease
        self._catching_up = CatchingUp()
        self._url = ""
        self._said: HeartbeatReply | None = None
        self._unheard: str | None = None  # why the controller does not answer
        self._comes_in = True  # it may have been told of more than its fleet serves
        self._told: dict[str, Version | None] = {}  # what the last heartbeat said that it serves
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="weightsync-heartbeat", daemon=True)

    def start(self, url: str) -> None:
        """Starts to send heartbeats, from the service that listens at `url`."""
        self._url = url
        self._thread.start()

    def close(self) -> None:
        """Its engines answer no more; the controller is told so, where it hears it. Idempotent."""
        self._lease.close()
        self._stop.set()  # after it: what the thread says last is true
        if self._thread.is_alive():
            self._thread.join(_STOP_S)
        self._client.close()

    @property
    def status(self) -> LeaseStatus:
        """What its engines answer under."""
        left_s, reply, why = self._lease.left_s, self._said, None
        if self._lease.damaged:
            why = self._lease.damage
        elif self._lease.overdue:
            why = "a set of models is not committed as a whole"
        elif left_s <= 0:
            why = self._unheard
        if why is not None or left_s > 0:
            return LeaseStatus(left_s=left_s, why_none=why, failed=why is not None)
        because = "" if reply is None or not reply.why else f": {reply.why}"
        why = "the controller has not answered yet" if reply is None else f"it is {reply.state} in its fleet{because}"
        return LeaseStatus(left_s=left_s, why_none=why)

    # --- what the controller asks ---

    def begin(self, request: PrepareRequest, *, prepare: bool) -> list[tuple[FleetModel, Claim]]:
        """Notes what is to be staged, and whom to call for it; or has the agents asked whether they have it.

        Raises:
            TransferAbortedError: another run took over from one of them. The others are noted.
        """
        claims = []
        for each in request.versions:
            model = self._models[each.model_id]
            claim = model.prepare if prepare else model.claimed
            self._catching_up.named[each.model_id] = endpoint = each.sender_endpoint.rstrip("/")  # as agents are known
            claims.append((model, claim(each.of, endpoint)))
        return claims

    def prepared(self, claims: list[tuple[FleetModel, Claim]]) -> PrepareReply | None:
        """The reply, once all are staged; None: not yet.

        Raises:
            WeightSyncError: one of them failed.
        """
        found = [(model, claim, model.prepared(claim)) for model, claim in claims]
        versions = [
            ModelVersion(
                model_id=model.model_id, run_id=staged.run_id, version=staged.number,
                sender_endpoint=claim.endpoint,
            )
            for model, claim, staged in found
            if staged is not None
        ]  # fmt: skip
        if len(versions) < len(found):
            return None
        return PrepareReply(
            versions=tuple(versions),
            models={model.model_id: model.status() for model, _, _ in found},
            waited_s=max(model.waited_s(claim) for model, claim, _ in found),
        )

    def check_may_commit(self, request: CommitVersionsRequest) -> list[tuple[FleetModel, Version]]:
        """The models, and the version of each.

        Raises:
            StateError: one of them is not staged. Nothing was changed.
        """
        pairs = [(self._models[each.model_id], each.of) for each in request.versions]
        for model, version in pairs:
            model.check_may_commit(version)
        return pairs

    def commit(self, request: CommitVersionsRequest) -> None:
        """Serves what was prepared. Returns when all of it is served.

        Raises:
            StateError: another commit is under way, or one of them is not staged. Nothing was changed.
            SyncFailedError: some failed. A single model serves its old version, or refuses to serve; of a set of
                models nothing is answered until this service has caught up.
        """
        deadline = Deadline(request.wait_s)
        if not self._set.acquire(timeout=deadline.remaining_s):
            raise StateError("another commit is under way", state_left="nothing was changed")
        try:
            pairs = self.check_may_commit(request)
            todo = [(model, version) for model, version in pairs if not model.serves(version)]
            names = {model.model_id for model, _ in pairs}
            self._num_commits += 1
            if (todo and len(pairs) > 1) or self._broken & names:
                self._broken |= names
                self._lease.hold(boot_s() + deadline.remaining_s)
            self._committed = {model.model_id: version for model, version in pairs}
            self._is_told(self._committed)
            for model, version in todo:
                model.gate.allow(version)
            self._wait(todo, deadline)
            self._renew(0.0)  # what was started not long ago, and loaded now, need not wait for the next heartbeat
            if len(pairs) > 1 and any(model.served != version for model, version in pairs):
                self._broken |= names  # it was told to catch up with something newer meanwhile, and has half of that
                self._lease.hold(boot_s())
                return
            self._sound = {**self._sound, **{model.model_id: model.served for model, _ in pairs}}
            self._broken -= names
            if not self._broken:
                self._lease.lift()
        finally:
            self._asks = self._lease.left_s <= 0  # it was let in before it asked, and its fleet waits for that
            self._set.release()

    def release(self, model_ids: tuple[str, ...], why: str) -> None:
        """Lets go of what is staged."""
        for model_id in model_ids:
            self._models[model_id].gate.release(why)

    def _wait(self, pairs: list[tuple[FleetModel, Version]], deadline: Deadline) -> None:
        causes: dict[str, WeightSyncError] = {}
        for model, version in pairs:
            try:
                model.wait_served(version, deadline)
            except WeightSyncError as error:
                causes[model.model_id] = error
        if causes:
            if self._broken:
                self._lease.hold(boot_s())  # from now on everything is refused
            raise SyncFailedError(
                f"{len(causes)} of {len(pairs)} models were not committed: "
                + "; ".join(f"{who}: {error}" for who, error in causes.items()),
                causes=causes,
                state_left="nothing is answered before it has caught up" if self._broken else "see the model's error",
            )

    # --- heartbeats ---

    def _beat(self) -> None:
        every_s, refusals = _FIRST_EVERY_S, set[type[Exception]]()
        with contextlib.suppress(Exception):  # no thread: they are looked at by and by
            for model in self._models.values():
                model.engines.look()  # before the first word: who has engines that have not started is not let in
        while not self._stop.is_set():
            sent_s, commits, self._asks = boot_s(), self._num_commits, False
            within_s = min(_HEARTBEAT_S, max(1.0, self._lease.left_s or _HEARTBEAT_S))  # later it brings no lease
            try:
                reply = self._client.heartbeat(self._request(), timeout_s=within_s)
                every_s = reply.every_s if self._heard(reply, sent_s, commits) else min(reply.every_s, _SOON_S)
                if self._unheard is not None:
                    _logger.info("the controller at %s answers again", self._client.url)
                self._unheard, rest_s = None, every_s
                refusals.clear()
            except Exception as error:  # whatever it is: the lease runs out by itself
                hint = TOKEN_HINT if isinstance(error, AuthError) else ""
                self._unheard = f"the controller at {self._client.url} lends no lease: {error}{hint}"
                if type(error) not in refusals and not self._stop.is_set():  # each kind of reason once
                    _logger.warning("%s", self._unheard)
                refusals.add(type(error))
                rest_s = min(every_s, _SOON_S) if self._lease.left_s > 0 else every_s  # before it is over
            if self._rest(rest_s):
                break
        with contextlib.suppress(Exception):  # whoever does not hear it waits for the end of the lease
            self._client.heartbeat(msgspec.structs.replace(self._request(), leaving=True), timeout_s=_LEAVE_S)

    def _rest(self, every_s: float) -> bool:
        """Until the next heartbeat: sooner where what it serves now waits for a lease. Whether it ends."""
        reply, deadline = self._said, Deadline(every_s)
        behind = [] if reply is None else [each for each in reply.catch_up if each.model_id in self._models]
        behind = [each for each in behind if not self._models[each.model_id].serves(each.of)]
        look_s = _LOOK_S if behind or self._lease.left_s <= 0 else every_s
        while not (deadline.expired or self._asks):
            if self._stop.wait(min(deadline.remaining_s, look_s)):
                return True
            if behind and all(self._models[each.model_id].serves(each.of) for each in behind):
                break
        return self._stop.is_set()

    def _request(self) -> HeartbeatRequest:
        commits, left_s = self._num_commits, min(self._lease.left_s, MAX_LEASE_S)
        serves, lacks, errors, absent, waits = [], [], [], [], []
        gone = [pair for each in self._models.values() for pair in each.engines.gone().items()]
        if self._lease.damaged:
            errors.append(self._lease.damage)
        for model_id, model in self._models.items():
            served, staged = model.served, model.gate.staged
            self._told[model_id] = served
            if staged is not None:
                waits.append(ModelVersion(model_id=model_id, run_id=staged.run_id, version=staged.number))
            status = model.status()
            failures = [pair for pair in (status.errors | status.sender_errors).items() if pair not in gone]
            errors += [f"{model_id}: {who}: {why}" for who, why in failures if not gave_way(why)]
            if status.retrying:
                errors.append(f"{model_id}: {status.retrying}")
            if (denied := self._catching_up.told_absent(model_id)) is not None:
                absent.append(denied)
            if served is None:
                lacks.append(model_id)
            else:
                sender = status.sender or ""
                if is_store_url(sender):  # others may not have it among their sources
                    sender = self._catching_up.named.get(model_id, "")
                serves.append(
                    ModelVersion(model_id=model_id, run_id=served.run_id, version=served.number, sender_endpoint=sender)
                )
        return HeartbeatRequest(
            instance_id=self._config.service_id,
            incarnation=self._incarnation,
            url=self._config.url_told(self._url),
            number=next(self._numbers),
            serves=tuple(serves),
            lacks=tuple(lacks),
            staged=tuple(waits),
            whole=self._belongs_together(commits),
            leased=left_s > 0,
            left_s=left_s,
            error="; ".join(errors)[:2000] or None,
            absent=tuple(absent),
            digests={model_id: found for model_id, model in self._models.items() if (found := model.served_digest)},
            adapters={tag: text for tag, model in self._models.items() if (text := model.status().adapter) is not None},
            progress={model_id: moved for model_id, model in self._models.items() if (moved := model.progress)},
            gone={who[:MAX_WORDS]: why[:MAX_WORDS] for who, why in gone[:MAX_GONE]},
        )

    def _is_told(self, versions: Mapping[str, Version]) -> None:
        """It is to serve these as one, with what it serves of others."""
        wanted = {**self._sound, **versions}
        if wanted not in self._wanted:
            self._wanted = (*self._wanted[1 - _MAX_WANTED :], wanted)

    def _belongs_together(self, commits: int) -> bool:
        """Whether what is served now was served as one, or was to be: half of what it catches up with is no set. What
        serves nothing mixes with nothing."""
        if self._told in self._wanted:
            self._sound = dict(self._told)
            if self._lease.left_s <= 0:  # a set that was committed late, too, and nobody is answered yet
                self._made_whole(commits)
        whole = all(version in (None, self._sound[model_id]) for model_id, version in self._told.items())
        return whole and not self._broken

    def _heard(self, reply: HeartbeatReply, sent_s: float, commits: int) -> bool:
        """False: the fleet is to hear soon what is served by now."""
        before, self._said = self._said, reply
        if before is None or before.state != reply.state:
            _logger.info("service %s is %s in its fleet%s", self._config.service_id, reply.state,
                         f": {reply.why}" if reply.why else "")  # fmt: skip
        if kept := reply.state == "joining" and reply.lease_s > 0:
            self._comes_in = True  # its controller was started again: what another has lent stays until it is over
        elif reply.lease_s <= 0:
            self._comes_in = True
            self._lease.revoke()
        elif self._comes_in and not self._keep_to_what_is_served(commits):
            return False  # what is being committed was not decided by the fleet: it is told of it first
        elif reply.admitted:
            self._made_whole(commits)
        if not kept:
            self._renew(sent_s + reply.lease_s if reply.lease_s else 0.0)
        if reply.catch_up:
            self._is_told({each.model_id: each.of for each in reply.catch_up if each.model_id in self._models})
        for each in reply.catch_up if self._num_commits == commits else ():  # else a commit that began since says more
            model = self._models.get(each.model_id)
            if model is not None:
                self._catching_up.go(model, each, reply.digests.get(each.model_id))
        return True

    def _renew(self, until_s: float) -> None:
        self._lease.renew(until_s, seen_s=min(model.engines.seen_s() for model in self._models.values()))

    def _keep_to_what_is_served(self, commits: int) -> bool:
        """It has come in: what it was told to catch up with before may be committed no more without its fleet. While
        the fleet commits, that waits for the next heartbeat.

        Returns:
            False: some engine has, or commits, something that this service has not told of, nor its fleet decided.
        """
        free = self._set.acquire(blocking=False)
        try:
            if not free or self._num_commits != commits:
                for name, model in self._models.items():
                    known = {reported := self._told.get(name), self._committed.get(name, reported)}
                    if model.served not in known or model.gate.passing not in {None, *known}:
                        return False
                return True
            kept = [model.gate.allow_no_more_than(self._told.get(name)) for name, model in self._models.items()]
            same = all(model.served == self._told.get(name) for name, model in self._models.items())
            self._comes_in = not (all(kept) and same)
            return not self._comes_in
        finally:
            if free:
                self._set.release()

    def _made_whole(self, commits: int) -> None:
        """The controller has seen what is served; a commit that was begun since then says more."""
        if self._set.acquire(blocking=False):
            try:
                if self._num_commits == commits:
                    self._broken, self._sound = frozenset(), dict(self._told)
                    self._lease.lift()
            finally:
                self._set.release()
