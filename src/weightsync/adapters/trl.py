"""What TRL's `AsyncGRPOTrainer` takes as `weight_transfer`: it publishes, or pushes, instead of TRL's NCCL group.

    transfer = WeightTransfer("actor", to=["http://host-0:9000"], token=TOKEN)      # hosts fetch: weightsync serve
    transfer = WeightTransfer(engines=["vllm+http://host-0:8000"], token=TOKEN)     # training rank 0 pushes
    trainer = AsyncGRPOTrainer(model, ..., weight_transfer=transfer)

The interface is `WeightTransferProtocol` of `trl.experimental.async_grpo`, release 1.16. TRL calls it on training
rank 0 alone, from one thread; the other ranks walk the same iterator in step.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

import torch

from weightsync.adapters.gathered import GatheredTransfer


class WeightTransfer(GatheredTransfer):
    """`GatheredTransfer` by TRL's names. A version's number is its `model_version`, if training was not resumed."""

    _outside: BaseException | None = None  # is handled around the training, e.g. that of one before that failed

    def init_weight_transfer(self) -> None:
        """Nothing: who is told or pushed to is met with the first weights, which follow at once."""

    def pause(self) -> None:
        """Nothing: engines go on generating while weights travel, and pause by themselves for as long as they write."""

    def send_weights(self, iterator: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._outside = sys.exc_info()[1]
        self.send(iterator)

    def resume(self) -> None:
        """Returns when the version is served; see `wait_served`."""
        self.wait_served()

    def destroy(self) -> None:
        """See `close`. It waits where training went well: TRL calls it in a `finally`."""
        outside, self._outside = self._outside, None
        self.close(wait=sys.exc_info()[1] is outside)
