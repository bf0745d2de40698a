"""WorkerAdapters: one vLLM worker's LoRA adapters: could one be loaded, is what was loaded what was published, let go.

vLLM changes an adapter on its way in: it casts it to its own dtype, multiplies each B with the adapter's scaling, puts
the parts of a fused layer side by side, and copies them into a slot of the layer. So live bytes are not the
publication's. The proof is in two steps:

    the folder's tensors, read anew     their digests are the manifest's
    cast and scaled as vLLM does it     equal, bit for bit, to what the worker holds, and to what lies in the slot
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from weightsync.engine.vllm.lora_base import CheckpointDigest, check_base
from weightsync.errors import (
    ConfigError,
    DigestMismatchError,
    EngineError,
    InvalidRequestError,
    ManifestMismatchError,
    StateError,
    UnsupportedError,
)
from weightsync.handles.lora_messages import TENSORS_FILE, AdapterOrder
from weightsync.memory.private_folder import check_private
from weightsync.types import Manifest, Version
from weightsync.types.adapter import Adapter

_logger = logging.getLogger(__name__)
_SLOT_DIMS = 4
_LEFT = "the adapter that was served is served on"
_SERVED_ON = "nothing was changed; the adapter that was served is served on"


class WorkerAdapters:
    """See the module. vLLM's worker calls it between two steps, in the thread that runs the model.

    Args:
        model: vLLM's; it has a `lora_manager` where adapters are enabled.
        vllm_config: vLLM's.
    """

    def __init__(self, model: Any, vllm_config: Any) -> None:
        self._model = model
        self._checkpoint = CheckpointDigest(vllm_config)

    def obey(self, order: AdapterOrder, base: tuple[Version | None, str | None]) -> None:
        """See `AdapterOrder`.

        Args:
            order: what to do.
            base: the whole model that this worker was given, and its digest.

        Raises:
            ConfigError: vLLM was started without adapters.
            WrongBaseError: the adapter belongs to another base.
            ManifestMismatchError: it has tensors that the model has no place for.
            UnsupportedError: vLLM does not do what it needs.
            DigestMismatchError: what the worker holds is something else.
            StateError: the worker has no such adapter.
        """
        if order.what == "drop":
            assert order.lora_id is not None
            self._drop(order.lora_id)
        else:
            assert order.manifest is not None
            if order.manifest.adapter is None:
                raise InvalidRequestError("the manifest is of no adapter")
            if order.what == "check":
                check_base(order.manifest.adapter, self._checkpoint, *base)
                self._check(order.manifest, order.manifest.adapter)
            else:
                assert order.folder is not None
                self._prove(order.manifest, order.manifest.adapter, order.folder, order.lora_id)

    # --- before anything is loaded ---

    def _check(self, manifest: Manifest, adapter: Adapter) -> None:
        manager = self._manager
        from vllm.lora.peft_helper import PEFTHelper

        try:
            PEFTHelper.from_dict(adapter.config_dict).validate_legal(manager.lora_config)
        except (ValueError, TypeError) as error:
            raise UnsupportedError(f"vLLM does not take this adapter: {error}", state_left=_SERVED_ON) from error
        found: dict[str, set[str]] = {}
        for name, (module, half) in self._modules(manifest).items():
            place = self._place(module)
            if place is None:
                raise ManifestMismatchError(
                    f"vLLM takes no adapter at {module}: the model has no such module, or it is none that can be "
                    "adapted (--lora-target-modules)",
                    parameter=name,
                    state_left=_SERVED_ON,
                )
            layer, index = manager.modules[place[0]], place[1]
            if any(part.dim() != _SLOT_DIMS for each in "ab" for part in _stacked(layer, each)):
                raise UnsupportedError(
                    f"adapters at {module} ({type(layer).__name__}) lie otherwise in vLLM's slots: they can't be "
                    "proved; train it without them",
                    parameter=name,
                    state_left=_SERVED_ON,
                )
            spec, size = manifest.by_name()[name], _sizes(layer, index)[half]
            rank = adapter.rank_of(_in_peft(name))
            wanted = (rank, size) if half == "a" else (size, rank)
            if size is not None and tuple(spec.shape) != wanted:
                raise ManifestMismatchError(
                    f"its shape is {tuple(spec.shape)}, and at {module} it would be {wanted}: the adapter is one of "
                    "another base",
                    parameter=name,
                    state_left=_SERVED_ON,
                )
            found.setdefault(module, set()).add(half)
        for module, halves in found.items():
            if len(halves) != 2:
                raise ManifestMismatchError(f"{module} has half an adapter", parameter=module, state_left=_SERVED_ON)

    # --- after it was loaded ---

    def _prove(self, manifest: Manifest, adapter: Adapter, folder: str, lora_id: int | None) -> None:
        manager = self._manager
        known = manager.list_adapters()
        lora_id = max(known, default=None) if lora_id is None else lora_id
        if lora_id is None or lora_id not in known:
            raise StateError(
                f"this worker has no adapter {lora_id}: vLLM said that it was loaded, and it is not here",
                state_left=_LEFT,
            )
        held = known[lora_id]
        slot = manager.lora_index_to_id.index(lora_id) if lora_id in manager.lora_index_to_id else None
        if slot is None:
            raise StateError(f"adapter {lora_id} lies in no slot", state_left=_LEFT)
        modules = self._modules(manifest)
        dtype = manager.lora_config.lora_dtype
        seen: set[tuple[str, int]] = set()
        for name, tensor in read_proved(manifest, folder):
            module, half = modules[name]
            place = self._place(module)
            assert place is not None
            layer_name, index = place
            expected = tensor.to(dtype)
            scaling = adapter.scaling_of(_in_peft(name))
            if half == "b" and scaling != 1:
                expected = expected.clone().mul_(scaling)  # as vLLM: in place, in its own dtype
            _compare(name, expected, self._held(held, layer_name, index, half), "what the worker holds")
            _compare(name, *self._in_slot(layer_name, slot, index, half, expected), "what lies in its slot")
            seen.add((layer_name, index))
        self._check_rest(slot, seen)

    def _held(self, held: Any, layer_name: str, index: int, half: str) -> torch.Tensor | None:
        weights = held.loras.get(layer_name)
        part = None if weights is None else getattr(weights, f"lora_{half}")
        return part[index] if isinstance(part, list) else part

    def _in_slot(
        self, layer_name: str, slot: int, index: int, half: str, whole: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """This worker's part of a tensor, and what its slot has of it."""
        layer = self._manager.modules[layer_name]
        part, stacked = whole, _stacked(layer, half)
        if getattr(layer, "tp_size", 1) > 1:
            cut = getattr(layer, f"slice_lora_{half}")
            if len(stacked) > 1:
                given: list[torch.Tensor | None] = [None] * len(stacked)
                given[index] = whole
                part = cut(given)[index]
            else:
                part = cut(whole)
        there = stacked[index][slot, 0] if index < len(stacked) else None
        if there is None:
            return part, None
        rest = there.clone()
        rest[: part.shape[0], : part.shape[1]] = 0
        if rest.count_nonzero():
            return part, None  # something lies beside it
        return part, there[: part.shape[0], : part.shape[1]]

    def _check_rest(self, slot: int, seen: set[tuple[str, int]]) -> None:
        """What this adapter does not change is not changed by another one's remains."""
        for name, layer in self._manager.modules.items():
            for index, part in enumerate(_stacked(layer, "b")):
                if (name, index) not in seen and part[slot].count_nonzero():
                    raise DigestMismatchError(
                        f"slot {slot} has something at {name}, where the adapter has nothing", parameter=name
                    )

    # --- and at the end ---

    def _drop(self, lora_id: int) -> None:
        manager = getattr(self._model, "lora_manager", None)
        if manager is None:
            return
        manager.remove_adapter(lora_id)
        if lora_id in manager.list_adapters() or lora_id in manager.lora_index_to_id:
            raise EngineError(f"vLLM did not let go of adapter {lora_id}")

    # --- where things are ---

    @property
    def _manager(self) -> Any:
        manager = getattr(self._model, "lora_manager", None)
        if manager is None:
            raise ConfigError("this vLLM was started without --enable-lora", state_left=_SERVED_ON)
        return manager

    def _modules(self, manifest: Manifest) -> Mapping[str, tuple[str, str]]:
        """Of each tensor vLLM's name of its module, and which half it is."""
        from vllm.lora.utils import parse_fine_tuned_lora_name

        mapper = getattr(self._model, "hf_to_vllm_mapper", None)
        if mapper is not None and hasattr(mapper, "get_rename_mapper"):
            mapper = mapper.get_rename_mapper()
        found: dict[str, tuple[str, str]] = {}
        for spec in manifest.tensors:
            try:
                module, is_a = parse_fine_tuned_lora_name(spec.name, mapper)
            except ValueError as error:
                raise ManifestMismatchError(
                    "this is no tensor of a LoRA adapter that vLLM knows", parameter=spec.name, state_left=_SERVED_ON
                ) from error
            found[spec.name] = module, "a" if is_a else "b"
        return found

    def _place(self, module: str) -> tuple[str, int] | None:
        """The layer that has a module's adapter, and its place among the layer's parts."""
        manager = self._manager
        for layer_name, parts in manager.packed_modules.items():
            if module in parts:
                return layer_name, parts.index(module)
        return (module, 0) if module in manager.modules else None


