"""The picture of the states is drawn from the code, and the page in docs/ is the one that the code draws."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from weightsync.control import picture, state

PAGE = Path(__file__).resolve().parents[3] / "docs" / "control-states.md"
RENEW = "run: python -m weightsync.control.picture > docs/control-states.md"


def test_the_page_is_what_the_code_draws() -> None:
    assert PAGE.read_text(encoding="utf-8") == picture.page(), RENEW


def test_it_can_be_read() -> None:
    pictures = re.findall(r"```mermaid\n(.*?)```", picture.page(), re.DOTALL)
    assert len(pictures) == 2
    for drawn in pictures:
        assert len(set(re.findall(r"^ +(\w+): ", drawn, re.MULTILINE))) <= 10
        assert drawn.count("-->") <= 30


def test_every_state_that_was_found_is_named_and_drawn() -> None:
    for drawing in (picture.explore("sync", "batch-async"), picture.explore("fully-async")):
        assert set(drawing.nodes) <= set(picture._WORDS)
        assert drawing.num_states > 500
        reached = {"running"}
        for _ in drawing.nodes:
            reached |= {there for here, there in drawing.edges if here in reached}
        assert reached == set(drawing.nodes)


def test_what_must_hold_is_seen_in_it() -> None:
    drawing = picture.explore("sync", "batch-async")
    for name, facts in drawing.nodes.items():
        for phase, waits, locked in facts:
            assert locked or not waits
            assert waits == (name in ("need_sync", "retry", "syncing")), (name, phase)
    assert not any(waits for facts in picture.explore("fully-async").nodes.values() for _, waits, _ in facts)
    assert ("need_sync", "running") not in drawing.edges, "who waits for a step is let go by its sync alone"


def test_a_change_of_the_machine_changes_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without this the first test could compare two pages that the machine has no part in."""

    def never_late(
        before: state.ModelState, event: state.Event, policy: state.Policy
    ) -> tuple[state.ModelState, tuple[state.Action, ...]]:
        after, actions = state.step(before, event, policy)
        return dataclasses.replace(after, overdue=False), actions

    before = picture.page()
    monkeypatch.setattr(picture, "step", never_late)
    assert picture.page() != before
