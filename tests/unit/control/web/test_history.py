"""What the plots show: the newest versions of each model's run, the worst that was seen of each."""

from __future__ import annotations

import msgspec
import pytest

from tests.unit.control import statuses
from tests.unit.control.statuses import model, status, sync
from weightsync.control.web import history
from weightsync.control.web.history import History


def test_syncs_that_ended_with_bytes_and_the_slowest_rate() -> None:
    kept = History()
    kept.look(statuses.plotted())
    points = {point.version: point for point in kept.points()}
    assert sorted(points) == list(range(1, 19))
    assert (points[11].seconds, points[11].outcome) == (40.0, "served")
    assert points[6].outcome == "failed"
    assert points[18].nbytes == 208_000_000
    assert points[18].slowest_bytes_s == pytest.approx(208_000_000 / 0.9)


def test_the_most_that_rollout_was_behind_each_version() -> None:
    kept = History()
    for trained, served in ((1, 0), (2, 0), (2, 1), (3, 1), (3, 3)):
        kept.look(status(models={"actor": model(trained, served)}, syncs=()))
    assert [(point.version, point.behind) for point in kept.points()] == [(1, 1), (2, 2), (3, 2)]


def test_one_that_runs_is_no_point_and_a_try_that_succeeds_counts() -> None:
    kept = History()
    kept.look(status(models={"actor": model(5)}, syncs=(sync(6, outcome="running"), sync(5, outcome="failed"))))
    assert {point.version: point.outcome for point in kept.points()} == {5: "failed"}
    kept.look(status(models={"actor": model(5)}, syncs=(sync(5, before_s=1.0), sync(5, outcome="failed"))))
    assert {point.version: point.outcome for point in kept.points()} == {5: "served"}


def test_a_number_that_was_denied_is_no_point_any_more() -> None:
    """Seen red: it stayed at the right end of all plots for the rest of the run, as a million behind."""
    kept = History()
    tried = sync(1_000_005, outcome="failed", error="it has 5")
    for trained, served, syncs in (
        (5, 5, ()), (1_000_005, 5, ()), (5, 5, (tried,)), (6, 5, (tried,)), (6, 6, (sync(6, before_s=1.0), tried)),
    ):  # fmt: skip
        kept.look(status(models={"actor": model(trained, served)}, syncs=syncs))
    assert [(point.version, point.behind, point.outcome) for point in kept.points()] == [(5, 0, None), (6, 1, "served")]


def test_a_look_that_another_has_overtaken_changes_nothing() -> None:
    """Threads look at once. Seen red: the late one took the newest version away, and how far behind rollout was."""
    kept = History()
    for trained, served, at_s in ((5, 5, 1.0), (6, 3, 3.0), (5, 5, 2.0), (6, 6, 4.0)):
        kept.look(status(models={"actor": model(trained, served)}, syncs=(), now_s=at_s))
    assert [(point.version, point.behind) for point in kept.points()] == [(5, 0), (6, 3)]


def test_another_run_begins_anew_and_old_versions_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "_MAX_VERSIONS", 4)
    kept = History()
    for version in range(1, 10):
        kept.look(status(models={"actor": model(version)}, syncs=()))
    assert [point.version for point in kept.points()] == [6, 7, 8, 9]
    other = msgspec.structs.replace(model(2), run_id="another")
    kept.look(status(models={"actor": other}, syncs=()))
    assert [(point.run_id, point.version) for point in kept.points()] == [("another", 2)]
