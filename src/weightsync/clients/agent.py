"""AgentClient: a receiver's view of a `TransferAgent`. No torch."""

from __future__ import annotations

import contextlib
import logging
from typing import Any, TypeVar
from urllib.parse import urlencode

import msgspec

from weightsync.errors import EngineError, InvalidRequestError, NotPublishedError, WeightSyncError
from weightsync.net.client import JsonClient
from weightsync.types import Deadline, Version
from weightsync.types.layout import GrantMessage, KnownLayouts
from weightsync.types.publication import Publication, SourceProof
from weightsync.types.relay_messages import RelayAnswer, RelayReport
from weightsync.types.transfer_messages import (
    AgentVersion,
    EndedTransfers,
    FinishRequest,
    Receivers,
    RegisterRequest,
    RenewRequest,
    TransferGrant,
    TransferRequest,
)

MAX_PUBLICATION_BYTES = 256 << 20
"""The most that may be said of one publication, as JSON. A tensor takes some 350 bytes (twice its name, dtype, shape
and place, its digest), the checksums of 1 TiB in blocks of 4 MiB take 4 MiB: 700 000 tensors in 1 TiB fit."""
_MAX_RELAY_BYTES = 128 << 20
_AROUND_BYTES = 1 << 16
"""What a grant says besides."""
_TOO_LONG = "its publication has too many parts: publish the model in pieces, each with a model_id of its own"

_FIRST_VERSION_S = 1.0
"""So long an agent may take to hear of its first version: its trainer may tell others of it first."""
_MAX_TRIES = 3
"""As often as a block whose bytes are wrong."""
_LET_GO_S = 2.0

_T = TypeVar("_T")
_logger = logging.getLogger(__name__)


def _query(after: str | None, wait_s: float) -> str:
    fields = {"after": after, "wait_s": f"{wait_s:g}" if wait_s else None}
    given = {name: value for name, value in fields.items() if value is not None}
    return f"?{urlencode(given)}" if given else ""


class PublishedNow(msgspec.Struct, frozen=True, kw_only=True):
    """What `/manifest` answers."""

    publication: Publication
    source: int
    proof: SourceProof


