"""TensorTable: the tensors of a manifest, checked once, with everything that follows from them alone.

A mixture of experts has 100,000 tensors, and publishes the same list of them at every step. Whoever needs an index, a
sum or a plan of that list asks the list for it: it is made once, and lives as long as the list does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeVar, cast

from weightsync.errors import InvalidRequestError
from weightsync.types.spec import TensorSpec

Derived = TypeVar("Derived")

DIGEST_BYTES = 16
"""Of one tensor, packed: XXH3-128, which `codec.digest` writes as "xxh3:" and 32 hex digits."""

_PREFIX = "xxh3:"
_MAX_DERIVED = 256


class SpecTable(tuple[TensorSpec, ...]):
    """A tuple of specs that is never changed, and what was made of it."""

    _derived: dict[Any, Any]

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Of each spec, in order; `dtypes` and `shapes` likewise."""
        return tuple([spec.name for spec in self])

    @cached_property
    def dtypes(self) -> tuple[str, ...]:
        return tuple([spec.dtype for spec in self])

    @cached_property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        return tuple([spec.shape for spec in self])

    def derive(self, make: Callable[..., Derived], *others: Any) -> Derived:
        """`make(self, *others)`, made at the first call and kept with the table. Not to be changed by anybody.

        Args:
            make: a function that depends on nothing but its arguments. It is the key: one of a module, no closure.
            others: further arguments, hashable; tables among them count by their identity, and are kept.
        """
        try:
            kept = self._derived
        except AttributeError:
            kept = self._derived = {}
        key = (make, *(id(other) if isinstance(other, SpecTable) else other for other in others))
        if len(kept) > _MAX_DERIVED:
            kept.clear()
        if (found := kept.get(key)) is None:  # made twice where two threads ask at once, which is no harm
            found = kept[key] = make(self, *others), others
        return cast(Derived, found[0])

    def __reduce__(self) -> tuple[Any, ...]:
        return tuple, (tuple(self),)


class TensorTable(SpecTable):
    """Specs with unique names; `of` makes one."""

    @classmethod
    def of(cls, specs: Iterable[TensorSpec]) -> TensorTable:
        """The table of these specs; itself where it is one already.

        Raises:
            InvalidRequestError: two have one name.
        """
        if type(specs) is cls:
            return specs
        table = cls(specs)
        if len(table.by_name) != len(table):
            seen: set[str] = set()
            for spec in table:
                if spec.name in seen:
                    raise InvalidRequestError("a manifest names every tensor once", parameter=spec.name)
                seen.add(spec.name)
        return table

    @cached_property
    def by_name(self) -> dict[str, TensorSpec]:
        """The specs by their names, in order. Not to be changed."""
        return {spec.name: spec for spec in self}

    @cached_property
    def index_of(self) -> dict[str, int]:
        """Where each name stands. Not to be changed."""
        return {spec.name: index for index, spec in enumerate(self)}

    @cached_property
    def sizes_bytes(self) -> tuple[int, ...]:
        """Bytes of each part held."""
        return tuple(spec.nbytes for spec in self)

    @cached_property
    def total_bytes(self) -> int:
        """Bytes of all parts held."""
        return sum(self.sizes_bytes)


class PackedDigests(Mapping[str, str]):
    """Digests by name, as `codec.tensor_digest.tensor_digest` writes them: of 100,000 tensors nobody wants the texts.

    Args:
        names: each once.
        packed: `DIGEST_BYTES` for each, one behind the other.
    """

    def __init__(self, names: Sequence[str], packed: bytes) -> None:
        self.names = tuple(names)
        self.packed = packed
        self._places: dict[str, int] | None = None

    def __getitem__(self, name: str) -> str:
        if self._places is None:
            self._places = {name: place for place, name in enumerate(self.names)}
        return written_digest(self.packed, self._places[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


def packed_digest(digest: str) -> bytes:
    """The 16 bytes of a digest as `codec.tensor_digest.tensor_digest` writes it.

    Raises:
        InvalidRequestError: it is none.
    """
    try:
        found = bytes.fromhex(digest.removeprefix(_PREFIX))
    except ValueError:
        found = b""
    if not digest.startswith(_PREFIX) or len(found) != DIGEST_BYTES or len(digest) != len(_PREFIX) + 2 * DIGEST_BYTES:
        raise InvalidRequestError(f"{digest[:64]!r} is no digest of the form xxh3:<32 hex>")
    return found


def written_digest(digests: bytes, index: int) -> str:
    """One of several packed digests, as `codec.tensor_digest.tensor_digest` writes it."""
    return _PREFIX + digests[DIGEST_BYTES * index : DIGEST_BYTES * (index + 1)].hex()
