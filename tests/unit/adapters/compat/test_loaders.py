"""A document's loader that keeps the tensors it is given: they are its own, and the next version never shows early.
Deadlines are the config's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from weightsync.adapters.compat.engines import ActorEngine, InferenceEngineClient
from weightsync.adapters.compat.extractors import WeightChunk
from weightsync.adapters.compat.loaders import VLLMWeightLoader, WeightLoader
from weightsync.adapters.compat.sender import CudaIpcTransferSender
from weightsync.adapters.compat.strategy import CudaIpcTransferStrategy
from weightsync.errors import ConfigError, StateError, SyncFailedError
from weightsync.load import vllm
from weightsync.testing.contracts import manifest_of
from weightsync.types import Deadline, DescribeRequest, EngineOp, Full, InitRequest, Version


class Assigns(WeightLoader):
    def __init__(self) -> None:
        self.model = nn.Linear(4, 4, bias=False)
        self.fails = False

    async def load_weights(self, named_tensors: Mapping[str, torch.Tensor]) -> None:  # type: ignore[override]
        if self.fails:
            raise RuntimeError("injected")
        self.model.load_state_dict(named_tensors, assign=True)

    @property
    def live(self) -> float:
        return self.model.weight[0, 0].item()


class AssignsPairs(Assigns):
    async def load_weights(self, receiver: AsyncIterator[tuple[str, torch.Tensor]], request: Any) -> None:  # type: ignore[override]
        async for name, tensor in receiver:
            getattr(self.model, name).data = tensor


class AssignsPlainly(Assigns):
    def load_weights(self, named_tensors: Mapping[str, torch.Tensor]) -> None:  # type: ignore[override]
        self.model.load_state_dict(named_tensors, assign=True)


class AssignsPairsPlainly(Assigns):
    def load_weights(self, receiver: AsyncIterator[tuple[str, torch.Tensor]], request: Any) -> None:  # type: ignore[override]
        async def pairs() -> dict[str, torch.Tensor]:
            return {name: tensor async for name, tensor in receiver}

        self.model.load_state_dict(asyncio.run(pairs()), assign=True)


def stage(loader: WeightLoader, number: int) -> Version:
    tensors = {"weight": torch.full((4, 4), float(number))}
    loader._loader.begin(manifest_of(tensors, number))
    loader._loader.load_weights(Full(name=name, tensor=tensor) for name, tensor in tensors.items())
    loader._loader.verify()
    return manifest_of(tensors, number).version


@pytest.mark.parametrize("kind", [Assigns, AssignsPairs])
def test_a_version_that_is_only_staged_is_not_live(kind: type[Assigns]) -> None:
    """Seen red with the host memory of one version used for the next."""
    loader = kind()
    for number in (1, 2):
        loader._loader.commit(stage(loader, number))
        assert loader.live == number
        stage(loader, number + 10)
        assert loader.live == number
        loader._loader.abort("the trainer died")
        assert (loader.live, loader._loader.healthy) == (number, True)


def test_a_commit_that_failed_is_not_tried_again() -> None:
    """What it gave is gone. Seen red with the proof kept."""
    loader = Assigns()
    version = stage(loader, 1)
    loader.fails = True
    with pytest.raises(RuntimeError, match="injected"):
        loader._loader.commit(version)
    loader.fails = False
    with pytest.raises(StateError):
        loader._loader.commit(version)
    assert not loader._loader.healthy


@pytest.mark.parametrize("kind", [AssignsPlainly, AssignsPairsPlainly])
def test_a_loader_need_not_be_a_coroutine(kind: type[Assigns]) -> None:
    """Seen red: its weights were in, then None was awaited, and the engine fenced."""
    loader = kind()
    loader._loader.commit(stage(loader, 1))
    assert (loader.live, loader._loader.healthy) == (1, True)


class Recorded:
    """In place of what is called: for how long it may take."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def call(self, op: Any, request: Any, *, timeout_s: float) -> None:
        self.seconds.append(timeout_s)

    def receive_weights(self, request: Any, *, deadline: Deadline) -> Iterator[Any]:
        self.seconds.append(deadline.remaining_s)
        return iter(())

    def release(self, request: Any) -> None: ...


