"""Agents: a puller's conversation with the agents of a publication: registration, grants, acknowledgements."""

from __future__ import annotations

import dataclasses
import functools
import ssl
import threading
import time
from collections.abc import Mapping
from concurrent.futures import wait as wait_for
from urllib.parse import urlsplit

from weightsync.clients.agent import AgentClient
from weightsync.clients.store import StoreClient, client_at
from weightsync.errors import (
    ConfigError,
    DeadlineExceededError,
    EngineUnreachableError,
    InvalidRequestError,
    NotRegisteredError,
    TransferAbortedError,
    VersionError,
    WeightSyncError,
)
from weightsync.handles.fanout import in_thread
from weightsync.host.relay import BlockShare, GrantBoard, Relay, RelayShelf
from weightsync.host.staging import Target, TargetMap
from weightsync.memory import host_nonce
from weightsync.net.auth import is_nearby
from weightsync.net.exchange import trusted
from weightsync.transfer.relay import RelaySource
from weightsync.transfer.shm import ShmSource
from weightsync.transfer.source import Checksums, RangedSource
from weightsync.transfer.store import StoreSource
from weightsync.transfer.tcp import TcpSource
from weightsync.types import Deadline, Version
from weightsync.types.layout import KnownLayouts
from weightsync.types.publication import DeltaBase, DeltaLink, Source
from weightsync.types.relay_messages import RelayPeer, content_id
from weightsync.types.transfer_messages import (
    FinishRequest,
    RegisterRequest,
    RenewRequest,
    TransferGrant,
    TransferRequest,
    Transport,
)

CALL_S = 10.0
"""No call takes longer; a grant may, where one has taken longer before."""
_MAX_PATIENCE_S = 60.0  # of one grant: between two of them another agent may take over
_ACKNOWLEDGE_S = 1.5
_GIVE_UP_S = 1.0
"""How long telling agents may take, all of them together: within the `GRACE_S` of a puller."""
_WHY_S = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Granted:
    """A grant, and the endpoint that was asked for it: the only one that is called about it."""

    endpoint: str
    grant: TransferGrant


