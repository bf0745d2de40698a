"""Denials: versions that their agent had not, and when each is tried again: a trainer may have told of it too early."""

from __future__ import annotations

from weightsync.control.events import StartSync

_AGAIN_S = (1.0, 2.0, 4.0)
_MAX_DENIED = 8


class Denials:
    """Of one model. Not thread-safe: its model's lock."""

    def __init__(self) -> None:
        self._tries: dict[tuple[str | None, int], int] = {}

    def again_after_s(self, denied: StartSync, run_id: str | None, served: int) -> float | None:
        """After how many seconds it is tried again; None: never. Of many the lowest numbers are, which a trainer comes
        to first.

        Args:
            denied: what its agent had not.
            run_id, served: the trainer's run, and the version that rollout serves of it.
        """
        self._tries = {key: tries for key, tries in self._tries.items() if key[0] == run_id and key[1] > served}
        key = (denied.run_id, denied.version)
        tries = self._tries.get(key, 0)
        if tries >= len(_AGAIN_S):
            return None
        self._tries[key] = tries + 1
        while len(self._tries) > _MAX_DENIED:
            del self._tries[max(self._tries, key=lambda each: each[1])]
        return _AGAIN_S[tries] if key in self._tries else None

    def was_no_try(self, denied: StartSync) -> None:
        """It could not be tried."""
        key = (denied.run_id, denied.version)
        self._tries[key] = max(0, self._tries.get(key, 0) - 1)
