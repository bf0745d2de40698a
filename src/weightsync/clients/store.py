"""StoreClient: a place in an object store, asked as an agent is asked: what is newest, and a grant of its bytes.

A grant is of the newest version where the caller's base leads to it, of the chain's anchor where it does not: that one
`leads_to` the newest, and whoever has it asks again. There is nobody to register at, to renew at, or to tell.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time

from weightsync.clients.agent import AgentClient
from weightsync.clients.chain import Chain
from weightsync.errors import (
    InvalidRequestError,
    NotPublishedError,
    SignatureError,
    StateError,
    StoreDamagedError,
    UnsupportedError,
    VersionError,
)
from weightsync.objects.opened import open_store
from weightsync.objects.signing import Trust
from weightsync.objects.urls import asked_url, is_store_url, split_asked
from weightsync.types import Deadline, Version
from weightsync.types.layout import KnownLayouts, PublicationHead
from weightsync.types.publication import DeltaBase, DeltaLink, Publication, Source
from weightsync.types.store import Pointer, StoredBlob, StoredLink, StoredSource, StoredVersion, epoch_folder
from weightsync.types.transfer_messages import (
    AgentVersion,
    FinishRequest,
    RegisterRequest,
    RenewRequest,
    TransferGrant,
    TransferRequest,
    Transport,
)

_TAKE_UP_S = 3600.0
"""Nobody takes an immutable object away while the reader's note is renewed."""
_chains: dict[tuple[str, str | None], tuple[Chain, int]] = {}
_seen: dict[tuple[str, str | None], Pointer] = {}
"""What chains had seen that nobody reads any more: a process goes back by no new client. Of places with a key alone: in
others anybody may put anything there."""
_NUM_SEEN = 256
_chains_lock = threading.Lock()


class StoreClient:
    """See `AgentClient`, whose calls these are.

    Args:
        endpoint: the place, as `objects.urls.asked_url` writes it.
        trust_key: file with the public key whose manifests are taken; None: anybody's.
        chain: an own one where not given: that of this process.
    """

    def __init__(self, endpoint: str, *, trust_key: str | None = None, chain: Chain | None = None) -> None:
        self.url = self.peer = endpoint
        self._place, self._source, self._pinned = split_asked(endpoint)
        self._key = (self._place, trust_key)
        self._name = f"{endpoint}/{secrets.token_hex(8)}"
        self._shared = chain is None
        self.chain = chain or _chain_at(*self._key)
        self._blobs: dict[str, StoredBlob] = {}
        self._closed = threading.Event()
        self._lock = threading.Lock()

    def get_version(
        self, *, after: Version | None = None, wait_s: float = 0.0, timeout_s: float = 10.0
    ) -> AgentVersion:
        """See `AgentClient.get_version`; the pointer is asked for again and again.

        Raises:
            NotPublishedError: there is nothing yet.
            StoreDamagedError, SignatureError, StoreAuthError, StoreUnavailableError: see `Chain.newest`.
        """
        until_s = time.monotonic() + wait_s
        while True:
            try:
                newest = self._newest(Deadline(timeout_s))
                self.chain.beat(deadline=Deadline(timeout_s))
                if after is None or newest.version != after:
                    break
            except NotPublishedError:
                if time.monotonic() >= until_s or self._closed.is_set():
                    raise
                newest = None
            if self._closed.is_set() or (left_s := until_s - time.monotonic()) <= 0:
                break
            self._closed.wait(min(left_s, self.chain.pause_s()))
        if newest is None:
            raise StateError("this client was closed")
        return AgentVersion(
            model_id=newest.model_id, run_id=newest.version.run_id, version=newest.version.number,
            incarnation=newest.incarnation, model_digest=newest.model_digest,
        )  # fmt: skip

    def current_run(self, model_id: str, *, timeout_s: float = 3.0) -> str:
        reply = self.get_version(timeout_s=timeout_s)
        if reply.model_id != model_id or reply.run_id is None:
            raise NotPublishedError(f"no run of model {model_id!r} is known: {self.url} has model {reply.model_id!r}")
        return reply.run_id

    def register(self, request: RegisterRequest, *, timeout_s: float = 10.0) -> dict[str, object]:
        """Nobody is told."""
        return {}

    def request_transfer(
        self, request: TransferRequest, *, layouts: KnownLayouts | None = None, timeout_s: float = 10.0
    ) -> TransferGrant:
        """See `AgentClient.request_transfer`, and above.

        Raises:
            VersionError: that version is not there (any more).
            InvalidRequestError: the place has another model.
            UnsupportedError: whoever asks takes no deltas, and the newest is no full.
        """
        deadline = Deadline(timeout_s)
        newest = self._newest(deadline)
        wanted = newest
        if request.version is not None and request.version != newest.version.number:
            wanted = self.chain.version(request.version, deadline=deadline)
        if wanted.model_id != request.model_id:
            raise InvalidRequestError(f"{self.url} has model {wanted.model_id!r}, not {request.model_id!r}")
        if self._source >= len(wanted.sources):
            raise VersionError(f"{wanted.version} has no source {self._source}", version=str(wanted.version))
        links = None if request.base is None else _links_from(request.base, wanted, self._source)
        granted = wanted
        if links is None and wanted.anchor is not None:
            if request.mode == "full":
                raise UnsupportedError(
                    f"{wanted.version} is a chain of deltas in a store, and this receiver takes none: leave --full out",
                    version=str(wanted.version),
                )
            granted = self.chain.manifest(wanted.anchor.manifest, deadline=deadline)
            anchor = Version(run_id=wanted.version.run_id, number=wanted.anchor.number)
            if granted.version != anchor or not granted.is_anchor or len(granted.sources) != len(wanted.sources):
                raise StoreDamagedError(
                    f"{self.url}/{wanted.anchor.manifest.key} is of {granted.version}, not {anchor}"
                )
        self.chain.reading(self._name, tuple(sorted({_key_of(wanted), _key_of(granted)})))
        self.chain.beat(deadline=deadline)
        return self._grant(
            granted, request.base, links, leads_to=None if granted is wanted else wanted, deadline=deadline
        )

    def renew_transfer(self, request: RenewRequest, *, timeout_s: float = 10.0) -> None:
        """Renews the reader's note, where it is time."""
        self.chain.beat(deadline=Deadline(timeout_s))

    def finish_transfer(self, request: FinishRequest, *, timeout_s: float = 10.0) -> None:
        """Nobody is told."""

    def blob(self, where: Source) -> StoredBlob:
        """The ranges of an object that was granted."""
        with self._lock:
            return self._blobs[where.segment]

    def close(self) -> None:
        """Ends a wait under way. Idempotent."""
        if not self._closed.is_set():
            self._closed.set()
            with contextlib.suppress(KeyError):
                self.chain.reading(self._name, ())
            if self._shared:
                _let_go(*self._key)

    # --- helpers ---

    def _newest(self, deadline: Deadline) -> StoredVersion:
        try:
            if self._pinned is not None:
                return self.chain.version(self._pinned, deadline=deadline)
            return self.chain.newest(deadline=deadline)
        except (StoreDamagedError, SignatureError):
            self.chain.beat(deadline=deadline)  # the writer is told: its next version is a full
            raise

    def _grant(
        self,
        version: StoredVersion,
        base: DeltaBase | None,
        links: tuple[StoredLink, ...] | None,
        *,
        leads_to: StoredVersion | None,
        deadline: Deadline,
    ) -> TransferGrant:
        layout = self.chain.layout(version, deadline=deadline)
        head = PublicationHead(
            version=version.version, model_id=version.model_id, layout=version.layout_digest,
            artifact="model" if layout.adapter is None else "lora",
            sources=tuple(self._where(index, each) for index, each in enumerate(version.sources)),
        )  # fmt: skip
        publication: Publication = layout.publication(head)
        mine = version.sources[self._source]
        transfer_id = secrets.token_hex(16)
        with self._lock:
            self._blobs = {mine.anchor.key: mine.anchor, **{link.blob.key: link.blob for link in links or ()}}
        return TransferGrant(
            transfer_id=transfer_id, source=self._source, proof=mine.proof, seal="", transport=Transport.STORE,
            host="", port=0, take_up_s=_TAKE_UP_S, incarnation=version.incarnation, publication=publication,
            base=None if links is None else base,
            delta=None if links is None else tuple(self._link(each) for each in links),
            leads_to=None if leads_to is None else leads_to.version.number,
        )  # fmt: skip

    def _where(self, index: int, source: StoredSource) -> Source:
        return Source(
            endpoint=asked_url(self._place, source=index, version=self._pinned), segment=source.anchor.key,
            data_start=source.data_start, data_end=source.data_end, block_bytes=source.block_bytes,
        )  # fmt: skip

    def _link(self, link: StoredLink) -> DeltaLink:
        blob = link.blob
        where = Source(
            endpoint=self._place, segment=blob.key, data_start=blob.data_start, data_end=blob.data_end,
            block_bytes=blob.block_bytes,
        )  # fmt: skip
        return DeltaLink(
            base=link.base, version=link.version, blob=where, block_checksums=link.block_checksums,
            transfer_id=secrets.token_hex(16),
        )  # fmt: skip


