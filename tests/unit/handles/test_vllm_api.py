"""An offline `LLM` whose user generates with the api's lock held, beside syncs. A real one: tests/engines."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from weightsync.errors import DeadlineExceededError, EngineError
from weightsync.handles.fanout import in_thread
from weightsync.handles.vllm_api import OfflineVllmApi

SOON_S = 15.0


class Llm:
    """What vLLM's `LLM` does at level 0: while it sleeps `generate` does not end.

    Attributes:
        stuck: set where something generates while it sleeps.
        generated: released for each `generate`.
        fails: what `sleep` raises.
    """

    def __init__(self) -> None:
        self.awake, self.stuck = threading.Event(), threading.Event()
        self.awake.set()
        self.generated = threading.Semaphore(0)
        self.calls: list[str] = []
        self.fails: Exception | None = None
        self.llm_engine = SimpleNamespace(is_sleeping=lambda: not self.awake.is_set())

    def generate(self) -> None:
        if not self.awake.is_set():
            self.stuck.set()
        self.awake.wait(3 * SOON_S)
        self.generated.release()

    def sleep(self, *, level: int, mode: str) -> None:
        self.calls.append("sleep")
        self.awake.clear()
        if self.fails is not None:
            raise self.fails

    def wake_up(self, *, tags: list[str]) -> None:
        self.calls.append("wake_up")
        self.awake.set()

    def update_weights(self, info: dict[str, Any]) -> None:
        self.calls.append("update_weights")


def gets_it(api: OfflineVllmApi, *, within_s: float = SOON_S) -> bool:
    """Whether a user gets the lock."""
    tries, got = threading.Event(), threading.Event()

    def enter() -> None:
        tries.set()
        with api.lock:
            got.set()

    in_thread(enter, name="user")
    assert tries.wait(SOON_S)
    return got.wait(within_s)


def test_nothing_generates_between_a_pause_and_its_resume() -> None:
    """Seen red: the user got the lock between the two, and kept it for good, in a `generate` that could not end."""
    llm = Llm()
    api, stop = OfflineVllmApi(llm), threading.Event()

    def roll_out() -> None:
        while not stop.is_set():
            with api.lock:
                llm.generate()

    user = in_thread(roll_out, name="user")
    for _ in range(5):
        assert llm.generated.acquire(timeout=SOON_S), "it goes on"
        api.pause("keep", clear_cache=True, timeout_s=SOON_S)
        assert not llm.stuck.wait(0.05)
        assert api.is_paused(timeout_s=SOON_S)
        api.update({}, timeout_s=SOON_S)
        api.resume(timeout_s=SOON_S)
    stop.set()
    user.result(SOON_S)
    assert llm.calls == ["sleep", "update_weights", "wake_up"] * 5


def test_a_call_that_does_not_get_the_lock_in_time_is_never_made() -> None:
    """Seen red: each left a thread that waited for the lock, and made the call when nobody expected it."""
    llm, before = Llm(), set(threading.enumerate())
    api = OfflineVllmApi(llm)
    with api.lock:
        with api.lock:
            pass
        for call in (api.is_paused, api.resume):
            with pytest.raises(DeadlineExceededError, match=r"was in use: .* did not get its lock within"):
                call(timeout_s=0.02)
        with pytest.raises(DeadlineExceededError, match="sleep did not get"):
            api.pause("keep", clear_cache=True, timeout_s=0.02)
        calls = {"weightsync-is_sleeping", "weightsync-wake_up", "weightsync-sleep"}
        assert [each.name for each in set(threading.enumerate()) - before if each.name in calls] == []
    api.update({}, timeout_s=SOON_S)
    assert llm.calls == ["update_weights"]
    assert gets_it(api)


def test_a_call_that_takes_too_long_keeps_the_lock_until_it_has_ended() -> None:
    llm = Llm()
    api, goes_on = OfflineVllmApi(llm), threading.Event()
    llm.update_weights = lambda _: goes_on.wait(3 * SOON_S)  # type: ignore[method-assign, assignment]
    with pytest.raises(DeadlineExceededError, match="did not return from update_weights"):
        api.update({}, timeout_s=0.02)
    assert not gets_it(api, within_s=0.05)
    goes_on.set()
    assert gets_it(api)


def test_a_pause_that_fails_keeps_users_away_where_it_sleeps_all_the_same() -> None:
    """Until somebody has woken it up, through the api or not."""
    llm = Llm()
    api = OfflineVllmApi(llm)
    llm.fails = RuntimeError("injected")
    for wake_up in (lambda: api.resume(timeout_s=SOON_S), llm.awake.set):
        with pytest.raises(EngineError, match="sleep failed with RuntimeError: injected"):
            api.pause("keep", clear_cache=True, timeout_s=SOON_S)
        assert not gets_it(api, within_s=0.05)
        wake_up()
        api.is_paused(timeout_s=SOON_S)
        assert gets_it(api)
    llm.sleep = lambda **_: 1 / 0  # type: ignore[method-assign, assignment]
    with pytest.raises(EngineError, match="ZeroDivisionError"):
        api.pause("keep", clear_cache=True, timeout_s=SOON_S)
    assert gets_it(api)


@pytest.mark.parametrize("waits", [False, True], ids=["before", "meanwhile"])
def test_who_wakes_it_up_by_hand_may_generate(waits: bool) -> None:
    """As where a sync had to leave it paused. Seen red: nobody looked before the next sync, which is often the same
    thread's."""
    llm = Llm()
    api = OfflineVllmApi(llm)
    api.pause("keep", clear_cache=True, timeout_s=SOON_S)
    if waits:
        assert not gets_it(api, within_s=0.05)
    llm.wake_up(tags=["scheduling"])
    assert gets_it(api)


def test_one_of_which_memory_sleeps_says_so() -> None:
    """Whoever put it to sleep gets the lock, to wake it up."""
    llm = Llm()
    llm.wake_up = lambda **_: False  # type: ignore[method-assign, assignment, return-value]
    api = OfflineVllmApi(llm)
    api.pause("keep", clear_cache=True, timeout_s=SOON_S)
    assert api.resume(timeout_s=SOON_S) is False
    assert gets_it(api)


def test_what_was_computed_of_images_is_dropped_with_prefixes() -> None:
    """Seen red: an image that was seen before a sync entered with the old weights' embedding."""
    llm, dropped = Llm(), []
    llm.llm_engine.reset_encoder_cache = lambda: dropped.append("images")
    llm.reset_prefix_cache = lambda **_: dropped.append("prefixes") or True  # type: ignore[attr-defined]
    assert OfflineVllmApi(llm).reset_prefix_cache(timeout_s=SOON_S)
    assert dropped == ["prefixes", "images"]


def test_an_engine_that_hangs_keeps_no_call_from_its_deadline() -> None:
    """A user waits for its end meanwhile. Seen red: it asked under the lock, and no call ended."""
    llm, answers, asked = Llm(), threading.Event(), threading.Event()
    api = OfflineVllmApi(llm)
    api.pause("keep", clear_cache=True, timeout_s=SOON_S)

    def hangs() -> bool:
        asked.set()
        return not answers.wait(3 * SOON_S)

    llm.llm_engine.is_sleeping = hangs

    def use() -> None:
        with api.lock:
            pass

    user = in_thread(use, name="user")
    assert asked.wait(SOON_S)
    with pytest.raises(DeadlineExceededError):
        api.resume(timeout_s=0.2)
    answers.set()
    user.result(SOON_S)
