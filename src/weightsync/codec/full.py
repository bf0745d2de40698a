"""The full codec: whole tensors travel as they are, and each side takes their digests on the way."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from weightsync.codec.base import Codec, Decoder, Encoder
from weightsync.codec.digest import tensor_digest, tensor_digests
from weightsync.errors import DigestMismatchError, InvalidRequestError, UnsupportedError
from weightsync.tensors import spec_of
from weightsync.types import Full, Manifest, PatchBase, TensorSpec, Update, WeightChunk


class FullEncoder(Encoder):
    """Passes chunks through unchanged. A chunk's digests are taken, on all cores, before it is handed on."""

    def __init__(self) -> None:
        self._digests: dict[str, str] = {}

    def encode(self, chunks: Iterable[WeightChunk]) -> Iterator[WeightChunk]:
        """See `Encoder.encode`.

        Raises:
            InvalidRequestError: a name comes twice in the stream; chunks before it were handed on.
        """
        for chunk in chunks:
            twice = next((name for name in chunk.names if name in self._digests), None)
            if twice is not None:
                raise InvalidRequestError("the stream has this tensor twice", parameter=twice)
            self._digests.update(tensor_digests(dict(zip(chunk.names, chunk.tensors, strict=True))))
            yield chunk
            del chunk  # whoever took it may let it go

    def digests(self) -> Mapping[str, str]:
        """See `Encoder.digests`."""
        return dict(self._digests)


class FullDecoder(Decoder):
    """Passes updates through. A tensor's digest is taken before it is handed on: its memory is only borrowed."""

    def __init__(self) -> None:
        self._received: dict[str, TensorSpec] = {}

    def decode(self, updates: Iterable[Update]) -> Iterator[Update]:
        """See `Decoder.decode`.

        Raises:
            UnsupportedError: a Patch came, which only a delta has.
            InvalidRequestError: a tensor came twice. Updates before it were handed on.
        """
        for update in updates:
            if not isinstance(update, Full):
                raise UnsupportedError("the full codec takes whole tensors, got a patch", parameter=update.name)
            if update.name in self._received:
                raise InvalidRequestError("the tensor came twice", parameter=update.name)
            spec = spec_of(update.name, update.tensor)
            self._received[update.name] = TensorSpec(
                name=spec.name, dtype=spec.dtype, shape=spec.shape, digest=tensor_digest(update.tensor)
            )
            yield update

    def check(self, manifest: Manifest) -> None:
        """See `Decoder.check`; names the first tensor, in the manifest's order, that is not as published.

        Raises:
            DigestMismatchError: a tensor differs in bytes, dtype or shape, did not come, or is not in the manifest.
            InvalidRequestError: the manifest lacks a digest, so nothing can be proved.
        """
        version = str(manifest.version)
        for spec in manifest.tensors:
            if spec.digest is None:
                raise InvalidRequestError("the manifest has no digest", parameter=spec.name, version=version)
            got = self._received.get(spec.name)
            if got is None:
                raise DigestMismatchError(
                    "the tensor was published and did not come", parameter=spec.name, version=version
                )
            if (got.dtype, got.shape) != (spec.dtype, spec.shape):
                raise DigestMismatchError(
                    f"the tensor came as {got.dtype} {got.shape} and was published as {spec.dtype} {spec.shape}",
                    parameter=spec.name,
                    version=version,
                )
            if got.digest != spec.digest:
                raise DigestMismatchError(
                    "the bytes that came are not those that were published",
                    parameter=spec.name,
                    version=version,
                    published=spec.digest,
                    received=got.digest,
                )
        published = manifest.by_name()
        extra = next((name for name in self._received if name not in published), None)
        if extra is not None:
            raise DigestMismatchError("a tensor came that was not published", parameter=extra, version=version)


class FullCodec(Codec):
    """Whole tensors, unchanged, with a digest of each."""

    name = "full"

    def encoder(self, base: PatchBase | None = None) -> FullEncoder:
        """See `Codec.encoder`.

        Raises:
            UnsupportedError: a base is given: these are whole tensors.
        """
        if base is not None:
            raise UnsupportedError(f"the full codec sends whole tensors, not a change of {base.version}")
        return FullEncoder()

    def decoder(self) -> Decoder:
        """See `Codec.decoder`."""
        return FullDecoder()
