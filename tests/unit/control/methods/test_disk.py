"""Method disk: all workers load the same version, zero is a failure, and who fails is named with what was left."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastapi import Request

from tests.standins.sglang_server import Failure, SGLangRouterServer, SGLangServer, StandIn
from tests.unit.handles.sglang_kit import NAMES, weights, write_checkpoint
from tests.unit.handles.vllm_kit import VllmStandIn
from weightsync.control.methods.disk import DiskMethod
from weightsync.control.methods.folder import VersionFolder
from weightsync.errors import (
    ConfigError,
    DeadlineExceededError,
    DigestMismatchError,
    EngineError,
    EngineUnreachableError,
    InvalidRequestError,
    NoEnginesError,
    SyncFailedError,
    VersionError,
)
from weightsync.net.client import JsonClient
from weightsync.types import Version
from weightsync.types.control import UNNAMED

GATE = ("/pause_generation", "/update_weights_from_disk", "/continue_generation")
VLLM_GATE = ("/pause", "/collective_rpc", "/reset_prefix_cache", "/resume")


def v(number: int) -> Version:
    return Version(run_id="run", number=number)


class Place:
    """A folder of versions, and servers that start with version 0."""

    def __init__(self, tmp_path: Path, stack: contextlib.ExitStack) -> None:
        self.start_path = write_checkpoint(tmp_path / "start", 0)
        self.folder = VersionFolder(tmp_path / "versions")
        self._stack = stack
        self._servers: list[Any] = []

    def publish(self, number: int) -> Path:
        return self.folder.publish("actor", v(number), lambda into: write_checkpoint(into, number))

    def started(self, server: Any) -> Any:
        server.start()
        self._servers.append(server)
        return server

    def close(self) -> None:
        """All at once: each takes a moment."""
        for thread in [threading.Thread(target=server.close) for server in self._servers]:
            thread.start()
            self._stack.callback(thread.join)

    def sglang(self, num: int, **options: Any) -> tuple[list[SGLangServer], SGLangRouterServer]:
        servers = [self.started(SGLangServer(self.start_path, **options)) for _ in range(num)]
        return servers, self.started(SGLangRouterServer([server.url for server in servers]))

    def vllm(self, **options: Any) -> VllmStandIn:
        server: VllmStandIn = self.started(VllmStandIn(self.start_path, **options))
        return server

    def method(self, *servers: StandIn, **options: Any) -> DiskMethod:
        method = DiskMethod(self.folder, {"actor": [server.url for server in servers]}, **options)
        self._stack.callback(method.close)
        return method


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with contextlib.ExitStack() as stack:
        place = Place(tmp_path, stack)
        yield place
        place.close()


def held(server: Any) -> dict[str, bytes]:
    return {name: each.tobytes() for name, each in server.weights.items()}


def test_all_workers_of_a_router_load_the_version(place: Place) -> None:
    servers, router = place.sglang(3)
    method = place.method(router)
    method.initialize()
    assert all(server.calls == [] for server in servers)
    for number in (1, 2):
        path = place.publish(number)
        method.trained("actor", v(number))
        assert method.sync_weights("actor", v(number)) == number
        for server in servers:
            assert held(server) == weights(number)
            assert (server.weight_version, server.paused) == (f"run/{number}", None)
            body = next(call.body for call in reversed(server.calls) if call.path == GATE[1])
            assert body == {
                "model_path": str(path), "load_format": None, "weight_version": f"run/{number}", "flush_cache": True,
                "abort_all_requests": False, "torch_empty_cache": False, "is_async": False, "keep_pause": False,
                "recapture_cuda_graph": False, "token_step": 0, "manifest": None,
            }  # fmt: skip
    assert servers[0].called(*GATE) == [*GATE, *GATE]


def test_a_run_without_a_name_is_no_other_runs(place: Place) -> None:
    """Seen red: what another run had left was loaded, and counted as what was trained."""
    (server,), _ = place.sglang(1)
    method = place.method(server)
    place.publish(3)
    nameless = Version(run_id=UNNAMED, number=1)
    with pytest.raises(
        VersionError, match=r"has no unnamed/1 .* the latest is run/3: publish .* name its run and numb"
    ):
        method.sync_weights("actor", nameless)
    assert server.weight_version != "run/3"
    place.folder.publish("actor", nameless, lambda into: write_checkpoint(into, 9))
    assert method.sync_weights("actor", nameless) == 1
    assert (server.weight_version, held(server)) == ("unnamed/1", weights(9))
    place.folder.publish("actor", Version(run_id=UNNAMED, number=5), lambda into: write_checkpoint(into, 5))
    assert method.sync_weights("actor", nameless) == 1, "a controller that was started again counts from 1"
    assert (server.weight_version, held(server)) == ("unnamed/5", weights(5))


def test_a_worker_that_came_later_loads_too_and_one_server_needs_no_router(place: Place) -> None:
    servers, router = place.sglang(1)
    method = place.method(router)
    place.publish(1)
    method.sync_weights("actor", v(1))
    late = place.started(SGLangServer(place.start_path, former=True))
    router.urls.append(late.url)
    place.publish(2)
    assert method.sync_weights("actor", v(2)) == 2
    assert held(late) == held(servers[0]) == weights(2)
    place.publish(3)
    assert place.method(late).sync_weights("actor", v(3)) == 3
    assert (held(late), held(servers[0])) == (weights(3), weights(2))


def test_a_worker_that_a_router_names_no_more_is_forgotten(place: Place) -> None:
    """Seen red: each that ever was there was kept, with what was known of it, for the run."""
    (first, second, other), router = place.sglang(3)
    router.urls = [first.url]
    method = DiskMethod(place.folder, {"actor": router.url, "critic": [other.url + "/"]})
    with contextlib.closing(method):
        method.initialize()
        place.publish(1)
        method.sync_weights("actor", v(1))
        assert set(method._engines) == {first.url, other.url}
        router.urls = [second.url]
        place.publish(2)
        method.sync_weights("actor", v(2))
        assert set(method._engines) == {second.url, other.url}
        assert {url.rstrip("/") for url in method._known} == {router.url, second.url, other.url}
        router.urls = [first.url]
        place.publish(3)
        assert method.sync_weights("actor", v(3)) == 3
        assert held(first) == weights(3)


def test_zero_workers_are_a_failure(place: Place) -> None:
    _, router = place.sglang(0)
    method = place.method(router)
    place.publish(1)
    with pytest.raises(NoEnginesError, match="has no workers"):
        method.initialize()
    with pytest.raises(NoEnginesError, match="has no workers"):
        method.sync_weights("actor", v(1))
    none: tuple[dict[str, list[str]], ...] = ({}, {"actor": []})
    for urls in none:
        with pytest.raises(NoEnginesError, match="at least one engine"):
            DiskMethod(place.folder, urls)


WAYS: dict[Failure, type[Exception]] = {
    "error": EngineError, "refused": EngineError, "garbage": EngineError, "drop": EngineUnreachableError,
    "hang": DeadlineExceededError,
}  # fmt: skip


@pytest.mark.parametrize("how", sorted(WAYS))
@pytest.mark.parametrize("after", [False, True])
def test_one_of_three_workers_fails_to_load(place: Place, how: Failure, after: bool) -> None:
    """It is named and stays paused, whether it had loaded or not; the others serve; the next sync heals it."""
    servers, router = place.sglang(3)
    method = place.method(router, timeout_s=4.0 if how == "hang" else 20.0)
    place.publish(1)
    bad, *good = servers
    bad.fail("/update_weights_from_disk", how, after=after)
    with pytest.raises(SyncFailedError, match=f"1 of 3 engines did not load it: {bad.url}") as caught:
        method.sync_weights("actor", v(1))
    error = caught.value
    assert set(error.causes) == {bad.url}
    assert type(error.causes[bad.url]) is WAYS[how]
    assert "it is paused" in str(error.causes[bad.url].state_left)
    assert all(server.url in str(error.state_left) for server in servers)
    assert bad.paused == "retract"
    assert [(server.paused, held(server)) for server in good] == [(None, weights(1))] * 2
    assert method.sync_weights("actor", v(1)) == 1
    assert [(server.paused, held(server)) for server in servers] == [(None, weights(1))] * 3


@pytest.mark.parametrize(("path", "left", "paused", "number"), [
    ("/pause_generation", "it serves its old version", None, 0),
    ("/model_info", "old weights, the new ones or parts", "retract", 1),
    ("/weights_checker", "old weights, the new ones or parts", "retract", 1),
    ("/continue_generation", "it has the new weights", "retract", 1),
])  # fmt: skip
def test_what_is_left_where_another_step_fails(
    place: Place, path: str, left: str, paused: str | None, number: int
) -> None:
    servers, router = place.sglang(2)
    method = place.method(router)
    method.initialize()
    place.publish(1)
    servers[0].fail(path, "error")
    with pytest.raises(SyncFailedError) as caught:
        method.sync_weights("actor", v(1))
    assert left in str(caught.value.causes[servers[0].url].state_left)
    assert (servers[0].paused, held(servers[0])) == (paused, weights(number))
    assert (servers[1].paused, held(servers[1])) == (None, weights(1))


@pytest.mark.parametrize(("field", "value", "words"), [
    ("weight_version", "default", "told to load run/1, and says that it has default"),
    ("model_path", "/elsewhere", "and says that it has /elsewhere"),
])  # fmt: skip
def test_a_server_that_says_something_else_than_it_was_told_has_failed(
    place: Place, monkeypatch: pytest.MonkeyPatch, field: str, value: str, words: str
) -> None:
    (server,), router = place.sglang(1)
    method = place.method(router)
    place.publish(1)
    loaded = server._loaded

    def says(body: Any) -> dict[str, Any]:
        told = loaded(body)
        setattr(server, field, value)
        return told

    monkeypatch.setattr(server, "_loaded", says)
    with pytest.raises(SyncFailedError, match=words):
        method.sync_weights("actor", v(1))
    assert server.paused == "retract"


@pytest.mark.parametrize(("num", "num_wrong"), [(3, 1), (2, 2)])
def test_workers_whose_live_weights_differ_are_not_resumed(
    place: Place, monkeypatch: pytest.MonkeyPatch, num: int, num_wrong: int
) -> None:
    """Which of two is wrong nobody can say; of three it is the one."""
    servers, router = place.sglang(num)
    method = place.method(router)
    place.publish(1)
    loaded = servers[0]._loaded

    def flips(body: Any) -> dict[str, Any]:
        servers[0].weights[NAMES[0]] = np.bitwise_xor(servers[0].weights[NAMES[0]], 1)
        return loaded(body)

    with monkeypatch.context() as patch:
        patch.setattr(servers[0], "_loaded", flips)
        with pytest.raises(SyncFailedError, match=f"{num_wrong} of {num} engines") as caught:
            method.sync_weights("actor", v(1))
    assert all(type(error) is DigestMismatchError for error in caught.value.causes.values())
    assert [server.paused for server in servers] == ["retract"] * num_wrong + [None] * (num - num_wrong)
    assert method.sync_weights("actor", v(1)) == 1


def test_who_failed_can_be_evicted_and_come_back(place: Place) -> None:
    servers, router = place.sglang(2)
    method = place.method(router)
    place.publish(1)
    servers[0].fail("/update_weights_from_disk", "error", times=2)
    with pytest.raises(SyncFailedError):
        method.sync_weights("actor", v(1))
    assert method.evict_failed("actor") == [servers[0].url]
    assert method.evict_failed("actor") == []
    assert method.sync_weights("actor", v(1)) == 1
    assert held(servers[0]) == weights(0)
    method.peers.readmit("actor", servers[0].url)
    with pytest.raises(SyncFailedError):
        method.sync_weights("actor", v(1))
    router.urls = [servers[0].url]
    method.evict_failed("actor")
    with pytest.raises(NoEnginesError, match="was evicted"):
        method.sync_weights("actor", v(1))


def test_one_that_its_router_has_dropped_and_names_again_takes_part_again(place: Place) -> None:
    """Seen red: it answered with what it was started with for the rest of the run, and each sync was a success."""
    servers, router = place.sglang(2)
    method = place.method(router)
    place.publish(1)
    servers[0].fail("/update_weights_from_disk", "error", times=1)
    with pytest.raises(SyncFailedError):
        method.sync_weights("actor", v(1))
    assert method.evict_failed("actor") == [servers[0].url]
    for number, urls in ((2, servers[:]), (3, servers[1:]), (4, servers[:])):
        router.urls = [each.url for each in urls]
        place.publish(number)
        assert method.sync_weights("actor", v(number)) == number
        assert held(servers[0]) == weights(4 if number == 4 else 0)


def test_one_alone_that_was_evicted_takes_part_again_with_a_newer_version(place: Place) -> None:
    """Seen red: a server that restarted for longer than the retries was evicted, and no later version was loaded."""
    server = place.vllm()
    method = place.method(server)
    place.publish(1)
    server.fail("/collective_rpc", "error", times=1)
    with pytest.raises(SyncFailedError):
        method.sync_weights("actor", v(1))
    assert method.evict_failed("actor") == [server.url]
    with pytest.raises(NoEnginesError, match="was evicted"):
        method.sync_weights("actor", v(1))
    place.publish(2)
    server.fail("/openapi.json", "error", times=1)
    with pytest.raises(NoEnginesError, match="was evicted"):  # it does not answer well yet
        method.sync_weights("actor", v(2))
    place.publish(3)
    assert method.sync_weights("actor", v(3)) == 3
    assert held(server) == weights(3)


def test_one_of_several_that_was_evicted_and_is_gone_fails_no_sync(place: Place) -> None:
    """Seen red: it was asked what it is, and that failed the others."""
    good, other = place.vllm(), place.vllm()
    method = place.method(good, other)
    place.publish(1)
    other.fail("/collective_rpc", "error", times=1)
    with pytest.raises(SyncFailedError):
        method.sync_weights("actor", v(1))
    assert method.evict_failed("actor") == [other.url]
    place.publish(2)
    other.fail("/openapi.json", "error")
    assert method.sync_weights("actor", v(2)) == 2
    assert held(good) == weights(2)
    assert held(other) == weights(0)


def test_the_version_has_to_be_published(place: Place) -> None:
    (server,), router = place.sglang(1)
    method = place.method(router)
    with pytest.raises(VersionError, match=r"has no run/1 .* the latest is None"):
        method.sync_weights("actor", v(1))
    for number in (2, 3, 4, 5):
        place.publish(number)
    assert method.sync_weights("actor", v(2)) == 5, "it is deleted already, and a newer one of its run is there"
    with pytest.raises(VersionError, match="the latest is run/5"):
        method.sync_weights("actor", v(6))
    with pytest.raises(VersionError, match="the latest is run/5"):
        method.sync_weights("actor", Version(run_id="other", number=1))
    with pytest.raises(InvalidRequestError, match="no engine of model 'critic'"):
        method.sync_weights("critic", v(1))
    assert held(server) == weights(5)


def test_a_version_that_is_being_loaded_is_not_deleted(place: Place) -> None:
    (server,), router = place.sglang(1)
    method = place.method(router)
    path = place.publish(1)
    loaded = server._loaded

    def publishes(body: Any) -> dict[str, Any]:
        for number in (2, 3, 4):
            place.publish(number)
        assert path.is_dir()
        return loaded(body)

    server._loaded = publishes  # type: ignore[method-assign]
    assert method.sync_weights("actor", v(1)) == 1
    assert place.folder.versions("actor") == (v(1), v(2), v(3), v(4))


@pytest.mark.parametrize(("running", "kv_cache", "mode"), [
    ("keep", "clear", "retract"), ("keep", "keep", "in_place"), ("abort", "clear", "abort"), ("abort", "keep", "abort"),
])  # fmt: skip
def test_running_requests_and_caches(place: Place, running: Any, kv_cache: Any, mode: str) -> None:
    (server,), router = place.sglang(1)
    server.num_running = 2
    place.publish(1)
    place.method(router, running=running, kv_cache=kv_cache, load_format="safetensors").sync_weights("actor", v(1))
    bodies = {call.path: call.body for call in server.calls}
    assert bodies["/pause_generation"] == {"mode": mode}
    load = bodies["/update_weights_from_disk"]
    assert (load["flush_cache"], load["load_format"]) == (kv_cache == "clear", "safetensors")
    assert server.num_running == (2 if mode == "in_place" else 0)


def test_engines_may_see_the_folder_elsewhere(place: Place, tmp_path: Path) -> None:
    (server,), router = place.sglang(1)
    place.publish(1)
    (tmp_path / "mounted").symlink_to(place.folder.root)
    place.method(router, engine_root=str(tmp_path / "mounted")).sync_weights("actor", v(1))
    assert server.model_path == str(tmp_path / "mounted" / "actor" / "run-1")


# vLLM


def test_a_vllm_server_reloads(place: Place) -> None:
    server = place.vllm()
    method = place.method(server)
    method.initialize()
    assert server.calls == []
    path = place.publish(1)
    assert method.sync_weights("actor", v(1)) == 1
    assert (held(server), server.weight_version, server.paused, server.cached) == (weights(1), "run/1", None, False)
    assert server.called() == list(VLLM_GATE)
    assert server.calls[0].body == {"mode": "keep", "clear_cache": True}
    assert server.calls[1].body["kwargs"] == {"weights_path": str(path)}
    assert server.calls[2].body == {"running": True}


def test_a_vllm_that_sleeps_is_left_to_whoever_wakes_it(place: Place) -> None:
    """Seen red: it had loaded all, and was said to have failed."""
    server = place.vllm()
    place.publish(1)
    server.app.add_api_route("/wake_up", lambda: {"status": "sleeping"}, methods=["POST"])
    assert place.method(server).sync_weights("actor", v(1)) == 1
    assert (held(server), server.weight_version, server.paused) == (weights(1), "run/1", "keep")


def test_vllm_keeps_its_cache_where_told_to(place: Place) -> None:
    server = place.vllm()
    place.publish(1)
    place.method(server, running="abort", kv_cache="keep").sync_weights("actor", v(1))
    assert server.called() == ["/pause", "/collective_rpc", "/resume"]
    assert (server.calls[0].body, server.cached) == ({"mode": "abort", "clear_cache": False}, True)


@pytest.mark.parametrize(("path", "how", "left", "paused"), [
    ("/pause", "error", "it serves its old version", None),
    ("/is_paused", "garbage", "it serves its old version", None),
    ("/collective_rpc", "error", "it is paused, with the old weights", "keep"),
    ("/collective_rpc", "refused", "it is paused, with the old weights", "keep"),
    ("/collective_rpc", "drop", "it is paused, with the old weights", "keep"),
    ("/reset_prefix_cache", "refused", "it is paused, with the old weights", "keep"),
    ("/weight_info", "error", "it is paused, with the old weights", "keep"),
    ("/resume", "error", "it has the new weights", "keep"),
])  # fmt: skip
def test_where_vllm_fails_it_serves_the_old_version_or_is_paused(
    place: Place, path: str, how: Failure, left: str, paused: str | None
) -> None:
    server = place.vllm()
    method = place.method(server)
    method.initialize()
    place.publish(1)
    server.fail(path, how)
    with pytest.raises(SyncFailedError) as caught:
        method.sync_weights("actor", v(1))
    assert left in str(caught.value.causes[server.url].state_left)
    assert server.paused == paused
    if paused is None:
        assert held(server) == weights(0)
    assert method.sync_weights("actor", v(1)) == 1
    assert (held(server), server.paused) == (weights(1), None)


def test_a_cache_that_can_not_be_dropped_leaves_vllm_paused(place: Place) -> None:
    server = place.vllm()
    server.resets = False
    place.publish(1)
    with pytest.raises(SyncFailedError, match="could not drop what it cached"):
        place.method(server).sync_weights("actor", v(1))
    assert server.paused == "keep"


def test_two_vllm_servers_have_to_agree(place: Place) -> None:
    servers = [place.vllm(), place.vllm()]
    method = place.method(*servers)
    place.publish(1)
    assert method.sync_weights("actor", v(1)) == 1
    place.publish(2)
    servers[0].fail("/weight_checker", "refused")
    with pytest.raises(SyncFailedError, match="no checksums"):
        method.sync_weights("actor", v(2))
    assert [server.paused for server in servers] == ["keep", None]
    assert method.sync_weights("actor", v(2)) == 2
    rpc = servers[1]._rpc

    async def flips(request: Request) -> dict[str, Any]:
        told = await rpc(request)
        servers[1].weights[NAMES[0]] = np.bitwise_xor(servers[1].weights[NAMES[0]], 1)
        return told

    route = next(route for route in servers[1].app.routes if getattr(route, "path", None) == "/collective_rpc")
    servers[1].app.router.routes.remove(route)
    servers[1].app.add_api_route("/collective_rpc", flips, methods=["POST"])
    with pytest.raises(SyncFailedError, match="2 of 2 engines") as caught:
        method.sync_weights("actor", v(2))
    assert {type(error) for error in caught.value.causes.values()} == {DigestMismatchError}
    assert [server.paused for server in servers] == ["keep", "keep"]


def test_engines_of_several_kinds_and_sizes_are_not_compared_with_each_other(place: Place) -> None:
    servers = [place.vllm(), *place.sglang(1)[0], *place.sglang(1, tp_size=2)[0]]
    place.publish(1)
    assert place.method(*servers).sync_weights("actor", v(1)) == 1
    assert [held(server) for server in servers] == [weights(1)] * 3


def test_what_is_no_engine_for_this_method_is_told_before_anything_is_changed(place: Place) -> None:
    plain = place.vllm(dev=False)
    (sglang,), _ = place.sglang(1)
    place.publish(1)
    method = place.method(plain, sglang)
    with pytest.raises(ConfigError, match="VLLM_SERVER_DEV_MODE=1"):
        method.initialize()
    with pytest.raises(SyncFailedError, match="VLLM_SERVER_DEV_MODE=1") as caught:
        method.sync_weights("actor", v(1))
    assert caught.value.state_left == "nothing was changed"
    assert (plain.calls, sglang.calls) == ([], [])
    generic = place.started(StandIn("generic"))
    with pytest.raises(ConfigError, match="is none of them"):
        place.method(generic).initialize()
    for options in ({"running": "wait"}, {"kv_cache": "flush"}):
        with pytest.raises(ConfigError, match="is one of"):
            place.method(sglang, **options)


def test_without_comparing_each_goes_on_by_itself(place: Place) -> None:
    servers, router = place.sglang(2)
    method = place.method(router, compare_checksums=False, timeout_s=4.0)
    method.initialize()
    place.publish(1)
    servers[0].fail("/update_weights_from_disk", "hang")
    with pytest.raises(SyncFailedError, match="1 of 2"):
        method.sync_weights("actor", v(1))
    assert [server.paused for server in servers] == ["retract", None]
    assert "/weights_checker" not in servers[1].called()


def test_a_server_that_came_back_as_less_is_met_anew(place: Place) -> None:
    server = place.vllm()
    method = place.method(server)
    place.publish(1)
    assert method.sync_weights("actor", v(1)) == 1
    gone = [route for route in server.app.routes if getattr(route, "path", "") not in ("/version", "/openapi.json")]
    for route in gone:
        server.app.router.routes.remove(route)
    place.publish(2)
    with pytest.raises(SyncFailedError, match="has no route /pause") as caught:
        method.sync_weights("actor", v(2))
    assert caught.value.causes[server.url].state_left == "it serves its old version"
    with pytest.raises(SyncFailedError, match="VLLM_SERVER_DEV_MODE=1"):
        method.sync_weights("actor", v(2))


def test_a_dead_engine_is_named(place: Place) -> None:
    servers, router = place.sglang(2)
    method = place.method(router)
    place.publish(1)
    servers[1].close()
    with pytest.raises(SyncFailedError, match=f"1 of 2 engines did not load it: {servers[1].url}") as caught:
        method.sync_weights("actor", v(1))
    assert type(caught.value.causes[servers[1].url]) is EngineUnreachableError
    assert held(servers[0]) == weights(0), "who is met first is met before anything is changed"
    method.evict_failed("actor")
    assert method.sync_weights("actor", v(1)) == 1


def test_a_server_that_the_configuration_does_not_mean_is_refused_before_anything_changes(place: Place) -> None:
    """`inference_service.backend` and `model`. Seen red without `_check_is_meant`: both were only shown."""
    (server,), router = place.sglang(1)
    other = place.vllm()
    place.publish(1)
    for app in (server.app, router.app):
        app.add_api_route("/v1/models", lambda: {"object": "list", "data": [{"id": "qwen"}, {"id": "qwen-lora"}]})
    for url in (server, router):
        with pytest.raises(ConfigError, match=r"backend is 'vllm', and http://\S+ is sglang"):
            place.method(url, backend="vllm").sync_weights("actor", v(1))
        with pytest.raises(ConfigError, match=r"model is 'llama', and http://\S+ serves qwen, qwen-lora"):
            place.method(url, served_model="llama").initialize()
    assert server.called(*GATE) == []
    ((again,), _), loaded = place.sglang(1), {"object": "list", "data": [{"id": f"{place.folder.root}/actor/run-1"}]}
    again.app.add_api_route("/v1/models", lambda: loaded)
    assert place.method(again, served_model="llama").sync_weights("actor", v(1)) == 1, "it is called by what it loaded"
    loaded["data"] = [{"id": f"{place.folder.root}/critic/run-1"}]
    with pytest.raises(ConfigError, match="model is 'llama'"):
        place.method(again, served_model="llama").initialize()
    loaded["data"] = [{"id": f"{place.folder.root}/actor/run-1"}]
    named = place.vllm()
    named.app.add_api_route("/v1/models", lambda: loaded)
    with pytest.raises(ConfigError, match="model is 'llama'"):
        place.method(named, served_model="llama").initialize()
    assert place.method(router, backend="sglang", served_model="qwen").sync_weights("actor", v(1)) == 1
    with pytest.raises(ConfigError, match=r"backend is 'sglang', and http://\S+ is vllm"):
        place.method(other, backend="sglang").initialize()
    place.method(other, backend="vllm", served_model="not listed, so not known").initialize()


def test_whoever_is_called_is_proved_by_the_same_authority(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """A router, its worker, a vLLM, and their lists of models. Seen red: the system's authorities alone."""
    made: list[Any] = []
    init = JsonClient.__init__

    def spied(client: JsonClient, *args: Any, **options: Any) -> None:
        made.append(options.get("verify", True))
        init(client, *args, **options)

    monkeypatch.setattr(JsonClient, "__init__", spied)
    vllm, (_, router) = place.vllm(), place.sglang(1)
    for server in (vllm, router):
        server.app.add_api_route("/v1/models", lambda: {"data": [{"id": "m"}]}, methods=["GET"])
    place.publish(1)
    assert place.method(vllm, router, served_model="m", verify="ca.pem").sync_weights("actor", v(1)) == 1
    assert set(made) == {"ca.pem"}
