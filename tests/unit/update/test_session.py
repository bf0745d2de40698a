"""UpdateSession: the order of its steps, what it believes of engines, and an abort that does not arrive."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.host.fakes import chunk
from tests.unit.update.kit import MANIFEST, VERSION, Engine
from weightsync.errors import (
    DigestMismatchError,
    EngineError,
    EngineUnreachableError,
    SyncFailedError,
    TransferAbortedError,
    WeightSyncError,
)
from weightsync.handles.fanout import DirectEngine, EngineFanout
from weightsync.observe import Recorder
from weightsync.types import Deadline, PatchBase, PhaseRecord
from weightsync.update.session import COMMIT_S, UpdateSession, unequal

PAUSE_S = 2.0
BASE = PatchBase(version=VERSION, model_digest=str(MANIFEST.model_digest))


def session_of(client: Any, **options: Any) -> UpdateSession:
    recorder = Recorder("test")
    return UpdateSession(client, VERSION, Deadline(60.0), pause_timeout_s=PAUSE_S, recorder=recorder, **options)


def update(session: UpdateSession, base: PatchBase | None = None) -> dict[str, str]:
    session.begin(MANIFEST, base)
    session.pause_live_writers()
    session.update(chunk(0))
    return session.finish(MANIFEST)


@pytest.mark.parametrize("direct", [True, False])
def test_engines_are_paused_for_the_commit_alone(direct: bool) -> None:
    one = Engine()
    assert update(session_of(DirectEngine(one) if direct else EngineFanout([one]))) == {}
    assert one.steps == ["begin", "update_weights", "stage", "pause", "commit", "resume"]
    pause = dict(one.asked)["pause"]
    assert (pause.timeout_s, pause.lease_s) == (PAUSE_S, PAUSE_S + COMMIT_S)
    assert len({getattr(request, "session", None) for _, request in one.asked} - {None}) == 1


def test_all_are_paused_from_the_first_chunk_on_where_one_loads_into_live_weights() -> None:
    engines = Engine("a"), Engine("b", begin={"writes_live": True})
    update(session_of(EngineFanout(engines)))
    for each in engines:
        assert each.steps == ["begin", "pause", "update_weights", "stage", "commit", "resume"]
        assert dict(each.asked)["pause"].lease_s > PAUSE_S + COMMIT_S, "it lasts as long as the update"


def test_a_change_is_staged_beside_live_weights_wherever_whole_tensors_go() -> None:
    one = Engine(begin={"writes_live": True})
    update(session_of(EngineFanout([one])), BASE)
    assert one.steps.index("pause") > one.steps.index("stage")


@pytest.mark.parametrize("live", [True, False])
def test_nothing_is_paused_before_that_is_allowed(live: bool) -> None:
    one, allowed = Engine(begin={"writes_live": live}), []

    def may_pause() -> None:
        allowed.append(list(one.steps))
        raise TransferAbortedError("not this one")

    with pytest.raises(TransferAbortedError):
        update(session_of(DirectEngine(one), may_pause=may_pause))
    assert allowed == [["begin"] if live else ["begin", "update_weights", "stage"]]
    assert "pause" not in one.steps


@pytest.mark.parametrize(
    "stage",
    [
        {},
        {"digests_equal": True},
        {"digests_equal": True, "model_digest": "wsd2:" + "0" * 32},
        {"digests_equal": False, "model_digest": MANIFEST.model_digest, "unprovable": "so it says"},
        {"digests_equal": None, "model_digest": MANIFEST.model_digest, "unprovable": ""},
    ],
)
def test_well_is_no_proof(stage: dict[str, Any]) -> None:
    good, bad = Engine("good"), Engine("bad", stage=stage)
    with pytest.raises(DigestMismatchError) as caught:
        update(session_of(EngineFanout([good, bad])))
    assert (caught.value.peer, caught.value.version) == ("bad", str(VERSION))
    assert "commit" not in good.steps


def test_what_can_t_be_proved_is_said() -> None:
    engines = Engine("proves"), Engine("can't", stage={"unprovable": "quantised"})
    assert update(session_of(EngineFanout(engines))) == {"can't": "quantised"}


def test_a_commit_of_something_else_is_a_failure() -> None:
    with pytest.raises(EngineError, match="serves None") as caught:
        update(session_of(EngineFanout([Engine("a"), Engine("b", commit={})])))
    assert caught.value.peer == "b"


LOST = EngineUnreachableError("no answer")


@pytest.mark.parametrize("last", [
    {"resume": LOST}, {"commit": {}}, {"commit": {"version": VERSION, "checksum": "1:y"}},
])  # fmt: skip
def test_a_failure_behind_the_commit_says_that_all_have_committed(last: dict[str, Any]) -> None:
    """Seen red: nothing was said, so a trainer said that engines serve their old version."""
    first = Engine("a", commit={"version": VERSION, "checksum": "1:x"})
    with pytest.raises(WeightSyncError) as caught:
        update(session_of(EngineFanout([first, Engine("b", **last)])))
    assert str(caught.value.state_left).startswith(
        f"every engine has answered the commit of {VERSION} well, and serves"
    )


def test_the_pause_is_what_engines_have_timed() -> None:
    times = {"pause": (1.0, 1.5), "commit": (1.5, 2.0), "resume": (2.0, 2.5)}
    phases = {
        name: {"phases": (PhaseRecord(name=name, start_s=start, end_s=end, track="e"),)}
        for name, (start, end) in times.items()
    }
    phases["commit"]["version"] = VERSION  # type: ignore[assignment]
    session = session_of(EngineFanout([Engine(**phases)]))
    update(session)
    assert session.paused_s == pytest.approx(1.5, abs=0.6)
    assert session.paused_s > 0.4


class Raises:
    """A client that is not ours: the protocol's abort never raises, its does."""

    engine_ids = ("e1",)

    def abort(self, *_: Any, **__: Any) -> None:
        raise OSError("no route")


