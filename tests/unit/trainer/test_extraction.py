"""LockstepExtraction: two chunks at most, failures reach every rank, and what ends one rank ends all in step."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch

from tests.standins.processes import run_ranks
from weightsync.codec.full import FullCodec
from weightsync.codec.whole import SummedChunks
from weightsync.errors import DeadlineExceededError, ExtractError, LoadError, TransferAbortedError, WeightSyncError
from weightsync.handles.fanout import in_thread
from weightsync.observe import Recorder
from weightsync.trainer.extraction import LockstepExtraction
from weightsync.trainer.ranks import TrainingRanks
from weightsync.types import Deadline, WeightChunk


class Extractor:
    """Chunks of one small tensor; remembers which are alive whenever it is asked for the next."""

    def __init__(self, count: int, *, at: Callable[[int], None] = lambda number: None, sums: bool = False) -> None:
        self.count = count
        self.at = at
        self.sums = sums
        self.chunks: list[weakref.ref[WeightChunk]] = []
        self.alive: list[list[int]] = []

    def extract_weights(self, dtype: str | None) -> Iterator[WeightChunk]:
        for number in range(self.count):
            self.alive.append([i for i, ref in enumerate(self.chunks) if ref() is not None])
            self.at(number)
            made = WeightChunk(names=(f"w{number}",), tensors=(torch.full((4,), number),))
            self.chunks.append(weakref.ref(made))
            yield made
            del made

    def can_shard_locally(self) -> bool:
        return self.sums

    def local_whole(self, dtype: str | None) -> None:
        return None

    def local_shards(self, dtype: str | None) -> Iterator[Any]:
        raise LoadError("shards can't be read")


def extraction(
    extractor: Any, *, keep: bool = True, timeout_s: float = 10.0, ranks: TrainingRanks | None = None
) -> LockstepExtraction:
    made = LockstepExtraction(
        extractor,
        dtype=None,
        ranks=ranks or TrainingRanks(timeout_s=10),
        deadline=Deadline(timeout_s),
        recorder=Recorder("t"),
        keep=keep,
    )
    made.start()
    return made


def test_every_chunk_comes_once_in_order() -> None:
    running = extraction(Extractor(7))
    assert [chunk.names[0] for chunk in running.chunks()] == [f"w{n}" for n in range(7)]
    assert running.finish() is None
    assert not running.hangs


def test_a_thread_that_is_just_ending_does_not_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen red: the ranks of the job were given up for ever, though nobody was inside a collective."""
    run, go = LockstepExtraction._run, threading.Event()

    def slow(self: LockstepExtraction) -> None:
        run(self)
        go.wait(20)

    monkeypatch.setattr(LockstepExtraction, "_run", slow)
    running = extraction(Extractor(2))
    assert len(list(running.chunks())) == 2
    running.finish()
    assert not running.hangs
    go.set()


def test_at_most_two_chunks_are_alive() -> None:
    """The one being built and the one before it, whatever the consumer's pace.

    Seen to fail: without the `del` behind each yield, and with a queue between the two threads.
    """
    extractor = Extractor(12)
    running = extraction(extractor)
    for chunk in running.chunks():
        number = int(chunk.tensors[0][0])
        alive = [i for i, ref in enumerate(extractor.chunks) if ref() is not None]
        assert set(alive) <= {number, number + 1}
        del chunk
    running.finish()
    assert all(len(alive) <= 1 for alive in extractor.alive), extractor.alive


def test_codec_and_sums_on_the_way_hold_no_chunk_while_they_ask_for_the_next() -> None:
    """The same through everything that stands between extraction and sender."""
    source = Extractor(6)
    summed = SummedChunks(source.extract_weights(None), counts=not source.can_shard_locally())
    stream = FullCodec().encoder().encode(summed)
    while (chunk := next(stream, None)) is not None:
        del chunk
    assert source.alive == [[]] * 6


def test_the_next_chunk_is_built_while_the_consumer_works_on_one_and_no_further() -> None:
    built = [threading.Event() for _ in range(5)]
    running = extraction(Extractor(5, at=lambda number: built[number].set()))
    chunks = running.chunks()
    next(chunks)
    assert built[1].wait(5), "in parallel"
    assert not built[2].wait(0.2), "but not ahead"
    running.stop(LoadError("enough"))
    with pytest.raises(WeightSyncError):
        running.finish()


def test_other_ranks_drop_their_chunks_and_wait_for_nobody() -> None:
    extractor = Extractor(5)
    running = extraction(extractor, keep=False)
    running.finish()
    assert len(extractor.chunks) == 5
    assert all(len(alive) == 0 for alive in extractor.alive)


def test_an_error_of_the_extractor_is_typed_and_comes_to_both_ends() -> None:
    def fail(number: int) -> None:
        if number == 2:
            raise ZeroDivisionError("in a hook")

    running = extraction(Extractor(5, at=fail))
    chunks = running.chunks()
    assert next(chunks) is not None
    assert next(chunks) is not None
    with pytest.raises(ExtractError, match="in a hook"):
        next(chunks)
    with pytest.raises(ExtractError, match="in a hook"):
        running.finish()


def test_an_error_of_the_shards_comes_out_of_finish() -> None:
    running = extraction(Extractor(2, sums=True))
    assert len(list(_drained(running))) == 2
    with pytest.raises(LoadError, match="shards"):
        running.finish()


def _drained(running: LockstepExtraction) -> Iterator[int]:
    try:
        for chunk in running.chunks():
            yield int(chunk.tensors[0][0])
            del chunk
    except LoadError:
        return  # the stream may hear of it before `finish` does


