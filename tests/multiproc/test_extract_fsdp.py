"""FSDPWeightExtractor on real ranks, compared bit by bit with the model before it was sharded."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from tests.standins.processes import run_ranks
from weightsync.config import WeightSyncConfig
from weightsync.errors import UnsupportedError
from weightsync.extract.base import WeightExtractor
from weightsync.extract.fsdp import FSDPWeightExtractor
from weightsync.extract.module import ModuleWeightExtractor
from weightsync.module_walk import module_tensors
from weightsync.tensors import byte_array
from weightsync.trainer.plan_cache import OffloadPlanCache
from weightsync.verbs.weights import extractor_from

Part = tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...], int, bytes]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(12, 12), nn.Linear(12, 12, bias=False)
        self.norm = nn.LayerNorm(12)
        self.v_proj = nn.Linear(12, 12)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.norm(self.v_proj(self.k_proj(self.q_proj(hidden))))


class Model(nn.Module):
    """Seven rows (uneven on 2 and 3 ranks), one row (empty shards), tied weights, buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 12)
        self.attn = Attention()
        self.norm = nn.BatchNorm1d(12)
        self.value = nn.Linear(12, 1)
        self.lm_head = nn.Linear(12, 7, bias=False)
        self.lm_head.weight = self.embed.weight
        self.register_buffer("rope", torch.ones(3), persistent=False)
        self.register_buffer("table", torch.arange(6).expand(2, 6))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.attn(self.embed(tokens).flatten(0, 1))
        return self.lm_head(hidden * self.norm.weight) + self.value(hidden)


def _model() -> Model:
    torch.manual_seed(7)
    return Model()


def _reference(model: nn.Module, dtype: str | None) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """What a whole model gives: dtype, shape and bytes by name; torch's own conversion of the whole tensor."""
    found = {}
    for name, tensor in module_tensors(model):
        whole = tensor.detach()
        if dtype is not None and whole.dtype in (torch.float32, torch.float64):
            whole = whole.to(getattr(torch, dtype))
        found[name] = (str(whole.dtype), tuple(whole.shape), byte_array(whole.contiguous()).tobytes())
    return found


def _extracted(extractor: WeightExtractor, dtype: str | None) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    found = {}
    order = []
    for chunk in extractor.extract_weights(dtype):
        for name, tensor in zip(chunk.names, chunk.tensors, strict=True):
            assert tensor.is_contiguous()
            assert not tensor.requires_grad
            assert not isinstance(tensor, DTensor)
            order.append((name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)))
            found[name] = (str(tensor.dtype), tuple(tensor.shape), byte_array(tensor).tobytes())
    assert order == [(spec.name, spec.dtype, spec.shape) for spec in extractor.metadata(dtype)]
    return found


def _parts(extractor: WeightExtractor, dtype: str | None) -> list[Part]:
    """This rank's shards, proved to need no communication."""
    with CommDebugMode() as communication:
        held = list(extractor.local_shards(dtype))
        extractor.metadata(dtype)
    assert communication.get_total_counts() == 0
    assert all(part.tensor.is_contiguous() for part in held)
    return [
        (
            part.spec.name,
            part.spec.shape,
            (0,) * len(part.spec.shape) if part.box is None else part.box.offset,
            tuple(part.tensor.shape),
            part.tensor.element_size(),
            byte_array(part.tensor).tobytes(),
        )
        for part in held
    ]


def _assembled(ranks: list[list[Part]]) -> dict[str, bytes]:
    """The tensors from all ranks' parts. Fails on a hole or an overlap."""
    memory: dict[str, torch.Tensor] = {}
    times: dict[str, torch.Tensor] = {}
    for name, shape, offset, extent, itemsize, raw in [part for rank in ranks for part in rank]:
        target = memory.setdefault(name, torch.zeros(*shape, itemsize, dtype=torch.uint8))
        count = times.setdefault(name, torch.zeros(shape, dtype=torch.int64))
        box = tuple(slice(start, start + size) for start, size in zip(offset, extent, strict=True))
        target[box] = torch.frombuffer(bytearray(raw) or bytearray(1), dtype=torch.uint8)[: len(raw)].view(
            *extent, itemsize
        )
        count[box] += 1
    assert all(count.eq(1).all() for count in times.values()), {name: c.tolist() for name, c in times.items()}
    return {name: whole.numpy().tobytes() for name, whole in memory.items()}


def _columns(parameter: nn.Parameter) -> Shard | None:
    return Shard(1) if parameter.dim() == 2 and parameter.shape == (12, 12) else None


