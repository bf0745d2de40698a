"""Strangers and liars on every port of the pull path: refused or survived, and a good pull works all the same."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from tests.multiproc.pull_hostile import BLOCK, LyingAgent, Nobody, check_bytes, exactly, tensors
from tests.multiproc.pull_kit import wait_until
from weightsync import EmbeddedEngine, ModuleWeightLoader
from weightsync.clients.agent import AgentClient
from weightsync.clients.host import RolloutClient
from weightsync.errors import (
    AuthError,
    ConfigError,
    DeadlineExceededError,
    DigestMismatchError,
    EngineError,
    EngineUnreachableError,
    InvalidRequestError,
    ManifestMismatchError,
    NoRoomError,
    SharedMemoryError,
    TransferAbortedError,
    TransferError,
    WeightSyncError,
)
from weightsync.host.puller import Puller
from weightsync.host.service import RolloutService
from weightsync.host.settings import RolloutConfig
from weightsync.host.staged_version import StagedVersion
from weightsync.host.staging import Staging
from weightsync.plan.safetensors import read_stamp
from weightsync.trainer.folder import FolderPublisher
from weightsync.trainer.publisher import WeightManager
from weightsync.transfer.blocks import ANSWER, HELLO, MAGIC, Code, ask_bytes, parse_answer
from weightsync.types import Deadline, TensorSpec
from weightsync.types.service import NotifyRequest, RegisterSenderRequest
from weightsync.types.transfer_messages import FinishRequest, RegisterRequest, TransferGrant, TransferRequest, Transport

TOKEN = "a-token-for-tests-only"
OTHER_TOKEN = "another-token-for-tests"
PATHS = (
    ("GET", "/get_version"), ("GET", "/get_buffer_info"), ("GET", "/manifest"), ("GET", "/get_capabilities"),
    ("GET", "/get_transfers"), ("GET", "/metrics"), ("POST", "/register_receiver"),
    ("POST", "/register_sglang_instance"), ("POST", "/renew_transfer"),
    ("POST", "/request_transfer"), ("POST", "/finish_transfer"), ("GET", "/nothing/here"),
)  # fmt: skip
SERVICE_PATHS = (
    ("POST", "/notify_version"), ("POST", "/register_sender"), ("GET", "/status"), ("GET", "/availability"),
    ("GET", "/metrics"),
)  # fmt: skip


class Model(torch.nn.Module):
    """The lying agent's tensors, as a module."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        for name, tensor in tensors(seed).items():
            self.register_buffer(name, tensor)


class Published:
    """A real manager with an agent, and a real service that pulls from it; both guarded by tokens."""

    def __init__(self) -> None:
        self.manager = WeightManager("m", token=TOKEN, run_id="run")
        self.version = 0
        self.publish()
        self.served = Model(99)
        config = RolloutConfig(
            token=OTHER_TOKEN, senders=(self.manager.endpoint,), sender_token=TOKEN, transport=Transport.TCP
        )
        self.service = RolloutService({"m": EmbeddedEngine.of(ModuleWeightLoader(self.served))}, config)
        self.url = self.service.start()
        self.endpoint = self.manager.endpoint

    def publish(self) -> None:
        self.version += 1
        self.manager.offload(tensors(self.version).items(), self.version)
        self.manager.wait_published(self.version, timeout_s=30)

    def grant(self, receiver_id: str) -> TransferGrant:
        """A transfer of one's own, not taken up yet."""
        client = AgentClient(self.endpoint, token=TOKEN)
        client.register(RegisterRequest(receiver_id=receiver_id))
        return client.request_transfer(TransferRequest(receiver_id=receiver_id, model_id="m"))

    def all_is_well(self, *, within_s: float = 10.0) -> None:
        """A pull and a sync of a new version succeed in time, and bring the right bytes."""
        self.publish()
        begun_s = time.monotonic()
        puller = Puller(self.endpoint, "m", receiver_id="good", token=TOKEN, transport=Transport.TCP)
        with puller.pull(deadline=Deadline(within_s)) as pulled:
            assert pulled.version.number == self.version
            check_bytes(pulled, tensors(self.version))
        puller.close()
        notice = NotifyRequest(
            run_id="run", model_id="m", version=self.version, sender_endpoint=self.endpoint, wait_s=within_s
        )
        with contextlib.closing(RolloutClient(self.url, token=OTHER_TOKEN)) as client:
            assert client.notify_version(notice).version == self.version
        for name, tensor in tensors(self.version).items():
            assert torch.equal(getattr(self.served, name), tensor)
        assert time.monotonic() - begun_s < within_s

    def close(self) -> None:
        self.service.close()
        self.manager.close()


