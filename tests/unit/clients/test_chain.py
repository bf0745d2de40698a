"""What a reader makes of damage: it is found, named, and passed by, for the newest version of which all is good."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import threading

import msgspec
import pytest

from tests.multiproc.pull_kit import MODEL
from tests.standins.stored import SEED, Writing, chain_of, pulled, puller_of, taken_over
from tests.standins.stores import FaultyStore, flipped
from weightsync.clients import chain as chain_module
from weightsync.clients.chain import Chain
from weightsync.clients.store import StoreClient
from weightsync.errors import (
    DeadlineExceededError,
    NotPublishedError,
    SignatureError,
    StoreAuthError,
    StoreDamagedError,
    StoreUnavailableError,
    UnsupportedError,
    VersionError,
)
from weightsync.objects.base import Data
from weightsync.objects.folder import FolderStore
from weightsync.objects.repeating import Repeating
from weightsync.objects.signing import Signer, Trust, make_keys, seal
from weightsync.sink.sweep import Sweeper
from weightsync.types import Deadline
from weightsync.types.store import POINTER, Pointer
from weightsync.types.transfer_messages import TransferRequest

E1 = "e000001"
ANCHOR = f"{E1}/anchors/00000004-0.safetensors"
DELTA = f"{E1}/deltas/00000004-00000005-0.delta"
NUM_PLACES = 8


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    name = tmp_path_factory.mktemp("keys") / "run"
    make_keys(f"{name}.secret", f"{name}.public")
    return Signer(f"{name}.secret"), Trust(f"{name}.public")


@pytest.fixture(scope="module")
def whole(tmp_path_factory, keys):
    """A signed place with two chains: 1 (full), 2, 3; 4 (full), 5, 6."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    made = Writing(FolderStore(f"file://{folder}"), signer=keys[0], anchor_every=3)
    for number in range(1, 7):
        made.write(number)
    made.claim.release()
    return folder


