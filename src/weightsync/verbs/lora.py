"""What `publish` and `push` do with a PEFT model: its adapter goes out, bound to its base; or both, merged."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch
from msgspec.structs import replace

from weightsync.codec.digest import shard_sums
from weightsync.codec.model_digest import ShardSum, model_digest
from weightsync.codec.whole import SummedChunks, whole_sum
from weightsync.config import WeightSyncConfig, select_grouping
from weightsync.errors import ConfigError, ExtractError, UnsupportedError, WeightSyncError, as_weightsync_error
from weightsync.extract.base import WeightExtractor
from weightsync.extract.peft import adapter_extractor, base_extractor, merged_extractor
from weightsync.extract.registry import check_extractor
from weightsync.module_walk import clean_name
from weightsync.observe import Recorder
from weightsync.peft_model import base_names, check_active, peft_model_in
from weightsync.trainer.extraction import gather
from weightsync.trainer.ranks import TrainingRanks
from weightsync.types import Base, Version, WeightChunk
from weightsync.verbs.canary import TOLERANCE, TrainerCanary
from weightsync.verbs.settings import KEEP_DTYPE, with_extract
from weightsync.verbs.weights import TrainerWeights

BASE_MODEL_ID = "base"
"""What the base is called where it is known by its digest alone."""


@runtime_checkable
class PublishesBase(Protocol):
    """A publisher of the base: the adapter's versions are bound to the newest version of that."""

    @property
    def version(self) -> Version | None:
        """Of the base, published last."""

    @property
    def model_id(self) -> str:
        """Of the base."""


BaseLike: TypeAlias = Base | PublishesBase | str | bool | None
"""What an adapter is bound to: a base, a base's publisher, a model digest; None: the digest of the trainer's own base,
computed once; False: nothing."""


