"""EngineWorker over a transport in memory: order, sessions, deadlines, versions, proofs."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from tests.unit.host.fakes import LONG_S, RUN, Bench, LoaderSpy, begin, chunk, init, manifest, model, weights
from weightsync.codec.digest import patch_sum
from weightsync.codec.model_digest import ShardSum, model_digest
from weightsync.engine.proof import prove_patch
from weightsync.errors import (
    DeadlineExceededError,
    DigestMismatchError,
    EngineUnreachableError,
    GroupJoinError,
    InvalidRequestError,
    LoadError,
    ManifestMismatchError,
    StateError,
    SyncInProgressError,
    TransferAbortedError,
    TransferError,
    UnsupportedError,
    VersionError,
    WeightSyncError,
)
from weightsync.handles.fanout import in_thread
from weightsync.load.module import ModuleWeightLoader
from weightsync.load.patching import Change
from weightsync.types import HeldTensor, StageRequest, TensorSpec, Version
from weightsync.types.engine import CHECK_RUN, PatchBase

TENSORS = ("0.weight", "0.bias", "1.weight", "1.bias")


def stage(number: int = 1, *, seed: int = 1, session: str = "s", **changes: Any) -> StageRequest:
    return StageRequest(session=session, manifest=manifest(number, seed=seed, **changes))


def until_somebody_waits_for_a_turn(bench: Bench) -> None:
    """There is no other way to see that a call has come so far."""
    while not bench.worker._session.receiving._changed._waiters:  # type: ignore[union-attr,attr-defined]
        pass


def works_again(bench: Bench, number: int = 9) -> None:
    """After whatever happened: a new init and a good sync."""
    bench.worker.init(init())
    bench.sync(number, seed=3, session="again")
    assert bench.loader.serves(3)
    assert bench.worker.describe().version == Version(run_id=RUN, number=number)


def test_a_good_sync() -> None:
    bench = Bench()
    bench.sync(4)
    assert bench.loader.serves(1)
    described = bench.worker.describe()
    assert described.version == Version(run_id=RUN, number=4)
    assert described.model_digest == manifest(4, seed=1).model_digest
    assert bench.receiver.released == [0, 1]
    names = [record.name for record in bench.worker.drain_phases()]
    assert names.count("transfer") == names.count("load") == 2
    assert {"verify", "commit"} <= set(names)
    assert bench.worker.drain_phases() == ()


def test_an_engine_of_a_model_on_the_cpu_leaves_its_hosts_gpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen red: it asked for the current device, which takes a context, and in a forked child there is none."""

    def asked() -> int:
        raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", asked)
    Bench().sync(4)


