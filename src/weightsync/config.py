"""WeightSyncConfig: everything that can be set, checked before anything starts.

One clean schema of our own; `WeightSyncConfig.load` also takes the names that other frameworks use
(docs/configuration.md has both tables). What is wrong comes out as one `ConfigError` that lists every
problem with the key as the user wrote it, the value and the choices.
"""

from __future__ import annotations

import os
import types
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Annotated, Any, Literal, Self, TypeAlias, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from weightsync import _config_foreign as foreign
from weightsync.errors import ConfigError

Strategy: TypeAlias = Literal["broadcast", "sglang", "cuda_ipc", "packed_cuda_ipc"]
Backend: TypeAlias = Literal["gloo", "nccl", "cuda_ipc"]
TrainingBackend: TypeAlias = Literal["module", "fsdp", "deepspeed", "megatron"]
SyncMode: TypeAlias = Literal["sync", "fully-async", "batch-async"]
SyncMethodName: TypeAlias = Literal["push", "pull", "network", "disk", "tinker", "weaver", "mock"]
EngineBackend: TypeAlias = Literal["embedded", "vllm", "sglang", "tinker", "weaver"]
FloatDtype: TypeAlias = Literal["bfloat16", "float16", "float32", "float64"]

_BROADCASTS = ("broadcast", "sglang")  # strategies with a process group
_Seconds: TypeAlias = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Text: TypeAlias = Annotated[str, Field(min_length=1)]
_Url: TypeAlias = Annotated[str, Field(pattern=r"^https?://[^\s/]+")]

_MUST = {
    "base_url": "an http:// or https:// URL",
    "chunk_bytes": "a whole number of bytes above 0",
    "commit_policy": "'each', 'all' or 'quorum(n)' with n from 1 on",
    "lease_s": "a finite number of seconds above 0",
    "models": "a list of names",
    "port": "a port from 0 to 65535",
    "retries_s": "a list of seconds, 0 or more",
    "sets": "a list of lists of names",
    "staleness_threshold": "a whole number of versions, 1 or more",
    "validate_freq": "a whole number of training steps, 0 (no validation) or more",
}


class _ContradictionError(ValueError):
    """Settings that are right one by one and can't hold together; read by `_problems` alone.

    Attributes:
        found: for each contradiction the keys (relative to the section), their values, and what to do.
    """

    def __init__(self, found: list[tuple[tuple[str, ...], tuple[object, ...], str]]) -> None:
        super().__init__("contradiction")
        self.found = found


