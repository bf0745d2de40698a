"""A callback for `transformers.Trainer`, and for what is made of it (TRL's SFTTrainer, GRPOTrainer, ...): it publishes.

    callback = PublishCallback("actor", every_steps=5)
    trainer = Trainer(model=model, args=args, train_dataset=data, callbacks=[callback])
    try:
        trainer.train()
    finally:
        callback.close()

Every rank has one; the model may be plain, DDP's, or sharded by FSDP2.
"""

from __future__ import annotations

import logging
from typing import Any

from transformers import TrainerCallback

from weightsync.errors import ConfigError
from weightsync.trainer.offload_steps import OffloadReport
from weightsync.verbs.publishing import Publisher, publish

_logger = logging.getLogger(__name__)


class PublishCallback(TrainerCallback):  # type: ignore[misc]
    """Publishes the model after every so many optimiser steps, and after the last one.

    A version's number is the trainer's `global_step`. Training goes on while hosts fetch it; its end waits until they
    serve the last one. transformers tells a callback of no failure: `close` ends what a training that failed has left,
    so does the next training with the same callback. With `load_best_model_at_end` the best checkpoint's
    weights, which `train()` leaves in the model, are one more version, numbered above the last step.

    Args:
        model_id: the name that rollout hosts ask for.
        every_steps: of the optimiser.
        publishing: further arguments of `weightsync.publish`, e.g. to, token, dtype, port.

    Attributes:
        publisher: while the trainer trains.
        report: of the last version.

    Raises:
        ConfigError: `every_steps` is no number from 1 on.
    """

    def __init__(self, model_id: str | None = None, *, every_steps: int = 1, **publishing: Any) -> None:
        if type(every_steps) is not int or every_steps < 1:
            raise ConfigError(f"every_steps is a whole number from 1 on, not {every_steps!r}")
        self._model_id = model_id
        self._every_steps = every_steps
        self._publishing = publishing
        self._last = -1
        self.publisher: Publisher | None = None
        self.report: OffloadReport | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Starts the agents. transformers calls it, as all of these, on every rank.

        Raises:
            ConfigError, WeightSyncError: see `publish`; where the port is taken it names `close`.
        """
        self.close()
        self._last = -1
        try:
            self.publisher = publish(given["model"], self._model_id, **self._publishing)
        except ConfigError as error:
            if "can't listen" in error.message:
                error.message += "; where another callback's training failed, that one publishes on: call its close()"
            raise

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Publishes, where it is time to."""
        if state.global_step % self._every_steps == 0:
            self._publish(state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Publishes the last step, or the best checkpoint, waits until it is served, and withdraws it."""
        if self.publisher is None:
            return
        if args.load_best_model_at_end and state.best_model_checkpoint is not None:  # it was loaded just now
            self._publish(max(state.global_step, self._last) + 1)
        elif state.global_step > self._last:
            self._publish(state.global_step)
        publisher, self.publisher = self.publisher, None
        publisher.close()

    def close(self) -> None:
        """Ends what a training that failed has left, and waits for nobody. Idempotent."""
        if self.publisher is not None:
            self.publisher.close(wait=False)
            self.publisher = None

    def _publish(self, number: int) -> None:
        assert self.publisher is not None
        self.report = self.publisher.step(number)
        self._last = number
        _logger.info("%s", self.report)
