"""A rollout service among agents and engines that lie, stand still, come back, or can't be asked."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import torch

from tests.standins.threads import fail_starts
from tests.unit.host.service_kit import MODEL, NEWS, Agent, Engine, World, wait_until, world
from weightsync.clients.host import RolloutClient
from weightsync.errors import (
    ConfigError,
    EngineUnreachableError,
    InvalidRequestError,
    NotPublishedError,
    NotRegisteredError,
    StateError,
    SyncFailedError,
    TransferAbortedError,
    VersionError,
)
from weightsync.handles.fanout import in_thread
from weightsync.host import commit_gate, model_updater
from weightsync.host import service as service_module
from weightsync.host.fleet_model import FleetModel
from weightsync.host.relay import Relay, relay_of
from weightsync.host.service import RolloutService
from weightsync.host.settings import RolloutConfig
from weightsync.host.staged_version import StagedVersion
from weightsync.memory import ServingLease
from weightsync.net import routes
from weightsync.net.places import Places
from weightsync.types import Deadline, EngineOp, EngineReply, EngineRequest, Version
from weightsync.types.fleet import ModelVersion, PrepareRequest

__all__ = ["world"]

OLD, NEW, BAD = "http://old:1", "http://new:1", "http://bad:1"


def loses_an_answer(engine: Engine, op: EngineOp) -> threading.Event:
    """To the next such step; set: it was lost."""
    answer, lost = engine.call, threading.Event()

    def call(step: EngineOp, request: EngineRequest, *, timeout_s: float) -> EngineReply:
        reply = answer(step, request, timeout_s=timeout_s)
        if step is op and not lost.is_set():
            lost.set()
            raise EngineUnreachableError("it was cut off", peer=engine.engine_id)
        return reply

    engine.call = call  # type: ignore[method-assign]
    return lost


# --- agents ---


def test_an_agent_that_can_t_be_asked_keeps_no_run_out(world: World) -> None:
    """Whatever asking it raises: the next run is taken up."""
    world.agents = {OLD: Agent("r1", 1), NEW: Agent("r2", 0), BAD: Agent("r666", 1)}
    world.agents[BAD].raises = UnicodeError("label empty or too long")
    world.serve("a")
    world.register(BAD)
    world.notify(BAD, "r666", 1, wait_s=None)
    wait_until(lambda: world.agents[BAD].num_asked > 1, "it is asked")
    world.register(NEW)
    assert world.notify(NEW, "r2", 0).run_id == "r2"


def test_a_service_that_was_there_first_catches_up_without_a_word(world: World) -> None:
    """Its agent can't be reached at first, which its status says; once it answers, its version is served. From then on
    the service waits for notifications. Seen to fail: one question at the start, and nothing ever after.
    """
    world.agents = {OLD: Agent("r1", 1)}
    world.agents[OLD].raises = EngineUnreachableError("nobody there")
    world.serve("a")
    wait_until(lambda: "nobody there" in world.status.sender_errors.get(OLD, ""), "its status says why")
    world.agents[OLD].raises = None
    world.skip(10.0)
    wait_until(lambda: world.serves("a", "r1/1"), "it is served")
    assert world.status.sender_errors == {}
    wait_until(lambda: world.asks_nobody, "it knows what it has")
    asked = world.agents[OLD].num_asked
    world.agents[OLD].number = 2
    world.skip(3600.0)
    assert world.followed.next_ask(OLD) is None
    assert (world.agents[OLD].num_asked, world.serves("a", "r1/1")) == (asked, True)


@pytest.mark.parametrize("waits", [True, False], ids=["agent-waits", "agent-does-not"])
def test_a_service_that_polls_needs_no_notifications(world: World, waits: bool) -> None:
    """Newer versions, and another run that its agent begins: at once, or `poll_s` later."""
    world.agents = {OLD: Agent("r1", 1, waits=waits)}
    world.serve("a", poll_s=25.0)
    for run_id, number in (("r1", 2), ("r1", 5), ("r2", 0), ("r2", 1)):
        with NEWS:
            world.agents[OLD].run_id, world.agents[OLD].number = run_id, number

        def served() -> bool:
            world.skip(0.0 if waits else 25.0)  # again and again: an answer of before may begin another pause
            return world.serves("a", f"{run_id}/{number}")  # noqa: B023

        wait_until(served, f"{run_id}/{number} is served")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"senders": "http://h:1"}, "tuple"),
        ({"transport": "rdma"}, "tcp or shm"),
        ({"mode": "patch"}, "mode"),
        ({"patch_limit": 2.0}, "patch_limit"),
        ({"transport": "store"}, "transport is tcp or shm"),
        ({"poll_s": 0}, "poll_s"),
        ({"advertise": "host-0:9000"}, "advertise's URL .*: write http://host-0:9000"),
        ({"advertise": "http://[::1"}, "advertise's URL can't be read"),
    ],
)
def test_settings_that_make_no_sense_are_refused_at_once(options: dict[str, Any], text: str) -> None:
    """Seen red with `advertise`: each heartbeat failed before it was sent, and the words blamed the controller."""
    with pytest.raises((ConfigError, InvalidRequestError), match=text):
        RolloutConfig(**options)


def test_a_store_among_the_senders_is_no_host_that_a_relay_is_reached_from() -> None:
    """Seen red: "is no URL", or that no address leads to the bucket."""
    for store in ("file:///mnt/run", "s3://bucket/run"):
        config = RolloutConfig(senders=(store, "http://127.0.0.1:8765"), relay=True, sender_token="0123456789abcdef")
        assert config.relay_address() == "127.0.0.1"


def test_a_module_is_no_engine() -> None:
    with pytest.raises(ConfigError, match=r"EmbeddedEngine\.of"):
        RolloutService({MODEL: torch.nn.Linear(1, 1)})  # type: ignore[dict-item]


def test_a_thread_that_can_t_be_started_keeps_no_run_out(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.agents = {OLD: Agent("r1", 1), NEW: Agent("r2", 0)}
    world.serve("a")
    world.register(NEW)
    wait_until(lambda: world.agents[NEW].num_asked and world.asks_nobody, "it was asked")
    failed = fail_starts(monkeypatch, "weightsync-ask-agent", times=1)
    with pytest.raises(Exception, match="new thread"):
        world.notify(NEW, "r2", 0)
    assert failed
    assert world.notify(NEW, "r2", 0).run_id == "r2"


def test_runs_that_nobody_has_keep_no_run_out(world: World) -> None:
    """An agent that stands still is said to have many runs: neither their number nor its silence delays another's."""
    world.agents = {OLD: Agent("r1", 1), NEW: Agent("r0", 0), BAD: Agent("r666", 1)}
    world.serve("a")
    world.register(BAD)
    world.register(NEW)
    world.agents[BAD].stands = threading.Event()
    world.notify(NEW, "r2", 7, wait_s=None)
    for number in range(20):
        world.notify(BAD, f"false-{number}", 1, wait_s=None)
    world.agents[NEW].run_id, world.agents[NEW].number = "r2", 7
    wait_until(lambda: world.serves("a", "r2/7"), "the real run")


