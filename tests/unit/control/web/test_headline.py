"""What operators are told in words, and the page's files over HTTP; a browser looks at it in tests/multiproc."""

from __future__ import annotations

import re

import httpx
import pytest

from tests.unit.control import statuses
from tests.unit.control.statuses import HOSTILE, StatusServer, instance, model, status, sync
from weightsync.clients.controller import ControllerClient
from weightsync.control.controller import WeightSyncController
from weightsync.control.method import SyncMethod
from weightsync.control.server import ControllerServer
from weightsync.control.web.headline import brief, facts, seconds_text, short_version, troubled_first
from weightsync.control.web.page import Overview
from weightsync.errors import EngineError, ManifestMismatchError
from weightsync.net.messages import decode
from weightsync.types import Version
from weightsync.types.control import SPANS, BarrierStatus, ControllerStatus, InstanceStatus, RolloutServiceState

TOKEN = "a-token-for-tests-only"


def said(now: ControllerStatus) -> list[str]:
    return [f"{fact.level}: {fact}" for fact in facts(now)]


@pytest.mark.parametrize(
    ("now", "lines"),
    [
        (statuses.nothing_yet(), ["ok: No sync yet"]),
        (status(), ["ok: All 3 instances serve actor 12, verifier 12"]),
        (status(instances=()), ["ok: Rollout serves actor 12, verifier 12"]),
        (status(instances=(instance("only", 12),)), ["ok: only serves actor 12, verifier 12"]),
        (
            status(instances=(instance("a", 12), instance("b", 11), instance("c", 12))),
            ["ok: All 3 instances serve actor (2 serve 12, 1 serve 11), verifier (2 serve 12, 1 serve 11)"],
        ),
        (
            statuses.evicted(),
            [
                "wrong: 1 of 3 instances is evicted: inst-2 (heartbeat late 12.3 s)",
                "ok: 2 of 3 serve actor 12, verifier 12",
            ],
        ),
        (
            status(instances=tuple(instance(f"i{n}", 11, state="evicted", heartbeat_age_s=150) for n in range(5))),
            ["wrong: All 5 instances are evicted: i0, i1, i2 and 2 more (heartbeat 2 min 30 s ago)"],
        ),
        (
            status(instances=(instance("a", 12), instance("b", 12, state="joining", why="it catches up"))),
            [
                "busy: 1 of 2 instances is joining: b (it catches up)",
                "ok: 1 of 2 serve actor 12, verifier 12",
            ],
        ),
        (
            status(instances=(instance("a", 12, heartbeat_age_s=2.5), instance("b", 12, gone=("e1", "e2")))),
            [
                "wrong: b: engine gone: e1, e2 (heard 0.4 s ago)",
                "ok: 1 of 2 serve actor 12, verifier 12 (as of 2.5 s ago)",
            ],
        ),
        (
            statuses.failed(),
            [
                f"wrong: actor: the sync of version 13 failed 2 times, rollout waits (next try in 2.0 s: "
                f"{statuses.ERROR})",
                "ok: All 3 instances serve actor 12, verifier 12",
            ],
        ),
        (
            statuses.moving(),
            [
                "busy: Syncing actor to version 13 (8.0 s so far; inst-1 has 4000 of 16000 MB (25 %), 500 MB/s, "
                "24 s to go (the slowest of 2))",
                "ok: All 3 instances serve actor 12, verifier 12",
            ],
        ),
        (
            status(models={"actor": model(13, 12, state="syncing", num_failed=1)}, instances=(), syncs=()),
            [
                "wrong: actor: the sync of version 13 failed once, rollout goes on with 12 (trying again now)",
                "ok: Rollout serves actor 12",
            ],
        ),
        (
            status(models={"actor": model(14, 12, overdue=True, last_error="cut")}, instances=(), syncs=()),
            [
                "wrong: actor: version 14 could not be synced, rollout goes on with 12 (cut)",
                "ok: Rollout serves actor 12",
            ],
        ),
        (
            status(models={"actor": model(12, 12, state="need_sync", blocked=True, step_waited_s=20.0)},
                   instances=(), syncs=()),
            [
                "busy: actor: rollout waits for the end of a training step, and its sync (for 20 s)",
                "ok: Rollout serves actor 12",
            ],
        ),
        (
            status(models={"actor": model(12, 12, state="need_sync", blocked=True, step_waited_s=362.0)},
                   instances=(), syncs=()),
            [
                "busy: actor: rollout waits for the end of a training step, and its sync (for 6 min 2 s; where its "
                "trainer has died, the next one says so: trajectory_pool_notify_batch_dropped)",
                "ok: Rollout serves actor 12",
            ],
        ),
        (
            status(models={"actor": model(14, 12, num_answering=0)},
                   instances=(instance("a", 12, state="joining", why="nobody has run/12 any more", failed=True),)),
            [
                "wrong: actor: nobody answers (if its trainer has died: the next one publishes what it starts with "
                "before it waits for rollout)",
                "busy: 1 of 1 instances is joining: a (nobody has run/12 any more)",
            ],
        ),
        (
            status(models={"actor": model(12, 12, lost_step="no version came within 60 s")}, instances=(), syncs=()),
            [
                "wrong: actor: no step gives a version, rollout goes on with 12 (no version came within 60 s)",
                "ok: Rollout serves actor 12",
            ],
        ),
        (
            status(models={"actor": model(12, 12, lost_step="no version came within 60 s", blocked=True,
                   state="need_sync", step_waited_s=3.0)}, instances=(), syncs=()),
            [
                "wrong: actor: no step gives a version, rollout waits for the next one (no version came within 60 s)",
                "busy: actor: rollout waits for the end of a training step, and its sync (for 3.0 s)",
                "ok: Rollout serves actor 12",
            ],
        ),
        (
            status(models={"actor": model(12, 12)}, syncs=(),
                   instances=(instance("a", 12, why="the trainer's agent is gone, or cut off", failed=True),)),
            [
                "wrong: a is live with actor 12, and something failed there (the trainer's agent is gone, or cut off)",
                "ok: a serves actor 12",
            ],
        ),
        (statuses.dark(), [
            "wrong: actor: nobody answers",
            "wrong: actor: version 14 could not be synced, nobody answers (cut)",
            "wrong: inst-0: engine gone: e (heard 0.4 s ago)",
            "busy: 1 of 1 instances is joining: inst-0 (engine e is gone)",
        ]),
        (
            status(models={"actor": model(14, 12, num_failed=1, num_answering=0)}, instances=(), syncs=()),
            [
                "wrong: actor: nobody answers",
                "wrong: actor: the sync of version 14 failed once, nobody answers (it is tried again)",
            ],
        ),
        (
            status(models={"actor": model(14, 12, num_answering=0)}, instances=(instance("a", 12, state="joining"),)),
            ["busy: actor: nobody answers", "busy: 1 of 1 instances is joining: a (heartbeat 0.4 s ago)"],
        ),
        (
            ControllerStatus(models={"default": RolloutServiceState(num_answering=0)}),
            ["busy: default: nobody answers", "ok: No sync yet"],
        ),
        (
            statuses.waiting(),
            [
                "busy: Waiting for verifier to publish 13 (4.0 s of 60 s)",
                "busy: Syncing actor to version 13 (4.0 s so far)",
                "ok: All 3 instances serve actor 12, verifier 12",
            ],
        ),
        (
            status(models={"actor": model(12, state="need_sync", blocked=True)}, instances=()),
            [
                "busy: actor: rollout waits for the end of a training step, and its sync",
                "ok: Rollout serves actor 12",
            ],
        ),
    ],
)  # fmt: skip
def test_sentences_of_each_state_the_worst_first(now: ControllerStatus, lines: list[str]) -> None:
    assert said(now) == lines