@pytest.mark.parametrize("client", [EngineFanout([Engine("e1", abort=EngineError("deaf"))]), Raises()])
def test_an_abort_that_fails_is_in_the_log(client: Any, caplog: pytest.LogCaptureFixture) -> None:
    session = session_of(client)
    session.abort("as told")
    assert f"engine e1: session {session.name} could not be aborted" in caplog.text
    assert ("deaf" if isinstance(client, EngineFanout) else "no route") in caplog.text


def test_an_engine_s_failure_is_told_by_engine() -> None:
    with pytest.raises(SyncFailedError) as caught:
        update(session_of(DirectEngine(Engine("e", update_weights=EngineError("no room")))))
    assert {who: error.message for who, error in caught.value.causes.items()} == {"e": "no room"}


@pytest.mark.parametrize(("at", "steps"), [("stage", []), ("commit", ["commit"])])
def test_engines_whose_checksums_differ_do_not_serve(at: str, steps: list[str]) -> None:
    """Of three that were given the same one has another: the session fails, and none is resumed."""
    said = {"version": VERSION} if at == "commit" else {}
    sums = {"a": "1:x", "b": "1:y", "c": "1:x"}
    engines = [Engine(name, **{at: {**said, "checksum": each}}) for name, each in sums.items()]
    session = session_of(EngineFanout(engines))
    with pytest.raises(DigestMismatchError, match="other checksums") as caught:
        update(session)
    assert caught.value.peer == "b"
    for each in engines:
        assert [step for step in each.steps if step in ("commit", "resume")] == steps
    assert session.checksums == sums


@pytest.mark.parametrize(("sums", "wrong"), [
    ({"a": "1:x", "b": "1:x"}, ()), ({"a": "1:x", "b": "1:y"}, ("a", "b")), ({"a": "1:x", "b": "2:y"}, ()), ({}, ()),
    ({"a": "2:x", "b": "2:y", "c": "2:y", "d": "1:x"}, ("a",)),
])  # fmt: skip
def test_whose_checksum_is_another(sums: dict[str, str], wrong: tuple[str, ...]) -> None:
    """Engines of one size compare; where no checksum is that of most, all differ."""
    assert unequal(sums) == wrong
