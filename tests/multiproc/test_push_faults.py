"""Every failure of the push path ends within its deadline, in a typed error, and the next sync works.

Each test: a good sync of version 1, the fault at version 2, then version 3 with whoever is left.
"""

from __future__ import annotations

import itertools
import os
import resource
import signal
import time
from typing import Any

import pytest
import torch
from torch import nn

from tests.multiproc.pull_kit import wait_until
from tests.multiproc.spine import Engine, build, cast_bytes, error_facts, push_of, shard, step
from tests.standins.processes import Child, children, free_port, in_gloo_world
from weightsync.errors import WeightSyncError
from weightsync.memory import folder as memory_folder

DEADLINE_S = 15.0
OPTIONS = {"transfer_timeout_s": 6.0, "join_timeout_s": 5.0, "pause_timeout_s": 2.0}
PATIENT: dict[str, Any] = {"transfer_timeout_s": 30.0}
"""For what is to end at once, and not at its deadline."""
AT_ONCE_S = 10.0


def trainer_main(rank: int, world_size: int, urls: dict[str, str], options: dict[str, Any], conn: Any) -> None:
    """Syncs when told to, and says how it went and how long it took."""
    model: nn.Module = build(5, blocks=6)
    if world_size > 1:
        model = shard(model, "shard0", world_size)
    options = dict(options)
    if rank in (elsewhere := options.pop("shared_memory", {})):  # of another host, so to say
        memory_folder._path = elsewhere[rank]
    push = push_of(model, urls, fsdp=world_size > 1, **{**OPTIONS, **options})
    outcome: dict[str, Any] = {}
    while (order := conn.recv()) is not None:
        started = time.monotonic()
        try:
            if order == "initialize":
                push.initialize()
                outcome = {"type": "ok"}
            elif order == "die in extraction":
                _die_at_chunk(push, 3)
                outcome = {"type": "ok"}
            elif order == "no room":
                resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
                outcome = {"type": "ok"}
            elif order == "room":
                resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
                outcome = {"type": "ok"}
            elif order == "close":
                push.close()
                outcome = {"type": "ok"}
            elif isinstance(order, tuple):
                outcome = _two_at_once(push, *order)
            else:
                step(model)
                report = push.sync_weights(order)
                outcome = {"type": "ok", "engines": report.engine_ids, "equal": report.digests_equal,
                           "lost": report.lost_engine_ids}  # fmt: skip
        except WeightSyncError as error:
            outcome = error_facts(error)
        conn.send({**outcome, "seconds": time.monotonic() - started})
    os._exit(0)


def _die_at_chunk(push: Any, number: int) -> None:
    extract = push._parts.extractor.extract_weights

    def dying(dtype: str | None) -> Any:
        for count, chunk in enumerate(extract(dtype)):
            if count == number:
                os.kill(os.getpid(), signal.SIGKILL)
            yield chunk

    push._parts.extractor.extract_weights = dying


def _two_at_once(push: Any, version: int) -> dict[str, Any]:
    import threading

    entered, refused = threading.Event(), threading.Event()
    extract = push._parts.extractor.extract_weights

    def announced(dtype: str | None) -> Any:
        entered.set()
        refused.wait(20)  # else it may be over before the second one begins
        yield from extract(dtype)

    push._parts.extractor.extract_weights = announced
    results: list[Any] = []
    first = threading.Thread(target=lambda: results.append(push.sync_weights(version)))
    first.start()
    assert entered.wait(20)
    try:
        push.sync_weights(version + 1)
        second: dict[str, Any] = {"type": "ok"}
    except WeightSyncError as error:
        second = error_facts(error)
    refused.set()
    first.join(10)
    return {**second, "first": results[0].version.number if results else None}


class Trainer:
    """One or several training ranks that take orders together."""

    def __init__(
        self, start: Any, urls: dict[str, str], ranks: int = 1, *, main: Any = trainer_main, **options: Any
    ) -> None:
        if ranks == 1:
            self.ranks: list[Child] = [start(main, 0, 1, urls, options, talk=True, name="rank0")]
        else:
            port = free_port()
            self.ranks = [
                start(_rank_main, rank, ranks, port, main, urls, options, talk=True, name=f"rank{rank}")
                for rank in range(ranks)
            ]

    def order(self, what: Any, ranks: list[int] | None = None) -> list[dict[str, Any]]:
        asked = [self.ranks[i] for i in (ranks if ranks is not None else range(len(self.ranks)))]
        for rank in asked:
            rank.conn.send(what)
        return [rank.recv(30) for rank in asked]

    def sync(self, what: Any) -> dict[str, Any]:
        return self.order(what)[0]


