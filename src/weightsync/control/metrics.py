"""ControllerMetrics: what a controller's `/metrics` says, on a registry of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import get_args, get_type_hints

from prometheus_client import CollectorRegistry, Counter, Histogram, Metric, generate_latest
from prometheus_client.core import GaugeMetricFamily

from weightsync.types.control import ControllerStatus, InstanceStatus, RolloutServiceState, SyncRecord

_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_STATES: tuple[str, ...] = get_args(get_type_hints(InstanceStatus)["state"])
_OUTCOMES = ("served", "failed")

_OF_MODELS: tuple[tuple[str, str, Callable[[RolloutServiceState], float]], ...] = (
    ("train_version", "Number of the newest version trained.", lambda model: model.train_model_version),
    ("rollout_version", "Number of the version that rollout serves; -1: none of the run.",
     lambda model: model.rollout_model_version),
    ("staleness", "Versions that rollout is behind.", lambda model: model.staleness),
    ("blocked", "1 while rollout has to wait.", lambda model: model.blocked),
    ("overdue", "1 while a version is not tried any more, after all retries.", lambda model: model.overdue),
    ("failures_in_a_row", "Syncs that have failed since the last good one, or since giving up.",
     lambda model: model.num_failed),
    ("validating", "1 while a validation runs.", lambda model: model.waiting_for_validation is not None),
)  # fmt: skip


class ControllerMetrics:
    """Reads a controller's status when it is asked; counts what a status forgets: syncs and validations that ended.

    Labels are model tags, which the configuration bounds, and words of ours; instances are counted, never named.

    Args:
        status: the controller's; called at each `look` and each `render`.
        records: the controller's syncs, of which a status shows the last; None: no more than those.
    """

    def __init__(
        self, status: Callable[[], ControllerStatus], records: Callable[[], Iterable[SyncRecord]] | None = None
    ) -> None:
        self._status = status
        self._records = records
        self._lock = threading.Lock()
        self._asked = self._seen = 0
        self._counted: set[tuple[object, ...]] = set()
        self._validating: dict[str, tuple[str | None, int]] = {}
        own = self._registry = CollectorRegistry()
        self._syncs = Counter(
            "weightsync_controller_syncs", "Syncs that ended, by outcome: served, failed.", ["model", "outcome"],
            registry=own,
        )  # fmt: skip
        self._sync = Histogram(
            "weightsync_controller_sync_seconds", "Seconds of each good sync.", ["model"], buckets=_BUCKETS_S,
            registry=own,
        )  # fmt: skip
        self._validations = Counter(
            "weightsync_controller_validations", "Validations that began.", ["model"], registry=own
        )
        own.register(_Now(status))

    def look(self) -> None:
        """Counts what has ended since the last look. Thread-safe. Call it after each change of a model
        (`WeightSyncController.subscribe`): what leaves the records between two looks is counted by nobody.
        """
        with self._lock:
            self._asked += 1
            mine = self._asked
        # without the lock: it takes the controller's, and a change may be told under these
        now = self._status()
        records = now.syncs if self._records is None else self._records()
        with self._lock:
            if mine > self._seen:  # else somebody who asked later was here first, and has seen as much
                self._seen = mine
                self._count(now, records)

    def _count(self, now: ControllerStatus, records: Iterable[SyncRecord]) -> None:
        ended = {
            (record.model_tag, record.run_id, record.version, record.started_s): record
            for record in records
            if record.outcome in _OUTCOMES
        }
        for key, record in ended.items():
            if key not in self._counted:
                self._syncs.labels(record.model_tag, record.outcome).inc()
                if record.outcome == "served":
                    self._sync.labels(record.model_tag).observe(record.seconds)
        self._counted = set(ended)
        for tag, model in now.models.items():
            for outcome in _OUTCOMES:
                self._syncs.labels(tag, outcome)
            self._sync.labels(tag)
            validations = self._validations.labels(tag)
            running = model.waiting_for_validation
            if running is None:
                self._validating.pop(tag, None)
            elif self._validating.get(tag) != (running.run_id, running.version):
                self._validating[tag] = (running.run_id, running.version)
                validations.inc()

    def render(self) -> bytes:
        """All of it, in Prometheus' text format; see `observe.metrics.CONTENT_TYPE`."""
        self.look()
        return generate_latest(self._registry)


class _Now:
    """What a status tells by itself; prometheus-client calls it at each scrape."""

    def __init__(self, status: Callable[[], ControllerStatus]) -> None:
        self._status = status

    def describe(self) -> Iterator[Metric]:
        """Nothing: without it the registry would ask for a status while the controller is being made."""
        yield from ()

    def collect(self) -> Iterator[Metric]:
        def gauge(name: str, text: str, label: str | None = None) -> GaugeMetricFamily:
            return GaugeMetricFamily(f"weightsync_controller_{name}", text, labels=[label] if label else None)

        now = self._status()
        for name, text, of in _OF_MODELS:
            family = gauge(name, text, "model")
            for tag, model in now.models.items():
                family.add_metric([tag], float(of(model)))
            yield family
        instances = gauge("instances", "Rollout services by state.", "state")
        for state in _STATES:
            instances.add_metric([state], sum(instance.state == state for instance in now.instances))
        yield instances
        taking_part = [instance for instance in now.instances if instance.state in ("live", "suspect")]
        answering = gauge("answering", "Rollout services that may answer with a model.", "model")
        for tag, model in now.models.items():
            if model.num_answering is not None:
                answering.add_metric([tag], model.num_answering)
        yield answering
        gone = gauge("engines_gone", "Engines that do not answer their rollout service.")
        gone.add_metric([], sum(len(instance.gone) for instance in now.instances))
        yield gone
        lag = gauge("lag_max", "Versions that the last of those that take part is behind.", "model")
        for tag in now.models:
            lag.add_metric([tag], max((instance.lag.get(tag) or 0 for instance in taking_part), default=0))
        yield lag
        age = gauge("heartbeat_age_max_seconds", "Seconds since the heartbeat that is longest ago, of those.")
        age.add_metric([], max((instance.heartbeat_age_s for instance in taking_part), default=0.0))
        yield age
        waiting = gauge("barriers", "Sets of models that wait for one of theirs.")
        waiting.add_metric([], len(now.barriers))
        yield waiting
        waited = gauge("barrier_waited_max_seconds", "Seconds that the longest of them has waited.")
        waited.add_metric([], max((barrier.waited_s for barrier in now.barriers), default=0.0))
        yield waited
