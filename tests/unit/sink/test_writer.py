"""What a writer leaves in a store, and what readers find, whatever breaks at whichever step of a version."""

from __future__ import annotations

import collections
import threading

import msgspec
import pytest

from tests.standins.stored import SEED, Writing, chain_of, pulled, puller_of, taken, taken_over
from tests.standins.stores import DiedError, FaultyStore
from weightsync.clients.chain import Chain
from weightsync.errors import (
    RunClaimedError,
    SignatureError,
    StoreAuthError,
    StoreDamagedError,
    StoreUnavailableError,
    VersionError,
    WeightSyncError,
)
from weightsync.objects.folder import FolderStore
from weightsync.objects.repeating import Repeating
from weightsync.objects.signing import Signer, Trust, make_keys, seal
from weightsync.sink.claim import ClaimKeeper
from weightsync.sink.main import Sink
from weightsync.types import Deadline
from weightsync.types.sink import SinkConfig
from weightsync.types.store import CLAIM, MAX_EPOCH, POINTER, Pointer


@pytest.fixture
def store(tmp_path):
    return FolderStore(f"file://{tmp_path}/run")


def pointed(store) -> Pointer:
    raw = store.get(POINTER, deadline=Deadline(5)).data
    return msgspec.json.decode(raw.partition(b"\n")[0], type=Pointer)


def test_a_chain_is_read_from_its_anchor_and_followed_by_its_deltas(store) -> None:
    made = Writing(store)
    made.write(1)
    with puller_of(store.url) as live:
        assert pulled(live) == (1, 0, True)
        for number in (2, 3):
            made.write(number)
        assert pulled(live) == (3, 2, True)
        with puller_of(store.url) as joiner:
            assert pulled(joiner) == (3, 2, True)
        made.write(7)
        assert pulled(live) == (7, 1, True)


def test_a_full_comes_when_the_chain_is_long_and_when_it_is_large(store) -> None:
    made, kinds = Writing(store, anchor_every=3), []
    for number in range(1, 8):
        made.write(number)
        kinds.append(made.writer.current.is_anchor)
    assert kinds == [True, False, False, True, False, False, True]
    made.writer._anchor_share = 0.0
    made.write(8)
    assert not made.writer.current.is_anchor
    made.write(9)
    assert made.writer.current.is_anchor


def test_a_full_comes_where_passed_by_versions_make_the_chain_too_long(store, monkeypatch) -> None:
    """The agent gives a delta for each of them. Seen red: they were uploaded, and could not be written into a manifest;
    and so again with each version after it."""
    monkeypatch.setattr("weightsync.types.store.MAX_LINKS", 4)
    monkeypatch.setattr("weightsync.sink.writer.MAX_LINKS", 4)
    made = Writing(store, anchor_every=4)
    made.write(1)
    made.writer.write(taken_over(3, base=1), deadline=Deadline(5))
    made.writer._store = faulty = FaultyStore(store)
    with pytest.raises(VersionError, match="4 deltas"):
        made.writer.write(taken_over(6, base=3), deadline=Deadline(5))
    assert not faulty.ops
    for number, is_anchor in ((6, True), (7, False)):
        made.write(number)
        assert made.writer.current.is_anchor == is_anchor
    made.claim.release()


def test_a_number_that_is_not_above_the_last_is_refused(store) -> None:
    made = Writing(store)
    made.write(3)
    for number in (3, 2):
        with pytest.raises(VersionError):
            made.writer.write(taken(number), deadline=Deadline(5))
    assert pointed(store).version.number == 3


STEPS = [("put_large", "anchors"), ("put_large", "deltas"), ("put", "layouts"), ("put", "versions"), ("put", POINTER)]


