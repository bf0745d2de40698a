"""WeightExtractor as the interface design and the migration plan have it: a config and a model in, chunks out.

    raw (ours by `training_backend`, or a subclass's own) -> grouped by module -> batched by bytes -> Chunks

The documents write one hook in several ways, and all of them work: `_extract_raw_weights` takes `(model)` or
`(model, generator_dtype)`, is a coroutine, an async generator or neither, and gives chunks or a dict;
`_group_by_module` is a switch that can be called. What is not overridden is done by our extractors.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import (
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from operator import attrgetter
from typing import Any, TypeAlias

import torch

from weightsync import types
from weightsync._config_foreign import BYTES_A_GB
from weightsync.adapters.compat.calls import config_of, each_of, in_thread, result_of
from weightsync.config import select_grouping
from weightsync.errors import ConfigError, ExtractError, InvalidRequestError
from weightsync.extract import base
from weightsync.extract.grouping import PlannedChunk, group_name
from weightsync.extract.registry import extractor_for
from weightsync.plan.buckets import split_by_bytes
from weightsync.tensors import torch_dtype
from weightsync.types import TensorSpec, TensorTable, dtype_name, target_dtype
from weightsync.types.table import SpecTable

AnyChunks: TypeAlias = Iterable[types.WeightChunk] | AsyncIterable[types.WeightChunk] | Awaitable[Any]


class WeightChunk(types.WeightChunk):
    """Our chunk, made from lists; dtypes may be torch's, or their `str`.

    Args:
        names, tensors, dtypes, shapes, module_name: as for ours; dtypes and shapes are checked against the tensors.
        total_size_bytes: checked, where given.
        packed: False: what travels is packed by the strategy, never the chunk.

    Raises:
        InvalidRequestError: it has no tensors, says that it is packed, or says what its tensors are not.
    """

    def __init__(
        self,
        names: Sequence[str],
        tensors: Sequence[torch.Tensor] | None = None,
        dtypes: Sequence[torch.dtype | str] = (),
        shapes: Sequence[Sequence[int]] = (),
        module_name: str | None = None,
        total_size_bytes: int | None = None,
        packed: bool = False,
    ) -> None:
        if tensors is None or packed:
            raise InvalidRequestError("a chunk has its tensors, one by one: strategies pack what travels")
        super().__init__(
            names=tuple(names),
            tensors=tuple(tensor.detach().contiguous() for tensor in tensors),
            dtypes=tuple(dtype_name(dtype) for dtype in dtypes),
            shapes=tuple(tuple(int(extent) for extent in shape) for shape in shapes),
            module_name=module_name,
            total_size_bytes=-1 if total_size_bytes is None else total_size_bytes,
        )

    @classmethod
    def of(cls, chunk: types.WeightChunk) -> types.WeightChunk:
        """A chunk of our extractors by the documents' name: it has `packed`. Another one stays what it is."""
        if type(chunk) is not types.WeightChunk:
            return chunk
        return cls(chunk.names, chunk.tensors, chunk.dtypes, chunk.shapes, chunk.module_name, chunk.total_size_bytes)

    @property
    def packed(self) -> bool:
        return False


class Chunks(Iterator[types.WeightChunk]):
    """What `extract_weights` gives. `for`, `async for`, `await` and a sender's `send_chunks` all take it.

    Every training rank runs it to its end. Names, dtypes and shapes are known before the first chunk is made.

    Args:
        dtype: the engine's; None leaves tensors as they are.
    """

    def __init__(self, source: WeightExtractor, model: Any, dtype: str | None) -> None:
        self._source, self._model, self._dtype = source, model, dtype
        self._stream: Iterator[types.WeightChunk] | None = None
        self._plan: tuple[PlannedChunk, ...] | None = None

    @property
    def plan(self) -> tuple[PlannedChunk, ...]:
        """How the stream will be cut. Of a subclass's own raw weights it is learnt from an extraction of them."""
        if self._plan is None:
            self._plan = self._source.plan(self._model, self._dtype)
        return self._plan

    @property
    def specs(self) -> TensorTable:
        """The tensors, in the stream's order."""
        return TensorTable.of(spec for chunk in self.plan for spec in chunk.specs)

    def __next__(self) -> types.WeightChunk:
        if self._stream is None:
            self._stream = self._source.chunks(self._model, self._dtype)
        return WeightChunk.of(next(self._stream))

    async def __aiter__(self) -> AsyncIterator[types.WeightChunk]:
        for chunk in self:
            yield chunk

    def __await__(self) -> Generator[Any, None, Chunks]:
        return self
        yield  # a generator: the documents have both `extract_weights(...)` and `await extract_weights(...)`