class _Section(BaseModel):
    """Frozen; unknown keys are refused; numbers are numbers and not text or booleans."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, protected_namespaces=())

    def __init__(self, **data: Any) -> None:
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise _config_error(_problems(error, type(self), {})) from None

    # As pydantic's own __init__ says of itself: nested sections are validated without calling it, so that the
    # problems of all sections come out together.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    def _refuse(self, *rules: tuple[bool, tuple[str, ...], str]) -> None:
        value_of = [attrgetter(*keys) for _, keys, _ in rules]
        found = [(keys, of(self), why) for of, (broken, keys, why) in zip(value_of, rules, strict=True) if broken]
        if found:
            raise _ContradictionError(found)


class TransferConfig(_Section):
    """How bytes move from the trainer to the engines, and how long anything may take."""

    backend: Backend = Field(default="gloo", description="library of the transfer group, or CUDA IPC without a group")
    strategy: Strategy | None = Field(
        default=None, description="names the strategy; null: it follows from the other keys"
    )
    colocated: bool = Field(default=False, description="trainer and engines share their GPUs")
    use_cuda_ipc: bool = Field(default=False, description="asks for CUDA IPC; false asks for nothing")
    pack_weights: bool = Field(default=False, description="one IPC handle a chunk instead of one a tensor")
    training_backend: TrainingBackend = Field(default="module", description="what shards the trainer's model")
    delta: bool = Field(
        default=False, description="a push sends what has changed since the version that every engine serves"
    )
    master_addr: _Text = Field(
        default="127.0.0.1", description="address of training rank 0 that the engines connect to"
    )
    interface: _Text | None = Field(
        default=None, description="network interface of the transfer group; null: the system's choice"
    )
    join_timeout_s: _Seconds = Field(default=30.0, description="how long members of a group wait for each other")
    transfer_timeout_s: _Seconds = Field(default=300.0, description="deadline of one whole sync")
    pause_timeout_s: _Seconds = Field(default=30.0, description="how long a pause waits for running generations")

    @model_validator(mode="after")
    def _no_contradiction(self) -> Self:
        broadcast = self.strategy in _BROADCASTS
        ipc = "choices are 'cuda_ipc', 'packed_cuda_ipc', or null to let it follow"
        self._refuse(
            (
                broadcast and self.backend == "cuda_ipc",
                ("strategy", "backend"),
                f"a broadcast needs a process group: set backend to 'gloo' or 'nccl', or strategy: {ipc}",
            ),
            (
                broadcast and self.use_cuda_ipc,
                ("strategy", "use_cuda_ipc"),
                f"a broadcast uses no CUDA IPC: set use_cuda_ipc to false, or strategy: {ipc}",
            ),
            (
                broadcast and self.backend == "nccl" and self.colocated,
                ("strategy", "backend", "colocated"),
                f"NCCL refuses two ranks on one GPU: set backend to 'gloo', or strategy: {ipc}",
            ),
            (
                self.strategy == "cuda_ipc" and self.pack_weights,
                ("strategy", "pack_weights"),
                "this strategy has one handle a tensor: set pack_weights to false, or strategy to 'packed_cuda_ipc'",
            ),
            *(
                (
                    self.delta and chosen,
                    ("delta", key),
                    f"CUDA IPC and SGLang take whole tensors: set delta to false, or {key} to {remedy}",
                )
                for key, chosen, remedy in (
                    ("strategy", self.strategy not in (None, "broadcast"), "'broadcast'"),
                    ("backend", self.strategy is None and self.backend == "cuda_ipc", "'gloo' or 'nccl'"),
                    ("use_cuda_ipc", self.strategy is None and self.use_cuda_ipc, "false"),
                    ("colocated", self.strategy is None and self.colocated, "false"),
                )
            ),
        )
        return self


class ExtractConfig(_Section):
    """How weights leave the trainer."""

    dtype: FloatDtype | None = Field(
        default="bfloat16", description="the engine's dtype, for floating-point weights; null: as they are"
    )
    group_by_module: bool | None = Field(
        default=None,
        description="a chunk holds whole modules: q, k, v together, a layer's experts together; "
        "null: with CUDA IPC it does, with a broadcast or Megatron's buckets it does not",
    )
    chunk_bytes: int | None = Field(
        default=64 << 20,
        gt=0,
        description="tensors (or groups) are merged into chunks of at most so many bytes, a larger one travels alone; "
        "null: a chunk for each",
    )
    dtype_overrides: Mapping[str, FloatDtype] = Field(
        default_factory=dict,
        description="glob over the engine's tensor names: its dtype instead; the first that matches counts",
    )


class InferenceServiceConfig(_Section):
    """Which model the engines serve, and where."""

    model_tag: _Text = Field(default="default", description="the model's name in calls: its own state, buffer and lock")
    model: _Text | None = Field(default=None, description="the model's name as the inference service knows it")
    weight_type: Literal["full"] = Field(default="full", description="kind of weights that are moved")
    backend: EngineBackend | None = Field(default=None, description="what serves the model; null: not said")
    base_url: _Url | None = Field(default=None, description="where the inference service answers")


class FleetConfig(_Section):
    """The controller's models, and the rollout services that follow it."""

    models: tuple[_Text, ...] = Field(
        default=(), strict=False, description="the models' names; none: the inference service's `model_tag`"
    )
    sets: tuple[Annotated[tuple[_Text, ...], Field(strict=False)], ...] = Field(
        default=(), strict=False, description="models that are served together: nobody serves one without the others"
    )
    commit_policy: Annotated[str, Field(pattern=r"^(each|all|quorum\([1-9][0-9]*\))$")] = Field(
        default="each", description="how many services have staged a version before any commits it"
    )
    lease_s: _Seconds = Field(default=10.0, description="a service that is cut off answers no longer than this")
    barrier_timeout_s: _Seconds = Field(default=600.0, description="how long the models of a set wait for each other")
    prepare_timeout_s: _Seconds = Field(default=120.0, description="how long a service may take to fetch and stage")
    commit_timeout_s: _Seconds = Field(default=30.0, description="how long it may take to pause and commit")
    straggler_s: _Seconds = Field(default=2.0, description="with a quorum: how long the others may take then")
    retries_s: tuple[Annotated[float, Field(ge=0, allow_inf_nan=False)], ...] = Field(
        default=(1.0, 2.0, 4.0), strict=False, description="seconds until each retry of a sync that failed"
    )
    after_failure: Literal["keep", "evict"] = Field(
        default="keep", description="after the last retry: keep the old version, or evict whoever failed"
    )
    validate_timeout_s: _Seconds = Field(
        default=3600.0, description="a validation that nobody has ended after so long counts as ended"
    )
    host: _Text = Field(default="127.0.0.1", description="where the controller listens; beyond loopback with a token")
    port: int = Field(default=8700, ge=0, le=65535, description="its port; 0: the system's choice")


