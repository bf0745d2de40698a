"""The two ends of a checkpoint engine, as frameworks call what moves weights from a trainer to rollout workers.

    training rank 0: Sender.prepare -> a plan, as data -> every rollout worker: Receiver.join
    training rank 0: Sender.send(weights)      others walk theirs          rollout workers: Receiver.receive

It is a publication: the sender offloads and goes on, receivers pull the version that the plan names, and no older one.
`verl` and others call these behind a base class of theirs.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
from collections.abc import AsyncGenerator, Generator, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import msgspec
import torch

from weightsync.adapters.host_copy import HostCopy
from weightsync.errors import InvalidRequestError, StateError
from weightsync.host.puller import Puller
from weightsync.host.staged_version import StagedVersion
from weightsync.memory import MappedSegment
from weightsync.plan.buckets import split_by_bytes
from weightsync.tensors import tensor_from_bytes
from weightsync.trainer.publisher import WeightManager
from weightsync.types import Deadline, Version
from weightsync.types.message import learn

_Given = TypeVar("_Given")

_TOKEN_BYTES = 32


class TransferPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What a rollout worker has to know of the next transfer. It carries the token: it is for these workers alone.

    Attributes:
        endpoint: URL of the trainer's agent.
        token: that the agent asks for; None: for none.
    """

    endpoint: str
    model_id: str
    version: Version
    token: str | None = None

    def __repr__(self) -> str:
        return f"TransferPlan(endpoint={self.endpoint!r}, model_id={self.model_id!r}, version={self.version})"


learn(TransferPlan)


class Sender:
    """The trainer's end, in training rank 0 alone.

    Args:
        host: where the agent listens, and how it is reached; "127.0.0.1" while all workers are on this machine.
        token: that the agent asks for; one is made up where not given.
        publishing: further arguments of `WeightManager`, e.g. dtype or delta_budget_bytes.
    """

    def __init__(
        self, model_id: str = "actor", *, host: str = "127.0.0.1", token: str | None = None, **publishing: Any
    ) -> None:
        self._token = token or secrets.token_hex(_TOKEN_BYTES)
        self._manager = WeightManager(model_id, host=host, token=self._token, alone=True, **publishing)
        self._copy = HostCopy()
        self._next = 1

    def prepare(self) -> TransferPlan:
        """The plan of the next transfer. The agent is started with the first one.

        Raises:
            ConfigError: the agent can't listen there.
            EngineUnreachableError: it did not start.
        """
        self._manager.start(deltas=True)
        return TransferPlan(
            endpoint=self._manager.endpoint,
            model_id=self._manager.model_id,
            version=Version(run_id=self._manager.run_id, number=self._next),
            token=self._token,
        )

    @property
    def next_number(self) -> int:
        """That of the next version."""
        return self._next

    def send(self, weights: Iterable[tuple[str, torch.Tensor]], *, timeout_s: float = 600.0) -> dict[str, float]:
        """Publishes what the iterator gives. Returns when it may be pulled; the trainer may change its weights then.

        Args:
            weights: names and whole tensors; walked to its end.
            timeout_s: how long the agent may take to prove it.

        Returns:
            Figures of it, by name: bytes and seconds.

        Raises:
            StateError: it was not published, since receivers still read the versions before.
            WeightSyncError: see `HostCopy.take` and `WeightManager.offload`. Nothing was published.
        """
        taken = self._copy.take(weights)
        number, self._next = self._next, self._next + 1
        deadline = Deadline(timeout_s)
        report = self._manager.offload(taken, number)
        if not report.published:
            raise StateError(f"version {number} was not published: {report.why}", state_left="the version before stays")
        self._manager.wait_published(number, timeout_s=deadline.check("proof of a version"))
        return {
            "weightsync/bytes": float(report.copied_bytes),
            "weightsync/offload_s": report.seconds,
            "weightsync/publish_s": deadline.timeout_s - deadline.remaining_s,
        }

    def close(self) -> None:
        """Ends the agent, and gives the copy back. Idempotent."""
        self._manager.close()
        self._copy = HostCopy()


