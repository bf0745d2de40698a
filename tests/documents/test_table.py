"""docs/documents.md: every section and name of the documents has a place and a test that are there, or a reason."""

from __future__ import annotations

import importlib.util
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]

GOOD = {
    "name": "`PushSync.sync_weights(version)`",
    "where": ["weightsync.trainer.push:PushSync.sync_weights(version)", "key:transfer.backend", "file:docs/check.py"],
    "test": "tests/documents/test_table.py::test_every_row_resolves",
}


@pytest.fixture(scope="module")
def table() -> Any:
    spec = importlib.util.spec_from_file_location("docs_documents", ROOT / "docs" / "documents.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["docs_documents"] = module  # its dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


def test_every_row_resolves(table: Any) -> None:
    """Seen red with a test and a method that are not there, and with a section too few."""
    assert list(table.problems()) == []


def test_the_documents_are_all_there(table: Any) -> None:
    numbers = [file.stem for file in table.files()]
    assert numbers == [str(number) for number in range(1, 6)]
    for file in table.files():
        said = tomllib.loads(file.read_text(encoding="utf-8"))
        assert len(said["section"]) == said["sections"] >= 13


def problems_with(table: Any, row: dict[str, Any]) -> list[str]:
    return list(
        table._problems_of({"title": "t", "about": "a", "sections": 1, "section": [{"title": "s", "row": [row]}]})
    )


def test_a_good_row_is_good(table: Any) -> None:
    assert problems_with(table, GOOD) == []
    assert problems_with(table, {"name": "x", "differs": "because"}) == []


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"where": []}, "a place and a test"),
        ({"test": []}, "a place and a test"),
        ({"test": ""}, "is empty"),
        ({"name": ""}, "no name"),
        ({"note": "x"}, "keys ['note']"),
        ({"differs": "x" * 301}, "one line"),
        ({"where": "weightsync.trainer.push:PushSync.nowhere"}, "has no PushSync.nowhere"),
        ({"where": "weightsync.trainer.push:PushSync.sync_weights(number)"}, "has no argument number"),
        ({"where": "weightsync.nowhere:X"}, "can't be imported"),
        ({"where": "key:transfer.nowhere"}, "has no key"),
        ({"where": "file:docs/nowhere.md"}, "no file"),
        ({"where": "route:POST /nowhere_at_all"}, "speaks of"),
        ({"test": "tests/documents/test_table.py::test_nowhere"}, "no test"),
        ({"test": "tests/documents/test_table.py"}, "no test"),
        ({"test": "tests/nowhere.py::test_x"}, "no test"),
    ],
)
def test_what_is_wrong_with_a_row_is_told(table: Any, change: dict[str, Any], expected: str) -> None:
    assert any(expected in problem for problem in problems_with(table, {**GOOD, **change}))


def test_what_is_wrong_with_a_file_is_told(table: Any) -> None:
    section = {"title": "s", "row": [GOOD]}
    for said, expected in (
        ({"sections": 2, "section": [section]}, "2 headings, 1 stand here"),
        ({"sections": 1, "section": [{"title": "s", "row": []}]}, "has no row"),
        ({"sections": 1, "section": [{"title": "s", "row": [GOOD, GOOD]}]}, "twice"),
        ({"sections": 1, "section": [section], "more": 1}, "unknown keys"),
    ):
        assert any(expected in problem for problem in table._problems_of(said)), expected
