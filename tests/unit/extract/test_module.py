"""WeightExtractor and ModuleWeightExtractor in one process."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from weightsync.errors import ConfigError, ExtractError, UnsupportedError
from weightsync.extract.module import ModuleWeightExtractor
from weightsync.tensors import byte_array


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.k_proj = nn.Linear(4, 4, bias=False)
        self.v_proj = nn.Linear(4, 4)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.attn = Attention()
        self.experts = nn.ModuleList(nn.Linear(4, 3, bias=False) for _ in range(3))
        self.norm = nn.BatchNorm1d(4)
        self.lm_head = nn.Linear(4, 7, bias=False)
        self.lm_head.weight = self.embed.weight
        self.register_buffer("rope", torch.ones(3), persistent=False)


EVERY_NAME = [
    *("embed.weight", "attn.q_proj.weight", "attn.q_proj.bias", "attn.norm.weight", "attn.norm.bias"),
    *("attn.k_proj.weight", "attn.v_proj.weight", "attn.v_proj.bias"),
    *("experts.0.weight", "experts.1.weight", "experts.2.weight", "norm.weight", "norm.bias"),
    *("norm.running_mean", "norm.running_var", "norm.num_batches_tracked"),
]


def test_parameters_and_persistent_buffers_with_tied_ones_once() -> None:
    extractor = ModuleWeightExtractor(Model(), chunk_bytes=None)
    assert [spec.name for spec in extractor.metadata()] == EVERY_NAME
    chunks = list(extractor.extract_weights())
    assert [chunk.names for chunk in chunks] == [(name,) for name in EVERY_NAME]
    assert all(chunk.module_name is None for chunk in chunks)


def test_chunks_are_large_where_nothing_is_said() -> None:
    """Each chunk is a request to every engine: 100,000 of them would take minutes."""
    model = nn.ParameterList(nn.Parameter(torch.zeros(1 << 20)) for _ in range(40))
    assert [len(chunk.specs) for chunk in ModuleWeightExtractor(model).chunk_plan()] == [16, 16, 8]


def test_grouping_brings_q_k_v_and_the_experts_together() -> None:
    chunks = list(ModuleWeightExtractor(Model(), group_by_module=True, chunk_bytes=None).extract_weights())
    by_module = {chunk.module_name: chunk.names for chunk in chunks}
    assert [chunk.module_name for chunk in chunks] == ["embed", "attn", "attn.norm", "experts", "norm"]
    assert by_module["attn"] == tuple(f"attn.{part}" for part in (
        "q_proj.weight", "q_proj.bias", "k_proj.weight", "v_proj.weight", "v_proj.bias"
    ))  # fmt: skip
    assert by_module["experts"] == ("experts.0.weight", "experts.1.weight", "experts.2.weight")


class Zoo(nn.Module):
    """One tensor of every kind."""

    def __init__(self) -> None:
        super().__init__()
        base = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
        for dtype in ("float64", "float32", "float16", "bfloat16"):
            self.register_parameter(f"p_{dtype}", nn.Parameter(base.to(getattr(torch, dtype))))
        for dtype in ("float8_e4m3fn", "float8_e5m2", "uint16", "uint32", "int8", "int64", "bool", "complex64"):
            values = (
                base.to(getattr(torch, dtype)) if "int" not in dtype else (base.abs() * 9).to(getattr(torch, dtype))
            )
            self.register_parameter(f"p_{dtype}", nn.Parameter(values, requires_grad=False))
            self.register_buffer(f"b_{dtype}", values.clone())
        self.register_buffer("scalar", torch.tensor(3.25))
        self.register_buffer("counter", torch.tensor(7))
        self.register_buffer("empty", torch.empty(0, 3))
        self.register_buffer("expanded", torch.arange(4.0).expand(3, 4))
        self.register_buffer("expanded_f8", base[0].to(torch.float8_e4m3fn).expand(3, 4))
        self.transposed = nn.Parameter(base.clone().t())
        self.strided = nn.Parameter(base.clone()[:, ::2])
        self.register_buffer("channels_last", torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last))


@pytest.mark.parametrize("dtype", [None, "bfloat16", "float32"])
def test_every_kind_of_tensor_passes_and_only_plain_floats_convert(dtype: str | None) -> None:
    model = Zoo()
    extractor = ModuleWeightExtractor(model, chunk_bytes=None)
    seen = {}
    for chunk in extractor.extract_weights(dtype):
        seen[chunk.names[0]] = chunk.tensors[0]
    live = dict([*model.named_parameters(), *model.named_buffers()])
    assert seen.keys() == live.keys()
    for name, tensor in seen.items():
        source = live[name].detach()
        plain_float = source.dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)
        expected = source.to(getattr(torch, dtype)) if dtype and plain_float else source
        assert tensor.dtype == expected.dtype, name
        assert tensor.is_contiguous(), name
        assert not tensor.requires_grad, name
        assert tensor.shape == expected.shape, name
        assert byte_array(tensor).tobytes() == byte_array(expected.contiguous()).tobytes(), name
    held = {part.spec.name: part for part in extractor.local_shards(dtype)}
    assert held.keys() == live.keys()
    for name, part in held.items():
        assert part.box is None
        assert byte_array(part.tensor).tobytes() == byte_array(seen[name]).tobytes()


def test_a_lazy_conjugate_or_negative_comes_as_what_it_means() -> None:
    """Seen red: the bit came along, and who asked for the tensor's bytes got a RuntimeError."""
    model, numbers = nn.Module(), torch.randn(5, dtype=torch.complex64)
    lazy = {"conjugate": numbers.conj(), "negative": numbers.conj().imag}
    for name, tensor in lazy.items():
        model.register_buffer(name, tensor)
    (chunk,) = ModuleWeightExtractor(model).extract_weights()
    for name, tensor in zip(chunk.names, chunk.tensors, strict=True):
        assert not tensor.is_conj()
        assert not tensor.is_neg()
        assert byte_array(tensor).tobytes() == lazy[name].resolve_conj().resolve_neg().numpy().tobytes()


