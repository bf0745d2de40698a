"""FleetMember: sets that are committed halfway, and what brings them back.

The lease, the pool and HTTP are real; what a model loads is told by the test.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from weightsync.control.controller import WeightSyncController
from weightsync.control.methods.fleet import FleetMethod
from weightsync.control.pool import RolloutPool
from weightsync.control.server import ControllerServer
from weightsync.errors import (
    EngineUnreachableError,
    NotPublishedError,
    StateError,
    SyncFailedError,
    TransferAbortedError,
)
from weightsync.handles.fanout import in_thread
from weightsync.host import member as member_module
from weightsync.host.agent_state import Claim
from weightsync.host.commit_gate import CommitGate
from weightsync.host.member import FleetMember
from weightsync.host.served_versions import words
from weightsync.host.settings import RolloutConfig
from weightsync.memory import LeaseReader, ServingLease, boot_s, serving
from weightsync.types import Deadline, Version
from weightsync.types.fleet import (
    MAX_GONE,
    MAX_WORDS,
    CommitVersionsRequest,
    HeartbeatReply,
    HeartbeatRequest,
    ModelVersion,
)
from weightsync.types.service import ModelStatus

LONG_S = 10.0
LEASE_S = 60.0
SHORT_LEASE_S = 3.0
BEAT_S = 1.0
MODELS = ("a", "b")


def at(model: str, version: int) -> ModelVersion:
    return ModelVersion(model_id=model, run_id="r", version=version, sender_endpoint="http://agent")


def both(version: int, wait_s: float = LONG_S) -> CommitVersionsRequest:
    return CommitVersionsRequest(versions=tuple(at(model, version) for model in MODELS), wait_s=wait_s)


class Told:
    """What a `FleetModel` is to a member: serves what it is allowed to at once, or fails as told."""

    served_digest = None
    staged = None
    kept: Version | None = None
    commits = False
    progress = None
    passing: Version | None = None
    num_gone = 0

    def __init__(self, model_id: str) -> None:
        self.model_id = model_id
        self.gate = self.engines = self
        self.served: Version | None = Version(run_id="r", number=1)
        self.fails = False
        self.errors: dict[str, str] = {}
        self.sender = "http://agent"
        self.go = threading.Event()
        self.go.set()

    def seen_s(self) -> float:
        return math.inf

    def look(self) -> None: ...

    def gone(self) -> dict[str, str]:
        return {f"e{number}" * MAX_WORDS: "EngineUnreachableError: " * MAX_WORDS for number in range(self.num_gone)}

    def allow(self, version: Version) -> None:
        if not self.fails:
            self.served = version

    def allow_no_more_than(self, served: Version | None) -> bool:
        self.kept = served
        return not self.commits

    def release(self, why: str, *, older_than: Version | None = None) -> None: ...
    def check_may_commit(self, version: Version) -> None: ...
    def add_sender(self, endpoint: str) -> None: ...
    def adopt(self, version: Version, endpoint: str, digest: str) -> bool:
        return False

    def claimed(self, version: Version, endpoint: str) -> Claim:
        return Claim(
            number=1, version=version, endpoint=endpoint, began_s=0.0, grace_s=1.0, until_s=LONG_S, is_told=True
        )

    def serves(self, version: Version) -> bool:
        return self.served is not None and self.served.number >= version.number

    def wait_served(self, version: Version, deadline: Deadline) -> None:
        assert self.go.wait(LONG_S)
        if self.fails:
            raise SyncFailedError("as told", causes={})

    def status(self) -> ModelStatus:
        number = self.served and self.served.number
        return ModelStatus(sender=self.sender, wanted_run_id="r", wanted=number, errors=self.errors)


class Pool(RolloutPool):
    """Wants a heartbeat each second, however long its leases are: on a busy machine a short one ends between two."""

    def heartbeat(self, beat: HeartbeatRequest) -> HeartbeatReply:
        reply = super().heartbeat(beat)
        return msgspec.structs.replace(reply, every_s=min(reply.every_s, BEAT_S))


class Member:
    """A member, what its engines see, and a fleet that has listened."""

    def __init__(self, folder: Path, lease_s: float) -> None:
        self.pool = Pool(lease_s=lease_s)
        self.pool._learning.until_s = time.monotonic()
        self.controller = WeightSyncController({}, FleetMethod(self.pool), model_tags=MODELS)
        self.server = ControllerServer(self.controller, self.pool)
        self.lease = ServingLease(str(folder / "lease"))
        self.reader = LeaseReader(self.lease.path)
        self.models: Any = {model: Told(model) for model in MODELS}
        config = RolloutConfig(service_id="one", controller=self.server.start(), lease=self.lease)
        self.member = FleetMember(self.models, config, self.lease)

    @property
    def answers(self) -> bool:
        return self.reader.refusal() is None and not self.reader.held

    def live(self) -> Member:
        self.member.start("http://127.0.0.1:9")
        until(lambda: self.answers, "it has a lease")
        return self

    def state(self) -> str:
        return self.pool.status({})[0].state

    def close(self) -> None:
        self.member.close()
        self.server.close()
        self.controller.close()


@pytest.fixture
def made(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Member]:
    found = Member(tmp_path, getattr(request, "param", LEASE_S))
    yield found
    found.close()


def until(condition: Callable[[], Any], what: str) -> None:
    end = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.005)


def test_nothing_is_answered_while_a_set_is_committed(made: Member) -> None:
    made.live()
    made.models["b"].go.clear()
    commit = in_thread(lambda: made.member.commit(both(2)), name="commit")
    until(lambda: made.models["a"].served.number == 2, "one of two is served")
    assert made.reader.held
    assert made.member.status.why_none is None, "they wait, and refuse nobody"
    with pytest.raises(StateError, match="another commit is under way"):
        made.member.commit(both(3, wait_s=0.05))
    made.models["b"].go.set()
    commit.result(LONG_S)
    assert made.answers


def test_it_says_why_its_engines_answer_nobody(made: Member) -> None:
    assert made.member.status.why_none == "the controller has not answered yet"
    assert not made.member.status.failed
    made.live()
    assert (made.member.status.left_s > 0, made.member.status.why_none) == (True, None)
    made.models["b"].fails = True
    with pytest.raises(SyncFailedError):
        made.member.commit(both(2))
    assert "a set of models" in str(made.member.status.why_none)
    made.models["b"].fails = False
    made.member.commit(both(2))
    assert made.member.status.why_none is None
    made.server.close()
    until(lambda: made.member._unheard, "no answer is on its way")
    made.lease.revoke()
    until(lambda: "lends no lease" in str(made.member.status.why_none), "its lease is over")
    assert (made.member.status.left_s, made.member.status.failed) == (0.0, True)


def test_engines_are_asked_again_whether_they_serve_what_is_current(
    made: Member, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen red: one that did not answer in time was asked once; its trainer had ended, so nothing could be pulled."""
    monkeypatch.setattr("weightsync.host.catching_up._ASK_AGAIN_S", 0.02)
    asked: list[Any] = []
    model = made.models["a"]
    model.served, model.fails, model.adopt = None, True, lambda *given: bool(asked.append(given))

    def again() -> bool:
        made.member._catching_up.go(model, at("a", 3), "digest")
        return len(asked) >= 3

    until(again, "it is asked again")