class _Switch:
    """A flag of the documents that is a helper too: `self._group_by_module = True`, `self._group_by_module(params)`."""

    def __init__(self, name: str, helper: Callable[..., Any]) -> None:
        self._name, self._helper = f"{name}_flag", helper

    def __set__(self, instance: object, on: object) -> None:
        setattr(instance, self._name, bool(on))

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self
        switched = _Switched(getattr(instance, self._name, False))
        switched.helper = functools.partial(self._helper, instance)
        return switched


class _Switched(int):
    """The flag of one extractor: 0 or 1."""

    helper: Callable[..., Any]

    def __call__(self, *args: Any) -> Any:
        return self.helper(*args)


def _names_by_module(self: WeightExtractor, params: Mapping[str, torch.Tensor]) -> dict[str, list[str]]:
    """The names of `params` by module: q, k and v of a layer together, a layer's experts together."""
    groups: dict[str, list[str]] = {}
    for name in params:
        groups.setdefault(group_name(name), []).append(name)
    return groups


def _batches(
    self: WeightExtractor, chunks: Iterable[types.WeightChunk], threshold_gb: float
) -> Iterator[list[types.WeightChunk]]:
    """Consecutive chunks of together at most `threshold_gb`; a larger one alone."""
    return split_by_bytes(chunks, attrgetter("total_size_bytes"), threshold_gb * BYTES_A_GB)


