"""S3 over HTTP by a real server, memory, and what refusals become. Conditional puts are really conditional."""

from __future__ import annotations

import contextlib
import http.server
import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import ClassVar

import pytest

from tests.standins.stores import BUCKET, FaultProxy, at_endpoint, s3_server
from tests.unit.objects.contract import check_contract
from weightsync.errors import (
    MissingDependencyError,
    ObjectConflictError,
    ObjectMissingError,
    StoreAuthError,
    StoreUnavailableError,
    WeightSyncError,
)
from weightsync.objects import cloud
from weightsync.objects.cloud import CloudStore
from weightsync.objects.repeating import Repeating
from weightsync.types import Deadline

pytest.importorskip("obstore")
pytest.importorskip("moto.server")


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with s3_server() as url:
        yield url


def test_the_contract_over_s3(endpoint: str) -> None:
    check_contract(CloudStore(f"s3://{BUCKET}/contract"))


def test_the_contract_in_memory() -> None:
    check_contract(CloudStore("memory://contract/run"))


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (401, StoreAuthError), (403, StoreAuthError), (404, ObjectMissingError), (429, StoreUnavailableError),
        (500, StoreUnavailableError), (503, StoreUnavailableError), (409, ObjectConflictError),
    ],
)  # fmt: skip
def test_each_status_is_a_typed_error(endpoint: str, status: int, error: type[WeightSyncError]) -> None:
    proxy = FaultProxy(endpoint)
    try:
        with at_endpoint(proxy.url):
            store = CloudStore(f"s3://{BUCKET}/status")
        proxy.rule = lambda method, path: status
        with pytest.raises(error):
            store.get("x", deadline=Deadline(10))
        assert proxy.num_asked == 1, "obstore's own repetitions are off"
    finally:
        proxy.close()


def test_an_expired_token_is_a_refused_credential(endpoint: str) -> None:
    from weightsync.objects.cloud import _CREDENTIAL

    assert _CREDENTIAL.search("400 Bad Request: <Error><Code>ExpiredToken</Code>")


def test_a_bucket_that_is_not_there_is_said_so(endpoint: str) -> None:
    with pytest.raises(StoreAuthError, match="no such bucket"):
        CloudStore("s3://nobody-has-this/run").get("x", deadline=Deadline(10))


def test_throttling_is_repeated_and_what_breaks_on_its_way(endpoint: str) -> None:
    proxy = FaultProxy(endpoint)
    try:
        with at_endpoint(proxy.url):
            store = Repeating(CloudStore(f"s3://{BUCKET}/throttled"), first_s=0.01)
        faults: list[int | str | None] = [429, 503, "drop", None]
        proxy.rule = lambda method, path: faults.pop(0) if faults else None
        store.put("x", b"1234", deadline=Deadline(20), replaces=None)
        assert not faults
        faults[:] = ["drop", 500, "cut", None]
        into = memoryview(bytearray(4))
        store.get_range("x", 0, into, deadline=Deadline(20))
        assert bytes(into) == b"1234"
        faults[:] = [403]
        asked = proxy.num_asked
        with pytest.raises(StoreAuthError):
            store.get("x", deadline=Deadline(20))
        assert proxy.num_asked == asked + 1
    finally:
        proxy.close()


