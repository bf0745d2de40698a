"""What every object store has to do; each is checked by it over its real transport."""

from __future__ import annotations

import pytest

from weightsync.errors import ObjectConflictError, ObjectMissingError, StoreDamagedError
from weightsync.objects.base import ObjectStore
from weightsync.types import Deadline

MIB = 1 << 20


def soon() -> Deadline:
    return Deadline(20.0)


def check_contract(store: ObjectStore) -> None:
    """Conditional puts are conditional, ranges exact, listings whole, deletions idempotent."""
    with pytest.raises(ObjectMissingError):
        store.get("a/x.json", deadline=soon())
    first = store.put("a/x.json", b"1", deadline=soon(), replaces=None)
    with pytest.raises(ObjectConflictError):
        store.put("a/x.json", b"other", deadline=soon(), replaces=None)
    found = store.get("a/x.json", deadline=soon())
    assert found is not None
    assert (found.data, found.etag) == (b"1", first)
    assert store.get("a/x.json", deadline=soon(), unless=first) is None
    second = store.put("a/x.json", b"2", deadline=soon(), replaces=first)
    for stale in (first, '"00000000000000000000000000000000"'):
        with pytest.raises(ObjectConflictError):
            store.put("a/x.json", b"3", deadline=soon(), replaces=stale)
    with pytest.raises(ObjectConflictError):
        store.put("a/none.json", b"3", deadline=soon(), replaces=second)
    found = store.get("a/x.json", deadline=soon(), unless=first)
    assert found is not None
    assert found.data == b"2"
    body = bytes(range(256)) * (20 * MIB // 256)  # in several parts
    store.put_large("b/big.bin", memoryview(body), deadline=soon())
    for start, length in ((0, 5), (17 * MIB - 3, 7), (20 * MIB - 5, 5)):
        into = memoryview(bytearray(length))
        store.get_range("b/big.bin", start, into, deadline=soon())
        assert bytes(into) == body[start : start + length]
    for start, length in ((20 * MIB - 5, 10), (21 * MIB, 1)):
        with pytest.raises(StoreDamagedError):
            store.get_range("b/big.bin", start, memoryview(bytearray(length)), deadline=soon())
    with pytest.raises(ObjectMissingError):
        store.get_range("b/none.bin", 0, memoryview(bytearray(4)), deadline=soon())
    assert sorted((each.key, each.nbytes) for each in store.list_under("", deadline=soon())) == [
        ("a/x.json", 1), ("b/big.bin", len(body)),
    ]  # fmt: skip
    assert [each.key for each in store.list_under("b", deadline=soon())] == ["b/big.bin"]
    store.delete(["a/x.json", "b/big.bin", "a/never.json"], deadline=soon())
    assert not list(store.list_under("", deadline=soon()))
