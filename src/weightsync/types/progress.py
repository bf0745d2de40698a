"""TransferProgress: how far a transfer under way is, and how one that has ended is told in a line."""

from __future__ import annotations

from collections.abc import Collection

from weightsync.types.message import Message

LONG_S = 2.0


class TransferProgress(Message, frozen=True, kw_only=True):
    """A transfer under way.

    Attributes:
        done_bytes, total_bytes: how much of how much is there.
        seconds: since it began.
    """

    done_bytes: int
    total_bytes: int
    seconds: float

    @property
    def rate_bytes_s(self) -> float:
        """Its mean so far."""
        return self.done_bytes / max(1e-3, self.seconds)

    @property
    def left_s(self) -> float | None:
        """Seconds to go at that rate; None before anything has come."""
        return (self.total_bytes - self.done_bytes) / self.rate_bytes_s if self.done_bytes > 0 else None

    @property
    def is_long(self) -> bool:
        """Whether it has taken so long that people want to know how far it is."""
        return self.seconds >= LONG_S

    def __str__(self) -> str:
        """`120 of 480 MB (25 %), 800 MB/s, 0.5 s to go`."""
        percent = 100 * self.done_bytes / self.total_bytes if self.total_bytes else 100
        left_s = self.left_s
        left = "" if left_s is None else f", {left_s:.0f} s to go" if left_s >= 9.95 else f", {left_s:.1f} s to go"
        decimals = 3 if 0 < self.total_bytes < 10e6 else 0
        return (
            f"{self.done_bytes / 1e6:.{decimals}f} of {self.total_bytes / 1e6:.{decimals}f} MB ({percent:.0f} %), "
            f"{self.rate_bytes_s / 1e6:.0f} MB/s{left}"
        )


def log_line(
    *, version: int, moved_bytes: int, total_bytes: int, by_deltas: bool, seconds: float, paused_s: float,
    unproved_by: Collection[str] | None,
) -> str:  # fmt: skip
    """One line for a log: `v3: 0.4 MB (1.2 %) in 0.14 s, paused 82 ms, proved`.

    Args:
        version: its number.
        moved_bytes, total_bytes: what moved, and the whole model; the share is told where deltas moved. Where nothing
            moved, it was mapped.
        by_deltas, seconds, paused_s: how it came, and how long it took.
        unproved_by: engines that can't prove their live bytes; None: all did.
    """
    part = f" ({100 * moved_bytes / total_bytes:.1f} %)" if by_deltas and total_bytes else ""
    if total_bytes and not moved_bytes and not by_deltas:  # on the same host nothing has to move
        moved_bytes, part = total_bytes, " mapped"
    proved = "proved" if unproved_by is None else f"unproved by {', '.join(unproved_by)}"
    size = f"{moved_bytes / 1e6:.1f} MB" if moved_bytes >= 1e5 else f"{moved_bytes / 1e3:.1f} kB"
    return f"v{version}: {size}{part} in {seconds:.2f} s, paused {1e3 * paused_s:.0f} ms, {proved}"