class WeightSyncConfig(_Section):
    """All settings. Bare keyword arguments, or `load` for files and other frameworks' configurations.

    Raises:
        ConfigError: one or several keys, values or combinations are wrong. Nothing was started.
    """

    sync_mode: SyncMode = Field(default="sync", description="when the engines follow the trainer")
    staleness_threshold: int = Field(
        default=2,
        ge=1,
        description="batch-async: versions behind at which rollout blocks; the other modes don't read it",
    )
    sync_method: SyncMethodName = Field(default="push", description="how a version reaches the engines")
    sync_weight_path: _Text | None = Field(default=None, description="folder that network and disk put the weights in")
    validate_freq: int = Field(
        default=0,
        ge=0,
        description="training steps between validations; 0: none",
    )
    transfer: TransferConfig = Field(default_factory=lambda: TransferConfig())
    extract: ExtractConfig = Field(default_factory=lambda: ExtractConfig())
    inference_service: InferenceServiceConfig = Field(default_factory=lambda: InferenceServiceConfig())
    fleet: FleetConfig = Field(default_factory=lambda: FleetConfig())

    @classmethod
    def load(cls, source: str | os.PathLike[str] | Mapping[str, Any] | WeightSyncConfig) -> WeightSyncConfig:
        """Reads a configuration.

        Args:
            source: a path to YAML, a mapping or an OmegaConf object (its interpolations are resolved). It
                holds our keys bare, under `weight_sync` or under `weight_sync_controller`, or it is a
                framework's whole configuration with `generator` and `trainer` trees; of such a tree only
                what concerns weight sync is read, and a misspelling of one of those keys is refused.

        Raises:
            ConfigError: unreadable, an unknown key, a wrong value, a contradiction: all of them at once.
        """
        if isinstance(source, WeightSyncConfig):
            return source
        sections = {key: tuple(_fields(section)) for key, section in SECTIONS.items()}
        adapted = foreign.adapt(foreign.read(source), own_keys={key: sections.get(key, ()) for key in _fields(cls)})
        problems = list(adapted.problems)
        config: WeightSyncConfig | None = None
        try:
            config = cls.model_validate(adapted.values)
        except ValidationError as error:
            problems += _problems(error, cls, adapted.origins)
        if config is None or problems:
            raise _config_error(problems)
        return config

    @model_validator(mode="after")
    def _no_contradiction_between_sections(self) -> Self:
        serving, method = self.inference_service.backend, self.sync_method
        hosted = ("tinker", "weaver")
        foreign_method = serving is not None and method not in (serving, "mock")
        self._refuse(
            (
                method in ("network", "disk") and self.sync_weight_path is None,
                ("sync_method", "sync_weight_path"),
                "this method needs a folder for the weights: set sync_weight_path, or sync_method to one of "
                "'push', 'pull', 'tinker', 'weaver', 'mock'",
            ),
            (
                foreign_method and (method in hosted or serving in hosted),
                ("sync_method", "inference_service.backend"),
                "a hosted service takes weights by its own method alone: name the same in both, or the method 'mock'",
            ),
            (
                bool(self.extract.group_by_module) and self.transfer.training_backend == "megatron",
                ("extract.group_by_module", "transfer.training_backend"),
                "Megatron's chunks are buckets up to chunk_bytes and not modules: set group_by_module to false, "
                "or training_backend to one of 'module', 'fsdp', 'deepspeed'",
            ),
        )
        return self


SECTIONS: dict[str, type[_Section]] = {
    "transfer": TransferConfig,
    "extract": ExtractConfig,
    "inference_service": InferenceServiceConfig,
    "fleet": FleetConfig,
}


def select_strategy(config: WeightSyncConfig) -> Strategy:
    """The transfer strategy that a configuration means; docs/configuration.md has it as a table.

    A strategy named explicitly wins. Otherwise backend "nccl" or "gloo", not colocated, is a broadcast;
    colocated, backend "cuda_ipc" or `use_cuda_ipc` is CUDA IPC, packed with `pack_weights` or where the
    chunks are buckets (Megatron).
    """
    transfer = config.transfer
    if transfer.strategy is not None:
        return transfer.strategy
    if not (transfer.colocated or transfer.use_cuda_ipc or transfer.backend == "cuda_ipc"):
        return "broadcast"
    return "packed_cuda_ipc" if transfer.pack_weights or transfer.training_backend == "megatron" else "cuda_ipc"


