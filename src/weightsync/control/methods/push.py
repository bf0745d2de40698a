"""PushMethod: a trainer pushes its weights through a process group when the controller says so.

The handles of the push's engines (`VllmEngine`, `SGLangEngine`, ...) speak the engine's own update protocol, and their
arguments say how generation is paused and what becomes of caches.
"""

from __future__ import annotations

from collections.abc import Mapping

from weightsync.control.method import Peers, SyncMethod
from weightsync.control.push_orders import PushOrders
from weightsync.errors import (
    ConfigError,
    EngineError,
    InvalidRequestError,
    NoEnginesError,
    SyncFailedError,
    VersionError,
)
from weightsync.types import Push, SyncReport, Version
from weightsync.types.control import UNNAMED


class PushMethod(SyncMethod):
    """A `SyncMethod` over pushes. Thread-safe.

    A sync succeeds where the push's report says that every engine serves the version; engines that were left out make
    it a failure, until `evict_failed` goes on without them: the push leaves them out by itself. One that it serves
    again is missed again.

    Args:
        pushes: by model: a `PushSync` of this process, a `RayWeightSync`, or `PushOrders` for ranks elsewhere.
        allow_lost: engines that a push left out are no failure.

    Raises:
        NoEnginesError: there is no model.
        ConfigError: one of them is no push.
    """

    peers: Peers

    def __init__(self, pushes: Mapping[str, Push], *, allow_lost: bool = False) -> None:
        if not pushes:
            raise NoEnginesError("method push needs a push for each model")
        for tag, each in pushes.items():
            if not callable(getattr(each, "sync_weights", None)):
                raise ConfigError(f"model {tag!r} has {each!r:.80}, which is no push")
        self._pushes = dict(pushes)
        self._allow_lost = allow_lost
        self.orders = {tag: each for tag, each in pushes.items() if isinstance(each, PushOrders)}
        self.peers = Peers()

    def initialize(self) -> None:
        """Every push meets its engines; see `Push.initialize`."""
        for push in self._pushes.values():
            push.initialize()

    def sync_weights(self, model_tag: str, version: Version) -> int:
        """See `SyncMethod.sync_weights`.

        Raises:
            InvalidRequestError: there is no such model.
            SyncFailedError: engines failed or were left out; `causes`, or the message, says which and why.
            VersionError: another version is served than was asked for.
            WeightSyncError: as the push raises it.
        """
        push = self._pushes.get(model_tag)
        if push is None:
            raise InvalidRequestError(f"there is no model {model_tag!r} here: {', '.join(self._pushes)}")
        self.peers.note_failed(model_tag)
        try:
            if (orders := self.orders.get(model_tag)) is None:
                report = push.sync_weights(version.number)
            else:
                report = orders.sync_weights(version.number, None if version.run_id == UNNAMED else version.run_id)
        except SyncFailedError as error:
            self.peers.note_failed(model_tag, error.causes)
            raise
        return self._checked(model_tag, version, report)

    def trained(self, model_tag: str, version: Version, sender_endpoint: str | None = None) -> None:
        """See `SyncMethod.trained`. Nobody waits for the ranks of a run that another has taken over from."""
        if (orders := self.orders.get(model_tag)) is not None and version.run_id != UNNAMED:
            orders.trained(version.run_id)

    def close(self) -> None:
        """Ends orders that wait; pushes stay their owner's."""
        for each in self.orders.values():
            each.close()

    def _checked(self, model_tag: str, version: Version, report: SyncReport) -> int:
        """The number that is served, by what the report says, whatever it was asked for."""
        served = report.version
        if served.number < version.number or version.run_id not in (UNNAMED, served.run_id):
            raise VersionError(
                f"the push reports {served}, and {version} was asked for: does the trainer that notifies push it, and "
                "under its push's run_id?",
                version=str(version),
            )
        if not report.engine_ids:
            raise NoEnginesError("the push reports a success on no engine", version=str(version))
        for who in set(report.engine_ids) - set(report.lost):  # whom the push serves again is missed again
            self.peers.readmit(model_tag, who)
        missed = sorted(self.peers.live(model_tag, report.lost))
        self.peers.note_failed(model_tag, missed)
        if missed and not self._allow_lost:
            raise SyncFailedError(
                f"the push left engines out: {'; '.join(f'{who}: {report.lost[who]}' for who in missed)}",
                causes={who: EngineError(report.lost[who], peer=who) for who in missed},
                version=str(version),
                state_left=f"{', '.join(report.engine_ids)} serve it; the others serve an older version, or nothing",
            )
        return served.number
