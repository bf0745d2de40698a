"""TRL's `SFTTrainer`, sharded by accelerate's FSDP2 over the ranks that torchrun has started, with our callback:
`sft_job.py JSON`, the JSON of a `Job`. accelerate shards on GPUs alone: here it is told that these CPUs are such.

Behind training each rank gathers the model; rank 0 saves what its plain form says of one prompt.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, DistributedType, PartialState
from datasets import Dataset
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM
from trl import SFTConfig, SFTTrainer

from tests.adapters.trl_job import PROMPT, tokenizer
from weightsync.adapters.transformers import PublishCallback


class Job(msgspec.Struct):
    """What is trained, and who is told."""

    checkpoint: str
    to: list[str]
    steps: int
    every: int
    out: str


def as_if_on_gpus() -> None:
    """accelerate takes FSDP for several GPUs alone; nothing else of it asks which kind of device there is."""
    plain = AcceleratorState.__init__

    def sharded(self: Any, *args: Any, **given: Any) -> None:
        if PartialState._shared_state.get("distributed_type") == DistributedType.MULTI_CPU:
            PartialState._shared_state["distributed_type"] = DistributedType.MULTI_XPU
        plain(self, *args, **given)

    AcceleratorState.__init__ = sharded


def main() -> None:
    """Trains."""
    job = msgspec.json.decode(sys.argv[1].encode(), type=Job)
    torch.set_num_threads(1)
    as_if_on_gpus()
    text = [" ".join(f"w{2 + (row * 5 + at * 3) % 90}" for at in range(24)) for row in range(64)]
    arguments = SFTConfig(
        output_dir=job.out, max_steps=job.steps, per_device_train_batch_size=4, learning_rate=5e-3, use_cpu=True,
        report_to=[], save_strategy="no", disable_tqdm=True, bf16=False, max_length=32, ddp_backend="gloo",
        gradient_checkpointing=False, lr_scheduler_type="constant",
        fsdp=True,
        fsdp_config={"fsdp_version": 2, "transformer_layer_cls_to_wrap": ["Qwen3DecoderLayer"]},
    )  # fmt: skip
    publishes = PublishCallback("actor", every_steps=job.every, to=job.to, port=0, dtype="float32")
    trainer = SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(job.checkpoint, dtype=torch.float32),
        args=arguments, train_dataset=Dataset.from_dict({"text": text}), processing_class=tokenizer(),
        callbacks=[publishes],
    )  # fmt: skip
    trainer.train()
    named = list(trainer.accelerator.unwrap_model(trainer.model).named_parameters())
    sharded = sum(isinstance(parameter, DTensor) for _, parameter in named)
    whole = {name: p.full_tensor() if isinstance(p, DTensor) else p.detach() for name, p in named}
    if trainer.args.process_index == 0:
        assert publishes.report is not None
        plain = AutoModelForCausalLM.from_pretrained(job.checkpoint, dtype=torch.float32)
        with torch.no_grad():
            before = plain(input_ids=torch.tensor([PROMPT])).logits[0].log_softmax(-1)
            for name, parameter in plain.named_parameters():
                parameter.copy_(whole[name])
            after = plain(input_ids=torch.tensor([PROMPT])).logits[0].log_softmax(-1)
        said = {
            "prompt": PROMPT, "sharded": sharded, "last": publishes.report.version.number,
            **{
                key: [float(logits[at, token]) for at, token in enumerate(PROMPT[1:])]
                for key, logits in (("before", before), ("after", after))
            },
        }  # fmt: skip
        Path(job.out, "said.json").write_text(json.dumps(said), encoding="utf-8")
    dist.destroy_process_group()  # else gloo's threads may abort a process that ends before the other


if __name__ == "__main__":
    main()
