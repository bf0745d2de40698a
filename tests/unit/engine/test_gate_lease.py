"""ServingGate with a lease of a fleet: no answer without one, and none while a set is committed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from weightsync.engine.gate import ServingGate
from weightsync.errors import NotServingError
from weightsync.handles.fanout import in_thread
from weightsync.memory import LeaseReader, ServingLease, boot_s
from weightsync.types import Version

LONG_S = 10.0
V1 = Version(run_id="r", number=1)


class Served:
    """A gate, and the lease that its service writes."""

    def __init__(self, path: Path) -> None:
        self.lease = ServingLease(str(path / "lease"))
        self.gate = ServingGate(LeaseReader(self.lease.path))
        self.lease.renew(boot_s() + 1000.0)

    def generates(self, timeout_s: float = 0.0) -> Version | None:
        with self.gate.generation(timeout_s=timeout_s) as version:
            return version


def until_somebody_waits(served: Served) -> None:
    end = time.monotonic() + LONG_S
    while not served.gate._changed._waiters:  # type: ignore[attr-defined]
        assert time.monotonic() < end
        time.sleep(0.0005)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    made = Served(tmp_path)
    yield made
    made.lease.remove()


def test_with_a_lease_it_generates(served: Served) -> None:
    served.gate.serve(V1)
    assert served.generates() == V1
    assert served.gate.serving


def test_without_one_it_refuses_at_once(served: Served) -> None:
    served.lease.revoke()
    began_s = time.monotonic()
    with pytest.raises(NotServingError, match="refuses to serve: it holds no lease of its rollout service") as caught:
        served.generates(LONG_S)
    assert caught.value.state_left == "fenced"
    assert time.monotonic() - began_s < LONG_S / 2, "nothing is waited for"
    assert not served.gate.serving
    served.lease.renew(boot_s() + 1000.0)
    served.generates()


def test_a_hold_is_waited_for(served: Served) -> None:
    served.lease.hold(boot_s() + 100.0)
    with pytest.raises(NotServingError, match=r"has been paused for over 0.05 s"):
        served.generates(0.05)
    waiting = in_thread(lambda: served.generates(LONG_S), name="waits")
    until_somebody_waits(served)
    served.gate.serve(V1)
    assert not waiting.done()
    served.lease.lift()
    assert waiting.result(LONG_S) == V1, "the new version"


def test_a_hold_that_ends_by_itself_refuses_who_waits(served: Served) -> None:
    served.lease.hold(boot_s() + 0.1)
    with pytest.raises(NotServingError, match="a set of models was not committed as a whole"):
        served.generates(LONG_S)


def test_a_lease_that_ends_refuses_who_waits_for_a_hold(served: Served) -> None:
    served.lease.hold(boot_s() + 100.0)
    waiting = in_thread(lambda: served.generates(LONG_S), name="waits")
    until_somebody_waits(served)
    served.lease.revoke()
    with pytest.raises(NotServingError, match="holds no lease"):
        waiting.result(LONG_S)


def test_a_lease_that_ends_refuses_who_waits_for_a_pause(served: Served) -> None:
    served.gate.pause("s", timeout_s=1.0, lease_s=0.05)
    served.lease.revoke()
    with pytest.raises(NotServingError, match="holds no lease"):
        served.generates(LONG_S)


def test_what_was_generated_without_a_lease_is_not_answered(served: Served) -> None:
    """It ended while the generation ran; what ran is out of the gate all the same."""
    generation = served.gate.generation()
    generation.__enter__()
    served.lease.revoke()
    with pytest.raises(NotServingError, match="this engine must not answer: it holds no lease"):
        generation.__exit__(None, None, None)
    served.gate.pause("s", timeout_s=0.0, lease_s=1.0)


def test_a_set_that_failed_meanwhile_is_not_answered(served: Served) -> None:
    generation = served.gate.generation()
    generation.__enter__()
    served.lease.hold(boot_s())
    with pytest.raises(NotServingError, match="must not answer: a set of models"):
        generation.__exit__(None, None, None)


def test_what_began_before_a_hold_may_end_in_it(served: Served) -> None:
    """It is of the old set, and all of the new one comes after the hold."""
    with served.gate.generation() as version:
        served.lease.hold(boot_s() + 100.0)
    assert version is None


def test_a_generation_that_fails_says_why_itself(served: Served) -> None:
    generation = served.gate.generation()
    generation.__enter__()
    served.lease.revoke()
    assert not generation.__exit__(ZeroDivisionError, ZeroDivisionError(), None), "it is raised on"
    served.gate.pause("s", timeout_s=0.0, lease_s=1.0)


def test_a_fence_is_stronger_than_a_lease(served: Served) -> None:
    served.gate.fence("half-loaded")
    with pytest.raises(NotServingError, match="half-loaded"):
        served.generates(LONG_S)
    served.gate.serve(V1)
    assert served.generates() == V1


def test_a_service_that_closes_ends_it(served: Served) -> None:
    served.lease.close()
    with pytest.raises(NotServingError, match="holds no lease"):
        served.generates()


def test_many_generate_while_sets_are_committed(served: Served) -> None:
    """Nothing of an older version is answered after a newer one was; who is held comes through."""
    answers: list[int] = []
    stop = False

    def generates() -> None:
        while not stop:
            with served.gate.generation(timeout_s=LONG_S) as version:
                answers.append(-1 if version is None else version.number)

    running = [in_thread(generates, name="generates") for _ in range(4)]
    for number in range(20):
        served.lease.hold(boot_s() + 100.0)
        served.gate.pause("s", timeout_s=LONG_S, lease_s=LONG_S)
        served.gate.serve(Version(run_id="r", number=number))
        served.gate.resume("s")
        enough = len(answers) + 8
        served.lease.lift()
        while len(answers) < enough:
            time.sleep(0.001)
    stop = True
    for each in running:
        each.result(LONG_S)
    assert answers == sorted(answers)
    assert set(answers) >= set(range(20))
