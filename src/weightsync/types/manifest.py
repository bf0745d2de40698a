"""Version and Manifest: what a publication is called and what is in it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal

import msgspec

from weightsync.errors import InvalidRequestError, VersionError
from weightsync.types.spec import TensorSpec

MODEL_DIGEST_PREFIX = "wsd2:"
"""What a model digest begins with: the number of its definition (`codec.digest`)."""


class Version(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A version within a run: an integer that rises with the trainer's steps.

    A restarted trainer has a new `run_id`; nobody compares versions across runs, so there is no `<`.
    """

    run_id: str
    number: int

    def __post_init__(self) -> None:
        if not self.run_id or len(self.run_id) > 256:
            raise InvalidRequestError("a run_id has 1 to 256 characters")
        if self.number < 0:
            raise InvalidRequestError(f"a version is not negative, got {self.number}")

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
        tensors: in the order of the stream; names are unique.
        artifact: kind of artifact, "model" so far.
        model_digest: the shard-independent digest of everything (`codec.digest`); None where it is
            not known yet: a push knows it at commit.
    """

    version: Version
    model_id: str
    tensors: tuple[TensorSpec, ...]
    artifact: Literal["model"] = "model"
    model_digest: str | None = None

    def __post_init__(self) -> None:
        if not self.tensors:
            raise InvalidRequestError("a manifest with no tensors publishes nothing", version=str(self.version))
        seen: set[str] = set()
        for spec in self.tensors:
            if spec.name in seen:
                raise InvalidRequestError("a manifest names every tensor once", parameter=spec.name)
            seen.add(spec.name)
        check_model_digest(self.model_digest, version=str(self.version))

    @property
    def total_bytes(self) -> int:
        """Bytes of all parts held."""
        return sum(spec.nbytes for spec in self.tensors)

    def by_name(self) -> dict[str, TensorSpec]:
        """The specs by their names, in order."""
        return {spec.name: spec for spec in self.tensors}

    def with_digests(self, digests: Mapping[str, str], model_digest: str | None) -> Manifest:
        """The same manifest with digests filled in.

        Raises:
            InvalidRequestError: `digests` lacks a tensor or has one that is not in the manifest.
        """
        if set(digests) != {spec.name for spec in self.tensors}:
            odd = sorted(set(digests) ^ {spec.name for spec in self.tensors})[:5]
            raise InvalidRequestError(f"digests and manifest disagree on {odd}", version=str(self.version))
        tensors = tuple(msgspec.structs.replace(spec, digest=digests[spec.name]) for spec in self.tensors)
        return msgspec.structs.replace(self, tensors=tensors, model_digest=model_digest)


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
