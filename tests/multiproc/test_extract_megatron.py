"""MegatronWeightExtractor and MegatronCoreExporter on real tensor-parallel ranks of megatron-core, on the CPU."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.multiproc.megatron_cpu import megatron_model, megatron_shard
from tests.multiproc.trainers import VOCAB, build_trainer, cast_bytes_of, check_push, hf_config, hf_model, tokens_of
from tests.standins.processes import RankPool, children, free_port, in_gloo_world
from weightsync.errors import UnsupportedError, WeightSyncError
from weightsync.extract.base import WeightExtractor
from weightsync.extract.megatron import MegatronWeightExtractor
from weightsync.extract.megatron_export import MegatronCoreExporter
from weightsync.observe import Recorder
from weightsync.tensors import byte_array
from weightsync.trainer.extraction import LockstepExtraction
from weightsync.trainer.ranks import TrainingRanks
from weightsync.types import Deadline


def _bytes_of(extractor: WeightExtractor, dtype: str | None) -> dict[str, bytes]:
    found = {}
    for chunk in extractor.extract_weights(dtype):
        found |= {name: byte_array(t).tobytes() for name, t in zip(chunk.names, chunk.tensors, strict=True)}
    return found


def _extract(rank: int, world_size: int) -> None:
    from megatron.core import parallel_state

    for tied in (False, True):
        _extract_one(rank, world_size, tied)
        parallel_state.destroy_model_parallel()


def _extract_one(rank: int, world_size: int, tied: bool) -> None:
    trainer = build_trainer("megatron", rank, world_size, tied=tied)
    reference = hf_model(tied=tied)
    start = {name: parameter.detach().clone() for name, parameter in reference.named_parameters()}
    assert ("lm_head.weight" in start) != tied
    for settings in ({"chunk_bytes": None}, {"chunk_bytes": 30_000}, {"chunk_bytes": 1 << 30}):
        extractor = MegatronWeightExtractor(trainer.model, bridge=MegatronCoreExporter(vocab_size=VOCAB), **settings)
        for dtype in (torch.float32, torch.bfloat16):
            wanted = cast_bytes_of(start, dtype)
            name = str(dtype).removeprefix("torch.")
            assert _bytes_of(extractor, name) == wanted
            assert {spec.name: spec.nbytes for spec in extractor.metadata(name)} == {
                key: len(raw) for key, raw in wanted.items()
            }

    # What both models compute is the proof that the names mean the same; after a step as well.
    tokens = tokens_of(99)
    for number in (0, 1, 2):
        if number:
            trainer.step(number)
            truth = trainer.truth()
            assert _bytes_of(trainer.extractor, None) == cast_bytes_of(truth, torch.float32)
            assert any(not torch.equal(truth[name], tensor) for name, tensor in start.items())
        exported = {n: t for c in trainer.extractor.extract_weights() for n, t in zip(c.names, c.tensors, strict=True)}
        reference.load_state_dict(exported, strict=not tied)
        with torch.no_grad():
            wanted_logits = reference(input_ids=tokens).logits
        assert wanted_logits.abs().max() > 0.5
        torch.testing.assert_close(trainer.logits(tokens), wanted_logits, rtol=0, atol=5e-6)


@pytest.fixture
def ranks(two_ranks: Callable[[str], RankPool]) -> RankPool:
    return two_ranks("megatron")


def test_tensor_parallel_weights_leave_under_hugging_faces_names(ranks: RankPool) -> None:
    """The vocabulary is padded from 128 to 192 rows. Seen to fail: with q, k and v cut one behind the other instead of
    group by group, with gate and up halved after joining, and with the padding left on."""
    ranks.run(_extract)


def _extract_replicas(rank: int, world_size: int) -> list[str]:
    """Two data-parallel replicas under a wrapper; then what the plain exporter refuses."""
    from megatron.core import parallel_state

    config = hf_config()
    whole = {name: p.detach() for name, p in hf_model().named_parameters()}
    model = megatron_model(config, 1)  # tensor-parallel size 1: the two ranks are replicas
    with torch.no_grad():
        for name, tensor in megatron_shard(whole, config, 0, 1).items():
            model.get_parameter(name).copy_(tensor)
    wrapped = nn.Module()  # as Float16Module and Megatron's DDP wrap it
    wrapped.module = model
    exporter = MegatronCoreExporter(vocab_size=VOCAB)
    assert _bytes_of(MegatronWeightExtractor([wrapped], bridge=exporter), None) == cast_bytes_of(whole, torch.float32)
    refused = []

    def refuse() -> None:
        try:
            MegatronWeightExtractor([model], bridge=exporter)
        except UnsupportedError as error:
            refused.append(error.parameter or error.message)

    for setting, value in {
        "num_moe_experts": 2,
        "gated_linear_unit": False,
        "layernorm_zero_centered_gamma": True,
    }.items():
        old = getattr(model.config, setting)
        setattr(model.config, setting, value)
        refuse()
        setattr(model.config, setting, old)
    model.decoder.adapter = nn.Linear(2, 2)
    refuse()
    try:
        MegatronWeightExtractor([model, model], bridge=exporter)
    except UnsupportedError as error:
        refused.append(error.message)
    parallel_state.destroy_model_parallel()
    return refused


def test_replicas_wrappers_and_refusals(ranks: RankPool) -> None:
    for refused in ranks.run(_extract_replicas):
        words = ["experts", "without gate", "zero-centered", "decoder.adapter.weight", "pipeline"]
        assert len(refused) == len(words)
        assert all(word in text for word, text in zip(words, refused, strict=True)), refused


class CollectiveBridge:
    """Every tensor takes a collective of all ranks, as a real export does."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.deviates_at: int | None = None
        self.dies_at: int | None = None

    def export_hf_weights(self, model: list[nn.Module], cpu: bool, show_progress: bool) -> Iterable[Any]:
        for number in range(self.count):
            if number == self.dies_at:
                os._exit(9)
            tensor = torch.full((4,), float(number))
            dist.all_reduce(tensor)
            yield f"w{number}", tensor[:3] if number == self.deviates_at else tensor


