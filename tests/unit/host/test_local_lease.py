"""LocalLease: what a service without a controller makes of a lease that another life has left."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.multiproc.pull_kit import wait_until
from weightsync.host.local_lease import LocalLease
from weightsync.memory import LeaseReader, ServingLease, boot_s


@pytest.mark.parametrize("left", ["a hold", "a file that was cut off"])
def test_no_hold_of_another_life_stays(tmp_path: Path, left: str) -> None:
    """Seen red: nobody lifts it without a controller, and engines refused for ever."""
    path = str(tmp_path / "lease")
    first = ServingLease(path)
    first.hold(boot_s())
    if left != "a hold":
        os.truncate(path, 20)
    first.close()
    lease = ServingLease(path)
    assert lease.torn
    reader = LeaseReader(path)
    loaded_s = boot_s()
    engines = SimpleNamespace(loaded_s=lambda: loaded_s, seen_s=lambda: loaded_s)
    model: Any = SimpleNamespace(is_anew=False, engines=engines)
    local = LocalLease({"actor": model}, lease, 5.0)
    local.start()
    try:
        wait_until(lambda: reader.refusal() is None and not reader.held, "engines may answer")
        wait_until(lambda: local.status.left_s > 0, "it is lent")
        assert local.status.why_none is None
        engines.seen_s = lambda: 0.0  # one was started again, and refuses by itself
        assert "not every engine is known" in str(local.status.why_none)
        engines.seen_s = lambda: loaded_s
        os.truncate(path, 20)
        assert "was damaged, or cut off" in str(local.status.why_none)
    finally:
        local.close()


@pytest.mark.parametrize(("is_anew", "why"), [(False, "not every engine is known"), (True, "published anew")])
def test_it_says_why_engines_answer_nobody(tmp_path: Path, is_anew: bool, why: str) -> None:
    model: Any = SimpleNamespace(is_anew=is_anew, engines=SimpleNamespace(loaded_s=lambda: 0.0, seen_s=lambda: 0.0))
    local = LocalLease({"actor": model}, ServingLease(str(tmp_path / "lease")), 5.0)
    assert why in str(local.status.why_none)
    local.close()
