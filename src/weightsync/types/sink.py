"""What a trainer and the writer of its object store say to each other: how it runs, one way; events, the other."""

from __future__ import annotations

from typing import Any, TypeAlias

from weightsync.types.manifest import Version
from weightsync.types.message import Message, learn


class SinkConfig(Message, frozen=True, kw_only=True):
    """How a store's writer runs. One line of JSON on its standard input, so that a token stands in no command line.

    Attributes:
        store: URL of the place.
        model_id, run_id: of the trainer.
        agents: URLs of the trainer's agents, one a trainer host; nobody else is called.
        token, verify: of the agents.
        writer: names the trainer's place for a writer: one that is started again under it need not watch a dead one's
            claim.
        sign_key: file with the secret key that manifests are signed with; None: they are not.
        anchor_every: a chain has at most so many versions; then comes a full.
        anchor_share: a chain has at most this share of the model's bytes; then comes a full.
        keep_s: so long what nobody needs any more stays, for readers that leave no note.
        takeover_s: a claim whose writer gives no sign of life for so long is taken over.
        write_timeout_s: of one version; then it is given up, and the newest is taken. Its bytes have longer where they
            come, or go, at 5 MB/s.
    """

    store: str
    model_id: str
    run_id: str
    agents: tuple[str, ...]
    token: str | None = None
    verify: bool | str = True
    writer: str = ""
    sign_key: str | None = None
    anchor_every: int = 32
    anchor_share: float = 0.5
    keep_s: float = 600.0
    sweep_s: float = 60.0
    takeover_s: float = 20.0
    write_timeout_s: float = 600.0


class _Said(Message, frozen=True, kw_only=True, tag_field="kind"):
    """One event, a line of the standard output."""


class Begun(_Said, tag="begun", frozen=True, kw_only=True):
    """The process runs: it asks for its claim now."""


class Claimed(_Said, tag="claimed", frozen=True, kw_only=True):
    """The place is this writer's."""

    epoch: int


class Stored(_Said, tag="stored", frozen=True, kw_only=True):
    """A version is in the store, and pointed to.

    Attributes:
        version: which.
        is_anchor: whether it went in full.
        nbytes: that were written for it.
        total_bytes: of the model.
        seconds: from its grant to the pointer.
    """

    version: Version
    is_anchor: bool
    nbytes: int
    total_bytes: int
    seconds: float


class Trouble(_Said, tag="trouble", frozen=True, kw_only=True):
    """Something went wrong, as `WeightSyncError.to_dict` says it.

    Attributes:
        is_last: the writer ends, and need not be started again.
    """

    error: dict[str, Any]
    is_last: bool = False


SinkEvent: TypeAlias = Begun | Claimed | Stored | Trouble

learn(SinkConfig, SinkEvent)
