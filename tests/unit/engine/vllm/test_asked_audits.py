"""Audits of vLLM's workers that were asked for by name: one counts when every worker has ended it."""

from __future__ import annotations

import threading
from collections.abc import Callable

import msgspec
import pytest

from tests.standins.threads import fail_starts
from weightsync.engine.vllm import asked_audits
from weightsync.engine.vllm.asked_audits import EVERY_VARIABLE, AskedAudits, merged_audits
from weightsync.errors import EngineError, StateError
from weightsync.handles.vllm_messages import VllmAudit
from weightsync.types import Deadline, EngineReply, Version

ONE, TWO = Version(run_id="r", number=1), Version(run_id="r", number=2)


def ended(name: str, equal: bool | None = True, version: Version = ONE, said: str | None = None) -> VllmAudit:
    return VllmAudit(name=name, version=version, digest="d", equal=equal, said=said)


def test_one_that_a_worker_has_not_ended_is_not_told() -> None:
    """Seen to fail with counters: one worker's were ahead, and the answer came before it had read anything."""
    assert list(merged_audits([[ended("a"), ended("b")], [ended("b")]])) == [ended("b")]


def test_wrong_goes_before_unknown_and_unknown_before_proved() -> None:
    wrong, unknown = ended("a", False, said="a bit"), ended("a", None, said="repacked")
    assert list(merged_audits([[ended("a")], [unknown], [wrong]])) == [wrong]
    assert list(merged_audits([[ended("a")], [unknown]])) == [unknown]


def test_workers_that_have_read_different_versions_prove_none() -> None:
    (told,) = merged_audits([[ended("a")], [ended("a", version=TWO)]])
    assert (told.equal, told.version) == (None, None)


@pytest.mark.parametrize(("every", "read"), [("0", 3), ("600", 1), ("never", 0), ("often", 1)])
def test_a_worker_reads_behind_a_patch_now_and_then(monkeypatch: pytest.MonkeyPatch, every: str, read: int) -> None:
    """One that was interrupted is no reading: the next one goes on."""
    monkeypatch.setenv(EVERY_VARIABLE, every)
    began: list[str] = []
    outcomes = iter([False, True, True, True])

    def audit(session: str) -> bool:
        began.append(session)
        return next(outcomes)

    def at_once(function: Callable[[], None], *, name: str) -> None:
        function()

    monkeypatch.setattr(asked_audits, "in_thread", at_once)
    audits = AskedAudits(lambda: EngineReply(engine_id="e"))
    for number in range(4):
        audits.behind(f"s{number}", audit, pytest.fail)
    assert len(began) == (read + 1 if read else 0)


def test_a_reading_behind_a_patch_that_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for its thread; it says nothing of the weights."""
    monkeypatch.setenv(EVERY_VARIABLE, "0")

    def audit(session: str) -> bool:
        raise RuntimeError("the device is gone")

    audits, deadline = AskedAudits(lambda: EngineReply(engine_id="e")), Deadline(20.0)
    audits.behind("s1", audit, pytest.fail)
    while not audits.ended:
        deadline.check("end of the reading")
    (ended,) = audits.ended
    assert (ended.name, ended.equal) == ("behind s1", None)
    assert "the device is gone" in str(ended.said)


def test_what_a_worker_found_is_kept_under_the_name_that_asked() -> None:
    go, replies = threading.Event(), iter([True, False, None])

    def verify() -> EngineReply:
        equal = next(replies)
        if equal is None:
            raise StateError("ask again")
        return EngineReply(
            engine_id="e", version=ONE, model_digest="d", digests_equal=equal, unhealthy=None if equal else "a bit"
        )

    audits = AskedAudits(verify)
    deadline = Deadline(20.0)
    for number in range(3):
        audits.begin(f"a{number}")
        while len(audits.ended) <= number:
            assert not deadline.expired
            go.wait(0.01)
    assert all(0 < each.began_s <= each.ended_s for each in audits.ended)
    told = [msgspec.structs.replace(each, began_s=0.0, ended_s=0.0) for each in audits.ended]
    assert told[:2] == [ended("a0"), ended("a1", False, said="a bit")]
    assert (audits.ended[2].equal, audits.ended[2].said) == (None, "StateError: ask again")


def test_one_that_can_have_no_thread_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen red: who asked for it waited for it up to its deadline."""
    fail_starts(monkeypatch, "weightsync-vllm-audit")
    with pytest.raises(EngineError, match="can't start new thread"):
        AskedAudits(lambda: EngineReply(engine_id="e")).begin("a")


def test_where_vllm_has_sleep_mode_nobody_reads_live_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """They may be unmapped meanwhile, and who reads them then ends the worker. No GPU here: none reads. What would undo
    a patch is let go of all the same: it would lie on the GPU through the sleep."""
    settled: list[str] = []
    monkeypatch.setattr(asked_audits, "in_thread", lambda call, *, name: call())
    audits = AskedAudits(lambda: pytest.fail("live weights were read"), sleeps=True)
    audits.begin("asked")
    audits.behind("run/1#x", pytest.fail, settled.append)
    assert [(each.name, each.equal) for each in audits.ended] == [("asked", None)]
    assert "sleep mode" in str(audits.ended[0].said)
    assert settled == ["run/1#x"]
