"""The checkpoint engine for verl, driven as its manager does: real agents and pulls, its base class.

verl's own manager, workers and loader of changes are in tests/adapters/test_verl.py, which needs verl.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.multiproc.pull_kit import wait_until
from tests.standins.frameworks import VERL_METHODS, checksum, provide_verl, takes
from tests.standins.processes import run_ranks

provide_verl()

from weightsync.adapters.checkpoint_engine import Receiver  # noqa: E402
from weightsync.adapters.verl import WeightSyncCheckpointEngine, _all_have  # noqa: E402
from weightsync.adapters.verl_flush import Piece, needs_whole  # noqa: E402
from weightsync.errors import ConfigError, InvalidRequestError, StorageError, TransferError, WeightSyncError  # noqa: E402
from weightsync.host import delta_intake  # noqa: E402
from weightsync.types import TensorSpec  # noqa: E402

LONG_S = 60.0


def weights(value: float) -> dict[str, torch.Tensor]:
    """Most stays; a whole and a part of a tensor change."""
    whole = torch.ones(256, 128, dtype=torch.bfloat16)
    whole[3] = value
    other = torch.full((5,), value, dtype=torch.float32)
    return {"a.weight": whole, "b": other, "none": torch.empty(0, 4, dtype=torch.bfloat16)}


class World:
    """A master, a training rank beside it, and rollout workers."""

    def __init__(self, workers: int, **settings: Any) -> None:
        made = {"bucket_size": 1 << 20, "host": "127.0.0.1", "timeout_s": LONG_S, **settings}
        made["delta_budget_bytes"] = 1 << 30
        self.ranks = [WeightSyncCheckpointEngine(is_master=rank == 0, **made) for rank in range(2)]
        self.made, self.workers = made, [WeightSyncCheckpointEngine(**made) for _ in range(workers)]

    def update(self, sent: dict[str, torch.Tensor]) -> list[Any]:
        """What each worker's `receive_weights` gives."""
        metadata = [each.prepare() for each in (*self.ranks, *self.workers)]
        own, theirs = WeightSyncCheckpointEngine.build_topology(len(self.ranks), len(self.workers), metadata)
        for each, plan in zip((*self.ranks, *self.workers), (*own["plan"], *theirs["plan"]), strict=True):
            each.init_process_group(plan=plan)
        for each in self.ranks:
            asyncio.run(each.send_weights(iter(sent.items()), global_steps=1))
        given = [each.receive_weights(global_steps=1) for each in self.workers]
        for each in (*self.ranks, *self.workers):
            each.finalize()
        return given

    def close(self) -> None:
        for each in (*self.ranks, *self.workers):
            if each._sender is not None:
                each._sender.close()
            if each._receiver is not None:
                each._receiver.close()


@pytest.fixture
def worlds() -> Iterator[list[World]]:
    made: list[World] = []
    yield made
    for each in made:
        each.close()


def whole(given: Any) -> dict[str, torch.Tensor]:
    async def taken() -> dict[str, torch.Tensor]:
        return {name: tensor.clone() async for name, tensor in given}

    return asyncio.run(taken())


class Engine:
    """Takes flushes as verl's loaders do: a NaN says that an element stays."""

    def __init__(self) -> None:
        self.live: dict[str, torch.Tensor] = {}

    def apply(self, given: Any) -> list[str]:
        """The encodings that came. The last flush alone says that it is the last."""
        told, last = [], []
        for named, is_last in given:
            tensors = dict(named)
            spec = json.loads(bytes(tensors["__delta_spec__"].numpy()))
            positions = tensors.get("__positions__", torch.empty(0, dtype=torch.uint8))
            values = tensors["__values__"]
            assert checksum(positions, values) == spec["checksum"]
            for param in spec["params"]:
                new = values[param["val_start"] : param["val_end"]]
                assert str(new.dtype) == f"torch.{param['dtype']}"
                if spec["encoding"] == "dense":
                    self.live[param["name"]] = new.clone().view(param["shape"])
                else:
                    places = positions[param["pos_start"] : param["pos_end"]].view(torch.int32).long()
                    self.live[param["name"]].view(-1)[places] = new
            told.append(spec["encoding"])
            last.append(is_last)
        assert last == [False] * (len(last) - 1) + [True] * bool(last)
        return told


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(one[name].equal(other[name]) for name in one)