@pytest.mark.parametrize("fault", ["unavailable", "auth", "lost", "die"])
@pytest.mark.parametrize(("op", "part"), STEPS)
def test_a_version_that_breaks_at_any_step_counts_for_nothing_or_for_all(store, op, part, fault) -> None:
    """The next writer, or the next turn of this one, goes on; a reader sees the version before, or this one, whole."""
    broken, faults = Writing(store), collections.Counter()
    faulty = FaultyStore(store)
    broken.writer._store = faulty
    number = 1
    if part in ("deltas", "versions", POINTER):
        broken.write(1)
        number = 2

    def rule(at_op: str, key: str, _: int) -> str | None:
        if at_op == op and part in key and not faults["done"]:
            faults["done"] += 1
            return fault
        return None

    faulty.rule = rule
    expected = {"unavailable": StoreUnavailableError, "auth": StoreAuthError, "lost": StoreUnavailableError}
    with pytest.raises((DiedError, WeightSyncError)) as caught:
        broken.write(number)
    assert faults["done"] == 1
    assert caught.type is expected.get(fault, DiedError)
    with puller_of(store.url) as reader:
        if number == 2:
            assert pulled(reader)[0] == (2 if fault == "lost" and part == POINTER else 1)
        if fault == "die":
            broken.stand_still()
            after = Writing(store)
        else:
            after = broken
        after.write(number + 1)
        assert pulled(reader)[::2] == (number + 1, True)


def test_a_lost_answer_is_no_conflict(store) -> None:
    """The same put is tried again, and finds its own object there. Each step once."""
    faulty, lost = FaultyStore(store), set()

    def rule(op: str, key: str, _: int) -> str | None:
        if op.startswith("put") and key not in lost and "claim" not in key:
            lost.add(key)
            return "lost"
        return None

    made = Writing(Repeating(faulty, first_s=0.001))
    faulty.rule = rule
    for number in (1, 2, 3):
        lost.discard(POINTER)
        made.write(number)
    assert len(lost) == 1 + 1 + 1 + 2 + 3  # pointer, layout, anchor, deltas, manifests
    with puller_of(store.url) as reader:
        assert pulled(reader) == (3, 2, True)


def test_the_second_writer_is_refused_while_the_first_lives(store) -> None:
    first = Writing(store)
    first.write(1)
    with pytest.raises(RunClaimedError, match="alive"):
        Writing(store, seed=SEED + 1, takeover_s=5.0)
    first.write(2)
    assert pointed(store).version.number == 2
    first.claim.release()
    second = Writing(store, seed=SEED + 1)
    second.write(1)
    assert (pointed(store).version.run_id, pointed(store).epoch) == (f"seed-{SEED + 1}", 2)


def test_a_writer_that_was_taken_over_moves_nothing_any_more(store) -> None:
    """It stood still, and its claim was taken: neither its pointer nor its next version counts."""
    first = Writing(store)
    first.write(1)
    first.stand_still()
    second = Writing(store, seed=SEED + 1)
    with pytest.raises(RunClaimedError):
        first.write(2)
    second.write(1)
    with pytest.raises(RunClaimedError):
        first.write(3)
    assert pointed(store).version.run_id == f"seed-{SEED + 1}"
    with puller_of(store.url) as reader:
        assert pulled(reader) == (1, 0, True)


