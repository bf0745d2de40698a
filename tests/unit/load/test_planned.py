"""A whole version that comes while the one before it is proved: what differs is written, or all of it by the plan."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.unit.load.test_patching import Kernels
from tests.unit.load.test_vllm import Live, PlainReload
from weightsync.errors import LoadError
from weightsync.load import patching
from weightsync.load.live import ShardPatch
from weightsync.load.live_plan import LivePlan
from weightsync.types import Full


class CountedReload(PlainReload):
    """vLLM's own, and how often it was opened."""

    opened = 0

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        type(self).opened += 1


@pytest.fixture
def live(monkeypatch: pytest.MonkeyPatch) -> Live:
    """A version that vLLM's reload has loaded, and that is proved."""
    CountedReload.opened = 0
    made = Live(monkeypatch, CountedReload)
    made.full()
    assert (CountedReload.opened, made.loader.written) == (1, None)
    return made


def changed(live: Live, value: float) -> dict[str, torch.Tensor]:
    """Two elements have that value; what was before."""
    before = {name: tensor.clone() for name, tensor in live.whole.items()}
    live.whole["q"][1, 2] = live.whole["out"][3, 5] = value
    return before


def test_what_differs_is_written_and_can_be_taken_back(live: Live) -> None:
    """It was settled by the next bracket, and the base is that of what is served."""
    for value in (7.0, 8.0):
        changed(live, value)
        live.full()
        assert live.serves()
        assert (live.loader.written, live.loader.can_roll_back, live.loader.proved) == (2, True, True)
    before = changed(live, 9.0)
    live.full()
    live.loader.rollback()
    live.whole = before
    assert live.serves()
    live.patched(10.0)
    assert live.serves()
    live.full()
    assert live.loader.written == 0
    assert CountedReload.opened == 1


def test_an_abort_costs_nothing_where_little_differs(live: Live) -> None:
    new = live.manifest()
    live.loader.begin(new)
    live.whole["q"][0, 0] = 5.0
    live.loader.load_weights([Full(name="q", tensor=live.whole["q"])])
    live.loader.abort("the trainer died")
    live.whole["q"][0, 0] = 1.0
    assert live.serves()
    live.patched(7.0)
    assert live.serves()


def test_where_much_differs_all_is_written_by_the_plan(live: Live) -> None:
    """In the middle of a version too: what had come by then is not lost. It can't be taken back; the base is what is
    served."""
    live.whole["q"][0, 0] = 5.0
    live.whole["out"] = torch.rand(4, 6)
    live.full()
    assert live.serves()
    assert (live.loader.written, live.loader.can_roll_back, live.loader.proved) == (None, False, True)
    live.patched(7.0)
    assert live.serves()
    assert CountedReload.opened == 1


def test_live_weights_that_somebody_else_wrote_are_written_over(live: Live) -> None:
    """Though the version that comes has the same there: the element that differs is near it."""
    changed(live, 7.0)
    live.model.out.data[3, 5] = -5.0
    live.full()
    assert live.serves()
    assert (live.loader.written, live.loader.proved) == (None, True)


def test_of_a_version_that_differs_nowhere_some_live_weights_are_looked_at_all_the_same(live: Live) -> None:
    """vLLM's sleep of level 2 leaves other memory at the same addresses. Seen red: it was proved, and served."""
    live.full()
    assert (live.loader.written, live.loader.proved) == (0, True)
    for tensor in (live.model.qk, live.model.out):
        tensor.data.zero_()
    live.full()
    assert live.serves()
    assert (live.loader.written, live.loader.proved) == (None, True)


@pytest.mark.parametrize("step", ["add_checked", "gather"])
def test_where_there_is_no_room_for_a_change_all_is_written(
    live: Live, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU a change lies beside the weights. Seen red: no version could be loaded any more."""

    def no_room(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    for value in (7.0, 8.0):
        changed(live, value)
        with monkeypatch.context() as patch:
            patch.setattr(patching.LivePatch, step, no_room)
            live.full()
        assert live.serves()
        assert (live.loader.written, live.loader.proved) == (None, True)
    changed(live, 9.0)
    live.full()
    assert (live.serves(), live.loader.written) == (True, 2)
    assert CountedReload.opened == 1


def test_after_an_audits_finding_the_engines_own_loader_brings_all(live: Live) -> None:
    """An element is wrong that does not differ in what comes."""
    live.model.qk.data[0, 0] = -5.0
    live.loader.distrust()
    assert not live.loader.takes_patch
    live.full()
    assert live.serves()
    assert (CountedReload.opened, live.loader.takes_patch) == (2, True)


def test_tensors_in_other_places_are_loaded_by_the_engines_own_loader(live: Live) -> None:
    live.model.out.data = live.model.out.data.clone()
    changed(live, 7.0)
    live.full()
    assert live.serves()
    assert CountedReload.opened == 2


def test_a_write_that_fails_is_undone_and_all_of_it_is_written_next(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = changed(live, 7.0)
    after, live.whole = live.whole, before

    def fail(number: int, *_: Any) -> str:
        if number == 1:
            raise MemoryError("no")
        return ""

    new = live.manifest()
    live.loader.begin(new)
    live.loader.load_weights(Full(name=name, tensor=tensor) for name, tensor in after.items())
    live.loader.verify()
    armed = Kernels(fail)
    with monkeypatch.context() as patch:
        patch.setattr(patching, "_PIECE_ELEMENTS", 1)
        patch.setattr(patching, "num_cores", lambda: 1)
        patch.setattr(patching, "kernels", lambda: armed)
        with pytest.raises(LoadError, match="it was undone"):
            live.loader.commit(new.version)
    live.loader.abort("failed")
    assert (live.loader.healthy, live.serves()) == (True, True)
    live.whole = after
    live.full()
    assert live.serves()
    assert CountedReload.opened == 2


@pytest.mark.parametrize("fault", ["raises", "is elsewhere"])
def test_a_write_by_the_plan_that_fails_refuses_to_serve_until_the_engines_own_loader_has(
    live: Live, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    write = LivePlan.write

    def fails(plan: LivePlan, whole: Any) -> None:
        if fault == "raises":
            raise MemoryError("no")
        write(plan, {name: tensor + 1 for name, tensor in whole.items()})

    live.whole["out"] = torch.rand(4, 6)
    with monkeypatch.context() as patch:
        patch.setattr(LivePlan, "write", fails)
        with pytest.raises(LoadError) as caught:
            live.full()
    assert "half-loaded" in (caught.value.state_left or "")
    live.loader.abort("failed")
    assert not live.loader.healthy
    assert not live.loader.takes_patch
    live.full()
    assert (live.loader.healthy, live.serves(), live.loader.proved) == (True, True, True)
    assert CountedReload.opened == 2


def test_a_base_that_was_half_written_is_no_base(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """What differs from that is not what differs from what is live: an element that was left out would stay."""

    def fails(patch: ShardPatch) -> None:
        live.loader._staging["q"][1, 2] = 7.0
        raise MemoryError

    before = changed(live, 7.0)
    live.whole["out"] = torch.rand(4, 6)
    with monkeypatch.context() as patched:
        patched.setattr(ShardPatch, "into_base", fails)
        live.loader.begin(live.manifest())
        with pytest.raises(MemoryError):
            live.loader.load_weights([Full(name=name, tensor=tensor) for name, tensor in live.whole.items()])
        live.loader.abort("no memory")
    live.whole = before | {"q": live.whole["q"]}
    live.full()
    assert live.serves()