def test_a_stop_ends_it_before_the_next_chunk() -> None:
    extractor = Extractor(1000)
    running = extraction(extractor)
    next(running.chunks())
    running.stop(LoadError("the engine failed"))
    running.stop(LoadError("a later reason"))
    with pytest.raises(LoadError, match="the engine failed"):
        running.finish()
    assert len(extractor.chunks) <= 3


def test_a_consumer_that_waits_is_told_too() -> None:
    go = threading.Event()
    running = extraction(Extractor(5, at=lambda number: None if number == 0 else _wait(go)))
    chunks = running.chunks()
    next(chunks)
    waiting = in_thread(lambda: next(chunks), name="wait")
    running.stop(LoadError("the engine failed"))
    go.set()
    assert isinstance(waiting.exception(5), (LoadError, TransferAbortedError, RuntimeError))


def _wait(go: threading.Event) -> None:
    assert go.wait(10)


def test_an_extraction_that_hangs_costs_the_deadline() -> None:
    go = threading.Event()
    running = extraction(Extractor(2, at=lambda number: _wait(go)), timeout_s=0.2)
    started = time.monotonic()
    with pytest.raises(DeadlineExceededError):
        next(running.chunks())
    with pytest.raises(DeadlineExceededError, match="extraction"):
        running.finish()
    assert time.monotonic() - started < 9
    assert running.hangs
    go.set()


def test_extraction_works_on_the_callers_cuda_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU; with one: tests/gpu/test_cuda_streams.py. The second device is on its default stream."""
    caller, seen = threading.get_ident(), []

    class Stream(NamedTuple):
        number: int
        device: int

    def current(index: int) -> Stream:
        assert threading.get_ident() == caller, "asked by the caller: a stream is a thread's own"
        return Stream(7 if index == 0 else 0, index)

    for name, fake in {
        "is_initialized": lambda: True,
        "current_device": lambda: 0,
        "device_count": lambda: 2,
        "current_stream": current,
        "default_stream": lambda index: Stream(0, index),
        "set_stream": lambda stream: seen.append((stream, threading.get_ident() == caller)),
        "set_device": lambda device: seen.append((device, threading.get_ident() == caller)),
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    running = extraction(Extractor(1), keep=False)
    running.finish()
    assert seen == [(Stream(7, 0), False), (0, False)]


def test_a_trainer_that_does_not_use_its_hosts_gpu_gets_no_context_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen red: asked for the current device, torch makes one, of hundreds of megabytes."""

    def asked() -> int:
        raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", asked)
    running = extraction(Extractor(1), keep=False)
    running.finish()


# --- two ranks ---


def outcome(call: Callable[[], Any]) -> str:
    try:
        call()
    except WeightSyncError as error:
        return type(error).__name__
    return "ok"


def consume(running: LockstepExtraction) -> None:
    for chunk in running.chunks():
        del chunk
    running.finish()


def _no_thread(name: str) -> None:
    start = threading.Thread.start

    def starts(thread: threading.Thread) -> None:
        if thread.name == name:
            raise RuntimeError("can't start new thread")
        start(thread)

    threading.Thread.start = starts  # type: ignore[method-assign]


def two_ranks(rank: int, world_size: int, what: str, faulty: int) -> tuple[str, float, list[int]]:
    """One extraction that fails on one rank, then an exchange that shows whether both are still in step."""
    ranks = TrainingRanks(timeout_s=20)

    def at(number: int) -> None:
        if what == "error" and rank == faulty and number == 3:
            raise ZeroDivisionError

    class Eager(Extractor):
        def extract_weights(self, dtype: str | None) -> Iterator[WeightChunk]:
            if what == "at once" and rank == faulty:
                raise ZeroDivisionError
            return super().extract_weights(dtype)

    if what == "no thread" and rank == faulty:
        _no_thread("weightsync-extract")
    started = time.monotonic()
    running = extraction(
        Eager(8, at=at), keep=rank == 0, ranks=ranks, timeout_s=1.0 if what == "silence" and rank == faulty else 30.0
    )
    if what == "stop" and rank == faulty:
        if rank == 0:
            next(running.chunks())
        running.stop(LoadError("as told"))
        ended = outcome(running.finish)
    elif what == "silence" or rank == 1:
        ended = outcome(running.finish)  # on rank 0: nobody takes a chunk
    else:
        ended = outcome(lambda: consume(running))
    took = time.monotonic() - started
    said = ranks.exchange({"rank": rank})
    assert ranks.agree(rank == 1)
    return ended, took, [one["rank"] for one in said]


@pytest.mark.parametrize(
    ("what", "faulty", "expected"),
    [
        ("error", 0, ("ExtractError", "TransferAbortedError")),
        ("error", 1, ("TransferAbortedError", "ExtractError")),
        ("at once", 1, ("TransferAbortedError", "ExtractError")),
        ("stop", 0, ("LoadError", "TransferAbortedError")),
        ("stop", 1, ("TransferAbortedError", "LoadError")),
        ("silence", 0, ("DeadlineExceededError", "TransferAbortedError")),
        ("no thread", 0, ("StateError", "TransferAbortedError")),
        ("no thread", 1, ("TransferAbortedError", "StateError")),
        ("nothing", 0, ("ok", "ok")),
    ],
)
def test_what_ends_one_rank_ends_both_and_they_stay_in_step(what: str, faulty: int, expected: tuple[str, str]) -> None:
    """`silence`: the sender takes no chunk (its engine hangs) until rank 0's deadline is over.

    A rank that leaves without telling meets the others' next agreement with something else: gloo then mixes up
    two collectives of different sizes.
    """
    results = run_ranks(two_ranks, 2, what, faulty, timeout_s=60)
    assert tuple(ended for ended, _, _ in results) == expected
    for _, took, said in results:
        assert took < 15
        assert said == [0, 1]
