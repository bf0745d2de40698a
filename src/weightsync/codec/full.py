"""The full codec: whole tensors travel as they are, and each side takes their digests on the way."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence

from weightsync.codec.base import Codec, Decoder, Encoder
from weightsync.codec.tensor_digest import bucket_digests, packed_digests
from weightsync.errors import DigestMismatchError, InvalidRequestError, UnsupportedError, WeightSyncError
from weightsync.tensors import PackedUpdates
from weightsync.types import Full, Manifest, PatchBase, Update, WeightChunk, dtype_name
from weightsync.types.table import DIGEST_BYTES, PackedDigests, written_digest

_BATCH_TENSORS = 4096
_TWICE = "the tensor came twice"


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Received:
    """Tensors that came together. All sequences have one entry a tensor; `digests` has `DIGEST_BYTES`."""

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    digests: bytes


class FullEncoder(Encoder):
    """Passes chunks through unchanged. A chunk's digests are taken, on all cores, before it is handed on."""

    def __init__(self) -> None:
        self._names: dict[str, None] = {}
        self._digests: list[bytes] = []

    def encode(self, chunks: Iterable[WeightChunk]) -> Iterator[WeightChunk]:
        """See `Encoder.encode`.

        Raises:
            InvalidRequestError: a name comes twice in the stream; chunks before it were handed on.
        """
        for chunk in chunks:
            if not self._names.keys().isdisjoint(chunk.names):
                twice = next(name for name in chunk.names if name in self._names)
                raise InvalidRequestError("the stream has this tensor twice", parameter=twice)
            self._names.update(dict.fromkeys(chunk.names))
            self._digests.append(packed_digests(chunk.tensors))
            yield chunk
            del chunk  # whoever took it may let it go

    def digests(self) -> Mapping[str, str]:
        return PackedDigests(tuple(self._names), b"".join(self._digests))


class FullDecoder(Decoder):
    """Passes updates through. A tensor's digest is taken before it is handed on: its memory is only borrowed.

    Where a chunk's tensors are all there at once (a sequence of updates), their digests are taken together.
    """

    def __init__(self) -> None:
        self._names: set[str] = set()
        self._received: list[_Received] = []

    def decode(self, updates: Iterable[Update]) -> Iterator[Update]:
        """See `Decoder.decode`.

        Raises:
            UnsupportedError: a Patch came, which only a delta has.
            InvalidRequestError: a tensor came twice. Updates before it were handed on.
        """
        if not isinstance(updates, PackedUpdates):
            return self._decode_each(updates)
        if not self._names.isdisjoint(updates.names) or len(set(updates.names)) != len(updates.names):
            counts = collections.Counter((*self._names, *updates.names))
            raise InvalidRequestError(_TWICE, parameter=next(name for name in updates.names if counts[name] > 1))
        digests = b"".join(bucket_digests(updates.bucket, updates.offsets, updates.sizes))
        self._note(updates.names, updates.dtypes, updates.shapes, digests)
        return updates

    def _note(
        self, names: tuple[str, ...], dtypes: tuple[str, ...], shapes: tuple[tuple[int, ...], ...], digests: bytes
    ) -> None:
        self._names.update(names)
        self._received.append(_Received(names=names, dtypes=dtypes, shapes=shapes, digests=digests))

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
            if update.name in self._names:
                failed = InvalidRequestError(_TWICE, parameter=update.name)
                break
            self._names.add(update.name)
            good.append(update)
        self._note(
            tuple(update.name for update in good),
            tuple(dtype_name(update.tensor.dtype) for update in good),
            tuple(tuple(update.tensor.shape) for update in good),
            packed_digests([update.tensor for update in good]),
        )
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
        if self._is_just(manifest):
            return
        received: dict[str, tuple[str, tuple[int, ...], bytes]] = {}
        for run in self._received:
            for place, (name, dtype, shape) in enumerate(zip(run.names, run.dtypes, run.shapes, strict=True)):
                received[name] = dtype, shape, run.digests[DIGEST_BYTES * place : DIGEST_BYTES * (place + 1)]
        for index, spec in enumerate(manifest.tensors):
            got = received.get(spec.name)
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
        if len(received) > len(manifest.tensors):
            published = manifest.by_name()
            extra = next(name for name in received if name not in published)
            raise DigestMismatchError("a tensor came that was not published", parameter=extra, version=version)

    def _is_just(self, manifest: Manifest) -> bool:
        """Whether what came is what the manifest has, in its order: most of the time, and seen without a loop."""
        start, table = 0, manifest.table
        for run in self._received:
            end = start + len(run.names)
            here = (table.names[start:end], table.dtypes[start:end], table.shapes[start:end])
            if here != (run.names, run.dtypes, run.shapes):
                return False
            start = end
        return start == len(table) and b"".join(run.digests for run in self._received) == manifest.digests


class FullCodec(Codec):
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
        return FullDecoder()
