"""Bench: a device, its clock and its yardsticks; rows; a model that generates beside what is measured."""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

REPEATS = 7
HIDDEN = 1024


class Bench:
    """What a part measures with. "cpu" stands for a GPU in a dry run: the same calls, no device.

    Args:
        device: "cuda" or "cpu".
        num_bytes: of the models.
        width: of their square layers.
    """

    def __init__(self, device: str, *, num_bytes: int, width: int = HIDDEN) -> None:
        self.device = torch.device(device, 0) if device == "cuda" else torch.device(device)
        self.num_bytes = num_bytes
        self.width = width
        self.rows: list[dict[str, Any]] = []
        if self.is_cuda:
            torch.cuda.set_device(self.device)

    @property
    def is_cuda(self) -> bool:
        """Whether this is no dry run."""
        return self.device.type == "cuda"

    @property
    def memory_bytes(self) -> int:
        """Of the device."""
        return torch.cuda.get_device_properties(self.device).total_memory if self.is_cuda else 1 << 40

    @property
    def repeats(self) -> int:
        """How often things are timed."""
        return REPEATS if self.is_cuda else 2

    def wait(self) -> None:
        """Until the device has done what was queued."""
        if self.is_cuda:
            torch.cuda.synchronize()

    def seconds(self, function: Callable[[], object], *, before: Callable[[], object] = lambda: None) -> float:
        """Median seconds of a call and all that it queues; the first does not count."""
        times = []
        for turn in range(self.repeats + 1):
            before()
            self.wait()
            begin = time.perf_counter()
            function()
            self.wait()
            if turn:
                times.append(time.perf_counter() - begin)
        return statistics.median(times)

    def copy_s(self, num_bytes: int) -> float:
        """Seconds of one copy of so many bytes on the device: the yardstick."""
        source = torch.ones(num_bytes, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        return self.seconds(lambda: target.copy_(source))

    def to_host_s(self, num_bytes: int) -> float:
        """Seconds of one copy of so many bytes into pinned host memory."""
        source = torch.ones(num_bytes, dtype=torch.uint8, device=self.device)
        target = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self.is_cuda)
        return self.seconds(lambda: target.copy_(source, non_blocking=True))

    def row(self, name: str, took_s: float, yardstick_s: float, yardstick: str, **detail: Any) -> None:
        """Notes a ratio."""
        facts = {"yardstick": yardstick, "seconds": took_s, "yardstick_seconds": yardstick_s, **detail}
        self.rows.append({"row": name, "ratio": took_s / yardstick_s, "detail": facts})

    def beside_generation(self, name: str, function: Callable[[], object]) -> None:
        """Notes what `function` takes beside a model that generates, over what it takes alone, and what generation
        loses.
        """
        alone_s = self.seconds(function)
        with generating(self.device) as tokens:
            rate_before = rate(tokens)
            beside_s = self.seconds(function)
            rate_during = rate_while(tokens, function)
        self.row(
            f"{name}_beside_generation", beside_s, alone_s, "the same alone",
            tokens_per_s=rate_before, tokens_per_s_during=rate_during,
        )  # fmt: skip


def model_of(bench: Bench, *, seed: int, dtype: torch.dtype = torch.bfloat16) -> torch.nn.Module:
    """Layers of `width` x `width` and small vectors, random, of about the bench's bytes."""
    generator, width = torch.Generator(device=bench.device).manual_seed(seed), bench.width
    layer_bytes = (width * width + width) * dtype.itemsize
    model = torch.nn.Module()
    for index in range(max(2, bench.num_bytes // layer_bytes)):
        for name, shape in ((f"w{index}", (width, width)), (f"b{index}", (width,))):
            values = torch.randn(shape, generator=generator, device=bench.device).to(dtype)
            model.register_parameter(name, torch.nn.Parameter(values, requires_grad=False))
    return model


def words_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's bits as integers: a NaN is itself."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.detach().contiguous().reshape(-1).view(kinds[tensor.element_size()])


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether both have the same bits, wherever they lie."""
    return first.dtype == second.dtype and torch.equal(words_of(first).cpu(), words_of(second).cpu())


@contextlib.contextmanager
def generating(device: torch.device) -> Iterator[list[int]]:
    """A model decodes on a stream and a thread of its own, token by token, until the block ends: how many, so far."""
    tokens = [0]
    ended = threading.Event()
    failed: list[BaseException] = []

    def decode() -> None:
        try:
            stream = torch.cuda.Stream(device) if device.type == "cuda" else None
            with torch.no_grad(), torch.cuda.stream(stream) if stream is not None else contextlib.nullcontext():
                layers = [torch.randn(HIDDEN, HIDDEN, device=device) / HIDDEN**0.5 for _ in range(8)]
                state = torch.randn(8, HIDDEN, device=device)
                while not ended.is_set():
                    for layer in layers:
                        state = torch.tanh(state @ layer)
                    state.argmax(-1).cpu()  # a token is known when the host has it
                    tokens[0] += 1
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=decode, name="generation", daemon=True)
    thread.start()
    try:
        yield tokens
    finally:
        ended.set()
        thread.join(30)
    if failed:
        raise failed[0]


def rate(tokens: list[int], *, for_s: float = 0.3) -> float:
    """Tokens a second while nothing else runs."""
    first, begin = tokens[0], time.perf_counter()
    threading.Event().wait(for_s)
    return (tokens[0] - first) / (time.perf_counter() - begin)


def rate_while(tokens: list[int], function: Callable[[], object], *, for_s: float = 0.3) -> float:
    """Tokens a second while `function` runs again and again."""
    first, begin = tokens[0], time.perf_counter()
    while time.perf_counter() - begin < for_s:
        function()
    return (tokens[0] - first) / (time.perf_counter() - begin)
