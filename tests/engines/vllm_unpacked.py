"""A vLLM plugin for tests: on a CPU linear weights stay as they were loaded, as they do on a GPU.

vLLM's CPU build packs them by default, so that nothing live can be written element by element; experts too, whose
kernel reads packed weights alone: here torch computes with them as they lie. Acts where `WEIGHTSYNC_TEST_UNPACKED` is
set, in each of vLLM's processes, before the model is built; "linear" leaves experts packed.
"""

from __future__ import annotations

import os
from typing import Any

VARIABLE = "WEIGHTSYNC_TEST_UNPACKED"
LINEAR = "linear"


def register() -> None:
    """vLLM calls it in each of its processes."""
    if not os.environ.get(VARIABLE):
        return
    from vllm import _custom_ops
    from vllm.model_executor.layers import utils

    ops: Any = _custom_ops
    ops._supports_onednn = False
    utils.check_cpu_sgl_kernel = lambda *_: False
    if os.environ[VARIABLE] == LINEAR:
        return
    try:
        from vllm.model_executor.layers.fused_moe import modular_kernel
        from vllm.model_executor.layers.fused_moe.experts import cpu_moe
    except ImportError:  # a release whose experts are elsewhere
        return
    experts: Any = cpu_moe.CPUUnquantizedExperts
    experts.process_weights_after_loading = modular_kernel.FusedMoEExperts.process_weights_after_loading
    experts.apply = _apply


def _apply(
    self: Any, output: Any, hidden_states: Any, w1: Any, w2: Any, topk_weights: Any, topk_ids: Any, activation: Any,
    *_: Any, expert_map: Any = None, **__: Any,
) -> None:  # fmt: skip
    """What vLLM's kernel of experts computes, from the stacked weights as they were loaded; of those that are here
    alone, which vLLM's own CPU kernel does not (0.32)."""
    import torch

    assert activation.value == "silu"
    output.zero_()
    for expert in topk_ids.unique().tolist():
        here = expert if expert_map is None else int(expert_map[expert])
        if here < 0:
            continue
        rows, slots = (topk_ids == expert).nonzero(as_tuple=True)
        gate, up = (hidden_states[rows] @ w1[here].t()).chunk(2, dim=-1)
        made = (torch.nn.functional.silu(gate) * up) @ w2[here].t()
        output.index_add_(0, rows, (made * topk_weights[rows, slots, None]).to(output.dtype))
