"""vLLM's server as users run it: the oracle, and every failure of a sync. One server for all."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.engines.vllm_faults import arm, armed
from tests.engines.vllm_support import (
    NEEDS_PACKING,
    PACKS,
    SAME,
    Oracle,
    Server,
    build_model,
    distance,
    nudge,
    save_checkpoint,
    train_step,
)
from tests.engines.vllm_trainers import LAST_CHUNK, Trainers
from tests.multiproc.pull_kit import wait_until
from weightsync.cli import app
from weightsync.handles.by_url import engine_at
from weightsync.handles.vllm import VllmEngine, VllmHttpApi
from weightsync.types import AbortRequest, DescribeRequest, EngineOp, EngineReply

pytestmark = pytest.mark.timeout(600)
Serves = Callable[[int], None]


def describe(server: Server) -> EngineReply:
    """What a stranger's handle sees."""
    handle = VllmEngine(VllmHttpApi(server.url))
    try:
        return handle.call(EngineOp.DESCRIBE, DescribeRequest(), timeout_s=5)
    finally:
        handle.close()


def test_a_look_at_a_healthy_server_leaves_no_error_in_its_log(whole: Trainers, vllm_server: Server) -> None:
    """Seen to fail: fifty lines of tracebacks for each, in worker, core and server."""
    before = (vllm_server.folder / "vllm.log").stat().st_size
    for _ in range(3):
        assert describe(vllm_server).engine_id
    with (vllm_server.folder / "vllm.log").open(encoding="utf-8", errors="replace") as log:
        log.seek(before)
        told = log.read()
    assert "Traceback" not in told
    assert "weightsync-error" not in told


def test_one_without_the_lease_middleware_says_that_it_looks_at_no_lease(vllm_server: Server) -> None:
    with contextlib.closing(engine_at(f"vllm+{vllm_server.url}", leased=True)) as handle:
        for _ in range(2):
            assert handle.call(EngineOp.DESCRIBE, DescribeRequest(), timeout_s=5).leased is False
    assert describe(vllm_server).leased is None, "nobody asked"


def idle(server: Server) -> None:
    """No pause and no update was left behind: vLLM takes a start, and the finish that belongs to it."""
    assert server.get("/is_paused") == {"is_paused": False}
    assert server.http.post("/start_weight_update").status_code == 200
    assert server.http.post("/finish_weight_update", json={}).status_code == 200


def test_the_oracle_over_http(trainers: Trainers, vllm_server: Server, serves: Serves) -> None:
    """A trainer that takes real optimizer steps: after each sync the server's log-probabilities are those of a fresh
    engine that loaded the same step's checkpoint, and not those of the step before.
    """
    trainers.good(0)
    serves(0)
    for steps in (1, 2, 1):
        outcome = trainers.good(steps)
        assert ("parameters in another form, packed or quantised" in outcome["unprovable"].get("vllm", "")) == PACKS
        assert outcome["num_chunks"] == LAST_CHUNK + 1
        serves(steps)
        assert vllm_server.get("/weight_info") == {"weight_version": outcome["version"]}
        reply = describe(vllm_server)
        assert (str(reply.version), reply.serving, reply.world_size) == (outcome["version"], True, 1)
    idle(vllm_server)


def test_changes_are_pushed_into_layers_that_are_packed(
    trainers: Trainers, vllm_server: Server, serves: Serves, oracle: Oracle, tmp_path: Path
) -> None:
    """Though live weights can't be proved; where the CPU packs none, they are. A check between two of them changes
    nothing. Seen to fail: each version went out in full, as none was proved; behind a check the next one did.
    """
    setup = {"changes": True}
    first = trainers.good(1, setup=setup)
    assert first["why_full"] == "nothing was pushed before"
    serves(1)
    model = build_model()
    train_step(model, 1)
    nudge(model)
    nudged = save_checkpoint(tmp_path / "nudged", model)
    for few in (True, False, True, False):
        said = trainers.good(1, setup=setup, few=few)
        assert (said["num_deltas"], said["why_full"], list(said["unprovable"])) == (1, None, ["vllm"] * PACKS), said
        if few:
            assert distance(vllm_server.logprobs(), oracle.logprobs(nudged)) <= SAME
        else:
            serves(1)
    words = ["check", "--model", str(nudged), "--engine", f"vllm+{vllm_server.url}", "--anyway"]
    told = CliRunner().invoke(app, words)
    assert told.exit_code == 0, told.output
    assert describe(vllm_server).accepts == ("full", "patch"), "a check leaves no trace"
    said = trainers.good(1, setup=setup, few=True)
    assert (said["num_deltas"], said["why_full"]) == (1, None), said
    idle(vllm_server)


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ({"at": "begin", "do": "raise"}, "EngineError"),
        ({"at": "load", "chunk": 3, "do": "raise"}, "LoadError"),
        ({"at": "receive", "do": "corrupt"}, "DigestMismatchError"),
        ({"at": "commit", "do": "raise"}, "LoadError"),
    ],
    ids=["begin", "chunk", "bytes", "commit"],
)
def test_a_failure_leaves_the_old_version_served_and_the_next_sync_works(
    whole: Trainers, vllm_server: Server, serves: Serves, fault: dict[str, Any], error: str
) -> None:
    """The error comes typed through vLLM's executor and HTTP, and no "already updating" stays."""
    arm(vllm_server.folder, fault)
    outcome = whole.sync(2)
    assert not armed(vllm_server.folder)
    assert outcome["type"] == "SyncFailedError", outcome
    assert outcome["causes"] == {"vllm": error}, outcome
    assert outcome["seconds"] < 8
    assert fault["do"] != "raise" or "planted" in outcome["text"]
    serves(1)
    idle(vllm_server)
    whole.good(2)
    serves(2)