def read_proved(manifest: Manifest, folder: str) -> Iterator[tuple[str, torch.Tensor]]:
    """The folder's tensors, each with the digest of the manifest.

    Raises:
        DigestMismatchError: one has another, or the file has others.
    """
    from safetensors import safe_open

    from weightsync.codec.tensor_digest import tensor_digest

    path = Path(check_private(folder)) / TENSORS_FILE
    with safe_open(path, framework="pt") as file:
        if set(file.keys()) != set(manifest.by_name()):
            raise DigestMismatchError("the folder has other tensors than the manifest", version=str(manifest.version))
        for spec in manifest.tensors:
            tensor = file.get_tensor(spec.name)
            if (digest := tensor_digest(tensor)) != manifest.digest(spec.name):
                raise DigestMismatchError(
                    f"the folder's tensor has digest {digest}, published was {manifest.digest(spec.name)}",
                    parameter=spec.name,
                    version=str(manifest.version),
                )
            yield spec.name, tensor


def _stacked(layer: Any, half: str) -> tuple[torch.Tensor, ...]:
    """A layer's slots, one tensor a part: [slots, 1, rows, columns]."""
    found = getattr(layer, f"lora_{half}_stacked", ())
    return (found,) if isinstance(found, torch.Tensor) else tuple(found)


def _compare(name: str, expected: torch.Tensor, found: torch.Tensor | None, what: str) -> None:
    if found is None or found.shape != expected.shape or found.dtype != expected.dtype:
        raise DigestMismatchError(f"{what} has nothing of the adapter's there, or something else", parameter=name)
    if not torch.equal(bits(expected), bits(found.to("cpu"))):
        raise DigestMismatchError(f"{what} is not what was published", parameter=name)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def _in_peft(name: str) -> str:
    """The module's name within the base model, from a tensor's name in PEFT's file."""
    return name.removeprefix("base_model.model.").rpartition(".lora_")[0]


def _sizes(layer: Any, index: int) -> dict[str, int | None]:
    """How many elements come into a part of a layer, and out of it, on all workers; None where that is not known."""
    base = getattr(layer, "base_layer", None)
    outs = getattr(base, "output_sizes", None)
    num_parts = len(_stacked(layer, "b"))
    out = getattr(base, "output_size", None)
    if num_parts > 1:
        replicated = int(getattr(base, "num_kv_head_replicas", 1) or 1) > 1
        out = outs[index] if outs is not None and len(outs) == num_parts and not replicated else None
    return {"a": getattr(base, "input_size", None), "b": out}
