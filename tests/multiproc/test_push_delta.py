"""Deltas over the push path, in real processes: engines are given what changed alone, or all of it, never a mixture.

Each version changes some tensors; what every worker holds afterwards is compared byte by byte with a model that was
trained beside it.
"""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch
from torch import nn

from tests.multiproc.spine import Engine, OddModel, build, cast_bytes, error_facts, push_of, shard
from tests.multiproc.test_push_faults import AT_ONCE_S, OPTIONS, PATIENT, Trainer
from tests.standins.processes import children, free_port
from weightsync.codec.changes import ChangesCodec
from weightsync.errors import SyncFailedError, UnsupportedError, WeightSyncError
from weightsync.update.session import UpdateSession

BLOCKS = 6
FEW = ("blocks.1.row.weight", "blocks.4.wide.weight", "running")
ALL = ("",)


def nudge(model: nn.Module, names: tuple[str, ...]) -> None:
    """The same change of these tensors (and of all that begin so) on every shard and on the whole."""
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if tensor.dtype == torch.float32 and name.startswith(names):
                tensor.mul_(1.0625).add_(0.03125)


def trainer_main(rank: int, world_size: int, urls: dict[str, str], options: dict[str, Any], conn: Any) -> None:
    """Syncs when told to: (version, what changes before)."""
    model: nn.Module = build(5, blocks=BLOCKS)
    if world_size > 1:
        model = shard(model, "shard0", world_size)  # type: ignore[arg-type]
    codec = ChangesCodec(**options.pop("codec", {}))
    push = push_of(model, urls, fsdp=world_size > 1, codec=codec, **{**OPTIONS, **options})
    push.initialize()
    conn.send("ready")
    while (order := conn.recv()) is not None:
        version, names = order
        if version == "fails":
            _fail_at_chunk(push, names if rank else None)
            conn.send({"type": "ok"})
            continue
        if version == "refuses":
            _refuse_in_the_pause()
            conn.send({"type": "ok"})
            continue
        nudge(model, names)
        started = time.monotonic()
        outcome: dict[str, Any]
        try:
            report = push.sync_weights(version)
            outcome = {"type": "ok", "engines": report.engine_ids, "deltas": report.num_deltas,
                       "why": report.full_because, "sent": report.sent_bytes, "total": report.total_bytes,
                       "chunks": report.num_chunks,
                       "equal": report.digests_equal}  # fmt: skip
        except WeightSyncError as error:
            outcome = error_facts(error)
        conn.send({**outcome, "seconds": time.monotonic() - started})
    push.close()
    os._exit(0)


def _fail_at_chunk(push: Any, number: int | None) -> None:
    """The next extraction that comes so far fails, once."""
    extract = push._parts.extractor.extract_weights
    armed = [number]

    def failing(dtype: str | None) -> Any:
        for count, chunk in enumerate(extract(dtype)):
            if count == armed[0]:
                armed[0] = None
                raise MemoryError("no room for this chunk")
            yield chunk

    push._parts.extractor.extract_weights = failing


def _refuse_in_the_pause() -> None:
    """Engines are paused before the first chunk of the next change, once, and one says then that it takes none."""
    pause = UpdateSession.pause_live_writers

    def refused(session: UpdateSession) -> None:
        UpdateSession.pause_live_writers = pause  # type: ignore[method-assign]
        session._pauses_first = True
        pause(session)
        raise SyncFailedError("it takes no changes", causes={"two": UnsupportedError("no")})

    UpdateSession.pause_live_writers = refused  # type: ignore[method-assign]


class Setup:
    """Two engines, a trainer, and the model that it should be by now."""

    def __init__(self, start: Any, *, ranks: int = 1, in_place: bool = False, **options: Any) -> None:
        self.start = start
        self.model: OddModel = build(5, blocks=BLOCKS)
        self.engines = [
            Engine(start, "one", 1, blocks=BLOCKS, in_place=in_place),
            Engine(start, "two", 2, blocks=BLOCKS, in_place=in_place, port=free_port()),
        ]
        urls = {engine.id: engine.url for engine in self.engines}
        self.trainer = Trainer(start, urls, ranks, main=trainer_main, **options)
        for rank in self.trainer.ranks:
            assert rank.recv(30) == "ready"
        self.served = cast_bytes(self.model)

    def sync(self, version: int, names: tuple[str, ...]) -> dict[str, Any]:
        """A sync of the next change; what rank 0 says. Every rank says the same."""
        nudge(self.model, names)
        said = self.trainer.order((version, names))
        assert all(other["type"] == said[0]["type"] for other in said)
        if said[0]["type"] == "ok":
            self.served = cast_bytes(self.model)
            self.check(version, said[0]["engines"])
        return said[0]

    def check(self, version: int, engine_ids: Any = ("one", "two")) -> None:
        """These engines serve this version, and exactly the bytes that were last synced."""
        for engine in self.engines:
            if engine.id in engine_ids:
                outcome, _, served = engine.generate()
                assert (outcome, served and served.rpartition("/")[2]) == ("ok", str(version))
                for worker in range(engine.world_size):
                    assert engine.weights(worker) == self.served, (engine.id, worker)


@pytest.fixture
def start() -> Any:
    with children() as starter:
        yield starter


