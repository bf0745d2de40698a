"""A probe says what a server is and why it can't do the rest; it guesses nothing and changes nothing."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from tests.standins.sglang_server import SGLangRouterServer, SGLangServer, StandIn
from tests.unit.handles.sglang_kit import write_checkpoint
from tests.unit.handles.vllm_kit import VllmStandIn
from weightsync.engine.vllm.lease_middleware import LEASE_FILE_VARIABLE, LeaseMiddleware
from weightsync.errors import AuthError, ConfigError, DeadlineExceededError, EngineError, EngineUnreachableError
from weightsync.handles.probe import Capabilities, Feature, probe
from weightsync.memory import ServingLease


async def update_weights() -> dict[str, Any]:
    """A route of a server of no kind known."""
    return {"success": True}


SGLANG = {Feature.PUSH, Feature.RELOAD, Feature.VERSION, Feature.CHECKSUM}


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


def started(stack: contextlib.ExitStack, server: Any) -> Any:
    server.start()
    stack.callback(server.close)
    return server


def can(told: Capabilities) -> set[Feature]:
    return {feature for feature in Feature if told.can(feature)}


def without(app: FastAPI, *paths: str) -> None:
    """A release that has not these routes."""
    app.router.routes[:] = [route for route in app.router.routes if getattr(route, "path", None) not in paths]


@pytest.mark.parametrize("described", [True, False])
@pytest.mark.parametrize("former", [True, False])
def test_an_sglang_server(stack: contextlib.ExitStack, tmp_path: Path, described: bool, former: bool) -> None:
    """Also where it does not describe its routes: then each is asked for, in a way that runs nothing."""
    server = started(stack, SGLangServer(write_checkpoint(tmp_path, 0), former=former))
    if not described:
        without(server.app, "/openapi.json")
    told = probe(server.url)
    assert (told.engine, told.release, can(told)) == ("sglang", "0.5.23", SGLANG)
    told.need(*SGLANG)
    with pytest.raises(ConfigError, match=r"can't list its workers: it is SGLang, which does nothing of the kind"):
        told.need(Feature.WORKERS)
    assert server.calls == []


@pytest.mark.parametrize("described", [True, False])
def test_an_sglang_of_another_release(stack: contextlib.ExitStack, tmp_path: Path, described: bool) -> None:
    """Without the bracket, which is newer, it takes updates all the same; without a name for weights it does not."""
    server = started(stack, SGLangServer(write_checkpoint(tmp_path, 0)))
    without(server.app, "/begin_weight_update", "/end_weight_update", *(() if described else ("/openapi.json",)))
    assert can(probe(server.url)) == SGLANG
    without(server.app, "/update_weight_version")
    server.app.openapi_schema = None
    told = probe(server.url)
    assert can(told) == SGLANG - {Feature.PUSH, Feature.VERSION}
    says = r"SGLang 0\.5\.23 has no /update_weight_version: take SGLang 0\.5\.10 or newer"
    with pytest.raises(ConfigError, match=says) as caught:
        told.need(Feature.RELOAD, Feature.PUSH)
    assert caught.value.state_left == "nothing was changed"


@pytest.mark.parametrize("described", [True, False])
def test_a_vllm_server_in_development_mode(stack: contextlib.ExitStack, tmp_path: Path, described: bool) -> None:
    server = started(stack, VllmStandIn(write_checkpoint(tmp_path, 0)))
    if not described:
        without(server.app, "/openapi.json")
    told = probe(server.url)
    assert (told.engine, told.release) == ("vllm", "0.32.0")
    assert can(told) == {Feature.PUSH, Feature.RELOAD, Feature.VERSION, Feature.CHECKSUM}
    assert server.calls == []


def test_a_vllm_server_that_refuses_to_answer(
    stack: contextlib.ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds no lease: who lends one has to learn first what it is. Seen to fail: it refused to say."""
    lease = ServingLease(str(tmp_path / "lease"))
    stack.callback(lease.release)
    monkeypatch.setenv(LEASE_FILE_VARIABLE, lease.path)
    server = VllmStandIn(write_checkpoint(tmp_path, 0))
    server.app.add_middleware(LeaseMiddleware)
    started(stack, server)
    assert httpx.post(f"{server.url}/v1/completions", json={}, trust_env=False).status_code == 503
    told = probe(server.url)
    assert (told.engine, told.release) == ("vllm", "0.32.0")
    assert can(told) == {Feature.PUSH, Feature.RELOAD, Feature.VERSION, Feature.CHECKSUM}


