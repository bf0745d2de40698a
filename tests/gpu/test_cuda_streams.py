"""What a training step has queued on a side stream is what is extracted and lent. Needs a CUDA GPU."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.parts_ipc import prove_streams

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def test_extraction_and_lending_come_after_what_the_caller_has_queued() -> None:
    prove_streams()
