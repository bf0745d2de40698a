"""SGLangEngine under a real push: what it loads is what was trained, and no failure resumes half-loaded weights.

The server keeps SGLang's rules and holds bytes; its workers are processes that join real groups by torch's own calls.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.standins.sglang_server import Failure, SGLangServer
from tests.standins.sglang_workers import SGLangWorkers
from tests.unit.handles.sglang_kit import NAMES, SHAPE, weights, write_checkpoint
from weightsync.control.methods.push import PushMethod
from weightsync.errors import ConfigError, DeadlineExceededError, SyncFailedError, UnsupportedError, WeightSyncError
from weightsync.extract.module import ModuleWeightExtractor
from weightsync.handles.fanout import in_thread
from weightsync.handles.sglang import LOADING, SGLangApi, SGLangEngine
from weightsync.handles.sglang_loads import is_dense
from weightsync.trainer.push import PushSync
from weightsync.transfer.base import WeightTransferStrategy
from weightsync.transfer.broadcast import BroadcastTransferStrategy
from weightsync.transfer.registry import strategy_named
from weightsync.transfer.sglang import SGLangTransferStrategy
from weightsync.types import (
    AbortRequest,
    BroadcastWeightUpdateRequest,
    Deadline,
    DescribeRequest,
    EngineOp,
    PauseRequest,
    Version,
)

PATH = (
    "/pause_generation", "/update_weight_version", "/begin_weight_update", "/update_weights_from_distributed",
    "/update_weights_from_distributed", "/update_weights_from_distributed", "/end_weight_update",
    "/weights_checker", "/weights_checker", "/update_weight_version", "/continue_generation",
)  # fmt: skip


class Trainer:
    """A model whose bytes are those of a checkpoint, pushed to one server as version after version."""

    def __init__(self, url: str, *, run_id: str = "run", **handle: Any) -> None:
        self.tensors = {name: torch.empty(SHAPE, dtype=torch.bfloat16) for name in NAMES}
        self.engine = SGLangEngine(SGLangApi(url), engine_id="sglang", **handle)
        self.push = push_of(self.tensors, self.engine, run_id=run_id)
        self.method = PushMethod({"actor": self.push})
        self.run_id = run_id

    def sync(self, number: int) -> int:
        for name, content in weights(number).items():
            source = torch.frombuffer(bytearray(content), dtype=torch.uint8).view(torch.bfloat16).reshape(SHAPE)
            self.tensors[name].copy_(source)
        return self.method.sync_weights("actor", Version(run_id=self.run_id, number=number))

    def group(self) -> str | None:
        return self.engine.call(EngineOp.DESCRIBE, DescribeRequest(), timeout_s=5).group

    def close(self) -> None:
        self.push.close()
        self.engine.close()


class Extractor(ModuleWeightExtractor):
    """Of tensors without a module."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], **options: Any) -> None:
        self._tensors = tensors
        super().__init__(torch.nn.Module(), **options)

    def _named_tensors(self) -> list[tuple[str, torch.Tensor]]:
        return list(self._tensors.items())


def push_of(
    tensors: Mapping[str, torch.Tensor],
    engine: SGLangEngine,
    *,
    run_id: str = "run",
    strategy: WeightTransferStrategy | None = None,
    chunk_bytes: int | None = None,
) -> PushSync:
    """With a chunk for each tensor, where not told otherwise."""
    return PushSync(
        Extractor(tensors, chunk_bytes=chunk_bytes), engine,
        strategy=strategy or SGLangTransferStrategy(join_timeout_s=10.0),
        run_id=run_id, transfer_timeout_s=20.0, join_timeout_s=10.0, pause_timeout_s=5.0,
    )  # fmt: skip


@pytest.fixture(scope="module")
def workers() -> Iterator[SGLangWorkers]:
    with contextlib.closing(SGLangWorkers()) as workers:
        yield workers


@pytest.fixture
def server(tmp_path: Path, workers: SGLangWorkers) -> Iterator[SGLangServer]:
    server = SGLangServer(write_checkpoint(tmp_path, 0), workers=workers)
    server.start()
    with contextlib.closing(server):
        yield server


