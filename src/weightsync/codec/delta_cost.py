"""What a delta's forms cost, measured while they are made: from it each unit gets its form.

A form's cost is the time until the receiver has the unit: CPU seconds of encoding and of decoding, spread over
the cores, and its bytes over the link. There is no fixed density at which a unit becomes full: on a slow link a unit of
which half has changed still is worth its planes, on a fast one a tenth is not.
"""

from __future__ import annotations

import enum
import math
import threading

from weightsync.codec.delta_units import Unit
from weightsync.errors import InvalidRequestError
from weightsync.types import process

_MEMORY = 0.9
"""How much of the earlier measurements a new one leaves."""


class Work(enum.StrEnum):
    """What CPU time is spent on; each has seconds an element or a byte, for encoding and for decoding."""

    SPARSE = "sparse"
    """Planes of changed elements; an amount is a number of them."""
    FULL = "full"
    """Copies of whole units; an amount is bytes."""
    PACKED = "packed"
    """Whole units through zstd; bytes."""


_START_S: dict[Work, tuple[float, float, float]] = {
    Work.SPARSE: (6e-9, 14e-9, 1e6),
    Work.FULL: (0.15e-9, 0.15e-9, 64e6),
    Work.PACKED: (2.6e-9, 1.3e-9, 64e6),
}
"""Seconds a piece of encoding and of decoding, and how many pieces that start value counts for. Measured on one core
of an AMD EPYC (Zen 4) at 2.6 GHz."""

_START_LINK = (1e9, 256e6)
_START_STEP_BITS = {1: 1.6, 2: 1.6, 4: 12.0, 8: 30.0}
"""Bits of a step on top of its gap's entropy, by an element's bytes."""
_START_PACKED_RATIO = {1: 0.95, 2: 0.69, 4: 0.84, 8: 0.88}


class _Rate:
    """A running mean of seconds (or bytes) a piece, weighted by pieces, that forgets."""

    def __init__(self, start: float, weight: float) -> None:
        self._sum, self._amount, self._most = start * weight, weight, weight

    @property
    def value(self) -> float:
        return self._sum / self._amount

    def observe(self, amount: float, total: float) -> None:
        """`total` for `amount` pieces. Small amounts count for little: their measurement is mostly overhead."""
        kept = 1.0 - (1.0 - _MEMORY) * min(1.0, amount / self._most)
        self._sum = self._sum * kept + total * min(1.0, self._most / amount)
        self._amount = self._amount * kept + min(amount, self._most)


