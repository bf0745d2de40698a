"""CheckpointTensors: what a checkpoint of vLLM's model holds, so that a manifest is refused before a byte moves."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn

from weightsync.load.placing import named_tensors
from weightsync.load.whole import TIED, Differences
from weightsync.tensors import torch_dtype
from weightsync.types import Manifest, dtype_name

_PLAIN = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

_logger = logging.getLogger(__name__)


class CheckpointTensors:
    """What a checkpoint of the model holds, from its Hugging Face config: names, shapes, and which are one tensor.

    Built on the meta device at the first use. Unknown where transformers has no such model; then names are not
    checked before they are loaded, and vLLM's own counts are (`LayerwiseReload.check`).
    """

    def __init__(self, model: nn.Module, model_config: Any) -> None:
        params = {name: p.dtype for name, p in model.named_parameters(remove_duplicate=False) if p.is_floating_point()}
        self._dtypes = set(params.values())
        self._own = {name: dtype for name, dtype in params.items() if dtype in _PLAIN}  # what is not packed into others
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
        differences = Differences()
        taken: dict[int, str] = {}
        for spec in manifest.tensors:
            dtype, shape = torch_dtype(spec.dtype), self._shapes.get(spec.name) if self.known else spec.shape
            if shape is None:
                differences.add_strange(spec.name, self._shapes)
            elif (other := taken.setdefault(self._tensor_of.get(spec.name, id(spec)), spec.name)) != spec.name:
                differences.add(spec.name, f"this tensor and {other} are one in the engine's model", hint=TIED)
            elif spec.box is not None:
                differences.add(spec.name, "a part of a tensor can't be loaded here")
            elif shape != spec.shape:
                differences.add(spec.name, f"the trainer sends {spec.shape}, the engine's model has {shape}")
            elif dtype.is_floating_point and dtype not in self._dtypes:
                own = ", ".join(sorted(dtype_name(each) for each in self._dtypes))
                what = f"the trainer sends {spec.dtype}, vLLM serves this model as {own} and would convert"
                hint = f"send {own} (dtype=, --dtype of weightsync check), or start vLLM with --dtype {spec.dtype}"
                differences.add(spec.name, what, hint=hint)
            elif dtype.is_floating_point and self._own.get(spec.name, dtype) != dtype:  # a router's float32, say
                own = dtype_name(self._own[spec.name])
                what = f"the trainer sends {spec.dtype}, vLLM has this parameter in {own} and would convert"
                differences.add(
                    spec.name, what, hint=f'send it so: dtype_overrides={{"{_glob_of(spec.name)}": "{own}"}}'
                )
        differences.add_missing(name for name, tensor in self._tensor_of.items() if tensor not in taken)
        differences.refuse(lambda: manifest.table.names)

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
            tensors = named_tensors(skeleton)
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


def _glob_of(name: str) -> str:
    """All tensors that are called alike, in any layer."""
    parts = name.split(".")
    return ".".join(["*", *parts[-2 if parts[-1] in ("weight", "bias") else -1 :]])