def test_a_sync_that_failed_is_wrong_until_one_of_the_model_is_good() -> None:
    bad = sync(12, outcome="failed", error="cut")
    assert said(status(syncs=(bad,)))[0] == "wrong: actor: the sync of version 12 failed (cut)"
    assert [fact.level for fact in facts(status(syncs=(sync(13), bad)))] == ["ok"]
    assert [fact.level for fact in facts(status(syncs=(sync(13, "verifier"), bad)))] == ["wrong", "ok"]


def test_a_set_that_waits_longer_than_it_may_is_wrong() -> None:
    late = BarrierStatus(versions={"a": 3, "b": None}, waits_for=("b",), version=3, waited_s=61, timeout_s=60)
    assert said(status(barriers=(late,)))[0] == "wrong: b did not publish 3 in time (61 s of 60 s)"


def test_the_troubled_come_first_and_then_the_names_as_people_count() -> None:
    names = [each.instance_id for each in troubled_first(statuses.hundred().instances)]
    assert names[:7] == ["rollout-63", "rollout-17", "rollout-40", "rollout-88", "rollout-0", "rollout-1", "rollout-2"]
    assert names.index("rollout-9") + 1 == names.index("rollout-10")
    assert len(names) == 100
    digits = [InstanceStatus(instance_id=name, url="", state="live") for name in ("9" * 5000, "", "-", "٣", "²")]
    assert len(troubled_first(digits)) == 5


