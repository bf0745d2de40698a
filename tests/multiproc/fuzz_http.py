"""What the HTTP fuzzer sends: requests of the right shape, bent; and every face that they are sent to."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import random
import socket
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from hypothesis import strategies as st
from starlette.applications import Starlette

import weightsync.codec.kernels  # noqa: F401  # an agent loads them beside its first requests, and they are large
from weightsync.agent.api import TransferAgent
from weightsync.control.controller import WeightSyncController
from weightsync.control.method import SyncMethod
from weightsync.control.pool import RolloutPool
from weightsync.control.server import ControllerServer
from weightsync.engine.embedded import EmbeddedEngine
from weightsync.engine.server import EngineServer
from weightsync.handles.http import ENGINE_API
from weightsync.host.service import RolloutService
from weightsync.host.settings import RolloutConfig
from weightsync.load.module import ModuleWeightLoader
from weightsync.types import EngineOp, Version
from weightsync.types.agent_config import AgentConfig

TOKEN = "a-token-for-tests-only"
NOBODY = "http://127.0.0.1:9"
JUNK = b"\x00\xff{}[]\"'\\:,0123456789abcdefEN-+.xyz\r\n "

_MANIFEST = {
    "version": {"run_id": "r", "number": 1},
    "model_id": "actor",
    "tensors": [{"name": "w", "dtype": "float32", "shape": [2, 3]}],
}
_MODEL = {"model_tag": "actor", "wait_s": 0.01}
_SET = {"versions": [{"model_id": "actor", "run_id": "r", "version": 1, "sender_endpoint": NOBODY}], "wait_s": 0.01}
_UPDATE = {
    "kind": "broadcast", "session": "s", "seq": 0, "names": ["w"], "dtypes": ["float32"], "shapes": [[2, 3]],
    "offsets": [0], "bucket_bytes": 24,
}  # fmt: skip
_INIT = {
    "run_id": "r", "model_id": "actor", "rank_offset": 1,
    "info": {"kind": "empty", "strategy": "packed_cuda_ipc", "group_name": "g"},
}  # fmt: skip
_HEARTBEAT = {
    "instance_id": "i", "incarnation": "l", "url": NOBODY,
    "serves": [{"model_id": "actor", "run_id": "r", "version": 1}], "error": "it broke",
}  # fmt: skip

Routes = Mapping[str, Any]
"""The body of each POST, as it should be; None: a GET."""
_ENGINE: Routes = {
    f"{ENGINE_API}/{op}": body
    for op, body in {
        "describe": {"layers": True},
        "audit": {},
        "init": _INIT,
        "begin": {"session": "s", "manifest": _MANIFEST, "deadline_s": 1.0},
        "update_weights": {"update": _UPDATE},
        "stage": {"session": "s", "manifest": _MANIFEST},
        "commit": {"session": "s"},
        "abort": {"session": "s", "reason": "enough"},
        "pause": {"session": "s", "timeout_s": 0.1, "lease_s": 0.1},
        "resume": {"session": "s"},
    }.items()
}
_WATCH = ("/metrics", "/timeline", "/timeline/clock")
_AGENT: Routes = {
    **dict.fromkeys(
        ("/get_version", "/get_buffer_info", "/manifest", "/get_capabilities", "/get_transfers", "/receivers", *_WATCH)
    ),
    "/register_receiver": {"receiver_id": "r"},
    "/register_sglang_instance": {"receiver_id": "r"},
    "/request_transfer": {"receiver_id": "r", "model_id": "actor", "run_id": "r", "version": 1, "mode": "full"},
    "/renew_transfer": {"transfer_id": "0" * 32},
    "/finish_transfer": {"transfer_id": "0" * 32, "ok": True},
    "/relay": {
        "receiver_id": "r", "face": {"host": "127.0.0.1", "port": 9, "zone": "z"}, "want": 4, "wait_s": 0.01,
        "content": "0" * 32, "fetched": "AAAA", "stuck": "AAAA", "transfer_id": "0" * 32,
        "holdings": [{"content": "0" * 32, "have": "//8="}],
    },
}  # fmt: skip
_SERVICE: Routes = {
    **dict.fromkeys(("/status", "/availability", *_WATCH)),
    "/check_versions": _SET,
    "/prepare_versions": _SET,
    "/commit_versions": _SET,
    "/release_versions": {"model_ids": ["actor"], "why": "enough"},
    "/notify_version": {
        "run_id": "r", "model_id": "actor", "version": 1, "sender_endpoint": NOBODY, "wait_s": 0.01,
    },
    "/register_sender": {"model_id": "actor", "sender_endpoint": NOBODY},
}  # fmt: skip
_CONTROLLER: Routes = {
    **dict.fromkeys(("/", "/page.js", "/plots.js", "/page.css", "/overview", "/status", *_WATCH)),
    "/check_rollout_service_status": _MODEL,
    "/trajectory_pool_notify_batch_ready": _MODEL,
    "/trajectory_pool_notify_batch_dropped": {**_MODEL, "num_batches": 1},
    "/train_worker_notify_weight_update": {**_MODEL, "worker_name": "w", "run_id": "r", "version": 1},
    "/notify_version": {"model_id": "actor", "version": 1, "run_id": "r", "sender_endpoint": NOBODY},
    "/wait_version": {**_MODEL, "run_id": "r", "version": 1},
    "/heartbeat": _HEARTBEAT,
    "/sync_weight_to_rollout_service": _MODEL,
    "/end_validate": {"model_tag": "actor", "result": {"reward": 0.5}, "version": 1},
    "/push/next": {**_MODEL, "version": 1, "run_id": "r", "taker": "t"},
    "/push/done": {**_MODEL, "order_id": "0" * 16, "error": {"type": "LoadError", "message": "no room"}},
}


class _Known(SyncMethod):
    """A method that has nothing to do."""

    def sync_weights(self, model_tag: str, version: Version) -> int:
        return version.number

    def evict_failed(self, model_tag: str) -> list[str]:
        return []


def _module() -> torch.nn.Module:
    module = torch.nn.Module()
    module.register_buffer("w", torch.zeros(2, 3))
    return module


def _engine() -> EmbeddedEngine:
    return EmbeddedEngine.of(ModuleWeightLoader(_module()), engine_id="e", model_id="actor")


@contextlib.contextmanager
def _with(token: str | None, kind: str) -> Iterator[str]:
    with contextlib.ExitStack() as stack:
        if kind == "engine":
            engine = EngineServer(_engine(), token=token)
            stack.callback(engine.close)
            _check_routes(kind, engine.app)
            yield engine.start()
        elif kind == "agent":
            agent = TransferAgent(AgentConfig(model_id="actor", token=token), lambda event: None)
            stack.callback(agent.close)
            _check_routes(kind, agent.app)
            yield agent.start().endpoint
        elif kind == "service":
            service = RolloutService({"actor": _engine()}, RolloutConfig(token=token))
            stack.callback(service.close)
            _check_routes(kind, service.app)
            yield service.start()
        else:
            controller = WeightSyncController({}, _Known(), model_tags=("actor",))
            stack.callback(controller.close)
            server = ControllerServer(controller, RolloutPool(lease_s=1.0), token=token)
            stack.callback(server.close)
            _check_routes(kind, server.app)
            yield server.start()


FACES: Mapping[str, Routes] = {
    "agent": _AGENT, "engine": _ENGINE, "service": _SERVICE, "controller": _CONTROLLER,
}  # fmt: skip


def face(kind: str, token: str | None) -> contextlib.AbstractContextManager[str]:
    """That server, as a URL."""
    return _with(token, kind)


def _check_routes(kind: str, app: Starlette) -> None:
    """A route that is new is to be sent something, too."""
    routes = {getattr(route, "path", "") for route in app.routes} - {"/healthz"}
    if (any_op := f"{ENGINE_API}/{{op}}") in routes:
        routes = routes - {any_op} | {f"{ENGINE_API}/{op}" for op in EngineOp}
    assert routes <= set(FACES[kind]), f"the fuzzer does not know {routes - set(FACES[kind])}"


# --- what is sent ---


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One request as it goes out.

    Attributes:
        head, body: bytes.
        whole: whether it is complete, so that an answer comes.
    """

    head: bytes
    body: bytes
    whole: bool

    def __repr__(self) -> str:
        return f"{self.head[:600]!r} + {self.body[:300]!r} ({len(self.body)} bytes)"


