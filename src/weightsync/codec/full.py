"""The full codec: whole tensors travel as they are, and each side takes their digests on the way."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from weightsync.codec.base import Codec, Decoder, Encoder
from weightsync.codec.digest import packed_digests, tensor_digests
from weightsync.codec.packed import bucket_digests
from weightsync.errors import DigestMismatchError, InvalidRequestError, UnsupportedError, WeightSyncError
from weightsync.tensors import PackedUpdates
from weightsync.types import Full, Manifest, PatchBase, Update, WeightChunk, dtype_name
from weightsync.types.table import DIGEST_BYTES, written_digest

_BATCH_TENSORS = 4096

_Received = tuple[str, tuple[int, ...], bytes]
"""Dtype, shape and packed digest of what came."""

_NOT_YET: _Received = ("", (), b"")


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
    """Passes updates through. A tensor's digest is taken before it is handed on: its memory is only borrowed.

    Where a chunk's tensors are all there at once (a sequence of updates), their digests are taken together.
    """

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
        digests = bucket_digests(updates.bucket, updates.offsets, updates.sizes)
        for name, dtype, shape, digest in zip(updates.names, updates.dtypes, updates.shapes, digests, strict=True):
            if name in self._received:
                raise InvalidRequestError("the tensor came twice", parameter=name)
            self._received[name] = dtype, shape, digest
        return updates

    def _decode_each(self, updates: Iterable[Update]) -> Iterator[Update]:
        if isinstance(updates, Sequence):  # all of them are there, and stay there until the loader is done
            for start in range(0, len(updates), _BATCH_TENSORS):
                yield from self._together(updates[start : start + _BATCH_TENSORS])
            return
        for update in updates:
            yield from self._together((update,))

    def _together(self, updates: Sequence[Update]) -> Iterator[Update]:
        good: list[Full] = []
        failed: WeightSyncError | None = None
        for update in updates:
            if not isinstance(update, Full):
                failed = UnsupportedError("the full codec takes whole tensors, got a patch", parameter=update.name)
                break
            if update.name in self._received:
                failed = InvalidRequestError("the tensor came twice", parameter=update.name)
                break
            self._received[update.name] = _NOT_YET
            good.append(update)
        digests = packed_digests([update.tensor for update in good])
        for index, update in enumerate(good):
            digest = digests[DIGEST_BYTES * index : DIGEST_BYTES * (index + 1)]
            self._received[update.name] = dtype_name(update.tensor.dtype), update.tensor.shape, digest
        yield from good
        if failed is not None:
            raise failed

    def check(self, manifest: Manifest) -> None:
        """See `Decoder.check`; names the first tensor, in the manifest's order, that is not as published.

        Raises:
            DigestMismatchError: a tensor differs in bytes, dtype or shape, did not come, or is not in the manifest.
            InvalidRequestError: the manifest lacks digests, so nothing can be proved.
        """
        version = str(manifest.version)
        if manifest.digests is None:
            raise InvalidRequestError("the manifest has no digests", version=version)
        for index, spec in enumerate(manifest.tensors):
            got = self._received.get(spec.name)
            if got is None:
                raise DigestMismatchError(
                    "the tensor was published and did not come", parameter=spec.name, version=version
                )
            dtype, shape, digest = got
            if dtype != spec.dtype or shape != spec.shape:
                raise DigestMismatchError(
                    f"the tensor came as {dtype} {tuple(shape)} and was published as {spec.dtype} {spec.shape}",
                    parameter=spec.name,
                    version=version,
                )
            if digest != manifest.digests[DIGEST_BYTES * index : DIGEST_BYTES * (index + 1)]:
                raise DigestMismatchError(
                    "the bytes that came are not those that were published",
                    parameter=spec.name,
                    version=version,
                    published=written_digest(manifest.digests, index),
                    received=written_digest(digest, 0),
                )
        if len(self._received) > len(manifest.tensors):
            published = manifest.by_name()
            extra = next(name for name in self._received if name not in published)
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