def test_nothing_is_copied_where_nothing_has_to_be() -> None:
    model = nn.Linear(4, 4)
    (weight, _) = [
        chunk.tensors[0] for chunk in ModuleWeightExtractor(model, chunk_bytes=None).extract_weights("float32")
    ]
    assert weight.data_ptr() == model.weight.data_ptr()
    with torch.no_grad():
        model.weight.fill_(2.0)
    assert weight.eq(2.0).all()


def test_a_tensor_whose_memory_ends_before_it_does_is_refused() -> None:
    """torch's own `resize_` leaves one where it fails. Seen red: what lay behind its memory was published."""
    named = {"a": torch.zeros(8), "b": torch.ones(4)[1::2]}
    named["a"].numpy()  # its storage can't be resized from now on
    module = nn.Module()
    for name, tensor in named.items():
        module.register_buffer(name, tensor)
    extractor = ModuleWeightExtractor(module)
    assert [spec.shape for spec in extractor.metadata()] == [(8,), (2,)]
    with pytest.raises(RuntimeError, match="not resizable"):
        named["a"].resize_(16)
    if named["a"].shape == (16,):  # the releases of torch that mend it have nothing to show here
        with pytest.raises(ExtractError, match="memory ends before") as caught:
            list(extractor.extract_weights())
        assert caught.value.parameter == "a"


@pytest.mark.parametrize("left", [0, 32])
def test_a_storage_that_is_freed_later_is_seen(left: int) -> None:
    """As a trainer's that is offloaded between two steps, and loaded again. Seen red: the glance looked at types and
    shapes alone, and the process died where the weights were read."""
    extractor = ModuleWeightExtractor(model := Model())
    before = streamed(extractor)
    weight = model.attn.k_proj.weight
    kept, size = weight.detach().clone(), weight.untyped_storage().nbytes()
    weight.untyped_storage().resize_(left)
    for call in (extractor.extract_weights, extractor.local_shards, extractor.local_parts, extractor.local_whole):
        with pytest.raises(ExtractError, match="memory ends before") as caught:
            call()
        assert caught.value.parameter == "attn.k_proj.weight"
    weight.untyped_storage().resize_(size)
    weight.data.copy_(kept)
    after = streamed(extractor)
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_wrappers_leave_no_trace_in_the_names() -> None:
    model = Model()
    model.attn = checkpoint_wrapper(model.attn)
    model.norm = torch.compile(model.norm)
    compiled = torch.compile(model)
    assert any("_orig_mod" in name for name, _ in compiled.named_parameters())
    assert [spec.name for spec in ModuleWeightExtractor(compiled).metadata()] == EVERY_NAME


def test_a_module_called_module_keeps_its_name() -> None:
    model = nn.Module()
    model.module = nn.Linear(2, 2)
    names = [spec.name for spec in ModuleWeightExtractor(model).metadata()]
    assert names == ["module.weight", "module.bias"]


def test_a_persistent_buffer_shared_with_a_transient_one_is_kept() -> None:
    model = nn.Module()
    shared = torch.ones(2)
    model.first, model.second = nn.Module(), nn.Module()
    model.first.register_buffer("held", shared, persistent=False)
    model.second.register_buffer("held", shared)
    assert [spec.name for spec in ModuleWeightExtractor(model).metadata()] == ["second.held"]


