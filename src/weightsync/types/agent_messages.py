"""What a trainer and the agent beside it say to each other, see design/0023: orders one way, events the other."""

from __future__ import annotations

import logging
from typing import Any, TypeAlias

import msgspec

from weightsync.types.agent_config import AgentConfig
from weightsync.types.engine import PhaseRecord
from weightsync.types.layout import PublicationHead
from weightsync.types.manifest import Version
from weightsync.types.message import learn

MAX_EVENT_BYTES = 16 << 20
"""A trainer takes no longer one: an agent leaves an event's phases out where they are too many."""


class AgentStart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The one line of the agent's standard input: how it runs, and the socket file where its trainer listens.

    Attributes:
        max_order_bytes: the longest order that the trainer will send.
        log_level: from which on it logs, as its trainer does: of `logging`.
    """

    config: AgentConfig
    socket: str
    max_order_bytes: int
    log_level: int = logging.WARNING


class _Said(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind"):
    """One message."""


# --- orders ---


class PublishOrder(_Said, tag="publish", frozen=True, kw_only=True):
    """Serve this version from now on.

    Attributes:
        head: the publication without its layout.
        source: which of its sources lies on this host.
        layout: the layout that `head` names, as it travels; null where it is the one that was sent last.
    """

    head: PublicationHead
    source: int
    layout: msgspec.Raw = msgspec.Raw(b"null")


class ResetOrder(_Said, tag="reset", frozen=True, kw_only=True):
    """End whatever reads superseded segments."""


class Ping(_Said, tag="ping", frozen=True, kw_only=True):
    """Give a sign of life.

    Attributes:
        phases: what the trainer has timed since it said so last; the agent shows it at `/timeline`.
    """

    phases: tuple[PhaseRecord, ...] = ()


class EndOrder(_Said, tag="end", frozen=True, kw_only=True):
    """Close, and end.

    Attributes:
        in_order: the trainer has come to its end, not to an exception.
    """

    in_order: bool


Order: TypeAlias = PublishOrder | ResetOrder | Ping | EndOrder


# --- events ---


class Ready(_Said, tag="ready", frozen=True, kw_only=True):
    """The agent serves: where, by which ports, and the nonce of the shared memory that it sees."""

    endpoint: str
    port: int
    blocks_port: int
    host_nonce: str


class Failed(_Said, tag="failed", frozen=True, kw_only=True):
    """The agent can't start: a typed error, as `WeightSyncError.to_dict` says it. It ends."""

    error: dict[str, Any]


class Pong(_Said, tag="pong", frozen=True, kw_only=True):
    """A sign of life."""


class DeltaBegun(_Said, tag="delta", frozen=True, kw_only=True):
    """It makes the delta to a version that was just proved. What it says of that version next tells the end of it."""


class DeltaReport(msgspec.Struct, frozen=True, kw_only=True):
    """A delta that receivers can take.

    Attributes:
        run_id: of both versions.
        base, version: numbers of the versions that it leads from and to.
        base_digest: sum of this host's bytes before, 32 hex digits.
        nbytes: its size.
        num_changed, num_elements: how many elements it changes on this host, and of how many.
        seconds: that the agent took to make it.
    """

    run_id: str
    base: int
    base_digest: str
    version: int
    nbytes: int
    num_changed: int
    num_elements: int
    seconds: float


class Published(_Said, tag="published", frozen=True, kw_only=True):
    """A version is proved, and served from now on.

    Attributes:
        delta: that leads to it from the version before; None where there is none.
        phases: what the agent has timed since it said so last.
    """

    version: Version
    delta: DeltaReport | None = None
    phases: tuple[PhaseRecord, ...] = ()


class NotPublished(_Said, tag="not_published", frozen=True, kw_only=True):
    """A version can't be served, and why: a typed error, as `WeightSyncError.to_dict` says it."""

    version: Version
    error: dict[str, Any]


class TransferBegun(_Said, tag="begun", frozen=True, kw_only=True):
    """A transfer is granted: whose, and of which version. A `TransferDone` tells its end."""

    version: Version
    receiver: str


class TransferDone(_Said, tag="done", frozen=True, kw_only=True):
    """A transfer is over: whose, and whether the receiver has acknowledged all of it. See `Published` for `phases`."""

    version: Version
    receiver: str
    ok: bool
    phases: tuple[PhaseRecord, ...] = ()


Event: TypeAlias = Ready | Failed | Pong | DeltaBegun | Published | NotPublished | TransferBegun | TransferDone

learn(AgentStart, Order, Event)
