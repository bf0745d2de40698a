"""What travels: every message survives JSON, and what does not fit is refused in words."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.types import messages as m
from weightsync.errors import InvalidRequestError, WeightSyncError
from weightsync.types import (
    REQUEST_TYPES,
    AnyInitInfo,
    AnyUpdateRequest,
    BeginRequest,
    EngineOp,
    EngineReply,
    Full,
    HeldTensor,
    InitRequest,
    Manifest,
    Patch,
    PauseRequest,
    TensorSpec,
    TorchDistributedWeightSyncInitInfo,
    UpdateRequest,
    Version,
    WeightChunk,
)

quiet = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])


@quiet
@given(st.one_of(m.requests, m.replies, m.manifests))
def test_every_message_survives_json(message: Any) -> None:
    text = msgspec.json.encode(message)
    assert msgspec.json.decode(text, type=type(message)) == message
    assert msgspec.convert(json.loads(text), type(message)) == message, "and through anybody's JSON"


@quiet
@given(m.updates)
def test_an_update_request_says_its_kind(request: Any) -> None:
    """A receiver tells kinds apart by the tag alone, never by which fields happen to be there."""
    again = msgspec.json.decode(msgspec.json.encode(request), type=AnyUpdateRequest)
    assert type(again) is type(request)
    assert again == request


@quiet
@given(m.init_infos)
def test_an_init_info_says_its_kind(info: Any) -> None:
    assert msgspec.json.decode(msgspec.json.encode(info), type=AnyInitInfo) == info


def test_every_step_has_a_request_type() -> None:
    assert set(REQUEST_TYPES) == set(EngineOp)


@quiet
@given(st.one_of(m.requests, m.replies, m.updates, m.init_infos), st.data())
def test_an_unknown_field_is_refused_wherever_it_stands(message: Any, data: st.DataObject) -> None:
    body = json.loads(msgspec.json.encode(message))
    places = list(_objects(body))
    data.draw(st.sampled_from(places))["surprise"] = 1
    kind = AnyUpdateRequest if "seq" in body else AnyInitInfo if "strategy" in body else type(message)
    with pytest.raises(msgspec.ValidationError, match="surprise"):
        msgspec.convert(body, kind)


def _objects(value: Any) -> Any:
    if isinstance(value, dict):
        yield value
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from _objects(item)


@quiet
@given(m.requests, st.data())
def test_a_field_of_another_type_is_refused(message: Any, data: st.DataObject) -> None:
    """Any one leaf replaced by something else is either refused, typed, or still a valid message."""
    body = json.loads(msgspec.json.encode(message))
    places = [(place, key) for place in _objects(body) for key in place]
    if not places:
        return
    place, key = data.draw(st.sampled_from(places))
    place[key] = data.draw(st.sampled_from([None, True, -1, 1 << 70, 1.5, "", "x", [], {}, [[]], [{"a": 1}]]))
    try:
        again = msgspec.convert(body, type(message))
    except (msgspec.ValidationError, WeightSyncError):
        return
    assert msgspec.json.decode(msgspec.json.encode(again), type=type(message)) == again


@quiet
@given(st.binary(max_size=80), st.sampled_from(list(EngineOp)))
def test_garbage_is_never_a_message(data: bytes, op: EngineOp) -> None:
    with pytest.raises((msgspec.DecodeError, WeightSyncError, UnicodeDecodeError)):
        msgspec.json.decode(b"\x00" + data, type=REQUEST_TYPES[op])


def test_messages_are_immutable() -> None:
    request = InitRequest(run_id="r", model_id="m", info=info(), rank_offset=1)
    with pytest.raises(AttributeError):
        request.rank_offset = 5  # type: ignore[misc]


def test_tensors_never_serialise() -> None:
    tensor = torch.ones(2)
    spec = TensorSpec(name="a", dtype="float32", shape=(2,))
    for holder in (
        WeightChunk(names=("a",), tensors=(tensor,)),
        HeldTensor(spec=spec, box=None, tensor=tensor),
        Full(name="a", tensor=tensor),
        Patch(name="a", positions=torch.tensor([0]), values=tensor[:1]),
    ):
        with pytest.raises(TypeError, match="Tensor"):
            msgspec.json.encode(holder)


def info(**changes: Any) -> TorchDistributedWeightSyncInitInfo:
    fields: dict[str, Any] = {
        "strategy": "broadcast",
        "master_addr": "127.0.0.1",
        "master_port": 1234,
        "world_size": 3,
        "group_name": "g",
        "backend": "gloo",
        "join_timeout_s": 1.0,
        "transfer_timeout_s": 1.0,
    }
    return TorchDistributedWeightSyncInitInfo(**{**fields, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {"master_port": 0},
        {"master_port": 65536},
        {"master_port": -1},
        {"world_size": 1},
        {"world_size": -3},
        {"world_size": 1 << 40},
        {"join_timeout_s": 0.0},
        {"join_timeout_s": float("nan")},
        {"join_timeout_s": float("inf")},
        {"transfer_timeout_s": -1.0},
        {"transfer_timeout_s": 1e300},
    ],
    ids=str,
)
def test_an_init_info_that_no_group_can_have(changes: dict[str, Any]) -> None:
    """A world of 2**40 ranks would be a list of that length in `join_group`, a timeout of 1e300 s an OverflowError."""
    with pytest.raises(InvalidRequestError):
        info(**changes)


def test_a_backend_is_one_of_two() -> None:
    body = json.loads(msgspec.json.encode(info()))
    body["backend"] = "mpi"
    with pytest.raises(msgspec.ValidationError, match="mpi"):
        msgspec.convert(body, AnyInitInfo)


@pytest.mark.parametrize("rank_offset", [0, -1, 3, 1000])
def test_an_engine_is_never_rank_0_nor_outside_the_group(rank_offset: int) -> None:
    """Rank 0 is the trainer; two members of one rank hang or end each other."""
    with pytest.raises(InvalidRequestError):
        InitRequest(run_id="r", model_id="m", info=info(world_size=3), rank_offset=rank_offset)


@pytest.mark.parametrize("seconds", [0.0, -1.0, 1e300, float("inf"), float("nan")])
def test_seconds_that_no_wait_can_have(seconds: float) -> None:
    """1e300 is valid JSON, and an OverflowError in the timer thread that was to watch over the session."""
    spec = TensorSpec(name="a", dtype="uint8", shape=(1,))
    manifest = Manifest(version=Version(run_id="r", number=1), model_id="m", tensors=(spec,))
    with pytest.raises(InvalidRequestError):
        BeginRequest(session="s", manifest=manifest, deadline_s=seconds)
    with pytest.raises(InvalidRequestError):
        PauseRequest(session="s", timeout_s=seconds, lease_s=1.0)
    with pytest.raises(InvalidRequestError):
        PauseRequest(session="s", timeout_s=1.0, lease_s=seconds)


@pytest.mark.parametrize("world_size", [0, -1])
def test_an_engine_without_workers_is_refused(world_size: int) -> None:
    """Zero workers found must never become a sync that reached "every" worker."""
    with pytest.raises(InvalidRequestError):
        EngineReply(engine_id="e", world_size=world_size)


def test_an_update_is_of_a_known_kind() -> None:
    header = {"session": "s", "seq": 0, "names": ["a"], "dtypes": ["uint8"], "shapes": [[1]]}
    body = {"update": {**header, "kind": "pickle"}}
    with pytest.raises(msgspec.ValidationError, match="pickle"):
        msgspec.convert(body, UpdateRequest)
    del body["update"]["kind"]
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(body, UpdateRequest)
