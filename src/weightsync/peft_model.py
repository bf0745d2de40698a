"""What is what in a PEFT model: whose tensors are whose, and what they are called in PEFT's file and without PEFT.

The one file that imports peft, for trainers and engines alike; nothing here copies a tensor.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from weightsync.errors import ConfigError, UnsupportedError
from weightsync.module_walk import clean_name, module_tensors, unwrapped
from weightsync.optional import imported
from weightsync.plan.peft_config import PREFIX


def new_adapter(model: torch.nn.Module, *, rank: int, alpha: int, modules: Sequence[str]) -> Any:
    """A model with a new LoRA adapter, which changes nothing yet.

    Raises:
        MissingDependencyError: peft is not installed.
    """
    peft = imported("peft", "adapters need peft: pip install 'weightsync[peft]'")
    return peft.get_peft_model(model, peft.LoraConfig(r=rank, lora_alpha=alpha, target_modules=list(modules)))


def peft_model_in(weights: object) -> Any | None:
    """The PEFT model that a trainer's weights are, inside DDP, torch.compile and a DeepSpeed engine; None: it is none.

    Does not import peft: who has a PEFT model has done so.
    """
    peft = sys.modules.get("peft")
    if peft is None or not isinstance(weights, torch.nn.Module):
        return None
    model: Any = unwrapped(weights)
    while any(kind.__module__.startswith("deepspeed.") for kind in type(model).__mro__) and hasattr(model, "module"):
        model = unwrapped(model.module)
    return model if isinstance(model, peft.PeftModel) else None


def adapter_name(model: Any, wanted: str | None) -> str:
    """Which of a PEFT model's adapters is meant.

    Raises:
        ConfigError: there is no such one, or several and none was named.
        UnsupportedError: it is not LoRA.
    """
    known = list(model.peft_config)
    if wanted is None and len(known) != 1:
        raise ConfigError(f"this PEFT model has the adapters {', '.join(known)}: say which with adapter=")
    name = known[0] if wanted is None else wanted
    if name not in known:
        raise ConfigError(f"this PEFT model has no adapter {name!r}, it has {', '.join(known)}")
    config = model.peft_config[name]
    kind = str(getattr(config.peft_type, "value", config.peft_type))
    if kind != "LORA":
        raise UnsupportedError(f"adapter {name!r} is of PEFT's kind {kind}, and LORA alone is published")
    for odd in ("layer_replication", "target_parameters", "trainable_token_indices"):
        if getattr(config, odd, None):
            remedy = "merge it in place (merge_and_unload), or train without"
            raise UnsupportedError(f"adapter {name!r} has {odd}, which is not published: {remedy}")
    return name


def check_active(model: Any, wanted: str | None) -> None:
    """Whether the model computes with that adapter, and with no other.

    Raises:
        ConfigError: it does not.
    """
    name = adapter_name(model, wanted)
    is_off = any(layer.disable_adapters for _, layer in lora_layers(model, name))
    active = [] if is_off else list(model.active_adapters)
    if active != [name]:
        raise ConfigError(
            f"adapter {name!r} is published, and the canary would be asked of {', '.join(active) or 'none'}: make it "
            f"the active one before the step, set_adapter({name!r})"
        )


def adapter_tensors(model: Any, name: str) -> dict[str, torch.Tensor]:
    """An adapter's own live tensors, under the names of PEFT's file, as PEFT itself picks them. Nothing is copied."""
    peft = importlib.import_module("peft")
    live = {clean_name(key): tensor for key, tensor in _under_each_name(model)}
    known = set(map(id, live.values()))
    found: dict[str, torch.Tensor] = peft.get_peft_model_state_dict(
        model, state_dict=live, adapter_name=name, save_embedding_layers=False
    )
    for key, tensor in found.items():
        if id(tensor) not in known:
            raise UnsupportedError("PEFT saves another tensor here than the model holds", parameter=key)
    saved = {key.split(".lora_", 1)[0] for key in found}
    for path, _ in lora_layers(model, name):
        if f"{PREFIX}{path}" not in saved:  # PEFT leaves out whatever has another adapter's name for a part of its own
            others = ", ".join(repr(each) for each in model.peft_config if f".{each}." in f".{path}.")
            raise UnsupportedError(
                f"PEFT's file of adapter {name!r} lacks this layer: another adapter is called like a part of its path "
                f"({others or 'which one is not known'}): give that one another name",
                parameter=path,
            )
    return found


def _under_each_name(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Tied ones come under all of theirs: PEFT asks for either."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def adapter_names(model: Any, name: str) -> dict[str, str]:
    """From a tensor's name in the model to that in PEFT's file, of an adapter's own tensors."""
    saved: dict[int, str] = {}
    for key, tensor in adapter_tensors(model, name).items():
        saved.setdefault(id(tensor), key)  # a tied one once
    return {clean_name(key): saved[id(t)] for key, t in module_tensors(model) if id(t) in saved}


