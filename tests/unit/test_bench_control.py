"""The control plane's benchmark runs: what its fleet waits for has come."""

from __future__ import annotations

import pytest
from bench import control
from bench.harness import BenchArgs


def test_a_version_reaches_all_instances_without_a_wait_for_a_heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen red: they had never heard that they were let in, and each sync waited half a lease for that."""
    monkeypatch.setattr(control, "_NUM_INSTANCES", 3)
    monkeypatch.setattr(control, "_LEASE_S", 60.0)
    row = control._notify_fanout(BenchArgs(repeats=1))
    assert row.detail["slowest_s"] < control._LEASE_S / 10
