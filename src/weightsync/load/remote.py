"""RemoteWeightLoader: a loader whose model lives behind HTTP, at a `RemoteLoadServer`."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterable, Iterator
from typing import TypeVar

import torch

from weightsync.clients.agent import JsonClient
from weightsync.errors import (
    AuthError,
    DeadlineExceededError,
    DigestMismatchError,
    EngineError,
    InvalidRequestError,
    ManifestMismatchError,
    StateError,
    UnsupportedError,
    WeightSyncError,
)
from weightsync.load.base import WeightLoader
from weightsync.load.remote_wire import (
    CHUNK_TYPE,
    LOAD_API,
    MAX_PIECE_BYTES,
    MAX_PIECES,
    AbortLoad,
    ChunkHead,
    CommitLoad,
    LiveRead,
    LiveReply,
    LoadReply,
    OpenLoad,
    Piece,
    VerifyLoad,
    bytes_of,
    digest_of_bytes,
    framed,
)
from weightsync.load.whole import whole_tensor
from weightsync.net.messages import decode, encode
from weightsync.tensors import tensor_from_bytes
from weightsync.types import HeldTensor, Manifest, TensorSpec, Update, Version
from weightsync.types.deadline import check_wait_s

_UNKNOWN = "not known: the remote loader may or may not have done it; nothing is served until a later commit"
_NOT_DONE = (InvalidRequestError, AuthError, ManifestMismatchError, StateError, UnsupportedError)
"""A server that says one of these has changed nothing."""
_NO_ANSWER = (EngineError, DeadlineExceededError)
_ERROR_BYTES = 1 << 16
"""An answer may be an error instead of the bytes that were asked for."""
_T = TypeVar("_T")


class RemoteWeightLoader(WeightLoader):
    """Sends each step of the bracket to a `RemoteLoadServer` and checks what it answers.

    Bytes go in requests of at most `request_bytes`; beside the update itself one such buffer is held. `verify` compares
    the digests of what the remote loader will serve with those of what was sent; `live_tensors` reads the remote bytes
    back, once the model's bytes over the network, for whoever proves them by himself.

    An answer that never came leaves the remote side unknown. Then `healthy` is False where it might serve something
    half-loaded or another version than was told, until a later commit. `healthy` is what the last answer said.

    Args:
        url: the server's, e.g. "http://127.0.0.1:8123".
        token: bearer token of the server.
        timeout_s: for each exchange; a commit or a chunk includes the remote loader's own work.
        request_bytes: the most tensor bytes of a request.
        verify: whether to check an https server's certificate; or the PEM file of the authority that signed it.

    Raises:
        ConfigError: the URL is none.
        EngineUnreachableError: nobody answers there.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        timeout_s: float = 60.0,
        request_bytes: int = 32 << 20,
        verify: bool | str = True,
    ) -> None:
        if not 1 <= request_bytes <= MAX_PIECE_BYTES:
            raise InvalidRequestError(f"request_bytes is 1 to {MAX_PIECE_BYTES}, not {request_bytes}")
        self._timeout_s = check_wait_s("timeout_s", timeout_s)
        self._request_bytes = request_bytes
        self._client = JsonClient(url, runs="a weightsync load server", token=token, verify=verify)
        self._session: str | None = None
        self._manifest: Manifest | None = None
        self._specs: dict[str, TensorSpec] = {}
        self._sent: dict[str, str] = {}  # name -> digest
        self._num_requests = 0
        self._healthy = False
        self._unsure = False  # whether a commit was not answered, and none has been since
        self._take(self._ask("describe", None), None)

    @property
    def healthy(self) -> bool:
        """See the base class."""
        return self._healthy

    def begin(self, manifest: Manifest) -> None:
        """See the base class.

        Raises:
            SyncInProgressError: another client has a bracket open there. Nothing was changed.
            EngineUnreachableError, DeadlineExceededError: no answer. A bracket that was opened nevertheless is told to
                end, and ends by itself when it is idle.
        """
        if self._manifest is not None:
            raise StateError("a load is under way: commit or abort it first", version=str(self._manifest.version))
        session = secrets.token_hex(16)
        try:
            reply = self._ask("begin", OpenLoad(session=session, manifest=manifest))
            self._take(reply, session, manifest.version)
        except _NOT_DONE:
            raise
        except WeightSyncError as error:
            self._forget(session, error)
            raise
        self._session, self._manifest = session, manifest
        self._specs, self._sent, self._num_requests = manifest.by_name(), {}, 0

    def load_weights(self, updates: Iterable[Update]) -> None:
        """See the base class. Returns when the remote loader has taken all of them."""
        manifest = self._open_bracket()
        pieces: list[Piece] = []
        parts: list[memoryview] = []
        room = self._request_bytes
        for update in updates:
            tensor = whole_tensor(update, self._specs, self._sent)
            data = bytes_of(tensor)
            self._sent[update.name] = digest_of_bytes(data)
            offset = 0
            while True:
                taken = min(len(data) - offset, room)
                pieces.append(Piece(name=update.name, offset=offset, nbytes=taken))
                parts.append(data[offset : offset + taken])
                offset, room = offset + taken, room - taken
                if not room or len(pieces) == MAX_PIECES:
                    self._send(manifest, pieces, parts, last=False)
                    pieces, parts, room = [], [], self._request_bytes
                if offset == len(data):
                    break
        self._send(manifest, pieces, parts, last=True)

    def verify(self) -> None:
        """See the base class.

        Raises:
            DigestMismatchError: what the remote loader will serve is not what was sent; the caller aborts.
        """
        manifest = self._open_bracket()
        if missing := sorted(self._specs.keys() - self._sent.keys()):
            raise ManifestMismatchError(f"{len(missing)} tensors did not arrive", parameter=missing[0])
        reply = self._step("verify", VerifyLoad(session=self._name()), manifest.version)
        if reply.digests is None:
            if not reply.unprovable:
                raise self._odd("neither digests nor a reason why there are none")
            return
        if odd := sorted(reply.digests.keys() ^ self._sent.keys()):
            raise ManifestMismatchError("what it would serve has other names than what was sent", parameter=odd[0])
        for name, digest in self._sent.items():
            if reply.digests[name] != digest:
                raise DigestMismatchError(
                    f"the remote loader would serve {reply.digests[name]}, sent was {digest}",
                    peer=self._client.url, parameter=name, version=str(manifest.version),
                )  # fmt: skip

    def live_tensors(self) -> Iterator[HeldTensor]:
        """See the base class. Reads every byte over the network, one tensor at a time."""
        live = self._answer("live", b"{}", LiveReply)
        for index, tensor in enumerate(live.tensors):
            data = bytearray()
            while len(data) < tensor.nbytes:
                wanted = min(tensor.nbytes - len(data), self._request_bytes)
                read = LiveRead(epoch=live.epoch, tensor=index, offset=len(data), nbytes=wanted)
                got = self._post("read", encode(read), limit_bytes=wanted + _ERROR_BYTES)
                if len(got) != wanted:
                    raise self._odd(f"{len(got)} of {wanted} bytes of {tensor.spec.name}")
                data += got
            buffer = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
            held = tensor_from_bytes(buffer, dtype=tensor.spec.dtype, shape=tensor.shape)
            yield HeldTensor(spec=tensor.spec, box=tensor.box, tensor=held)

    def commit(self, version: Version) -> None:
        """See the base class.

        Raises:
            EngineUnreachableError, DeadlineExceededError: no answer: it serves the old version or the new one, and
                `healthy` is False until a later commit says which.
        """
        self._open_bracket()
        reply = self._step("commit", CommitLoad(session=self._name(), version=version), version)
        self._session = self._manifest = None
        self._unsure, self._healthy = False, reply.healthy

    def abort(self, reason: str) -> None:
        """See the base class.

        Raises:
            EngineUnreachableError, DeadlineExceededError: no answer. Here the bracket is closed and the next begin
                works; there it ends when it is idle.
        """
        session, self._session, self._manifest = self._session, None, None
        if session is not None:
            self._take(self._ask("abort", AbortLoad(session=session, reason=reason[:1000])), session)

    def close(self) -> None:
        """Closes the connections. Idempotent."""
        self._client.close()

    def _open_bracket(self) -> Manifest:
        if self._manifest is None:
            raise StateError("no load is under way: begin first", state_left="nothing was changed")
        return self._manifest

    def _name(self) -> str:
        assert self._session is not None  # _open_bracket has looked
        return self._session

    def _send(self, manifest: Manifest, pieces: list[Piece], parts: list[memoryview], *, last: bool) -> None:
        head = ChunkHead(session=self._name(), index=self._num_requests, pieces=tuple(pieces), last=last)
        self._num_requests += 1
        reply = self._step("chunk", head, manifest.version, framed(head, parts))
        if last and reply.num_received != len(self._sent):
            raise self._odd(f"it has {reply.num_received} of the {len(self._sent)} tensors that were sent")

    def _step(
        self, path: str, message: VerifyLoad | CommitLoad | ChunkHead, version: Version, chunk: bytes | None = None
    ) -> LoadReply:
        """A step of the open bracket. One that fails may have written, where the remote loader writes live weights."""
        try:
            if chunk is None:
                reply = self._answer(path, encode(message), LoadReply)
            else:
                reply = self._answer(path, chunk, LoadReply, content_type=CHUNK_TYPE)
            return self._take(reply, message.session, version)
        except _NOT_DONE:
            raise
        except WeightSyncError as error:
            if path == "commit" or (path == "chunk" and self.writes_live):
                self._healthy = False
            if path == "commit" and isinstance(error, _NO_ANSWER):
                self._unsure = True
                error.state_left = error.state_left or _UNKNOWN
            raise

    def _take(self, reply: LoadReply, session: str | None, version: Version | None = None) -> LoadReply:
        """Believes an answer, where it is one to this step of this session."""
        if reply.session != session or (version is not None and reply.version != version):
            raise self._odd(f"it answered for session {reply.session} and version {reply.version}")
        self._healthy, self.writes_live = reply.healthy and not self._unsure, reply.writes_live
        return reply

    def _forget(self, session: str, why: WeightSyncError) -> None:
        """Ends a bracket that may have been opened."""
        with contextlib.suppress(WeightSyncError):
            self._ask("abort", AbortLoad(session=session, reason=f"begin failed: {why.message}"[:1000]))

    def _ask(self, path: str, message: OpenLoad | AbortLoad | None) -> LoadReply:
        return self._answer(path, b"{}" if message is None else encode(message), LoadReply)

    def _answer(self, path: str, content: bytes, kind: type[_T], *, content_type: str = "application/json") -> _T:
        body = self._post(path, content, content_type=content_type)
        try:
            return decode(body, kind, what=f"the answer to {path}")
        except InvalidRequestError as error:
            raise self._odd(str(error)) from error

    def _post(
        self, path: str, content: bytes, *, content_type: str = "application/json", limit_bytes: int | None = None
    ) -> bytes:
        return self._client.exchange(
            "POST", f"{LOAD_API}/{path}", content=content, content_type=content_type, timeout_s=self._timeout_s,
            limit_bytes=limit_bytes,
        )  # fmt: skip

    def _odd(self, what: str) -> EngineError:
        return EngineError(f"{self._client.url} answered well and wrongly: {what}", peer=self._client.url)
