"""PushMethod: a push is believed by its report alone."""

from __future__ import annotations

from typing import Any

import pytest

from weightsync.control.methods.push import PushMethod
from weightsync.errors import (
    ConfigError,
    EngineError,
    InvalidRequestError,
    NoEnginesError,
    SyncFailedError,
    VersionError,
)
from weightsync.types import SyncReport, Version
from weightsync.types.control import UNNAMED


def v(number: int, run_id: str = "run") -> Version:
    return Version(run_id=run_id, number=number)


def report(number: int, **changes: Any) -> SyncReport:
    fields: dict[str, Any] = {
        "version": v(number), "engine_ids": ("e0", "e1"), "lost": {}, "total_bytes": 10, "sent_bytes": 10,
        "num_deltas": 0, "full_because": None, "num_chunks": 1, "seconds": 0.1, "paused_s": 0.1, "phases_s": {},
        "digests_equal": True, "unprovable": {},
    }  # fmt: skip
    return SyncReport(**{**fields, **changes})


class Said:
    """A push that says what it was told to say; a real one is in tests/engines."""

    def __init__(self, *says: SyncReport | Exception) -> None:
        self.says = list(says)
        self.asked: list[int] = []
        self.num_met = 0

    def initialize(self) -> None:
        self.num_met += 1

    def sync_weights(self, version: int) -> SyncReport:
        self.asked.append(version)
        said = self.says.pop(0)
        if isinstance(said, Exception):
            raise said
        return said

    def close(self) -> None:
        """Nothing to give back."""


def test_a_push_is_asked_for_the_number_and_its_report_counts() -> None:
    push = Said(report(3), report(5))
    method = PushMethod({"actor": push})
    method.initialize()
    assert push.num_met == 1
    method.trained("actor", v(3))
    assert method.sync_weights("actor", v(3)) == 3
    assert method.sync_weights("actor", v(4)) == 5, "a newer one of its run is as good"
    assert push.asked == [3, 4]
    assert method.evict_failed("actor") == []


@pytest.mark.parametrize("said", [report(2), report(3, version=v(3, "other"))])
def test_a_report_of_another_version_is_a_failure(said: SyncReport) -> None:
    with pytest.raises(VersionError, match=r"reports .*, and run/3 was asked for"):
        PushMethod({"actor": Said(said)}).sync_weights("actor", v(3))


def test_a_run_that_nobody_named_is_any() -> None:
    assert PushMethod({"actor": Said(report(3))}).sync_weights("actor", v(3, UNNAMED)) == 3


def test_a_success_on_no_engine_is_a_failure() -> None:
    with pytest.raises(NoEnginesError, match="a success on no engine"):
        PushMethod({"actor": Said(report(3, engine_ids=()))}).sync_weights("actor", v(3))


def test_engines_that_were_left_out_are_a_failure_until_they_are_evicted() -> None:
    lost = report(3, engine_ids=("e0",), lost={"e1": "it is dead"})
    method = PushMethod({"actor": Said(lost, lost, report(3, engine_ids=("e1",), lost={"e0": "dead too"}), lost)})
    with pytest.raises(SyncFailedError, match="e1: it is dead") as caught:
        method.sync_weights("actor", v(3))
    assert set(caught.value.causes) == {"e1"}
    assert caught.value.state_left == "e0 serve it; the others serve an older version, or nothing"
    assert method.evict_failed("actor") == ["e1"]
    assert method.sync_weights("actor", v(3)) == 3
    with pytest.raises(SyncFailedError, match="e0: dead too"):
        method.sync_weights("actor", v(3))
    method.peers.readmit("actor", "e1")
    with pytest.raises(SyncFailedError, match="e1: it is dead"):
        method.sync_weights("actor", v(3))
    assert PushMethod({"actor": Said(lost)}, allow_lost=True).sync_weights("actor", v(3)) == 3


def test_who_was_evicted_and_is_served_again_is_missed_again() -> None:
    """Seen red: it stayed evicted for ever, and the gates said "continue" while it answered with an old version."""
    lost, again = (
        report(number, engine_ids=("e0",), lost={"e1": why}) for number, why in ((3, "dead"), (5, "dead again"))
    )
    method = PushMethod({"actor": Said(lost, lost, report(4), again)})
    with pytest.raises(SyncFailedError, match="e1: dead"):
        method.sync_weights("actor", v(3))
    assert method.evict_failed("actor") == ["e1"]
    assert [method.sync_weights("actor", v(number)) for number in (3, 4)] == [3, 4]
    with pytest.raises(SyncFailedError, match="e1: dead again"):
        method.sync_weights("actor", v(5))


def test_what_a_push_raises_is_raised_and_its_causes_can_be_evicted() -> None:
    failed = SyncFailedError("commit failed", causes={"e1": EngineError("no", peer="e1")})
    method = PushMethod({"actor": Said(failed, report(3, lost={"e1": "shunned"}))})
    with pytest.raises(SyncFailedError, match="commit failed"):
        method.sync_weights("actor", v(3))
    assert method.evict_failed("actor") == ["e1"]
    assert method.sync_weights("actor", v(3)) == 3


def test_models_are_known_and_are_what_they_have_to_be() -> None:
    with pytest.raises(NoEnginesError):
        PushMethod({})
    with pytest.raises(ConfigError, match="no push"):
        PushMethod({"actor": "http://127.0.0.1:1"})  # type: ignore[dict-item]
    with pytest.raises(InvalidRequestError, match="no model 'critic' here: actor"):
        PushMethod({"actor": Said()}).sync_weights("critic", v(1))