@pytest.fixture(scope="module")
def published() -> Iterator[Published]:
    there = Published()
    yield there
    there.close()


def blocks_port(published: Published) -> tuple[str, int]:
    grant = published.grant("whoever wants to know the port")
    AgentClient(published.endpoint, token=TOKEN).finish_transfer(FinishRequest(transfer_id=grant.transfer_id, ok=False))
    return grant.host, grant.port


def ended(connection: socket.socket) -> bool:
    """Whether the peer has ended it, orderly or not; waits as long as the socket's timeout."""
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


# --- strangers, at a real agent and a real service ---


@pytest.mark.parametrize("token", [None, "not-the-token-at-all", OTHER_TOKEN[:-1]])
def test_without_the_token_there_is_nothing(published: Published, token: str | None) -> None:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    for url, paths in ((published.endpoint, PATHS), (published.url, SERVICE_PATHS)):
        with httpx.Client(base_url=url, headers=headers, trust_env=False) as http:
            for method, path in paths:
                answer = http.request(method, path, content=b"{}" if method == "POST" else None)
                assert answer.status_code == 401, path
                assert answer.json()["error"] == "AuthError"
            assert http.get("/healthz").json() == {"status": "ok"}
    puller = Puller(published.endpoint, "m", receiver_id="stranger", token=token)
    with pytest.raises(AuthError):
        puller.pull(deadline=Deadline(5))
    puller.close()


def test_an_unregistered_receiver_is_not_served(published: Published) -> None:
    client = AgentClient(published.endpoint, token=TOKEN)
    with pytest.raises(AuthError, match="not registered"):
        client.request_transfer(TransferRequest(receiver_id="never seen", model_id="m"))


def test_nobody_calls_an_unregistered_sender(published: Published) -> None:
    nobody = Nobody()
    with contextlib.closing(RolloutClient(published.url, token=OTHER_TOKEN)) as client, contextlib.closing(nobody):
        for endpoint in (nobody.url, f"{published.endpoint}@{nobody.host}:{nobody.port}", f"{published.endpoint}/.."):
            notice = NotifyRequest(run_id="run", model_id="m", version=99, sender_endpoint=endpoint)
            with pytest.raises((AuthError, ConfigError)):
                client.notify_version(notice)
        assert client.status().models["m"].wanted != 99
        with pytest.raises(InvalidRequestError, match="no model"):
            client.register_sender(RegisterSenderRequest(model_id="another", sender_endpoint=nobody.url))
        published.all_is_well()
        assert not nobody.was_called()


@pytest.mark.parametrize(
    "body",
    [b"", b"\x00" * 100, b"[]", b'{"receiver_id": 3}', b"[" * 100_000, b'{"receiver_id": "x", "more": 1}', b'"\xff"'],
    ids=["empty", "zeros", "list", "wrong type", "deep", "more", "no utf-8"],
)
def test_bodies_that_make_no_sense(published: Published, body: bytes) -> None:
    for url, token, paths in ((published.endpoint, TOKEN, PATHS), (published.url, OTHER_TOKEN, SERVICE_PATHS)):
        headers = {"Authorization": f"Bearer {token}"}
        with httpx.Client(base_url=url, headers=headers, trust_env=False) as http:
            for method, path in paths:
                if method == "POST":
                    answer = http.post(path, content=body, headers={"content-type": "application/json"})
                    assert answer.status_code == 422, path
                    assert answer.json()["error"] == "InvalidRequestError"


def test_a_length_that_is_too_large_is_refused_before_a_byte_is_read(published: Published) -> None:
    for url, token in ((published.endpoint, TOKEN), (published.url, OTHER_TOKEN)):
        parsed = httpx.URL(url)
        with socket.create_connection((parsed.host, parsed.port), timeout=5) as raw:
            raw.sendall(
                f"POST /register_receiver HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\n"
                f"Content-Length: {1 << 40}\r\n\r\n".encode()
            )
            assert raw.recv(12) == b"HTTP/1.1 422"