@pytest.fixture
def trainer(server: SGLangServer) -> Iterator[Trainer]:
    with contextlib.closing(Trainer(server.url)) as trainer:
        trainer.push.initialize()
        yield trainer


def held(server: SGLangServer) -> dict[str, bytes]:
    return {name: each.tobytes() for name, each in server.weights.items()}


def state(server: SGLangServer) -> tuple[str | None, str, bool]:
    return server.paused, server.weight_version, server.updating


def test_a_push_loads_byte_for_byte_in_sglangs_order(server: SGLangServer, trainer: Trainer) -> None:
    server.num_running = 3
    group = trainer.group()
    server.calls.clear()
    for number in (1, 2):
        assert trainer.sync(number) == number
        assert (held(server), state(server)) == (weights(number), (None, f"run/{number}", False))
    assert server.called() == [*PATH, *PATH]
    update = server.calls[3].body
    assert (update["load_format"], update["flush_cache"], update["group_name"]) == ("flattened_bucket", True, group)
    assert (update["weight_version"], update["abort_all_requests"]) == (None, False)
    assert server.calls[1].body == {"new_version": LOADING, "abort_all_requests": False}
    reply = trainer.engine.call(EngineOp.DESCRIBE, DescribeRequest(), timeout_s=5)
    assert (reply.version, reply.serving, reply.group) == (Version(run_id="run", number=2), True, group)


def test_a_release_without_the_bracket_is_pushed_to(tmp_path: Path, workers: SGLangWorkers) -> None:
    """Before 0.5.21. What fails in the middle leaves it paused there, too."""
    server = SGLangServer(write_checkpoint(tmp_path, 0), workers=workers, brackets=False)
    server.start()
    with contextlib.closing(server), contextlib.closing(Trainer(server.url)) as trainer:
        trainer.push.initialize()
        assert trainer.sync(1) == 1
        assert (held(server), state(server)) == (weights(1), (None, "run/1", False))
        server.fail("/update_weights_from_distributed", "error", after=False)
        with pytest.raises(WeightSyncError):
            trainer.sync(2)
        assert state(server) == ("retract", LOADING, False)
        assert trainer.sync(3) == 3
        assert (held(server), state(server)) == (weights(3), (None, "run/3", False))


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
    assert list(server.groups) == [trainer.group()], "the former ones are given back"


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


def test_a_trainer_that_died_half_way_has_an_heir(server: SGLangServer, trainer: Trainer) -> None:
    """It finds the server paused, half-loaded and in a bracket; it may not resume it before it has loaded all."""
    assert trainer.sync(1) == 1
    server.paused, server.weight_version, server.updating = "retract", LOADING, True
    with contextlib.closing(Trainer(server.url, run_id="next")) as heir:
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


@pytest.mark.parametrize("waits", [False, True], ids=["gives up", "waits"])
@pytest.mark.parametrize("step", ["set_version", "begin_update"])
def test_an_abort_that_comes_while_a_paused_server_is_made_ready_leaves_nothing(
    server: SGLangServer, trainer: Trainer, step: str, waits: bool
) -> None:
    """As where another engine has refused the sync. Seen red: a bracket was opened behind the abort's look, on a server
    that went on under the name of its version; or it went on under the name of a load."""
    assert trainer.sync(1) == 1
    engine, api, aborts = trainer.engine, trainer.engine._api, []
    call, end, ended = getattr(api, step), engine._session.end, threading.Event()

    def ends(*args: Any, **options: Any) -> bool:
        try:
            return end(*args, **options)
        finally:
            ended.set()

    def late(*args: Any, **options: Any) -> None:
        setattr(api, step, call)
        engine._session.end = ends  # type: ignore[method-assign]
        request = AbortRequest(session=str(engine._paused_by), reason="enough")
        timeout_s = 10.0 if waits else 0.2
        aborts.append(in_thread(lambda: engine.call(EngineOp.ABORT, request, timeout_s=timeout_s), name="abort"))
        assert ended.wait(5)
        if not waits:
            aborts[0].exception(5)
        call(*args, **options)

    setattr(api, step, late)
    with pytest.raises(SyncFailedError, match="was aborted"):
        trainer.sync(2)
    gave_up = aborts[0].exception(5)
    assert (held(server), state(server)) == (weights(1), (None, "run/1", False))
    assert waits is (gave_up is None)
    assert waits or "took longer than 0.2 s" in str(gave_up)
    assert trainer.sync(3) == 3
    assert (held(server), state(server)) == (weights(3), (None, "run/3", False))


