"""EngineServer: what comes over the wire is read, refused in words, or handed to the engine unchanged."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.host.fakes import begin
from tests.unit.types import messages as m
from weightsync.engine.server import EngineServer
from weightsync.errors import ConfigError, LoadError
from weightsync.handles.http import ENGINE_API
from weightsync.testing.contracts import ScriptedEngine
from weightsync.types import REQUEST_TYPES, EngineOp, EngineReply

TOKEN = "0123456789abcdef"


class Served:
    def __init__(self) -> None:
        self.engine = ScriptedEngine("inside", world_size=2)
        self.server = EngineServer(self.engine, token=TOKEN)
        self.http = httpx.Client(
            base_url=self.server.start(), headers={"Authorization": f"Bearer {TOKEN}"}, trust_env=False, timeout=10
        )

    def post(self, op: str, content: bytes, **options: Any) -> httpx.Response:
        return self.http.post(
            f"{ENGINE_API}/{op}", content=content, headers={"content-type": "application/json"}, **options
        )


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    made = Served()
    yield made
    made.http.close()
    made.server.close()


@settings(deadline=None, max_examples=40, suppress_health_check=list(HealthCheck))
@given(request_=m.requests)
def test_every_request_arrives_as_it_was_sent(served: Served, request_: Any) -> None:
    op = next(op for op, kind in REQUEST_TYPES.items() if kind is type(request_))
    served.engine.asked.clear()
    answer = served.post(op, msgspec.json.encode(request_))
    assert answer.status_code == 200
    assert msgspec.json.decode(answer.content, type=EngineReply).world_size == 2
    assert served.engine.asked == [(op, request_)]


BAD = [
    b"not json",
    b"[]",
    b"null",
    b'"s"',
    b'{"session": 5}',
    b'{"session": "s", "surprise": 1}',
    b'{"session": "\xff\xfe"}',
    b"{" * 5000,
    b'{"session": "s"} trailing',
    pickle.dumps({"session": "s"}),
    b"\x00" * 100,
]


@pytest.mark.parametrize("op", [op for op in EngineOp if op != EngineOp.DESCRIBE])
@pytest.mark.parametrize("body", BAD, ids=lambda body: repr(body[:24]))
def test_a_body_that_does_not_fit_never_reaches_the_engine(served: Served, op: EngineOp, body: bytes) -> None:
    served.engine.asked.clear()
    answer = served.post(op, body)
    assert answer.status_code == 422
    assert answer.json()["error"] == "InvalidRequestError"
    assert served.engine.asked == []


@settings(deadline=None, max_examples=60, suppress_health_check=list(HealthCheck))
@given(op=st.sampled_from(list(EngineOp)), body=st.binary(min_size=1, max_size=60))
def test_no_bytes_at_all_are_a_crash(served: Served, op: EngineOp, body: bytes) -> None:
    assert served.post(op, body).status_code in (200, 422)


@pytest.mark.parametrize("op", ["", "delete", "UPDATE_WEIGHTS", "update_weights/", "__class__", "../healthz", "%2e%2e"])
def test_an_unknown_step(served: Served, op: str) -> None:
    served.engine.asked.clear()
    assert served.post(op, b"{}").status_code in (404, 307, 405, 422)
    assert served.engine.asked == []
    answer = served.post("delete", b"{}")
    assert answer.status_code == 422
    assert "describe" in answer.json()["message"], "it says which there are"


def test_a_value_that_can_not_be_is_refused_by_the_types(served: Served) -> None:
    body = msgspec.to_builtins(begin())
    body["manifest"]["tensors"][0]["shape"] = [-4, 3]
    served.engine.asked.clear()
    answer = served.post("begin", msgspec.json.encode(body))
    assert answer.status_code == 422
    assert answer.json()["parameter"] == "0.weight"
    assert served.engine.asked == []


def test_an_engines_error_keeps_its_status_and_its_facts(served: Served) -> None:
    served.engine.fails[EngineOp.DESCRIBE] = LoadError("no room", parameter="w")
    try:
        answer = served.post("describe", b"{}")
    finally:
        served.engine.fails.clear()
    assert answer.status_code == 500
    assert (answer.json()["error"], answer.json()["parameter"]) == ("LoadError", "w")


def test_a_step_that_takes_long_holds_up_no_other(served: Served) -> None:
    go = threading.Event()
    served.engine.waits[EngineOp.COMMIT] = go
    served.engine.entered[EngineOp.COMMIT].clear()
    slow = threading.Thread(target=served.post, args=("commit", b'{"session": "s"}'))
    slow.start()
    try:
        assert served.engine.entered[EngineOp.COMMIT].wait(5)
        assert served.post("describe", b"").status_code == 200
        assert served.http.get("/healthz").status_code == 200
    finally:
        go.set()
        slow.join(5)
        served.engine.waits.clear()


def test_beyond_loopback_only_with_a_token() -> None:
    with pytest.raises(ConfigError):
        EngineServer(ScriptedEngine("e"), host="0.0.0.0")
