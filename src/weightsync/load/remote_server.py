"""RemoteLoadServer: any `WeightLoader` behind HTTP, for a `RemoteWeightLoader` elsewhere.

Who runs what: the server's event loop receives, checks and keeps the session; the loader is called in threads, one
at a time. No byte is taken before its place in the announced manifest was checked, and memory is
allocated for tensors that the loader's `begin` has accepted alone: one copy of what has come of a chunk.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from typing import TypeVar

import msgspec
from fastapi import FastAPI, Request, Response
from starlette.requests import ClientDisconnect

from weightsync.clients.fanout import in_thread
from weightsync.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    LoadError,
    StateError,
    SyncInProgressError,
    TransferAbortedError,
    UnsupportedError,
    as_weightsync_error,
)
from weightsync.load.base import WeightLoader
from weightsync.load.remote_session import LoadSession
from weightsync.load.remote_wire import (
    CHUNK_TYPE,
    LENGTH,
    LOAD_API,
    MAX_HEAD_BYTES,
    AbortLoad,
    ChunkHead,
    CommitLoad,
    LiveRead,
    LiveReply,
    LiveTensor,
    LoadReply,
    OpenLoad,
    VerifyLoad,
    bytes_of,
    digest_of_bytes,
)
from weightsync.net.guard import LIST_BODY_BYTES, MANIFEST_BODY_BYTES
from weightsync.net.messages import decode, encode
from weightsync.net.server import ServerThread, TlsFiles, api_app
from weightsync.types import HeldTensor, Version
from weightsync.types.deadline import check_wait_s
from weightsync.types.process import of_one_process

_T = TypeVar("_T")


@of_one_process
class RemoteLoadServer:
    """Serves one loader's bracket, to one client at a time, from `start` to `close`.

    Whoever generates with the model asks `loader.healthy` first and holds its generations while a commit runs (from the
    first chunk on, where the loader writes live weights): the server knows nothing of generations.

    Args:
        loader: its bracket is the clients' alone from now on.
        host, port, token, tls: see `ServerThread`.
        idle_s: a session that has heard nothing for so long is aborted when another one begins.
        chunk_timeout_s: how long the bytes of one request may take to come.

    Raises:
        ConfigError: the host is reachable from elsewhere and there is no token.
    """

    def __init__(
        self,
        loader: WeightLoader,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        token: str | None = None,
        tls: TlsFiles | None = None,
        idle_s: float = 300.0,
        chunk_timeout_s: float = 60.0,
    ) -> None:
        self._loader = loader
        self._idle_s = check_wait_s("idle_s", idle_s)
        self._chunk_timeout_s = check_wait_s("chunk_timeout_s", chunk_timeout_s)
        self._session: LoadSession | None = None
        self._epoch = 0
        self._live: list[HeldTensor] | None = None  # of this epoch
        self._bytes: tuple[int, memoryview] | None = None  # of one of them
        self._one = threading.Lock()  # the loader is called by one thread at a time
        self.app: FastAPI = api_app("weightsync load")
        for path, handler in (
            ("describe", self._describe),
            ("begin", self._begin),
            ("chunk", self._chunk),
            ("verify", self._verify),
            ("commit", self._commit),
            ("abort", self._abort),
            ("live", self._list_live),
            ("read", self._read_live),
        ):
            self.app.add_api_route(f"{LOAD_API}/{path}", handler, methods=["POST"])
        chunk = f"{LOAD_API}/chunk"
        self._server = ServerThread(
            self.app,
            host=host,
            port=port,
            token=token,
            tls=tls,
            body_limits={
                f"{LOAD_API}/begin": MANIFEST_BODY_BYTES,
                chunk: MANIFEST_BODY_BYTES,
                f"{LOAD_API}/abort": LIST_BODY_BYTES,
            },
            streams={chunk: CHUNK_TYPE},
            name="weightsync-load-http",
        )

    def start(self) -> str:
        """Starts to listen; the URL."""
        return self._server.start()

    def wait(self) -> None:
        """Blocks until the server ends."""
        self._server.wait()

    def close(self) -> None:
        """Stops listening; a session that is open is aborted. Idempotent."""
        self._server.close()
        session, self._session = self._session, None
        if session is not None:

            def abort() -> None:
                with self._one:
                    self._loader.abort("the load server is closing")

            in_thread(abort, name="weightsync-load-close")  # not waited for: the loader may hang

    # --- the steps ---

    async def _describe(self) -> Response:
        return _json(self._reply(None))

    async def _begin(self, request: Request) -> Response:
        asked = decode(await request.body(), OpenLoad, what="a begin")
        before = self._session
        if before is not None and not (before.idle_s > self._idle_s and not before.busy):
            raise SyncInProgressError("another load is under way", version=str(before.manifest.version))
        session = self._session = LoadSession(asked.session, asked.manifest)
        try:
            with session.step():
                if before is not None:
                    await self._call(lambda: self._loader.abort(f"nothing was heard for {self._idle_s:g} s"))
                await self._call(lambda: self._loader.begin(asked.manifest))
        except BaseException:
            if self._session is session:
                self._session = None
            raise
        return _json(self._reply(self._of(asked.session)))

    async def _chunk(self, request: Request) -> Response:
        incoming = _Incoming(request)
        try:
            async with asyncio.timeout(self._chunk_timeout_s):
                head = decode(await incoming.head(), ChunkHead, what="a chunk's head")
        except TimeoutError:
            raise DeadlineExceededError(f"no head of a chunk within {self._chunk_timeout_s:g} s") from None
        session = self._of(head.session)
        with session.step(breaks=True):
            session.check(head)
            incoming.check_length(head.total_bytes)
            try:
                async with asyncio.timeout(self._chunk_timeout_s):
                    for piece in head.pieces:
                        place, filled = session.place(piece), 0
                        async for part in incoming.take(piece.nbytes):
                            self._still(session)
                            place[filled : filled + len(part)] = part
                            filled += len(part)
                    await incoming.end()
            except TimeoutError:
                raise DeadlineExceededError(f"a chunk did not come within {self._chunk_timeout_s:g} s") from None
            except ClientDisconnect:
                raise TransferAbortedError("the connection was cut in a chunk") from None
            if head.last:
                updates = session.take_updates()
                if updates:
                    await self._call(lambda: self._loader.load_weights(updates))
                    session.num_loaded += len(updates)
            self._still(session)
        return _json(self._reply(session))

    async def _verify(self, request: Request) -> Response:
        asked = decode(await request.body(), VerifyLoad, what="a verify")
        session = self._of(asked.session)
        with session.step():
            digests, unprovable = await self._call(self._verified)
            self._still(session)
        return _json(self._reply(session, digests, unprovable))

    async def _commit(self, request: Request) -> Response:
        asked = decode(await request.body(), CommitLoad, what="a commit")
        session = self._of(asked.session)
        with session.step():
            await self._call(lambda: self._loader.commit(asked.version))
            self._still(session)
            self._session = None
        return _json(self._reply(session))

    async def _abort(self, request: Request) -> Response:
        asked = decode(await request.body(), AbortLoad, what="an abort")
        session = self._session
        if session is None or session.name != asked.session:
            return _json(self._reply(None, session_name=asked.session))
        session.end(asked.reason)  # a chunk that is still coming ends; a loader that is running is waited for
        try:
            await self._call(lambda: self._loader.abort(asked.reason))
        finally:
            if self._session is session:
                self._session = None
        return _json(self._reply(session))

    async def _list_live(self) -> Response:
        def listed() -> LiveReply:
            self._live = list(self._loader.live_tensors())
            return LiveReply(
                epoch=self._epoch, tensors=tuple(LiveTensor(spec=held.spec, box=held.box) for held in self._live)
            )

        return _json(await self._in_turn(listed))

    async def _read_live(self, request: Request) -> Response:
        asked = decode(await request.body(), LiveRead, what="a read")

        def read() -> bytes:
            if self._live is None or asked.epoch != self._epoch:
                raise StateError("the loader has gone on since these tensors were listed")
            if asked.tensor >= len(self._live):
                raise InvalidRequestError(f"there are {len(self._live)} tensors, none has number {asked.tensor}")
            if self._bytes is None or self._bytes[0] != asked.tensor:
                self._bytes = (asked.tensor, bytes_of(self._live[asked.tensor].tensor))
            data = self._bytes[1]
            if asked.offset + asked.nbytes > len(data):
                raise InvalidRequestError(f"this tensor has {len(data)} bytes")
            return bytes(data[asked.offset : asked.offset + asked.nbytes])

        return Response(await self._in_turn(read), media_type="application/octet-stream")

    # --- what they share ---

    def _verified(self) -> tuple[dict[str, str] | None, str | None]:
        self._loader.verify()
        try:
            held = list(self._loader.live_tensors())
        except UnsupportedError as error:
            return None, error.message or "unprovable"
        if any(each.box is not None and not each.box.covers(each.spec.shape) for each in held):
            return None, "this loader holds parts of tensors"
        return {each.spec.name: digest_of_bytes(bytes_of(each.tensor)) for each in held}, None

    def _of(self, name: str) -> LoadSession:
        if self._session is None or self._session.name != name:
            raise StateError("there is no such session: it was aborted, or has ended", state_left="nothing was changed")
        return self._session

    def _still(self, session: LoadSession) -> None:
        if self._session is not session or session.ended:
            raise TransferAbortedError(f"the session was ended: {session.ended}", version=str(session.manifest.version))

    async def _call(self, step: Callable[[], _T]) -> _T:
        """A step of the loader's; what was listed as live is not any more."""

        def run() -> _T:
            self._epoch += 1
            self._live = self._bytes = None
            return step()

        return await self._in_turn(run)

    async def _in_turn(self, function: Callable[[], _T]) -> _T:
        """Calls it in a daemon thread, after those before it: a loader that hangs keeps no process from ending."""

        def run() -> _T:
            with self._one:
                return function()

        try:
            return await asyncio.wrap_future(in_thread(run, name="weightsync-load"))
        except Exception as error:
            raise as_weightsync_error(error, LoadError, "the remote loader failed") from error

    def _reply(
        self,
        session: LoadSession | None,
        digests: dict[str, str] | None = None,
        unprovable: str | None = None,
        *,
        session_name: str | None = None,
    ) -> LoadReply:
        version: Version | None = None if session is None else session.manifest.version
        return LoadReply(
            session=session_name if session is None else session.name,
            version=version,
            healthy=self._loader.healthy,
            writes_live=self._loader.writes_live,
            num_received=0 if session is None else session.num_loaded,
            digests=digests,
            unprovable=unprovable,
        )


