"""The pull path with an extractor of every trainer: what was trained is what is pulled, bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch.distributed as dist
from safetensors.torch import load_file

from tests.multiproc.trainers import build_trainer, cast_bytes_of
from tests.standins.processes import RankPool
from weightsync.host.puller import Puller
from weightsync.memory.folder import path_of
from weightsync.tensors import byte_array
from weightsync.trainer.publisher import WeightManager
from weightsync.types import Deadline


def _train_and_publish(rank: int, world_size: int, kind: str) -> str:
    trainer = build_trainer(kind, rank, world_size)
    path = ""
    with WeightManager("actor", dtype="bfloat16") as manager:
        for version in (1, 2):
            trainer.step(version)
            report = manager.offload(trainer.extractor, version, rank, world_size)
            assert report.published
            path = report.path
            truth = trainer.truth()  # a collective
            if rank == 0:
                puller = Puller(manager.endpoint, "actor", receiver_id="test")
                with puller.pull(deadline=Deadline(30.0)) as pulled:
                    assert pulled.version.number == version
                    found = load_file(path_of(pulled.segment))
                puller.close()
                assert {name: byte_array(t).tobytes() for name, t in found.items()} == cast_bytes_of(truth)
            dist.barrier()
    return path


@pytest.mark.parametrize(("kind", "path"), [("fsdp", "shards"), ("deepspeed", "gather"), ("megatron", "gather")])
def test_what_was_trained_is_what_is_pulled(two_ranks: Callable[[str], RankPool], kind: str, path: str) -> None:
    """Two ranks, two real steps. FSDP2's shards go to their places without communication, the others are gathered."""
    assert two_ranks(kind).run(_train_and_publish, kind) == [path, path]
