"""TransferAgent: a process beside the trainer that proves what was published and serves it to receivers.

Started by `agent_process.AgentProcess`, with which it talks in JSON lines: over its standard input come publications,
over its standard output go events. It ends when its standard input does: then the trainer is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import logging
import os
import queue
import resource
import ssl
import sys
import threading
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import msgspec
import zmq
import zmq.auth.thread
from fastapi import Request, Response

from weightsync.errors import (
    AuthError,
    ConfigError,
    InvalidRequestError,
    StateError,
    TransferAbortedError,
    VersionError,
    WeightSyncError,
    as_weightsync_error,
)
from weightsync.memory import Lock, Reader, host_nonce, reclaim_dead
from weightsync.memory.folder import read_head
from weightsync.net.messages import decode, encode
from weightsync.net.server import ServerThread, TlsFiles, api_app
from weightsync.observe import Metrics, Recorder, now_s
from weightsync.plan.safetensors import STAMP_WITHIN_BYTES, read_stamp
from weightsync.transfer.tcp_server import BlockServer, Transfer
from weightsync.types import PhaseRecord, Version
from weightsync.types.publication import (
    AgentVersion,
    FinishRequest,
    Publication,
    RegisterRequest,
    SourceProof,
    TransferGrant,
    TransferRequest,
    Transport,
)

_logger = logging.getLogger(__name__)

_RECLAIM_EVERY_S = 2.0
_MAX_RECEIVERS = 10_000
_LAST_RECLAIMS = 20
_LOOK_EVERY_S = 0.5
_MAX_EVENTS = 1000


class AgentConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How an agent runs. Travels to its process as JSON on a pipe, so a token never stands in a command line.

    Attributes:
        model_id: the one model that it serves.
        host: where it listens; beyond loopback only with a token.
        port, blocks_port, news_port: of HTTP, of the block server, of the announcements over ZMQ; 0: any.
        advertise: host name that receivers reach it by; `host` where not given.
        token: bearer token.
        certificate, key: PEM files; HTTP and block server speak TLS then.
        take_up_s: a transfer that nothing reads for so long is over.
        stall_s: a connection that takes nothing for so long is cut.
    """

    model_id: str
    host: str = "127.0.0.1"
    port: int = 0
    blocks_port: int = 0
    news_port: int = 0
    advertise: str | None = None
    token: str | None = None
    certificate: str | None = None
    key: str | None = None
    take_up_s: float = 10.0
    stall_s: float = 10.0


