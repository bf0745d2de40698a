"""The checkpoint engine for NeMo-RL, driven in the order in which its `CheckpointEngineWeightSynchronizer` does."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.standins.frameworks import NEMO_RL_METHODS, provide_nemo_rl, takes

provide_nemo_rl()

from weightsync.adapters.nemo_rl import WeightSyncCheckpointEngine  # noqa: E402
from weightsync.errors import InvalidRequestError, StateError, WeightSyncError  # noqa: E402
from weightsync.handles.fanout import in_thread  # noqa: E402
from weightsync.memory import Reader, is_read  # noqa: E402

LONG_S = 60.0
SHM = Path("/dev/shm")


def weights(value: float) -> dict[str, torch.Tensor]:
    whole = torch.ones(256, 128, dtype=torch.bfloat16)
    whole[0] = value
    return {"a": whole, "b": torch.full((3,), value, dtype=torch.bfloat16), "none": torch.empty(0, 4)}


class World:
    """Workers of both kinds, made alike."""

    def __init__(self, policy: int, rollout: int, **settings: Any) -> None:
        self._made = [
            WeightSyncCheckpointEngine(**{"bucket_size": 1 << 20, "host": "127.0.0.1", "timeout_s": LONG_S, **settings})
            for _ in range(policy + rollout)
        ]
        self.policy, self.rollout = self._made[:policy], self._made[policy:]

    def connect(self) -> None:
        metadata = [{**each.prepare(), "rank": rank} for rank, each in enumerate(self._made)]
        sizes = {"train_world_size": len(self.policy), "rollout_world_size": len(self.rollout)}
        for rank, each in enumerate(self.policy):
            each.init_policy_process_group(worker_rank=rank, metadata=metadata, **sizes)
        for rank, each in enumerate(self.rollout):
            each.init_rollout_process_group(rollout_rank=rank, metadata=metadata, **sizes)

    def refit(self, sent: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
        """One transfer: all workers at once. What each rollout worker got."""
        walked = [[] for _ in self.policy]  # type: ignore[var-annotated]

        def gathered(rank: int) -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in sent.items():
                walked[rank].append(name)
                yield name, tensor

        async def received(engine: WeightSyncCheckpointEngine) -> dict[str, torch.Tensor]:
            return {name: t.clone() async for batch in engine.receive_weight_batches() for name, t in batch}

        receiving = [in_thread(lambda e=each: asyncio.run(received(e)), name="rollout") for each in self.rollout]
        for rank, each in enumerate(self.policy):
            asyncio.run(each.send_weights(gathered(rank)))
        assert walked == [list(sent)] * len(self.policy)
        return [each.result(LONG_S) for each in receiving]

    def close(self) -> None:
        for each in self._made:
            each.finalize()


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name].bfloat16(), other[name]) for name in one)


def test_it_has_what_the_base_class_asks_for() -> None:
    for name, arguments in NEMO_RL_METHODS.items():
        assert takes(getattr(WeightSyncCheckpointEngine, name), arguments), name


@pytest.mark.parametrize("mode", ["auto", "delta"])
def test_one_prepare_serves_many_transfers(mode: str) -> None:
    """Two training ranks, three rollout workers: each gets the version that is sent, never the one before."""
    with contextlib.closing(World(2, 3, mode=mode)) as world:
        world.connect()
        for value in range(2, 6):
            sent = weights(float(value))
            assert all(same(sent, got) for got in world.refit(sent))


def test_the_option_host_is_an_address_of_training_rank_0s_node_alone() -> None:
    """All workers are given it, on every node. Seen red: an OSError out of `prepare` of a worker on another node."""
    with contextlib.closing(World(2, 1)) as world:
        for each in (world.policy[1], world.rollout[0]):
            each._host = "192.0.2.1"  # another node's
        world.connect()
        sent = weights(2.0)
        assert all(same(sent, got) for got in world.refit(sent))
    refused = pytest.raises(InvalidRequestError, match=r"training rank 0 can't listen on 192\.0\.2\.1")
    with contextlib.closing(World(1, 1, host="192.0.2.1")) as world, refused:
        world.connect()


def test_everything_begins_anew_after_finalize() -> None:
    """As `release_after_refit` has it."""
    with contextlib.closing(World(1, 2, release_after_refit=True)) as world:
        for value in range(2, 4):
            world.connect()
            sent = weights(float(value))
            assert all(same(sent, got) for got in world.refit(sent))
            world.close()


def test_a_batch_has_no_more_than_a_bucket() -> None:
    with contextlib.closing(World(1, 1, bucket_size=1 << 10)) as world:
        world.connect()
        sender = in_thread(lambda: asyncio.run(world.policy[0].send_weights(iter(weights(2.0).items()))), name="policy")

        async def batches() -> list[list[str]]:
            return [[name for name, _ in batch] async for batch in world.rollout[0].receive_weight_batches()]

        got = asyncio.run(batches())
        sender.result(LONG_S)
        assert sorted(name for batch in got for name in batch) == ["a", "b", "none"]
        assert len(got) == 2  # "a" is larger than a bucket, and comes alone


def test_the_last_batch_comes_while_its_memory_is_held() -> None:
    """Seen red: the trainer's segment was given back before the batch that reads it was handed out."""
    with contextlib.closing(World(1, 1)) as world:
        world.connect()
        sender = in_thread(lambda: asyncio.run(world.policy[0].send_weights(iter(weights(2.0).items()))), name="policy")

        async def held() -> list[bool]:
            return [mapped() async for _ in world.rollout[0].receive_weight_batches()]

        assert asyncio.run(held()) == [True]
        sender.result(LONG_S)
        assert not mapped()


