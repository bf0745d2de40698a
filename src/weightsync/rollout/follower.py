"""Follower: keeps the engines of one model at the newest version that its service was told of.

One thread pulls, proves and loads. Pulling does not disturb generation; an engine is paused for its own load alone, and
one that fails fails alone: it stays on its old version and is tried again, by and by, or with the next version.

Over 400 lines: the states of one model and the lock that guards them. Who is believed is in `wishes`, how engines are
loaded in `engine_group`, how bytes come in `puller`.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait as wait_for

import msgspec

from weightsync.clients.agent import AgentClient
from weightsync.clients.fanout import in_thread
from weightsync.codec.delta_reader import coding
from weightsync.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    StateError,
    SyncFailedError,
    TransferAbortedError,
    as_weightsync_error,
)
from weightsync.observe import Metrics, Recorder, now_s
from weightsync.rollout.adoption import Adoption
from weightsync.rollout.engine_group import EngineGroup, GroupReport
from weightsync.rollout.permit import Permit
from weightsync.rollout.pulled import Pulled
from weightsync.rollout.puller import Puller
from weightsync.rollout.sender import Ticket, Wish
from weightsync.rollout.settings import RolloutConfig
from weightsync.rollout.staging import Staging
from weightsync.rollout.version_path import VersionPath
from weightsync.rollout.watcher import Watcher
from weightsync.rollout.wishes import Wishes
from weightsync.types import Deadline, EngineHandle, SyncReport, Version
from weightsync.types.publication import AgentVersion, ModelStatus

_RETRY_S = 0.5
_LONGEST_RETRY_S = 10.0
_ASK_S = 3.0
_GRACE_S = 1.0
"""A trainer may tell its fleet of a version that its agent has been told of, and has not heard of yet."""
LOOK_EVERY_S = 5.0
_CLOSE_S = 15.0

_logger = logging.getLogger(__name__)


class Follower:
    """One model of a service. Thread-safe.

    Args:
        model_id: which.
        engines: handles of its engines.
        config: of the service.
        recorder: where phases go.
        metrics: where syncs are counted.
        on_served: told (model_id, version) after every engine serves it; from the follower's thread, which waits.

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
    ) -> None:
        self.model_id = model_id
        self._config = config
        self._recorder = recorder
        self._metrics = metrics
        self._on_served = on_served
        self._changed = threading.Condition()
        self._permit = None if config.controller is None else Permit(self._changed, self._tell_listeners)
        self._engines = EngineGroup(
            engines, model_id, pause_timeout_s=config.pause_timeout_s, recorder=recorder, metrics=metrics,
            changed=self._tell_listeners, permit=self._permit,
        )  # fmt: skip
        self._listeners: set[Callable[[], None]] = set()
        self._senders: set[str] = set()
        self._wishes = Wishes(
            model_id, self._changed, ask=self._newest_at, served=self._engines.served,
            answering=self._engines.answering, taken_over=self._taken_over, told=self._heard,
            settle=self._engines.settle, patience_s=config.patience_s, timeout_s=config.pull_timeout_s,
            poll_s=config.poll_s,
        )  # fmt: skip
        self._watcher = None
        if config.poll_s is not None:
            name = f"weightsync-watch-{model_id}"
            self._watcher = Watcher(self._agent_at, self._wishes.look_at, pause_s=config.poll_s, name=name)
        self._num_done = 0
        self._num_failed = 0
        self._status = ModelStatus(since_s=now_s())
        self._staging = Staging()
        self._paths = None if config.path_root is None else VersionPath(config.path_root, model_id)
        self._receiver_id = f"{config.service_id}-{uuid.uuid4().hex[:8]}/{model_id}"  # two of one name end each other's
        self._puller: Puller | None = None
        self._moved_s = 0.0
        self._granted: tuple[Version, float, float] | None = None  # what agents had; asked since, had at; monotonic
        self._looking = threading.Thread(target=self._keep_looking, name=f"weightsync-look-{model_id}", daemon=True)
        self._thread = threading.Thread(target=self._run, name=f"weightsync-follow-{model_id}", daemon=True)
        self._closed = False

    def start(self) -> None:
        """Starts the threads."""
        if self._config.mode != "full":  # a second of compiled code that the first delta would wait for
            threading.Thread(target=coding, name="weightsync-warm-up", daemon=True).start()
        self._looking.start()
        self._thread.start()

    def close(self) -> None:
        """Ends a pull under way and gives the staging back; engines go on with what they serve. Idempotent."""
        with self._changed:
            self._closed = True
            puller = self._puller
        self._wishes.close()
        if self._watcher is not None:
            self._watcher.close()
        self._tell_listeners()
        if puller is not None:
            puller.cancel()
        if self._thread.is_alive():
            self._thread.join(_CLOSE_S)
        if not self._thread.is_alive():  # else engines read the staging: it is unlinked when this process ends
            if puller is not None:
                puller.close()
            self._staging.close()

    # --- what it is told ---

    def add_sender(self, endpoint: str) -> None:
        """That agent may be called for this model."""
        with self._changed:
            self._senders.add(endpoint)
            self._wishes.know(endpoint)
        if self._watcher is not None:
            self._watcher.watch(endpoint)

    def may_call(self, endpoint: str) -> bool:
        """Whether that agent was registered for this model."""
        with self._changed:
            return endpoint.rstrip("/") in self._senders

    def want(self, version: Version, endpoint: str, *, waits: bool = True, grace_s: float | None = None) -> Ticket:
        """Notes a wish and returns; gives what `settled` asks for, if anybody waits.

        Args:
            version: which.
            endpoint: of the agent that is said to have it.
            waits: whether anybody does.
            grace_s: see `Wishes.add`; where somebody waits `patience_s`, if it is not given.

        Raises:
            StateError: this service is closing, or has no thread left.
            TransferAbortedError: another run took over from that one.
        """
        if waits and grace_s is None:
            grace_s = self._config.patience_s
        ticket = self._wishes.add(Wish(version=version, endpoint=endpoint), waits=waits, grace_s=grace_s)
        self._tell_listeners()
        return ticket

    def catch_up(self, endpoint: str) -> None:
        """Asks an agent what it has, by and by; where there is no wish yet, that is one.

        Raises:
            StateError: there is no thread left for it.
        """
        self._wishes.look_at(endpoint)

    def settled(self, ticket: Ticket) -> bool:
        """Whether every engine serves the version of that wish or a newer one of its run.

        Raises:
            StateError: this service is closing.
            SyncFailedError: the attempt at it has failed.
            TransferAbortedError: another run took over from that one.
            NotPublishedError: its sender says that it has it not.
            VersionError: its sender never had that run, or publishes it anew.
        """
        version = ticket.wish.version
        with self._changed:
            # while it says "loading", on_served was not told yet
            sure = ticket.checked and self._wishes.is_sure_of(version)
            if sure and self._engines.serve(version) and self._status.state != "loading":
                return True
            self._wishes.check(ticket)
            if self._wishes.follows(version) and self._num_done >= ticket.number and self._status.errors:
                raise SyncFailedError(
                    "; ".join(f"{who}: {why}" for who, why in self._status.errors.items()),
                    causes={},
                    version=str(version),
                    state_left="engines that failed serve their old version, or refuse to serve",
                )
            return False

    def wait(self, ticket: Ticket, deadline: Deadline) -> None:
        """Until it is settled, or `late` is raised. See `settled` for what else is."""
        with self._changed:
            while not self.settled(ticket):
                if not self._changed.wait(deadline.remaining_s) and deadline.expired:
                    raise late(ticket, deadline)

    # --- what a fleet tells it ---

    @property
    def permit(self) -> Permit:
        """What may be committed.

        Raises:
            StateError: this service is in no fleet.
        """
        if self._permit is None:
            raise StateError("this service is in no fleet: give it a `controller`")
        return self._permit

    def prepare(self, version: Version, endpoint: str) -> Ticket:
        """As `want`; what is staged and older is let go."""
        self.permit.release(f"{version} is prepared instead", older_than=version)
        return self.want(version, endpoint, grace_s=min(_GRACE_S, self._config.patience_s))

    def prepared(self, ticket: Ticket) -> Version | None:
        """What every engine has staged, or serves, of that wish's run, from its version on; None: not yet.

        Raises:
            WeightSyncError: see `settled`.
        """
        version = ticket.wish.version
        with self._changed:
            staged = self.permit.staged
            if staged is not None and staged.run_id == version.run_id and not version.is_newer_than(staged):
                return staged
            return self.served if self.settled(ticket) else None

    def catch_up_with(self, version: Version, endpoint: str) -> Ticket:
        """As `want`; nobody waits, and `Ticket.absent` says whether its agent has denied it."""
        return self.want(version, endpoint, waits=False, grace_s=min(_GRACE_S, self._config.patience_s))

    def adopt(self, version: Version, endpoint: str, digest: str) -> bool:
        """See `EngineGroup.adopt`; asks the engines, and waits for their answers. Whether every engine serves it."""
        adopted = self._engines.adopt(version, digest)
        if adopted:
            self._wishes.adopted(Adoption(version=version, digest=digest, sure=True), endpoint)
            self._note(run_id=version.run_id, version=version.number, served_s=now_s())
        return adopted

    def adopt_any(self) -> None:
        """See `EngineGroup.adopt_any`. It is no success before an agent has said that it published just that."""
        version = self._engines.adopt_any()
        digest = None if version is None else self._engines.digest_of(version)
        if version is not None and digest is not None:
            self._wishes.adopted(Adoption(version=version, digest=digest, sure=False))
            self._note(run_id=version.run_id, version=version.number, served_s=now_s())

    @property
    def is_anew(self) -> bool:
        """See `Wishes.is_anew`."""
        return self._wishes.is_anew

    @property
    def served_digest(self) -> str | None:
        """Of what every engine serves; None where that is nothing, or not known."""
        served = self.served
        return None if served is None else self._engines.digest_of(served)

    @property
    def loaded_s(self) -> float:
        """See `EngineGroup.loaded_s`."""
        return self._engines.loaded_s()

    def ask_about(self, version: Version, endpoint: str) -> Ticket:
        """That agent is asked whether it has that version, see `is_there`; nothing is pulled for that."""
        grace_s = min(_GRACE_S, self._config.patience_s)
        return self._wishes.ask_about(Wish(version=version, endpoint=endpoint), grace_s=grace_s)

    def is_there(self, ticket: Ticket) -> bool:
        """Whether its agent has said that it has it.

        Raises:
            WeightSyncError: see `settled`.
        """
        self._wishes.check(ticket)
        return ticket.there

    def waited_s(self, ticket: Ticket) -> float:
        """Seconds that its agent was asked for that wish's version, or a newer one of its run, before it had it."""
        version, granted = ticket.wish.version, self._granted
        if granted is None or granted[0].run_id != version.run_id or version.is_newer_than(granted[0]):
            return 0.0
        return max(0.0, granted[2] - max(granted[1], ticket.began_s))

    @property
    def served(self) -> Version | None:
        """The version that every engine serves, the oldest of one run; None: some serve nothing, or another run."""
        served = set(self._engines.served().values())
        known = [version for version in served if version is not None]
        if None in served or len({version.run_id for version in known}) != 1:
            return None
        return min(known, key=lambda version: version.number)

    @property
    def seen_s(self) -> float:
        """See `EngineGroup.seen_s`."""
        return self._engines.seen_s()

    def serves(self, version: Version) -> bool:
        """Whether every engine serves that version or a newer one of its run, and has ended its load."""
        with self._changed:
            return self._engines.serve(version) and self._status.state != "loading"

    def check_may_commit(self, version: Version) -> None:
        """Raises StateError where that version is neither staged nor served."""
        with self._changed:
            if self.permit.staged != version and not self._engines.serve(version) and not self.permit.allows(version):
                raise StateError(
                    f"model {self.model_id} has {self.permit.staged or 'nothing'} staged: prepare it first",
                    version=str(version),
                    state_left="nothing was changed",
                )

    def wait_served(self, version: Version, deadline: Deadline) -> None:
        """Until every engine serves what may be committed now.

        Raises:
            SyncFailedError: its load has failed. It is tried again, by and by.
            DeadlineExceededError: it takes longer. It goes on.
        """
        with self._changed:
            begun = self._num_failed
            while not self.serves(version):
                if self._num_failed > begun:
                    raise SyncFailedError(
                        "; ".join(f"{who}: {why}" for who, why in self._status.errors.items()) or "its load failed",
                        causes={}, version=str(version), state_left="its old version, or it refuses to serve",
                    )  # fmt: skip
                if not self._changed.wait(deadline.remaining_s) and deadline.expired:
                    raise DeadlineExceededError(
                        f"{version} is not served within {deadline.timeout_s:g} s; it is still tried",
                        version=str(version),
                    )

    @property
    def current_sender(self) -> str | None:
        """Whom it pulls from."""
        wanted = self._wishes.wanted
        return None if wanted is None else wanted.endpoint

    @contextlib.contextmanager
    def listening(self, listener: Callable[[], None]) -> Iterator[None]:
        """Calls `listener` after every change, from any thread, while the body runs. It has to be quick."""
        with self._changed:
            self._listeners.add(listener)
        try:
            yield
        finally:
            with self._changed:
                self._listeners.discard(listener)

    # --- what it says ---

    def status(self) -> ModelStatus:
        """See `ModelStatus`."""
        with self._changed:
            wanted, served = self._wishes.wanted, self._engines.served()
            return msgspec.structs.replace(
                self._status,
                sender=None if wanted is None else wanted.endpoint,
                wanted_run_id=None if wanted is None else wanted.version.run_id,
                wanted=None if wanted is None else wanted.version.number,
                engines={who: None if version is None else str(version) for who, version in served.items()},
                staged=None if self._permit is None or self._permit.staged is None else str(self._permit.staged),
                unprovable=self._engines.unprovable(),
                sender_errors=self._wishes.sender_errors,
                retrying=self._status.retrying or self._wishes.doubts,
            )

    def available(self) -> dict[str, bool]:
        """Whether each engine serves, as it says itself. Asks all at once."""
        return self._engines.available()

    def _agent_at(self, endpoint: str) -> AgentClient:
        return AgentClient(endpoint, token=self._config.sender_token, verify=self._config.sender_verify)

    def _newest_at(self, endpoint: str) -> AgentVersion:
        client = self._agent_at(endpoint)
        try:
            found = client.get_version(timeout_s=_ASK_S)
        finally:
            client.close()
        if found.model_id != self.model_id:
            raise InvalidRequestError(f"{endpoint} serves model {found.model_id!r}, not {self.model_id!r}")
        return found

    def _taken_over(self) -> None:
        """Under the lock: what failed, or is pulled, is of a run that nobody follows."""
        self._status = msgspec.structs.replace(self._status, errors={}, retrying=None)
        if self._puller is not None:
            self._puller.cancel()

    def _heard(self) -> None:
        """An agent has said something: a pull that does not get on may give way to one from elsewhere."""
        with self._changed:
            target, puller = self._wishes.target(), self._puller
            stands_still = (
                self._status.state == "pulling" and time.monotonic() - self._moved_s > self._config.patience_s
            )
            if stands_still and puller is not None and target is not None and target.endpoint != puller.endpoint:
                puller.cancel()
        self._tell_listeners()

    def _tell_listeners(self) -> None:
        with self._changed:
            self._changed.notify_all()
            listeners = tuple(self._listeners)
        for listener in listeners:
            listener()

    # --- the threads ---

    def _keep_looking(self) -> None:
        """Asks engines what they serve, whatever else is done or waited for."""
        while True:
            with self._changed:
                if self._changed.wait_for(lambda: self._closed, LOOK_EVERY_S):
                    return
                idle = self._wishes.wanted is None
            if idle:
                continue
            try:
                self._engines.look()
            except Exception:  # a bug: this thread must outlive it
                _logger.exception("model %s: engines could not be asked what they serve", self.model_id)

    def _run(self) -> None:
        retry_s = _RETRY_S
        while True:
            wish, ticket, errors = None, 0, {}
            try:
                with self._changed:
                    self._changed.wait_for(
                        lambda: self._closed or self._has_work() or bool(self._status.errors), LOOK_EVERY_S
                    )
                    if self._closed:
                        return
                    wish, ticket = self._wishes.target(), self._wishes.count
                if wish is None:
                    if self._status.errors:  # what failed came right by itself
                        self._note(state="idle", errors={}, retrying=None)
                    continue
                errors = self._sync(wish)
            except Exception as error:  # a bug, or a caller's: this thread must outlive it
                _logger.exception("model %s: %s was not brought to its engines", self.model_id, wish and wish.version)
                errors = {"service": f"{type(error).__name__}: {error}"}
            with self._changed:
                if wish is not None and not self._wishes.follows(wish.version):
                    errors = {}  # nobody asks for that run any more
                self._note(state="waiting" if errors else "idle", errors=errors, retrying=None, num_done=ticket)
            if errors:  # the failed ones are tried again, by and by, or at the next wish
                with self._changed:
                    self._num_failed += 1
                    self._changed.notify_all()
                    self._changed.wait_for(lambda: self._closed or self._wishes.count > ticket, retry_s)  # noqa: B023
                retry_s = min(2 * retry_s, _LONGEST_RETRY_S)
            else:
                retry_s = _RETRY_S

    def _has_work(self) -> bool:
        return self._wishes.target() is not None

    def _sync(self, wish: Wish) -> dict[str, str]:
        """One attempt at a version or a newer one; what failed, by engine or "pull"."""
        dead = self._engines.all_dead(wish.version)
        if dead or not self._has_work():
            return dead
        self._note(state="pulling")
        self._moved_s = time.monotonic()
        began_s = now_s()
        try:
            with self._recorder.phase("sync", detail=str(wish.version)):
                return self._pull_and_load(wish, began_s)
        except Exception as error:
            typed = as_weightsync_error(error, SyncFailedError, "the pull failed")
            with self._changed:
                now = self._wishes.target()
                if isinstance(typed, TransferAbortedError) and (now is None or now.endpoint != wish.endpoint):
                    return {}  # it gave way
                if self._closed:
                    return {}
                if self._wishes.follows(wish.version):
                    _logger.warning("model %s: %s could not be pulled: %s", self.model_id, wish.version, typed)
                    self._metrics.observe_failure(typed)
                    self._wishes.failed(wish.endpoint)
            return {"pull": f"{type(typed).__name__}: {typed}"}

    def _pull_and_load(self, wish: Wish, began_s: float) -> dict[str, str]:
        def retrying(error: Exception) -> None:
            self._note(retrying=f"{type(error).__name__}: {error}")
            self._wishes.struggles(wish.endpoint)

        def moved(_done: int, _total: int) -> None:
            self._moved_s = time.monotonic()

        def granted(version: Version) -> None:
            if self._granted is None or self._granted[0] != version:  # else it was begun anew: the agent had it before
                self._granted = version, asked_s, time.monotonic()

        asked_s = time.monotonic()
        pulled = self._puller_at(wish.endpoint).pull(
            deadline=Deadline(self._config.pull_timeout_s),
            at_least=lambda: self._wishes.still(wish),
            progress=moved,
            retrying=retrying,
            granted=granted,
        )
        with contextlib.ExitStack() as stack:
            stack.callback(self._let_go, pulled)
            self._wishes.pulled(wish.endpoint, pulled.version, pulled.life)
            loading_s = now_s()
            self._note(
                state="loading", retrying=None, num_pulled=self._status.num_pulled + 1, pull_s=loading_s - began_s,
                transport=pulled.transport, num_deltas=pulled.num_deltas, received_bytes=pulled.received_bytes,
            )  # fmt: skip
            if self._paths is not None:
                stack.enter_context(self._paths.held(pulled))
            loaded = self._engines.load(pulled, Deadline(self._config.load_timeout_s))
        if loaded.errors:
            if loaded.bytes_are_wrong:
                self._staging.forget()
            return loaded.errors
        return self._served(pulled, loaded, began_s, loading_s)

    def _let_go(self, pulled: Pulled) -> None:
        """Gives a version's memory back; where an engine reads on, past its deadline, only when it has ended, and what
        is pulled next goes elsewhere."""
        holders = self._engines.holders()
        if not holders:
            pulled.release()
            return
        left, self._staging = self._staging, Staging()
        with self._changed:
            puller, self._puller = self._puller, None
        if puller is not None:
            puller.close()

        def wait() -> None:
            wait_for(holders)
            pulled.release()
            left.close()

        _logger.warning(
            "model %s: an engine still reads %s: its memory is kept until then", self.model_id, pulled.version
        )
        in_thread(wait, name="weightsync-let-go")

    def _served(self, pulled: Pulled, loaded: GroupReport, began_s: float, loading_s: float) -> dict[str, str]:
        """Every engine has it."""
        self._wishes.loaded()
        version, done_s, size = pulled.version, now_s(), pulled.manifest.total_bytes
        self._metrics.observe_sync(
            SyncReport(
                version=version,
                engine_ids=tuple(loaded.engine_ids),
                lost={},
                total_bytes=size,
                sent_bytes=pulled.received_bytes,
                num_deltas=pulled.num_deltas,
                full_because=None,
                num_chunks=loaded.num_chunks,
                seconds=done_s - began_s,
                paused_s=loaded.paused_s,
                phases_s={"pull": loading_s - began_s, "load": done_s - loading_s},
                digests_equal=None if loaded.unprovable else True,
                unprovable=loaded.unprovable,
            ),
            model_id=self.model_id,
        )
        _logger.info(
            "model %s: %s is served: %.1f MB by %s%s in %.3f s, loaded in %.3f s, paused for %.3f s",
            self.model_id, version, size / 1e6, pulled.transport,
            f" ({pulled.num_deltas} deltas of {pulled.received_bytes / 1e6:.1f} MB)" if pulled.num_deltas else "",
            loading_s - began_s, done_s - loading_s,
            loaded.paused_s,
        )  # fmt: skip
        if self._on_served is not None:
            try:
                self._on_served(self.model_id, version)
            except Exception:
                _logger.exception("on_served failed for %s of model %s", version, self.model_id)
        self._note(
            run_id=version.run_id, version=version.number, served_s=done_s, load_s=done_s - loading_s,
            paused_s=loaded.paused_s, num_committed=self._status.num_committed + 1, num_patched=loaded.num_patched,
        )  # fmt: skip
        return {}

    def _puller_at(self, endpoint: str) -> Puller:
        if self._puller is not None and self._puller.endpoint == endpoint and not self._puller.cancelled:
            return self._puller
        if self._puller is not None:
            self._puller.close()
        puller = Puller(
            endpoint,
            self.model_id,
            receiver_id=self._receiver_id,
            token=self._config.sender_token,
            verify=self._config.sender_verify,
            may_call=self.may_call,
            transport=self._config.transport,
            mode=self._config.mode,
            patch_limit=lambda: self._config.patch_limit if self._engines.take_patches else 0.0,
            num_streams=self._config.num_streams,
            staging=self._staging,
            recorder=self._recorder,
        )
        with self._changed:
            self._puller = puller
            if self._closed:
                puller.cancel()
        return puller

    def _note(self, *, num_done: int = 0, **changes: object) -> None:
        with self._changed:
            if changes.get("state", self._status.state) != self._status.state:
                changes["since_s"] = now_s()
            self._status = msgspec.structs.replace(self._status, **changes)
            self._num_done = max(self._num_done, num_done)
        self._tell_listeners()


def late(ticket: Ticket, deadline: Deadline) -> DeadlineExceededError:
    """What a wait that took too long raises."""
    version = ticket.wish.version
    return DeadlineExceededError(
        f"{version} is not served within {deadline.timeout_s:g} s; it is still tried", version=str(version)
    )