@pytest.mark.parametrize(
    "told",
    [b"", b"W", MAGIC, HELLO.pack(MAGIC, bytes(16))[:-1], HELLO.pack(b"WSPULL2\n", bytes(16)), b"\xff" * 5000,
     b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(100)],
    ids=["nothing", "a byte", "half", "one byte short", "another magic", "garbage", "http", "tls"],
)  # fmt: skip
def test_what_is_no_hello_ends_the_connection(published: Published, told: bytes) -> None:
    with socket.create_connection(blocks_port(published), timeout=5) as raw:
        raw.sendall(told)
        with contextlib.suppress(OSError):
            raw.shutdown(socket.SHUT_WR)
        assert ended(raw)


def test_a_transfer_that_is_over_or_never_was(published: Published) -> None:
    """Superseded, finished, guessed: one answer that says so, and no byte of any segment."""
    finished = published.grant("one")
    client = AgentClient(published.endpoint, token=TOKEN)
    client.finish_transfer(FinishRequest(transfer_id=finished.transfer_id, ok=True))
    taken_back = published.grant("two")
    published.grant("two")
    for transfer_id in ("00" * 16, finished.transfer_id, taken_back.transfer_id):
        with pytest.raises(TransferAbortedError):
            client.finish_transfer(FinishRequest(transfer_id=transfer_id, ok=True))
        with socket.create_connection((finished.host, finished.port), timeout=5) as raw:
            raw.sendall(HELLO.pack(MAGIC, bytes.fromhex(transfer_id)) + ask_bytes(0))
            assert parse_answer(exactly(raw, ANSWER.size)).code is Code.ENDED
            assert ended(raw)


@pytest.mark.parametrize("ask", [ask_bytes(1 << 31), b"WSAX\x00\x00\x00\x00", b"\x00" * 8])
def test_a_block_that_is_not_there(published: Published, ask: bytes) -> None:
    grant = published.grant("three")
    with socket.create_connection((grant.host, grant.port), timeout=5) as raw:
        raw.sendall(HELLO.pack(MAGIC, bytes.fromhex(grant.transfer_id)) + ask)
        answer = parse_answer(exactly(raw, ANSWER.size))
        assert (answer.code, answer.length) == (Code.BAD_REQUEST, 0)
        assert ended(raw)


def test_a_crowd_that_says_nothing_or_drips_holds_up_nobody(published: Published) -> None:
    """200 idle connections on each port, readers that take nothing, headers and hellos byte by byte."""
    ports = [blocks_port(published)]
    for url in (published.endpoint, published.url):
        parsed = httpx.URL(url)
        assert parsed.port is not None
        ports.append((parsed.host, parsed.port))
    grants = [published.grant(f"slow reader {number}") for number in range(4)]
    over = threading.Event()
    with contextlib.ExitStack() as stack:
        stack.callback(over.set)
        idle = [stack.enter_context(socket.create_connection(port, timeout=10)) for port in ports for _ in range(200)]
        for grant in grants:
            reader = stack.enter_context(socket.create_connection((grant.host, grant.port), timeout=5))
            asks = b"".join(ask_bytes(0) for _ in range(1000))
            reader.sendall(HELLO.pack(MAGIC, bytes.fromhex(grant.transfer_id)) + asks)
        dripping = [
            (stack.enter_context(socket.create_connection(port, timeout=5)), iter(slow))
            for port, slow in zip(
                ports, (HELLO.pack(MAGIC, bytes(16)), b"POST /x HTTP/1.1\r\nHo", b"GET /status HTTP/1"), strict=True
            )
            for _ in range(5)
        ]

        def drip() -> None:
            while not over.wait(0.2):
                for connection, slow in dripping:
                    with contextlib.suppress(OSError, StopIteration):
                        connection.sendall(bytes([next(slow)]))

        threading.Thread(target=drip, daemon=True).start()
        for _ in range(2):
            published.all_is_well()
        assert ended(idle[0]), "the block port cuts who says nothing"
        assert ended(idle[199])


def test_a_checkpoint_index_names_no_file_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "secret.safetensors").write_bytes(b"x" * 100)
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    for name in ("../secret.safetensors", str(tmp_path / "secret.safetensors"), "a/../../secret.safetensors", "..", 3):
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": name}}))
        with pytest.raises(ConfigError):
            FolderPublisher(folder, None)  # type: ignore[arg-type]


