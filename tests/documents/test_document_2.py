"""The migration plan: the code of its four phases as it stands, imports aside. `test_ranks.py` has it on ranks."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from types import SimpleNamespace
from typing import Any, AsyncIterator, Dict, Iterator, List, Tuple

import pytest
import torch
import torch.distributed
from torch.overrides import TorchFunctionMode

from tests.documents.kit import Model, bytes_of, config, run, step
from tests.standins.processes import free_port, run_ranks
from weightsync.adapters.compat import skyrl
from weightsync.adapters.compat.skyrl import (
    BroadcastTransferStrategy,
    BroadcastWeightTransferReceiver,
    BroadcastWeightTransferSender,
    BroadcastWeightUpdateRequest,
    CudaIpcTransferStrategy,
    CudaIpcWeightTransferSender,
    EmptyWeightSyncInitInfo,
    InferenceEngine,
    InferenceEngineClient,
    MegatronWeightExtractor,
    PackedCudaIpcTransferStrategy,
    PackedCudaIpcWeightTransferSender,
    SGLangWeightLoader,
    TorchDistributedWeightSyncInitInfo,
    WeightChunk,
    WeightExtractor,
    WeightLoader,
    WeightSyncInitInfo,
    WeightTransferStrategy,
    WeightUpdateRequest,
    init_custom_process_group,
    parse_dtype,
)
from weightsync.errors import ConfigError, GroupJoinError, InvalidRequestError, StateError

# Phase 1: extraction


def full_tensor(param: Any, *_: Any) -> torch.Tensor:
    """The plan's "existing FSDP gathering logic"."""
    return param.full_tensor() if hasattr(param, "full_tensor") else param.detach()


class FSDPWeightExtractor(WeightExtractor):
    """Extracts weights from FSDP-sharded models."""

    def __init__(self, cfg, model):
        super().__init__(cfg, model)
        # Preserve module grouping for FlashRL
        self._group_by_module = cfg.generator.get("use_flashrl", False)

    def _extract_raw_weights(self, model) -> Iterator[WeightChunk]:
        """Wrap existing full_tensor() + DTensor conversion logic."""
        for name, param in model.named_parameters():
            # Existing FSDP gathering logic
            tensor = full_tensor(param, ...)  # Simplified
            dtype_str = str(tensor.dtype)
            shape = list(tensor.shape)

            yield WeightChunk(
                names=[name],
                dtypes=[dtype_str],
                shapes=[shape],
                tensors=[tensor],
                total_size_bytes=tensor.numel() * tensor.element_size(),
            )

    def _group_by_module_impl(self, chunks: Iterator[WeightChunk]) -> Iterator[WeightChunk]:
        """Override for FSDP-specific QKV grouping."""
        # Group q_proj, k_proj, v_proj into single chunk
        buffer = []
        for chunk in chunks:
            buffer.append(chunk)
            if self._should_flush_group(buffer):
                yield self._merge_chunks(buffer)
                buffer = []
        if buffer:
            yield self._merge_chunks(buffer)


class ExampleMegatron(WeightExtractor):
    """Extracts weights from Megatron model-parallel models."""

    def __init__(self, cfg, model):
        super().__init__(cfg, model)
        # Preserve batching for packing optimization
        self._batch_by_threshold = True

    def _extract_raw_weights(self, model) -> Iterator[WeightChunk]:
        """Wrap existing export_hf_weights() logic."""
        hf_weights = export_hf_weights(model, ...)  # Existing function
        for name, tensor in hf_weights.items():
            yield WeightChunk(
                names=[name],
                dtypes=[str(tensor.dtype)],
                shapes=[list(tensor.shape)],
                tensors=[tensor],
                total_size_bytes=tensor.numel() * tensor.element_size(),
            )


def export_hf_weights(model: Any, *_: Any) -> Dict[str, torch.Tensor]:
    return {f"hf.{name}": param.detach() for name, param in model.named_parameters()}


GatheredParameters: Any = None  # deepspeed.zero's, in the test that has DeepSpeed