@pytest.fixture
def place(whole, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    return folder


def store_at(folder) -> FolderStore:
    return FolderStore(f"file://{folder}")


def places_in(size: int, first: int = 0) -> list[int]:
    return sorted({first, size - 1, *(first + (size - first) * n // NUM_PLACES for n in range(NUM_PLACES))})


FILES = {
    POINTER: (6, 0),
    f"{E1}/versions/6.json": (5, 0),
    f"{E1}/versions/4.json": (3, 0),  # the anchor's: nothing of its chain can be begun
    ANCHOR: (3, 4096),  # its header is not read
    DELTA: (4, 0),
    f"{E1}/deltas/00000005-00000006-0.delta": (5, 0),
}


@pytest.mark.parametrize("key", FILES)
def test_a_flipped_bit_is_found_and_named_and_passed_by(place, key, caplog, keys) -> None:
    """By a joiner without a trainer: it takes the newest version that is good. Unsigned, and signed."""
    expected, first = FILES[key]
    path = place / key
    good = path.read_bytes()
    caplog.set_level(logging.INFO)
    for count, byte in enumerate(places_in(len(good), first)):
        path.write_bytes(flipped(good, byte, bit=count % 8))
        caplog.clear()
        trust = keys[1] if count % 2 else None
        with chain_of(store_at(place), trust), puller_of(f"file://{place}") as reader:
            number, _, right = pulled(reader)
        signature = (
            trust is None and good[byte : byte + 1].isalnum() and byte > good.index(b"\n") if key == POINTER else False
        )
        assert (number, right) == (expected, True), f"byte {byte}"
        assert key in caplog.text or (signature and byte > len(good) - 100), f"byte {byte} of {key} is not named"
    path.write_bytes(good)
    with chain_of(store_at(place)), puller_of(f"file://{place}") as reader:
        assert pulled(reader)[::2] == (6, True)


@pytest.mark.parametrize("key", [ANCHOR, DELTA, f"{E1}/versions/6.json"])
@pytest.mark.parametrize("how", ["gone", "cut", "swapped", "empty"])
def test_an_object_that_is_gone_cut_off_or_swapped_is_passed_by(place, key, how, caplog) -> None:
    path = place / key
    if how == "gone":
        path.unlink()
    elif how == "swapped":
        other = {ANCHOR: f"{E1}/anchors/00000001-0.safetensors", DELTA: f"{E1}/deltas/00000005-00000006-0.delta"}
        shutil.copyfile(place / other.get(key, f"{E1}/versions/5.json"), path)
    else:
        path.write_bytes(path.read_bytes()[: len(path.read_bytes()) // 2 if how == "cut" else 0])
    with chain_of(store_at(place)), puller_of(f"file://{place}") as reader:
        assert pulled(reader)[::2] == (FILES[key][0], True)
    assert key in caplog.text


def test_damage_on_the_way_is_mended_by_asking_again(place) -> None:
    """Of each kind of object once, in a row."""
    hurt: set[str] = set()

    def rule(op: str, key: str, _: int) -> str | None:
        if op in ("get", "range") and key not in hurt and POINTER not in key:
            hurt.add(key)
            return "flip"
        return None

    with chain_of(FaultyStore(store_at(place), rule)), puller_of(f"file://{place}") as reader:
        assert pulled(reader) == (6, 2, True)
    assert len(hurt) == 6  # two manifests, the layout, the anchor, two deltas


def test_throttling_is_waited_for_and_a_refused_credential_is_not(place) -> None:
    busy = FaultyStore(store_at(place), lambda op, key, count: "unavailable" if count % 3 else None)
    with chain_of(Repeating(busy, first_s=0.001)), puller_of(f"file://{place}") as reader:
        assert pulled(reader) == (6, 2, True)
    expired = FaultyStore(store_at(place), lambda op, key, count: "auth")
    with chain_of(Repeating(expired, first_s=0.001)), puller_of(f"file://{place}") as reader:
        with pytest.raises(StoreAuthError):
            pulled(reader)
        assert len(expired.ops) <= 2, "nobody storms a store that says no"


@pytest.mark.parametrize("op", ["get", "range"])
def test_reading_that_breaks_at_any_step_is_begun_anew(place, op) -> None:
    """At each call once, for longer than one try waits: what was taken is right, or nothing."""
    total = FaultyStore(store_at(place))
    with chain_of(total), puller_of(f"file://{place}") as reader:
        assert pulled(reader)[2]
    steps = [count for count, each in enumerate(total.ops) if each[0] == op]
    for step in steps:
        faulty = FaultyStore(store_at(place), lambda _, key, count, step=step: "unavailable" if count == step else None)
        with chain_of(faulty), puller_of(f"file://{place}") as reader:
            assert pulled(reader) == (6, 2, True), total.ops[step]


def test_only_what_the_trusted_key_has_signed_is_taken(place, keys, tmp_path) -> None:
    make_keys(f"{tmp_path}/other.secret", f"{tmp_path}/other.public")
    other = Trust(f"{tmp_path}/other.public")
    with chain_of(store_at(place), other), puller_of(f"file://{place}") as reader, pytest.raises(SignatureError):
        pulled(reader)
    path = place / POINTER
    payload = path.read_bytes().partition(b"\n")[0]
    path.write_bytes(seal("pointer", payload, None))
    chain = Chain(store_at(place), trust=keys[1])
    found = chain.newest(deadline=Deadline(5))  # a way out of damage: manifests are signed too
    assert found.version.number == 6


def replay(place, keys, **changes):
    """A pointer with other facts; signed by the key, as a thief of it could, or as an older one."""
    path = place / POINTER
    pointer = msgspec.json.decode(path.read_bytes().partition(b"\n")[0], type=Pointer)
    path.write_bytes(seal("pointer", msgspec.json.encode(msgspec.structs.replace(pointer, **changes)), keys[0]))


def test_an_older_manifest_under_a_newer_number_is_refused(place, keys, caplog) -> None:
    """Its number is within it."""
    pointer = msgspec.json.decode((place / POINTER).read_bytes().partition(b"\n")[0], type=Pointer)
    version = msgspec.structs.replace(pointer.version, number=9)
    ref = msgspec.structs.replace(pointer.current, number=9)
    replay(place, keys, version=version, current=ref)
    found = Chain(store_at(place), trust=keys[1]).newest(deadline=Deadline(5))
    assert found.version.number == 5  # the pointer's previous
    assert "versions/6.json" in caplog.text


def test_manifests_are_kept_by_their_bytes(place, monkeypatch) -> None:
    """Seen red: 300 of them, each with megabytes for a large model."""
    chain = Chain(store_at(place), trust=None)
    newest = chain.newest(deadline=Deadline(5))
    monkeypatch.setattr(chain_module, "_KEPT_BYTES", 1)
    for back in range(2):
        chain.version(newest.version.number - back, deadline=Deadline(5))
        assert len(chain._manifests) == 1


def test_a_pointer_to_a_version_of_a_later_writer_is_none(place, keys) -> None:
    """Whoever took it would refuse all that come after it."""
    path = place / POINTER
    pointer = json.loads(path.read_bytes().partition(b"\n")[0])
    pointer["current"]["manifest"]["key"] = "e999999999999999999/versions/6.json"
    path.write_bytes(seal("pointer", json.dumps(pointer).encode(), keys[0]))
    chain = Chain(store_at(place), trust=keys[1])
    assert chain.newest(deadline=Deadline(5)).version.number == 6  # the newest manifest that is good counts
    assert chain.seen is not None
    assert chain.seen.order == (pointer["epoch"], 6)


def test_an_older_pointer_is_refused_by_whoever_has_seen_a_newer_one(place, keys) -> None:
    old = (place / POINTER).read_bytes()
    chain = Chain(store_at(place), trust=keys[1])
    assert chain.newest(deadline=Deadline(5)).version.number == 6
    made = Writing(store_at(place), signer=keys[0], seed=SEED + 1)
    made.write(1)
    assert chain.newest(deadline=Deadline(5)).version.run_id == f"seed-{SEED + 1}"
    now = (place / POINTER).read_bytes()
    (place / POINTER).write_bytes(old)
    with pytest.raises(StoreDamagedError, match="went back"):
        chain.newest(deadline=Deadline(5))
    (place / POINTER).write_bytes(now)
    assert chain.newest(deadline=Deadline(5)).version.number == 1
    made.claim.release()


def test_what_was_signed_for_another_place_counts_for_nothing(place, keys) -> None:
    elsewhere = place.with_name("elsewhere")
    shutil.copytree(place, elsewhere)
    with pytest.raises(SignatureError, match="elsewhere"):
        Chain(store_at(elsewhere), trust=keys[1]).newest(deadline=Deadline(5))


def test_a_signature_is_of_one_kind_of_record(place, keys) -> None:
    """A manifest is no pointer, though the same key has signed it."""
    payload = (place / POINTER).read_bytes().partition(b"\n")[0]
    (place / POINTER).write_bytes(seal("version", payload, keys[0]))
    store = FaultyStore(store_at(place), lambda op, key, count: "lag" if op == "list" else None)
    with pytest.raises(SignatureError):
        Chain(store, trust=keys[1]).newest(deadline=Deadline(5))


def test_nothing_there_yet_is_said_so(tmp_path) -> None:
    with pytest.raises(NotPublishedError):
        Chain(store_at(tmp_path / "none"), trust=None).newest(deadline=Deadline(5))


def test_any_version_of_the_chain_can_be_asked_for(place) -> None:
    chain = Chain(store_at(place), trust=None)
    for number in range(1, 7):
        assert chain.version(number, deadline=Deadline(5)).version.number == number
    with pytest.raises(VersionError):
        chain.version(7, deadline=Deadline(5))
    for number in (2, 4, 5):
        with puller_of(f"file://{place}?version={number}") as reader:
            assert pulled(reader)[::2] == (number, True)


def test_who_takes_no_deltas_is_told_so(place) -> None:
    client = StoreClient(f"file://{place}", chain=Chain(store_at(place), trust=None))
    with pytest.raises(UnsupportedError):
        client.request_transfer(TransferRequest(receiver_id="r", model_id=MODEL, mode="full"))
    client.close()


def test_a_reader_leaves_a_note_and_takes_it_away(place) -> None:
    store = store_at(place)
    with chain_of(store, beat_s=30.0) as chain, puller_of(f"file://{place}") as reader:
        assert pulled(reader)[0] == 6
        notes = [each.key for each in store.list_under("readers", deadline=Deadline(5))]
        assert len(notes) == 1
        said = msgspec.json.decode(store.get(notes[0], deadline=Deadline(5)).data)
        assert said["manifests"] == [f"{E1}/versions/6.json"]
        chain.close()
    assert not list(store.list_under("readers", deadline=Deadline(5)))


def test_whoever_may_not_write_reads_all_the_same(place) -> None:
    readonly = FaultyStore(store_at(place), lambda op, key, count: "auth" if op == "put" else None)
    with chain_of(readonly), puller_of(f"file://{place}") as reader:
        assert pulled(reader) == (6, 2, True)


def test_a_store_that_takes_no_note_is_asked_once_a_beat(place) -> None:
    """In whatever words it refuses. Seen red: each pull tried its note for as long as it had, and began then."""
    asked: list[float] = []
    store = store_at(place)

    def put(key: str, data: Data, *, deadline: Deadline, replaces: str | None) -> str:
        asked.append(deadline.remaining_s)
        raise StoreUnavailableError("405 Method Not Allowed")

    store.put = put
    chain = Chain(store, trust=None, beat_s=60.0)
    for number in range(3):
        chain.reading("r", (f"{E1}/versions/{number}.json",))
        chain.beat(deadline=Deadline(30.0))
    assert len(asked) == 1
    assert 0.0 < asked[0] <= 3.0
    chain.damaged(ANCHOR)
    chain.beat(deadline=Deadline(30.0))
    assert len(asked) == 2, "of damage the writer is told soon"


def test_a_pull_goes_on_though_the_request_of_its_note_hangs(place, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gateway that swallows writes. Seen red: it hung as long as the request did."""
    monkeypatch.setattr(chain_module, "_NOTE_S", 0.05)
    over, asked = threading.Event(), []
    store = store_at(place)

    def put(key: str, data: Data, *, deadline: Deadline, replaces: str | None) -> str:
        asked.append(key)
        assert over.wait(60)
        return "etag"

    store.put = put
    chain = Chain(store, trust=None, beat_s=0.001)
    chain.reading("r", (f"{E1}/versions/1.json",))
    deadline = Deadline(30.0)
    for _ in range(2):
        chain.beat(deadline=deadline)
    over.set()
    assert (len(asked), deadline.expired) == (1, False)


def test_the_trailer_is_what_was_written() -> None:
    raw = seal("pointer", b"{}", None)
    assert hashlib.sha256(b"{}").hexdigest().encode() in raw


def test_an_older_manifest_under_a_newer_name_is_not_recovered(place, keys) -> None:
    """The pointer is damaged, and a signed manifest was copied to where a newer one would lie. Seen red without a look
    at what is within."""
    shutil.copytree(place / E1 / "versions", place / "e000009" / "versions")
    shutil.copyfile(place / E1 / "versions/2.json", place / "e000009/versions/99.json")
    (place / E1 / "versions/odd name.json").write_bytes(b"x")
    (place / POINTER).write_bytes(b"damaged")
    assert Chain(store_at(place), trust=keys[1]).newest(deadline=Deadline(5)).version.number == 6


def test_who_has_recovered_once_does_not_go_back_by_recovering_again(place, keys) -> None:
    (place / POINTER).write_bytes(b"damaged")
    chain = Chain(store_at(place), trust=keys[1])
    assert chain.newest(deadline=Deadline(5)).version.number == 6
    (place / E1 / "versions/6.json").unlink()
    (place / POINTER).write_bytes(b"damaged anew")
    with pytest.raises(StoreDamagedError):
        chain.newest(deadline=Deadline(5))


def test_a_number_of_the_run_before_is_not_given_for_one_of_the_newest(place, keys) -> None:
    """The newest run begins at 5; 2 was the run's before it. Seen red with runs that are not compared."""
    made = Writing(store_at(place), signer=keys[0], seed=SEED + 1)
    made.write(5)
    chain = Chain(store_at(place), trust=None)
    assert chain.version(5, deadline=Deadline(5)).version.run_id == f"seed-{SEED + 1}"
    for number in (2, 4):
        with pytest.raises(VersionError):
            chain.version(number, deadline=Deadline(5))
    made.claim.release()


def test_a_newer_answer_of_another_thread_is_no_pointer_that_went_back(place, keys) -> None:
    """Both have asked; the older answer is looked at last."""
    old = (place / POINTER).read_bytes()
    made = Writing(store_at(place), signer=keys[0])
    made.write(7)
    chain = Chain(store_at(place), trust=keys[1])
    now = (place / POINTER).read_bytes()
    inner = store_at(place)

    class Slow(FaultyStore):
        def get(self, key, *, deadline, unless=None):
            if key == POINTER and not self.ops:
                self.ops.append(("get", key))
                (place / POINTER).write_bytes(old)
                found = inner.get(key, deadline=deadline, unless=unless)
                (place / POINTER).write_bytes(now)
                assert chain.newest(deadline=deadline).version.number == 7
                return found
            return inner.get(key, deadline=deadline, unless=unless)

    chain.store = Slow(inner)
    assert chain.newest(deadline=Deadline(5)).version.number == 7
    made.claim.release()


def test_a_credential_that_had_expired_ends_no_note_for_ever(place, monkeypatch) -> None:
    monkeypatch.setattr("weightsync.clients.chain._MUTE_S", 0.0)
    expired = [True]
    store = FaultyStore(store_at(place), lambda op, key, count: "auth" if op == "put" and expired[0] else None)
    chain = Chain(store, trust=None, beat_s=1e-6)
    chain.reading("r", (f"{E1}/versions/6.json",))
    chain.beat(deadline=Deadline(5))
    expired.clear()
    expired.append(False)
    chain.beat(deadline=Deadline(5))
    assert len(list(store.list_under("readers", deadline=Deadline(5)))) == 1
    chain.close()


def test_a_source_that_a_version_does_not_have_is_a_typed_error(place) -> None:
    client = StoreClient(f"file://{place}?source=3", chain=Chain(store_at(place), trust=None))
    with pytest.raises(VersionError, match="no source 3"):
        client.request_transfer(TransferRequest(receiver_id="r", model_id=MODEL, mode="auto"))
    client.close()


def test_a_chain_whose_anchor_is_damaged_is_left_at_once(place, monkeypatch) -> None:
    """However long it is: not one version after another. Seen red with each version before looked at."""
    monkeypatch.setattr("weightsync.clients.chain._NUM_BACK", 2)
    (place / ANCHOR).unlink()
    with chain_of(store_at(place)), puller_of(f"file://{place}") as reader:
        assert pulled(reader)[::2] == (3, True)


@pytest.mark.parametrize("key", [f"{E1}/anchors/00000001-0.safetensors", f"{E1}/versions/1.json"])
def test_the_writer_is_told_of_damage_where_no_version_is_good(tmp_path, key) -> None:
    """There is one chain, and what it begins with is gone. Seen red: the note never said so, nor was one left where
    nothing could be granted; no host could start until the chain ended by itself."""
    store = store_at(tmp_path / "run")
    made = Writing(store)
    for number in (1, 2, 3):
        made.write(number)
    (tmp_path / "run" / key).unlink()
    with chain_of(store), puller_of(store.url) as reader:
        with pytest.raises(DeadlineExceededError, match="StoreDamagedError"):
            pulled(reader, timeout_s=2.0)
        Sweeper(store, made.writer, keep_s=60.0, every_s=0.0).sweep(now=True)
        made.write(4)
        assert made.writer.current.is_anchor
        assert pulled(reader) == (4, 0, True)
    made.claim.release()


def test_a_long_chain_hides_no_version_of_the_chain_before(place, monkeypatch) -> None:
    """It has more versions than are looked at. Seen red with each version before looked at: they were "not there"."""
    monkeypatch.setattr("weightsync.clients.chain._NUM_BACK", 2)
    chain = Chain(store_at(place), trust=None)
    for number in range(1, 7):
        assert chain.version(number, deadline=Deadline(5)).version.number == number
    with pytest.raises(VersionError):
        chain.version(7, deadline=Deadline(5))


@pytest.mark.parametrize(
    ("gone", "num_looks", "expected"), [((DELTA,), 2, 4), ((DELTA, f"{E1}/versions/4.json"), 3, 3)]
)
def test_a_chain_is_left_at_its_first_bad_delta(place, monkeypatch, gone, num_looks, expected) -> None:
    """However many come after it. Seen red with each version before looked at: no version was said to be good."""
    monkeypatch.setattr("weightsync.clients.chain._NUM_BACK", num_looks)
    chain = Chain(store_at(place), trust=None)
    for key in gone:
        (place / key).unlink()
        chain.damaged(key)
    assert chain.newest(deadline=Deadline(5)).version.number == expected


def test_a_bad_delta_to_a_version_that_was_passed_by_leads_back_to_one_that_was_written(tmp_path) -> None:
    """Only these have a manifest. Seen red with the version before that delta, whatever it is."""
    store = store_at(tmp_path / "run")
    made = Writing(store)
    for number in (1, 2):
        made.write(number)
    made.writer.write(taken_over(5, base=2), deadline=Deadline(5))
    made.write(6)
    made.claim.release()
    chain = Chain(store, trust=None)
    chain.damaged(f"{E1}/deltas/00000003-00000004-0.delta")
    assert chain.newest(deadline=Deadline(5)).version.number == 2
    chain.damaged(f"{E1}/deltas/00000001-00000002-0.delta")
    assert chain.newest(deadline=Deadline(5)).version.number == 1
