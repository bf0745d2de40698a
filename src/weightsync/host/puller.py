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
import threading
from collections.abc import Callable, Mapping

import xxhash

from weightsync.errors import (
    BusyError,
    DeadlineExceededError,
    EngineUnreachableError,
    NoRoomError,
    NotRegisteredError,
    SharedMemoryError,
    StateError,
    StoreDamagedError,
    TransferAbortedError,
    VersionError,
    WeightSyncError,
)
from weightsync.host.agent_calls import CALL_S, Agents, Granted
from weightsync.host.agent_state import is_in
from weightsync.host.delta_intake import DeltaIntake
from weightsync.host.delta_pull import num_bytes
from weightsync.host.progress import ByteProgress, Progress, all_at_once
from weightsync.host.relay import BlockShare, Relay
from weightsync.host.renewal import Renewal
from weightsync.host.settings import check_num_streams
from weightsync.host.staged_version import (
    StagedVersion,
    all_whole,
    check_whole,
    first_bytes,
    proved_manifest,
    release_both,
)
from weightsync.host.staging import Held, Staging, TargetMap
from weightsync.objects.urls import is_same_place
from weightsync.observe import LONG_RUN_BYTES, Recorder, now_s
from weightsync.transfer.shm import ShmSource
from weightsync.transfer.source import Arrived, Destination, RangedSource
from weightsync.types import Deadline, Version
from weightsync.types.deadline import check_wait_s
from weightsync.types.process import of_one_process
from weightsync.types.spec import check_config_id
from weightsync.types.transfer_messages import TransferGrant, Transport

GRACE_S = 2.0
"""So long after its deadline a pull may still be: agents are told how it ended."""

_SHORTEST_RETRY_S = 0.01
_RETRY_S = 0.05
_LONGEST_RETRY_S = 0.2
_MARGIN_S = 2.0
_SAY_EVERY_S = 10.0

_PASSING = (VersionError, StateError, BusyError, TransferAbortedError, EngineUnreachableError, SharedMemoryError)
"""What the next attempt may not meet; nor what is damaged in a store, which is passed by."""

_logger = logging.getLogger(__name__)


