"""Who is built from a configuration, and what is seen of him: the key walk's observers, `test_config_keys`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import torch

import weightsync
from weightsync import EmbeddedEngine, ModuleWeightLoader, PushSync, WeightManager, WeightSyncConfig
from weightsync.config import SECTIONS, select_strategy
from weightsync.control.build import build_controller
from weightsync.control.controller import WeightSyncController
from weightsync.control.methods.disk import DiskMethod
from weightsync.control.methods.fleet import FleetMethod
from weightsync.control.methods.network import NetworkMethod
from weightsync.control.methods.push import PushMethod
from weightsync.errors import ConfigError, WeightSyncError
from weightsync.extract.registry import extractor_for
from weightsync.host.settings import RolloutConfig
from weightsync.types import EngineOp
from weightsync.verbs.storing import sink_config

Tree = dict[str, Any]
HEARD: list[str] = []
"""What the server of no use was asked."""
ENGINE, OTHER = "weightsync+http://127.0.0.1:1", "http://127.0.0.1:2"


RUN_ID = "run-of-the-file"


def tree_of(*parts: Tree) -> Tree:
    """Trees laid over each other."""
    made: Tree = {}
    for part in parts:
        for key, value in part.items():
            made[key] = tree_of(made.get(key, {}), value) if isinstance(value, dict) and key in SECTIONS else value
    return made


class Told:
    """An engine that keeps what it was told."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._engine = EmbeddedEngine.of(ModuleWeightLoader(model), engine_id="e")
        self.engine_id = "e"
        self.heard: list[tuple[str, Any]] = []
        self.close = self._engine.close

    def call(self, op: EngineOp, message: Any, *, timeout_s: float) -> Any:
        self.heard.append((op.value, message))
        return self._engine.call(op, message, timeout_s=timeout_s)


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    return net.bfloat16()


def pushed(tree: Tree) -> Any:
    """What an engine is told of two versions that a `PushSync` of this configuration pushes, in whole messages."""
    config = WeightSyncConfig.load(tree)
    trained, engine = model(), Told(model())
    push = PushSync.from_config(config, extractor_for(config, trained), engine)  # type: ignore[arg-type]
    seen: list[Any] = []
    try:
        push.initialize()
        for version in (1, 2):
            report = push.sync_weights(version)
            seen.append((report.num_chunks, report.num_deltas))
    except WeightSyncError as error:
        seen.append(type(error).__name__)
    finally:
        push.close()
        engine.close()
    return seen + [(op, lasting(msgspec.to_builtins(message))) for op, message in engine.heard]


OF_ONE_LIFE = ("session", "group_name", "master_port", "handles", "run_id", "deadline_s", "timings")
"""Fields of messages that no two pushes have in common."""


def lasting(message: Any) -> Any:
    """A message without what no two pushes have in common."""
    if isinstance(message, dict):
        kept = {key: each for key, each in message.items() if key not in OF_ONE_LIFE or each == RUN_ID}
        return {key: lasting(each) for key, each in kept.items()}
    return [lasting(each) for each in message] if isinstance(message, list | tuple) else message


def strategy(tree: Tree) -> Any:
    config = WeightSyncConfig.load(tree)
    return select_strategy(config)


def by_the_verb(tree: Tree) -> Any:
    """Where `weightsync.push` looks for engines."""
    try:
        with weightsync.push(model(), config=tree):
            raise AssertionError("nobody is there")
    except WeightSyncError as error:
        return type(error).__name__, error.message


def ordered(tree: Tree) -> Any:
    """Whether a step is pushed at once."""
    with weightsync.push(model(), model(), config=tree) as push:
        return push.step() is None


def manager(tree: Tree) -> Any:
    """What a `WeightManager` keeps, and starts its agent with."""
    made = WeightManager.from_config(tree)
    return made._config, made._guard_s, made.timeout_s, made._dtype, made._given_run_id


def extractor(tree: Tree) -> Any:
    """What the trainer of a publisher hands out."""
    config = WeightSyncConfig.load(tree)
    try:
        made = extractor_for(config, model())
    except ConfigError as error:
        return str(error)
    return type(made).__name__, [chunk.specs for chunk in made.chunk_plan(config.extract.dtype)]


def told(tree: Tree) -> Any:
    """Whether a publisher asks somebody who he is."""
    HEARD.clear()
    with weightsync.publish(model(), config=tree_of(tree, {"publish": {"port": 0, "last_wait_s": 0.0}})):
        return bool(HEARD)


def waits(tree: Tree) -> Any:
    """Whether a publisher waits for those who have not got its last version, who are there or not."""
    wanted = {"last_wait_s": 0.2, **tree["publish"], "port": 0}
    with weightsync.publish(model(), config=tree_of(tree, {"publish": wanted})) as publisher:
        publisher.step()
    return bool(publisher._not_serving)  # of the wait alone


