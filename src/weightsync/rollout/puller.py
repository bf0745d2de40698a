"""Puller: fetches a version from its agents into a staging, proved, or not at all.

One attempt: a grant of the newest version at the first agent, grants of the same version at the publication's other
agents; a lease or blocks from each; every block's checksum; the acknowledgement. Whatever says "superseded" starts over
at the newest; what broke is resumed where it stopped, as long as it is the same version that is wanted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import ssl
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import FIRST_EXCEPTION
from concurrent.futures import wait as wait_for
from types import TracebackType
from urllib.parse import urlsplit

import torch
import xxhash

from weightsync.clients.agent import AgentClient
from weightsync.clients.fanout import in_thread
from weightsync.codec.digest import ShardSum, model_digest, tensor_digest
from weightsync.errors import (
    AuthError,
    DeadlineExceededError,
    EngineUnreachableError,
    InvalidRequestError,
    SharedMemoryError,
    StateError,
    TransferAbortedError,
    VersionError,
    WeightSyncError,
)
from weightsync.memory import host_nonce
from weightsync.observe import Recorder
from weightsync.plan.boxes import check_partition, whole_box
from weightsync.rollout.staging import Staging, TargetMap
from weightsync.tensors import tensor_from_bytes
from weightsync.transfer.shm import ShmSource
from weightsync.transfer.source import Arrived, Destination, RangedSource
from weightsync.transfer.tcp import TcpSource
from weightsync.types import Box, Deadline, Manifest, TensorSpec, Version
from weightsync.types.publication import FinishRequest, RegisterRequest, TransferGrant, TransferRequest, Transport

_RETRY_S = 0.05
_LONGEST_RETRY_S = 0.2
_CALL_S = 10.0
_ACKNOWLEDGE_S = 2.0

_logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
"""Told (bytes that are there, bytes in all), from several threads."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pulled:
    """A version that is here, proved. A context manager: at its end the memory is given back.

    Attributes:
        manifest: with every tensor's digest and the model's.
        segment: name of the shared memory that it lies in, a safetensors file.
        offsets: first byte of each tensor in it.
        transport: how it came. "shm": it lies in the publisher's own segment, under a lease.
        num_attempts: how often it was begun anew at another version, plus one.
    """

    manifest: Manifest
    segment: str
    offsets: Mapping[str, int]
    transport: Transport
    num_attempts: int
    release: Callable[[], None]

    @property
    def version(self) -> Version:
        """Which one."""
        return self.manifest.version

    def __enter__(self) -> Pulled:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class Puller:
    """Pulls versions of one model. One pull at a time.

    Args:
        endpoint: URL of an agent.
        model_id: which model.
        receiver_id: name of this receiver, for the agent's operator.
        token: the agents' bearer token.
        verify: see `AgentClient`; for the block server too.
        may_call: which other endpoints a publication may name; by default none but `endpoint`.
        transport: "tcp" or "shm" alone; chosen by itself where not given.
        num_streams: TCP connections to each agent.
        stall_s: a connection over which nothing comes for so long is opened anew.
        staging: where TCP pulls go; an own one where not given. Kept from pull to pull.
        recorder: where phases go.
    """

    def __init__(
        self,
        endpoint: str,
        model_id: str,
        *,
        receiver_id: str,
        token: str | None = None,
        verify: bool | str = True,
        may_call: Callable[[str], bool] | None = None,
        transport: Transport | None = None,
        num_streams: int = 6,
        stall_s: float = 10.0,
        staging: Staging | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        self.endpoint = endpoint.rstrip("/")
        self.model_id = model_id
        self.recorder = recorder or Recorder(f"puller/{receiver_id}")
        self._receiver_id = receiver_id
        self._token = token
        self._verify = verify
        self._may_call = may_call or (lambda _: False)
        self._transport = None if transport is None else Transport(transport)
        self._num_streams = num_streams
        self._stall_s = stall_s
        self._staging = staging or Staging()
        self._own_staging = staging is None
        self._clients: dict[str, AgentClient] = {}
        self._registered: set[str] = set()
        self._stop = threading.Event()
        self._reading: set[RangedSource] = set()
        self._client(self.endpoint)

    def newest(self, *, timeout_s: float = _CALL_S) -> Version | None:
        """The agent's newest publication; None before the first."""
        found = self._client(self.endpoint).get_version(timeout_s=timeout_s)
        if found.run_id is None or found.version is None:
            return None
        return Version(run_id=found.run_id, number=found.version)

    def pull(
        self,
        *,
        deadline: Deadline,
        at_least: Callable[[], Version] | None = None,
        progress: Progress | None = None,
    ) -> Pulled:
        """Fetches the newest version.

        Args:
            deadline: of the whole; attempts don't add up.
            at_least: says what the agent is known to have published, or is about to; asked before each attempt, and
                what it raises ends the pull. An older version of that run, or another run, is not taken: the agent is
                asked again until it has it.
            progress: told of bytes as they arrive.

        Raises:
            DeadlineExceededError: it took too long; says what failed last. The staging holds no version.
            DigestMismatchError: bytes are not the published ones, again and again.
            WeightSyncError: it can't be had: a wrong token, another model, no room.
        """
        attempts = 0
        retry_s = _RETRY_S
        last: WeightSyncError | None = None
        while not self._stop.is_set():
            if deadline.expired:
                raise DeadlineExceededError(
                    f"no version came within {deadline.timeout_s:g} s"
                    + (f"; last: {type(last).__name__}: {last.message}" if last else ""),
                    peer=self.endpoint,
                    state_left="nothing was changed",
                ) from last
            attempts += 1
            wanted = None if at_least is None else at_least()
            try:
                return self._attempt(deadline, wanted, progress, attempts)
            except (VersionError, StateError, TransferAbortedError, EngineUnreachableError, SharedMemoryError) as error:
                if isinstance(error, EngineUnreachableError) or not isinstance(last, type(error)):
                    _logger.info("a pull is begun anew: %s", error)
                last = error
            except DeadlineExceededError as error:
                last = error
            self._stop.wait(min(retry_s, deadline.remaining_s))
            retry_s = min(2 * retry_s, _LONGEST_RETRY_S)
        raise TransferAbortedError("this puller was closed", state_left="nothing was changed")

    def close(self) -> None:
        """Ends a pull under way, and gives the staging back where it is this puller's own. Idempotent."""
        self._stop.set()
        for source in tuple(self._reading):
            source.close()
        for client in tuple(self._clients.values()):
            client.close()
        if self._own_staging:
            self._staging.close()

    # --- one attempt ---

    def _attempt(
        self, deadline: Deadline, at_least: Version | None, progress: Progress | None, attempts: int
    ) -> Pulled:
        with contextlib.ExitStack() as stack:
            with self.recorder.phase("request transfer"):
                first = self._granted(self.endpoint, None, deadline)
            # by source: whom we asked, which is not always what the publication calls it, and what it answered
            granted = {first.source: _Granted(endpoint=self.endpoint, grant=first)}
            stack.callback(self._finish_failed, granted)
            publication = first.publication
            version = publication.manifest.version
            self._check_wanted(version, at_least)
            _check_whole(publication.manifest, publication.parts)
            for index, source in enumerate(publication.sources):
                if index not in granted:
                    if not self._may_call(source.endpoint):
                        raise AuthError(
                            f"{version} lies at {source.endpoint} too, which was not registered here: nobody calls it"
                        )
                    grant = self._granted(source.endpoint, version, deadline)
                    if grant.publication != publication or grant.source != index:
                        raise VersionError(f"{source.endpoint} tells another story of {version}", version=str(version))
                    granted[index] = _Granted(endpoint=source.endpoint, grant=grant)
            sources = {index: self._source(each, stack) for index, each in granted.items()}
            whole = all(part.box is None for part in publication.parts)
            if len(sources) == 1 and isinstance(sources[0], ShmSource) and whole:
                with self.recorder.phase("pull", detail=f"{version}, mapped"):
                    return self._mapped(granted, sources[0], stack, attempts)
            with self.recorder.phase("pull", detail=str(version)):
                return self._copied(granted, sources, deadline, progress, stack, attempts)

    def _granted(self, endpoint: str, version: Version | None, deadline: Deadline) -> TransferGrant:
        """A grant; registers first where the agent does not know us (any more)."""
        client = self._client(endpoint)
        request = TransferRequest(
            receiver_id=self._receiver_id,
            model_id=self.model_id,
            run_id=None if version is None else version.run_id,
            version=None if version is None else version.number,
            host_nonce=None if self._transport is Transport.TCP else host_nonce(),
        )
        for again in (True, False):
            if endpoint not in self._registered:
                left = min(_CALL_S, deadline.check("time to register", peer=endpoint))
                client.register(RegisterRequest(receiver_id=self._receiver_id), timeout_s=left)
                self._registered.add(endpoint)
            try:
                left = min(_CALL_S, deadline.check("time to ask", peer=endpoint))
                grant = client.request_transfer(request, timeout_s=left)
            except AuthError:
                self._registered.discard(endpoint)
                if not again:
                    raise
                continue
            if self._transport is Transport.SHM and grant.transport is not Transport.SHM:
                with contextlib.suppress(WeightSyncError):
                    client.finish_transfer(FinishRequest(transfer_id=grant.transfer_id, ok=False), timeout_s=left)
                raise InvalidRequestError(f"{endpoint} is not on this host: its memory can't be mapped", peer=endpoint)
            return grant
        raise AssertionError("unreachable")

    def _check_wanted(self, version: Version, at_least: Version | None) -> None:
        if at_least is None or version == at_least:
            return
        if version.run_id != at_least.run_id or at_least.is_newer_than(version):
            raise VersionError(f"{version} is the newest there, {at_least} was announced", version=str(version))

    def _source(self, granted: _Granted, stack: contextlib.ExitStack) -> RangedSource:
        grant = granted.grant
        where, manifest = grant.publication.sources[grant.source], grant.publication.manifest
        if grant.transport is Transport.SHM:
            source: RangedSource = ShmSource(where, grant.proof, version=manifest.version, model_id=manifest.model_id)
        else:
            source = TcpSource(
                where,
                grant.proof,
                transfer_id=grant.transfer_id,
                address=(urlsplit(granted.endpoint).hostname or "", grant.port),  # no other host than was registered
                num_streams=self._num_streams,
                stall_s=self._stall_s,
                tls=self._tls(granted.endpoint),
            )
        stack.callback(source.close)
        return source

    def _mapped(
        self, granted: dict[int, _Granted], source: ShmSource, stack: contextlib.ExitStack, attempts: int
    ) -> Pulled:
        """The publisher's own segment is the staging; the lease holds it until the end."""
        parts = granted[0].grant.publication.parts
        manifest = _proved(granted, None)
        self._acknowledge(granted)
        lease = stack.pop_all()  # what is done at the end: the lease goes; the transfer is finished already
        return Pulled(
            manifest=manifest,
            segment=source.segment,
            offsets={part.name: part.offset for part in parts},
            transport=Transport.SHM,
            num_attempts=attempts,
            release=lease.close,
        )

    def _copied(
        self,
        granted: dict[int, _Granted],
        sources: Mapping[int, RangedSource],
        deadline: Deadline,
        progress: Progress | None,
        stack: contextlib.ExitStack,
        attempts: int,
    ) -> Pulled:
        publication = granted[0].grant.publication
        manifest = publication.manifest
        checksums = "".join(each.grant.proof.block_checksums for _, each in sorted(granted.items()))
        target = self._staging.open(manifest, str(xxhash.xxh3_128_hexdigest(checksums.encode())))
        tally = _Tally(publication.sources, progress)
        reads: list[Callable[[], None]] = []
        for index, source in sources.items():
            where = publication.sources[index]
            blocks = TargetMap(target, where, publication.parts_of(index))
            wanted = [block for block in range(where.num_blocks) if not target.has(manifest.version, index, block)]
            tally.skip(where.num_blocks - len(wanted), where.block_bytes)

            def arrived(block: int, data: memoryview, *, index: int = index, blocks: TargetMap = blocks) -> None:
                blocks.take(block, data)
                target.note(manifest.version, index, block)
                tally.add(len(data))

            if wanted:
                reads.append(functools.partial(self._read, source, wanted, blocks.into, arrived, deadline))
        _all_at_once(reads, sources.values())
        proved = _proved(granted, target.tensor_of)
        self._acknowledge(granted)
        finished = stack.pop_all()
        finished.close()  # connections go; the transfers are finished already
        self._staging.verified(proved.version)
        return Pulled(
            manifest=proved,
            segment=target.segment.name,
            offsets=target.offsets,
            transport=Transport.TCP,
            num_attempts=attempts,
            release=self._staging.release,
        )

    def _read(
        self, source: RangedSource, wanted: list[int], into: Destination, arrived: Arrived, deadline: Deadline
    ) -> None:
        """`source.read`, which `close` ends."""
        self._reading.add(source)
        try:
            if self._stop.is_set():
                raise TransferAbortedError("this puller was closed", state_left="nothing was changed")
            source.read(wanted, into, arrived, deadline=deadline)
        finally:
            self._reading.discard(source)

    def _acknowledge(self, granted: dict[int, _Granted]) -> None:
        """The bytes are here and right: from now on it does not matter what becomes of the source. Forgets them."""
        for each in granted.values():
            with contextlib.suppress(WeightSyncError):  # proved by digest: nothing the agent says changes that
                self._client(each.endpoint).finish_transfer(
                    FinishRequest(transfer_id=each.grant.transfer_id, ok=True), timeout_s=_ACKNOWLEDGE_S
                )
        granted.clear()

    def _finish_failed(self, granted: dict[int, _Granted]) -> None:
        """The agent may forget transfers that this attempt will not go on with."""
        for each in granted.values():
            with contextlib.suppress(WeightSyncError):
                self._client(each.endpoint).finish_transfer(
                    FinishRequest(transfer_id=each.grant.transfer_id, ok=False), timeout_s=1.0
                )

    def _client(self, endpoint: str) -> AgentClient:
        if endpoint not in self._clients:
            self._clients[endpoint] = AgentClient(endpoint, token=self._token, verify=self._verify)
        return self._clients[endpoint]

    def _tls(self, endpoint: str) -> ssl.SSLContext | None:
        if urlsplit(endpoint).scheme != "https":
            return None
        if isinstance(self._verify, str):
            return ssl.create_default_context(cafile=self._verify)
        context = ssl.create_default_context()
        if not self._verify:
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        return context


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Granted:
    """A grant, and the endpoint that was asked for it: the only one that is called about it."""

    endpoint: str
    grant: TransferGrant


class _Tally:
    """Bytes that are there, told as they come."""

    def __init__(self, sources: tuple[object, ...], progress: Progress | None) -> None:
        self._total = sum(source.data_end - source.data_start for source in sources)  # type: ignore[attr-defined]
        self._progress = progress
        self._lock = threading.Lock()
        self._done = 0

    def add(self, count: int) -> None:
        with self._lock:
            self._done = min(self._total, self._done + count)
            done = self._done
        if self._progress is not None:
            self._progress(done, self._total)

    def skip(self, num_blocks: int, block_bytes: int) -> None:
        if num_blocks:
            self.add(num_blocks * block_bytes)


def _all_at_once(reads: list[Callable[[], None]], sources: Iterable[RangedSource]) -> None:
    """Reads every source, none after another: a grant does not wait for its turn. The first failure ends all."""
    if len(reads) == 1:
        reads[0]()
        return
    calls = [in_thread(read, name=f"weightsync-pull-from-{number}") for number, read in enumerate(reads)]
    wait_for(calls, return_when=FIRST_EXCEPTION)
    failed = next((error for call in calls if call.done() and (error := call.exception()) is not None), None)
    if failed is not None:
        for source in sources:
            source.close()
        wait_for(calls)
        raise failed


def _check_whole(manifest: Manifest, parts: tuple[TensorSpec, ...]) -> None:
    """Parts make up every tensor exactly once, before a byte is allocated for them."""
    boxes: dict[str, list[Box]] = {spec.name: [] for spec in manifest.tensors}
    for part in parts:
        boxes[part.name].append(part.box or whole_box(part.shape))
    for spec in manifest.tensors:
        if spec.nbytes:
            check_partition(spec.shape, boxes[spec.name], parameter=spec.name)


def _proved(granted: Mapping[int, _Granted], tensor_of: Callable[[TensorSpec], torch.Tensor] | None) -> Manifest:
    """The manifest with digests: of whole parts as their agents say, of tensors in several parts as they arrived.

    The latter is no circle: each of their blocks was compared with its agent's checksum.
    """
    publication = next(iter(granted.values())).grant.publication
    digests: dict[str, str] = {}
    total = ShardSum.zero()
    for index, each in sorted(granted.items()):
        proof = each.grant.proof
        total += ShardSum(lane_a=proof.lane_a, lane_b=proof.lane_b)
        for part, digest in zip(publication.parts_of(index), proof.part_digests, strict=True):
            if part.box is None:
                digests[part.name] = digest
    for spec in publication.manifest.tensors:
        if spec.name not in digests:
            if tensor_of is None:
                empty = tensor_from_bytes(torch.empty(0, dtype=torch.uint8), dtype=spec.dtype, shape=spec.shape)
                digests[spec.name] = tensor_digest(empty)
            else:
                digests[spec.name] = tensor_digest(tensor_of(spec))
    return publication.manifest.with_digests(digests, model_digest(publication.manifest.tensors, total))
