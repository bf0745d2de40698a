"""EngineUpdate: an engine that is to answer under a lease alone, and does not, is warned of."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.standins.threads import logged_here
from weightsync.engine.embedded import EmbeddedEngine
from weightsync.host.engine_update import EngineUpdate
from weightsync.load.module import ModuleWeightLoader
from weightsync.memory import LeaseReader, ServingLease


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
