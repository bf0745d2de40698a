"""PublicationLayout: all of a publication that is the same version after version, and what a version says beside it.

Names, dtypes, shapes, places and an adapter's configuration are most of what is said of a publication: some 250 bytes a
tensor. They are sent once, named by the SHA-256 of the very bytes that were sent. Later a version names its layout by
that, and has digests alone. A name by content can't be wrong: whoever sends one, what was checked under it is what it
says.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterable
from functools import cached_property

import msgspec

from weightsync.errors import InvalidRequestError
from weightsync.types.adapter import Adapter
from weightsync.types.canary import Canary
from weightsync.types.manifest import ArtifactKind, Manifest, Version
from weightsync.types.message import learn
from weightsync.types.publication import Publication, Source
from weightsync.types.seal import seal_of
from weightsync.types.spec import Box, TensorSpec
from weightsync.types.table import SpecTable, TensorTable
from weightsync.types.transfer_messages import GrantFacts, TransferGrant

_MAX_KNOWN = 4
"""Of one receiver: a model has one, and another for a while when it has changed."""

_Part = tuple[int, int, int, Box | None]
"""Index of the tensor, index of the source, first byte within it, and the box; none where it is the whole tensor."""


class _Said(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A layout as it travels: a part's name, dtype and shape are those of its tensor, and are not said again."""

    tensors: tuple[TensorSpec, ...]
    parts: list[_Part]
    adapter: Adapter | None = None


