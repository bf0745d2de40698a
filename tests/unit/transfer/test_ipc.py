"""IPC: what the transfer contract does not say: whose handles are taken, what is refused, who may still read."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from weightsync.config import WeightSyncConfig
from weightsync.errors import (
    InvalidRequestError,
    SharedMemoryError,
    SyncFailedError,
    TransferAbortedError,
    TransferError,
    UnsupportedError,
    WeightSyncError,
)
from weightsync.memory import Segment, folder, host_nonce
from weightsync.transfer import ipc_cuda, ipc_receive
from weightsync.transfer.base import SharedChunk
from weightsync.transfer.ipc import (
    CudaIpcTransferStrategy,
    IpcSharer,
    IpcTransferReceiver,
    IpcTransferSender,
    PackedCudaIpcTransferStrategy,
    borrowers,
)
from weightsync.transfer.ipc_cuda import CudaBorrower, CudaDriver, CudaLender, _Opened
from weightsync.transfer.ipc_handles import ShmLender
from weightsync.transfer.registry import strategy_for, strategy_named
from weightsync.types import (
    CudaMemoryHandle,
    Deadline,
    EmptyWeightSyncInitInfo,
    PackedCudaIpcWeightUpdateRequest,
    Patch,
    PatchWeightUpdateRequest,
    SharedMemoryHandle,
    TorchDistributedWeightSyncInitInfo,
    WeightChunk,
)

BOTH = pytest.mark.parametrize("packed", [False, True])


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(folder, "_path", str(tmp_path))
    yield tmp_path
    gc.collect()
    assert [name for name in os.listdir(tmp_path) if not name.startswith("weightsync-host-")] == []


def strategy(packed: bool) -> Any:
    return PackedCudaIpcTransferStrategy() if packed else CudaIpcTransferStrategy()


def chunk_of(fill: int, numel: int = 1000) -> WeightChunk:
    tensors = (torch.full((numel,), fill, dtype=torch.int32), torch.empty(0, 3), torch.tensor(fill))
    return WeightChunk(names=("w", "none", "step"), tensors=tensors)


class Ends:
    """A sharer, and a receiver that gets what a sender would announce of it."""

    def __init__(self, packed: bool) -> None:
        self.sharer = IpcSharer(packed=packed)
        self.sender = IpcTransferSender(packed=packed, record=lambda record: None, track="t")
        self.receiver = self.new_receiver(packed)

    def new_receiver(self, packed: bool) -> Any:
        return strategy(packed).create_receiver(EmptyWeightSyncInitInfo(strategy="cuda_ipc", group_name="g"), rank=1)

    def request(self, chunk: WeightChunk, seq: int, *, others: tuple[Any, ...] = ()) -> Any:
        """The announcement; `others` are handles of other ranks, which come first."""
        lists = (*others, self.sharer.share(chunk, seq))
        return self.sender.create_request(SharedChunk.of(chunk, lists, let_go=lambda: None), session="s", seq=seq)

    def receive(self, request: Any) -> list[torch.Tensor]:
        return [update.tensor for update in self.receiver.receive_weights(request, deadline=Deadline(5))]  # type: ignore[union-attr]

    def close(self) -> None:
        self.receiver.close()
        self.sharer.close()


@pytest.fixture
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    made = Ends(request.param)
    yield made
    made.close()


both_ends = pytest.mark.parametrize("ends", [False, True], indirect=True, ids=["each", "packed"])


@both_ends
def test_a_late_reader_keeps_the_old_bytes_after_a_failure(ends: Ends) -> None:
    """Seen to fail: with the segments kept after a failure, the view had the next sync's bytes."""
    late = ends.receive(ends.request(chunk_of(1), 0))[0]
    ends.sharer.end_sync(failed=True)
    again = ends.receive(ends.request(chunk_of(2), 0))[0]
    assert (late[0], again[0]) == (1, 2)
    assert bool((late == 1).all())