class FrozenBase:
    """Looks whether tensors of a PEFT model's base are trained beside its adapters: an adapter that is bound to the
    digest of its base, which is computed once, goes out without them."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._good: list[str] = []

    def check(self) -> None:
        """Costs a look at each parameter.

        Raises:
            UnsupportedError: one is.
        """
        trained = [name for name, parameter in self._model.named_parameters() if parameter.requires_grad]
        if trained == self._good:
            return
        base = base_names(self._model)
        for name in map(clean_name, trained):
            if name in base:
                raise UnsupportedError(
                    "this tensor of the base is trained beside the adapter, and would never go out: freeze it, or name "
                    "its module in modules_to_save, or give merge=True, or base= the base's own publisher (base=False: "
                    "engines do not compare their base)",
                    parameter=base[name],
                )
        self._good = trained


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoraChoice:
    """How a PEFT model goes out.

    Attributes:
        adapter: which; its only one where not given.
        merge: whether the base goes out with it merged.
        base: see `BaseLike`.
        frozen: looks whether the base is trained, too.
        canary: what is asked before each step; None: nothing.
    """

    adapter: str | None
    merge: bool
    base: BaseLike
    frozen: FrozenBase
    canary: TrainerCanary | None = None

    def settings(self, config: WeightSyncConfig, *, dtype_given: bool) -> WeightSyncConfig:
        """An adapter keeps the trainer's dtype where nobody says another one.

        Args:
            config: what was said.
            dtype_given: whether the dtype was.
        """
        keeps = not self.merge and not dtype_given and "dtype" not in config.extract.model_fields_set
        return with_extract(config, dtype=KEEP_DTYPE) if keeps else config

    def extractor(
        self,
        weights: torch.nn.Module,
        config: WeightSyncConfig,
        ranks: TrainingRanks,
        *,
        name_map: Callable[[str], str | None] | None,
        timeout_s: float,
    ) -> WeightExtractor:
        """The extractor; all ranks call it, and it raises on all of them alike.

        Args:
            timeout_s: see `digest_over_ranks`.

        Raises:
            WeightSyncError: see `extract.peft`.
        """
        error: WeightSyncError | None = None
        made: WeightExtractor | None = None
        base: WeightExtractor | None = None
        try:
            made = self._made(weights, config, name_map)
            if made.adapter is not None and self.base is None:
                self.frozen.check()
                base = base_extractor(weights, **_of_chunks(config))
                base.alone = ranks.alone
        except Exception as caught:
            error = as_weightsync_error(caught, ExtractError, "the adapter can't be extracted", rank=ranks.rank)
        ranks.settle(error)
        assert made is not None
        if base is not None and made.adapter is not None:
            digest = digest_over_ranks(base, config.extract.dtype, ranks, timeout_s=timeout_s)
            made.adapter = replace(made.adapter, base=Base(model_id=BASE_MODEL_ID, model_digest=digest))
        return made

    def _made(
        self, weights: torch.nn.Module, config: WeightSyncConfig, name_map: Callable[[str], str | None] | None
    ) -> WeightExtractor:
        if config.transfer.training_backend == "megatron":
            raise UnsupportedError("Megatron's own adapters are not extracted: merge them with its bridge")
        if self.merge:
            if self.base is not None:
                raise ConfigError("base= is what an adapter is bound to, merge=True publishes a whole model: keep one")
            made = merged_extractor(weights, adapter=self.adapter, name_map=name_map, **_of_chunks(config))
        else:
            if name_map is not None:
                raise ConfigError("an adapter's tensors have PEFT's names: leave name_map= out, or give merge=True")
            made = adapter_extractor(weights, adapter=self.adapter, base=self._given(), **_of_chunks(config))
        check_extractor(config, made)
        return made

    def _given(self) -> Base | None:
        if isinstance(self.base, Base):
            return self.base
        if isinstance(self.base, str):
            return Base(model_id=BASE_MODEL_ID, model_digest=self.base)
        if self.base is None or self.base is False or isinstance(self.base, PublishesBase):
            return None
        raise ConfigError(f"base= is a Base, a base's publisher, a digest or False, not a {type(self.base).__name__}")

    def bind(self, extractor: object) -> None:
        """Before a step, on every rank: the adapter as the model has it now, to the base's version of now, where its
        publisher was given; and what the model says of the canary.

        Raises:
            ConfigError: that publisher has published nothing; or a canary would be asked of another adapter.
            UnsupportedError: see `adapter_of`; or the base is trained, too.
        """
        if not isinstance(extractor, WeightExtractor):
            return
        if self.canary is not None:
            check_active(peft_model_in(self.canary.model), self.adapter)
            extractor.canary = self.canary.read()
        if extractor.adapter is None or extractor.read_adapter is None:
            return
        base = extractor.adapter.base
        if self.base is None:
            self.frozen.check()
        if isinstance(self.base, PublishesBase) and not isinstance(self.base, Base):  # which looks like one
            if self.base.version is None:
                raise ConfigError("the base's publisher has published nothing yet: step() it before the adapter's")
            base = Base(model_id=self.base.model_id, version=self.base.version)
        extractor.adapter = replace(extractor.read_adapter(), base=base)


def lora_choice(
    weights: TrainerWeights,
    *,
    adapter: str | None,
    merge: bool,
    base: BaseLike,
    canary: Sequence[int] | None = None,
    canary_tolerance: float = TOLERANCE,
) -> LoraChoice | None:
    """How a PEFT model goes out; None where the weights are none.

    Raises:
        ConfigError: something was said of an adapter, and there is none.
    """
    if peft_model_in(weights) is not None:
        if canary is not None and merge:
            raise ConfigError("canary= is asked of an adapter's engine, and merge=True publishes a whole model")
        asked = None
        if canary is not None:
            assert isinstance(weights, torch.nn.Module)
            asked = TrainerCanary(weights, canary, tolerance=canary_tolerance)
        frozen = FrozenBase(peft_model_in(weights))
        return LoraChoice(adapter=adapter, merge=merge, base=base, frozen=frozen, canary=asked)
    if adapter is not None or merge or base is not None or canary is not None:
        raise ConfigError(
            "adapter=, merge=, base= and canary= are for a PEFT model, and these weights are a "
            f"{type(weights).__name__}"
        )
    return None


def digest_over_ranks(extractor: WeightExtractor, dtype: str | None, ranks: TrainingRanks, *, timeout_s: float) -> str:
    """The model digest of what an extractor gives, the same on every rank. All ranks call it; each reads its own part,
    or all gather and rank 0 reads.

    Args:
        timeout_s: of gathering, which has 1 s more for each 100 MiB.

    Raises:
        WeightSyncError: on every rank, where one could not read it.
    """
    error: WeightSyncError | None = None
    total = ShardSum.zero()
    try:
        if extractor.can_shard_locally():
            whole = extractor.local_whole(dtype)
            local = extractor.local_shards(dtype) if whole is None else None
            total = whole_sum(*whole, convert=True) if whole is not None else shard_sums(local or ())
        else:
            total = _gathered_sum(extractor, dtype, ranks, timeout_s)
    except Exception as caught:
        error = as_weightsync_error(caught, ExtractError, "the base's digest can't be computed", rank=ranks.rank)
    replies = ranks.settle(error, lanes=[total.lane_a, total.lane_b])
    total = ShardSum.zero()
    for reply in replies:
        total += ShardSum(lane_a=reply["lanes"][0], lane_b=reply["lanes"][1])
    return model_digest(extractor.metadata(dtype), total)


def _gathered_sum(extractor: WeightExtractor, dtype: str | None, ranks: TrainingRanks, timeout_s: float) -> ShardSum:
    """On rank 0 the sum of all; nothing on the others. See `gather`."""
    total = ShardSum.zero()

    def sum_up(chunks: Iterator[WeightChunk]) -> None:
        nonlocal total
        summed = SummedChunks(chunks)
        collections.deque(summed, maxlen=0)  # holds no chunk
        total = summed.total

    gather(
        extractor, sum_up, dtype=dtype, ranks=ranks, timeout_s=timeout_s, recorder=Recorder("base"),
        failed="the base's digest can't be computed",
    )  # fmt: skip
    return total


def _of_chunks(config: WeightSyncConfig) -> dict[str, Any]:
    return {
        "group_by_module": select_grouping(config),
        "chunk_bytes": config.extract.chunk_bytes,
        "dtype_overrides": config.extract.dtype_overrides,
    }
