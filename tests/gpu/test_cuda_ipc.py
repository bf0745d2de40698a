"""CUDA IPC and packed CUDA IPC between two processes on one GPU: every bit, and how fast. Needs a CUDA GPU."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from tests.gpu.parts_ipc import STRATEGIES, chunk_of, odd_tensors, prove_every_bit, time_ipc
from tests.gpu.timing import Bench
from tests.standins.processes import children
from weightsync.engine.worker import EngineWorker
from weightsync.handles.fanout import in_thread
from weightsync.load.module import ModuleWeightLoader
from weightsync.transfer.ipc import IpcSharer, borrowers
from weightsync.transfer.ipc_cuda import CudaLender, device_uuid

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

BANDWIDTH_TARGET = 0.8
EACH_CHUNK_S = 5e-3
CHUNK_BYTES = 256 << 20


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_bit_arrives_in_another_process(strategy: str) -> None:
    prove_every_bit(Bench("cuda", num_bytes=0), strategy)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_bandwidth_is_near_that_of_a_copy_on_the_device(strategy: str) -> None:
    """Sharing, opening and loading chunks moves bytes at 0.8 of a device-to-device copy's bandwidth, beside what each
    chunk costs whatever its size: a GPU of today copies 256 MiB in 0.14 ms, less than it takes to open a handle."""
    rate, each_chunk_s = time_ipc(Bench("cuda", num_bytes=0), strategy)
    assert rate >= BANDWIDTH_TARGET
    assert each_chunk_s <= EACH_CHUNK_S


def allocate_expandable(conn: Any) -> None:
    """Runs with expandable segments; says what lending in place and lending a bucket end in."""
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"  # read at the first use of the GPU
    chunk = chunk_of(odd_tensors(1), "cuda")
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
    chunk = chunk_of({"w": torch.randn(CHUNK_BYTES // 4)}, "cuda")
    sharer = IpcSharer(packed=True)
    torch.cuda.synchronize()
    free, _ = torch.cuda.mem_get_info()
    for seq in range(5):
        sharer.share(chunk, seq)
    held, _ = torch.cuda.mem_get_info()
    assert free - held >= 3 * CHUNK_BYTES
    sharer.close()
    assert torch.cuda.mem_get_info()[0] >= free - (32 << 20)


def test_a_bucket_takes_what_torch_keeps_and_does_not_use() -> None:
    """As behind a training step: torch has nearly all of the GPU, and uses little of it."""
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    kept = torch.empty(free // 10 * 9, dtype=torch.uint8, device=device)
    del kept
    assert torch.cuda.mem_get_info()[0] < free // 2
    lender = CudaLender(device, 1)
    assert len(lender.bucket(0, free // 2)) == free // 2
    lender.close()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_an_engine_opens_memory_of_its_models_gpu_and_not_of_the_current_one() -> None:
    """By the calls of a server's thread, whose current GPU is the first."""
    torch.cuda.set_device(0)
    worker = EngineWorker(ModuleWeightLoader(torch.nn.Linear(4, 4).to("cuda:1")))

    def opens() -> str:
        worker._use_device()
        return borrowers()[0].place

    assert in_thread(opens, name="server").result(60) == f"GPU {device_uuid(torch.device('cuda', 1))}"
