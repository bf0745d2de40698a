"""Which key is read with which sync_method. One that is asked for and that nobody reads is refused, in words.

Private to `weightsync.config`. One file configures trainer, host and controller, so a key is read where one of them
reads it; `tests/unit/test_config_keys.py` walks all of them, and sees each act or be refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from pydantic import BaseModel

if TYPE_CHECKING:
    from weightsync.config import WeightSyncConfig

Contradiction = tuple[tuple[str, ...], tuple[object, ...], str]
"""Keys, their values, and what to do."""

METHODS = ("push", "pull", "network", "disk", "tinker", "weaver", "mock")
_UNSAID = ("push", "pull")
"""Where no method is said: `weightsync.push` means the one, `publish` and `serve` the other."""

READ_WITH: dict[str, tuple[str, ...]] = {
    "run_id": ("push", "pull"),
    "sync_mode": METHODS,
    "staleness_threshold": METHODS,
    "sync_method": METHODS,
    "sync_weight_path": ("network", "disk"),
    "validate_freq": METHODS,
    "transfer": ("push",),
    "transfer.training_backend": ("push", "pull"),
    "transfer.delta": ("push", "pull"),
    "transfer.join_timeout_s": ("push", "pull"),
    "transfer.transfer_timeout_s": ("push", "pull", "network", "disk", "tinker", "weaver"),
    "transfer.pause_timeout_s": ("push", "pull"),
    "extract": ("push", "pull"),
    "extract.group_by_module": ("push",),
    "inference_service": METHODS,
    "fleet": ("pull",),
    "fleet.models": METHODS,
    "fleet.prepare_timeout_s": ("push", "pull"),
    "fleet.retries_s": METHODS,
    "fleet.after_failure": METHODS,
    "fleet.validate_timeout_s": METHODS,
    "fleet.step_timeout_s": METHODS,
    "fleet.host": METHODS,
    "fleet.port": METHODS,
    "publish": ("pull",),
    "push": ("push",),
    "serve": ("pull",),
}
"""By key, or by section for all of its other keys."""


def read_with(key: str) -> tuple[str, ...]:
    """The methods with which somebody reads a key, written with its section."""
    return READ_WITH[key] if key in READ_WITH else READ_WITH[key.partition(".")[0]]


def asked(config: BaseModel, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Keys that were said, with their values; saying the default asks for nothing."""
    for name, field in type(config).model_fields.items():
        value = getattr(config, name)
        if isinstance(value, BaseModel):
            yield from asked(value, f"{name}.")
        elif name in config.model_fields_set and value != field.get_default(call_default_factory=True):
            yield f"{prefix}{name}", value


def unread(config: WeightSyncConfig, method: str | None, strategy: str) -> list[Contradiction]:
    """What is asked for and acts nowhere with this method, or beside the other keys.

    Args:
        config: all settings.
        method: None: the one that is said; where none is, each that a verb may mean.
        strategy: what a push would take.
    """
    methods: Sequence[str] = (method,) if method else (config.sync_method,)
    if method is None and "sync_method" not in config.model_fields_set:
        methods = _UNSAID
    found: list[Contradiction] = []
    values = dict(asked(config))
    for key, value in values.items():
        reading = read_with(key)
        if key == "transfer.use_cuda_ipc" and value is False:
            continue  # who moves no bytes does not use it
        if not set(methods) & set(reading):
            why = f"nobody reads it with this method: leave it out, or set sync_method to {_either(reading)}"
            found.append(((key, "sync_method"), (value, method or config.sync_method), why))
    return found + [rule for rule in _beside(config, methods, strategy) if rule[0][0] in values]


def _beside(config: WeightSyncConfig, methods: Sequence[str], strategy: str) -> Iterator[Contradiction]:
    """Keys that the value of another one leaves nothing to do."""
    fleet, service = config.fleet, config.inference_service
    if config.sync_mode != "batch-async":
        yield _rule(
            config,
            ("staleness_threshold", "sync_mode"),
            "'batch-async' alone has a threshold: leave it out, or set sync_mode to that",
        )
    if not fleet.commit_policy.startswith("quorum"):
        yield _rule(
            config,
            ("fleet.straggler_s", "fleet.commit_policy"),
            "nobody is left behind without a quorum: leave it out, or set commit_policy to 'quorum(n)'",
        )
    if not fleet.sets:
        yield _rule(
            config,
            ("fleet.barrier_timeout_s", "fleet.sets"),
            "models wait for each other in a set: leave it out, or name one",
        )
    if fleet.models and service.model_tag not in fleet.models:
        yield _rule(
            config, ("inference_service.model_tag", "fleet.models"), "the controller has no such model: name it there"
        )
    if service.backend == "embedded" and set(methods) & {"network", "disk"}:
        yield _rule(
            config,
            ("inference_service.backend", "sync_method"),
            "a module of one of our processes loads from no path: set it to 'vllm' or 'sglang', or leave it out",
        )
    if strategy.endswith("cuda_ipc"):
        for key in ("master_addr", "interface"):
            yield _rule(
                config,
                (f"transfer.{key}", "transfer.strategy"),
                f"these settings mean {strategy}, which has no transfer group: leave it out, or set strategy to "
                "'broadcast'",
            )


def _rule(config: WeightSyncConfig, keys: tuple[str, ...], why: str) -> Contradiction:
    return keys, tuple(value_of(config, key) for key in keys), why


def value_of(config: BaseModel, key: str) -> object:
    """The value of a key that is written with its section."""
    for part in key.split("."):
        config = getattr(config, part)
    return config


def _either(words: Sequence[str]) -> str:
    quoted = [repr(word) for word in words]
    return " or ".join([", ".join(quoted[:-1]), quoted[-1]] if len(quoted) > 1 else quoted)
