"""What is deleted, and what stays: for the newest chains, for readers that are alive, for what is being written."""

from __future__ import annotations

import threading

import msgspec
import pytest

from tests.standins.stored import SEED, Writing, chain_of, pulled, puller_of
from tests.standins.stores import FaultyStore
from weightsync.objects.folder import FolderStore
from weightsync.objects.signing import seal
from weightsync.sink.sweep import Sweeper
from weightsync.types import Deadline
from weightsync.types.store import ReaderNote


@pytest.fixture
def store(tmp_path):
    return FolderStore(f"file://{tmp_path}/run")


def keys(store) -> list[str]:
    return sorted(each.key for each in store.list_under("", deadline=Deadline(5)) if each.key.startswith("e"))


def test_the_last_two_chains_stay_and_older_ones_go(store) -> None:
    made = Writing(store, anchor_every=2)
    sweeper = Sweeper(store, made.writer, keep_s=0.0, every_s=0.0)
    sizes = []
    for number in range(1, 21):
        made.write(number)
        sweeper.sweep(now=True)
        sizes.append(len(keys(store)))
        with puller_of(store.url) as reader:
            assert pulled(reader)[::2] == (number, True)
    assert max(sizes) <= 9
    assert not [key for key in keys(store) if "/00000016" in key]


def test_what_was_needed_a_moment_ago_stays_for_a_while(store) -> None:
    made = Writing(store, anchor_every=1)
    sweeper = Sweeper(store, made.writer, keep_s=60.0, every_s=0.0)
    for number in range(1, 6):
        made.write(number)
        assert sweeper.sweep(now=True) == 0


def test_what_a_live_reader_reads_stays_until_it_is_gone(store) -> None:
    made = Writing(store, anchor_every=2)
    sweeper = Sweeper(store, made.writer, keep_s=0.0, every_s=0.0, reader_s=60.0)
    for number in (1, 2):
        made.write(number)
    with chain_of(store, beat_s=60.0) as chain, puller_of(f"{store.url}") as reader:
        assert pulled(reader)[0] == 2
        for number in range(3, 11):
            made.write(number)
            sweeper.sweep(now=True)
        assert "e000001/anchors/00000001-0.safetensors" in keys(store)
        assert "e000001/anchors/00000003-0.safetensors" not in keys(store)
        chain.close()
    sweeper.sweep(now=True)
    assert "e000001/anchors/00000001-0.safetensors" not in keys(store)


def test_a_reader_whose_note_stands_still_is_gone_whatever_its_clock_says(store) -> None:
    made = Writing(store, anchor_every=1)
    sweeper = Sweeper(store, made.writer, keep_s=0.0, every_s=0.0, reader_s=0.0)
    made.write(1)
    note = ReaderNote(reader="r", beat=1, manifests=("e000001/versions/1.json",))
    store.put("readers/r.json", msgspec.json.encode(note), deadline=Deadline(5), replaces=None)
    for number in range(2, 6):
        made.write(number)
        sweeper.sweep(now=True)
    assert "e000001/versions/1.json" not in keys(store)


def test_notes_that_are_none_are_passed_by(store) -> None:
    made = Writing(store)
    made.write(1)
    store.put("readers/x.json", b"\xff{", deadline=Deadline(5), replaces=None)
    store.put(
        "readers/y.json", b'{"reader":"y","beat":1,"manifests":["../../etc"]}', deadline=Deadline(5), replaces=None
    )
    store.put("readers/z.json", b'{"reader":"\xff","beat":1}', deadline=Deadline(5), replaces=None)
    named = b'{"reader":"w","beat":1,"manifests":["readers/v.json"]}'
    store.put("readers/w.json", named, deadline=Deadline(5), replaces=None)
    store.put("readers/v.json", seal("version", b'"\xff"', None), deadline=Deadline(5), replaces=None)
    sweeper = Sweeper(store, made.writer, keep_s=0.0, every_s=0.0)
    assert sweeper.sweep(now=True) == 0


