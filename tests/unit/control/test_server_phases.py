"""The syncs of a controller as phases: by the clock of its other phases."""

from __future__ import annotations

from weightsync.control.server import phases_of
from weightsync.types.control import ControllerStatus, SyncRecord, SyncSpan


def test_waits_become_phases_by_the_clock_that_is_asked_for() -> None:
    sync = SyncRecord(
        model_tag="actor", run_id="r", version=7, started_s=1000.0, seconds=3.0, outcome="served",
        spans=(SyncSpan(name="transfer", start_s=-0.5, seconds=2.0, who="host-0"),),
    )  # fmt: skip
    (phase,) = phases_of(ControllerStatus(models={}, syncs=(sync,), now_s=1010.0), now_s=1012.0)
    assert (phase.name, phase.start_s, phase.end_s) == ("transfer", 1001.5, 1003.5)
    assert (phase.track, phase.detail) == ("waits of actor", "version 7, host-0")
