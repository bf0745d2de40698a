"""LayerwiseReload: vLLM's own reload of a model's layers, and the check that nothing is completed with filler."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from weightsync.errors import LoadError
from weightsync.load.vllm_layers import LayerNotes, SomeLayers
from weightsync.load.vllm_trust import packs
from weightsync.optional import imported

_MANY = 5


class LayerwiseReload:
    """vLLM's layerwise reload, open from construction to `finish`. In between, vLLM must not run the model.

    Args:
        model, model_config, vllm_config: vLLM's.
        only: these layers alone; all that goes into them has to be given. Everything, where not given.

    Attributes:
        notes: which layers what was given went to; of a reload of everything.
    """

    def __init__(
        self, model: nn.Module, model_config: Any, vllm_config: Any, *, only: Collection[str] | None = None
    ) -> None:
        self._model = model
        self._some: nn.Module | SomeLayers = model if only is None else SomeLayers(model, only)
        self.notes = LayerNotes()
        self._model_config = model_config
        self._vllm_config = vllm_config
        self._told: set[str] | None = set()  # names that vLLM says it loaded; None where it doesn't say
        # While a reload is open tied layers are not tied. The first one alone is loaded.
        self._wanted = {name for name, _ in self._some.named_parameters()}
        self._buffers = set(_persistent_buffers(self._some))
        self._given: set[str] = set()
        reloaded = {id(layer) for layer in self._some.modules()}
        self._tied = [layer for first, layer in _tied_layers(model) if id(first) in reloaded]
        self._places: list[tuple[dict[str, Any], dict[str, Any]]] = [
            (held, dict(held)) for layer in self._some.modules() for held in (layer._parameters, layer._buffers)
        ]
        self._kernels: list[tuple[Any, Any]] = []
        try:
            with loading(self._vllm_config):
                _layerwise().initialize_layerwise_reload(self._some)
            self._kernels = _take_packing_kernels(self._some)
            # What a layer has computed for its kernel (MLA's W_UK_T) is gone now: nobody sends it.
            self._wanted &= {name for name, _ in self._some.named_parameters()}
        except BaseException:
            with contextlib.suppress(Exception):
                self._finalize()
            self.put_back()
            raise
        if only is None:
            self.notes.watch(model)

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Gives checkpoint tensors to the model; it may keep references until `finish`."""

        def noted() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in weights:
                self._given.add(name)
                yield name, tensor

        with loading(self._vllm_config):
            loaded = self._model.load_weights(self.notes.giving(noted()))  # type: ignore[operator]
        self._told = None if loaded is None or self._told is None else self._told | set(loaded)

    def check(self, *, strict: bool) -> None:
        """Refuses what vLLM would complete with filler.

        Args:
            strict: also refuse layers that got fewer elements than they have; padding is no reason to, so this is
                for manifests that could not be compared with the model's own checkpoint names.

        Raises:
            LoadError: names them.
        """
        quantised = getattr(self._model_config, "quantization", None)
        if self._told is not None and not quantised and (never := sorted(self._wanted - self._told)):
            raise LoadError(
                f"vLLM loaded nothing into {len(never)} parameters, e.g. {', '.join(never[:_MANY])}", parameter=never[0]
            )
        if self._told is not None and (stale := sorted(self._given & self._buffers - self._told)):
            raise LoadError(
                f"vLLM skipped {len(stale)} buffers of the model that were sent, e.g. {', '.join(stale[:_MANY])}: they "
                "would stay as they were",
                parameter=stale[0],
            )
        short = list(self._short_layers())
        if short and strict:
            raise LoadError(
                f"{len(short)} layers got a part of their elements, and vLLM would fill in the rest: "
                f"{', '.join(short[:_MANY])}",
                parameter=short[0],
            )

    def finish(self) -> None:
        """Puts the loaded tensors into the live ones and closes the reload.

        Raises:
            LoadError: vLLM has left a tensor without memory, as it does where it failed before. `put_back` is next.
        """
        self.notes.done()
        self._finalize()
        with loading(self._vllm_config):
            self._repack_tied()
        for held, kept in self._places:
            for name, tensor in held.items():
                if tensor is not None and tensor.is_meta and tensor is not kept.get(name):
                    raise LoadError("vLLM's reload has left a tensor without memory", parameter=name)

    def close(self) -> None:
        """Closes a reload that is given up, or has failed; `put_back` is next."""
        self.notes.done()
        self._finalize()

    def put_back(self) -> None:
        """After a failure: each layer has the tensors again that it had before, with mixed content. vLLM drops those of
        a layer that failed, which would lie elsewhere, or nowhere, from then on (seen with 0.32)."""
        for held, kept in self._places:
            held.clear()
            held.update(kept)

    def _finalize(self) -> None:
        with loading(self._vllm_config):
            try:
                _layerwise().finalize_layerwise_reload(self._some, self._model_config)
            finally:
                for method, kernel in self._kernels:
                    if method.moe_kernel is None:  # nothing was loaded into this layer
                        method.moe_kernel = kernel

    def _repack_tied(self) -> None:
        """On a CPU, layers keep a packed copy of their weights, and vLLM renews that of loaded layers alone: a tied
        output layer would go on with the old weights (seen with 0.32)."""
        if not self._tied:
            return
        if _is_cpu():
            for layer in self._tied:
                method = getattr(layer, "quant_method", None)
                if method is not None:
                    method.process_weights_after_loading(layer)

    def _short_layers(self) -> Iterator[str]:
        info_of = getattr(_layerwise(), "get_layerwise_info", None)
        if info_of is None:
            return
        for name, layer in self._some.named_modules():
            info = info_of(layer)
            total = getattr(info, "load_numel_total", None)
            padded = hasattr(layer, "num_embeddings_padded")
            if total is not None and 0 < info.load_numel < total and not padded:
                yield name or type(layer).__name__


