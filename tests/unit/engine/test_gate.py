"""ServingGate: nothing is generated while paused or half-loaded, whatever order calls come in."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from tests.unit.host.fakes import holds_pause
from tests.unit.host.service_kit import wait_until
from weightsync.engine import gate as gate_module
from weightsync.engine.gate import ServingGate
from weightsync.errors import DeadlineExceededError, NotServingError, StateError, WeightSyncError
from weightsync.handles.fanout import in_thread
from weightsync.types import Version

SESSIONS = st.sampled_from(["a", "b"])


class Clock:
    """Time that passes when told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


class GateMachine(RuleBasedStateMachine):
    """A model of the gate in five variables. Pauses are asked with no time to wait: they take or fail at once."""

    running = Bundle("running")

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self._real = gate_module.time
        gate_module.time = self.clock  # type: ignore[assignment]
        self.gate = ServingGate()
        self.count = 0
        self.paused_by: str | None = None
        self.lease_end = 0.0
        self.fenced = False
        self.fenced_by: str | None = None
        self.version: Version | None = None

    def teardown(self) -> None:
        gate_module.time = self._real

    def holder(self) -> str | None:
        return self.paused_by if self.clock.now < self.lease_end else None

    @rule(target=running)
    def enter(self) -> Any:
        generation = self.gate.generation(timeout_s=0.0)
        if self.fenced or self.holder() is not None:
            with pytest.raises(NotServingError):
                generation.__enter__()
            return None
        assert generation.__enter__() == self.version
        self.count += 1
        return generation

    @rule(generation=consumes(running), fails=st.booleans())
    def leave(self, generation: Any, fails: bool) -> None:
        if generation is None:
            return
        if fails:
            with contextlib.suppress(ZeroDivisionError):
                generation.__exit__(ZeroDivisionError, ZeroDivisionError(), None)
        else:
            generation.__exit__(None, None, None)
        self.count -= 1

    @rule(session=SESSIONS, lease_s=st.sampled_from([1.0, 10.0]))
    def pause(self, session: str, lease_s: float) -> None:
        holder = self.holder()
        if holder not in (None, session):
            with pytest.raises(StateError):
                self.gate.pause(session, timeout_s=0.0, lease_s=lease_s)
        elif self.count:
            with pytest.raises(DeadlineExceededError):
                self.gate.pause(session, timeout_s=0.0, lease_s=lease_s)
            self.paused_by = None
        else:
            self.gate.pause(session, timeout_s=0.0, lease_s=lease_s)
            self.paused_by, self.lease_end = session, self.clock.now + lease_s

    @rule(session=SESSIONS)
    def resume(self, session: str) -> None:
        if self.fenced:
            with pytest.raises(StateError):
                self.gate.resume(session)
            return
        self.gate.resume(session)
        self.release_in_model(session)

    @rule(session=SESSIONS)
    def release(self, session: str) -> None:
        self.gate.release(session)
        self.release_in_model(session)

    def release_in_model(self, session: str) -> None:
        if self.paused_by == session:
            self.paused_by = None

    @rule()
    def fence(self) -> None:
        self.gate.fence("half-loaded")
        self.fenced, self.fenced_by = True, None

    @rule(session=SESSIONS)
    def fence_if_paused_by(self, session: str) -> None:
        holds = self.holder() == session and self.count == 0
        assert self.gate.fence_if_paused_by(session, "weights are written") == holds
        if holds:
            self.fenced, self.fenced_by = True, session

    @precondition(lambda self: self.fenced)
    @rule(number=st.integers(0, 5))
    def serve(self, number: int) -> None:
        self.version = Version(run_id="r", number=number)
        self.gate.serve(self.version)
        self.fenced = False

    @precondition(lambda self: self.fenced)
    @rule(session=SESSIONS)
    def unfence(self, session: str) -> None:
        self.gate.unfence(session)
        self.fenced = self.fenced_by != session

    @rule(seconds=st.sampled_from([0.5, 2.0, 20.0]))
    def pass_time(self, seconds: float) -> None:
        self.clock.now += seconds

    @invariant()
    def agrees_with_the_model(self) -> None:
        assert self.gate.serving == (not self.fenced and self.holder() is None)
        assert self.gate.version == self.version
        for session in ("a", "b"):
            assert holds_pause(self.gate, session) == (self.holder() == session and self.count == 0)


