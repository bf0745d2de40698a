"""A job of TRL's `AsyncGRPOTrainer`, by our adapter: `trl_job.py JSON`, the JSON of a `Job`.

Behind each sync it asks the server for log-probabilities and compares them with its own model's, and writes a line of
JSON. TRL's attention kernel, which is for GPUs, is replaced by a plain torch one.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer, packing

from weightsync.adapters.trl import WeightTransfer
from weightsync.adapters.trl_rollouts import NEWEST, OLDEST, UNKNOWN, VersionedRolloutWorker

PROMPT = tuple((7 * i + 3) % 89 for i in range(24))


class Job(msgspec.Struct):
    """What is trained, and against whom.

    Attributes:
        checkpoint: of the model; its folder is the name that vLLM serves it by.
        server: URL of vLLM.
        to: rollout services that are told; none: it is pushed into vLLM.
        steps: how many.
        out: a folder.
        versioned: whether the rollout worker that knows versions is used.
    """

    checkpoint: str
    server: str
    to: list[str]
    steps: int
    out: str
    versioned: bool = False


class Synced(msgspec.Struct):
    """A line of JSON, behind a sync.

    Attributes:
        number: of the version.
        off: the largest relative distance between the server's log-probabilities and the model's; None: it was away.
        moved: by how much the model's differ from those of the version before.
        away: who does not serve it yet.
    """

    number: int
    off: float | None
    moved: float | None
    away: list[str]


def varlen_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, starts: torch.Tensor, key_starts: torch.Tensor,
    *_: Any, softmax_scale: float | None = None, **__: Any,
) -> torch.Tensor:  # fmt: skip
    """What the kernel computes: each segment's queries see its keys, causally from the end."""
    out = torch.empty_like(query)
    group = query.shape[1] // key.shape[1]
    for index in range(len(starts) - 1):
        rows = slice(int(starts[index]), int(starts[index + 1]))
        seen = slice(int(key_starts[index]), int(key_starts[index + 1]))
        q, k, v = (x.transpose(0, 1) for x in (query[rows], key[seen], value[seen]))
        k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
        mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
        part = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=softmax_scale)
        out[rows] = part.transpose(0, 1)
    return out


def tokenizer() -> PreTrainedTokenizerFast:
    """One word a token."""
    words = {"<eos>": 0, "<unk>": 1, **{f"w{index}": index for index in range(2, 96)}, "says": 96}
    plain = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    made = PreTrainedTokenizerFast(
        tokenizer_object=plain, eos_token="<eos>", unk_token="<unk>", pad_token="<eos>",
        chat_template="{% for message in messages %}{{ message['content'] }} {% endfor %}says",
    )  # fmt: skip
    made.response_template = {
        "defaults": {"role": "assistant"},
        "start_anchor": "says",
        "fields": {"content": {"close_pattern": "<eos>", "content": "text"}},
    }
    return made


def reward(completion_ids: Iterable[list[int]], **_: Any) -> list[float]:
    """Low tokens are good; and no two samples of a group are as good, or a step would move nothing."""
    return [
        sum(1.0 for token in ids if token < 48) / max(1, len(ids)) + index / 100
        for index, ids in enumerate(completion_ids)
    ]


