"""The remote loader against an engine behind HTTP, over sockets: what it proves, what fails, what that leaves."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.standins.faults import FaultyLoader
from tests.standins.sglang_server import SGLangServer
from tests.standins.sglang_workers import SGLangWorkers
from tests.unit.handles.sglang_kit import NAMES, SHAPE, write_checkpoint
from tests.unit.handles.vllm_kit import VllmStandIn
from tests.unit.host.fakes import Bench, begin, chunk, model
from tests.unit.host.fakes import manifest as bench_manifest
from tests.unit.host.fakes import weights as bench_weights
from weightsync.engine.embedded import EmbeddedEngine
from weightsync.engine.proof import prove
from weightsync.engine.remote import RemoteWeightLoader
from weightsync.engine.server import EngineServer
from weightsync.errors import (
    AuthError,
    ConfigError,
    DeadlineExceededError,
    DigestMismatchError,
    EngineError,
    EngineUnreachableError,
    LoadError,
    NotServingError,
    TransferAbortedError,
    UnsupportedError,
    WeightSyncError,
)
from weightsync.handles.two_kinds import VllmServerEngine
from weightsync.handles.vllm_messages import VllmState
from weightsync.load import remote as old_place
from weightsync.load.module import ModuleWeightLoader
from weightsync.testing.contracts import bytes_of as content
from weightsync.testing.contracts import manifest_of
from weightsync.transfer.ipc import PackedCudaIpcTransferStrategy
from weightsync.types import (
    Deadline,
    EngineOp,
    EngineReply,
    EngineRequest,
    Full,
    HeldTensor,
    PauseRequest,
    StageRequest,
    UpdateRequest,
    Version,
)

TOKEN = "a-token-for-tests-only"
LONG_S = 20.0


def module(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16, dtype=torch.bfloat16), nn.Linear(16, 4, dtype=torch.bfloat16))


def weights(seed: int) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in module(seed).named_parameters()}


def load(client: RemoteWeightLoader, new: dict[str, torch.Tensor]) -> None:
    client.load_weights(Full(name=name, tensor=tensor) for name, tensor in new.items())


class Remote:
    """A model, its loader, its engine behind HTTP and a client, in one process."""

    def __init__(self, kind: type[FaultyLoader] = FaultyLoader, *, in_place: bool = False) -> None:
        self.module = module(0)
        self.loader = kind(self.module, in_place=in_place)
        self.engine = EmbeddedEngine.of(self.loader)
        self.server = EngineServer(self.engine, token=TOKEN)
        self.url = self.server.start()
        self.clients: list[RemoteWeightLoader] = []
        self.client = self.connect()

    def connect(self, **options: Any) -> RemoteWeightLoader:
        client = RemoteWeightLoader(self.url, token=TOKEN, **{"timeout_s": LONG_S, **options})
        self.clients.append(client)
        return client

    def sync(self, seed: int, *, client: RemoteWeightLoader | None = None) -> None:
        client = client or self.client
        new = weights(seed)
        manifest = manifest_of(new, seed)
        client.begin(manifest)
        load(client, new)
        client.verify()
        client.commit(manifest.version)

    def serves(self, seed: int) -> bool:
        own = dict(self.module.named_parameters())
        return all(content(own[name]) == content(tensor) for name, tensor in weights(seed).items())

    def close(self) -> None:
        for client in self.clients:
            client.close()
        self.server.close()
        self.engine.close()


@pytest.fixture
def remote() -> Iterator[Remote]:
    made = Remote()
    yield made
    made.close()


@pytest.fixture
def live_writer() -> Iterator[Remote]:
    made = Remote(in_place=True)
    yield made
    made.close()


# --- a sync, and the proof of it ---


def test_a_sync_serves_the_same_bytes_and_says_their_digest(remote: Remote) -> None:
    with pytest.raises(UnsupportedError, match="nothing was synced"):
        remote.client.live_digest()
    for seed in (1, 2):
        remote.sync(seed)
        assert remote.serves(seed)
        assert remote.engine.version == Version(run_id="contract", number=seed)
        digest = remote.client.live_digest()
        manifest = manifest_of(weights(seed), seed, model_digest=digest)
        assert prove(remote.loader, manifest) == (digest, None), "the same as from the memory itself"
        assert prove(remote.client, manifest) == (digest, None)
    with pytest.raises(DigestMismatchError):
        prove(remote.client, manifest_of(weights(1), 1, model_digest=f"wsd2:{'0' * 32}"))
    with pytest.raises(UnsupportedError, match="another engine"):
        remote.client.live_tensors()


def test_a_new_run_and_a_new_client_join_anew(remote: Remote) -> None:
    remote.sync(5)
    new = weights(1)
    manifest = manifest_of(new, 1, version=Version(run_id="another", number=1))
    remote.client.begin(manifest)
    load(remote.client, new)
    remote.client.verify()
    remote.client.commit(manifest.version)
    assert remote.serves(1)
    assert remote.engine.version == manifest.version


def test_a_bit_that_flips_on_the_far_side_is_found_before_the_commit(remote: Remote) -> None:
    remote.sync(1)
    remote.loader.arm({"at": "load", "chunk": 0, "do": "corrupt"})
    new = weights(2)
    remote.client.begin(manifest_of(new, 2))
    load(remote.client, new)
    with pytest.raises(DigestMismatchError):
        remote.client.verify()
    remote.client.abort("corrupt")
    assert remote.serves(1)
    assert remote.client.healthy


class Unprovable(FaultyLoader):
    def live_tensors(self) -> Iterator[HeldTensor]:
        raise UnsupportedError("repacked")


def test_what_the_far_loader_can_not_prove_is_said_to_be_unprovable() -> None:
    made = Remote(Unprovable)
    try:
        made.sync(1)
        assert made.serves(1)
        with pytest.raises(UnsupportedError, match="repacked"):
            made.client.live_digest()
        assert prove(made.client, manifest_of(weights(1)))[1] == "repacked"
    finally:
        made.close()


def test_updates_travel_together_up_to_chunk_bytes(remote: Remote) -> None:
    asked: dict[int, tuple[str, ...]] = {}  # two may be on their way at once
    call = remote.engine.call

    def noted(op: EngineOp, request: EngineRequest, *, timeout_s: float) -> EngineReply:
        if isinstance(request, UpdateRequest):
            asked[request.update.seq] = request.update.names
        return call(op, request, timeout_s=timeout_s)

    remote.engine.call = noted  # type: ignore[method-assign]
    client = remote.connect(chunk_bytes=160)
    new = weights(1)
    client.begin(manifest_of(new, 1))
    names = list(new)
    for cut in (names[:3], names[3:]):  # 256, 32 and 128 bytes; 8
        client.load_weights(Full(name=name, tensor=new[name]) for name in cut)
    assert asked == {0: (names[0],), 1: (names[1], names[2]), 2: (names[3],)}
    client.verify()
    client.commit(Version(run_id="contract", number=1))
    assert remote.serves(1)


def test_it_is_found_where_loaders_are() -> None:
    assert old_place.RemoteWeightLoader is RemoteWeightLoader
    with pytest.raises(AttributeError):
        _ = old_place.RemoteLoader


# --- failures, step by step ---


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("point", ["begin", "load", "loaded", "commit"])
def test_a_loader_that_fails_is_typed_and_leaves_the_old_model_or_a_fenced_one(point: str, in_place: bool) -> None:
    remote = Remote(in_place=in_place)
    try:
        remote.sync(1)
        remote.loader.arm({"at": point, "chunk": 0 if point != "commit" else 1, "do": "raise"})
        with pytest.raises((LoadError, EngineError), match=f"injected at {point}"):
            remote.sync(2)
        remote.client.abort("it failed")
        assert remote.client.healthy == remote.loader.healthy
        assert remote.serves(1) if remote.loader.healthy else in_place
        assert remote.loader.healthy == (not in_place or point in ("begin", "load"))
        remote.sync(3)
        assert remote.serves(3)
        assert remote.client.healthy
        with remote.engine.generation(timeout_s=0.1) as version:
            assert version == Version(run_id="contract", number=3)
    finally:
        remote.close()


def test_a_loader_that_hangs_is_a_missed_deadline(remote: Remote) -> None:
    hung, go = remote.connect(), threading.Event()
    remote.sync(1, client=hung)  # a group takes its time
    hung._timeout_s = 3.0
    remote.loader.begin = lambda manifest: go.wait(LONG_S) and None  # type: ignore[method-assign]
    with pytest.raises(DeadlineExceededError):
        hung.begin(manifest_of(weights(2), 2))
    go.set()


def test_a_commit_without_an_answer_is_not_called_healthy_until_the_next(remote: Remote) -> None:
    held, go, done = threading.Event(), threading.Event(), threading.Event()
    commit = remote.loader.commit

    def slow(version: Version) -> None:
        held.set()
        assert go.wait(LONG_S)
        commit(version)
        done.set()

    impatient = remote.connect()
    remote.sync(1, client=impatient)  # a group takes its time
    remote.loader.commit = slow  # type: ignore[method-assign]
    impatient._timeout_s = 5.0
    with pytest.raises(DeadlineExceededError) as caught:
        remote.sync(2, client=impatient)
    assert held.is_set()
    assert "not known" in (caught.value.state_left or "")
    assert not impatient.healthy
    go.set()
    assert done.wait(LONG_S)
    impatient.abort("no answer")
    assert not impatient.healthy, "it never heard which version is served"
    remote.sync(3, client=impatient)
    assert remote.serves(3)
    assert impatient.healthy


def test_an_engine_that_goes_away_is_typed_and_the_bracket_closes_here(remote: Remote) -> None:
    new = weights(1)
    remote.client.begin(manifest_of(new, 1))
    remote.server.close()
    with pytest.raises(EngineUnreachableError):
        load(remote.client, new)
    with pytest.raises(EngineUnreachableError):
        remote.client.abort("gone")
    remote.client.abort("again")
    with pytest.raises(EngineUnreachableError):
        RemoteWeightLoader(remote.url, token=TOKEN)


def test_a_live_writer_that_went_away_in_a_load_is_not_healthy(live_writer: Remote) -> None:
    new = weights(1)
    live_writer.client.begin(manifest_of(new, 1))
    live_writer.server.close()
    assert live_writer.client.healthy, "nothing was written yet"
    with pytest.raises(EngineUnreachableError):
        load(live_writer.client, new)
    assert not live_writer.client.healthy


def test_nobody_generates_there_while_live_weights_are_written(live_writer: Remote) -> None:
    new = weights(1)
    live_writer.client.begin(manifest_of(new, 1))
    with pytest.raises(NotServingError), live_writer.engine.generation(timeout_s=0.05):
        pass
    live_writer.client.abort("enough")
    with live_writer.engine.generation(timeout_s=0.05):
        pass


class Restarting:
    """An engine that is started anew behind the same address."""

    engine_id = "restarting"

    def __init__(self) -> None:
        self.engine = EmbeddedEngine.of(ModuleWeightLoader(model()))
        self.asked: list[EngineRequest] = []

    def restart(self) -> None:
        self.engine.close()
        self.engine = EmbeddedEngine.of(ModuleWeightLoader(model()))

    def call(self, op: EngineOp, request: EngineRequest, *, timeout_s: float) -> EngineReply:
        self.asked.append(request)
        return self.engine.call(op, request, timeout_s=timeout_s)


@pytest.fixture
def restarting() -> Iterator[tuple[Restarting, Bench]]:
    """It, and a worker that loads it: with v1 served, and v2 staged."""
    there = Restarting()
    client = RemoteWeightLoader(there, timeout_s=LONG_S)
    bench = Bench(loader=client)
    bench.sync(1)
    bench.receiver.tensors = bench_weights(2)
    bench.worker.begin(begin(2))
    for seq in (0, 1):
        bench.worker.update(chunk(seq))
    bench.worker.stage(StageRequest(session="s", manifest=bench_manifest(2, seed=2)))
    yield there, bench
    bench.worker.close()
    client.close()
    there.engine.close()


def test_an_engine_that_was_restarted_before_the_commit_is_not_called_serving(
    restarting: tuple[Restarting, Bench],
) -> None:
    """The error is a typed one, not a missing answer: what it serves by now is asked."""
    there, bench = restarting
    there.restart()
    with pytest.raises(WeightSyncError, match="not open"):
        bench.worker.commit("s")
    assert not bench.worker.describe().serving


def test_where_this_side_dies_in_a_commit_the_other_engine_goes_on_soon(restarting: tuple[Restarting, Bench]) -> None:
    """Seen red: it stood still for up to `timeout_s`, five minutes, and ten seconds."""
    there, bench = restarting
    bench.loader._load.session._deadline = Deadline(300.0)
    bench.worker.commit("s")
    pause = [each for each in there.asked if isinstance(each, PauseRequest)][-1]
    assert (pause.timeout_s, pause.lease_s) == (30.0, 40.0)


def test_a_pause_that_comes_too_late_has_committed_nothing(restarting: tuple[Restarting, Bench]) -> None:
    there, bench = restarting
    bench.loader._load.session._pause_timeout_s = 0.05
    with there.engine.generation() as version, pytest.raises(DeadlineExceededError):
        bench.worker.commit("s")
    reply = bench.worker.describe()
    assert (reply.serving, reply.version) == (True, version)


# --- two at once ---


def test_a_second_client_takes_over_and_the_first_is_told_so(remote: Remote) -> None:
    other, new = remote.connect(), weights(1)
    remote.client.begin(manifest_of(new, 1))
    remote.sync(2, client=other)
    with pytest.raises((TransferAbortedError, EngineError), match=r"took over|not open"):
        load(remote.client, new)
    remote.client.abort("late")
    assert remote.serves(2)
    remote.sync(3)
    assert remote.serves(3)


def test_a_bracket_that_nobody_ends_is_ended_there(remote: Remote) -> None:
    silent = remote.connect()
    remote.sync(1, client=silent)  # a group takes its time
    silent._timeout_s = 5.0
    silent.begin(manifest_of(weights(2), 2))
    for _ in range(400):
        if next(iter(remote.engine._workers)).session is None:  # type: ignore[attr-defined]
            break
        threading.Event().wait(0.05)
    remote.sync(3)
    assert remote.serves(3)


# --- an engine of another kind ---


@pytest.mark.parametrize("kind", ["sglang+", ""])
def test_a_server_of_another_kind_is_loaded_by_its_own_routes(kind: str, tmp_path: Path) -> None:
    """An SGLang, whether its URL says so or it has to be asked. Seen red: `sglang+http` was no URL, and a plain one was
    taken for an engine server's."""
    new = {name: torch.full(SHAPE, float(i), dtype=torch.bfloat16) for i, name in enumerate(NAMES)}
    manifest = manifest_of(new, 1)
    with contextlib.ExitStack() as opened:
        workers = opened.enter_context(contextlib.closing(SGLangWorkers()))
        server = SGLangServer(write_checkpoint(tmp_path, 0), workers=workers, token=TOKEN)
        opened.callback(server.close)
        url = server.start()
        with pytest.raises(ConfigError, match="is sglang, and its URL says vllm"):
            RemoteWeightLoader(f"vllm+{url}", token=TOKEN)
        client = RemoteWeightLoader(f"{kind}{url}", token=TOKEN, timeout_s=LONG_S)
        opened.callback(client.close)
        client.begin(manifest)
        assert server.paused is not None, "it loads in place"
        load(client, new)
        client.verify()
        client.commit(manifest.version)
        assert client.healthy
        assert client.lost() is None
        assert {name: each.tobytes() for name, each in server.weights.items()} == {
            name: content(tensor) for name, tensor in new.items()
        }
        assert (server.weight_version, server.paused) == (str(manifest.version), None)


