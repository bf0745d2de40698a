from __future__ import annotations

import dataclasses

import prometheus_client
import pytest
from prometheus_client.parser import text_string_to_metric_families

from weightsync.errors import TransferError
from weightsync.observe import Metrics, Recorder
from weightsync.observe import metrics as observe_metrics
from weightsync.types import PhaseRecord, SyncReport, Version

REPORT = SyncReport(
    version=Version(run_id="run", number=7),
    engine_ids=("engine-0",),
    lost={"engine-1": "it is gone"},
    total_bytes=1000,
    sent_bytes=400,
    num_deltas=1,
    full_because=None,
    num_chunks=3,
    seconds=0.4,
    paused_s=0.03,
    phases_s={"extract": 0.1},
    digests_equal=True,
    unprovable={},
)


def samples(metrics: Metrics) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    text = metrics.render().decode()
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(metrics: Metrics, name: str, **labels: str) -> float:
    return samples(metrics)[name, frozenset(labels.items())]


def test_phases_of_a_recorder_and_of_its_engines_are_counted() -> None:
    recorder = Recorder("trainer")
    metrics = Metrics(recorder)
    with recorder.phase("extract"):
        pass
    recorder.add(PhaseRecord(name="load", start_s=1, end_s=3, track="engine-0"))
    recorder.add(PhaseRecord(name="load", start_s=5, end_s=4, track="engine-0"))
    assert value(metrics, "weightsync_phase_seconds_count", phase="extract", track="trainer") == 1
    assert value(metrics, "weightsync_phase_seconds_count", phase="load", track="engine-0") == 2
    assert value(metrics, "weightsync_phase_seconds_sum", phase="load", track="engine-0") == 2


def test_good_and_failed_syncs_are_counted() -> None:
    metrics = Metrics(model_id="actor")
    assert value(metrics, "weightsync_syncs_total", outcome="failed") == 0
    metrics.observe_sync(REPORT)
    metrics.observe_sync(dataclasses.replace(REPORT, digests_equal=None), model_id="verifier")
    metrics.observe_failure(TransferError("cut"))
    metrics.observe_failure(RuntimeError("?"))
    assert value(metrics, "weightsync_syncs_total", outcome="ok") == 2
    assert value(metrics, "weightsync_syncs_total", outcome="failed") == 2
    assert value(metrics, "weightsync_failures_total", error="TransferError") == 1
    assert value(metrics, "weightsync_failures_total", error="unexpected") == 1
    assert value(metrics, "weightsync_bytes_total") == 2000
    assert value(metrics, "weightsync_paused_seconds_total") == pytest.approx(0.06)
    assert value(metrics, "weightsync_pause_seconds_count") == 2
    assert value(metrics, "weightsync_version", model_id="actor") == 7
    assert value(metrics, "weightsync_version", model_id="verifier") == 7
    assert value(metrics, "weightsync_unproved_syncs_total") == 1
    assert value(metrics, "weightsync_lost_engines_total") == 2


def test_each_has_a_registry_of_its_own() -> None:
    first, second = Metrics(), Metrics()
    first.observe_sync(REPORT)
    assert value(second, "weightsync_syncs_total", outcome="ok") == 0
    assert b"weightsync" not in prometheus_client.generate_latest()


def test_labels_that_peers_choose_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observe_metrics, "_MAX_LABELS", 4)
    metrics = Metrics()
    for index in range(100):
        metrics.observe_phase(PhaseRecord(name="load", start_s=0, end_s=1, track=f"engine-{index}"))
    tracks = {dict(labels)["track"] for (name, labels) in samples(metrics) if name == "weightsync_phase_seconds_count"}
    assert tracks == {"engine-0", "engine-1", "engine-2", "engine-3", "other"}
    assert value(metrics, "weightsync_phase_seconds_count", phase="load", track="other") == 96


def test_what_engines_wrote_read_again_and_loaded_all_the_same_is_counted() -> None:
    metrics = Metrics()
    metrics.observe_sync(dataclasses.replace(REPORT, written=12))
    metrics.observe_sync(dataclasses.replace(REPORT, written=30, full_because="nothing was pushed before"))
    assert value(metrics, "weightsync_written_elements_total") == 42
    assert value(metrics, "weightsync_full_fallbacks_total") == 1
    for detail in ("r/1", "r/1, failed: DigestMismatchError", "r/1, failed: TransferAbortedError", "r/2"):
        metrics.observe_phase(PhaseRecord(name="audit", start_s=1, end_s=2, track="engine-0", detail=detail))
    assert value(metrics, "weightsync_audits_total", outcome="proved") == 2
    assert value(metrics, "weightsync_audits_total", outcome="wrong") == 1
    assert value(metrics, "weightsync_audits_total", outcome="unknown") == 1