class Compared(WeightTransfer):
    """Says what the server computes behind each sync, against plain transformers with the trainer's weights."""

    def __init__(self, job: Job, **given: Any) -> None:
        super().__init__("actor", **given)
        self._job = job
        self._plain = AutoModelForCausalLM.from_pretrained(job.checkpoint, dtype=torch.float32)
        self._told: list[float] = []
        self.trainer: Any = None

    def resume(self) -> None:
        super().resume()
        assert self.version is not None
        weights = dict(self.trainer.accelerator.unwrap_model(self.trainer.model).named_parameters())
        with torch.no_grad():
            for name, parameter in self._plain.named_parameters():
                parameter.copy_(weights[name])
            logits = self._plain(input_ids=torch.tensor([PROMPT])).logits[0].log_softmax(-1)
        here = [float(logits[at, token]) for at, token in enumerate(PROMPT[1:])]
        there = self._served()
        off = None if there is None else max(abs(a - b) / abs(b) for a, b in zip(there, here, strict=True))
        moved = max((abs(a - b) / abs(b) for a, b in zip(self._told, here, strict=False)), default=None)
        self._told = here
        say(Synced(number=self.version.number, off=off, moved=moved, away=list(self.not_serving)))

    def _served(self) -> list[float] | None:
        body = {
            "model": self._job.checkpoint, "prompt": list(PROMPT), "max_tokens": 1, "temperature": 0.0,
            "prompt_logprobs": 0, "return_tokens_as_token_ids": True,
        }  # fmt: skip
        with contextlib.suppress(httpx.HTTPError):
            answer = httpx.post(f"{self._job.server}/v1/completions", json=body, timeout=30.0, trust_env=False)
            told = answer.raise_for_status().json()["choices"][0]["prompt_logprobs"][1:]
            return [float(each[str(token)]["logprob"]) for each, token in zip(told, PROMPT[1:], strict=True)]
        return None


class Logged(msgspec.Struct):
    """A line of JSON: what TRL logs of the versions that made its samples.

    Attributes:
        oldest, newest: numbers of versions, the mean of the samples; None: no sample is of a known version.
        unknown: how many tokens are of no known version, the mean of the samples.
    """

    oldest: float | None
    newest: float | None
    unknown: float


class Logs(TrainerCallback):  # type: ignore[misc]
    """Says what TRL has logged of versions."""

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
        """transformers calls it."""
        if UNKNOWN in logs:
            say(Logged(logs.get(OLDEST), logs.get(NEWEST), float(logs[UNKNOWN])))


def say(line: msgspec.Struct) -> None:
    """Writes a line of JSON."""
    sys.stdout.write(msgspec.json.encode(line).decode() + "\n")
    sys.stdout.flush()


def main() -> None:
    """Trains."""
    job = msgspec.json.decode(sys.argv[1].encode(), type=Job)
    packing._flash_attn = lambda: types.SimpleNamespace(flash_attn_varlen_func=varlen_attention)
    async_grpo_trainer.get_peak_flops_per_device = lambda *_: None  # of a GPU
    words = tokenizer()
    asked = [" ".join(f"w{2 + (step * 7 + at) % 90}" for at in range(8)) for step in range(64)]
    arguments = AsyncGRPOConfig(
        output_dir=job.out, max_steps=job.steps, per_device_train_batch_size=4, num_generations=4,
        max_completion_length=12, vllm_server_base_url=job.server, token_budget=512, report_to=[], use_cpu=True,
        save_strategy="no", disable_tqdm=True, learning_rate=5e-3, bf16=False, gradient_checkpointing=False,
        max_inflight_tasks=8, lr_scheduler_type="constant", logging_steps=1,
    )  # fmt: skip
    data = Dataset.from_dict({"prompt": [[{"role": "user", "content": text}] for text in asked]})
    way: dict[str, Any] = {"to": job.to} if job.to else {"engines": f"vllm+{job.server}"}
    transfer = Compared(job, dtype="float32", **({"port": 0} if job.to else {}), **way)
    worker = None
    if job.versioned:
        worker = VersionedRolloutWorker(
            model_name=job.checkpoint, dataset=data, reward_funcs=[reward], processing_class=words, eos_token_ids=[0],
            num_generations=4, max_inflight_tasks=8, vllm_server_url=job.server, max_tokens=12,
        )  # fmt: skip
    trainer = AsyncGRPOTrainer(
        model=job.checkpoint, reward_funcs=reward, args=arguments, train_dataset=data, processing_class=words,
        weight_transfer=transfer, rollout_worker=worker,
    )  # fmt: skip
    transfer.trainer = trainer
    trainer.add_callback(Logs())
    trainer.train()
    Path(job.out, "done").write_text(str(trainer.state.global_step), encoding="utf-8")


if __name__ == "__main__":
    main()
