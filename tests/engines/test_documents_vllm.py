"""The interface design's `VLLMWeightLoader(engine)`, with the worker of a real vLLM."""

from __future__ import annotations

import pytest

from tests.engines.conftest import Versions
from tests.engines.vllm_support import (
    DIFFERENT,
    LIMITED,
    NEEDS_VLLM,
    NOT_LIMITED,
    SAME,
    distance,
    engine_env,
    run_script,
    vllm_is_there,
)

pytestmark = [pytest.mark.timeout(600), pytest.mark.skipif(not vllm_is_there, reason=NEEDS_VLLM)]


@pytest.mark.skipif(LIMITED, reason=NOT_LIMITED)
def test_the_example_usage_loads_a_real_vllm_model(versions: Versions) -> None:
    """After the second sync it answers as it did when it was fresh, from the second step's checkpoint; after the first
    it does not.

    Seen red with a commit that never reaches the worker.
    """
    told = run_script("documents", [str(versions.checkpoints[2])], env=engine_env(1), timeout_s=150)
    first, second = told["synced"]
    assert distance(first, told["fresh"]) >= DIFFERENT, told
    assert distance(second, told["fresh"]) <= SAME, told