class TransferAgent:
    """Serves one model's publications from `start` to `close`. Document 3's endpoints, and a few more.

    Args:
        config: how it runs.
        tell: takes events, as JSON-able dicts; called from several threads.
    """

    def __init__(self, config: AgentConfig, tell: Callable[[dict[str, Any]], None]) -> None:
        self._config = config
        self._tell = tell
        self._nonce = host_nonce()
        self._lock = threading.Lock()
        self._receivers: dict[str, None] = {}
        self._current: tuple[Publication, int, SourceProof] | None = None
        self._next: tuple[Publication, int] | None = None
        self._proving: Version | None = None
        self._wake = threading.Condition(self._lock)
        self._closed = False
        self.recorder = Recorder(f"agent/{config.model_id}")
        self._metrics = Metrics(self.recorder, model_id=config.model_id)
        tls = None
        if config.certificate is not None and config.key is not None:
            tls = TlsFiles(certificate=config.certificate, key=config.key)
        self.app = api_app("weightsync agent")
        for method, path, handler in (
            ("GET", "/get_version", self._get_version),
            ("GET", "/get_buffer_info", self._get_buffer_info),
            ("GET", "/manifest", self._get_manifest),
            ("GET", "/get_capabilities", self._get_capabilities),
            ("GET", "/metrics", self._get_metrics),
            ("POST", "/register_receiver", self._register),
            ("POST", "/register_sglang_instance", self._register),
            ("POST", "/request_transfer", self._request_transfer),
            ("POST", "/finish_transfer", self._finish_transfer),
        ):
            self.app.add_api_route(path, handler, methods=[method])
        self._server = ServerThread(self.app, host=config.host, port=config.port, token=config.token, tls=tls)
        self._blocks = BlockServer(
            config.host, config.blocks_port, stall_s=config.stall_s, tls=None if tls is None else _tls_context(tls)
        )
        self._news = _News(config)

    def start(self) -> dict[str, Any]:
        """Starts to serve; the ports, for whoever starts it again."""
        self._blocks.start()
        url = urlsplit(self._server.start())
        host = self._config.advertise or self._config.host
        self.endpoint = f"{url.scheme}://{f'[{host}]' if ':' in host else host}:{url.port}"
        for target in (self._prove_all, self._keep_house):
            threading.Thread(target=target, name=f"weightsync-agent{target.__name__}", daemon=True).start()
        return {
            "event": "ready", "endpoint": self.endpoint, "port": url.port,
            "blocks_port": self._blocks.port, "news_port": self._news.port, "host_nonce": self._nonce,
        }  # fmt: skip

    def publish(self, publication: Publication, source: int) -> None:
        """A stamped segment: it is proved, then served. One that waits to be proved gives way to a newer one."""
        with self._lock:
            self._next = (publication, source)
            self._wake.notify_all()

    def reset(self) -> int:
        """Ends all transfers but those of the newest publication; says how many.

        A proof under way goes on: where publications come faster than proofs, none would ever end.
        """
        with self._lock:
            current = None if self._current is None else self._current[0].manifest.version
            newest = self._proving or current if self._next is None else self._next[0].manifest.version
        return self._blocks.reset(keep=newest)

    def close(self) -> None:
        """Cuts everything. Idempotent."""
        with self._lock:
            self._closed = True
            self._wake.notify_all()
        self._blocks.close()
        self._server.close()
        self._news.close()

    # --- what is proved ---

    def _prove_all(self) -> None:
        try:
            from weightsync.publish.proof import warm_up  # torch and numba: not before the agent has begun to answer

            warm_up()  # seconds that the first publication would wait for
        except Exception as error:  # each proof will say so again, and by name
            _logger.warning("the agent can't prove anything: %r", error)
        while True:
            with self._lock:
                self._wake.wait_for(lambda: self._next is not None or self._closed)
                if self._closed:
                    return
                assert self._next is not None
                publication, source = self._next
                self._next = None
                self._proving = publication.manifest.version
            version = publication.manifest.version
            try:
                with self.recorder.phase("prove", detail=str(version)):
                    proof = self._proved(publication, source)
            except Exception as error:
                typed = as_weightsync_error(error, StateError, "the publication could not be proved")
                self._tell({"event": "not_published", "version": version.number, "error": typed.to_dict()})
                continue
            finally:
                with self._lock:
                    self._proving = None
            with self._lock:
                self._current = (publication, source, proof)
            self._tell({"event": "published", "version": version.number, "phases": self._phases()})
            self._news.send("version", run_id=version.run_id, version=version.number)

    def _proved(self, publication: Publication, source: int) -> SourceProof:
        from weightsync.publish.proof import prove

        version = publication.manifest.version

        def go_on() -> None:
            if self._closed:
                raise TransferAbortedError("the agent ends", version=str(version))

        try:
            lock = Lock(publication.sources[source].segment, Reader.SENT)
        except BlockingIOError:
            raise TransferAbortedError(f"{version} is superseded before it was proved", version=str(version)) from None
        with lock:
            self._check_stamp(publication, source)
            return prove(publication, source, go_on=go_on)

    def _check_stamp(self, publication: Publication, source: int) -> None:
        """Raises VersionError where the segment holds something else. Under a lock on it."""
        where, manifest = publication.sources[source], publication.manifest
        stamp = read_stamp(memoryview(read_head(where.segment, STAMP_WITHIN_BYTES, need_bytes=where.data_end)))
        if stamp != (manifest.version, manifest.model_id):
            raise VersionError("the segment holds another version: ask for the newest", version=str(manifest.version))

    def _keep_house(self) -> None:
        """Unlinks what killed processes left; they can't."""
        pause = threading.Event()
        while not self._closed:
            pause.wait(_RECLAIM_EVERY_S)
            with contextlib.suppress(OSError, WeightSyncError):
                reclaim_dead()

    # --- what is asked ---

    async def _get_version(self) -> Response:
        current = self._current
        version = None if current is None else current[0].manifest.version
        return _json(
            AgentVersion(
                model_id=self._config.model_id,
                run_id=None if version is None else version.run_id,
                version=None if version is None else version.number,
            )
        )

    async def _get_buffer_info(self) -> Response:
        publication, source, _ = self._published()
        where = publication.sources[source]
        return _json(
            {
                "segment": where.segment,
                "total_bytes": where.data_end,
                "data_start": where.data_start,
                "block_bytes": where.block_bytes,
                "tensors": publication.parts_of(source),
            }
        )

    async def _get_manifest(self) -> Response:
        publication, source, proof = self._published()
        return _json({"publication": publication, "source": source, "proof": proof})

    async def _get_capabilities(self) -> Response:
        return _json(
            {
                "modes": ["full"],
                "transports": list(Transport),
                "host_nonce": self._nonce,
                "delta_ready": False,
                "news": self._news.endpoint,
                "tls": self._config.certificate is not None,
            }
        )

    async def _get_metrics(self) -> Response:
        return Response(self._metrics.render(), media_type="text/plain; version=0.0.4")

    async def _register(self, request: Request) -> Response:
        asked = decode(await request.body(), RegisterRequest, what="a registration")
        with self._lock:
            self._receivers.pop(asked.receiver_id, None)
            while len(self._receivers) >= _MAX_RECEIVERS:
                del self._receivers[next(iter(self._receivers))]
            self._receivers[asked.receiver_id] = None
        return await self._get_capabilities()

    async def _request_transfer(self, request: Request) -> Response:
        asked = decode(await request.body(), TransferRequest, what="a request for a transfer")
        return _json(await asyncio.to_thread(self._grant, asked))

    async def _finish_transfer(self, request: Request) -> Response:
        asked = decode(await request.body(), FinishRequest, what="the end of a transfer")
        known = await asyncio.to_thread(self._blocks.finish, asked.transfer_id, ok=asked.ok)
        if not known:
            raise TransferAbortedError("this transfer is over: superseded, or nothing was read of it for too long")
        return _json({})

    def _grant(self, asked: TransferRequest) -> TransferGrant:
        if asked.receiver_id not in self._receivers:
            raise AuthError(f"receiver {asked.receiver_id!r} is not registered: POST /register_receiver first")
        publication, source, proof = self._published()
        manifest = publication.manifest
        if asked.model_id != manifest.model_id:
            raise InvalidRequestError(f"this agent serves model {manifest.model_id!r}, not {asked.model_id!r}")
        if asked.run_id not in (None, manifest.version.run_id) or asked.version not in (None, manifest.version.number):
            raise VersionError(
                f"{manifest.version} is the newest publication, {asked.run_id}/{asked.version} was asked for",
                version=str(manifest.version),
            )
        transfer = self._blocks.grant(
            manifest.version,
            publication.sources[source],
            receiver_id=asked.receiver_id,
            take_up_s=self._config.take_up_s,
            on_end=self._ended,
        )
        try:
            self._check_stamp(publication, source)
        except BaseException:
            transfer.end(ok=False)
            raise
        return TransferGrant(
            transfer_id=transfer.id,
            publication=publication,
            source=source,
            proof=proof,
            transport=Transport.SHM if asked.host_nonce == self._nonce else Transport.TCP,
            host=self._config.advertise or self._config.host,
            port=self._blocks.port,
            take_up_s=self._config.take_up_s,
        )

    def _published(self) -> tuple[Publication, int, SourceProof]:
        current = self._current
        if current is None:
            raise StateError("nothing is published yet: ask again")
        return current

    def _ended(self, transfer: Transfer, ok: bool) -> None:
        name = "serve" if ok else "serve, ended early"
        track, who = self.recorder.track, transfer.receiver_id
        self.recorder.add(PhaseRecord(name=name, start_s=transfer.start_s, end_s=now_s(), track=track, detail=who))
        self._news.send(
            "done",
            version=transfer.version.number,
            run_id=transfer.version.run_id,
            receiver=transfer.receiver_id,
            ok=ok,
        )
        self._tell(
            {"event": "transfer", "version": transfer.version.number, "receiver": transfer.receiver_id, "ok": ok,
             "phases": self._phases()}
        )  # fmt: skip

    def _phases(self) -> list[Any]:
        builtins: list[Any] = msgspec.to_builtins(self.recorder.drain())
        return builtins


