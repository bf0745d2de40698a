"""RunsOver: the runs of one model that another one took over from, and which of them may come back."""

from __future__ import annotations

from weightsync.errors import TransferAbortedError
from weightsync.types import Version

_MAX_RUNS = 1000


class RunsOver:
    """Not thread-safe: its owner's lock.

    Args:
        of_fleet: a controller says which run is followed. It goes back to a former run where the newest one was given
            up before any of it was served, see `control.state`.

    Attributes:
        loaded: whether engines ever served something of the run that is followed.
    """

    def __init__(self, *, of_fleet: bool) -> None:
        self._of_fleet = of_fleet
        self._by: dict[str, str] = {}
        self._in_vain: set[str] = set()  # those of which nothing was ever served
        self.loaded = False

    def __contains__(self, run_id: object) -> bool:
        return run_id in self._by

    def __len__(self) -> int:
        return len(self._by)

    def take_over(self, before: str, run_id: str) -> None:
        """That run is followed from now on, in place of the one before."""
        if not self.loaded:
            self._in_vain.add(before)
        self.loaded = run_id in self._by and run_id not in self._in_vain
        self._by.pop(run_id, None)
        self._in_vain.discard(run_id)
        self._by[before] = run_id
        while len(self._by) > _MAX_RUNS:
            oldest = next(iter(self._by))
            del self._by[oldest]
            self._in_vain.discard(oldest)

    def may_return(self, run_id: str) -> bool:
        """Whether that run is over, and its fleet's word brings it back: nothing of the run that took over, or of that
        run itself, was ever served here."""
        return self._of_fleet and run_id in self._by and (not self.loaded or run_id in self._in_vain)

    def check(self, version: Version) -> None:
        """Raises TransferAbortedError where another run took over from that version's."""
        if (by := self._by.get(version.run_id)) is not None:
            raise TransferAbortedError(f"run {version.run_id} was taken over by {by}", version=str(version))
