"""The contract with a bridge, by a stand-in of Megatron-Bridge's signature. Megatron-Bridge itself can't be installed
beside this environment's transformers and was never run here."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from weightsync import WeightSyncConfig, extractor_for
from weightsync.errors import ConfigError, ExtractError, MissingDependencyError, UnsupportedError, WeightSyncError
from weightsync.extract.deepspeed import DeepSpeedWeightExtractor
from weightsync.extract.megatron import MegatronWeightExtractor
from weightsync.extract.megatron_export import MegatronCoreExporter

Export = dict[str, torch.Tensor]


class Weight(NamedTuple):
    """As Megatron-Bridge's tuple was at first."""

    param_name: str
    weight: torch.Tensor


class LongWeight(NamedTuple):
    """As it is in some releases."""

    param_name: str
    weight: torch.Tensor
    megatron_param_name: str


class AutoBridge:
    """The signature of Megatron-Bridge's `AutoBridge.export_hf_weights`."""

    def __init__(self, export: Export, wrap: Callable[..., Any] = Weight) -> None:
        self.export = export
        self.wrap = wrap
        self.closed = 0

    def export_hf_weights(
        self,
        model: list[nn.Module],
        cpu: bool = False,
        show_progress: bool = True,
        conversion_tasks: list[Any] | None = None,
        merge_adapter_weights: bool = True,
    ) -> Iterable[Any]:
        assert isinstance(model, list)
        assert not cpu
        assert not show_progress
        assert conversion_tasks is None
        assert not torch.is_grad_enabled()
        try:
            for name, tensor in self.export.items():
                yield self.wrap(name, tensor)
        finally:
            self.closed += 1


def export() -> Export:
    torch.manual_seed(0)
    return {
        "embed": torch.randn(7, 4),
        "rope": torch.randn(3),
        "q": torch.randn(4, 4, dtype=torch.bfloat16),
        "scale": torch.arange(3),
        "view": torch.randn(6, 4).t(),
        "head": torch.randn(7, 4),
    }


def extractor(bridge: Any, **settings: Any) -> MegatronWeightExtractor:
    return MegatronWeightExtractor([nn.Linear(2, 2)], bridge=bridge, **settings)


def flat(of: MegatronWeightExtractor, dtype: str | None = None) -> dict[str, torch.Tensor]:
    return {n: t for c in of.extract_weights(dtype) for n, t in zip(c.names, c.tensors, strict=True)}


@pytest.mark.parametrize("wrap", [Weight, lambda *pair: LongWeight(*pair, "m"), lambda *pair: pair])
def test_every_tensor_comes_once_in_the_order_of_the_export(wrap: Callable[..., Any]) -> None:
    bridge = AutoBridge(export(), wrap)
    made = extractor(bridge, chunk_bytes=120, dtype_overrides={"head": "float32"})
    assert bridge.closed == 1
    for _ in range(2):
        found = flat(made, "bfloat16")
        specs = made.metadata("bfloat16")
        assert [(s.name, s.shape) for s in specs] == [(n, tuple(t.shape)) for n, t in export().items()]
        assert list(found) == list(export())
        assert [str(t.dtype) for t in found.values()] == [f"torch.{s.dtype}" for s in specs]
        for name, tensor in export().items():
            wanted = tensor if name in ("scale", "head") else tensor.to(torch.bfloat16)
            assert found[name].is_contiguous()
            assert torch.equal(found[name], wanted)
    assert bridge.closed == 3
    plan = made.chunk_plan("bfloat16")
    assert len(plan) == 3
    assert all(chunk.nbytes <= 120 for chunk in plan)
    assert not made.can_shard_locally()
    with pytest.raises(UnsupportedError):
        made.local_shards()


def test_a_name_map_renames_and_drops() -> None:
    names = {"embed": None, "rope": "model.rope", "q": "model.q", "scale": None, "view": "model.view", "head": None}
    bridge = AutoBridge(export())
    found = flat(extractor(bridge, name_map=names.get))
    assert list(found) == ["model.rope", "model.q", "model.view"]
    assert torch.equal(found["model.view"], export()["view"])
    assert bridge.closed == 2


def _changed(change: str) -> Export:
    other = export()
    if change == "shape":
        other["q"] = torch.zeros(4, 5, dtype=torch.bfloat16)
    elif change == "dtype":
        other["q"] = other["q"].float()
    elif change == "less":
        del other["head"]
    elif change == "more":
        other["extra"] = torch.zeros(1)
    elif change == "order":
        other = {name: other[name] for name in ["embed", "q", "rope", "scale", "view", "head"]}
    return other


@pytest.mark.parametrize(
    ("change", "parameter"), [("shape", "q"), ("dtype", "q"), ("less", "head"), ("more", "extra"), ("order", "rope")]
)
@pytest.mark.parametrize("dropped", ["", "head"])
def test_an_export_that_has_changed_is_refused(change: str, parameter: str, dropped: str) -> None:
    """Also where the last tensors are dropped: nothing may come after them, and they may not be missing."""
    bridge = AutoBridge(export())
    made = extractor(bridge, chunk_bytes=200, name_map=lambda name: None if name == dropped else name)
    bridge.export = _changed(change)
    with pytest.raises(ExtractError) as caught:
        flat(made)
    assert caught.value.parameter == parameter
    assert bridge.closed == 2
    bridge.export = export()
    assert flat(made)


def test_a_deviating_chunk_is_taken_off_the_export_to_its_end() -> None:
    """So a rank that sees a deviation still takes part in the chunk's collectives."""
    bridge = AutoBridge(export())
    made = extractor(bridge, chunk_bytes=10_000)
    taken = []
    bridge.export = _changed("shape")
    bridge.wrap = lambda name, tensor: (taken.append(name), Weight(name, tensor))[1]
    with pytest.raises(ExtractError):
        next(made.extract_weights())
    assert taken == list(export())


