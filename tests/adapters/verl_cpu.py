"""A CPU as a platform of verl, by its plug-in point, for its own tests: verl has platforms for accelerators alone.

verl imports it where `VERL_USE_EXTERNAL_MODULES` names it, with our checkpoint engine, which real workers import
because the configuration says so.
"""

from __future__ import annotations

import functools
import importlib
from types import SimpleNamespace
from typing import Any

import torch
from verl.plugin.platform import platform_manager
from verl.plugin.platform.platform_cuda import PlatformCUDA


@platform_manager.PlatformRegistry.register("cpu")
class Cpu(PlatformCUDA):  # type: ignore[misc]
    """What a worker that computes nothing asks of its device."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = SimpleNamespace(
        empty_cache=lambda: None, mem_get_info=lambda: (1, 1), memory_allocated=lambda: 0, memory_reserved=lambda: 0
    )

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        return torch.device("cpu")

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None: ...

    def synchronize(self, device_index: int | None = None) -> None: ...

    def set_allocator_settings(self, settings: str) -> None: ...

    def empty_cache(self) -> None: ...

    def communication_backend_name(self) -> str:
        return "gloo"


platform_manager.set_platform(Cpu())
workers = importlib.import_module("verl.workers.engine_workers")
workers.initialize_global_process_group_ray = functools.partial(
    workers.initialize_global_process_group_ray, backend="gloo"
)
importlib.import_module("weightsync.adapters.verl")
registry = importlib.import_module("verl.workers.engine").EngineRegistry
fsdp = importlib.import_module("verl.workers.engine.fsdp.transformer_impl")
registry.register(model_type="language_model", backend=["fsdp", "fsdp2"], device="cpu")(fsdp.FSDPEngineWithLMHead)
pinned = fsdp.CPUOffloadPolicy
fsdp.CPUOffloadPolicy = lambda **_: pinned(pin_memory=False)