class WeightExtractor:
    """The documents' base class. By itself it is our extractor of the config's `training_backend`.

    A subclass sets the flags `_group_by_module` and `_batch_by_threshold`, or overrides any of the methods below.

    Args:
        cfg: a `WeightSyncConfig`, or what its `load` takes: SkyRL's `generator` and `trainer` trees, ours.
        model: the training model; may come with `extract_weights`.
        bridge: of Megatron: what exports its weights.

    Raises:
        ConfigError: the config.
    """

    training_backend: str | None = None
    _group_by_module: Any = _Switch("_group_by_module", _names_by_module)
    _batch_by_threshold: Any = _Switch("_batch_by_threshold", _batches)

    def __init__(self, cfg: Any, model: Any = None, *, bridge: Any = None) -> None:
        self.cfg, self.model, self._bridge = cfg, model, bridge
        config = config_of(cfg)
        if self.training_backend is not None:
            transfer = config.transfer.model_copy(update={"training_backend": self.training_backend})
            config = config.model_copy(update={"transfer": transfer})
        self._config = config
        self._group_by_module = select_grouping(config)
        self._batch_by_threshold = config.extract.chunk_bytes is not None
        self._made: tuple[Any, bool, base.WeightExtractor] | None = None
        self._following: tuple[Any, dict[str, str]] | None = None
        self._raw_specs: tuple[Any, str | None, tuple[TensorSpec, ...]] | None = None

    # What callers use.

    def extract_weights(self, model: Any = None, generator_dtype: torch.dtype | str | None = None) -> Chunks:
        """The chunks, grouped and batched. Nothing is gathered before the first is asked for. A subclass's own may be a
        generator, async or not, or a coroutine that gives one: that is read to its end before a byte moves.

        Args:
            model: the constructor's where not given.
            generator_dtype: the engine's; tensors are converted before they are gathered.

        Raises:
            ConfigError: there is no model.
        """
        self.model = self.model if model is None else model
        if self.model is None:
            raise ConfigError("an extractor needs a model: extract_weights(model, generator_dtype)")
        return Chunks(self, self.model, None if generator_dtype is None else dtype_name(generator_dtype))

    # What subclasses override.

    def _should_group_by_module(self) -> bool:
        """Whether chunks hold whole modules."""
        return bool(self._group_by_module)

    def _should_batch_by_threshold(self) -> bool:
        """Whether chunks are merged up to the config's bytes."""
        return bool(self._batch_by_threshold)

    def _extract_raw_weights(self, model: Any, generator_dtype: torch.dtype | None = None) -> Any:
        """One chunk a parameter (a module, where grouped), as our extractor hands them out. A subclass gives chunks,
        or whole tensors by name; it need not take the dtype, and may be a coroutine or an async generator."""
        return self._ours(model).extract_weights(None if generator_dtype is None else dtype_name(generator_dtype))

    def _group_by_module_impl(self, chunks: Iterable[types.WeightChunk]) -> Iterator[types.WeightChunk]:
        """Merges neighbours of one module."""
        for _, members in itertools.groupby(chunks, key=lambda chunk: group_name(chunk.names[0])):
            yield self._merge_chunks(list(members))

    def _batch_by_threshold_impl(self, chunks: Iterable[types.WeightChunk]) -> Iterator[types.WeightChunk]:
        """Merges neighbours up to the config's `chunk_bytes`."""
        limit = self._config.extract.chunk_bytes or base.CHUNK_BYTES
        return map(self._merge_chunks, self._batch_by_threshold(chunks, limit / BYTES_A_GB))

    def _should_flush_group(self, buffer: Sequence[types.WeightChunk]) -> bool:
        """Whether the model's next parameter after `buffer` is of another module."""
        if self._following is None or self._following[0] is not self.model:
            names = [name for name, _ in self.model.named_parameters()]
            self._following = self.model, dict(itertools.pairwise(names))
        last = buffer[-1].names[-1]
        following = self._following[1].get(last)
        return following is None or group_name(following) != group_name(last)

    def _merge_chunks(self, buffer: Sequence[types.WeightChunk]) -> types.WeightChunk:
        groups = {group_name(name) for chunk in buffer for name in chunk.names}
        return types.WeightChunk(
            names=tuple(name for chunk in buffer for name in chunk.names),
            tensors=tuple(tensor for chunk in buffer for tensor in chunk.tensors),
            module_name=groups.pop() if len(groups) == 1 else None,
        )

    # What a push asks.

    def chunks(self, model: Any, dtype: str | None) -> Iterator[types.WeightChunk]:
        """The stream itself; see `extract_weights`."""
        return self._cut(self._raw(model, dtype))

    def plan(self, model: Any, dtype: str | None) -> tuple[PlannedChunk, ...]:
        """How the stream is cut: the hooks, run over tensors without data."""
        if type(self)._extract_raw_weights is WeightExtractor._extract_raw_weights:
            specs: Iterable[TensorSpec] = self._ours(model).metadata(dtype)
        else:
            if self._raw_specs is None or self._raw_specs[0] is not model or self._raw_specs[1] != dtype:
                raw = self._raw(model, dtype)
                self._raw_specs = model, dtype, tuple(spec for chunk in raw for spec in _specs(chunk))
            specs = self._raw_specs[2]
        empty = (
            types.WeightChunk(
                names=(spec.name,), tensors=(torch.empty(spec.shape, dtype=torch_dtype(spec.dtype), device="meta"),)
            )
            for spec in specs
        )
        planned = tuple(
            PlannedChunk(module_name=chunk.module_name, specs=SpecTable(_specs(chunk))) for chunk in self._cut(empty)
        )
        if not planned:
            raise ExtractError("the extractor has no weights to hand out")
        return planned

    def _cut(self, chunks: Iterable[types.WeightChunk]) -> Iterator[types.WeightChunk]:
        if self._should_group_by_module():
            chunks = self._group_by_module_impl(chunks)
        if self._should_batch_by_threshold():
            chunks = self._batch_by_threshold_impl(chunks)
        return iter(chunks)

    def _raw(self, model: Any, dtype: str | None) -> Iterator[types.WeightChunk]:
        hook: Callable[..., Any] = self._extract_raw_weights
        takes_dtype = len(inspect.signature(hook).parameters) > 1
        found = result_of(hook(model, None if dtype is None else torch_dtype(dtype)) if takes_dtype else hook(model))
        if isinstance(found, AsyncIterator):
            found = each_of(found)
        elif isinstance(found, Mapping):
            found = (WeightChunk(names=[name], tensors=[tensor]) for name, tensor in found.items())
        return iter(found) if takes_dtype or dtype is None else (_converted(chunk, dtype) for chunk in found)

    def _ours(self, model: Any) -> base.WeightExtractor:
        grouped = self._should_group_by_module() and self._config.transfer.training_backend != "megatron"
        if self._made is None or self._made[0] is not model or self._made[1] != grouped:
            extract = self._config.extract.model_copy(update={"group_by_module": grouped, "chunk_bytes": None})
            config = self._config.model_copy(update={"extract": extract})
            self._made = model, grouped, extractor_for(config, model, bridge=self._bridge)
        return self._made[2]