class PublicationHead(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A publication without its layout.

    Attributes:
        version, model_id, artifact: of the manifest.
        sources: where it lies.
        layout: digest of the layout.
    """

    version: Version
    model_id: str
    sources: tuple[Source, ...]
    layout: str
    artifact: ArtifactKind = "model"
    canary: Canary | None = None

    def __post_init__(self) -> None:
        if len(self.layout) != 64 or set(self.layout) - set("0123456789abcdef"):
            raise InvalidRequestError("a layout's digest has 64 hex digits")


class PublicationLayout:
    """Tensors and parts of a publication, checked.

    Args:
        tensors: of the manifest.
        parts: of the publication.
        adapter: of the manifest.

    Attributes:
        tensors, parts, adapter: as given; shared by every publication of this layout.
    """

    def __init__(
        self, tensors: Iterable[TensorSpec], parts: Iterable[TensorSpec], adapter: Adapter | None = None
    ) -> None:
        self.adapter = adapter
        self.tensors = TensorTable.of(tensors)
        self.parts = parts if type(parts) is SpecTable else SpecTable(parts)

    @classmethod
    def of(cls, publication: Publication) -> PublicationLayout:
        """The layout of a publication: the same object for publications of the same tables."""
        return publication.table.derive(_layout_of, publication.manifest.table, publication.manifest.adapter)

    @classmethod
    def read(cls, raw: bytes | memoryview, digest: str) -> PublicationLayout:
        """A layout as it travelled.

        Raises:
            InvalidRequestError: it is none, or not the one that `digest` names.
        """
        if hashlib.sha256(raw).hexdigest() != digest:
            raise InvalidRequestError("what came is not the layout that was named: its SHA-256 is another")
        try:
            message = msgspec.json.decode(raw, type=_Said)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise InvalidRequestError(f"a layout does not fit: {error}") from error
        for part in message.parts:
            if not 0 <= part[0] < len(message.tensors):
                raise InvalidRequestError(
                    f"a layout has a part of tensor {part[0]}, and {len(message.tensors)} tensors"
                )
        layout = cls(
            message.tensors, [_spec(message.tensors[part[0]], *part[1:]) for part in message.parts], message.adapter
        )
        layout.__dict__["digest"] = digest
        return layout

    def encode(self) -> bytes:
        """As it travels. Made anew at each call: nobody but an agent needs it twice."""
        index_of = self.tensors.index_of
        parts = [(index_of[part.name], part.source, part.offset, part.box) for part in self.parts]
        raw = msgspec.json.encode(_Said(tensors=tuple(self.tensors), parts=parts, adapter=self.adapter))
        if "digest" not in self.__dict__:
            self.__dict__["digest"] = hashlib.sha256(raw).hexdigest()
        return raw

    @cached_property
    def digest(self) -> str:
        """What names it: SHA-256 of `encode` in hex."""
        return hashlib.sha256(self.encode()).hexdigest()

    def head(self, publication: Publication) -> PublicationHead:
        """What a publication of this layout says besides."""
        manifest = publication.manifest
        return PublicationHead(
            version=manifest.version,
            model_id=manifest.model_id,
            artifact=manifest.artifact,
            canary=manifest.canary,
            sources=publication.sources,
            layout=self.digest,
        )

    def publication(self, head: PublicationHead) -> Publication:
        """The publication that `head` tells of.

        Raises:
            InvalidRequestError: the head is of another layout, or its sources do not go with this one.
        """
        if head.layout != self.digest:
            raise InvalidRequestError("a version's head is of another layout")
        manifest = Manifest(
            version=head.version,
            model_id=head.model_id,
            artifact=head.artifact,
            tensors=self.tensors,
            adapter=self.adapter,
            canary=head.canary,
        )
        return Publication(manifest=manifest, parts=self.parts, sources=head.sources)


class GrantMessage(GrantFacts, frozen=True, kw_only=True):
    """A `TransferGrant` as it travels: its publication is whole, or a head beside a layout.

    Attributes:
        publication: as of `TransferGrant`, for a receiver that knows no layouts.
        head: else.
        layout: the layout that `head` names; null where the receiver has said that it holds it.
    """

    publication: Publication | None = None
    head: PublicationHead | None = None
    layout: msgspec.Raw = msgspec.Raw(b"null")


class KnownLayouts:
    """The layouts that a receiver holds. Thread-safe; the last few are kept."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[str, PublicationLayout] = {}

    def names(self) -> tuple[str, ...]:
        """Their digests."""
        with self._lock:
            return tuple(self._known)

    def grant(self, message: GrantMessage) -> TransferGrant:
        """The grant that a message tells of; a layout that came with it is kept.

        Raises:
            InvalidRequestError: it names a layout that it does not have and that is not held, or one that is none; or
                it is no grant, or was damaged on its way.
        """
        facts = {name: getattr(message, name) for name in GrantFacts.__struct_fields__}
        if message.head is None:
            if message.publication is None:
                raise InvalidRequestError("a grant has a publication, or the head of one")
            _check_seal(message, PublicationLayout.of(message.publication).head(message.publication))
            return TransferGrant(**facts, publication=message.publication)
        _check_seal(message, message.head)
        return TransferGrant(**facts, publication=self._layout(message.head, message.layout).publication(message.head))

    def _layout(self, head: PublicationHead, encoded: msgspec.Raw) -> PublicationLayout:
        with self._lock:
            layout = self._known.pop(head.layout, None)
            if layout is not None:
                self._known[head.layout] = layout
                return layout
        raw = bytes(encoded)
        if raw == b"null":
            raise InvalidRequestError(f"a grant names layout {head.layout}, which was neither sent nor is held")
        layout = PublicationLayout.read(raw, head.layout)
        with self._lock:
            self._known[head.layout] = layout
            while len(self._known) > _MAX_KNOWN:
                del self._known[next(iter(self._known))]
        return layout


def _check_seal(message: GrantMessage, head: PublicationHead) -> None:
    body, proof = msgspec.json.encode(head), msgspec.json.encode(message.proof)
    if message.seal != seal_of(body, proof, source=message.source, incarnation=message.incarnation):
        raise InvalidRequestError("it was damaged on the way: its seal does not fit")


def _layout_of(parts: SpecTable, tensors: TensorTable, adapter: Adapter | None) -> PublicationLayout:
    return PublicationLayout(tensors, parts, adapter)


def _spec(tensor: TensorSpec, source: int, offset: int, box: Box | None) -> TensorSpec:
    return TensorSpec(name=tensor.name, dtype=tensor.dtype, shape=tensor.shape, box=box, source=source, offset=offset)


learn(_Said, PublicationHead, GrantMessage)
