"""Which tensors touch the same memory: no overlap is ever missed, of plain tensors and of others."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from weightsync.load.spans import overlapping, overlaps_itself, share_storage


def base() -> torch.Tensor:
    return torch.zeros(4, 6)


OVERLAPPING = {
    "a view of all": lambda whole: whole.view(-1),
    "its last element": lambda whole: whole.view(-1)[-1:],
    "a row, as a parameter": lambda whole: nn.Parameter(whole[2]),
    "a column, with gaps": lambda whole: whole[:, 1],
}


@pytest.mark.parametrize("what", OVERLAPPING)
def test_an_overlap_is_seen(what: str) -> None:
    """Seen to fail: with ends compared by their starts alone, which misses a row of a larger tensor."""
    whole, apart = base(), base()
    other = OVERLAPPING[what](whole)
    assert share_storage([apart, whole, other])
    assert [{one, two} for (one, _), (two, _) in overlapping({"w": whole, "o": other, "a": apart}.items())] == [
        {"w", "o"}
    ]


def test_one_that_ends_behind_others_overlaps_them_all() -> None:
    """One between them ends first: neighbours alone do not tell."""
    flat = torch.zeros(100)
    tensors = {"flat": flat, "head": flat[10:20], "w": flat[30:40], "apart": torch.zeros(3)}
    assert [(one, two) for (one, _), (two, _) in overlapping(tensors.items())] == [("flat", "head"), ("flat", "w")]
    twice = [("one", flat), ("same", flat), ("w", flat[99:])]
    assert [{one, two} for (one, _), (two, _) in overlapping(twice)] == [{"one", "w"}]


def test_what_is_apart_shares_nothing() -> None:
    whole = base()
    assert not share_storage([base(), base(), torch.zeros(0), torch.zeros(0), torch.tensor(1.0)])
    assert not share_storage([whole[:2], whole[2:]]), "neighbours in one storage"
    assert not list(overlapping({"a": whole[:2], "b": whole[2:]}.items()))
    gone = base()
    gone.untyped_storage().resize_(0)
    assert share_storage([gone, base()]), "one without memory has to be looked at"


def test_a_tensor_may_overlap_itself() -> None:
    assert overlaps_itself(torch.zeros(1).expand(3))
    assert not overlaps_itself(base())
    assert not overlaps_itself(base()[:, ::2])