def test_a_transfer_meets_on_the_gpu_of_the_engines_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU. Seen red: on the current one of whoever had made the engine, which NCCL and CUDA IPC refuse."""
    module, chosen = model(), list[int]()
    devices = [torch.device("cpu"), torch.device("cuda", 1), torch.device("cuda", 0)]
    on_gpus = [SimpleNamespace(is_cuda=device.type == "cuda", device=device) for device in devices]
    monkeypatch.setattr(module, "parameters", lambda: iter(on_gpus))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    bench = Bench(loader=LoaderSpy(module))
    assert chosen == [1]
    del on_gpus[1:]
    bench.worker.init(init())
    assert chosen == [1, 0], "of a model on the CPU, where somebody uses the GPU"


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))), ids=str)
def test_chunks_whose_calls_come_in_any_order_load_in_the_order_of_their_numbers(order: tuple[int, ...]) -> None:
    bench = Bench()
    bench.worker.begin(begin())
    calls = []
    for seq in order:
        calls.append(in_thread(lambda seq=seq: bench.worker.update(chunk(seq, TENSORS[seq])), name=str(seq)))  # type: ignore[misc]
    for call in calls:
        call.result(5)
    assert bench.receiver.received == [0, 1, 2, 3]
    assert bench.loader.loaded == list(TENSORS)
    bench.worker.stage(stage())
    bench.worker.commit("s")
    assert bench.loader.serves(1)


def test_a_chunk_is_received_while_the_one_before_is_loaded_and_released_after() -> None:
    bench = Bench()
    bench.worker.begin(begin())
    bench.loader.go.clear()
    first = in_thread(lambda: bench.worker.update(chunk(0)), name="0")
    assert bench.loader.loading.wait(5)
    second = in_thread(lambda: bench.worker.update(chunk(1)), name="1")
    assert bench.receiver.entered[1].wait(5)
    assert bench.receiver.released == []
    bench.loader.go.set()
    first.result(5)
    second.result(5)
    assert bench.receiver.released == [0, 1]


def test_a_chunk_announced_twice_ends_the_session() -> None:
    bench = Bench()
    bench.worker.begin(begin())
    bench.worker.update(chunk(0))
    with pytest.raises(InvalidRequestError, match="twice"):
        bench.worker.update(chunk(0))
    assert bench.loader.serves(0)
    works_again(bench)


def test_a_chunk_announced_twice_at_once_loads_once() -> None:
    bench = Bench()
    bench.worker.begin(begin())
    hold = bench.receiver.holds[0] = threading.Event()
    calls = [in_thread(lambda: bench.worker.update(chunk(0)), name=str(i)) for i in range(2)]
    assert bench.receiver.entered[0].wait(5)
    hold.set()
    errors = [call.exception(5) for call in calls]
    assert any(isinstance(error, InvalidRequestError) for error in errors)
    assert bench.receiver.received == [0]


def test_calls_of_another_session_touch_nothing() -> None:
    bench = Bench()
    bench.worker.begin(begin())
    for call in (
        lambda: bench.worker.update(chunk(0, session="other")),
        lambda: bench.worker.stage(stage(session="other")),
        lambda: bench.worker.commit("other"),
    ):
        with pytest.raises(TransferAbortedError, match="other"):
            call()
    bench.worker.abort("other", "not mine")
    assert bench.loader.aborts == []
    assert bench.receiver.received == []
    for seq in (0, 1):
        bench.worker.update(chunk(seq))
    bench.worker.stage(stage())
    bench.worker.commit("s")


def test_calls_of_a_session_that_has_ended() -> None:
    bench = Bench()
    bench.sync()
    for call in (lambda: bench.worker.update(chunk(0)), lambda: bench.worker.commit("s")):
        with pytest.raises(TransferAbortedError):
            call()
    bench.worker.abort("s", "too late")
    assert bench.loader.aborts == []
    assert bench.worker.describe().group is not None, "a late abort does not cost the group"


def test_begin_twice_disturbs_nothing() -> None:
    bench = Bench()
    bench.worker.begin(begin())
    for again in (begin(2, session="t"), begin(1)):
        with pytest.raises(SyncInProgressError, match="session s"):
            bench.worker.begin(again)
    for seq in (0, 1):
        bench.worker.update(chunk(seq))
    bench.worker.stage(stage())
    bench.worker.commit("s")
    assert bench.loader.serves(1)


def test_begin_without_a_group() -> None:
    with pytest.raises(StateError, match="init first"):
        Bench(join=False).worker.begin(begin())


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("inf"), float("nan"), 1e300])
def test_a_session_has_a_deadline_that_a_timer_can_keep(seconds: float) -> None:
    bench = Bench()
    with pytest.raises(InvalidRequestError):
        bench.worker.begin(begin(deadline_s=seconds))
    bench.sync()


def test_a_session_of_another_model_is_refused() -> None:
    """Two models of one shape (actor and reference, say) must not get each other's weights."""
    bench = Bench(join=False)
    bench.worker.init(init(model_id="actor"))
    with pytest.raises(WeightSyncError, match="reference"):
        bench.worker.begin(begin(model_id="reference"))


