"""The full codec: whole tensors travel as they are, and each side takes their digests on the way."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from weightsync.codec.base import Codec, Decoder, Encoder
from weightsync.codec.digest import tensor_digest, tensor_digests
from weightsync.codec.packed import packed_digests
from weightsync.errors import DigestMismatchError, InvalidRequestError, UnsupportedError
from weightsync.tensors import PackedUpdates
from weightsync.types import Full, Manifest, PatchBase, Update, WeightChunk, dtype_name
from weightsync.types.table import DIGEST_BYTES, packed_digest, written_digest

_Received = tuple[str, tuple[int, ...], bytes]
"""Dtype, shape and digest of a tensor that came."""


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
        self._received: dict[str, _Received] = {}

    def decode(self, updates: Iterable[Update]) -> Iterator[Update]:
        """See `Decoder.decode`.

        Raises:
            UnsupportedError: a Patch came, which only a delta has.
            InvalidRequestError: a tensor came twice. Updates before it were handed on.
        """
        if not isinstance(updates, PackedUpdates):
            return self._decode_each(updates)
        digests = packed_digests(updates.bucket, updates.offsets, updates.sizes)
        for name, dtype, shape, digest in zip(updates.names, updates.dtypes, updates.shapes, digests, strict=True):
            self._note(name, (dtype, shape, digest))
        return updates

    def _decode_each(self, updates: Iterable[Update]) -> Iterator[Update]:
        for update in updates:
            if not isinstance(update, Full):
                raise UnsupportedError("the full codec takes whole tensors, got a patch", parameter=update.name)
            tensor = update.tensor
            digest = packed_digest(tensor_digest(tensor))
            self._note(update.name, (dtype_name(tensor.dtype), tuple(tensor.shape), digest))
            yield update

    def _note(self, name: str, received: _Received) -> None:
        if self._received.setdefault(name, received) is not received:
            raise InvalidRequestError("the tensor came twice", parameter=name)

    def check(self, manifest: Manifest) -> None:
        """See `Decoder.check`; names the first tensor, in the manifest's order, that is not as published.

        Raises:
            DigestMismatchError: a tensor differs in bytes, dtype or shape, did not come, or is not in the manifest.
            InvalidRequestError: the manifest lacks the digests, so nothing can be proved.
        """
        version = str(manifest.version)
        digests = manifest.digests
        if digests is None:
            raise InvalidRequestError("the manifest has no digests", version=version)
        for index, spec in enumerate(manifest.tensors):
            got = self._received.get(spec.name)
            published = digests[DIGEST_BYTES * index : DIGEST_BYTES * (index + 1)]
            if got is not None and got[2] == published and got[0] == spec.dtype and got[1] == spec.shape:
                continue
            if got is None:
                raise DigestMismatchError(
                    "the tensor was published and did not come", parameter=spec.name, version=version
                )
            if got[:2] != (spec.dtype, spec.shape):
                raise DigestMismatchError(
                    f"the tensor came as {got[0]} {got[1]} and was published as {spec.dtype} {spec.shape}",
                    parameter=spec.name,
                    version=version,
                )
            raise DigestMismatchError(
                "the bytes that came are not those that were published",
                parameter=spec.name,
                version=version,
                published=written_digest(published, 0),
                received=written_digest(got[2], 0),
            )
        if len(self._received) != len(manifest.tensors):
            extra = next(iter(self._received.keys() - manifest.by_name().keys()))
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