def mapped() -> bool:
    """Whether anybody reads a segment of this process."""
    return any(is_read(path.name, Reader.MAPPED) for path in SHM.glob(f"weightsync-{os.getpid()}-*"))


def test_what_can_not_be_is_refused() -> None:
    with contextlib.closing(World(1, 1)) as world:
        offers = [each.prepare() for each in (*world.policy, *world.rollout)]
        sizes = {"train_world_size": 1, "rollout_world_size": 1}
        with pytest.raises(InvalidRequestError, match="2 workers take part, 1 have prepared"):
            world.rollout[0].init_rollout_process_group(rollout_rank=0, metadata=offers[:1], **sizes)
        with pytest.raises(InvalidRequestError, match="another checkpoint engine"):
            world.rollout[0].init_rollout_process_group(rollout_rank=0, metadata=[{"ip": "x"}, {}], **sizes)
        with pytest.raises(StateError, match="init_rollout_process_group comes first"):
            asyncio.run(anext(world.rollout[0].receive_weight_batches()))


def test_a_transfer_that_was_broken_off_does_not_come_again() -> None:
    """Its worker asks for the next one before that is sent. Seen to fail: it was given the one before once more."""
    with contextlib.closing(World(1, 1)) as world:
        world.connect()

        async def first_batch() -> None:
            given = world.rollout[0].receive_weight_batches()
            await anext(given)
            await given.aclose()

        sending = in_thread(
            lambda: asyncio.run(world.policy[0].send_weights(iter(weights(2.0).items()))), name="policy"
        )
        asyncio.run(first_batch())
        sending.result(LONG_S)
        sent = weights(3.0)
        (got,) = world.refit(sent)
        assert same(sent, got)


def test_a_worker_whose_transfer_failed_takes_no_older_one() -> None:
    """It can't know whether that version came after all. Seen red: it stayed one version behind, for ever."""
    with contextlib.closing(World(1, 2)) as world:
        world.connect()
        late = world.rollout[0]
        late._timeout_s = 0.2

        async def receive() -> None:
            await anext(late.receive_weight_batches())

        with pytest.raises(WeightSyncError, match=r"no version came within"):
            asyncio.run(receive())
        late._timeout_s = LONG_S
        asyncio.run(world.policy[0].send_weights(iter(weights(2.0).items())))
        with pytest.raises(StateError, match="prepare all workers again"):
            asyncio.run(receive())
        world.connect()  # the other has not taken that one: it waits for the next one, too
        for value in (3.0, 4.0):
            sent = weights(value)
            assert all(same(sent, got) for got in world.refit(sent))


def test_a_worker_that_comes_later_waits_for_the_next_transfer() -> None:
    """Seen red: it was given the last one."""
    with contextlib.closing(World(1, 2)) as world:
        late = world.rollout.pop()
        world._made.remove(late)
        world.connect()
        world.refit(weights(2.0))
        world.rollout.append(late)
        world._made.append(late)
        world.connect()
        sent = weights(3.0)
        assert all(same(sent, got) for got in world.refit(sent))