class _Raw(str):
    """JSON as it stands: what `json` would not write."""


_ODD: tuple[Callable[[random.Random], Any], ...] = (
    lambda pick: None,
    lambda pick: pick.choice(
        [True, False, 0, -1, 1, 2**31, 2**53, 2**63, 2**64, 10**30, -(2**63), 1e308, -0.0, 1e-320]
    ),
    lambda pick: _Raw(
        pick.choice(["NaN", "Infinity", "-Infinity", "1e999", "1" * 5000, "0x10", "01", "'a'", "", "1."])
    ),
    lambda pick: pick.choice(["", "x", "\ud800", "a\x00b", "../../etc/passwd", "é" * 300, "x" * 5000, "\u202e", "NaN"]),
    lambda pick: _Raw('"\\ud800\\udfff\\uDBFF"'),
    lambda pick: _Raw("[" * pick.choice([10, 900, 20_000]) + "]" * pick.choice([0, 10, 900])),
    lambda pick: _Raw('{"a":' * 2000 + "1" + "}" * 2000),
    lambda pick: [],
    lambda pick: {},
    lambda pick: [0] * pick.choice([1, 300]),
    lambda pick: {"kind": pick.choice(["broadcast", "cuda_ipc", "empty", "x"])},
    lambda pick: pick.choice(["http://", "http://a:b@c", NOBODY, "file:///etc/passwd", "http://[::1", "float8", "shm"]),
)
_METHODS = (
    "GET", "POST", "POST", "POST", "PUT", "HEAD", "DELETE", "OPTIONS", "PATCH", "TRACE", "CONNECT", "X" * 40, "get",
)  # fmt: skip
_PATHS = (
    "/healthz", "/healthz/", "//healthz", "/nothing", "*", "/%00", "/%ff%fe", "/../..", "/docs", "/" + "a" * 9000,
    "/?a=b&" * 50,
)  # fmt: skip
_HEADERS = (
    "Origin: http://evil.example", "Origin: null", "Host: evil.example", "Connection: close", "Connection: upgrade",
    "Upgrade: websocket", "Upgrade: h2c", "Expect: 100-continue", "Transfer-Encoding: gzip", "Content-Encoding: gzip",
    "Content-Type: text/plain", "Content-Type: application/json; charset=\xff", "X: " + "y" * 3000, "TE: trailers",
    "X-Forwarded-For: 1.2.3.4", "X-Forwarded-Proto: https", "Authorization: Bearer wrong", "Authorization: Bearer \xff",
    "Accept: *", ": x", "A B: c", "Range: bytes=0-", "weightsync-timeout-s: nan", "weightsync-timeout-s: -1",
    "weightsync-timeout-s: 1e400", "weightsync-timeout-s: \xb2", "Cookie: a=b", "Content-Length: 5",
    "Content-Length: -1", "Content-Length: 99999999999999999999",
)  # fmt: skip
_ENDS = (b"0\r\n\r\n",) * 4 + (b"", b"zz\r\n", b"-1\r\n", b"0\r\nX: y\r\n\r\n", b"f" * 20 + b"\r\n")


