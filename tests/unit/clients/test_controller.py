"""How a client of a controller waits at a gate."""

from __future__ import annotations

from weightsync.clients.controller import rounds
from weightsync.types.control import ModelRequest


def test_a_round_at_a_gate_is_over_before_a_proxys_own_limit() -> None:
    """nginx and AWS's balancer give a request 60 s. Seen red: a round had as many, so the proxy was first, and its 504
    ended the wait."""
    for wait_s in (600.0, 25.5):
        asked, this_s = next(rounds(ModelRequest(model_tag="m"), wait_s))
        assert asked.wait_s == this_s
        assert 20.0 < this_s <= 30.0
    (only,) = rounds(ModelRequest(model_tag="m"), 0.0)
    assert only[0].wait_s is None
