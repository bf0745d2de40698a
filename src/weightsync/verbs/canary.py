"""TrainerCanary: what the trainer's model says of a fixed prompt, with the weights that it is about to publish."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weightsync.errors import ConfigError, ExtractError, InvalidRequestError, as_weightsync_error
from weightsync.types.canary import Canary

TOLERANCE = 0.1
"""Of a log-probability. Two engines that compute the same weights in bfloat16 differ by some hundredths."""


class TrainerCanary:
    """Every rank makes one; a forward pass may be a collective.

    Args:
        model: takes `input_ids` of shape [1, tokens], int64, and gives `logits` of shape [1, tokens, vocabulary].
        tokens: token ids of the prompt.
        tolerance: see `Canary`.

    Raises:
        ConfigError: a prompt or a tolerance that is none.
    """

    def __init__(self, model: torch.nn.Module, tokens: Sequence[int], *, tolerance: float = TOLERANCE) -> None:
        try:
            Canary(tokens=tuple(tokens), logprobs=(0.0,) * max(0, len(tokens) - 1), tolerance=tolerance)
        except (InvalidRequestError, TypeError) as error:
            raise ConfigError(f"canary= is a prompt's token ids: {error}") from None
        self.model = model
        self._tokens = tuple(tokens)
        self._tolerance = tolerance

    def read(self) -> Canary:
        """One forward pass, without gradients and without dropout; the model's mode is as before.

        Raises:
            ExtractError: the forward pass fails, or the model gives no logits.
        """
        device = next((each.device for each in self.model.parameters()), torch.device("cpu"))
        training = {module: module.training for module in self.model.modules()}
        self.model.eval()
        try:
            with torch.no_grad():
                output = self.model(input_ids=torch.tensor([self._tokens], dtype=torch.int64, device=device))
        except Exception as caught:
            raise as_weightsync_error(caught, ExtractError, "the canary's forward pass failed") from caught
        finally:
            for module, was in training.items():
                module.training = was
        logits = getattr(output, "logits", None)
        if not isinstance(logits, torch.Tensor) or logits.shape[:2] != (1, len(self._tokens)):
            raise ExtractError("a canary needs a model that gives logits of shape [1, tokens, vocabulary]")
        scores = torch.log_softmax(logits[0, :-1].float(), dim=-1)
        wanted = torch.tensor(self._tokens[1:], device=scores.device).unsqueeze(1)
        return Canary(
            tokens=self._tokens, logprobs=tuple(scores.gather(1, wanted)[:, 0].tolist()), tolerance=self._tolerance
        )