def _bent(value: Any, pick: random.Random, depth: int = 0) -> Any:
    """`value`, at one place something else."""
    if depth > 6 or not isinstance(value, dict | list) or not value or pick.random() < 0.25:
        return pick.choice(_ODD)(pick)
    if isinstance(value, list):
        place = pick.randrange(len(value))
        return [*value[:place], _bent(value[place], pick, depth + 1), *value[place + 1 :]]
    key = pick.choice(list(value))
    how = pick.random()
    if how < 0.1:
        return {name: item for name, item in value.items() if name != key}
    if how < 0.2:
        return {**value, pick.choice(["more", "", "\ud800", "x" * 3000]): 1}
    return {**value, key: _bent(value[key], pick, depth + 1)}


def _written(value: Any) -> str:
    if isinstance(value, _Raw):
        return str(value)
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(str(key))}:{_written(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_written, value)) + "]"
    return json.dumps(value)


def _body(base: Any, pick: random.Random) -> bytes:
    value = base
    for _ in range(pick.choice([0, 1, 1, 1, 2, 4])):
        value = _bent(value, pick)
    body = _written(value).encode("utf-8", "surrogatepass")
    if isinstance(value, dict) and value and pick.random() < 0.1:  # a key twice
        key = pick.choice(list(value))
        body = body[:-1] + b"," + _written({key: _bent(value, pick)}).encode("utf-8", "surrogatepass")[1:]
    if body and pick.random() < 0.15:
        place = pick.randrange(len(body))
        junk = bytes(pick.choices(JUNK, k=pick.choice([1, 1, 20])))
        body = body[:place] + junk + body[place + pick.choice([0, 1, 20]) :]
    if pick.random() < 0.02:
        body += b" " * pick.choice([70_000, 1_100_000])
    return body