def lora_layers(model: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Modules that an adapter changes, by their names within the base."""
    layer_kind = importlib.import_module("peft.tuners.lora.layer").LoraLayer
    for path, module in model.named_modules():
        if isinstance(module, layer_kind) and name in module.r:
            yield clean_name(path).removeprefix(PREFIX), module


def saved_copies(model: Any, name: str) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Tensors of the base that an adapter has trained copies of (`modules_to_save`): where, the base's, the copy."""
    for path, module in model.named_modules():
        copies = module._modules.get("modules_to_save")
        if isinstance(copies, torch.nn.ModuleDict) and name in copies and "original_module" in module._modules:
            own = dict(copies[name].named_parameters(remove_duplicate=False))
            for key, tensor in module.original_module.named_parameters(remove_duplicate=False):
                if key in own:
                    yield f"{clean_name(path).removeprefix(PREFIX)}.{key}", tensor, own[key]


def base_names(model: Any, merged: str | None = None) -> dict[str, str]:
    """From a tensor's name in a PEFT model to the one that it has without PEFT; adapters' own are left out.

    Args:
        model: the PEFT model.
        merged: an adapter whose trained copies of whole modules (`modules_to_save`) stand for the base's.

    Raises:
        UnsupportedError: PEFT has put something around a module that is not known here.
    """
    tuners = importlib.import_module("peft.tuners.tuners_utils").BaseTunerLayer
    others = importlib.import_module("peft.utils.other")
    wraps = getattr(others, "AuxiliaryTrainingWrapper", others.ModulesToSaveWrapper)
    inside: list[tuple[str, Mapping[str, str]]] = []  # of a module: what below it is the base's, and under which name
    for path, module in model.named_modules():
        if isinstance(module, tuners):
            inside.append((clean_name(path), {"base_layer.": ""}))
        elif isinstance(module, wraps):
            inside.append((clean_name(path), {_own_part(path, module, merged): ""}))
    found: dict[str, str] = {}
    for key, _ in module_tensors(model):
        clean = name = clean_name(key)
        for path, kept in reversed(inside):  # the innermost first
            if name is None or not name.startswith(f"{path}."):
                continue
            below = name[len(path) + 1 :]
            part = next((each for each in kept if below.startswith(each)), None)
            name = None if part is None else f"{path}.{below[len(part) :]}"  # type: ignore[assignment]
        if name is not None:
            found[clean] = name.removeprefix(PREFIX)
    return found


def _own_part(path: str, module: Any, merged: str | None) -> str:
    """Where the base's module lies in what PEFT has put around it."""
    if "token_adapter" in module._modules:  # a layer of PEFT's, which has the base's
        return "token_adapter."
    copies = module._modules.get("modules_to_save")
    if copies is None:
        kind = type(module).__name__
        raise UnsupportedError(f"which tensor is the base's in PEFT's {kind} is not known", parameter=clean_name(path))
    return f"modules_to_save.{merged}." if merged is not None and merged in copies else "original_module."
