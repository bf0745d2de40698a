"""VllmLoraEngine: whose a folder is when a load's answer is lost. All steps: tests/engines/test_lora_vllm.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.unit.handles.test_lora_folder import manifest
from weightsync.errors import EngineUnreachableError, StateError, WeightSyncError
from weightsync.handles.lora_folder import AdapterFolder
from weightsync.handles.lora_messages import AdapterState, LoadedAdapter
from weightsync.handles.vllm_lora import VllmLoraEngine
from weightsync.types import AbortRequest, Deadline, EngineOp, Manifest, StageRequest


class Server:
    """What the middleware answers to a drop."""

    name = "vllm"

    def __init__(self, state: AdapterState | None) -> None:
        self._state = state

    def order(self, path: str, message: object, deadline: object) -> AdapterState:
        if self._state is None:
            raise EngineUnreachableError("it is gone")
        return self._state


def state(*sessions: str) -> AdapterState:
    return AdapterState(
        max_loras=2, max_cpu_loras=2, max_lora_rank=8, num_replicas=1, updating=True, others=0,
        adapters=tuple(
            LoadedAdapter(
                name=f"actor@{each}", session=each, model_id="actor", version=manifest().version, model_digest=None,
                lora_id=1, state="retired", in_flight=0,
            )
            for each in sessions
        ),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("told", "stays"), [(state("mine"), True), (state("others"), False), (state(), False), (None, False)]
)
def test_a_folder_that_the_server_has_taken_is_its_to_remove(told: AdapterState | None, stays: bool) -> None:
    """Its load had come, and the answer was lost. Where the server has it not, or is gone, nothing stays."""
    server: Any = Server(told)
    engine = VllmLoraEngine(server, server, model_id="actor")
    folder = engine._folder = AdapterFolder(manifest())
    path = Path(folder._folder.path)
    try:
        engine.call(EngineOp.ABORT, AbortRequest(session="mine", reason="time is over"), timeout_s=5.0)
    except WeightSyncError:
        assert told is None
    assert path.exists() is stays
    if stays:
        for each in path.iterdir():
            each.unlink()
        path.rmdir()


def test_an_abort_closes_no_folder_that_is_being_sealed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its descriptor would be another's by then. Seen red: whoever sealed held no lock that an abort takes."""
    server: Any = Server(state())
    engine = VllmLoraEngine(server, server, model_id="actor")
    made = manifest()
    with AdapterFolder(made) as folder:
        held: list[bool] = []

        def sealed(manifest: Manifest, *, with_manifest: bool) -> str:
            held.append(engine._files.locked())
            raise StateError("far enough")

        monkeypatch.setattr(folder, "sealed", sealed)
        engine._session.start("mine", made.version)
        engine._folder = folder
        with pytest.raises(StateError, match="far enough"):
            engine._stage(StageRequest(session="mine", manifest=made), Deadline(5))
    assert held == [True]
