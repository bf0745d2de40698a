"""The picture of the states is drawn from the code, and the page in docs/ is the one that the code draws."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from weightsync.control import state

ROOT = Path(__file__).resolve().parents[2]


def _picture() -> Any:
    spec = importlib.util.spec_from_file_location("control_states", ROOT / "docs" / "control_states.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


picture = _picture()
drawn_page = functools.cache(picture.page)
explored = functools.cache(picture.explore)

PAGE = ROOT / "docs" / "control-states.md"
RENEW = "run: python docs/control_states.py > docs/control-states.md"


def test_the_page_is_what_the_code_draws() -> None:
    assert PAGE.read_text(encoding="utf-8") == drawn_page(), RENEW


def test_it_can_be_read() -> None:
    pictures = re.findall(r"```mermaid\n(.*?)```", drawn_page(), re.DOTALL)
    assert len(pictures) == 2
    for drawn in pictures:
        assert len(set(re.findall(r"^ +(\w+): ", drawn, re.MULTILINE))) <= 10
        assert drawn.count("-->") <= 32


def test_every_state_that_was_found_is_named_and_drawn() -> None:
    for drawing in (explored("sync", "batch-async"), explored("fully-async")):
        assert set(drawing.nodes) <= set(picture._WORDS)
        assert drawing.num_states > 500
        reached = {"running"}
        for _ in drawing.nodes:
            reached |= {there for here, there in drawing.edges if here in reached}
        assert reached == set(drawing.nodes)


def test_what_must_hold_is_seen_in_it() -> None:
    drawing = explored("sync", "batch-async")
    for name, facts in drawing.nodes.items():
        for phase, waits, pool, dataloader in facts:
            assert pool or not waits
            assert dataloader == (name == "validating"), "a sync leaves the dataloader free"
            assert waits == (name in ("need_sync", "retry", "syncing")), (name, phase)
    assert not any(waits for facts in explored("fully-async").nodes.values() for _, waits, *_ in facts)
    lets_go = drawing.edges["need_sync", "running"]
    assert lets_go == {"batch dropped"}, "who waits for a step is let go by its sync, or where it gives no version"


def test_a_change_of_the_machine_changes_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without this the first test could compare two pages that the machine has no part in."""

    def never_late(
        before: state.ModelState, event: state.Event, policy: state.Policy
    ) -> tuple[state.ModelState, tuple[state.Action, ...]]:
        after, actions = state.step(before, event, policy)
        return dataclasses.replace(after, overdue=False), actions

    before = drawn_page()
    monkeypatch.setattr(picture, "step", never_late)
    assert picture.page() != before