def put_notes(store, names, beat: int = 1) -> None:
    for name in names:
        note = ReaderNote(reader=name, beat=beat, manifests=("e000001/versions/1.json",))
        found = store.get(f"readers/{name}.json", deadline=Deadline(5)).etag if beat > 1 else None
        store.put(f"readers/{name}.json", msgspec.json.encode(note), deadline=Deadline(5), replaces=found)


def test_nothing_is_swept_where_there_are_more_notes_than_are_read(store, monkeypatch, caplog) -> None:
    """The reader of version 1 is not among those that are read. Seen red where the others are passed by."""
    monkeypatch.setattr("weightsync.sink.sweep._MAX_READERS", 3)
    made = Writing(store, anchor_every=1)
    sweeper = Sweeper(store, made.writer, keep_s=0.0, every_s=0.0, reader_s=60.0)
    made.write(1)
    put_notes(store, "abcd")
    for number in range(2, 6):
        made.write(number)
        assert sweeper.sweep(now=True) == 0
    assert sum("readers' notes" in each.message for each in caplog.records) == 1
    store.delete(["readers/a.json"], deadline=Deadline(5))  # three are left, which stand as they were
    assert sweeper.sweep(now=True) > 0
    assert "e000001/versions/1.json" in keys(store)
    assert "e000001/versions/2.json" not in keys(store)
    put_notes(store, "a")
    sweeper.sweep(now=True)
    assert sum("readers' notes" in each.message for each in caplog.records) == 2


def test_notes_are_read_side_by_side(store) -> None:
    """Each takes its time. Seen red with one after another: of many readers not all were heard within a sweep's time,
    and nothing was ever deleted."""
    made = Writing(store, anchor_every=1)
    together = threading.Barrier(16)

    def meet(op: str, key: str, _: int) -> None:
        if op == "get" and key.startswith("readers/"):
            together.wait(20)

    sweeper = Sweeper(FaultyStore(store, meet), made.writer, keep_s=0.0, every_s=0.0)
    for number in range(1, 5):
        made.write(number)
    put_notes(store, [f"r{n}" for n in range(32)])
    assert sweeper.sweep(now=True) > 0
    assert "e000001/versions/1.json" in keys(store)
    assert "e000001/versions/2.json" not in keys(store)


def test_notes_of_the_dead_end_no_sweeping_for_ever(store, monkeypatch) -> None:
    """There are more than are read at once; those of the living come first. Seen red where only the first are read."""
    monkeypatch.setattr("weightsync.sink.sweep._MAX_READERS", 3)
    made = Writing(store, anchor_every=1)
    sweeper = Sweeper(store, made.writer, keep_s=0.0, every_s=0.0, reader_s=0.0)
    made.write(1)
    put_notes(store, ["a", "b", "c", *(f"dead-{n}" for n in range(4))])
    for turn in range(2, 10):
        made.write(turn)
        put_notes(store, "abc", turn)
        sweeper.sweep(now=True)
    assert not [each.key for each in store.list_under("readers", deadline=Deadline(5)) if "dead" in each.key]
    assert "e000001/versions/2.json" not in keys(store)


def test_names_that_are_none_of_ours_stop_no_sweep(store, tmp_path) -> None:
    """As NFS names what is deleted and still open. Seen red with each listed name deleted."""
    made = Writing(store, anchor_every=1)
    sweeper = Sweeper(store, made.writer, keep_s=0.0, every_s=0.0)
    made.write(1)
    for name in ("e000001/anchors/.nfs0001", "e000001/versions/a b.json", "readers/.nfs0002"):
        (tmp_path / "run" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "run" / name).write_bytes(b"x")
    for number in range(2, 6):
        made.write(number)
        sweeper.sweep(now=True)
    assert not [key for key in keys(store) if "anchors/00000001" in key or "versions/1.json" in key]
    assert (tmp_path / "run/e000001/anchors/.nfs0001").exists()


MINE = (
    "e20240315/results.csv", "e000000/results.csv", "e000000/versions.json", "e000001/anchors/mine.safetensors",
    "e0000001/versions/1.json", "e000001/versions/1/x.json", "e000000/deltas/1-2.delta", "readers/list.txt",
    "readers/a/b.json",
)  # fmt: skip


