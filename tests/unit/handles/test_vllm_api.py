"""How a vLLM server is paused: by its sleep of level 0 where its release has one: that does not wait for 20 ms."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from fastapi import FastAPI, HTTPException, Request

from weightsync.handles.vllm_api import VllmHttpApi, _sleep_can_pause
from weightsync.net.server import ServerSettings, ServerThread


class Routes:
    """A server of that release with some of vLLM's routes, and what was called; perhaps without a sleep."""

    def __init__(self, release: str, sleeps: bool) -> None:
        self.calls: list[str] = []
        app = FastAPI(openapi_url=None)

        @app.get("/get_world_size")
        def world_size() -> dict[str, int]:
            return {"world_size": 1}

        @app.get("/version")
        def version() -> dict[str, str]:
            self.calls.append("version")
            return {"version": release}

        @app.post("/{path:path}")
        def other(path: str, request: Request) -> dict[str, Any]:
            self.calls.append(f"{path}?{request.url.query}")
            if path == "sleep" and not sleeps:
                raise HTTPException(404)
            return {}

        self.server = ServerThread(app, ServerSettings(host="127.0.0.1", port=0))


@pytest.fixture
def routes(request: pytest.FixtureRequest) -> Iterator[tuple[Routes, VllmHttpApi]]:
    there = Routes(*request.param)
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


@pytest.mark.parametrize("routes", [("0.32.0+cpu", True)], indirect=True)
def test_a_server_that_can_is_put_to_sleep_and_woken(routes: tuple[Routes, VllmHttpApi]) -> None:
    """What it has encoded of images is dropped beside its prefixes: this pause does not do that."""
    there, api = routes
    paused_and_resumed(api)
    turn = [
        "sleep?level=0&mode=keep", "reset_encoder_cache?",
        "reset_prefix_cache?reset_running_requests=true&reset_external=true", "wake_up?tags=scheduling",
    ]  # fmt: skip
    assert there.calls == ["version", *turn, *turn]


@pytest.mark.parametrize("routes", [("0.31.2", True), ("0.32.0", False)], indirect=True)
def test_another_one_is_paused(routes: tuple[Routes, VllmHttpApi]) -> None:
    there, api = routes
    paused_and_resumed(api)
    turn = [
        "pause?mode=keep&clear_cache=true", "reset_prefix_cache?reset_running_requests=true&reset_external=true",
        "resume?",
    ]  # fmt: skip
    assert [call for call in there.calls if "sleep" not in call] == ["version", *turn, *turn]
    assert len(there.calls) - len([*turn, *turn]) <= 2, "a sleep that is not there is tried once"


@pytest.mark.parametrize(
    ("release", "sleeps"),
    [
        ("0.32.0", True), ("0.33.1rc1", True), ("1.0.0", True), ("0.31.9", False), ("0.9.32", False), ("dev", False),
        ("", False), (None, False), (32, False),
    ],
)  # fmt: skip
def test_releases_before_have_a_sleep_that_takes_the_memory_away(release: object, sleeps: bool) -> None:
    assert _sleep_can_pause(release) is sleeps