@pytest.mark.parametrize("kind", ["vllm+", ""])
def test_a_vllm_has_the_handle_that_a_push_gives_it(kind: str, tmp_path: Path) -> None:
    """Seen red as above."""
    server = VllmStandIn(write_checkpoint(tmp_path, 0), state=VllmState())
    with contextlib.closing(server), contextlib.closing(RemoteWeightLoader(f"{kind}{server.start()}")) as client:
        assert isinstance(client._engine, VllmServerEngine)
        assert client._strategy.name == "broadcast"


# --- who may, and what is believed ---


def test_who_has_another_token_gets_nowhere(remote: Remote) -> None:
    with pytest.raises(AuthError):
        RemoteWeightLoader(remote.url, token="another-token-of-some-length")


def test_a_strategy_that_lends_memory_is_refused(remote: Remote) -> None:
    with pytest.raises(ConfigError, match="lends memory"):
        remote.connect(strategy=PackedCudaIpcTransferStrategy())
    with pytest.raises(ConfigError, match="chunk_bytes"):
        remote.connect(chunk_bytes=0)


class Liar:
    """An engine whose answers to one step are changed."""

    def __init__(self, engine: EmbeddedEngine, op: EngineOp, lie: Callable[[EngineReply], EngineReply]) -> None:
        self.engine, self.op, self.lie = engine, op, lie
        self.engine_id = engine.engine_id

    def call(self, op: EngineOp, request: EngineRequest, *, timeout_s: float) -> EngineReply:
        reply = self.engine.call(op, request, timeout_s=timeout_s)
        return self.lie(reply) if op is self.op else reply


@pytest.mark.parametrize(
    ("op", "told", "kind"),
    [
        (EngineOp.STAGE, {"model_digest": f"wsd2:{'0' * 32}"}, DigestMismatchError),
        (EngineOp.STAGE, {"digests_equal": None}, DigestMismatchError),
        (EngineOp.COMMIT, {"version": Version(run_id="contract", number=7)}, EngineError),
        (EngineOp.COMMIT, {"version": None}, EngineError),
    ],
)
def test_an_answer_without_a_proof_is_not_believed(
    remote: Remote, op: EngineOp, told: dict[str, Any], kind: type[Exception]
) -> None:
    def lie(reply: EngineReply) -> EngineReply:
        fields = {name: getattr(reply, name) for name in reply.__struct_fields__}
        return EngineReply(**{**fields, **told})

    client = RemoteWeightLoader(Liar(remote.engine, op, lie), timeout_s=LONG_S)
    try:
        with pytest.raises(kind):
            remote.sync(1, client=client)
        if op is EngineOp.COMMIT:
            assert not client.healthy
    finally:
        client.close()
