"""A vLLM plugin for tests: its processes are forked from each other, as they are on a GPU.

On a CPU vLLM starts each of its three processes from nothing, which is 12 s of imports each time. Acts where
`WEIGHTSYNC_TEST_FORKS` is set. Workers then compute with as many threads as their server's environment says, since
OpenMP has read it before the fork.
"""

from __future__ import annotations

import os
from typing import Any

VARIABLE = "WEIGHTSYNC_TEST_FORKS"


def register() -> None:
    """vLLM calls it in each of its processes, before a configuration is made."""
    if not os.environ.get(VARIABLE):
        return
    from vllm.platforms.cpu import CpuPlatform

    kind: Any = CpuPlatform
    if getattr(kind, "forks", False):
        return
    kind.forks = True
    update = kind.check_and_update_config

    def updated(vllm_config: Any) -> None:
        update(vllm_config)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    kind.check_and_update_config = staticmethod(updated)
