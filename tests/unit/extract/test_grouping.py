"""The plan: every tensor exactly once, in the metadata's order, cut where the settings say."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weightsync.extract.grouping import group_name, order_by_group, plan_chunks
from weightsync.types import TensorSpec


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn"),
        ("model.layers.0.self_attn.k_proj.bias", "model.layers.0.self_attn"),
        ("model.layers.0.self_attn.v_proj.lora_A.weight", "model.layers.0.self_attn"),
        ("model.layers.0.self_attn.o_proj.weight", "model.layers.0.self_attn.o_proj"),
        ("encoder.layer.3.attention.self.query.weight", "encoder.layer.3.attention.self"),
        ("model.layers.1.mlp.gate_proj.weight", "model.layers.1.mlp"),
        ("model.layers.1.mlp.up_proj.weight", "model.layers.1.mlp"),
        ("model.layers.1.mlp.experts.17.down_proj.weight", "model.layers.1.mlp.experts"),
        ("model.layers.1.mlp.experts.3.gate_proj.weight", "model.layers.1.mlp.experts"),
        ("model.layers.1.mlp.experts.gate_up_proj", "model.layers.1.mlp.experts"),
        ("model.layers.1.block_sparse_moe.experts.0.w1.weight", "model.layers.1.block_sparse_moe.experts"),
        ("model.layers.1.mlp.shared_experts.up_proj.weight", "model.layers.1.mlp.shared_experts"),
        ("model.layers.1.mlp.gate.weight", "model.layers.1.mlp.gate"),
        ("model.embed_tokens.weight", "model.embed_tokens"),
        ("scale", ""),
    ],
)
def test_group_of_a_parameter(name: str, group: str) -> None:
    assert group_name(name) == group


def test_members_far_apart_come_together_in_order_of_first_appearance() -> None:
    names = ["a.q_proj.weight", "b.weight", "a.k_proj.weight", "c.weight", "b.bias", "a.v_proj.weight"]
    assert order_by_group(names, group_name) == [
        *("a.q_proj.weight", "a.k_proj.weight", "a.v_proj.weight"),
        *("b.weight", "b.bias"),
        "c.weight",
    ]


def test_a_chunk_of_one_group_carries_its_name_and_a_merged_one_none() -> None:
    specs = [_spec("a.q_proj.weight", 4), _spec("a.k_proj.weight", 4), _spec("b.weight", 4), _spec("c.weight", 99)]
    chunks = plan_chunks(specs, group_of=group_name, chunk_bytes=13)
    assert [(chunk.module_name, chunk.nbytes) for chunk in chunks] == [(None, 12), ("c", 99)]
    chunks = plan_chunks(specs, group_of=group_name, chunk_bytes=11)
    assert [(chunk.module_name, chunk.nbytes) for chunk in chunks] == [("a", 8), ("b", 4), ("c", 99)]


def test_a_group_above_the_threshold_is_not_split() -> None:
    specs = [_spec(f"experts.{index}.w1.weight", 10) for index in range(8)]
    assert [len(chunk.specs) for chunk in plan_chunks(specs, group_of=group_name, chunk_bytes=15)] == [8]
    assert [len(chunk.specs) for chunk in plan_chunks(specs, group_of=None, chunk_bytes=25)] == [2, 2, 2, 2]


_names = st.lists(
    st.builds(
        lambda layer, part: f"layers.{layer}.{part}",
        st.integers(0, 3),
        st.sampled_from(
            ["attn.q_proj.weight", "attn.k_proj.weight", "attn.v_proj.bias", "norm.weight", "norm.bias"]
            + [f"mlp.experts.{index}.w{matrix}.weight" for index in range(4) for matrix in (1, 2, 3)]
        ),
    ),
    unique=True,
    max_size=40,
)


@settings(deadline=None)
@given(names=_names, data=st.data(), grouped=st.booleans(), chunk_bytes=st.none() | st.integers(1, 200))
def test_every_tensor_once_in_order_and_within_the_threshold(
    names: list[str], data: st.DataObject, grouped: bool, chunk_bytes: int | None
) -> None:
    group_of = group_name if grouped else None
    order = order_by_group(names, group_name) if grouped else names
    assert sorted(order) == sorted(names)
    specs = [_spec(name, data.draw(st.integers(0, 90))) for name in order]
    chunks = plan_chunks(specs, group_of=group_of, chunk_bytes=chunk_bytes)

    assert [spec for chunk in chunks for spec in chunk.specs] == specs
    groups = [{group_name(spec.name) if grouped else spec.name for spec in chunk.specs} for chunk in chunks]
    assert all(members for members in groups)
    for index, members in enumerate(groups):
        assert not any(members & others for others in groups[index + 1 :]), "a group was split"
        single = len(members) == 1
        if chunk_bytes is None:
            assert single
        else:
            assert single or chunks[index].nbytes <= chunk_bytes
    if chunk_bytes is not None:
        for chunk, following in itertools.pairwise(chunks):
            first = following.specs[:1]
            if grouped:
                first = tuple(x for x in following.specs if group_name(x.name) == group_name(first[0].name))
            assert chunk.nbytes + sum(spec.nbytes for spec in first) > chunk_bytes, "the next one would have fitted"


def test_a_large_plan_takes_no_quadratic_time() -> None:
    specs = [_spec(f"layers.0.experts.{index}.weight", 1) for index in range(50_000)]
    assert len(plan_chunks(specs, group_of=group_name, chunk_bytes=1 << 20)) == 1
    assert len(plan_chunks(specs, group_of=None, chunk_bytes=1 << 20)) == 1


def _spec(name: str, size_bytes: int) -> TensorSpec:
    return TensorSpec(name=name, dtype="uint8", shape=(size_bytes,))