def test_two_that_claim_at_once_are_not_both_told_yes(store) -> None:
    keepers = [ClaimKeeper(store, run_id=f"seed-{n}", takeover_s=8.0) for n in range(4)]
    found: list[object] = []

    def claim(keeper: ClaimKeeper) -> None:
        try:
            keeper.acquire(ended=threading.Event())
            found.append(keeper.epoch)
        except RunClaimedError as error:
            found.append(error)

    threads = [threading.Thread(target=claim, args=(keeper,)) for keeper in keepers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(40)
    assert len(found) == 4
    assert [each for each in found if isinstance(each, int)] == [1]
    for keeper in keepers:
        keeper.release()


def test_readers_that_find_damage_get_a_full(store) -> None:
    made = Writing(store)
    for number in (1, 2, 3):
        made.write(number)
    bad = made.writer.current.sources[0].links[0].blob.key
    made.writer.damaged(frozenset({"e000009/deltas/other"}))
    assert made.writer.bases is not None
    made.writer.damaged(frozenset({bad}))
    made.write(4)
    assert made.writer.current.is_anchor
    made.writer.damaged(frozenset({bad}))  # told again
    made.write(5)
    assert not made.writer.current.is_anchor


def test_a_damaged_pointer_is_replaced(store) -> None:
    made = Writing(store)
    made.write(1)
    found = store.get(POINTER, deadline=Deadline(5))
    store.put(POINTER, b"nonsense", deadline=Deadline(5), replaces=found.etag)
    made.write(2)
    with chain_of(store), puller_of(store.url) as reader:
        assert pulled(reader) == (2, 1, True)


def test_a_pointer_that_the_key_has_not_signed_is_not_signed_by_the_next_writer(store, tmp_path) -> None:
    """Whoever can write into the store puts an old manifest's name there: no new epoch makes it the newest for readers.
    Seen red with a pointer that is carried on unread."""
    make_keys(f"{tmp_path}/run.secret", f"{tmp_path}/run.public")
    signer, trust = Signer(f"{tmp_path}/run.secret"), Trust(f"{tmp_path}/run.public")
    made = Writing(store, signer=signer)
    made.write(1)
    old = pointed(store)
    made.write(2)
    made.claim.release()
    reader = Chain(store, trust=trust)
    assert reader.newest(deadline=Deadline(5)).version.number == 2
    found = store.get(POINTER, deadline=Deadline(5))
    forged = seal("pointer", msgspec.json.encode(old), None)
    store.put(POINTER, forged, deadline=Deadline(5), replaces=found.etag)
    after = Writing(store, signer=signer)
    assert store.get(POINTER, deadline=Deadline(5)).data == forged
    with pytest.raises(SignatureError):
        reader.newest(deadline=Deadline(5))
    after.write(3)
    assert reader.newest(deadline=Deadline(5)).version.number == 3
    after.claim.release()


def test_a_pointer_of_impossible_facts_bars_no_writer(store) -> None:
    made = Writing(store)
    made.write(1)
    found = store.get(POINTER, deadline=Deadline(5))
    payload = found.data.partition(b"\n")[0].replace(b"e000001/versions", b"../e01/versions")
    assert payload != found.data.partition(b"\n")[0]
    store.put(POINTER, seal("pointer", payload, None), deadline=Deadline(5), replaces=found.etag)
    made.claim.release()
    Writing(store).write(2)
    assert (pointed(store).version.number, pointed(store).epoch) == (2, 2)


@pytest.mark.parametrize(("folder", "epoch"), [("e1000000", 1000000), ("e000007", 7)])
def test_the_epoch_of_a_folder_is_read_as_it_is_written(store, folder, epoch) -> None:
    """Where nothing else is left to read it from. Seen red with its first six digits, and with
    a folder of somebody else's files."""
    there = "versions/1.json"
    for key in (
        f"{folder}/{there}", f"e00012/{there}", f"e1234567890123456789/{there}", f"engines/{there}", "e2000000",
        "e20240315/results.csv", f"e0000009/{there}",
    ):  # fmt: skip
        store.put(key, b"x", deadline=Deadline(5), replaces=None)
    made = Writing(store)
    assert made.claim.epoch == epoch + 1
    made.claim.release()


@pytest.mark.parametrize("epoch", [MAX_EPOCH + 1, (1 << 64) - 1, -1])
@pytest.mark.parametrize("name", [POINTER, CLAIM])
def test_an_epoch_that_can_not_be_bars_no_writer(store, name, epoch) -> None:
    """Whoever can write into the store has put it there. Seen red with epochs that have no bound."""
    made = Writing(store)
    made.write(1)
    made.claim.release()
    found = store.get(name, deadline=Deadline(5))
    payload = found.data.partition(b"\n")[0].replace(b'"epoch":1', b'"epoch":%d' % epoch)
    store.put(name, seal(name.partition(".")[0], payload, None), deadline=Deadline(5), replaces=found.etag)
    after = Writing(store)
    after.write(2)
    assert pointed(store).epoch == 2
    after.claim.release()


@pytest.mark.parametrize("name", [POINTER, CLAIM, "folder"])
def test_the_last_epoch_has_no_next_one(store, name) -> None:
    """A typed error; nothing is written."""
    made = Writing(store)
    made.write(1)
    made.claim.release()
    if name == "folder":
        store.delete([POINTER], deadline=Deadline(5))
        store.put(f"e{MAX_EPOCH}/versions/1.json", b"x", deadline=Deadline(5), replaces=None)
    else:
        found = store.get(name, deadline=Deadline(5))
        payload = found.data.partition(b"\n")[0].replace(b'"epoch":1', b'"epoch":%d' % MAX_EPOCH)
        store.put(name, seal(name.partition(".")[0], payload, None), deadline=Deadline(5), replaces=found.etag)
    before = store.get(CLAIM, deadline=Deadline(5)).data
    with pytest.raises(StoreDamagedError, match="epoch"):
        Writing(store)
    assert store.get(CLAIM, deadline=Deadline(5)).data == before


def test_a_claim_whose_answer_was_lost_is_ones_own(store) -> None:
    lost: list[str] = []

    def rule(op: str, key: str, _: int) -> str | None:
        if (op, key) == ("put", CLAIM) and not lost:
            lost.append(key)
            return "lost"
        return None

    made = Writing(Repeating(FaultyStore(store, rule), first_s=0.001))
    made.write(1)
    assert (lost, made.claim.epoch) == ([CLAIM], 1)
    made.claim.release()


def test_a_claim_that_can_not_be_looked_at_is_not_lost(store) -> None:
    """The answer of a renewal is lost, and the store is away when it is looked at: it is asked again."""
    faults: list[str | None] = []
    faulty = FaultyStore(store, lambda op, key, _: faults.pop(0) if faults and key == CLAIM else None)
    made = Writing(Repeating(faulty, first_s=0.001))
    made.stand_still()
    keeper = made.claim
    keeper._ended.clear()
    faults[:] = ["lost", None, "auth"]
    keeper._thread = threading.Thread(target=keeper._keep, daemon=True)
    keeper._thread.start()
    until = Deadline(20)
    while sum(each == ("put", CLAIM) for each in faulty.ops) < 5:
        assert not until.expired
        assert keeper._thread.is_alive(), keeper._lost
        threading.Event().wait(0.01)
    keeper.check()
    made.write(1)
    keeper.release()


class Published:
    """One version, which stays the newest: the last of a training."""

    def newest(self, **_):
        return taken(1).version

    def take(self, bases, **_):
        return taken(1)


@pytest.mark.parametrize("part", ["versions", POINTER])
@pytest.mark.parametrize("fault", ["auth", "lost"])
def test_the_last_version_is_stored_though_the_store_failed_at_its_last_step(store, part, fault) -> None:
    """No version comes after it. Seen red where a manifest that was begun is passed by."""
    made, faults, told = Writing(store), [fault], []
    made.writer._store = FaultyStore(
        store, lambda op, key, _: faults.pop() if faults and op == "put" and part in key else None
    )
    sink = Sink.__new__(Sink)
    sink._config = SinkConfig(store=store.url, model_id="m", run_id="r", agents=())
    sink._tell, sink._store, sink._intake, sink._seen = told.append, store, Published(), None
    with pytest.raises(WeightSyncError):
        sink._turn(made.writer, wait_s=0.0)
    assert sink._turn(made.writer, wait_s=0.0)
    assert [each.version.number for each in told] == [1]
    assert not sink._turn(made.writer, wait_s=0.0)
    assert pointed(store).version.number == 1
    with puller_of(store.url) as reader:
        assert pulled(reader) == (1, 0, True)
    made.claim.release()
