"""What crosses a process: IPC handles, a whole push, an offload. Also extraction, and the machine itself."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch

from tests.gpu.timing import Bench, model_of, same_bits, words_of
from tests.standins.processes import Child, children
from weightsync.codec.tensor_digest import packed_digests
from weightsync.engine.embedded import EmbeddedEngine
from weightsync.engine.server import EngineServer
from weightsync.extract.module import ModuleWeightExtractor
from weightsync.handles.fanout import EngineFanout
from weightsync.handles.http import HttpEngine
from weightsync.host.puller import Puller
from weightsync.load.module import ModuleWeightLoader
from weightsync.memory.folder import path_of
from weightsync.observe import Recorder
from weightsync.trainer.extraction import LockstepExtraction
from weightsync.trainer.publisher import WeightManager
from weightsync.trainer.push import PushSync
from weightsync.trainer.ranks import TrainingRanks
from weightsync.transfer.base import SharedChunk
from weightsync.transfer.ipc import IpcSharer, IpcTransferSender
from weightsync.transfer.registry import strategy_named
from weightsync.types import Deadline, EmptyWeightSyncInitInfo, Full, Manifest, WeightChunk
from weightsync.types.transfer_messages import Transport

STRATEGIES = ("cuda_ipc", "packed_cuda_ipc")
CYCLES = 500_000_000
"""For `torch.cuda._sleep`: a quarter of a second, or so."""
_IPC_BYTES = 8 << 30
"""Of a chunk: opening a handle takes a millisecond more or less each time, in which a GPU of today copies 2 GiB."""
WARM_PUSHES = 2
"""Handles are opened and memory is pinned in the first ones."""


def prove_device(bench: Bench) -> None:
    """The yardsticks of this machine, as ratios to a copy on the device."""
    copy_s, to_host_s = bench.copy_s(bench.num_bytes), bench.to_host_s(bench.num_bytes)
    facts: dict[str, Any] = {"torch": torch.__version__, "num_bytes": bench.num_bytes}
    if bench.is_cuda:
        properties = torch.cuda.get_device_properties(bench.device)
        facts |= {"gpu": properties.name, "uuid": str(properties.uuid), "memory_bytes": properties.total_memory}
    facts |= {"device_gb_per_s": bench.num_bytes / copy_s / 1e9, "to_host_gb_per_s": bench.num_bytes / to_host_s / 1e9}
    bench.row("to_host", to_host_s, copy_s, "one copy on the device", **facts)


# --- handles between two processes ---


def odd_tensors(seed: int) -> dict[str, torch.Tensor]:
    """Several dtypes; 0-d, empty, not contiguous, and a view into the middle of an allocation. In host memory."""
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


def chunk_of(tensors: dict[str, torch.Tensor], device: torch.device | str) -> WeightChunk:
    """They, on the device, with their strides."""
    return WeightChunk(names=tuple(tensors), tensors=tuple(tensor.to(device) for tensor in tensors.values()))


def raw(tensor: torch.Tensor) -> bytes:
    """A tensor's bytes in row-major order."""
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def announced(sender: IpcTransferSender, sharer: IpcSharer, chunk: WeightChunk, seq: int) -> Any:
    """Lends a chunk; gives the request that tells engines of it."""
    lent = SharedChunk.of(chunk, (sharer.share(chunk, seq),), let_go=lambda: None)
    return sender.create_request(lent, session="s", seq=seq)


def engine_main(strategy: str, device: str, conn: Any) -> None:
    """Receives what it is told of; answers with its bytes, or with the seconds that loading them took."""
    bench = Bench(device, num_bytes=0)
    info = EmptyWeightSyncInitInfo(strategy=strategy, group_name="g")
    receiver = strategy_named(strategy).create_receiver(info, rank=1)
    weights: dict[str, torch.Tensor] = {}
    conn.send("ready")
    while (order := conn.recv()) is not None:
        what, request = order
        bench.wait()
        begin = time.perf_counter()
        for update in receiver.receive_weights(request, deadline=Deadline(30)):
            assert isinstance(update, Full)
            if update.name not in weights or weights[update.name].shape != update.tensor.shape:
                weights[update.name] = torch.empty_like(update.tensor)
            weights[update.name].copy_(update.tensor)
        bench.wait()
        receiver.release(request)
        took = time.perf_counter() - begin
        conn.send(took if what == "time" else {name: raw(tensor) for name, tensor in weights.items()})
    receiver.close()
    conn.send("closed")