class DeepSpeedWeightExtractor(WeightExtractor):
    """Extracts weights from DeepSpeed ZeRO-sharded models."""

    def __init__(self, cfg, model):
        super().__init__(cfg, model)
        # Preserve module grouping for FlashRL
        self._group_by_module = cfg.generator.get("use_flashrl", False)

    def _extract_raw_weights(self, model) -> Iterator[WeightChunk]:
        """Wrap existing GatheredParameters logic."""
        with GatheredParameters(model.parameters(), modifier_rank=0):
            for name, param in model.named_parameters():
                yield WeightChunk(
                    names=[name],
                    dtypes=[str(param.dtype)],
                    shapes=[list(param.shape)],
                    tensors=[param],
                    total_size_bytes=param.numel() * param.element_size(),
                )


def held(chunks: Any) -> Dict[str, torch.Tensor]:
    return {name: tensor for chunk in chunks for name, tensor in zip(chunk.names, chunk.tensors, strict=True)}


@pytest.mark.parametrize("use_flashrl", [False, True])
def test_the_fsdp_example_yields_chunks_with_their_metadata(use_flashrl: bool) -> None:
    """Seen red with `_should_flush_group` that always flushes."""
    model = Model()
    extractor = FSDPWeightExtractor(config(use_flashrl=use_flashrl), model=model)
    extractor._batch_by_threshold = False
    chunks = list(extractor.extract_weights(model))
    assert {name: tensor.numpy().tobytes() for name, tensor in held(chunks).items()} == bytes_of(model)
    assert all(chunk.total_size_bytes == sum(tensor.nbytes for tensor in chunk.tensors) for chunk in chunks)
    together = [chunk.names for chunk in chunks if "layers.0.self_attn.q_proj.weight" in chunk.names]
    assert [len(names) for names in together] == [5 if use_flashrl else 1]
    assert chunks[0].module_name == ("layers.0.self_attn" if use_flashrl else None)


def test_the_megatron_example_packs_small_tensors_into_chunks() -> None:
    extractor = ExampleMegatron(config(weight_transfer_threshold_cuda_ipc_GB=600 / 2**30), Model())
    chunks = list(extractor.extract_weights(extractor.model))
    assert len(chunks) < len(list(extractor.model.parameters()))
    assert all(chunk.total_size_bytes <= 600 for chunk in chunks)
    assert list(held(chunks)) == [f"hf.{name}" for name, _ in extractor.model.named_parameters()]


def test_the_deepspeed_example_reads_inside_its_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """The context is open when the first tensor is read, and closed behind the last."""
    told: List[Any] = []

    @contextlib.contextmanager
    def gathered(parameters: Any, modifier_rank: int) -> Iterator[None]:
        told.append(len(list(parameters)))
        yield
        told.append("freed")

    monkeypatch.setitem(globals(), "GatheredParameters", gathered)
    model = Model()
    extractor = DeepSpeedWeightExtractor(config(), model)
    found = held(extractor.extract_weights(model))
    assert all(torch.equal(found[name], parameter) for name, parameter in model.named_parameters())
    assert told == [len(list(model.parameters())), "freed"]


class LegacyWorker:
    def __init__(self, cfg: Any, model: Any) -> None:
        self.cfg, self.model = cfg, model

    async def broadcast_to_inference_engines(self, inference_engine_client):
        extractor = FSDPWeightExtractor(self.cfg, model=self.model)
        chunks = list(extractor.extract_weights(self.model))

        # Continue with old sending logic (convert chunks to NamedWeightsUpdateRequest)
        request = self._chunks_to_legacy_request(chunks)
        await inference_engine_client.update_weights(**request)

    def _chunks_to_legacy_request(self, chunks: List[WeightChunk]) -> Dict:
        """Convert chunks to legacy NamedWeightsUpdateRequest format."""
        names, dtypes, shapes = [], [], []
        for chunk in chunks:
            names.extend(chunk.names)
            dtypes.extend(chunk.dtypes)
            shapes.extend(chunk.shapes)
        return {"names": names, "dtypes": dtypes, "shapes": shapes}