@of_one_process
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
        mode: "full"; "delta" where the agent has one from what the staging holds, on the same host too; "auto" for a
            delta over TCP and the publisher's own memory on the same host.
        patch_limit: says up to which share of the model's bytes the changed elements are laid out for engines that
            take patches; 0: not at all. Asked at each pull.
        num_streams: TCP connections to each agent.
        stall_s: a connection over which nothing comes for so long is opened anew.
        trust_key: see `StoreClient`; for an `endpoint` in an object store.
        staging: where TCP pulls go; an own one where not given. Kept from pull to pull.
        recorder: where phases go.
        relay: serves what comes to other hosts, and what they have is taken from them; None: all comes from agents.
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
        mode: str = "auto",
        patch_limit: Callable[[], float] = lambda: 0.0,
        num_streams: int = 6,
        stall_s: float = 10.0,
        trust_key: str | None = None,
        staging: Staging | None = None,
        recorder: Recorder | None = None,
        relay: Relay | None = None,
    ) -> None:
        check_config_id("model_id", model_id)
        check_config_id("receiver_id", receiver_id)
        check_num_streams(num_streams)
        check_wait_s("stall_s", stall_s)
        self.endpoint = endpoint.rstrip("/")
        self.model_id = model_id
        self.recorder = recorder or Recorder(f"puller/{receiver_id}", max_bytes=LONG_RUN_BYTES)
        self._source_of: dict[str, int] = {}
        self._may_call = may_call or (lambda _: False)
        self._staging, self._own_staging = staging or Staging(), staging is None
        self._agents = Agents(
            receiver_id=receiver_id,
            model_id=model_id,
            token=token,
            verify=verify,
            transport=None if transport is None else Transport(transport),
            num_streams=num_streams,
            stall_s=stall_s,
            trust_key=trust_key,
            relay=relay,
        )
        if self._agents.shelf is not None:
            self._staging.before_write = functools.partial(self._agents.shelf.withdraw, staged=True)
        self._deltas = DeltaIntake(self._agents, self._staging, self.recorder, mode=mode, patch_limit=patch_limit)
        self._stop = threading.Event()
        self._pulling = threading.Lock()
        self._lock = threading.Lock()  # nothing is called under it
        self._reading: set[RangedSource] = set()
        self._agents.client(self.endpoint)

    def newest(self, *, timeout_s: float = CALL_S, after: Version | None = None, wait_s: float = 0.0) -> Version | None:
        """The agent's newest publication; None before the first. See `AgentClient.get_version`."""
        return self._agents.newest(self.endpoint, timeout_s=timeout_s, after=after, wait_s=wait_s)

    def pull(
        self,
        *,
        deadline: Deadline,
        at_least: Callable[[], Version] | None = None,
        progress: Progress | None = None,
        retrying: Callable[[WeightSyncError], None] | None = None,
        granted: Callable[[Version], None] | None = None,
    ) -> StagedVersion:
        """Fetches the newest version.

        Args:
            deadline: of the whole; attempts don't add up. It returns `GRACE_S` later at the latest.
            at_least: says what the agent is known to have published, or is about to; asked before each attempt, and
                what it raises ends the pull. An older version of that run, or another run, is not taken: the agent is
                asked again until it has it.
            progress: told of bytes as they arrive.
            retrying: told why an attempt failed, before the next one.
            granted: told, in each attempt, which version every agent has, before any byte of it is moved.

        Raises:
            TransferAbortedError: it was cancelled.
            StateError: another pull of this puller is under way.
            DeadlineExceededError: it took too long; says what failed last. The staging holds no version.
            DigestMismatchError: bytes are not the published ones, again and again.
            NoRoomError: there is no shared memory for it here.
            WeightSyncError: it can't be had: a wrong token, another model.
        """
        if not self._pulling.acquire(blocking=False):
            raise StateError("this puller pulls already: one pull at a time")
        try:
            return self._pull(deadline, at_least, progress, retrying or (lambda _: None), granted or (lambda _: None))
        finally:
            self._pulling.release()
            if self._stop.is_set() and self._own_staging:  # `close` may not have waited for so long
                self._staging.close()

    def _pull(
        self,
        deadline: Deadline,
        at_least: Callable[[], Version] | None,
        progress: Progress | None,
        retrying: Callable[[WeightSyncError], None],
        granted: Callable[[Version], None],
    ) -> StagedVersion:
        attempts, brought, said_s = 0, 0, 0.0
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
            begun_s = now_s()
            try:
                staged = self._attempt(deadline, wanted, progress, granted, attempts)
                if staged.leads_to is None:
                    return dataclasses.replace(staged, received_bytes=staged.received_bytes + brought)
                brought += staged.received_bytes
                staged.release()  # a chain's anchor: the deltas that follow it come next
                attempts -= 1
                continue
            except NoRoomError:
                raise
            except (*_PASSING, StoreDamagedError) as error:
                if not isinstance(last, type(error)) or now_s() - said_s > _SAY_EVERY_S:
                    said_s = now_s()
                    level = logging.WARNING if isinstance(error, EngineUnreachableError) else logging.INFO
                    _logger.log(level, "a pull is begun anew: %s", error)
                last = error
            except DeadlineExceededError as error:
                last = error if last is None or not deadline.expired else last  # cut off by this pull's end: no reason
            if not self._stop.is_set():
                retrying(last)
            # from one attempt to the next: who has waited at the agent asks again at once
            pause_s = max(_SHORTEST_RETRY_S, begun_s + retry_s - now_s())
            self._stop.wait(min(pause_s, deadline.remaining_s))
            retry_s = min(2 * retry_s, _LONGEST_RETRY_S)
        raise TransferAbortedError("this pull was cancelled", state_left="nothing was changed")

    @property
    def cancelled(self) -> bool:
        """Whether it will pull nothing any more."""
        return self._stop.is_set()

    def cancel(self) -> None:
        """Ends a pull under way soon, and every later one at once. From any thread; gives nothing back."""
        self._stop.set()
        self._agents.cancel()
        self._cancel_reading()

    def _cancel_reading(self) -> None:
        with self._lock:
            reading = tuple(self._reading)
        for source in reading:
            source.cancel()

    def close(self) -> None:
        """Ends a pull under way, and gives the staging back where it is this puller's own. Idempotent."""
        self.cancel()
        if self._pulling.acquire(timeout=CALL_S + _MARGIN_S):  # whoever reads or writes the staging has let go of it
            self._pulling.release()
            if self._own_staging:
                self._staging.close()
        self._agents.close()

    # --- one attempt ---

    def _attempt(
        self,
        deadline: Deadline,
        at_least: Version | None,
        progress: Progress | None,
        tell_granted: Callable[[Version], None],
        attempts: int,
    ) -> StagedVersion:
        self._agents.begin_count()
        with contextlib.ExitStack() as stack:
            if at_least is not None and attempts > 1:  # who waits for a version takes no grant of the one before it
                newest = self._wait_for(at_least, deadline)
                if newest is None:
                    raise StateError(f"nothing is published there yet, {at_least} was announced")
                self._check_wanted(newest, at_least)
            with self.recorder.phase("request transfer"):
                first = self._grant(self.endpoint, None, self._source_of.get(self.endpoint), deadline)
            # by source: whom we asked, which is not always what the publication calls it, and what it answered
            granted = {first.source: Granted(endpoint=self.endpoint, grant=first)}
            stack.callback(self._agents.give_up, granted)
            renewal = Renewal(self._agents, granted)
            stack.callback(renewal.close)
            renewal.start()
            publication = first.publication
            version = publication.manifest.version
            leads_to = version if first.leads_to is None else Version(run_id=version.run_id, number=first.leads_to)
            self._check_wanted(leads_to, at_least)
            check_whole(publication)
            for index, source in enumerate(publication.sources):
                if index not in granted:
                    if not (self._may_call(source.endpoint) or is_same_place(source.endpoint, self.endpoint)):
                        raise NotRegisteredError(
                            f"{version} lies at {source.endpoint} too, which was not registered here: nobody calls it"
                        )
                    grant = self._grant(source.endpoint, version, index, deadline)
                    if (grant.publication, grant.source, grant.incarnation) != (publication, index, first.incarnation):
                        self._agents.give_up({index: Granted(endpoint=source.endpoint, grant=grant)})
                        raise VersionError(f"{source.endpoint} tells another story of {version}", version=str(version))
                    granted[index] = Granted(endpoint=source.endpoint, grant=grant)
            tell_granted(version)
            self._source_of = {each.endpoint: index for index, each in granted.items()}
            sources: dict[int, RangedSource] = {}
            for index, each in granted.items():
                if each.grant.delta is None:
                    sources[index] = self._agents.source(each)
                    stack.callback(sources[index].close)
            whole = publication.table.derive(all_whole)
            mapped = sources.get(0)
            if len(granted) == 1 and isinstance(mapped, ShmSource) and whole and self._deltas.mode != "delta":
                renewal.close()
                with self.recorder.phase("pull", detail=f"{version}, mapped"):
                    return self._mapped(granted, mapped, stack, attempts)
            self._deltas.begin()
            how = "delta" if any(each.grant.delta is not None for each in granted.values()) else "full"
            with self.recorder.phase("pull", detail=f"{version}, {how}"):
                try:
                    return self._copied(granted, sources, deadline, renewal.told_too(progress), stack, attempts)
                except TransferAbortedError as error:
                    if self._stop.is_set():
                        raise
                    if (why := self._agents.why_over(granted, within_s=deadline.remaining_s)) is not None:
                        raise TransferAbortedError(why, peer=error.peer, version=str(version)) from error
                    raise

    def _wait_for(self, at_least: Version, deadline: Deadline) -> Version | None:
        """What is there: as soon as it is at least that version or of another run, else after a moment."""
        before = None if at_least.number == 0 else Version(run_id=at_least.run_id, number=at_least.number - 1)
        left_s = deadline.check("time to ask", peer=self.endpoint)
        return self.newest(timeout_s=min(CALL_S, left_s), after=before, wait_s=min(_LONGEST_RETRY_S, left_s))

    def _grant(self, endpoint: str, version: Version | None, source: int | None, deadline: Deadline) -> TransferGrant:
        """A grant, for a delta where the staging holds what one can build on."""
        return self._agents.grant(endpoint, version, deadline, mode=self._deltas.mode, base=self._deltas.base(source))

    @staticmethod
    def _check_wanted(version: Version, at_least: Version | None) -> None:
        if at_least is not None and not is_in(at_least, version):
            raise VersionError(f"{version} is the newest there, {at_least} was announced", version=str(version))

    def _mapped(
        self, granted: dict[int, Granted], source: ShmSource, stack: contextlib.ExitStack, attempts: int
    ) -> StagedVersion:
        """The publisher's own segment is the staging; the lease holds it until the end."""
        grant = granted[0].grant
        manifest = proved_manifest(granted, None)
        self._agents.acknowledge(granted)
        lease = stack.pop_all()  # what is done at the end: the lease goes; the transfer is finished already
        return StagedVersion(
            manifest=manifest,
            segment=source.segment,
            offsets=grant.publication.table.derive(first_bytes),
            transport=Transport.SHM,
            num_attempts=attempts,
            release=lease.close,
            incarnation=grant.incarnation,
            because="the publisher's own memory is mapped: it is on this host",
        )

    def _copied(
        self,
        granted: dict[int, Granted],
        sources: Mapping[int, RangedSource],
        deadline: Deadline,
        progress: Progress,
        stack: contextlib.ExitStack,
        attempts: int,
    ) -> StagedVersion:
        manifest = (publication := granted[0].grant.publication).manifest
        deltas = {index: each for index, each in granted.items() if each.grant.delta is not None}
        if deltas and manifest.total_bytes > self._staging.size_bytes:  # before room is made for what an agent says
            raise StateError("a delta to a larger model than the one that is here was granted")
        bytes_progress = ByteProgress(num_bytes(granted), progress)
        read = functools.partial(self._read, deadline=deadline)
        blobs = self._deltas.fetch(deltas, read, bytes_progress.add, cancel=self._cancel_reading)
        held = self._staging.held
        checksums = "".join(each.grant.proof.block_checksums for _, each in sorted(granted.items()))
        target = self._staging.open(manifest, str(xxhash.xxh3_128_hexdigest(checksums.encode())))
        if deltas and (held is None or target.was is not held):
            raise StateError("the staging has another layout than what the delta builds on")
        reads: list[Callable[[], None]] = []
        for index, source in sources.items():
            where = publication.sources[index]
            blocks = TargetMap(target, where, publication.parts_of(index))
            share = self._agents.share(granted[index], target, blocks)
            wanted = [block for block in range(where.num_blocks) if not target.has(manifest.version, index, block)]
            bytes_progress.skip(where.num_blocks - len(wanted), where.block_bytes)

            def arrived(
                block: int, data: memoryview, *, at: tuple[int, TargetMap, BlockShare] = (index, blocks, share)
            ) -> None:
                at[1].take(block, data)
                target.note(manifest.version, at[0], block)
                at[2].note(block)
                bytes_progress.add(len(data))

            if wanted:
                reads.append(functools.partial(read, source, wanted, blocks.into, arrived))

        def cancel() -> None:
            for source in sources.values():
                source.cancel()

        all_at_once(reads, cancel=cancel)
        changes = self._deltas.apply(granted, blobs, target, held)
        for index, each in deltas.items():
            self._agents.share(each, target, TargetMap(target, publication.sources[index], publication.parts_of(index)))
        proved = proved_manifest(granted, target.tensor_of)
        granted_digests = {index: each.grant.proof.digest for index, each in granted.items()}
        grant = granted[0].grant
        self._agents.acknowledge(granted)
        stack.pop_all().close()  # connections go; the transfers are finished already
        # the last step that may fail: nobody has to close what it makes
        laid_out = self._deltas.lay_out(changes, target, held, proved)
        patch, segment = (None, None) if isinstance(laid_out, str) else laid_out
        num_deltas = sum(len(found) for found in blobs.values())
        digests = tuple(granted_digests[index] for index in range(len(publication.sources)))
        self._staging.verified(Held(version=proved.version, model_digest=proved.model_digest or "", digests=digests))
        return StagedVersion(
            manifest=proved,
            segment=target.segment.name,
            offsets=target.offsets,
            transport=grant.transport,
            num_attempts=attempts,
            release=functools.partial(release_both, self._staging, segment),
            num_deltas=num_deltas,
            received_bytes=bytes_progress.received,
            incarnation=grant.incarnation,
            leads_to=grant.leads_to,
            received_from=self._agents.came_from(grant.transport, bytes_progress.received),
            because=self._agents.because(grant.transport, num_deltas, self._deltas.mode),
            patch=patch,
            no_patch_because=laid_out if isinstance(laid_out, str) else None,
        )

    def _read(
        self, source: RangedSource, wanted: list[int], into: Destination, arrived: Arrived, *, deadline: Deadline
    ) -> None:
        """`source.read`, which `cancel` ends."""
        with self._lock:
            self._reading.add(source)
        try:
            if self._stop.is_set():  # looked at after it was added: whoever cancels finds it, or is found here
                raise TransferAbortedError("this pull was cancelled", state_left="nothing was changed")
            source.read(wanted, into, arrived, deadline=deadline)
        finally:
            with self._lock:
                self._reading.discard(source)
