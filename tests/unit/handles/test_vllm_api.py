"""How a vLLM server is paused: by its sleep of level 0 where it describes one, which does not wait for 20 ms more."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from fastapi import FastAPI, Request

from weightsync.handles.vllm_api import VllmHttpApi, _sleep_can_pause
from weightsync.net.server import ServerSettings, ServerThread

MODES = {"type": "string", "enum": ["abort", "wait", "keep"]}
LEVELS = {"type": "integer", "minimum": 0}
CACHES = ("/wake_up", "/reset_encoder_cache", "/reset_prefix_cache", "/pause", "/resume")


def described(*, level: Any = LEVELS, mode: Any = MODES, also: tuple[str, ...] = CACHES) -> dict[str, Any]:
    given = [{"name": "level", "schema": level}, {"name": "mode", "schema": mode}]
    return {"paths": {"/sleep": {"post": {"parameters": given}}, **{path: {} for path in also}}}


class Routes:
    """A server with some of vLLM's routes, and what was called; `says` is its description of itself."""

    def __init__(self, says: dict[str, Any]) -> None:
        self.calls: list[str] = []
        app = FastAPI(openapi_url=None)

        @app.get("/get_world_size")
        def world_size() -> dict[str, int]:
            return {"world_size": 1}

        @app.get("/openapi.json")
        def openapi() -> dict[str, Any]:
            self.calls.append("openapi")
            return says

        @app.post("/{path:path}")
        def other(path: str, request: Request) -> dict[str, Any]:
            self.calls.append(f"{path}?{request.url.query}")
            return {}

        self.server = ServerThread(app, ServerSettings(host="127.0.0.1", port=0))


@pytest.fixture
def routes(request: pytest.FixtureRequest) -> Iterator[tuple[Routes, VllmHttpApi]]:
    there = Routes(request.param)
    api = VllmHttpApi(there.server.start())
    yield there, api
    api.close()
    there.server.close()


def paused_and_resumed(api: VllmHttpApi) -> None:
    for _ in range(2):
        assert api.world_size(timeout_s=5) == 1
    for _ in range(2):
        api.pause("keep", clear_cache=True, timeout_s=5)
        assert api.reset_prefix_cache(timeout_s=5)
        api.resume(timeout_s=5)


@pytest.mark.parametrize("routes", [described()], indirect=True)
def test_a_server_that_can_is_put_to_sleep_and_woken(routes: tuple[Routes, VllmHttpApi]) -> None:
    """What it has encoded of images is dropped beside its prefixes: this pause does not do that."""
    there, api = routes
    paused_and_resumed(api)
    turn = [
        "sleep?level=0&mode=keep", "reset_encoder_cache?",
        "reset_prefix_cache?reset_running_requests=true&reset_external=true", "wake_up?tags=scheduling",
    ]  # fmt: skip
    assert there.calls == ["openapi", *turn, *turn]


@pytest.mark.parametrize("routes", [described(also=("/wake_up",))], indirect=True)
def test_another_one_is_paused(routes: tuple[Routes, VllmHttpApi]) -> None:
    there, api = routes
    paused_and_resumed(api)
    turn = [
        "pause?mode=keep&clear_cache=true", "reset_prefix_cache?reset_running_requests=true&reset_external=true",
        "resume?",
    ]  # fmt: skip
    assert there.calls == ["openapi", *turn, *turn]


@pytest.mark.parametrize(
    "odd",
    [
        {}, {"paths": None}, {"paths": {"/sleep": {"post": {}}}}, described(level={"minimum": 1}),
        described(level=None), described(mode={"type": "string"}), described(mode={"enum": ["abort"]}),
        described(also=("/reset_encoder_cache",)),
    ],
)  # fmt: skip
def test_a_sleep_without_level_0_and_the_modes_of_a_pause_is_none(odd: dict[str, Any]) -> None:
    """Releases before had a sleep that takes the memory away."""
    assert _sleep_can_pause(described())
    assert not _sleep_can_pause(odd)
