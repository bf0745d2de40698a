"""WeaverMethod: the Weaver service, through an object that the caller has. There is no public client of it."""

from __future__ import annotations

from typing import Protocol

from weightsync.control.methods.hosted import HostedMethod, ServedWeights
from weightsync.types import Deadline, Version


class WeaverServiceHolder(Protocol):
    """Who holds the clients of a service that trains a model and samples with it."""

    def update_weights(self, model_tag: str, run_id: str, version: int, *, timeout_s: float) -> object:
        """Has the samplers take the weights of this version; returns when they have.

        Raises:
            Exception: they have not; they go on with what they had.
        """

    def served_weights(self, model_tag: str, *, timeout_s: float) -> ServedWeights:
        """Asks the service what its samplers sample with now."""


class WeaverMethod(HostedMethod[WeaverServiceHolder]):
    """Asks the service to update, then asks it what it serves; see `HostedMethod` for arguments and errors.

    What `update_weights` returns is not looked at: a sync has succeeded where the service says so when it is asked.
    """

    service = "weaver"
    calls = ("update_weights", "served_weights")

    def _update(
        self, holder: WeaverServiceHolder, model_tag: str, version: Version, deadline: Deadline
    ) -> ServedWeights:
        left = deadline.remaining_s
        self._within(
            deadline,
            "update of the samplers",
            lambda: holder.update_weights(model_tag, version.run_id, version.number, timeout_s=left),
        )
        left = deadline.check("answer about what is served", peer=self.service)
        return self._within(
            deadline, "answer about what is served", lambda: holder.served_weights(model_tag, timeout_s=left)
        )
