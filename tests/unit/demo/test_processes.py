"""The demo's time limit is a step's, and what is slow is said."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch

from weightsync.demo.processes import DemoError, Patience, Processes, here, patiently


def test_a_step_has_the_limit_and_a_run_has_none() -> None:
    now_s, said = 0.0, list[str]()
    patience = Patience(60.0, said.append, clock=lambda: now_s)
    for step in range(1, 30):
        now_s = step * 50.0
        assert not patience.wait("a step")
        patience.renew()
    now_s += 60.0
    assert patience.wait("a step")


def test_a_slow_step_is_said_now_and_then_and_on_what_machine() -> None:
    now_s, said = 0.0, list[str]()
    patience = Patience(60.0, said.append, clock=lambda: now_s)
    for second in range(41):
        now_s = float(second)
        patience.wait("the third step")
    assert [line.split(" (")[0] for line in said] == [
        f"waiting for the third step: {second} s so far" for second in (5, 10, 20, 40)
    ]
    cores = len(os.sched_getaffinity(0))
    assert all(f"({cores} core" in line and "load" in line for line in said)


def test_a_cpu_without_avx512_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for capability, named in (("AVX2", True), ("DEFAULT", True), ("AVX512", False)):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda capability=capability: capability)
        assert ("no AVX-512" in here()) is named


def test_a_call_that_blocks_is_spoken_of_and_its_error_passes() -> None:
    before = set(threading.enumerate())
    with pytest.raises(ValueError, match="the call's"), patiently("a step", lambda text: None):
        raise ValueError("the call's")
    assert "weightsync-demo-patience" not in {each.name for each in set(threading.enumerate()) - before}


def test_a_process_that_says_nothing_costs_a_steps_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "silent.py").write_text("import sys; sys.stdin.read()")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    with Processes(step_timeout_s=0.5, say=lambda text: None) as processes:
        processes.start("silent", "silent")
        with pytest.raises(DemoError, match=r"no word of it within 0\.5 s \("):
            processes.next("word of it")
    assert processes.running["silent"].poll() is not None