def _rank_main(
    rank: int, world_size: int, port: int, main: Any, urls: dict[str, str], options: dict[str, Any], conn: Any
) -> None:
    in_gloo_world(rank, world_size, port, main, (urls, options), conn=conn)


def expected(steps: int) -> dict[str, bytes]:
    model = build(5, blocks=6)
    for _ in range(steps):
        step(model)
    return cast_bytes(model)


@pytest.fixture
def start() -> Any:
    with children() as starter:
        yield starter


def setup(
    start: Any, *, ranks: int = 1, push: dict[str, Any] | None = None, **options: Any
) -> tuple[Engine, Engine, Trainer]:
    """Two engines (made with `options`) and a trainer (with `push`) that have synced version 1."""
    one = Engine(start, "one", 1, blocks=6, **options)
    two = Engine(start, "two", 2, blocks=6, **options)
    trainer = Trainer(start, {"one": one.url, "two": two.url}, ranks, **(push or {}))
    assert all(said["type"] == "ok" for said in trainer.order("initialize"))
    assert trainer.sync(1)["type"] == "ok"
    return one, two, trainer


def check_serving(engine: Engine, version: int, steps: int) -> None:
    """The engine serves exactly this version's bytes, in every worker."""
    outcome, _, served = engine.generate()
    assert outcome == "ok"
    assert served.endswith(f"/{version}")
    for worker in range(engine.world_size):
        assert engine.weights(worker) == expected(steps)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("chunk", [0, 3])
def test_an_engine_raises_at_a_chunk(start: Any, chunk: int, ranks: int) -> None:
    """The cause comes back by name; both engines keep version 1; version 3 reaches both."""
    one, two, trainer = setup(start, ranks=ranks, push=PATIENT)
    two.ask("arm", {"at": "load", "chunk": chunk, "do": "raise"}, worker=1)
    said = trainer.sync(2) if ranks == 1 else trainer.order(2)[0]
    assert said["type"] == "SyncFailedError"
    assert said["causes"] == {"two": "LoadError"}
    assert "injected" in said["text"]
    assert said["seconds"] < AT_ONCE_S, "an error ends the sync at once, not at its deadline"
    check_serving(one, 1, 1)
    check_serving(two, 1, 1)
    assert trainer.sync(3)["engines"] == ("one", "two")
    check_serving(one, 3, 3)
    check_serving(two, 3, 3)


def test_an_engine_is_killed_at_a_chunk(start: Any) -> None:
    """The survivor keeps version 1 and gets version 3; the dead one is reported as lost."""
    one, two, trainer = setup(start, push=PATIENT)
    one.ask("arm", {"at": "load", "chunk": 2, "do": "kill"})
    said = trainer.sync(2)
    assert said["type"] in {"SyncFailedError", "TransferError"}
    assert said["seconds"] < AT_ONCE_S
    check_serving(two, 1, 1)
    said = trainer.sync(3)
    assert (said["engines"], said["lost"]) == (("two",), ("one",))
    check_serving(two, 3, 3)


def test_a_worker_is_killed_inside_a_collective(start: Any) -> None:
    """One of two workers dies while it receives: its engine refuses to serve, the other one goes on."""
    one, two, trainer = setup(start, push=PATIENT)
    one.ask("arm", {"at": "load", "chunk": 1, "do": "stop"})  # holds everybody in the collective
    two.child.conn.send((0, "generate", None))
    assert two.child.recv(5)[0] == "ok"
    trainer.ranks[0].conn.send(2)
    _wait_until_stopped(one.worker_pids[0])
    os.kill(two.worker_pids[1], signal.SIGKILL)
    one.child.cont()
    said = trainer.ranks[0].recv(30)
    assert said["type"] in {"SyncFailedError", "TransferError"}
    assert said["seconds"] < DEADLINE_S
    check_serving(one, 1, 1)
    assert two.generate()[0] == "NotServingError"
    assert trainer.sync(3)["engines"] == ("one",)
    check_serving(one, 3, 3)


def _wait_until_stopped(pid: int) -> None:
    def is_stopped() -> bool:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] == "T"

    wait_until(is_stopped, "it is stopped")


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_engine_hangs_in_the_middle(start: Any, ranks: int) -> None:
    """A stopped process neither answers nor dies: the deadline ends it, and it rejoins after it wakes up."""
    one, two, trainer = setup(start, ranks=ranks)
    one.ask("arm", {"at": "load", "chunk": 2, "do": "stop"})
    said = trainer.sync(2)
    assert said["type"] in {"DeadlineExceededError", "SyncFailedError"}
    assert said["seconds"] < DEADLINE_S
    check_serving(two, 1, 1)
    assert trainer.sync(3)["engines"] == ("two",)
    one.child.cont()
    check_serving(one, 1, 1)
    _sync_until(trainer, 4, ("one", "two"))
    check_serving(two, 4 + _sync_until.extra, 4 + _sync_until.extra)  # type: ignore[attr-defined]