def test_the_legacy_request_is_the_metadata_and_the_legacy_call_is_gone() -> None:
    """Phase 4 deletes `update_weights(names, dtypes, shapes)`: names without a sender move nothing, and it says so."""
    model = Model()
    chunks = FSDPWeightExtractor(config(), model).extract_weights(model)
    specs = chunks.specs
    assert LegacyWorker(config(), model)._chunks_to_legacy_request(list(chunks)) == {
        "names": [spec.name for spec in specs],
        "dtypes": [spec.dtype for spec in specs],
        "shapes": [spec.shape for spec in specs],
    }
    client = InferenceEngineClient([InferenceEngine(SGLangWeightLoader(Model(2)))])
    with pytest.raises(ConfigError, match="names alone move nothing"):
        run(LegacyWorker(config(), model).broadcast_to_inference_engines(client))
    assert not hasattr(client, "update_weights_cuda_ipc")
    assert not hasattr(skyrl, "NamedWeightsUpdateRequest")


# Phase 2: loading and receiving


class ExampleLoader(WeightLoader):  # the plan's `VLLMWeightLoader(WeightLoader)`
    """Loads weights into vLLM engine."""

    def __init__(self, engine):
        self.engine = engine

    async def load_weights(self, receiver: AsyncIterator[Tuple[str, torch.Tensor]], request: Dict) -> None:
        """Pull weights from receiver and apply to vLLM model."""
        async for name, tensor in receiver:
            # Preserve multi-param chunk handling for FlashRL
            if isinstance(name, list):
                # Grouped params (e.g., QKV fusion)
                for n, t in zip(name, tensor):
                    self.engine.worker.model.load_weights([(n, t)])
            else:
                # Single param
                self.engine.worker.model.load_weights([(name, tensor)])


class Phase2Engine:
    def __init__(self, engine: Any, group: Any) -> None:
        self.engine, self._model_update_group = engine, group

    async def _receive_weights_broadcast(self, request: Dict):
        """Async generator yielding (name, tensor) tuples via broadcast."""
        for name, dtype_str, shape in zip(request["names"], request["dtypes"], request["shapes"]):
            tensor = torch.empty(shape, dtype=parse_dtype(dtype_str), device="cuda")
            torch.distributed.broadcast(tensor, src=0, group=self._model_update_group)
            yield name, tensor

    async def update_weights(self, names, dtypes, shapes):
        request = {"names": names, "dtypes": dtypes, "shapes": shapes}
        loader = ExampleLoader(self.engine)
        receiver = self._receive_weights_broadcast(request)
        await loader.load_weights(receiver, request)


class OnCpu(TorchFunctionMode):
    """`device="cuda"` where there is none."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


def broadcast_and_load(rank: int, world_size: int) -> Any:
    """Rank 0 broadcasts tensor by tensor; rank 1 runs the plan's engine."""
    model = Model(1 if rank == 0 else 2)
    if rank == 0:
        for parameter in model.parameters():
            torch.distributed.broadcast(parameter.data, src=0)
        return bytes_of(model)
    named = dict(Model(1).named_parameters())
    engine = Phase2Engine(SimpleNamespace(worker=SimpleNamespace(model=model)), torch.distributed.group.WORLD)
    with OnCpu():
        asyncio.run(
            engine.update_weights(
                list(named), [str(each.dtype) for each in named.values()], [list(each.shape) for each in named.values()]
            )
        )
    return bytes_of(model)


def test_the_phase_2_engine_loads_what_a_peer_broadcasts() -> None:
    sent, loaded = run_ranks(broadcast_and_load, 2)
    assert sent == loaded


