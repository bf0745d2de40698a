"""The agent's side of relaying: what it grants is known to its board, and hosts' reports are answered."""

from __future__ import annotations

import threading

from starlette.requests import Request
from starlette.responses import Response

from weightsync.agent.long_poll import LongPoll
from weightsync.agent.proved import Proved
from weightsync.agent.receivers import ReceiverBook
from weightsync.agent.relay_board import RelayBoard
from weightsync.errors import NotRegisteredError
from weightsync.net.auth import unmapped
from weightsync.net.messages import decode
from weightsync.net.server import json_of
from weightsync.transfer.tcp_server import BlockServer
from weightsync.types import Version
from weightsync.types.publication import DeltaLink
from weightsync.types.relay_messages import RelayReport, content_id

PATH = "/relay"
REPORT_BYTES = 16 << 20
"""The longest body of a report."""


class Relaying:
    """Of one agent. Thread-safe.

    Args:
        receivers: who may ask.
        blocks: the block server, whose grants a report renews.
    """

    def __init__(self, receivers: ReceiverBook, blocks: BlockServer) -> None:
        self._receivers = receivers
        self._blocks = blocks
        self._lock = threading.Lock()
        self._board = RelayBoard()
        self._waiting = LongPoll()

    def granted(self, served: Proved, delta: tuple[DeltaLink, ...] | None) -> None:
        """That publication, or these deltas to it, are granted now."""
        version, model_id = served.publication.manifest.version, served.publication.manifest.model_id
        pieces = [(version, served.where, served.proof.block_checksums)]
        for link in delta or ():
            pieces.append((Version(run_id=version.run_id, number=link.version), link.blob, link.block_checksums))
        with self._lock:
            for whose, source, checksums in pieces:
                self._board.know(
                    content_id(whose, model_id, source, checksums),
                    num_blocks=source.num_blocks,
                    size_bytes=source.data_end - source.data_start,
                )

    def close(self) -> None:
        """Nobody waits any longer. Idempotent."""
        self._waiting.close()

    async def relay(self, request: Request) -> Response:
        """Answers at `PATH`."""
        report = decode(await request.body(), RelayReport, what="a report of a relay")
        if report.receiver_id not in self._receivers:
            raise NotRegisteredError(
                f"receiver {report.receiver_id!r} is not registered: POST /register_receiver first"
            )
        if report.transfer_id is not None:
            self._blocks.renew(report.transfer_id)
        address = unmapped(request.client.host) if request.client is not None else "127.0.0.1"
        with self._lock:
            changed = self._board.report(report, address=address)
        if changed:
            self._waiting.changed()

        def has_news() -> bool:
            with self._lock:
                return self._board.has_news(report)

        await self._waiting.until(has_news, request, wait_s=report.wait_s)
        with self._lock:
            return json_of(self._board.answer(report, address=address))
