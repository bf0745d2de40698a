"""Nobody goes back: an old pointer that is put there again is refused by whoever has seen or recovered a newer one."""

from __future__ import annotations

import shutil

import pytest

from tests.multiproc.pull_kit import run_of
from tests.standins.stored import SEED, Writing
from tests.standins.stores import FaultyStore
from weightsync.clients import store as clients
from weightsync.clients.chain import Chain
from weightsync.clients.store import StoreClient
from weightsync.errors import StoreDamagedError
from weightsync.objects.folder import FolderStore
from weightsync.objects.signing import Signer, Trust, make_keys
from weightsync.types import Deadline
from weightsync.types.store import POINTER

E1 = "e000001"


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    name = tmp_path_factory.mktemp("keys") / "run"
    make_keys(f"{name}.secret", f"{name}.public")
    return Signer(f"{name}.secret"), Trust(f"{name}.public"), f"{name}.public"


def store_at(folder) -> FolderStore:
    return FolderStore(f"file://{folder}")


@pytest.fixture
def kept(tmp_path, keys):
    """A signed place with versions 1 to 6, and the pointers that were there on the way, by number."""
    store, pointers = store_at(tmp_path / "kept"), {}
    made = Writing(store, signer=keys[0], anchor_every=3)
    for number in range(1, 7):
        made.write(number)
        pointers[number] = (tmp_path / "kept" / POINTER).read_bytes()
    made.claim.release()
    return tmp_path / "kept", pointers


def test_who_has_recovered_does_not_go_back_to_an_old_pointer(kept, keys) -> None:
    """It was signed, and somebody has kept it. Seen red where what was recovered does not count as seen."""
    folder, pointers = kept
    (folder / POINTER).write_bytes(b"damaged")
    chain = Chain(store_at(folder), trust=keys[1])
    assert chain.newest(deadline=Deadline(5)).version.number == 6
    (folder / POINTER).write_bytes(pointers[2])
    for _ in range(2):
        with pytest.raises(StoreDamagedError, match="went back"):
            chain.newest(deadline=Deadline(5))
    (folder / POINTER).write_bytes(pointers[6])
    assert chain.newest(deadline=Deadline(5)).version.number == 6


def test_an_answer_from_before_another_thread_recovered_is_none_that_went_back(kept, keys) -> None:
    """The pointer was read, then damaged, and another thread recovers first. Seen red with etags alone compared."""
    folder, pointers = kept
    chain, inner = Chain(store_at(folder), trust=keys[1]), store_at(folder)
    (folder / POINTER).write_bytes(pointers[2])

    class Slow(FaultyStore):
        def get(self, key, *, deadline, unless=None):
            found = inner.get(key, deadline=deadline, unless=unless)
            if key == POINTER and not self.ops:
                self.ops.append(("get", key))
                (folder / POINTER).write_bytes(b"damaged")
                assert chain.newest(deadline=deadline).version.number == 6
            return found

    chain.store = Slow(inner)
    assert chain.newest(deadline=Deadline(5)).version.number == 6
    (folder / POINTER).write_bytes(pointers[2])
    with pytest.raises(StoreDamagedError, match="went back"):
        chain.newest(deadline=Deadline(5))


def test_a_run_that_took_over_may_begin_below_the_one_before(kept, keys) -> None:
    """Its writer takes the pointer over first, with the old version in it; a reader that saw that takes the new run's
    first version too, and nothing older from then on. Seen red: such readers stood still until the new run had passed
    the number of the old one."""
    folder, pointers = kept
    chain = Chain(store_at(folder), trust=keys[1])
    after = Writing(store_at(folder), seed=SEED + 1, signer=keys[0], anchor_every=3)
    taken_over = (folder / POINTER).read_bytes()
    assert taken_over != pointers[6]
    assert chain.newest(deadline=Deadline(5)).version.number == 6
    for old in (pointers[6], pointers[2]):  # of the writer that was fenced
        (folder / POINTER).write_bytes(old)
        with pytest.raises(StoreDamagedError, match="went back"):
            chain.newest(deadline=Deadline(5))
    (folder / POINTER).write_bytes(b"damaged")
    later = Chain(store_at(folder), trust=keys[1], seen=chain.seen)  # recovers the same version, and the fence stays
    assert later.newest(deadline=Deadline(5)).version.number == 6
    (folder / POINTER).write_bytes(pointers[6])
    with pytest.raises(StoreDamagedError, match="went back"):
        later.newest(deadline=Deadline(5))
    (folder / POINTER).write_bytes(taken_over)
    after.write(1)
    newest = chain.newest(deadline=Deadline(5)).version
    assert (newest.run_id, newest.number) == (run_of(SEED + 1), 1)
    for old in (taken_over, pointers[6], pointers[2]):
        (folder / POINTER).write_bytes(old)
        with pytest.raises(StoreDamagedError, match="went back"):
            chain.newest(deadline=Deadline(5))
    after.claim.release()


def newest_of(folder, trust_key) -> int | None:
    """As a client asks that is the only one of its process, and ends."""
    client = StoreClient(f"file://{folder}", trust_key=trust_key)
    try:
        return client.get_version().version
    finally:
        client.close()


@pytest.fixture
def public(keys, monkeypatch):
    """File of the public key; what other tests have seen is forgotten."""
    monkeypatch.setattr(clients, "_seen", {})
    return keys[2]


def test_what_a_process_has_seen_outlives_its_last_client(kept, public) -> None:
    """Of a place whose key is trusted. Seen red with a new chain that knows nothing."""
    folder, pointers = kept
    assert newest_of(folder, public) == 6
    (folder / POINTER).write_bytes(pointers[2])
    with pytest.raises(StoreDamagedError, match="went back"):
        newest_of(folder, public)
    assert newest_of(folder, None) == 2  # whoever trusts anybody has seen nothing
    (folder / POINTER).write_bytes(b"damaged")
    assert newest_of(folder, public) == 6
    (folder / E1 / "versions/6.json").rename(folder / E1 / "versions/6.gone")
    with pytest.raises(StoreDamagedError):
        newest_of(folder, public)
    (folder / POINTER).unlink()
    with pytest.raises(StoreDamagedError, match="gone"):
        newest_of(folder, public)


def test_what_is_seen_of_places_is_bounded(kept, public, monkeypatch) -> None:
    monkeypatch.setattr(clients, "_NUM_SEEN", 2)
    folder, _ = kept
    others = [folder.with_name(f"at-{n}") / "kept" for n in range(2)]
    for each in (folder, *others):
        if each != folder:
            shutil.copytree(folder, each)
        assert newest_of(each, public) == 6
    assert [url for url, _ in clients._seen] == [f"file://{each}" for each in others]


def test_a_writer_that_took_the_pointer_on_bars_no_recovery(kept, public, keys) -> None:
    """Its epoch is newer than the one that the newest version was written in. Seen red with epochs alone compared."""
    folder, _ = kept
    Writing(store_at(folder), signer=keys[0]).claim.release()
    assert newest_of(folder, public) == 6
    (folder / POINTER).write_bytes(b"damaged")
    assert newest_of(folder, public) == 6
