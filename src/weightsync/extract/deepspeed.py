"""DeepSpeedWeightExtractor: engines of DeepSpeed's ZeRO, stages 0 to 3. The one file that imports deepspeed."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Sequence
from typing import Any

import torch

from weightsync.errors import ExtractError, UnsupportedError
from weightsync.extract.base import WeightExtractor
from weightsync.extract.module import ModuleWeightExtractor
from weightsync.module_walk import clean_name, module_tensors, unwrapped
from weightsync.optional import imported
from weightsync.types import Box


class DeepSpeedWeightExtractor(ModuleWeightExtractor):
    """Extracts from a DeepSpeed engine, or from the module inside one.

    What it hands out are the module's own parameters, in the dtype that the engine computes in: under `bf16` or
    `fp16` these, not the optimizer's fp32 masters.

    ZeRO-3: a parameter is empty outside of DeepSpeed's `GatheredParameters`, its shape comes from `ds_shape`. The
    parameters of a chunk are gathered together and handed out as they were gathered, without a copy; one that has
    to be converted is gathered and converted by itself. So at most two chunks and the largest parameter (in the
    trainer's dtype) are there at one time, never the model; gloo takes as much again as it gathers at one time.
    Parameters that DeepSpeed keeps whole (small ones, or those that a forward pass left) are read where they lie and
    stay as they are. Whatever fails, nothing stays gathered.

    A ZeRO-3 shard is a stretch of the flattened parameter and no box: `can_shard_locally` is False, and the model's
    digest is summed over the whole tensors. Stages 0 to 2 keep parameters whole on every rank and communicate
    nothing.

    Args:
        model: what `deepspeed.initialize` returned first, or its module. The rest is as for the base class.

    Raises:
        MissingDependencyError: deepspeed is not installed.
        UnsupportedError: besides the base's reasons, a parameter that differs between ranks: of an expert, of a
            pipeline's stage, or of DeepSpeed's tensor parallelism.
    """

    def __init__(self, model: torch.nn.Module, **settings: Any) -> None:
        needs = "DeepSpeedWeightExtractor needs deepspeed: pip install 'weightsync[deepspeed]'"
        self._zero = imported("deepspeed.runtime.zero", needs)
        _refuse_split(model)
        super().__init__(_inner(model), **settings)

    def _named_tensors(self) -> list[tuple[str, torch.Tensor]]:
        return [(clean_name(name), tensor) for name, tensor in module_tensors(unwrapped(self.model))]

    def _check(self, name: str, tensor: torch.Tensor) -> None:
        WeightExtractor._check(self, name, tensor)
        if not getattr(tensor, "allreduce", True):
            raise UnsupportedError(
                "this parameter is an expert's that other ranks don't have: expert parallelism can't be extracted",
                parameter=name,
            )

    def _shape(self, tensor: torch.Tensor) -> tuple[int, ...]:
        return tuple(int(extent) for extent in getattr(tensor, "ds_shape", tensor.shape))

    def _gathered(self, tensors: Sequence[tuple[torch.Tensor, torch.dtype]]) -> contextlib.AbstractContextManager[Any]:
        return self._whole([tensor for tensor, dtype in tensors if tensor.dtype == dtype])

    def _gather(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        with self._whole([tensor]):
            if tuple(tensor.shape) != self._shape(tensor):
                raise ExtractError(
                    f"the parameter is {tuple(tensor.shape)} where {self._shape(tensor)} was gathered: DeepSpeed is "
                    "fetching it; extract between two steps, not inside one"
                )
            # An alias: it keeps what was gathered when DeepSpeed lets go of it.
            return tensor.detach().to(dtype).contiguous()

    def _can_shard(self, tensor: torch.Tensor) -> bool:
        return not _is_partitioned(tensor)

    def _local_part(self, tensor: torch.Tensor) -> tuple[Box, torch.Tensor] | None:
        assert not _is_partitioned(tensor)
        return super()._local_part(tensor)

    def _whole(self, tensors: Sequence[torch.Tensor]) -> contextlib.AbstractContextManager[Any]:
        """Gathers those that are not there. The same ones on every rank: their status follows from the steps."""
        absent = [tensor for tensor in tensors if _is_partitioned(tensor) and not _is_available(tensor)]
        # modifier_rank None: nobody writes them, so leaving the context frees them and sends nothing.
        return self._zero.GatheredParameters(absent, modifier_rank=None) if absent else contextlib.nullcontext()


def _is_partitioned(tensor: torch.Tensor) -> bool:
    """Whether ZeRO-3 has taken the parameter apart, be it whole at the moment or not."""
    return hasattr(tensor, "ds_shape")


def _is_available(tensor: torch.Tensor) -> bool:
    return bool(getattr(tensor, "ds_status").name == "AVAILABLE")  # noqa: B009  (DeepSpeed's attribute, not torch's)


def _inner(model: torch.nn.Module) -> torch.nn.Module:
    """The module that the user gave to `deepspeed.initialize`."""
    engines = importlib.import_module("deepspeed.runtime.engine").DeepSpeedEngine
    while isinstance(model, engines):
        model = model.module
    return model


def _refuse_split(model: torch.nn.Module) -> None:
    """Refuses models of which each rank has other weights, and which DeepSpeed does not gather."""
    pipeline = importlib.import_module("deepspeed.runtime.pipe.module").PipelineModule
    if isinstance(_inner(model), pipeline):
        raise UnsupportedError("a DeepSpeed pipeline can't be extracted: each stage has other layers")
    autotp_size = getattr(model, "autotp_size", None)
    if callable(autotp_size) and autotp_size() > 1:
        raise UnsupportedError(
            f"DeepSpeed's tensor parallelism (autotp_size {autotp_size()}) can't be extracted: ZeRO gathers no slices"
        )
