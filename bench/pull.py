"""The pull path: what a version costs the trainer, and how fast it is fetched, over TCP and on the same host.

`offload`: one rank's `WeightManager.offload` of a bf16 model (no conversion), from call to return, into segments that
are there already, over one memcpy of the same bytes.

`tcp_pull`: a TCP pull through the library (request, six streams, sendfile, block checksums, into a staging that is
there already) less the time of the checksums alone (digests have their own row), over bare sockets: as many streams,
`sendfile` from the same segment, `recv_into` a buffer that is there, no framing, no checksum. Agent and bare sender are
processes of their own.

`shm_pull`: a pull on the same host, from the request to the staged version, over one memcpy: nothing is copied.

`detail` of `tcp_pull` also has the pull with its checksums (`with_checksums_ratio`); 1, 2, 4 and 8 receivers at once;
and `end_to_end`: from `offload` to weights in a module, proved on the way, against a safetensors file in /dev/shm that
is written, read and copied, with no proof.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
import statistics
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import safetensors.torch
import torch

from bench.harness import BenchArgs, Memcpy, Row, facts
from weightsync.engine.embedded import EmbeddedEngine
from weightsync.host.engine_update import EngineUpdate
from weightsync.host.puller import Puller
from weightsync.load.module import ModuleWeightLoader
from weightsync.memory import MappedSegment
from weightsync.memory.folder import open_own, path_of
from weightsync.trainer.publisher import BLOCK_BYTES, WeightManager
from weightsync.transfer.blocks import checksum
from weightsync.types import Deadline
from weightsync.types.transfer_messages import Transport

ROWS = {
    "offload": "one rank's offload of a bf16 model into shared memory, over one memcpy",
    "tcp_pull": "full pull over TCP less its checksums, over bare sockets with as many streams",
    "shm_pull": "full pull on the same host, request to staged, over one memcpy",
}
_TARGETS = {"offload": 1.3, "tcp_pull": 1.1, "shm_pull": 0.2}
_NUM_STREAMS = 6
_HIDDEN = 1024
_TIMEOUT_S = 120.0


def _weights(num_bytes: int) -> dict[str, torch.Tensor]:
    """Tensors of a dense decoder's sizes, as views of one tensor, so that a memcpy of them is one call."""
    shapes = [(2 * _HIDDEN, _HIDDEN), (_HIDDEN, _HIDDEN), (_HIDDEN,), (3 * _HIDDEN, _HIDDEN), (_HIDDEN, 3 * _HIDDEN)]
    sizes = [shape[0] * (shape[1] if len(shape) > 1 else 1) for shape in shapes]
    num_layers = max(1, num_bytes // (2 * sum(sizes)))
    flat = torch.full((num_layers * sum(sizes),), 0.5, dtype=torch.bfloat16)
    flat[::7] = 0.25
    found: dict[str, torch.Tensor] = {}
    start = 0
    for layer in range(num_layers):
        for number, (shape, size) in enumerate(zip(shapes, sizes, strict=True)):
            found[f"layers.{layer}.w{number}"] = flat[start : start + size].view(shape)
            start += size
    found["flat"] = flat
    return found


def run(args: BenchArgs) -> list[Row]:
    """Measures the rows that are wanted."""
    weights = _weights(args.num_bytes)
    flat = weights.pop("flat")
    memcpy = Memcpy(flat)
    rows: list[Row] = []
    with WeightManager("bench") as manager:
        versions = iter(range(1, 10_000))

        def offload() -> float:
            begin = time.perf_counter()
            report = manager.offload(weights.items(), next(versions))
            took = time.perf_counter() - begin
            assert report.published, report.why
            manager.wait_published(report.version.number, timeout_s=_TIMEOUT_S)  # the agent reads; not timed
            return took

        offload()
        offload()  # both segments are there now
        memcpys, offloads = [], []
        for _ in range(args.repeats):
            memcpys.append(_timed(memcpy))
            offloads.append(offload())
        one = statistics.median(memcpys)
        if "offload" in args.rows:
            rows.append(_row("offload", statistics.median(offloads), one, args, {"num_tensors": len(weights)}))
        if "shm_pull" in args.rows:
            rows.append(_shm_pull(manager, memcpy, args))
        if "tcp_pull" in args.rows:
            rows.append(_tcp_pull(manager, weights, flat.nbytes, one, offload, args))
    return rows


def _row(name: str, seconds: float, reference: float, args: BenchArgs, detail: dict[str, Any]) -> Row:
    return Row(
        row=name,
        ratio=seconds / reference,
        target=_TARGETS[name],
        detail={**facts(args), "seconds": {"measured": round(seconds, 5), "reference": round(reference, 5)}, **detail},
    )


def _timed(function: Any) -> float:
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def _shm_pull(manager: WeightManager, memcpy: Memcpy, args: BenchArgs) -> Row:
    puller = Puller(manager.endpoint, "bench", mode="full", receiver_id="shm", transport=Transport.SHM)
    pulls, memcpys = [], []
    for turn in range(args.repeats + 1):
        begin = time.perf_counter()
        pulled = puller.pull(deadline=Deadline(_TIMEOUT_S))
        took = time.perf_counter() - begin
        pulled.release()
        if turn:
            pulls.append(took)
            memcpys.append(_timed(memcpy))
    puller.close()
    return _row("shm_pull", statistics.median(pulls), statistics.median(memcpys), args, {})


def _tcp_pull(
    manager: WeightManager,
    weights: dict[str, torch.Tensor],
    num_bytes: int,
    memcpy_s: float,
    offload: Any,
    args: BenchArgs,
) -> Row:
    puller = Puller(
        manager.endpoint, "bench", mode="full", receiver_id="tcp", transport=Transport.TCP, num_streams=_NUM_STREAMS
    )
    pulled = puller.pull(deadline=Deadline(_TIMEOUT_S))
    with MappedSegment(pulled.segment, need_bytes=num_bytes) as mapped:
        checks = [
            _timed(lambda: [checksum(mapped.memory[at : at + BLOCK_BYTES]) for at in range(0, num_bytes, BLOCK_BYTES)])
            for _ in range(3)
        ]
    checksum_s = statistics.median(checks) / min(_NUM_STREAMS, len(os.sched_getaffinity(0)))
    pulled.release()
    segment = _published_segment(manager)
    pulls, bares = [], []
    with _bare_sender(segment, num_bytes) as address:
        buffer = memoryview(bytearray(num_bytes))
        for turn in range(args.repeats + 1):
            begin = time.perf_counter()
            _bare_receive(address, buffer)
            bare = time.perf_counter() - begin
            puller._staging.forget()  # else what is there of this version counts
            begin = time.perf_counter()
            pulled = puller.pull(deadline=Deadline(_TIMEOUT_S))
            took = time.perf_counter() - begin
            pulled.release()
            if turn:
                pulls.append(took)
                bares.append(bare)
        del buffer
    puller.close()
    bare_s, pull_s = statistics.median(bares), statistics.median(pulls)
    receivers = {str(number): _receivers(manager.endpoint, number, num_bytes) for number in (1, 2, 4, 8)}
    return _row(
        "tcp_pull",
        pull_s - checksum_s,
        bare_s,
        args,
        {
            "with_checksums_ratio": round(pull_s / bare_s, 3),
            "memcpy_ratio": round(pull_s / memcpy_s, 3),
            "gib_a_second": round(num_bytes / (1 << 30) / pull_s, 3),
            "receivers": receivers,
            "end_to_end": _end_to_end(manager, weights, offload, args),
        },
    )


def _published_segment(manager: WeightManager) -> str:
    puller = Puller(manager.endpoint, "bench", mode="full", receiver_id="name", transport=Transport.SHM)
    with puller.pull(deadline=Deadline(_TIMEOUT_S)) as pulled:
        segment = pulled.segment
    puller.close()
    return segment


@contextlib.contextmanager
def _bare_sender(segment: str, num_bytes: int) -> Iterator[tuple[str, int]]:
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    sender = context.Process(target=_send_bare, args=(theirs, segment, num_bytes), daemon=True)
    sender.start()
    try:
        yield mine.recv()
    finally:
        sender.kill()


def _send_bare(conn: Connection, segment: str, num_bytes: int) -> None:
    """Each connection says which share it wants, and gets it by sendfile."""
    listener = socket.create_server(("127.0.0.1", 0))
    conn.send(listener.getsockname())
    fd = open_own(segment, os.O_RDONLY)

    def serve(connection: socket.socket) -> None:
        with connection:
            share = connection.recv(1)[0]
            start, end = _share(share, num_bytes)
            while start < end:
                start += os.sendfile(connection.fileno(), fd, start, end - start)

    while True:
        connection, _ = listener.accept()
        threading.Thread(target=serve, args=(connection,), daemon=True).start()


def _share(share: int, num_bytes: int) -> tuple[int, int]:
    return share * num_bytes // _NUM_STREAMS, (share + 1) * num_bytes // _NUM_STREAMS


def _bare_receive(address: tuple[str, int], buffer: memoryview) -> None:
    def receive(share: int) -> None:
        with socket.create_connection(address) as connection:
            connection.sendall(bytes([share]))
            start, end = _share(share, len(buffer))
            while start < end:
                start += connection.recv_into(buffer[start:end])

    threads = [threading.Thread(target=receive, args=(share,)) for share in range(_NUM_STREAMS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _receivers(endpoint: str, number: int, num_bytes: int) -> dict[str, float]:
    """So many receivers in processes of their own pull at once."""
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for index in range(number):
        mine, theirs = context.Pipe()
        processes.append(context.Process(target=_receive, args=(theirs, endpoint, index), daemon=True))
        processes[-1].start()
        pipes.append(mine)
    for pipe in pipes:
        pipe.recv()
    begin = time.perf_counter()
    for pipe in pipes:
        pipe.send("go")
    each = [pipe.recv() for pipe in pipes]
    took = time.perf_counter() - begin
    for process in processes:
        process.kill()
        process.join()
    rate = number * num_bytes / (1 << 30) / took
    return {
        "median_s": round(statistics.median(each), 3),
        "slowest_s": round(max(each), 3),
        "gib_a_second": round(rate, 3),
    }


def _receive(conn: Connection, endpoint: str, index: int) -> None:
    puller = Puller(endpoint, "bench", mode="full", receiver_id=f"r{index}", transport=Transport.TCP)
    puller.pull(deadline=Deadline(_TIMEOUT_S)).release()  # its staging is there now
    puller._staging.forget()
    conn.send("ready")
    conn.recv()
    begin = time.perf_counter()
    puller.pull(deadline=Deadline(_TIMEOUT_S)).release()
    conn.send(time.perf_counter() - begin)
    puller.close()


def _end_to_end(
    manager: WeightManager, weights: dict[str, torch.Tensor], offload: Any, args: BenchArgs
) -> dict[str, float]:
    """Seconds from a trained step to weights in another module, proof included, and by a file in /dev/shm without."""
    module = torch.nn.Module()
    for name, tensor in weights.items():
        module.register_parameter(
            name.replace(".", "_"), torch.nn.Parameter(torch.zeros_like(tensor), requires_grad=False)
        )
    loader = ModuleWeightLoader(module, in_place=True, name_map=lambda name: name.replace(".", "_"))
    engine = EngineUpdate(EmbeddedEngine.of(loader), "bench")
    ours: dict[str, list[float]] = {"tcp": [], "shm": []}
    paused: list[float] = []
    for transport in (Transport.TCP, Transport.SHM):
        puller = Puller(manager.endpoint, "bench", mode="full", receiver_id="e2e", transport=transport)
        for turn in range(4):
            begin = time.perf_counter()
            offload()
            with puller.pull(deadline=Deadline(_TIMEOUT_S)) as pulled:
                paused.append(engine.load(pulled, deadline=Deadline(_TIMEOUT_S)).paused_s)
            if turn:
                ours[transport].append(time.perf_counter() - begin)
        puller.close()
    path = path_of("weightsync-bench-file")
    files = []
    try:
        for turn in range(4):
            begin = time.perf_counter()
            safetensors.torch.save_file(weights, path)
            loaded = safetensors.torch.load_file(path)
            with torch.no_grad():
                for name, tensor in loaded.items():
                    module.get_parameter(name.replace(".", "_")).copy_(tensor)
            del loaded
            if turn:
                files.append(time.perf_counter() - begin)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
    return {
        **{f"{transport}_s": round(statistics.median(times), 4) for transport, times in ours.items()},
        "paused_s": round(statistics.median(paused), 4),
        "safetensors_in_shm_s": round(statistics.median(files), 4),
    }
