"""What of a worker's errors reaches vLLM's log."""

from __future__ import annotations

import logging

import pytest

from tests.standins.threads import logged_here
from weightsync.engine.vllm.quiet_log import keep_told_states_out
from weightsync.errors import StateError
from weightsync.handles.vllm_messages import VllmState, error_text, other_state


def test_a_told_state_is_not_logged_and_an_error_is(caplog: pytest.LogCaptureFixture) -> None:
    """vLLM wraps what its workers raise, so the text is what there is."""
    keep_told_states_out()
    keep_told_states_out()
    logger = logging.getLogger("vllm.v1.engine.core")
    assert len(logger.filters) == 1
    told = error_text(other_state(VllmState()))
    with caplog.at_level(logging.ERROR):
        for text in (told, error_text(StateError("no session is open")), "no error of ours"):
            try:
                raise RuntimeError(f"Call to collective_rpc method failed: {text}")
            except RuntimeError as error:
                logger.exception("%s", str(error)[:60])
        logger.error("without an exception: %s", told)
    assert [record.message[:11] for record in logged_here(caplog)] == ["Call to col", "Call to col", "without an "]
