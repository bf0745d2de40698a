"""The remote loader against its server, over real sockets: what fails, what it leaves, and what strangers may send."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import torch
from fastapi import Request, Response
from torch import nn

from weightsync.clients.fanout import in_thread
from weightsync.codec.digest import tensor_digest
from weightsync.errors import (
    AuthError,
    ConfigError,
    DeadlineExceededError,
    DigestMismatchError,
    EngineError,
    EngineUnreachableError,
    InvalidRequestError,
    LoadError,
    ManifestMismatchError,
    StateError,
    SyncInProgressError,
    TransferAbortedError,
    UnsupportedError,
    WeightSyncError,
    error_from_dict,
)
from weightsync.load.remote import RemoteWeightLoader
from weightsync.load.remote_server import RemoteLoadServer
from weightsync.load.remote_wire import (
    CHUNK_TYPE,
    LENGTH,
    LOAD_API,
    MAX_HEAD_BYTES,
    ChunkHead,
    LoadReply,
    Piece,
    bytes_of,
    digest_of_bytes,
    framed,
)
from weightsync.net.messages import encode
from weightsync.net.server import ServerThread, api_app
from weightsync.testing.contracts import bytes_of as content
from weightsync.testing.contracts import manifest_of
from weightsync.testing.faults import FaultyLoader
from weightsync.types import Full, HeldTensor, Manifest, Version

TOKEN = "a-token-for-tests-only"
HEADERS = {"Authorization": f"Bearer {TOKEN}"}
LONG_S = 20.0
NAME = "0123456789abcdef"


def module(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16, dtype=torch.bfloat16), nn.Linear(16, 4, dtype=torch.bfloat16))


def weights(seed: int) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in module(seed).named_parameters()}


class Remote:
    """A model, its loader, its server and a client, in one process."""

    def __init__(self, loader: FaultyLoader | None = None, *, in_place: bool = False, **options: Any) -> None:
        self.module = module(0)
        self.loader = loader or FaultyLoader(self.module, in_place=in_place)
        self.server = RemoteLoadServer(self.loader, token=TOKEN, **options)
        self.url = self.server.start()
        self.client = self.connect()

    def connect(self, **options: Any) -> RemoteWeightLoader:
        return RemoteWeightLoader(self.url, token=TOKEN, **{"timeout_s": LONG_S, "request_bytes": 100, **options})

    def sync(self, seed: int, *, client: RemoteWeightLoader | None = None) -> None:
        client = client or self.client
        new = weights(seed)
        manifest = manifest_of(new, seed)
        client.begin(manifest)
        client.load_weights(Full(name=name, tensor=tensor) for name, tensor in new.items())
        client.verify()
        client.commit(manifest.version)

    def serves(self, seed: int) -> bool:
        own = dict(self.module.named_parameters())
        return all(content(own[name]) == content(tensor) for name, tensor in weights(seed).items())

    def post(self, path: str, body: bytes, **options: Any) -> WeightSyncError | None:
        """What a stranger with the token is told; None: it was done."""
        headers = {"content-type": CHUNK_TYPE if path == "chunk" else "application/json", **HEADERS}
        answer = httpx.post(f"{self.url}{LOAD_API}/{path}", content=body, **{"headers": headers, **options})
        return None if answer.status_code == 200 else error_from_dict(answer.json())

    def close(self) -> None:
        self.client.close()
        self.server.close()


@pytest.fixture
def remote() -> Iterator[Remote]:
    made = Remote()
    yield made
    made.close()


@pytest.fixture
def live_writer() -> Iterator[Remote]:
    made = Remote(in_place=True)
    yield made
    made.close()


# --- a sync, and the proof of it ---


def test_a_sync_serves_the_same_bytes_and_reads_them_back(remote: Remote) -> None:
    for seed in (1, 2):
        remote.sync(seed)
        assert remote.serves(seed)
        back = {held.spec.name: held.tensor for held in remote.client.live_tensors()}
        assert {name: content(tensor) for name, tensor in back.items()} == {
            name: content(tensor) for name, tensor in weights(seed).items()
        }


def test_the_digest_of_the_wire_is_that_of_manifests() -> None:
    tensor = torch.arange(12.0).reshape(3, 4).t()
    assert digest_of_bytes(bytes_of(tensor)) == tensor_digest(tensor)


def test_a_bit_that_flips_on_the_far_side_is_found_before_the_commit(remote: Remote) -> None:
    remote.sync(1)
    remote.loader.arm({"at": "load", "chunk": 0, "do": "corrupt"})
    new = weights(2)
    remote.client.begin(manifest_of(new, 2))
    remote.client.load_weights(Full(name=name, tensor=tensor) for name, tensor in new.items())
    with pytest.raises(DigestMismatchError) as caught:
        remote.client.verify()
    assert caught.value.parameter == "0.weight"
    remote.client.abort("corrupt")
    assert remote.serves(1)
    assert remote.client.healthy


class Unprovable(FaultyLoader):
    def live_tensors(self) -> Iterator[HeldTensor]:
        raise UnsupportedError("repacked")


def test_what_the_far_loader_can_not_prove_is_said_to_be_unprovable() -> None:
    model = module(0)
    made = Remote(Unprovable(model))
    made.module = model
    try:
        made.sync(1)
        assert made.serves(1)
        with pytest.raises(UnsupportedError, match="repacked"):
            list(made.client.live_tensors())
    finally:
        made.close()


def test_a_read_that_a_step_came_between_is_refused(remote: Remote) -> None:
    remote.sync(1)
    reading = remote.client.live_tensors()
    next(reading)
    other = remote.connect()
    remote.sync(2, client=other)
    assert next(other.live_tensors()).spec.name == "0.weight"  # it is listed anew
    with pytest.raises(StateError, match="gone on"):
        list(reading)
    other.close()


# --- failures, step by step ---


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("point", ["begin", "load", "loaded", "commit"])
def test_a_loader_that_fails_is_typed_and_leaves_the_old_model_or_a_fenced_one(point: str, in_place: bool) -> None:
    remote = Remote(in_place=in_place)
    try:
        remote.sync(1)
        remote.loader.arm({"at": point, "chunk": 0 if point != "commit" else 1, "do": "raise"})
        with pytest.raises(LoadError, match=f"injected at {point}"):
            remote.sync(2)
        remote.client.abort("it failed")
        assert remote.client.healthy == remote.loader.healthy
        assert remote.serves(1) if remote.loader.healthy else in_place
        assert remote.loader.healthy == (not in_place or point in ("begin", "load"))
        remote.sync(3)
        assert remote.serves(3)
        assert remote.client.healthy
    finally:
        remote.close()


def test_a_loader_that_hangs_is_a_missed_deadline(remote: Remote) -> None:
    hung = remote.connect(timeout_s=0.5)
    remote.loader.arm({"at": "begin", "do": "hang"})
    with pytest.raises(DeadlineExceededError):
        hung.begin(manifest_of(weights(1), 1))
    hung.close()


def test_a_commit_without_an_answer_is_not_called_healthy_until_the_next(remote: Remote) -> None:
    held, go = threading.Event(), threading.Event()
    commit = remote.loader.commit

    def slow(version: Version) -> None:
        held.set()
        assert go.wait(LONG_S)
        commit(version)

    remote.loader.commit = slow  # type: ignore[method-assign]
    impatient = remote.connect(timeout_s=1.0)
    with pytest.raises(DeadlineExceededError) as caught:
        remote.sync(1, client=impatient)
    assert held.is_set()
    assert "not known" in (caught.value.state_left or "")
    assert not impatient.healthy
    go.set()
    impatient.abort("no answer")  # waits for the commit: it was done
    assert remote.serves(1)
    assert not impatient.healthy, "it never heard which version is served"
    remote.sync(2, client=impatient)
    assert impatient.healthy
    impatient.close()


def test_a_server_that_goes_away_is_typed_and_the_bracket_closes_here(remote: Remote) -> None:
    new = weights(1)
    remote.client.begin(manifest_of(new, 1))
    remote.server.close()
    with pytest.raises(EngineUnreachableError):
        remote.client.load_weights([Full(name=name, tensor=tensor) for name, tensor in new.items()])
    with pytest.raises(EngineUnreachableError):
        remote.client.abort("gone")
    remote.client.abort("again")
    with pytest.raises(EngineUnreachableError):
        RemoteWeightLoader(remote.url, token=TOKEN)


def test_a_live_writer_that_went_away_in_a_load_is_not_healthy(live_writer: Remote) -> None:
    new = weights(1)
    live_writer.client.begin(manifest_of(new, 1))
    live_writer.server.close()
    assert live_writer.client.healthy, "nothing was written yet"
    with pytest.raises(EngineUnreachableError):
        live_writer.client.load_weights([Full(name=name, tensor=tensor) for name, tensor in new.items()])
    assert not live_writer.client.healthy


# --- two at once ---


def test_a_second_client_is_refused_until_the_first_has_ended(remote: Remote) -> None:
    other, new = remote.connect(), weights(1)
    remote.client.begin(manifest_of(new, 1))
    with pytest.raises(SyncInProgressError):
        other.begin(manifest_of(weights(2), 2))
    remote.client.load_weights(Full(name=name, tensor=tensor) for name, tensor in new.items())
    remote.client.verify()
    remote.client.commit(manifest_of(new, 1).version)
    assert remote.serves(1)
    remote.sync(2, client=other)
    assert remote.serves(2)
    other.close()


def test_a_session_that_nobody_speaks_in_gives_way() -> None:
    remote = Remote(idle_s=0.05)
    try:
        remote.client.begin(manifest_of(weights(1), 1))
        remote.server._session._heard_at -= 1.0  # type: ignore[union-attr]  # a second ago
        other = remote.connect()
        remote.sync(2, client=other)
        assert remote.serves(2)
        with pytest.raises(StateError, match="no such session"):
            remote.client.load_weights([Full(name="0.weight", tensor=weights(1)["0.weight"])])
        remote.client.abort("late")
        assert remote.serves(2)
        other.close()
    finally:
        remote.close()


def test_an_abort_waits_for_the_loader_and_ends_what_it_was_doing(remote: Remote) -> None:
    inside, go, new = threading.Event(), threading.Event(), weights(1)
    load = remote.loader.load_weights

    def slow(updates: Any) -> None:
        inside.set()
        assert go.wait(LONG_S)
        load(updates)

    remote.loader.load_weights = slow  # type: ignore[method-assign]
    remote.client.begin(manifest_of(new, 1))
    session = remote.client._session
    loading = in_thread(
        lambda: remote.client.load_weights([Full(name=name, tensor=tensor) for name, tensor in new.items()]), name="l"
    )
    assert inside.wait(LONG_S)
    aborting = in_thread(lambda: remote.post("abort", encode({"session": session, "reason": "enough"})), name="a")
    open_session = remote.server._session
    while open_session is not None and not open_session.ended and not aborting.done():
        time.sleep(0.01)  # until it has come
    with pytest.raises(TimeoutError):
        aborting.result(0.1)
    go.set()
    assert aborting.result(LONG_S) is None
    with pytest.raises((TransferAbortedError, StateError)):
        loading.result(LONG_S)


# --- strangers ---


def opened(remote: Remote, manifest: Manifest | None = None) -> None:
    manifest = manifest or manifest_of(weights(1), 1)
    assert remote.post("begin", encode({"session": NAME, "manifest": manifest})) is None


def chunk(*pieces: tuple[str, int, int], index: int = 0, last: bool = True, session: str = NAME) -> bytes:
    named = tuple(Piece(name=name, offset=offset, nbytes=nbytes) for name, offset, nbytes in pieces)
    head = ChunkHead(session=session, index=index, pieces=named, last=last)
    return framed(head, [memoryview(bytes(head.total_bytes))])


def test_nobody_without_the_token_gets_anywhere(remote: Remote) -> None:
    for path in ("describe", "begin", "chunk", "verify", "commit", "abort", "live", "read"):
        for headers in ({}, {"Authorization": "Bearer another-token-of-some-length"}):
            assert isinstance(remote.post(path, b"{}", headers=headers), AuthError)
    with pytest.raises(AuthError):
        RemoteWeightLoader(remote.url, token="another-token-of-some-length")
    with pytest.raises(ConfigError):
        RemoteLoadServer(remote.loader, host="0.0.0.0")


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (chunk(("nobody.has.this", 0, 8)), ManifestMismatchError),
        (chunk(("0.weight", 0, 8)), ManifestMismatchError),  # ends within the tensor
        (chunk(("0.weight", 0, 258)), ManifestMismatchError),  # two bytes more than it has
        (chunk(("0.weight", 8, 8), last=False), ManifestMismatchError),  # not its next bytes
        (chunk(("0.bias", 0, 32), ("0.bias", 0, 32)), ManifestMismatchError),
        (chunk(("0.bias", 0, 32), index=1), StateError),
        (chunk(("0.bias", 0, 32), session="f" * 16), StateError),
        (chunk(("0.bias", 0, 32))[:-1], InvalidRequestError),
        (chunk(("0.bias", 0, 32)) + b"!", InvalidRequestError),
        (b"", InvalidRequestError),
        (LENGTH.pack(9) + b"{}", InvalidRequestError),
        (LENGTH.pack(MAX_HEAD_BYTES + 1) + b"{}", InvalidRequestError),
        (LENGTH.pack(2**32 - 1), InvalidRequestError),
        (LENGTH.pack(3) + b"\x80\x04.", InvalidRequestError),  # a pickle
        (LENGTH.pack(2) + b"{}", InvalidRequestError),
    ],
)
def test_a_chunk_that_does_not_fit_is_refused_and_the_loader_hears_nothing_of_it(
    remote: Remote, body: bytes, kind: type[WeightSyncError]
) -> None:
    remote.sync(1)
    heard: list[object] = []
    remote.loader.load_weights = heard.append  # type: ignore[method-assign,assignment]
    opened(remote)
    assert isinstance(remote.post("chunk", body), kind)
    assert heard == []
    assert remote.post("abort", encode({"session": NAME, "reason": "enough"})) is None
    del remote.loader.load_weights
    remote.sync(2)
    assert remote.serves(2)


def test_the_same_without_a_length_is_refused_where_it_ends(remote: Remote) -> None:
    """A chunked body: what it announces is all that is taken."""
    opened(remote)
    good = chunk(("0.bias", 0, 32))

    def parts(body: bytes) -> Iterator[bytes]:
        yield body[:7]
        yield body[7:]

    assert isinstance(remote.post("chunk", parts(good + b"!")), InvalidRequestError)  # type: ignore[arg-type]
    assert isinstance(remote.post("chunk", good), StateError), "a chunk that failed leaves an abort alone"


def test_sizes_that_can_not_be_are_refused_by_the_loader_before_anything_is_allocated(remote: Remote) -> None:
    huge = {**{name: {"name": name, "dtype": "bfloat16", "shape": list(t.shape)} for name, t in weights(1).items()}}
    huge["0.weight"]["shape"] = [1 << 40, 8]
    manifest = {
        "version": {"run_id": "r", "number": 1}, "model_id": "m", "tensors": list(huge.values()),
    }  # fmt: skip
    error = remote.post("begin", encode({"session": NAME, "manifest": manifest}))
    assert isinstance(error, ManifestMismatchError)
    huge["0.weight"]["shape"] = [1 << 60]
    error = remote.post("begin", encode({"session": NAME, "manifest": manifest}))
    assert isinstance(error, InvalidRequestError)
    remote.sync(1)


@pytest.mark.parametrize("path", ["begin", "verify", "commit", "abort", "read"])
@pytest.mark.parametrize("body", [b"", b"{}", b"\x80\x04.", b'{"session": "short"}', b'{"session": 5}'])
def test_a_message_that_is_none_is_typed(remote: Remote, path: str, body: bytes) -> None:
    assert isinstance(remote.post(path, body), InvalidRequestError)


def test_a_connection_that_is_cut_in_a_chunk_leaves_an_abort_alone(remote: Remote) -> None:
    remote.sync(1)
    opened(remote)
    body = chunk(("0.weight", 0, 256))
    host, port = remote.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as raw:
        head = f"POST {LOAD_API}/chunk HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n"
        raw.sendall(f"{head}Content-Type: {CHUNK_TYPE}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body[:-50])
    session = remote.server._session
    ended = threading.Event()
    for _ in range(1000):
        if session is None or session.ended or ended.wait(0.01):
            break
    assert isinstance(remote.post("verify", encode({"session": NAME})), StateError)
    assert remote.post("abort", encode({"session": NAME, "reason": "cut"})) is None
    assert remote.serves(1)
    remote.sync(2)
    assert remote.serves(2)


def test_a_body_that_stalls_is_cut_by_the_server() -> None:
    remote = Remote(chunk_timeout_s=0.3)
    try:
        opened(remote)
        body = chunk(("0.weight", 0, 256))
        host, port = remote.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=LONG_S) as raw:
            head = f"POST {LOAD_API}/chunk HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n"
            raw.sendall(
                f"{head}Content-Type: {CHUNK_TYPE}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body[:-50]
            )
            assert b" 504 " in raw.recv(1000).split(b"\r\n")[0]
        assert remote.post("abort", encode({"session": NAME, "reason": "slow"})) is None
    finally:
        remote.close()


def test_reads_stay_inside_a_tensor(remote: Remote) -> None:
    answer = httpx.post(f"{remote.url}{LOAD_API}/live", headers=HEADERS).json()
    for read in (
        {"tensor": 99, "offset": 0, "nbytes": 1},
        {"tensor": 0, "offset": 0, "nbytes": 257},
        {"tensor": 0, "offset": 256, "nbytes": 1},
        {"tensor": 0, "offset": -1, "nbytes": 1},
        {"tensor": -1, "offset": 0, "nbytes": 1},
    ):
        assert isinstance(remote.post("read", encode({"epoch": answer["epoch"], **read})), InvalidRequestError)


# --- a server that lies ---


@pytest.mark.parametrize(
    "told",
    [
        {"session": "another-session-of-16"},
        {"version": {"run_id": "contract", "number": 7}},
        {"num_received": 1},
        {"num_received": 1.5},
        {"healthy": None},
        {"a_field": "that nobody knows"},
    ],
)
def test_an_answer_to_something_else_is_not_believed(told: dict[str, Any]) -> None:
    app = api_app("a liar")

    async def answer(request: Request) -> Response:
        body = await request.body()
        reply: dict[str, Any] = {"session": None, "version": None, "healthy": True, "writes_live": False}
        if request.url.path.endswith("chunk"):
            (length,) = LENGTH.unpack(body[:4])
            session = httpx.Response(200, content=body[4 : 4 + length]).json()["session"]
            reply |= {"session": session, "version": {"run_id": "contract", "number": 1}, "num_received": 4, **told}
        elif request.url.path.endswith("begin"):
            asked = httpx.Response(200, content=body).json()
            reply |= {"session": asked["session"], "version": asked["manifest"]["version"]}
        return Response(encode(reply), media_type="application/json")

    app.add_api_route(f"{LOAD_API}/{{step}}", answer, methods=["POST"])
    server = ServerThread(app, streams={f"{LOAD_API}/chunk": CHUNK_TYPE})
    client = RemoteWeightLoader(server.start(), timeout_s=LONG_S)
    new = weights(1)
    client.begin(manifest_of(new, 1))
    with pytest.raises(EngineError, match="answered well and wrongly"):
        client.load_weights([Full(name=name, tensor=tensor) for name, tensor in new.items()])
    client.close()
    server.close()


def test_a_reply_says_what_it_means() -> None:
    reply = LoadReply(session=None, version=None, healthy=True, writes_live=False)
    assert reply.digests is None
    assert reply.num_received == 0
