"""WeightSyncConfig: everything that can be set, checked before anything starts.

One clean schema of our own; `WeightSyncConfig.load` also takes the names that other frameworks use
(docs/strategies.md and docs/configuration.md have the tables). What is wrong comes out as one `ConfigError` that
lists every problem with the key as the user wrote it, the value and the choices.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from operator import attrgetter
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from weightsync import _config_foreign as foreign
from weightsync._config_problems import ContradictionError, config_error, problem_of, problems_of
from weightsync._config_reads import asked, unread
from weightsync.errors import ConfigError
from weightsync.types.deadline import MAX_WAIT_S
from weightsync.types.spec import check_config_id

Strategy: TypeAlias = Literal["broadcast", "sglang", "cuda_ipc", "packed_cuda_ipc"]
Backend: TypeAlias = Literal["gloo", "nccl", "cuda_ipc"]
TrainingBackend: TypeAlias = Literal["module", "fsdp", "deepspeed", "megatron"]
SyncMode: TypeAlias = Literal["sync", "fully-async", "batch-async"]
SyncMethodName: TypeAlias = Literal["push", "pull", "network", "disk", "tinker", "weaver", "mock"]
EngineBackend: TypeAlias = Literal["embedded", "vllm", "sglang", "tinker", "weaver"]
FloatDtype: TypeAlias = Literal["bfloat16", "float16", "float32", "float64"]

_BROADCASTS = ("broadcast", "sglang")  # strategies with a process group
_Seconds: TypeAlias = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Lease: TypeAlias = Annotated[float, Field(ge=0.1, le=3600, allow_inf_nan=False)]
_Wait: TypeAlias = Annotated[float, Field(gt=0, le=MAX_WAIT_S, allow_inf_nan=False)]
_Text: TypeAlias = Annotated[str, Field(min_length=1)]
_Url: TypeAlias = Annotated[str, Field(pattern=r"^https?://[^\s/]+")]
_PLACE = r"^(s3|gs|az|memory)://[^\s/]+/[^\s]+|^file:///[^\s]+"
_StoreUrl: TypeAlias = Annotated[str, Field(pattern=_PLACE)]
_SourceUrl: TypeAlias = Annotated[str, Field(pattern=rf"^https?://[^\s/]+|{_PLACE}")]
_EngineUrl: TypeAlias = Annotated[str, Field(pattern=r"^([a-z]+\+)?https?://[^\s/]+")]


def _run_id(value: str) -> str:
    try:
        check_config_id("run_id", value)
    except ConfigError as error:
        raise ValueError(error.message) from None
    return value


class _Section(BaseModel):
    """Frozen; unknown keys are refused; numbers are numbers and not text or booleans."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, protected_namespaces=())

    def __init__(self, **data: Any) -> None:
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise config_error(problems_of(error, type(self), {})) from None

    # As pydantic's own __init__ says of itself: nested sections are validated without calling it, so that the
    # problems of all sections come out together.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    def _refuse(self, *rules: tuple[bool, tuple[str, ...], str]) -> None:
        value_of = [attrgetter(*keys) for _, keys, _ in rules]
        found = [(keys, of(self), why) for of, (broken, keys, why) in zip(value_of, rules, strict=True) if broken]
        if found:
            raise ContradictionError(found)