# --- an agent that lies, at a real puller ---


@pytest.fixture
def liar() -> Iterator[LyingAgent]:
    agent = LyingAgent()
    yield agent
    agent.close()


@pytest.fixture
def nobody() -> Iterator[Nobody]:
    there = Nobody()
    yield there
    there.close()


class Attempt:
    """A puller of a lying agent, with a staging that a test can look into."""

    def __init__(self, agent: LyingAgent, **options: Any) -> None:
        self.staging = Staging()
        settings: dict[str, Any] = {"receiver_id": "honest", "transport": Transport.TCP, "staging": self.staging}
        self.puller = Puller(agent.url, "m", **{**settings, **options})

    def pull(self, seconds: float = 10.0) -> StagedVersion:
        return self.puller.pull(deadline=Deadline(seconds))

    def fails_with(self, kind: type[WeightSyncError], text: str) -> None:
        """Its first attempt; there is no second one."""
        tried: list[WeightSyncError] = []

        def retrying(error: WeightSyncError) -> None:
            tried.append(error)
            self.puller.cancel()

        with pytest.raises(TransferAbortedError, match="cancelled"):
            self.puller.pull(deadline=Deadline(10.0), retrying=retrying)
        assert isinstance(tried[0], kind)
        assert text in str(tried[0])

    @property
    def arrived(self) -> set[int]:
        """Blocks that are there, and were right."""
        target = self.staging._target
        return set() if target is None else {block for _, block in tuple(target._there)}

    @property
    def holds_nothing(self) -> bool:
        """No version is stamped, whatever bytes are there."""
        target = self.staging._target
        return target is None or read_stamp(target.segment.memory) is None

    def close(self) -> None:
        self.puller.close()
        self.staging.close()


@pytest.fixture
def attempt(liar: LyingAgent) -> Iterator[Attempt]:
    there = Attempt(liar)
    yield there
    there.close()


def own_segments() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith(f"weightsync-{os.getpid()}-")}


def test_as_long_as_it_is_honest_it_is_believed(liar: LyingAgent, attempt: Attempt) -> None:
    with attempt.pull() as pulled:
        check_bytes(pulled, liar.tensors)
    assert sorted(liar.asked) == list(range(liar.source.num_blocks))
    assert liar.source.num_blocks > 3


@pytest.mark.parametrize(
    "changes",
    [{"block": 1 << 20}, {"block": 1}, {"offset": 0}, {"offset": 1 << 50}, {"length": BLOCK + 1}, {"length": 1 << 63},
     {"length": 0}, {"code": Code.BAD_REQUEST}],
    ids=str,
)  # fmt: skip
def test_an_answer_to_something_else_is_refused(liar: LyingAgent, attempt: Attempt, changes: dict[str, Any]) -> None:
    def answer(connection: socket.socket, block: int) -> bool:
        if block != 2:
            return liar.honest(connection, block)
        connection.sendall(liar.head(block, **changes) + liar.bytes_of(block))
        return True

    liar.answer = answer
    begun_s = time.monotonic()
    with pytest.raises(TransferError, match="asked for block 2"):
        attempt.pull(30.0)
    assert time.monotonic() - begun_s < 8
    assert attempt.holds_nothing


@pytest.mark.parametrize("ends", [False, True], ids=["goes on", "ends"])
@pytest.mark.parametrize("byte", range(ANSWER.size))
def test_a_damaged_head_costs_a_retry(liar: LyingAgent, attempt: Attempt, byte: int, ends: bool) -> None:
    """As damaged bytes behind it do. Seen to fail: one flipped bit of a head ended the pull."""

    def answer(connection: socket.socket, block: int) -> bool:
        head = bytearray(liar.head(block))
        first = liar.asked.count(block) == 1 and block % 2 == 0
        head[byte] ^= 1 << (byte % 8) if first else 0
        connection.sendall(head + liar.bytes_of(block))
        return not (first and ends)

    liar.answer = answer
    with attempt.pull() as pulled:
        check_bytes(pulled, liar.tensors)
    assert max(map(liar.asked.count, liar.asked)) <= 3


def test_garbage_instead_of_an_answer(liar: LyingAgent, attempt: Attempt) -> None:
    liar.answer = lambda connection, block: connection.sendall(b"HTTP/1.1 400 Bad Request\r\n" * 9) is None
    with pytest.raises(TransferError, match="no answer of a block server"):
        attempt.pull()
    assert attempt.holds_nothing


