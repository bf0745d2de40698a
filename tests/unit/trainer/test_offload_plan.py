"""plan_hosts: every element lies once, on the host whose ranks hold it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weightsync.errors import ManifestMismatchError
from weightsync.plan.boxes import check_partition, split_box, whole_box
from weightsync.trainer.offload_plan import plan_hosts
from weightsync.types import Box, TensorSpec


def said(host: str, *boxes: tuple[int, Box]) -> dict[str, Any]:
    """What a rank says, as it arrives: as JSON has it."""
    return {"host": host, "boxes": [[index, list(box.offset), list(box.shape)] for index, box in boxes]}


@settings(deadline=None)
@given(st.data())
def test_any_partition_over_any_ranks_of_any_hosts(data: st.DataObject) -> None:
    hosts = data.draw(st.lists(st.sampled_from("abc"), min_size=1, max_size=5))
    specs, held = [], [[] for _ in hosts]
    for index in range(data.draw(st.integers(1, 4))):
        shape = data.draw(st.lists(st.integers(0, 6), max_size=3).map(tuple))
        specs.append(TensorSpec(name=f"w{index}", dtype=data.draw(st.sampled_from(["int8", "float32"])), shape=shape))
        boxes = list(split_box(whole_box(shape), data.draw(st.integers(1, 40)))) or [whole_box(shape)]
        for box in boxes:
            held[data.draw(st.integers(0, len(hosts) - 1))].append((index, box))
        held[data.draw(st.integers(0, len(hosts) - 1))] += [(index, Box(offset=shape, shape=(0,) * len(shape)))] * bool(
            shape and whole_box(shape).numel
        )
    plan = plan_hosts(specs, [said(host, *boxes) for host, boxes in zip(hosts, held, strict=True)])

    assert list(plan.leaders) == sorted(plan.leaders)
    assert [hosts[leader] for leader in plan.leaders] == list(plan.hosts)
    assert all(hosts.index(host) == leader for host, leader in zip(plan.hosts, plan.leaders, strict=True))
    assert len(plan.layouts) == len(plan.hosts)
    for number, spec in enumerate(specs):
        by_host = {
            host: [
                box for of, boxes in zip(hosts, held, strict=True) if of == host for at, box in boxes if at == number
            ]
            for host in plan.hosts
        }
        parts = [part for part in plan.parts if part.name == spec.name]
        check_partition(spec.shape, [part.box or whole_box(spec.shape) for part in parts])
        for part in parts:
            here = [box for box in by_host[plan.hosts[part.source]] if box.numel]
            assert (part.dtype, part.shape) == (spec.dtype, spec.shape)
            assert part.box in here if part.box else sum(box.numel for box in here) == whole_box(spec.shape).numel
        if len({part.source for part in parts}) == 1:
            assert [part.box for part in parts] == [None], "whole where one host holds all of it"
        assert parts or not whole_box(spec.shape).numel
    for source, layout in enumerate(plan.layouts):
        end = layout.data_start
        for part in sorted(layout.parts, key=lambda part: (part.offset, part.nbytes)):
            assert (part.source, part.offset) == (source, end)
            end += part.nbytes
        assert end == layout.total_bytes


_SPECS = [TensorSpec(name="w", dtype="int8", shape=(4, 2)), TensorSpec(name="b", dtype="int8", shape=())]
_TOP, _BOTTOM = Box(offset=(0, 0), shape=(3, 2)), Box(offset=(3, 0), shape=(1, 2))
_SCALAR = Box(offset=(), shape=())


@pytest.mark.parametrize(
    "ranks",
    [
        [said("a", (0, _TOP), (1, _SCALAR))],
        [said("a", (0, _TOP), (0, _BOTTOM))],
        [said("a", (0, _TOP), (1, _SCALAR)), said("b", (0, _TOP))],
        [said("a", (0, _TOP), (0, _BOTTOM), (1, _SCALAR)), said("b", (1, _SCALAR))],
        [said("a", (0, _TOP), (1, _SCALAR)), said("b", (0, Box(offset=(3, 0), shape=(2, 2))))],
        [said("a"), said("b")],
    ],
)
def test_parts_that_make_no_whole_are_refused_and_named(ranks: list[dict[str, Any]]) -> None:
    with pytest.raises(ManifestMismatchError) as caught:
        plan_hosts(_SPECS, ranks)
    assert caught.value.parameter in ("w", "b")


def test_a_host_whose_ranks_hold_nothing_is_no_source() -> None:
    """The replicas of HSDP's second row."""
    plan = plan_hosts(_SPECS, [said("a", (0, _TOP), (1, _SCALAR)), said("b"), said("c", (0, _BOTTOM)), said("b")])
    assert (plan.hosts, plan.leaders) == (("a", "c"), (0, 2))
    assert [(part.name, part.source) for part in plan.parts] == [("w", 0), ("b", 0), ("w", 1)]