class _News:
    """A PUB socket: new versions and ended transfers, as JSON. Beyond loopback subscribers show the token (PLAIN)."""

    def __init__(self, config: AgentConfig) -> None:
        self._context = zmq.Context()
        self._auth: zmq.auth.thread.ThreadAuthenticator | None = None
        self._socket = self._context.socket(zmq.PUB)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._lock = threading.Lock()
        if config.token is not None:
            self._auth = zmq.auth.thread.ThreadAuthenticator(self._context)
            self._auth.start()
            self._auth.configure_plain(domain="*", passwords={"weightsync": config.token})
            self._socket.plain_server = True
        with contextlib.suppress(ValueError):
            self._socket.ipv6 = ipaddress.ip_address(config.host).version == 6
        host = f"[{config.host}]" if ":" in config.host else config.host
        try:
            self._socket.bind(f"tcp://{host}:{config.news_port or '*'}")
        except zmq.ZMQError as error:
            raise ConfigError(f"can't announce on {config.host}:{config.news_port}: {error}") from error
        self.port = int(self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rsplit(":", 1)[1])
        known = config.advertise or config.host
        self.endpoint = f"tcp://{f'[{known}]' if ':' in known else known}:{self.port}"

    def send(self, kind: str, **facts: Any) -> None:
        """Never waits: a subscriber that is too slow misses news."""
        with self._lock, contextlib.suppress(zmq.ZMQError):
            self._socket.send(json.dumps({"kind": kind, **facts}).encode(), zmq.NOBLOCK)

    def close(self) -> None:
        with self._lock:
            self._socket.close(0)
            if self._auth is not None:
                self._auth.stop()
            self._context.term()


