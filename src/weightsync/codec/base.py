"""Codec: what a chunk becomes before it is moved, and back. Knows no transport and no engine."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Iterator, Mapping

from weightsync.errors import ManifestMismatchError
from weightsync.types import AnyUpdateRequest, EngineReply, Manifest, PatchBase, TensorTable, Update, WeightChunk


class Encoder(abc.ABC):
    """The sending half, for one version. Training rank 0 alone runs it."""

    @abc.abstractmethod
    def encode(self, chunks: Iterable[WeightChunk]) -> Iterator[WeightChunk]:
        """Turns chunks into the chunks that travel, lazily, one at a time, in order. It lets go of a chunk before it
        asks for the next.
        """

    @abc.abstractmethod
    def digests(self) -> Mapping[str, str]:
        """Digest of each tensor's plain bytes, by name; complete once `encode` is exhausted. None at all where a base
        and the model's digest are the proof."""


class Decoder(abc.ABC):
    """The receiving half, for one version. Every engine worker runs one."""

    def check_announced(self, request: AnyUpdateRequest, expected: TensorTable) -> None:
        """Refuses a chunk that can't be of this version, before anything is allocated or received.

        Args:
            request: announces it.
            expected: the manifest's tensors.

        Raises:
            ManifestMismatchError: the manifest has no such tensor.
        """
        first = expected.index_of.get(request.names[0], 0)
        run = slice(first, first + len(request.names))
        if (expected.names[run], expected.dtypes[run], expected.shapes[run]) == (
            request.names,
            request.dtypes,
            request.shapes,
        ):
            return
        for name, dtype, shape in zip(request.names, request.dtypes, request.shapes, strict=True):
            spec = expected.by_name.get(name)
            if spec is None:
                raise ManifestMismatchError("a chunk has a tensor that the manifest has not", parameter=name)
            if (spec.dtype, spec.shape) != (dtype, shape):
                raise ManifestMismatchError(
                    f"a chunk has {dtype} {shape}, the manifest {spec.dtype} {spec.shape}", parameter=name
                )

    @abc.abstractmethod
    def decode(self, updates: Iterable[Update]) -> Iterator[Update]:
        """Turns what travelled into what a loader takes, lazily, in order."""

    @abc.abstractmethod
    def check(self, manifest: Manifest) -> None:
        """Proves that the bytes decoded so far are those of `manifest`, which has its digests filled in.

        Raises:
            DigestMismatchError: some tensor differs or did not come; names the first.
        """


class Codec(abc.ABC):
    """A pair of halves. A codec is chosen for a whole sync; both ends use the same.

    Attributes:
        name: how it is called in messages, e.g. "full".
        passes_through: whether the encoder hands out the very tensors that it is given. Only these can be lent where
            they lie.
        why_full: why `base_for` gave no base the last time, in words; None where it never gives one.
    """

    name: str
    passes_through: bool = True
    why_full: str | None = None

    def claim(self, owner: object) -> None:  # noqa: B027  (a hook)
        """A `PushSync` is made with it. One that remembers something belongs to one of them.

        Raises:
            ConfigError: it belongs to another one.
        """

    def base_for(self, replies: Mapping[str, EngineReply], manifest: Manifest) -> PatchBase | None:
        """Training rank 0, before a session begins: what it may be a change of; None: whole tensors.

        Args:
            replies: what each engine of the sync says that it serves.
            manifest: what is to be pushed.
        """
        return None

    @abc.abstractmethod
    def encoder(self, base: PatchBase | None = None) -> Encoder:
        """The sending half for one version; of its change from `base`, which `base_for` gave, where there is one.

        Raises:
            InvalidRequestError, UnsupportedError: it has no such base, or sends no changes. What it remembers stays.
        """

    @abc.abstractmethod
    def decoder(self) -> Decoder:
        """The receiving half for one version of whole tensors; `codec.patch` has that of a change."""

    def close(self) -> None:  # noqa: B027  (a hook)
        """Lets go of what it remembers. Idempotent; the next version is a full one."""

    def ended(self, manifest: Manifest | None, error: BaseException | None = None) -> None:  # noqa: B027  (a hook)
        """The version of the last `encoder` is committed on every engine, as `manifest` says, proved; or failed.

        Args:
            manifest: None after a failure.
            error: what failed.
        """