TestGateMachine = GateMachine.TestCase
TestGateMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_a_pause_waits_for_running_generations_and_keeps_new_ones_out() -> None:
    gate = ServingGate()
    running = gate.generation()
    running.__enter__()
    pausing = in_thread(lambda: gate.pause("s", timeout_s=10, lease_s=10), name="pause")
    while gate.serving:
        time.sleep(0.001)
    with pytest.raises(NotServingError, match="paused"), gate.generation(timeout_s=0.05):
        pytest.fail("a generation began while a pause waits")
    assert not pausing.done()
    assert not holds_pause(gate, "s"), "not before the last one is out"
    running.__exit__(None, None, None)
    pausing.result(5)
    assert holds_pause(gate, "s")


def test_nobody_fences_for_a_write_while_a_generation_runs() -> None:
    gate = ServingGate()
    running = gate.generation()
    running.__enter__()
    pausing = in_thread(lambda: gate.pause("s", timeout_s=10, lease_s=10), name="pause")
    while gate.serving:
        time.sleep(0.001)
    assert not gate.fence_if_paused_by("s", "weights are written")
    running.__exit__(None, None, None)
    pausing.result(5)
    assert not gate.fence_if_paused_by("t", "weights are written")
    assert gate.fence_if_paused_by("s", "weights are written")


