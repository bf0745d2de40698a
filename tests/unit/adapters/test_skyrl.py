"""The strategy for SkyRL, driven as its workers do: a function chooses a class, ranks make senders and walk chunks."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import weightsync
from tests.multiproc.spine import TOKEN, build, shard, step
from tests.standins.frameworks import SKYRL_SENDER, SKYRL_STRATEGY, provide_skyrl, takes
from tests.standins.processes import run_ranks
from tests.unit.adapters.test_trl import gathered, same

provide_skyrl()

from skyrl.backends.skyrl_train import weight_sync  # noqa: E402

from weightsync.adapters.skyrl import PublishSender, install, strategy  # noqa: E402


@dataclasses.dataclass
class Chunk:
    """Some tensors, as SkyRL's `WeightChunk` has them."""

    names: list[str]
    tensors: list[torch.Tensor]


def chunks(model: torch.nn.Module, size: int = 3) -> Iterator[Chunk]:
    pairs = list(gathered(model))
    for at in range(0, len(pairs), size):
        names, tensors = zip(*pairs[at : at + size], strict=True)
        yield Chunk(list(names), list(tensors))


def test_it_has_what_the_base_classes_ask_for() -> None:
    made = strategy(to=[])
    for kind, methods in ((PublishSender, SKYRL_SENDER), (made, SKYRL_STRATEGY)):
        for name, arguments in methods.items():
            assert takes(getattr(kind, name), arguments), name


def test_a_sender_takes_what_later_releases_say_besides() -> None:
    """SkyRL's source behind 0.3. Seen red: a TypeError at each sync."""
    asyncio.run(PublishSender(None).send_chunks(iter([]), weight_metadata={}, reset_prefix_cache=True))


def worker_main(rank: int, world_size: int, url: str) -> int:
    """A training worker, as `init_weight_sync_state` and `broadcast_to_inference_engines` of SkyRL's have it."""
    provide_skyrl()
    install("actor", to=[url], token=TOKEN, port=0)
    chosen = weight_sync.get_transfer_strategy_cls(weight_sync_backend="nccl", colocate_all=False)
    info = chosen.create_init_info(None, inference_world_size=2)
    assert info.for_servers(1, 2, dp_size=1) == []
    sender = chosen.create_sender(init_info=info, inference_client=None)
    model = shard(build(5), "shard0", world_size)
    for _ in range(3):
        step(model)
        asyncio.run(sender.send_chunks(chunks(model), weight_metadata={}))
    sender.teardown()
    return 0 if sender.transfer is None else int(sender.transfer.version.number)


def test_two_ranks_publish_and_a_host_serves_each_version_when_the_sender_returns() -> None:
    served, wanted = build(99, dtype=torch.bfloat16), build(5)
    with weightsync.serve({"actor": served}, token=TOKEN, port=0) as service:
        assert run_ranks(worker_main, 2, service.url) == [3, 0]
        assert service.model_status("actor").version == 3
    for _ in range(3):
        step(wanted)
    assert same(wanted, served)


def test_every_rank_walks_its_chunks_though_one_is_wrong() -> None:
    """Others walk theirs in step; and nothing is sent."""
    sender: Any = strategy("actor", port=0).create_sender(None, None)
    walked = []

    def wrong() -> Iterator[Chunk]:
        for chunk in chunks(build(5), size=1):
            walked.append(chunk.names[0])
            yield Chunk(["same"], chunk.tensors)

    with pytest.raises(weightsync.WeightSyncError, match="comes twice"):
        asyncio.run(sender.send_chunks(wrong()))
    assert len(walked) == len(list(gathered(build(5))))
    assert sender.transfer.version is None
    sender.teardown()