def test_it_has_what_the_base_class_asks_for() -> None:
    for name, arguments in VERL_METHODS.items():
        assert takes(getattr(WeightSyncCheckpointEngine, name), arguments), name


@pytest.mark.parametrize("mode", ["auto", "delta"])
def test_workers_are_given_each_version_whole(worlds: list[World], mode: str) -> None:
    worlds.append(world := World(2, mode=mode))
    for number in range(1, 4):
        sent = weights(float(number))
        assert all(same(whole(each), sent) for each in world.update(sent))


@pytest.mark.parametrize("wire_format", ["named_tensors", "delta_flush"])
def test_what_a_rollout_is_given_lies_on_its_device(
    worlds: list[World], monkeypatch: pytest.MonkeyPatch, wire_format: str
) -> None:
    """verl's rollouts hand a weight larger than a bucket, or each one, to another process by handle. Seen red: whole
    tensors lay in host memory, whose handle is none of CUDA's: the engine's worker failed, and verl waited for good."""
    meta = torch.device("meta")
    for module in ("verl", "verl_flush"):
        monkeypatch.setattr(f"weightsync.adapters.{module}.worker_device", lambda: meta)
    worlds.append(world := World(1, wire_format=wire_format))
    (given,) = world.update(weights(1.0))

    async def devices() -> set[torch.device]:
        return {tensor.device async for _, tensor in given}

    if wire_format == "named_tensors":
        assert asyncio.run(devices()) == {meta}
    else:
        assert {tensor.device for named, _ in given for _, tensor in named} == {meta}


@pytest.mark.parametrize("bucket_bytes", [1 << 20, 100])
def test_flushes_bring_changes_alone(worlds: list[World], bucket_bytes: int) -> None:
    """To the bit; the first version of a worker is dense, and one in which nothing changed is no flush at all."""
    worlds.append(world := World(1, mode="delta", wire_format="delta_flush", bucket_size=bucket_bytes))
    assert world.workers[0].wire_format == "delta_flush"
    engine = Engine()
    for number, value in enumerate((1.0, 2.0, 3.0)):
        sent = weights(value)
        (given,) = world.update(sent)
        assert set(engine.apply(given)) == {"dense" if number == 0 else "indices"}
        assert same(engine.live, sent)
    (given,) = world.update(sent)
    assert engine.apply(given) == []


def test_a_worker_that_was_interrupted_is_given_all_of_it(worlds: list[World]) -> None:
    """What it has is of no version: a change of one would make it neither. So with a NaN, which says that one stays."""
    worlds.append(world := World(1, mode="delta", wire_format="delta_flush", bucket_size=100))
    engine = Engine()
    engine.apply(world.update(weights(1.0))[0])
    (given,) = world.update(weights(2.0))
    next(given)
    given.close()
    sent = weights(3.0)
    assert set(engine.apply(world.update(sent)[0])) == {"dense"}
    assert same(engine.live, sent)
    sent["b"][1] = float("nan")
    assert set(engine.apply(world.update(sent)[0])) == {"dense"}
    assert bool(engine.live["b"][1].isnan())


def test_changed_integers_come_whole(worlds: list[World]) -> None:
    """verl's loader masks what stays by NaN, and fails at a tensor that has none. Seen red: they came as changes."""
    worlds.append(world := World(1, mode="delta", wire_format="delta_flush"))
    engine = Engine()
    for number in range(2):
        sent = {**weights(1.0), "count": torch.full((64,), 0, dtype=torch.int64)}
        sent["count"][0] = number
        assert set(engine.apply(world.update(sent)[0])) == {"dense"}
        assert same(engine.live, sent)


