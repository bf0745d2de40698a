"""VLLMWeightLoader: one vLLM worker's model, loaded by vLLM's own layerwise reload.

Who owns what, and how often each byte is copied: an update borrows the transport's bucket; `load_weights` copies it
once, to staging memory on the host (staged) or to a clone (in place), since vLLM keeps references to what it was given
until a module is complete. vLLM's loaders then copy the worker's part of it into a fresh parameter, repack that, and
copy it into the live one.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from weightsync.clients.vllm_messages import UNPROVABLE
from weightsync.errors import (
    LoadError,
    ManifestMismatchError,
    MissingDependencyError,
    StateError,
    UnsupportedError,
    as_weightsync_error,
)
from weightsync.load.base import WeightLoader
from weightsync.tensors import torch_dtype
from weightsync.types import Full, HeldTensor, Manifest, TensorSpec, Update, Version, dtype_name

_logger = logging.getLogger(__name__)
_MANY = 5


class VLLMWeightLoader(WeightLoader):
    """Loads checkpoint-named tensors into a vLLM model; each worker is given all of them and keeps its shard.

    Staged (default): `load_weights` copies into host memory, once the size of the model in every worker, allocated at
    the first sync and kept. vLLM generates between chunks. `commit`, while it is paused, reloads all layers from there.
    An abort before commit loses nothing. In place: chunks go straight into vLLM's reload, no staging; vLLM has to be
    paused from the first chunk on, and an abort leaves the model half-loaded (`healthy` is False) until a later commit.

    Args:
        model: the worker's model, as vLLM built it; None where it comes later (`bind`).
        model_config: vLLM's; its `hf_config` tells what a checkpoint holds, its `dtype` what it is served as.
        vllm_config: vLLM's; current while weights are loaded. None in releases that give a backend none.
        in_place: see above.
    """

    def __init__(
        self, model: nn.Module | None, *, model_config: Any, vllm_config: Any = None, in_place: bool = False
    ) -> None:
        self._model_config = model_config
        self._vllm_config = vllm_config
        self._manifest: Manifest | None = None
        self._specs: dict[str, TensorSpec] = {}
        self._staging: dict[str, torch.Tensor] = {}
        self._loaded: set[str] = set()
        self._healthy = True
        self._reload: _Reload | None = None  # open: the live model is on the meta device, in part or whole
        self._broken: str | None = None
        self.writes_live = in_place
        self._model: nn.Module | None = None
        if model is not None:
            self.bind(model)

    def bind(self, model: nn.Module) -> None:
        """Takes the model, where the constructor had none. Idempotent.

        Without vLLM's own model config what is known of it is taken from the model.
        """
        if self._model is model:
            return
        self._model = model
        if self._model_config is None:
            dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
            self._model_config = SimpleNamespace(hf_config=getattr(model, "config", None), dtype=dtype)
        self._expected = _Expected(model, self._model_config)

    @property
    def healthy(self) -> bool:
        """See the base class."""
        return self._healthy

    def set_in_place(self, in_place: bool) -> None:
        """Chooses between staging and loading in place, for the next bracket.

        Raises:
            StateError: a bracket is open.
        """
        if self._manifest is not None:
            raise StateError("a load is under way: commit or abort it first", version=str(self._manifest.version))
        self.writes_live = in_place
        if in_place:
            self._staging = {}

    def begin(self, manifest: Manifest) -> None:
        """See the base class."""
        if self._manifest is not None:
            raise StateError("a load is under way: commit or abort it first", version=str(self._manifest.version))
        if self._broken is not None:
            raise StateError(f"this engine has to be restarted: {self._broken}", state_left="half-loaded")
        if self._model is None:
            raise UnsupportedError("this release of vLLM has not shown its model yet", state_left="nothing was changed")
        self._expected.check(manifest)
        self._specs = manifest.by_name()
        if not self.writes_live:
            pinned = torch.cuda.is_available()
            self._staging = {
                name: spare
                if (spare := self._staging.get(name)) is not None and _is_of(spare, spec)
                else torch.empty(spec.shape, dtype=torch_dtype(spec.dtype), device="cpu", pin_memory=pinned)
                for name, spec in self._specs.items()
            }
        self._loaded = set()
        self._manifest = manifest

    def load_weights(self, updates: Iterable[Update]) -> None:
        """See the base class."""
        self._open_bracket()
        if not self.writes_live:
            for update in updates:
                tensor = self._accept(update)
                self._staging[update.name].copy_(tensor)
                self._loaded.add(update.name)
            return
        fresh: list[tuple[str, torch.Tensor]] = []
        for update in updates:
            fresh.append((self._expected.canonical(update.name), self._accept(update).clone()))
            self._loaded.add(update.name)
        if self._reload is None:
            self._healthy = False
            self._reload = self._open_reload()
        self._reload.load(fresh)

    def verify(self) -> None:
        """See the base class."""
        self._open_bracket()
        if missing := sorted(self._specs.keys() - self._loaded):
            raise ManifestMismatchError(f"{len(missing)} tensors did not arrive", parameter=missing[0])

    def live_tensors(self) -> Iterator[HeldTensor]:
        """See the base class.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError(UNPROVABLE)

    def commit(self, version: Version) -> None:
        """See the base class. Seconds for a large model: every byte is copied to the device and repacked.

        Raises:
            LoadError: vLLM could not load, or did not load everything. The model is half-loaded until a later commit.
        """
        manifest = self._open_bracket()
        if manifest.version != version or self._loaded != self._specs.keys():
            raise StateError(f"what was loaded is {manifest.version}, {len(self._loaded)} tensors, not {version}")
        self._healthy = False
        try:
            if self._reload is None:
                self._reload = self._open_reload()
                self._reload.load((self._expected.canonical(name), self._staging[name]) for name in self._specs)
            self._reload.check(strict=not self._expected.known)
            self._reload.finish()
        except Exception as error:
            raise as_weightsync_error(
                error, LoadError, "vLLM failed to load", version=str(version), state_left="half-loaded: not served"
            ) from error
        self._reload = None
        self._manifest = None
        self._healthy = True

    def abort(self, reason: str) -> None:
        """See the base class. Where a reload is open vLLM's layers get their tensors back, with mixed content."""
        self._manifest = None
        if self._reload is not None:
            reload, self._reload = self._reload, None
            try:
                reload.finish()
            except Exception as error:  # a next reload would start from what this one left in vLLM's books
                self._broken = f"vLLM could not close a reload that was aborted ({reason}): {error!r}"
                _logger.warning("%s", self._broken)

    def _open_bracket(self) -> Manifest:
        if self._manifest is None:
            raise StateError("no load is under way: begin first", state_left="nothing was changed")
        return self._manifest

    def _open_reload(self) -> _Reload:
        assert self._model is not None  # begin has looked
        return _Reload(self._model, self._model_config, self._vllm_config)

    def _accept(self, update: Update) -> torch.Tensor:
        if not isinstance(update, Full):
            raise UnsupportedError("this loader takes whole tensors alone", parameter=update.name)
        spec = self._specs.get(update.name)
        if spec is None:
            raise ManifestMismatchError("this tensor is not in the manifest", parameter=update.name)
        if update.name in self._loaded:
            raise ManifestMismatchError("this tensor came twice", parameter=update.name)
        if not _is_of(update.tensor, spec):
            raise ManifestMismatchError(
                f"got {update.tensor.dtype} {tuple(update.tensor.shape)}, announced was {spec.dtype} {spec.shape}",
                parameter=update.name,
            )
        return update.tensor.detach()


