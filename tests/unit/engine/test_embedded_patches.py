"""Engines that are given patches: exactly the new version or exactly the old one, on every worker."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch

from tests.unit.engine.patch_kit import LONG_S, MODEL_ID, Mixed, Rig, Trainer, held_sums, manifest_of, until, version
from weightsync.codec.digest import PartSums
from weightsync.engine import audit
from weightsync.engine.embedded import EmbeddedEngine
from weightsync.engine.processes import ProcessWorker
from weightsync.errors import (
    DigestMismatchError,
    EngineError,
    InvalidRequestError,
    LoadError,
    NotServingError,
    SyncInProgressError,
    VersionError,
    WeightSyncError,
)
from weightsync.handles.fanout import in_thread
from weightsync.host.engine_update import EngineUpdate
from weightsync.host.staged_requests import full_chunks, full_request, patch_requests, patch_that_fits
from weightsync.host.staged_version import StagedPatch, StagedVersion
from weightsync.load.module import ModuleWeightLoader
from weightsync.testing.contracts import bytes_of
from weightsync.types import (
    AbortRequest,
    BeginRequest,
    CommitRequest,
    Deadline,
    DescribeRequest,
    EngineOp,
    EngineReply,
    EngineRequest,
    PatchBase,
    PauseRequest,
    ResumeRequest,
    StageRequest,
    UpdateRequest,
)

workers = pytest.mark.parametrize("num_workers", [1, 3])
modes = pytest.mark.parametrize("in_place", [False, True], ids=["staged", "in place"])


@pytest.fixture
def trainer() -> Iterator[Trainer]:
    made = Trainer()
    yield made
    made.close()


def described(rig: Rig) -> EngineReply:
    return rig.engine.call(EngineOp.DESCRIBE, DescribeRequest(), timeout_s=LONG_S)


class Session:
    """A patch session, step by step."""

    def __init__(self, rig: Rig, pulled: StagedVersion, name: str = "s", **base: Any) -> None:
        assert pulled.patch is not None
        self._rig, self._pulled, self.name = rig, pulled, name
        fields: dict[str, Any] = {"version": pulled.patch.base, "model_digest": pulled.patch.base_digest}
        self._base = PatchBase(**{**fields, **base})

    def call(self, op: EngineOp, request: EngineRequest) -> EngineReply:
        return self._rig.engine.call(op, request, timeout_s=LONG_S)

    def begin(self) -> None:
        request = BeginRequest(session=self.name, manifest=self._pulled.manifest, deadline_s=LONG_S, base=self._base)
        self.call(EngineOp.BEGIN, request)

    def update(self) -> None:
        assert self._pulled.patch is not None
        for update in patch_requests(self._pulled.patch, self._pulled.manifest, self.name, max_bytes=100):
            self.call(EngineOp.UPDATE_WEIGHTS, UpdateRequest(update=update))

    def stage(self) -> EngineReply:
        return self.call(EngineOp.STAGE, StageRequest(session=self.name, manifest=self._pulled.manifest))

    def pause(self) -> None:
        self.call(EngineOp.PAUSE, PauseRequest(session=self.name, timeout_s=5.0, lease_s=LONG_S))

    def commit(self) -> EngineReply:
        return self.call(EngineOp.COMMIT, CommitRequest(session=self.name))

    def resume(self) -> None:
        self.call(EngineOp.RESUME, ResumeRequest(session=self.name))

    def up_to_pause(self) -> None:
        self.begin()
        self.update()
        self.stage()
        self.pause()


@workers
@modes
def test_a_version_and_then_patches_upon_patches(trainer: Trainer, num_workers: int, in_place: bool) -> None:
    rig = Rig(num_workers, in_place=in_place)
    assert not rig.load(trainer.pulled()).patched
    for _ in range(4):
        trainer.step()
        report = rig.load(trainer.pulled())
        assert report.patched
        assert report.unprovable is None
        rig.serves(trainer.weights, trainer.number)
        assert described(rig).model_digest == trainer.manifest.model_digest
    trainer.patch = None
    assert not rig.load(trainer.pulled()).patched
    rig.serves(trainer.weights, trainer.number)
    trainer.step()
    assert rig.load(trainer.pulled()).patched
    rig.serves(trainer.weights, trainer.number)


def test_a_patch_in_many_chunks(trainer: Trainer) -> None:
    rig = Rig()
    rig.loading = EngineUpdate(rig.engine, "m", chunk_bytes=64)
    rig.load(trainer.pulled())
    trainer.step()
    report = rig.load(trainer.pulled())
    assert report.patched
    assert report.num_chunks > 3
    rig.serves(trainer.weights, 2)


def test_a_patch_of_nothing(trainer: Trainer) -> None:
    rig = Rig()
    rig.load(trainer.pulled())
    base = trainer.manifest
    trainer.step()
    trainer.weights = Trainer().weights
    trainer.manifest = msgspec.structs.replace(base, version=version(2))
    assert trainer.patch is not None
    nothing = StagedPatch(base=base.version, base_digest=base.model_digest or "", segment="weightsync-x", tensors=())
    report = rig.load(trainer.pulled(patch=nothing))
    assert (report.patched, report.num_chunks) == (True, 0)
    rig.serves(trainer.weights, 2)


@modes
def test_generation_goes_on_up_to_the_pause(trainer: Trainer, in_place: bool) -> None:
    """Also in an engine that is loaded in place else."""
    rig = Rig(in_place=in_place)
    rig.load(trainer.pulled())
    before = trainer.weights
    trainer.step()
    session = Session(rig, trainer.pulled())
    for step in (session.begin, session.update, session.stage):
        step()
        rig.serves(before, 1)
    session.pause()
    with pytest.raises(NotServingError), rig.engine.generation(timeout_s=0.0):
        pass
    session.commit()
    session.resume()
    rig.serves(trainer.weights, 2)


def audits_of(rig: Rig) -> list[Any]:
    """The audits' phases from now on."""
    records: list[Any] = []

    def take(record: Any) -> None:
        if record.name == "audit":
            records.append(record)

    for worker in rig.workers:
        worker.recorder.subscribe(take)
    return records