@pytest.mark.parametrize("of_call", [False, True])
def test_a_step_and_a_chunk_have_the_configs_deadline(of_call: bool) -> None:
    """Of the strategy's config, or of the one that `create_receiver` is given. Seen red: 300 s, whatever was said."""
    short, long = ({"transfer": {"transfer_timeout_s": each, "join_timeout_s": 0.1}} for each in (0.2, 50.0))
    strategy = CudaIpcTransferStrategy(long if of_call else short)
    cfg, recorded, loader = short if of_call else None, Recorded(), Assigns()
    loader.__dict__["serving"] = recorded

    class Silent:
        """A Ray actor that makes its receiver and then answers nothing."""

        def __init__(self) -> None:
            made: Future[None] = Future()
            made.set_result(None)
            self.initialize_weight_sync, self.update_named_weights = Method(made), Method(Future())

    async def job() -> None:
        info = await strategy.create_init_info()
        receiver = await strategy.create_receiver(cfg, info, 1)
        loader.step(DescribeRequest(), receiver)
        receiver._ours = recorded  # type: ignore[assignment]
        sender = CudaIpcTransferSender()
        request = sender.create_request(WeightChunk(names=["a"], tensors=[torch.ones(1)]))
        assert [pair async for pair in receiver.receive_weights(request)] == []
        client = InferenceEngineClient([Silent()])
        await client.initialize_weight_sync(strategy, info, cfg)
        try:
            await client.update_named_weights(request)
        finally:
            await sender.close()

    with pytest.raises(SyncFailedError, match=r"no answer to update_named_weights within 0\.2 s"):
        asyncio.run(job())
    assert [seconds <= 0.2 for seconds in recorded.seconds] == [True, True]


class Method:
    """A method of a Ray actor's handle."""

    def __init__(self, answer: Future[Any]) -> None:
        self._answer = answer

    def __call__(self) -> Any:
        raise TypeError("Ray's are called by remote()")

    def remote(self, *_: Any, **__: Any) -> Method:
        return self

    def future(self) -> Future[Any]:
        return self._answer


def test_what_vllm_has_cached_of_the_old_weights_is_dropped_at_a_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the engine has a call for it, or one is given; where it refuses, nothing is loaded. Seen red: nobody was
    asked to."""
    log: list[str] = []
    monkeypatch.setattr(vllm.VLLMWeightLoader, "commit", lambda self, version: log.append("commit"))
    version = Version(run_id="r", number=1)

    class Loads(nn.Linear):
        def load_weights(self, pairs: Any) -> None: ...

    class Engine:
        model = Loads(2, 2)

        def __init__(self, answer: Any) -> None:
            self.answer = answer

        def reset_prefix_cache(self) -> Any:
            log.append("drop")
            return self.answer

    class AsyncEngine(Engine):
        async def reset_prefix_cache(self) -> Any: ...

    for answer in (True, None):
        VLLMWeightLoader(Engine(answer)).ours().commit(version)
    VLLMWeightLoader(AsyncEngine(True), drop_cache=Engine(True).reset_prefix_cache).ours().commit(version)
    assert log == ["drop", "commit"] * 3
    log.clear()
    VLLMWeightLoader(AsyncEngine(True)).ours().commit(version)
    VLLMWeightLoader(SimpleNamespace(model=Engine.model)).ours().commit(version)
    assert log == ["commit"] * 2
    log.clear()
    with pytest.raises(StateError, match="did not drop its prefix cache"):
        VLLMWeightLoader(Engine(False)).ours().commit(version)
    assert log == ["drop"]


def test_an_actor_that_makes_its_model_yet_is_described_all_the_same() -> None:
    """It is asked for its workers again before it joins. Seen red: the set-up failed."""

    class Busy:
        def __call__(self) -> int:
            raise AssertionError("it is a Ray actor's")

        def remote(self) -> Any:
            return SimpleNamespace(future=Future)

    engine = ActorEngine(SimpleNamespace(update_weights=print, world_size=Busy()), engine_id="actor-0")
    assert engine.call(EngineOp.DESCRIBE, DescribeRequest(), timeout_s=0.2).world_size == 1


def test_a_coroutine_drops_no_cache() -> None:
    """Seen red: it was never awaited, and answers went on with prefixes of the old weights."""

    async def drop() -> None: ...

    with pytest.raises(ConfigError, match="a coroutine would drop nothing"):
        VLLMWeightLoader(SimpleNamespace(), drop_cache=drop)


def test_joining_has_the_configs_time_to_join() -> None:
    """Seen red: it had the transfer's, and the receiver gave up before its trainer."""
    strategy, recorded, loader = CudaIpcTransferStrategy(), Recorded(), Assigns()
    loader.__dict__["serving"] = recorded
    cfg = {"transfer": {"transfer_timeout_s": 0.2, "join_timeout_s": 50.0}}

    async def steps() -> None:
        info = await strategy.create_init_info()
        receiver = await strategy.create_receiver(cfg, info, 1)
        loader.step(InitRequest(run_id="r", model_id="m", info=info, rank_offset=1), receiver)
        loader.step(DescribeRequest(), receiver)

    asyncio.run(steps())
    assert recorded.seconds == [50.0, 0.2]
