"""EngineWorker and patches: what an engine of workers never shows by itself."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.unit.engine.patch_kit import LONG_S, Rig, Trainer, until, version
from weightsync.engine import audit
from weightsync.errors import (
    DigestMismatchError,
    LoadError,
    StateError,
    TransferAbortedError,
    UnsupportedError,
    WeightSyncError,
)
from weightsync.handles.fanout import in_thread
from weightsync.host.staged_requests import patch_requests
from weightsync.types import BeginRequest, PatchBase, StageRequest


class Patched:
    """A worker that serves version 1, with a patch to version 2 that is staged."""

    def __init__(self) -> None:
        self.trainer = Trainer()
        self.rig = Rig()
        self.rig.load(self.trainer.pulled())
        self.before = self.trainer.weights
        self.worker, self.loader = self.rig.workers[0], self.rig.loaders[0]
        self.trainer.step()
        self.pulled = self.trainer.pulled()
        self.begin()

    def begin(self, session: str = "s") -> None:
        patch = self.pulled.patch
        assert patch is not None
        base = PatchBase(version=patch.base, model_digest=patch.base_digest)
        self.worker.begin(BeginRequest(session=session, manifest=self.pulled.manifest, deadline_s=LONG_S, base=base))
        for update in patch_requests(patch, self.pulled.manifest, session, max_bytes=1 << 20):
            self.worker.update(update)
        self.worker.stage(StageRequest(session=session, manifest=self.pulled.manifest))

    def is_at(self, number: int) -> None:
        self.rig.has(self.rig.modules[0], self.before if number == 1 else self.trainer.weights)
        assert self.worker.describe().version == version(number)
        assert self.worker.describe().serving


@pytest.fixture
def patched() -> Iterator[Patched]:
    made = Patched()
    yield made
    made.trainer.close()


def test_a_commit_is_rolled_back_and_told_so(patched: Patched) -> None:
    patched.worker.commit("s")
    patched.is_at(2)
    patched.worker.rollback("s", "the other one failed")
    patched.is_at(1)
    with pytest.raises(TransferAbortedError, match="the other one failed"):
        patched.worker.commit("s")
    patched.worker.rollback("s", "again")
    patched.is_at(1)
    assert "undo" in [record.name for record in patched.worker.drain_phases()]


def test_a_rollback_of_what_was_not_committed_aborts(patched: Patched) -> None:
    patched.worker.rollback("s", "as told")
    patched.is_at(1)
    with pytest.raises(TransferAbortedError, match="as told"):
        patched.worker.commit("s")
    patched.is_at(1)


def test_a_rollback_of_another_session_touches_nothing(patched: Patched) -> None:
    patched.worker.commit("s")
    patched.worker.rollback("stranger", "as told")
    patched.is_at(2)
    patched.worker.rollback("s", "as told")
    patched.is_at(1)


def test_what_was_audited_can_not_be_rolled_back(patched: Patched) -> None:
    patched.worker.commit("s")
    patched.worker.audit("s")
    patched.worker.rollback("s", "too late")
    patched.is_at(2)
    with pytest.raises(StateError):
        patched.loader.rollback()


def test_what_was_settled_can_not_be_rolled_back_and_nothing_else_is(patched: Patched) -> None:
    patched.worker.settle("s")  # not committed yet
    patched.worker.commit("s")
    patched.worker.settle("stranger")
    assert patched.loader.can_roll_back
    patched.worker.settle("s")
    assert not patched.loader.can_roll_back
    patched.worker.rollback("s", "too late")
    patched.is_at(2)


def test_an_audit_of_something_else_than_is_served_reads_nothing(patched: Patched) -> None:
    patched.worker.drain_phases()
    patched.worker.audit("s")  # not committed yet
    patched.worker.commit("s")
    patched.worker.audit("stranger")
    assert "audit" not in [record.name for record in patched.worker.drain_phases()]
    patched.worker.audit("s")
    assert "audit" in [record.name for record in patched.worker.drain_phases()]


def test_what_an_audit_found_is_said_until_a_full_load(patched: Patched) -> None:
    patched.worker.commit("s")
    patched.rig.modules[0].mask[-1] ^= True
    with pytest.raises(DigestMismatchError, match="audit"):
        patched.worker.audit("s")
    reply = patched.worker.describe()
    assert (reply.serving, reply.version, reply.model_digest) == (False, None, None)
    assert "not to be served" in (reply.unhealthy or "")


@pytest.mark.parametrize("rots", [False, True])
def test_audits_end_though_patches_come_faster_than_they_read(
    patched: Patched, monkeypatch: pytest.MonkeyPatch, rots: bool
) -> None:
    """Each is interrupted after two tensors; together they read all, and follow what the patches change.

    Seen to fail where each began anew, and where they did not follow.
    """
    reads, stands = [0], threading.Event()

    class TwoAtATime(audit.PartSums):
        def add(self, held: Any) -> None:
            reads[0] += 1
            if reads[0] == 2:
                stands.set()
                until(
                    lambda: patched.worker._audits._current is None or patched.worker._audits._current.paused,
                    "the next session",
                )
            super().add(held)

    monkeypatch.setattr(audit, "PartSums", TwoAtATime)
    patched.worker.commit("s")
    if rots:
        patched.rig.modules[0].bf16.view(torch.int16)[0, 0] ^= 1
    session, rounds = "s", 0
    while patched.worker.describe().unhealthy is None:
        rounds += 1
        assert rounds < 10, "no audit ends"
        reads[0] = 0
        stands.clear()
        running = in_thread(functools.partial(patched.worker.audit, session), name="audit")
        until(lambda: stands.is_set() or running.done(), "an audit that reads")  # noqa: B023
        if running.done():
            break
        patched.trainer.step(share=0.0)
        patched.pulled = patched.trainer.pulled()
        session = f"s{rounds}"
        patched.begin(session)
        assert running.exception(LONG_S) is None
        patched.worker.commit(session)
    assert rounds > 3
    assert (patched.worker.describe().unhealthy is not None) == rots


def test_a_model_that_can_not_be_patched_says_so_from_then_on(
    patched: Patched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen to fail: it said that it takes patches, and refused each of them, at the price of a new group every time."""
    patched.worker.abort("s", "as told")
    assert patched.worker.describe().accepts == ("full", "patch")

    def refuses(_: Any) -> None:
        raise UnsupportedError("elements share memory")

    monkeypatch.setattr(patched.loader, "begin_patch", refuses)
    patched.rig.load(patched.pulled)
    patched.trainer.step()
    patched.pulled = patched.trainer.pulled()
    with pytest.raises(UnsupportedError):
        patched.begin("t")
    assert patched.worker.describe().accepts == ("full",)


