"""AgentClient: a receiver's view of a `TransferAgent`. No torch."""

from __future__ import annotations

from typing import Any, TypeVar
from urllib.parse import urlencode

import msgspec

from weightsync.clients.http_edge import MAX_REPLY_BYTES, checked_url, told_error
from weightsync.clients.wire import Wire
from weightsync.errors import (
    EngineError,
    InvalidRequestError,
    WeightSyncError,
)
from weightsync.net.auth import bearer_headers
from weightsync.net.messages import decode, encode
from weightsync.types import Deadline, Version
from weightsync.types.layout import GrantMessage, KnownLayouts
from weightsync.types.publication import (
    AgentVersion,
    EndedTransfers,
    FinishRequest,
    Publication,
    RegisterRequest,
    RenewRequest,
    SourceProof,
    TransferGrant,
    TransferRequest,
)

MAX_PUBLICATION_BYTES = 256 << 20
"""The most that may be said of one publication, as JSON. A tensor takes some 350 bytes (twice its name, dtype, shape
and place, its digest), the checksums of 1 TiB in blocks of 4 MiB take 4 MiB: 700 000 tensors in 1 TiB fit."""
_AROUND_BYTES = 1 << 16
"""What a grant says besides."""
_TOO_LONG = "its publication has too many parts: publish the model in pieces, each with a model_id of its own"

_T = TypeVar("_T")


class JsonClient:
    """Calls to one of our own HTTP faces. Thread-safe.

    Args:
        url: e.g. "http://127.0.0.1:8123".
        runs: what should be running there, for messages.
        token: bearer token of the server.
        connect_timeout_s: how long to try to connect.
        verify: whether to check an https server's certificate; or the PEM file of the authority that signed it.

    Raises:
        ConfigError: the URL is none.
    """

    def __init__(
        self,
        url: str,
        *,
        runs: str,
        token: str | None = None,
        connect_timeout_s: float = 3.0,
        verify: bool | str = True,
    ) -> None:
        self.url = checked_url(url, whose=f"{runs}'s")
        self._runs = runs
        self._wire = Wire(
            self.url, runs=runs, headers=bearer_headers(token), connect_timeout_s=connect_timeout_s, verify=verify
        )

    def call(
        self,
        method: str,
        path: str,
        kind: type[_T],
        *,
        message: Any = None,
        timeout_s: float,
        limit_bytes: int | None = None,
        advice: str = "",
    ) -> _T:
        """One exchange.

        Args:
            method, path: what is called.
            kind: type of the answer.
            message: the body; none where not given.
            timeout_s: for the whole exchange.
            limit_bytes: the longest answer that is taken; `http_edge.MAX_REPLY_BYTES` where not given.
            advice: what to do where it is longer, for the error.

        Raises:
            EngineUnreachableError: nobody answered.
            EngineError: the answer is none, or too long.
            DeadlineExceededError: no answer in time.
            WeightSyncError: what the server raised, typed.
        """
        body = self.exchange(
            method,
            path,
            content=None if message is None else encode(message),
            timeout_s=timeout_s,
            limit_bytes=limit_bytes,
            advice=advice,
        )
        try:
            return decode(body, kind, what=f"the answer to {path}")
        except InvalidRequestError as error:
            raise EngineError(
                f"{self.url} answered {path} with what is no answer: {error}; does {self._runs} run there?",
                peer=self.url,
            ) from error

    def exchange(
        self,
        method: str,
        path: str,
        *,
        content: bytes | None = None,
        content_type: str = "application/json",
        timeout_s: float,
        limit_bytes: int | None = None,
        advice: str = "",
    ) -> bytes:
        """One exchange of bytes: the body of a good answer. See `call` for arguments and errors."""
        status, body = self._wire.exchange(
            method,
            path,
            content=content,
            headers={} if content is None else {"content-type": content_type},
            deadline=Deadline(timeout_s),
            limit_bytes=MAX_REPLY_BYTES if limit_bytes is None else limit_bytes,
            advice=advice,
        )
        if status >= 300:
            raise self._error_in(status, body, path)
        return body

    def close(self) -> None:
        """Ends what is under way. Idempotent."""
        self._wire.close()

    def _error_in(self, status: int, body: bytes, path: str) -> WeightSyncError:
        return told_error(body, peer=self.url) or EngineError(
            f"{self.url} answered {path} with status {status}: {body[:200]!r}; is {self._runs} there?", peer=self.url
        )


def _query(after: str | None, wait_s: float) -> str:
    said = {"after": after, "wait_s": f"{wait_s:g}" if wait_s else None}
    given = {name: value for name, value in said.items() if value is not None}
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

    def ended_transfers(self, *, after: int = 0, wait_s: float = 0.0, timeout_s: float = 10.0) -> EndedTransfers:
        """Transfers that are over, at most the last few hundred; see `get_version` for `wait_s`."""
        query = _query(str(after), wait_s)
        return self.call("GET", f"/get_transfers{query}", EndedTransfers, timeout_s=timeout_s + wait_s)

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
        """
        path = "/request_transfer"
        if layouts is None:
            return self._published("POST", path, TransferGrant, message=request, timeout_s=timeout_s)
        asked = msgspec.structs.replace(request, layouts=layouts.names())
        said = self._published("POST", path, GrantMessage, message=asked, timeout_s=timeout_s)
        try:
            return layouts.grant(said)
        except InvalidRequestError as error:
            raise EngineError(f"{self.url} answered {path} with what is no grant: {error}", peer=self.url) from error

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

    def _published(self, method: str, path: str, kind: type[_T], *, message: Any = None, timeout_s: float) -> _T:
        """`call` of a route whose answer holds a whole publication."""
        limit_bytes = MAX_PUBLICATION_BYTES + _AROUND_BYTES
        return self.call(
            method, path, kind, message=message, timeout_s=timeout_s, limit_bytes=limit_bytes, advice=_TOO_LONG
        )