def test_wrong_bytes_are_asked_for_again_and_then_refused(liar: LyingAgent, attempt: Attempt) -> None:
    """A few times, in case that it was an accident; never taken."""

    def answer(connection: socket.socket, block: int) -> bool:
        data = bytearray(liar.bytes_of(block))
        if block == 2:
            data[17] ^= 1
            wait_until(lambda: attempt.arrived, "a block that is right")
        connection.sendall(liar.head(block) + data)
        return True

    liar.answer = answer
    with pytest.raises(DigestMismatchError, match="block 2 came wrong 3 times"):
        attempt.pull()
    assert liar.asked.count(2) == 3
    assert attempt.holds_nothing
    missing = set(range(liar.source.num_blocks)) - attempt.arrived  # the others, unless the end overtook them
    assert 2 in missing
    assert len(missing) < liar.source.num_blocks
    liar.answer, before = liar.honest, len(liar.asked)
    with attempt.pull() as pulled:
        check_bytes(pulled, liar.tensors)
    assert set(liar.asked[before:]) == missing, "what was right had been kept"  # an ask of before may be heard late


def test_one_accident_is_mended(liar: LyingAgent, attempt: Attempt) -> None:
    def answer(connection: socket.socket, block: int) -> bool:
        data = bytearray(liar.bytes_of(block))
        data[0] ^= liar.asked.count(block) == 1
        connection.sendall(liar.head(block) + data)
        return True

    liar.answer = answer
    with attempt.pull() as pulled:
        check_bytes(pulled, liar.tensors)


def _drip_block(liar: LyingAgent) -> None:
    def answer(connection: socket.socket, block: int) -> bool:
        connection.sendall(liar.head(block))
        for byte in liar.bytes_of(block):
            if liar.over.wait(0.05):
                return False
            connection.sendall(bytes([byte]))
        return True

    liar.answer = answer


def _drip_http(path: str, begin: bytes) -> Callable[[LyingAgent], None]:
    def bend(liar: LyingAgent) -> None:
        def reply(handler: Any, called: str) -> bool:
            if called != path:
                return False
            handler.wfile.write(begin)
            while not liar.over.wait(0.05):
                handler.wfile.write(b"x")
                handler.wfile.flush()
            return True

        liar.reply = reply

    return bend


def _silent(liar: LyingAgent) -> None:
    liar.answer = lambda connection, block: not liar.over.wait(30)


@pytest.mark.parametrize(
    "bend",
    [_drip_block, _silent, _drip_http("/request_transfer", b"HTTP/1.1 200 OK\r\nX: "),
     _drip_http("/request_transfer", b"HTTP/1.1 200 OK\r\ncontent-length: 99999\r\n\r\n"),
     _drip_http("/register_receiver", b"HTTP/1.1 200 OK\r\nX: ")],
    ids=["block", "silence", "headers", "body", "registration"],
)  # fmt: skip
def test_endless_trickle_ends_at_the_deadline(
    liar: LyingAgent, attempt: Attempt, bend: Callable[[LyingAgent], None]
) -> None:
    bend(liar)
    begun_s = time.monotonic()
    with pytest.raises(DeadlineExceededError):
        attempt.pull(1.0)
    assert 0.9 < time.monotonic() - begun_s < 9.0
    assert attempt.holds_nothing


def test_it_may_not_hold_up_what_is_there_and_proved(liar: LyingAgent, attempt: Attempt) -> None:
    """The answer to the acknowledgement is worth nothing: it is not waited for without end."""
    _drip_http("/finish_transfer", b"HTTP/1.1 200 OK\r\nX: ")(liar)
    begun_s = time.monotonic()
    with attempt.pull(30.0) as pulled:
        check_bytes(pulled, liar.tensors)
    assert time.monotonic() - begun_s < 10.0


