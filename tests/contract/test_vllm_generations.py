"""The backend under the worker of every generation of vLLM's weight-transfer interface; docs/vllm.md has the table."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: pip install weightsync[engines-cpu]"
)

SHAPES = (
    "config, vllm_config, device, model",
    "config, vllm_config=, device=, model=",
    "config, parallel_config",
    "config, parallel_config, model",
)


@pytest.fixture(scope="module")
def told() -> dict[str, Any]:
    """How two syncs and a failed one between them went, for each shape."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.contract.vllm_generations"],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"},
    )
    last = done.stdout.strip().rpartition("\n")[2]
    assert last.startswith("RESULT "), f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    outcome: dict[str, Any] = json.loads(last.removeprefix("RESULT "))
    return outcome


@pytest.mark.parametrize("shape", SHAPES)
def test_a_worker_of_this_shape_is_served(told: dict[str, Any], shape: str) -> None:
    """Bytes arrive, a failed sync leaves the old ones and no update active, the next works, the version is named; a
    model whose names nobody could check beforehand is not completed with filler."""
    outcome = told[shape]
    assert "division by zero" in outcome.pop("failed")
    assert "vLLM loaded nothing into 1 parameters, e.g. down.weight" in outcome.pop("partial")
    assert outcome == {"first": True, "kept": True, "second": True, "version": True, "active": False}


def test_every_stand_in_is_looked_at(told: dict[str, Any]) -> None:
    assert set(told) == set(SHAPES)
