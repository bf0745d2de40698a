"""SGLangWorkers: the receiving end of a push as SGLang's workers have it, by torch's own calls and none of ours."""

from __future__ import annotations

import multiprocessing
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from datetime import timedelta
from typing import Any

from weightsync.types import itemsize_bytes

_JOIN_TIMEOUT_S = 20.0
_CALL_TIMEOUT_S = 60.0  # with the start of a process
_groups: dict[str, Any] = {}  # of a worker process


class SGLangWorkers:
    """One process a worker. They join process groups and receive flattened buckets as SGLang 0.5.23's do, on the CPU.

    Args:
        number: how many; the tensor-parallel size.
    """

    def __init__(self, number: int = 1) -> None:
        self.number = number
        self._processes = [_process() for _ in range(number)]
        self._last: list[Future[Any]] = []
        self._all(_start, None)  # else the first join waits for what they import

    def join(self, body: Mapping[str, Any]) -> None:
        """As `/init_weights_update_group` tells; returns when all have joined.

        Raises:
            RuntimeError: somebody did not come.
        """
        for rank, busy in enumerate(self._last):
            if not busy.done():  # it waits for a trainer that has given up: who joins next would wait with it
                _end(self._processes[rank])
                self._processes[rank] = _process()
        self._all(_join, dict(body))

    def leave(self, group_name: str) -> None:
        """Leaves a group."""
        self._all(_leave, group_name)

    def receive(self, body: Mapping[str, Any]) -> list[bytes]:
        """One bucket, as `/update_weights_from_distributed` tells; each tensor's bytes.

        Raises:
            ValueError: a tensor would not lie at a multiple of its itemsize; nothing is received.
            RuntimeError: the sender is gone, or workers got different bytes.
        """
        found: list[list[bytes]] = self._all(_receive, dict(body))
        if any(each != found[0] for each in found):
            raise RuntimeError("workers received different bytes")
        return found[0]

    def close(self) -> None:
        """Ends the processes, whatever they wait for. Idempotent."""
        for each in self._processes:
            _end(each)

    def _all(self, call: Any, argument: Any) -> list[Any]:
        try:
            self._last = [each.submit(call, argument, rank) for rank, each in enumerate(self._processes)]
            return [future.result(_CALL_TIMEOUT_S) for future in self._last]
        except (BrokenProcessPool, TimeoutError) as error:
            raise RuntimeError("a worker died, or hangs") from error


def _process() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))


def _end(one: ProcessPoolExecutor) -> None:
    for process in list((one._processes or {}).values()):
        process.kill()
    one.shutdown(cancel_futures=True)


def _start(_: None, tp_rank: int) -> None:
    pass


def parts(names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """Where each tensor lies in a flattened bucket: first byte and end.

    Raises:
        ValueError: there is none, or one would not lie at a multiple of its itemsize.
    """
    if not names:
        raise ValueError("Cannot create empty tensor bucket")
    found, end = [], 0
    for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
        size = itemsize_bytes(dtype)
        if end % size:
            raise ValueError(f"Unaligned received tensor {name}: byte offset {end}, dtype {dtype}")
        for extent in shape:
            size *= extent
        found.append((end, end + size))
        end += size
    return found


def _join(body: Mapping[str, Any], tp_rank: int) -> None:
    from torch.distributed import distributed_c10d as c10d
    from torch.distributed.rendezvous import rendezvous

    name, world_size, rank = body["group_name"], body["world_size"], body["rank_offset"] + tp_rank
    timeout = timedelta(seconds=_JOIN_TIMEOUT_S)
    url = f"tcp://{body['master_address']}:{body['master_port']}"
    store, _, _ = next(rendezvous(url, rank, world_size, timeout=timeout))
    store.set_timeout(timeout)
    group, _ = c10d._new_process_group_helper(
        world_size,
        rank,
        [],
        c10d.Backend(body["backend"]),
        c10d.PrefixStore(name, store),
        group_name=name,
        timeout=timeout,
    )
    c10d._world.pg_group_ranks[group] = {each: each for each in range(world_size)}
    _groups[name] = group


def _leave(group_name: str, tp_rank: int) -> None:
    import torch.distributed as dist

    dist.destroy_process_group(_groups.pop(group_name))


def _receive(body: Mapping[str, Any], tp_rank: int) -> list[bytes]:
    import torch
    import torch.distributed as dist

    places = parts(body["names"], body["dtypes"], body["shapes"])
    bucket = torch.empty(places[-1][1], dtype=torch.uint8)
    dist.broadcast(bucket, src=0, group=_groups[body["group_name"]])
    return [bucket[start:end].numpy().tobytes() for start, end in places]
