"""FleetModel: one model of a service in a fleet. What is staged waits until the controller lets it commit."""

from __future__ import annotations

from weightsync.errors import StateError, SyncFailedError
from weightsync.host.agent_state import Claim, Target, is_in
from weightsync.host.commit_gate import CommitGate
from weightsync.host.model_updater import ModelUpdater
from weightsync.host.sync_report import failed, late
from weightsync.types import Deadline, Version

_GRACE_S = 1.0
"""A trainer may tell its fleet of a version that its agent has been told of, and has not heard of yet."""


class FleetModel(ModelUpdater):
    """See `ModelUpdater`; its config has a controller."""

    @property
    def gate(self) -> CommitGate:
        """What may be committed."""
        assert self._gate is not None
        return self._gate

    def claimed(self, version: Version, endpoint: str) -> Claim:
        """As `want`; a denial counts after a second."""
        return self.want(version, endpoint, grace_s=_GRACE_S)

    def prepare(self, version: Version, endpoint: str) -> Claim:
        """As `want`; what is staged and older is let go, and what comes staged and older."""
        self.gate.prepare(version)
        return self.claimed(version, endpoint)

    def prepared(self, claim: Claim) -> Version | None:
        """What every engine has staged, or serves, of that claim's run, from its version on; None: not yet.

        Raises:
            NotPublishedError: its trainer has ended with it, and nobody else has it.
            WeightSyncError: see `settled`.
        """
        version = claim.version
        with self._changed:
            staged = self.gate.staged
            if is_in(version, staged):
                return staged
            failure: SyncFailedError | None = None
            try:
                if self.settled(claim):
                    return self.served
            except SyncFailedError as error:  # why it failed may be that nobody has it: that is said with its own type
                failure = error
            lost = self._followed.nobody_has(Target(version=version, endpoint=claim.endpoint), since_s=claim.began_s)
            if lost is not None and not self._pulls.moving:
                raise lost
            if failure is not None:
                raise failure
            return None

    def is_there(self, claim: Claim) -> bool:
        """Whether its agent has said that it has it.

        Raises:
            WeightSyncError: see `settled`.
        """
        with self._changed:
            self._check_open(claim.version)
            self._followed.check(claim)
            return claim.there_s is not None

    def waited_s(self, claim: Claim) -> float:
        """Seconds from that claim on in which its version, or a newer one of its run, was not there."""
        lacked_s = 0.0 if claim.there_s is None else claim.there_s - claim.began_s
        return lacked_s + self._pulls.waited_s(claim.version, claim.began_s + lacked_s)

    def check_may_commit(self, version: Version) -> None:
        """Raises StateError where that version is neither staged nor served."""
        with self._changed:
            if self.gate.staged != version and not self.engines.all_serve(version) and not self.gate.allows(version):
                raise StateError(
                    f"model {self.model_id} has {self.gate.staged or 'nothing'} staged: prepare it first",
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
                    raise failed(version, self._status, "its old version, or it refuses to serve")
                if not self._changed.wait(deadline.remaining_s) and deadline.expired:
                    raise late(version, deadline, self.status())