def test_the_example_loader_takes_pairs_and_groups() -> None:
    trained, served = Model(1), Model(2)

    async def grouped() -> AsyncIterator[Tuple[Any, Any]]:
        named = dict(trained.named_parameters())
        together = [name for name in named if "self_attn" in name]
        yield together, [named[name] for name in together]
        for name in named.keys() - set(together):
            yield name, named[name]

    run(ExampleLoader(SimpleNamespace(worker=SimpleNamespace(model=served))).load_weights(grouped(), {}))
    assert bytes_of(served) == bytes_of(trained)
    again = Model(2)
    run(SGLangWeightLoader(again).load_weights(grouped(), {}))
    assert bytes_of(again) == bytes_of(trained)


def test_the_example_loader_takes_part_in_a_push() -> None:
    """It is called once a version, with all of it: the plan's way through our bracket."""
    trained, served = Model(1), Model(2)
    actor = InferenceEngine(ExampleLoader(SimpleNamespace(worker=SimpleNamespace(model=served))))

    async def job() -> None:
        client, strategy = InferenceEngineClient([actor]), BroadcastTransferStrategy()
        await client.initialize_weight_sync(strategy, await strategy.create_init_info())
        sender = await strategy.create_sender()
        before = bytes_of(served)
        await sender.send_chunks(FSDPWeightExtractor(config(), trained).extract_weights(trained))
        assert bytes_of(served) == before, "nothing moves before the engines are told"
        await client.update_weights(sender.get_request())
        await sender.close()

    run(job())
    assert bytes_of(served) == bytes_of(trained)


# Phase 3: sending


class Phase3Worker:
    def __init__(self, cfg: Any, model: Any, group: Any = None) -> None:
        self.cfg, self.model, self._model_update_group = cfg, model, group
        self.extractor = self._create_extractor()

    def _create_extractor(self) -> Any:
        if self.cfg.trainer.training_backend == "megatron":
            return MegatronWeightExtractor(self.cfg, self.model, bridge=Bridge())
        return FSDPWeightExtractor(self.cfg, self.model)

    async def broadcast_to_inference_engines(self, inference_engine_client):
        # Phase 1: extraction with grouping/batching
        extractor = self._create_extractor()
        chunks = extractor.extract_weights(self.model)

        # Phase 3: sending
        if self.cfg.generator.weight_sync_backend == "nccl":
            sender = BroadcastWeightTransferSender(process_group=self._model_update_group)
        else:
            sender = self._create_cuda_ipc_sender()  # To be implemented in PR #3b

        await sender.send_chunks(chunks)
        request = sender.get_request()  # Legacy format

        # Old coordination
        await inference_engine_client.update_weights(**request)

    def _create_cuda_ipc_sender(self):
        if self.cfg.generator.pack_weights and isinstance(self.extractor, MegatronWeightExtractor):
            return PackedCudaIpcWeightTransferSender()
        else:
            return CudaIpcWeightTransferSender()


class Bridge:
    """What exports Megatron's weights: here the module's own."""

    def export_hf_weights(self, models: Any, cpu: bool, show_progress: bool) -> Iterator[Tuple[str, torch.Tensor]]:
        for model in models:
            yield from ((name, parameter.detach()) for name, parameter in model.named_parameters())


@pytest.mark.parametrize(
    ("cfg", "strategy"),
    [
        (config(weight_sync_backend="cuda_ipc", pack_weights=False), CudaIpcTransferStrategy()),
        (config(weight_sync_backend="cuda_ipc", pack_weights=True), CudaIpcTransferStrategy()),
        (
            config(weight_sync_backend="cuda_ipc", pack_weights=True, training_backend="megatron"),
            PackedCudaIpcTransferStrategy(),
        ),
    ],
)
def test_the_phase_3_worker_sends_by_the_sender_that_it_selects(cfg: Any, strategy: Any) -> None:
    """Megatron packs, others don't; engines get the bytes after `update_weights(**request)`.

    Seen red with a request that has lost its sender.
    """
    trained, served = Model(1), Model(2)
    actor = InferenceEngine(SGLangWeightLoader(served))
    worker = Phase3Worker(cfg, trained)
    assert type(worker._create_cuda_ipc_sender()).name == strategy.name

    async def job() -> None:
        client = InferenceEngineClient([actor])
        await client.initialize_weight_sync(strategy, EmptyWeightSyncInitInfo(strategy=strategy.name, group_name="g"))
        await worker.broadcast_to_inference_engines(client)

    run(job())
    assert bytes_of(served) == bytes_of(trained)
    assert actor.loader.serving.version is not None