def test_a_trainer_that_ends_takes_no_load_from_a_pause_that_is_under_way(trainer: Trainer) -> None:
    """Who takes back what that did needs it. Seen red: a bracket stayed open on a server that went on."""
    assert trainer.sync(1) == 1
    engine = trainer.engine
    load = engine._load
    assert load is not None
    goodbye = AbortRequest(session=load.name, reason="the trainer ends")
    with engine._turning, pytest.raises(DeadlineExceededError, match="took longer than"):
        engine.call(EngineOp.ABORT, goodbye, timeout_s=0.2)
    assert engine._load is load
    engine.call(EngineOp.ABORT, goodbye, timeout_s=10.0)
    assert engine._load is None


def test_what_was_found_before_an_earlier_session_is_not_what_a_later_one_found(server: SGLangServer) -> None:
    """Seen red, twice: a half-loaded server was told to go on, as "default", where the first look of the first sync
    failed; and behind a sync that had healed it, a failed look had it called half-loaded."""
    server.paused, server.weight_version = "retract", LOADING
    with contextlib.closing(Trainer(server.url)) as trainer:
        trainer.push.initialize()
        look_fails(trainer.engine, server)
        with pytest.raises(SyncFailedError):
            trainer.sync(1)
        assert state(server) == ("retract", LOADING, False), "it is half-loaded still"
        assert trainer.sync(2) == 2
        look_fails(trainer.engine, server)
        with pytest.raises(SyncFailedError):
            trainer.sync(3)
        assert (held(server), state(server)) == (weights(2), (None, "run/2", False))
        assert trainer.engine.call(EngineOp.DESCRIBE, DescribeRequest(), timeout_s=5).serving


def look_fails(engine: SGLangEngine, server: SGLangServer) -> None:
    """The first look of the next pause, once."""
    pause = engine._pause

    def fails(request: PauseRequest, deadline: Deadline) -> None:
        engine._pause = pause  # type: ignore[method-assign]
        server.fail("/model_info", "error")
        pause(request, deadline)

    engine._pause = fails  # type: ignore[method-assign]


def test_one_that_stands_still_is_not_said_to_serve(server: SGLangServer) -> None:
    """Nobody will tell it to go on: `status` says so. Seen red: it was well."""
    server.paused = "retract"
    with contextlib.closing(SGLangEngine(SGLangApi(server.url))) as engine:
        reply = engine.call(EngineOp.DESCRIBE, DescribeRequest(), timeout_s=5)
        assert (reply.serving, reply.left_paused) == (False, True)
        server.weight_version = LOADING
        reply = engine.call(EngineOp.DESCRIBE, DescribeRequest(), timeout_s=5)
        assert (reply.serving, reply.left_paused) == (False, False), "somebody loads it, perhaps"
        server.paused, server.weight_version = None, "run/1"
        reply = engine.call(EngineOp.DESCRIBE, DescribeRequest(), timeout_s=5)
        assert (reply.serving, reply.left_paused) == (True, False)


def test_an_older_answer_is_not_noted_over_what_a_step_has_done(server: SGLangServer) -> None:
    """Seen red: an abort then thought that the server had its old name, and resumed it inside a bracket."""
    with contextlib.closing(SGLangEngine(SGLangApi(server.url))) as engine:
        engine.call(EngineOp.DESCRIBE, DescribeRequest(), timeout_s=5)
        asked = engine._api.model_info

        def late(**options: Any) -> Any:
            answer = asked(**options)
            engine._name(LOADING, Deadline(5))
            return answer

        engine._api.model_info = late  # type: ignore[method-assign]
        engine._look(Deadline(5))
        assert engine._called == LOADING


def test_a_name_that_was_heard_though_its_answer_was_lost_is_taken_back(server: SGLangServer, trainer: Trainer) -> None:
    """Seen red: the server went on under the name of a load, of no version."""
    assert trainer.sync(1) == 1
    server.fail("/update_weight_version", "drop", after=True)
    with pytest.raises(SyncFailedError):
        trainer.sync(2)
    assert (held(server), state(server)) == (weights(1), (None, "run/1", False))