class Lending:
    """A trainer that lends, and an engine in a process of its own."""

    def __init__(self, strategy: str, bench: Bench, engine: Child) -> None:
        packed = strategy == "packed_cuda_ipc"
        self.sharer = IpcSharer(packed=packed)
        self.sender = IpcTransferSender(packed=packed, record=lambda record: None, track="t")
        self.engine = engine
        self._bench = bench
        assert engine.recv(60) == "ready"

    def moved(self, chunk: WeightChunk, seq: int, what: str = "bytes") -> Any:
        """Lends a chunk, and gives the engine's answer."""
        self.engine.conn.send((what, announced(self.sender, self.sharer, chunk, seq)))
        return self.engine.recv(60)

    def close(self) -> None:
        """The engine lets go first."""
        self.engine.conn.send(None)
        assert self.engine.recv(60) == "closed"
        self.sharer.close()


def prove_every_bit(bench: Bench, strategy: str) -> None:
    """Several chunks through every slot, twice; then the receiver closes and a new one opens the same memory."""
    with children() as start:
        for _ in range(2):
            lending = Lending(strategy, bench, start(engine_main, strategy, bench.device.type, talk=True))
            for seq in range(2 * lending.sharer.num_slots):
                tensors = odd_tensors(seq)
                found = lending.moved(chunk_of(tensors, bench.device), seq)
                assert found == {name: raw(tensor) for name, tensor in tensors.items()}, f"{strategy}, chunk {seq}"
            lending.close()


