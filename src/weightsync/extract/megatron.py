"""MegatronWeightExtractor: streams what a bridge exports under Hugging Face's names. Imports no megatron."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist

from weightsync.errors import ConfigError, ExtractError, UnsupportedError
from weightsync.extract.base import CHUNK_BYTES, WeightExtractor, chunk_of, training_rank, translated
from weightsync.extract.grouping import PlannedChunk
from weightsync.tensors import torch_dtype
from weightsync.types import Box, WeightChunk, dtype_name


class HFExporter(Protocol):
    """What a bridge has to be: Megatron-Bridge's `AutoBridge`, our `MegatronCoreExporter`, or your own."""

    def export_hf_weights(self, model: list[torch.nn.Module], cpu: bool, show_progress: bool) -> Iterable[Any]:
        """Pairs of a name and a whole tensor, or objects with `param_name` and `weight`. A collective.

        Every rank gets every tensor, in the same order, at every call.
        """


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Exported:
    """One tensor of the export as the survey saw it; `engine_name` is None where `name_map` drops it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    engine_name: str | None


class MegatronWeightExtractor(WeightExtractor):
    """Extracts from Megatron's model chunks by a bridge that exports them.

    The names, shapes and dtypes of the export are known only from an export. So the constructor runs one on all
    ranks and keeps what it learns, not the tensors; it costs the communication of one sync. The ranks then compare
    what they saw. Every later export is checked against it, tensor by tensor.

    A rank that sees another tensor than it expects takes part in the export up to the end of the chunk, and raises
    there: the others are not left in a collective, and where extraction runs under `PushSync` they learn of it
    before the next chunk. A rank that fails INSIDE the bridge's collective leaves the others in it until the
    deadline of their process group, as everywhere.

    Chunks are buckets of up to `chunk_bytes`, in the order of the export; modules are not grouped. No rank can
    tell which box of an exported tensor it holds: `can_shard_locally` is False, and the model's digest is summed over
    whole tensors.

    Args:
        models: the model chunks of this rank, as Megatron keeps them (more than one with a virtual pipeline), or
            one of them alone.
        bridge: see `HFExporter`. It is called as `export_hf_weights(models, cpu=False, show_progress=False)`.
        group_by_module: must be False.
        chunk_bytes: as for the base class.
        name_map: as for the base class, from the bridge's names.
        dtype_overrides: as for the base class.

    Raises:
        ConfigError: no chunks, a bridge without `export_hf_weights`, or `group_by_module`.
        ExtractError: the export failed, or did not give the same on every rank: every rank raises this.
        UnsupportedError: a chunk overlaps its parameters' gather in a way that can't be completed before an export.
    """

    def __init__(
        self,
        models: torch.nn.Module | Sequence[torch.nn.Module],
        *,
        bridge: HFExporter,
        group_by_module: bool = False,
        chunk_bytes: int | None = CHUNK_BYTES,
        name_map: Callable[[str], str | None] | None = None,
        dtype_overrides: Mapping[str, str] | None = None,
    ) -> None:
        self._models = [models] if isinstance(models, torch.nn.Module) else list(models)
        if not self._models:
            raise ConfigError("MegatronWeightExtractor needs this rank's model chunks, got none")
        if not callable(getattr(bridge, "export_hf_weights", None)):
            raise ConfigError(f"the bridge needs a method export_hf_weights, a {type(bridge).__name__} has none")
        if group_by_module:
            raise ConfigError("Megatron's chunks are buckets up to chunk_bytes and not modules: no group_by_module")
        for chunk in self._models:
            _refuse_unmendable(chunk)
        self._bridge = bridge
        self._survey = self._look(name_map)
        super().__init__(self._models[0], chunk_bytes=chunk_bytes, name_map=name_map, dtype_overrides=dtype_overrides)

    def _named_tensors(self) -> list[tuple[str, torch.Tensor]]:
        """The export's tensors without their data, which comes when the stream does."""
        return [(one.name, torch.empty(one.shape, dtype=torch_dtype(one.dtype), device="meta")) for one in self._survey]

    def _check(self, name: str, tensor: torch.Tensor) -> None:
        """Nothing: the survey has looked at the tensors themselves."""

    def _stream(self, plan: tuple[PlannedChunk, ...], live: Mapping[str, torch.Tensor]) -> Iterator[WeightChunk]:
        expected = iter(self._survey)
        with self._export() as export:
            for planned in plan:
                yield self._pull(planned, export, expected)
            self._drain(export, expected)

    def _gather(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        raise AssertionError("the bridge gathers")

    def _can_shard(self, tensor: torch.Tensor) -> bool:
        return False

    def _local_part(self, tensor: torch.Tensor) -> tuple[Box, torch.Tensor] | None:
        raise AssertionError("can_shard_locally is False")

    @contextlib.contextmanager
    def _export(self) -> Iterator[Iterator[Any]]:
        """One run of the bridge's export, ended with the block whatever happens. All ranks call it."""
        for chunk in self._models:
            _finish_param_gather(chunk)
        with translated(None, "the bridge's export failed"):
            export = iter(self._bridge.export_hf_weights(self._models, cpu=False, show_progress=False))
        try:
            yield export
        finally:
            close = getattr(export, "close", None)
            if close is not None:
                close()

    def _look(self, name_map: Callable[[str], str | None] | None) -> tuple[_Exported, ...]:
        """Runs an export to learn what comes; the ranks agree that all saw the same."""
        seen: list[_Exported] = []
        error: Exception | None = None
        try:
            with torch.no_grad(), self._export() as export:
                while (item := _next(export, after=seen[-1].name if seen else None)) is not None:
                    seen.append(_exported(*item, name_map))
                    del item
        except Exception as failed:  # the others wait in the exchange below
            error = failed
        text = repr([(one.name, one.dtype, one.shape, one.engine_name) for one in seen]) if error is None else ""
        alike = _all_ranks_have(text, failed=error is not None, device=self._device())
        if error is not None:
            raise error
        if not alike:
            raise ExtractError(
                f"the bridge's export is not the same on all training ranks (here {len(seen)} tensors), or failed on "
                "another one: every rank must get every tensor, in one order",
                rank=training_rank(),
                state_left="the model is unchanged",
            )
        return tuple(seen)

    def _device(self) -> torch.device:
        """Where the ranks' exchange runs: where the weights are, since the default group serves that device."""
        parameter = next((parameter for model in self._models for parameter in model.parameters()), None)
        return torch.device("cpu") if parameter is None else parameter.device

    @torch.no_grad()
    def _pull(self, planned: PlannedChunk, export: Iterator[Any], expected: Iterator[_Exported]) -> WeightChunk:
        """The next chunk; takes as many tensors off the export as on every other rank, whatever they are."""
        tensors: list[torch.Tensor] = []
        wrong: ExtractError | None = None
        while len(tensors) < len(planned.specs):
            known = next(expected)
            tensor, deviation = self._take(known, export)
            wrong = wrong or deviation
            if known.engine_name is None:
                continue
            if wrong is None:
                with translated(known.engine_name):
                    tensor = tensor.detach().to(torch_dtype(planned.specs[len(tensors)].dtype)).contiguous()
            tensors.append(tensor)
            del tensor
        if wrong is not None:
            raise wrong
        return chunk_of(planned, tensors)

    @torch.no_grad()
    def _drain(self, export: Iterator[Any], expected: Iterator[_Exported]) -> None:
        """What `name_map` drops at the end, and nothing more."""
        wrong = [deviation for known in expected if (deviation := self._take(known, export)[1]) is not None]
        item = _next(export, after=self._survey[-1].name)
        if item is not None:
            wrong.append(_changed("a tensor came that was not there before", item[0]))
        if wrong:
            raise wrong[0]

    def _take(self, known: _Exported, export: Iterator[Any]) -> tuple[torch.Tensor, ExtractError | None]:
        item = _next(export, after=None, awaited=known.name)
        if item is None:
            raise _changed("the bridge's export ended early, before this tensor", known.name)
        name, tensor = item
        found = (name, dtype_name(tensor.dtype), tuple(int(extent) for extent in tensor.shape))
        if found == (known.name, known.dtype, known.shape):
            return tensor, None
        return tensor, _changed(
            f"the bridge exported {found[0]} {found[1]} {found[2]} where it had {known.dtype} {known.shape}", known.name
        )


def _finish_param_gather(chunk: torch.nn.Module) -> None:
    """With `overlap_param_gather` Megatron leaves the gather after `step()` to the next forward pass: until then each
    rank has stepped its own part alone. Gathering twice changes nothing."""
    ddp = _overlapping(chunk)
    if ddp is not None:
        _refuse_unmendable(chunk)
        with translated(None, "Megatron's gather of parameters failed"), torch.no_grad():
            ddp.start_param_sync(force_sync=True)


def _refuse_unmendable(chunk: torch.nn.Module) -> None:
    ddp = _overlapping(chunk)
    if ddp is None:
        return
    refusals = {
        "reuse_grad_buf_for_mxfp8_param_ag": getattr(ddp.ddp_config, "reuse_grad_buf_for_mxfp8_param_ag", False),
        "fp8_param_gather": getattr(ddp.ddp_config, "fp8_param_gather", False),
        "overlap_param_gather_with_optimizer_step": getattr(ddp, "overlap_param_gather_with_optimizer_step", False),
    }
    if found := [name for name, there in refusals.items() if there]:
        raise UnsupportedError(
            f"overlap_param_gather together with {', '.join(found)} leaves parameters that only the next forward pass "
            "completes: train without one of them",
            rank=training_rank(),
            state_left="nothing was exported",
        )


def _overlapping(chunk: Any) -> Any:
    """Megatron's DistributedDataParallel in the chunk, where it overlaps the gather; else None."""
    while isinstance(chunk, torch.nn.Module):
        if getattr(getattr(chunk, "ddp_config", None), "overlap_param_gather", False):
            return chunk
        chunk = getattr(chunk, "module", None)
    return None


def _next(export: Iterator[Any], *, after: str | None, awaited: str | None = None) -> tuple[str, torch.Tensor] | None:
    """The next name and tensor; None at the end."""
    where = f" before {awaited}" if awaited else f" after {after}" if after else ""
    with translated(awaited, f"the bridge's export failed{where}"):
        try:
            item = next(export)
        except StopIteration:
            return None
    if hasattr(item, "param_name") and hasattr(item, "weight"):  # Megatron-Bridge's tuples have grown a third field
        name, tensor = item.param_name, item.weight
    elif isinstance(item, Sequence) and len(item) == 2:
        name, tensor = item
    else:
        raise ExtractError(f"the bridge exported a {type(item).__name__}: expected a name and a tensor{where}")
    if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
        raise ExtractError(f"the bridge exported a {type(name).__name__} and a {type(tensor).__name__}{where}")
    return name, tensor


def _exported(name: str, tensor: torch.Tensor, name_map: Callable[[str], str | None] | None) -> _Exported:
    if tensor.layout != torch.strided or tensor.is_meta:
        raise ExtractError(f"a tensor of layout {tensor.layout} on {tensor.device} can't be extracted", parameter=name)
    return _Exported(
        name=name,
        dtype=dtype_name(tensor.dtype),
        shape=tuple(int(extent) for extent in tensor.shape),
        engine_name=name if name_map is None else name_map(name),
    )


def _changed(what: str, name: str) -> ExtractError:
    return ExtractError(
        f"{what}: the model or the bridge has changed; make a new extractor",
        parameter=name,
        rank=training_rank(),
        state_left="the model is unchanged",
    )


def _all_ranks_have(text: str, *, failed: bool, device: torch.device) -> bool:
    """Whether all ranks of the default group have the same text and none failed. A collective."""
    if not dist.is_available() or not dist.is_initialized():
        return not failed
    code = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")
    extremes = torch.tensor([code, -code, int(failed)], dtype=torch.int64, device=device)
    with translated(None, "the training ranks could not compare the bridge's export"):
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
    most, least, any_failed = cast(list[int], extremes.tolist())
    return most == -least and not any_failed
