"""CheckpointTensors: what a checkpoint of vLLM's model holds, so that a manifest is refused before a byte moves."""

from __future__ import annotations

import logging
import re
from typing import Any

import torch
from torch import nn

from weightsync.load.placing import named_tensors
from weightsync.load.whole import TIED, Differences
from weightsync.tensors import torch_dtype
from weightsync.types import Manifest, dtype_name

_PLAIN = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_ROUTERS = ("e_score_correction_bias", "expert_bias")
"""In float32 in vLLM, whether transformers says so or not; who has them in less loses nothing by the override."""

_logger = logging.getLogger(__name__)


class CheckpointTensors:
    """What a checkpoint of the model holds, from its Hugging Face config: names, shapes, and which are one tensor.

    Built on the meta device at the first use. Unknown where transformers has no such model; then names are not
    checked before they are loaded, and vLLM's own counts are (`LayerwiseReload.check`).

    transformers may give a module's tensors other names and shapes than its files have (from release 5 on experts are
    stacked). vLLM's loader takes either; so a manifest has either, and no mixture.
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
        self._skeleton: Any = None
        self._named: dict[str, torch.Tensor] = {}
        self._files: dict[str, torch.Tensor] | None = None
        self._take({})

    @property
    def known(self) -> bool:
        """Whether names and shapes could be found out."""
        self._build()
        return bool(self._named)

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
        if self.known:
            self._take(self._meant_by(manifest))
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
            elif dtype.is_floating_point and (lost := self._loses(spec.name, dtype)) is not None:
                why, overrides = lost
                hint = (
                    f'config={{"extract": {{"dtype_overrides": {{{overrides}}}}}}} on the trainer\'s side, or '
                    "--dtype-override of weightsync agent, sends it so"
                )
                differences.add(spec.name, why, hint=hint)
        differences.add_missing(name for name, tensor in self._tensor_of.items() if tensor not in taken)
        differences.refuse(lambda: manifest.table.names)

    def _loses(self, name: str, dtype: torch.dtype) -> tuple[str, str] | None:
        """Why digits of that tensor get lost, and what to override; None where they don't."""
        own, sent = self._own.get(name), f"the trainer sends {dtype_name(dtype)}"
        if own == dtype:
            return None
        if own is not None and (dtype not in _PLAIN or torch.promote_types(own, dtype) != own):
            why = f"{sent}, vLLM has this parameter in {dtype_name(own)} and would convert"
            return why, f'"{_glob_of(name)}": "{dtype_name(own)}"'
        if dtype.itemsize < 4 and torch.float32 in self._dtypes:  # routers choose experts by small differences
            for kept in [*_ROUTERS, *(getattr(self._skeleton, "_keep_in_fp32_modules_strict", None) or ())]:
                if re.search(rf"(^|\.){kept}($|\.)", name):
                    return f"{sent}, and such numbers are kept in float32", f'"*{kept}*": "float32"'
        return None

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
        self._skeleton, self._named = skeleton, tensors
        self._take(tensors)

    def _take(self, tensors: dict[str, torch.Tensor]) -> None:
        """What is checked against from now on; `_named` and `_files` keep the ids from being used again."""
        self._shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        self._tensor_of = {name: id(tensor) for name, tensor in tensors.items()}
        self._first_name: dict[int, str] = {}
        for name, tensor in self._tensor_of.items():
            self._first_name.setdefault(tensor, name)

    def _meant_by(self, manifest: Manifest) -> dict[str, torch.Tensor]:
        """The module's tensors, or its files' where the manifest has more names of these."""
        strange = [spec.name for spec in manifest.tensors if spec.name not in self._named]
        if not strange:
            return self._named
        if self._files is None:
            self._files = _as_files(self._skeleton, self._named)
        known = sum(name in self._files for name in strange)
        return self._files if known > len(strange) // 2 else self._named


def _as_files(model: Any, named: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What `save_pretrained` would write; empty where that is not known."""
    try:
        from transformers.core_model_loading import revert_weight_conversion

        files: dict[str, torch.Tensor] = revert_weight_conversion(model, dict(named))
    except Exception as error:  # an older release of transformers, which converts nothing
        _logger.debug("how transformers writes this model's files is not known: %r", error)
        return {}
    return {name: tensor for name, tensor in named.items() if name in files} | {
        name: tensor for name, tensor in files.items() if name not in named
    }


def _glob_of(name: str) -> str:
    """All tensors that are called alike, in any layer."""
    parts = name.split(".")
    return "*" + ".".join(parts[-2 if parts[-1] in ("weight", "bias") else -1 :])