def test_a_trainer_that_falls_silent_is_aborted_at_the_deadline() -> None:
    bench = Bench()
    bench.worker.begin(begin(deadline_s=4.0))
    bench.worker.update(chunk(0))
    assert bench.receiver.closed.wait(20), "the group is dropped, so that others notice"
    end = time.monotonic() + 5
    while not bench.loader.aborts and time.monotonic() < end:
        time.sleep(0.001)
    assert "trainer is gone" in bench.loader.aborts[0]
    assert bench.loader.serves(0)
    works_again(bench)


def test_a_chunk_that_waits_for_its_turn_ends_with_the_deadline() -> None:
    bench = Bench()
    bench.worker.begin(begin(deadline_s=2.0))
    started = time.monotonic()
    with pytest.raises(DeadlineExceededError):
        bench.worker.update(chunk(1))
    assert time.monotonic() - started < 15


def test_a_commit_in_time_stops_the_watchdog() -> None:
    bench = Bench()
    bench.worker.begin(begin(deadline_s=60))
    assert bench.worker._session is not None
    watchdog = bench.worker._session.watchdog
    assert watchdog is not None
    for seq in (0, 1):
        bench.worker.update(chunk(seq))
    bench.worker.stage(stage())
    bench.worker.commit("s")
    watchdog.join(10)
    assert not watchdog.is_alive(), "it waits for the deadline of a session that has ended"
    assert bench.loader.aborts == []
    assert not bench.receiver.closed.is_set()


def test_an_abort_while_bytes_are_awaited_ends_that_wait() -> None:
    bench = Bench()
    bench.worker.begin(begin())
    bench.receiver.holds[0] = threading.Event()
    waiting = [in_thread(lambda n=n: bench.worker.update(chunk(n)), name=str(n)) for n in (0, 1)]  # type: ignore[misc]
    assert bench.receiver.entered[0].wait(5)
    until_somebody_waits_for_a_turn(bench)
    started = time.monotonic()
    bench.worker.abort("s", "as told")
    for call in waiting:
        error = call.exception(5)
        assert isinstance(error, TransferAbortedError), "the reason, not the broken connection that followed"
        assert "as told" in str(error)
    assert time.monotonic() - started < LONG_S
    assert len(bench.loader.aborts) == 1
    works_again(bench)


