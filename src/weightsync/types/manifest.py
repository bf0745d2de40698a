"""Manifest: what is in a publication."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, cast

import msgspec

from weightsync.errors import InvalidRequestError
from weightsync.types.adapter import Adapter
from weightsync.types.canary import Canary
from weightsync.types.spec import TensorSpec, check_id
from weightsync.types.table import DIGEST_BYTES, PackedDigests, TensorTable, packed_digest, written_digest
from weightsync.types.version import MAX_VERSION, MODEL_DIGEST_PREFIX, Version, check_model_digest

__all__ = ["MAX_VERSION", "MODEL_DIGEST_PREFIX", "ArtifactKind", "Manifest", "Version", "check_model_digest"]

ArtifactKind = Literal["model", "lora"]
"""What a publication is: all weights of a model, or a LoRA adapter's."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The ordered list of what a publication holds. It travels; no side agrees by convention.

    Attributes:
        version: which version of which run.
        model_id: which model.
        tensors: in the order of the stream; names are unique. A `TensorTable`, whatever it was made from.
        artifact: "model": all weights; "lora": an adapter's, named as in PEFT's file.
        adapter: of "lora" alone: its configuration and its base.
        canary: what the trainer's model says of a known prompt; None where it does not.
        model_digest: the shard-independent digest of everything (`codec.model_digest`); None where it is
            not known yet: a push knows it at commit.
        digests: XXH3-128 of the bytes of each part held (`codec.tensor_digest.tensor_digest`), 16 bytes each, in the
            order of `tensors`; None where they are not known yet.
    """

    version: Version
    model_id: str
    tensors: tuple[TensorSpec, ...]
    artifact: ArtifactKind = "model"
    model_digest: str | None = None
    digests: bytes | None = None
    adapter: Adapter | None = None
    canary: Canary | None = None

    def __post_init__(self) -> None:
        check_id("model_id", self.model_id)
        if not self.tensors:
            raise InvalidRequestError("a manifest with no tensors publishes nothing", version=str(self.version))
        if type(self.tensors) is not TensorTable:
            msgspec.structs.force_setattr(self, "tensors", TensorTable.of(self.tensors))
        if self.digests is not None and len(self.digests) != DIGEST_BYTES * len(self.tensors):
            raise InvalidRequestError("there is not one digest a tensor", version=str(self.version))
        check_model_digest(self.model_digest, version=str(self.version))
        if (self.artifact == "lora") != (self.adapter is not None):
            raise InvalidRequestError('a manifest has an adapter where its artifact is "lora", and nowhere else')

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
        """A tensor's digest as `codec.tensor_digest.tensor_digest` writes it; None where it is not known yet."""
        return None if self.digests is None else written_digest(self.digests, self.table.index_of[name])

    def with_digests(self, digests: Mapping[str, str], model_digest: str | None) -> Manifest:
        """The same manifest with digests filled in.

        Args:
            digests: as `codec.tensor_digest.tensor_digest` writes them, by name.
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
