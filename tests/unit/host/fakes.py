"""A transport in memory, and one small model to sync over it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from weightsync.codec.digest import digest_of
from weightsync.codec.tensor_digest import tensor_digest
from weightsync.engine.gate import ServingGate
from weightsync.engine.worker import EngineWorker
from weightsync.errors import TransferError
from weightsync.load.base import WeightLoader
from weightsync.load.module import ModuleWeightLoader
from weightsync.plan.buckets import plan_bucket
from weightsync.tensors import spec_of
from weightsync.testing.contracts import bytes_of
from weightsync.transfer.base import WeightTransferReceiver, WeightTransferStrategy
from weightsync.types import (
    BeginRequest,
    BroadcastWeightUpdateRequest,
    EmptyWeightSyncInitInfo,
    Full,
    HeldTensor,
    InitRequest,
    Manifest,
    Version,
)

RUN = "run"
LONG_S = 10.0


def model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))


def weights(seed: int) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model(seed).state_dict().items()}


def manifest(number: int = 1, *, run_id: str = RUN, seed: int | None = None, **changes: Any) -> Manifest:
    """Of the small model; with digests of `weights(seed)` where a seed is given."""
    tensors = weights(seed or 0)
    specs = tuple(spec_of(name, tensor) for name, tensor in tensors.items())
    made = Manifest(
        **{"version": Version(run_id=run_id, number=number), "model_id": "default", "tensors": specs, **changes}
    )
    if seed is None:
        return made
    held = [HeldTensor(spec=spec_of(name, tensor), box=None, tensor=tensor) for name, tensor in tensors.items()]
    return made.with_digests(
        {name: tensor_digest(tensor) for name, tensor in tensors.items()}, digest_of(held, made.tensors)
    )


def begin(number: int = 1, *, session: str = "s", deadline_s: float = LONG_S, **changes: Any) -> BeginRequest:
    return BeginRequest(session=session, manifest=manifest(number, **changes), deadline_s=deadline_s)


def chunk(seq: int, *names: str, session: str = "s", seed: int = 0, **changes: Any) -> BroadcastWeightUpdateRequest:
    """Announces some of the small model's tensors; those of module `seq` where no names are given."""
    tensors = weights(seed)
    names = names or (f"{seq}.weight", f"{seq}.bias")
    layout = plan_bucket([tensors[name].nbytes for name in names])
    fields: dict[str, Any] = {
        "session": session,
        "seq": seq,
        "names": names,
        "dtypes": ("float32",) * len(names),
        "shapes": tuple(tuple(tensors[name].shape) for name in names),
        "offsets": layout.offsets,
        "bucket_bytes": layout.total_bytes,
    }
    return BroadcastWeightUpdateRequest(**{**fields, **changes})


def init(run_id: str = RUN, *, strategy: str = "memory", model_id: str = "default", group: str = "g") -> InitRequest:
    info = EmptyWeightSyncInitInfo(strategy=strategy, group_name=group)
    return InitRequest(run_id=run_id, model_id=model_id, info=info, rank_offset=1)


def holds_pause(gate: ServingGate, session: str) -> bool:
    """Whether the session holds the pause, its lease included, and nothing runs; changes nothing."""
    with gate._changed:
        return gate._is_paused() and gate._paused_by == session and gate._running == 0


class MemoryReceiver(WeightTransferReceiver):
    """Hands out tensors of `weights(seed)`, and overwrites them with 0xEE when they are released.

    Attributes:
        holds: a chunk with an event here is received when the event is set, or the receiver closed.
        faults: a chunk with an error here raises it.
    """

    def __init__(self, seed: int) -> None:
        self.tensors = weights(seed)
        self.received: list[int] = []
        self.released: list[int] = []
        self.holds: dict[int, threading.Event] = {}
        self.faults: dict[int, BaseException] = {}
        self.entered: dict[int, threading.Event] = {seq: threading.Event() for seq in range(8)}
        self.closed = threading.Event()
        self._lent: dict[int, list[torch.Tensor]] = {}

    def receive_weights(self, request: Any, *, deadline: Any) -> Iterator[Any]:
        if self.closed.is_set():
            raise TransferError("closed")
        self.entered[request.seq].set()
        if hold := self.holds.get(request.seq):
            while not hold.wait(0.01):
                if self.closed.is_set():
                    raise TransferError("a member left the group")
                deadline.check("bytes")
        if fault := self.faults.get(request.seq):
            raise fault
        self.received.append(request.seq)
        self._lent[request.seq] = [self.tensors[name].clone() for name in request.names]
        return iter([Full(name=n, tensor=t) for n, t in zip(request.names, self._lent[request.seq], strict=True)])

    def release(self, request: Any) -> None:
        self.released.append(request.seq)
        for tensor in self._lent.pop(request.seq, []):
            tensor.view(torch.uint8).fill_(0xEE)

    def close(self) -> None:
        self.closed.set()