def case_of(routes: Routes, token: str | None, seed: int) -> Case:
    """The request that this number makes."""
    pick = random.Random(seed)
    path = pick.choice(list(routes)) if pick.random() < 0.9 else pick.choice(_PATHS)
    base = routes.get(path)
    method = ("GET" if base is None else "POST") if pick.random() < 0.85 else pick.choice(_METHODS)
    if pick.random() < 0.05:
        path += pick.choice(["?", "?a=\xff", "/", "%2f", "#x", ";", "\x7f", " "])
    body = b"" if base is None and pick.random() < 0.8 else _body({} if base is None else base, pick)
    fields = [f"{method} {path} HTTP/{'1.1' if pick.random() < 0.97 else pick.choice(['1.0', '2.0', '0.9', 'x'])}"]
    if pick.random() < 0.98:
        fields.append("Host: localhost")
    if token is not None and pick.random() < 0.95:
        fields.append(f"Authorization: Bearer {token}")
    if pick.random() < 0.95:
        fields.append("Content-Type: application/json")
    fields += [pick.choice(_HEADERS) for _ in range(pick.choice([0, 0, 0, 1, 2]))]
    whole, framing = True, pick.random()
    if framing < 0.1:
        pieces, at = [], 0
        while at < len(body):
            size = pick.choice([1, 7, 5000, 100_000])
            piece = body[at : at + size]
            pieces.append(b"%x\r\n%b\r\n" % (len(piece), piece))
            at += size
        fields.append("Transfer-Encoding: chunked")
        end = pick.choice(_ENDS)
        whole = end.startswith(b"0")
        body = b"".join(pieces[:2000]) + end
    elif body or framing < 0.5:
        length = len(body) if pick.random() < 0.93 else len(body) + pick.choice([1, 100, 10**9, -1, -len(body)])
        fields.append(f"Content-Length: {length}")
        whole = length <= len(body)
    head = "\r\n".join([*fields, "\r\n"]).encode("latin-1")
    if pick.random() < 0.03:
        place = pick.randrange(len(head))
        head, whole = head[:place] + bytes(pick.choices(JUNK, k=2)) + head[place + pick.choice([0, 2, 30]) :], False
    return Case(head=head, body=body, whole=whole)


def cases(routes: Routes, token: str | None, *, num: int) -> st.SearchStrategy[list[Case]]:
    """So many requests; each is made of a number, which hypothesis chooses."""
    seeds = st.lists(st.integers(0, 2**48), min_size=num, max_size=num)
    return seeds.map(lambda chosen: [case_of(routes, token, seed) for seed in chosen])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """What came back; a status of 0: nothing, or the connection's end."""

    status: int
    body: bytes


def ask(address: tuple[str, int], case: Case, *, timeout_s: float) -> Answer:
    """One exchange on a connection of its own."""
    said = b""
    with socket.create_connection(address, timeout=20) as raw:
        raw.settimeout(timeout_s if case.whole else 0.05)
        with contextlib.suppress(OSError):
            raw.sendall(case.head + case.body)
        with contextlib.suppress(OSError):
            while more := raw.recv(1 << 16):
                said += more
                raw.settimeout(20)  # an answer that has begun is waited for
                head, found, body = said.partition(b"\r\n\r\n")
                while found and head.startswith(b"HTTP/1.1 1"):  # "continue"
                    said = body
                    head, found, body = said.partition(b"\r\n\r\n")
                length = head.lower().partition(b"content-length: ")[2].partition(b"\r")[0]
                if found and (case.head.startswith(b"HEAD ") or (length and len(body) >= int(length))):
                    break
    head, _, body = said.partition(b"\r\n\r\n")
    length = head.lower().partition(b"content-length: ")[2].partition(b"\r")[0]
    body = body[: int(length)] if length else body  # what follows answers what came behind the request
    words = head.split(b" ", 2)
    status = int(words[1]) if len(words) > 1 and words[0].startswith(b"HTTP/") and words[1].isdigit() else 0
    return Answer(status=status, body=body)
