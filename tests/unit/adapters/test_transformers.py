"""The callback's end with a best checkpoint; transformers' own trainer calls it. More is in tests/adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("accelerate", reason="needs accelerate: pip install weightsync[engines-cpu]")

from transformers import Trainer, TrainingArguments

from tests.standins.processes import free_port
from weightsync.adapters.transformers import PublishCallback
from weightsync.errors import ConfigError

NUM_STEPS = 4


class Worsens(nn.Module):
    """Each step takes 1 from its weight, and each evaluation finds it worse: the first checkpoint is the best."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((2,), 8.0))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        loss = self.weight.sum() if self.training else -self.weight.sum()
        return {"loss": loss, "logits": x}


class Noted(PublishCallback):
    """Notes what is published."""

    def on_train_begin(self, *given: Any, model: nn.Module, **more: Any) -> None:
        self.model, self.came = model, dict[int, float]()
        super().on_train_begin(*given, model=model, **more)

    def _publish(self, number: int) -> None:
        super()._publish(number)
        self.came[number] = next(self.model.parameters())[0].item()


@pytest.mark.parametrize(("every", "wanted"), [(2, [2, 4, 5]), (3, [3, 5])])
@pytest.mark.parametrize("best", [True, False])
def test_the_best_checkpoint_is_a_version_above_the_last_step(
    tmp_path: Path, every: int, wanted: list[int], best: bool
) -> None:
    """What `train()` leaves in the model is served last. Seen red: with step 4 published hosts kept it, and without
    it the best checkpoint went out as step 4."""
    publishes = Noted("actor", every_steps=every, port=0, last_wait_s=0)
    arguments = TrainingArguments(
        output_dir=str(tmp_path), max_steps=NUM_STEPS, per_device_train_batch_size=1, report_to=[], use_cpu=True,
        disable_tqdm=True, learning_rate=1.0, optim="sgd", lr_scheduler_type="constant", max_grad_norm=0,
        eval_strategy="steps", save_strategy="steps", eval_steps=1, save_steps=1,
        load_best_model_at_end=best, metric_for_best_model="loss", greater_is_better=False,
    )  # fmt: skip
    data = [{"x": torch.ones(1), "labels": torch.ones(1)}] * NUM_STEPS
    model = Worsens()
    Trainer(model=model, args=arguments, train_dataset=data, eval_dataset=data[:1], callbacks=[publishes]).train()
    of_step = {number: 8.0 - number for number in range(1, NUM_STEPS + 1)}
    if best:
        assert list(publishes.came) == wanted
        assert publishes.came.pop(wanted[-1]) == model.weight[0].item() == of_step[1]
    else:
        assert max(publishes.came) == NUM_STEPS
    assert publishes.came == {number: of_step[number] for number in publishes.came}


def test_what_a_training_that_failed_has_left_is_named_by_the_next_one() -> None:
    """Seen red: the port was taken, and nothing said by whom."""
    port = free_port()
    failed, following = PublishCallback("actor", port=port), PublishCallback("actor", port=port)
    failed.on_train_begin(None, None, None, model=Worsens())
    with pytest.raises(ConfigError, match=r"another callback's training failed, that one publishes on: call its close"):
        following.on_train_begin(None, None, None, model=Worsens())
    failed.close()
    following.on_train_begin(None, None, None, model=Worsens())
    following.close()