@contextlib.contextmanager
def loading(vllm_config: Any) -> Iterator[None]:
    """What vLLM's loaders need around them."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        if vllm_config is not None:
            from vllm.config import set_current_vllm_config

            stack.enter_context(set_current_vllm_config(vllm_config))
        with contextlib.suppress(ImportError):  # a draft's layers in the model's own checkpoint may stay out
            from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check

            stack.enter_context(disable_mtp_completeness_check())
        yield


def _tied_layers(model: nn.Module) -> list[tuple[nn.Module, nn.Module]]:
    """Modules that share a parameter of their own with a module before them, behind the first that has it."""
    first: dict[int, nn.Module] = {}
    tied = []
    for layer in model.modules():
        holders = {id(of): of for own in layer.parameters(recurse=False) if (of := first.get(id(own))) is not None}
        tied += [(of, layer) for of in holders.values()]
        for own in layer.parameters(recurse=False):
            first.setdefault(id(own), layer)
    return tied


def _take_packing_kernels(model: nn.Module | SomeLayers) -> list[tuple[Any, Any]]:
    """Takes away the kernels of experts that pack weights on a CPU: vLLM packs where it makes a kernel, so that at a
    reload the kernel that is there would read unpacked weights as packed ones (seen with 0.32). It makes a new one.

    Returns:
        Each method with its kernel.
    """
    taken = []
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        kernel = getattr(method, "moe_kernel", None)
        experts = getattr(kernel, "fused_experts", None)
        if experts is not None and packs(experts) and _is_cpu():
            taken.append((method, kernel))
            method.moe_kernel = None  # type: ignore[union-attr]
    return taken


def _is_cpu() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def _persistent_buffers(model: nn.Module | SomeLayers) -> Iterator[str]:
    for path, module in model.named_modules():
        for name, _ in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{path}.{name}" if path else name


def _layerwise() -> Any:
    home, needs = "vllm.model_executor.model_loader.reload", "this needs a vLLM with layerwise reload"
    reload, layerwise = imported(home, needs), imported(f"{home}.layerwise", needs)
    return layerwise if hasattr(layerwise, "initialize_layerwise_reload") else reload
