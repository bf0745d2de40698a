"""TrainerCanary: it reads what the model says, without dropout and gradients, and leaves the model as it was."""

from __future__ import annotations

import types

import pytest
import torch
from torch import nn

from weightsync.errors import ConfigError, ExtractError
from weightsync.verbs.canary import TrainerCanary


class Model(nn.Module):
    """Logits of one embedding, behind a dropout."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(8, 8)
        self.drop = nn.Dropout(0.5)
        self.frozen = nn.Dropout(0.5).eval()

    def forward(self, input_ids: torch.Tensor) -> types.SimpleNamespace:
        return types.SimpleNamespace(logits=self.frozen(self.drop(self.table(input_ids))))


def test_it_says_the_models_log_probabilities_and_leaves_its_mode() -> None:
    """Seen red without eval()."""
    model = Model().train()
    model.frozen.eval()
    told = TrainerCanary(model, [3, 1, 4], tolerance=0.2).read()
    scores = torch.log_softmax(model.table.weight.detach()[[3, 1]], -1)
    assert told.logprobs == pytest.approx([float(scores[0, 1]), float(scores[1, 4])])
    assert (told.tokens, told.tolerance) == ((3, 1, 4), 0.2)
    assert (model.training, model.drop.training, model.frozen.training) == (True, True, False)
    assert model.table.weight.grad is None


@pytest.mark.parametrize("tokens", [[], [1], [1, -1]])
def test_a_prompt_that_is_none_is_refused(tokens: list[int]) -> None:
    with pytest.raises(ConfigError):
        TrainerCanary(Model(), tokens)


def test_a_forward_pass_that_fails_is_typed() -> None:
    """Seen red: a token beyond the vocabulary was a bare IndexError."""
    model = Model().train()
    with pytest.raises(ExtractError, match="the canary's forward pass failed: IndexError"):
        TrainerCanary(model, [1, 8]).read()
    assert model.training


def test_a_model_without_logits_is_refused() -> None:
    class Odd(Model):
        def forward(self, input_ids: torch.Tensor) -> types.SimpleNamespace:
            return types.SimpleNamespace()

    with pytest.raises(ExtractError, match="logits"):
        TrainerCanary(Odd(), [1, 2]).read()
