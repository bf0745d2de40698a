"""Stand-ins for the vLLM workers of several releases: how each builds a weight-transfer backend and calls it.

Written after the workers of those releases; only the newest is installed here. The layerwise reload under them is the
installed vLLM's own. Run as a script (vLLM keeps process-wide state); prints one JSON line.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from weightsync.engine.vllm.plugin import WeightSyncTransferEngine
from weightsync.extract.module import ModuleWeightExtractor
from weightsync.handles.vllm import VllmEngine
from weightsync.handles.vllm_api import error_of
from weightsync.trainer.push import PushSync


class Net(nn.Module):
    """Three layers, and a loader of checkpoint names as vLLM's models have."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.config = None
        self.up = nn.Linear(6, 9)
        self.down = nn.Linear(9, 6, bias=False)
        self.norm = nn.LayerNorm(6)
        for parameter in self.parameters():
            parameter.requires_grad_(False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        from vllm.model_executor.model_loader.weight_utils import default_weight_loader

        parameters, loaded = dict(self.named_parameters()), set()
        for name, weight in weights:
            getattr(parameters[name], "weight_loader", default_weight_loader)(parameters[name], weight)
            loaded.add(name)
        return loaded


class Worker:
    """What the newest release's worker does; older ones differ below."""

    def __init__(self, model: Net) -> None:
        self.model = model
        self.active = False
        self.engine = self.build()

    def build(self) -> Any:
        """Through vLLM's own factory, as registered by the plugin."""
        from vllm.config.weight_transfer import WeightTransferConfig
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

        from weightsync.engine.vllm.plugin import register

        register()
        register()  # idempotent
        config = SimpleNamespace(
            parallel_config=SimpleNamespace(world_size=1),
            model_config=SimpleNamespace(hf_config=None, dtype=torch.float32, quantization=None),
        )
        wanted = WeightTransferConfig(backend="weightsync")
        return WeightTransferEngineFactory.create_engine(wanted, config, torch.device("cpu"), self.model)

    def init(self, info: dict[str, Any]) -> None:
        self.engine.init_transfer_engine(self.engine.parse_init_info(info))

    def start(self) -> None:
        assert not self.active, "start_weight_update called while a weight update is already active"
        self.engine.start_weight_update()
        self.active = True

    def update(self, info: dict[str, Any]) -> None:
        assert self.active, "start_weight_update must be called before update_weights"
        try:
            self.engine.update_weights(info)
        except BaseException:
            self.active = False
            raise

    def finish(self) -> None:
        assert self.active, "finish_weight_update called without a matching start_weight_update"
        self.engine.finish_weight_update()
        self.active = False


class WithKeywords(Worker):
    """The same shape, given by name."""

    def build(self) -> Any:
        config = SimpleNamespace(parallel_config=SimpleNamespace(world_size=1), model_config=None)
        return WeightSyncTransferEngine(object(), vllm_config=config, device=torch.device("cpu"), model=self.model)


class Callback(Worker):
    """A release whose worker brackets the load itself and hands the backend a function to load with."""

    def build(self) -> Any:
        return WeightSyncTransferEngine(object(), SimpleNamespace(world_size=1))

    def start(self) -> None:
        assert not self.active, "start_weight_update called while a weight update is already active"
        self.active = True  # and so it stays when an update fails

    def update(self, info: dict[str, Any]) -> None:
        assert self.active
        typed = self.engine.parse_update_info(info)
        assert not typed.is_checkpoint_format
        model = self.model

        def load_weights_direct(weights: list[tuple[str, torch.Tensor]]) -> None:
            for name, weight in weights:
                model.get_parameter(name).copy_(weight)

        self.engine.receive_weights(typed, load_weights=load_weights_direct)

    def finish(self) -> None:
        self.active = False


class CallbackAndModel(Callback):
    """The same, with the model for a third argument, and its bound loader."""

    def build(self) -> Any:
        return WeightSyncTransferEngine(object(), SimpleNamespace(world_size=1), self.model)

    def update(self, info: dict[str, Any]) -> None:
        self.engine.receive_weights(self.engine.parse_update_info(info), load_weights=self.model.load_weights)


class LocalApi:
    """vLLM's calls on one stand-in worker."""

    name = "stand-in"

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._paused = False
        self.version = "default"

    def world_size(self, *, timeout_s: float) -> int:
        return 1

    def is_paused(self, *, timeout_s: float) -> bool:
        return self._paused

    def weight_version(self, *, timeout_s: float) -> str | None:
        return self.version

    def set_weight_version(self, version: str, *, timeout_s: float) -> None:
        self.version = version

    def init_engine(self, info: dict[str, Any], *, timeout_s: float) -> None:
        self._told(lambda: self._worker.init(json.loads(json.dumps(info))))

    def start_update(self, *, timeout_s: float) -> None:
        self._told(self._worker.start)

    def update(self, info: dict[str, Any], *, timeout_s: float) -> None:
        self._told(lambda: self._worker.update(json.loads(json.dumps(info))))

    def finish_update(self, version: str | None, *, timeout_s: float) -> None:
        self._told(self._worker.finish)
        self.version = version or self.version

    def pause(self, mode: str, *, clear_cache: bool, timeout_s: float) -> None:
        self._paused = True

    def resume(self, *, timeout_s: float) -> None:
        self._paused = False

    def reset_prefix_cache(self, *, timeout_s: float) -> bool:
        return True

    def close(self) -> None: ...

    @staticmethod
    def _told(step: Callable[[], None]) -> None:
        try:
            step()
        except Exception as error:
            raise error_of(f"Worker failed with error '{error}'", "failed", peer="stand-in") from error


GENERATIONS: dict[str, type[Worker]] = {
    "config, vllm_config, device, model": Worker,
    "config, vllm_config=, device=, model=": WithKeywords,
    "config, parallel_config": Callback,
    "config, parallel_config, model": CallbackAndModel,
}


def sync_twice(kind: type[Worker]) -> dict[str, Any]:
    """Syncs two versions; in between, one that fails in a chunk and one that lacks a tensor. How each went."""
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    model, trained = Net(1), Net(2)
    record_metadata_for_reloading(model)
    worker = kind(model)
    api = LocalApi(worker)
    extractor: Any = ModuleWeightExtractor(trained, chunk_bytes=100)
    push = PushSync(
        extractor, VllmEngine(api, engine_id="vllm"), transfer_timeout_s=10, join_timeout_s=5, pause_timeout_s=5
    )
    push.initialize()
    push.sync_weights(1)
    first = _same(model, trained)
    trained.load_state_dict(Net(3).state_dict())
    fails = worker.engine._loader.load_weights
    worker.engine._loader.load_weights = lambda updates: 1 / 0
    try:
        push.sync_weights(2)
        failed = "nothing"
    except Exception as error:
        failed = str(error)
    worker.engine._loader.load_weights = fails
    kept = not _same(model, trained)
    whole = extractor.metadata
    extractor.metadata = lambda dtype: tuple(spec for spec in whole(dtype) if spec.name != "down.weight")
    extract = extractor.extract_weights
    extractor.extract_weights = lambda dtype: (chunk for chunk in extract(dtype) if "down.weight" not in chunk.names)
    try:
        push.sync_weights(3)
        partial = "nothing"
    except Exception as error:
        partial = str(error)
    extractor.metadata, extractor.extract_weights = whole, extract
    report = push.sync_weights(4)
    return {
        "first": first, "failed": failed, "kept": kept, "partial": partial, "second": _same(model, trained),
        "version": api.version == str(report.version), "active": worker.active,
    }  # fmt: skip


def _same(model: Net, trained: Net) -> bool:
    return all(
        torch.equal(a, b) for a, b in zip(model.state_dict().values(), trained.state_dict().values(), strict=True)
    )


def main() -> None:
    """Runs them all."""
    torch.set_num_threads(1)
    told = {name: sync_twice(kind) for name, kind in GENERATIONS.items()}
    sys.stdout.write(f"\nRESULT {json.dumps(told)}\n")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