@pytest.mark.parametrize("described", [True, False])
def test_a_vllm_server_that_is_not(stack: contextlib.ExitStack, tmp_path: Path, described: bool) -> None:
    server = started(stack, VllmStandIn(write_checkpoint(tmp_path, 0), dev=False))
    if not described:
        without(server.app, "/openapi.json")
    told = probe(server.url)
    assert (told.engine, can(told)) == ("vllm", set())
    for feature in (Feature.PUSH, Feature.RELOAD):
        with pytest.raises(ConfigError, match="only with VLLM_SERVER_DEV_MODE=1"):
            told.need(feature)


def test_a_vllm_release_without_a_route(stack: contextlib.ExitStack, tmp_path: Path) -> None:
    server = started(stack, VllmStandIn(write_checkpoint(tmp_path, 0)))
    without(server.app, "/weight_info", "/start_weight_update")
    told = probe(server.url)
    assert can(told) == {Feature.CHECKSUM, Feature.RELOAD}
    assert told.lacks[Feature.PUSH] == "vLLM 0.32.0 has no /start_weight_update: take vLLM 0.21 or newer"
    assert told.lacks[Feature.VERSION] == "vLLM 0.32.0 has no /weight_info: take vLLM 0.27 or newer"


def test_a_router_and_a_server_of_no_kind(stack: contextlib.ExitStack) -> None:
    router = started(stack, SGLangRouterServer([]))
    told = probe(router.url)
    assert (told.engine, can(told)) == ("sglang-router", {Feature.WORKERS})
    generic = started(stack, StandIn())
    assert (probe(generic.url).engine, can(probe(generic.url))) == ("generic", set())
    generic.app.add_api_route("/update_weights", update_weights, methods=["POST"])
    generic.app.openapi_schema = None
    assert can(probe(generic.url)) == {Feature.UPDATE}
    without(generic.app, "/openapi.json")
    assert can(probe(generic.url)) == {Feature.UPDATE}


def test_what_fails_is_not_taken_for_another_kind(stack: contextlib.ExitStack, tmp_path: Path) -> None:
    server = started(stack, SGLangServer(write_checkpoint(tmp_path, 0), token="a-token-of-its-own"))
    with pytest.raises(AuthError):
        probe(server.url)
    assert probe(server.url, token="a-token-of-its-own").engine == "sglang"
    for how, kind in (("error", EngineError), ("drop", EngineUnreachableError)):
        server.fail("/model_info", how)
        with pytest.raises(kind):
            probe(server.url, token="a-token-of-its-own")
    server.fail("/model_info", "hang")
    with pytest.raises(DeadlineExceededError):
        probe(server.url, token="a-token-of-its-own", timeout_s=3.0)
    server.fail("/model_info", "garbage")
    assert probe(server.url, token="a-token-of-its-own").engine == "generic", "that is no answer of SGLang's"
    with pytest.raises(EngineUnreachableError, match="does an engine run there"):
        probe("http://127.0.0.1:9", timeout_s=2)


def test_a_need_names_the_first_thing_that_lacks() -> None:
    told = Capabilities(url="http://e", engine="generic", release=None, lacks={Feature.PUSH: "so it is"})
    told.need(Feature.UPDATE)
    with pytest.raises(ConfigError, match="http://e can't take pushed weights: so it is"):
        dataclasses.replace(told).need(Feature.UPDATE, Feature.PUSH)
