"""An offline `LLM` of two tensor-parallel workers, with the trainer in the same process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines import vllm_faults
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


@pytest.mark.soak
@pytest.mark.skipif(LIMITED, reason=NOT_LIMITED)
def test_the_oracle_offline_with_two_workers(tied_versions: Versions, tmp_path: Path) -> None:
    """The oracle, and failures of one worker alone: the first, whose error vLLM's executor stops to listen at, and the
    last; and strangers who speak while a session is open. After each, the next sync works and what it synced is served.

    Seen red with every worker raising its own error: vLLM then takes each answer of the second worker for the next
    call's. The output layer is the embedding.
    """
    told = run_script(
        "offline",
        [[str(each) for each in tied_versions.checkpoints], str(tmp_path), 2],
        env={**engine_env(2), **vllm_faults.install(tmp_path)},
        timeout_s=200,
    )
    assert told["first"]["type"] == "ok", told["first"]
    assert told["first"]["weight_version"] == told["first"]["version"]
    assert distance(told["other"], told["fresh"]) >= DIFFERENT
    assert told["second"]["type"] == "ok", told["second"]
    assert distance(told["same"], told["fresh"]) <= SAME
    assert len(told["faults"]) == 6
    for each in told["faults"]:
        assert each["fired"], each
        assert each["failed"]["type"] == "SyncFailedError", each
        expected = "DigestMismatchError" if each["fault"]["at"] == "receive" else "LoadError"
        assert each["failed"]["causes"] == {"vllm": expected}, each
        assert each["next"]["type"] == "ok", each
    foreign, brackets = told["strangers"]
    assert "InvalidRequestError" in foreign["told"]
    assert brackets["told"] == "ok", brackets
    for each in (foreign, brackets):
        assert each["during"]["type"] == "ok", each
        assert [sync["type"] for sync in each["after"]] == ["ok", "ok"], each
    assert distance(told["last"], told["fresh"]) <= SAME