class AgentClient(JsonClient):
    """The agent's endpoints; see `JsonClient` for arguments and errors."""

    def __init__(self, url: str, *, token: str | None = None, verify: bool | str = True) -> None:
        super().__init__(url, runs="a weightsync agent", token=token, verify=verify)

    def get_version(
        self, *, after: Version | None = None, wait_s: float = 0.0, timeout_s: float = 10.0
    ) -> AgentVersion:
        """The newest publication.

        Args:
            after: the caller knows this one.
            wait_s: the agent waits so long, 60 s at most, until there is another run or a newer version than `after`
                (any version where that is None); then it answers with what there is.
            timeout_s: for the exchange, on top of `wait_s`.

        Raises:
            StateError: too many wait there already.
        """
        query = _query(None if after is None else str(after), wait_s)
        return self.call("GET", f"/get_version{query}", AgentVersion, timeout_s=timeout_s + wait_s)

    def current_run(self, model_id: str, *, timeout_s: float = 3.0) -> str:
        """The run of what the agent has of a model, or is about to have: for who was told of a version and no run.

        Raises:
            NotPublishedError: it has nothing yet, or another model.
        """
        reply = self.get_version(wait_s=_FIRST_VERSION_S, timeout_s=timeout_s)
        run_id = reply.coming_run_id or reply.run_id
        if reply.model_id != model_id or run_id is None:
            has = f"has model {reply.model_id!r}" if reply.model_id != model_id else "has published nothing yet"
            raise NotPublishedError(f"no run of model {model_id!r} is known: {self.url} {has}", peer=self.peer)
        return run_id

    def ended_transfers(self, *, after: int = 0, wait_s: float = 0.0, timeout_s: float = 10.0) -> EndedTransfers:
        """Transfers that are over, at most the last few hundred; see `get_version` for `wait_s`."""
        query = _query(str(after), wait_s)
        return self.call("GET", f"/get_transfers{query}", EndedTransfers, timeout_s=timeout_s + wait_s)

    def receivers(self, *, timeout_s: float = 10.0) -> Receivers:
        """Who is registered there, and what each has had."""
        return self.call("GET", "/receivers", Receivers, timeout_s=timeout_s)

    def manifest(self, *, timeout_s: float = 10.0) -> PublishedNow:
        """The newest publication, whole, with what the agent has computed over its source.

        Raises:
            StateError: nothing is published yet.
        """
        return self._published("GET", "/manifest", PublishedNow, timeout_s=timeout_s)

    def capabilities(self, *, timeout_s: float = 10.0) -> dict[str, Any]:
        """Modes, transports, deltas."""
        return self.call("GET", "/get_capabilities", dict[str, Any], timeout_s=timeout_s)

    def register(self, request: RegisterRequest, *, timeout_s: float = 10.0) -> dict[str, Any]:
        """Makes a receiver known; the agent's capabilities."""
        return self.call("POST", "/register_receiver", dict[str, Any], message=request, timeout_s=timeout_s)

    def request_transfer(
        self, request: TransferRequest, *, layouts: KnownLayouts | None = None, timeout_s: float = 10.0
    ) -> TransferGrant:
        """Asks for one version's bytes.

        Args:
            request: what is asked for.
            layouts: what the caller holds; the agent leaves out what is among them, and what it sends is added. Without
                it every answer has its publication whole.
            timeout_s: for the whole exchange.

        Raises:
            VersionError: another version is the newest; the error's `version` says which.
            StateError: nothing is published yet.
            NotRegisteredError: the receiver is not registered (an agent that was started again has forgotten it).
            EngineError: what it answers is no grant, or was damaged on its way, as often as it is asked.
        """
        path, deadline = "/request_transfer", Deadline(timeout_s)
        if layouts is None:
            return self._published("POST", path, TransferGrant, message=request, timeout_s=timeout_s)
        for num_tries in range(1, _MAX_TRIES + 1):  # as for a block: damage is mended by asking again
            asked = msgspec.structs.replace(request, layouts=layouts.names())
            left_s = timeout_s if num_tries == 1 else deadline.check("time to ask again", peer=self.url)
            last = num_tries == _MAX_TRIES
            try:
                reply = self._published("POST", path, GrantMessage, message=asked, timeout_s=left_s)
            except EngineError as error:
                if last or not isinstance(error.__cause__, InvalidRequestError):  # it said something else than this
                    raise
                _logger.info("%s", error)
                continue
            try:
                return layouts.grant(reply)
            except InvalidRequestError as error:
                self._let_go(reply)
                if last:
                    raise EngineError(
                        f"{self.url} answered {path} with what is no grant: {error} (wrong {num_tries} times)",
                        peer=self.url,
                    ) from error
                _logger.info("%s answered %s with what is no grant, it is asked again: %s", self.url, path, error)
        raise AssertionError("unreachable")

    def _let_go(self, reply: GrantMessage) -> None:
        """The agent need not keep what nobody can read; where that can't be said, it finds out by itself."""
        for transfer_id in [reply.transfer_id] if reply.delta is None else [link.transfer_id for link in reply.delta]:
            with contextlib.suppress(WeightSyncError):
                self.finish_transfer(FinishRequest(transfer_id=transfer_id, ok=False), timeout_s=_LET_GO_S)

    def renew_transfer(self, request: RenewRequest, *, timeout_s: float = 10.0) -> None:
        """The receiver is at work: the transfer is not over for want of a reader.

        Raises:
            TransferAbortedError: it is over, in words why.
        """
        self.call("POST", "/renew_transfer", dict[str, Any], message=request, timeout_s=timeout_s)

    def finish_transfer(self, request: FinishRequest, *, timeout_s: float = 10.0) -> None:
        """The receiver's acknowledgement.

        Raises:
            TransferAbortedError: the transfer is over already.
        """
        self.call("POST", "/finish_transfer", dict[str, Any], message=request, timeout_s=timeout_s)

    def relay(self, report: RelayReport, *, timeout_s: float = 10.0) -> RelayAnswer:
        """What this host has, and who has what it lacks.

        Args:
            report: with how long the answer may wait for news.
            timeout_s: for the exchange, on top of that.

        Raises:
            NotRegisteredError: the receiver is not registered.
            TransferAbortedError: its grant is over.
            UnsupportedError: the agent does not relay.
        """
        timeout_s += report.wait_s
        return self.call(
            "POST", "/relay", RelayAnswer, message=report, timeout_s=timeout_s, limit_bytes=_MAX_RELAY_BYTES
        )

    def _published(self, method: str, path: str, kind: type[_T], *, message: Any = None, timeout_s: float) -> _T:
        """`call` of a route whose answer holds a whole publication."""
        limit_bytes = MAX_PUBLICATION_BYTES + _AROUND_BYTES
        return self.call(
            method, path, kind, message=message, timeout_s=timeout_s, limit_bytes=limit_bytes, advice=_TOO_LONG
        )