def test_a_pause_that_a_dead_trainer_left_ends_where_the_weights_are_whole(server: SGLangServer) -> None:
    server.paused = "retract"
    with contextlib.closing(Trainer(server.url)) as heir:
        heir.push.initialize()
        assert server.paused is None


@pytest.mark.parametrize("late", [False, True], ids=["answered", "not in time"])
def test_a_pause_that_comes_behind_the_resume_of_its_abort_is_ended(
    server: SGLangServer, trainer: Trainer, late: bool
) -> None:
    """Seen red: SGLang was told to go on before it stood still, and stayed paused, under the name of a load."""
    engine, pause = trainer.engine, trainer.engine._api.pause

    def late_pause(*args: Any, **options: Any) -> None:
        engine.call(EngineOp.ABORT, AbortRequest(session=str(engine._paused_by), reason="enough"), timeout_s=5)
        pause(*args, **options)
        if late:
            raise DeadlineExceededError("no answer to the pause: it was aborted")

    engine._api.pause = late_pause  # type: ignore[method-assign]
    with pytest.raises(SyncFailedError, match="was aborted"):
        trainer.sync(1)
    assert state(server) == (None, "default", False)
    engine._api.pause = pause  # type: ignore[method-assign]
    assert trainer.sync(2) == 2


def test_a_trainer_leaves_no_group_in_the_workers(server: SGLangServer, trainer: Trainer) -> None:
    """Whether it ends in order, or its init fails behind the join. Seen red: one was left for each."""
    assert trainer.sync(1) == 1
    trainer.push.close()
    assert server.groups == {}
    assert server.called("/destroy_weights_update_group") == ["/destroy_weights_update_group"]
    join = trainer.engine._api.init_group

    def joins(*args: Any, **options: Any) -> None:
        join(*args, **options)
        server.fail("/model_info", "error")

    trainer.engine._api.init_group = joins  # type: ignore[method-assign]
    push = push_of(trainer.tensors, trainer.engine, run_id="next")
    with contextlib.closing(push), pytest.raises(WeightSyncError, match="injected"):
        push.initialize()
    assert server.groups == {}
    trainer.engine._api.init_group = join  # type: ignore[method-assign]
    with contextlib.closing(push_of(trainer.tensors, trainer.engine, run_id="last")) as push:
        push.initialize()
        assert list(server.groups) == [trainer.group()]


def test_a_server_that_was_started_again_is_joined_again(server: SGLangServer, trainer: Trainer) -> None:
    assert trainer.sync(1) == 1
    server.weight_version, server.groups = "default", {}
    assert trainer.sync(2) == 2
    assert (held(server), list(server.groups)) == (weights(2), [trainer.group()])


def test_requests_may_be_kept_in_place_with_their_cache(server: SGLangServer) -> None:
    server.num_running = 2
    with contextlib.closing(Trainer(server.url, pause_mode="in_place", kv_cache="keep")) as trainer:
        trainer.push.initialize()
        assert trainer.sync(1) == 1
    assert server.num_running == 2
    with pytest.raises(ConfigError, match="can't clear its cache under requests"):
        SGLangEngine(SGLangApi(server.url), pause_mode="in_place")
    for options in ({"pause_mode": "wait"}, {"kv_cache": "flush"}):
        with pytest.raises(ConfigError, match="is one of"):
            SGLangEngine(SGLangApi(server.url), **options)  # type: ignore[arg-type]


def test_a_sender_that_is_not_sglangs_is_refused_in_words(server: SGLangServer) -> None:
    tensors = {name: torch.empty(SHAPE, dtype=torch.bfloat16) for name in NAMES}
    with contextlib.closing(SGLangApi(server.url)) as api:
        push = push_of(tensors, SGLangEngine(api), strategy=BroadcastTransferStrategy())
        with contextlib.closing(push), pytest.raises(SyncFailedError, match=r"with SGLangTransferStrategy\(\)"):
            push.initialize()
    assert server.called("/init_weights_update_group") == []
    with pytest.raises(UnsupportedError, match="no receiver"):
        strategy_named("sglang").create_receiver(SGLangTransferStrategy().create_init_info({"a": 1})[0], rank=1)


