"""An adapter behind one address with two data-parallel replicas: both have it, proved, and both say what it says."""

from __future__ import annotations

from pathlib import Path

import pytest

import weightsync
from tests.engines.lora_kit import CLOSE, FAR, Trainer, lora_server, served
from tests.engines.vllm_support import NEEDS_VLLM, PROMPTS, completion, distance, vllm_is_there
from tests.standins.processes import children


@pytest.mark.soak
@pytest.mark.timeout(300)
@pytest.mark.skipif(not vllm_is_there, reason=NEEDS_VLLM)
def test_every_replica_has_each_version(tmp_path: Path) -> None:
    """vLLM's own routes tell one replica alone; here each is asked the canary, and answers
    as PEFT does by the newest version and not by the one before."""
    server = lora_server(
        tmp_path, options=("--data-parallel-size", "2"), env={"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    )  # a core each: vLLM gives the second replica none by itself

    def scores(replica: int) -> list[list[float]]:
        told = []
        for prompt in PROMPTS:
            response = server.http.post(
                "/v1/completions", json=completion(prompt, model="actor", prompt_logprobs=0),
                headers={"x-data-parallel-rank": str(replica)},
            )  # fmt: skip
            assert response.status_code == 200, response.text
            found = response.json()["choices"][0]["prompt_logprobs"]
            told.append([float(next(iter(each.values()))["logprob"]) for each in found[1:]])
        return told

    with children() as start, server.running():
        trainer = Trainer(start, "actor", {"publish": {"canary": list(PROMPTS[0])}})
        trainer.publish()
        with weightsync.serve({"actor": f"vllm+{server.url}"}, sources=[trainer.endpoint], port=0) as service:
            for number in (1, 2, 3):
                if number > 1:
                    trainer.publish()
                status = served(service, trainer)
                (reading,) = status.canaries.values()
                assert (reading.num_replicas, status.unprovable) == (2, {})
                for replica in (0, 1):
                    told = scores(replica)
                    assert distance(told, trainer.scores[number]) <= CLOSE, (number, replica)
                    if number > 1:
                        assert distance(told, trainer.scores[number - 1]) >= FAR, (number, replica)
