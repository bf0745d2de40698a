"""A real vLLM whose live weights lie as they were loaded: deltas are written into them, proved, and taken back."""

from __future__ import annotations

import contextlib
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from tests.engines import vllm_faults
from tests.engines.conftest import Versions
from tests.engines.test_pull_vllm import Pulls
from tests.engines.vllm_support import (
    DIFFERENT,
    NEEDS_VLLM,
    SAME,
    Oracle,
    Server,
    build_model,
    distance,
    nudge,
    save_checkpoint,
    train_step,
    vllm_is_there,
)
from tests.engines.vllm_unpacked import VARIABLE
from tests.standins.processes import children
from weightsync.cli import app
from weightsync.engine.vllm.asked_audits import EVERY_VARIABLE
from weightsync.types import Deadline
from weightsync.types.transfer_messages import Transport

pytestmark = pytest.mark.timeout(600)
UNPACKED = {VARIABLE: "1", EVERY_VARIABLE: "0"}
CLOSE = 0.02
"""Sums over two workers are rounded in another order."""


class Live:
    """A server, and what fresh engines of each version say.

    Args:
        server: of version 0.
        oracle: fresh engines that keep their weights as the server does.
        checkpoints: the model after one step, and the same with few elements changed.
    """

    def __init__(self, server: Server, oracle: Oracle, checkpoints: tuple[Path, Path]) -> None:
        self.server = server
        self.oracle = oracle
        self.checkpoints = checkpoints

    def serves(self, *, few: bool) -> None:
        """Asserts that it answers as a fresh engine of that version, and not as one of the other."""
        told = self.server.logprobs()
        assert distance(told, self.oracle.logprobs(self.checkpoints[few])) <= SAME
        assert distance(told, self.oracle.logprobs(self.checkpoints[not few])) >= DIFFERENT


@contextlib.contextmanager
def live(versions: Versions, folder: Path, *, tp: int = 1) -> Iterator[Live]:
    if not vllm_is_there:
        pytest.skip(NEEDS_VLLM)
    model = build_model()
    train_step(model, 1)
    nudge(model)
    checkpoints = versions.checkpoints[1], save_checkpoint(folder / "nudged", model)
    server = Server(versions.checkpoints[0], folder / "server", tp=tp, env=UNPACKED)
    env = {**vllm_faults.install(folder / "oracle"), **UNPACKED}
    with tempfile.TemporaryFile("w+") as log, contextlib.ExitStack() as stack:
        oracle = Oracle(log, env=env)
        stack.callback(oracle.close)
        stack.callback(server.stop)
        stack.callback(server.http.close)
        server.start()
        oracle.learn(checkpoints)
        server.wait_until_ready()
        yield Live(server, oracle, checkpoints)


