"""The demo refuses what can't be before it starts a process."""

from __future__ import annotations

import importlib.util
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from weightsync.demo import launch
from weightsync.errors import MissingDependencyError


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_an_engine_that_is_not_installed_is_told_before_anything_starts(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen red: the engine's own process found out, and ended in a traceback."""
    found = importlib.util.find_spec

    def without(name: str, package: str | None = None) -> ModuleSpec | None:
        return None if name == engine else found(name, package)

    def starts(*_: object, **__: object) -> None:
        pytest.fail("processes are started")

    monkeypatch.delenv("WEIGHTSYNC_SGLANG", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", without)
    monkeypatch.setattr(launch, "_Job", starts)
    with pytest.raises(MissingDependencyError, match=f"--engine {engine} needs"):
        launch.run_demo(launch.DemoOptions(engine=engine, out=tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_the_model_is_as_large_as_its_engine_needs() -> None:
    """The pause of a vLLM shows what a delta saves where there is something to save."""
    of = {
        (engine, delta): launch.DemoOptions(engine=engine, delta=delta).size
        for engine in ("vllm", "embedded")
        for delta in (True, False)
    }
    assert of == {
        ("vllm", True): "medium",
        ("vllm", False): "small",
        ("embedded", True): "small",
        ("embedded", False): "small",
    }
    assert launch.DemoOptions(engine="vllm", delta=True, size="tiny").size == "tiny"
