"""SGLangLoraEngine: the LoRA adapters of one model in an SGLang server: see `lora_engine`. Our plug-in in the server
(`engine.sglang_lora`) checks the base before it loads, and its workers prove what they loaded with the load itself."""

from __future__ import annotations

from weightsync.handles.lora_engine import LoraEngine
from weightsync.handles.lora_messages import SGLANG_VARIABLE, LoadedAdapter
from weightsync.types import Deadline, Manifest

HOW_TO_START = (
    f"start SGLang with {SGLANG_VARIABLE}=1, --enable-lora, --max-lora-rank and --lora-target-modules, in an "
    "environment where weightsync is installed; its log says whether the plug-in is there"
)


class SGLangLoraEngine(LoraEngine):
    """Thread-safe. See `LoraEngine` for arguments."""

    kind = "SGLang"
    how_to_start = HOW_TO_START
    slots_option = "--max-loras-per-batch 3"
    with_manifest = True

    def _check_at_workers(self, manifest: Manifest, deadline: Deadline) -> None:
        """They check with the load."""

    def _proved(self, manifest: Manifest, folder: str, held: LoadedAdapter, deadline: Deadline) -> str | None:
        return held.unprovable