class _Reload:
    """vLLM's layerwise reload, open from construction to `finish`. In between, vLLM must not run the model."""

    def __init__(self, model: nn.Module, model_config: Any, vllm_config: Any) -> None:
        self._model = model
        self._model_config = model_config
        self._vllm_config = vllm_config
        self._told: set[str] | None = set()  # names that vLLM says it loaded; None where it doesn't say
        # While a reload is open tied layers are not tied. The first one alone is loaded.
        self._wanted = {name for name, _ in model.named_parameters()}
        self._tied = _tied_layers(model)
        with self._context():
            _layerwise().initialize_layerwise_reload(model)

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Gives checkpoint tensors to the model; it may keep references until `finish`."""
        with self._context():
            told = self._model.load_weights(iter(weights))  # type: ignore[operator]
        self._told = None if told is None or self._told is None else self._told | set(told)

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
        short = list(self._short_layers())
        if short and strict:
            raise LoadError(
                f"{len(short)} layers got a part of their elements, and vLLM would fill in the rest: "
                f"{', '.join(short[:_MANY])}",
                parameter=short[0],
            )

    def finish(self) -> None:
        """Puts the loaded tensors into the live ones and closes the reload."""
        with self._context():
            _layerwise().finalize_layerwise_reload(self._model, self._model_config)
            self._repack_tied()

    def _repack_tied(self) -> None:
        """On a CPU, layers keep a packed copy of their weights, and vLLM renews that of loaded layers alone: a tied
        output layer would go on with the old weights (seen with 0.32)."""
        if not self._tied:
            return
        from vllm.platforms import current_platform

        if current_platform.is_cpu():
            for layer in self._tied:
                method = getattr(layer, "quant_method", None)
                if method is not None:
                    method.process_weights_after_loading(layer)

    def _short_layers(self) -> Iterator[str]:
        info_of = getattr(_layerwise(), "get_layerwise_info", None)
        if info_of is None:
            return
        for name, layer in self._model.named_modules():
            info = info_of(layer)
            total = getattr(info, "load_numel_total", None)
            padded = hasattr(layer, "num_embeddings_padded")
            if total is not None and 0 < info.load_numel < total and not padded:
                yield name or type(layer).__name__

    @contextlib.contextmanager
    def _context(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            if self._vllm_config is not None:
                from vllm.config import set_current_vllm_config

                stack.enter_context(set_current_vllm_config(self._vllm_config))
            with contextlib.suppress(ImportError):  # a draft's layers in the model's own checkpoint may stay out
                from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check

                stack.enter_context(disable_mtp_completeness_check())
            yield


def _tied_layers(model: nn.Module) -> list[nn.Module]:
    """Modules that share a parameter of their own with a module before them."""
    seen: set[int] = set()
    tied = []
    for layer in model.modules():
        own = {id(parameter) for parameter in layer.parameters(recurse=False)}
        if own & seen:
            tied.append(layer)
        seen |= own
    return tied


class _Expected:
    """What a checkpoint of the model holds, from its Hugging Face config: names, shapes, and which are one tensor.

    Built on the meta device at the first use. Unknown where transformers has no such model; then names are not
    checked before they are loaded, and vLLM's own counts are (`_Reload.check`).
    """

    def __init__(self, model: nn.Module, model_config: Any) -> None:
        self._dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
        self._dtype: torch.dtype | None = getattr(model_config, "dtype", None)
        if isinstance(self._dtype, torch.dtype):
            self._dtypes.add(self._dtype)
        self._hf_config = getattr(model_config, "hf_config", None)
        self._built = False
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._tensor_of: dict[str, int] = {}
        self._first_name: dict[int, str] = {}

    @property
    def known(self) -> bool:
        """Whether names and shapes could be found out."""
        self._build()
        return bool(self._shapes)

    def canonical(self, name: str) -> str:
        """The first name of the tensor: of tied names vLLM loads that one alone."""
        return self._first_name.get(self._tensor_of.get(name, -1), name)

    def check(self, manifest: Manifest) -> None:
        """Refuses a manifest that vLLM would load in part, or convert.

        Raises:
            ManifestMismatchError: wrong dtype, shape, missing or extra name.
        """
        for spec in manifest.tensors:
            dtype = torch_dtype(spec.dtype)
            if spec.box is not None:
                raise ManifestMismatchError("a part of a tensor can't be loaded here", parameter=spec.name)
            if dtype.is_floating_point and dtype not in self._dtypes:
                own = ", ".join(sorted(dtype_name(each) for each in self._dtypes))
                raise ManifestMismatchError(
                    f"the trainer sends {spec.dtype}, vLLM serves this model as {own} and would convert: give "
                    f"PushSync(dtype=...) or vLLM's --dtype the other's",
                    parameter=spec.name,
                )
        if self.known:
            self._check_names(manifest)

    def _check_names(self, manifest: Manifest) -> None:
        taken: dict[int, str] = {}
        for spec in manifest.tensors:
            shape = self._shapes.get(spec.name)
            if shape is None:
                raise ManifestMismatchError("the engine's model has no such tensor", parameter=spec.name)
            if shape != spec.shape:
                raise ManifestMismatchError(
                    f"the trainer sends {spec.shape}, the engine's model has {shape}", parameter=spec.name
                )
            if (other := taken.setdefault(self._tensor_of[spec.name], spec.name)) != spec.name:
                raise ManifestMismatchError(
                    f"this tensor and {other} are one in the engine's model", parameter=spec.name
                )
        if missing := sorted(name for name, tensor in self._tensor_of.items() if tensor not in taken):
            raise ManifestMismatchError(
                f"the manifest lacks {len(missing)} of the model's tensors, the first is {missing[0]}",
                parameter=missing[0],
            )

    def _build(self) -> None:
        if self._built:
            return
        self._built = True
        try:
            import transformers

            config = self._hf_config
            kind = getattr(transformers, str(config.architectures[0]))  # type: ignore[union-attr]
            with torch.device("meta"):
                skeleton = kind(config)
            skeleton.tie_weights()
            tensors = dict(skeleton.named_parameters(remove_duplicate=False))
            for path, module in skeleton.named_modules(remove_duplicate=False):
                for name, buffer in module.named_buffers(recurse=False):
                    if name not in module._non_persistent_buffers_set:
                        tensors[f"{path}.{name}" if path else name] = buffer
        except Exception as error:  # remote code, a model that vLLM alone knows, another release of transformers
            _logger.warning(
                "what a checkpoint of this model holds is not known (%r): tensor names are checked by vLLM alone", error
            )
            return
        self._shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        self._tensor_of = {name: id(tensor) for name, tensor in tensors.items()}
        for name, tensor in self._tensor_of.items():
            self._first_name.setdefault(tensor, name)
        self._skeleton = skeleton  # keeps the ids from being used again


def _layerwise() -> Any:
    try:
        from vllm.model_executor.model_loader import reload
        from vllm.model_executor.model_loader.reload import layerwise
    except ImportError as error:
        raise MissingDependencyError(f"this needs a vLLM with layerwise reload: {error}") from error
    return layerwise if hasattr(layerwise, "initialize_layerwise_reload") else reload


def _is_of(tensor: torch.Tensor, spec: TensorSpec) -> bool:
    return tensor.shape == spec.shape and dtype_name(tensor.dtype) == spec.dtype