def _sharded(model: Model, **options: Any) -> Model:
    fully_shard(model.attn, shard_placement_fn=_columns, **options)
    return fully_shard(model, **options)


def _extract_in_every_way(rank: int, world_size: int) -> list[list[Part]]:
    model = _model()
    plain = copy.deepcopy(model)
    _sharded(model)
    placements = {name: p.placements for name, p in model.named_parameters()}  # type: ignore[attr-defined]
    assert placements["attn.q_proj.weight"] == (Shard(1),)
    assert placements["embed.weight"] == (Shard(0),)
    expected = {dtype: _reference(plain, dtype) for dtype in (None, "bfloat16")}
    for settings in (
        {"chunk_bytes": None},
        {"group_by_module": True, "chunk_bytes": None},
        {"chunk_bytes": 300},
        {"group_by_module": True, "chunk_bytes": 900},
    ):
        extractor = FSDPWeightExtractor(model, **settings)  # type: ignore[arg-type]
        for dtype, reference in expected.items():
            found = _extracted(extractor, dtype)
            assert found == reference, (settings, dtype)
            assert "lm_head.weight" not in found
            assert "rope" not in found
            assert len(extractor.chunk_plan(dtype)) >= 3
    assert extractor.can_shard_locally()
    return [_parts(extractor, None), _parts(extractor, "bfloat16")]


@pytest.mark.parametrize("world_size", [2, 3])
def test_fully_shard_gives_the_weights_of_the_whole_model(world_size: int) -> None:
    ranks = run_ranks(_extract_in_every_way, world_size)
    for index, dtype in enumerate((None, "bfloat16")):
        whole = _assembled([rank[index] for rank in ranks])
        assert whole == {name: raw for name, (_, _, raw) in _reference(_model(), dtype).items()}


_DTYPES = ("float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "uint8", "int8", "int16",
           "uint16", "int32", "uint32", "int64", "bool", "complex64", "complex128")  # fmt: skip


def _dtensor(whole: torch.Tensor, placement: Placement, rank: int, world_size: int) -> DTensor:
    """A DTensor of any dtype, cut by hand: distribute_tensor sends by gloo, which refuses some."""
    local = whole
    if isinstance(placement, Shard):
        chunks = whole.chunk(world_size, placement.dim)
        local = chunks[rank] if rank < len(chunks) else whole.narrow(placement.dim, 0, 0)
    mesh = init_device_mesh("cpu", (world_size,))
    return DTensor.from_local(
        local, mesh, [placement], run_check=False, shape=whole.shape, stride=whole.contiguous().stride()
    )


def _kinds() -> dict[str, tuple[torch.Tensor, Placement]]:
    torch.manual_seed(3)
    kinds: dict[str, tuple[torch.Tensor, Placement]] = {}
    base = torch.randint(0, 200, (7, 5), dtype=torch.int32)
    for dtype in _DTYPES:
        whole = (
            base.to(getattr(torch, dtype))
            if "int" in dtype or dtype == "bool"
            else (base / 7).to(getattr(torch, dtype))
        )
        for label, placement in (("rows", Shard(0)), ("columns", Shard(1)), ("replicated", Replicate())):
            kinds[f"{dtype}_{label}"] = (whole.clone(), placement)
    kinds["scalar"] = (torch.tensor(1.5), Replicate())
    kinds["no_rows"] = (torch.empty(0, 3), Shard(0))
    kinds["no_columns"] = (torch.empty(4, 0), Shard(0))
    kinds["one_row"] = (torch.randn(1, 3), Shard(0))
    kinds["one_column"] = (torch.randn(5, 1), Shard(1))
    kinds["transposed"] = (torch.randn(5, 7).t(), Shard(0))
    kinds["three_dims"] = (torch.randn(2, 5, 3)[:, :, ::2], Shard(1))
    kinds["expanded"] = (torch.randn(5).expand(7, 5), Shard(0))
    return kinds


def _holder(tensors: dict[str, torch.Tensor]) -> nn.Module:
    model = nn.Module()
    for index, (name, tensor) in enumerate(tensors.items()):
        if index % 2:
            model.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
        else:
            model.register_buffer(name, tensor)
    return model


