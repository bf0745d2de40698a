"""Standing: what a host knows of its peers from one read to the next."""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable, Iterable

_FIRST_STRIKE_S, _LONGEST_STRIKE_S = 0.5, 60.0
_WRONG_S = 600.0
_MAX_DOUBLED = 10
_MAX_NAMES = 4096
"""Of more peers, those that were named first are forgotten: a host that starts again has another name."""


class Standing:
    """What a host knows of its peers from one read to the next: who failed, and how fast they were. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._strikes: collections.Counter[str] = collections.Counter()
        self._until_s: dict[str, float] = {}
        self._rates: dict[str, float] = {}

    def usable(self, name: str) -> bool:
        return self._until_s.get(name, 0.0) <= self._clock()

    def strike(self, name: str, *, wrong: bool = False) -> None:
        """It failed, or was too slow: it is left alone for a while, each time longer; who sent wrong bytes for long."""
        with self._lock:
            self._strikes[name] += 1
            pause_s = min(_LONGEST_STRIKE_S, _FIRST_STRIKE_S * 2 ** min(_MAX_DOUBLED, self._strikes[name] - 1))
            self._until_s[name] = self._clock() + (_WRONG_S if wrong else pause_s)
            self._forget_first()

    def gave(self, name: str, num_bytes: int, seconds: float) -> None:
        """It sent a block."""
        with self._lock:
            self._strikes.pop(name, None)
            rate, before = num_bytes / max(1e-6, seconds), self._rates.get(name)
            self._rates[name] = rate if before is None else 0.7 * before + 0.3 * rate
            self._forget_first()

    def _forget_first(self) -> None:
        for known in (self._strikes, self._until_s, self._rates):
            if len(known) > _MAX_NAMES:
                del known[next(iter(known))]

    def fast_first(self, names: Iterable[str]) -> list[str]:
        """In the order given, but for those that are known to be four times slower than the fastest: they come last."""
        names = list(names)
        best = max((self._rates.get(name, 0.0) for name in names), default=0.0)
        return sorted(names, key=lambda name: self._rates.get(name, best) < best / 4)