def test_another_agent_is_asked_before_it_is_believed(world: World) -> None:
    """One false word, that another agent has a version of this run, moves nothing."""
    world.agents = {OLD: Agent("r1", 1), BAD: Agent("r9", 1)}
    world.serve("a", patience_s=30.0)
    world.register(BAD)
    world.notify(BAD, "r1", 10**9, wait_s=None)
    for number in (2, 3, 4):
        world.agents[OLD].number = number
        assert world.notify(OLD, "r1", number).version == number
    assert (world.status.sender, world.status.wanted, world.status.errors) == (OLD, 4, {})
    told = world.notify_aside(BAD, "r1", 10**9)
    world.skip(31.0)
    with pytest.raises(VersionError, match="did not have it"):
        told.result(20)


def test_who_waits_for_a_run_of_a_silent_agent_is_told_when_its_time_is_over(world: World) -> None:
    """And nobody else says a word meanwhile."""
    world.agents = {OLD: Agent("r1", 1), BAD: Agent("r1", 1)}
    world.serve("a", pull_timeout_s=50.0)
    world.register(BAD)
    wait_until(lambda: world.agents[BAD].num_asked and world.asks_nobody, "it was asked")
    world.agents[BAD].raises = EngineUnreachableError("nobody there")
    told = world.notify_aside(BAD, "r2", 1)
    wait_until(lambda: world.status.sender_errors, "it was asked again")
    world.skip(51.0)
    with pytest.raises(VersionError, match=r"not taken up: .* nobody there"):
        told.result(20)


def test_a_false_word_that_comes_first_gives_way_to_another_agent(world: World) -> None:
    world.agents = {OLD: Agent("r1", 1), BAD: Agent("r9", 1)}
    world.agents[OLD].raises = world.agents[BAD].raises = EngineUnreachableError("not up yet")
    world.serve("a", patience_s=30.0)
    world.register(BAD)
    wait_until(lambda: len(world.status.sender_errors) == 2, "they were asked")
    world.notify(BAD, "r1", 1, wait_s=None)
    world.agents[OLD].raises = None
    assert world.notify(OLD, "r1", 1).version == 1


def test_an_agent_that_is_gone_gives_way_to_one_that_has_the_run(world: World) -> None:
    """A run has two agents; the one that announced a version dies: it is pulled from the other."""
    world.agents = {OLD: Agent("r1", 1), NEW: Agent("r1", 1)}
    world.serve("a", patience_s=30.0)
    world.register(NEW)
    wait_until(lambda: world.agents[NEW].num_asked and world.asks_nobody, "both were asked")
    world.agents[OLD].raises = EngineUnreachableError("gone")
    world.agents[NEW].number = 2
    assert world.notify(OLD, "r1", 2).version == 2
    assert world.senders_of_pulls[-1] == NEW


