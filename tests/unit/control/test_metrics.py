"""A controller's metrics, read as Prometheus reads them."""

from __future__ import annotations

import threading

import httpx
import prometheus_client
from prometheus_client.parser import text_string_to_metric_families

from tests.unit.control import statuses
from tests.unit.control.pool_kit import at, beat, made
from tests.unit.control.statuses import StatusServer, model, status, sync
from tests.unit.control.test_controller import Method, until
from weightsync.control.controller import WeightSyncController
from weightsync.control.methods.fleet import FleetMethod
from weightsync.control.metrics import ControllerMetrics
from weightsync.observe.metrics import CONTENT_TYPE
from weightsync.types import Version
from weightsync.types.control import ControllerStatus, ValidationRun

PREFIX = "weightsync_controller_"


class Told:
    """Metrics of a status that the test changes."""

    def __init__(self, now: ControllerStatus) -> None:
        self.now = now
        self.metrics = ControllerMetrics(lambda: self.now)

    def samples(self) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
        return {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(self.metrics.render().decode())
            for sample in family.samples
        }

    def value(self, name: str, **labels: str) -> float:
        return self.samples()[PREFIX + name, frozenset(labels.items())]


def test_what_a_status_tells() -> None:
    told = Told(statuses.failed())
    for name, value in (
        ("train_version", 13), ("rollout_version", 12), ("staleness", 1), ("blocked", 1), ("failures_in_a_row", 2),
        ("overdue", 0), ("validating", 0),
    ):  # fmt: skip
        assert told.value(name, model="actor") == value, name
    assert told.value("blocked", model="verifier") == 0
    told.now = statuses.hundred()
    assert [told.value("instances", state=state) for state in ("joining", "live", "suspect", "evicted")] == [
        1,
        97,
        1,
        1,
    ]
    assert told.value("heartbeat_age_max_seconds") == 3.3, "of those that take part: the evicted one's is 61 s"
    assert told.value("lag_max", model="actor") == 1
    told.now = statuses.waiting()
    assert (told.value("barriers"), told.value("barrier_waited_max_seconds")) == (1, 4)
    told.now = statuses.nothing_yet()
    assert told.value("instances", state="evicted") == told.value("heartbeat_age_max_seconds") == 0
    assert told.value("barrier_waited_max_seconds") == told.value("syncs_total", model="default", outcome="failed") == 0


def test_a_fleet_in_which_nobody_answers_is_seen() -> None:
    """Seen red: with its only engine dead, and no trainer, nothing told it from a fleet that is well."""
    pool, _ = made()
    controller = WeightSyncController({"sync_mode": "fully-async"}, FleetMethod(pool), model_tags=("m", "n"))
    told = Told(controller.status())

    def seen() -> tuple[float, ...]:
        told.now = controller.status()
        answering = [told.value("answering", model=model) for model in ("m", "n")]
        return (*answering, told.value("engines_gone"), told.value("instances", state="live"))

    assert seen() == (0, 0, 0, 0), "each is there to be compared, before anybody is"
    pool.decided([at(1)])
    pool.heartbeat(beat("a", at(1)))
    pool.heartbeat(beat("a", at(1)))
    assert seen() == (1, 0, 0, 1), "it has one of the models"
    pool.heartbeat(beat("a", at(1), gone={"e": "can't connect"}))
    assert seen() == (1, 0, 1, 1), "that engine is another model's: a service says no version of one that is gone"
    for _ in range(2):
        pool.heartbeat(beat("a", lacks=("m",), gone={"e": "can't connect"}))
    assert seen() == (0, 0, 1, 0), "it joins"
    controller.close()
    told.now = status()
    assert not any(name == PREFIX + "answering" for name, _ in told.samples()), "without a fleet nobody counts"


def test_each_sync_is_counted_once_when_it_has_ended() -> None:
    bad = sync(13, outcome="failed", seconds=600.0, error="cut")
    told = Told(status(syncs=(sync(13, outcome="running"), sync(12))))
    for _ in range(2):
        assert told.value("syncs_total", model="actor", outcome="served") == 1
        assert told.value("syncs_total", model="actor", outcome="failed") == 0
    told.now = status(syncs=(bad, sync(12)))
    told.metrics.look()
    told.now = status(syncs=(sync(14, before_s=3.0), bad))
    told.metrics.look()
    told.now = status(syncs=(sync(14, "verifier", before_s=1.0), sync(14, before_s=3.0)))
    assert told.value("syncs_total", model="actor", outcome="failed") == 1
    assert told.value("syncs_total", model="actor", outcome="served") == 2
    assert told.value("syncs_total", model="verifier", outcome="served") == 1
    assert told.value("sync_seconds_count", model="actor") == 2, "the failed one has no place in it"
    assert told.value("sync_seconds_sum", model="actor") == 5.2