def test_versions_and_seconds_in_short() -> None:
    here = model(3)
    assert short_version(None, here) == "none"
    assert short_version(f"{statuses.RUN}/12", here) == "12"
    assert short_version("other/12", here) == "other/12"
    assert short_version("other/12", None) == "other/12"
    assert [seconds_text(value) for value in (0.04, 9.94, 9.96, 119, 120, 3600 * 2 + 65)] == [
        "0.0 s", "9.9 s", "10 s", "119 s", "2 min 0 s", "2 h 1 min",
    ]  # fmt: skip


def test_the_page_is_four_files_that_take_nothing_from_elsewhere() -> None:
    with StatusServer(status()) as server, httpx.Client(base_url=server.url) as client:
        for path, kind in (
            ("/", "text/html"),
            ("/page.js", "text/javascript"),
            ("/plots.js", "text/javascript"),
            ("/page.css", "text/css"),
        ):
            answer = client.get(path)
            assert (answer.status_code, answer.headers["content-type"]) == (200, f"{kind}; charset=utf-8")
            assert answer.headers["x-content-type-options"] == "nosniff"
            policy = dict(part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";"))
            assert policy["default-src"] == policy["form-action"] == policy["frame-ancestors"] == "'none'"
            assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
            assert not re.search(r"https?://|innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", answer.text)
        assert not re.search(r"<script>|<style|style=|onclick|onload", client.get("/").text)
        got = decode(client.get("/overview").content, Overview, what="it")
    assert got.status == status()
    assert got.facts == facts(status())
    assert got.spans == SPANS


def test_the_colours_are_as_many_as_the_names() -> None:
    with StatusServer(status()) as server:
        text = httpx.get(f"{server.url}/page.css").text
    assert {f".span-{index}" for index in range(len(SPANS))} <= set(re.findall(r"\.span-\d+", text))


def test_files_need_no_token_and_what_is_told_does() -> None:
    with StatusServer(statuses.hostile(), token=TOKEN) as server, httpx.Client(base_url=server.url) as client:
        for path in ("/", "/page.js", "/plots.js", "/page.css"):
            answer = client.get(path)
            assert answer.status_code == 200
            assert HOSTILE not in answer.text
        for path in ("/overview", "/status", "/metrics", "/page.jsx", "/index.html", "/page.js/"):
            assert client.get(path).status_code == 401, path
        assert server.asked == 0
        assert client.get("/overview", headers={"Authorization": f"Bearer {TOKEN}"}).status_code == 200


class Fails(SyncMethod):
    """A method that can't."""

    def sync_weights(self, model_tag: str, version: Version) -> int:
        raise RuntimeError("the disk is full")

    def evict_failed(self, model_tag: str) -> list[str]:
        return []


def test_a_real_controller_has_this_face() -> None:
    controller = WeightSyncController({"sync_mode": "sync"}, Fails(), retries_s=(60.0,))
    server = ControllerServer(controller, token=TOKEN)
    url = server.start()
    client = ControllerClient(url, token=TOKEN)
    try:
        client.train_worker_notify_weight_update("w", "default", "run", 1, wait_s=20.0)
        with httpx.Client(base_url=url, headers={"Authorization": f"Bearer {TOKEN}"}) as http:
            got = decode(http.get("/overview").content, Overview, what="it")
            metrics = http.get("/metrics").text
        assert [fact.level for fact in got.facts] == ["wrong", "ok"]
        assert got.facts[0].text == "default: the sync of version 1 failed once, rollout waits"
        assert "the disk is full" in got.facts[0].detail
        assert 'weightsync_controller_failures_in_a_row{model="default"} 1.0' in metrics
        assert "<title>weightsync controller</title>" in httpx.get(url).text, "no token was sent"
        assert httpx.get(f"{url}/metrics").status_code == 401
    finally:
        client.close()
        server.close()
        controller.close()


def test_an_error_keeps_its_tensors_name() -> None:
    """Seen red: a wrong shape was told of without the tensor that has it."""
    error = ManifestMismatchError("(500, 128) is sent", parameter="lm_head.weight", peer="vllm-0", state_left="old")
    assert brief(f"host-0: {error}; host-1: {EngineError('cut', peer='a')}", 100) == (
        "host-0: (500, 128) is sent (lm_head.weight); host-1: cut"
    )
