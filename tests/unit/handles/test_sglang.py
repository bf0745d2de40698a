"""SGLang's routes: what is sent fits its schema, what it answers is checked, and every failure has its type."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import httpx
import pytest

from tests.standins.sglang_server import FIELDS, Failure, SGLangRouterServer, SGLangServer, read_weights
from tests.unit.handles.sglang_kit import NAMES, SHAPE, weights, write_checkpoint
from weightsync.errors import (
    AuthError,
    ConfigError,
    DeadlineExceededError,
    EngineError,
    EngineUnreachableError,
    InvalidRequestError,
    NoEnginesError,
    UnsupportedError,
)
from weightsync.handles.sglang_api import SGLangApi, SGLangRouter
from weightsync.handles.sglang_messages import (
    InitGroup,
    PauseMode,
    UpdateFromDisk,
    UpdateFromDistributed,
    UpdateFromTensor,
)

GROUP = InitGroup(
    master_address="127.0.0.1", master_port=29500, rank_offset=1, world_size=2, group_name="g", backend="gloo"
)

TENSORS = UpdateFromTensor(
    serialized_named_tensors=("a",), load_format="loader", flush_cache=True, abort_all_requests=False
)


def update(**changes: Any) -> UpdateFromDistributed:
    fields: dict[str, Any] = {
        "names": NAMES, "dtypes": ("bfloat16",) * 3, "shapes": (SHAPE,) * 3, "group_name": "g",
        "load_format": "flattened_bucket", "flush_cache": True, "abort_all_requests": False,
    }  # fmt: skip
    return UpdateFromDistributed(**{**fields, **changes})


def disk(path: Path, **changes: Any) -> UpdateFromDisk:
    fields: dict[str, Any] = {
        "model_path": str(path), "load_format": None, "weight_version": "run/1", "flush_cache": True,
        "abort_all_requests": False,
    }  # fmt: skip
    return UpdateFromDisk(**{**fields, **changes})


class Told:
    """Workers that know what a trainer would send."""

    number = 1

    def join(self, body: Mapping[str, Any]) -> None: ...

    def leave(self, group_name: str) -> None: ...

    def receive(self, body: Mapping[str, Any]) -> list[bytes]:
        return [weights(1)[name] for name in body["names"]]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[SGLangServer]:
    server = SGLangServer(write_checkpoint(tmp_path / "v0", 0), workers=Told())
    server.start()
    yield server
    server.close()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLangServer]:
    """For tests that load nothing."""
    server = SGLangServer(write_checkpoint(tmp_path_factory.mktemp("shared"), 0))
    server.start()
    yield server
    server.close()


@pytest.fixture
def failing(shared: SGLangServer) -> Iterator[SGLangApi]:
    with contextlib.closing(SGLangApi(shared.url)) as api:
        yield api


@pytest.fixture
def api(server: SGLangServer) -> Iterator[SGLangApi]:
    with contextlib.closing(SGLangApi(server.url)) as api:
        yield api


def held(server: SGLangServer) -> dict[str, bytes]:
    return {name: each.tobytes() for name, each in server.weights.items()}


def test_a_checkpoint_is_loaded_byte_for_byte(server: SGLangServer, api: SGLangApi, tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "v1", 1)
    api.update_from_disk(disk(path), timeout_s=5)
    assert held(server) == weights(1) != weights(0)
    info = api.model_info(timeout_s=5)
    assert (info.model_path, info.weight_version) == (str(path), "run/1")
    sent = json.loads(json.dumps(server.calls[0].body))
    assert {key: sent[key] for key in ("model_path", "load_format", "weight_version")} == {
        "model_path": str(path), "load_format": None, "weight_version": "run/1",
    }  # fmt: skip


def test_tensors_are_taken_from_a_group_within_the_bracket(server: SGLangServer, api: SGLangApi) -> None:
    api.init_group(GROUP, timeout_s=5)
    assert server.groups["g"] == {
        "master_address": "127.0.0.1", "master_port": 29500, "rank_offset": 1, "world_size": 2, "group_name": "g",
        "backend": "gloo",
    }  # fmt: skip
    api.pause("retract", timeout_s=5)
    api.begin_update(timeout_s=5)
    api.update_from_distributed(update(), timeout_s=5)
    api.end_update(timeout_s=5)
    api.set_version("run/1", timeout_s=5)
    api.resume(timeout_s=5)
    api.destroy_group("g", timeout_s=5)
    assert held(server) == weights(1)
    assert (server.weight_version, server.groups, server.paused) == ("run/1", {}, None)
    assert [path for path in FIELDS if path not in server.called()] == [
        "/update_weights_from_tensor", "/update_weights_from_disk", "/weights_checker",
    ]  # fmt: skip


def test_checksums_are_of_live_weights(server: SGLangServer, api: SGLangApi, tmp_path: Path) -> None:
    before = api.checksum(timeout_s=5)
    assert api.checksum(timeout_s=5) == before
    assert set(before.ranks[0].checksums) == set(NAMES)
    api.update_from_disk(disk(write_checkpoint(tmp_path / "v1", 1)), timeout_s=5)
    after = api.checksum(timeout_s=5)
    assert after.ranks[0].per_gpu_checksum != before.ranks[0].per_gpu_checksum


def test_the_order_rules_of_the_bracket(server: SGLangServer, api: SGLangApi) -> None:
    api.init_group(GROUP, timeout_s=5)
    with pytest.raises(EngineError, match="must run between begin_weight_update"):
        api.update_from_distributed(update(), timeout_s=5)
    with pytest.raises(EngineError, match="must run between begin_weight_update"):
        api.update_from_tensor(TENSORS, timeout_s=5)
    with pytest.raises(EngineError, match="no weight-update session is open"):
        api.end_update(timeout_s=5)
    api.begin_update(timeout_s=5)
    with pytest.raises(EngineError, match="already open"):
        api.begin_update(timeout_s=5)
    with pytest.raises(EngineError, match=r"Group other not in"):
        api.update_from_distributed(update(group_name="other"), timeout_s=5)
    with pytest.raises(EngineError, match="does not exist"):
        api.destroy_group("other", timeout_s=5)
    assert held(server) == weights(0)


def test_a_cache_is_not_flushed_under_running_requests(server: SGLangServer, api: SGLangApi, tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "v1", 1)
    server.num_running = 2
    api.pause("in_place", timeout_s=5)
    with pytest.raises(EngineError, match="the cache was not flushed"):
        api.update_from_disk(disk(path), timeout_s=5)
    assert server.weight_version == "default"
    api.update_from_disk(disk(path, flush_cache=False), timeout_s=5)
    api.pause("retract", timeout_s=5)
    api.update_from_disk(disk(path), timeout_s=5)
    assert server.num_running == 0


def test_an_update_of_a_server_that_goes_on_waits_for_its_requests(
    server: SGLangServer, api: SGLangApi, tmp_path: Path
) -> None:
    path = write_checkpoint(tmp_path / "v1", 1)
    server.num_running = 1
    with pytest.raises(DeadlineExceededError):
        api.update_from_disk(disk(path), timeout_s=0.3)
    assert held(server) == weights(0)
    api.update_from_disk(disk(path, abort_all_requests=True), timeout_s=5)
    assert held(server) == weights(1)


@pytest.mark.parametrize("path", sorted(FIELDS))
def test_the_server_refuses_what_sglang_would(shared: SGLangServer, path: str) -> None:
    """Without this the tests above could pass because it takes anything."""
    required: dict[str, dict[str, Any]] = {
        "/init_weights_update_group": {"master_address": "h", "master_port": 1, "rank_offset": 1, "world_size": 2},
        "/update_weights_from_distributed": {"names": ["a"], "dtypes": ["float32"], "shapes": [[1]]},
        "/update_weights_from_disk": {"model_path": "/nowhere"},
        "/update_weights_from_tensor": {"serialized_named_tensors": ["a"]},
        "/update_weight_version": {"new_version": "x"},
    }
    good = required.get(path, {})
    shared.calls.clear()
    with httpx.Client(base_url=shared.url, trust_env=False) as client:

        def refusal(body: Any) -> str:
            response = client.post(path, json=body)
            assert response.status_code == 400, response.text
            return str(response.json()["message"])

        assert "unknown fields: ['flush_cash']" in refusal({**good, "flush_cash": True})
        for name in good:
            assert f"missing fields: ['{name}']" in refusal({key: each for key, each in good.items() if key != name})
        for name in set(FIELDS[path]) - {"manifest"}:  # which takes any mapping
            assert f"field {name}" in refusal({**good, name: {"": [1.5]}})
        assert client.post(path, content=b"{", headers={"content-type": "application/json"}).status_code == 400
    assert shared.calls == []


CALLS: dict[str, Callable[[SGLangApi, float], Any]] = {
    "/model_info": lambda api, left_s: api.model_info(timeout_s=left_s),
    "/server_info": lambda api, left_s: api.server_info(timeout_s=left_s),
    "/weights_checker": lambda api, left_s: api.checksum(timeout_s=left_s),
    "/pause_generation": lambda api, left_s: api.pause("abort", timeout_s=left_s),
    "/continue_generation": lambda api, left_s: api.resume(timeout_s=left_s),
    "/init_weights_update_group": lambda api, left_s: api.init_group(GROUP, timeout_s=left_s),
    "/destroy_weights_update_group": lambda api, left_s: api.destroy_group("g", timeout_s=left_s),
    "/begin_weight_update": lambda api, left_s: api.begin_update(timeout_s=left_s),
    "/end_weight_update": lambda api, left_s: api.end_update(timeout_s=left_s),
    "/update_weights_from_distributed": lambda api, left_s: api.update_from_distributed(update(), timeout_s=left_s),
    "/update_weights_from_tensor": lambda api, left_s: api.update_from_tensor(TENSORS, timeout_s=left_s),
    "/update_weights_from_disk": lambda api, left_s: api.update_from_disk(disk(Path("/nowhere")), timeout_s=left_s),
    "/update_weight_version": lambda api, left_s: api.set_version("run/1", timeout_s=left_s),
}
FAILURES: dict[Failure, tuple[type[Exception], str]] = {
    "error": (EngineError, r"answered .* with an error: injected \[.*status=500"),
    "refused": (EngineError, r"injected|what is no answer|says that it failed"),
    "garbage": (EngineError, "what is no answer"),
    "drop": (EngineUnreachableError, "broke during"),
}


@pytest.mark.parametrize("how", sorted(FAILURES))
@pytest.mark.parametrize("path", sorted(CALLS))
def test_each_route_may_fail_in_each_way(shared: SGLangServer, failing: SGLangApi, path: str, how: Failure) -> None:
    kind, words = FAILURES[how]
    shared.fail(path, how)
    with pytest.raises(kind, match=words) as caught:
        CALLS[path](failing, 10.0)
    assert caught.value.peer == shared.url  # type: ignore[attr-defined]


@pytest.mark.parametrize("path", ["/update_weights_from_disk", "/model_info"])
def test_a_call_that_hangs_ends_at_its_deadline(server: SGLangServer, api: SGLangApi, path: str) -> None:
    server.fail(path, "hang")
    with pytest.raises(DeadlineExceededError, match=r"within 0\.5 s"):
        CALLS[path](api, 0.5)


def test_every_failure_is_tried(api: SGLangApi) -> None:
    assert set(get_args(Failure)) == {*FAILURES, "hang"}
    assert set(CALLS) == {*FIELDS, "/model_info", "/server_info"}


def test_a_file_that_is_cut_off_is_not_loaded(server: SGLangServer, api: SGLangApi, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="cut off"):
        api.update_from_disk(disk(write_checkpoint(tmp_path / "v1", 1, cut=1)), timeout_s=5)
    with pytest.raises(EngineError, match="no safetensors files"):
        api.update_from_disk(disk(tmp_path / "nowhere"), timeout_s=5)
    assert held(server) == weights(0)
    assert {name: each.tobytes() for name, each in read_weights(tmp_path / "v0").items()} == weights(0)


def test_former_routes_are_asked_where_the_new_ones_are_not(tmp_path: Path) -> None:
    server = SGLangServer(write_checkpoint(tmp_path / "v0", 0), former=True, tp_size=2)
    with contextlib.closing(SGLangApi(server.start())) as api:
        assert api.model_info(timeout_s=5).weight_version == "default"
        assert api.server_info(timeout_s=5).tp_size == 2
    server.close()


def test_tokens_and_missing_routes_have_types_of_their_own(tmp_path: Path) -> None:
    server = SGLangServer(write_checkpoint(tmp_path / "v0", 0), token="a-token-of-its-own")
    server.start()
    api = SGLangApi(server.url, token="another-token-is-wrong")
    with contextlib.closing(api), pytest.raises(AuthError, match="refuses the token"):
        api.begin_update(timeout_s=5)
    server.close()
    router = SGLangRouterServer([])
    api = SGLangApi(router.start())
    with contextlib.closing(api), pytest.raises(UnsupportedError, match=r"no route /begin_weight_update: .* 0\.5\.23"):
        api.begin_update(timeout_s=5)
    router.close()


def test_a_router_lists_its_workers(tmp_path: Path) -> None:
    router = SGLangRouterServer(["http://127.0.0.1:1/", "http://127.0.0.1:2", "http://127.0.0.1:1"])
    with contextlib.closing(SGLangRouter(router.start())) as api:
        assert api.workers(timeout_s=5) == ("http://127.0.0.1:1", "http://127.0.0.1:2")
        router.urls = []
        with pytest.raises(NoEnginesError, match="has no workers"):
            api.workers(timeout_s=5)
        router.urls = ["http://127.0.0.1:1", "file:///etc/passwd"]
        with pytest.raises(EngineError, match="can't be called"):
            api.workers(timeout_s=5)
        router.urls = ["http://127.0.0.1:1@0", "http://127.0.0.1:1@1"]
        with pytest.raises(EngineError, match="parts of data-parallel servers"):
            api.workers(timeout_s=5)
        router.fail("/workers", "refused")
        with pytest.raises(EngineError, match="what is no answer"):
            api.workers(timeout_s=5)
    router.close()
    with pytest.raises(ConfigError, match="starts with http"):
        SGLangRouter("router:3000")


def test_an_update_that_can_not_be_is_not_sent() -> None:
    with pytest.raises(InvalidRequestError, match="as many names as dtypes"):
        update(dtypes=("bfloat16",))
    with pytest.raises(InvalidRequestError, match="at least one"):
        update(names=(), dtypes=(), shapes=())
    assert get_args(PauseMode) == ("abort", "retract", "in_place")
