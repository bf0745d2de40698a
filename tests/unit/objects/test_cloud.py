"""S3 over HTTP by a real server, memory, and what refusals become. Conditional puts are really conditional."""

from __future__ import annotations

from collections.abc import Iterator

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