def test_two_tensors_with_one_name_are_refused_naming_both() -> None:
    with pytest.raises(
        ConfigError, match=r"'experts\.0\.weight' and 'experts\.1\.weight'.*'experts\.x\.weight'"
    ) as info:
        ModuleWeightExtractor(Model(), name_map=lambda name: name.replace(".0.", ".x.").replace(".1.", ".x."))
    assert info.value.parameter == "experts.x.weight"


def test_a_model_that_has_changed_is_refused_before_the_first_chunk() -> None:
    extractor = ModuleWeightExtractor(model := Model())
    model.norm = nn.BatchNorm1d(5)
    with pytest.raises(ExtractError, match="has changed") as info:
        extractor.extract_weights()
    assert info.value.parameter == "norm.weight"
    model.norm = nn.BatchNorm1d(4)
    list(extractor.extract_weights())
    model.more = nn.Linear(2, 2)
    with pytest.raises(ExtractError, match="new tensor"):
        extractor.extract_weights()


def test_what_can_not_be_extracted_is_refused_by_name() -> None:
    model = Model()
    model.register_buffer("adjacency", torch.eye(3).to_sparse())
    with pytest.raises(UnsupportedError) as info:
        ModuleWeightExtractor(model)
    assert info.value.parameter == "adjacency"
    with pytest.raises(ExtractError, match="no data"):
        ModuleWeightExtractor(nn.Linear(2, 2, device="meta"))
    with pytest.raises(ExtractError, match="no data"):
        ModuleWeightExtractor(nn.LazyLinear(2))
    with pytest.raises(ExtractError, match="no tensors"):
        ModuleWeightExtractor(Model(), name_map=lambda name: None)


def streamed(extractor: ModuleWeightExtractor) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for chunk in extractor.extract_weights()
        for name, tensor in zip(chunk.names, chunk.tensors, strict=True)
    }


def test_what_replaced_a_tensor_is_what_is_streamed() -> None:
    """A stream that is checked at a glance reads the model anew all the same."""
    extractor = ModuleWeightExtractor(model := Model())
    before = streamed(extractor)
    model.attn.q_proj.weight = nn.Parameter(torch.full((4, 4), 7.0))
    model.attn.v_proj.weight.data = torch.full((4, 4), 8.0)
    model.experts[1] = nn.Linear(4, 3, bias=False)
    model.norm.running_mean = torch.full((4,), 9.0)
    after = streamed(extractor)
    assert after.keys() == before.keys()
    expected = {
        "attn.q_proj.weight": torch.full((4, 4), 7.0),
        "attn.v_proj.weight": torch.full((4, 4), 8.0),
        "experts.1.weight": model.experts[1].weight.detach(),
        "norm.running_mean": torch.full((4,), 9.0),
    }
    for name, tensor in after.items():
        assert torch.equal(tensor, expected.get(name, before[name])), name
    assert {held.spec.name for held in extractor.local_shards()} == after.keys()


def test_what_no_glance_can_see_is_looked_at() -> None:
    def changed(model: Model, tensor: torch.Tensor | None, **attributes: object) -> None:
        if tensor is not None:
            model.norm.running_var = tensor
        for name, value in attributes.items():
            setattr(model.norm.running_var, name, value)

    for tensor, attributes, error in (
        (torch.zeros(4).to_sparse(), {}, UnsupportedError),
        (torch.zeros(4, device="meta"), {}, ExtractError),
        (torch.zeros(4, dtype=torch.float64), {}, ExtractError),
        (torch.zeros(5), {}, ExtractError),
        (None, {"ds_shape": (8,)}, UnsupportedError),
    ):
        extractor = ModuleWeightExtractor(model := Model())
        streamed(extractor)
        changed(model, tensor, **attributes)
        for call in (extractor.extract_weights, extractor.local_shards):
            with pytest.raises(error) as info:
                call()
            assert info.value.parameter == "norm.running_var"


def test_a_tie_that_came_or_went_is_seen() -> None:
    extractor = ModuleWeightExtractor(model := Model())
    streamed(extractor)
    model.lm_head.weight = nn.Parameter(torch.ones(7, 4))
    with pytest.raises(ExtractError, match="new tensor"):
        extractor.extract_weights()
    model.lm_head.weight = model.embed.weight
    model.attn.q_proj.weight = model.attn.v_proj.weight
    with pytest.raises(ExtractError, match="has changed"):
        extractor.extract_weights()