class Agents:
    """Calls agents in one receiver's name.

    Args:
        receiver_id: name of the receiver, for the agents' operator.
        model_id: which model.
        token: the agents' bearer token.
        verify: see `AgentClient`; for the block servers too.
        transport: the only one that will do; None: the agent chooses.
        num_streams: TCP connections to each agent.
        stall_s: a connection over which nothing comes for so long is opened anew.
        trust_key: see `StoreClient`.
        relay: of this host; None: everything comes from agents.

    Attributes:
        shelf: what is relayed of what comes; None where nothing is.
        peer_bytes: that came from peers, of all sources that were made so far.
        how: where the bytes of each came from, and why.
    """

    def __init__(
        self,
        *,
        receiver_id: str,
        model_id: str,
        token: str | None,
        verify: bool | str,
        transport: Transport | None,
        num_streams: int,
        stall_s: float,
        trust_key: str | None = None,
        relay: Relay | None = None,
    ) -> None:
        self._receiver_id = receiver_id
        self._model_id = model_id
        self._token = token
        self._verify = verify
        self._transport = transport
        self._num_streams = num_streams
        self._stall_s = stall_s
        self._trust_key = trust_key
        self._clients: dict[str, AgentClient | StoreClient] = {}
        self._registered: set[str] = set()
        self._layouts = KnownLayouts()
        self._patience_s: dict[str, float] = {}  # by endpoint: so long a grant may take
        self._lock = threading.Lock()
        self._asking: AgentClient | StoreClient | None = None  # a grant, now
        self._cancelled = False
        self.shelf = None if relay is None else RelayShelf(relay, receiver_id, self._connected)
        self.peer_bytes = 0
        self.how: list[str] = []

    def newest(
        self, endpoint: str, *, timeout_s: float, after: Version | None = None, wait_s: float = 0.0
    ) -> Version | None:
        """An agent's newest publication; None before the first. See `AgentClient.get_version`."""
        found = self.client(endpoint).get_version(after=after, wait_s=wait_s, timeout_s=timeout_s)
        if found.model_id != self._model_id:
            raise InvalidRequestError(f"{endpoint} serves model {found.model_id!r}, not {self._model_id!r}")
        if found.run_id is None or found.version is None:
            return None
        return Version(run_id=found.run_id, number=found.version)

    def grant(
        self, endpoint: str, version: Version | None, deadline: Deadline, *, mode: str = "auto", base: DeltaBase | None
    ) -> TransferGrant:
        """A grant; registers first where the agent does not know us (any more). One that takes too long has twice the
        time when it is asked for again: that of a model of very many tensors is long, and its link may be slow.

        Raises:
            TransferAbortedError: see `cancel`.
            VersionError: it answered with another version, or a delta from another base, than was asked for.
            InvalidRequestError: it serves another model.
            EngineError: what it answered is not what it said: it was damaged on the way.
            WeightSyncError: there is none to be had.
        """
        client = self.client(endpoint)
        request = TransferRequest(
            receiver_id=self._receiver_id,
            model_id=self._model_id,
            run_id=None if version is None else version.run_id,
            version=None if version is None else version.number,
            host_nonce=None if self._transport is Transport.TCP else host_nonce(),
            mode=mode,
            base=base,
        )
        for again in (True, False):
            if endpoint not in self._registered:
                left = min(CALL_S, deadline.check("time to register", peer=endpoint))
                client.register(RegisterRequest(receiver_id=self._receiver_id), timeout_s=left)
                self._registered.add(endpoint)
            try:
                grant = self._request(client, endpoint, request, deadline)
            except NotRegisteredError:  # it was started again
                self._registered.discard(endpoint)
                if not again:
                    raise
                continue
            try:
                self._check_answer(endpoint, grant, request)
            except WeightSyncError:
                self._finish(client, grant, ok=False, timeout_s=_GIVE_UP_S)
                raise
            return grant
        raise AssertionError("unreachable")

    def _request(
        self, client: AgentClient | StoreClient, endpoint: str, request: TransferRequest, deadline: Deadline
    ) -> TransferGrant:
        left_s, patience_s = deadline.check("time to ask", peer=endpoint), self._patience_s.get(endpoint, CALL_S)
        with self._lock:
            if self._cancelled:
                raise TransferAbortedError("this pull was cancelled", peer=endpoint)
            self._asking = client
        began_s = time.monotonic()
        try:
            grant = client.request_transfer(request, layouts=self._layouts, timeout_s=min(left_s, patience_s))
        except DeadlineExceededError:
            if left_s >= patience_s:  # it had all of it
                self._patience_s[endpoint] = min(2 * patience_s, _MAX_PATIENCE_S)
            raise
        finally:
            with self._lock:
                self._asking = None
        self._patience_s[endpoint] = min(max(CALL_S, 2 * (time.monotonic() - began_s)), _MAX_PATIENCE_S)
        return grant

    def cancel(self) -> None:
        """No grant is asked for any more; one that an agent is asked for now is given up. From any thread."""
        with self._lock:
            self._cancelled, asking = True, self._asking
        if isinstance(asking, AgentClient):  # closing a store's takes a call
            asking.close()

    def _check_answer(self, endpoint: str, grant: TransferGrant, asked: TransferRequest) -> None:
        """A grant is of what was asked for. Nothing of it counts before."""
        manifest = grant.publication.manifest
        if manifest.model_id != asked.model_id:
            raise InvalidRequestError(
                f"{endpoint} granted model {manifest.model_id!r}, {asked.model_id!r} was asked for", peer=endpoint
            )
        if asked.version is not None and (asked.run_id, asked.version) != (
            manifest.version.run_id,
            manifest.version.number,
        ):
            raise VersionError(
                f"{endpoint} granted {manifest.version}, {asked.run_id}/{asked.version} was asked for",
                version=str(manifest.version),
            )
        if grant.delta is not None and grant.base != asked.base:
            raise VersionError(f"{endpoint} answered with a delta from another base than was asked for")
        if grant.transport is Transport.STORE and not isinstance(self.client(endpoint), StoreClient):
            raise InvalidRequestError(f"{endpoint} is no store, and granted what lies in one", peer=endpoint)
        if self._transport is Transport.SHM and grant.transport is not Transport.SHM:
            raise InvalidRequestError(f"{endpoint} is not on this host: its memory can't be mapped", peer=endpoint)

    def source(self, granted: Granted) -> RangedSource:
        """Where the bytes of a grant's source are read from; the caller's to close.

        Raises:
            VersionError: another version lies there by now.
            SharedMemoryError: the segment is gone.
        """
        grant = granted.grant
        where, manifest = grant.publication.sources[grant.source], grant.publication.manifest
        if grant.transport is Transport.SHM:
            return ShmSource(where, grant.proof, stamp=(manifest.version, manifest.model_id))
        if grant.transport is Transport.STORE:
            return self._stored(granted, where)
        content = content_id(manifest.version, manifest.model_id, where, grant.proof.block_checksums)
        return self._tcp(granted, where, grant.proof, grant.transfer_id, content)

    def blob(self, granted: Granted, link: DeltaLink) -> RangedSource:
        """Where one delta of a grant is read from; the caller's to close.

        Raises:
            SharedMemoryError: it is gone.
        """
        if granted.grant.transport is Transport.SHM:
            return ShmSource(link.blob, link, stamp=None)
        if granted.grant.transport is Transport.STORE:
            return self._stored(granted, link.blob)
        return self._tcp(granted, link.blob, link, link.transfer_id, delta_content(granted, link))

    def _stored(self, granted: Granted, where: Source) -> StoreSource:
        client = self.client(granted.endpoint)
        assert isinstance(client, StoreClient)  # see `_check_answer`
        chain = client.chain
        return StoreSource(
            where, client.blob(where), chain.store, num_streams=self._num_streams, damaged=chain.damaged
        )  # fmt: skip

    def _tcp(
        self, granted: Granted, where: Source, checksums: Checksums, transfer_id: str, content: str
    ) -> TcpSource | RelaySource:
        grant = granted.grant
        agent = TcpSource(
            where,
            checksums,
            transfer_id=transfer_id,
            address=(urlsplit(granted.endpoint).hostname or "", grant.port),  # no other host than was registered
            num_streams=self._num_streams,
            stall_s=self._stall_s,
            tls=self._tls(granted.endpoint),
        )
        shelf = self.shelf
        if shelf is None:
            return agent
        return RelaySource(
            where,
            checksums,
            content=content,
            agent=agent,
            num_streams=self._num_streams,
            board=GrantBoard(shelf, granted.endpoint, transfer_id),
            standing=shelf.relay.standing,
            zone=shelf.relay.zone,
            stall_s=self._stall_s,
            max_peers=shelf.relay.max_peers,
            tls_of=functools.partial(self._tls_of_peer, granted.endpoint),
            told=self._came,
        )

    def share(self, granted: Granted, target: Target, places: TargetMap) -> BlockShare:
        """Serves on what there is, and will be, of a granted source in the staging, where this host relays."""
        grant = granted.grant
        where, manifest = grant.publication.sources[grant.source], grant.publication.manifest
        share = BlockShare.of_target(target, where, grant.source, places, manifest.version)
        if self.shelf is not None and grant.transport is Transport.TCP:
            content = content_id(manifest.version, manifest.model_id, where, grant.proof.block_checksums)
            self.shelf.put(granted.endpoint, content, share, staged=True)
        return share

    def _came(self, _agent_bytes: int, peer_bytes: int, how: str) -> None:
        with self._lock:
            self.peer_bytes += peer_bytes
            if how not in self.how:
                self.how.append(how)

    def came_from(self, transport: Transport, received_bytes: int) -> dict[str, int]:
        """Of so many bytes, how many came from where."""
        if transport is Transport.STORE:
            return {"store": received_bytes} if received_bytes else {}
        with self._lock:
            peer_bytes = min(self.peer_bytes, received_bytes)
        found = {"agent": received_bytes - peer_bytes, "peer": peer_bytes}
        return {name: size_bytes for name, size_bytes in found.items() if size_bytes}

    def because(self, transport: Transport, num_deltas: int, mode: str) -> str:
        """Why a version came as it did, in words."""
        way = "by delta from what is here" if num_deltas else "in full: there was no delta from what is here"
        if mode == "full":
            way = "in full, as the mode says"
        with self._lock:
            how = "; ".join(self.how)
        if transport is Transport.SHM:
            how = "read from the publisher's memory: it is on this host"
        elif transport is Transport.STORE:
            how = "all of it from the store"
        elif self.shelf is None:
            how = "all of it from the agent: this host does not relay"
        return f"{way}; {how or 'nothing had to be sent'}"

    def begin_count(self) -> None:
        """What comes from now on is counted anew."""
        with self._lock:
            self.peer_bytes = 0
            self.how.clear()

    def _tls_of_peer(self, endpoint: str, peer: RelayPeer) -> ssl.SSLContext | None:
        """How a peer is spoken to.

        Raises:
            ConfigError: it speaks in clear, and the agent does not; or its address leads to this machine, or to nothing
                that a host can be, and the agent's does not.
        """
        if is_nearby(peer.host) and not is_nearby(urlsplit(endpoint).hostname or ""):
            raise ConfigError(f"{peer.receiver_id} relays at {peer.host}, it says: it is not asked")
        secret = urlsplit(endpoint).scheme == "https"
        if secret and not peer.tls:
            raise ConfigError(f"{peer.receiver_id} relays in clear what {endpoint} sends by TLS: it is not asked")
        return trusted(self._verify) if peer.tls else None

    def renew(self, granted: Granted) -> None:
        """This receiver is at work on a grant, though it reads nothing now.

        Raises:
            TransferAbortedError: the agent says that it is over, and why.
            WeightSyncError: the agent could not be asked.
        """
        self._renew(self.client(granted.endpoint), granted.grant)

    def why_over(self, granted: Mapping[int, Granted], *, within_s: float) -> str | None:
        """What an agent says of a transfer that has ended; None where none says so in time."""
        deadline = Deadline(min(_WHY_S, within_s))
        for each in tuple(granted.values()):
            try:
                left = deadline.check("time to ask why")
                self._renew(self.client(each.endpoint), each.grant, timeout_s=left)
            except TransferAbortedError as error:
                return error.message
            except WeightSyncError:
                continue
        return None

    @staticmethod
    def _renew(client: AgentClient | StoreClient, grant: TransferGrant, *, timeout_s: float = _ACKNOWLEDGE_S) -> None:
        ids = [grant.transfer_id] if grant.delta is None else [link.transfer_id for link in grant.delta[:1]]
        for transfer_id in ids:  # deltas that were granted together share what is renewed
            client.renew_transfer(RenewRequest(transfer_id=transfer_id), timeout_s=timeout_s)

    def acknowledge(self, granted: dict[int, Granted]) -> None:
        """The bytes are here and right: from now on it does not matter what becomes of the source. Forgets them."""
        self._tell_all(granted, ok=True, timeout_s=_ACKNOWLEDGE_S)  # proved by digest: no answer changes that
        granted.clear()

    def give_up(self, granted: dict[int, Granted]) -> None:
        """The agent may forget transfers that this attempt will not go on with."""
        self._tell_all(granted, ok=False, timeout_s=_GIVE_UP_S)

    def _tell_all(self, granted: Mapping[int, Granted], *, ok: bool, timeout_s: float) -> None:
        """All at once: an agent that does not answer costs its time, and not that of the others."""
        calls = [
            functools.partial(self._finish, self.client(each.endpoint), each.grant, ok=ok, timeout_s=timeout_s)
            for each in granted.values()
        ]
        if len(calls) == 1:
            calls[0]()
        else:
            wait_for([in_thread(call, name="weightsync-finish") for call in calls], timeout=timeout_s)

    @staticmethod
    def _finish(client: AgentClient | StoreClient, grant: TransferGrant, *, ok: bool, timeout_s: float) -> None:
        granted_ids = [grant.transfer_id] if grant.delta is None else [link.transfer_id for link in grant.delta]
        deadline = Deadline(timeout_s)
        for transfer_id in granted_ids:
            try:
                left = deadline.check("time to tell an agent")
                client.finish_transfer(FinishRequest(transfer_id=transfer_id, ok=ok), timeout_s=left)
            except (EngineUnreachableError, DeadlineExceededError):
                return  # it finds out by itself that nobody reads them
            except WeightSyncError:
                continue

    def close(self) -> None:
        """Closes the connections, and relays nothing any more. Idempotent."""
        if self.shelf is not None:
            self.shelf.close()
        for client in tuple(self._clients.values()):
            client.close()

    def client(self, endpoint: str) -> AgentClient | StoreClient:
        """The client of one agent, or of a store.

        Raises:
            ConfigError: the endpoint is no URL.
        """
        if endpoint not in self._clients:
            self._clients[endpoint] = client_at(
                endpoint, token=self._token, verify=self._verify, trust_key=self._trust_key
            )
        return self._clients[endpoint]

    def _connected(self, endpoint: str) -> AgentClient:
        return AgentClient(endpoint, token=self._token, verify=self._verify)

    def _tls(self, endpoint: str) -> ssl.SSLContext | None:
        return trusted(self._verify) if urlsplit(endpoint).scheme == "https" else None


def delta_content(granted: Granted, link: DeltaLink) -> str:
    """The name of a delta's blocks among hosts that relay."""
    manifest = granted.grant.publication.manifest
    version = Version(run_id=manifest.version.run_id, number=link.version)
    return content_id(version, manifest.model_id, link.blob, link.block_checksums)