@pytest.mark.parametrize(("rows", "is_whole"), [(1, False), (2, True), (3, True)])
def test_a_parameter_that_int32_can_not_count_comes_whole(rows: int, is_whole: bool) -> None:
    """Seen red: positions from 2**31 on went out as negative ones, which verl's rollouts refuse at each version."""
    spec = TensorSpec(name="w", dtype="bfloat16", shape=(rows, 1 << 30))
    piece = Piece(
        spec=spec, positions=torch.zeros(1, dtype=torch.int32), values=torch.zeros(1, dtype=torch.bfloat16)
    )  # fmt: skip
    assert needs_whole([piece]) == is_whole


def one_worker_differs(rank: int, world_size: int) -> list[list[str] | str]:
    """The encodings that a worker of this rollout is given of each version. Rank 1 has no room for the change of
    version 2, and can't fetch version 4. The trainer is in rank 0's process."""
    worker, engine, said = WeightSyncCheckpointEngine(mode="delta", **_FLUSHES), Engine(), []
    master = WeightSyncCheckpointEngine(is_master=True, **_FLUSHES) if rank == 0 else None
    for number in range(1, 6):
        plan = [None if master is None else master.prepare()]
        dist.broadcast_object_list(plan)
        worker.init_process_group(plan=plan[0])
        if master is not None:
            asyncio.run(master.send_weights(iter(weights(float(number)).items()), global_steps=number))
        dist.barrier()
        with pytest.MonkeyPatch.context() as patch:
            if (rank, number) == (1, 2):
                patch.setattr(delta_intake, "lay_out_patch", lambda *_, **__: None)
            if (rank, number) == (1, 4):
                patch.setattr(Receiver, "pulled", fails)
            try:
                said.append(sorted(set(engine.apply(worker.receive_weights(global_steps=number)))))
                assert same(engine.live, weights(float(number)))
            except WeightSyncError as error:
                said.append(str(error))
        dist.barrier()  # the version is there until all have it
    for each in (worker._receiver, None if master is None else master._sender):
        if each is not None:
            each.close()
    return said


_FLUSHES = {
    "bucket_size": 100, "host": "127.0.0.1", "timeout_s": LONG_S, "wire_format": "delta_flush",
    "delta_budget_bytes": 1 << 30,
}  # fmt: skip


def fails(*_: object, **__: object) -> None:
    raise StorageError("no room for a staging")


def test_workers_of_one_rollout_are_given_the_same_flushes_or_none() -> None:
    """verl calls a rollout once for each flush of one worker, while the others wait for that. Seen red: one gave a
    flush of changes and the other many of all; verl would have waited for good."""
    zero, one = run_ranks(one_worker_differs, 2)
    assert zero[:3] == one[:3] == [["dense"], ["dense"], ["indices"]]
    assert "another worker of this rollout" in zero[3]
    assert "no room for a staging" in one[3]
    assert zero[4] == one[4] == ["dense"], "what they have is of no version"


def one_does_not_come(rank: int, world_size: int, told: str) -> str | None:
    if rank == 1:
        wait_until(Path(told).exists, "the other has given up")
        return None
    begun_s = time.monotonic()
    with pytest.raises(TransferError) as caught:
        _all_have("a change", failed=None, timeout_s=0.5)
    assert time.monotonic() - begun_s < 20.0, "not the group's own time-out, which is 30 s here"
    Path(told).touch()
    return str(caught.value)


def test_a_worker_that_does_not_come_is_waited_for_so_long(tmp_path: Path) -> None:
    """Seen red: for torch's own time-out, which is 30 minutes in verl's group."""
    said, _ = run_ranks(one_does_not_come, 2, str(tmp_path / "told"), timeout_s=60.0)
    assert "could not agree" in said


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(ConfigError, match="wire_format is 'named_tensors' or 'delta_flush', not 'flush'"):
        WeightSyncCheckpointEngine(wire_format="flush")
    with pytest.raises(InvalidRequestError, match="one worker sends"):
        WeightSyncCheckpointEngine.build_topology(1, 1, [None, None])