def test_the_phase_3_worker_broadcasts_by_its_process_group() -> None:
    """A group that both sides joined by hand is the one that the bytes go through."""
    trained, served, port = Model(1), Model(2), free_port()
    actor = InferenceEngine(SGLangWeightLoader(served))

    async def job() -> None:
        strategy, client = BroadcastTransferStrategy(), InferenceEngineClient([actor])
        common = ("127.0.0.1", port, 2)
        group, joined = await asyncio.gather(
            asyncio.to_thread(init_custom_process_group, *common, 0, "by-hand", "gloo"),
            asyncio.to_thread(init_custom_process_group, *common, 1, "by-hand", "gloo"),
        )
        actor.receiver = BroadcastWeightTransferReceiver(joined)
        sender = BroadcastWeightTransferSender(process_group=group)
        await sender.send_chunks(FSDPWeightExtractor(config(), trained).extract_weights(trained))
        request = sender.get_request()
        await client.update_weights(**request)
        assert sender._push is not None
        assert sender._push._engines.group._name == "by-hand"
        assert strategy.get_request_type() is BroadcastWeightUpdateRequest
        await sender.close()

    run(job())
    assert bytes_of(served) == bytes_of(trained)


def test_a_sender_without_chunks_says_so() -> None:
    with pytest.raises(StateError, match="send_chunks"):
        BroadcastWeightTransferSender().get_request()


# Phase 4: strategies and coordination


class ray:
    """`ray.get`, where actors are objects."""

    @staticmethod
    def get(awaited: Any) -> Any:
        return asyncio.run(awaited)


class Phase4Trainer:
    def __init__(self, cfg: Any, worker: Any, client: Any) -> None:
        self.cfg, self.inference_engine_client = cfg, client

        class Policy:
            def async_run_ray_method(self, dispatch: str, method: str, *args: Any) -> Any:
                return getattr(worker, method)(*args)

        self.policy_model = Policy()

    def _create_strategy(self) -> WeightTransferStrategy:
        """Factory based on config."""
        if self.cfg.generator.weight_sync_backend == "nccl":
            return BroadcastTransferStrategy(...)
        elif self.cfg.generator.weight_sync_backend == "cuda_ipc":
            if self.cfg.generator.pack_weights and self.cfg.trainer.training_backend == "megatron":
                return PackedCudaIpcTransferStrategy(...)
            return CudaIpcTransferStrategy(...)

    def init_weight_sync_state(self):
        strategy = self._create_strategy()

        # Training actors: create sender and init info
        sync_info = ray.get(self.policy_model.async_run_ray_method("pass_through", "initialize_weight_sync", strategy))

        # Inference actors: create receiver with init info
        ray.get(self.inference_engine_client.initialize_weight_sync(strategy, sync_info))


class Phase4Worker:
    def __init__(self, cfg: Any, model: Any) -> None:
        self.cfg, self.model = cfg, model

    def _create_extractor(self) -> Any:
        return Phase3Worker(self.cfg, self.model).extractor

    async def initialize_weight_sync(self, strategy: WeightTransferStrategy):
        """Called at startup; all ranks participate."""
        # Rank 0 creates init info
        if torch.distributed.get_rank() == 0:
            sync_info = await strategy.create_init_info(...)
        else:
            sync_info = None

        # All ranks create sender (for process group participation)
        self.sender = await strategy.create_sender(...)
        self.extractor = self._create_extractor()  # From Phase 1

        return sync_info

    async def broadcast_to_inference_engines(self, inference_engine_client):
        """Simplified - components already created."""
        chunks = self.extractor.extract_weights(self.model)  # Grouping/batching already applied
        await self.sender.send_chunks(chunks)
        request = self.sender.get_request()  # Now typed

        # New coordination
        await inference_engine_client.update_weights(request)


