"""Version and Manifest: what a publication is called and what is in it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal, cast

import msgspec

from weightsync.errors import InvalidRequestError, VersionError
from weightsync.types.spec import TensorSpec, check_id
from weightsync.types.table import DIGEST_BYTES, PackedDigests, TensorTable, packed_digest, written_digest

MAX_VERSION = 2**63 - 1

MODEL_DIGEST_PREFIX = "wsd2:"
"""What a model digest begins with: the number of its definition (`codec.digest`)."""


class Version(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A version within a run: an integer that rises with the trainer's steps.

    A restarted trainer has a new `run_id`; nobody compares versions across runs, so there is no `<`.
    """

    run_id: str
    number: int

    def __post_init__(self) -> None:
        check_id("run_id", self.run_id)
        if not 0 <= self.number <= MAX_VERSION:
            raise InvalidRequestError(f"a version is a number from 0 to 2**63 - 1, not {str(self.number)[:40]}")

    def __str__(self) -> str:
        return f"{self.run_id}/{self.number}"

    def is_newer_than(self, other: Version) -> bool:
        """Whether this version comes after `other` of the same run.

        Raises:
            VersionError: the runs differ; neither is newer.
        """
        if self.run_id != other.run_id:
            raise VersionError(f"{self} and {other} belong to different runs and can't be compared")
        return self.number > other.number


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The ordered list of what a publication holds. It travels; no side agrees by convention.

    Attributes:
        version: which version of which run.
        model_id: which model.
        tensors: in the order of the stream; names are unique. A `TensorTable`, whatever it was made from.
        artifact: kind of artifact, "model" so far.
        model_digest: the shard-independent digest of everything (`codec.digest`); None where it is
            not known yet: a push knows it at commit.
        digests: XXH3-128 of the bytes of each part held (`codec.digest.tensor_digest`), 16 bytes each, in the order of
            `tensors`; None where they are not known yet.
    """

    version: Version
    model_id: str
    tensors: tuple[TensorSpec, ...]
    artifact: Literal["model"] = "model"
    model_digest: str | None = None
    digests: bytes | None = None

    def __post_init__(self) -> None:
        check_id("model_id", self.model_id)
        if not self.tensors:
            raise InvalidRequestError("a manifest with no tensors publishes nothing", version=str(self.version))
        if type(self.tensors) is not TensorTable:
            msgspec.structs.force_setattr(self, "tensors", TensorTable.of(self.tensors))
        if self.digests is not None and len(self.digests) != DIGEST_BYTES * len(self.tensors):
            raise InvalidRequestError("there is not one digest a tensor", version=str(self.version))
        check_model_digest(self.model_digest, version=str(self.version))

    @property
    def table(self) -> TensorTable:
        """`tensors`, with what follows from them."""
        return cast(TensorTable, self.tensors)

    @property
    def total_bytes(self) -> int:
        """Bytes of all parts held."""
        return self.table.total_bytes

    def by_name(self) -> dict[str, TensorSpec]:
        """The specs by their names, in order. Not to be changed."""
        return self.table.by_name

    def digest(self, name: str) -> str | None:
        """A tensor's digest as `codec.digest.tensor_digest` writes it; None where it is not known yet."""
        return None if self.digests is None else written_digest(self.digests, self.table.index_of[name])

    def with_digests(self, digests: Mapping[str, str], model_digest: str | None) -> Manifest:
        """The same manifest with digests filled in.

        Args:
            digests: as `codec.digest.tensor_digest` writes them, by name.
            model_digest: of everything.

        Raises:
            InvalidRequestError: `digests` lacks a tensor, has one that is not in the manifest, or one that is none.
        """
        if isinstance(digests, PackedDigests) and digests.names == self.table.names:
            return self.with_packed_digests(digests.packed, model_digest)
        if digests.keys() != self.table.by_name.keys():
            odd = sorted(digests.keys() ^ self.table.by_name.keys())[:5]
            raise InvalidRequestError(f"digests and manifest disagree on {odd}", version=str(self.version))
        packed = b"".join([packed_digest(digests[name]) for name in self.table.by_name])
        return self.with_packed_digests(packed, model_digest)

    def with_packed_digests(self, digests: bytes, model_digest: str | None) -> Manifest:
        """As `with_digests`, of digests as the field has them."""
        return msgspec.structs.replace(self, digests=digests, model_digest=model_digest)


def check_model_digest(digest: str | None, *, version: str | None = None) -> None:
    """Refuses a model digest of another definition: it would look like a wrong byte, whatever the bytes.

    Args:
        digest: None is fine.
        version: what the error is to name.

    Raises:
        InvalidRequestError: the digest has another number than `MODEL_DIGEST_PREFIX`, such as wsd1.
    """
    found = re.match(r"wsd[0-9]+:", digest or "")
    if found and found[0] != MODEL_DIGEST_PREFIX:
        raise InvalidRequestError(
            f"a model digest {found[0]} is one of another weightsync release, this one has {MODEL_DIGEST_PREFIX}; "
            "run the same release on the trainer's and the rollout's side",
            version=version,
        )
