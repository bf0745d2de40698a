"""Megatron's layout of weights: whatever the heads, groups and ranks, what was put together comes apart again."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weightsync.errors import ExtractError
from weightsync.extract.megatron_layout import cut_vocabulary, join_slices, split_gate_up, split_qkv

small = st.integers(1, 4)
rests = st.sampled_from([(), (1,), (3,)])


def numbered(*shape: int, start: int = 0) -> torch.Tensor:
    count = int(torch.Size(shape).numel())
    return torch.arange(start, start + count, dtype=torch.float32).view(shape)


@given(groups=small, queries=small, head_dim=small, rest=rests)
def test_qkv_comes_apart(groups: int, queries: int, head_dim: int, rest: tuple[int, ...]) -> None:
    query = numbered(groups * queries * head_dim, *rest)
    key = numbered(groups * head_dim, *rest, start=10_000)
    value = numbered(groups * head_dim, *rest, start=20_000)
    rows = []
    for group in range(groups):
        rows += list(query[group * queries * head_dim : (group + 1) * queries * head_dim])
        rows += list(key[group * head_dim : (group + 1) * head_dim])
        rows += list(value[group * head_dim : (group + 1) * head_dim])
    found = split_qkv(torch.stack(rows), num_query_groups=groups, head_dim=head_dim)
    for got, wanted in zip(found, (query, key, value), strict=True):
        assert torch.equal(got, wanted)


@given(ranks=small, rows=small, rest=rests)
def test_gate_and_up_come_apart(ranks: int, rows: int, rest: tuple[int, ...]) -> None:
    gate, up = numbered(ranks * rows, *rest), numbered(ranks * rows, *rest, start=10_000)
    parts = [torch.cat([gate[r * rows : (r + 1) * rows], up[r * rows : (r + 1) * rows]]) for r in range(ranks)]
    found_gate, found_up = split_gate_up(parts)
    assert torch.equal(found_gate, gate)
    assert torch.equal(found_up, up)


@given(ranks=small, tokens=st.integers(1, 40), multiple=st.integers(1, 16), hidden=small)
def test_vocabulary_loses_its_padding_and_nothing_else(ranks: int, tokens: int, multiple: int, hidden: int) -> None:
    whole = numbered(tokens, hidden)
    padding = -tokens % (ranks * multiple)
    parts = torch.cat([whole, torch.full((padding, hidden), -1.0)]).chunk(ranks)
    assert torch.equal(cut_vocabulary(join_slices(parts, 0), tokens), whole)


@given(ranks=small, rows=small, columns=small, dim=st.integers(0, 1))
def test_slices_join(ranks: int, rows: int, columns: int, dim: int) -> None:
    whole = numbered(rows * ranks, columns * ranks)
    assert torch.equal(join_slices(whole.chunk(ranks, dim), dim), whole)


def test_rows_that_are_not_that_layout_are_refused() -> None:
    with pytest.raises(ExtractError, match="10 rows"):
        split_qkv(torch.zeros(10, 2), num_query_groups=2, head_dim=3)
    with pytest.raises(ExtractError, match="4 rows"):
        split_qkv(torch.zeros(4, 2), num_query_groups=1, head_dim=2)
    with pytest.raises(ExtractError, match="odd"):
        split_gate_up([torch.zeros(3, 2)])
    with pytest.raises(ExtractError, match="5 rows"):
        cut_vocabulary(torch.zeros(5, 2), 6)
