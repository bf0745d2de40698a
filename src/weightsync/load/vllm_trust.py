"""What is known of vLLM's own modules: whose parameters are all that they compute with.

A live plan sees where a loader writes. It can't see that a layer computes with something else: a packed copy, a product
of weights, a scale that was read into a number. So a parameter is only written element by element where its layer is
one of vLLM's own that are known to keep nothing besides; every other one is marked, with the reason.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator

import torch
from torch import nn

from weightsync.load.spans import storage_id

_PLAIN_METHODS = {"UnquantizedLinearMethod", "UnquantizedEmbeddingMethod"}
_EXPERTS_METHOD = "UnquantizedFusedMoEMethod"
_EXPERTS_IN_PLACE = {"TRITON", "BATCHED_TRITON", "CPU"}
"""Backends of experts that are given the stacked weights themselves, where the kernel has no hook that repacks them."""
_NO_HOOK = "vllm.model_executor.layers.fused_moe.modular_kernel", "FusedMoEExperts.process_weights_after_loading"
MAPS = {
    "_expert_map",
    "expert_mask",
    "expert_global_to_physical",
    "expert_physical_to_global",
    "expert_local_to_global",
}
"""Buffers that say which expert is where: vLLM loads none of them, and without EPLB they stay as they are."""
_HARMLESS = {"Attention"}
"""Their `process_weights_after_loading` is about the scales of a cache, and no weights."""
_CALLED = {"vllm": "vLLM", "sglang": "SGLang"}
_CACHES = {"kv_cache"}
_PLAIN = (bool, int, float, str, bytes, type, torch.dtype, torch.device, torch.Size, types.ModuleType)
_DEPTH = 3


def doubts(model: nn.Module, *, home: str = "vllm") -> dict[str, str]:
    """Parameters that must not be written element by element, by every name that they have, with the reason.

    Args:
        model: of an engine.
        home: the engine's package: "vllm", or "sglang", whose plain layers have the same names.
    """
    found: dict[str, str] = {}
    modules = dict(model.named_modules(remove_duplicate=False))
    live = {storage_id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    trusted = (module for module in modules.values() if not _of_method(module, home))
    plain = {id(vars(module)["_modules"].get("quant_method")) for module in trusted}
    for path, module in modules.items():
        if (why := _of_class(module, home)) is not None:
            _mark(found, path, module, why, recurse=False)
        if (why := _of_method(module, home)) is not None:
            _mark(found, path, module, why, recurse=True)
        hidden = next((key for key, value in vars(module).items() if _hides(key, value, live)), None)
        later = hasattr(type(module), "process_weights_after_loading") and id(module) not in plain
        later = later and type(module).__name__ not in _HARMLESS
        if hidden is None and not later:
            continue
        why = f"{path or type(module).__name__} " + ("works on weights" if later else f"keeps memory in {hidden}")
        if next(module.parameters(), None) is None:  # of its neighbours' weights, perhaps
            path = path.rpartition(".")[0]
        _mark(found, path, modules[path], why, recurse=True)
    of_one: dict[int, str] = {}
    names = list(model.named_parameters(remove_duplicate=False))
    for name, parameter in names:
        if name in found:
            of_one.setdefault(id(parameter), found[name])
    return {name: of_one[id(parameter)] for name, parameter in names if id(parameter) in of_one}


def packs(experts: object) -> bool:
    """Whether a kernel of experts may put weights into a form of its own when they are loaded."""
    hook = getattr(type(experts), "process_weights_after_loading", None)
    return (getattr(hook, "__module__", None), getattr(hook, "__qualname__", None)) != _NO_HOOK


def _mark(found: dict[str, str], path: str, module: nn.Module, why: str, *, recurse: bool) -> None:
    for name, _ in module.named_parameters(prefix=path, recurse=recurse, remove_duplicate=False):
        found.setdefault(name, why)


def _of_class(module: nn.Module, home: str) -> str | None:
    its = type(module).__module__
    if its.split(".")[0] == home or its.startswith("torch.nn."):
        return None
    return f"{type(module).__name__} is none of {_CALLED[home]}'s layers, and may compute with something else"


def _of_method(module: nn.Module, home: str) -> str | None:
    method = getattr(module, "quant_method", None)
    if method is None:
        return None
    name, its = type(method).__name__, type(method).__module__.split(".")[0]
    if its == home and name in _PLAIN_METHODS:
        return None
    if its == home == "vllm" and name == _EXPERTS_METHOD:
        return _of_experts(method)
    return f"{name} may keep it in a form of its own"


def _of_experts(method: object) -> str | None:
    """Experts: whether their kernel is given the parameters as they were loaded, at every call."""
    experts = getattr(getattr(method, "moe_kernel", None), "fused_experts", None)
    backend = str(getattr(getattr(method, "unquantized_backend", None), "name", None))
    if experts is None or backend not in _EXPERTS_IN_PLACE:
        return f"the experts' backend {backend} may keep it in a form of its own"
    if packs(experts):
        return f"{type(experts).__name__} packs the experts' weights"
    parallel = getattr(getattr(method, "moe", None), "moe_parallel_config", None)
    if getattr(parallel, "enable_eplb", True):
        return "experts may be moved among workers (EPLB)"
    return None


def _hides(key: str, value: object, live: set[int]) -> bool:
    if key in ("_parameters", "_buffers", "_modules") or key in _CACHES:
        return False
    return any(_is_memory(each, live) for each in _reached(value, _DEPTH))


def _reached(value: object, depth: int) -> Iterator[object]:
    """What an attribute leads to: containers, functions with what they hold on to, objects."""
    yield value
    if depth == 0 or value is None or isinstance(value, (*_PLAIN, nn.Module, torch.Tensor)):
        return
    inner: list[object] = []
    if isinstance(value, list | tuple | set | frozenset):
        inner = list(value)
    elif isinstance(value, dict):
        inner = list(value.values())
    elif isinstance(value, functools.partial):
        inner = [value.func, *value.args, *value.keywords.values()]
    elif isinstance(value, types.FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if _is_set(cell)]
        inner = [*cells, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    elif isinstance(value, types.MethodType):
        inner = [] if isinstance(value.__self__, nn.Module) else [value.__self__]
    elif hasattr(value, "__dict__"):
        inner = list(vars(value).values())
    for each in inner:
        yield from _reached(each, depth - 1)


def _is_set(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _is_memory(value: object, live: set[int]) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() > 1 and storage_id(value) not in live
    return (type(value).__module__ == "numpy" and getattr(value, "size", 0) > 1) or "Handler" in type(value).__name__
