"""Messages of the fleet: what arrives is what was sent, and what can't be is refused."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightsync.errors import InvalidRequestError
from weightsync.net.messages import decode, encode
from weightsync.types import Version
from weightsync.types.control import InstanceStatus, TrainedRequest, WaitVersionRequest
from weightsync.types.fleet import (
    MAX_GONE,
    MAX_MODELS,
    MAX_WORDS,
    CommitVersionsRequest,
    HeartbeatReply,
    HeartbeatRequest,
    ModelVersion,
    PrepareReply,
    PrepareRequest,
    ReleaseRequest,
)
from weightsync.types.service import ModelStatus

ids = st.text(st.characters(categories=("L", "N", "P")), min_size=1, max_size=20)
urls = st.builds("http://{}".format, ids)
versions = st.builds(
    ModelVersion, model_id=ids, run_id=ids, version=st.integers(0, 2**53), sender_endpoint=st.one_of(st.just(""), urls)
)
sets = st.lists(versions, min_size=1, max_size=4, unique_by=lambda each: each.model_id).map(tuple)
waits = st.floats(0.001, 1e5)


@st.composite
def heartbeats(draw: Any) -> HeartbeatRequest:
    serves = draw(sets)
    taken = {each.model_id for each in serves}
    lacks = draw(st.lists(ids.filter(lambda name: name not in taken), max_size=3, unique=True))
    return HeartbeatRequest(
        instance_id=draw(ids), incarnation=draw(ids), url=draw(urls), serves=serves, lacks=tuple(lacks),
        whole=draw(st.booleans()), error=draw(st.none() | st.text()), leaving=draw(st.booleans()),
        gone=draw(st.dictionaries(ids, st.text(), max_size=2)),
    )  # fmt: skip


replies = st.builds(
    HeartbeatReply, state=st.sampled_from(["joining", "live", "suspect", "evicted"]), lease_s=st.floats(0, 3600),
    every_s=st.floats(0.001, 3600), admitted=st.booleans(), catch_up=sets, why=st.none() | st.text(),
)  # fmt: skip
messages = st.one_of(
    heartbeats(), replies,
    st.builds(PrepareRequest, versions=sets, wait_s=waits),
    st.builds(
        PrepareReply, versions=sets, models=st.dictionaries(ids, st.just(ModelStatus(state="idle"))),
        waited_s=st.floats(0, 1e5),
    ),
    st.builds(CommitVersionsRequest, versions=sets, wait_s=waits),
    st.builds(ReleaseRequest, model_ids=st.lists(ids).map(tuple), why=st.text()),
)  # fmt: skip


@given(messages)
def test_what_arrives_is_what_was_sent(message: Any) -> None:
    assert decode(encode(message), type(message), what="a message") == message


@given(messages)
def test_nothing_more_is_taken(message: Any) -> None:
    body = {**msgspec.to_builtins(message), "more": 1}
    with pytest.raises(InvalidRequestError):
        decode(msgspec.json.encode(body), type(message), what="a message")


def test_a_controller_from_before_takes_a_heartbeat() -> None:
    """It refuses fields that it does not know. Seen to fail: each heartbeat said that it is not the last one."""
    beat = HeartbeatRequest(instance_id="a", incarnation="1", url="http://a", lacks=("m",))
    assert b"leaving" not in encode(beat)
    assert b"leaving" in encode(msgspec.structs.replace(beat, leaving=True))


def test_a_version_knows_its_run() -> None:
    assert ModelVersion(model_id="m", run_id="r", version=3).of == Version(run_id="r", number=3)


ONE = {"model_id": "m", "run_id": "r", "version": 1}
BEAT = {"instance_id": "a", "incarnation": "1", "url": "http://a", "serves": [ONE]}
REPLY = {"state": "live", "lease_s": 1.0, "every_s": 1.0}
WRONG: list[tuple[type[Any], dict[str, Any], dict[str, Any]]] = [
    (ModelVersion, ONE, {"version": -1}),
    (ModelVersion, ONE, {"version": "1"}),
    (ModelVersion, ONE, {"model_id": ""}),
    (ModelVersion, ONE, {"run_id": "a\nb"}),
    (ModelVersion, ONE, {"sender_endpoint": "ftp://a"}),
    (ModelVersion, ONE, {"sender_endpoint": "http://" + "a" * 2048}),
    (HeartbeatRequest, BEAT, {"instance_id": ""}),
    (HeartbeatRequest, BEAT, {"incarnation": "\0"}),
    (HeartbeatRequest, BEAT, {"url": "a:80"}),
    (HeartbeatRequest, BEAT, {"url": ""}),
    (HeartbeatRequest, BEAT, {"serves": []}),
    (HeartbeatRequest, BEAT, {"serves": [ONE, ONE]}),
    (HeartbeatRequest, BEAT, {"lacks": ["m"]}),
    (HeartbeatRequest, BEAT, {"lacks": [str(n) for n in range(MAX_MODELS)]}),
    (HeartbeatRequest, BEAT, {"whole": 1}),
    (HeartbeatRequest, BEAT, {"gone": {str(n): "" for n in range(MAX_GONE + 1)}}),
    (HeartbeatRequest, BEAT, {"gone": {"e": "a" * (MAX_WORDS + 1)}}),
    (HeartbeatReply, REPLY, {"state": "dead"}),
    (HeartbeatReply, REPLY, {"lease_s": -1.0}),
    (HeartbeatReply, REPLY, {"lease_s": 3601.0}),
    (HeartbeatReply, REPLY, {"every_s": 0.0}),
    (HeartbeatReply, REPLY, {"every_s": 1e99}),
    (PrepareRequest, {"versions": [ONE], "wait_s": 1.0}, {"wait_s": 0.0}),
    (PrepareRequest, {"versions": [ONE], "wait_s": 1.0}, {"versions": []}),
    (PrepareRequest, {"versions": [ONE], "wait_s": 1.0}, {"versions": [ONE, ONE]}),
    (PrepareReply, {"versions": [ONE], "models": {}}, {"waited_s": -0.1}),
    (PrepareReply, {"versions": [ONE], "models": {}}, {"waited_s": None}),
    (CommitVersionsRequest, {"versions": [ONE], "wait_s": 1.0}, {"wait_s": 1e99}),
    (CommitVersionsRequest, {"versions": [ONE], "wait_s": 1.0}, {"wait_s": None}),
    (CommitVersionsRequest, {"versions": [ONE], "wait_s": 1.0}, {"versions": []}),
    (ReleaseRequest, {"model_ids": ["m"], "why": "so"}, {"model_ids": "m"}),
    (TrainedRequest, {"model_tag": "m", "worker_name": "w"}, {"evaluate": "yes"}),
    (TrainedRequest, {"model_tag": "m", "worker_name": "w"}, {"version": -1}),
    (WaitVersionRequest, {"model_tag": "m", "run_id": "r", "version": 1}, {"version": None}),
    (WaitVersionRequest, {"model_tag": "m", "run_id": "r", "version": 1}, {"wait_s": -1.0}),
    (InstanceStatus, {"instance_id": "a", "url": "http://a", "state": "live"}, {"state": "dead"}),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "good", "wrong"), WRONG, ids=lambda value: str(value)[:60])
def test_what_can_not_be(kind: type[Any], good: dict[str, Any], wrong: dict[str, Any]) -> None:
    decode(msgspec.json.encode(good), kind, what="a message")
    with pytest.raises(InvalidRequestError):
        decode(msgspec.json.encode({**good, **wrong}), kind, what="a message")


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity"])
def test_numbers_that_are_none(number: str) -> None:
    """JSON has none of these; a reply with one is not taken for a lease without end."""
    body = f'{{"state": "live", "lease_s": {number}, "every_s": 1.0}}'.encode()
    with pytest.raises(InvalidRequestError):
        decode(body, HeartbeatReply, what="a reply")
    with pytest.raises(InvalidRequestError):
        HeartbeatReply(state="live", lease_s=float(number), every_s=1.0)
    with pytest.raises(InvalidRequestError):
        PrepareReply(versions=(), models={}, waited_s=float(number))