def _claims(nbytes: int) -> Callable[[dict[str, Any]], None]:
    """A tensor of that size, all said consistently."""

    def bend(grant: dict[str, Any]) -> None:
        publication = grant["publication"]
        source = publication["sources"][0]
        for spec in (publication["manifest"]["tensors"][0], publication["parts"][0]):
            spec.update(shape=[nbytes], dtype="uint8")
        publication["manifest"]["tensors"] = publication["manifest"]["tensors"][:1]
        publication["parts"] = publication["parts"][:1]
        publication["parts"][0]["offset"] = source["data_start"]
        source.update(data_end=source["data_start"] + nbytes, block_bytes=64 << 20)
        num_blocks = -(-nbytes // (64 << 20))
        grant["proof"].update(block_checksums="0" * 16 * min(num_blocks, 1 << 16), part_digests=_packed(bytes(16)))

    return bend


@pytest.mark.parametrize("nbytes", [1 << 49, 1 << 41], ids=["more checksums than fit", "more than /dev/shm has"])
def test_a_size_that_nobody_has_allocates_nothing(liar: LyingAgent, attempt: Attempt, nbytes: int) -> None:
    liar.bend = _claims(nbytes)
    before = own_segments()
    with pytest.raises((EngineError, NoRoomError)) as caught:
        attempt.pull()
    assert nbytes == 1 << 49 or "no room" in str(caught.value)
    assert own_segments() <= before, "nothing is left of it; what others give back meanwhile is theirs"
    assert attempt.staging.size_bytes == 0
    assert liar.asked == []


def _packed(digests: bytes) -> str:
    """As JSON has them."""
    return base64.b64encode(digests).decode()


def _twice(grant: dict[str, Any]) -> None:
    """Every tensor lies there, and one of them a second time."""
    publication = grant["publication"]
    part = publication["parts"][0]
    source = publication["sources"][0]
    nbytes = 60 * 64 * 4
    publication["parts"].append({**part, "offset": source["data_end"]})
    source["data_end"] += nbytes
    count = -(-(source["data_end"] - source["data_start"]) // BLOCK)
    grant["proof"]["block_checksums"] = "0" * 16 * count
    grant["proof"]["part_digests"] = _packed(base64.b64decode(grant["proof"]["part_digests"]) + bytes(16))


def _half(grant: dict[str, Any]) -> None:
    """Half of a tensor is nowhere; the source is as long as what is left."""
    publication = grant["publication"]
    source = publication["sources"][0]
    first = publication["parts"][0]
    assert first["offset"] == min(part["offset"] for part in publication["parts"] if part["dtype"] == "float32")
    first["box"] = {"offset": [0, 0], "shape": [30, 64]}
    for part in publication["parts"]:
        if part["offset"] > first["offset"]:
            part["offset"] -= 30 * 64 * 4
    source["data_end"] -= 30 * 64 * 4
    count = -(-(source["data_end"] - source["data_start"]) // BLOCK)
    grant["proof"]["block_checksums"] = grant["proof"]["block_checksums"][: 16 * count]


@pytest.mark.parametrize("bend", [_twice, _half])
def test_parts_that_overlap_or_leave_holes(
    liar: LyingAgent, attempt: Attempt, bend: Callable[[dict[str, Any]], None]
) -> None:
    liar.bend = bend
    before = own_segments()
    with pytest.raises(ManifestMismatchError):
        attempt.pull(5.0)
    assert own_segments() <= before, "nothing is left of it; what others give back meanwhile is theirs"
    assert attempt.staging.size_bytes == 0
    assert liar.asked == []


def _also_at(url: str, *, first: bool) -> Callable[[dict[str, Any]], None]:
    def bend(grant: dict[str, Any]) -> None:
        publication = grant["publication"]
        source = publication["sources"][0]
        if first:  # the liar's own source is said to lie elsewhere
            source["endpoint"] = url
        else:
            publication["sources"].append({**source, "endpoint": url, "data_end": source["data_start"]})

    return bend


@pytest.mark.parametrize("first", [False, True], ids=["another source", "its own"])
def test_nobody_is_called_that_a_publication_names_and_nobody_registered(
    liar: LyingAgent, nobody: Nobody, first: bool
) -> None:
    """Neither for bytes nor for an acknowledgement, which would carry the token."""
    liar.bend = _also_at(nobody.url, first=first)
    attempt = Attempt(liar, token=TOKEN)
    if first:
        with attempt.pull() as pulled:
            check_bytes(pulled, liar.tensors)
        assert "/finish_transfer" in liar.paths
    else:
        with pytest.raises(AuthError, match="not registered"):
            attempt.pull()
    assert not nobody.was_called()
    attempt.close()


def test_blocks_are_fetched_from_the_host_that_was_named(liar: LyingAgent, attempt: Attempt) -> None:
    """A grant that names another host does not lead there."""
    elsewhere = Nobody("127.0.0.2")
    liar.bend = lambda grant: grant.update(host="127.0.0.2", port=elsewhere.port)
    with contextlib.closing(elsewhere):
        attempt.fails_with(EngineUnreachableError, f"127.0.0.1:{elsewhere.port} cut the stream")
        assert not elsewhere.was_called()
    assert "/request_transfer" in liar.paths


def _reply(status: int, body: bytes, **headers: str) -> Callable[[LyingAgent], None]:
    def bend(liar: LyingAgent) -> None:
        def reply(handler: Any, path: str) -> bool:
            if path != "/request_transfer":
                return False
            handler.send_response(status)
            for name, value in {"content-length": str(len(body)), **headers}.items():
                handler.send_header(name, value)
            handler.end_headers()
            handler.wfile.write(body)
            return True

        liar.reply = reply

    return bend


@pytest.mark.parametrize(
    "bend",
    [_reply(200, b"<html>"), _reply(200, b""), _reply(200, b"null"), _reply(200, b"[" * 500_000),
     _reply(200, b'{"a":"' + b"x" * (65 << 20) + b'"}'), _reply(500, b"\xff\xfe"), _reply(500, b'{"error": [1]}'),
     _reply(200, b"{}", **{"content-encoding": "gzip"})],
    ids=["html", "empty", "null", "deep", "huge", "no text", "no error", "not gzip"],
)  # fmt: skip
def test_answers_that_are_no_grant(liar: LyingAgent, attempt: Attempt, bend: Callable[[LyingAgent], None]) -> None:
    bend(liar)
    with pytest.raises(EngineError):
        attempt.pull(20.0)
    assert attempt.holds_nothing


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_redirects_are_not_followed(liar: LyingAgent, attempt: Attempt, nobody: Nobody, status: int) -> None:
    _reply(status, b"", location=f"{nobody.url}/request_transfer")(liar)
    with pytest.raises(EngineError, match=str(status)):
        attempt.pull(5.0)
    assert not nobody.was_called()


@pytest.mark.parametrize(
    "name", ["../../etc/passwd", "weightsync-../x", "/etc/passwd", "", "weightsync-host-0", "weightsync-1-2\x00"]
)
def test_a_segment_lies_in_the_folder_of_segments_and_is_ours(name: str) -> None:
    """An agent that says that it is on this host can have nothing mapped but a publisher's segment."""
    liar = LyingAgent(transport=Transport.SHM)
    liar.bend = lambda grant: grant["publication"]["sources"][0].update(segment=name)
    attempt = Attempt(liar, transport=None)
    attempt.fails_with(SharedMemoryError, name if name == "weightsync-host-0" else "nothing was opened")
    attempt.close()
    liar.close()


def test_pieces_of_a_tensor_are_put_together_and_not_mapped() -> None:
    """A mapped segment is given to engines as it is: a tensor that lies there in two pieces can't be."""
    from weightsync.memory import Segment

    liar = LyingAgent(transport=Transport.SHM)
    with Segment(liar.source.data_end) as segment:
        segment.memory[:] = liar._data
        liar.bend = lambda grant: _split(grant, segment.name, liar)
        attempt = Attempt(liar, transport=None)
        with attempt.pull() as pulled:
            check_bytes(pulled, liar.tensors)
        attempt.close()
    liar.close()


def _split(grant: dict[str, Any], segment: str, liar: LyingAgent) -> None:
    from weightsync.codec.tensor_digest import tensor_digest
    from weightsync.types.table import packed_digest

    publication = grant["publication"]
    publication["sources"][0]["segment"] = segment
    first = publication["parts"][0]
    spec = TensorSpec(name="a", dtype="float32", shape=(60, 64))
    publication["parts"] = [
        {**first, "box": {"offset": [0, 0], "shape": [30, 64]}},
        {**first, "box": {"offset": [30, 0], "shape": [30, 64]}, "offset": first["offset"] + spec.nbytes // 2},
        *publication["parts"][1:],
    ]
    halves = b"".join(packed_digest(tensor_digest(liar.tensors["a"][rows])) for rows in (slice(0, 30), slice(30, 60)))
    rest = base64.b64decode(grant["proof"]["part_digests"])[16:]
    grant["proof"]["part_digests"] = _packed(halves + rest)