def test_no_more_than_two_chunks_and_a_tensor_are_alive() -> None:
    """Seen to fail with a stream that keeps a reference to its last chunk, and with a survey that keeps tensors."""
    memory: list[weakref.ref[Any]] = []
    most_alive = 0

    def fresh(model: Any, cpu: bool, show_progress: bool) -> Iterable[Any]:
        nonlocal most_alive
        for number in range(20):
            array = np.full(8, number, dtype=np.float32)
            memory.append(weakref.ref(array))
            most_alive = max(most_alive, sum(ref() is not None for ref in memory))
            yield f"w{number}", torch.from_numpy(array)
            del array

    bridge = AutoBridge({})
    bridge.export_hf_weights = fresh  # type: ignore[method-assign]
    made = extractor(bridge, chunk_bytes=4 * 32)
    assert most_alive <= 2
    held = None
    for chunk in made.extract_weights():
        held = chunk
        del chunk
    assert held is not None
    assert 8 <= most_alive <= 4 + 4 + 1


def _bridge_that(does: str) -> Any:
    def pairs() -> Iterable[Any]:
        yield "a", torch.zeros(2)
        if does == "raises":
            raise RuntimeError("no memory")
        yield {"number": 7, "pair": ("b", 7), "triple": ("b", torch.zeros(1), 3), "twice": ("a", torch.ones(2))}[does]

    bridge = AutoBridge({})
    bridge.export_hf_weights = lambda model, cpu, show_progress: pairs()  # type: ignore[method-assign]
    return bridge


@pytest.mark.parametrize(
    ("does", "kind", "text"),
    [
        ("raises", ExtractError, "no memory"),
        ("number", ExtractError, "a name and a tensor after a"),
        ("pair", ExtractError, "a str and a int"),
        ("triple", ExtractError, "exported a tuple"),
        ("twice", ConfigError, "both get the name 'a'"),
    ],
)
def test_a_bridge_that_misbehaves_is_refused_at_once(does: str, kind: type[WeightSyncError], text: str) -> None:
    with pytest.raises(kind, match=text):
        extractor(_bridge_that(does))


@pytest.mark.parametrize(
    ("models", "settings", "text"),
    [
        ([], {"bridge": AutoBridge({})}, "got none"),
        ([nn.Linear(1, 1)], {"bridge": object()}, "export_hf_weights, a object has none"),
        ([nn.Linear(1, 1)], {"bridge": AutoBridge(export()), "group_by_module": True}, "buckets"),
    ],
)
def test_wrong_arguments_are_refused(models: list[nn.Module], settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        MegatronWeightExtractor(models, **settings)


@pytest.mark.parametrize(
    ("package", "make"),
    [
        ("deepspeed", lambda: DeepSpeedWeightExtractor(nn.Linear(1, 1))),
        ("megatron.core", lambda: MegatronCoreExporter(vocab_size=2)),
    ],
)
def test_a_package_that_is_not_installed_is_one_clear_error(
    package: str, make: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith(f"{package}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingDependencyError, match=rf"pip install 'weightsync\[{package.partition('.')[0]}\]'"):
        make()


def test_the_config_leads_to_it() -> None:
    model, bridge = nn.Linear(2, 2), AutoBridge(export())
    config = WeightSyncConfig.load({"transfer": {"training_backend": "megatron"}, "extract": {"chunk_bytes": 99}})
    made = extractor_for(config, [model], bridge=bridge)
    assert isinstance(made, MegatronWeightExtractor)
    assert len(made.chunk_plan()) > 3
    with pytest.raises(ConfigError, match="needs bridge="):
        extractor_for(config, [model])
    with pytest.raises(ConfigError, match="'fsdp'"):
        extractor_for(WeightSyncConfig.load({"transfer": {"training_backend": "fsdp"}}), model, bridge=bridge)


class OverlappingDdp(nn.Module):
    """Megatron's DistributedDataParallel as the extractor sees it: after a step a gather is due."""

    def __init__(self, **config: bool) -> None:
        super().__init__()
        self.ddp_config = SimpleNamespace(overlap_param_gather=True, **config)
        self.module = nn.Linear(2, 2)
        self.live = torch.zeros(2)
        self.stepped = torch.zeros(2)

    def start_param_sync(self, *_: object, force_sync: bool = False) -> None:
        assert force_sync, "without it the gather is only begun"
        self.live.copy_(self.stepped)


def test_a_gather_that_megatron_left_to_the_next_forward_pass_is_completed_first() -> None:
    ddp = OverlappingDdp()
    wrapped = nn.Module()
    wrapped.module = ddp
    taken = MegatronWeightExtractor([wrapped], bridge=AutoBridge({"w": ddp.live}))
    ddp.stepped.fill_(3)
    chunks = list(taken.extract_weights("float32"))
    assert torch.equal(chunks[0].tensors[0], ddp.stepped)


@pytest.mark.parametrize("option", ["reuse_grad_buf_for_mxfp8_param_ag", "fp8_param_gather"])
def test_a_gather_that_can_not_be_completed_is_refused_by_name(option: str) -> None:
    with pytest.raises(UnsupportedError, match=option):
        MegatronWeightExtractor([OverlappingDdp(**{option: True})], bridge=AutoBridge({"w": torch.zeros(2)}))
    early = OverlappingDdp()
    early.overlap_param_gather_with_optimizer_step = True
    with pytest.raises(UnsupportedError, match="with_optimizer_step"):
        MegatronWeightExtractor([early], bridge=AutoBridge({"w": torch.zeros(2)}))
