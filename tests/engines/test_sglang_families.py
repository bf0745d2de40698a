"""Families of models in a real SGLang: what is live, and what it answers, after each optimiser step's delta.

One step of one family in `make test`, ten of each in `make soak`. SGLang computes in float32 here. A version holds
values of bfloat16, so that a step changes a part of the elements, as it does in RL.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.engines import vllm_families
from tests.engines.sglang_kit import Pulls
from tests.engines.sglang_support import (
    DIFFERENT,
    NEEDS_SGLANG,
    SAME,
    Server,
    Starter,
    distance,
    save_checkpoint,
    sglang_is_there,
    told_by_a_fresh_server,
)
from tests.multiproc.trainers import VOCAB
from weightsync.types.transfer_messages import Transport

pytestmark = [pytest.mark.timeout(900), pytest.mark.skipif(not sglang_is_there, reason=NEEDS_SGLANG)]
_logger = logging.getLogger(__name__)


def trained(family: str, *, tied: bool) -> Iterator[nn.Module]:
    """The model, and after each real step of AdamW what of it is served."""
    model = vllm_families.build(family, tied=tied)
    rates = vllm_families.LEARNING_RATES
    groups = [{"params": [parameter], "lr": rates[parameter.dim()]} for parameter in model.parameters()]
    optimizer = torch.optim.AdamW(groups)
    for step in range(1000):
        yield served(model)
        tokens = torch.randint(0, VOCAB, (2, 16), generator=torch.Generator().manual_seed(step))
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def served(model: nn.Module) -> nn.Module:
    """A copy with the values that bfloat16 has."""
    made = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(parameter.bfloat16().float())
    return made


def check(family: str, folder: Path, *, tied: bool, steps: int) -> None:
    """Starts a server, brings each step's delta into it, and compares it with a fresh server of that step."""
    versions = trained(family, tied=tied)
    with contextlib.ExitStack() as stack:
        starter = Starter()
        stack.callback(starter.close)
        first = next(versions)
        server = Server(starter, save_checkpoint(folder / "v0", first), folder / "server")
        stack.callback(server.close)
        server.start()
        server.wait_until_ready()
        pulls = Pulls(server, transport=Transport.TCP, mode="delta", load_by="tensor")
        stack.callback(pulls.close)
        begun, far, patched = server.truth(), [], 0
        pulls.publish(first)
        assert pulls.sync().num_patched == 0
        for step in range(1, steps + 1):
            model = next(versions)
            pulls.publish(model)
            status = pulls.sync()
            assert (status.num_patched, status.unprovable) == (1, {}), status
            patched += status.num_patched
            fresh = told_by_a_fresh_server(starter, save_checkpoint(folder / f"v{step}", model), folder / f"v{step}")
            told = server.truth()
            far.append(distance(told.logprobs, fresh.logprobs))
            assert status.checksums == {"sglang": fresh.checksum}
            assert told.checksum == fresh.checksum
        assert max(far) <= SAME, far
        assert distance(begun.logprobs, told.logprobs) >= DIFFERENT, "the steps change what it says"
        pulls.publish(first)  # and back, by a delta
        assert pulls.sync().num_patched == 1
        back = server.truth()
        assert (back.checksum, distance(back.logprobs, begun.logprobs)) == (begun.checksum, 0.0)
        _logger.warning("%s: %d steps, %d patched in place, %.2g from a fresh server", family, steps, patched, max(far))


@pytest.mark.soak
def test_a_steps_deltas_are_written_into_live_weights(tmp_path: Path) -> None:
    """Of Qwen3, whose heads have norms of their own."""
    check("Qwen3", tmp_path, tied=False, steps=1)


@pytest.mark.soak
@pytest.mark.parametrize("family", ["Qwen2", "Qwen3", "Llama"])
def test_ten_steps(tmp_path: Path, family: str) -> None:
    """A fresh server after each."""
    check(family, tmp_path, tied=False, steps=10)
