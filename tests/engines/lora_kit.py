"""LoRA adapters for tests of engines: a PEFT model of the tiny model, its versions, and what PEFT says of each.

A version's weights are made from its number alone, so every process has the same.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.engines import sglang_support
from tests.engines.vllm_support import PROMPTS, Server, build_model, completion, save_checkpoint
from tests.standins.processes import Child
from weightsync.errors import WeightSyncError
from weightsync.memory import reclaim_dead
from weightsync.types.service import ModelStatus
from weightsync.verbs.serving import Service

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
MAX_RANK = 64
BASE = "base"
MIDDLEWARE = "weightsync.engine.vllm.lora_middleware.LoraMiddleware"
ENV = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"}
SERVED_S = 60.0
STRENGTH = 0.3
"""So strong that two versions say clearly different things."""
CLOSE, FAR = 0.08, 0.2
"""Of log-probabilities. vLLM and PEFT compute the same bfloat16 weights in other orders, and are closer than CLOSE
(up to 0.057 was seen); of two versions some token's are further apart than FAR."""


def lora_options(*, max_loras: int = 4, max_rank: int = MAX_RANK) -> tuple[str, ...]:
    """Words of a server's command line."""
    return (
        *("--enable-lora", "--max-lora-rank", str(max_rank), "--max-loras", str(max_loras)),
        *("--served-model-name", BASE, "--middleware", MIDDLEWARE),
    )


def lora_server(
    folder: Path, *, max_loras: int = 4, max_rank: int = MAX_RANK, env: dict[str, str] | None = None,
    options: Sequence[str] = (), seed: int = 0,
) -> Server:  # fmt: skip
    """A vLLM server of the tiny model that takes adapters; not started yet."""
    checkpoint = save_checkpoint(folder / "base", build_model(seed))
    return Server(
        checkpoint, folder / "server", env={**ENV, **(env or {})},
        options=(*lora_options(max_loras=max_loras, max_rank=max_rank), *options),
    )  # fmt: skip


def peft_model(
    *, rank: int = 8, modules: Sequence[str] = (*ATTENTION, *MLP), alpha: float | None = None, seed: int = 0,
    engine: str = "vllm",
) -> Any:  # fmt: skip
    """A PEFT model over the tiny model in bfloat16, as a trainer of it would have it; its adapter in bfloat16, too. For
    "sglang" over the model of its tests, both in float32."""
    from peft import LoraConfig, get_peft_model

    base = build_model(seed).to(torch.bfloat16) if engine == "vllm" else sglang_support.build_model(seed)
    config = LoraConfig(r=rank, lora_alpha=2 * rank if alpha is None else alpha, target_modules=list(modules))
    return get_peft_model(base, config, autocast_adapter_dtype=False)


def set_version(model: nn.Module, number: int, *, mute: bool = False) -> None:
    """Gives the adapter the weights of a version: as if so many steps had been made. `mute`: with all of B at 0."""
    chance = torch.Generator().manual_seed(10_000 + number)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if "lora_" in name:
                scale = STRENGTH if "lora_A" in name else STRENGTH / tensor.shape[1] ** 0.5
                tensor.copy_(torch.randn(tensor.shape, generator=chance) * scale)
                if mute and "lora_B" in name:
                    tensor.zero_()


def scores_of(model: nn.Module, prompt: Sequence[int]) -> list[float]:
    """The log-probability of every token but the first, by PEFT's own forward pass."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([list(prompt)])).logits[0].float()
    scores = torch.log_softmax(logits, -1)
    return [float(scores[place, token]) for place, token in enumerate(prompt[1:])]


def publisher_main(model_id: str, options: dict[str, Any], *, conn: Any) -> None:
    """A trainer: publishes the version that it is told, and answers with PEFT's scores of the prompts.

    Args:
        conn: to whoever started it.
        model_id: under which it publishes.
        options: of `peft_model`; under "publish" those of `weightsync.publish`.
    """
    import weightsync

    torch.set_num_threads(1)
    said = options.pop("publish", {})
    model = peft_model(**options)
    with weightsync.publish(model, model_id, port=0, last_wait_s=0, **said) as publisher:
        conn.send((publisher.run_id, publisher.endpoint))
        while (order := conn.recv()) is not None:
            number, lie, mute = order
            set_version(model, number, mute=mute)
            _lie(publisher, lie)
            report = publisher.step(number)
            assert report.published, report
            conn.send([scores_of(model, prompt) for prompt in PROMPTS])
    os._exit(0)


def _lie(publisher: Any, by: float) -> None:
    """From here on the trainer's canary says something else than its model does."""
    canary = publisher._lora.canary
    if canary is not None:
        real = type(canary).read(canary)
        canary.read = lambda: type(real)(
            tokens=real.tokens, logprobs=tuple(each - by for each in type(canary).read(canary).logprobs),
            tolerance=real.tolerance,
        )  # fmt: skip


