"""The name that was probably meant."""

from __future__ import annotations

import pytest

from weightsync.plan.names import closest, did_you_mean

NAMES = (
    "model.embed.weight",
    "model.layers.0.q.weight",
    "model.layers.1.q.weight",
    "model.layers.1.q.bias",
    "head.weight",
)


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("layers.1.q.weight", "model.layers.1.q.weight"),  # a wrapper at the front
        ("module.model.layers.0.q.weight", "model.layers.0.q.weight"),
        ("model.layers.1.q.bais", "model.layers.1.q.bias"),  # a slip
        ("xyz", None),
    ],
)
def test_the_closest_name(said: str, meant: str | None) -> None:
    assert closest(said, NAMES) == meant


def test_a_hint_is_a_question_or_nothing() -> None:
    assert did_you_mean("actr", ["actor", "verifier"]) == " did you mean 'actor'?"
    assert did_you_mean("xyz", ["actor"]) == ""
