"""CUDA IPC and packed CUDA IPC between two processes on one GPU: every bit, and how fast. Needs a CUDA GPU."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch

from weightsync.testing.processes import children
from weightsync.transfer.base import SharedChunk
from weightsync.transfer.ipc import IpcSharer, IpcTransferSender
from weightsync.transfer.registry import strategy_named
from weightsync.types import Deadline, EmptyWeightSyncInitInfo, WeightChunk

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

STRATEGIES = ("cuda_ipc", "packed_cuda_ipc")
REPEATS = 20
BANDWIDTH_TARGET = 0.8
CHUNK_BYTES = 256 << 20


def odd_tensors(seed: int) -> dict[str, torch.Tensor]:
    """Several dtypes; 0-d, empty, not contiguous, and a view into the middle of an allocation."""
    generator = torch.Generator().manual_seed(seed)

    def words(count: int) -> torch.Tensor:
        return torch.randint(0, 256, (count,), generator=generator, dtype=torch.uint8)

    return {
        "bf16": words(2 * 5000).view(torch.bfloat16),
        "fp8": words(15).view(torch.float8_e4m3fn).reshape(3, 5),
        "odd": words(7),
        "step": torch.tensor(seed, dtype=torch.int64),
        "empty": torch.empty(0, 4),
        "mask": words(9) > 127,
        "t": words(4 * 12).view(torch.float32).reshape(4, 3).t(),
        "middle": words(4 * 4096).view(torch.int32)[100:2100],
    }


def chunk_of(tensors: dict[str, torch.Tensor]) -> WeightChunk:
    on_gpu = tuple(tensor.cuda() for tensor in tensors.values())
    return WeightChunk(names=tuple(tensors), tensors=on_gpu)


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def engine_main(strategy: str, conn: Any) -> None:
    """Receives what the test announces; answers with its bytes, or with the seconds that loading them took."""
    torch.cuda.set_device(0)
    info = EmptyWeightSyncInitInfo(strategy=strategy, group_name="g")
    receiver = strategy_named(strategy).create_receiver(info, rank=1)
    weights: dict[str, torch.Tensor] = {}
    conn.send("ready")
    while (order := conn.recv()) is not None:
        what, request = order
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for update in receiver.receive_weights(request, deadline=Deadline(30)):
            tensor = update.tensor  # type: ignore[union-attr]
            if update.name not in weights or weights[update.name].shape != tensor.shape:
                weights[update.name] = torch.empty_like(tensor)
            weights[update.name].copy_(tensor)
        receiver.release(request)
        took = time.perf_counter() - begin
        conn.send(took if what == "time" else {name: raw(tensor) for name, tensor in weights.items()})
    receiver.close()
    conn.send("closed")


def announce(sender: IpcTransferSender, sharer: IpcSharer, chunk: WeightChunk, seq: int) -> Any:
    lent = SharedChunk.of(chunk, (sharer.share(chunk, seq),), let_go=lambda: None)
    return sender.create_request(lent, session="s", seq=seq)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_bit_arrives_in_another_process(strategy: str) -> None:
    """Several chunks through every slot, twice; then the receiver closes and a new one opens the same memory."""
    sharer = IpcSharer(packed=strategy == "packed_cuda_ipc")
    sender = IpcTransferSender(packed=strategy == "packed_cuda_ipc", record=lambda record: None, track="t")
    with children() as start:
        for _ in range(2):
            engine = start(engine_main, strategy, talk=True)
            assert engine.recv(60) == "ready"
            for seq in range(2 * sharer.num_slots):
                tensors = odd_tensors(seq)
                engine.conn.send(("bytes", announce(sender, sharer, chunk_of(tensors), seq)))
                assert engine.recv(60) == {name: raw(tensor) for name, tensor in tensors.items()}
            engine.conn.send(None)
            assert engine.recv(60) == "closed"
            sharer.end_sync(failed=False)
        sharer.close()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_bandwidth_is_near_that_of_a_copy_on_the_device(strategy: str, record_property: Any) -> None:
    """Sharing, opening and loading a chunk moves its bytes at 0.8 of a device-to-device copy's bandwidth.

    `packed_cuda_ipc` copies twice, into the bucket and out of it, so its yardstick is two copies.
    """
    torch.cuda.set_device(0)
    num_copies = 2 if strategy == "packed_cuda_ipc" else 1
    sharer = IpcSharer(packed=strategy == "packed_cuda_ipc")
    sender = IpcTransferSender(packed=strategy == "packed_cuda_ipc", record=lambda record: None, track="t")
    chunk = chunk_of({f"w{i}": torch.randn(CHUNK_BYTES // 16).bfloat16() for i in range(8)})
    source = torch.cat([tensor.reshape(-1) for tensor in chunk.tensors])
    target = torch.empty_like(source)
    copies, moves = [], []
    with children() as start:
        engine = start(engine_main, strategy, talk=True)
        assert engine.recv(60) == "ready"
        for turn in range(REPEATS + 2):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(num_copies):
                target.copy_(source)
            torch.cuda.synchronize()
            copied = time.perf_counter() - begin
            begin = time.perf_counter()
            request = announce(sender, sharer, chunk, turn)
            shared = time.perf_counter() - begin
            engine.conn.send(("time", request))
            loaded = engine.recv(60)
            if turn > 1:
                copies.append(copied)
                moves.append(shared + loaded)
        engine.conn.send(None)
        assert engine.recv(60) == "closed"
    sharer.close()
    ratio = sorted(copies)[REPEATS // 2] / sorted(moves)[REPEATS // 2]
    record_property("bandwidth_ratio", ratio)
    assert ratio >= BANDWIDTH_TARGET, f"{ratio:.2f} of a device-to-device copy"


def allocate_expandable(conn: Any) -> None:
    """Runs with expandable segments; says what lending in place and lending a bucket end in."""
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"  # read at the first use of the GPU
    chunk = chunk_of(odd_tensors(1))
    for packed in (False, True):
        sharer = IpcSharer(packed=packed)
        try:
            sharer.share(chunk, 0)
            conn.send("ok")
        except Exception as error:
            conn.send(f"{type(error).__name__}: {error}")
        sharer.close()


def test_expandable_segments_are_refused_in_words_and_packed_goes_on() -> None:
    with children() as start:
        trainer = start(allocate_expandable, talk=True)
        said = trainer.recv(60)
        assert said.startswith("UnsupportedError")
        assert "expandable_segments" in said
        assert trainer.recv(60) == "ok"


def test_memory_is_given_back_when_the_sharer_closes() -> None:
    """Its buckets are the driver's own, so the device's free memory shows them."""
    torch.cuda.set_device(0)
    chunk = chunk_of({"w": torch.randn(CHUNK_BYTES // 4)})
    sharer = IpcSharer(packed=True)
    torch.cuda.synchronize()
    free, _ = torch.cuda.mem_get_info()
    for seq in range(5):
        sharer.share(chunk, seq)
    held, _ = torch.cuda.mem_get_info()
    assert free - held >= 3 * CHUNK_BYTES
    sharer.close()
    assert torch.cuda.mem_get_info()[0] >= free - (32 << 20)