def test_the_audit_is_recorded_and_finds_nothing(trainer: Trainer) -> None:
    rig = Rig(2)
    audits = audits_of(rig)
    rig.load(trainer.pulled())
    trainer.step()
    rig.load(trainer.pulled())
    until(lambda: len(audits) == 2, "an audit on each worker")
    assert described(rig).unhealthy is None
    assert described(rig).serving


# --- what does not fit ---


@pytest.mark.parametrize("wrong", ["version", "digest", "run", "nothing served"])
@modes
def test_a_patch_on_another_base_is_refused_and_loaded_in_full(trainer: Trainer, wrong: str, in_place: bool) -> None:
    rig = Rig(2, in_place=in_place)
    if wrong != "nothing served":
        rig.load(trainer.pulled())
    before = trainer.weights
    trainer.step()
    pulled = trainer.pulled()
    base: dict[str, Any] = {
        "version": {"version": version(7)},
        "digest": {"model_digest": "wsd2:" + "0" * 32},
        "run": {"version": version(1, "other")},
        "nothing served": {},
    }[wrong]
    if wrong == "nothing served":
        rig.loading._ready(pulled, Deadline(LONG_S), of_fleet=False)
    session = Session(rig, pulled, **base)
    with pytest.raises(VersionError):
        session.begin()
    if wrong != "nothing served":
        rig.serves(before, 1)
    other = StagedPatch(
        base=base.get("version", version(1)),
        base_digest=base.get("model_digest", trainer.patch.base_digest),  # type: ignore[union-attr]
        segment=trainer.patch.segment,  # type: ignore[union-attr]
        tensors=trainer.patch.tensors,  # type: ignore[union-attr]
    )
    assert not rig.load(trainer.pulled(patch=other)).patched
    rig.serves(trainer.weights, 2)


def lies(rig: Rig, pulled: StagedVersion) -> None:
    """The engine loader believes that the patch fits whatever the engine says."""
    describe = rig.engine.call

    def call(op: EngineOp, request: EngineRequest, *, timeout_s: float) -> EngineReply:
        reply = describe(op, request, timeout_s=timeout_s)
        if op == EngineOp.DESCRIBE and pulled.patch is not None:
            return msgspec.structs.replace(
                reply, version=pulled.patch.base, model_digest=pulled.patch.base_digest, accepts=("full", "patch")
            )
        return reply

    rig.engine.call = call  # type: ignore[method-assign]


