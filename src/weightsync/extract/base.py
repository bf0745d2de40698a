"""WeightExtractor: how weights leave a trainer. Knows no transport and no engine."""

from __future__ import annotations

import abc
import contextlib
import fnmatch
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist

from weightsync.errors import ConfigError, ExtractError, UnsupportedError, WeightSyncError, as_weightsync_error
from weightsync.extract.glance import Glance, Pairs
from weightsync.extract.grouping import PlannedChunk, group_name, order_by_group, plan_chunks
from weightsync.tensors import has_its_memory, torch_dtype
from weightsync.types import Box, HeldTensor, TensorSpec, TensorTable, WeightChunk, dtype_name, target_dtype
from weightsync.types.adapter import Adapter
from weightsync.types.canary import Canary
from weightsync.types.dtypes import CASTABLE, ITEMSIZE_BYTES

CHUNK_BYTES = 64 << 20
"""Large enough that what a chunk costs by itself is nothing beside its bytes, small enough for two buckets of it."""


class WeightExtractor(abc.ABC):
    """Hands out a trainer's weights under the engine's names, in the engine's dtype.

    Every training rank constructs one, at the same point of the program, between two training steps. Then,
    again between steps and on every rank alike:

    1. `metadata(dtype)`: what will come, in stream order. Any rank, any number of times.
    2. `extract_weights(dtype)`: whole tensors. EVERY rank runs it to its end: its collectives line up.
       Or `local_shards(dtype)`: each rank's own part, without communication.

    The list of tensors is made once, at construction; the metadata, the chunks and the shards are readings of
    it. What the constructor or the call of `extract_weights` can refuse is refused on all ranks alike, before
    the first collective.

    Memory: a generator keeps no chunk that it has handed out. With a consumer that holds one chunk while it asks
    for the next, the extra memory is at most two chunks plus the largest parameter. Where nothing has to be
    converted or gathered, a chunk's tensors ARE the live weights (no copy): the consumer is done with them
    before the next optimizer step.

    Subclasses override the hooks below; the public methods own the checks.

    Args:
        model: the training model, wrapped as the trainer has it.
        group_by_module: keeps q, k and v of a layer, all experts of a layer, and the parameters of any one
            module in one chunk, which is never split.
        chunk_bytes: merges consecutive parameters (or groups) into chunks of at most so many bytes; one that is
            larger travels alone. None: a chunk for each parameter (or group).
        name_map: from the trainer's clean name to the engine's; None drops the tensor. Must be the same function
            on every rank.
        dtype_overrides: from a glob over engine names (`*` matches dots too) to a dtype that wins over the one
            asked for; the first that matches counts. Only float16, bfloat16, float32 and float64 convert.

    Raises:
        ConfigError: a setting makes no sense, two tensors get one name, or an override matches no tensor.
        ExtractError: nothing is left to extract, or a tensor has no data.
        UnsupportedError: a tensor that this extractor can't hand out; named in `parameter`.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        group_by_module: bool = False,
        chunk_bytes: int | None = CHUNK_BYTES,
        name_map: Callable[[str], str | None] | None = None,
        dtype_overrides: Mapping[str, str] | None = None,
    ) -> None:
        if chunk_bytes is not None and chunk_bytes < 1:
            raise ConfigError(f"chunk_bytes is a number of bytes above 0 or None, got {chunk_bytes}")
        self.model = model
        self._group_of = self._module_of if group_by_module else None
        self._chunk_bytes = chunk_bytes
        self._name_map = name_map
        self._overrides = {glob: _castable(wanted) for glob, wanted in (dtype_overrides or {}).items()}
        self._prepare()
        live, self._glance = self._live(Pairs.of(self._named_tensors()))
        order = list(live) if self._group_of is None else order_by_group(list(live), self._group_of)
        self._specs = tuple(self._describe(name, live[name]) for name in order)
        self._metadata: dict[str | None, TensorTable] = {}
        self._plans: dict[str | None, tuple[tuple[TensorSpec, ...], tuple[PlannedChunk, ...]]] = {}
        self._sharded_locally = all(self._can_shard(tensor) for tensor in live.values())
        for glob in self._overrides:
            if not fnmatch.filter(order, glob):
                raise ConfigError(f"dtype_overrides has {glob!r}, which matches no tensor; the first is {order[0]!r}")

    # What callers use.

    adapter: Adapter | None = None
    """Of a publication of kind "lora": what goes beside its tensors. The same on every rank, and may change between two
    steps. None: these are a model's weights."""

    read_adapter: Callable[[], Adapter] | None = None
    """Makes `adapter` anew, bound to nothing, of what the model says by now."""

    alone: bool = False
    """Whether this process has whole tensors for itself, whatever group of `torch.distributed` it is in: what extracts
    from them alone says so. Else tensors that are not sharded are rank 0's to hand out."""

    canary: Canary | None = None
    """What the model says of a known prompt with the weights that are extracted next; rank 0's counts."""

    @property
    def settings(self) -> Mapping[str, object]:
        """What it was made with, of the settings that a configuration has too."""
        return {
            "chunk_bytes": self._chunk_bytes,
            "group_by_module": self._group_of is not None,
            "dtype_overrides": dict(self._overrides),
        }

    def metadata(self, dtype: str | None = None) -> TensorTable:
        """The tensors of the stream, in its order. Costs nothing: no communication, no copies.

        Args:
            dtype: what the engine computes in, e.g. "bfloat16"; None leaves every tensor as it is.

        Raises:
            ConfigError: `dtype` is not one that weights convert to.
        """
        wanted = None if dtype is None else _castable(dtype)
        if wanted not in self._metadata:
            self._metadata[wanted] = TensorTable.of(
                TensorSpec(name=spec.name, dtype=self._target(spec, wanted), shape=spec.shape) for spec in self._specs
            )
        return self._metadata[wanted]

    def chunk_plan(self, dtype: str | None = None) -> tuple[PlannedChunk, ...]:
        """How `extract_weights` will cut the stream. As cheap as `metadata`, and in the same order."""
        specs = self.metadata(dtype)
        of, plan = self._plans.get(dtype, (None, ()))
        if of is not specs:
            plan = plan_chunks(specs, group_of=self._group_of, chunk_bytes=self._chunk_bytes)
            self._plans[dtype] = specs, plan
        return plan

    def extract_weights(self, dtype: str | None = None) -> Iterator[WeightChunk]:
        """Whole tensors, converted before they are gathered. Run by every training rank, to the end.

        What can be checked is checked by the call itself; the iterator only gathers and hands out.

        Yields:
            Chunks of contiguous, detached tensors, none a lazy conjugate or negative; bit-identical to gathering first
            and converting then.

        Raises:
            ConfigError: as for `metadata`.
            ExtractError: by the call: the model has changed since construction (nothing was sent). By the
                iterator: a gather failed, most likely because another rank did; the model is untouched.
            UnsupportedError: as for the constructor.
        """
        plan = self.chunk_plan(dtype)
        self._prepare()
        return self._stream(plan, self._checked_live())

    def can_shard_locally(self) -> bool:
        """Whether `local_shards` works for this model. The same answer on every rank, without communication."""
        return self._sharded_locally

    def local_shards(self, dtype: str | None = None) -> Iterator[HeldTensor]:
        """This rank's own part of every tensor, converted, in stream order, without communication.

        Over all training ranks the boxes are an exact partition of every tensor: of several replicas one rank
        yields, tensors that are not sharded come from rank 0 of the default group, and empty parts from nobody
        (a tensor without elements is yielded whole, by one rank).

        Yields:
            Contiguous, detached parts on the device they lie on. They may be live weights.

        Raises:
            UnsupportedError: `can_shard_locally` is False; raised by the call.
            ConfigError, ExtractError: as for `extract_weights`, by the call.
        """
        return self._shards(*self._shardable(dtype))

    def local_parts(self, dtype: str | None = None) -> Iterator[HeldTensor]:
        """`local_shards` before their conversion, for a caller that converts while it copies; raises what that does.

        Yields:
            Parts with the spec of `metadata(dtype)`; their tensors are live weights, of the trainer's own dtype, not
            always contiguous.
        """
        specs, live = self._shardable(dtype)
        return (part for spec in specs if (part := self._held(spec, live[spec.name])) is not None)

    def local_whole(self, dtype: str | None = None) -> tuple[TensorTable, list[torch.Tensor]] | None:
        """`metadata(dtype)` and for each of these the live tensor, in the trainer's own dtype, where this rank's parts
        are all of every tensor. None where they are not, or where that has to be found out one by one. Raises what
        `local_shards` does.
        """
        return None

    def local_boxes(self) -> tuple[tuple[int, Box], ...]:
        """Which part of which tensor (by its place in `metadata`) `local_parts` would give. Reads no weights."""
        specs, live = self._shardable(None)
        found: list[tuple[int, Box]] = []
        for index, spec in enumerate(specs):
            with translated(spec.name):
                box = self._local_box(live[spec.name])
            if box is not None:
                found.append((index, box))
        return tuple(found)

    def _shardable(self, dtype: str | None) -> tuple[TensorTable, dict[str, torch.Tensor]]:
        if not self._sharded_locally:
            raise UnsupportedError(
                "some placement of this model has no local form: ask can_shard_locally() first, gather if not"
            )
        specs = TensorTable.of(self.metadata(dtype))  # a subclass may have its own, a plain tuple
        self._prepare()
        return specs, self._checked_live()

    # What subclasses override.

    def _prepare(self) -> None:  # noqa: B027  (a hook with a default)
        """Brings the model into the state in which it is read. On every rank alike, no communication."""

    @abc.abstractmethod
    def _named_tensors(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Parameters and persistent buffers under clean names, tied ones once, in a fixed order."""

    def _check(self, name: str, tensor: torch.Tensor) -> None:
        """Refuses what `_gather` can't do, from metadata alone, so identically on every rank.

        Raises:
            UnsupportedError: names the parameter.
        """
        if torch.nn.parameter.is_lazy(tensor) or tensor.is_meta:
            raise ExtractError("the tensor has no data yet: it is lazy or on the meta device", parameter=name)
        if tensor.layout != torch.strided:
            raise UnsupportedError(f"a tensor of layout {tensor.layout} can't be extracted", parameter=name)
        if str(tensor.dtype).removeprefix("torch.") not in ITEMSIZE_BYTES:
            raise UnsupportedError(f"a tensor of dtype {tensor.dtype} can't be extracted", parameter=name)
        if type(tensor) in (torch.Tensor, torch.nn.Parameter) and not has_its_memory(tensor):
            raise ExtractError(
                f"the tensor says that it is {tuple(tensor.shape)}, and its memory ends before that, as after a "
                "resize_ that failed, or where its storage was freed: what lies behind it is not published",
                parameter=name,
            )

    def _at_a_glance(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether types, dtypes, shapes, sizes of storages and this answer say all that `_check` and `_shape` look at:
        tensors that are as they were need not be checked again then."""
        return False

    def _shape(self, tensor: torch.Tensor) -> tuple[int, ...]:
        return tuple(int(extent) for extent in tensor.shape)

    def _module_of(self, name: str) -> str:
        """The group of an engine-side name."""
        return group_name(name)

    def _gathered(self, tensors: Sequence[tuple[torch.Tensor, torch.dtype]]) -> AbstractContextManager[None]:
        """What holds while the tensors of one chunk go through `_gather`: for trainers that gather several at once.

        Args:
            tensors: the chunk's, each with the dtype that it is asked in.
        """
        return contextlib.nullcontext()

    @abc.abstractmethod
    def _gather(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The whole tensor in `dtype`, contiguous and detached. A collective of all ranks; grad mode is off."""

    def _gather_together(
        self, tensors: Sequence[torch.Tensor], dtypes: Sequence[torch.dtype]
    ) -> list[torch.Tensor] | None:
        """`_gather` of each of a chunk's tensors, where that is faster for all at once and communicates nothing; None
        where it is not, or can't be."""
        return None

    @abc.abstractmethod
    def _can_shard(self, tensor: torch.Tensor) -> bool:
        """Whether `_local_part` can tell this rank's part of the tensor. The same answer on every rank."""

    @abc.abstractmethod
    def _local_part(self, tensor: torch.Tensor) -> tuple[Box, torch.Tensor] | None:
        """The part that this rank answers for, neither converted nor copied; None if it is another's."""

    def _local_box(self, tensor: torch.Tensor) -> Box | None:
        """The box of `_local_part`."""
        part = self._local_part(tensor)
        return None if part is None else part[0]

    # The rest is private.

    def _live(self, named: Pairs) -> tuple[dict[str, torch.Tensor], Glance | None]:
        """The model's tensors as they are now, checked, by engine-side name; and what a glance at them tells."""
        live: dict[str, torch.Tensor] = {}
        origin: dict[str, str] = {}
        engine_names: list[str | None] = []
        for name, tensor in named:
            engine_name = name if self._name_map is None else self._name_map(name)
            engine_names.append(engine_name)
            if engine_name is None:
                continue
            if engine_name in origin:
                raise ConfigError(
                    f"{origin[engine_name]!r} and {name!r} both get the name {engine_name!r}", parameter=engine_name
                )
            self._check(engine_name, tensor)
            origin[engine_name] = name
            live[engine_name] = tensor
        if not live:
            raise ExtractError("the model has no tensors to extract (or name_map drops all of them)")
        return live, Glance(named, engine_names, sized=True) if self._at_a_glance(named.tensors) else None

    def _checked_live(self) -> dict[str, torch.Tensor]:
        named = Pairs.of(self._named_tensors())
        known = None if self._glance is None else self._glance.live(named, says_all=self._at_a_glance)
        if known is not None:
            return known
        live, glance = self._live(named)
        for spec in self._specs:
            tensor = live.get(spec.name)
            if tensor is None or dtype_name(tensor.dtype) != spec.dtype or self._shape(tensor) != spec.shape:
                found = None if tensor is None else self._describe(spec.name, tensor)
                raise ExtractError(
                    f"the model has changed since this extractor was made: it had {spec.dtype} {spec.shape}, now "
                    f"{'nothing' if found is None else f'{found.dtype} {found.shape}'}; make a new extractor",
                    parameter=spec.name,
                )
        if len(live) != len(self._specs):
            extra = next(iter(live.keys() - {spec.name for spec in self._specs}))
            raise ExtractError("the model has a new tensor; make a new extractor", parameter=extra)
        self._glance = glance
        return live

    def _describe(self, name: str, tensor: torch.Tensor) -> TensorSpec:
        return TensorSpec(name=name, dtype=dtype_name(tensor.dtype), shape=self._shape(tensor))

    def _target(self, spec: TensorSpec, wanted: str | None) -> str:
        for glob, override in self._overrides.items():
            if fnmatch.fnmatchcase(spec.name, glob):
                return target_dtype(spec.dtype, override)
        return target_dtype(spec.dtype, wanted)

    def _stream(self, plan: tuple[PlannedChunk, ...], live: Mapping[str, torch.Tensor]) -> Iterator[WeightChunk]:
        """The chunks, one after the other; trainers that can't choose the order of what they gather override it."""
        for planned in plan:
            # No local name for the chunk: whoever took it is then the only one that holds it.
            yield self._build(planned, live)

    @torch.no_grad()
    def _build(self, planned: PlannedChunk, live: Mapping[str, torch.Tensor]) -> WeightChunk:
        specs = planned.specs
        known = {name: torch_dtype(name) for name in set(specs.dtypes)}
        sources, dtypes = list(map(live.__getitem__, specs.names)), list(map(known.__getitem__, specs.dtypes))
        tensors: list[torch.Tensor] = []
        with translated(specs.names[0], "the chunk that starts here could not be gathered"):
            if (together := self._gather_together(sources, dtypes)) is not None:
                return chunk_of(planned, together)
            asked = list(zip(sources, dtypes, strict=True))
            with self._gathered(asked):
                try:
                    for tensor, dtype in asked:
                        tensors.append(self._gather(tensor, dtype).resolve_conj().resolve_neg())  # mostly itself
                except Exception:
                    with translated(specs.names[len(tensors)]):
                        raise
        return chunk_of(planned, tensors)

    @torch.no_grad()
    def _shards(self, specs: tuple[TensorSpec, ...], live: Mapping[str, torch.Tensor]) -> Iterator[HeldTensor]:
        dtypes = {name: torch_dtype(name) for name in {spec.dtype for spec in specs}}
        for spec in specs:
            part = self._held(spec, live[spec.name])
            if part is not None:
                dtype, local = dtypes[spec.dtype], part.tensor
                if local.dtype is not dtype or not local.is_contiguous():
                    with translated(spec.name):
                        part = HeldTensor(spec=spec, box=part.box, tensor=local.to(dtype).contiguous())
                del local
                yield part
            del part

    def _held(self, spec: TensorSpec, tensor: torch.Tensor) -> HeldTensor | None:
        try:
            part = self._local_part(tensor)
            if part is None:
                return None
            box, local = part
            if local.shape != box.shape:
                raise ExtractError(f"this rank holds {tuple(local.shape)} where {box} was computed")
            return HeldTensor(spec=spec, box=None if box.covers(spec.shape) else box, tensor=local.detach())
        except Exception:
            with translated(spec.name):
                raise


def training_rank() -> int:
    """This process's rank in the default group; 0 where there is none."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def _castable(dtype: str) -> str:
    name = str(dtype).removeprefix("torch.")
    if name not in CASTABLE:
        raise ConfigError(f"weights don't convert to {name!r}; choose one of {', '.join(sorted(CASTABLE))}")
    return name


def chunk_of(planned: PlannedChunk, tensors: Sequence[torch.Tensor]) -> WeightChunk:
    return WeightChunk(
        names=planned.specs.names,
        tensors=tuple(tensors),
        dtypes=planned.specs.dtypes,
        shapes=planned.specs.shapes,
        module_name=planned.module_name,
    )


@contextlib.contextmanager
def translated(name: str | None, what: str = "a tensor could not be extracted") -> Iterator[None]:
    """The one place where torch's errors become ours."""
    try:
        yield
    except (RuntimeError, ValueError, WeightSyncError) as error:
        typed = as_weightsync_error(error, ExtractError, what)
        typed.parameter = typed.parameter or name
        typed.rank = training_rank() if typed.rank is None else typed.rank
        raise typed from error.__cause__ if typed is error else error
