"""How Megatron lays out fused and parallel weights: pure functions of tensors, without communication.

A tensor-parallel rank holds a slice along one dimension. `linear_qkv` interleaves: for each query group its
queries, then its key, then its value, so a slice holds whole groups (or, with fewer groups than ranks, a stretch of
one). `linear_fc1` of a gated model holds, on EACH rank, that rank's slice of the gate and then of the up projection.
The vocabulary is padded at its end, to a multiple that depends on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weightsync.errors import ExtractError


def join_slices(parts: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    """The whole tensor from the slices of all tensor-parallel ranks, in their order."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)


def split_gate_up(parts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Gate and up projection, [ffn, ...] each, from every rank's [2 * ffn / ranks, ...].

    Raises:
        ExtractError: a part can't be halved.
    """
    if any(part.shape[0] % 2 for part in parts):
        raise ExtractError(f"a fused gate and up projection has an odd number of rows: {tuple(parts[0].shape)}")
    halves = [part.chunk(2, 0) for part in parts]
    return join_slices([gate for gate, _ in halves], 0), join_slices([up for _, up in halves], 0)


def split_qkv(
    fused: torch.Tensor, *, num_query_groups: int, head_dim: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query, key and value from the whole fused weight or bias.

    Args:
        fused: [num_query_groups * (queries a group + 2) * head_dim, ...].
        num_query_groups: key-value heads of the model.
        head_dim: rows of one head.

    Returns:
        [query heads * head_dim, ...], then twice [num_query_groups * head_dim, ...]; of a bias they may be views.

    Raises:
        ExtractError: the rows are not those of a fused projection with this many groups.
    """
    rows, rest = fused.shape[0], fused.shape[1:]
    heads, left_over = divmod(rows, num_query_groups * head_dim)
    if left_over or heads < 3:
        raise ExtractError(
            f"{rows} rows are no fused query, key and value of {num_query_groups} groups with heads of {head_dim}"
        )
    grouped = fused.reshape(num_query_groups, heads, head_dim, *rest)
    query, key, value = torch.split(grouped, [heads - 2, 1, 1], dim=1)
    return query.reshape(-1, *rest), key.reshape(-1, *rest), value.reshape(-1, *rest)


def cut_vocabulary(padded: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """The rows of real tokens, [vocab_size, hidden], of an embedding that is padded at its end.

    Raises:
        ExtractError: there are fewer rows than tokens.
    """
    if padded.shape[0] < vocab_size:
        raise ExtractError(f"the embedding has {padded.shape[0]} rows, fewer than the {vocab_size} tokens asked for")
    return padded[:vocab_size]
