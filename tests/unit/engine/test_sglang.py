"""Our loader in SGLang's workers raises nothing for a step: SGLang would end. What it does is in the handle's tests."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import msgspec
import pytest
import torch

from tests.standins.threads import logged_here
from tests.unit.host.fakes import init
from tests.unit.load.test_sglang import Model, weights
from weightsync.engine import sglang
from weightsync.engine.sglang import load_weights
from weightsync.errors import ManifestMismatchError, VersionError
from weightsync.handles.sglang_messages import STEP, StepAnswer, WorkerStep
from weightsync.memory import PrivateFolder
from weightsync.net.messages import decode, encode
from weightsync.types import CommitRequest, EngineOp, InitRequest


def told(message: bytes) -> list[tuple[str, torch.Tensor]]:
    return [(STEP, torch.frombuffer(bytearray(message), dtype=torch.uint8))]


def step(folder: str, op: EngineOp = EngineOp.COMMIT, body: bytes | None = None) -> bytes:
    raw = msgspec.Raw(encode(CommitRequest(session="nobody's")) if body is None else body)
    return encode(WorkerStep(number=7, folder=folder, tp_size=1, op=op, body=raw))


@pytest.mark.parametrize(("op", "body", "error"), [
    (EngineOp.COMMIT, None, "TransferAbortedError"), (EngineOp.COMMIT, b'{"no": 1}', "InvalidRequestError"),
    (EngineOp.DESCRIBE, b"{}", "StateError"),
])  # fmt: skip
def test_an_error_is_written_down_and_not_raised(op: EngineOp, body: bytes | None, error: str) -> None:
    with PrivateFolder() as folder:
        load_weights(Model(), told(step(os.path.basename(folder.path), op, body)))
        (name,) = os.listdir(folder.path)
        answer = decode(Path(folder.path, name).read_bytes(), StepAnswer, what="it")
    assert name == StepAnswer.file(7, 0)
    assert answer.error is not None
    assert answer.error["error"] == error


@pytest.mark.parametrize("folder", ["../../tmp", "weightsync-ipc-1-0123456789abcdef", "/tmp"])
def test_nothing_is_written_into_another_folder(folder: str, caplog: pytest.LogCaptureFixture) -> None:
    """Nor is a step done whose outcome nobody would hear of."""
    with caplog.at_level(logging.ERROR):
        load_weights(Model(), told(step(folder)))
        load_weights(Model(), told(b"no step"))
    assert len(logged_here(caplog)) == 2


def test_tensors_of_others_are_checked_and_loaded() -> None:
    model, new = Model(), weights(3)
    load_weights(model, new.items())
    assert torch.equal(model.norm.weight, new["norm.weight"])
    with pytest.raises(ManifestMismatchError):
        load_weights(model, [("nowhere", new["norm.weight"])])


def test_the_init_of_a_run_that_is_over_ends_nobodys_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen red: a trainer that another had taken over from ended each session of that one."""
    ended: list[str] = []

    class Worker:
        def init(self, request: InitRequest) -> None:
            raise VersionError("run old was taken over by new")

        def abort(self, session: str | None, reason: str) -> None:
            ended.append(reason)

    model = Model()
    monkeypatch.setitem(sglang._workers, model, Worker())
    with PrivateFolder() as folder:
        load_weights(model, told(step(os.path.basename(folder.path), EngineOp.INIT, encode(init("old")))))
        answer = decode(Path(folder.path, StepAnswer.file(7, 0)).read_bytes(), StepAnswer, what="it")
    assert answer.error is not None
    assert answer.error["error"] == "VersionError"
    assert ended == []