def test_an_object_has_no_more_parts_than_a_store_takes(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen red with parts of 16 MiB: no source above 168 GB could be stored."""
    for nbytes in (1, 168 << 30, 1 << 40, 5 << 40):
        part_bytes = cloud._part_bytes(nbytes)
        assert -(-nbytes // part_bytes) <= 10_000
        assert part_bytes >= 16 << 20
        assert part_bytes % (1 << 20) == 0
    monkeypatch.setattr(cloud, "_MAX_PARTS", 2)
    proxy, parts = FaultProxy(endpoint), []
    proxy.rule = lambda method, path: parts.append(path) if "partNumber=" in path else None
    try:
        with at_endpoint(proxy.url):
            store = CloudStore(f"s3://{BUCKET}/parts")
        body = bytes(range(256)) * ((40 << 20) // 256)
        store.put_large("x", body, deadline=Deadline(60))
        assert len(parts) == 2
        into = memoryview(bytearray(len(body)))
        store.get_range("x", 0, into, deadline=Deadline(60))
        assert into == body
    finally:
        proxy.close()


class _Slow(http.server.BaseHTTPRequestHandler):
    """A link on which something moves each 0.2 s, for 2 s; nothing at all under the key "still"."""

    protocol_version = "HTTP/1.1"
    moved_s: ClassVar[dict[str, list[float]]] = {}
    """When something moved, by key."""

    def _moved(self) -> None:
        key = self.path.partition("?")[0].rpartition("/")[2]
        self.moved_s.setdefault(key, []).append(time.monotonic())

    def do_GET(self) -> None:
        self.send_response(206)
        for name, value in (
            ("content-length", "1000"), ("content-range", "bytes 0-999/1000"), ("etag", '"x"'),
            ("last-modified", "Tue, 06 Jan 2026 08:00:00 GMT"),
        ):  # fmt: skip
            self.send_header(name, value)
        self.end_headers()
        with contextlib.suppress(OSError):
            for _ in range(10):
                threading.Event().wait(20 if self.path.endswith("still") else 0.4)
                self.wfile.write(bytes(100))
                self._moved()

    def do_PUT(self) -> None:
        step = int(self.headers["content-length"]) // 10
        with contextlib.suppress(OSError):
            for _ in range(10):
                threading.Event().wait(0.4)
                self.rfile.read(step)
                self._moved()
            self.send_response(200)
            self.send_header("content-length", "0")
            self.send_header("etag", '"x"')
            self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def moves(keys: str, transfer: Callable[[str], object]) -> None:
    """`transfer(key)`; with the next key where this machine, and so the link, stood still for half of a stall."""
    for key in keys:
        began_s = time.monotonic()
        try:
            transfer(key)
            return
        except StoreUnavailableError:
            times = (began_s, *_Slow.moved_s.get(key, ()), time.monotonic())
            if key == keys[-1] or max(after - before for before, after in itertools.pairwise(times)) < 1.0:
                raise


def test_a_slow_link_is_no_stall(endpoint: str) -> None:
    """Neither when it is read nor when it is written, though it takes twice the stall. Seen red with a limit on the
    whole request, and for the write with one on the wait for its answer."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Slow)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        with at_endpoint(f"http://127.0.0.1:{server.server_port}"):
            store = CloudStore(f"s3://{BUCKET}/slow", stall_s=2.0)
        moves("abcde", lambda key: store.get_range(key, 0, memoryview(bytearray(1000)), deadline=Deadline(20)))
        moves("vwxyz", lambda key: store.put_large(key, bytes(10 << 20), deadline=Deadline(20)))
        begun = Deadline(60)
        with pytest.raises(StoreUnavailableError):
            store.get_range("still", 0, memoryview(bytearray(1000)), deadline=Deadline(20))
        assert begun.remaining_s > 52, "a limit on the whole request alone"
    finally:
        server.shutdown()
        server.server_close()


def test_nobody_there_ends_with_the_deadline() -> None:
    import os

    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("AWS_ENDPOINT_URL", "http://127.0.0.1:1"), ("AWS_REGION", "r")):
            patch.setitem(os.environ, name, value)
        patch.setitem(os.environ, "AWS_ACCESS_KEY_ID", "x")
        patch.setitem(os.environ, "AWS_SECRET_ACCESS_KEY", "x")
        store = Repeating(CloudStore("s3://b/run"))
    begun = Deadline(30)
    with pytest.raises(StoreUnavailableError):
        store.get("x", deadline=Deadline(0.5))
    assert begun.remaining_s > 20


def test_without_obstore_a_folder_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(MissingDependencyError, match="file://"):
        CloudStore("s3://b/run")


class _Generations(http.server.BaseHTTPRequestHandler):
    """As much of Google Cloud Storage as small objects need: etags when read, generations when written."""

    protocol_version = "HTTP/1.1"
    objects: dict[str, tuple[bytes, int]]

    def _say(self, status: int, body: bytes = b"", generation: int = 0) -> None:
        self.send_response(status)
        for name, value in (
            ("content-length", str(len(body))), ("etag", f'"{generation:x}"'), ("x-goog-generation", str(generation)),
            ("last-modified", "Tue, 06 Jan 2026 08:00:00 GMT"),
        ):  # fmt: skip
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def do_PUT(self) -> None:
        body, asked = self.rfile.read(int(self.headers["content-length"])), self.headers["x-goog-if-generation-match"]
        _, generation = self.objects.get(self.path, (b"", 0))
        if asked is not None and int(asked) != generation:
            self._say(412)
            return
        self.objects[self.path] = body, generation + 100
        self._say(200, generation=generation + 100)

    def do_GET(self) -> None:
        body, generation = self.objects.get(self.path, (b"", 0))
        if not generation:
            self._say(404)
        elif self.headers["if-none-match"] == f'"{generation:x}"':
            self._say(304, generation=generation)
        else:
            self._say(200, body, generation)

    def log_message(self, *_: object) -> None:
        pass


def test_google_cloud_storage_replaces_by_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen red with the etag alone: obstore has no conditional replace by that there."""
    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), type("_Served", (_Generations,), {"objects": {}})
    )  # fmt: skip
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    key = {"gcs_base_url": endpoint, "disable_oauth": True, "client_email": "", "private_key": "", "private_key_id": ""}
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", json.dumps(key))
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)  # plain HTTP may be
    try:
        store = CloudStore("gs://bucket/run")
        first = store.put("x", b"1", deadline=Deadline(10), replaces=None)
        with pytest.raises(ObjectConflictError):
            store.put("x", b"other", deadline=Deadline(10), replaces=None)
        found = store.get("x", deadline=Deadline(10))
        assert found is not None
        assert (found.data, found.etag) == (b"1", first)
        assert store.get("x", deadline=Deadline(10), unless=first) is None
        second = store.put("x", b"2", deadline=Deadline(10), replaces=first)
        with pytest.raises(ObjectConflictError):
            store.put("x", b"3", deadline=Deadline(10), replaces=first)
        found = store.get("x", deadline=Deadline(10), unless=first)
        assert found is not None
        assert (found.data, found.etag) == (b"2", second)
    finally:
        server.shutdown()
        server.server_close()


def test_what_obstore_says_is_told_without_queries() -> None:
    from weightsync.objects.cloud import _words

    said = _words(
        OSError("Error performing GET https://a.blob.net/c/x?sv=1&sig=SECRET in 3 s: (https://b/c?sig=SECRET)")
    )
    assert "SECRET" not in said
    assert "https://a.blob.net/c/x?..." in said
    assert "in 3 s" in said
