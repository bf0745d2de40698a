"""ObjectStore: what this library needs of an object store. A store is one file, which knows no publication."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Protocol, TypeAlias

from weightsync.types import Deadline

Data: TypeAlias = bytes | memoryview

MAX_SMALL_BYTES = 256 << 20
"""No object that is read whole (a pointer, a manifest, a layout, a note) is longer."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Found:
    """An object that was read whole.

    Attributes:
        data: its bytes.
        etag: names just this content of this key: what a conditional put compares.
    """

    data: bytes
    etag: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Listed:
    """One line of a listing, which may lag behind what is there."""

    key: str
    nbytes: int


class ObjectStore(Protocol):
    """One place in a store: a bucket and a prefix, or a folder. Thread-safe.

    Keys are relative to it. A reader sees an object whole or not at all, and the newest as soon as its put has
    returned. Listings alone may lag; nothing relies on them.

    Every call raises StoreUnavailableError (it does not answer), StoreAuthError (it refuses the credential) and
    DeadlineExceededError beside what it names; what was to be written is then there or not, whole.

    Attributes:
        url: of the place, without a credential.
    """

    url: str

    def get(self, key: str, *, deadline: Deadline, unless: str | None = None) -> Found | None:
        """An object, whole; None where it still has the etag `unless`.

        Raises:
            ObjectMissingError: there is none.
            StoreDamagedError: it is longer than `MAX_SMALL_BYTES`.
        """

    def get_range(self, key: str, start: int, into: memoryview, *, deadline: Deadline) -> None:
        """Fills `into` from byte `start` on.

        Raises:
            ObjectMissingError: there is none.
            StoreDamagedError: it ends before that.
        """

    def put(self, key: str, data: Data, *, deadline: Deadline, replaces: str | None) -> str:
        """Writes a small object under a condition; its etag.

        Args:
            key: where.
            data: all of it.
            deadline: of the call.
            replaces: the etag of what has to be there; None: nothing may be there.

        Raises:
            ObjectConflictError: something else is there. It stays.
        """

    def put_large(self, key: str, data: Data, *, deadline: Deadline) -> None:
        """Writes an object of any size under a key that no other writer uses."""

    def delete(self, keys: Iterable[str], *, deadline: Deadline) -> None:
        """Deletes objects; those that are not there count as deleted."""

    def list_under(self, prefix: str, *, deadline: Deadline) -> Iterator[Listed]:
        """Objects whose keys begin with whole folders of `prefix`, as far as the listing knows."""
