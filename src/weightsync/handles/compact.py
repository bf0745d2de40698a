"""The steps of a sync, as they are said to an engine that has the list of tensors already.

A model's names, dtypes and shapes are the same from version to version: its layout. It is said once, in full, and named
by its digest afterwards; here it is the manifest's `TensorTable`. What is left of a version is its digests, and of a
chunk its place in the layout. Only HTTP knows these forms: on either side of it stand the requests of `types.engine`,
which are checked as ever.
"""

from __future__ import annotations

import hashlib
import threading
from typing import Any

import msgspec

from weightsync.errors import EngineError, InvalidRequestError, UnknownLayoutError
from weightsync.plan.buckets import plan_bucket
from weightsync.types import (
    AnyUpdateRequest,
    BeginRequest,
    BroadcastWeightUpdateRequest,
    EngineOp,
    EngineRequest,
    Manifest,
    MemoryHandle,
    PackedCudaIpcWeightUpdateRequest,
    PatchBase,
    StageRequest,
    TensorTable,
    UpdateRequest,
    Version,
)
from weightsync.types.adapter import Adapter
from weightsync.types.canary import Canary
from weightsync.types.manifest import ArtifactKind
from weightsync.types.message import Message, learn
from weightsync.types.requests import MAX_TENSORS_A_CHUNK
from weightsync.types.table import SpecTable

_PREFIX = "wsl1:"

COMPACT_HEADER = "weightsync-layout"
"""In a request: its body is in the compact form, of that layout. In an answer: the server has kept this layout."""

_MAX_LAYOUTS = 4
_MAX_TENSORS_KEPT = 2 * MAX_TENSORS_A_CHUNK


def layout_digest(tensors: TensorTable) -> str:
    """What names a layout: "wsl1:" and the SHA-256, in hex, of the tensors as JSON."""
    return tensors.derive(_digest)


def _digest(tensors: SpecTable) -> str:
    return _PREFIX + hashlib.sha256(msgspec.json.encode(tensors)).hexdigest()


class KnownLayouts:
    """The layouts that a server keeps: the last few, of a bounded number of tensors. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._layouts: dict[str, TensorTable] = {}  # least recently used first

    def keep(self, layout: TensorTable) -> str:
        """Its digest, by which `named` finds it from now on."""
        digest = layout_digest(layout)
        with self._lock:
            self._layouts[digest] = self._layouts.pop(digest, layout)
            while len(self._layouts) > 1 and (
                len(self._layouts) > _MAX_LAYOUTS
                or sum(len(kept) for kept in self._layouts.values()) > _MAX_TENSORS_KEPT
            ):
                del self._layouts[next(iter(self._layouts))]
        return digest

    def named(self, digest: str) -> TensorTable:
        """The layout of that digest.

        Raises:
            UnknownLayoutError: it is not kept here, any more or yet.
        """
        with self._lock:
            layout = self._layouts.pop(digest, None)
            if layout is not None:
                self._layouts[digest] = layout
                return layout
        raise UnknownLayoutError(
            f"no layout {digest[:80]!r} is known here: say the request in full", state_left="nothing was changed"
        )


class ToldLayout:
    """The layout that a client's server has said to keep. Thread-safe.

    The client says begin in full, and the server answers with the digest of the layout that it has read and kept; from
    then on requests of that layout are said in their compact form, until the server does not know it any more.
    """

    def __init__(self) -> None:
        self._told: TensorTable | None = None

    def shortened(self, request: EngineRequest) -> CompactRequest | None:
        """The compact form; None where the server can't read it, or there is none."""
        layout = self._told
        return None if layout is None else shortened(request, layout)

    def forget(self) -> None:
        """The server does not know it any more."""
        self._told = None

    def answered(self, request: EngineRequest, digest: str | None) -> None:
        """A request in full went well.

        Args:
            request: that one.
            digest: of the layout that the server says to keep; None where it says nothing of the kind.

        Raises:
            EngineError: the server has read another layout than it was sent.
        """
        if not isinstance(request, BeginRequest) or digest is None:
            return
        layout = request.manifest.table
        if layout_digest(layout) != digest:
            raise EngineError(
                f"the engine has read layout {digest[:80]!r} where {layout_digest(layout)} was sent: its weightsync is "
                "another one, or something between changes what is sent"
            )
        self._told = layout


class CompactManifest(Message, frozen=True, kw_only=True, omit_defaults=True):
    """A manifest without its tensors.

    Attributes:
        layout: digest of the layout that has them.
        digests: 16 bytes a tensor, in the layout's order; None where they are not known yet.
    """

    version: Version
    model_id: str
    artifact: ArtifactKind
    model_digest: str | None
    layout: str
    digests: bytes | None
    adapter: Adapter | None = None
    canary: Canary | None = None


class CompactBegin(Message, frozen=True, kw_only=True):
    """See `BeginRequest`."""

    session: str
    manifest: CompactManifest
    deadline_s: float
    base: PatchBase | None


class CompactStage(Message, frozen=True, kw_only=True):
    """See `StageRequest`."""

    session: str
    manifest: CompactManifest


