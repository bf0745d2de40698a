"""What a rollout worker of TRL reads from answers; the worker itself runs in tests/adapters."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("trl", reason="needs TRL: pip install weightsync[engines-cpu]")

from weightsync.adapters.trl_rollouts import NEWEST, OLDEST, UNKNOWN, spans_in, versions_of
from weightsync.types.spans import VersionSpan


def answer(*spans: tuple[str | None, int, int]) -> dict[str, Any]:
    said = [{"version": version, "start": start, "end": end} for version, start, end in spans]
    return {"choices": [{"token_ids": [1, 2, 3, 4, 5]}], "weight_versions": [{"index": 0, "spans": said}]}


def test_the_versions_of_a_conversation_are_those_of_all_its_turns() -> None:
    spans = [*spans_in(answer(("r/3", 0, 2), ("r/4", 2, 5))), *spans_in(answer(("r/5", 0, 5)))]
    assert versions_of(spans) == {OLDEST: 3.0, NEWEST: 5.0, UNKNOWN: 0.0}


def test_tokens_of_no_known_version_are_counted_and_never_guessed() -> None:
    assert versions_of(spans_in(answer((None, 0, 2), ("r/4", 2, 5)))) == {OLDEST: 4.0, NEWEST: 4.0, UNKNOWN: 2.0}
    assert versions_of([]) == {UNKNOWN: 0.0}


@pytest.mark.parametrize("said", [None, [], [{}], [{"spans": None}], [{"spans": "x"}], [7], "x", {"spans": 3}])
def test_a_server_that_says_nothing_of_versions_or_nonsense(said: Any) -> None:
    reply = {**answer(), "weight_versions": said}
    assert spans_in(reply) == [VersionSpan(version=None, start=0, end=5)]
    assert versions_of(spans_in(reply)) == {UNKNOWN: 5.0}