@pytest.mark.skipif(not PACKS, reason=NEEDS_PACKING)
def test_a_reload_that_breaks_half_way_is_never_served(whole: Trainers, vllm_server: Server, serves: Serves) -> None:
    """Live weights are lost in part: vLLM stays paused and says so, until the next sync has put whole ones there.

    Seen red with the reload not closed at the abort.
    """
    arm(vllm_server.folder, {"at": "reload", "do": "raise"})
    outcome = whole.sync(2)
    assert outcome["causes"] == {"vllm": "LoadError"}, outcome
    assert vllm_server.get("/is_paused") == {"is_paused": True}
    assert describe(vllm_server).serving is False
    whole.good(1)
    assert describe(vllm_server).serving is True
    serves(1)
    idle(vllm_server)


@pytest.mark.parametrize("phase", ["begin", "update", "stage", "pause", "commit"])
def test_a_trainer_that_is_killed_leaves_an_engine_for_the_next(
    whole: Trainers, vllm_server: Server, serves: Serves, phase: str
) -> None:
    """kill -9 right after vLLM answered that step, or with chunks in flight. A new trainer's run takes over.

    Seen red with a begin that does not end what vLLM still holds for active.
    """
    fate: dict[str, Any] = {"kills": 0} if phase == "update" else {"dies_after": phase}
    whole.dies(2, **fate)
    paused = vllm_server.get("/is_paused")["is_paused"]
    assert paused is (phase in ("pause", "commit")), "vLLM's pause has no lease, as the docs say"
    if not paused:
        serves(1)
    now = 1 if phase == "commit" else 2  # other weights than those that are served
    outcome = whole.good(now)
    serves(now)
    assert vllm_server.get("/weight_info") == {"weight_version": outcome["version"]}
    idle(vllm_server)


def test_what_a_dead_trainer_left_paused_says_so_when_its_session_has_ended(
    whole: Trainers, vllm_server: Server, serves: Serves
) -> None:
    """By its deadline: until then nobody can tell it from a trainer that lives."""
    whole.dies(2, dies_after="pause")
    wait_until(lambda: describe(vllm_server).left_paused, "the session has ended, and the pause has not", 60.0)
    whole.good(2)
    serves(2)
    assert describe(vllm_server).left_paused is False
    idle(vllm_server)


def test_a_new_run_ends_the_pause_of_a_dead_one_before_it_syncs(
    whole: Trainers, vllm_server: Server, serves: Serves
) -> None:
    """The dead trainer had committed, and nobody had said so: the new one's init serves and names that version.

    Seen red with an init that does not resume.
    """
    whole.dies(2, dies_after="commit")
    refused = whole.sync(2, setup={"dtype": None})  # a sync that gets as far as begin
    assert refused["causes"] == {"vllm": "ManifestMismatchError"}, refused
    assert "bfloat16" in refused["text"], "vLLM would convert float32 without a word"
    serves(2)
    assert vllm_server.get("/weight_info") == {"weight_version": str(describe(vllm_server).version)}
    idle(vllm_server)


def test_in_place(whole: Trainers, vllm_server: Server, serves: Serves) -> None:
    """Chunks go into live weights: paused from the first one, half-loaded after a failure, whole after the next."""
    in_place = {"in_place": True}
    whole.good(2, setup=in_place)
    serves(2)
    arm(vllm_server.folder, {"at": "load", "chunk": 5, "do": "raise"})
    outcome = whole.sync(1, setup=in_place)
    assert outcome["causes"] == {"vllm": "LoadError"}, outcome
    reply = describe(vllm_server)
    assert (reply.serving, vllm_server.get("/is_paused")) == (False, {"is_paused": True})
    whole.good(1, setup=in_place)
    serves(1)
    whole.good(2)  # staged again
    serves(2)
    idle(vllm_server)


def test_strangers_change_nothing(whole: Trainers, vllm_server: Server, serves: Serves) -> None:
    """While a session is open: another handle's describe and abort, and vLLM's bare finish."""
    whole.send(2, waits_at=5)
    assert whole.child.recv(60) == "session is open"
    stranger = VllmEngine(VllmHttpApi(vllm_server.url))
    assert stranger.call(EngineOp.DESCRIBE, DescribeRequest(), timeout_s=5).serving
    stranger.call(EngineOp.ABORT, AbortRequest(session="another", reason="confused"), timeout_s=5)
    stranger.close()
    refused = vllm_server.http.post("/finish_weight_update", json={})
    assert refused.status_code == 500
    assert "has not committed" in refused.text
    whole.child.conn.send("go on")
    assert whole.child.recv(60)["type"] == "ok"
    serves(2)
    idle(vllm_server)


def test_a_server_that_is_killed_is_a_typed_error_and_rejoins(
    whole: Trainers, vllm_server: Server, serves: Serves
) -> None:
    """kill -9 of the whole server with chunks in flight; the same trainer then syncs to its successor."""
    try:
        outcome = whole.sync(2, kills=vllm_server.pid)
        assert outcome["type"] in ("SyncFailedError", "TransferError"), outcome
        assert outcome["seconds"] < 12
        gone = whole.sync(2)
        assert gone["type"] == "NoEnginesError", gone
    finally:
        vllm_server.kill()
        vllm_server.start()
        vllm_server.wait_until_ready()
    serves(0)
    assert describe(vllm_server).version is None
    whole.good(2)
    serves(2)