class Trainer:
    """A trainer in a process of its own, see `publisher_main`.

    Attributes:
        run_id, endpoint: of its publisher.
        version: its newest one; 0: none yet.
        scores: PEFT's of the prompts, by version.
    """

    def __init__(self, start: Callable[..., Child], model_id: str, options: dict[str, Any]) -> None:
        self.model_id = model_id
        self.options = {name: value for name, value in options.items() if name != "publish"}
        self._child = start(publisher_main, model_id, dict(options), talk=True, name=f"trainer of {model_id}")
        self.run_id, self.endpoint = self._child.recv(120)
        self.version = 0
        self.scores: dict[int, list[list[float]]] = {}

    def publish(self, *, lie: float = 0.0, mute: bool = False) -> None:
        """The next version.

        Args:
            lie: the canary says so much less than it is.
            mute: other bytes that change nothing: B is 0.
        """
        self.version += 1
        self._child.conn.send((self.version, lie, mute))
        self.scores[self.version] = self._child.recv(60)


@dataclasses.dataclass(kw_only=True)
class Asked:
    """One streamed answer.

    Attributes:
        model, prompt: what was asked.
        version: as the answer's header says, and its spans.
        tokens, logprobs: the answer's.
    """

    model: str
    prompt: list[int]
    version: str
    tokens: list[int]
    logprobs: list[float]

    def distance_to(self, model: nn.Module) -> float:
        """The greatest difference of any token's score from what a model says of it."""
        told = self.scores(model, [*self.prompt, *self.tokens])[len(self.prompt) - 1 :]
        return max(abs(one - other) for one, other in zip(told, self.logprobs, strict=True))

    scores = staticmethod(scores_of)


def stream(server: Server, model: str, prompt: list[int], *, num_tokens: int) -> Asked:
    """Asks for one answer, and takes it as it comes.

    Raises:
        AssertionError: it failed, or is not what it should be.
    """
    body = completion(
        prompt, model=model, max_tokens=num_tokens, ignore_eos=True, temperature=1.0, logprobs=0, stream=True
    )
    tokens: list[int] = []
    logprobs: list[float] = []
    spans: Any = None
    with server.http.stream("POST", "/v1/completions", json=body, timeout=120) as response:
        assert response.status_code == 200, response.read()
        version = response.headers["x-weightsync-version"]
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            assert event["model"] == model
            for choice in event["choices"]:
                told = choice["logprobs"] or {"tokens": [], "token_logprobs": []}
                tokens += [int(name.removeprefix("token_id:")) for name in told["tokens"]]
                logprobs += told["token_logprobs"]
            spans = event.get("weight_versions") or spans
    assert len(tokens) == num_tokens
    assert spans == [{"index": 0, "spans": [{"version": version, "start": 0, "end": num_tokens}]}]
    return Asked(model=model, prompt=prompt, version=version, tokens=tokens, logprobs=logprobs)


def worker_adapters(server: Server) -> list[int]:
    """The numbers of the adapters that vLLM's worker holds."""
    found: list[int] = server.http.post("/collective_rpc", json={"method": "list_loras"}).json()["results"][0]
    return found


def adapter_folders() -> set[str]:
    """Folders of adapters in shared memory made by this process, but those of servers that are gone; other tests' may
    lie beside them."""
    reclaim_dead()
    return {
        name for name in os.listdir("/dev/shm")
        if name.startswith(f"weightsync-ipc-{os.getpid()}-")
        and os.path.exists(f"/dev/shm/{name}/adapter_model.safetensors")
    }  # fmt: skip


def served(service: Service, trainer: Trainer, *, within_s: float = SERVED_S) -> ModelStatus:
    """Returns when the trainer's newest version is served."""
    end = time.monotonic() + within_s
    while True:
        status = service.model_status(trainer.model_id)
        if (status.run_id, status.version) == (trainer.run_id, trainer.version) and not status.errors:
            return status
        assert time.monotonic() < end, f"{status}; {status.errors}; {status.sender_errors}"
        time.sleep(0.01)  # between two looks


def refused(service: Service, trainer: Trainer, *, within_s: float = SERVED_S) -> str:
    """What is said of a version that the engine does not take."""
    end = time.monotonic() + within_s
    while not (errors := service.model_status(trainer.model_id).errors):
        assert time.monotonic() < end
        time.sleep(0.01)  # between two looks
    return "; ".join(errors.values())


def until(condition: Callable[[], object], *, within_s: float = SERVED_S) -> None:
    """Returns when it holds."""
    end = time.monotonic() + within_s
    while True:
        with contextlib.suppress(WeightSyncError):
            if condition():
                return
        assert time.monotonic() < end
        time.sleep(0.02)  # between two looks