class Receiver:
    """A rollout worker's end. It keeps the last version, so that the next one may come as a delta.

    Args:
        receiver_id: name of this worker, for the trainer's operator.
        pulling: further arguments of `Puller`, e.g. mode.

    Attributes:
        received_bytes: that were sent for the last version; 0 where it was read where the trainer has it.
        num_deltas: how many deltas brought it; 0: it came in full.
    """

    def __init__(self, receiver_id: str | None = None, **pulling: Any) -> None:
        self._receiver_id = receiver_id or f"{socket.gethostname()}-{secrets.token_hex(4)}"
        self._pulling = pulling
        self._puller: Puller | None = None
        self._plan: TransferPlan | None = None
        self._received: int | None = None
        self.received_bytes = self.num_deltas = 0

    def join(self, plan: TransferPlan) -> None:
        """Takes the plan of the next transfer. A worker may join at any of them."""
        before, self._plan = self._plan, plan
        if before is None or (before.endpoint, before.token) != (plan.endpoint, plan.token):
            self._end_puller()
        self._puller_of(plan)

    def expect_next(self) -> bool:
        """The version behind the one that was received last is waited for, where each has no plan of its own.

        Returns:
            Whether the one that was waited for has come.
        """
        if self._plan is None or self._received is None or self._received < self._plan.version.number:
            return False
        version = msgspec.structs.replace(self._plan.version, number=self._received + 1)
        self._plan = msgspec.structs.replace(self._plan, version=version)
        return True

    def receive(self, *, timeout_s: float = 600.0) -> Generator[tuple[str, torch.Tensor], None, None]:
        """The version that the plan names, or a newer one of its run, whole and proved.

        Yields:
            Names and whole tensors, in host memory that is not to be written. They are true until the iterator ends.

        Raises:
            StateError: no plan was taken.
            WeightSyncError: see `Puller.pull`; before the first tensor.
        """
        with self.pulled(timeout_s=timeout_s) as staged, MappedSegment(staged.segment, need_bytes=1) as segment:
            yield from whole_tensors(staged, segment)

    def received(self, *, timeout_s: float) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
        """As `receive`; the trainer is waited for in a thread."""
        return self._awaited(self.receive(timeout_s=timeout_s))

    def received_batches(
        self, most_bytes: float, *, timeout_s: float
    ) -> AsyncGenerator[list[tuple[str, torch.Tensor]], None]:
        """As `received`, in batches of at most so many bytes; a larger tensor alone. The last one is true until the
        iterator ends, too."""
        return self._awaited(self._batches(most_bytes, timeout_s=timeout_s))

    def _batches(self, most_bytes: float, *, timeout_s: float) -> Generator[list[tuple[str, torch.Tensor]], None, None]:
        with self.pulled(timeout_s=timeout_s) as staged, MappedSegment(staged.segment, need_bytes=1) as segment:
            yield from split_by_bytes(whole_tensors(staged, segment), lambda pair: pair[1].nbytes, most_bytes)

    async def _awaited(self, given: Generator[_Given, None, None]) -> AsyncGenerator[_Given, None]:
        """The first of what is given is waited for in a thread."""
        try:
            first = await asyncio.to_thread(next, given, None)
        except asyncio.CancelledError:  # who is cancelled here can't close it: the thread runs it
            if self._puller is not None:
                self._puller.cancel()
            raise
        with contextlib.closing(given):
            if first is not None:
                yield first
            for each in given:
                yield each

    @contextlib.contextmanager
    def pulled(self, *, timeout_s: float = 600.0) -> Iterator[StagedVersion]:
        """The same as it is staged; its memory is given back behind the block.

        Raises:
            StateError, WeightSyncError: as `receive`.
        """
        if self._plan is None:
            raise StateError("there is no transfer to receive: join with the sender's plan first")
        wanted = self._plan.version
        with self._puller_of(self._plan).pull(deadline=Deadline(timeout_s), at_least=lambda: wanted) as staged:
            self.received_bytes, self.num_deltas = staged.received_bytes, staged.num_deltas
            self._received = staged.version.number
            yield staged

    def close(self) -> None:
        """Gives its memory back; a plan is to be taken before it receives again. Idempotent."""
        self._plan = None
        self._end_puller()

    def _puller_of(self, plan: TransferPlan) -> Puller:
        """The one that has the last version, or a new one where that was cancelled."""
        if self._puller is None or self._puller.cancelled:
            self._end_puller()
            self._puller = Puller(
                plan.endpoint, plan.model_id, receiver_id=self._receiver_id, token=plan.token, **self._pulling
            )
        return self._puller

    def _end_puller(self) -> None:
        if self._puller is not None:
            self._puller.close()
            self._puller = None


def whole_tensors(staged: StagedVersion, segment: MappedSegment) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and tensors of a version that is here, in the manifest's order; true while its segment is mapped."""
    memory = torch.frombuffer(segment.memory, dtype=torch.uint8)
    for spec in staged.manifest.tensors:
        start = staged.offsets[spec.name]
        data = memory[start : start + spec.nbytes]
        yield spec.name, tensor_from_bytes(data, dtype=spec.dtype, shape=spec.shape)


def plan_in(metadata: Iterable[Mapping[str, Any] | None]) -> dict[str, Any]:
    """The one plan among what all workers have prepared.

    Raises:
        InvalidRequestError: there is none, or more than one.
    """
    plans = [dict(each) for each in metadata if each]
    if len(plans) != 1:
        raise InvalidRequestError(f"one worker sends, training rank 0; {len(plans)} have prepared to")
    return plans[0]


def worker_device() -> torch.device:
    """Where a framework's rollout takes tensors: this process's GPU, or host memory where it has none."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def node_address() -> str:
    import ray

    return str(ray.util.get_node_ip_address()).strip("[]")
