"""PullMethod: tells every rollout service of a version, all at once, and waits until each serves it."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Mapping, Sequence

from weightsync.clients.host import RolloutClient
from weightsync.control.method import Peers, SyncMethod
from weightsync.errors import (
    InvalidRequestError,
    NoEnginesError,
    NotPublishedError,
    SyncFailedError,
    VersionError,
    WeightSyncError,
)
from weightsync.handles.fanout import call_all, in_thread
from weightsync.types import Version
from weightsync.types.deadline import check_wait_s
from weightsync.types.service import ModelStatus, NotifyRequest

_MARGIN_S = 10.0


class PullMethod(SyncMethod):
    """A `SyncMethod` over rollout services. Thread-safe.

    A sync succeeds where every live service serves the version that it has fetched and proved. Those that do not are
    named in the error, and are tried again with the others: who serves it already answers at once. `evict_failed` goes
    on without them. Each later sync tells them too, and does not wait: one that serves what it was told of takes part
    again. Where everybody was evicted, all take part again in the sync of a newer version.

    Args:
        services: rollout services, by a name that tells operators which it is.
        senders: endpoint of the agent of each model, which the services have registered.
        timeout_s: how long a service may take to pull and load.

    Raises:
        NoEnginesError: there is no service.
        InvalidRequestError: no such time.
    """

    asks_agents = True
    peers: Peers

    def __init__(
        self, services: Mapping[str, RolloutClient], senders: Mapping[str, str], *, timeout_s: float = 300.0
    ) -> None:
        if not services:
            raise NoEnginesError("a pull needs at least one rollout service to tell")
        self._services = dict(services)
        self._senders = dict(senders)
        self._timeout_s = check_wait_s("timeout_s", timeout_s)
        self.peers = Peers()
        self._lock = threading.Lock()
        self._asked: dict[str, Version] = {}  # by model: what was asked for last
        self._evicted: dict[str, Version | None] = {}  # by model: what was asked for when somebody was evicted last
        self._told: set[tuple[str, str]] = set()  # model and name of who was evicted, and is told now

    def live(self, model_tag: str) -> tuple[str, ...]:
        """The services of this model that take part."""
        return self.peers.live(model_tag, self._services)

    def sync_weights(self, model_tag: str, version: Version) -> int:
        """See `SyncMethod.sync_weights`.

        Raises:
            InvalidRequestError: nobody said which agent has this model.
            NoEnginesError: every service was evicted, and this version is not newer.
            NotPublishedError: the agent says that it has no such version. Nothing was committed.
            SyncFailedError: some do not serve it; `causes` says why, by service.
        """
        sender = self._senders.get(model_tag)
        if sender is None:
            raise InvalidRequestError(f"no agent of model {model_tag!r} is known: {', '.join(self._senders) or 'none'}")
        if not self.live(model_tag) and self._is_newer(model_tag, version):
            for name in self._services:
                self.peers.readmit(model_tag, name)
        with self._lock:
            self._asked[model_tag] = version
            names = self.live(model_tag)
        notice = self._notice(model_tag, version)
        for name in self._services.keys() - set(names):
            self._tell_evicted(model_tag, name)
        if not names:
            raise NoEnginesError(f"every rollout service of model {model_tag!r} was evicted")
        served, causes = call_all(
            {name: functools.partial(_tell, self._services[name], notice) for name in names},
            what="a notification",
            timeout_s=self._timeout_s + _MARGIN_S,
        )
        self.peers.note_failed(model_tag, causes)
        denied = next((each for each in causes.values() if isinstance(each, NotPublishedError)), None)
        if denied is not None and len(causes) == len(names):
            raise NotPublishedError(
                denied.message, peer=denied.peer, version=str(version), newest=denied.newest,
                state_left="what was served is served",
            )  # fmt: skip
        if causes:
            raise SyncFailedError(
                f"{len(causes)} of {len(names)} rollout services do not serve it",
                causes=causes,
                version=str(version),
                state_left="the others do; those serve their old version, or refuse to serve",
            )
        return min(served.values())

    def evict_failed(self, model_tag: str) -> Sequence[str]:
        """See `SyncMethod.evict_failed`; and `PullMethod` for when they take part again."""
        failed = super().evict_failed(model_tag)
        if failed:
            self._evicted[model_tag] = self._asked.get(model_tag)
        return failed

    def _is_newer(self, model_tag: str, version: Version) -> bool:
        """Whether that version was not asked for when somebody was evicted last."""
        last = self._evicted.get(model_tag)
        return last is None or last.run_id != version.run_id or last.number < version.number

    def _notice(self, model_tag: str, version: Version) -> NotifyRequest:
        return NotifyRequest(
            run_id=version.run_id, model_id=model_tag, version=version.number,
            sender_endpoint=self._senders[model_tag], wait_s=self._timeout_s,
        )  # fmt: skip

    def _tell_evicted(self, model_tag: str, name: str) -> None:
        """Tells one that was evicted, in a thread of its own and not twice at once, until it serves what was asked for
        last. Then it takes part again."""
        key = (model_tag, name)
        with self._lock:
            if key in self._told:
                return
            self._told.add(key)

        def tell() -> None:
            with contextlib.suppress(WeightSyncError):  # its turn comes with the next sync
                for is_last in (False, False, True):  # where versions come faster than it follows it is let in at last
                    asked = self._asked[model_tag]
                    _tell(self._services[name], self._notice(model_tag, asked))
                    with self._lock:
                        if is_last or asked == self._asked[model_tag]:
                            self.peers.readmit(model_tag, name)
                            return

        def told(_: object) -> None:
            with self._lock:
                self._told.discard(key)

        in_thread(tell, name=f"weightsync-told-{name}").add_done_callback(told)


def _tell(service: RolloutClient, notice: NotifyRequest) -> int:
    """Returns when it serves that version, or a newer one of its run: the number.

    Raises:
        VersionError: it says that it serves something else.
        WeightSyncError: it failed.
    """
    status: ModelStatus = service.notify_version(notice)
    if status.run_id != notice.run_id or status.version is None or status.version < notice.version:
        raise VersionError(
            f"it answered well and serves {status.run_id}/{status.version}", version=f"{notice.run_id}/{notice.version}"
        )
    return status.version
