"""StagedVersions: what a pull leaves on a host (shared memory, digests, changes to and fro), to measure pauses with."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch

from weightsync.codec.digest import digest_of, patch_sum
from weightsync.codec.model_digest import ShardSum, patched_digest
from weightsync.codec.tensor_digest import tensor_digests
from weightsync.host.staged_version import PatchedTensor, StagedPatch, StagedVersion
from weightsync.memory import Segment
from weightsync.plan.buckets import plan_bucket
from weightsync.tensors import byte_view, spec_of, tensor_from_bytes
from weightsync.types import HeldTensor, Manifest, TensorSpec, Version
from weightsync.types.transfer_messages import Transport


class StagedVersions:
    """A model, and for each density a change of it; each version that it gives has the next number.

    A context manager: at its end the shared memory is given back.

    Args:
        model: bf16 tensors by name; they are copied.
        densities: shares of changed elements, at random places.
    """

    def __init__(self, model: Mapping[str, torch.Tensor], densities: Sequence[float]) -> None:
        rng = np.random.default_rng(0)
        self._stack = contextlib.ExitStack()
        self._specs = tuple(spec_of(name, tensor) for name, tensor in model.items())
        self._tensor_digests = tensor_digests(dict(model))
        self._number = -1
        self._staging, self._offsets = self._filled(list(model.values()))
        held = [HeldTensor(spec=spec, box=None, tensor=model[spec.name]) for spec in self._specs]
        self._digest = digest_of(held, self._specs)
        self._other: tuple[Segment, Mapping[str, str], str] | None = None
        self._changes: dict[float, tuple[str, list[torch.Tensor], list[int], Segment]] = {}
        for density in densities:
            parts: list[torch.Tensor] = []
            total = ShardSum.zero()
            for spec in self._specs:
                flat = model[spec.name].reshape(-1)
                mask = rng.random(flat.numel(), dtype=np.float32) < density
                where = torch.from_numpy(np.flatnonzero(mask).astype(np.uint32))
                old = flat[where.to(torch.int64)]
                new = (old.view(torch.int16) ^ 1).view(torch.bfloat16)
                total += patch_sum(spec, where, old, new)
                parts += [where, old, new]
            segment, offsets = self._filled(parts)
            self._changes[density] = patched_digest(self._digest, total), parts, offsets, segment

    def __enter__(self) -> StagedVersions:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _filled(self, tensors: list[torch.Tensor]) -> tuple[Segment, list[int]]:
        layout = plan_bucket([tensor.nbytes for tensor in tensors])
        segment = Segment(layout.total_bytes)
        self._stack.callback(segment.close)
        memory = torch.frombuffer(segment.memory, dtype=torch.uint8)
        for tensor, offset in zip(tensors, layout.offsets, strict=True):
            memory[offset : offset + tensor.nbytes] = byte_view(tensor)
        return segment, list(layout.offsets)

    def whole(self) -> StagedVersion:
        """The model itself."""
        return self._staged(self._digest, None)

    def negated(self) -> StagedVersion:
        """Another one, of which every element differs. Made at the first call, in as much memory again."""
        if self._other is None:
            model = {spec.name: -self._tensor(spec) for spec in self._specs}
            held = [HeldTensor(spec=spec, box=None, tensor=model[spec.name]) for spec in self._specs]
            segment, _ = self._filled(list(model.values()))
            self._other = segment, tensor_digests(model), digest_of(held, self._specs)
        segment, digests, digest = self._other
        return dataclasses.replace(self._staged(digest, None, digests), segment=segment.name, release=lambda: None)

    def _tensor(self, spec: TensorSpec) -> torch.Tensor:
        at = self._offsets[self._specs.index(spec)]
        flat = torch.frombuffer(self._staging.memory, dtype=torch.uint8)[at : at + spec.nbytes]
        return tensor_from_bytes(flat, dtype=spec.dtype, shape=spec.shape)

    def changed(self, density: float, *, back: bool) -> StagedVersion:
        """With that many of its elements changed; or, after that, as it was."""
        digest, parts, offsets, segment = self._changes[density]
        patch = StagedPatch(
            base=Version(run_id="bench", number=self._number),
            base_digest=digest if back else self._digest,
            segment=segment.name,
            tensors=tuple(
                PatchedTensor(
                    name=spec.name, count=parts[3 * index].numel(), positions_offset=offsets[3 * index],
                    values_offset=offsets[3 * index + (1 if back else 2)],
                )
                for index, spec in enumerate(self._specs)
            ),
        )  # fmt: skip
        return self._staged(self._digest if back else digest, patch)

    def elements(self, density: float, *, back: bool) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """Names, positions and values of the same change."""
        _, parts, _, _ = self._changes[density]
        for index, spec in enumerate(self._specs):
            yield spec.name, parts[3 * index].to(torch.int64), parts[3 * index + (1 if back else 2)]

    def _staged(
        self, digest: str, patch: StagedPatch | None, digests: Mapping[str, str] | None = None
    ) -> StagedVersion:
        self._number += 1
        manifest = Manifest(version=Version(run_id="bench", number=self._number), model_id="bench", tensors=self._specs)
        return StagedVersion(
            manifest=manifest.with_digests(digests or self._tensor_digests, digest),
            segment=self._staging.name,
            offsets={spec.name: at for spec, at in zip(self._specs, self._offsets, strict=True)},
            transport=Transport.TCP,
            num_attempts=1,
            release=lambda: None,
            patch=patch,
        )