@modes
def test_a_patch_that_the_engine_refuses_is_loaded_in_full_by_the_same_call(trainer: Trainer, in_place: bool) -> None:
    rig = Rig(in_place=in_place)
    rig.load(trainer.pulled())
    trainer.step()
    trainer.step()  # it has the version before
    pulled = trainer.pulled()
    lies(rig, pulled)
    assert not rig.load(pulled).patched
    rig.serves(trainer.weights, 3)


@pytest.mark.parametrize("what", ["value", "position", "missing", "twice", "outside", "segment"])
@modes
def test_a_patch_of_other_bytes_is_never_served(trainer: Trainer, what: str, in_place: bool) -> None:
    """One bit of it, on its way or in the sender's memory: the digest tells, before anything live is written."""
    rig = Rig(2, in_place=in_place)
    rig.load(trainer.pulled())
    before = trainer.weights
    trainer.step()
    good = trainer.patch
    assert good is not None
    pulled = trainer.pulled()
    memory = torch.frombuffer(trainer.segments[-2].memory, dtype=torch.uint8)
    first, second = good.tensors[0], good.tensors[1]
    tensors = good.tensors
    segment = good.segment
    if what == "value":
        memory[first.values_offset] ^= 1
    elif what == "position":
        at = memory[first.positions_offset :][:4].view(torch.int32)
        at -= 1 if int(at) else 0
        memory[first.values_offset] ^= 0 if int(at) else 1
    elif what == "outside":
        memory[first.positions_offset + 4 * first.count - 2] = 0xFF
    elif what == "missing":
        tensors = tensors[1:]
    elif what == "twice":
        tensors = (first, second, first)
    else:
        segment = "weightsync-1-gone"
    bad = StagedPatch(base=good.base, base_digest=good.base_digest, segment=segment, tensors=tensors)
    pulled = trainer.pulled(patch=bad)
    session = Session(rig, pulled)
    if what != "twice":
        with pytest.raises(WeightSyncError):
            session.up_to_pause()
        rig.serves(before, 1)
    assert not rig.load(pulled).patched, "loaded in full instead"
    rig.serves(trainer.weights, 2)


