"""A vLLM plugin for tests: on a CPU linear weights stay as they were loaded, as they do on a GPU.

vLLM's CPU build packs them by default, so that nothing live can be written element by element. Acts where
`WEIGHTSYNC_TEST_UNPACKED` is set, in each of vLLM's processes, before the model is built.
"""

from __future__ import annotations

import os
from typing import Any

VARIABLE = "WEIGHTSYNC_TEST_UNPACKED"


def register() -> None:
    """vLLM calls it in each of its processes."""
    if not os.environ.get(VARIABLE):
        return
    from vllm import _custom_ops
    from vllm.model_executor.layers import utils

    ops: Any = _custom_ops
    ops._supports_onednn = False
    utils.check_cpu_sgl_kernel = lambda *_: False
