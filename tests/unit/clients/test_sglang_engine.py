"""SGLangEngine under a real push: what it loads is what was trained, and no failure resumes half-loaded weights.

The server keeps SGLang's rules and holds bytes; the process group is a dictionary, since SGLang's own needs its engine.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.clients.sglang_kit import NAMES, SHAPE, weights, write_checkpoint
from weightsync.clients.sglang import LOADING, SGLangApi, SGLangEngine, _is_dense
from weightsync.control.methods.network import NetworkMethod
from weightsync.errors import ConfigError, SyncFailedError, UnsupportedError, WeightSyncError
from weightsync.extract.named import NamedTensorsExtractor
from weightsync.publish.push import PushSync
from weightsync.testing.sglang_server import Failure, SGLangServer
from weightsync.transfer.base import RecordPhase, WeightTransferReceiver, WeightTransferSender, WeightTransferStrategy
from weightsync.types import (
    BroadcastWeightUpdateRequest,
    Deadline,
    DescribeRequest,
    EngineOp,
    EngineReply,
    InferenceEngineClient,
    TorchDistributedWeightSyncInitInfo,
    Version,
    WeightChunk,
    WeightSyncInitInfo,
)

PATH = (
    "/pause_generation", "/update_weight_version", "/begin_weight_update", "/update_weights_from_distributed",
    "/update_weights_from_distributed", "/update_weights_from_distributed", "/end_weight_update",
    "/update_weight_version", "/continue_generation",
)  # fmt: skip
Wire = dict[str, bytes]


class DenseStrategy(WeightTransferStrategy):
    """Packs without padding, and moves bytes by a dictionary."""

    name = "dense"
    request_type = BroadcastWeightUpdateRequest

    def __init__(self, wire: Wire, *, padding_bytes: int = 0) -> None:
        self.wire = wire
        self.padding_bytes = padding_bytes
        self.num_groups = 0

    def create_init_info(self, world_sizes: Mapping[str, int]) -> tuple[WeightSyncInitInfo, object]:
        self.num_groups += 1
        info = TorchDistributedWeightSyncInitInfo(
            strategy=self.name, group_name=f"g{self.num_groups}", master_addr="127.0.0.1", master_port=29500,
            world_size=1 + sum(world_sizes.values()), backend="gloo", join_timeout_s=5.0, transfer_timeout_s=5.0,
        )  # fmt: skip
        return info, None

    def create_sender(
        self, info: WeightSyncInitInfo, token: object, *, joined: Future[Mapping[str, EngineReply]], record: RecordPhase
    ) -> WeightTransferSender:
        joined.result(5)
        return DenseSender(self)

    def create_receiver(self, info: WeightSyncInitInfo, *, rank: int) -> WeightTransferReceiver:
        raise AssertionError("SGLang has its own")


class DenseSender(WeightTransferSender):
    def __init__(self, strategy: DenseStrategy) -> None:
        self._strategy = strategy
        self._usable = True

    @property
    def usable(self) -> bool:
        return self._usable

    def send_chunks(
        self, chunks: Iterable[WeightChunk], client: InferenceEngineClient, *, session: str, deadline: Deadline
    ) -> int:
        self._usable = False
        num = 0
        for num, chunk in enumerate(chunks, 1):
            offsets, end = [], 0
            for name, tensor in zip(chunk.names, chunk.tensors, strict=True):
                offsets.append(end)
                end += tensor.nbytes + self._strategy.padding_bytes
                self._strategy.wire[name] = tensor.contiguous().view(torch.uint8).numpy().tobytes()
            request = BroadcastWeightUpdateRequest(
                session=session, seq=num - 1, names=chunk.names, dtypes=chunk.dtypes, shapes=chunk.shapes,
                offsets=tuple(offsets), bucket_bytes=end,
            )  # fmt: skip
            client.update_weights(request, timeout_s=deadline.remaining_s).result(deadline.remaining_s)
        self._usable = True
        return num

    def close(self) -> None:
        self._usable = False


class Trainer:
    """A model whose bytes are those of a checkpoint, pushed to one server as version after version."""

    def __init__(self, url: str, wire: Wire, *, run_id: str = "run", padding_bytes: int = 0, **handle: Any) -> None:
        self.tensors = {name: torch.empty(SHAPE, dtype=torch.bfloat16) for name in NAMES}
        self.engine = SGLangEngine(SGLangApi(url), engine_id="sglang", **handle)
        self.strategy = DenseStrategy(wire, padding_bytes=padding_bytes)
        self.push = PushSync(
            NamedTensorsExtractor(self.tensors.items()), self.engine, strategy=self.strategy,
            run_id=run_id, transfer_timeout_s=20.0, join_timeout_s=10.0, pause_timeout_s=5.0,
        )  # fmt: skip
        self.method = NetworkMethod({"actor": self.push})
        self.run_id = run_id

    def sync(self, number: int) -> int:
        for name, content in weights(number).items():
            source = torch.frombuffer(bytearray(content), dtype=torch.uint8).view(torch.bfloat16).reshape(SHAPE)
            self.tensors[name].copy_(source)
        return self.method.sync("actor", Version(run_id=self.run_id, number=number))

    def close(self) -> None:
        self.push.close()
        self.engine.close()


@pytest.fixture
def wire() -> Wire:
    return {}


@pytest.fixture
def server(tmp_path: Path, wire: Wire) -> Iterator[SGLangServer]:
    server = SGLangServer(write_checkpoint(tmp_path, 0), broadcast=lambda body: [wire[name] for name in body["names"]])
    server.start()
    with contextlib.closing(server):
        yield server


@pytest.fixture
def trainer(server: SGLangServer, wire: Wire) -> Iterator[Trainer]:
    with contextlib.closing(Trainer(server.url, wire)) as trainer:
        trainer.push.initialize()
        yield trainer


def held(server: SGLangServer) -> dict[str, bytes]:
    return {name: each.tobytes() for name, each in server.weights.items()}


def state(server: SGLangServer) -> tuple[str | None, str, bool]:
    return server.paused, server.weight_version, server.updating


def test_a_push_loads_byte_for_byte_in_sglangs_order(server: SGLangServer, trainer: Trainer) -> None:
    server.num_running = 3
    server.calls.clear()
    for number in (1, 2):
        assert trainer.sync(number) == number
        assert (held(server), state(server)) == (weights(number), (None, f"run/{number}", False))
    assert server.called() == [*PATH, *PATH]
    update = server.calls[3].body
    assert (update["load_format"], update["flush_cache"], update["group_name"]) == ("flattened_bucket", True, "g1")
    assert (update["weight_version"], update["abort_all_requests"]) == (None, False)
    assert server.calls[1].body == {"new_version": LOADING, "abort_all_requests": False}
    assert trainer.strategy.num_groups == 1, "the group stays from sync to sync"
    reply = trainer.engine.call(EngineOp.DESCRIBE, DescribeRequest(), timeout_s=5)
    assert (reply.version, reply.serving, reply.group) == (Version(run_id="run", number=2), True, "g1")


WAYS: tuple[tuple[Failure, bool], ...] = (("error", False), ("refused", False), ("drop", True))
STEPS = {
    "/pause_generation": True, "/begin_weight_update": True, "/update_weights_from_distributed": False,
    "/end_weight_update": False, "/model_info": True,
}  # fmt: skip


@pytest.mark.parametrize(("how", "after"), WAYS)
@pytest.mark.parametrize("path", sorted(STEPS))
def test_a_failure_leaves_the_old_version_or_a_pause(
    server: SGLangServer, trainer: Trainer, path: str, how: Failure, after: bool
) -> None:
    """Nothing half-loaded ever serves, and the next sync heals it."""
    assert trainer.sync(1) == 1
    server.fail(path, how, after=after)
    with pytest.raises(WeightSyncError):
        trainer.sync(2)
    if STEPS[path]:
        assert (held(server), state(server)) == (weights(1), (None, "run/1", False))
    else:
        assert state(server) == ("retract", LOADING, False)
    assert trainer.sync(3) == 3
    assert (held(server), state(server)) == (weights(3), (None, "run/3", False))


@pytest.mark.parametrize("after", [False, True])
def test_a_commit_that_fails_leaves_it_paused(server: SGLangServer, trainer: Trainer, after: bool) -> None:
    assert trainer.sync(1) == 1
    name = trainer.engine._name

    def fails(version: str, deadline: Deadline) -> None:
        if version != LOADING:
            server.fail("/update_weight_version", "error", after=after)
        name(version, deadline)

    trainer.engine._name = fails  # type: ignore[method-assign]
    with pytest.raises(SyncFailedError, match="commit failed"):
        trainer.sync(2)
    trainer.engine._name = name  # type: ignore[method-assign]
    assert server.paused == "retract"
    assert trainer.sync(3) == 3
    assert (held(server), state(server)) == (weights(3), (None, "run/3", False))


def test_a_trainer_that_died_half_way_has_an_heir(server: SGLangServer, trainer: Trainer, wire: Wire) -> None:
    """It finds the server paused, half-loaded and in a bracket; it may not resume it before it has loaded all."""
    assert trainer.sync(1) == 1
    server.paused, server.weight_version, server.updating = "retract", LOADING, True
    with contextlib.closing(Trainer(server.url, wire, run_id="next")) as heir:
        heir.push.initialize()
        assert state(server) == ("retract", LOADING, True)
        assert not heir.engine.call(EngineOp.DESCRIBE, DescribeRequest(), timeout_s=5).serving
        server.updating = False
        server.fail("/begin_weight_update", "error")
        with pytest.raises(SyncFailedError):
            heir.sync(4)
        assert state(server) == ("retract", LOADING, False), "it had loaded nothing, and found it half-loaded"
        server.updating = True
        server.fail("/update_weights_from_distributed", "error")
        with pytest.raises(SyncFailedError):
            heir.sync(5)
        assert state(server) == ("retract", LOADING, False)
        assert heir.sync(6) == 6
        assert (held(server), state(server)) == (weights(6), (None, "next/6", False))


def test_a_pause_that_a_dead_trainer_left_ends_where_the_weights_are_whole(server: SGLangServer, wire: Wire) -> None:
    server.paused = "retract"
    with contextlib.closing(Trainer(server.url, wire)) as heir:
        heir.push.initialize()
        assert server.paused is None


def test_a_server_that_was_started_again_is_joined_again(server: SGLangServer, trainer: Trainer) -> None:
    assert trainer.sync(1) == 1
    server.weight_version, server.groups = "default", {}
    assert trainer.sync(2) == 2
    assert (held(server), sorted(server.groups)) == (weights(2), ["g2"])


def test_requests_may_be_kept_in_place_with_their_cache(server: SGLangServer, wire: Wire) -> None:
    server.num_running = 2
    with contextlib.closing(Trainer(server.url, wire, pause_mode="in_place", kv_cache="keep")) as trainer:
        trainer.push.initialize()
        assert trainer.sync(1) == 1
    assert server.num_running == 2
    with pytest.raises(ConfigError, match="can't clear its cache under requests"):
        SGLangEngine(SGLangApi(server.url), pause_mode="in_place")
    for options in ({"pause_mode": "wait"}, {"kv_cache": "flush"}):
        with pytest.raises(ConfigError, match="is one of"):
            SGLangEngine(SGLangApi(server.url), **options)  # type: ignore[arg-type]


def test_a_sender_that_pads_is_refused_in_words(server: SGLangServer, wire: Wire) -> None:
    with contextlib.closing(Trainer(server.url, wire, padding_bytes=208)) as trainer:
        trainer.push.initialize()
        with pytest.raises(SyncFailedError, match="this sender packs otherwise"):
            trainer.sync(1)
    assert (held(server), state(server)) == (weights(0), (None, "default", False))


@pytest.mark.parametrize(("offsets", "bucket_bytes", "dense"), [
    ((0, 48), 96, True), ((48, 0), 96, False), ((0, 64), 112, False), ((0, 48), 128, False),
])  # fmt: skip
def test_which_buckets_sglang_unpacks(offsets: tuple[int, ...], bucket_bytes: int, dense: bool) -> None:
    update = BroadcastWeightUpdateRequest(
        session="s", seq=0, names=NAMES[:2], dtypes=("bfloat16",) * 2, shapes=(SHAPE,) * 2, offsets=offsets,
        bucket_bytes=bucket_bytes,
    )  # fmt: skip
    assert _is_dense(update) is dense


@pytest.mark.parametrize("sizes", [{"dp_size": 2}, {"pp_size": 2}])
def test_replicas_in_one_server_are_refused(tmp_path: Path, wire: Wire, sizes: dict[str, Any]) -> None:
    server = SGLangServer(write_checkpoint(tmp_path, 0), **sizes)
    with contextlib.closing(server), contextlib.closing(SGLangApi(server.start())) as api:
        with pytest.raises(UnsupportedError, match="a server of its own"):
            SGLangEngine(api).call(EngineOp.DESCRIBE, DescribeRequest(), timeout_s=5)
        assert server.calls == []
