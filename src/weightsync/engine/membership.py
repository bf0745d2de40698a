"""Membership: which transfer group a worker is in, and for which run. Runs that were taken over from stay over, but
where a fleet goes back to one."""

from __future__ import annotations

from collections import deque

from weightsync.errors import InvalidRequestError, StateError, TransferAbortedError, VersionError
from weightsync.transfer.base import WeightTransferReceiver
from weightsync.types import InitRequest, Version
from weightsync.types.engine import CHECK_RUN

_MAX_SUPERSEDED = 1000
_MAX_OVER = 16


class Membership:
    """Not thread-safe: its worker calls it under its lock.

    Attributes:
        model_id: the one model that is taken; None: any.
        run: run_id and model_id of the latest init, but of none that was a check and is over; None before the first.
        group: name of the group; None where there is none.
        receiver: of the group; None where there is none.
    """

    def __init__(self, model_id: str | None) -> None:
        self.model_id = model_id
        self.run: tuple[str, str] | None = None
        self.group: str | None = None
        self.receiver: WeightTransferReceiver | None = None
        self._superseded: dict[str, None] = {}  # runs that are over, oldest first
        self._trainer: tuple[str, str] | None = None  # the run that is no check
        self._joined: str | None = None  # the group that was joined last
        self._over: deque[str] = deque(maxlen=_MAX_OVER)
        self._ended = False  # whether the trainer has said that it ended
        self._num_inits = 0

    @property
    def run_id(self) -> str | None:
        """The run that may come again without being asked; None where there is none."""
        return None if self.run is None or (self._ended and self.run == self._trainer) else self.run[0]

    def check_may_join(self, request: InitRequest) -> None:
        """Raises InvalidRequestError for another model, VersionError for a run that is over."""
        if self.model_id not in (None, request.model_id):
            raise InvalidRequestError(f"this engine serves model {self.model_id!r}, not {request.model_id!r}")
        if request.run_id in self._superseded and not request.returns:
            raise VersionError(
                f"run {request.run_id} was taken over by {self._trainer and self._trainer[0]}; start a new run"
            )

    def begin_join(self) -> int:
        """The number of this attempt; an older one that is still under way gives up."""
        self._num_inits += 1
        return self._num_inits

    def check_newest(self, attempt: int) -> None:
        """Raises TransferAbortedError where a newer attempt was begun."""
        if attempt != self._num_inits:
            raise TransferAbortedError("a newer init took over while this one joined")

    def join(self, request: InitRequest, receiver: WeightTransferReceiver, *, attempt: int) -> None:
        """The group is the worker's.

        Raises:
            TransferAbortedError: a newer attempt was begun; the receiver is closed.
        """
        if attempt != self._num_inits:
            receiver.close()
        self.check_newest(attempt)
        self.receiver = receiver
        self.run = (request.run_id, request.model_id)
        self.group = self._joined = request.info.group_name
        if request.run_id.startswith(CHECK_RUN):
            return
        self._superseded.pop(request.run_id, None)
        if self._trainer is not None and self._trainer[0] != request.run_id:
            self._superseded[self._trainer[0]] = None
            while len(self._superseded) > _MAX_SUPERSEDED:
                del self._superseded[next(iter(self._superseded))]
        self._trainer, self._ended = self.run, False

    def end(self, name: str) -> None:
        """The trainer of a group has ended in order: of one that is not the last, or said again, it is no news. Or a
        session of that name is over, which may not have begun yet: an abort can come before its begin."""
        self._over.append(name)
        if name == self._joined:
            self.leave()
            self._ended |= self.run == self._trainer
            self.run, self._joined = self._trainer, None

    def check_not_over(self, session: str) -> None:
        """Raises TransferAbortedError where that session was aborted before it began."""
        if session in self._over:
            raise TransferAbortedError(f"session {session} was aborted", state_left="nothing was changed")

    def receiver_for(self, version: Version, model_id: str) -> WeightTransferReceiver:
        """The group's receiver, for a version of the current run and model.

        Raises:
            StateError: there is no group.
            VersionError: it is of another run or model.
        """
        if self.receiver is None or self.run is None:
            raise StateError("this worker is in no transfer group: init first", version=str(version))
        if (version.run_id, model_id) != self.run:
            raise VersionError(
                f"the current run and model are {self.run}, not {(version.run_id, model_id)}", version=str(version)
            )
        return self.receiver

    def leave(self, receiver: WeightTransferReceiver | None = None) -> None:
        """Drops the group, or that receiver, which may be an older group's. Idempotent."""
        receiver = receiver or self.receiver
        if receiver is not None:
            receiver.close()
        if receiver is self.receiver:
            self.receiver = self.group = None
