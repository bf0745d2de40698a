"""Base classes of frameworks that are not installed here, by what their sources ask of those who stand behind them.

NeMo-RL: `nemo_rl/utils/checkpoint_engines/base.py`, commit 7ea279a of August 2026. SkyRL:
`skyrl/backends/skyrl_train/weight_sync`, release 0.3.0. verl: `verl/checkpoint_engine`, release 0.9.1.
Where a framework is installed, its own are taken.
"""

from __future__ import annotations

import abc
import dataclasses
import importlib.util
import inspect
import sys
from types import ModuleType
from typing import Any

import torch

NEMO_RL = "nemo_rl.utils.checkpoint_engines.base"
NEMO_RL_METHODS = {
    "prepare": (),
    "init_policy_process_group": ("worker_rank", "train_world_size", "rollout_world_size", "metadata"),
    "init_rollout_process_group": ("rollout_rank", "train_world_size", "rollout_world_size", "metadata"),
    "send_weights": ("weights",),
    "receive_weight_batches": (),
}
SKYRL = "skyrl.backends.skyrl_train.weight_sync"
SKYRL_SENDER = {"send_chunks": ("chunks", "weight_metadata"), "teardown": ()}
SKYRL_STRATEGY = {
    "create_init_info": ("ie_cfg", "inference_world_size"),
    "get_vllm_transfer_engine": (),
    "create_sender": ("init_info", "inference_client"),
}


VERL, VERL_ENCODE = "verl.checkpoint_engine", "verl.checkpoint_engine.delta_sync.encode"
VERL_METHODS = {
    "prepare": (),
    "build_topology": ("actor_wg_world_size", "rollout_world_size", "metadata"),
    "init_process_group": (),
    "send_weights": ("weights", "global_steps"),
    "receive_weights": ("global_steps",),
    "finalize": (),
}


def abstract(name: str, methods: dict[str, tuple[str, ...]], **more: Any) -> type:
    """A class with these abstract methods."""

    def method(named: str) -> Any:
        def body(self: Any, *args: Any, **given: Any) -> Any:
            raise NotImplementedError(named)

        return abc.abstractmethod(body)

    return abc.ABCMeta(name, (), {**{each: method(each) for each in methods}, **more})


def provide(name: str, **names: Any) -> None:
    """Makes a module importable, and the packages above it, where it is not installed."""
    with_parents = [name[: at if at >= 0 else None] for at in _ends(name)]
    if name in sys.modules:
        return
    try:
        if importlib.util.find_spec(name) is not None:
            return
    except ModuleNotFoundError:
        pass
    for each in with_parents:
        module = sys.modules.setdefault(each, ModuleType(each))
        module.__path__ = []
        parent, _, child = each.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
    for key, value in names.items():
        setattr(sys.modules[name], key, value)


def _ends(name: str) -> list[int]:
    return [at for at, letter in enumerate(name) if letter == "."] + [-1]


def takes(method: Any, names: tuple[str, ...]) -> bool:
    """Whether it can be called with these keywords."""
    signature = inspect.signature(method)
    own = [each for each in signature.parameters if each != "self"]
    return all(each in own or "kwargs" in own for each in names)


def provide_nemo_rl() -> None:
    """Its base class of checkpoint engines."""
    more = {"finalize": lambda self: None, "shard_expert_weights": False}
    provide(NEMO_RL, CheckpointEngine=abstract("CheckpointEngine", NEMO_RL_METHODS, **more))


def provide_skyrl() -> None:
    """Its strategy layer."""

    class WeightSyncInitInfo:
        def __init__(self, override_existing_receiver: bool) -> None:
            self.override_existing_receiver = override_existing_receiver

    provide(
        SKYRL,
        WeightSyncInitInfo=WeightSyncInitInfo,
        WeightTransferSender=abstract("WeightTransferSender", SKYRL_SENDER),
        WeightTransferStrategy=abstract("WeightTransferStrategy", SKYRL_STRATEGY),
        get_transfer_strategy_cls=lambda weight_sync_backend, colocate_all: None,
    )


@dataclasses.dataclass
class DeltaParam:
    """What verl says of one parameter in a flush."""

    name: str
    dtype: str
    shape: list[int]
    pos_start: int
    pos_end: int
    pos_width: int
    val_start: int
    val_end: int


def checksum(positions: torch.Tensor, values: torch.Tensor) -> int:
    """verl's, of a flush."""
    one, other = (int(torch.hash_tensor(each).item()) if each.numel() else 0 for each in (positions, values))
    return one ^ (other << 1)


def provide_verl() -> None:
    """Its base class of checkpoint engines, their registry, and the form of its flushes."""

    class Registry:
        engines: dict[str, type] = {}  # noqa: RUF012

        @classmethod
        def register(cls, name: str) -> Any:
            return lambda made: cls.engines.setdefault(name, made)

    more = {"wire_format": "named_tensors"}
    made = abstract("CheckpointEngine", VERL_METHODS, **more)
    provide(VERL, CheckpointEngine=made, CheckpointEngineRegistry=Registry)
    provide(VERL_ENCODE, DeltaParam=DeltaParam, checksum=checksum)
