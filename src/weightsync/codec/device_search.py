"""DeviceSearch: finds what changed between two runs of bytes on a GPU, for an agent that has one beside it.

The search reads both versions whole and finds one element in a hundred. A GPU reads them at the speed of the bus. What
it finds is a hundredth of the bytes: that comes back, and the compiled loops go on with it on the CPU. The delta is the
same, byte for byte, wherever the search ran.
"""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt
import torch

from weightsync.codec import delta_kernels as kernels
from weightsync.codec.delta_planes import Bytes, Found, Positions, Words, shape_of
from weightsync.codec.delta_units import Unit
from weightsync.errors import UnsupportedError

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class DeviceSearch:
    """A `Search` of `codec.delta.encode_delta`. Any number of threads may call it at once.

    Memory on the device: two units and their changes for each thread that calls. Bytes cross the bus from pinned
    memory, a unit at a time; each thread has a stream and buffers of its own.

    Args:
        device: "cuda", "cuda:1"; "cpu" runs the same code without a GPU.

    Raises:
        UnsupportedError: there is no such device.
    """

    def __init__(self, device: str) -> None:
        try:
            self._device = torch.device(device)
            torch.empty(1, device=self._device)
        except (RuntimeError, AssertionError) as error:  # torch without CUDA raises either
            raise UnsupportedError(f"changes can't be searched for on device {device!r}: {error}") from error
        self._own = threading.local()

    def __call__(self, old: Bytes, new: Bytes, unit: Unit, room: int, scratch: Bytes | None = None) -> Found | None:
        """The elements that differ, in host memory; None where there are more than `room`."""
        width = unit.kind.width_bytes
        before, after = self._uploaded(old, 0).view(_WORDS[width]), self._uploaded(new, 1).view(_WORDS[width])
        where = torch.nonzero(before != after).flatten()
        number = where.numel()
        if number > max(1, min(room, unit.num_elements)):
            return None
        if not number:
            return Found(np.empty(0, np.uint32), np.empty(0, unit.kind.word), 0)
        was, now = (_host_bytes(words[where]) for words in (before, after))
        positions = where.to(torch.int32).cpu().numpy().view(np.uint32)
        steps: Words = np.empty(number, unit.kind.word)
        all_of_them = np.empty(number, np.uint32)
        bits, flips = shape_of(unit)
        found = kernels.find_changes(was, now, steps, all_of_them, bits, flips, np.empty(1, np.uint64))
        assert found == number, "elements that the device calls different are different"
        return Found(positions, steps, _sum_on_host(new, unit, positions))

    def _uploaded(self, data: Bytes, which: int) -> torch.Tensor:
        """The bytes on the device; valid until this thread's next call."""
        if self._device.type == "cpu":
            return torch.from_numpy(np.array(data))  # aligned, as an upload is
        stage, there = self._buffers(len(data))[which]
        stage[: len(data)].numpy()[:] = data
        return there[: len(data)].copy_(stage[: len(data)], non_blocking=True)

    def _buffers(self, num_bytes: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """For both versions: pinned memory, and memory of the device; of this thread."""
        found: list[tuple[torch.Tensor, torch.Tensor]] | None = getattr(self._own, "buffers", None)
        if found is None or found[0][0].numel() < num_bytes:
            found = self._own.buffers = [
                (
                    torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True),
                    torch.empty(num_bytes, dtype=torch.uint8, device=self._device),
                )
                for _ in range(2)
            ]
        return found


def _host_bytes(words: torch.Tensor) -> npt.NDArray[np.uint8]:
    found: npt.NDArray[np.uint8] = words.cpu().view(torch.uint8).numpy()
    return found


def _sum_on_host(new: Bytes, unit: Unit, positions: Positions) -> int:
    """Of the elements as they are here: a bit that went wrong on the way to the device, or back, is found by it."""
    return int(kernels.sum_values(positions, new.view(unit.kind.word).take(positions)))
