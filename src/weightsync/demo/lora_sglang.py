"""The engine process of `demo --lora --engine sglang`, see `lora_vllm`. On a CPU SGLang computes in float32, with the
values of the bfloat16 base.
"""

from __future__ import annotations

from typing import Any

from weightsync.demo.lora_engine import ADAPTER_ID, BASE_ID
from weightsync.demo.lora_vllm import LoraVllmEngine, main
from weightsync.demo.sglang_engine import SGLangServer
from weightsync.handles.lora_messages import SGLANG_VARIABLE
from weightsync.handles.two_kinds import SGLangServerEngine

_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_SLOTS = 3


class LoraSGLangServer(SGLangServer):
    def _command(self, port: int) -> tuple[str, ...]:
        import torch

        backend = () if torch.cuda.is_available() else ("--lora-backend", "torch_native")
        return (
            *super()._command(port),
            *("--served-model-name", BASE_ID, "--enable-lora", "--max-loras-per-batch", str(_SLOTS + 1)),
            *("--max-lora-rank", "64", "--lora-target-modules", *_MODULES, *backend),
        )

    def _environment(self) -> dict[str, str]:
        return {**super()._environment(), SGLANG_VARIABLE: "1"}


class LoraSGLangEngine(LoraVllmEngine):
    _unknown = (400,)

    def _scores(self, row: list[int]) -> tuple[list[float], int | None]:
        reply, version = self._said(row, 1, return_logprob=True, logprob_start_len=0)
        return [each[0] for each in reply["meta_info"]["input_token_logprobs"][1:]], version

    def _generated(self, prompt: list[int], num_tokens: int) -> tuple[str, int | None]:
        reply, version = self._said(prompt, num_tokens)
        return bytes(reply.get("output_ids", ())).decode("utf-8", "replace"), version

    def _said(self, prompt: list[int], num_tokens: int, **options: Any) -> tuple[dict[str, Any], int | None]:
        sampling = {"max_new_tokens": num_tokens, "temperature": 0.0, "ignore_eos": True}
        body = {"input_ids": prompt, "lora_path": ADAPTER_ID, "sampling_params": sampling, **options}
        return self._ask("/generate", body)


if __name__ == "__main__":
    main(LoraSGLangServer, LoraSGLangEngine, lambda url: SGLangServerEngine(url, engine_id="engine-0"))