def test_all_engines_hang_and_a_step_at_which_none_is_asked_says_so(start: Any) -> None:
    """On every training rank, with the seconds after which they are asked again. Seen red: the first step's words."""
    one, two, trainer = setup(start, ranks=2)
    for engine in (one, two):
        engine.child.stop()
    for said in trainer.order(2):
        assert (said["type"], said["retry_after_s"]) == ("NoEnginesError", None), said
    for said in trainer.order(3):
        assert said["type"] == "NoEnginesError"
        assert "no engine was asked" in said["text"]
        assert said["retry_after_s"] > 0
    one.child.cont()
    two.child.cont()
    _sync_until(trainer, 4, ("one", "two"))


def _sync_until(trainer: Trainer, version: int, engines: tuple[str, ...]) -> None:
    """Syncs rising versions until all engines take part: one that just woke up may still be aborting."""
    end = time.monotonic() + 60
    for extra in itertools.count():
        said = trainer.sync(version + extra)
        _sync_until.extra = extra  # type: ignore[attr-defined]
        if said.get("engines") == engines:
            return
        assert time.monotonic() < end, said


def test_a_loader_never_returns(start: Any) -> None:
    """It costs one deadline and one refused begin; then the others go on without it, and it never serves half."""
    one, two, trainer = setup(start)
    one.ask("arm", {"at": "load", "chunk": 2, "do": "hang"})
    said = trainer.sync(2)
    assert said["type"] in {"DeadlineExceededError", "SyncFailedError"}
    assert said["seconds"] < DEADLINE_S
    said = trainer.sync(3)
    assert said["causes"] == {"one": "SyncInProgressError"}
    assert trainer.sync(4)["engines"] == ("two",)
    check_serving(one, 1, 1)
    check_serving(two, 4, 4)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_training_rank_is_killed_mid_extract(start: Any, victim: int) -> None:
    """The other rank raises; engines keep version 1; a new trainer with a new run takes over at a lower version."""
    one, two, trainer = setup(start, ranks=2)
    trainer.order("die in extraction", [victim])
    for rank in trainer.ranks:
        rank.conn.send(2)
    said = trainer.ranks[1 - victim].recv(30)
    assert said["type"] in {"TrainerRankError", "ExtractError", "TransferAbortedError"}
    assert said["seconds"] < DEADLINE_S
    fresh = Trainer(start, {"one": one.url, "two": two.url}, 2)
    assert all(said["type"] == "ok" for said in fresh.order("initialize"))
    check_serving(one, 1, 1)
    check_serving(two, 1, 1)
    assert fresh.sync(0)["engines"] == ("one", "two")
    check_serving(one, 0, 1)
    check_serving(two, 0, 1)


def test_an_engine_never_joins(start: Any) -> None:
    """It answers and does not join: the error names the missing rank, and the next sync goes on without it."""
    one = Engine(start, "one", 1, blocks=6)
    two = Engine(start, "two", 1, blocks=6, deaf=True)
    trainer = Trainer(start, {"one": one.url, "two": two.url})
    said = trainer.sync("initialize")
    assert said["type"] == "GroupJoinError", said
    assert "ranks [2]" in said["text"]
    assert "; these are of two" in said["text"]
    assert said["seconds"] < DEADLINE_S
    said = trainer.sync(1)
    assert (said["engines"], said["lost"], said["equal"]) == (("one",), ("two",), True)
    check_serving(one, 1, 1)


def test_nobody_is_there(start: Any) -> None:
    """No engine is a failure, never a success; a dead URL is told apart from none."""
    trainer = Trainer(start, {})
    assert trainer.sync("initialize")["type"] == "NoEnginesError"
    trainer = Trainer(start, {"gone": f"http://127.0.0.1:{free_port()}"})
    said = trainer.sync("initialize")
    assert said["type"] == "NoEnginesError"
    assert "gone" in said["text"]


def _surgery_shape(model: Any) -> None:
    model.blocks[0].up = nn.Linear(12, 8).to(torch.bfloat16)


def _surgery_dtype(model: Any) -> None:
    model.blocks[0].row.float()


def _surgery_missing(model: Any) -> None:
    model.extra = nn.Linear(2, 2).to(torch.bfloat16)


def _surgery_extra(model: Any) -> None:
    model.blocks[5].row = nn.Identity()