def test_a_set_that_is_told_again_answers_again(made: Member) -> None:
    """Seen to fail: the second time one model was left to do, and nobody ended the refusal."""
    made.live()
    made.models["b"].fails = True
    with pytest.raises(SyncFailedError, match="1 of 2 models were not committed"):
        made.member.commit(both(2))
    assert "not committed as a whole" in str(made.reader.refusal())
    with pytest.raises(SyncFailedError, match="1 of 1 models were not committed"):
        made.member.commit(both(2))
    assert "not committed as a whole" in str(made.reader.refusal()), "not held: refused"
    made.models["b"].fails = False
    made.member.commit(both(2))
    assert made.answers


def test_another_model_does_not_make_a_set_whole(made: Member) -> None:
    made.live()
    made.models["other"] = Told("other")
    made.models["b"].fails = True
    with pytest.raises(SyncFailedError):
        made.member.commit(both(2))
    made.member.commit(CommitVersionsRequest(versions=(at("other", 2),), wait_s=LONG_S))
    assert made.reader.refusal() is not None
    assert not made.member._request().whole


def test_half_of_a_set_catches_up_and_comes_back(made: Member) -> None:
    """Seen to fail: it was never let in again."""
    made.live()
    made.models["b"].fails = True
    with made.pool.syncing():
        made.pool.decided(both(2).versions)
        with pytest.raises(SyncFailedError):
            made.member.commit(both(2))
        made.pool.evict("one", "as told")
    until(lambda: made.state() == "joining", "it asks to come back")
    made.models["b"].fails = False
    until(lambda: made.answers, "it answers")
    assert made.state() == "live"


