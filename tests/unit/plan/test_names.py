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


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("3.wieght", "3.weight"),
        ("weight", None),  # of which layer?
        ("5.wieght", None),  # and not another layer's
        ("9.bias", None),
        ("lm_head.weight", None),
        ("model.layers.7.q.weight", None),
        ("model.norm.weight", None),  # "model.embed.weight" is no slip for it
        ("model.layers.0.wider.weight", "model.layers.0.wide.weight"),
        ("model.layers.0.mlp.wide.weight", "model.layers.0.wide.weight"),
        ("actor.layers.0.wide.weight", "model.layers.0.wide.weight"),
    ],
)
def test_a_hint_is_given_for_a_slip_alone(said: str, meant: str | None) -> None:
    """Seen red: "9.bias" was said to be close to "3.bias", and "lm_head.weight" to "9.weight"."""
    names = ("0.weight", "3.weight", "3.bias", "9.weight", "model.embed.weight", "model.layers.0.wide.weight")
    assert closest(said, names) == meant


def test_a_hint_is_a_question_or_nothing() -> None:
    assert did_you_mean("actr", ["actor", "verifier"]) == " did you mean 'actor'?"
    assert did_you_mean("xyz", ["actor"]) == ""