class TransferConfig(_Section):
    """How bytes move from the trainer to the engines, and how long anything may take."""

    backend: Backend = Field(default="gloo", description="library of the transfer group, or CUDA IPC without a group")
    strategy: Strategy | None = Field(
        default=None, description="names the strategy; null: it follows from the other keys"
    )
    colocated: bool = Field(default=False, description="trainer and engines share their GPUs")
    use_cuda_ipc: bool | None = Field(
        default=None, description="whether bytes go by CUDA IPC; null: it follows from `backend` and `colocated`"
    )
    pack_weights: bool | None = Field(
        default=None, description="one IPC handle a chunk instead of one a tensor; null: with Megatron's buckets it is"
    )
    training_backend: TrainingBackend = Field(default="module", description="what shards the trainer's model")
    delta: bool | None = Field(
        default=None,
        description="what has changed is sent instead of everything; null: a push sends everything, services that pull "
        "take deltas over TCP",
    )
    master_addr: _Text = Field(default="127.0.0.1", description="of training rank 0, for the engines to connect to")
    interface: _Text | None = Field(default=None, description="of the transfer group; null: the system's choice")
    join_timeout_s: _Wait = Field(
        default=30.0, description="how long members of a group wait for each other; said, ranks that publish too"
    )
    transfer_timeout_s: _Wait = Field(
        default=300.0, description="deadline of one whole sync; said, of a service's pull, or of what a service is told"
    )
    pause_timeout_s: _Wait = Field(
        default=30.0, description="how long a pause waits for running generations; said, that of a rollout service too"
    )

    @model_validator(mode="after")
    def _no_contradiction(self) -> Self:
        broadcast = self.strategy in _BROADCASTS
        by_ipc = self.strategy is not None and not broadcast
        ipc = "choices are 'cuda_ipc', 'packed_cuda_ipc', or null to let it follow"
        self._refuse(
            (
                broadcast and self.backend == "cuda_ipc",
                ("strategy", "backend"),
                f"a broadcast needs a process group: set backend to 'gloo' or 'nccl', or strategy: {ipc}",
            ),
            (
                broadcast and bool(self.use_cuda_ipc),
                ("strategy", "use_cuda_ipc"),
                f"a broadcast uses no CUDA IPC: set use_cuda_ipc to false, or strategy: {ipc}",
            ),
            (
                broadcast and self.backend == "nccl" and self.colocated,
                ("strategy", "backend", "colocated"),
                f"NCCL refuses two ranks on one GPU: set backend to 'gloo', or strategy: {ipc}",
            ),
            (
                by_ipc and self.use_cuda_ipc is False,
                ("strategy", "use_cuda_ipc"),
                "this strategy is CUDA IPC: leave use_cuda_ipc out, or set strategy to 'broadcast'",
            ),
            (
                self.strategy is None and self.backend == "cuda_ipc" and self.use_cuda_ipc is False,
                ("backend", "use_cuda_ipc"),
                "this backend is CUDA IPC: leave use_cuda_ipc out, or set backend to 'gloo' or 'nccl'",
            ),
            (
                self.strategy is None and self.backend == "nccl" and self.colocated and self.use_cuda_ipc is False,
                ("backend", "colocated", "use_cuda_ipc"),
                "without CUDA IPC it is a broadcast, and NCCL refuses two ranks on one GPU: leave use_cuda_ipc out, or "
                "set backend to 'gloo'",
            ),
            (
                self.strategy == "cuda_ipc" and bool(self.pack_weights),
                ("strategy", "pack_weights"),
                "this strategy has one handle a tensor: set pack_weights to false, or strategy to 'packed_cuda_ipc'",
            ),
            (
                self.strategy == "packed_cuda_ipc" and self.pack_weights is False,
                ("strategy", "pack_weights"),
                "this strategy has one handle a chunk: leave pack_weights out, or set strategy to 'cuda_ipc'",
            ),
            *(
                (
                    bool(self.delta) and chosen,
                    ("delta", key),
                    f"CUDA IPC and SGLang take whole tensors: set delta to false, or {key} to {remedy}",
                )
                for key, chosen, remedy in (
                    ("strategy", self.strategy not in (None, "broadcast"), "'broadcast'"),
                    ("backend", self.strategy is None and self.backend == "cuda_ipc", "'gloo' or 'nccl'"),
                    ("use_cuda_ipc", self.strategy is None and bool(self.use_cuda_ipc), "false"),
                    ("colocated", self.strategy is None and self.colocated and self.use_cuda_ipc is not False, "false"),
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
    lease_s: _Lease = Field(default=10.0, description="a service that is cut off answers no longer than this")
    barrier_timeout_s: _Wait = Field(default=600.0, description="how long the models of a set wait for each other")
    prepare_timeout_s: _Wait = Field(default=120.0, description="how long a service may take to fetch and stage")
    commit_timeout_s: _Wait = Field(default=30.0, description="how long it may take to pause and commit")
    straggler_s: _Wait = Field(default=2.0, description="with a quorum: how long the others may take then")
    retries_s: tuple[Annotated[float, Field(ge=0, le=MAX_WAIT_S, allow_inf_nan=False)], ...] = Field(
        default=(1.0, 2.0, 4.0), strict=False, description="seconds until each retry of a sync that failed"
    )
    after_failure: Literal["keep", "evict"] = Field(
        default="keep", description="after the last retry: keep the old version, or evict whoever failed"
    )
    validate_timeout_s: _Wait = Field(
        default=3600.0, description="a validation that nobody has ended after so long counts as ended"
    )
    step_timeout_s: _Wait | None = Field(
        default=3600.0, description="steps that rollout has waited for so long are dropped; null: never"
    )
    host: _Text = Field(default="127.0.0.1", description="where the controller listens; beyond loopback with a token")
    port: int = Field(default=8700, ge=0, le=65535, description="its port; 0: the system's choice")


class PublishConfig(_Section):
    """Of `weightsync.publish`: where the trainer's agents listen, and whom they tell."""

    to: tuple[_Url, ...] = Field(
        default=(), strict=False, description="URLs of rollout services that are told, or of a controller; none: nobody"
    )
    host: _Text | None = Field(
        default=None,
        description="where agents listen; null: loopback, or where `to` names other machines the address towards them",
    )
    port: int = Field(default=8765, ge=0, le=65535, description="the agents' port; 0: the system's choice")
    advertise: _Text | None = Field(default=None, description="host name that rollout hosts reach the agents by")
    guard_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(
        default=1.0, description="how long a step waits at most for memory that is still read"
    )
    last_wait_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(
        default=60.0, description="how long the end of the block waits at most until the last version is served"
    )
    store: _StoreUrl | None = Field(
        default=None, description="place in an object store that versions are written to, too: s3://bucket/run"
    )
    sign_key: _Text | None = Field(
        default=None, description="file with the secret key that what is written there is signed with; null: it is not"
    )
    anchor_every: Annotated[int, Field(ge=1, le=256)] = Field(
        default=32, description="a chain in the store has at most so many versions, then comes a full"
    )
    keep_s: _Seconds = Field(
        default=600.0, description="how long what no newest chain needs stays in the store at least"
    )


class PushConfig(_Section):
    """Of `weightsync.push`: the engines, and who says when."""

    engines: tuple[_EngineUrl, ...] = Field(default=(), strict=False, description="the engines' URLs")
    controller: _Url | None = Field(
        default=None, description="URL of the controller that orders pushes; null: each step is one"
    )


class ServeConfig(_Section):
    """Of `weightsync.serve` and its command: the engines of a rollout host, and where their weights come from."""

    engines: Mapping[str, Annotated[tuple[_EngineUrl, ...], Field(strict=False)]] = Field(
        default_factory=dict, description="of each model the URLs of its engines"
    )
    sources: tuple[_SourceUrl, ...] = Field(
        default=(),
        strict=False,
        description="URLs of the trainers' agents, one a trainer host, or places in object stores (s3://bucket/run)",
    )
    trust_key: _Text | None = Field(
        default=None, description="file with the public key whose manifests are taken from stores; null: anybody's"
    )
    host: _Text = Field(default="127.0.0.1", description="where the service listens; beyond loopback with a token")
    port: int = Field(default=9000, ge=0, le=65535, description="its port; 0: the system's choice")
    service_id: _Text | None = Field(default=None, description="its name; null: HOST, -PORT if not 9000, random if 0")
    lease: _Text | None = Field(default=None, description="file of the serving lease that its engines look at")
    controller: _Url | None = Field(default=None, description="URL of the controller whose fleet it is part of")
    advertise: _Url | None = Field(default=None, description="URL by which the controller reaches it")
    relay: bool | None = Field(
        default=None,
        description="whether it takes blocks from other rollout hosts and serves them; null: where it listens beyond "
        "loopback",
    )
    zone: _Text | None = Field(default=None, description="its rack, room or data centre: those of one ask each other")
    upload_bytes_s: _Seconds | None = Field(default=None, description="most that it sends to other hosts in a second")


class WeightSyncConfig(_Section):
    """All settings. Bare keyword arguments, or `load` for files and other frameworks' configurations.

    Raises:
        ConfigError: one or several keys, values or combinations are wrong. Nothing was started.
    """

    run_id: Annotated[_Text, AfterValidator(_run_id)] | None = Field(
        default=None, description="name of the trainer's run, a new one for each start; null: rank 0 makes one up"
    )
    sync_mode: SyncMode = Field(default="sync", description="when the engines follow the trainer")
    staleness_threshold: int = Field(
        default=2, ge=1, description="versions behind at which `batch-async` syncs and waits; no other value elsewhere"
    )
    sync_method: SyncMethodName = Field(default="push", description="how a version reaches the engines")
    sync_weight_path: _Text | None = Field(default=None, description="folder that network and disk put the weights in")
    validate_freq: int = Field(default=0, ge=0, description="training steps between validations; 0: none")
    transfer: TransferConfig = Field(default_factory=lambda: TransferConfig())
    extract: ExtractConfig = Field(default_factory=lambda: ExtractConfig())
    inference_service: InferenceServiceConfig = Field(default_factory=lambda: InferenceServiceConfig())
    fleet: FleetConfig = Field(default_factory=lambda: FleetConfig())
    publish: PublishConfig = Field(default_factory=lambda: PublishConfig())
    push: PushConfig = Field(default_factory=lambda: PushConfig())
    serve: ServeConfig = Field(default_factory=lambda: ServeConfig())

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
        sections = {key: tuple(section.model_fields) for key, section in SECTIONS.items()}
        adapted = foreign.adapt(foreign.read(source), own_keys={key: sections.get(key, ()) for key in cls.model_fields})
        problems = list(adapted.problems)
        config: WeightSyncConfig | None = None
        try:
            config = cls.model_validate(adapted.values)
        except ValidationError as error:
            problems += problems_of(error, cls, adapted.origins)
        if config is None or problems:
            raise config_error(problems)
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
        if found := unread(self, None, select_strategy(self)):
            raise ContradictionError(found)
        return self

    def asked(self) -> tuple[tuple[str, object], ...]:
        """Keys that were said, with their sections, and their values; saying the default asks for nothing."""
        return tuple(asked(self))

    def for_method(self, method: SyncMethodName) -> Self:
        """These settings where `method` moves versions, whether that is said or not.

        Raises:
            ConfigError: another method is said; or something is asked for that nobody reads with this one.
        """
        found = unread(self, method, select_strategy(self))
        if "sync_method" in self.model_fields_set and self.sync_method != method:
            found = [(("sync_method",), (self.sync_method,), _OTHER_METHOD.format(method=method))]
        if found:
            raise config_error([problem_of(*each) for each in found])
        return self.model_copy(update={"sync_method": method})


_OTHER_METHOD = (
    "this is the {method} path: leave it out or set it to {method!r} (weightsync.push is the push path, publish and "
    "serve the pull path)"
)


SECTIONS: dict[str, type[_Section]] = {
    key: kind
    for key, field in WeightSyncConfig.model_fields.items()
    if isinstance(kind := field.annotation, type) and issubclass(kind, _Section)
}


def select_strategy(config: WeightSyncConfig) -> Strategy:
    """The transfer strategy that a configuration means; docs/strategies.md has it as a table.

    A strategy named explicitly wins, then `use_cuda_ipc` and `pack_weights` where they are said, false too. Otherwise
    backend "nccl" or "gloo", not colocated, is a broadcast; colocated or backend "cuda_ipc" is CUDA IPC, packed where
    the chunks are buckets (Megatron).
    """
    transfer = config.transfer
    if transfer.strategy is not None:
        return transfer.strategy
    beside, buckets = transfer.colocated or transfer.backend == "cuda_ipc", transfer.training_backend == "megatron"
    if not _said(transfer.use_cuda_ipc, beside):
        return "broadcast"
    return "packed_cuda_ipc" if _said(transfer.pack_weights, buckets) else "cuda_ipc"


def select_grouping(config: WeightSyncConfig) -> bool:
    """Whether chunks hold whole modules. Said explicitly it holds; otherwise it follows the strategy: an engine beside
    the trainer opens the tensors of a fused module together, and a bucket of Megatron's is no module.
    """
    follows = select_strategy(config) not in _BROADCASTS and config.transfer.training_backend != "megatron"
    return _said(config.extract.group_by_module, follows)


def _said(asked: bool | None, otherwise: bool) -> bool:
    return otherwise if asked is None else asked