def _extract_every_dtype(rank: int, world_size: int) -> list[Part]:
    kinds = _kinds()
    sharded = {name: _dtensor(whole, placement, rank, world_size) for name, (whole, placement) in kinds.items()}
    extractor = FSDPWeightExtractor(_holder(sharded), chunk_bytes=500)  # type: ignore[arg-type]
    plain = _holder({name: whole for name, (whole, _) in kinds.items()})
    found, reference = _extracted(extractor, None), _reference(plain, None)
    assert [name for name in reference if found.get(name) != reference[name]] == []
    assert found.keys() == reference.keys()
    return _parts(extractor, None)


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_dtype_and_shape_by_every_placement(world_size: int) -> None:
    whole = _assembled(run_ranks(_extract_every_dtype, world_size))
    assert whole == {name: byte_array(tensor.contiguous()).tobytes() for name, (tensor, _) in _kinds().items()}


def _extract_on_two_dimensional_meshes(rank: int, world_size: int) -> dict[str, list[Part]]:
    results = {}
    reference = _reference(_model(), "bfloat16")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))

    hsdp = FSDPWeightExtractor(_sharded(_model(), mesh=mesh))
    assert _extracted(hsdp, "bfloat16") == reference
    results["hsdp"] = _parts(hsdp, "bfloat16")

    whole = {name: tensor.detach() for name, tensor in module_tensors(_model()) if tensor.dtype == torch.float32}
    wanted = {name: entry for name, entry in reference.items() if name in whole}
    for label, choice in {
        "rows_twice": lambda dims: [Shard(0), Shard(0)],
        "both_ways": lambda dims: [Shard(dims - 1), Shard(0)],
        "replicas_inside": lambda dims: [Shard(dims - 1), Replicate()],
        "replicas": lambda dims: [Replicate(), Replicate()],
    }.items():
        tensors = {}
        for name, tensor in whole.items():
            cut, placements = tensor, choice(tensor.dim())
            for mesh_dim, placement in enumerate(placements):
                place = mesh.get_local_rank(mesh_dim)
                if isinstance(placement, Shard):
                    pieces = cut.chunk(2, placement.dim)
                    cut = pieces[place] if place < len(pieces) else cut.narrow(placement.dim, 0, 0)
            tensors[name.replace(".", "/")] = DTensor.from_local(
                cut, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
            )
        extractor = FSDPWeightExtractor(_holder(tensors), name_map=lambda name: name.replace("/", "."))  # type: ignore[arg-type]
        assert _extracted(extractor, "bfloat16") == wanted, label
        results[label] = _parts(extractor, "bfloat16")

    # FSDP2 over tensor parallelism: its _StridedShard can be gathered, but has no box.
    torch.manual_seed(7)
    feed_forward = nn.Sequential(nn.Linear(12, 8), nn.Linear(8, 12))
    strided_reference = _reference(feed_forward, "bfloat16")
    parallelize_module(feed_forward, mesh["b"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    strided = FSDPWeightExtractor(fully_shard(feed_forward, mesh=mesh["a"]))
    assert _extracted(strided, "bfloat16") == strided_reference
    assert not strided.can_shard_locally()
    with pytest.raises(UnsupportedError, match="no local form"):
        strided.local_shards("bfloat16")

    # Each half of the world has a copy of its own: nobody can tell whose part counts.
    halves = FSDPWeightExtractor(_sharded(_model(), mesh=mesh["b"]))
    assert _extracted(halves, "bfloat16") == reference
    assert not halves.can_shard_locally()
    return results


def test_hsdp_and_other_meshes_of_two_dimensions() -> None:
    ranks = run_ranks(_extract_on_two_dimensional_meshes, 4)
    expected = {name: raw for name, (_, _, raw) in _reference(_model(), "bfloat16").items()}
    floats = {name for name, tensor in module_tensors(_model()) if tensor.dtype == torch.float32}
    for label in ranks[0]:
        wanted = expected if label == "hsdp" else {name: raw for name, raw in expected.items() if name in floats}
        assert _assembled([rank[label] for rank in ranks]) == wanted, label


def _extract_between_forwards(rank: int, world_size: int) -> bool:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model = _sharded(_model(), reshard_after_forward=False, mp_policy=policy).eval()
    tokens = torch.tensor([[0, 1, 2], [3, 4, 6]])
    reference = _reference(_model(), None)
    extractor = FSDPWeightExtractor(model)
    told = extractor.metadata()
    with torch.no_grad():
        model(tokens)
    left_unsharded = not any(isinstance(parameter, DTensor) for parameter in model.parameters())
    assert extractor.metadata() == told
    assert _extracted(extractor, None) == reference
    with torch.no_grad():
        model(tokens)
    assert {part.spec.name for part in extractor.local_shards()} <= {spec.name for spec in told}
    with torch.no_grad():
        model(tokens)
    assert FSDPWeightExtractor(model).metadata() == told

    # Training goes on, and the next extraction sees the new weights.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model(tokens).float().square().mean().backward()
    optimizer.step()
    found = _extracted(extractor, None)
    assert found["embed.weight"] != reference["embed.weight"]
    assert found["embed.weight"][2] == byte_array(model.embed.weight.full_tensor().detach()).tobytes()
    return left_unsharded


def test_parameters_that_a_forward_left_unsharded_are_extracted_from_their_shards() -> None:
    assert run_ranks(_extract_between_forwards, 2) == [True, True]


def _under_ddp(rank: int, world_size: int) -> list[Part]:
    whole = _model()
    whole.table = whole.table.clone()  # DDP writes buffers, which an expanded one refuses
    model = DistributedDataParallel(whole)
    extractor = ModuleWeightExtractor(model)
    assert _extracted(extractor, "bfloat16") == _reference(_model(), "bfloat16")
    dist.barrier()
    return _parts(extractor, "bfloat16")


def test_ddp_keeps_the_models_names_and_rank_0_alone_answers_for_its_shards() -> None:
    ranks = run_ranks(_under_ddp, 2)
    assert ranks[1] == []
    expected = {name: raw for name, (_, _, raw) in _reference(_model(), "bfloat16").items()}
    assert _assembled(ranks) == expected


def _fsdp1(module: Any) -> FullyShardedDataParallel:
    return FullyShardedDataParallel(module, use_orig_params=True, device_id=torch.device("cpu"))


def _under_fsdp1(rank: int, world_size: int) -> bool:
    torch.manual_seed(7)
    plain = nn.Sequential(nn.Linear(4, 4, bias=False))
    reference = _reference(plain, None)
    model = _fsdp1(plain)
    assert [tuple(tensor.shape) for _, tensor in module_tensors(model)] == [(8,)]
    for make in (FSDPWeightExtractor, ModuleWeightExtractor, OffloadPlanCache().listed):
        with pytest.raises(UnsupportedError, match="FSDP1's flat parameters"):
            make(model)
    for alone in (model.module, dict(model.named_parameters()), model.named_parameters()):
        with pytest.raises(UnsupportedError, match="FSDP1's own module"):  # nobody says whether these are whole
            OffloadPlanCache().listed(alone)
    with pytest.raises(UnsupportedError, match="FSDP1's own module"):
        FSDPWeightExtractor(model.module)
    with pytest.raises(UnsupportedError, match="FSDP1's own module"):
        extractor_from(dict(model.named_parameters()), WeightSyncConfig())
    kept = OffloadPlanCache()
    with FullyShardedDataParallel.summon_full_params(model):
        extractor = FSDPWeightExtractor(model)
        (chunk,) = extractor.extract_weights()
        whole = chunk.tensors[0].clone()  # numpy's view of it would keep FSDP1 from freeing the memory
        assert kept.listed(model) is not None
    assert byte_array(whole).tobytes() == reference["0.weight"][2]
    with pytest.raises(UnsupportedError, match="FSDP1's flat parameters"):
        kept.listed(model)
    with pytest.raises(UnsupportedError, match="FSDP1's flat parameters"):
        extractor.extract_weights()
    nested = _fsdp1(nn.Sequential(nn.Linear(4, 4, bias=False), _fsdp1(nn.Linear(4, 4, bias=False)))).module
    with FullyShardedDataParallel.summon_full_params(nested):  # the inner one alone
        for make in (FSDPWeightExtractor, OffloadPlanCache().listed):
            with pytest.raises(UnsupportedError, match="FSDP1's own module"):
                make(nested)
    for module in (
        _fsdp1(nn.Sequential(nn.Linear(4, 4, bias=False), _fsdp1(nn.Linear(4, 4, bias=False)))),
        _fsdp1(torch.compile(nn.Sequential(nn.Linear(4, 4, bias=False)))),
    ):
        with FullyShardedDataParallel.summon_full_params(module):
            assert {spec.shape for spec in FSDPWeightExtractor(module).metadata()} == {(4, 4)}
            assert OffloadPlanCache().listed(module) is not None
    return True


def test_fsdp1_is_refused_where_its_parameters_keep_their_names() -> None:
    """Seen red: with `use_orig_params=True` the half that rank 0 has was taken for all of `0.weight`."""
    assert run_ranks(_under_fsdp1, 2) == [True, True]