def test_nobody_fences_for_a_write_after_the_lease_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even if nobody has looked at the gate since."""
    clock = Clock()
    monkeypatch.setattr(gate_module, "time", clock)
    gate = ServingGate()
    gate.pause("s", timeout_s=0.0, lease_s=1.0)
    clock.now += 1.0
    assert not gate.fence_if_paused_by("s", "weights are written")
    assert gate.serving


def test_a_pause_that_can_not_have_it_lets_everybody_go_on() -> None:
    gate = ServingGate()
    with gate.generation():
        with pytest.raises(DeadlineExceededError, match="1 left"):
            gate.pause("s", timeout_s=0.05, lease_s=10)
        assert gate.serving
    gate.pause("t", timeout_s=1, lease_s=10)


def test_a_generation_waits_out_a_pause_and_runs_on_the_new_version() -> None:
    gate = ServingGate()
    gate.pause("s", timeout_s=1, lease_s=30)
    entered = threading.Event()

    def generate() -> Any:
        with gate.generation(timeout_s=10) as version:
            entered.set()
            return version

    waiting = in_thread(generate, name="generate")
    assert not entered.wait(0.1)
    new = Version(run_id="r", number=2)
    gate.fence("a commit")
    # A fence is an answer, not a wait: who waited is told to go elsewhere.
    assert isinstance(waiting.exception(5), NotServingError)
    waiting = in_thread(generate, name="generate")
    assert isinstance(waiting.exception(5), NotServingError)
    gate.serve(new)
    waiting = in_thread(generate, name="generate")
    assert not entered.wait(0.1), "serve lifts the fence, not the pause"
    gate.resume("s")
    assert waiting.result(5) == new


def test_a_lease_that_ends_lets_waiting_generations_in_without_being_told() -> None:
    gate = ServingGate()
    gate.pause("dead trainer", timeout_s=0.0, lease_s=0.15)
    with gate.generation(timeout_s=10):
        pass
    assert not holds_pause(gate, "dead trainer")


class Hold:
    """A lease of which a set is held, and who looks at it."""

    def __init__(self) -> None:
        self.looks: list[str] = []
        self.on = True

    def refusal(self) -> str | None:
        return None

    @property
    def held(self) -> bool:
        self.looks.append(threading.current_thread().name)
        return self.on


def test_of_all_that_wait_for_the_end_of_a_hold_one_looks() -> None:
    """And another one where that gives up. Seen red: each looked every 2 ms: 64 of them took two thirds of a core."""
    hold: Any = Hold()
    gate = ServingGate(hold)

    def passes(timeout_s: float) -> None:
        with gate.generation(timeout_s=timeout_s):
            pass

    first = in_thread(lambda: passes(2.0), name="first")
    wait_until(lambda: hold.looks, "it looks")
    others = [in_thread(lambda: passes(60.0), name=f"other-{index}") for index in range(8)]
    with pytest.raises(NotServingError, match="paused for over"):
        first.result(60.0)
    hold.looks.clear()
    wait_until(lambda: len(hold.looks) > 100, "another one looks")
    found = [hold.looks.count(f"other-{index}") for index in range(8)]
    assert sorted(found)[-2] <= 6, found
    hold.on = False
    for other in others:
        other.result(60.0)


@pytest.mark.parametrize("read", range(1, 9))
def test_a_hold_that_ends_between_two_looks_is_over(read: int) -> None:
    """Seen red: who looked then waited for a word, which nobody gave."""

    class Ends(Hold):
        @property
        def held(self) -> bool:
            self.looks.append("")
            return len(self.looks) < read

    hold: Any = Ends()
    gate = ServingGate(hold)
    gate.pause("before", timeout_s=0.0, lease_s=600.0)
    gate.resume("before")

    def passes() -> None:
        with gate.generation(timeout_s=60.0):
            pass

    in_thread(passes, name="passes").result(30.0)


def test_a_lease_never_opens_a_fence() -> None:
    gate = ServingGate()
    gate.pause("dead trainer", timeout_s=0.0, lease_s=0.05)
    gate.fence("half-loaded")
    while holds_pause(gate, "dead trainer"):
        time.sleep(0.001)
    assert not gate.serving
    with pytest.raises(NotServingError, match="half-loaded"), gate.generation(timeout_s=5):
        pytest.fail("half-loaded weights were served")
    gate.pause("next", timeout_s=1, lease_s=10)
    gate.serve(Version(run_id="r", number=1))
    gate.resume("next")
    assert gate.serving


def test_a_session_that_is_over_can_not_pause_and_the_next_of_its_name_can() -> None:
    """Seen red: the gate went by the name that its engine gave, and that one may be over."""
    gate, is_open = ServingGate(), [True]

    def pause() -> None:
        gate.pause("s", timeout_s=1, lease_s=30, is_open=lambda: is_open[0])

    for _ in range(2):
        gate.begin("s")
        pause()
        gate.resume("s")
        pause()
        gate.release("s")
        with pytest.raises(StateError, match="is not open here"):
            pause()
        assert gate.serving
    gate.begin("s")
    is_open[0] = False
    with pytest.raises(StateError, match="is not open here"):
        pause()
    assert gate.serving


def test_another_session_neither_pauses_over_nor_resumes() -> None:
    gate = ServingGate()
    gate.pause("a", timeout_s=1, lease_s=30)
    with pytest.raises(StateError, match="session a"):
        gate.pause("b", timeout_s=1, lease_s=30)
    gate.resume("b")
    gate.release("b")
    assert holds_pause(gate, "a")


def test_a_pause_that_was_released_meanwhile_takes_nothing_from_the_next_one() -> None:
    """An abort ends a's pause while it still waits; b pauses; then a's wait runs out of time."""
    gate = ServingGate()
    running = gate.generation()
    running.__enter__()
    first = in_thread(lambda: gate.pause("a", timeout_s=10, lease_s=30), name="a")
    while gate.serving:
        time.sleep(0.001)
    gate.release("a")
    second = in_thread(lambda: gate.pause("b", timeout_s=20, lease_s=30), name="b")
    while gate.serving and not second.done():
        time.sleep(0.001)
    assert isinstance(first.exception(15), WeightSyncError)
    assert not gate.serving, "b still holds its pause"
    running.__exit__(None, None, None)
    second.result(5)
    assert holds_pause(gate, "b")


def test_a_pause_that_was_released_meanwhile_is_no_success() -> None:
    gate = ServingGate()
    running = gate.generation()
    running.__enter__()
    first = in_thread(lambda: gate.pause("a", timeout_s=5, lease_s=30), name="a")
    while gate.serving:
        time.sleep(0.001)
    gate.release("a")
    running.__exit__(None, None, None)
    assert isinstance(first.exception(5), WeightSyncError)


def test_many_threads_never_generate_inside_a_pause() -> None:
    """Each pause is one switch of the weights: two halves that must be equal whenever a generation looks."""
    gate = ServingGate()
    halves = [0, 0]
    stop = threading.Event()
    generated = 0

    def generate() -> None:
        nonlocal generated
        while not stop.is_set():
            with gate.generation(timeout_s=10):
                first = halves[0]
                for _ in range(20):
                    assert halves == [first, first]
                generated += 1

    generators = [in_thread(generate, name=f"g{i}") for i in range(4)]
    for number in range(1, 60):
        gate.pause("s", timeout_s=10, lease_s=10)
        halves[0] = number
        seen = generated
        assert holds_pause(gate, "s")
        halves[1] = number
        assert generated == seen
        gate.resume("s")
        while generated == seen and not any(g.done() for g in generators):
            pass
    stop.set()
    for generator in generators:
        generator.result(10)