def stored(tree: Tree) -> Any:
    """How the writer of an object store runs."""
    config = WeightSyncConfig.load(tree)
    return sink_config(config, store=None, sign_key=None, model_id="m", token=None, certificate=None)


def service(tree: Tree) -> Any:
    """What a rollout service works with."""
    made = RolloutConfig.from_config(tree)
    lease = made.lease
    if lease is not None:
        lease.release()
    fields = {name: getattr(made, name) for name in made.__dataclass_fields__ if name != "lease"}
    return fields, lease is not None


def served(tree: Tree) -> Any:
    """Which models and engines a host has, by its status."""
    try:
        with weightsync.serve(config={**tree, "serve": {"port": 0, **tree.get("serve", {})}}) as running:
            return {tag: sorted(each.engines) for tag, each in running.status().models.items()}
    except WeightSyncError as error:
        return type(error).__name__, error.message


def controlled(see: Callable[[WeightSyncController], Any]) -> Callable[[Tree], Any]:
    def seen(tree: Tree) -> Any:
        with contextlib.closing(WeightSyncController(tree)) as controller:
            return see(controller)

    return seen


def _gate(controller: WeightSyncController) -> Any:
    tag = controller.model_tags[0]
    controller.trajectory_pool_notify_batch_ready(tag)
    return controller.check_rollout_service_status(tag)


def _policy(controller: WeightSyncController) -> Any:
    return [each.policy for each in controller._models.values()], (
        controller._shared.validate_timeout_s,
        controller._shared.step_timeout_s,
    )


def _state(controller: WeightSyncController) -> Any:
    return controller.rollout_service_state(controller.model_tags[0])


def _how(controller: WeightSyncController) -> Any:
    """The limits and places that the method works with."""
    method = controller.method
    match method:
        case FleetMethod():
            pool = method.pool
            assert pool is not None
            times = (
                method._barrier_timeout_s,
                method._prepare_timeout_s,
                method._commit_timeout_s,
                method._straggler_s,
            )
            return method.policy, times, pool.lease_s, method.barrier.set_of("default")
        case DiskMethod():
            return method._folder.root, method._urls, method._timeout_s, method._backend, method._served_model
        case NetworkMethod():
            return method._services
        case PushMethod():
            return {tag: (each._take_s, each._push_s) for tag, each in method.orders.items()}
    return getattr(method, "_timeout_s", None)


def listens(tree: Tree) -> Any:
    with build_controller(tree) as built:
        return built.url


GATE, POLICY, STATE, HOW = controlled(_gate), controlled(_policy), controlled(_state), controlled(_how)
TAGS = controlled(lambda controller: controller.model_tags)

Seen = Callable[[Tree], Any] | Mapping[str, Callable[[Tree], Any]]

SEEN: dict[str, Seen] = {
    "run_id": {"push": pushed, "pull": manager},
    "sync_mode": GATE,
    "staleness_threshold": GATE,
    "sync_weight_path": HOW,
    "validate_freq": POLICY,
    "transfer": pushed,
    "transfer.pack_weights": strategy,
    "transfer.training_backend": extractor,
    "transfer.delta": {"push": pushed, "pull": service},
    "transfer.join_timeout_s": {"push": pushed, "pull": manager},
    "transfer.transfer_timeout_s": {"push": pushed, "pull": service, "*": HOW},
    "transfer.pause_timeout_s": {"push": pushed, "pull": service},
    "extract.dtype": {"push": pushed, "pull": manager},
    "extract.group_by_module": pushed,
    "extract.chunk_bytes": {"push": pushed, "pull": extractor},
    "extract.dtype_overrides": {"push": pushed, "pull": extractor},
    "inference_service.model_tag": TAGS,
    "inference_service.model": {"network": HOW, "disk": HOW, "*": STATE},
    "inference_service.backend": {"push": by_the_verb, "pull": served, "network": HOW, "disk": HOW, "*": STATE},
    "inference_service.base_url": {"push": by_the_verb, "pull": served, "network": HOW, "disk": HOW, "*": STATE},
    "fleet": HOW,
    "fleet.models": TAGS,
    "fleet.retries_s": POLICY,
    "fleet.after_failure": POLICY,
    "fleet.validate_timeout_s": POLICY,
    "fleet.step_timeout_s": POLICY,
    "fleet.host": listens,
    "fleet.port": listens,
    "publish": manager,
    "publish.to": told,
    "publish.last_wait_s": waits,
    "publish.store": stored,
    "publish.sign_key": stored,
    "publish.anchor_every": stored,
    "publish.keep_s": stored,
    "push": by_the_verb,
    "push.controller": ordered,
    "serve": service,
    "serve.engines": served,
}
"""By key, or by section for its other keys, and where it has to be by method: who shows that it acts."""


def seen_by(key: str, method: str) -> Callable[[Tree], Any]:
    found = SEEN.get(key) or SEEN[key.partition(".")[0]]
    return found if callable(found) else found.get(method) or found["*"]