@both_ends
def test_buckets_stay_from_sync_to_sync_and_are_mapped_once(ends: Ends, own_folder: Path) -> None:
    names = set()
    for turn in range(3):
        for seq in range(5):
            (got, none, step) = ends.receive(ends.request(chunk_of(10 * turn + seq), seq))
            assert int(got[0]) == int(step) == 10 * turn + seq
            assert none.shape == (0, 3)
        ends.sharer.end_sync(failed=False)
        names.add(tuple(sorted(name for name in os.listdir(own_folder) if "host" not in name)))
    (kept,) = names
    assert len(kept) == 3


@BOTH
@pytest.mark.parametrize("keep", [True, False])
def test_what_is_mapped_goes_with_its_session_where_it_is_not_to_be_kept(
    own_folder: Path, packed: bool, keep: bool
) -> None:
    """A pull's segments: a dead trainer's pages would stay as long as they are mapped. A push keeps its buckets."""
    ends = Ends(packed)
    info = EmptyWeightSyncInitInfo(strategy="cuda_ipc", group_name="g", keep_mapped=keep)
    ends.receiver = strategy(packed).create_receiver(info, rank=1)
    for turn in range(2):
        views = []
        for seq in range(3):
            request = ends.request(chunk_of(10 * turn + seq), seq)
            views.append(ends.receive(request)[0])
            assert int(views[-1][0]) == 10 * turn + seq
            ends.receiver.release(request)
        late = views.pop()
        assert _private_maps(own_folder) == 3
        views.clear()
        ends.receiver.end_session()
        ends.receiver.end_session()
        assert int(late[0]) == 10 * turn + 2, "what is looked at yet stays readable"
        del late
        gc.collect()
        assert _private_maps(own_folder) == (3 if keep else 0)
    ends.close()


def _private_maps(own_folder: Path) -> int:
    """How many segments this process maps as a reader does."""
    lines = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines()]
    return sum(len(line) == 6 and line[1].endswith("p") and f"{own_folder}/weightsync-" in line[5] for line in lines)


@both_ends
def test_a_bucket_that_has_become_too_small_is_replaced_on_both_ends(ends: Ends) -> None:
    """And the old one's memory is given back: nobody maps what nobody writes."""
    ends.receiver.release(ends.request(chunk_of(1), 0))
    ends.receive(ends.request(chunk_of(1), 0))
    gc.collect()
    for numel in (1_000_000, 3_000_000):
        (got, _, _) = ends.receive(ends.request(chunk_of(2, numel), 0))
        assert bool((got == 2).all())
        del got
    gc.collect()
    maps = {
        line.split()[-2 if "deleted" in line else -1]
        for line in Path("/proc/self/maps").read_text().splitlines()
        if folder._path in line
    }
    assert len(maps) == 1, maps


def test_the_memory_of_an_outgrown_bucket_is_free_though_an_idle_engine_maps_it() -> None:
    """Seen to fail: with the mapping's pages kept, /dev/shm needed room for four chunks and more."""
    ends = Ends(packed=True)
    request = ends.request(chunk_of(1), 0)
    ends.receive(request)
    ends.receiver.release(request)
    gc.collect()
    (mapped,) = ends.receiver._borrowers[-1]._mapped.values()
    assert os.fstat(mapped._fd).st_blocks
    ends.request(chunk_of(2, 1_000_000), 0)
    assert os.fstat(mapped._fd).st_blocks == 0
    ends.close()


def test_only_where_chunks_need_the_room_smaller_ones_are_advised() -> None:
    """Seen red: so was who had no room for a whole model, which chunk_bytes does not make smaller."""
    with pytest.raises(SharedMemoryError, match=r"; raise the size of /dev/shm .* or lower chunk_bytes"):
        ShmLender(1).bucket(0, 1 << 60)
    with pytest.raises(SharedMemoryError, match="; raise the size of /dev/shm") as caught:
        Segment(1 << 60)
    assert "chunk_bytes" not in str(caught.value)


