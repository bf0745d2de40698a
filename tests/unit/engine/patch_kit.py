"""Versions and their patches in shared memory, as a puller leaves them, and engines of some workers."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn

from weightsync.codec.digest import PartSums, digest_of
from weightsync.codec.tensor_digest import tensor_digest
from weightsync.engine import audit
from weightsync.engine.embedded import EmbeddedEngine
from weightsync.engine.worker import EngineWorker
from weightsync.host.engine_update import EngineUpdate, LoadReport
from weightsync.host.staged_version import PatchedTensor, StagedPatch, StagedVersion
from weightsync.load.module import ModuleWeightLoader
from weightsync.memory import Segment
from weightsync.plan.buckets import plan_bucket
from weightsync.tensors import byte_view, spec_of
from weightsync.testing.contracts import bytes_of
from weightsync.testing.contracts.loader_patches import patches_of
from weightsync.types import Deadline, HeldTensor, Manifest, Patch, Version
from weightsync.types.transfer_messages import Transport

MODEL_ID = "m"
LONG_S = 20.0


class Mixed(nn.Module):
    """Tensors of every kind that a patch treats differently."""

    def __init__(self) -> None:
        super().__init__()
        for name, tensor in weights(0).items():
            self.register_buffer(name, tensor.t() if name == "turned" else tensor)


def weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def words(size: int) -> torch.Tensor:
        return torch.randint(0, 256, (size,), generator=generator, dtype=torch.uint8)

    made = {
        "bf16": words(400).view(torch.bfloat16).reshape(20, 10),
        "fp16": words(60).view(torch.float16),
        "fp32": words(200).view(torch.float32),
        "int64": words(160).view(torch.int64),
        "mask": words(33) > 127,
        "fp8": words(45).view(torch.float8_e4m3fn).reshape(5, 9),
        "turned": words(96).view(torch.float32).reshape(4, 6),
        "step": torch.tensor(seed),
        "none": torch.empty(0, 3),
    }
    return made if seed else made | {"turned": made["turned"].t().contiguous()}


def version(number: int, run_id: str = "run") -> Version:
    return Version(run_id=run_id, number=number)


def manifest_of(tensors: Mapping[str, torch.Tensor], number: int, run_id: str = "run") -> Manifest:
    specs = tuple(spec_of(name, tensor) for name, tensor in tensors.items())
    made = Manifest(version=version(number, run_id), model_id=MODEL_ID, tensors=specs)
    held = [HeldTensor(spec=spec_of(name, tensor), box=None, tensor=tensor) for name, tensor in tensors.items()]
    return made.with_digests(
        {name: tensor_digest(tensor) for name, tensor in tensors.items()}, digest_of(held, made.tensors)
    )


def in_segment(tensors: list[torch.Tensor]) -> tuple[Segment, list[int]]:
    """A segment with these tensors' bytes, and where each is."""
    layout = plan_bucket([tensor.nbytes for tensor in tensors])
    segment = Segment(layout.total_bytes)
    memory = torch.frombuffer(segment.memory, dtype=torch.uint8)
    for tensor, offset in zip(tensors, layout.offsets, strict=True):
        memory[offset : offset + tensor.nbytes] = byte_view(tensor.contiguous())
    return segment, list(layout.offsets)


class Trainer:
    """Makes version after version, each a small change of the one before, and its patch."""

    def __init__(self, seed: int = 1, run_id: str = "run") -> None:
        self.run_id = run_id
        self.number = 1
        self.weights = weights(seed)
        self.manifest = manifest_of(self.weights, 1, run_id)
        self.segments: list[Segment] = []
        self.patch: StagedPatch | None = None
        self.patches: list[Patch] = []

    def step(self, *, share: float = 0.2) -> None:
        base = self.manifest
        self.number += 1
        self.patches, self.weights = patches_of(self.weights, self.number, share=share)
        self.manifest = manifest_of(self.weights, self.number, self.run_id)
        self.patch = self.patch_on(base)

    def patch_on(self, base: Manifest) -> StagedPatch:
        """The latest change, in a segment of its own."""
        parts = [part for update in self.patches for part in (update.positions, update.values)]
        segment, offsets = in_segment(parts)
        self.segments.append(segment)
        assert base.model_digest is not None
        return StagedPatch(
            base=base.version,
            base_digest=base.model_digest,
            segment=segment.name,
            tensors=tuple(
                PatchedTensor(name=update.name, count=len(update.values), positions_offset=where, values_offset=what)
                for update, where, what in zip(self.patches, offsets[::2], offsets[1::2], strict=True)
            ),
        )

    def pulled(self, *, patch: StagedPatch | None = None, **changes: Any) -> StagedVersion:
        """The newest version in a staging, with its patch unless another is given."""
        segment, offsets = in_segment(list(self.weights.values()))
        self.segments.append(segment)
        fields: dict[str, Any] = {
            "manifest": self.manifest,
            "segment": segment.name,
            "offsets": dict(zip(self.weights, offsets, strict=True)),
            "transport": Transport.TCP,
            "num_attempts": 1,
            "release": lambda: None,
            "patch": patch or self.patch,
        }
        return StagedVersion(**{**fields, **changes})

    def close(self) -> None:
        for segment in self.segments:
            with contextlib.suppress(BufferError):
                segment.close()


class Rig:
    """An engine of workers in this process, and what loads it."""

    def __init__(
        self, num_workers: int = 1, *, loader: Callable[..., ModuleWeightLoader] = ModuleWeightLoader, **options: Any
    ) -> None:
        self.modules = [Mixed() for _ in range(num_workers)]
        self.loaders = [loader(module, **options) for module in self.modules]
        self.workers = [
            EngineWorker(each, index=index, track=f"e/worker-{index}") for index, each in enumerate(self.loaders)
        ]
        self.engine = EmbeddedEngine(self.workers, engine_id="e")
        self.loading = EngineUpdate(self.engine, MODEL_ID)

    def load(self, pulled: StagedVersion) -> LoadReport:
        return self.loading.load(pulled, deadline=Deadline(LONG_S))

    def serves(self, tensors: Mapping[str, torch.Tensor], number: int) -> None:
        """A generation passes, and every worker's live bytes are these."""
        with self.engine.generation(timeout_s=5.0) as running:
            assert running is not None
            assert running.number == number
            for module in self.modules:
                self.has(module, tensors)

    @staticmethod
    def has(module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
        live = {name: bytes_of(tensor) for name, tensor in module.state_dict().items()}
        assert live == {name: bytes_of(tensor) for name, tensor in tensors.items()}


def until(condition: Callable[[], Any], what: str) -> None:
    end = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.005)


def held_sums(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Audits wait at each piece that they read, until `audit.PartSums` is the real one again: (one waits, go on)."""
    reading, go = threading.Event(), threading.Event()

    class Held(PartSums):
        def add(self, held: HeldTensor) -> None:
            reading.set()
            assert go.wait(LONG_S)
            super().add(held)

    monkeypatch.setattr(audit, "PartSums", Held)
    return reading, go
