"""Glance: tensors of other names, types, dtypes or shapes than those that were checked are never taken for these."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import nn

from weightsync.extract.glance import Glance, Pairs


def named(count: int = 600) -> Pairs:
    """More than are looked at together."""
    return Pairs(names=[f"w{index}" for index in range(count)], tensors=[torch.zeros(2, 3) for _ in range(count)])


def test_the_same_kinds_are_the_new_tensors_by_their_names() -> None:
    then, now = named(), named()
    glance = Glance(then, [None if index == 5 else f"e{index}" for index in range(600)])
    live = glance.live(now, says_all=lambda tensors: True)
    assert live is not None
    assert len(live) == 599
    assert live["e4"] is now.tensors[4]
    assert "e5" not in live
    whole = Glance(then, [f"e{index}" for index in range(600)]).live(Pairs.of(list(now)), says_all=lambda _: True)
    assert whole is not None
    assert all(map(operator.is_, whole.values(), now.tensors))


@pytest.mark.parametrize("place", [0, 511, 512, 599])
@pytest.mark.parametrize(
    "other", [torch.zeros(3, 2), torch.zeros(2, 3, dtype=torch.float64), nn.Parameter(torch.zeros(2, 3)), None]
)
def test_one_of_another_kind_is_seen(place: int, other: torch.Tensor | None) -> None:
    """Seen to fail: with any of the comparisons left out."""
    then, now = named(), named()
    glance = Glance(then, list(then.names))
    if other is None:
        changed = Pairs(names=[*now.names[:place], "other", *now.names[place + 1 :]], tensors=now.tensors)
    else:
        changed = Pairs(names=now.names, tensors=[*now.tensors[:place], other, *now.tensors[place + 1 :]])
    assert glance.live(changed, says_all=lambda _: True) is None
    assert glance.live(now, says_all=lambda tensors: now.tensors[place] not in set(tensors)) is None
    assert glance.live(now, says_all=lambda _: True) is not None


@pytest.mark.parametrize("place", [0, 511, 512, 599])
def test_a_storage_of_another_size_is_seen(place: int) -> None:
    """Seen red: with sizes left out."""
    then = named()
    glance, unsized = Glance(then, list(then.names), sized=True), Glance(then, list(then.names))
    assert glance.live(named(), says_all=lambda _: True) is not None
    then.tensors[place].untyped_storage().resize_(0)
    assert glance.live(then, says_all=lambda _: True) is None
    assert unsized.live(then, says_all=lambda _: True) is not None


def test_more_or_fewer_are_seen() -> None:
    glance = Glance(named(10), [f"w{index}" for index in range(10)])
    for count in (9, 11):
        assert glance.live(named(count), says_all=lambda _: True) is None