def time_ipc(bench: Bench, strategy: str) -> tuple[float, float]:
    """Lends, opens and loads a chunk, and one of a quarter of its bytes, in turn; notes and gives two figures: the rate
    of the bytes between as a share of that of copies on the device, and the seconds of a chunk whatever its size.

    `packed_cuda_ipc` copies twice, into the bucket and out of it, so its yardstick is two copies.
    """
    num_copies = 2 if strategy == "packed_cuda_ipc" else 1
    large = min(_IPC_BYTES, bench.memory_bytes // 10) if bench.is_cuda else bench.num_bytes
    small = large // 4
    with children() as start:
        lending = Lending(strategy, bench, start(engine_main, strategy, bench.device.type, talk=True))
        large_s, small_s = moved_s(bench, lending, (large, small))
        lending.close()
    copies_s, more_copies_s = (num_copies * bench.copy_s(num_bytes) for num_bytes in (large, large - small))
    each_s = small_s - (large_s - small_s) * small / (large - small)
    rate = more_copies_s / max(large_s - small_s, 1e-9)
    yardstick = f"{num_copies} copies on the device"
    bench.row(strategy, large_s, copies_s, yardstick, num_bytes=large, rate=rate, each_chunk_s=each_s)
    return rate, each_s


def moved_s(bench: Bench, lending: Lending, sizes: Sequence[int]) -> list[float]:
    """Of each size, the median seconds to lend, open and load eight tensors of so many bytes together."""
    chunks = []
    for size in sizes:
        piece = torch.zeros(size // 16, dtype=torch.bfloat16, device=bench.device)
        chunks.append(chunk_of({f"{size}.{i}": piece.clone() for i in range(8)}, bench.device))
    moves: list[list[float]] = [[] for _ in sizes]
    for turn in range(3 * bench.repeats + 2):
        for which, chunk in enumerate(chunks):
            bench.wait()
            begin = time.perf_counter()
            request = announced(lending.sender, lending.sharer, chunk, turn * len(chunks) + which)
            shared_s = time.perf_counter() - begin
            lending.engine.conn.send(("time", request))
            loaded_s = lending.engine.recv(60)
            if turn > 1:
                moves[which].append(shared_s + loaded_s)
    return [statistics.median(took) for took in moves]


def prove_ipc(bench: Bench) -> None:
    """Both strategies."""
    for strategy in STRATEGIES:
        prove_every_bit(bench, strategy)
        time_ipc(bench, strategy)


# --- a whole push ---


def pushed_to(device: str, num_bytes: int, width: int, conn: Any) -> None:
    """An engine behind HTTP, whose model is on the device; answers what each tensor's bytes are."""
    answer_sums(model_of(Bench(device, num_bytes=num_bytes, width=width), seed=0), conn)


def answer_sums(model: torch.nn.Module, conn: Any) -> None:
    """Serves it as an engine, until it is told to end: says where, and each time that it is asked the tensors' sums."""
    server = EngineServer(EmbeddedEngine.of(ModuleWeightLoader(model)))
    conn.send(server.start())
    while conn.recv() == "sums":
        conn.send({name: sum_of(parameter) for name, parameter in model.named_parameters()})
    server.close()


def sum_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Two sums over a tensor's bits, one weighted by position: enough to tell equal from not, here."""
    words = words_of(tensor).to(torch.int64)
    places = torch.arange(1, len(words) + 1, device=words.device)
    return int(words.sum()), int((words * places).sum())


def prove_push(bench: Bench) -> None:
    """A model on the device into an engine's model on the device, by each strategy, proved from live weights."""
    small = Bench(bench.device.type, num_bytes=min(bench.num_bytes, 1 << 30), width=bench.width)
    for strategy in STRATEGIES:
        with children() as start:
            engine = start(pushed_to, bench.device.type, small.num_bytes, bench.width, talk=True)
            url = engine.recv(120)
            model = model_of(small, seed=1)
            push = PushSync(
                ModuleWeightExtractor(model, chunk_bytes=256 << 20), EngineFanout([HttpEngine(url, engine_id="e")]),
                strategy=strategy_named(strategy),
            )  # fmt: skip
            push.initialize()
            times, paused = [], []
            for version in range(1, WARM_PUSHES + bench.repeats + 1):
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.add_(0.125)
                bench.wait()
                report = push.sync_weights(version)
                assert report.digests_equal, "the engine proves its live weights"
                engine.conn.send("sums")
                found = engine.recv(60)
                assert found == {name: sum_of(parameter) for name, parameter in model.named_parameters()}
                times.append(report.seconds)
                paused.append(report.paused_s)
            push.close()
            engine.conn.send("end")
        bench.row(
            f"push_{strategy}", statistics.median(times[WARM_PUSHES:]), bench.copy_s(small.num_bytes),
            "one copy on the device", num_bytes=report.total_bytes,
            paused_s=statistics.median(paused[WARM_PUSHES:]), phases_s=dict(report.phases_s),
        )  # fmt: skip


# --- extraction ---


def prove_extract(bench: Bench) -> None:
    """Every tensor converted and packed; and what a step has queued on a stream of its own is what is extracted."""
    model = model_of(bench, seed=1, dtype=torch.float32)
    extractor = ModuleWeightExtractor(model, chunk_bytes=256 << 20)
    num_bytes = sum(spec.nbytes for spec in extractor.metadata("bfloat16"))

    def extract() -> None:
        for chunk in extractor.extract_weights("bfloat16"):
            sharer.share(chunk, next(numbers))

    numbers = iter(range(1 << 30))
    sharer = IpcSharer(packed=True)
    took_s = bench.seconds(extract)
    bench.row("extract_and_pack", took_s, bench.copy_s(num_bytes), "one copy of the bf16 bytes", num_bytes=num_bytes)
    bench.beside_generation("extract_and_pack", extract)
    sharer.close()
    live = dict(model.named_parameters())
    for chunk in extractor.extract_weights("bfloat16"):
        for name, tensor in zip(chunk.names, chunk.tensors, strict=True):
            assert same_bits(tensor, live[name].to(torch.bfloat16)), name
    if bench.is_cuda:
        prove_streams()


def prove_streams() -> None:
    """Extraction and lending come after what the caller has queued on its own stream."""
    model = torch.nn.Linear(512, 512, bias=False).cuda()
    for dtype in (None, "bfloat16"):
        extractor = ModuleWeightExtractor(model)
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()), torch.no_grad():
            torch.cuda._sleep(CYCLES)
            model.weight.fill_(3.0)
            running = LockstepExtraction(
                extractor, dtype=dtype, ranks=TrainingRanks(timeout_s=10), deadline=Deadline(30),
                recorder=Recorder("t"), keep=True,
            )  # fmt: skip
            running.start()
            seen = [bool((tensor == 3.0).all()) for chunk in running.chunks() for tensor in chunk.tensors]
            running.finish()
        assert seen == [True]
        model.weight.data.zero_()
    filled = [torch.zeros(1 << 22, device="cuda") for _ in range(2)]  # large: each is another thread's
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(CYCLES)
        for tensor in filled:
            tensor.fill_(3.0)
        taken = packed_digests(filled)
    torch.cuda.synchronize()
    assert taken == packed_digests(filled), "digests are of what was queued, and not of what was there before"
    for packed in (False, True):
        weight = torch.zeros(1 << 20, device="cuda")
        torch.cuda.synchronize()
        sharer, side = IpcSharer(packed=packed), torch.cuda.Stream()
        with torch.cuda.stream(side):
            torch.cuda._sleep(CYCLES)
            weight.fill_(3.0)
            sharer.share(WeightChunk(names=("w",), tensors=(weight,)), 0)
            assert side.query(), "another process reads at once, on a stream of its own: nothing is queued any more"
        sharer.close()


# --- offload ---


def prove_offload(bench: Bench) -> None:
    """Into pinned shared memory, converted on the device; receivers get those bytes, over TCP and from memory."""
    model = model_of(bench, seed=1, dtype=torch.float32)
    num_bytes = sum(parameter.numel() * 2 for parameter in model.parameters())
    version = 0
    with WeightManager("m", dtype="bfloat16", guard_s=10.0) as manager:
        manager.start()

        def offload() -> None:
            nonlocal version
            version += 1
            assert manager.offload(model, version).published, "the segments are free in time"

        def between() -> None:
            if version:
                manager.wait_published(version, timeout_s=60)

        took_s = bench.seconds(offload, before=between)
        bench.row("offload", took_s, bench.to_host_s(num_bytes), "one copy to pinned memory", num_bytes=num_bytes)
        between()
        for transport in (Transport.TCP, Transport.SHM):
            puller = Puller(manager.endpoint, "m", receiver_id="r", transport=transport)
            with puller.pull(deadline=Deadline(60)) as pulled:
                assert pulled.version.number == version
                check_file(pulled.segment, pulled.offsets, pulled.manifest, model)
            puller.close()
        if bench.is_cuda:
            version += 1
            prove_offload_of_queued_work(manager, version)
        bench.beside_generation("offload", lambda: (between(), offload()))


def check_file(segment: str, offsets: Any, manifest: Manifest, model: torch.nn.Module) -> None:
    """The staged bytes are the model's, in bf16."""
    flat = torch.from_file(path_of(segment), size=max(offsets[s.name] + s.nbytes for s in manifest.tensors),
                           dtype=torch.uint8)  # fmt: skip
    live = dict(model.named_parameters())
    assert {spec.name for spec in manifest.tensors} == set(live)
    for spec in manifest.tensors:
        found = flat[offsets[spec.name] : offsets[spec.name] + spec.nbytes]
        wanted = live[spec.name].detach().to(torch.bfloat16).cpu().reshape(-1).view(torch.uint8)
        assert torch.equal(found, wanted), spec.name


def prove_offload_of_queued_work(manager: WeightManager, version: int) -> None:
    """What the step has queued is what is published, though the next step writes at once."""
    model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.Linear(512, 7)).cuda()
    with torch.cuda.stream(torch.cuda.Stream()), torch.no_grad():
        torch.cuda._sleep(CYCLES)
        for parameter in model.parameters():
            parameter.fill_(3.0)
        assert manager.offload(model, version).published
        for parameter in model.parameters():
            parameter.fill_(-1.0)
    manager.wait_published(version, timeout_s=60)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(3.0)
    puller = Puller(manager.endpoint, "m", receiver_id="r", transport=Transport.SHM)
    with puller.pull(deadline=Deadline(30)) as pulled:
        check_file(pulled.segment, pulled.offsets, pulled.manifest, model)
    puller.close()
