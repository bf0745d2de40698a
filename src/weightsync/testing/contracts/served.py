"""One version on its way through a codec: the chunks of a trainer, and what an engine does of what comes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import torch

from weightsync.codec.base import Decoder
from weightsync.codec.digest import digest_of
from weightsync.plan.buckets import plan_bucket
from weightsync.tensors import byte_view, spec_of
from weightsync.types import BroadcastWeightUpdateRequest, EngineReply, Full, HeldTensor, Manifest, Update, WeightChunk

Weights = dict[str, torch.Tensor]


class ServedWeights:
    """What an engine does of a sync: it serves what was proved, and after a failure what it served before."""

    def __init__(self) -> None:
        self.live: Weights = {}
        self.proved: Manifest | None = None

    def replies(self, **changes: Any) -> dict[str, EngineReply]:
        """What this engine and another that serves the same say; `changes` are the other's."""
        reply = EngineReply(engine_id="a", accepts=("full", "patch"))
        if self.proved is not None:
            version, digest = self.proved.version, self.proved.model_digest
            reply = msgspec.structs.replace(reply, version=version, model_digest=digest)
        return {"a": reply, "b": msgspec.structs.replace(reply, engine_id="b", **changes)}

    def receive(self, chunk: WeightChunk, decoder: Decoder, manifest: Manifest, staged: Weights) -> None:
        """Takes a chunk as a worker does, from memory that is the next chunk's afterwards."""
        decoder.check_announced(announced(chunk), manifest.table)
        borrowed = [tensor.detach().clone() for tensor in chunk.tensors]
        for update in decoder.decode([Full(name=n, tensor=t) for n, t in zip(chunk.names, borrowed, strict=True)]):
            staged[update.name] = _applied(staged.get(update.name), update)
        for tensor in borrowed:
            byte_view(tensor).fill_(0xEE)


def chunks_of(weights: Mapping[str, torch.Tensor], size: int = 2) -> Iterator[WeightChunk]:
    for start in range(0, len(weights), size):
        names = tuple(weights)[start : start + size]
        yield WeightChunk(names=names, tensors=tuple(weights[name] for name in names))


def announced(chunk: WeightChunk) -> BroadcastWeightUpdateRequest:
    layout = plan_bucket([tensor.nbytes for tensor in chunk.tensors])
    return BroadcastWeightUpdateRequest(
        session="a session", seq=0, names=chunk.names, dtypes=chunk.dtypes, shapes=chunk.shapes,
        offsets=layout.offsets, bucket_bytes=layout.total_bytes,
    )  # fmt: skip


def _applied(live: torch.Tensor | None, update: Update) -> torch.Tensor:
    if isinstance(update, Full):
        return update.tensor.clone()
    assert live is not None
    patched = live.clone()
    elements = byte_view(patched).view(-1, patched.element_size())
    elements[update.positions.to(torch.int64)] = byte_view(update.values).view(-1, patched.element_size())
    return patched


def digest_of_all(weights: Weights) -> str:
    held = [HeldTensor(spec=spec_of(name, tensor), box=None, tensor=tensor) for name, tensor in weights.items()]
    return digest_of(held, [part.spec for part in held])