def test_a_rollback_that_fails_is_typed_and_the_worker_refuses(patched: Patched) -> None:
    patched.worker.commit("s")
    patched.rig.modules[0].bf16.data = patched.rig.modules[0].bf16.data.clone()
    with pytest.raises(LoadError, match="could not be undone"):
        patched.worker.rollback("s", "as told")
    assert not patched.worker.describe().serving


def test_a_session_that_ends_while_its_commit_waits_is_not_committed(
    patched: Patched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its watchdog came first: the loader is being aborted, and the patch with it, at this very moment."""
    look = patched.worker._open_session

    def look_and_lose(name: str) -> Any:
        session = look(name)
        session.note(TransferAbortedError("its deadline is over"))
        session.ended = True
        return session

    committed: list[Any] = []
    commit = patched.loader.commit
    monkeypatch.setattr(patched.loader, "commit", lambda version: committed.append(commit(version)))
    monkeypatch.setattr(patched.worker, "_open_session", look_and_lose)
    with pytest.raises(WeightSyncError, match="its deadline is over"):
        patched.worker.commit("s")
    assert committed == []


def test_closing_forgets_the_undo_record(patched: Patched) -> None:
    patched.worker.commit("s")
    patched.worker.close()
    patched.worker.rollback("s", "too late")
    patched.is_at(2)
