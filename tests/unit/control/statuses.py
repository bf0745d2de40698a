"""What a controller may answer, in every state that its page has to show."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from starlette.responses import Response

from weightsync.control.metrics import ControllerMetrics
from weightsync.control.web.page import OPEN_PATHS, add_page
from weightsync.net.messages import encode
from weightsync.net.server import Api, ServerSettings, ServerThread
from weightsync.observe.metrics import CONTENT_TYPE
from weightsync.types.control import (
    BarrierStatus,
    ControllerStatus,
    InstanceStatus,
    RolloutServiceState,
    SyncRecord,
    SyncSpan,
    ValidationRun,
)
from weightsync.types.progress import TransferProgress

NOW_S = 1_790_000_000.0
RUN = "run-a1b2c3"
HOSTILE = '<img src=x onerror="document.title=1">'
ERROR = "EngineError: the loader refused layer.7.mlp: shape (4096, 11008) was announced, (4096, 14336) is there"


def model(version: int, served: int | None = None, **more: Any) -> RolloutServiceState:
    served = version if served is None else served
    return RolloutServiceState(
        run_id=RUN, train_model_version=version, rollout_model_version=served, staleness=version - served, **more
    )


def instance(name: str, version: int, *, lag: int = 0, run: str = RUN, **more: Any) -> InstanceStatus:
    words: dict[str, Any] = {"state": "live", "heartbeat_age_s": 0.4, "lease_left_s": 4.6, **more}
    return InstanceStatus(
        instance_id=name,
        url=f"http://10.0.0.7:8{len(name):03d}",
        models={"actor": f"{run}/{version}", "verifier": f"{run}/{version}"},
        lag={"actor": lag, "verifier": lag},
        **words,
    )


def sync(version: int, tag: str = "actor", *, instances: int = 3, before_s: float = 10.0, **more: Any) -> SyncRecord:
    words: dict[str, Any] = {"outcome": "served", "seconds": 2.6, **more}
    spans = [
        SyncSpan(name="trainer", start_s=-0.5, seconds=0.5, who=tag),
        SyncSpan(name="barrier", start_s=0.0, seconds=0.4, who="verifier"),
    ]
    for index in range(instances):
        late = 0.2 * (index % 4)
        name = f"inst-{index}"
        spans += [
            SyncSpan(name="agent", start_s=0.4, seconds=0.1 + late / 4, who=name),
            SyncSpan(name="transfer", start_s=0.5 + late / 4, seconds=0.8 + late, who=name),
            SyncSpan(name="load", start_s=1.3 + late * 1.25, seconds=0.3, who=name),
        ]
    spans += [SyncSpan(name="pause", start_s=2.3, seconds=0.1), SyncSpan(name="commit", start_s=2.4, seconds=0.2)]
    return SyncRecord(
        model_tag=tag, run_id=RUN, version=version, started_s=NOW_S - before_s, spans=tuple(spans), **words
    )


def status(**more: Any) -> ControllerStatus:
    words: dict[str, Any] = {
        "models": {"actor": model(12), "verifier": model(12)},
        "sync_mode": {"actor": "batch-async", "verifier": "batch-async"},
        "instances": tuple(instance(f"inst-{index}", 12) for index in range(3)),
        "syncs": tuple(sync(version, before_s=10.0 * (13 - version)) for version in range(12, 6, -1)),
        "now_s": NOW_S,
        **more,
    }
    return ControllerStatus(**words)


def nothing_yet() -> ControllerStatus:
    return ControllerStatus(models={"default": RolloutServiceState()}, sync_mode={"default": "sync"}, now_s=NOW_S)


def hundred() -> ControllerStatus:
    instances = [instance(f"rollout-{index}", 12) for index in range(100)]
    instances[17] = instance("rollout-17", 11, lag=1, state="suspect", heartbeat_age_s=3.3, lease_left_s=1.7)
    instances[40] = instance("rollout-40", 9, run="run-old", lag=0, state="joining", lease_left_s=0.0,
                             why="it catches up to actor 12")  # fmt: skip
    instances[63] = instance("rollout-63", 11, lag=1, state="evicted", heartbeat_age_s=61.0, lease_left_s=0.0,
                             why="heartbeat late 61 s")  # fmt: skip
    instances[88] = instance("rollout-88", 11, lag=1, why="its commit of actor 12 was told again")
    syncs = tuple(sync(version, instances=100, before_s=10.0 * (13 - version)) for version in range(12, 0, -1))
    validated = model(12, waiting_for_validation=ValidationRun(run_id=RUN, version=12, stands_for=(12,)))
    return status(models={"actor": validated, "verifier": model(12)}, instances=tuple(instances), syncs=syncs)


def failed() -> ControllerStatus:
    retry = SyncSpan(name="retry", start_s=600.0, seconds=4.0)
    bad = sync(13, outcome="failed", seconds=600.0, error=ERROR, before_s=602.0)
    bad = SyncRecord(**{name: getattr(bad, name) for name in bad.__struct_fields__} | {"spans": (*bad.spans, retry)})
    late = model(
        13, 12, state="need_sync", blocked=True, pool_locked=True, num_failed=2, retry_in_s=2.0, last_error=ERROR
    )
    return status(models={"actor": late, "verifier": model(12)}, syncs=(bad, *status().syncs))


def evicted() -> ControllerStatus:
    gone = instance("inst-2", 11, lag=1, state="evicted", heartbeat_age_s=12.3, lease_left_s=0.0,
                    why="heartbeat late 12.3 s")  # fmt: skip
    return status(instances=(*status().instances[:2], gone))


def dark() -> ControllerStatus:
    """The only instance has no engine any more, and the trainer is gone."""
    alone = instance("inst-0", 12, state="joining", lease_left_s=0.0, why="engine e is gone", gone=("e",))
    late = model(14, 12, overdue=True, last_error="cut", num_answering=0)
    return status(models={"actor": late}, instances=(alone,), syncs=())


def waiting() -> ControllerStatus:
    barrier = BarrierStatus(
        versions={"actor": 13, "verifier": 12}, waits_for=("verifier",), version=13, waited_s=4.0, timeout_s=60.0
    )
    now = SyncRecord(
        model_tag="actor", run_id=RUN, version=13, started_s=NOW_S - 4.0, seconds=4.0, outcome="running",
        spans=(SyncSpan(name="barrier", start_s=0.0, seconds=4.0, who="verifier"),),
    )  # fmt: skip
    syncing = model(13, 12, state="syncing", blocked=True, pool_locked=True)
    return status(models={"actor": syncing, "verifier": model(12)}, barriers=(barrier,), syncs=(now, *status().syncs))


def moving() -> ControllerStatus:
    """A sync under way that takes long: two instances fetch, and one of them is slow."""
    slow = TransferProgress(done_bytes=4_000_000_000, total_bytes=16_000_000_000, seconds=8.0)
    fast = TransferProgress(done_bytes=12_000_000_000, total_bytes=16_000_000_000, seconds=8.0)
    short = TransferProgress(done_bytes=1_000_000_000, total_bytes=16_000_000_000, seconds=0.5)
    instances = (
        instance("inst-0", 12, lag=1, progress={"actor": fast}),
        instance("inst-1", 12, lag=1, progress={"actor": slow}),
        instance("inst-2", 12, lag=1, progress={"actor": short}),
    )
    now = SyncRecord(
        model_tag="actor", run_id=RUN, version=13, started_s=NOW_S - 8.0, seconds=8.0, outcome="running",
        spans=tuple(SyncSpan(name="transfer", start_s=0.1, seconds=7.9, who=f"inst-{n}") for n in range(3)),
    )  # fmt: skip
    models = {"actor": model(13, 12, state="syncing"), "verifier": model(12)}
    return status(models=models, instances=instances, syncs=(now, *status().syncs))


def plotted() -> ControllerStatus:
    """Eighteen versions of which one took 40 s and one failed, in bytes that differ."""
    syncs = []
    for version in range(18, 0, -1):
        slow = 40.0 if version == 11 else 1.0 + 0.1 * (version % 5)
        nbytes = 16_000_000_000 if version % 6 == 1 else 190_000_000 + 9_000_000 * (version % 4)
        spans = (
            SyncSpan(name="transfer", start_s=0.1, seconds=slow - 0.4, who="inst-0", nbytes=nbytes),
            SyncSpan(name="transfer", start_s=0.1, seconds=slow - 0.6, who="inst-1", nbytes=nbytes),
            SyncSpan(name="pause", start_s=slow - 0.2, seconds=0.05),
            SyncSpan(name="commit", start_s=slow - 0.2, seconds=0.2),
        )
        failed = version == 6
        record = SyncRecord(
            model_tag="actor", run_id=RUN, version=version, started_s=NOW_S - 60.0 * (19 - version), seconds=slow,
            outcome="failed" if failed else "served", error=ERROR if failed else None, spans=spans,
        )  # fmt: skip
        syncs.append(record)
    return status(models={"actor": model(18)}, syncs=tuple(syncs))


def hostile() -> ControllerStatus:
    """Names and errors that would run as markup, and long ones."""
    bad = InstanceStatus(
        instance_id=HOSTILE, url="javascript:alert(1)", state="evicted", models={HOSTILE: HOSTILE}, why=HOSTILE * 3
    )
    long = instance("9" * 5000, 12, why="a-word-without-a-blank-" * 40)
    record = SyncRecord(
        model_tag=HOSTILE, run_id=HOSTILE, version=3, started_s=NOW_S - 5, seconds=1.0, outcome="failed",
        error=HOSTILE, spans=(SyncSpan(name=HOSTILE, start_s=0.0, seconds=1.0, who=HOSTILE),),
    )  # fmt: skip
    models = {HOSTILE: model(3, 2, last_error=HOSTILE, num_failed=1, state="need_sync"), "__proto__": model(3)}
    return ControllerStatus(
        models=models, sync_mode={HOSTILE: HOSTILE}, instances=(bad, bad, long), syncs=(record,), now_s=NOW_S,
        barriers=(BarrierStatus(versions={HOSTILE: None}, waits_for=(HOSTILE,), version=3, waited_s=70, timeout_s=60),),
    )  # fmt: skip


class StatusServer:
    """A controller's face that answers what the test wants, with the page, `/status` and `/metrics`."""

    def __init__(self, now: ControllerStatus, *, token: str | None = None, port: int = 0) -> None:
        self.now = now
        self.asked = 0
        self.metrics = ControllerMetrics(lambda: self.now)

        async def status() -> Response:
            return Response(encode(self._status()), media_type="application/json")

        async def metrics() -> Response:
            return Response(self.metrics.render(), media_type=CONTENT_TYPE)

        self.app = Api("a controller's face", ("GET", "/status", status), ("GET", "/metrics", metrics))
        add_page(self.app, self._status)
        self.server = ServerThread(self.app, ServerSettings(token=token, port=port), open_paths=OPEN_PATHS)

    def _status(self) -> ControllerStatus:
        self.asked += 1
        return self.now

    def __enter__(self) -> StatusServer:
        self.url = self.server.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.server.close()