@both_ends
def test_a_swept_folder_costs_one_sync(ends: Ends, own_folder: Path) -> None:
    """A tmp cleaner takes the nonce: an engine that joins makes another, which the trainer learns after the failure.

    Seen to fail: with the lender kept after a failure, every later sync was refused as well.
    """
    packed = isinstance(ends.request(chunk_of(1), 0), PackedCudaIpcWeightUpdateRequest)
    for path in own_folder.iterdir():
        path.unlink()
    ends.receiver.close()
    ends.receiver = ends.new_receiver(packed)
    with pytest.raises(UnsupportedError, match="lends memory of host"):
        ends.receive(ends.request(chunk_of(1), 0))
    ends.sharer.end_sync(failed=True)
    (got, _, _) = ends.receive(ends.request(chunk_of(2), 0))
    assert int(got[0]) == 2


def test_what_can_not_be_handed_out_is_let_go_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen red: the chunk was held for ever, and the receiver could not be closed."""
    ends = Ends(packed=False)

    def fails(*_: Any) -> None:
        raise UnsupportedError("a dtype that this torch lacks")

    monkeypatch.setattr(ipc_receive, "_updates", fails)
    with pytest.raises(UnsupportedError):
        ends.receive(ends.request(chunk_of(1), 0))
    assert ends.receiver._lent == {}
    ends.close()


def test_a_receiver_that_closes_clears_away_what_a_killed_trainer_lent(own_folder: Path) -> None:
    ends = Ends(packed=True)
    ends.request(chunk_of(1), 0)
    (alive,) = [path for path in own_folder.iterdir() if "host" not in path.name]
    dead = own_folder / f"weightsync-1-{'0' * 16}"  # nobody has its lock
    os.close(os.open(dead, os.O_CREAT | os.O_RDWR, 0o600))
    ends.receiver.close()
    assert (dead.exists(), alive.exists()) == (False, True)
    ends.sharer.close()


@both_ends
def test_a_worker_takes_the_handles_of_its_own_host_wherever_they_stand(ends: Ends) -> None:
    packed = isinstance(ends.request(chunk_of(1), 0), PackedCudaIpcWeightUpdateRequest)
    mine = ends.sharer.share(chunk_of(4), 1)
    far = tuple(
        SharedMemoryHandle(host_nonce="0" * 32, name="weightsync-1-x", offset_bytes=0, size_bytes=h.size_bytes)
        for h in mine
    )
    gpu = tuple(
        CudaMemoryHandle(device_uuid="a-b", handle="ab" * 64, offset_bytes=0, size_bytes=h.size_bytes) for h in mine
    )
    (got, _, _) = ends.receive(ends.request(chunk_of(4), 1, others=(far, gpu)))
    assert int(got[0]) == 4
    request = ends.sender.create_request(
        SharedChunk.of(chunk_of(4), (far, gpu), let_go=lambda: None), session="s", seq=2
    )
    with pytest.raises(UnsupportedError, match="broadcast") as caught:
        ends.receive(request)
    for word in ("GPU a-b", "host " + "0" * 32, borrowers()[-1].place):
        assert word in caught.value.message
    assert packed == (len(mine) == 1)


def test_a_list_of_two_hosts_is_nobodys() -> None:
    """All of a chunk comes from one place, or nothing."""
    ends = Ends(packed=False)
    mine = ends.sharer.share(chunk_of(4), 1)
    far = SharedMemoryHandle(host_nonce="0" * 32, name="weightsync-1-x", offset_bytes=0, size_bytes=mine[0].size_bytes)
    request = ends.sender.create_request(
        SharedChunk.of(chunk_of(4), ((far, *mine[1:]),), let_go=lambda: None), session="s", seq=1
    )
    with pytest.raises(UnsupportedError):
        ends.receive(request)
    ends.close()


@both_ends
def test_after_the_close_nothing_is_opened_and_what_is_read_stays_until_it_is_released(ends: Ends) -> None:
    request = ends.request(chunk_of(3), 0)
    (got, _, _) = ends.receive(request)
    ends.receiver.close()
    with pytest.raises(TransferAbortedError):
        ends.receive(ends.request(chunk_of(4), 1))
    assert ends.receiver._given_back is False, "a loader still reads"
    assert bool((got == 3).all())
    ends.receiver.release(request)
    assert ends.receiver._given_back is True
    ends.receiver.release(request)


@both_ends
def test_memory_that_is_gone_is_told_as_such(ends: Ends) -> None:
    request = ends.request(chunk_of(3), 0)
    ends.sharer.close()
    with pytest.raises(SharedMemoryError, match="gone"):
        ends.receive(request)


quiet = settings(deadline=None, max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])


@quiet
@given(offset=st.integers(0, 3 << 20), packed=st.booleans(), name=st.sampled_from(["", "weightsync-1-gone", "a"]))
def test_no_announcement_reads_beyond_its_segment(offset: int, packed: bool, name: str) -> None:
    """Hostile offsets and names: a typed error, or exactly the bytes that lie there."""
    ends = Ends(packed)
    chunk = WeightChunk(names=("w",), tensors=(torch.arange(64, dtype=torch.int64),))
    (handle,) = ends.sharer.share(chunk, 0)
    wrong = SharedMemoryHandle(
        host_nonce=handle.host_nonce,  # type: ignore[union-attr]
        name=name or handle.name,  # type: ignore[union-attr]
        offset_bytes=offset,
        size_bytes=handle.size_bytes,
    )
    request = ends.sender.create_request(SharedChunk.of(chunk, ((wrong,),), let_go=lambda: None), session="s", seq=0)
    try:
        (got,) = ends.receive(request)
    except WeightSyncError:
        assert name or offset % 8 or offset + 512 > (2 << 20)
    else:
        assert got.shape == (64,)
        assert offset % 8 == 0
        assert offset + 512 <= 2 << 20
        del got
    ends.close()


@BOTH
def test_what_a_codec_changed_is_not_announced(packed: bool) -> None:
    """In words: engines would open something else than what the digests are of."""
    ends = Ends(packed)
    lent = SharedChunk.of(chunk_of(1), (ends.sharer.share(chunk_of(1), 0),), let_go=lambda: None)
    changed = dataclasses.replace(lent, tensors=(lent.tensors[0] + 1, *lent.tensors[1:]))
    for chunk, words in ((chunk_of(1), "codec"), (changed, "codec")):
        sender = IpcTransferSender(packed=packed, record=lambda record: None, track="t")
        with pytest.raises(UnsupportedError, match=words):
            sender.send_chunks([chunk], None, session="s", deadline=Deadline(5))  # type: ignore[arg-type]
        assert not sender.usable
    ends.close()


@BOTH
def test_ends_that_can_not_be_made_say_why(packed: bool) -> None:
    group = TorchDistributedWeightSyncInitInfo(
        strategy="x", group_name="g", master_addr="a", master_port=1, world_size=2, backend="gloo",
        join_timeout_s=1.0, transfer_timeout_s=1.0,
    )  # fmt: skip
    with pytest.raises(InvalidRequestError, match="empty init info"):
        strategy(packed).create_receiver(group, rank=1)
    quick = type(strategy(packed))(join_timeout_s=0.01)
    info, token = quick.create_init_info({"e": 1})
    failed: Future[Any] = Future()
    failed.set_exception(SyncFailedError("busy"))
    with pytest.raises(SyncFailedError):
        quick.create_sender(info, token, joined=failed, record=lambda record: None)
    assert info.group_name != quick.create_init_info({"e": 1})[0].group_name


def test_the_registry_knows_all_and_takes_their_settings_from_the_config() -> None:
    for name in ("broadcast", "sglang", "cuda_ipc", "packed_cuda_ipc"):
        assert strategy_named(name).name == name
        made = strategy_for(WeightSyncConfig.load({"transfer": {"strategy": name, "join_timeout_s": 7.0}}))
        assert (made.name, made.join_timeout_s) == (name, 7.0)  # type: ignore[attr-defined]
    with pytest.raises(UnsupportedError, match="broadcast, sglang, cuda_ipc, packed_cuda_ipc"):
        strategy_named("nvlink")


class FakeDriver:
    """Counts what is open, and what was allocated and freed."""

    def __init__(self) -> None:
        self.open_now: list[int] = []
        self.allocated: list[int] = []
        self.freed: list[int] = []
        self.broken = False

    def allocate(self, size_bytes: int) -> int:
        self.allocated.append(1 + len(self.allocated))
        return self.allocated[-1]

    def free(self, address: int) -> None:
        self.freed.append(address)

    def handle_of(self, base: int) -> str:
        if self.broken:
            raise TransferError("no IPC handle for a tensor's memory")
        return f"{base:0128x}"

    def open(self, handle: str) -> int:
        address = int(handle[:4], 16)
        assert address not in self.open_now, "the driver opens a handle once in a process"
        self.open_now.append(address)
        return address

    def extent_of(self, address: int) -> tuple[int, int]:
        if self.broken:
            raise TransferError("no such address")
        return address, 512

    def close(self, address: int) -> None:
        self.open_now.remove(address)


def on_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(ipc_cuda, "_bind", lambda device: None)
    monkeypatch.setattr(ipc_cuda, "device_uuid", lambda device: "GPU")
    monkeypatch.setattr(ipc_cuda, "_tensor_at", lambda address, nbytes, device: torch.zeros(nbytes, dtype=torch.uint8))


def test_an_allocation_is_opened_once_and_closed_by_the_last_of_its_borrowers() -> None:
    opened, driver = _Opened(), FakeDriver()
    one, two = "00ab" + "0" * 124, "00cd" + "0" * 124
    for handle in (one, one, two):
        opened.take(driver, handle)  # type: ignore[arg-type]
    assert opened.extent(one) == (0xAB, 512)
    opened.give_back(driver, one)  # type: ignore[arg-type]
    assert driver.open_now == [0xAB, 0xCD]
    opened.give_back(driver, one)  # type: ignore[arg-type]
    opened.give_back(driver, two)  # type: ignore[arg-type]
    assert driver.open_now == []
    opened.take(driver, one)  # type: ignore[arg-type]
    assert driver.open_now == [0xAB]
    driver.broken = True
    with pytest.raises(TransferError):
        opened.take(driver, two)  # type: ignore[arg-type]
    assert driver.open_now == [0xAB], "what can't be measured is not left open"


def test_a_bucket_whose_memory_can_not_be_lent_is_freed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU. Seen red: what had no handle was never freed, and what it was to replace was freed three times."""
    driver = FakeDriver()
    on_no_gpu(monkeypatch)
    lender = CudaLender(torch.device("cpu"), 2, driver=driver)  # type: ignore[arg-type]
    lender.bucket(0, 1 << 20)
    driver.broken = True
    for slot in (0, 0, 1):
        with pytest.raises(TransferError):
            lender.bucket(slot, 1 << 27)
    assert driver.freed == driver.allocated[1:]
    driver.broken = False
    assert len(lender.bucket(0, 1 << 27)) == 1 << 27
    lender.close()
    assert sorted(driver.freed) == driver.allocated