def _tls_context(files: TlsFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.certificate, files.key)
    return context


def _json(message: Any) -> Response:
    return Response(encode(message), media_type="application/json")


def main() -> None:
    """The process: a config on the first line, publications on the next ones, the end where they end."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever prints must not stand between the events
    events: queue.Queue[dict[str, Any]] = queue.Queue(_MAX_EVENTS)

    def tell(event: dict[str, Any]) -> None:
        with contextlib.suppress(queue.Full):  # a trainer that stands still must not hold up receivers
            events.put_nowait(event)

    def write_events() -> None:
        with contextlib.suppress(OSError, ValueError):
            while True:
                out.write(json.dumps(events.get()) + "\n")
                out.flush()

    threading.Thread(target=write_events, name="weightsync-events", daemon=True).start()
    threading.Thread(target=_end_with, args=(os.getppid(),), name="weightsync-parent", daemon=True).start()

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(
        OSError, ValueError
    ):  # each connection is a descriptor, and so is each segment that is read
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    lines = sys.stdin.buffer
    try:
        agent = TransferAgent(msgspec.json.decode(lines.readline(), type=AgentConfig), tell)
        tell(agent.start())
    except WeightSyncError as error:
        out.write(json.dumps({"event": "failed", "error": error.to_dict()}) + "\n")
        out.flush()
        os._exit(1)
    orderly = False
    for line in lines:
        order = json.loads(line)
        orderly = order["order"] == "end"
        if order["order"] == "publish":
            agent.publish(msgspec.convert(order["publication"], Publication), order["source"])
        elif order["order"] == "reset":
            tell({"event": "reset", "num_transfers": agent.reset()})
    agent.close()
    _end(orderly=orderly)


def _end_with(parent: int) -> None:
    """Ends this process when its parent has ended, though a child that it forked keeps our input open."""
    pause = threading.Event()
    while os.getppid() == parent:
        pause.wait(_LOOK_EVERY_S)
    _end(orderly=False)


def _end(*, orderly: bool) -> None:
    for _ in range(0 if orderly else _LAST_RECLAIMS):  # the trainer's lock comes free, and its segments go
        with contextlib.suppress(OSError, WeightSyncError):
            reclaim_dead()
        threading.Event().wait(0.05)
    os._exit(0)


if __name__ == "__main__":
    main()
