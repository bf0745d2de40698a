"""AgentMetrics: what an agent's `/metrics` says, on a registry of its own."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

from weightsync.agent.proved import StoredDelta
from weightsync.errors import SharedMemoryError
from weightsync.memory import Reader, is_read
from weightsync.observe import now_s
from weightsync.types.publication import Publication
from weightsync.types.transfer_messages import Transport

if TYPE_CHECKING:
    from prometheus_client import Metric

    from weightsync.transfer.tcp_server import BlockServer

_PROOF_BUCKETS_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_KEPT_SEGMENTS = 4
"""A host has three at most; one more has just been replaced."""


class AgentMetrics:
    """Counts publications and transfers; asks the block server and the kernel for the rest when it is asked itself.

    Args:
        blocks: whose connections and bytes are told.
    """

    def __init__(self, blocks: BlockServer) -> None:
        from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

        self._blocks = blocks
        self._lock = threading.Lock()
        self._segments: dict[str, None] = {}
        own = self._registry = CollectorRegistry()
        self._version = Gauge("weightsync_agent_version", "Number of the newest version served.", registry=own)
        self._since = Gauge(
            "weightsync_agent_published_timestamp_seconds", "When it was published, since the epoch.", registry=own
        )
        self._bytes = Gauge("weightsync_agent_publication_bytes", "Bytes of it on this host.", registry=own)
        self._publications = Counter(
            "weightsync_agent_publications", "Versions by outcome: ok, or failed (not proved).", ["outcome"],
            registry=own,
        )  # fmt: skip
        self._proof = Histogram(
            "weightsync_agent_proof_seconds", "Seconds of each proof.", buckets=_PROOF_BUCKETS_S, registry=own
        )
        self._transfers = Counter(
            "weightsync_agent_transfers",
            "Transfers by transport and what became of them: begun, ok, failed.",
            ["transport", "event"],
            registry=own,
        )
        self._deltas = Counter("weightsync_agent_deltas", "Deltas made.", registry=own)
        self._delta_bytes = Gauge("weightsync_agent_delta_bytes", "Bytes of the newest delta.", registry=own)
        self._delta_density = Gauge(
            "weightsync_agent_delta_density", "Elements that the newest delta changes, of all.", registry=own
        )
        self._delta_seconds = Histogram(
            "weightsync_agent_delta_seconds", "Seconds that each delta took to make.", buckets=_PROOF_BUCKETS_S,
            registry=own,
        )  # fmt: skip
        self._refused = Counter("weightsync_agent_auth_failures", "HTTP requests without the token.", registry=own)
        for outcome in ("ok", "failed"):
            self._publications.labels(outcome)
        for transport in Transport:
            for event in ("begun", "ok", "failed"):
                self._transfers.labels(transport, event)
        own.register(self)

    def published(self, publication: Publication, source: int, *, proof_s: float) -> None:
        """A version is served from here on."""
        where = publication.sources[source]
        with self._lock:
            self._segments.pop(where.segment, None)
            self._segments[where.segment] = None
            while len(self._segments) > _KEPT_SEGMENTS:
                del self._segments[next(iter(self._segments))]
        self._publications.labels("ok").inc()
        self._proof.observe(proof_s)
        self._version.set(publication.manifest.version.number)
        self._since.set(now_s())
        self._bytes.set(where.data_end - where.data_start)

    def delta(self, delta: StoredDelta) -> None:
        self._deltas.inc()
        self._delta_bytes.set(delta.nbytes)
        self._delta_density.set(delta.num_changed / max(1, delta.num_elements))
        self._delta_seconds.observe(delta.seconds)

    def not_published(self) -> None:
        self._publications.labels("failed").inc()

    def transfer(self, transport: Transport, event: str) -> None:
        """One has begun, or ended: "begun", "ok", "failed"."""
        self._transfers.labels(transport, event).inc()

    def auth_failed(self) -> None:
        self._refused.inc()

    def collect(self) -> Iterator[Metric]:
        """What is read when it is asked for; prometheus-client calls it."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        blocks = self._blocks
        yield CounterMetricFamily("weightsync_agent_sent_bytes", "Bytes of blocks sent.", value=blocks.sent_bytes)
        yield GaugeMetricFamily(
            "weightsync_agent_active_transfers", "Transfers granted and not over.", value=blocks.num_transfers
        )
        yield GaugeMetricFamily(
            "weightsync_agent_connections", "Open connections to the block port.", value=blocks.num_connections
        )
        yield GaugeMetricFamily(
            "weightsync_agent_leased_segments", "Segments that somebody on this host has mapped.", value=self._leased()
        )
        rejected = CounterMetricFamily(
            "weightsync_agent_rejected_connections",
            "Connections to the block port that were cut or refused, by reason.",
            labels=["reason"],
        )
        for reason, count in sorted(blocks.rejected.items()):
            rejected.add_metric([reason], count)
        yield rejected

    def render(self) -> bytes:
        """All of it, in Prometheus' text format."""
        from prometheus_client import generate_latest

        return generate_latest(self._registry)

    def _leased(self) -> int:
        with self._lock:
            segments = list(self._segments)
        count = 0
        for segment in segments:
            with contextlib.suppress(SharedMemoryError):  # given back
                count += is_read(segment, Reader.MAPPED)
        return count
