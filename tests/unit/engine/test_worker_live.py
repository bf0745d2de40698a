"""EngineWorker.live_version: what is live at each moment of a session, told without waiting for anybody."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from tests.unit.engine.patch_kit import version
from tests.unit.engine.test_worker_patches import Patched
from tests.unit.host.fakes import RUN, Bench, begin, chunk, manifest
from weightsync.errors import LoadError
from weightsync.handles.fanout import in_thread
from weightsync.types import StageRequest, Version


def served(number: int) -> Version:
    return Version(run_id=RUN, number=number)


@pytest.fixture
def patched() -> Iterator[Patched]:
    made = Patched()
    yield made
    made.trainer.close()


def half_loaded(*, in_place: bool) -> Bench:
    """A worker that serves version 1, and has half of version 2."""
    bench = Bench(in_place=in_place)
    assert bench.worker.live_version is None, "nobody told what it was built with"
    bench.sync(1)
    assert bench.worker.live_version == served(1)
    bench.worker.begin(begin(2))
    bench.worker.update(chunk(0))
    return bench


def test_the_old_version_is_live_until_the_commit() -> None:
    bench = half_loaded(in_place=False)
    assert bench.worker.live_version == served(1)
    bench.worker.update(chunk(1))
    bench.worker.stage(StageRequest(session="s", manifest=manifest(2, seed=1)))
    assert bench.worker.live_version == served(1)
    bench.worker.commit("s")
    assert bench.worker.live_version == served(2)


def test_weights_that_are_written_in_place_are_no_versions() -> None:
    """From the first chunk on, and when the session was aborted, until the next commit.

    Seen red without the look at the loader's health."""
    bench = half_loaded(in_place=True)
    assert bench.worker.live_version is None
    bench.worker.abort(None, "as told")
    assert bench.worker.live_version is None
    bench.sync(3, seed=2, session="again")
    assert bench.worker.live_version == served(3)


def test_a_commit_that_fails_leaves_what_the_loader_says() -> None:
    bench = half_loaded(in_place=False)
    bench.worker.update(chunk(1))
    bench.worker.stage(StageRequest(session="s", manifest=manifest(2, seed=1)))
    bench.loader.commit_fault = LoadError("no")
    with pytest.raises(LoadError):
        bench.worker.commit("s")
    assert bench.worker.live_version == served(1)
    assert bench.worker.describe().version == served(1)


def test_it_waits_for_nobody() -> None:
    """It is asked before each step of a generation. Seen red with a lock."""
    bench = half_loaded(in_place=False)
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with bench.worker._lock:
            held.set()
            assert done.wait(20)

    holder = in_thread(hold, name="holder")
    assert held.wait(10)
    asked = in_thread(lambda: bench.worker.live_version, name="asks")
    try:
        assert asked.result(5) == served(1)
    finally:
        done.set()
        holder.result(10)


def test_a_patch_is_live_from_its_commit_to_its_undo(patched: Patched) -> None:
    assert patched.worker.live_version == version(1)
    patched.worker.commit("s")
    assert patched.worker.live_version == version(2)
    patched.worker.rollback("s", "the other one failed")
    assert patched.worker.live_version == version(1)


def test_what_an_audit_found_is_no_version(patched: Patched) -> None:
    """Seen red without the look at what audits found."""
    patched.worker.commit("s")
    patched.rig.modules[0].bf16.view(torch.int16)[0, 0] ^= 1
    patched.worker.verify()
    assert patched.worker.live_version is None
