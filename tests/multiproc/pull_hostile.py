"""Peers that a test can bend: an agent that lies, a proxy that cuts, a socket that nobody should call."""

from __future__ import annotations

import contextlib
import http.server
import json
import random
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import torch

from weightsync.codec.digest import shard_sum
from weightsync.codec.model_digest import ShardSum
from weightsync.codec.tensor_digest import tensor_digest
from weightsync.host.staged_version import StagedVersion
from weightsync.memory import MappedSegment
from weightsync.plan.safetensors import plan_layout
from weightsync.tensors import byte_array, spec_of
from weightsync.transfer.blocks import ASK, HELLO, Answer, Code, answer_bytes, checksum, parse_ask
from weightsync.types import HeldTensor, Manifest, Version
from weightsync.types.layout import PublicationLayout
from weightsync.types.publication import Publication, Source, SourceProof
from weightsync.types.seal import seal_of
from weightsync.types.table import packed_digest
from weightsync.types.transfer_messages import TransferGrant, Transport

BLOCK = 4096
Body = dict[str, Any]


class Nobody:
    """A listening socket that nobody should call."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        self._socket = socket.create_server((host, 0))
        self.host, self.port = self._socket.getsockname()
        self.url = f"http://{host}:{self.port}"

    def was_called(self) -> bool:
        """Whether a connection has come in; the kernel has queued it, if so."""
        self._socket.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            self._socket.accept()[0].close()
            return True
        return False

    def close(self) -> None:
        self._socket.close()


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    """A small model: several blocks, three dtypes, a scalar."""
    made = torch.Generator().manual_seed(seed)
    return {
        "a": torch.randn(60, 64, generator=made),
        "b": torch.randint(0, 100, (7,), generator=made),
        "c": torch.randn(33, 5, generator=made).to(torch.bfloat16),
        "d": torch.tensor(3.5),
    }


def check_bytes(pulled: StagedVersion, expected: dict[str, torch.Tensor]) -> None:
    with MappedSegment(pulled.segment, need_bytes=1) as mapped:
        for spec in pulled.manifest.tensors:
            start = pulled.offsets[spec.name]
            held = bytes(mapped.memory[start : start + spec.nbytes])
            assert held == expected[spec.name].contiguous().reshape(-1).view(torch.uint8).numpy().tobytes(), spec.name


def seal_of_body(grant: Body) -> str:
    """The seal of a grant in JSON; any where its publication or proof is none."""
    try:
        publication = msgspec.json.decode(json.dumps(grant.get("publication")), type=Publication)
        proof = msgspec.json.decode(json.dumps(grant.get("proof")), type=SourceProof)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return ""
    head = msgspec.json.encode(PublicationLayout.of(publication).head(publication))
    return seal_of(
        head, msgspec.json.encode(proof), source=grant.get("source", 0), incarnation=grant.get("incarnation")
    )


class LyingAgent:
    """An agent that is honest as long as a test does not bend it.

    Attributes:
        bend: takes a grant as a dict, changes it.
        breaks_the_seal: the change comes on the way, and is no lie of the agent.
        answer: (connection, block): sends what it likes for a block. True: the connection goes on.
        reply: (handler, path): answers an HTTP request in its own way, where it returns True.
        asked: every block that was asked for.
        paths: every path that was called.
    """

    def __init__(self, *, run_id: str = "run", transport: Transport = Transport.TCP) -> None:
        self.bend: Callable[[Body], Any] = lambda grant: None
        self.breaks_the_seal = False
        self.answer: Callable[[socket.socket, int], bool] = self.honest
        self.reply: Callable[[http.server.BaseHTTPRequestHandler, str], bool] = lambda handler, path: False
        self.asked: list[int] = []
        self.paths: list[str] = []
        self.over = threading.Event()
        self._blocks = socket.create_server(("127.0.0.1", 0))
        agent = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                agent._answer_http(self)

            do_POST = do_GET  # noqa: N815

            def log_message(self, *_: Any) -> None: ...

        self._http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        self.tensors = tensors()
        self.grant, self._data = self._made(run_id, transport)
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()
        threading.Thread(target=self._accept, daemon=True).start()

    def _made(self, run_id: str, transport: Transport) -> tuple[TransferGrant, memoryview]:
        specs = tuple(spec_of(name, tensor) for name, tensor in self.tensors.items())
        layout = plan_layout(specs)
        data = bytearray(layout.total_bytes)
        total = ShardSum.zero()
        for part in layout.parts:
            tensor = self.tensors[part.name]
            data[part.offset : part.offset + part.nbytes] = byte_array(tensor).tobytes()
            total += shard_sum(HeldTensor(spec=part, box=None, tensor=tensor))
        version = Version(run_id=run_id, number=1)
        data[: layout.data_start] = layout.header(version, "m")
        source = Source(
            endpoint=self.url, segment="weightsync-1-0123456789abcdef", data_start=layout.data_start,
            data_end=layout.total_bytes, block_bytes=BLOCK,
        )  # fmt: skip
        view = memoryview(bytes(data))
        blocks = [source.block(index) for index in range(source.num_blocks)]
        proof = SourceProof(
            block_checksums="".join(checksum(view[start : start + length]) for start, length in blocks),
            part_digests=b"".join(packed_digest(tensor_digest(self.tensors[part.name])) for part in layout.parts),
            lane_a=total.lane_a,
            lane_b=total.lane_b,
        )
        manifest = Manifest(version=version, model_id="m", tensors=specs)
        grant = TransferGrant(
            transfer_id="0123456789abcdef" * 2,
            publication=Publication(manifest=manifest, parts=layout.parts, sources=(source,)),
            source=0, proof=proof, seal="", transport=transport, host="127.0.0.1",
            port=self._blocks.getsockname()[1], take_up_s=10.0,
        )  # fmt: skip
        return grant, view

    @property
    def source(self) -> Source:
        return self.grant.publication.sources[0]

    def head(self, block: int, /, **changes: Any) -> bytes:
        """The head of an answer."""
        offset, length = self.source.block(block)
        facts: dict[str, Any] = {"code": Code.OK, "block": block, "offset": offset, "length": length, **changes}
        return answer_bytes(Answer(**facts))

    def bytes_of(self, block: int) -> bytes:
        """What was published."""
        offset, length = self.source.block(block)
        return bytes(self._data[offset : offset + length])

    def honest(self, connection: socket.socket, block: int) -> bool:
        """The default answer."""
        connection.sendall(self.head(block) + self.bytes_of(block))
        return True

    def close(self) -> None:
        self.over.set()
        self._blocks.shutdown(socket.SHUT_RDWR)
        self._blocks.close()
        self._http.shutdown()
        self._http.server_close()

    def _answer_http(self, handler: http.server.BaseHTTPRequestHandler) -> None:
        path = handler.path
        self.paths.append(path)
        handler.rfile.read(int(handler.headers.get("content-length", 0)))
        with contextlib.suppress(OSError):
            if self.reply(handler, path):
                handler.close_connection = True
                return
            body: Any = {}
            if path == "/request_transfer":
                body = json.loads(msgspec.json.encode(self.grant))
                self.bend(body)
                if not self.breaks_the_seal:
                    body["seal"] = seal_of_body(body)
            elif path == "/get_version":
                body = {"model_id": "m", "run_id": "run", "version": 1}
            raw = json.dumps(body).encode()
            handler.send_response(200)
            handler.send_header("content-length", str(len(raw)))
            handler.end_headers()
            handler.wfile.write(raw)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._blocks.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            exactly(connection, HELLO.size)
            while not self.over.is_set() and (ask := exactly(connection, ASK.size)):
                block = parse_ask(ask)
                assert block is not None
                self.asked.append(block)
                if not self.answer(connection, block):
                    return


class CuttingProxy:
    """Hands TCP on, and resets each connection after as many bytes towards the client as `budgets` says next.

    Attributes:
        num_bytes: towards clients, handed on so far.
        num_cuts: connections that were reset.
    """

    def __init__(self, port: int, budgets: Iterator[int]) -> None:
        self._far = port
        self._budgets = budgets
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._lock = threading.Lock()
        self.port = self._listener.getsockname()[1]
        self.num_bytes = 0
        self.num_cuts = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._far))
                with self._lock:
                    budget = next(self._budgets)
                threading.Thread(target=self._up, args=(near, far), daemon=True).start()
                threading.Thread(target=self._down, args=(near, far, budget), daemon=True).start()

    def _up(self, near: socket.socket, far: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := near.recv(4096):
                far.sendall(data)
            far.shutdown(socket.SHUT_WR)

    def _down(self, near: socket.socket, far: socket.socket, budget: int) -> None:
        with near, far, contextlib.suppress(OSError):
            while budget > 0 and (data := far.recv(min(65536, budget))):
                budget -= len(data)
                with self._lock:
                    self.num_bytes += len(data)
                near.sendall(data)
            if budget == 0:
                with self._lock:
                    self.num_cuts += 1
                near.shutdown(socket.SHUT_RDWR)
            far.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            far.shutdown(socket.SHUT_RDWR)


def random_budgets(seed: int, low: int, high: int) -> Iterator[int]:
    """Endless."""
    chance = random.Random(seed)
    while True:
        yield chance.randint(low, high)


def exactly(connection: socket.socket, count: int) -> bytes:
    """So many bytes; nothing where the peer has ended."""
    data = b""
    while len(data) < count:
        part = connection.recv(count - len(data))
        if not part:
            return b""
        data += part
    return data