class MemoryStrategy(WeightTransferStrategy):
    """Makes `MemoryReceiver`s; the latest is `receiver`. Joins when `may_join` lets it."""

    name = "memory"
    request_type = BroadcastWeightUpdateRequest

    def __init__(self) -> None:
        self.seed = 1
        self.receivers: list[MemoryReceiver] = []
        self.may_join: Callable[[], None] = lambda: None

    @property
    def receiver(self) -> MemoryReceiver:
        return self.receivers[-1]

    def create_init_info(self, world_sizes: Any) -> Any:
        raise NotImplementedError

    def create_sender(self, info: Any, token: object, *, joined: Any, record: Any) -> Any:
        raise NotImplementedError

    def create_receiver(self, info: Any, *, rank: int) -> MemoryReceiver:
        self.may_join()
        self.receivers.append(MemoryReceiver(self.seed))
        return self.receivers[-1]


class LoaderSpy(ModuleWeightLoader):
    """Notes what it is told, and can be held or made to fail in the middle of a load or a commit."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(module, **options)
        self.module = module
        self.loaded: list[str] = []
        self.aborts: list[str] = []
        self.loading = threading.Event()
        self.go = threading.Event()
        self.go.set()
        self.fault: BaseException | None = None
        self.commit_fault: BaseException | None = None
        self.at_commit: Callable[[], None] = lambda: None

    def load_weights(self, updates: Any) -> None:
        self.loading.set()
        assert self.go.wait(LONG_S)
        for update in updates:
            super().load_weights([update])
            self.loaded.append(update.name)
            if self.fault is not None:
                fault, self.fault = self.fault, None
                raise fault

    def commit(self, version: Version) -> None:
        self.at_commit()
        if self.commit_fault is not None:
            fault, self.commit_fault = self.commit_fault, None
            raise fault
        super().commit(version)

    def abort(self, reason: str) -> None:
        self.aborts.append(reason)
        super().abort(reason)

    def serves(self, seed: int) -> bool:
        """Whether the live bytes are exactly those of `weights(seed)`."""
        live = {name: bytes_of(tensor) for name, tensor in self.module.state_dict().items()}
        return live == {name: bytes_of(tensor) for name, tensor in weights(seed).items()}


class Bench:
    """A worker, its loader, its transport."""

    def __init__(self, *, loader: WeightLoader | None = None, join: bool = True, **options: Any) -> None:
        self.strategy = MemoryStrategy()
        self.loader: Any = loader or LoaderSpy(model(), **options)
        self.worker = EngineWorker(self.loader, track="w", strategies=lambda name: self.strategy)
        if join:
            self.worker.init(init())

    @property
    def receiver(self) -> MemoryReceiver:
        return self.strategy.receiver

    def sync(self, number: int = 1, *, seed: int = 1, session: str = "s", run_id: str = RUN) -> None:
        """A whole good sync of `weights(seed)`."""
        from weightsync.types import StageRequest

        if self.worker.describe().group is None:
            self.worker.init(init(run_id))
        self.receiver.tensors = weights(seed)
        self.worker.begin(begin(number, session=session, run_id=run_id))
        for seq in (0, 1):
            self.worker.update(chunk(seq, session=session))
        self.worker.stage(StageRequest(session=session, manifest=manifest(number, run_id=run_id, seed=seed)))
        self.worker.commit(session)
