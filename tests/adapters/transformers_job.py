"""A `transformers.Trainer` that publishes by our callback, and a receiver in its first rank that compares what arrives.

Run by torchrun, or alone, as `transformers_job.py FOLDER`. Each rank writes a line of JSON at its end.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Trainer, TrainerCallback, TrainingArguments

from weightsync.adapters.checkpoint_engine import Receiver, TransferPlan
from weightsync.adapters.transformers import PublishCallback

NUM_STEPS, EVERY = 5, 2


class Follows(TrainerCallback):  # type: ignore[misc]
    """Fetches each version as it is published; which ones are the model's weights at that moment, to the bit."""

    def __init__(self, publishes: PublishCallback) -> None:
        self._publishes = publishes
        self._receiver = Receiver("follower")
        self.right: list[int] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Behind the one that publishes: rank 0 alone."""
        publisher, report = self._publishes.publisher, self._publishes.report
        if report is None or report.version.number != state.global_step or publisher is None or args.process_index:
            return
        plan = TransferPlan(endpoint=publisher.endpoint, model_id="actor", version=report.version)
        self._receiver.join(plan)
        here = {name: tensor.detach().bfloat16() for name, tensor in given["model"].state_dict().items()}
        came = dict(self._receiver.receive(timeout_s=30))
        if all(torch.equal(tensor, here[name]) for name, tensor in came.items()) and came:
            self.right.append(state.global_step)


def main() -> None:
    """Trains, and says what was published and what was right."""
    torch.manual_seed(0)
    config = Qwen2Config(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=96,
        vocab_size=128, max_position_embeddings=256,
    )  # fmt: skip
    data = [{"input_ids": row, "labels": row} for row in torch.randint(0, 128, (64, 16))]
    publishes = PublishCallback("actor", every_steps=EVERY, port=0, last_wait_s=1.0)  # the follower leaves it out
    follows = Follows(publishes)
    arguments = TrainingArguments(
        output_dir=sys.argv[1], per_device_train_batch_size=4, max_steps=NUM_STEPS, report_to=[], use_cpu=True,
        ddp_backend="gloo" if "RANK" in os.environ else None, save_strategy="no", disable_tqdm=True, learning_rate=1e-3,
    )  # fmt: skip
    trainer = Trainer(
        model=Qwen2ForCausalLM(config), args=arguments, train_dataset=data, callbacks=[publishes, follows]
    )
    trainer.train()
    assert publishes.report is not None
    told = {"rank": int(os.environ.get("RANK", "0")), "last": publishes.report.version.number, "right": follows.right}
    sys.stdout.write(f"{json.dumps(told)}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
