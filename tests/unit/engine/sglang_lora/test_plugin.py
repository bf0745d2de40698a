"""The plug-in does nothing unless it is asked, and nothing in a release that has not its functions."""

from __future__ import annotations

import logging
import sys
import tomllib
import types
from configparser import ConfigParser
from pathlib import Path
from typing import Any

import pytest

from weightsync.engine.sglang_lora import plugin
from weightsync.engine.sglang_lora.middleware import SGLangLoraMiddleware
from weightsync.handles.lora_messages import SGLANG_VARIABLE

ROOT = Path(__file__).parents[4]
GROUP = "sglang.srt.plugins"


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The modules that the plug-in looks for, and the hooks that it registers."""
    hooks: dict[str, Any] = {}
    registry = types.SimpleNamespace(
        HookRegistry=types.SimpleNamespace(register=lambda target, hook, kind: hooks.update({target: (hook, kind)})),
        HookType=types.SimpleNamespace(AROUND="around", BEFORE="before"),
    )
    app = types.SimpleNamespace(build_middleware_stack=lambda: "sglang's own")
    server = types.SimpleNamespace(_setup_and_run_http_server=lambda: None, app=app)
    scheduler = types.SimpleNamespace(Scheduler=types.SimpleNamespace(load_lora_adapter=lambda: None))
    for name, module in {
        "sglang": types.ModuleType("sglang"), "sglang.srt": types.ModuleType("sglang.srt"),
        "sglang.srt.plugins": types.ModuleType("sglang.srt.plugins"), "sglang.srt.plugins.hook_registry": registry,
        "sglang.srt.entrypoints": types.ModuleType("sglang.srt.entrypoints"),
        "sglang.srt.entrypoints.http_server": server,
        "sglang.srt.managers": types.ModuleType("sglang.srt.managers"), "sglang.srt.managers.scheduler": scheduler,
    }.items():  # fmt: skip
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr("multiprocessing.parent_process", lambda: None)
    return {"hooks": hooks, "server": server, "scheduler": scheduler, "app": app}


def test_nobody_who_has_not_asked_gets_a_middleware(sglang: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SGLANG_VARIABLE, raising=False)
    plugin.register()
    assert not sglang["hooks"]
    monkeypatch.setenv(SGLANG_VARIABLE, "1")
    plugin.register()
    assert {target: kind for target, (_, kind) in sglang["hooks"].items()} == {
        "sglang.srt.managers.scheduler.Scheduler.load_lora_adapter": "around",
        "sglang.srt.entrypoints.http_server._setup_and_run_http_server": "before",
    }


def test_a_release_that_does_not_fit_is_left_alone_and_it_is_said(
    sglang: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(SGLANG_VARIABLE, "1")
    del sglang["scheduler"].Scheduler.load_lora_adapter
    with caplog.at_level(logging.WARNING):
        plugin.register()
    assert not sglang["hooks"]
    assert "has no sglang.srt.managers.scheduler.Scheduler.load_lora_adapter" in caplog.text


@pytest.mark.parametrize(("options", "there"), [
    ({}, True), ({"enable_lora": False}, False), ({"tokenizer_worker_num": 2}, False),
])  # fmt: skip
def test_the_middleware_stands_outside_of_sglangs_own(
    sglang: dict[str, Any], options: dict[str, Any], there: bool
) -> None:
    arguments = types.SimpleNamespace(**{"enable_lora": True, "tokenizer_worker_num": 1, **options})
    plugin.before_serving(arguments, "manager", "more")
    built = sglang["app"].build_middleware_stack()
    assert isinstance(built, SGLangLoraMiddleware) is there
    if there:
        assert built._app == "sglang's own"


def test_the_servers_of_the_tests_find_it_as_an_installed_one_does() -> None:
    """They have the library on their path, and its name and entry points from a folder beside the stand-ins."""
    listed = ConfigParser()
    listed.read(ROOT / "tests/engines/sglang_cpu/weightsync-0.dist-info/entry_points.txt")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert dict(listed[GROUP]) == project["entry-points"][GROUP]
