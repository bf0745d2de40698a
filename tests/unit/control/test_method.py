"""What all methods share: calls that may be left out, and what is kept of peers."""

from __future__ import annotations

from weightsync.control.method import Peers, SyncMethod
from weightsync.types import Version


class Least(SyncMethod):
    """No more than a method needs."""

    def sync_weights(self, model_tag: str, version: Version) -> int:
        return version.number


def test_a_method_needs_one_call_alone() -> None:
    method = Least()
    method.initialize()
    method.trained("m", Version(run_id="r", number=1))
    assert method.sync_weights("m", Version(run_id="r", number=1)) == 1
    assert method.evict_failed("m") == ()
    assert (method.spans("m"), method.instances(), method.barriers()) == ((), (), ())
    method.close()


def test_who_failed_the_last_sync_is_evicted_once_until_readmitted() -> None:
    peers = Peers()
    assert peers.evict_failed("m") == []
    peers.note_failed("m", ["c", "b"])
    peers.note_failed("m", ["b", "a"])
    assert peers.live("m", ("a", "b", "c")) == ("a", "b", "c"), "one that failed takes part until it is evicted"
    assert peers.evict_failed("m") == ["a", "b"], "of the last sync alone"
    assert peers.evict_failed("m") == []
    assert peers.live("m", ("a", "b", "c")) == ("c",)
    assert peers.live("other", ("a", "b")) == ("a", "b"), "each model has its own"
    peers.readmit("m", "a")
    peers.readmit("other", "b")
    assert peers.live("m", ("a", "b", "c")) == ("a", "c")


def test_a_good_sync_leaves_nobody_to_evict() -> None:
    peers = Peers()
    peers.note_failed("m", ["a"])
    peers.note_failed("m")
    assert peers.take_failed("m") == []
    peers.note_failed("m", ["a"])
    assert peers.take_failed("m") == ["a"]
    assert peers.live("m", ["a"]) == ("a",), "taken, not evicted"
