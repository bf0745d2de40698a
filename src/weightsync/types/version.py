"""Version: what a publication is called, and the form of a model's digest."""

from __future__ import annotations

import re

import msgspec

from weightsync.errors import InvalidRequestError, VersionError
from weightsync.types.spec import check_id

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
