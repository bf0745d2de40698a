"""From a step to an answer by it: our way against TRL's own (save a folder, load it by HTTP), in turns on one vLLM.

python -m pytest tests/engines/test_lora_trl.py -m soak -s      prints both
"""

from __future__ import annotations

import queue
import statistics
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import weightsync
from tests.engines.lora_kit import lora_server, peft_model, set_version
from tests.engines.vllm_support import NEEDS_VLLM, PROMPTS, Server, completion, vllm_is_there

pytestmark = [pytest.mark.timeout(600), pytest.mark.soak, pytest.mark.alone]
NUM_TURNS = 10
AT_MOST = 3.0
"""Times TRL's. Ours also fetches, proves and asks the canary; TRL's pauses vLLM, and proves nothing."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    if not vllm_is_there:
        pytest.skip(NEEDS_VLLM)
    pytest.importorskip("trl")
    made = lora_server(tmp_path_factory.mktemp("lora"), max_loras=4)
    with made.running():
        yield made


def test_from_step_to_served(server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from trl.experimental.async_distillation.vllm_client import VLLMClient
    from trl.experimental.async_grpo.async_grpo_trainer import save_lora_adapter

    model = peft_model(rank=64)
    client = VLLMClient.__new__(VLLMClient)  # its constructor looks for a server of TRL's kind
    client.server_url = server.url
    accelerator: Any = types.SimpleNamespace(device=torch.device("cpu"), is_main_process=True)
    told: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def on_served(_: str, version: Any) -> None:
        told.put(version)

    ours: list[float] = []
    theirs: list[float] = []
    with (
        weightsync.publish(model, "actor", port=0, last_wait_s=0, canary=list(PROMPTS[0])) as publisher,
        weightsync.serve(
            {"actor": f"vllm+{server.url}"},
            sources=[publisher.endpoint],
            port=0,
            on_served=lambda _, served: told.put(served),
        ),
    ):
        for turn in range(1, NUM_TURNS + 2):
            set_version(model, turn)
            began_s = time.monotonic()
            version = str(publisher.step().version)
            assert (
                str(told.get(timeout=60)) == version
            )  # the server is not asked meanwhile: it is idle in TRL's turn, too
            assert answered(server, "actor") == version
            ours.append(time.monotonic() - began_s)

            set_version(model, 1000 + turn)
            began_s = time.monotonic()
            assert server.http.post("/pause", params={"mode": "keep"}).status_code == 200
            folder = tmp_path / f"policy-v{turn}"
            save_lora_adapter(model, accelerator, "default", str(folder))
            client.load_lora_adapter(folder.name, str(folder))
            assert server.http.post("/resume").status_code == 200
            answered(server, folder.name)
            theirs.append(time.monotonic() - began_s)
            client.unload_lora_adapter(folder.name)
    mine, other = statistics.median(ours[1:]), statistics.median(theirs[1:])
    with capsys.disabled():
        sys.stdout.write(
            f"\nfrom step to served: {mine:.3f} s, TRL's own way {other:.3f} s, {mine / other:.2f} times\n"
        )
    assert mine <= AT_MOST * other, (ours, theirs)


def answered(server: Server, model: str) -> str | None:
    """The version that answers; None where there is none yet."""
    response = server.http.post("/v1/completions", json=completion(PROMPTS[0], model=model))
    return response.headers.get("x-weightsync-version") if response.status_code == 200 else None