def full_gpu(monkeypatch: pytest.MonkeyPatch, *, kept: int) -> tuple[CudaDriver, list[int]]:
    """A driver of a GPU without room until torch gives back the `kept` bytes of its cache; and what was asked of it."""
    driver, asked, free = CudaDriver.__new__(CudaDriver), list[int](), [0]

    def allocate(found: Any, size_bytes: int) -> int:
        asked.append(size_bytes)
        if size_bytes > free[0]:
            return 2
        found._obj.value = 4096
        return 0

    driver._library = SimpleNamespace(cuMemAlloc_v2=allocate, cuGetErrorString=lambda code, text: 0)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: free.append(free.pop() + kept))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free[0], 1 << 30))
    return driver, asked


def test_a_bucket_takes_what_torch_keeps_on_the_gpu_and_does_not_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU. Seen red: the driver had no room, and each push failed, beside gigabytes of torch's cache."""
    driver, asked = full_gpu(monkeypatch, kept=1 << 21)
    assert driver.allocate(1 << 21) == 4096
    assert asked == [1 << 21] * 2
    driver, asked = full_gpu(monkeypatch, kept=1 << 20)
    with pytest.raises(SharedMemoryError, match=r"1048576 of 1073741824 bytes are left .* cuda_ipc"):
        driver.allocate(1 << 21)
    assert asked == [1 << 21] * 2, "once more, and no oftener"