class FSDPWeightExtractor(WeightExtractor):
    """Of modules under FSDP2's `fully_shard`."""

    training_backend = "fsdp"


class DeepSpeedWeightExtractor(WeightExtractor):
    """Of DeepSpeed engines, ZeRO 0 to 3."""

    training_backend = "deepspeed"


class MegatronWeightExtractor(WeightExtractor):
    """Of Megatron's model chunks; `bridge` exports them. Buckets of bytes, never modules."""

    training_backend = "megatron"


class Handed(base.WeightExtractor):
    """What a push extracts from: the chunks that were handed over last."""

    now: Chunks

    def __init__(self) -> None:
        """Nothing is handed over yet."""

    def metadata(self, dtype: str | None = None) -> TensorTable:
        return self.now.specs

    def chunk_plan(self, dtype: str | None = None) -> tuple[PlannedChunk, ...]:
        return self.now.plan

    def extract_weights(self, dtype: str | None = None) -> Iterator[types.WeightChunk]:
        return self.now

    def can_shard_locally(self) -> bool:
        return False

    def _never(self, *_: Any) -> Any:
        raise AssertionError("a document's extractor gathers by itself")

    _named_tensors = _gather = _can_shard = _local_part = _never  # type: ignore[assignment]


class HandedList(WeightExtractor):
    """Chunks that were made elsewhere, as an extractor."""

    def __init__(self, chunks: Iterable[types.WeightChunk]) -> None:
        super().__init__(None)
        self._chunks = tuple(chunks)
        self._group_by_module = self._batch_by_threshold = False

    def chunks(self, model: Any, dtype: str | None) -> Iterator[types.WeightChunk]:
        return iter(self._chunks)

    def plan(self, model: Any, dtype: str | None) -> tuple[PlannedChunk, ...]:
        return tuple(PlannedChunk(module_name=one.module_name, specs=SpecTable(_specs(one))) for one in self._chunks)


async def as_chunks(chunks: AnyChunks) -> Chunks:
    """What a sender is given as what a push takes. Of somebody else's, an iterator, an async one, or a coroutine that
    gives one, is read to its end first, since names and sizes are told before the first byte: it holds the model then.
    """
    found: Any = await chunks if isinstance(chunks, Awaitable) and not isinstance(chunks, Chunks) else chunks
    if isinstance(found, Chunks):
        return found
    if isinstance(found, AsyncIterable):
        found = [chunk async for chunk in found]
    return await in_thread(lambda: Chunks(HandedList(found), None, None))


def _specs(chunk: types.WeightChunk) -> Iterator[TensorSpec]:
    for name, dtype, shape in zip(chunk.names, chunk.dtypes, chunk.shapes, strict=True):
        yield TensorSpec(name=name, dtype=dtype, shape=shape)


def _converted(chunk: types.WeightChunk, dtype: str) -> types.WeightChunk:
    tensors = tuple(
        tensor.to(torch_dtype(target_dtype(own, dtype)))
        for tensor, own in zip(chunk.tensors, chunk.dtypes, strict=True)
    )
    return types.WeightChunk(names=chunk.names, tensors=tensors, module_name=chunk.module_name)