class _CompactChunk(Message, frozen=True, kw_only=True, tag_field="kind"):
    """A chunk that is a run of the layout's tensors.

    Attributes:
        layout: digest of the layout.
        first: place of its first tensor in there.
        num_tensors: how many follow one another, from that on.
        offsets: of each in the bucket; None where they are those of `plan_bucket`.
    """

    session: str
    seq: int
    layout: str
    first: int
    num_tensors: int
    offsets: tuple[int, ...] | None


class CompactBroadcast(_CompactChunk, frozen=True, kw_only=True, tag="broadcast"):
    """See `BroadcastWeightUpdateRequest`."""

    bucket_bytes: int


class CompactPackedIpc(_CompactChunk, frozen=True, kw_only=True, tag="packed_cuda_ipc"):
    """See `PackedCudaIpcWeightUpdateRequest`."""

    handles: tuple[MemoryHandle, ...]


class CompactUpdate(Message, frozen=True, kw_only=True):
    """See `UpdateRequest`."""

    update: CompactBroadcast | CompactPackedIpc


CompactRequest = CompactBegin | CompactStage | CompactUpdate

COMPACT_TYPES: dict[EngineOp, type[CompactRequest]] = {
    EngineOp.BEGIN: CompactBegin,
    EngineOp.STAGE: CompactStage,
    EngineOp.UPDATE_WEIGHTS: CompactUpdate,
}

learn(*COMPACT_TYPES.values())


def layout_named_in(message: CompactRequest) -> str:
    """Digest of the layout that `expanded` needs."""
    return message.update.layout if isinstance(message, CompactUpdate) else message.manifest.layout


def shortened(request: EngineRequest, layout: TensorTable) -> CompactRequest | None:
    """The compact form of a request; None where it has none, or is not one of this layout."""
    if isinstance(request, UpdateRequest):
        chunk = _short_chunk(request.update, layout)
        return None if chunk is None else CompactUpdate(update=chunk)
    if not isinstance(request, (BeginRequest, StageRequest)) or layout != request.manifest.tensors:
        return None
    manifest = CompactManifest(layout=layout_digest(layout), **_fields(request.manifest, "tensors"))
    kind = CompactBegin if isinstance(request, BeginRequest) else CompactStage
    return kind(manifest=manifest, **_fields(request, "manifest"))


def expanded(message: CompactRequest, layout: TensorTable) -> EngineRequest:
    """The request that `shortened` was given; what can't be is refused as there.

    Raises:
        InvalidRequestError: it names tensors that the layout has not, or has not one digest a tensor.
    """
    if isinstance(message, CompactUpdate):
        return UpdateRequest(update=_whole_chunk(message.update, layout))
    manifest = Manifest(tensors=layout, **_fields(message.manifest, "layout"))
    kind = BeginRequest if isinstance(message, CompactBegin) else StageRequest
    return kind(manifest=manifest, **_fields(message, "manifest"))


def _short_chunk(request: AnyUpdateRequest, layout: TensorTable) -> CompactBroadcast | CompactPackedIpc | None:
    if not isinstance(request, (BroadcastWeightUpdateRequest, PackedCudaIpcWeightUpdateRequest)):
        return None
    first = layout.index_of.get(request.names[0], 0)
    run = slice(first, first + len(request.names))
    if (layout.names[run], layout.dtypes[run], layout.shapes[run]) != (request.names, request.dtypes, request.shapes):
        return None
    usual = request.offsets == plan_bucket(layout.sizes_bytes[run]).offsets
    return (CompactBroadcast if isinstance(request, BroadcastWeightUpdateRequest) else CompactPackedIpc)(
        layout=layout_digest(layout),
        first=first,
        num_tensors=len(request.names),
        offsets=None if usual else request.offsets,
        **_fields(request, "names", "dtypes", "shapes", "sizes", "offsets"),
    )


def _whole_chunk(chunk: CompactBroadcast | CompactPackedIpc, layout: TensorTable) -> AnyUpdateRequest:
    if not (chunk.first >= 0 and 1 <= chunk.num_tensors <= len(layout) - chunk.first):
        raise InvalidRequestError(
            f"a chunk of {chunk.num_tensors} tensors from number {chunk.first} on is not one of the layout's "
            f"{len(layout)}"
        )
    run = slice(chunk.first, chunk.first + chunk.num_tensors)
    sizes = layout.sizes_bytes[run]
    facts: dict[str, Any] = {
        **_fields(chunk, "layout", "first", "num_tensors"),
        "names": layout.names[run],
        "dtypes": layout.dtypes[run],
        "shapes": layout.shapes[run],
        "offsets": plan_bucket(sizes).offsets if chunk.offsets is None else chunk.offsets,
    }
    if isinstance(chunk, CompactBroadcast):
        return BroadcastWeightUpdateRequest(**facts)
    return PackedCudaIpcWeightUpdateRequest(**facts, sizes=sizes)


def _fields(message: msgspec.Struct, *left_out: str) -> dict[str, Any]:
    """What a message says, less some of it."""
    return {name: getattr(message, name) for name in message.__struct_fields__ if name not in left_out}