def test_syncs_of_more_models_than_a_status_shows_are_all_counted() -> None:
    """Seen red: of 24 that ran at once the first four that ended were never among the 20 that were shown."""
    tags = [f"m{index}" for index in range(24)]
    held = {tag: threading.Event() for tag in tags}
    method = Method()

    def does(tag: str, version: Version) -> int:
        assert held[tag].wait(20.0)
        return version.number if tag != "m3" else -1

    method.does = does
    controller = WeightSyncController({"sync_mode": "fully-async"}, method, model_tags=tags, retries_s=())
    metrics = ControllerMetrics(controller.status, controller.records)
    controller.subscribe(lambda tag: metrics.look())
    for tag in tags:
        controller.train_worker_notify_weight_update("w", tag, "r", 1)
    until(lambda: len(controller.records()) == len(tags), "all run")
    for tag in tags:
        held[tag].set()
        until(lambda tag=tag: controller.rollout_service_state(tag).state == "running", "it has ended")  # type: ignore[misc]
    text = metrics.render().decode()
    for tag in tags:
        outcome = "failed" if tag == "m3" else "served"
        assert f'syncs_total{{model="{tag}",outcome="{outcome}"}} 1.0' in text
    found = controller.status().syncs
    assert {record.model_tag for record in found} == set(tags), "the newest of each is there for who asks what failed"
    controller.close()


def test_each_validation_is_counted_once() -> None:
    def validating(version: int) -> ControllerStatus:
        run = ValidationRun(run_id="run", version=version, stands_for=(version,))
        return status(models={"actor": model(version, waiting_for_validation=run)})

    told = Told(status())
    for now, count in (
        (validating(12), 1),
        (validating(12), 1),
        (status(), 1),
        (validating(12), 2),
        (validating(14), 3),
    ):
        told.now = now
        told.metrics.look()
        assert told.value("validations_total", model="actor") == count
    assert told.value("validating", model="actor") == 1


def test_instances_and_errors_are_no_labels() -> None:
    """A fleet of 100, and names that nobody chose: a scrape stays as small as the configuration."""
    few, many = Told(status()), Told(statuses.hundred())
    assert many.samples().keys() == few.samples().keys()
    assert "rollout-63" not in many.metrics.render().decode()
    assert not any(statuses.ERROR in str(key) for key in Told(statuses.failed()).samples())


def test_looks_from_many_threads_count_once_and_hold_nothing_while_they_ask() -> None:
    """Red with `status()` called under the lock: a change told under the controller's own lock waits for a scrape."""
    controllers = threading.Lock()

    def asked() -> ControllerStatus:
        with controllers:
            return status()

    metrics = ControllerMetrics(asked)
    inside = threading.Event()

    def change() -> None:
        with controllers:  # a scrape waits for it in `asked`; the look must not wait for the scrape
            inside.set()
            scrape.start()
            while not metrics._asked:
                pass
            assert metrics._lock.acquire(timeout=10)
            metrics._lock.release()

    scrape = threading.Thread(target=metrics.look, daemon=True)
    changing = threading.Thread(target=change, daemon=True)
    changing.start()
    assert inside.wait(10)
    changing.join(10)
    assert not changing.is_alive()
    scrape.join(10)
    looks = [threading.Thread(target=metrics.look) for _ in range(8)]
    for look in looks:
        look.start()
    for look in looks:
        look.join(10)
    assert b'weightsync_controller_syncs_total{model="actor",outcome="served"} 6.0' in metrics.render()


def test_over_http_and_on_a_registry_of_its_own() -> None:
    with StatusServer(status()) as server:
        answer = httpx.get(f"{server.url}/metrics")
    assert answer.headers["content-type"] == CONTENT_TYPE
    assert PREFIX + "rollout_version" in answer.text
    assert "weightsync_controller" not in prometheus_client.generate_latest().decode()