@pytest.mark.parametrize(
    ("surgery", "words"),
    [
        (_surgery_shape, "(7, 12)"),
        (_surgery_dtype, "bfloat16"),
        (_surgery_missing, "does not send 2"),
        (_surgery_extra, "no such tensor"),
    ],
)
def test_a_model_that_does_not_fit(start: Any, surgery: Any, words: str) -> None:
    """Refused before a byte moves, by name of the tensor; the other engine keeps serving."""
    one = Engine(start, "one", 1, blocks=6)
    two = Engine(start, "two", 1, blocks=6, surgery=surgery)
    trainer = Trainer(start, {"one": one.url, "two": two.url}, **PATIENT)
    assert trainer.sync("initialize")["type"] == "ok"
    said = trainer.sync(1)
    assert said["type"] == "SyncFailedError"
    assert said["causes"] == {"two": "ManifestMismatchError"}
    assert words in said["text"]
    assert said["seconds"] < AT_ONCE_S
    assert one.generate()[0] == "ok"
    assert one.weights() == cast_bytes(build(99, dtype=torch.bfloat16, blocks=6))


def test_two_syncs_at_once(start: Any) -> None:
    """The second is refused at once and does not disturb the first."""
    one, two, trainer = setup(start)
    said = trainer.sync((2,))
    assert said["type"] == "SyncInProgressError"
    assert said["first"] == 2
    check_serving(one, 2, 1)
    check_serving(two, 2, 1)


def test_a_bit_flips_on_the_way(start: Any) -> None:
    """The receiving side's digest catches it; nobody commits; the next sync is good."""
    one, two, trainer = setup(start)
    two.ask("arm", {"at": "load", "chunk": 1, "do": "corrupt"}, worker=0)
    said = trainer.sync(2)
    assert said["causes"] == {"two": "DigestMismatchError"}
    check_serving(one, 1, 1)
    check_serving(two, 1, 1)
    assert trainer.sync(3)["equal"] is True
    check_serving(two, 3, 3)


def test_in_place_and_half_loaded_is_never_served(start: Any) -> None:
    """Loading over the live weights: after a failure the engine refuses every generation until a good sync."""
    one, two, trainer = setup(start, in_place=True)
    two.ask("arm", {"at": "load", "chunk": 3, "do": "raise"}, worker=1)
    assert trainer.sync(2)["causes"] == {"two": "LoadError"}
    outcome, text, _ = two.generate()
    assert outcome == "NotServingError"
    assert "half-loaded" in text
    assert trainer.sync(3)["engines"] == ("one", "two")
    check_serving(one, 3, 3)
    check_serving(two, 3, 3)


def test_in_place_and_the_trainer_dies_between_chunks(start: Any) -> None:
    """Nobody tells the engine: its pause runs out by itself, and half-loaded weights are still not served.

    Seen to fail: without the fence that `EmbeddedEngine` raises before the first byte is written over live weights.
    """
    one, two, trainer = setup(start, in_place=True)
    trainer.order("die in extraction")
    trainer.ranks[0].conn.send(2)
    trainer.ranks[0].process.join(10)
    end = time.monotonic() + OPTIONS["transfer_timeout_s"] + 1.5
    while time.monotonic() < end:
        assert one.generate()[0] == "NotServingError"
        assert two.generate()[0] == "NotServingError"
    fresh = Trainer(start, {"one": one.url, "two": two.url})
    assert fresh.sync("initialize")["type"] == "ok"
    assert fresh.sync(7)["engines"] == ("one", "two")
    check_serving(one, 7, 1)
    check_serving(two, 7, 1)


def test_a_commit_fails_on_one_worker(start: Any) -> None:
    """Workers on different versions are one engine that refuses to serve; the next sync heals it."""
    one, two, trainer = setup(start)
    two.ask("arm", {"at": "commit", "do": "raise"}, worker=1)
    said = trainer.sync(2)
    assert said["type"] == "SyncFailedError"
    assert set(said["causes"]) == {"two"}
    check_serving(one, 2, 2)
    assert two.generate()[0] == "NotServingError"
    assert trainer.sync(3)["engines"] == ("one", "two")
    check_serving(two, 3, 3)


def test_a_trainer_that_dies_paused_does_not_keep_engines_paused(start: Any) -> None:
    """The pause is a lease: a trainer killed inside it leaves engines that serve their old version."""
    one, two, trainer = setup(start)
    two.ask("arm", {"at": "commit", "do": "stop"}, worker=0)
    trainer.ranks[0].conn.send(2)
    _wait_until_stopped(two.worker_pids[0])
    trainer.ranks[0].kill()
    os.kill(two.worker_pids[0], signal.SIGCONT)
    end = time.monotonic() + DEADLINE_S
    while (said := one.generate())[0] != "ok" and time.monotonic() < end:
        pass
    assert said[0] == "ok"
