"""What every `WeightExtractor` keeps on a training rank of its own."""

from __future__ import annotations

import abc
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from weightsync.errors import ConfigError, ExtractError, UnsupportedError
from weightsync.extract.base import WeightExtractor
from weightsync.plan.boxes import check_partition, whole_box
from weightsync.tensors import cut_out, torch_dtype
from weightsync.testing.contracts.cases import bytes_of, change_in_place
from weightsync.types import HeldTensor, dtype_name, target_dtype
from weightsync.types.dtypes import CASTABLE

Seen = tuple[str, tuple[int, ...], bytes]
"""Dtype, shape and bytes of a tensor."""

_DTYPES = pytest.mark.parametrize("dtype", [None, "bfloat16"])
_CUT = pytest.mark.parametrize("chunk_bytes", [None, 1, 100, 1 << 20])
_GROUPED = pytest.mark.parametrize("group_by_module", [False, True])


class WeightExtractorContract(abc.ABC):
    """What every `WeightExtractor` keeps, in one process: without a process group, or in one of a single rank."""

    @abc.abstractmethod
    def make_extractor(self, **options: Any) -> WeightExtractor:
        """An extractor of this test's weights, with these options of the base class."""

    @abc.abstractmethod
    def truth(self) -> dict[str, torch.Tensor]:
        """This test's weights as they are now, in the trainer's dtypes, by their names without a `name_map`."""

    def change(self) -> None:
        """Changes them in place. Override it where what `truth` gives is a copy, or not contiguous."""
        change_in_place(self.truth())

    def expected(self, dtype: str | None = None) -> dict[str, Seen]:
        """What has to come, by name."""
        return {
            name: _seen(tensor.detach().to(torch_dtype(target_dtype(dtype_name(tensor.dtype), dtype))))
            for name, tensor in self.truth().items()
        }

    @staticmethod
    def streamed(extractor: WeightExtractor, dtype: str | None = None) -> dict[str, Seen]:
        """What came, in its order; each once, contiguous and detached."""
        came: dict[str, Seen] = {}
        for chunk in extractor.extract_weights(dtype):
            assert came.keys().isdisjoint(chunk.names)
            assert all(tensor.is_contiguous() and not tensor.requires_grad for tensor in chunk.tensors)
            assert torch.is_grad_enabled(), "the consumer's grad mode is its own"
            came |= dict(zip(chunk.names, map(_seen, chunk.tensors), strict=True))
        return came

    @_CUT
    @_GROUPED
    def test_what_was_told_is_what_comes(self, chunk_bytes: int | None, group_by_module: bool) -> None:
        """By the metadata and by the plan, and its bytes are the weights'. Seen red: a `_target` without the dtype."""
        extractor = self.make_extractor(chunk_bytes=chunk_bytes, group_by_module=group_by_module)
        for dtype in (None, "bfloat16", "float32"):
            came = self.streamed(extractor, dtype)
            assert came == self.expected(dtype)
            told = [(spec.name, (spec.dtype, spec.shape)) for spec in extractor.metadata(dtype)]
            assert told == [(name, seen[:2]) for name, seen in came.items()]
            chunks = list(extractor.extract_weights(dtype))
            plan = [(each.module_name, each.specs.names, each.nbytes) for each in extractor.chunk_plan(dtype)]
            assert [(each.module_name, each.names, each.total_size_bytes) for each in chunks] == plan

    @_CUT
    @_GROUPED
    def test_chunks_keep_the_order_and_no_module_is_split(self, chunk_bytes: int | None, group_by_module: bool) -> None:
        """Seen red: a plan reversed, without the group, of other sizes; an order without the groups."""
        options = {"chunk_bytes": chunk_bytes, "group_by_module": group_by_module}
        extractor = self.make_extractor(**options)
        assert {name: extractor.settings[name] for name in options} == options
        plan = extractor.chunk_plan()
        whole = self.make_extractor(group_by_module=group_by_module).metadata().names
        assert [name for planned in plan for name in planned.specs.names] == list(whole)
        modules = [{_module(name) if group_by_module else name for name in planned.specs.names} for planned in plan]
        assert sum(map(len, modules)) == len(set().union(*modules))
        groups = [planned.module_name for planned in plan if planned.module_name is not None]
        assert len(groups) == len(set(groups))
        for planned, inside in zip(plan, modules, strict=True):
            one_group = len(inside) == 1 or planned.module_name is not None
            assert one_group or planned.nbytes <= (chunk_bytes or 0)

    def test_an_override_wins_by_the_engines_name_and_the_first_match_counts(self) -> None:
        """Seen red: the overrides' order reversed; the trainer's name matched."""
        first = next(name for name, tensor in self.truth().items() if dtype_name(tensor.dtype) in CASTABLE)
        overrides = {f"engine.{first}": "float64", "engine.*": "float16"}
        extractor = self.make_extractor(name_map=lambda name: f"engine.{name}", dtype_overrides=overrides)
        expected = {f"engine.{name}": seen for name, seen in self.expected("float16").items()}
        expected[f"engine.{first}"] = self.expected("float64")[first]
        assert self.streamed(extractor, "bfloat16") == expected
        assert {spec.name: spec.dtype for spec in extractor.metadata("bfloat16")} == {
            name: seen[0] for name, seen in expected.items()
        }

    def test_a_name_that_is_mapped_to_none_is_dropped(self) -> None:
        """Seen red: the trainer's name in its place."""
        gone = list(self.truth())[1]
        extractor = self.make_extractor(name_map=lambda name: None if name == gone else f"engine.{name}")
        expected = {f"engine.{name}": seen for name, seen in self.expected().items() if name != gone}
        assert self.streamed(extractor) == expected
        assert set(extractor.metadata().names) == expected.keys()

    @_DTYPES
    def test_the_next_extraction_sees_what_was_changed_in_place(self, dtype: str | None) -> None:
        """Seen red: copies kept from the first time."""
        extractor = self.make_extractor()
        before, told = self.streamed(extractor, dtype), list(extractor.metadata(dtype))
        self.change()
        assert self.streamed(extractor, dtype) == self.expected(dtype) != before
        assert list(extractor.metadata(dtype)) == told

    @_DTYPES
    def test_local_parts_are_all_of_every_tensor_once(self, dtype: str | None) -> None:
        """Or are refused by the call. Seen red: a part left out, one twice, and one that was not converted."""
        extractor = self.make_extractor()
        if not extractor.can_shard_locally():
            for call in (extractor.local_shards, extractor.local_parts):
                with pytest.raises(UnsupportedError):
                    call(dtype)
            return
        for turn in range(2):
            if turn:
                self.change()
            specs, truth = extractor.metadata(dtype), self.truth()
            found: list[HeldTensor] = []
            for part in extractor.local_shards(dtype):
                assert torch.is_grad_enabled(), "the consumer's grad mode is its own"
                found.append(part)
            assert list(dict.fromkeys(part.spec.name for part in found)) == list(specs.names)
            boxes = [(specs.index_of[part.spec.name], part.box or whole_box(part.spec.shape)) for part in found]
            for index, spec in enumerate(specs):
                check_partition(spec.shape, [box for at, box in boxes if at == index], parameter=spec.name)
            assert list(extractor.local_boxes()) == boxes
            live = list(extractor.local_parts(dtype))
            assert [(part.spec, part.box) for part in live] == [(part.spec, part.box) for part in found]
            for (_, box), part, same in zip(boxes, found, live, strict=True):
                wanted = torch_dtype(part.spec.dtype)
                right = _seen(cut_out(truth[part.spec.name].detach(), box).to(wanted))
                assert part.tensor.is_contiguous()
                assert _seen(part.tensor) == _seen(same.tensor.to(wanted)) == right

    @_DTYPES
    def test_a_chunk_that_was_handed_out_is_not_kept(self, dtype: str | None) -> None:
        """Seen red: a local name for the chunk in `_stream`."""
        for chunk in self.make_extractor(chunk_bytes=100).extract_weights(dtype):
            tensors = [weakref.ref(tensor) for tensor in chunk.tensors]
            del chunk
            assert [tensor() for tensor in tensors] == [None] * len(tensors)

    @pytest.mark.parametrize(
        ("options", "error"),
        [
            ({"chunk_bytes": 0}, ConfigError),
            ({"dtype_overrides": {"*": "int8"}}, ConfigError),
            ({"dtype_overrides": {"*": "float8_e4m3fn"}}, ConfigError),
            ({"dtype_overrides": {"no tensor": "float32"}}, ConfigError),
            ({"name_map": lambda name: "one name"}, ConfigError),
            ({"name_map": lambda name: None}, ExtractError),
        ],
        ids=["no-bytes", "int8", "float8", "no-match", "one-name", "no-name"],
    )
    def test_options_that_make_no_sense_are_refused(self, options: Mapping[str, Any], error: type[Exception]) -> None:
        """By the constructor. Seen red: each of its refusals left out."""
        with pytest.raises(error):
            self.make_extractor(**options)

    def test_a_call_refuses_before_anything_is_extracted(self) -> None:
        """And the extractor goes on working. Seen red: `extract_weights` as a generator."""
        extractor = self.make_extractor()
        calls: list[Callable[[str], object]] = [extractor.metadata, extractor.chunk_plan, extractor.extract_weights]
        for call in calls + [extractor.local_shards, extractor.local_parts] * extractor.can_shard_locally():
            with pytest.raises(ConfigError):
                call("int8")
        assert self.streamed(extractor) == self.expected()


def _seen(tensor: torch.Tensor) -> Seen:
    return dtype_name(tensor.dtype), tuple(tensor.shape), bytes_of(tensor)


def _module(name: str) -> str:
    return name.rpartition(".")[0]
