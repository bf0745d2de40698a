"""SyncMethod: how a controller asks for a version of a model to be served. Every file in `methods` has one."""

from __future__ import annotations

import abc
import contextlib
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import ClassVar

from weightsync.clients.agent import AgentClient
from weightsync.control.pool import RolloutPool
from weightsync.control.push_orders import PushOrders
from weightsync.errors import InvalidRequestError
from weightsync.types import Version
from weightsync.types.control import BarrierStatus, InstanceStatus, SyncSpan
from weightsync.types.fleet import ModelVersion


class Peers:
    """What a method keeps of its peers, by model: who failed the last sync, and who was evicted. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._failed: dict[str, frozenset[str]] = {}
        self._evicted: dict[str, set[str]] = {}

    def note_failed(self, model_tag: str, names: Iterable[str] = ()) -> None:
        """These failed the model's last sync; nobody else did."""
        with self._lock:
            self._failed[model_tag] = frozenset(names)

    def take_failed(self, model_tag: str) -> list[str]:
        """Who failed the last sync; from now on nobody has."""
        with self._lock:
            return sorted(self._failed.pop(model_tag, ()))

    def evict_failed(self, model_tag: str) -> list[str]:
        """Who failed the last sync takes part no more, until `readmit`; their names."""
        failed = self.take_failed(model_tag)
        with self._lock:
            self._evicted.setdefault(model_tag, set()).update(failed)
        return failed

    def readmit(self, model_tag: str, name: str) -> None:
        """One that was evicted takes part again, from the next sync on."""
        with self._lock:
            self._evicted.get(model_tag, set()).discard(name)

    def live(self, model_tag: str, names: Iterable[str]) -> tuple[str, ...]:
        """Those of `names` that were not evicted."""
        with self._lock:
            evicted = self._evicted.get(model_tag, ())
            return tuple(name for name in names if name not in evicted)


class SyncMethod(abc.ABC):
    """One way of bringing versions to the rollout side. Thread-safe; `sync_weights` runs in a thread of its own, never
    twice at once for one model. Only that one has to be there.
    """

    asks_agents: ClassVar[bool] = False
    """Whether `sync_weights` raises NotPublishedError for a version that was announced and is not there."""

    peers: Peers | None = None
    """What it keeps of those that it syncs, where one of them may be left out."""

    pool: RolloutPool | None = None
    """The instances that it syncs, where they come and go by themselves."""

    agent_client: Callable[[str], AgentClient] | None = None
    """Makes the client of the agent at a URL, where the method may ask agents by itself."""

    orders: Mapping[str, PushOrders] = MappingProxyType({})
    """By model: the syncs that training ranks elsewhere take as orders."""

    end_within_s: float = 0.0
    """How long a sync may take at most of a method whose engines stay paused, for good, where the process ends within
    it: whoever ends that waits for the sync. 0: there is no need to."""

    def attach(self, *, learnt: Callable[[Sequence[ModelVersion]], None], members: Callable[[], object]) -> None:
        """A controller takes this method into service. Both calls return at once.

        Args:
            learnt: to be told of versions that instances serve, and that no trainer has told of.
            members: to be told when a sync that was given up may do by now: an instance takes part that did not, or
                none does any more; one that does not serves something else; or an agent has less than was told of.
        """
        if self.pool is not None:
            self.pool.on_learnt, self.pool.on_members = learnt, members

    def initialize(self) -> None:  # noqa: B027
        """Meets the other side once, so that a wrong set-up fails before the first sync. Changes nothing there.

        Raises:
            WeightSyncError: somebody does not answer, or lacks what this method needs; says what.
        """

    @abc.abstractmethod
    def sync_weights(self, model_tag: str, version: Version) -> int:
        """Sees to it that the rollout side serves this version of the model, or a newer one of its run.

        Returns:
            The number of the version that is served now.

        Raises:
            Exception: nothing was committed, or only by some; it will be tried again.
        """

    def run_of(self, model_tag: str, sender_endpoint: str) -> str | None:
        """The run that the agent there has, for a trainer that names none; None where versions need no run.

        Raises:
            NotPublishedError: the agent has nothing yet.
            InvalidRequestError: this method needs a run, and can't ask.
        """
        if not self.asks_agents:
            return None
        if self.agent_client is None:
            raise InvalidRequestError(f"{type(self).__name__} needs the run of a version: name run_id")
        with contextlib.closing(self.agent_client(sender_endpoint)) as agent:
            return agent.current_run(model_tag)

    def trained(self, model_tag: str, version: Version, sender_endpoint: str | None = None) -> None:  # noqa: B027
        """Told of each version when it was trained, before any sync. Quick.

        Args:
            model_tag, version: what. A run that nobody has named is `types.control.UNNAMED`, and a number that nobody
                has named is the one that a sync of it would ask for.
            sender_endpoint: URL of the agent that has it, where the trainer said so.
        """

    def evict_failed(self, model_tag: str) -> Sequence[str]:
        """Goes on without whoever failed the last sync, until `peers.readmit`; their names. Nobody, where there are no
        peers.
        """
        return () if self.peers is None else self.peers.evict_failed(model_tag)

    def spans(self, model_tag: str) -> tuple[SyncSpan, ...]:
        """Who was waited for in this model's last sync, or is in the one that runs."""
        return ()

    def instances(self) -> tuple[InstanceStatus, ...]:
        """The pool; empty where there is none."""
        return ()

    def barriers(self) -> tuple[BarrierStatus, ...]:
        """Sets of models that wait for one of theirs."""
        return ()

    def close(self) -> None:  # noqa: B027
        """Gives back connections, and ends what waits. Idempotent."""
