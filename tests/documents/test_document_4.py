"""The call graph: its manager, its order of calls, and the two ways of initialising that it draws."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any, List

import msgspec
import pytest
import torch

from tests.documents.call_graph_actors import InferenceActor, TrainingActor
from tests.documents.kit import Model, bytes_of, config, run
from tests.standins.processes import free_port
from weightsync.adapters.compat.skyrl import (
    BroadcastTransferReceiver,
    BroadcastTransferSender,
    BroadcastTransferStrategy,
    CudaIpcTransferSender,
    CudaIpcTransferStrategy,
    FSDPWeightExtractor,
    InferenceEngine,
    InferenceEngineClient,
    PackedCudaIpcTransferSender,
    ProcessGroup,
    SGLangWeightLoader,
    WeightChunk,
    WeightExtractor,
    WeightLoader,
    WeightSyncManager,
    WeightTransferReceiver,
    WeightTransferSender,
    init_custom_process_group,
)
from weightsync.control.method import SyncMethod
from weightsync.errors import EngineError, StateError, SyncFailedError, WeightSyncError


@pytest.mark.parametrize("strategy", [BroadcastTransferStrategy(), CudaIpcTransferStrategy()])
def test_the_manager_calls_in_the_order_of_the_graph(strategy: Any) -> None:
    """Senders, receivers; then of each sync extraction, sending, loading. Seen red with senders left out."""
    log: List[str] = []
    trainer, actor = TrainingActor(1, log), InferenceActor(2, log)
    manager = WeightSyncManager([trainer], InferenceEngineClient([actor]), strategy, config())
    manager.initialize()
    assert log == ["create_sender", "create_receiver"]
    said = manager.sync_weights()
    assert log[2:4] == ["extract_weights", "send_weights"]
    assert set(log[4:]) == {"receive_and_load_weights"}
    assert said.endswith("proved")
    assert bytes_of(actor.model) == bytes_of(trainer.model)
    run(trainer.train())
    manager.sync_weights()
    assert bytes_of(actor.model) == bytes_of(trainer.model)
    assert run(actor.version()) == 2
    run(trainer.close())


def test_the_managers_steps_have_the_graphs_names() -> None:
    called: List[str] = []

    class Traced(WeightSyncManager):
        def _initialize_training_senders(self) -> Any:
            called.append("_initialize_training_senders")
            return super()._initialize_training_senders()

        def _initialize_inference_receivers(self, sync_info: Any) -> None:
            called.append("_initialize_inference_receivers")
            super()._initialize_inference_receivers(sync_info)

        def _trigger_training_sync(self) -> Any:
            called.append("_trigger_training_sync")
            return super()._trigger_training_sync()

    trainer = TrainingActor(1)
    manager = Traced([trainer], InferenceEngineClient([InferenceActor(2)]), BroadcastTransferStrategy(), config())
    manager.initialize()
    manager.sync_weights()
    run(trainer.close())
    assert called == ["_initialize_training_senders", "_initialize_inference_receivers", "_trigger_training_sync"]
    for step in ("initialize", "sync_weights"):  # as every method of a controller's
        assert callable(getattr(SyncMethod, step))


def test_both_ends_initialise_by_the_graphs_arguments() -> None:
    """`receiver.initialize(master_addr, ...)` gives the process group; `sender.initialize(client, group)` uses it."""
    trained, served, port = Model(1), Model(2), free_port()
    actor = InferenceEngine(SGLangWeightLoader(served))
    actor.receiver = receiver = BroadcastTransferReceiver()

    async def job() -> Any:
        group, joined = await asyncio.gather(
            asyncio.to_thread(init_custom_process_group, "127.0.0.1", port, 2, 0, "graph", "gloo"),
            receiver.initialize(
                master_addr="127.0.0.1",
                master_port=port,
                rank_offset=1,
                world_size=2,
                group_name="graph",
                backend="gloo",
            ),
        )
        assert isinstance(joined, ProcessGroup)
        assert (joined.group.rank, joined.info.group_name) == (1, "graph")
        inference_client, sender = InferenceEngineClient([actor]), BroadcastTransferSender()
        await sender.initialize(inference_client, process_group=group)
        weight_chunks = FSDPWeightExtractor(config()).extract_weights(trained, torch.float32)
        report = await sender.send_weights(weight_chunks, inference_client)
        assert sender._push is not None
        assert sender._push._engines.group._name == "graph", "the group that was joined by hand"
        await sender.close()
        return report

    report = run(job())
    assert report.digests_equal is True or report.unprovable == {}
    assert bytes_of(served) == bytes_of(trained)


def test_a_loader_is_given_the_request() -> None:
    """`loader.load_weights(request)`: what a receiver has parsed, once one has come; each step of it."""
    served, trained = Model(2), Model(1)

    class Actor(InferenceActor):
        async def update_named_weights(self, request_dict: Any) -> Any:
            request = self.receiver.parse_request(request_dict)
            if request_dict.get("op") == "init":
                return await self.receiver.receive_and_load_weights(request, self.loader)
            return msgspec.to_builtins(await self.loader.load_weights(request))

    actor = Actor(2)
    trainer = TrainingActor(1)
    manager = WeightSyncManager([trainer], InferenceEngineClient([actor]), BroadcastTransferStrategy(), config())
    manager.initialize()
    manager.sync_weights()
    run(trainer.close())
    assert bytes_of(actor.model) == bytes_of(trained) == bytes_of(trainer.model)
    lonely = SGLangWeightLoader(served)
    header = BroadcastTransferSender().create_request(WeightChunk(names=["a"], tensors=[torch.ones(1)]))
    with pytest.raises(StateError, match="no receiver"):
        run(lonely.load_weights(BroadcastTransferReceiver().parse_request(msgspec.to_builtins(header))))


def test_announcing_one_chunk_reaches_every_engine() -> None:
    """`update_named_weights(request)` by itself: outside of a sync an engine refuses it, in words."""
    actors = [InferenceActor(2), InferenceActor(3)]

    async def job() -> None:
        client, strategy = InferenceEngineClient(actors), CudaIpcTransferStrategy()
        await client.initialize_weight_sync(strategy, await strategy.create_sync_info(config(), client))
        sender = CudaIpcTransferSender()
        request = sender.create_request(WeightChunk(names=["a"], tensors=[torch.ones(1)]))
        try:
            await client.update_named_weights(request)
        finally:
            await sender.close()

    with pytest.raises(SyncFailedError, match="by itself"):
        run(job())
    assert {name for actor in actors for name in actor.log} == {"create_receiver", "receive_and_load_weights"}


def test_an_actor_that_fails_fails_the_sync() -> None:
    class Broken(InferenceActor):
        async def update_named_weights(self, request_dict: Any) -> Any:
            if "names" in request_dict:
                raise RuntimeError("out of memory")
            return await super().update_named_weights(request_dict)

    actor, trainer = Broken(2), TrainingActor(1)
    before = bytes_of(actor.model)
    manager = WeightSyncManager([trainer], InferenceEngineClient([actor]), BroadcastTransferStrategy(), config())
    manager.initialize()
    with pytest.raises(SyncFailedError) as caught:
        manager.sync_weights()
    assert isinstance(caught.value.causes["actor-0"], EngineError)
    assert "out of memory" in str(caught.value)
    assert bytes_of(actor.model) == before


def test_packed_headers_have_sizes_in_bytes() -> None:
    sender = PackedCudaIpcTransferSender()
    request: Any = sender.create_request(WeightChunk(names=["q", "k"], tensors=[torch.ones(4, 4), torch.ones(3)]))
    assert (request.sizes, len(request.handles)) == ((64, 12), 1)
    run(sender.close())


def test_the_argument_names_are_the_graphs() -> None:
    names = {
        WeightExtractor.extract_weights: "model generator_dtype",
        WeightTransferSender.initialize: "inference_client process_group",
        WeightTransferSender.send_weights: "weight_chunks inference_client",
        WeightTransferReceiver.initialize: "master_addr master_port rank_offset world_size group_name backend",
        WeightTransferReceiver.receive_and_load_weights: "request loader",
        WeightLoader.load_weights: "request",
        WeightChunk: "names tensors dtypes shapes module_name total_size_bytes packed",
    }
    for called, wanted in names.items():
        assert set(wanted.split()) <= set(inspect.signature(called).parameters), called


@pytest.mark.parametrize("by_info", [False, True])
def test_an_actor_of_several_workers_is_refused_in_words(by_info: bool) -> None:
    """A receiver is of one worker. Seen red: such an actor counted as one."""

    class Parallel(InferenceActor):
        size = 2

        async def world_size(self) -> int:
            return self.size

    actor, trainer = Parallel(2), TrainingActor(1)
    client, strategy = InferenceEngineClient([InferenceActor(3), actor]), BroadcastTransferStrategy()
    manager = WeightSyncManager([trainer], client, strategy, config())
    initialize: Any = manager.initialize
    if by_info:  # the plan's: engines are not asked before they make their receivers
        initialize = lambda: run(client.initialize_weight_sync(strategy, run(strategy.create_init_info())))  # noqa: E731
    with pytest.raises(WeightSyncError, match="actor-1 has 2 workers, and an actor under the documents' names has one"):
        initialize()
    assert "create_receiver" not in actor.log
    actor.size = 1
    manager.initialize()
    manager.sync_weights()
    assert bytes_of(actor.model) == bytes_of(trainer.model)
    run(trainer.close())
