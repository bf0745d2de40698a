"""Prometheus metrics of the syncs of one process, on a registry of their own."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from weightsync.errors import DigestMismatchError, WeightSyncError
from weightsync.observe.events import Recorder
from weightsync.types import PhaseRecord, SyncReport

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""What an HTTP face answers together with `Metrics.render`."""

_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_OTHER, _MAX_LABELS = "other", 256


class Metrics:
    """Counts and times syncs. Several can live in one process; none touches the global registry.

    The labels `phase` and `track` come from engines too, so their number is bounded: what exceeds 256 different values
    is counted under "other".

    Args:
        recorder: watched from the start.
        model_id: the label of `weightsync_version` where `observe_sync` is not told another.
    """

    def __init__(self, recorder: Recorder | None = None, *, model_id: str = "model") -> None:
        from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

        self.model_id = model_id
        self.registry: CollectorRegistry = CollectorRegistry(auto_describe=True)
        own = self.registry
        self._phase = Histogram(
            "weightsync_phase_seconds", "Seconds of each phase.", ["phase", "track"], buckets=_BUCKETS_S, registry=own
        )
        self._sync = Histogram(
            "weightsync_sync_seconds", "Seconds of each good sync.", buckets=_BUCKETS_S, registry=own
        )
        self._pause = Histogram(
            "weightsync_pause_seconds",
            "The longest pause of any engine in each sync.",
            buckets=_BUCKETS_S,
            registry=own,
        )
        self._paused = Counter("weightsync_paused_seconds", "Sum of weightsync_pause_seconds.", registry=own)
        self._bytes = Counter("weightsync_bytes", "Bytes of weights synced, once a sync.", registry=own)
        self._sent = Counter("weightsync_sent_bytes", "Bytes that moved for them, once a sync.", registry=own)
        self._deltas = Counter("weightsync_delta_syncs", "Syncs that moved what had changed alone.", registry=own)
        self._written = Counter(
            "weightsync_written_elements", "Elements that engines wrote in place, not all of a version.", registry=own
        )
        self._fallbacks = Counter(
            "weightsync_full_fallbacks",
            "Syncs that loaded all of a version where changes alone were wanted.",
            registry=own,
        )
        self._audits = Counter(
            "weightsync_audits", "Readings of live weights: proved, wrong, or ended without a word.", ["outcome"],
            registry=own,
        )  # fmt: skip
        self._syncs = Counter("weightsync_syncs", "Syncs by outcome: ok or failed.", ["outcome"], registry=own)
        self._failures = Counter("weightsync_failures", "Failed syncs by type of error.", ["error"], registry=own)
        self._lost = Counter("weightsync_lost_engines", "Engines that syncs had to leave out.", registry=own)
        self._unproved = Counter(
            "weightsync_unproved_syncs", "Good syncs after which some engine could not prove its weights.", registry=own
        )
        self._version = Gauge("weightsync_version", "The version that the engines serve.", ["model_id"], registry=own)
        for outcome in ("ok", "failed"):
            self._syncs.labels(outcome)
        for outcome in ("proved", "wrong", "unknown"):
            self._audits.labels(outcome)
        self._labels: dict[str, set[str]] = {"phase": set(), "track": set(), "error": set(), "model_id": set()}
        self._lock = threading.Lock()
        if recorder is not None:
            recorder.subscribe(self.observe_phase)

    def observe_phase(self, record: PhaseRecord) -> None:
        labels = self._bounded("phase", record.name), self._bounded("track", record.track)
        self._phase.labels(*labels).observe(max(0.0, record.end_s - record.start_s))
        if record.name == "audit":
            wrong = DigestMismatchError.__name__ in record.detail
            self._audits.labels("wrong" if wrong else "unknown" if "failed: " in record.detail else "proved").inc()

    def observe_sync(self, report: SyncReport, *, model_id: str | None = None) -> None:
        """Counts one sync that ended well."""
        self._syncs.labels("ok").inc()
        self._sync.observe(report.seconds)
        self._pause.observe(report.paused_s)
        self._paused.inc(report.paused_s)
        self._bytes.inc(report.total_bytes)
        self._sent.inc(report.sent_bytes)
        self._deltas.inc(report.num_deltas > 0)
        self._written.inc(report.written)
        self._fallbacks.inc(report.full_because is not None)
        self._lost.inc(len(report.lost_engine_ids))
        self._unproved.inc(report.digests_equal is not True)
        self._version.labels(self._bounded("model_id", model_id or self.model_id)).set(report.version.number)

    def observe_failure(self, error: BaseException) -> None:
        """Counts one sync that failed. The served version stays what it was."""
        self._syncs.labels("failed").inc()
        kind = type(error).__name__ if isinstance(error, WeightSyncError) else "unexpected"
        self._failures.labels(self._bounded("error", kind)).inc()

    def render(self) -> bytes:
        """The metrics in Prometheus' text format, for `/metrics`; see `CONTENT_TYPE`."""
        from prometheus_client import generate_latest

        return generate_latest(self.registry)

    def _bounded(self, label: str, value: str) -> str:
        with self._lock:
            seen = self._labels[label]
            if value in seen or len(seen) < _MAX_LABELS:
                seen.add(value)
                return value
            return _OTHER
