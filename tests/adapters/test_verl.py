"""verl's own manager and rollout workers, on Ray and CPUs, with our checkpoint engine in them."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.engines.vllm_support import MODEL_NAME, NEEDS_VLLM, Server, build_model, save_checkpoint, vllm_is_there
from tests.engines.vllm_unpacked import VARIABLE

ROOT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("WEIGHTSYNC_VERL_PYTHON", ROOT / ".venv-verl" / "bin" / "python"))
SOURCE = "VERL_SOURCE"
"""The variable that names a checkout of verl's source: its tests are not in its package."""
NUM_VERSIONS, NUM_WORKERS = 10, 2
CLOSE, DIFFERENT = 1e-2, 2e-2
pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not PYTHON.exists(), reason="needs verl: make engines-verl"),
]


def lines_of(job: str, *words: str) -> list[dict[str, Any]]:
    """What a job says of each of its versions."""
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}"}
    command = [str(PYTHON), "-m", f"tests.adapters.{job}", *words]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300, check=False)
    lines = done.stdout.splitlines()
    assert lines, done.stderr[-4000:]
    assert lines[-1] == "done", done.stdout[-2000:] + done.stderr[-4000:]
    return [json.loads(line) for line in lines if line.startswith("{")]


@pytest.mark.parametrize("mode", ["auto", "delta", "flush"])
def test_rollout_workers_get_what_two_sharded_ranks_have_trained(mode: str) -> None:
    """To the bit, after each step; one more worker comes in the middle. Deltas where they were asked for."""
    told = lines_of("verl_job", str(NUM_VERSIONS), mode)
    assert [each["version"] for each in told] == list(range(1, NUM_VERSIONS + 1))
    for each in told:
        (published,) = set(each["published"])
        num_there = NUM_WORKERS + (each["version"] >= NUM_VERSIONS // 2)
        received = each["received"][:num_there]
        assert [digest for digest, _, _ in received] == [published] * num_there, each
        if mode == "flush":  # a worker that comes has nothing to change
            news = [encodings_of(each, which) for which in range(num_there)]
            assert [set(told) for told in each["encodings"][:num_there]] == news, each
        if mode != "auto" and each["version"] > NUM_VERSIONS // 2:
            assert all(num_deltas == 1 and size < each["weightsync/bytes"] / 4 for _, size, num_deltas in received), (
                each
            )
    assert len({each["published"][0] for each in told}) == NUM_VERSIONS, "each step changes something"


@pytest.mark.skipif(not vllm_is_there, reason=NEEDS_VLLM)
def test_a_vllm_behind_a_worker_serves_what_was_trained(tmp_path: Path) -> None:
    """Behind each of verl's updates its log-probabilities are the training ranks' model's, and no older one's."""
    model = build_model()
    checkpoint = save_checkpoint(tmp_path / "model", model, dict(model.named_parameters()))
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    config.update(dtype="float32", torch_dtype="float32")
    (checkpoint / "config.json").write_text(json.dumps(config), encoding="utf-8")
    server = Server(checkpoint, tmp_path / "server", env={VARIABLE: "1"}, options=("--dtype", "float32"))
    with server.running():
        job = {
            "checkpoint": str(checkpoint), "server": server.url, "model_name": MODEL_NAME, "versions": NUM_VERSIONS,
        }  # fmt: skip
        told = lines_of("verl_vllm_job", json.dumps(job))
    assert [each["version"] for each in told] == list(range(1, NUM_VERSIONS + 1))
    for number, each in enumerate(told):
        assert len(set(each["digests"])) == 1, each
        assert relative(each["served"], each["wanted"]) <= CLOSE, each
        assert "proved" in each["pushed"], each
        if number:
            assert relative(each["served"], told[number - 1]["served"]) >= DIFFERENT, each


def encodings_of(told: dict[str, Any], worker: int) -> set[str]:
    """How a worker is given a version in flushes: whole where it has none before it."""
    first = 1 if worker < NUM_WORKERS else NUM_VERSIONS // 2
    return {"dense" if told["version"] == first else "indices"}


def relative(one: list[float], other: list[float]) -> float:
    """The largest relative distance."""
    return max(abs(a - b) / abs(b) for a, b in zip(one, other, strict=True))


@pytest.mark.skipif(SOURCE not in os.environ, reason=f"needs verl's source: {SOURCE}=<a checkout of v0.9.0>")
def test_its_own_test_passes_with_our_name_put_in(tmp_path: Path) -> None:
    """Three updates from two FSDP2 ranks of its own to two workers, each compared with the checkpoint by verl."""
    source = Path(os.environ[SOURCE]).resolve()
    command = [str(PYTHON), str(ROOT / "tests/adapters/verl_own_job.py"), str(source), str(tmp_path)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout.endswith("done\n"), (done.stdout + done.stderr)[-4000:]