class _Incoming:
    """The body of a chunk's request, part by part; no more is held than one part."""

    def __init__(self, request: Request) -> None:
        self._stream: AsyncIterator[bytes] = request.stream()
        length = request.headers.get("content-length", "")
        self._length = int(length) if length.isascii() and length.isdigit() else None
        self._taken = 0
        self._left = memoryview(b"")

    async def head(self) -> bytes:
        """The head, of a length that is looked at first."""
        (length,) = LENGTH.unpack(await self._exactly(LENGTH.size))
        if length > MAX_HEAD_BYTES:
            raise InvalidRequestError(f"a chunk's head has at most {MAX_HEAD_BYTES} bytes, not {length}")
        return await self._exactly(length)

    def check_length(self, num_bytes: int) -> None:
        """Refuses a body that can't hold what its head says, before any of it is taken."""
        if self._length is not None and self._length != self._taken + num_bytes:
            raise InvalidRequestError(
                f"the request has {self._length} bytes, its head announces {self._taken + num_bytes}"
            )

    async def take(self, num_bytes: int) -> AsyncIterator[memoryview]:
        """The next bytes, as they come."""
        while num_bytes:
            part = await self._some()
            if not part:
                raise InvalidRequestError(f"the request ends {num_bytes} bytes before its head says")
            now, self._left = part[:num_bytes], part[num_bytes:]
            num_bytes -= len(now)
            self._taken += len(now)
            yield now

    async def end(self) -> None:
        """Nothing follows."""
        if await self._some():
            raise InvalidRequestError("the request has more bytes than its head says")

    async def _exactly(self, num_bytes: int) -> bytes:
        return b"".join([bytes(part) async for part in self.take(num_bytes)])

    async def _some(self) -> memoryview:
        while not self._left:
            try:
                self._left = memoryview(await anext(self._stream))
            except StopAsyncIteration:
                break
        return self._left


def _json(message: msgspec.Struct) -> Response:
    return Response(encode(message), media_type="application/json")