@BOTH
def test_the_trainers_own_allocations_are_closed_with_their_chunk_and_buckets_are_kept(
    packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a GPU: the driver is a fake, the rest is real. Two tensors and two chunks share an allocation.

    Seen to fail: with all handles kept, each sync whose allocator had given its segments back left one open.
    """
    driver = FakeDriver()
    on_no_gpu(monkeypatch)
    monkeypatch.setattr(CudaBorrower, "finish_reading", lambda self: None)
    borrower = CudaBorrower(torch.device("cpu"), driver=driver)  # type: ignore[arg-type]
    receiver = IpcTransferReceiver(strategy(packed).request_type, [borrower])
    sender = IpcTransferSender(packed=packed, record=lambda record: None, track="t")
    chunk = WeightChunk(names=("a", "b", "none"), tensors=(torch.zeros(4), torch.zeros(4), torch.empty(0, 3)))

    def request(seq: int, address: int, *, beyond: int = 0) -> Any:
        def handle(size_bytes: int) -> CudaMemoryHandle:
            return CudaMemoryHandle(
                device_uuid="GPU", handle=f"{address:04x}" + "0" * 124, offset_bytes=beyond, size_bytes=size_bytes
            )

        handles = (handle(512),) if packed else (handle(16), handle(16), handle(0))
        lent = SharedChunk.of(chunk, (handles,), let_go=lambda: None)
        return sender.create_request(lent, session="s", seq=seq)

    for address in (0xAB, 0xCD):
        two = [request(0, address), request(1, address)]
        for each in two:
            assert len(list(receiver.receive_weights(each, deadline=Deadline(5)))) == 3
        for each in two:
            assert address in driver.open_now
            receiver.release(each)
            receiver.release(each)
    with pytest.raises(TransferError):
        list(receiver.receive_weights(request(2, 0xEF, beyond=512), deadline=Deadline(5)))
    assert driver.open_now == ([0xAB, 0xCD, 0xEF] if packed else [])
    receiver.close()
    assert driver.open_now == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="here is a CUDA GPU, and with it a driver")
def test_no_driver_is_told_in_words() -> None:
    with pytest.raises(UnsupportedError, match="driver"):
        CudaDriver()


@pytest.mark.parametrize("fault", [UnsupportedError("no libcuda.so.1"), RuntimeError("in forked subprocess")], ids=type)
def test_where_the_gpu_can_not_be_used_host_memory_is_opened_all_the_same(
    fault: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on ROCm, where torch says CUDA too, and in a child of a process that used CUDA. Seen red: no engine took a
    version, by whatever way."""

    def fails(*_: torch.device) -> Any:
        raise fault

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", fails if isinstance(fault, RuntimeError) else lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(ipc_receive, "CudaBorrower", fails)
    ends = Ends(packed=True)
    (got, _, _) = ends.receive(ends.request(chunk_of(4), 0))
    assert int(got[0]) == 4
    ends.close()


def test_memory_of_each_gpu_that_is_seen_can_be_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the current one first. Seen red: a trainer beside it had to be on the engine's own."""
    opened: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(ipc_receive, "CudaBorrower", lambda device: opened.append(device.index))
    assert len(ipc_receive.borrowers()) == 4
    assert opened == [1, 0, 2]


def test_a_receiver_that_opened_nothing_of_the_gpu_closes_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen red: it made a context there, for a model on the CPU, of hundreds of megabytes that stay."""
    on_no_gpu(monkeypatch)
    bound: list[torch.device] = []
    monkeypatch.setattr(ipc_cuda, "_bind", bound.append)
    borrower = CudaBorrower(torch.device("cpu"), driver=FakeDriver())  # type: ignore[arg-type]
    borrower.close()
    assert bound == []


# --- patches ---


class PatchSegment:
    """Three positions and three new elements each of two tensors, in one segment."""

    def __init__(self) -> None:
        self.segment = Segment(4096)
        memory = torch.frombuffer(self.segment.memory, dtype=torch.uint8)
        memory[:12] = torch.tensor([0, 7, 2**31 + 5]).to(torch.uint32).view(torch.uint8)
        memory[16:22] = torch.tensor([0x3F80, -0x8000, 0x7FC1], dtype=torch.int16).view(torch.uint8)
        memory[24:25] = 1

    def request(self, **changes: Any) -> PatchWeightUpdateRequest:
        def handle(offset: int, size: int) -> SharedMemoryHandle:
            return SharedMemoryHandle(
                host_nonce=host_nonce(), name=self.segment.name, offset_bytes=offset, size_bytes=size
            )

        fields: dict[str, Any] = {
            "session": "s",
            "seq": 0,
            "names": ("w", "flag", "none"),
            "dtypes": ("bfloat16", "bool", "float32"),
            "shapes": ((1 << 31, 2), (), (5,)),
            "counts": (3, 1, 0),
            "positions": (handle(0, 12), handle(0, 4), handle(0, 0)),
            "values": (handle(16, 6), handle(24, 1), handle(0, 0)),
        }
        return PatchWeightUpdateRequest(**{**fields, **changes})


@pytest.fixture
def patch() -> Iterator[PatchSegment]:
    made = PatchSegment()
    yield made
    made.segment.close()


@pytest.mark.parametrize("ends", [False, True], indirect=True, ids=["each", "packed"])
def test_a_patch_arrives_as_views_of_the_segment(ends: Ends, patch: PatchSegment) -> None:
    request = patch.request()
    updates: list[Any] = list(ends.receiver.receive_weights(request, deadline=Deadline(5)))
    assert all(isinstance(update, Patch) for update in updates)
    assert [update.name for update in updates] == ["w", "flag", "none"]
    assert updates[0].positions.dtype == torch.uint32
    assert updates[0].positions.tolist() == [0, 7, 2**31 + 5]
    assert updates[0].values.dtype == torch.bfloat16
    assert updates[0].values.view(torch.int16).tolist() == [0x3F80, -0x8000, 0x7FC1]
    assert (updates[1].positions.tolist(), updates[1].values.tolist()) == ([0], [True])
    assert (updates[2].positions.numel(), updates[2].values.shape) == (0, (0,))
    patch.segment.memory[0] = 1
    assert updates[0].positions.tolist()[0] == 1, "nothing was copied"
    ends.receiver.release(request)


@pytest.mark.parametrize("ends", [False], indirect=True, ids=["each"])
@pytest.mark.parametrize("fault", ["gone", "too short", "another host"])
def test_a_patch_that_is_not_there(ends: Ends, patch: PatchSegment, fault: str) -> None:
    where = {"host_nonce": host_nonce(), "name": patch.segment.name, "offset_bytes": 0, "size_bytes": 12}
    where |= {
        "gone": {"name": "weightsync-1-gone"},
        "too short": {"offset_bytes": 4092},
        "another host": {"host_nonce": "other"},
    }[fault]
    good = patch.request()
    bad = patch.request(positions=(SharedMemoryHandle(**where), *good.positions[1:]))  # type: ignore[arg-type]
    with pytest.raises((SharedMemoryError, InvalidRequestError, UnsupportedError)):
        list(ends.receiver.receive_weights(bad, deadline=Deadline(5)))
    list(ends.receiver.receive_weights(good, deadline=Deadline(5)))
    ends.receiver.release(good)
