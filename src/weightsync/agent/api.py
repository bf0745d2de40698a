"""TransferAgent: proves what was published on its host and serves it to receivers. Beside the trainer, a process of its
own (`agent.main`)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable
from urllib.parse import urlsplit

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from weightsync.agent.deltas import Deltas
from weightsync.agent.grants import Grants
from weightsync.agent.long_poll import LongPoll, asked_number, asked_version, asked_wait_s
from weightsync.agent.metrics import AgentMetrics
from weightsync.agent.proved import Proved, facts_of
from weightsync.agent.prover import Prover
from weightsync.agent.receivers import ReceiverBook
from weightsync.agent.relay import PATH, REPORT_BYTES, Relaying
from weightsync.clients.agent import MAX_PUBLICATION_BYTES
from weightsync.errors import InvalidRequestError, NotRegisteredError, StateError, TransferAbortedError, WeightSyncError
from weightsync.memory import host_nonce, reclaim_dead
from weightsync.net.messages import decode, encode
from weightsync.net.server import Api, ServerSettings, ServerThread, TlsFiles, json_of
from weightsync.net.timeline import add_timeline
from weightsync.observe import LONG_RUN_BYTES, Recorder, now_s
from weightsync.transfer.granted import Transfer
from weightsync.transfer.tcp_server import BlockServer
from weightsync.types import PhaseRecord, Version
from weightsync.types.agent_config import AgentConfig
from weightsync.types.agent_messages import (
    DeltaBegun,
    Event,
    NotPublished,
    Published,
    Ready,
    TransferBegun,
    TransferDone,
)
from weightsync.types.layout import PublicationLayout
from weightsync.types.process import of_one_process
from weightsync.types.publication import Publication, SourceProof
from weightsync.types.seal import seal_of
from weightsync.types.timeline import Timeline
from weightsync.types.transfer_messages import (
    MODES,
    AgentVersion,
    EndedTransfer,
    EndedTransfers,
    FinishRequest,
    RegisterRequest,
    RenewRequest,
    TransferRequest,
    Transport,
)

_logger = logging.getLogger(__name__)

_RECLAIM_EVERY_S = 2.0
_MOST_LISTED = 1000
_TELLS_OF_LINK_BYTES = 16 << 20
"""Smaller transfers tell how long a call takes, and not how fast the link is."""
_NUM_SEGMENTS = 3
_NUM_ENDED = 256
_READ_BYTES_S = 1 << 20
"""What a receiver reads of a publication in a second, at the least, before it can say that it is at work."""


class _Served(Proved, frozen=True, kw_only=True):
    """The newest publication. What is asked for by everybody is encoded once.

    Attributes:
        raw_head, raw_layout, raw_proof: the publication without its layout, the layout, and `proof`, as JSON.
        layout: digest of the layout.
        said_bytes: of all three.
        seal: see `TransferGrant`.
        model_digest: of the whole model, where this agent has all of it.
    """

    raw_head: msgspec.Raw
    raw_layout: msgspec.Raw
    layout: str
    raw_proof: msgspec.Raw
    said_bytes: int
    seal: str
    model_digest: str | None


@of_one_process
class TransferAgent:
    """Serves one model's publications from `start` to `close`. Document 3's endpoints, and a few more.

    Args:
        tell: takes events; called from several threads.
    """

    def __init__(self, config: AgentConfig, tell: Callable[[Event], None]) -> None:
        self._config = config
        self._tell = tell
        self._nonce = host_nonce()
        self._lock = threading.Lock()
        self._receivers = ReceiverBook()
        self._current: _Served | None = None
        self._raw_whole: tuple[_Served, msgspec.Raw] | None = None
        self._raw_layout: tuple[PublicationLayout, msgspec.Raw] | None = None
        self._segments: deque[str] = deque(maxlen=_NUM_SEGMENTS)  # of the newest publications
        self._waiting = LongPoll()
        self._ended_last: deque[EndedTransfer] = deque(maxlen=_NUM_ENDED)
        self._num_ended = 0
        self._deltas = Deltas(
            lambda: self.endpoint,
            budget_bytes=config.delta_budget_bytes,
            full_sync_interval=config.full_sync_interval,
            evicted=lambda segment: self._blocks.end_all_of(segment),
            begun=lambda: self._tell(DeltaBegun()),
            search_device=config.delta_device,
            rest=config.delta_rest,
        )
        self._prover = Prover(self._proved, self._not_proved, served=lambda: self._current, deltas=self._deltas)
        self._closed = self._ending = False
        self.recorder = Recorder(f"agent/{config.model_id}")
        self._told = Recorder(self.recorder.track, max_bytes=LONG_RUN_BYTES)  # the trainer drains the other one
        self.recorder.subscribe(self._told.add)
        tls = None
        if config.certificate is not None and config.key is not None:
            tls = TlsFiles(certificate=config.certificate, key=config.key)
        self.app = Api(
            "weightsync agent",
            ("GET", "/get_version", self._get_version),
            ("GET", "/get_buffer_info", self._get_buffer_info),
            ("GET", "/manifest", self._get_manifest),
            ("GET", "/get_capabilities", self._get_capabilities),
            ("GET", "/get_transfers", self._get_transfers),
            ("GET", "/receivers", self._get_receivers),
            ("GET", "/metrics", self._get_metrics),
            ("POST", "/register_receiver", self._register),
            ("POST", "/register_sglang_instance", self._register),
            ("POST", "/request_transfer", self._request_transfer),
            ("POST", "/renew_transfer", self._renew_transfer),
            ("POST", "/finish_transfer", self._finish_transfer),
        )
        add_timeline(self.app, self._told, lambda: Timeline(kind="agent", name=self._config.model_id, now_s=now_s()))
        self._blocks = BlockServer(
            config.host, config.blocks_port, stall_s=config.stall_s, tls=None if tls is None else tls.context()
        )
        self._relaying = Relaying(self._receivers, self._blocks)
        self.app.answer("POST", PATH, self._relaying.relay)
        self._metrics = AgentMetrics(self._blocks)
        self._grants = Grants(
            config,
            nonce=self._nonce,
            blocks=self._blocks,
            deltas=self._deltas,
            segments=self._segments,
            begun=lambda transport: self._metrics.transfer(transport, "begun"),
            ended=self._ended,
        )
        self._server = ServerThread(
            self.app,
            ServerSettings(host=config.host, port=config.port, token=config.token, tls=tls),
            on_refused=self._metrics.auth_failed,
            hosts=() if config.advertise is None else (config.advertise,),
            body_limits={PATH: REPORT_BYTES},
        )

    def start(self) -> Ready:
        """Starts to serve; the ports, for whoever starts it again."""
        if self._config.load_delta_codec:
            self._deltas.load_codec()
        self._blocks.start()
        url = urlsplit(self._server.start())
        host = self._config.advertise or self._config.host
        self.endpoint = f"{url.scheme}://{f'[{host}]' if ':' in host else host}:{url.port}"
        self._prover.start()
        threading.Thread(target=self._keep_house, name="weightsync-agent-house", daemon=True).start()
        assert url.port is not None
        return Ready(endpoint=self.endpoint, port=url.port, blocks_port=self._blocks.port, host_nonce=self._nonce)

    def publish(self, publication: Publication, source: int) -> None:
        """A stamped segment: it is proved, then served. One that waits to be proved gives way to a newer one."""
        self._prover.publish(publication, source)

    def show(self, phases: Iterable[PhaseRecord]) -> None:
        """The trainer's own phases, at `/timeline`."""
        self._told.extend(phases)

    def reset(self) -> int:
        """Ends all transfers but those of the newest publication; says how many.

        A proof under way goes on: where publications come faster than proofs, none would ever end.
        """
        self._deltas.let_go()
        current = self._current
        served = None if current is None else current.publication.manifest.version
        return self._blocks.reset(keep=self._prover.newest or served)

    def close(self, *, in_order: bool = False) -> None:
        """Cuts everything. Idempotent.

        Args:
            in_order: its trainer has said so, and did not just go: who follows is told, see `LongPoll`.
        """
        self._closed, self._ending = True, self._ending or in_order
        if in_order:
            self._waiting.close_for_followers()
        self._waiting.close()
        self._relaying.close()
        self._prover.close()
        self._blocks.close()
        self._deltas.clear()
        self._server.close()

    # --- what is proved ---

    def _proved(self, publication: Publication, source: int, proof: SourceProof, seconds: float) -> None:
        proof.check_fits(publication, source)
        layout, raw_layout = PublicationLayout.of(publication), self._raw_layout
        if raw_layout is None or raw_layout[0] is not layout:  # the same for version after version
            raw_layout = self._raw_layout = layout, msgspec.Raw(layout.encode())
        raw_head, raw_proof = encode(layout.head(publication)), encode(proof)
        size_bytes = len(raw_head) + len(raw_layout[1]) + len(raw_proof)
        if size_bytes > MAX_PUBLICATION_BYTES:
            raise InvalidRequestError(
                f"what is said of this publication has {size_bytes} bytes, and receivers take {MAX_PUBLICATION_BYTES}: "
                f"{len(publication.parts)} parts are too many. Publish the model in pieces, each with a model_id and a "
                "WeightManager of its own",
                version=str(publication.manifest.version),
            )
        version, where = publication.manifest.version, publication.sources[source]
        if where.segment not in self._segments:
            self._segments.append(where.segment)
        self._current = _Served(
            publication=publication,
            source=source,
            proof=proof,
            raw_head=msgspec.Raw(raw_head),
            raw_layout=raw_layout[1],
            layout=layout.digest,
            raw_proof=msgspec.Raw(raw_proof),
            said_bytes=size_bytes,
            seal=seal_of(raw_head, raw_proof, source=source, incarnation=self._config.incarnation),
            model_digest=_model_digest(publication, proof),
        )
        end_s, track = now_s(), self.recorder.track
        self.recorder.add(
            PhaseRecord(name="prove", start_s=end_s - seconds, end_s=end_s, track=track, detail=str(version))
        )
        self._waiting.changed()
        self._metrics.published(publication, source, proof_s=seconds)
        size_bytes = where.data_end - where.data_start
        _logger.info("version %s is published: %d bytes, proved in %.3f s", version, size_bytes, seconds)
        delta = self._deltas.to(version.number)
        if delta is not None:
            self._metrics.delta(delta)
            _logger.info(
                "delta %d -> %d: %d of %d elements, %d bytes, made in %.3f s",
                delta.base, delta.version, delta.num_changed, delta.num_elements, delta.nbytes, delta.seconds,
            )  # fmt: skip
        self._tell(
            Published(version=version, delta=None if delta is None else facts_of(delta), phases=self.recorder.drain())
        )

    def _not_proved(self, version: Version, error: WeightSyncError) -> None:
        self._metrics.not_published()
        self._tell(NotPublished(version=version, error=error.to_dict()))

    def _keep_house(self) -> None:
        """Unlinks what killed processes left; they can't."""
        pause = threading.Event()
        while not self._closed:
            pause.wait(_RECLAIM_EVERY_S)
            with contextlib.suppress(OSError, WeightSyncError):
                reclaim_dead()

    # --- what is asked ---

    async def _get_version(self, request: Request) -> Response:
        after = asked_version(request)

        def newest() -> Version | None:
            current = self._current
            return None if current is None else current.publication.manifest.version

        def newer() -> bool:
            now = newest()
            return now is not None and (after is None or now.run_id != after.run_id or now.is_newer_than(after))

        await self._waiting.until(newer, request, wait_s=asked_wait_s(request))
        coming = self._prover.newest  # looked at first: what is proved meanwhile is in one of the two
        served = self._current
        version = None if served is None else served.publication.manifest.version
        return json_of(
            AgentVersion(
                model_id=self._config.model_id,
                run_id=None if version is None else version.run_id,
                version=None if version is None else version.number,
                incarnation=self._config.incarnation,
                model_digest=None if served is None else served.model_digest,
                coming_run_id=None if coming is None else coming.run_id,
                coming=None if coming is None else coming.number,
                ending=self._ending,
            )
        )

    async def _get_buffer_info(self) -> Response:
        served = self._published()
        publication, source = served.publication, served.source
        where = publication.sources[source]
        return json_of(
            {
                "segment": where.segment,
                "total_bytes": where.data_end,
                "data_start": where.data_start,
                "block_bytes": where.block_bytes,
                "tensors": publication.parts_of(source),
            }
        )

    async def _get_manifest(self) -> Response:
        served = self._published()
        return json_of({"publication": self._whole(served), "source": served.source, "proof": served.raw_proof})

    async def _get_capabilities(self) -> Response:
        kept = self._deltas.kept()
        return json_of(
            {
                "modes": [mode for mode in MODES if mode != "delta" or self._deltas.can_be_made],
                "transports": [Transport.SHM, Transport.TCP],
                "host_nonce": self._nonce,
                "delta_ready": bool(kept),
                "delta_codec_ready": self._deltas.codec_ready,
                "why_no_delta": self._deltas.why_none,
                "deltas": [facts_of(stored) for stored in kept],
                "full_sync_interval": self._config.full_sync_interval,
                "tls": self._config.certificate is not None,
            }
        )

    async def _get_transfers(self, request: Request) -> Response:
        after = asked_number(request)
        if after > self._num_ended:  # of an agent before this one
            after = 0
        await self._waiting.until(lambda: self._num_ended > after, request, wait_s=asked_wait_s(request))
        with self._lock:
            ended = tuple(each for each in self._ended_last if each.number > after)
            return json_of(EndedTransfers(ended=ended, newest=self._num_ended))

    async def _get_receivers(self) -> Response:
        return json_of(self._receivers.listed(most=_MOST_LISTED))

    async def _get_metrics(self) -> Response:
        return Response(self._metrics.render(), media_type="text/plain; version=0.0.4")

    async def _register(self, request: Request) -> Response:
        asked = decode(await request.body(), RegisterRequest, what="a registration")
        self._receivers.register(asked.receiver_id)
        return await self._get_capabilities()

    async def _request_transfer(self, request: Request) -> Response:
        asked = decode(await request.body(), TransferRequest, what="a request for a transfer")
        return await asyncio.to_thread(self._grant, asked)

    async def _finish_transfer(self, request: Request) -> Response:
        asked = decode(await request.body(), FinishRequest, what="the end of a transfer")
        known = await asyncio.to_thread(self._blocks.finish, asked.transfer_id, ok=asked.ok)
        if not known:
            raise TransferAbortedError(f"this transfer is over: {self._blocks.why_over(asked.transfer_id)}")
        return json_of({})

    async def _renew_transfer(self, request: Request) -> Response:
        asked = decode(await request.body(), RenewRequest, what="a renewal")
        self._blocks.renew(asked.transfer_id)
        return json_of({})

    def _grant(self, asked: TransferRequest) -> Response:
        if asked.receiver_id not in self._receivers:
            raise NotRegisteredError(f"receiver {asked.receiver_id!r} is not registered: POST /register_receiver first")
        served = self._published()
        take_up_s = self._config.take_up_s + served.said_bytes / _READ_BYTES_S
        grant = self._grants.grant(asked, served, take_up_s=take_up_s)
        version, who = served.publication.manifest.version, asked.receiver_id
        if grant.get("delta") == ():  # nothing is fetched: it has all of it
            self._tell(TransferDone(version=version, receiver=who, ok=True))
        else:
            self._tell(TransferBegun(version=version, receiver=who))
        self._relaying.granted(served, grant.get("delta"))
        # a `TransferGrant`, of which the largest fields are encoded already
        sealed = {"proof": served.raw_proof, "seal": served.seal}
        if asked.layouts is None:
            return json_of({**grant, **sealed, "publication": self._whole(served)})
        layout = None if served.layout in asked.layouts else served.raw_layout
        return json_of({**grant, **sealed, "head": served.raw_head, "layout": layout})

    def _whole(self, served: _Served) -> msgspec.Raw:
        """The publication as JSON, with its layout: for those that know of none, so not before one asks."""
        kept = self._raw_whole
        if kept is None or kept[0] is not served:
            kept = self._raw_whole = served, msgspec.Raw(encode(served.publication))
        return kept[1]

    def _published(self) -> _Served:
        current = self._current
        if current is None:
            raise StateError("nothing is published yet: ask again")
        return current

    def _ended(self, transport: Transport, is_last: bool, transfer: Transfer, ok: bool) -> None:
        self._metrics.transfer(transport, "ok" if ok else "failed")
        self._receivers.ended(transport, transfer, ok=ok)
        size_bytes = transfer.source.data_end - transfer.source.data_start
        if ok and _TELLS_OF_LINK_BYTES <= size_bytes <= transfer.asked_bytes:
            self._deltas.observe_link(size_bytes, now_s() - transfer.start_s)
        name = "serve" if ok else "serve, ended early"
        track, who = self.recorder.track, transfer.receiver_id
        self.recorder.add(PhaseRecord(name=name, start_s=transfer.start_s, end_s=now_s(), track=track, detail=who))
        with self._lock:
            self._num_ended += 1
            self._ended_last.append(
                EndedTransfer(
                    number=self._num_ended,
                    run_id=transfer.version.run_id,
                    version=transfer.version.number,
                    receiver_id=transfer.receiver_id,
                    ok=ok,
                )
            )
        self._waiting.changed()
        if is_last:  # a receiver that takes several deltas has fetched one version
            self._tell(TransferDone(version=transfer.version, receiver=who, ok=ok, phases=self.recorder.drain()))


def _model_digest(publication: Publication, proof: SourceProof) -> str | None:
    if len(publication.sources) > 1:
        return None
    from weightsync.codec.model_digest import (  # with numpy: not before the agent has begun to answer
        ShardSum,
        model_digest,
    )

    return model_digest(publication.manifest.table, ShardSum(lane_a=proof.lane_a, lane_b=proof.lane_b))