@pytest.mark.parametrize(
    ("ranks", "options"),
    [(1, {}), (1, {"in_place": True}), (1, {"codec": {"keep_on": "device"}}), (2, {})],
    ids=["plain", "in place", "kept beside", "FSDP2"],
)
def test_what_changed_alone_is_sent(start: Any, ranks: int, options: dict[str, Any]) -> None:
    """From the second version on, over a broadcast, to every worker; also when nothing has changed."""
    setup = Setup(start, ranks=ranks, **options)
    first = setup.sync(1, ALL)
    assert (first["deltas"], first["sent"], first["equal"]) == (0, first["total"], True)
    assert first["why"] == "nothing was pushed before"
    for version in (2, 3, 7):
        said = setup.sync(version, FEW)
        assert (said["deltas"], said["why"]) == (1, None)
        assert (said["equal"], said["engines"]) == (True, ("one", "two"))
        assert 0 < said["sent"] < said["total"] / 2
        assert said["chunks"] == 1, "small changes travel together"
    nothing = setup.sync(8, ("nothing begins so",))
    assert (nothing["deltas"], nothing["sent"], nothing["chunks"]) == (1, 0, 0)


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_is_too_large_goes_out_in_full_within_the_same_sync(start: Any, ranks: int) -> None:
    """Every rank starts over; then one full more, and changes are tried again."""
    setup = Setup(start, ranks=ranks)
    setup.sync(1, ALL)
    seen = [setup.sync(version, names) for version, names in ((2, ALL), (3, FEW), (4, FEW))]
    assert [said["deltas"] for said in seen] == [0, 0, 1]
    assert "more than 50 % of the model" in seen[0]["why"]
    assert "too large" in seen[1]["why"]


@pytest.mark.parametrize("chunk", [0, 1, 3])
def test_what_is_too_large_while_another_rank_fails_is_one_failure_for_all(start: Any, chunk: int) -> None:
    """Seen to fail: rank 0 began anew by itself and waited for a rank that had told its user of the error."""
    setup = Setup(start, ranks=2, codec={"largest": 0.01}, **PATIENT)
    setup.sync(1, ALL)
    setup.trainer.order(("fails", chunk))
    nudge(setup.model, ALL)
    said = setup.trainer.order((2, ALL))
    assert [each["type"] for each in said] == ["ExtractError"] * 2
    assert max(each["seconds"] for each in said) < AT_ONCE_S
    assert setup.sync(3, FEW)["type"] == "ok"


def test_full_where_one_lacks_the_base(start: Any) -> None:
    """A new engine at an old address has nothing: all get a full, and then changes again."""
    setup = Setup(start)
    setup.sync(1, ALL)
    assert setup.sync(2, FEW)["deltas"] == 1
    two = setup.engines[1]
    two.child.kill()
    setup.engines[1] = Engine(start, "two", 2, blocks=BLOCKS, port=int(two.url.rpartition(":")[2]))
    said = setup.sync(3, FEW)
    assert (said["deltas"], said["engines"]) == (0, ("one", "two"))
    assert said["why"].startswith("two serves nothing that was synced")
    assert setup.sync(4, FEW)["deltas"] == 1


def test_an_engine_that_refuses_a_change_at_begin(start: Any) -> None:
    """It said that it would take it, and does not: the same sync goes on in full."""
    setup = Setup(start, **PATIENT)
    setup.sync(1, ALL)
    setup.engines[1].ask("arm", {"at": "begin", "do": "raise"}, worker=1)
    said = setup.sync(2, FEW)
    assert (said["deltas"], "refused" in said["why"]) == (0, True)
    assert setup.sync(3, FEW)["deltas"] == 1


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_engine_that_refuses_a_change_in_its_pause(start: Any, ranks: int) -> None:
    """As SGLang's workers do, which take no step while it generates. Seen to fail: the whole sync, not its change."""
    setup = Setup(start, ranks=ranks, **PATIENT)
    setup.sync(1, ALL)
    setup.trainer.order(("refuses", ()))
    said = setup.sync(2, FEW)
    assert "deltas" in said, said
    assert (said["deltas"], "refused" in said["why"]) == (0, True), said
    assert setup.sync(3, FEW)["deltas"] == 1


@pytest.mark.parametrize("fault", [
    {"at": "load", "chunk": 0, "do": "raise"},
    {"at": "load", "chunk": 0, "do": "corrupt"},
    {"at": "commit", "do": "raise"},
], ids=lambda fault: f"{fault['do']} at {fault['at']}")  # fmt: skip
def test_a_change_that_fails_leaves_the_old_version(start: Any, fault: dict[str, Any]) -> None:
    """On one worker of two; the kept bytes are no base any more, so a full follows."""
    setup = Setup(start)
    setup.sync(1, ALL)
    setup.engines[1].ask("arm", fault, worker=1)
    said = setup.sync(2, FEW)
    assert said["type"] == "SyncFailedError"
    assert list(said["causes"]) == ["two"]
    setup.check(1, ("two",))
    if fault["at"] != "commit":  # the other engine may have committed already: a push commits each by itself
        setup.check(1)
    said = setup.sync(3, FEW)
    assert (said["deltas"], said["why"]) == (0, "the sync before failed")
    assert setup.sync(4, FEW)["deltas"] == 1


def test_an_engine_dies_while_it_takes_a_change(start: Any) -> None:
    """The sync fails at once; the others go on in full, and then with changes."""
    setup = Setup(start, **PATIENT)
    setup.sync(1, ALL)
    setup.engines[1].ask("arm", {"at": "load", "chunk": 0, "do": "kill"}, worker=1)
    said = setup.sync(2, FEW)
    assert said["type"] == "SyncFailedError"
    assert said["seconds"] < AT_ONCE_S
    setup.check(1, ("one",))
    after = [setup.sync(version, FEW) for version in (3, 4, 5)]
    done = [said for said in after if said["type"] == "ok"]
    assert (done[0]["deltas"], done[-1]["deltas"]) == (0, 1)
    assert done[-1]["engines"] == ("one",)