def test_a_fleet_hears_soon_that_nobody_has_a_version_any_more(world: World, tmp_path: Path) -> None:
    """Its trainer has ended after engines could not load it. Seen red: it was pulled for `pull_timeout_s` from a port
    at which nobody answered, and the fleet waited."""
    world.agents = {OLD: Agent("r1", 1)}
    world.agents[OLD].raises = EngineUnreachableError("not up yet")
    lease = ServingLease(str(tmp_path / "lease"))
    world.serve("a", controller="http://127.0.0.1:9", lease=lease, pull_timeout_s=600.0, poll_s=0.1)
    model = world.service._models[MODEL]
    assert isinstance(model, FleetModel)
    world.engines["a"].dead, world.agents[OLD].raises = True, None
    version = Version(run_id="r1", number=1)
    model.prepare(version, OLD)
    wait_until(lambda: "a" in world.status.errors, "it could not be loaded")
    world.agents[OLD].ending = True
    wait_until(lambda: world.followed.agents[OLD].ended, "it says so")
    world.agents[OLD].raises = EngineUnreachableError("gone")
    world.engines["a"].dead = False
    claim = model.prepare(version, OLD)

    def denied() -> bool:
        try:
            return model.prepared(claim) is not None
        except NotPublishedError as error:
            return "has ended, and nobody has r1/1 any more" in str(error)

    wait_until(denied, "it is told")
    wait_until(lambda: "nobody has r1/1 any more" in world.status.errors.get("pull", ""), "the pull has ended")
    assert denied(), "also once its pull has failed of it (seen red: a SyncFailedError)"
    world.agents[OLD].ending, world.agents[OLD].raises = False, None
    model.prepare(version, OLD)
    wait_until(lambda: model.gate.staged == version, "it has come back")