class Phase4Engine:
    def __init__(self, model: Any) -> None:
        self.model = model

    def _create_loader(self) -> Any:
        return SGLangWeightLoader(self.model)

    async def initialize_weight_sync(self, strategy: WeightTransferStrategy, sync_info: WeightSyncInitInfo):
        """Called at startup."""
        self.receiver = await strategy.create_receiver(..., sync_info)
        self.loader = self._create_loader()  # From Phase 2

    async def update_weights(self, request: WeightUpdateRequest):
        """Simplified - loader drives receiver."""
        await self.loader.load_weights(self.receiver, request)


@pytest.mark.parametrize("backend", ["nccl", "cuda_ipc", "packed"])
def test_phase_4_end_to_end(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Controller, worker and engines as they stand, by each strategy; NCCL's name stands for gloo without a GPU."""
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    cfg = config(
        weight_sync_backend="cuda_ipc" if backend == "packed" else backend,
        pack_weights=backend == "packed",
        training_backend="megatron" if backend == "packed" else "fsdp",
        use_flashrl=backend == "cuda_ipc",
    )
    trained, served = Model(1), [Model(2), Model(3)]
    actors = [Phase4Engine(each) for each in served]
    worker, client = Phase4Worker(cfg, trained), InferenceEngineClient(actors)
    trainer = Phase4Trainer(cfg, worker, client)
    trainer.init_weight_sync_state()
    expected = {"nccl": "broadcast", "cuda_ipc": "cuda_ipc", "packed": "packed_cuda_ipc"}[backend]
    assert trainer._create_strategy().name == skyrl.create_strategy(cfg).name == expected
    for _ in range(2):
        step(trained)
        run(worker.broadcast_to_inference_engines(client))
        assert [bytes_of(each) for each in served] == [bytes_of(trained)] * 2
    announces = {
        "nccl": BroadcastWeightUpdateRequest,
        "cuda_ipc": skyrl.CudaIpcWeightUpdateRequest,
        "packed": skyrl.PackedCudaIpcWeightUpdateRequest,
    }[backend]
    assert trainer._create_strategy().get_request_type() is announces
    assert issubclass(announces, worker.sender._strategy.request_type)
    assert issubclass(worker.sender._strategy.request_type, WeightUpdateRequest)
    run(worker.sender.close())


@pytest.mark.parametrize("use_flashrl", [False, True])
def test_flashrls_grouped_chunks_are_sent(use_flashrl: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches are smaller than q, k and v together: each layer's are announced in one chunk with FlashRL, and without
    it in several. Seen red with an extractor that does not group."""
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    cfg = config(
        weight_sync_backend="cuda_ipc",
        pack_weights=False,
        use_flashrl=use_flashrl,
        weight_transfer_threshold_cuda_ipc_GB=300 / 2**30,
    )
    announced: List[set[str]] = []

    class Engine(Phase4Engine):
        async def update_weights(self, request):
            announced.append(set(request.get("names", ())))
            await super().update_weights(request)

    trained, served = Model(1), Model(2)
    worker, client = Phase4Worker(cfg, trained), InferenceEngineClient([Engine(served)])
    Phase4Trainer(cfg, worker, client).init_weight_sync_state()
    run(worker.broadcast_to_inference_engines(client))
    run(worker.sender.close())
    assert bytes_of(served) == bytes_of(trained)
    for layer in (0, 1):
        together = {f"layers.{layer}.self_attn.{name}_proj.weight" for name in "qkv"}
        assert [together <= names for names in announced].count(True) == int(use_flashrl)
        assert together <= set().union(*announced)


def test_the_request_is_typed_and_has_the_plans_fields() -> None:
    model = Model()
    sender = BroadcastWeightTransferSender()
    chunks = FSDPWeightExtractor(config(), model).extract_weights(model)
    run(sender.send_chunks(chunks))
    request = sender.get_request()
    assert (request.names, request.dtypes) == ([s.name for s in chunks.specs], ["float32"] * len(chunks.specs))
    assert request.shapes == [list(parameter.shape) for parameter in model.parameters()]


def test_init_info_carries_what_was_chosen_and_its_port_is_open() -> None:
    port = free_port()
    strategy = BroadcastTransferStrategy()
    info = run(strategy.create_init_info("127.0.0.1", port, 3, "weights", "gloo"))
    assert isinstance(info, TorchDistributedWeightSyncInitInfo)
    assert (info.master_addr, info.master_port, info.world_size) == ("127.0.0.1", port, 3)
    assert (info.group_name, info.backend) == ("weights", "gloo")
    with pytest.raises(GroupJoinError, match=f"port {port}"):
        run(strategy.create_init_info("127.0.0.1", port, 3, "weights", "gloo"))
    with pytest.raises(InvalidRequestError, match="mpi"):
        run(strategy.create_init_info("127.0.0.1", free_port(), 3, "weights", "mpi"))
    with pytest.raises(ConfigError, match="cuda_ipc"):
        run(CudaIpcTransferStrategy().create_receiver(sync_info=info, rank_offset=1))
    receiver = run(strategy.create_receiver(sync_info=info, rank_offset=1))
    assert (receiver._info, receiver._rank) == (info, 1)
    assert run(strategy.create_receiver(info, 2))._rank == 2


@pytest.mark.parametrize("said", ["master_port group_name", "master_addr master_port", "group_name backend"])
def test_init_info_takes_what_is_said_and_chooses_the_rest(said: str) -> None:
    """Seen red with arguments that are only read where an address is given."""
    every = {"master_addr": "127.0.0.1", "master_port": free_port(), "group_name": "mine", "backend": "gloo"}
    given = {name: every[name] for name in said.split()}
    info = run(BroadcastTransferStrategy().create_init_info(**given))
    assert {name: getattr(info, name) for name in given} == given
    assert (info.master_addr, info.backend) == ("127.0.0.1", "gloo")
    assert info.master_port > 1
    assert info.group_name
    with pytest.raises(ConfigError, match=f"no process group: leave out {', '.join(given)}"):
        run(CudaIpcTransferStrategy().create_init_info(**given))


def test_both_sides_meet_by_the_info_that_was_made() -> None:
    """Two engines, told one after the other; the info was made before anybody knew how many there are.

    Seen red with the world size of the info as it was made, with a store that was lost, and with ranks two apart.
    """
    trained, served = Model(1), [Model(2), Model(3)]

    async def job() -> None:
        client = InferenceEngineClient([InferenceEngine(SGLangWeightLoader(each)) for each in served])
        strategy = BroadcastTransferStrategy({"transfer": {"join_timeout_s": 5}})
        info = await strategy.create_init_info()
        sender = await strategy.create_sender(None, client, info)
        await client.initialize_weight_sync(strategy, info)
        await sender.send_chunks(FSDPWeightExtractor(config(), trained).extract_weights(trained), client)
        assert sender._push is not None
        assert sender._push._engines.group._name == info.group_name
        await sender.close()

    run(job())
    assert [bytes_of(each) for each in served] == [bytes_of(trained)] * 2


def test_the_argument_names_are_the_plans() -> None:
    """Every argument that the plan names, by its name."""
    names = {
        BroadcastTransferStrategy.create_init_info: "master_addr master_port world_size group_name backend",
        BroadcastTransferStrategy.create_receiver: "sync_info rank_offset",
        BroadcastTransferStrategy.create_sender: "process_group",
        BroadcastWeightTransferReceiver.receive_weights: "request",
        BroadcastWeightTransferSender: "process_group",
        BroadcastWeightTransferSender.send_chunks: "chunks",
        init_custom_process_group: "master_addr master_port world_size rank group_name backend",
        WeightExtractor: "cfg model",
        WeightExtractor.extract_weights: "model",
        WeightChunk: "names dtypes shapes tensors total_size_bytes",
    }
    for called, wanted in names.items():
        assert set(wanted.split()) <= set(inspect.signature(called).parameters), called
