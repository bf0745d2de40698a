"""ModelSync: how a controller asks for a model's version to be served. Every file in `methods` has one."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import ClassVar

from weightsync.types import Version
from weightsync.types.control import BarrierStatus, InstanceStatus, SyncSpan


class ModelSync(abc.ABC):
    """One way of bringing versions to the rollout side. Thread-safe; `sync` runs in a thread of its own, never twice at
    once for one model.
    """

    asks_agents: ClassVar[bool] = False
    """Whether `sync` raises NotPublishedError for a version that was announced and is not there."""

    @abc.abstractmethod
    def sync(self, model_tag: str, version: Version) -> int:
        """Sees to it that the rollout side serves this version of the model, or a newer one of its run.

        Returns:
            The number of the version that is served now.

        Raises:
            Exception: nothing was committed, or only by some; it will be tried again.
        """

    @abc.abstractmethod
    def evict_failed(self, model_tag: str) -> Sequence[str]:
        """Takes whoever failed the last sync out of the pool; their names."""

    def trained(self, model_tag: str, version: Version, sender_endpoint: str | None = None) -> None:  # noqa: B027
        """Told of each version when it was trained, before any sync. Quick.

        Args:
            model_tag, version: what.
            sender_endpoint: URL of the agent that has it, where the trainer said so.
        """

    def spans(self, model_tag: str) -> tuple[SyncSpan, ...]:
        """Who was waited for in this model's last sync, or is in the one that runs."""
        return ()

    def instances(self) -> tuple[InstanceStatus, ...]:
        """The pool; empty where there is none."""
        return ()

    def barriers(self) -> tuple[BarrierStatus, ...]:
        """Sets of models that wait for one of theirs."""
        return ()
