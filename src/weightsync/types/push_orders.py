"""The messages by which training ranks take a controller's orders to push."""

from __future__ import annotations

from typing import Any

from weightsync.errors import InvalidRequestError
from weightsync.types.control import ModelRequest, check_trained
from weightsync.types.message import Message, learn
from weightsync.types.method import SyncReport


class PushOrder(Message, frozen=True, kw_only=True):
    """All ranks are to push what they have.

    Attributes:
        order_id: what the report names.
        version: the lowest number that will do.
    """

    order_id: str
    version: int


class NextPushRequest(ModelRequest, frozen=True, kw_only=True):
    """Training rank 0 asks for an order; `wait_s` is how long to wait for one.

    Attributes:
        version: number of the weights that the ranks have now; None: no order is taken, and the answer says that this
            controller gives some.
        run_id: theirs, said with a version: ranks of a run that another has taken over from take no order.
        taker: what they alone call themselves: they get an order that they have not reported again. None: they do not.
    """

    version: int | None = None
    run_id: str | None = None
    taker: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_trained("rank 0" if self.taker is None else self.taker, self.run_id, self.version)
        if self.version is not None and self.run_id is None:
            raise InvalidRequestError(
                "ranks that take an order say of which run they are: name run_id (a trainer with an older weightsync "
                "does not: bring it to the controller's release)"
            )


class NextPushReply(Message, frozen=True, kw_only=True):
    """The order, which one taker gets; None: there is none."""

    order: PushOrder | None = None


class PushDoneRequest(ModelRequest, frozen=True, kw_only=True):
    """How an order ended: one of both.

    Attributes:
        order_id: which.
        report: what `PushSync.sync_weights` returned.
        error: what it raised, as `WeightSyncError.to_dict` writes it.
    """

    order_id: str
    report: SyncReport | None = None
    error: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.report is None) == (self.error is None):
            raise InvalidRequestError("a push has ended with a report, or with an error")


class PushDoneReply(Message, frozen=True, kw_only=True):
    """The report has come."""


learn(PushOrder, NextPushRequest, NextPushReply, PushDoneRequest, PushDoneReply)