@pytest.fixture(scope="module")
def one(versions: Versions, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with live(versions, tmp_path_factory.mktemp("live")) as there:
        yield there


@pytest.fixture
def pulls(one: Live) -> Iterator[Callable[[], Pulls]]:
    vllm_faults.disarm(one.server.folder)
    with contextlib.ExitStack() as stack:
        start = stack.enter_context(children())

        def make() -> Pulls:
            made = Pulls(start, one.server, Transport.TCP, "delta")
            stack.callback(made.close)
            return made

        yield make


def test_a_delta_is_written_into_live_weights_and_proved(one: Live, pulls: Callable[[], Pulls]) -> None:
    """There and back, several times; the first version of a run alone is loaded in full."""
    there = pulls()
    for number, few in enumerate((False, True, False, True, False)):
        there.publish(1, few=few)
        status = there.sync()
        assert (status.num_committed, status.num_patched) == (number + 1, int(number > 0)), status
        assert status.unprovable == {}, status
        one.serves(few=few)


def test_a_patch_that_fails_half_way_is_undone(one: Live, pulls: Callable[[], Pulls]) -> None:
    """The weights are the former ones, to the bit: the next delta builds on them; the same version comes in full."""
    there = pulls()
    there.publish(1)
    there.sync()
    vllm_faults.arm(one.server.folder, {"at": "patch", "do": "raise"})
    there.publish(1, few=True)
    status = there.sync()
    assert not vllm_faults.armed(one.server.folder)
    assert status.num_patched == 0
    one.serves(few=True)
    there.publish(1)
    assert there.sync().num_patched == 1
    one.serves(few=False)


def test_a_service_that_was_started_again_has_what_differs_written(one: Live, pulls: Callable[[], Pulls]) -> None:
    """It knows no base, and pulls all of a version; the server holds one. vLLM's own reload is not asked for: armed as
    it is, it would fail. Where everything differs it isn't either."""
    there = pulls()
    for few in (False, True):
        there.publish(1, few=few)
        there.sync()
    there.stop()
    vllm_faults.arm(one.server.folder, {"at": "reload", "do": "raise", "chunk": 0})
    there.publish(1)
    there.serve()
    status = there.sync()
    assert (status.num_deltas, status.num_patched, status.unprovable) == (0, 0, {}), status
    one.serves(few=False)
    assert 0 < there.metric("weightsync_written_elements_total") < 1000
    there.publish(1, few=True)
    assert there.sync().num_patched == 1
    one.serves(few=True)
    there.stop()
    there.publish(2)
    there.serve()
    assert there.sync().num_deltas == 0
    assert there.metric("weightsync_written_elements_total") == 0, "all of it was written"
    there.publish(1)
    there.sync()
    one.serves(few=False)
    assert verified(one.server) == 0
    assert vllm_faults.armed(one.server.folder)


def test_live_weights_are_read_again_when_somebody_asks(one: Live, pulls: Callable[[], Pulls]) -> None:
    """Also behind a patch. One bit that nobody published: its state says so, and that version comes in full again."""
    there = pulls()
    for few in (False, True):
        there.publish(1, few=few)
        there.sync()
        assert verified(one.server) == 0
    vllm_faults.arm(one.server.folder, {"at": "audit", "do": "corrupt"})
    assert verified(one.server) == 1
    brought_back(one)
    one.serves(few=True)
    there.publish(1)
    assert there.sync().num_patched == 1
    assert verified(one.server) == 0
    one.serves(few=False)


def test_live_weights_are_read_again_behind_a_patch(one: Live, pulls: Callable[[], Pulls]) -> None:
    """Nobody asks. Its service sees what was found, and loads the same version in full."""
    there = pulls()
    there.publish(1)
    there.sync()
    vllm_faults.arm(one.server.folder, {"at": "behind", "do": "corrupt"})
    there.publish(1, few=True)
    assert there.sync().num_patched == 1
    deadline = Deadline(120.0)
    while there.metric('weightsync_audits_total{outcome="wrong"}') < 1:
        assert not deadline.expired, one.server.tail()
        threading.Event().wait(0.1)
    assert not vllm_faults.armed(one.server.folder)
    one.serves(few=True)


def test_a_doctor_says_that_all_layers_take_changes(one: Live, pulls: Callable[[], Pulls]) -> None:
    there = pulls()
    there.publish(1)
    there.sync()
    said = CliRunner().invoke(app, ["doctor", f"vllm+{one.server.url}"]).output
    assert "changes are written in place in all of its" in said, said


def verified(server: Server) -> int:
    """The exit code of `weightsync verify`."""
    return CliRunner().invoke(app, ["verify", f"vllm+{server.url}"]).exit_code


def brought_back(there: Live) -> None:
    """Returns when its service has seen what an audit found, and has loaded the same version in full."""
    deadline = Deadline(60.0)
    while verified(there.server) != 0:
        assert not deadline.expired, there.server.tail()


def answers_of(server: Server) -> list[list[float]] | None:
    """What it answers; None where it refuses, or is gone."""
    try:
        return server.logprobs()
    except (httpx.HTTPError, AssertionError):
        return None


def test_two_tensor_parallel_workers_patch_their_shards_together(versions: Versions, tmp_path: Path) -> None:
    """Each writes its own part. One that fails half-way: the other takes its part back, and both load in full. One that
    is killed half-way: the server answers nothing any more.

    What a version says when vLLM's own loader has brought it, it says when a patch has, to the bit."""
    with contextlib.ExitStack() as stack:
        two, start = stack.enter_context(live(versions, tmp_path, tp=2)), stack.enter_context(children())
        there = stack.enter_context(contextlib.closing(Pulls(start, two.server, Transport.TCP, "delta")))
        told: dict[bool, list[list[float]]] = {}

        def brings(few: bool, *, patched: int) -> None:
            there.publish(1, few=few)
            status = there.sync()
            assert (status.num_patched, status.unprovable) == (patched, {}), status
            answers = two.server.logprobs()
            assert told.setdefault(few, answers) == answers
            assert distance(answers, two.oracle.logprobs(two.checkpoints[few])) <= CLOSE

        brings(False, patched=0)
        brings(True, patched=1)
        brings(False, patched=1)
        vllm_faults.arm(two.server.folder, {"at": "patch", "do": "raise", "worker": 1})
        brings(True, patched=0)
        assert not vllm_faults.armed(two.server.folder)
        brings(False, patched=1)
        assert distance(told[False], told[True]) >= 2 * CLOSE
        assert verified(two.server) == 0
        vllm_faults.arm(two.server.folder, {"at": "audit", "do": "corrupt", "worker": 1})
        assert verified(two.server) == 1
        brought_back(two)
        assert two.server.logprobs() == told[False]
        brings(False, patched=1)
        vllm_faults.arm(two.server.folder, {"at": "patch", "do": "kill", "worker": 1})
        there.publish(1, few=True)
        there.notify()
        deadline = Deadline(60.0)
        while (answers := answers_of(two.server)) is not None:
            assert answers == told[False]
            assert not deadline.expired, two.server.tail()
        assert not vllm_faults.armed(two.server.folder)