def _lockstep(extractor: WeightExtractor, ranks: TrainingRanks, rank: int) -> tuple[str, int]:
    """The error of one extraction as `PushSync` runs it ("" without), and how many chunks were handed over."""
    extraction = LockstepExtraction(
        extractor, dtype=None, ranks=ranks, deadline=Deadline(20), recorder=Recorder("t"), keep=rank == 0
    )
    extraction.start()
    taken = 0
    try:
        if rank == 0:
            for _ in extraction.chunks():
                taken += 1
        extraction.finish()
    except WeightSyncError as error:
        return f"{type(error).__name__} {error.parameter}", taken
    return "", taken


def _deviate(rank: int, world_size: int) -> list[Any]:
    bridge = CollectiveBridge(6)
    extractor = MegatronWeightExtractor(nn.Linear(2, 2), bridge=bridge, chunk_bytes=32)
    ranks = TrainingRanks(timeout_s=10)
    seen: list[Any] = [_lockstep(extractor, ranks, rank)]
    bridge.deviates_at = 2 if rank == 1 else None  # the first tensor of a chunk of two
    seen.append(_lockstep(extractor, ranks, rank))
    bridge.deviates_at = None
    seen.append(_lockstep(extractor, ranks, rank))
    bridge.count = 5 if rank == 1 else 6
    try:
        MegatronWeightExtractor(nn.Linear(2, 2), bridge=Local(bridge.count))
    except WeightSyncError as error:
        seen.append(f"{type(error).__name__} {error.message}")
    return seen


class Local(CollectiveBridge):
    """Without collectives: the ranks may differ in number."""

    def export_hf_weights(self, model: list[nn.Module], cpu: bool, show_progress: bool) -> Iterable[Any]:
        for number in range(self.count):
            yield f"w{number}", torch.zeros(2)


def test_a_rank_that_sees_another_export_stops_all_at_the_same_chunk(ranks: RankPool) -> None:
    """Seen to fail: raising in the middle of the chunk leaves the other rank in a collective that no other enters."""
    first, second = ranks.run(_deviate, timeout_s=60)
    assert first[0] == ("", 3)
    assert second[0] == ("", 0)
    assert first[1] == ("TransferAbortedError None", 2), "what it had gathered went to the sender, and no more"
    assert second[1] == ("ExtractError w2", 0)
    assert first[2] == ("", 3), "the next one works"
    for seen in (first, second):
        assert "ExtractError the bridge's export is not the same on all training ranks" in seen[3]


def _die(rank: int, world_size: int) -> tuple[str, float]:
    bridge = CollectiveBridge(6)
    extractor = MegatronWeightExtractor(nn.Linear(2, 2), bridge=bridge, chunk_bytes=32)
    ranks = TrainingRanks(timeout_s=10)
    bridge.dies_at = 3 if rank == 1 else None
    start = time.monotonic()
    return _lockstep(extractor, ranks, rank)[0], time.monotonic() - start


def test_a_rank_that_dies_in_the_export_is_a_typed_error_on_the_others() -> None:
    with children() as start:
        port = free_port()
        first, _ = [start(in_gloo_world, rank, 2, port, _die, ()) for rank in range(2)]
        error, took_s = first.result(30)
    assert error == "TrainerRankError None"
    assert took_s < 10


def test_an_engine_holds_what_megatron_trained(ranks: RankPool) -> None:
    """Two tensor-parallel ranks, two steps and two syncs by broadcast."""
    check_push("megatron", ranks)