def select_grouping(config: WeightSyncConfig) -> bool:
    """Whether chunks hold whole modules. Said explicitly it holds; otherwise it follows the strategy: an engine beside
    the trainer opens the tensors of a fused module together, and a bucket of Megatron's is no module.
    """
    asked = config.extract.group_by_module
    if asked is not None:
        return asked
    return select_strategy(config) not in _BROADCASTS and config.transfer.training_backend != "megatron"


def choices_of(annotation: object) -> list[str]:
    """The literal values that a field of this type may have; "null" last where None is one of them."""
    if annotation is types.NoneType:
        return ["null"]
    if get_origin(annotation) is Literal:
        return [repr(value) for value in get_args(annotation)]
    return [choice for argument in get_args(annotation) for choice in choices_of(argument)]


def must_be(key: str, annotation: object) -> str:
    """What a key may hold where it isn't a choice, in words and units."""
    if key in _MUST:
        text = _MUST[key]
    elif bool in (annotation, *get_args(annotation)):
        text = "true or false"
    elif annotation is float:
        text = "a finite number of seconds above 0"
    elif get_origin(annotation) is Mapping or annotation in SECTIONS.values():
        text = "a mapping of keys to values"
    else:
        text = "text that is not empty"
    return f"{text}, or null" if types.NoneType in get_args(annotation) else text


def _fields(section: type[BaseModel]) -> dict[str, FieldInfo]:
    return section.model_fields


def _config_error(problems: Sequence[foreign.Problem]) -> ConfigError:
    head = "the configuration is wrong" if len(problems) == 1 else f"the configuration has {len(problems)} problems"
    lines = [problem.text for problem in problems]
    text = f"{head}: {lines[0]}" if len(lines) == 1 else "\n  - ".join([f"{head}:", *lines])
    return ConfigError(text, keys=[problem.key for problem in problems])


def _problems(
    error: ValidationError, root: type[BaseModel], origins: Mapping[foreign.KeyPath, foreign.Origin]
) -> list[foreign.Problem]:
    """What pydantic found, in the names and values that the user wrote."""
    problems: dict[tuple[str, ...], foreign.Problem] = {}
    for item in error.errors(include_url=False):
        path = tuple(map(str, item["loc"]))
        raised = item.get("ctx", {}).get("error")
        if isinstance(raised, _ContradictionError):
            for keys, values, why in raised.found:
                paths = [(*path, *key.split(".")) for key in keys]
                written = [_origin(each, value, origins) for each, value in zip(paths, values, strict=True)]
                text = " with ".join(f"{each.name} = {foreign.short(each.value)}" for each in written)
                problems[(*path, *keys)] = foreign.Problem(key=written[0].name, text=f"{text}: {why}")
        else:
            written_here = _origin(path, item["input"], origins)
            text = f"{written_here.name} = {foreign.short(written_here.value)}: {_why(item, root, path)}"
            problems[path] = foreign.Problem(key=written_here.name, text=text)
    return list(problems.values())


def _origin(path: foreign.KeyPath, value: object, origins: Mapping[foreign.KeyPath, foreign.Origin]) -> foreign.Origin:
    found = origins.get(path)
    if found is None and path[:2] in origins:  # inside dtype_overrides
        return foreign.Origin(name=f"{origins[path[:2]].name}[{path[2]!r}]", value=value)
    return found or foreign.Origin(name=".".join(path), value=value)


def _why(item: ErrorDetails, root: type[BaseModel], path: foreign.KeyPath) -> str:
    section, key = (
        (SECTIONS.get(path[0], root), path[1]) if len(path) > 1 and root is WeightSyncConfig else (root, path[0])
    )
    fields = _fields(section)
    if key not in fields:
        return f"is not a key;{foreign.close_choices(key, fields)} keys here are {', '.join(fields)}"
    if item["type"] == "literal_error":
        choices = choices_of(fields[key].annotation)
        hint = foreign.close_choices(str(item["input"]), [choice.strip("'") for choice in choices])
        return f"is not a choice;{hint} choices are {', '.join(choices)}"
    return f"must be {must_be(key, fields[key].annotation)}"