def test_a_run_that_takes_over_while_the_one_before_is_loaded_waits_for_no_commit_of_that(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All bytes of the old one were here. Seen red: they were held for `load_timeout_s`, and the new run was not even
    pulled meanwhile."""
    world.agents = {OLD: Agent("r1", 1)}
    world.agents[OLD].raises = EngineUnreachableError("not up yet")
    lease = ServingLease(str(tmp_path / "lease"))
    world.serve("a", controller="http://127.0.0.1:9", lease=lease, load_timeout_s=120.0)
    model, successor = world.service._models[MODEL], Version(run_id="r2", number=0)
    assert isinstance(model, FleetModel)
    pulled = world.followed.pulled

    def taken_over(*given: Any) -> None:
        pulled(*given)
        if world.agents[OLD].run_id == "r1":
            with NEWS:
                world.agents[OLD].run_id, world.agents[OLD].number = "r2", 0
            model.prepare(successor, OLD)

    monkeypatch.setattr(world.followed, "pulled", taken_over)
    world.agents[OLD].raises = None
    model.prepare(Version(run_id="r1", number=1), OLD)
    wait_until(lambda: model.gate.staged == successor, "it is staged")


def test_a_host_that_its_controller_can_not_reach_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen red: it joined, was lent a lease, and each sync failed: its controller called itself."""
    monkeypatch.setattr(routes, "own_address_towards", lambda host, family: "192.0.2.2")
    lease = ServingLease(str(tmp_path / "lease"))
    for host in ("127.0.0.1", "::1"):
        config = RolloutConfig(controller="http://192.0.2.7:8700", lease=lease, host=host)
        with pytest.raises(ConfigError, match=r"is another machine, and can't reach http://.*1\]?:.*--advertise"):
            RolloutService({MODEL: Engine("a")}, config)
    lease.release()


def test_a_slash_behind_a_sender_is_no_other_sender(world: World, tmp_path: Path) -> None:
    """Seen red: what a trainer had told its controller so ended each sync in a KeyError."""
    world.agents = {OLD: Agent("r1", 1)}
    world.agents[OLD].raises = EngineUnreachableError("not up yet")
    world.serve("a", controller="http://127.0.0.1:9", lease=ServingLease(str(tmp_path / "lease")))
    world.agents[OLD].raises = None
    version = ModelVersion(model_id=MODEL, run_id="r1", version=1, sender_endpoint=f"{OLD}/")
    asked = PrepareRequest(versions=(version,), wait_s=20.0)
    with contextlib.closing(RolloutClient(world.url)) as client:
        client.check_versions(asked)
        reply = client.prepare_versions(asked)
    assert [(each.of, each.sender_endpoint) for each in reply.versions] == [(version.of, OLD)]
    assert list(world.followed.agents) == [OLD]


def test_what_a_fleet_takes_to_commit_is_no_time_of_a_load(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Seen red: "loaded in 3.05 s" of a version that was staged at once, and waited for its controller."""
    world.agents = {OLD: Agent("r1", 1)}
    world.agents[OLD].raises = EngineUnreachableError("not up yet")
    world.serve("a", controller="http://127.0.0.1:9", lease=ServingLease(str(tmp_path / "lease")))
    model, version = world.service._models[MODEL], Version(run_id="r1", number=1)
    assert isinstance(model, FleetModel)
    world.agents[OLD].raises = None
    model.prepare(version, OLD)
    wait_until(lambda: model.gate.staged == version, "it is staged")
    monkeypatch.setattr(commit_gate, "CLOCK", lambda: time.monotonic() + 100.0)
    with caplog.at_level("INFO", logger="weightsync.host.sync_report"):
        model.gate.allow(version)
        wait_until(lambda: world.status.version == 1, "it is served")
    assert world.status.load_s == 0.0
    assert " s (and held for its fleet's commit for 10" in caplog.text


def test_a_false_number_delays_no_true_one(world: World) -> None:
    """Neither one false number nor many, each higher; and when their time is over nobody asks for them any more."""
    world.agents = {OLD: Agent("r1", 1)}
    world.serve("a", patience_s=30.0)
    for number in range(2, 5):
        world.notify(OLD, "r1", 10**9 + number, wait_s=None)
        world.agents[OLD].number = number
        assert world.notify(OLD, "r1", number).version == number  # and patience has not ended
    world.skip(31.0)
    wait_until(lambda: world.followed.agents[OLD].doubted is not None, "it gave way")
    assert "was announced" in (world.status.retrying or "")
    assert world.status.state == "idle"
    world.skip(3600.0)
    wait_until(lambda: world.asks_nobody and world.status.retrying is None, "it is given up")
    world.agents[OLD].number = 9
    assert world.notify(OLD, "r1", 9).version == 9


def test_a_version_that_comes_late_is_found(world: World) -> None:
    """Its proof took longer than anybody's patience, and nobody announces it again."""
    world.agents = {OLD: Agent("r1", 1)}
    world.serve("a", patience_s=30.0)
    world.notify(OLD, "r1", 2, wait_s=None)
    world.skip(31.0)
    wait_until(lambda: world.followed.agents[OLD].doubted is not None, "it gave way")
    world.agents[OLD].number = 2
    wait_until(lambda: world.serves("a", "r1/2"), "it is found")


def test_who_waits_hears_at_once_that_a_successor_has_another_run(world: World) -> None:
    """A trainer dies after its last word, and another one answers at its port."""
    world.agents = {OLD: Agent("r1", 1)}
    world.serve("a", patience_s=30.0)
    told = world.notify_aside(OLD, "r1", 51)
    with NEWS:
        world.agents[OLD].run_id, world.agents[OLD].number = "r2", 0
    with pytest.raises((TransferAbortedError, NotPublishedError)):
        told.result(20)
    wait_until(lambda: world.serves("a", "r2/0"), "the successor is followed")


def test_another_life_of_a_run_is_no_success(world: World) -> None:
    """A trainer that was started again under its old run_id publishes numbers that were served before."""
    world.agents = {OLD: Agent("r1", 5), NEW: Agent("r1", 3, incarnation="two")}
    world.serve("a")
    world.notify(OLD, "r1", 4)  # told late: the newer one is served
    world.register(NEW)
    for number in (3, 5):
        world.agents[NEW].number = number
        with pytest.raises(VersionError, match="published anew"):
            world.notify(NEW, "r1", number)
    assert world.serves("a", "r1/5")
    world.agents[NEW].number = 6
    assert world.notify(NEW, "r1", 6).version == 6
    world.notify(NEW, "r1", 3)


# --- engines ---


def test_engines_are_looked_at_while_another_is_dead(world: World) -> None:
    world.agents = {OLD: Agent("r1", 1)}
    world.serve("a", "b")
    world.engines["b"].dead = True
    wait_until(lambda: world.status.state == "waiting", "b is missed")
    world.engines["a"].renew()
    wait_until(lambda: world.serves("a", "r1/1"), "a is brought back")
    wait_until(lambda: world.status.engines == {"a": "r1/1", "b": None}, "that is known")
    world.agents[OLD].number = 2
    with pytest.raises(SyncFailedError, match="b: "):
        world.notify(OLD, "r1", 2)
    assert world.serves("a", "r1/2")


def test_an_engine_that_answers_again_is_no_error_though_nothing_comes(world: World) -> None:
    """Seen red: "can't connect" stood in the status of a server that had been started again, as long as no trainer was
    there to load it from."""
    world.agents = {OLD: Agent("r1", 1)}
    world.serve("a", pull_timeout_s=600.0, patience_s=300.0)
    world.engines["a"].dead = True
    world.engines["a"].renew()
    wait_until(lambda: world.status.engines == {"a": None}, "it is missed")
    wait_until(lambda: "a" in world.status.errors, "it is an error")
    world.agents[OLD].raises = EngineUnreachableError("gone")
    world.engines["a"].dead = False
    wait_until(lambda: "a" not in world.status.errors, "it answers again")
    assert world.status.engines == {"a": None}


def test_an_engine_that_answers_again_is_no_error_while_it_is_loaded(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen red: that nobody listened there was told of a load under way."""
    world.agents = {OLD: Agent("r1", 1)}
    world.serve("a")
    engine = world.engines["a"]
    engine.dead = True
    engine.renew()
    wait_until(lambda: "a" in world.status.errors, "it is an error")
    group, looked = world.service._models[MODEL].engines, threading.Event()

    def look() -> None:
        monkeypatch.setattr(model_updater, "LOOK_EVERY_S", 60.0)  # from now on the load alone asks it
        looked.set()

    monkeypatch.setattr(group, "look", look)
    assert looked.wait(10.0)
    engine.holds[EngineOp.BEGIN] = threading.Event()
    engine.dead = False
    wait_until(lambda: EngineOp.BEGIN in engine.calls, "it is being loaded")
    assert world.status.errors == {}


def test_an_engine_that_comes_back_with_its_version_is_waited_for_no_more(world: World) -> None:
    """Seen red: its error was gone, and the model was said to wait for ever."""
    world.agents = {OLD: Agent("r1", 1)}
    world.serve("a", patience_s=300.0)
    world.engines["a"].dead = True
    wait_until(lambda: "a" in world.status.errors, "it is an error")
    world.engines["a"].dead = False
    model = world.service._models[MODEL]
    with model._changed:
        model._note(errors={})  # as the thread that looks at engines does, where it is the first to see it
    wait_until(lambda: world.status.state == "idle", "nothing is left to do")


def test_a_trainer_that_has_ended_is_no_crash_when_an_engine_needs_its_version_again(world: World) -> None:
    """Seen red: "the trainer's agent is gone, or cut off", of a trainer that had ended in order."""
    world.agents = {OLD: Agent("r1", 1)}
    world.serve("a", poll_s=0.1)
    world.agents[OLD].ending = True
    wait_until(lambda: world.followed.agents[OLD].ended, "it says so")
    world.agents[OLD].raises = EngineUnreachableError("gone")
    wait_until(lambda: world.status.ended == (OLD,), "it has ended")
    world.engines["a"].renew()
    why = f"NotPublishedError: the trainer at {OLD} has ended, and nobody has r1/1 any more: start a trainer"
    wait_until(lambda: world.status.errors.get("pull", "").startswith(why), "nobody has it")
    assert (world.status.sender_errors, world.status.ended) == ({}, (OLD,))


def test_a_load_whose_answer_was_lost_is_noted_when_the_engine_says_that_it_has_it(world: World) -> None:
    """Seen red: nothing was wrong any more, and the status named the version before for good: each notification was
    answered well, with that, and `on_served` was never told."""
    world.agents = {OLD: Agent("r1", 1)}
    world.serve("a")
    model, told = world.service._models[MODEL], list[tuple[str, Version]]()
    model._on_served = lambda *given: told.append(given)
    engine = world.engines["a"]
    lost = loses_an_answer(engine, EngineOp.RESUME)
    world.agents[OLD].number = 2
    with pytest.raises(SyncFailedError, match="a: EngineUnreachableError"):
        world.notify(OLD, "r1", 2)
    assert lost.is_set()
    status = world.notify(OLD, "r1", 2)
    assert (status.run_id, status.version, status.num_committed) == ("r1", 2, 2)
    assert told == [(MODEL, Version(run_id="r1", number=2))]
    wait_until(lambda: world.status.state == "idle", "nothing is left to do")
    assert (world.status.errors, engine.calls.count(EngineOp.COMMIT), world.followed._loaded) == ({}, 2, True)


def test_what_engines_say_that_they_serve_and_no_load_has_left_open_is_served(world: World) -> None:
    """As where one of two engines answers too late for both to be taken over. Seen red: it was never noted, so who
    waited for it ran into a deadline."""
    world.agents = {OLD: Agent("r1", 1)}
    world.serve("a", "b")
    model = world.service._models[MODEL]
    model._status = msgspec.structs.replace(model._status, run_id=None, version=None)
    assert model.serves(Version(run_id="r1", number=1))


def test_a_commit_of_a_fleet_whose_answer_was_lost_is_done(world: World, tmp_path: Path) -> None:
    """Seen red: it was answered well, with a status of the version before, for which the fleet evicted the host."""
    world.agents = {OLD: Agent("r1", 1)}
    world.agents[OLD].raises = EngineUnreachableError("not up yet")
    world.serve("a", controller="http://127.0.0.1:9", lease=ServingLease(str(tmp_path / "lease")))
    model, version = world.service._models[MODEL], Version(run_id="r1", number=1)
    assert isinstance(model, FleetModel)
    lost = loses_an_answer(world.engines["a"], EngineOp.RESUME)
    world.agents[OLD].raises = None
    model.prepare(version, OLD)
    wait_until(lambda: model.gate.staged == version, "it is staged")
    model.gate.allow(version)
    model.wait_served(version, Deadline(20.0))
    assert lost.is_set()
    assert (world.status.run_id, world.status.version, world.status.errors) == ("r1", 1, {})


def test_an_engine_that_is_half_loaded_serves_nothing_and_is_loaded_again(world: World) -> None:
    """Seen red: by its own word it served the version before, which a notification took for a success, and it refused
    to answer until there was a newer one."""
    world.agents = {OLD: Agent("r1", 1)}
    world.serve("a", "b")
    engine = world.engines["a"]
    hold = engine.holds[EngineOp.BEGIN] = threading.Event()
    engine.half_loaded = True
    wait_until(lambda: world.status.engines == {"a": None, "b": "r1/1"}, "it is missed")
    hold.set()
    wait_until(lambda: world.status.engines == {"a": "r1/1", "b": "r1/1"}, "it is loaded")
    assert engine.calls.count(EngineOp.COMMIT) == 2
    assert world.service._models[MODEL].engines.available() == {"a": True, "b": True}


def test_an_engine_with_another_checksum_is_loaded_until_it_agrees(world: World) -> None:
    """Seen red: its own word for the version counted half a second later. It was loaded no more, and the next
    notification was a success."""
    world.agents = {OLD: Agent("r1", 1)}
    world.serve("a", "b", "c")
    odd = world.engines["c"]
    for engine in world.engines.values():
        engine.checksum = "1:good"
    odd.checksum = "1:odd"
    world.agents[OLD].number = 2
    for _ in range(2):
        with pytest.raises(SyncFailedError, match="c: DigestMismatchError"):
            world.notify(OLD, "r1", 2)
    wait_until(lambda: odd.calls.count(EngineOp.COMMIT) >= 4, "it is loaded again")
    wait_until(lambda: world.status.engines == {"a": "r1/2", "b": "r1/2", "c": None}, "it counts as serving nothing")
    assert "DigestMismatchError" in world.status.errors["c"]
    assert world.serves("c", "r1/2"), "whatever it says itself"
    odd.checksum = "1:good"
    wait_until(lambda: world.status.errors == {}, "it agrees")
    assert world.status.engines == dict.fromkeys("abc", "r1/2")
    assert world.engines["a"].calls.count(EngineOp.COMMIT) == 2


def test_engines_are_looked_at_while_a_version_does_not_come(world: World) -> None:
    world.agents = {OLD: Agent("r1", 1)}
    world.serve("a", patience_s=20.0)
    world.notify(OLD, "r1", 2, wait_s=None)
    wait_until(lambda: world.status.wanted == 2, "it is waited for")
    world.engines["a"].renew()
    wait_until(lambda: world.serves("a", "r1/1"), "it is brought back")


def test_an_engine_that_never_answered_is_an_error_before_the_first_version(world: World) -> None:
    """Seen red: nothing was wrong until a version came."""
    world.agents = {OLD: Agent("r1", 1)}
    world.agents[OLD].raises = EngineUnreachableError("no trainer yet", peer=OLD)
    world.serve("a")
    world.engines["a"].dead = True
    wait_until(lambda: "dead" in world.status.errors.get("a", ""), "it is said")
    world.engines["a"].dead = False
    wait_until(lambda: world.status.errors == {}, "it answers")


def test_a_look_that_fails_ends_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.agents = {OLD: Agent("r1", 1)}
    world.serve("a")
    failed = fail_starts(monkeypatch, "weightsync-ask-a", times=1)
    wait_until(lambda: failed, "a look failed")
    world.agents[OLD].number = 2
    assert world.notify(OLD, "r1", 2).version == 2


def test_one_answer_that_is_missed_costs_no_load(world: World) -> None:
    """An engine is loaded again because it says that it serves nothing, not because it says nothing."""
    world.agents = {OLD: Agent("r1", 1)}
    world.serve("a")
    world.engines["a"].dead = True
    wait_until(lambda: world.status.engines == {"a": None}, "it is missed")
    assert "dead" in world.status.errors.get("a", "dead")
    world.engines["a"].dead = False
    wait_until(lambda: world.status.engines == {"a": "r1/1"}, "it is back")
    wait_until(lambda: world.status.errors == {}, "all is well")
    assert (world.status.num_pulled, world.engines["a"].calls.count(EngineOp.COMMIT)) == (1, 1)


def test_a_load_that_can_t_be_started_leaves_no_other_alone(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the first engine reads is kept for it until it has let go."""
    world.agents = {OLD: Agent("r1", 1)}
    world.serve("a", "b")
    hold = world.engines["a"].holds[EngineOp.STAGE] = threading.Event()
    failed = fail_starts(monkeypatch, "weightsync-load-b", times=1)
    world.agents[OLD].number = 2
    world.notify(OLD, "r1", 2, wait_s=None)
    wait_until(lambda: EngineOp.STAGE in world.engines["a"].calls[6:], "a reads")
    wait_until(lambda: failed, "b was to be loaded")
    assert [str(version) for version in world.held] == ["r1/2"]
    hold.set()
    wait_until(lambda: world.serves("a", "r1/2") and world.serves("b", "r1/2"), "both are loaded")


def test_a_service_that_is_closed_during_a_long_load_gives_its_memory_back(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen red: it was kept until the process ended."""
    world.agents = {OLD: Agent("r1", 1)}
    world.serve("a", load_timeout_s=0.5)
    hold = world.engines["a"].holds[EngineOp.UPDATE_WEIGHTS] = threading.Event()
    staging, closed = world.service._models[MODEL]._pulls._staging, threading.Event()
    monkeypatch.setattr(staging, "close", closed.set)
    monkeypatch.setattr(model_updater, "CLOSE_S", 0.05)
    world.engines["a"].calls.clear()
    world.agents[OLD].number = 2
    world.notify(OLD, "r1", 2, wait_s=None)
    wait_until(lambda: EngineOp.UPDATE_WEIGHTS in world.engines["a"].calls, "it is loaded")
    world.service.close()
    assert not closed.is_set(), "its engine reads it"
    hold.set()
    assert closed.wait(10.0)


def test_a_service_that_is_closed_during_a_load_waits_until_its_engine_was_resumed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody else resumes it, and its handle is closed behind this. Seen red: it waited for 15 s, whatever the load."""
    world.agents = {OLD: Agent("r1", 1)}
    world.serve("a", load_timeout_s=60.0)
    hold = world.engines["a"].holds[EngineOp.STAGE] = threading.Event()
    thread = world.service._models[MODEL]._thread
    join = thread.join

    def joins(timeout: float | None = None) -> None:
        join(timeout)
        hold.set()  # the load goes on when nothing but itself is waited for any more

    monkeypatch.setattr(thread, "join", joins)
    monkeypatch.setattr(model_updater, "CLOSE_S", 0.05)
    world.engines["a"].calls.clear()
    world.agents[OLD].number = 2
    world.notify(OLD, "r1", 2, wait_s=None)
    wait_until(lambda: EngineOp.STAGE in world.engines["a"].calls, "it is loaded")
    world.service.close()
    assert world.engines["a"].calls[-1] is EngineOp.RESUME
    assert world.serves("a", "r1/2")


def test_no_load_begins_in_a_service_that_ends(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another model's may be waited for. Seen red: what had been fetched just then was loaded."""
    world.agents = {OLD: Agent("r1", 1)}
    world.serve("a")
    model = world.service._models[MODEL]
    pulled = model._pulls.pulled

    @contextlib.contextmanager
    def ends(*of: Any, **how: Any) -> Iterator[StagedVersion]:
        with pulled(*of, **how) as found:
            model.end()
            yield found

    monkeypatch.setattr(model._pulls, "pulled", ends)
    world.engines["a"].calls.clear()
    world.agents[OLD].number = 2
    world.notify(OLD, "r1", 2, wait_s=None)
    model._thread.join(20.0)
    assert not model._thread.is_alive()
    assert EngineOp.BEGIN not in world.engines["a"].calls


@pytest.mark.parametrize("in_fleet", [False, True])
def test_the_order_in_which_a_service_ends(
    in_fleet: bool, world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """No load begins while it waits for something else. But a fleet is told first that it leaves. Seen red: loads began
    for ten seconds behind the signal; a sync of the whole fleet failed with it."""
    world.agents = {OLD: Agent("r1", 1)}
    world.agents[OLD].raises = EngineUnreachableError("not up yet")
    fleet: dict[str, Any] = {"controller": "http://127.0.0.1:9"} if in_fleet else {}
    world.serve("a", lease=ServingLease(str(tmp_path / "lease")), **fleet)
    service, seen = world.service, list[str]()
    assert service._lender is not None
    for name, part, call in (
        ("no loads", service._models[MODEL], "end"),
        ("server", service._server, "close"),
        ("lease", service._lender, "close"),
    ):
        real = getattr(part, call)
        monkeypatch.setattr(part, call, lambda name=name, real=real: (seen.append(name), real())[1])
    service.close()
    order = ["lease", "server", "no loads"] if in_fleet else ["no loads", "lease", "server"]
    assert list(dict.fromkeys(seen)) == order


def test_an_engine_that_never_lets_go_holds_nobody(world: World) -> None:
    """Its handle knows no deadline: others go on with other memory, and what it reads is kept as long as it does."""
    world.agents = {OLD: Agent("r1", 1)}
    world.serve("a", "b", load_timeout_s=4.0)
    hold = world.engines["b"].holds[EngineOp.UPDATE_WEIGHTS] = threading.Event()
    stagings = {world.service._models[MODEL]._pulls._staging}
    for number in (2, 3, 4):
        world.agents[OLD].number = number
        with pytest.raises(SyncFailedError, match=r"b: .*has not let go"):
            world.notify(OLD, "r1", number)
        assert world.serves("a", f"r1/{number}")
        stagings.add(world.service._models[MODEL]._pulls._staging)
    assert [str(version) for version in world.held] == ["r1/2"]
    assert len(stagings) == 2, "another one for those that go on, and no more"
    hold.set()
    wait_until(lambda: not world.held, "it is given back")
    wait_until(lambda: world.serves("b", "r1/4"), "it is brought to the newest")


def refuses(address: tuple[str, int]) -> bool:
    """Whether nobody listens there."""
    try:
        socket.create_connection(address, 20.0).close()
    except ConnectionRefusedError:
        return True
    return False


def test_a_service_that_is_closed_by_on_served_ends_as_a_whole(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """At the last version of a run. Seen red: "cannot join current thread" was logged, models behind that one went on,
    and the relay listened."""
    world.agents = {OLD: Agent("r1", 1)}
    world.engines = {"a": Engine("a"), "b": Engine("b")}
    engines = {MODEL: world.engines["a"], "other": world.engines["b"]}
    service = world.service = RolloutService(
        engines, RolloutConfig(senders=(OLD,), relay=True), on_served=lambda *_: service.close()
    )
    assert service.relay is not None
    address = ("127.0.0.1", service.relay.face.port)
    assert not refuses(address)
    threads = [thread for model in service._models.values() for thread in (model._thread, model._looking)]
    service.start()
    wait_until(lambda: world.serves("a", "r1/1"), "it is served")
    wait_until(lambda: not any(thread.is_alive() for thread in threads), "no thread is left")
    assert refuses(address)
    assert "on_served failed" not in caplog.text


@pytest.mark.parametrize("broken", [MODEL, "other"])
def test_what_can_t_be_closed_keeps_nothing_else_open(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen red: models behind it went on, and the relay listened."""
    service = RolloutService({MODEL: Engine("a"), "other": Engine("b")}, RolloutConfig(relay=True))
    assert service.relay is not None
    service.start()
    model, close = service._models[broken], service._models[broken].close

    def closes() -> None:
        close()
        raise StateError("as told")

    monkeypatch.setattr(model, "close", closes)
    with pytest.raises(StateError, match="as told"):
        service.close()
    assert all(each._closed for each in service._models.values())
    assert refuses(("127.0.0.1", service.relay.face.port))


def test_a_service_that_can_t_be_made_leaves_no_relay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen red: it listened as long as the error was held."""
    relays = list[Relay]()

    def made(config: RolloutConfig) -> Relay:
        relay = relay_of(config)
        assert relay is not None
        relays.append(relay)
        return relay

    monkeypatch.setattr(service_module, "relay_of", made)
    with pytest.raises(ConfigError, match="share a name"):
        RolloutService({MODEL: [Engine("a"), Engine("a")]}, RolloutConfig(relay=True))
    assert [refuses(("127.0.0.1", relay.face.port)) for relay in relays] == [True]


# --- its HTTP face ---


def post(
    url: str, message: dict[str, Any], kind: str | None = "application/json", *, path: str = "/register_sender"
) -> httpx.Response:
    headers = {} if kind is None else {"content-type": kind}
    return httpx.post(f"{url}{path}", content=json.dumps(message).encode(), headers=headers, timeout=60)


def test_a_notification_without_a_run_means_the_run_of_its_agent(world: World) -> None:
    """Document 3's body. Red where the run that is followed is taken for it: the trainer was started again."""
    world.agents = {OLD: Agent("r1", 1), NEW: Agent("r2", 1), BAD: Agent("r9", 1)}
    url = world.serve("a")._server.url
    wait_until(lambda: world.serves("a", "r1/1"), "the first run")
    world.register(NEW)
    body = {"model_id": MODEL, "version": 1, "sender_endpoint": NEW}
    assert post(url, body, path="/notify_version").status_code == 200
    wait_until(lambda: world.serves("a", "r2/1"), "that agent's run")
    refused = post(url, {**body, "sender_endpoint": BAD}, path="/notify_version")
    assert (refused.status_code, refused.json()["error"]) == (403, "NotRegisteredError")
    assert world.agents[BAD].num_asked == 0, "nobody calls who was not registered"
    refused = post(url, {**body, "evaluate": True}, path="/notify_version")
    assert (refused.status_code, refused.json()["error"]) == (422, "InvalidRequestError")


def test_agents_that_do_not_answer_hold_up_nobody_else(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen red with the loop's own threads, which are few: whether engines are available was not answered."""
    world.agents = {OLD: Agent("r1", 1)}
    service = world.serve("a")
    url, go, asked = service._server.url, threading.Event(), threading.Semaphore(0)

    def run_of(_: object) -> str:
        asked.release()
        assert go.wait(60)
        return "r1"

    monkeypatch.setattr(service, "_run_of", run_of)
    body = {"model_id": MODEL, "version": 1, "sender_endpoint": OLD}
    crowd = [in_thread(lambda: post(url, body, path="/notify_version"), name="crowd") for _ in range(40)]
    try:
        assert all(asked.acquire(timeout=20) for _ in crowd), "all of them are under way"
        assert httpx.get(f"{url}/availability", timeout=20).status_code == 200
    finally:
        go.set()
    assert {each.result(60).status_code for each in crowd} == {200}
    assert service._asking.num_taken == 0


def test_no_engine_is_available_whose_lease_is_over(world: World, tmp_path: Path) -> None:
    """The engine itself does not know: what refuses in its name may be a middleware before it."""
    world.agents = {OLD: Agent("r1", 1)}
    service = world.serve("a", lease=ServingLease(str(tmp_path / "lease")))
    assert service._local is not None
    wait_until(lambda: service.status().lease.left_s > 0, "it is lent")  # type: ignore[union-attr]
    for answers in (True, False):
        told = httpx.get(f"{service._server.url}/availability", timeout=20).json()
        assert told == {"models": {MODEL: {"a": answers}}}
        service._local.close()


def test_the_agents_token_is_not_for_anybody(world: World) -> None:
    """A service that asks for no token gives none away, either."""
    world.agents = {OLD: Agent("r1", 1), BAD: Agent("r9", 1)}
    service = world.serve("a", sender_token="0123456789abcdef")
    url = service._server.url
    refused = post(url, {"model_id": MODEL, "sender_endpoint": BAD})
    assert (refused.status_code, refused.json()["error"]) == (403, "NotRegisteredError")
    assert post(url, {"model_id": MODEL, "sender_endpoint": f"{OLD}/"}).status_code == 200
    with pytest.raises(NotRegisteredError):
        world.notify(BAD, "r9", 1)
    assert world.agents[BAD].num_asked == 0
    service.register_sender(MODEL, BAD)  # this process may
    wait_until(lambda: world.agents[BAD].num_asked, "it is asked")


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded"])
def test_what_a_web_page_may_send_is_refused(world: World, kind: str | None) -> None:
    world.agents = {OLD: Agent("r1", 1), BAD: Agent("r9", 1)}
    url = world.serve("a")._server.url
    assert post(url, {"model_id": MODEL, "sender_endpoint": BAD}, kind).status_code == 422
    assert post(url, {"model_id": MODEL, "sender_endpoint": BAD}, "application/json; charset=utf-8").status_code == 200


def test_a_crowd_that_waits_makes_room_itself(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen to fail: any number waited, until no descriptor was left for anybody."""
    world.agents = {OLD: Agent("r1", 1)}
    service = world.serve("a", patience_s=60.0)
    places = Places(2, clock=lambda: 0.0)
    monkeypatch.setattr(service, "_waiting", places)
    body = {"run_id": "r1", "model_id": MODEL, "version": 2, "sender_endpoint": OLD, "wait_s": 20.0}

    def ask(peer: str) -> Future[httpx.Response]:
        def run() -> httpx.Response:
            with httpx.Client(transport=httpx.HTTPTransport(local_address=peer), timeout=30) as http:
                return http.post(f"{service._server.url}/notify_version", json=body)

        return in_thread(run, name="asks")

    crowd = []
    for number in range(2):
        crowd.append(ask("127.0.0.2"))
        wait_until(lambda: places.num_taken == number + 1, "it waits", timeout_s=20)  # noqa: B023
    honest = ask("127.0.0.1")
    lost = crowd[0].result(20)
    assert (lost.status_code, lost.json()["error"], lost.json()["state_left"]) == (
        503, "BusyError", "what it asked for goes on",
    )  # fmt: skip
    assert ask("127.0.0.2").result(20).status_code == 409
    assert not honest.done()
    world.agents[OLD].number = 2
    assert [each.result(20).json()["version"] for each in (honest, crowd[1])] == [2, 2]