def test_an_abort_that_does_not_arrive_is_in_the_log(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Beside the error that led to it, which is the one that is raised."""
    rig = Rig(1)
    call = rig.engine.call

    def dying(op: EngineOp, request: EngineRequest, *, timeout_s: float) -> EngineReply:
        if op in (EngineOp.STAGE, EngineOp.ABORT):
            raise EngineError(f"gone at {op}")
        return call(op, request, timeout_s=timeout_s)

    monkeypatch.setattr(rig.engine, "call", dying)
    with pytest.raises(EngineError, match="gone at stage"):
        rig.load(trainer.pulled())
    assert "could not be aborted: gone at abort" in caplog.text


def test_one_chunk_may_not_bring_a_tensor_that_another_has_brought(trainer: Trainer) -> None:
    rig = Rig()
    rig.load(trainer.pulled())
    trainer.step()
    session = Session(rig, trainer.pulled())
    session.begin()
    assert trainer.patch is not None
    updates = list(patch_requests(trainer.patch, trainer.manifest, "s", max_bytes=1))
    session.call(EngineOp.UPDATE_WEIGHTS, UpdateRequest(update=updates[0]))
    again = msgspec.structs.replace(updates[0], seq=1)
    with pytest.raises(InvalidRequestError, match="twice"):
        session.call(EngineOp.UPDATE_WEIGHTS, UpdateRequest(update=again))


@pytest.mark.parametrize("base", [True, False])
def test_a_session_takes_what_it_began_as(trainer: Trainer, base: bool) -> None:
    rig = Rig()
    rig.load(trainer.pulled())
    trainer.step()
    pulled = trainer.pulled()
    session = Session(rig, pulled)
    if base:
        session.begin()
        (chunk,) = full_chunks(pulled.manifest.table, pulled.offsets, pulled.segment, 1 << 20)
        update: Any = full_request(chunk, "s", 0, pulled.segment)
    else:
        session.call(EngineOp.BEGIN, BeginRequest(session="s", manifest=pulled.manifest, deadline_s=LONG_S))
        update = next(iter(patch_requests(trainer.patch, pulled.manifest, "s", max_bytes=1 << 20)))  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="patches alone" if base else "whole tensors alone"):
        session.call(EngineOp.UPDATE_WEIGHTS, UpdateRequest(update=update))
    rig.serves(Trainer().weights, 1)


def test_a_half_loaded_engine_takes_no_patch(trainer: Trainer) -> None:
    """In place, and a full load was aborted: the version it names is not what is live."""
    rig = Rig(in_place=True)
    rig.load(trainer.pulled())
    trainer.step()
    pulled = trainer.pulled()
    rig.loaders[0]._healthy = False
    with pytest.raises(VersionError, match="half-loaded"):
        Session(rig, pulled).begin()
    rig.load(pulled)
    rig.serves(trainer.weights, 2)


def test_an_engine_that_proved_nothing_takes_no_patch(trainer: Trainer) -> None:
    """Its digest is the trainer's word. A patch would add to a sum that nobody has taken."""
    rig = Rig(ignore=["rotary"])
    trainer.weights["rotary"] = torch.zeros(9)
    trainer.manifest = manifest_of(trainer.weights, 1)
    assert rig.load(trainer.pulled()).unprovable
    trainer.step()
    with pytest.raises(VersionError, match="proved"):
        Session(rig, trainer.pulled()).begin()
    assert not rig.load(trainer.pulled()).patched


def test_an_engine_without_patches_is_never_given_one(trainer: Trainer) -> None:
    class FullOnly(ModuleWeightLoader):
        accepts = frozenset({"full"})

    rig = Rig(2)
    rig.workers[1].loader = FullOnly(rig.modules[1])
    rig.load(trainer.pulled())
    assert described(rig).accepts == ("full",)
    trainer.step()
    assert patch_that_fits(trainer.pulled(), described(rig)) == "it takes whole tensors alone, as far as it has said"
    with pytest.raises(VersionError, match="whole tensors alone"):
        Session(rig, trainer.pulled()).begin()
    assert not rig.load(trainer.pulled()).patched
    rig.serves(trainer.weights, 2)


# --- failures of a commit ---


class FailsAtCommit(ModuleWeightLoader):
    """Fails once, before or after its commit, where it is told to."""

    fails: str | None = None

    def commit(self, version: Any) -> None:
        fails, self.fails = self.fails, None
        if fails == "before":
            raise RuntimeError("injected")
        super().commit(version)
        if fails == "after":
            raise RuntimeError("injected")


@modes
@pytest.mark.parametrize("failing", [(0,), (2,), (0, 1), (0, 1, 2)], ids=str)
def test_a_commit_that_fails_on_some_workers_is_undone_on_all(
    trainer: Trainer, in_place: bool, failing: tuple[int, ...]
) -> None:
    rig = Rig(3, loader=FailsAtCommit, in_place=in_place)
    rig.load(trainer.pulled())
    before, digest = trainer.weights, trainer.manifest.model_digest
    trainer.step()
    session = Session(rig, trainer.pulled())
    session.up_to_pause()
    for index in failing:
        rig.loaders[index].fails = "before"  # type: ignore[attr-defined]
    with pytest.raises(LoadError, match="injected"):
        session.commit()
    rig.serves(before, 1)
    for worker in rig.workers:
        reply = worker.describe()
        assert (reply.version, reply.model_digest, reply.serving) == (version(1), digest, True)
    report = rig.load(trainer.pulled())
    assert report.patched, "the base is served exactly, so the same patch fits again"
    rig.serves(trainer.weights, 2)


def test_a_load_whose_commit_fails_on_a_worker_goes_on_in_full(trainer: Trainer) -> None:
    rig = Rig(2, loader=FailsAtCommit)
    rig.load(trainer.pulled())
    trainer.step()
    rig.loaders[1].fails = "before"  # type: ignore[attr-defined]
    assert not rig.load(trainer.pulled()).patched
    rig.serves(trainer.weights, 2)


def test_a_worker_that_can_not_be_undone_refuses_and_a_full_load_heals(trainer: Trainer) -> None:
    class NeverUndone(FailsAtCommit):
        def rollback(self) -> None:
            self._healthy = False
            raise LoadError("could not be undone")

    rig = Rig(2, loader=NeverUndone)
    rig.load(trainer.pulled())
    trainer.step()
    session = Session(rig, trainer.pulled())
    session.up_to_pause()
    rig.loaders[1].fails = "before"  # type: ignore[attr-defined]
    with pytest.raises(LoadError, match="injected"):
        session.commit()
    with pytest.raises(NotServingError), rig.engine.generation(timeout_s=0.0):
        pass
    assert not rig.load(trainer.pulled()).patched
    rig.serves(trainer.weights, 2)


def test_no_session_begins_while_another_commits(trainer: Trainer) -> None:
    """One worker has ended the session already: a begin there would settle what may have to be undone."""
    rig = Rig(2, loader=FailsAtCommit)
    rig.load(trainer.pulled())
    before = trainer.weights
    trainer.step()
    pulled = trainer.pulled()
    session = Session(rig, pulled)
    session.up_to_pause()
    go, entered = threading.Event(), threading.Event()
    commit = rig.loaders[1].commit

    def held(to: Any) -> None:
        entered.set()
        assert go.wait(LONG_S)
        raise RuntimeError("injected")

    rig.loaders[1].commit = held  # type: ignore[method-assign]
    committing = in_thread(session.commit, name="commit")
    assert entered.wait(5)
    until(lambda: rig.workers[0].session is None, "worker 0 has committed")
    with pytest.raises(SyncInProgressError):
        Session(rig, pulled, "stranger").begin()
    go.set()
    assert isinstance(committing.exception(5), LoadError)
    rig.loaders[1].commit = commit  # type: ignore[method-assign]
    rig.serves(before, 1)


def test_an_abort_within_a_commit_in_place_lifts_no_fence(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker has committed, and generations would be told the version before."""
    rig = Rig(in_place=True)
    rig.load(trainer.pulled())
    trainer.step()
    trainer.patch = None
    real, fenced = rig.workers[0].commit, []

    def commit(name: str) -> Any:
        committed = real(name)
        rig.engine.call(EngineOp.ABORT, AbortRequest(session=name, reason="too late"), timeout_s=LONG_S)
        fenced.append(rig.engine._gate.fenced)
        return committed

    monkeypatch.setattr(rig.workers[0], "commit", commit)
    rig.load(trainer.pulled())
    assert fenced == [True]
    rig.serves(trainer.weights, 2)


# --- the audit ---


@modes
@workers
def test_a_flipped_bit_in_an_element_that_was_not_touched_takes_the_engine_out(
    trainer: Trainer, in_place: bool, num_workers: int
) -> None:
    rig = Rig(num_workers, in_place=in_place)
    rig.load(trainer.pulled())
    trainer.step(share=0.0)  # the last element of each tensor alone
    rig.modules[-1].bf16.view(torch.int16)[0, 0] ^= 1
    assert rig.load(trainer.pulled()).patched, "the change itself is right"
    until(lambda: described(rig).unhealthy, "the audit")
    reply = described(rig)
    assert (reply.serving, reply.version) == (False, None)
    assert "DigestMismatchError" in (reply.unhealthy or "")
    with pytest.raises(NotServingError, match="audit"), rig.engine.generation(timeout_s=0.0):
        pass
    trainer.step()
    with pytest.raises(VersionError, match="audit"):
        Session(rig, trainer.pulled()).begin()
    assert not rig.load(trainer.pulled()).patched
    assert described(rig).unhealthy is None
    rig.serves(trainer.weights, 3)


def test_whoever_is_told_of_an_audit_is_told_of_a_fence(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker knows before its answer has reached the engine."""
    rig = Rig(2)
    rig.load(trainer.pulled())
    trainer.step(share=0.0)
    rig.modules[0].bf16.view(torch.int16)[0, 0] ^= 1
    answer, found, go = rig.workers[0].audit, threading.Event(), threading.Event()

    def late(name: str) -> bool:
        try:
            return answer(name)
        finally:
            found.set()
            assert go.wait(LONG_S)

    monkeypatch.setattr(rig.workers[0], "audit", late)
    try:
        rig.load(trainer.pulled())
        assert found.wait(LONG_S)
        assert described(rig).unhealthy
        with pytest.raises(NotServingError, match="audit"), rig.engine.generation(timeout_s=0.0):
            pass
        assert not rig.load(trainer.pulled()).patched
        rig.serves(trainer.weights, 2)
        audits = [thread for thread in threading.enumerate() if thread.name == "e-audit"]
    finally:
        go.set()
    assert audits
    for thread in audits:
        thread.join(LONG_S)
    rig.serves(trainer.weights, 2)


def test_the_same_version_in_full_heals_too(trainer: Trainer) -> None:
    rig = Rig()
    rig.load(trainer.pulled())
    trainer.step(share=0.0)
    rig.modules[0].bf16.view(torch.int16)[0, 0] ^= 1
    rig.load(trainer.pulled())
    until(lambda: described(rig).unhealthy, "the audit")
    assert not rig.load(trainer.pulled()).patched
    rig.serves(trainer.weights, 2)


def test_a_new_session_ends_an_audit(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """It never waits for one that reads gigabytes, and what that found says nothing then."""
    rig = Rig()
    rig.load(trainer.pulled())
    trainer.step()
    reading, go = held_sums(monkeypatch)
    rig.load(trainer.pulled())
    assert reading.wait(5)
    trainer.step()
    started = time.monotonic()
    session = Session(rig, trainer.pulled(), "next")
    session.begin()
    assert time.monotonic() - started < 10.0
    go.set()
    session.update()
    session.stage()
    monkeypatch.setattr(audit, "PartSums", PartSums)
    audits = audits_of(rig)
    session.pause()
    session.commit()
    session.resume()
    rig.serves(trainer.weights, 3)
    until(lambda: any("failed" not in record.detail for record in audits), "the audit of the second")
    assert described(rig).unhealthy is None


@modes
def test_an_audit_that_a_full_load_overtakes_says_nothing(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch, in_place: bool
) -> None:
    """What it has read is of two versions."""
    rig = Rig(in_place=in_place)
    rig.load(trainer.pulled())
    trainer.step()
    audits = audits_of(rig)
    reading, go = held_sums(monkeypatch)
    rig.load(trainer.pulled())
    assert reading.wait(5)
    trainer.step()
    trainer.patch = None
    assert not rig.load(trainer.pulled()).patched
    monkeypatch.setattr(audit, "PartSums", PartSums)
    go.set()
    until(lambda: audits, "the end of the audit")
    assert "TransferAbortedError" in audits[0].detail
    assert described(rig).unhealthy is None
    rig.serves(trainer.weights, 3)


def test_a_begin_that_is_refused_does_not_end_an_audit(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    rig.load(trainer.pulled())
    trainer.step(share=0.0)
    rig.modules[0].bf16.view(torch.int16)[0, 0] ^= 1
    reading, go = held_sums(monkeypatch)
    rig.load(trainer.pulled())
    assert reading.wait(5)
    trainer.step()
    with pytest.raises(VersionError):
        Session(rig, trainer.pulled(), "wrong", model_digest="wsd2:" + "0" * 32).begin()
    go.set()
    until(lambda: described(rig).unhealthy, "the audit")


def test_a_patch_that_began_before_a_finding_lifts_no_fence(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its base was served and proved when it began."""
    rig = Rig()
    rig.load(trainer.pulled())
    rig.modules[0].bf16.view(torch.int16)[0, 0] ^= 1
    trainer.step(share=0.0)
    reading, go = held_sums(monkeypatch)
    rig.load(trainer.pulled())
    assert reading.wait(LONG_S)
    trainer.step(share=0.0)
    session = Session(rig, trainer.pulled(), "next")
    session.begin()
    go.set()
    until(lambda: rig.engine._gate.fenced, "the fence")
    _, go = held_sums(monkeypatch)  # the audit behind the commit would fence again
    try:
        session.update()
        session.stage()
        session.pause()
        with pytest.raises(VersionError, match="audit"):
            session.commit()
        with pytest.raises(NotServingError), rig.engine.generation(timeout_s=0.0):
            pass
    finally:
        go.set()
    monkeypatch.undo()
    assert not rig.load(trainer.pulled()).patched
    rig.serves(trainer.weights, 3)


# --- generations ---


@modes
def test_generations_see_whole_versions_alone(in_place: bool) -> None:
    """A hammer: every generation reads all weights and knows which version it runs on."""
    trainer = Trainer()
    rig = Rig(2, in_place=in_place)
    rig.load(trainer.pulled())
    known = {1: {name: tensor.clone() for name, tensor in trainer.weights.items()}}
    stop = threading.Event()
    seen: set[int] = set()

    def generate() -> None:
        while not stop.is_set():
            with rig.engine.generation(timeout_s=LONG_S) as running:
                assert running is not None
                for module in rig.modules:
                    rig.has(module, known[running.number])
                seen.add(running.number)

    threads = [in_thread(generate, name=f"generate-{index}") for index in range(3)]
    try:
        for _ in range(12):
            trainer.step()
            known[trainer.number] = trainer.weights
            assert rig.load(trainer.pulled()).patched
    finally:
        stop.set()
        errors = [thread.exception(LONG_S) for thread in threads]
        trainer.close()
    assert errors == [None] * 3
    assert len(seen) > 3


# --- workers in processes of their own ---


def factory(index: int, in_place: bool) -> Any:
    module = Mixed()
    loader = FailsAtCommit(module, in_place=in_place)

    def arm(fails: Any) -> None:
        loader.fails = fails

    def flip(name: str) -> None:
        module.get_buffer(name).view(torch.int16).reshape(-1)[0] ^= 1

    def live(_: Any) -> dict[str, str]:
        return {name: bytes_of(tensor).hex() for name, tensor in module.state_dict().items()}

    return loader, {"arm": arm, "flip": flip, "live": live}


@modes
def test_workers_in_processes(trainer: Trainer, in_place: bool) -> None:
    children = [
        ProcessWorker(factory, index=index, args=(in_place,), track=f"e/worker-{index}", start_method="spawn")
        for index in range(2)
    ]
    engine = EmbeddedEngine(children, engine_id="e")
    loading = EngineUpdate(engine, "m")

    def load() -> bool:
        return loading.load(trainer.pulled(), deadline=Deadline(LONG_S)).patched

    def serves() -> None:
        with engine.generation(timeout_s=5.0) as running:
            assert running == version(trainer.number)
        for child in children:
            assert child.ask("live", None) == {name: bytes_of(tensor).hex() for name, tensor in trainer.weights.items()}

    def describe() -> EngineReply:
        return engine.call(EngineOp.DESCRIBE, DescribeRequest(), timeout_s=LONG_S)

    try:
        assert not load()
        assert describe().accepts == ("full", "patch")
        trainer.step()
        assert load()
        serves()
        # one fails: all go back, and the load goes on in full
        before = [child.ask("live", None) for child in children]
        trainer.step()
        rig: Any = type("Rig", (), {"engine": engine})
        session = Session(rig, trainer.pulled())
        session.up_to_pause()
        children[1].ask("arm", "before")
        with pytest.raises(LoadError, match="injected"):
            session.commit()
        assert [child.ask("live", None) for child in children] == before
        assert (describe().version, describe().serving) == (version(2), True)
        assert load()
        serves()
        # a flipped bit that no patch has touched, and no audit of the version before
        trainer.step()
        trainer.patch = None
        assert not load()
        trainer.step(share=0.0)
        children[0].ask("flip", "fp16")
        assert load()
        until(lambda: describe().unhealthy, "the audit")
        with pytest.raises(NotServingError), engine.generation(timeout_s=0.0):
            pass
        assert not load()
        serves()
    finally:
        engine.close()


def test_a_digest_mismatch_is_typed(trainer: Trainer) -> None:
    rig = Rig()
    rig.load(trainer.pulled())
    trainer.step()
    pulled = trainer.pulled()
    assert trainer.patch is not None
    torch.frombuffer(trainer.segments[-2].memory, dtype=torch.uint8)[trainer.patch.tensors[0].values_offset] ^= 4
    session = Session(rig, pulled)
    session.begin()
    session.update()
    with pytest.raises(DigestMismatchError, match="with this patch"):
        session.stage()


def test_a_fleet_takes_an_engine_back_from_a_run_of_which_it_serves_nothing_and_from_no_other() -> None:
    """Seen red: it took the engine back from a newer trainer that had committed, who was refused from then on."""
    one, in_vain, newer, rig = Trainer(1, "one"), Trainer(2, "in-vain"), Trainer(3, "newer"), Rig()
    others = EngineUpdate(rig.engine, MODEL_ID)
    try:
        rig.load(one.pulled())
        others._ready(in_vain.pulled(), Deadline(LONG_S), of_fleet=True)
        with pytest.raises(VersionError, match="taken over by in-vain"):
            rig.loading._ready(one.pulled(), Deadline(LONG_S), of_fleet=False)
        rig.loading._ready(one.pulled(), Deadline(LONG_S), of_fleet=True)
        others.load(newer.pulled(), deadline=Deadline(LONG_S))
        with pytest.raises(VersionError, match="taken over by newer"):
            rig.loading._ready(one.pulled(), Deadline(LONG_S), of_fleet=True)
        rig.serves(newer.weights, 1)
    finally:
        for trainer in (one, in_vain, newer):
            trainer.close()
