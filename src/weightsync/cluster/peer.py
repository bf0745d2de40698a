"""RayPeer: one of our actors, as its callers see it: answers are read, and its death is a typed error."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, TypeVar

from weightsync.cluster.client import Whereabouts
from weightsync.cluster.engine_actor import ASKS, URGENT
from weightsync.cluster.ray_calls import get, kill, submit
from weightsync.cluster.wire import read_answer
from weightsync.errors import EngineUnreachableError, WeightSyncError
from weightsync.types import Deadline

_T = TypeVar("_T")
_CLOSE_S = 5.0


class RayPeer:
    """Calls an actor that has the methods `ready` and `close`. Thread-safe; may be sent to other actors, as a copy.

    Args:
        actor: the actor's handle.
        name: for messages.
    """

    def __init__(self, actor: Any, *, name: str) -> None:
        self.actor = actor
        self.name = name

    def ready(self, *, timeout_s: float) -> Whereabouts:
        """Waits until it is built.

        Raises:
            EngineUnreachableError: the actor died.
            DeadlineExceededError: it is not there in time: not scheduled, or still being built.
            WeightSyncError: what building it raised.
        """
        return self.call("ready", group=URGENT, kind=Whereabouts, timeout_s=timeout_s)

    def call(self, method: str, *args: Any, group: str, kind: type[_T], timeout_s: float) -> _T:
        """Calls a method of the actor that answers with JSON.

        Args:
            method, args: what.
            group: the concurrency group that runs it.
            kind: type of the value.
            timeout_s: how long to wait; the method goes on over there.

        Raises:
            EngineUnreachableError: the actor is gone.
            DeadlineExceededError: no answer in time.
            WeightSyncError: what the method raised.
        """
        return read_answer(
            self._get(method, *args, group=group, timeout_s=timeout_s), kind, peer=self.name, what=method
        )

    def call_user(self, method: str, *args: Any, timeout_s: float) -> Any:
        """Calls `ask` of the actor: `method` is the user's, and its result crosses as Ray sends it. See `call`."""
        told = self._get("ask", *args, group=ASKS, timeout_s=timeout_s)
        try:
            body, value = told
        except (TypeError, ValueError):
            body, value = told, None
        read_answer(body, type(None), peer=self.name, what=method)
        return value

    def replace(self, actor: Any) -> None:
        """From here on calls go to another actor; those under way end as they may."""
        self.actor = actor  # one assignment: other threads see the old one or the new one

    def submit(self, method: str, *args: Any, group: str) -> Any:
        """Calls a method; the reference of its answer, at once."""
        return submit(self.actor, method, *args, group=group, peer=self.name)

    def _get(self, method: str, *args: Any, group: str, timeout_s: float) -> Any:
        ref = self.submit(method, *args, group=group)
        return get(ref, timeout_s=timeout_s, peer=self.name, what=method, lost=self._lost)

    def _lost(self, words: str) -> WeightSyncError:
        return EngineUnreachableError(f"the actor of {self.name} is gone {words}", peer=self.name)


def end(peers: Sequence[RayPeer]) -> None:
    """Lets actors give back what outlives a process, all at once, then ends them. One that is gone is no error."""
    closing = []
    for peer in peers:
        with contextlib.suppress(WeightSyncError):
            closing.append((peer, peer.submit("close", group=URGENT)))
    deadline = Deadline(_CLOSE_S)
    for peer, ref in closing:
        with contextlib.suppress(WeightSyncError):
            get(ref, timeout_s=deadline.remaining_s, peer=peer.name, what="close", lost=WeightSyncError)
    for peer in peers:
        with contextlib.suppress(Exception):  # the cluster itself may be gone
            kill(peer.actor)