@pytest.mark.parametrize(("how", "why"), [("refused", "injected"), ("hang", "not all of the 1 workers joined")])
def test_a_server_that_does_not_join_is_named(server: SGLangServer, how: Failure, why: str) -> None:
    server.fail("/init_weights_update_group", how)
    tensors = {name: torch.empty(SHAPE, dtype=torch.bfloat16) for name in NAMES}
    with contextlib.closing(SGLangApi(server.url)) as api:
        strategy = SGLangTransferStrategy(join_timeout_s=2.0 if how == "hang" else 20.0)
        push = push_of(tensors, SGLangEngine(api), strategy=strategy)
        with contextlib.closing(push), pytest.raises(WeightSyncError, match=why):
            push.initialize()


def test_every_worker_gets_every_byte_whatever_its_dtype(tmp_path: Path) -> None:
    """Two workers; tensors of eight, four, two and one byte an element, odd sizes and none; few buckets or many."""
    generator = torch.Generator().manual_seed(7)

    def random(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        size = math.prod(shape) * dtype.itemsize
        return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator).view(dtype).reshape(shape)

    kinds = (
        torch.float8_e4m3fn,
        torch.bfloat16,
        torch.int8,
        torch.float32,
        torch.int64,
        torch.float16,
        torch.float8_e5m2,
    )
    tensors = {f"w{i}.{k}": random((k, 3), kind) for i, kind in enumerate(kinds) for k in (1, 5, 0, 7)}
    tensors["large"] = random((1 << 20,), torch.bfloat16)
    save_file(tensors, tmp_path / "model.safetensors")
    with contextlib.closing(SGLangWorkers(2)) as workers, contextlib.ExitStack() as stack:
        server = stack.enter_context(contextlib.closing(SGLangServer(tmp_path, workers=workers)))
        api = stack.enter_context(contextlib.closing(SGLangApi(server.start())))
        for number, chunk_bytes in ((1, 1 << 30), (2, 100), (3, None)):
            run_id = f"run-{chunk_bytes}"
            with contextlib.closing(
                push_of(tensors, SGLangEngine(api), run_id=run_id, chunk_bytes=chunk_bytes)
            ) as push:
                push.initialize()
                for tensor in tensors.values():
                    tensor.view(torch.uint8).copy_(random(tensor.view(torch.uint8).shape, torch.uint8))
                report = push.sync_weights(number)
                assert report.version == Version(run_id=run_id, number=number)
                assert (report.num_chunks == 1) is (chunk_bytes == 1 << 30)
                assert held(server) == {
                    name: tensor.view(torch.uint8).numpy().tobytes() for name, tensor in tensors.items()
                }


@pytest.mark.parametrize(("offsets", "bucket_bytes", "dense"), [
    ((0, 48), 96, True), ((48, 0), 96, False), ((0, 64), 112, False), ((0, 48), 128, False),
])  # fmt: skip
def test_which_buckets_sglang_unpacks(offsets: tuple[int, ...], bucket_bytes: int, dense: bool) -> None:
    update = BroadcastWeightUpdateRequest(
        session="s", seq=0, names=NAMES[:2], dtypes=("bfloat16",) * 2, shapes=(SHAPE,) * 2, offsets=offsets,
        bucket_bytes=bucket_bytes,
    )  # fmt: skip
    assert is_dense(update) is dense


@pytest.mark.parametrize(
    ("sizes", "cure"),
    [
        ({"dp_size": 2}, "a server of its own"),
        ({"pp_size": 2}, "a server of its own"),
        ({"tokenizer_workers": 2}, "--tokenizer-worker-num 1"),
    ],
)
def test_replicas_in_one_server_are_refused(tmp_path: Path, sizes: dict[str, Any], cure: str) -> None:
    """And front ends that call the same weights differently: by the name half-loaded ones are known."""
    server = SGLangServer(write_checkpoint(tmp_path, 0), **sizes)
    with contextlib.closing(server), contextlib.closing(SGLangApi(server.start())) as api:
        with pytest.raises(UnsupportedError, match=cure):
            SGLangEngine(api).call(EngineOp.DESCRIBE, DescribeRequest(), timeout_s=5)
        assert server.calls == []
