"""Receivers: who is registered with an agent, and what each has had of it."""

from __future__ import annotations

import threading

from weightsync.observe import now_s
from weightsync.transfer.granted import Transfer
from weightsync.types.transfer_messages import ReceiverInfo, Receivers, Transport

_MAX_RECEIVERS = 10_000


class _Had:
    """What one receiver has had."""

    def __init__(self) -> None:
        self.since_s = self.seen_s = now_s()
        self.version: str | None = None
        self.num_transfers = self.num_failed = self.received_bytes = 0
        self.bytes_per_s: float | None = None


class ReceiverBook:
    """Thread-safe. Of too many, who has registered longest ago is forgotten, and has to register again."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._had: dict[str, _Had] = {}

    def __contains__(self, receiver_id: str) -> bool:
        return receiver_id in self._had

    def register(self, receiver_id: str) -> None:
        """It may ask for transfers. Again: what it has had stays known."""
        with self._lock:
            had = self._had.pop(receiver_id, None) or _Had()
            while len(self._had) >= _MAX_RECEIVERS:
                del self._had[next(iter(self._had))]
            had.seen_s = now_s()
            self._had[receiver_id] = had

    def ended(self, transport: Transport, transfer: Transfer, *, ok: bool) -> None:
        """A transfer of it is over. Bytes that it mapped were not sent."""
        size_bytes = transfer.source.data_end - transfer.source.data_start
        with self._lock:
            had = self._had.get(transfer.receiver_id)
            if had is None:
                return
            had.seen_s = now_s()
            if not ok:
                had.num_failed += 1
                return
            had.num_transfers += 1
            had.version = str(transfer.version)
            if transport is Transport.TCP:
                had.received_bytes += transfer.asked_bytes
                if transfer.asked_bytes >= size_bytes:  # else hosts that relay have sent the rest
                    had.bytes_per_s = size_bytes / max(1e-6, had.seen_s - transfer.start_s)

    def listed(self, *, most: int) -> Receivers:
        """Those that were seen last, the latest first; at most so many."""
        with self._lock:
            latest = sorted(self._had.items(), key=lambda item: -item[1].seen_s)[:most]
            found = tuple(
                ReceiverInfo(
                    receiver_id=receiver_id, version=had.version, num_transfers=had.num_transfers,
                    num_failed=had.num_failed, received_bytes=had.received_bytes, bytes_per_s=had.bytes_per_s,
                    since_s=had.since_s, seen_s=had.seen_s,
                )
                for receiver_id, had in latest
            )  # fmt: skip
            return Receivers(receivers=found, num_registered=len(self._had))