class CostModel:
    """Running means of what coding and moving cost, and the choices that follow from them.

    One is kept by who makes deltas, for as long as it lives. Any number of threads may use it at once.

    Args:
        link_bytes_per_s: bytes a second that one receiver gets.
        num_cores: cores that code at the same time; those of this process where it is None.
        fixed: keep these values and observe nothing, so that equal bytes give equal deltas.

    Raises:
        InvalidRequestError: a rate is not above 0.
    """

    def __init__(
        self, *, link_bytes_per_s: float | None = None, num_cores: int | None = None, fixed: bool = False
    ) -> None:
        if any(rate is not None and not (0 < rate < math.inf) for rate in (link_bytes_per_s, num_cores)):
            raise InvalidRequestError("a cost model's rates lie above 0")
        self._lock = threading.Lock()
        self._fixed = fixed
        self._num_cores = num_cores or process.num_cores()
        self._encode = {work: _Rate(encode_s, weight) for work, (encode_s, _, weight) in _START_S.items()}
        speed, weight = _START_LINK
        self._link = _Rate(1.0 / (link_bytes_per_s or speed), weight)
        self._step_bits = {width: _Rate(bits, 1e6) for width, bits in _START_STEP_BITS.items()}
        self._packed_ratio = {width: _Rate(ratio, 64e6) for width, ratio in _START_PACKED_RATIO.items()}

    @property
    def link_bytes_per_s(self) -> float:
        """What a receiver gets a second."""
        return 1.0 / self._link.value

    def seconds(self, work: Work) -> float:
        """CPU seconds of encoding and decoding a piece of `work`."""
        return self._encode[work].value + _START_S[work][1]

    def observe_link(self, nbytes: int, seconds: float) -> None:
        """`nbytes` took `seconds` until one receiver had them all."""
        self._observe(self._link, nbytes, seconds)

    def observe_encode(self, work: Work, amount: int, seconds: float) -> None:
        """Encoding `amount` pieces took one thread `seconds` of CPU time."""
        self._observe(self._encode[work], amount, seconds)

    def observe_planes(self, unit: Unit, num_changed: int, nbytes: int) -> None:
        """`num_changed` elements of `unit` became planes of `nbytes`."""
        bits = max(0.01 * num_changed, 8 * nbytes - _gap_bits(unit.num_elements, num_changed))
        self._observe(self._step_bits[unit.kind.width_bytes], num_changed, bits)

    def observe_packed(self, unit: Unit, nbytes: int) -> None:
        """`unit` became `nbytes` through zstd."""
        self._observe(self._packed_ratio[unit.kind.width_bytes], unit.nbytes, nbytes)

    def planes_s(self, unit: Unit, num_changed: int) -> float:
        return self._total_s(self.planes_bytes(unit, num_changed), Work.SPARSE, num_changed)

    def planes_bytes(self, unit: Unit, num_changed: int) -> float:
        """Estimated bytes of `num_changed` elements of `unit` as planes."""
        step_bits = self._step_bits[unit.kind.width_bytes].value
        return (_gap_bits(unit.num_elements, num_changed) + num_changed * step_bits) / 8

    def full_s(self, unit: Unit) -> float:
        """Estimated seconds of the whole `unit`, in the better of the two full forms."""
        return min(self._full_s(unit), self._packed_s(unit))

    def packs_full(self, unit: Unit) -> bool:
        """Whether zstd is worth its time for the whole `unit`."""
        return self._packed_s(unit) < self._full_s(unit)

    def most_changed(self, unit: Unit) -> int:
        """So many changed elements are still better as planes than as the whole `unit`; 0 to all of them."""
        limit_s = self.full_s(unit)
        low, high = 0, unit.num_elements
        while low < high:
            middle = (low + high + 1) // 2
            if self.planes_s(unit, middle) <= limit_s:
                low = middle
            else:
                high = middle - 1
        return low

    def prefers_full(self, unit: Unit, num_changed: int, nbytes: int) -> bool:
        """Whether the whole `unit` is better after all, now that its changes are known to have `nbytes`."""
        return nbytes >= unit.nbytes or self.full_s(unit) < self._total_s(nbytes, Work.SPARSE, num_changed)

    def _full_s(self, unit: Unit) -> float:
        return self._total_s(unit.nbytes, Work.FULL, unit.nbytes)

    def _packed_s(self, unit: Unit) -> float:
        ratio = self._packed_ratio[unit.kind.width_bytes].value
        return self._total_s(unit.nbytes * ratio, Work.PACKED, unit.nbytes)

    def _total_s(self, nbytes: float, work: Work, amount: int) -> float:
        return nbytes * self._link.value + amount * self.seconds(work) / self._num_cores

    def _observe(self, rate: _Rate, amount: float, total: float) -> None:
        if self._fixed or amount <= 0 or not 0 < total < math.inf:
            return
        with self._lock:
            rate.observe(amount, total)


def _gap_bits(num_elements: int, num_changed: int) -> float:
    """The entropy of which of so many elements have changed, as if anyone might; it does not fall beyond one half."""
    if not num_changed:
        return 0.0
    share = min(0.5, num_changed / num_elements)
    return num_elements * -(share * math.log2(share) + (1 - share) * math.log2(1 - share))
