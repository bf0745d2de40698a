"""ModelUpdater: keeps the engines of one model at the newest version that its agents have.

One thread pulls, proves and loads. Pulling does not disturb generation; an engine is paused for its own load alone, and
one that fails fails alone: it stays on its old version and is tried again, by and by, or with the next version.

What is pulled, and from whom, is decided in `followed`; `upstream` asks the agents, `pulls` brings the bytes,
`engine_group` loads the engines.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence

import msgspec

from weightsync.clients.agent import AgentClient
from weightsync.clients.store import StoreClient, client_at
from weightsync.codec.delta_reader import coding
from weightsync.errors import StateError, SyncFailedError, TransferAbortedError, as_weightsync_error
from weightsync.host.adoption import Adoption
from weightsync.host.agent_state import Claim, Target, is_in
from weightsync.host.commit_gate import CommitGate
from weightsync.host.engine_group import EngineGroup, GroupReport
from weightsync.host.followed import FollowedRun
from weightsync.host.listeners import Listeners
from weightsync.host.pulls import Pulls
from weightsync.host.relay import Relay
from weightsync.host.settings import RolloutConfig
from weightsync.host.staged_version import StagedVersion
from weightsync.host.sync_report import came, failed, progress_of, taken, tell_served
from weightsync.host.upstream import Upstream
from weightsync.observe import Metrics, Recorder, now_s
from weightsync.types import Deadline, EngineHandle, Version
from weightsync.types.progress import TransferProgress
from weightsync.types.service import ModelStatus

LOOK_EVERY_S = 5.0
_RETRY_S, _LONGEST_RETRY_S = 0.5, 10.0
_OVER_S = 60.0
"""From one try to the next where the trainer has ended in order, and no agent says something new."""
CLOSE_S = 15.0  # so much longer than `load_timeout_s` an end waits for a load
CLOCK = time.monotonic

_logger = logging.getLogger(__name__)


class ModelUpdater:
    """One model of a service, with its `engines`. Thread-safe. For `listening` see `Listeners`.

    Args:
        model_id: which.
        engines: handles of its engines.
        config: of the service.
        recorder: where phases go.
        metrics: where syncs are counted.
        on_served: told (model_id, version) after every engine serves it; from the updater's thread, which waits.
        relay: see `Puller`.

    Raises:
        NoEnginesError: there are none.
        ConfigError: two have one name.
    """

    def __init__(
        self,
        model_id: str,
        engines: Sequence[EngineHandle],
        config: RolloutConfig,
        *,
        recorder: Recorder,
        metrics: Metrics,
        on_served: Callable[[str, Version], None] | None = None,
        relay: Relay | None = None,
    ) -> None:
        self.model_id = model_id
        self._config = config
        self._recorder = recorder
        self._metrics = metrics
        self._on_served = on_served
        self._changed = threading.Condition()
        listeners = Listeners(self._changed)
        self._tell_listeners, self.listening = listeners.tell, listeners.listening
        self._gate = None if config.controller is None else CommitGate(self._changed, self._tell_listeners)
        self.engines = EngineGroup(
            engines, model_id, pause_timeout_s=config.pause_timeout_s, recorder=recorder, metrics=metrics,
            changed=self._tell_listeners, gate=self._gate, leased=config.lease is not None,
        )  # fmt: skip
        self._followed = FollowedRun(
            model_id, clock=CLOCK, settle=self.engines.settle, taken_over=self._taken_over, poll_s=config.poll_s,
            patience_s=config.patience_s, timeout_s=config.pull_timeout_s, of_fleet=self._gate is not None,
        )  # fmt: skip
        self._upstream = Upstream(
            model_id, self._followed, self._changed, connect=self.agent_at, on_answer=self._tell_listeners, clock=CLOCK
        )
        self._pulls = Pulls(
            model_id, config, recorder=recorder, may_call=self.may_call, holders=self.engines.holders,
            patch_limit=lambda: config.patch_limit if self.engines.take_patches else 0.0, relay=relay,
        )  # fmt: skip
        self._tried: tuple[Version, int] | None = None  # by the last attempt, and how many claims there were then
        self._num_failed = 0
        self._late: tuple[StagedVersion, GroupReport, float, float] | None = None  # the last load, where some failed
        self._status = ModelStatus(since_s=now_s())
        self._looking = threading.Thread(target=self._keep_looking, name=f"weightsync-look-{model_id}", daemon=True)
        self._thread = threading.Thread(target=self._keep_updating, name=f"weightsync-update-{model_id}", daemon=True)
        self._closed = False

    def start(self) -> None:
        if self._config.mode != "full":  # a second of compiled code that the first delta would wait for
            threading.Thread(target=coding, name="weightsync-warm-up", daemon=True).start()
        self._looking.start()
        self._thread.start()

    def end(self) -> None:
        """Ends a pull under way; no load begins any more. Waits for nobody; `close` comes behind it. Idempotent."""
        with self._changed:
            self._closed = True
        self._upstream.close()
        self._tell_listeners()
        self._pulls.end()
        if self._gate is not None:
            self._gate.close()

    def close(self) -> None:
        """Lets a load under way end, and gives the staging back; engines go on with what they serve. Idempotent."""
        self.end()
        if self._thread.is_alive() and self._thread is not threading.current_thread():  # `on_served` may close it
            self._thread.join(CLOSE_S)
            if self._thread.is_alive():  # nobody else would resume the engines that a load has paused
                self.engines.wait_loads(self._config.load_timeout_s)
                self._thread.join(CLOSE_S)
        if not self._thread.is_alive():  # else engines read the staging: that thread gives it back when it ends
            self._pulls.close()

    # --- what it is told ---

    def add_sender(self, endpoint: str, *, lasting: bool = False) -> None:
        """That agent may be called for this model. `lasting`: see `AgentState`."""
        with self._changed:
            self._followed.know(endpoint, lasting=lasting)

    def may_call(self, endpoint: str) -> bool:
        """Whether that agent was registered for this model."""
        with self._changed:
            return endpoint.rstrip("/") in self._followed.agents

    def catch_up(self, endpoint: str) -> None:
        """Asks an agent what it has, by and by.

        Raises:
            StateError: there is no thread left for it.
        """
        with self._changed:
            self._followed.wake(endpoint)
            self._upstream.look()

    def want(self, version: Version, endpoint: str, *, grace_s: float | None = None) -> Claim:
        """That agent is said to have a version, and is asked. Returns at once; see `settled`.

        Args:
            version, endpoint: what, and who.
            grace_s: see `Claim`. None: nobody wants to hear of a denial.

        Raises:
            StateError: this service is closing, or has no thread left.
            TransferAbortedError: another run took over from that one.
        """
        with self._changed:
            self._check_open(version)
            claim = self._followed.claim(version, endpoint, grace_s=grace_s)
            self._upstream.look()
        self._tell_listeners()
        return claim

    def settled(self, claim: Claim) -> bool:
        """Whether every engine serves the version of that claim or a newer one of its run.

        Raises:
            StateError: this service is closing.
            SyncFailedError: the attempt at it has failed.
            TransferAbortedError: another run took over from that one.
            NotPublishedError: its agent says that it has it not.
            VersionError: its agent never had that run, or publishes it anew.
        """
        version = claim.version
        with self._changed:
            if claim.checked and self._followed.is_sure_of(version) and self.serves(version):
                return True
            self._check_open(version)
            self._followed.check(claim)
            if self._status.errors and self._was_tried(claim):
                raise failed(version, self._status, "engines that failed serve their old version, or refuse to serve")
            return False

    # --- what was served before ---

    def adopt(self, version: Version, endpoint: str, digest: str) -> bool:
        """See `EngineGroup.adopt`; asks the engines, and waits for their answers. Whether every engine serves it."""
        adopted = self.engines.adopt(version, digest)
        if adopted:
            self._took_over(Adoption(version=version, digest=digest, sure=True), endpoint)
        return adopted

    def adopt_any(self) -> None:
        """See `EngineGroup.adopt_any`. It is no success before an agent has said that it published just that."""
        version = self.engines.adopt_any()
        digest = None if version is None else self.engines.digest_of(version)
        if version is not None and digest is not None:
            self._took_over(Adoption(version=version, digest=digest, sure=False))

    def _took_over(self, adoption: Adoption, endpoint: str | None = None) -> None:
        with self._changed:
            self._followed.adopted(adoption, endpoint)
            self._note(run_id=adoption.version.run_id, version=adoption.version.number, served_s=now_s())

    @property
    def is_anew(self) -> bool:
        """See `FollowedRun.is_anew`."""
        with self._changed:
            return self._followed.is_anew

    @property
    def served_digest(self) -> str | None:
        """Of what every engine serves; None where that is nothing, or not known."""
        served = self.served
        return None if served is None else self.engines.digest_of(served)

    @property
    def served(self) -> Version | None:
        """See `ServedVersions.common`."""
        return self.engines.common()

    def serves(self, version: Version) -> bool:
        """Whether every engine serves that version or a newer one of its run, and `on_served` was told of its load."""
        with self._changed:
            noted = self._status.run_id == version.run_id and version.number <= (self._status.version or 0)
            noted |= self._late is None or not is_in(version, self._late[0].version)
            return noted and self.engines.all_serve(version) and self._status.state != "loading"

    # --- what it says ---

    def status(self) -> ModelStatus:
        with self._changed:
            wanted, served = self._followed.wanted, self.engines.served()
            return msgspec.structs.replace(
                self._status,
                sender=None if wanted is None else wanted.endpoint,
                wanted_run_id=None if wanted is None else wanted.version.run_id,
                wanted=None if wanted is None else wanted.version.number,
                engines={who: None if version is None else str(version) for who, version in served.items()},
                staged=None if self._gate is None or self._gate.staged is None else str(self._gate.staged),
                unprovable=self.engines.unprovable(),
                sender_errors=self._followed.errors,
                errors=self._status.errors or (self.engines.gone() if wanted is None else {}),
                ended=self._followed.ended,
                retrying=self._status.retrying or self._followed.doubts,
                progress=self.progress,
            )

    @property
    def progress(self) -> TransferProgress | None:
        """Of the pull under way; None where none is, or nothing has come yet."""
        with self._changed:
            return progress_of(self._status, self._pulls.progress)

    def agent_at(self, endpoint: str) -> AgentClient | StoreClient:
        """A client of that agent, or store."""
        config = self._config
        return client_at(endpoint, token=config.sender_token, verify=config.sender_verify, trust_key=config.trust_key)

    # --- helpers ---

    def _taken_over(self) -> None:
        """Under the lock: what failed, or is pulled, is of a run that nobody follows."""
        self._status = msgspec.structs.replace(self._status, errors={}, retrying=None)
        self._pulls.cancel()
        if self._gate is not None and self._followed.run_id is not None:
            self._gate.turn_to(self._followed.run_id)

    def _check_open(self, version: Version) -> None:
        if self._closed:
            raise StateError("this service is closing", version=str(version))

    def _was_tried(self, claim: Claim) -> bool:
        """Whether an attempt at its version, or a newer one, has begun since then and is over."""
        if self._tried is None or not self._followed.follows(claim.version):
            return False
        version, count = self._tried
        return is_in(claim.version, version) and count >= claim.number

    def _note(self, **changes: object) -> None:
        with self._changed:
            if changes.get("state", self._status.state) != self._status.state:
                changes["since_s"] = now_s()
            self._status = msgspec.structs.replace(self._status, **changes)
        self._tell_listeners()

    def _target(self) -> Target | None:
        with self._changed:
            return self._followed.target(self.engines.served(), self.engines.answering())

    def _at_least(self, target: Target, tried_s: float) -> Version:
        """What a pull for a target has to bring by now; `tried_s`: it has failed since then; 0: not yet.

        Raises:
            NotPublishedError: nobody has it any more.
            TransferAbortedError: another run or another agent took its place; or this service is closing.
        """
        with self._changed:
            now = self._target()
            if self._closed or now is None or target.gave_way(now):
                raise TransferAbortedError("another agent, or another run, took its place, or the service is closing")
            if tried_s and (lost := self._followed.nobody_has(now, since_s=tried_s)) is not None:
                raise lost
            return now.version

    # --- the threads ---

    def _keep_looking(self) -> None:
        """Asks engines what they serve, whatever else is done or waited for."""
        while True:
            with self._changed:
                if self._changed.wait_for(lambda: self._closed, LOOK_EVERY_S):
                    return
            try:
                self.engines.look()
                with self._changed:
                    if (errors := self.engines.standing(self._status.errors)) != self._status.errors:
                        self._note(errors=errors)
            except Exception:  # a bug: this thread must outlive it
                _logger.exception("model %s: engines could not be asked what they serve", self.model_id)

    def _keep_updating(self) -> None:
        with contextlib.closing(self._pulls):  # `close` may not have waited for so long
            self._update_on()

    def _update_on(self) -> None:
        retry_s = _RETRY_S
        while True:
            target, count, errors = None, 0, {}
            try:
                with self._changed:
                    self._changed.wait_for(
                        lambda: self._closed or self._target() is not None or self._status.is_troubled, LOOK_EVERY_S
                    )
                    if self._closed:
                        return
                    target, count = self._target(), self._followed.count
                if target is None and not self._status.is_troubled:
                    continue
                errors = {} if target is None else self._sync(target)
                late = self._late
                if late and self._followed.follows(late[0].version) and self.engines.common() == late[0].version:
                    self._served(*late)  # what failed came right by itself: an answer was lost, or came late
            except Exception as error:  # a bug, or a caller's: this thread must outlive it
                _logger.exception("model %s: %s was not brought to its engines", self.model_id, target)
                errors = {"service": f"{type(error).__name__}: {error}"}
            with self._changed:
                if target is not None:
                    self._tried = target.version, count
                    if not self._followed.follows(target.version):
                        errors = {}  # nobody asks for that run any more
                self._num_failed += bool(errors)
                self._note(state="waiting" if errors else "idle", errors=errors, retrying=None)
                if errors:  # the failed ones are tried again, by and by, or when there is something else to do
                    over = self._followed.is_over(target)
                    self._changed.wait_for(
                        lambda: (
                            self._closed or self._followed.count > count or self._target() != target  # noqa: B023
                            or (over and not self._followed.is_over(target))  # noqa: B023
                        ),
                        _OVER_S if over else retry_s,
                    )  # fmt: skip
            retry_s = min(2 * retry_s, _LONGEST_RETRY_S) if errors else _RETRY_S

    def _sync(self, target: Target) -> dict[str, str]:
        """One attempt at a version or a newer one; what failed, by engine or "pull"."""
        dead = self.engines.all_dead(target.version)
        if dead or self._target() is None:
            return dead
        self._note(state="pulling", errors=self.engines.standing(self._status.errors))
        began_s = now_s()
        try:
            with self._recorder.phase("sync", detail=str(target.version)):
                return self._pull_and_load(target, began_s)
        except Exception as error:
            typed = as_weightsync_error(error, SyncFailedError, "the pull failed")
            with self._changed:
                now = self._target()
                if self._closed or (isinstance(typed, TransferAbortedError) and (not now or target.gave_way(now))):
                    return {}
                errors = {"pull": f"{type(typed).__name__}: {typed}"}
                level = logging.DEBUG if errors == self._status.errors else logging.WARNING
                _logger.log(level, "model %s: %s could not be pulled: %s", self.model_id, target.version, typed)
                self._metrics.observe_failure(typed)
                self._followed.failed(target.endpoint)
                with contextlib.suppress(StateError):  # no thread for it now: the next attempt tries again
                    self._upstream.look()
            return errors

    def _pull_and_load(self, target: Target, began_s: float) -> dict[str, str]:
        tried_s = 0.0

        def retrying(error: Exception) -> None:
            nonlocal tried_s
            tried_s = tried_s or CLOCK()
            self._note(retrying=f"{type(error).__name__}: {error}")
            with self._changed, contextlib.suppress(StateError):
                self._followed.struggles(target.endpoint)
                self._upstream.look()

        with self._pulls.pulled(
            target.endpoint, at_least=lambda: self._at_least(target, tried_s), retrying=retrying
        ) as pulled:
            with self._changed:
                self._check_open(pulled.version)
                self._followed.pulled(target.endpoint, pulled.version, pulled.incarnation)
            loading_s = now_s()
            self._note(
                state="loading", retrying=None, num_pulled=self._status.num_pulled + 1, pull_s=loading_s - began_s,
                **came(pulled),
            )  # fmt: skip
            loaded = self.engines.load(pulled, Deadline(self._config.load_timeout_s))
        self._late = pulled, loaded, began_s, loading_s
        if not loaded.errors or self.engines.common() == pulled.version:
            self._served(*self._late)
            return {}
        if loaded.bytes_are_wrong:
            self._pulls.forget()
        return loaded.errors

    def _served(self, pulled: StagedVersion, loaded: GroupReport, began_s: float, loading_s: float) -> None:
        """Every engine has it."""
        with self._changed:
            self._followed.loaded(pulled.version)
        version, done_s = pulled.version, now_s()
        pull_s, load_s = loading_s - began_s, max(0.0, done_s - loading_s - loaded.held_s)
        tell_served(self.model_id, self._metrics, pulled, loaded, pull_s=pull_s, load_s=load_s)
        if self._on_served is not None:
            try:
                self._on_served(self.model_id, version)
            except Exception:
                _logger.exception("on_served failed for %s of model %s", version, self.model_id)
        self._note(
            served_s=done_s, load_s=load_s, num_committed=self._status.num_committed + 1, **taken(pulled, loaded)
        )
        self._late = None