def test_what_a_person_has_put_there_stays(store) -> None:
    """A place that is not empty, with a folder whose name is a date. Seen red: the date was taken for an epoch, and its
    files were deleted; and with each name below `readers`."""
    for key in MINE:
        store.put(key, b"mine", deadline=Deadline(5), replaces=None)
    made = Writing(store, anchor_every=1)
    assert made.claim.epoch == 1
    sweeper = Sweeper(store, made.writer, keep_s=0.0, every_s=0.0, reader_s=0.0)
    for number in range(1, 6):
        made.write(number)
        sweeper.sweep(now=True)
    assert "e000001/versions/1.json" not in keys(store)
    for key in MINE:
        assert store.get(key, deadline=Deadline(5)).data == b"mine"


def test_a_note_that_can_not_be_read_now_ends_no_reader(store) -> None:
    """The store does not answer when it is asked for: nothing is deleted by that."""
    made = Writing(store, anchor_every=1)
    made.write(1)
    note = ReaderNote(reader="r", beat=1, manifests=("e000001/versions/1.json",))
    store.put("readers/r.json", msgspec.json.encode(note), deadline=Deadline(5), replaces=None)
    away = FaultyStore(store, lambda op, key, _: "unavailable" if op == "get" and key.startswith("readers/") else None)
    sweeper = Sweeper(away, made.writer, keep_s=0.0, every_s=0.0)
    for number in range(2, 6):
        made.write(number)
        assert sweeper.sweep(now=True) == 0
    assert "e000001/versions/1.json" in keys(store)


def test_the_chain_before_stays_where_the_newest_ones_anchor_is_damaged(store, tmp_path) -> None:
    """It is what readers go back to."""
    made = Writing(store, anchor_every=2)
    for number in range(1, 5):
        made.write(number)
    (tmp_path / "run/e000001/versions/3.json").write_bytes(b"damaged")
    Sweeper(store, made.writer, keep_s=0.0, every_s=0.0).sweep(now=True)
    with chain_of(store), puller_of(store.url) as reader:
        assert pulled(reader)[::2] == (2, True)


def test_what_a_later_writer_has_is_not_swept_by_the_one_before(store) -> None:
    """Who was taken over, and does not know it yet."""
    first = Writing(store, anchor_every=1)
    first.write(1)
    first.stand_still()
    second = Writing(store, seed=SEED + 1)
    second.write(3)
    Sweeper(store, first.writer, keep_s=0.0, every_s=0.0).sweep(now=True)
    with chain_of(store), puller_of(store.url) as reader:
        assert pulled(reader)[::2] == (3, True)
    second.claim.release()


def test_what_a_dead_writer_left_goes_and_a_lagging_listing_costs_nothing(store) -> None:
    dead = Writing(store)
    dead.write(1)
    store.put_large("e000001/deltas/00000001-00000002-0.delta", b"half of it", deadline=Deadline(5))
    dead.stand_still()
    after = Writing(store, seed=SEED + 1, anchor_every=1)
    lagging = FaultyStore(store, lambda op, key, count: "lag" if op == "list" else None)
    after.write(1)
    assert Sweeper(lagging, after.writer, keep_s=0.0, every_s=0.0).sweep(now=True) == 0
    sweeper = Sweeper(store, after.writer, keep_s=0.0, every_s=0.0)
    sweeper.sweep(now=True)
    assert "e000001/deltas/00000001-00000002-0.delta" not in keys(store)
    assert "e000001/anchors/00000001-0.safetensors" in keys(store)  # of the chain before
    after.write(2)
    sweeper.sweep(now=True)
    assert not [key for key in keys(store) if key.startswith("e000001")]


def test_what_is_being_written_stays(store) -> None:
    made = Writing(store)
    made.write(1)
    store.put_large("e000001/anchors/00000009-0.safetensors", b"x", deadline=Deadline(5))
    made.writer.under_way.add("e000001/anchors/00000009-0.safetensors")
    assert Sweeper(store, made.writer, keep_s=0.0, every_s=0.0).sweep(now=True) == 0
