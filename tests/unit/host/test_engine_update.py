"""EngineUpdate: an engine that is to answer under a lease alone, and does not, is warned of; what chunks are kept."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.standins.threads import logged_here
from weightsync.engine.embedded import EmbeddedEngine
from weightsync.host import engine_update, staged_requests
from weightsync.host.engine_update import EngineUpdate
from weightsync.load.module import ModuleWeightLoader
from weightsync.memory import LeaseReader, ServingLease
from weightsync.types import Manifest, TensorSpec, TensorTable, Version


@pytest.mark.parametrize("leased", [True, False])
@pytest.mark.parametrize("looks", [True, False])
def test_an_engine_that_looks_at_no_lease_is_warned_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, leased: bool, looks: bool
) -> None:
    """Its service has a lease for it. Seen red: a fleet said that nobody answers, and it went on answering."""
    with ServingLease(str(tmp_path / "lease")) as lease:
        engine = EmbeddedEngine.of(
            ModuleWeightLoader(torch.nn.Linear(2, 2)), lease=LeaseReader(lease.path) if looks else None
        )
        update = EngineUpdate(engine, "m", leased=leased)
        for _ in range(3):
            assert update.describe(timeout_s=10).leased is looks
        said = [each.getMessage() for each in logged_here(caplog) if "looks at no lease" in each.getMessage()]
        assert len(said) == (leased and not looks)


def test_chunks_are_made_anew_where_the_host_has_another_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody has cleaned /dev/shm. Seen red: the old proof was sent for as long as the model had this layout, and
    workers said that they are on another host."""
    nonces = ["a", "a", "b"]
    monkeypatch.setattr(engine_update, "host_nonce", lambda: nonces[0])
    monkeypatch.setattr(staged_requests, "host_nonce", lambda: nonces[0])
    update = EngineUpdate(EmbeddedEngine.of(ModuleWeightLoader(torch.nn.Linear(2, 2))), "m")
    table = TensorTable.of([TensorSpec(name="w", dtype="int8", shape=(9,))])
    manifest = Manifest(version=Version(run_id="run", number=1), model_id="m", tensors=table)
    pulled: Any = SimpleNamespace(manifest=manifest, offsets={"w": 0}, segment="s")
    made = []
    while nonces:
        made.append(update._chunks_of(pulled))
        nonces.pop(0)
    assert made[0] is made[1]
    assert [handle.host_nonce for chunk in made[2] for handle in chunk.handles] == ["b"]