def test_an_answer_from_before_a_commit_says_nothing_of_it(made: Member) -> None:
    """It lets the service in; meanwhile a set was committed halfway. Seen to fail: the refusal was lifted."""
    commits = made.member._num_commits
    made.lease.renew(1e12)
    made.models["b"].fails = True
    with pytest.raises(SyncFailedError):
        made.member.commit(both(2))
    made.member._made_whole(commits)
    assert made.reader.refusal() is not None
    made.member._made_whole(made.member._num_commits)
    assert made.answers


def patiently(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last word is said once: a machine that stands still for a second loses none."""
    monkeypatch.setattr(member_module, "_LEAVE_S", LONG_S)
    monkeypatch.setattr(member_module, "_STOP_S", LONG_S)


def test_one_that_ends_says_so_when_it_answers_no_more(made: Member, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen to fail: it stood there as evicted; and said so while it still had its lease."""
    patiently(monkeypatch)
    made.live()
    heard: list[bool] = []
    real = made.pool.heartbeat

    def heartbeat(beat: HeartbeatRequest) -> HeartbeatReply:
        if beat.leaving:
            heard.append(made.answers or beat.leased)
        return real(beat)

    made.pool.heartbeat = heartbeat  # type: ignore[method-assign]
    made.member.close()
    assert heard == [False]
    assert made.pool.status({}) == ()
    made.member.close()
    assert len(heard) == 1


def test_its_heartbeats_are_numbered(made: Member, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last word has the highest number."""
    patiently(monkeypatch)
    beats: list[tuple[int, bool]] = []
    real = made.pool.heartbeat

    def heartbeat(beat: HeartbeatRequest) -> HeartbeatReply:
        beats.append((beat.number, beat.leaving))
        return real(beat)

    made.pool.heartbeat = heartbeat  # type: ignore[method-assign]
    made.live()
    until(lambda: len(beats) >= 3, "it is heard")
    made.member.close()
    numbers = [number for number, _ in beats]
    assert numbers == sorted(set(numbers))
    assert numbers[0] >= 1
    assert beats[-1][1], "its last word"


def test_one_that_ends_waits_for_no_controller(made: Member) -> None:
    made.live()
    made.server.close()
    began_s = time.monotonic()
    made.member.close()
    assert time.monotonic() - began_s < LONG_S / 2
    assert not made.answers


@pytest.mark.parametrize("made", [SHORT_LEASE_S], indirect=True)
def test_without_a_controller_it_answers_until_its_lease_is_over(made: Member) -> None:
    made.live()
    made.server.close()
    assert until_s(made) - boot_s() <= SHORT_LEASE_S
    until(lambda: not made.answers, "its lease is over")


def test_a_lease_file_that_was_cut_off_is_told_to_the_fleet(made: Member) -> None:
    """Seen red: an instance whose engines refused everything stood there as one that serves."""
    made.live()
    os.truncate(made.lease.path, 0)
    until(lambda: "was damaged, or cut off" in (made.pool.status({})[0].why or ""), "its status says so")
    assert not made.answers


def test_an_engine_that_is_gone_is_said_once(made: Member, monkeypatch: pytest.MonkeyPatch) -> None:
    made.live()
    monkeypatch.setattr(made.models["a"], "gone", lambda: {"e": "silent"})
    made.models["a"].errors = {"e": "silent", "f": "bad"}
    until(lambda: made.pool.status({})[0].why == "engine e is gone: silent; a: f: bad", "its status says so")


def test_a_version_that_gave_way_to_a_newer_one_is_no_failure(made: Member) -> None:
    """Its own words, as its engine's load ends with them. Seen red: its fleet said that it "can't go on"."""
    made.member._url = "http://127.0.0.1:9"
    gate = CommitGate(threading.Condition(), lambda: None)
    gate.prepare(Version(run_id="r", number=3))
    with pytest.raises(TransferAbortedError) as caught:
        gate.hold(Version(run_id="r", number=2), 1).staged(Deadline(5))
    made.models["a"].errors = {"e": words(caught.value), "f": "bad"}
    assert made.member._request().error == "a: f: bad"


def test_engines_are_looked_at_before_the_first_heartbeat(made: Member, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen red: it was let in before its engines had started, and each sync failed until they had."""
    done: list[str] = []
    beat = made.pool.heartbeat

    def heard(request: HeartbeatRequest) -> HeartbeatReply:
        done.append("beat")
        return beat(request)

    for name, model in made.models.items():
        monkeypatch.setattr(model, "look", lambda name=name: done.append(name))
    monkeypatch.setattr(made.pool, "heartbeat", heard)
    made.live()
    assert done[:3] == ["a", "b", "beat"]


def test_engines_that_are_gone_are_told_to_the_fleet(made: Member) -> None:
    made.live()
    made.models["a"].num_gone = 2 * MAX_GONE
    until(lambda: made.pool.status({})[0].gone, "its status says so")
    assert len(made.pool.status({})[0].gone) == MAX_GONE, "as many as a heartbeat takes"


def test_what_it_was_told_before_it_came_in_is_committed_with_its_fleet_alone(made: Member) -> None:
    """Told of a number that nobody has, it came in, and then committed whatever it had staged, by itself. Seen red."""
    made.models["a"].commits = True
    made.member.start("http://127.0.0.1:9")
    until(lambda: made.pool.status({}) and made.state() == "live", "its fleet lets it in")
    until(lambda: made.models["a"].kept is not None, "it looks what it may commit")
    assert not made.answers, "one of its engines is on its way to something else"
    made.models["a"].commits = False
    until(lambda: made.answers, "it has a lease")
    assert [model.kept for model in made.models.values()] == [Version(run_id="r", number=1)] * 2


def test_what_it_has_committed_since_its_heartbeat_is_told_first(made: Member) -> None:
    made.member._url = "http://127.0.0.1:9"
    made.member._request()
    made.models["a"].served = Version(run_id="r", number=2)
    assert not made.member._keep_to_what_is_served(0)
    made.member._request()
    assert made.member._keep_to_what_is_served(0)


def test_what_may_be_committed_is_looked_at_when_its_fleet_commits_no_more(made: Member) -> None:
    """Seen red: it came in while another model was committed, and kept what it had been told before for good."""
    with made.member._set:
        made.live()
    until(lambda: all(model.kept is not None for model in made.models.values()), "it looks what it may commit")


def test_a_service_that_pulls_from_a_store_sends_heartbeats(made: Member) -> None:
    """Its fleet is told of the agent that it has named. Seen red: "an endpoint is an http URL", for good, so that its
    lease ran out and it was evicted."""
    made.models["a"].sender = "s3://bucket/run"
    made.live()
    assert [each.sender_endpoint for each in made.member._request().serves] == ["", "http://agent"]
    made.member._heard(told(at("a", 2)), 0.0, 0)
    assert [each.sender_endpoint for each in made.member._request().serves] == ["http://agent"] * 2


def told(*versions: ModelVersion) -> HeartbeatReply:
    return HeartbeatReply(state="joining", lease_s=0.0, every_s=1.0, catch_up=versions)


def test_an_answer_from_before_a_commit_allows_nothing_older(made: Member) -> None:
    """Seen red: engines that had not gone on yet with what was committed meanwhile waited until a deadline."""
    allowed: list[int] = []
    made.models["a"].fails = True
    made.models["a"].allow = lambda version: allowed.append(version.number)
    commits = made.member._num_commits
    with pytest.raises(SyncFailedError):
        made.member.commit(CommitVersionsRequest(versions=(at("a", 7),), wait_s=LONG_S))
    made.member._heard(told(at("a", 6)), 0.0, commits)
    assert allowed == [7]
    made.member._heard(told(at("a", 8)), 0.0, made.member._num_commits)
    assert allowed == [7, 8]


def test_a_slash_behind_a_sender_is_no_other_sender(made: Member) -> None:
    """Seen red: it was registered a second time, and asked twice for everything."""
    made.models["a"].fails = True
    made.member._heard(told(msgspec.structs.replace(at("a", 9), sender_endpoint="http://agent/")), 0.0, 0)
    assert made.member._catching_up._claims["a"].endpoint == "http://agent"


def serves(made: Member, a: int, b: int) -> HeartbeatRequest:
    for model, version in zip(MODELS, (a, b), strict=True):
        made.models[model].served = Version(run_id="r", number=version)
    return made.member._request()


def test_half_of_what_it_catches_up_with_is_no_set(made: Member) -> None:
    """Seen red: a controller that was started anew believed it, and it answered with a split set."""
    made.member._url = "http://127.0.0.1:9"
    for model in made.models.values():
        model.fails = True
    assert serves(made, 1, 1).whole
    for version in (5, 6):
        made.member._heard(told(at("a", version), at("b", version)), 0.0, 0)
    assert serves(made, 1, 1).whole, "nothing has come yet"
    assert not serves(made, 5, 1).whole
    assert not serves(made, 6, 5).whole
    assert serves(made, 5, 5).whole, "it was told that as one, too"
    assert not serves(made, 6, 5).whole
    assert serves(made, 6, 6).whole
    made.models["b"].served = None
    assert made.member._request().whole, "its engine was started anew: it answers nothing"


def test_a_set_of_which_one_is_newer_is_not_committed_as_a_whole(made: Member) -> None:
    """It was told to catch up with that while an older set was committed. Seen red: it stood there as whole."""
    made.live()
    made.models["a"].served = Version(run_id="r", number=3)
    made.member.commit(both(2))
    assert made.models["b"].served == Version(run_id="r", number=2)
    assert made.reader.refusal() is not None
    assert not made.member._request().whole


def test_a_set_that_is_committed_late_is_whole_when_it_has_no_lease(made: Member) -> None:
    """Seen red: its controller was started anew, knew of no set, and left it out for half of one."""
    made.member._url = "http://127.0.0.1:9"
    made.models["b"].fails = True
    with pytest.raises(SyncFailedError):
        made.member.commit(both(2))
    assert not made.member._request().whole
    assert serves(made, 2, 2).whole
    made.lease.renew(1e12)
    assert made.answers


def test_a_denial_is_told_before_it_is_asked_for_again(made: Member) -> None:
    """It came between a heartbeat and its answer. Seen red: it was asked for again, and never told."""
    made.member._url = "http://127.0.0.1:9"
    for model in made.models.values():
        model.fails = True
    made.member._heard(told(at("a", 9)), 0.0, 0)
    made.member._request()
    claim = made.member._catching_up._claims["a"]
    claim.error = NotPublishedError("as told", newest=1)
    made.member._heard(told(at("a", 9)), 0.0, 0)
    assert [(each.of.version, each.newest) for each in made.member._request().absent] == [(9, 1)]
    made.member._heard(told(at("a", 9)), 0.0, 0)
    assert made.member._catching_up._claims["a"] is not claim, "it may be there by now"


def test_the_last_of_a_set_is_committed_behind_a_hold(made: Member) -> None:
    """The other one was served already, by what it was told before it came in. Seen red: both were answered, apart."""
    made.live()
    made.models["a"].served = Version(run_id="r", number=2)
    made.models["b"].go.clear()
    commit = in_thread(lambda: made.member.commit(both(2)), name="commit")
    until(lambda: made.reader.held, "nothing is answered meanwhile")
    made.models["b"].go.set()
    commit.result(LONG_S)
    assert made.answers


def test_what_it_commits_while_its_fleet_commits_takes_no_lease(made: Member) -> None:
    """Seen red: it took its first lease for what it had told, and answered with what it had by then."""
    made.member._url = "http://127.0.0.1:9"
    assert made.member._request().whole
    with made.member._set:
        assert made.member._keep_to_what_is_served(0)
        made.models["a"].passing = Version(run_id="r", number=2)
        assert not made.member._keep_to_what_is_served(0)
        made.models["a"].passing, made.models["a"].served = None, Version(run_id="r", number=2)
        assert not made.member._keep_to_what_is_served(0)


def test_who_is_brought_something_and_holds_no_lease_asks_for_it_at_once(made: Member) -> None:
    """A fleet may let it in before it asks. Seen red: its engines refused for a second behind their first sync."""
    rest = in_thread(lambda: made.member._rest(3600.0), name="rest")
    made.member.commit(CommitVersionsRequest(versions=(at("b", 2),), wait_s=LONG_S))
    assert rest.result(LONG_S) is False


def test_what_it_has_committed_beside_its_fleet_takes_no_lease(made: Member) -> None:
    """Its fleet committed another model meanwhile. Seen red: that hid what it had committed by itself."""
    made.member._url = "http://127.0.0.1:9"
    made.member._request()
    made.member.commit(CommitVersionsRequest(versions=(at("b", 2),), wait_s=LONG_S))
    assert made.models["b"].served == Version(run_id="r", number=2)
    assert made.member._keep_to_what_is_served(0), "it serves what it has told of, and what its fleet has committed"
    for served in (Version(run_id="r", number=2), None):  # None: its engine was started anew, with weights of its own
        made.models["a"].served = served
        assert not made.member._keep_to_what_is_served(0), served


def until_s(made: Member) -> float:
    return made.lease._words[serving._UNTIL]


def test_while_its_controller_listens_it_goes_on_for_as_long_as_it_was_lent(made: Member) -> None:
    """Seen red: it refused at once, and what its engines were generating was cut off."""
    made.live()
    made.member.close()
    made.lease = ServingLease(made.lease.path)
    member = FleetMember(made.models, made.member._config, made.lease)
    made.lease.renew(boot_s() + 100.0)
    until_then, seen = until_s(made), made.lease._words[serving._SEEN]
    member._url = "http://127.0.0.1:9"
    assert 90.0 < member._request().left_s <= 100.0
    member._comes_in = False
    kept = HeartbeatReply(state="joining", lease_s=200.0, every_s=1.0)
    assert member._heard(kept, boot_s(), 0)
    assert (until_s(made), made.lease._words[serving._SEEN], made.answers) == (until_then, seen, True)
    assert member._comes_in, "the first lease of that controller is its first"
    assert member._heard(told(), boot_s(), 0)
    assert (until_s(made), made.answers) == (0.0, False)


def test_each_kind_of_reason_why_it_has_no_lease_is_logged_once(
    made: Member, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Seen red: the first one alone; the log said that nobody was there, long after a controller had refused it."""
    reasons: list[Exception] = [EngineUnreachableError("nobody there")] * 2
    reasons += [StateError("another process has its name")] * 2 + [EngineUnreachableError("nobody there")]
    asked, enough = list[float](), threading.Event()

    def fails(beat: HeartbeatRequest, *, timeout_s: float) -> HeartbeatReply:
        asked.append(timeout_s)
        if len(asked) == len(reasons):
            enough.set()
        raise reasons[min(len(asked), len(reasons)) - 1]

    monkeypatch.setattr(made.member._client, "heartbeat", fails)
    monkeypatch.setattr(member_module, "_FIRST_EVERY_S", 0.01)
    made.lease.renew(boot_s() + 4.0)
    made.member.start("http://127.0.0.1:9")
    assert enough.wait(LONG_S)
    made.member.close()
    said = [each.getMessage() for each in caplog.records if each.name == "weightsync.host.member"]
    assert [text.partition("lends no lease: ")[2] for text in said if "lends no" in text] == [
        "nobody there", "another process has its name",
    ]  # fmt: skip
    assert asked[0] <= 4.0, "an answer that comes when its lease is over is none"