def _links_from(base: DeltaBase, version: StoredVersion, source: int) -> tuple[StoredLink, ...] | None:
    """Deltas that lead from a base to a version; none where it is that one; None where there are none."""
    mine = version.sources[source]
    if base.run_id != version.version.run_id:
        return None
    if base.version == version.version.number:
        return () if base.digest == mine.proof.digest else None
    index = next((index for index, link in enumerate(mine.links) if link.base == base.version), None)
    return None if index is None else mine.links[index:]


def _key_of(version: StoredVersion) -> str:
    return f"{epoch_folder(version.epoch)}/versions/{version.version.number}.json"


def client_at(
    endpoint: str, *, token: str | None = None, verify: bool | str = True, trust_key: str | None = None
) -> AgentClient | StoreClient:
    """A client of an agent, or of a place in an object store."""
    if is_store_url(endpoint):
        return StoreClient(endpoint, trust_key=trust_key)
    return AgentClient(endpoint, token=token, verify=verify)


def _chain_at(url: str, trust_key: str | None) -> Chain:
    with _chains_lock:
        chain, count = _chains.get((url, trust_key), (None, 0))
        if chain is None:
            trust = None if trust_key is None else Trust(trust_key)
            chain = Chain(open_store(url, whose="a source's"), trust=trust, seen=_seen.get((url, trust_key)))
        _chains[url, trust_key] = chain, count + 1
        return chain


def _let_go(url: str, trust_key: str | None) -> None:
    with _chains_lock:
        chain, count = _chains[url, trust_key]
        if count > 1:
            _chains[url, trust_key] = chain, count - 1
            return
        del _chains[url, trust_key]
        if trust_key is not None and chain.seen is not None:
            _seen.pop((url, trust_key), None)
            _seen[url, trust_key] = chain.seen
            while len(_seen) > _NUM_SEEN:
                del _seen[next(iter(_seen))]
    chain.close()