@pytest.mark.parametrize("how", ["abort", "init"])
def test_an_abort_waits_for_whoever_ends_the_session_already(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen to fail: it returned at once, and the begin that followed met the open session."""
    bench = Bench()
    bench.worker.begin(begin())
    aborting, go, real = threading.Event(), threading.Event(), bench.loader.abort

    def slowly(reason: str) -> None:
        aborting.set()
        assert go.wait(5)
        real(reason)

    monkeypatch.setattr(bench.loader, "abort", slowly)
    failing = in_thread(lambda: bench.worker.update(chunk(0, "0.weight", shapes=((7, 7),))), name="fails")
    assert aborting.wait(5)
    step = {"abort": lambda: bench.worker.abort("s", "as told"), "init": lambda: bench.worker.init(init())}[how]
    ending = in_thread(step, name="ends")
    with pytest.raises(TimeoutError):
        ending.result(0.2)
    go.set()
    ending.result(5)
    assert isinstance(failing.exception(5), WeightSyncError)
    assert bench.worker.session is None
    works_again(bench)


def test_an_abort_that_overtakes_its_begin_keeps_it_from_beginning() -> None:
    """Nobody would end that session, and every other one would wait for its deadline."""
    bench = Bench()
    bench.worker.abort("s", "its begin takes too long")
    with pytest.raises(TransferAbortedError):
        bench.worker.begin(begin(session="s"))
    assert bench.worker.session is None
    bench.sync(session="t")
    assert bench.loader.serves(1)


def test_an_abort_waits_for_a_load_that_is_running() -> None:
    """A loader is driven by one thread at a time; its live weights are judged after the load, not inside it."""
    bench = Bench()
    bench.worker.begin(begin())
    bench.loader.go.clear()
    loading = in_thread(lambda: bench.worker.update(chunk(0)), name="load")
    assert bench.loader.loading.wait(5)
    aborting = in_thread(lambda: bench.worker.abort("s", "as told"), name="abort")
    assert bench.receiver.closed.wait(5)
    assert bench.loader.aborts == []
    bench.loader.go.set()
    aborting.result(5)
    assert len(bench.loader.aborts) == 1
    loading.exception(5)
    works_again(bench)


def test_a_loader_that_never_returns_marks_its_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightsync.engine.worker._STUCK_LOADER_S", 0.1)
    bench = Bench()
    bench.worker.begin(begin())
    bench.loader.go.clear()
    loading = in_thread(lambda: bench.worker.update(chunk(0)), name="load")
    assert bench.loader.loading.wait(5)
    bench.worker.abort("s", "as told")
    for call in (
        bench.worker.describe,
        lambda: bench.worker.init(init()),
        lambda: bench.worker.begin(begin(2, session="t")),
    ):
        with pytest.raises(StateError, match="restarted"):
            call()
    assert bench.loader.aborts == [], "never under a load that runs"
    bench.loader.go.set()
    loading.exception(5)
    end = time.monotonic() + 5
    while not bench.loader.aborts and time.monotonic() < end:
        time.sleep(0.001)
    assert len(bench.loader.aborts) == 1, "it came back after all"


def test_the_first_error_is_the_one_that_is_told() -> None:
    bench = Bench()
    bench.worker.begin(begin())
    bench.receiver.faults[0] = TransferError("a member left")
    hold = bench.receiver.holds[0] = threading.Event()
    late, first = (in_thread(lambda n=n: bench.worker.update(chunk(n)), name=str(n)) for n in (1, 0))  # type: ignore[misc]
    assert bench.receiver.entered[0].wait(5)
    until_somebody_waits_for_a_turn(bench)
    hold.set()
    for call in (first, late):
        assert "a member left" in str(call.exception(5))
    with pytest.raises(TransferAbortedError, match="a member left"):
        bench.worker.update(chunk(2, "1.weight"))  # whoever comes late is told why as well


def test_an_error_that_is_not_ours_is_typed_and_the_old_weights_stay() -> None:
    bench = Bench()
    bench.sync(1, seed=2)
    bench.worker.begin(begin(2, session="t"))
    bench.loader.fault = ZeroDivisionError("in the loader")
    with pytest.raises(LoadError, match="in the loader"):
        bench.worker.update(chunk(0, session="t"))
    assert bench.loader.serves(2)
    assert bench.worker.describe().version == Version(run_id=RUN, number=1)
    works_again(bench)


# --- groups ---


def test_a_new_init_aborts_the_session_and_closes_the_old_group() -> None:
    bench = Bench()
    old = bench.receiver
    bench.worker.begin(begin())
    bench.worker.init(init())
    assert old.closed.is_set()
    assert bench.loader.aborts
    with pytest.raises(TransferAbortedError):
        bench.worker.update(chunk(0))
    bench.sync(session="t")


def test_an_older_init_gives_way_to_a_newer_one() -> None:
    bench = Bench(join=False)
    joining, go = threading.Event(), threading.Event()

    def wait() -> None:
        joining.set()
        assert go.wait(LONG_S)

    bench.strategy.may_join = wait
    older = in_thread(lambda: bench.worker.init(init()), name="older")
    assert joining.wait(5)
    bench.strategy.may_join = lambda: None
    bench.worker.init(init("newer"))
    newest = bench.receiver
    go.set()
    assert isinstance(older.exception(5), TransferAbortedError)
    assert bench.receiver.closed.is_set(), "the late one is closed again"
    assert not newest.closed.is_set()
    bench.worker.begin(begin(run_id="newer"))


def test_an_older_init_that_was_held_up_leaves_the_newer_ones_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for the end of a session. Seen red: it then left the group that the newer one had joined."""
    bench = Bench()
    bench.worker.begin(begin())
    end, held, go = bench.worker._end, threading.Event(), threading.Event()

    def slow(session: Any, error: WeightSyncError) -> None:
        end(session, error)
        held.set()
        assert go.wait(LONG_S)

    monkeypatch.setattr(bench.worker, "_end", slow)
    older = in_thread(lambda: bench.worker.init(init()), name="older")
    assert held.wait(5)
    bench.worker.init(init("newer"))
    go.set()
    assert isinstance(older.exception(5), TransferAbortedError)
    bench.worker.begin(begin(run_id="newer"))


def test_a_loader_that_can_not_abort_ends_its_session_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its engine elsewhere is gone for a while. Seen red: each later begin said that the session is open."""
    bench = Bench()
    bench.worker.begin(begin())

    abort = bench.loader.abort

    def gone(reason: str) -> None:
        abort(reason)
        raise EngineUnreachableError("nobody answers there")

    with monkeypatch.context() as patched:
        patched.setattr(bench.loader, "abort", gone)
        bench.worker.abort("s", "as told")
    works_again(bench)


def test_an_end_that_comes_behind_the_commit_says_nothing_of_the_session() -> None:
    """Seen red: of a version that is served the next call said that its session was aborted."""
    bench = Bench()
    bench.sync()
    session = bench.worker._ended
    assert session is not None
    bench.worker._expire(session)
    with pytest.raises(TransferAbortedError, match="it was aborted, or has ended"):
        bench.worker.update(chunk(0))


def test_an_init_that_fails_leaves_no_group() -> None:
    bench = Bench()

    def fail() -> None:
        raise GroupJoinError("nobody came")

    bench.strategy.may_join = fail
    with pytest.raises(GroupJoinError):
        bench.worker.init(init())
    assert bench.worker.describe().group is None
    with pytest.raises(StateError):
        bench.worker.begin(begin())
    bench.strategy.may_join = lambda: None
    works_again(bench)


def test_a_worker_closed_while_it_joins_keeps_no_group() -> None:
    bench = Bench(join=False)
    joining, go = threading.Event(), threading.Event()

    def wait() -> None:
        joining.set()
        assert go.wait(LONG_S)

    bench.strategy.may_join = wait
    late = in_thread(lambda: bench.worker.init(init()), name="late")
    assert joining.wait(5)
    bench.worker.close()
    go.set()
    late.exception(5)
    assert bench.receiver.closed.is_set()
    assert bench.worker.describe().group is None


def test_a_strategy_that_is_not_there() -> None:
    from weightsync.engine.worker import EngineWorker

    with pytest.raises(UnsupportedError, match="memory"):
        EngineWorker(ModuleWeightLoader(model())).init(init())


def test_closing_aborts_and_can_be_repeated() -> None:
    bench = Bench()
    bench.worker.begin(begin())
    for _ in range(2):
        bench.worker.close()
    assert bench.receiver.closed.is_set()
    assert len(bench.loader.aborts) == 1


# --- versions ---


def test_versions_rise_within_a_run() -> None:
    bench = Bench()
    bench.sync(5)
    with pytest.raises(VersionError, match="run/5"):
        bench.worker.begin(begin(4, session="t"))
    bench.sync(6, seed=2, session="u")


def test_another_run_starts_over_but_only_after_its_init() -> None:
    bench = Bench()
    bench.sync(5)
    with pytest.raises(VersionError, match="current run"):
        bench.worker.begin(begin(6, session="t", run_id="restarted"))
    bench.worker.init(init("restarted"))
    bench.sync(1, seed=2, session="u", run_id="restarted")
    assert bench.worker.describe().version == Version(run_id="restarted", number=1)
    with pytest.raises(VersionError, match="current run"):
        bench.worker.begin(begin(9, session="v"))


def test_a_trainer_that_says_that_it_ends_is_none_any_more_and_may_come_again() -> None:
    bench = Bench()
    bench.worker.init(init(group="first"))
    bench.worker.init(init(group="second"))
    bench.worker.abort("first", "an older life of it has ended")
    assert (bench.worker.describe().run_id, bench.worker.describe().group) == (RUN, "second")
    bench.worker.begin(begin(5))
    bench.worker.abort("second", "it ended, and somebody has a session open")
    assert (bench.worker.describe().run_id, bench.worker.session) == (RUN, "s")
    bench.worker.abort("s", "over")
    bench.worker.abort("second", "it ended")
    assert (bench.worker.describe().run_id, bench.worker.describe().group) == (None, None)
    bench.worker.init(init(group="third"))
    assert bench.worker.describe().run_id == RUN
    bench.sync(5)
    bench.worker.abort("third", "it ended")
    assert bench.worker.describe().version == Version(run_id=RUN, number=5)
    bench.worker.init(init("newer"))
    with pytest.raises(VersionError, match=f"{RUN} was taken over by newer"):
        bench.worker.init(init(group="fourth"))
    bench.worker.abort("third", "a late goodbye of another run")
    assert (bench.worker.describe().run_id, bench.worker.describe().group) == ("newer", "g")


def test_a_fleet_goes_back_to_a_run_that_another_one_took_over_from() -> None:
    bench = Bench()
    for run_id in (RUN, "newer"):
        bench.worker.init(init(run_id))
    with pytest.raises(VersionError, match=f"{RUN} was taken over by newer"):
        bench.worker.init(init())
    bench.worker.init(msgspec.structs.replace(init(), returns=True))
    bench.worker.init(init(group="again"))
    bench.sync(5)
    with pytest.raises(VersionError, match=f"newer was taken over by {RUN}"):
        bench.worker.init(init("newer"))


@pytest.mark.parametrize("ended", [False, True])
def test_a_check_takes_no_trainers_place(ended: bool) -> None:
    bench = Bench()
    bench.worker.init(init())
    bench.sync(5)
    if ended:
        bench.worker.abort("g", "it ended")
    check = f"{CHECK_RUN}-1"
    bench.worker.init(init(check, group="of the check"))
    bench.worker.begin(begin(0, session="t", run_id=check))
    bench.worker.abort("t", "nothing but a check")
    assert bench.worker.describe().run_id == check
    for _ in range(2):  # seen red: said twice it ended the trainer's run
        bench.worker.abort("of the check", "nothing but a check")
        assert bench.worker.describe().run_id == (None if ended else RUN)
    assert bench.worker.describe().version == Version(run_id=RUN, number=5)
    works_again(bench)


def test_the_same_version_again_has_the_same_bytes_or_is_refused() -> None:
    bench = Bench()
    bench.sync(5, seed=1)
    bench.sync(5, seed=1, session="again")
    with pytest.raises(VersionError, match="immutable"):
        bench.sync(5, seed=2, session="other bytes")
    assert bench.loader.serves(1)


# --- what may arrive ---


@pytest.mark.parametrize(
    ("request_", "name"),
    [
        (chunk(0, "0.bias", names=("nobody",)), "nobody"),
        (chunk(0, "0.bias", dtypes=("int32",)), "0.bias"),
        (chunk(0, "0.bias", shapes=((1, 3),)), "0.bias"),
    ],
    ids=["name", "dtype", "shape"],
)
def test_a_chunk_that_the_manifest_has_not_is_refused_before_it_is_received(request_: Any, name: str) -> None:
    bench = Bench()
    bench.worker.begin(begin())
    with pytest.raises(ManifestMismatchError) as caught:
        bench.worker.update(request_)
    assert caught.value.parameter == name
    assert bench.receiver.received == []
    works_again(bench)


def loaded() -> Bench:
    bench = Bench()
    bench.worker.begin(begin())
    for seq in (0, 1):
        bench.worker.update(chunk(seq))
    return bench


def with_other_digest(field: str) -> Any:
    good = manifest(seed=1)
    if field == "model":
        return msgspec.structs.replace(good, model_digest=manifest(seed=2).model_digest)
    if field == "none":
        return manifest()
    digests = good.digests
    return msgspec.structs.replace(good, digests=digests[:32] + digests[:16] + digests[48:])


@pytest.mark.parametrize(
    ("field", "kind"), [("tensor", DigestMismatchError), ("model", DigestMismatchError), ("none", InvalidRequestError)]
)
def test_bytes_that_are_not_the_published_ones_are_never_staged(field: str, kind: type[WeightSyncError]) -> None:
    bench = loaded()
    with pytest.raises(kind):
        bench.worker.stage(StageRequest(session="s", manifest=with_other_digest(field)))
    with pytest.raises(TransferAbortedError):
        bench.worker.commit("s")
    assert bench.loader.serves(0)
    works_again(bench)


def other_manifests() -> Iterator[Any]:
    good = manifest(seed=1)
    assert good.digests is not None
    yield manifest(2, seed=1)
    yield manifest(1, seed=1, run_id="other")
    yield msgspec.structs.replace(good, tensors=good.tensors[:-1], digests=good.digests[:-16])
    extra = TensorSpec(name="extra", dtype="uint8", shape=(1,))
    yield msgspec.structs.replace(good, tensors=(*good.tensors, extra), digests=good.digests + bytes(16))
    shape = msgspec.structs.replace(good.tensors[0], shape=(4, 3))
    yield msgspec.structs.replace(good, tensors=(shape, *good.tensors[1:]))


@pytest.mark.parametrize("other", list(other_manifests()), ids=["number", "run", "fewer", "more", "shape"])
def test_stage_names_the_manifest_of_begin(other: Any) -> None:
    bench = loaded()
    with pytest.raises(ManifestMismatchError):
        bench.worker.stage(StageRequest(session="s", manifest=other))
    assert bench.loader.serves(0)


def test_stage_before_everything_came() -> None:
    bench = Bench()
    bench.worker.begin(begin())
    bench.worker.update(chunk(0))
    with pytest.raises(ManifestMismatchError) as caught:
        bench.worker.stage(stage())
    assert caught.value.parameter == "1.bias"
    works_again(bench)


def test_commit_comes_after_stage() -> None:
    bench = loaded()
    with pytest.raises(StateError, match="after stage"):
        bench.worker.commit("s")
    assert bench.loader.serves(0)


def test_a_commit_that_fails_keeps_the_old_version() -> None:
    bench = loaded()
    bench.worker.stage(stage())
    bench.loader.commit_fault = RuntimeError("no")
    with pytest.raises(LoadError, match="no"):
        bench.worker.commit("s")
    assert bench.worker.describe().version is None
    assert bench.loader.serves(0)
    works_again(bench)


# --- proofs ---


class Repacked(LoaderSpy):
    """An engine that can't give its live bytes back."""

    def live_tensors(self) -> Iterator[HeldTensor]:
        raise UnsupportedError("the engine repacked its linear weights")


class RepackedLazily(Repacked):
    def live_tensors(self) -> Iterator[HeldTensor]:
        yield next(LoaderSpy.live_tensors(self))
        raise UnsupportedError("the engine repacked its linear weights")


class Lying(LoaderSpy):
    """Loads one bit wrong: only a look at the live bytes can find it."""

    def verify(self) -> None:
        super().verify()
        next(iter(self._spare.values())).view(torch.uint8).reshape(-1)[0] ^= 1


def staged(loader: Callable[..., LoaderSpy]) -> Any:
    bench = Bench(loader=loader(model()))
    bench.worker.begin(begin())
    for seq in (0, 1):
        bench.worker.update(chunk(seq))
    return bench.worker.stage(stage())


def test_the_digest_is_of_the_live_bytes() -> None:
    reply = staged(LoaderSpy)
    assert reply.digests_equal is True
    assert reply.unprovable is None
    assert reply.model_digest == manifest(seed=1).model_digest
    with pytest.raises(DigestMismatchError, match="the engine's weights"):
        staged(Lying)


@pytest.mark.parametrize("loader", [Repacked, RepackedLazily])
def test_what_can_not_be_read_back_is_unprovable_with_the_reason(loader: Any) -> None:
    reply = staged(loader)
    assert reply.digests_equal is None
    assert "repacked" in reply.unprovable
    assert reply.model_digest is None, "never a guess"


def test_a_manifest_without_a_model_digest_proves_nothing_and_says_so() -> None:
    bench = loaded()
    good = msgspec.structs.replace(manifest(seed=1), model_digest=None)
    reply = bench.worker.stage(StageRequest(session="s", manifest=good))
    assert reply.digests_equal is None
    assert reply.unprovable


def test_in_place_half_loaded_is_never_called_serving() -> None:
    """`serving` is what the engine asks before it lets generations in again."""
    bench = Bench(in_place=True)
    bench.sync(1, seed=2)
    bench.worker.begin(begin(2, session="t"))
    assert bench.worker.describe().serving
    bench.worker.update(chunk(0, session="t"))
    assert not bench.worker.describe().serving
    bench.worker.abort("t", "as told")
    assert not bench.worker.describe().serving
    works_again(bench)
    assert bench.worker.describe().serving
    assert weights(3)


# --- the proof of a patch ---


class Changing:
    """A loader whose changes are what somebody says that they are."""

    def __init__(self, *changes: Change, then: Exception | None = None) -> None:
        self._changes, self._then = changes, then

    def prepare_patch(self) -> Iterator[Change]:
        yield from self._changes
        if self._then is not None:
            raise self._then


def change_of(name: str, positions: list[int], *, checked: bool = False) -> Change:
    spec = TensorSpec(name=name, dtype="float32", shape=(3, 4))
    where = torch.tensor(positions).to(torch.uint32)
    values = torch.zeros(len(positions)), torch.arange(1.0, len(positions) + 1)
    return Change(spec=spec, positions=where, old=values[0], new=values[1], checked=checked)


def test_the_sum_of_a_patch_is_that_of_each_change_in_it() -> None:
    good = [change_of("a", [0, 5, 11], checked=True), change_of("b", []), change_of("c", [3])]
    specs = [each.spec for each in good]
    sums = [patch_sum(each.spec, each.positions, each.old, each.new) for each in good]
    before = model_digest(specs, ShardSum.zero())
    after = msgspec.structs.replace(manifest(), model_digest=model_digest(specs, sum(sums, ShardSum.zero())))
    base = PatchBase(version=Version(run_id=RUN, number=0), model_digest=before)
    found: dict[str, ShardSum] = {}
    assert prove_patch(Changing(*good), base, after, found) == after.model_digest  # type: ignore[arg-type]
    assert found == dict(zip("abc", sums, strict=True))
    other = change_of("c", [4])
    with pytest.raises(DigestMismatchError, match="nothing was changed"):
        prove_patch(Changing(*good[:2], other), base, after, {})  # type: ignore[arg-type]


def test_what_a_loader_has_not_seen_to_rise_is_looked_at_before_the_next_change() -> None:
    base = PatchBase(version=Version(run_id=RUN, number=0), model_digest="wsd2:" + "0" * 32)
    loader = Changing(change_of("a", [5, 2]), then=LoadError("the next one"))
    with pytest.raises(InvalidRequestError, match="rise") as caught:
        prove_patch(loader, base, manifest(seed=1), {})  # type: ignore[arg-type]
    assert caught.value.parameter == "a"
