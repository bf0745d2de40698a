"""`WeightManager.offload` on real ranks: what lies in the segments, who wrote it, and what a failure leaves behind.

A segment is read from /dev/shm by the real safetensors library and compared with `full_tensor()` of each parameter.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.multiproc.pull_kit import wait_until
from tests.multiproc.spine import build, shard
from tests.standins.processes import children, run_ranks
from weightsync.clients.agent import AgentClient
from weightsync.errors import ExtractError, StateError, VersionError, WeightSyncError
from weightsync.extract.fsdp import FSDPWeightExtractor
from weightsync.extract.named import NamedTensorsExtractor
from weightsync.extract.placements import shard_box
from weightsync.host.puller import Puller
from weightsync.memory import Lock, Reader
from weightsync.module_walk import module_tensors
from weightsync.plan.boxes import whole_box
from weightsync.tensors import byte_array
from weightsync.trainer import extraction
from weightsync.trainer.publisher import OffloadReport, WeightManager
from weightsync.trainer.ranks import TrainingRanks
from weightsync.types import Box, Deadline, Version
from weightsync.types.transfer_messages import Transport

SHM = Path("/dev/shm")


def segments_of(pid: int) -> list[Path]:
    """The files of one process."""
    return sorted(SHM.glob(f"weightsync-{pid}-*"))


def stamped(pid: int, version: Version) -> Path | None:
    """The file that holds a version, as its own header says."""
    for path in segments_of(pid):
        with safe_open(path, framework="pt") as file:
            if f'["{version.run_id}", {version.number}, ' in file.metadata()["weightsync"]:
                return path
    return None


def raw(tensor: torch.Tensor) -> tuple[str, tuple[int, ...], bytes]:
    return str(tensor.dtype), tuple(tensor.shape), byte_array(tensor.detach().contiguous()).tobytes()


def cast(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.bfloat16) if tensor.dtype in (torch.float32, torch.float64, torch.float16) else tensor


def wholes(named: list[tuple[str, torch.Tensor]]) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """What has to lie there: torch's own gather, then torch's own conversion. On every rank."""
    return {name: raw(cast(t.full_tensor() if isinstance(t, DTensor) else t)) for name, t in named}


def lying(path: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    return {name: raw(tensor) for name, tensor in load_file(path).items()}


class Plain(nn.Module):
    """Plain tensors beside sharded ones: 0-d, int64, bool, float8, strided, empty; a buffer that does not persist."""

    def __init__(self) -> None:
        super().__init__()
        self.odd = build(5)
        self.register_buffer("count", torch.tensor(2**60 + 1))
        self.register_buffer("flag", torch.tensor(True))
        self.register_buffer("wide", torch.arange(12, dtype=torch.float64).reshape(3, 4).t())
        self.register_buffer("sixteen", torch.arange(6).to(torch.float16) / 7)


def by_hand(rank: int, world_size: int, mesh: Any, choice: Any) -> nn.Module:
    """DTensors of any placements on a mesh, cut by hand: several dtypes, uneven and empty parts."""
    torch.manual_seed(11)
    model = nn.Module()
    for index, (shape, dtype) in enumerate(
        [((7, 5), "float32"), ((1, 3), "float32"), ((5, 1), "bfloat16"), ((2, 5, 3), "float32"), ((4, 6), "int64"),
         ((3, 4), "bool"), ((9, 4), "float16"), ((0, 4), "float32")]
    ):  # fmt: skip
        whole = torch.randint(0, 9, shape).to(getattr(torch, dtype)) if "float" not in dtype else torch.randn(shape)
        whole = whole.to(getattr(torch, dtype))
        placements = choice(index, len(shape))
        cut = whole
        for mesh_dim, placement in enumerate(placements):
            if isinstance(placement, Shard):
                place, parts = mesh.get_local_rank(mesh_dim), cut.chunk(mesh.size(mesh_dim), placement.dim)
                cut = parts[place] if place < len(parts) else cut.narrow(placement.dim, 0, 0)
        tensor = DTensor.from_local(
            cut, mesh, placements, run_check=False, shape=whole.shape, stride=whole.contiguous().stride()
        )
        model.register_buffer(f"w{index}_{mesh.ndim}", tensor)
    return model


def one_dim_mixed(index: int, dims: int) -> list[Placement]:
    return [(Shard(0), Shard(dims - 1), Replicate())[index % 3]]


def two_dim_mixed(index: int, dims: int) -> list[Placement]:
    return (
        [Shard(dims - 1), Shard(0)],
        [Shard(0), Shard(0)],
        [Replicate(), Shard(dims - 1)],
        [Shard(0), Replicate()],
        [Replicate(), Replicate()],
    )[index % 5]


def models(rank: int, world_size: int) -> Iterator[tuple[str, nn.Module]]:
    """Every placement, by what it is called. Each is made when it is asked for, on every rank."""
    yield "rows", shard(build(1), "shard0", world_size)
    yield "columns", shard(build(2, blocks=2), "shard1", world_size)
    model = Plain()
    shard(model.odd, "shard0", world_size)
    yield "plain buffers", model
    yield "mixed", by_hand(rank, world_size, init_device_mesh("cpu", (world_size,)), one_dim_mixed)
    if world_size == 2:
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
        yield "hsdp 2x1", fully_shard(build(3, blocks=1), mesh=mesh)
    if world_size == 4:
        yield "hsdp 2x2", shard(build(3, blocks=1), "hsdp", world_size)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        yield "mixed in two dimensions", by_hand(rank, world_size, mesh, two_dim_mixed)
        torch.manual_seed(7)
        strided = nn.Sequential(nn.Linear(12, 8), nn.Linear(8, 12))
        parallelize_module(strided, mesh["b"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        yield "gather: over tensor parallelism", fully_shard(strided, mesh=mesh["a"])


@contextlib.contextmanager
def extractors() -> Iterator[list[NamedTensorsExtractor]]:
    """Those that are made meanwhile: an offload of the same tensors again needs none."""
    made: list[NamedTensorsExtractor] = []
    original = NamedTensorsExtractor.__init__

    def noted(extractor: NamedTensorsExtractor, *args: Any, **options: Any) -> None:
        made.append(extractor)
        original(extractor, *args, **options)

    NamedTensorsExtractor.__init__ = noted  # type: ignore[method-assign]
    yield made
    NamedTensorsExtractor.__init__ = original  # type: ignore[method-assign]


def _every_placement(rank: int, world_size: int) -> dict[str, tuple[str, int, bool, int]]:
    """Of each model: path, bytes that this rank wrote, whether the segment was right, bytes in all."""
    found = {}
    with WeightManager("actor", dtype="bfloat16", run_id="run", guard_s=20.0) as wm:
        versions = itertools.count()
        for label, model in models(rank, world_size):
            named = list(module_tensors(model))
            for again in range(3):  # in each segment, and where it was before, with other values
                for _, tensor in named if again else ():
                    if tensor.is_floating_point() and tensor.element_size() > 1:
                        (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().add_(again)
                expected = wholes(named)
                with extractors() as made:
                    report = wm.offload(iter(named), next(versions), rank, world_size)
                assert report.published, label
                assert bool(made) is (again == 0 or report.path == "gather"), label
            right = True
            if rank == 0:
                path = stamped(os.getpid(), report.version)
                assert path is not None, label
                held = lying(path)
                right = held == expected
                assert right, (label, [name for name in expected if held.get(name) != expected[name]])
            found[label] = (report.path, report.copied_bytes, right, sum(len(data) for _, _, data in expected.values()))
        assert rank == 0 or segments_of(os.getpid()) == [], "one segment a host, its first rank's"
    assert segments_of(os.getpid()) == []
    return found


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_the_segment_is_full_tensor_of_each_parameter(world_size: int) -> None:
    """And each byte was written once, by the rank that holds it; rank 0 wrote all only where it had to gather."""
    ranks = run_ranks(_every_placement, world_size)
    for label in ranks[0]:
        paths, copied, _, totals = zip(*(rank[label] for rank in ranks), strict=True)
        gathers = label.startswith("gather")
        assert set(paths) == {"gather" if gathers else "shards"}, label
        assert sum(copied) == totals[0], label
        if gathers:
            assert copied[1:] == (0,) * (world_size - 1), label
        elif label != "mixed":
            assert sum(count > 0 for count in copied) > 1 or label == "hsdp 2x1", label


# Several hosts.


def _on_two_hosts(rank: int, world_size: int, hosts: str) -> dict[str, tuple[int, int]]:
    """Of each model: bytes that this rank wrote, and bytes in this rank's segment. Rank 0 pulls each version."""
    found = {}
    group = hosts[rank]
    leader = hosts.index(group) == rank
    with WeightManager("actor", dtype="bfloat16", run_id="run", guard_s=20.0, host_group=group) as wm:
        wm.start()
        assert len(wm.endpoints) == 2
        puller = Puller(
            wm.endpoint,
            "actor",
            receiver_id=f"elsewhere {rank}",
            may_call=lambda endpoint: endpoint in wm.endpoints,
            transport=Transport.TCP,
        )
        for version, (label, model) in enumerate(models(rank, world_size)):
            expected = wholes(list(module_tensors(model)))
            report = wm.offload(FSDPWeightExtractor(model), version)
            assert (report.published, report.path) == (True, "shards"), label
            path = stamped(os.getpid(), report.version)
            held = 0
            if path is not None:
                assert leader, label
                held = check_part(path, expected, boxes_of_host(model, hosts, group), label)
                wm.wait_published(version, timeout_s=30)
            else:
                assert not boxes_of_host(model, hosts, group) or not leader, label
            found[label] = (report.copied_bytes, held)
            if rank == 0:
                with puller.pull(deadline=Deadline(30), at_least=report_version(report)) as pulled:
                    assert (pulled.version, pulled.transport) == (report.version, Transport.TCP)
                    assert lying(SHM / pulled.segment) == expected, label
            dist.barrier()
        puller.close()
    assert segments_of(os.getpid()) == []
    return found


def report_version(report: OffloadReport) -> Callable[[], Version]:
    return lambda: report.version


def boxes_of_host(model: nn.Module, hosts: str, group: str) -> dict[str, list[Box]]:
    """What the ranks of a host hold, computed for each of them from the placements alone."""
    found: dict[str, list[Box]] = {}
    for name, tensor in module_tensors(model):
        for rank in range(len(hosts)):
            if hosts[rank] != group:
                continue
            if not isinstance(tensor, DTensor):
                boxes = [whole_box(tuple(tensor.shape))] if rank == 0 else []
            else:
                (at,) = (tensor.device_mesh.mesh == rank).nonzero().tolist()
                replicas = [place for place, how in zip(at, tensor.placements, strict=True) if how.is_replicate()]
                boxes = [shard_box(tensor.shape, tensor.placements, tensor.device_mesh.shape, at)]
                if any(replicas) or (boxes[0].numel == 0 and (tensor.numel() or any(at))):
                    boxes = []
            if boxes:
                found.setdefault(name, []).extend(boxes)
    return found


def check_part(
    path: Path, expected: dict[str, tuple[str, tuple[int, ...], bytes]], boxes: dict[str, list[Box]], label: str
) -> int:
    """A host's segment holds exactly those boxes of the tensors; its bytes."""
    total = 0
    left = {name: sum(box.numel for box in held) for name, held in boxes.items()}
    for entry, tensor in load_file(path).items():
        name, _, cut = entry.partition("@")
        dtype, shape, data = expected[name]
        ranges = [(0, size) for size in shape] if not cut else [tuple(map(int, r.split(":"))) for r in cut.split(",")]
        box = Box(offset=tuple(a for a, _ in ranges), shape=tuple(b - a for a, b in ranges))
        assert not cut or box in boxes[name], (label, entry)
        left[name] -= box.numel
        whole = torch.frombuffer(bytearray(data or b"-"), dtype=torch.uint8)[: len(data)]
        whole = whole.view(tensor.dtype).reshape(shape) if data else torch.empty(shape, dtype=tensor.dtype)
        assert str(tensor.dtype) == dtype, (label, entry)
        assert raw(tensor) == raw(whole[tuple(slice(a, b) for a, b in ranges)]), (label, entry)
        total += tensor.nbytes
    assert not any(left.values()), (label, left)
    return total


@pytest.mark.parametrize("hosts", ["ab", "aba"])
def test_two_hosts_publish_their_own_parts_and_a_receiver_puts_them_together(hosts: str) -> None:
    """No funnel: what lies in a host's segment is what its own ranks hold, and they wrote it."""
    ranks = run_ranks(_on_two_hosts, len(hosts), hosts)
    for label in ranks[0]:
        for group in "ab":
            members = [rank for rank, of_rank in enumerate(hosts) if of_rank == group]
            held = ranks[members[0]][label][1]
            assert held == sum(ranks[rank][label][0] for rank in members), label
            assert held > 0 or (group == "b" and label == "hsdp 2x1"), label


# A rank that fails.


class Failing(FSDPWeightExtractor):
    """Raises at one plain buffer, for which no other rank waits, while it is armed."""

    armed = False
    laying_out = False

    def _local_box(self, tensor: torch.Tensor) -> Any:
        if self.laying_out:
            self._perhaps_fail(tensor)
        part = super()._local_part(tensor)
        return None if part is None else part[0]

    def _local_part(self, tensor: torch.Tensor) -> Any:
        self._perhaps_fail(tensor)
        return super()._local_part(tensor)

    def _gather(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        self._perhaps_fail(tensor)
        return super()._gather(tensor, dtype)

    def _perhaps_fail(self, tensor: torch.Tensor) -> None:
        if self.armed and tensor.dtype == torch.bool:
            raise RuntimeError("a part that can't be read")


class Gathering(Failing):
    """As if a placement had no local form."""

    def _can_shard(self, tensor: torch.Tensor) -> bool:
        return False


def test_memory_that_was_freed_since_the_first_step_is_not_published() -> None:
    """Seen red: what lay behind it was published, and proved. torch itself refuses that of a large tensor."""
    size = 16
    model = nn.Linear(size, size, bias=False)
    with WeightManager("m") as manager:
        assert manager.offload(model, 1).published
        model.weight.untyped_storage().resize_(2 * size * size)
        with pytest.raises(WeightSyncError, match="memory ends before"):
            manager.offload(model, 2)


def test_of_many_small_tensors_none_is_published_whose_memory_was_shrunk() -> None:
    """Seen red: one loop copies them, and it looked at addresses alone."""
    model = nn.ParameterList([nn.Parameter(torch.ones(64)) for _ in range(1100)])
    with WeightManager("m") as manager:
        for version in (1, 2):
            assert manager.offload(model, version).published
        model[5].untyped_storage().resize_(16)
        with pytest.raises(WeightSyncError, match="memory ends before"):
            manager.offload(model, 3)


def test_a_gathered_copy_has_the_time_that_its_size_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen red: a model that takes longer than ranks wait for each other was never published."""
    given_s: list[float] = []

    class Seen(extraction.LockstepExtraction):
        def __init__(self, *args: Any, deadline: Deadline, **options: Any) -> None:
            given_s.append(deadline.timeout_s)
            super().__init__(*args, deadline=deadline, **options)

    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)])  # 240 bytes
    monkeypatch.setattr(extraction, "LockstepExtraction", Seen)
    monkeypatch.setattr(extraction, "_GATHER_BYTES_S", 10.0)
    with WeightManager("m", timeout_s=1.0, guard_s=0.5) as manager:
        report = manager.offload(Gathering(model, chunk_bytes=None), 1)
        assert (report.path, report.published) == ("gather", True)
    assert given_s == [1.0 + 24.0]


def _one_rank_fails(rank: int, world_size: int) -> dict[int, tuple[str, str | None, bool]]:
    """By failed version: the error's type and parameter here, and whether it names the rank that failed."""
    model = shard(build(1), "shard0", world_size)
    expected = wholes(list(module_tensors(model)))
    extractors = {"shards": Failing(model, chunk_bytes=None), "gather": Gathering(model, chunk_bytes=None)}
    fails_on = {0: 1, 2: 1, 3: 0, 6: 1, 7: 0}
    raised = {}
    newest: Version | None = None
    with WeightManager("actor", dtype="bfloat16", run_id="run", guard_s=20.0) as wm:
        for version in range(9):
            path = "shards" if version < 5 else "gather"
            extractor = extractors[path]
            extractor.armed = fails_on.get(version) == rank
            extractor.laying_out = version < 2
            if version in fails_on:
                with pytest.raises(ExtractError, match="can't be read") as caught:
                    wm.offload(extractor, version)
                told = f"told by training rank {fails_on[version]}" in str(caught.value)
                raised[version] = (type(caught.value).__name__, caught.value.parameter, told)
                assert stamped(os.getpid(), Version(run_id="run", number=version)) is None
            else:
                report = wm.offload(extractor, version)
                assert (report.published, report.path) == (True, path)
                newest = report.version
            if rank == 0 and newest is not None:
                held = stamped(os.getpid(), newest)
                assert held is not None
                assert lying(held) == expected, version
                wm.wait_published(newest.number, timeout_s=30)
                assert AgentClient(wm.endpoint).get_version().version == newest.number
        with pytest.raises(VersionError):
            wm.offload(extractors["shards"], 8)
    assert segments_of(os.getpid()) == []
    return raised


def test_a_rank_that_fails_is_told_to_all_and_the_next_offload_works() -> None:
    """While parts are laid out, copied, and gathered; the newest version stays what it was."""
    ranks = run_ranks(_one_rank_fails, 2)
    for rank, raised in enumerate(ranks):
        assert {version: told for version, (_, _, told) in raised.items()} == {
            0: rank == 0, 2: rank == 0, 3: rank == 1, 6: rank == 0, 7: rank == 1
        }  # fmt: skip
        assert {what[:2] for what in raised.values()} == {("ExtractError", "mask")}


class Cramped(extraction.LockstepExtraction):
    """One that can't begin on rank 1, e.g. for want of memory."""

    def __init__(self, *args: Any, ranks: TrainingRanks, **options: Any) -> None:
        if ranks.rank == 1:
            raise MemoryError("no room to gather")
        super().__init__(*args, ranks=ranks, **options)


def _one_rank_can_not_begin(rank: int, world_size: int) -> str:
    model, whole = shard(build(1), "shard0", world_size), extraction.LockstepExtraction
    with WeightManager("actor", dtype="bfloat16", guard_s=20.0) as wm:
        extraction.LockstepExtraction = Cramped  # type: ignore[misc]
        with pytest.raises(WeightSyncError) as caught:
            wm.offload(Gathering(model, chunk_bytes=None), 1)
        extraction.LockstepExtraction = whole  # type: ignore[misc]
        assert wm.offload(Gathering(model, chunk_bytes=None), 2).published
    return str(caught.value)


def test_a_rank_that_can_not_begin_to_gather_is_told_to_all() -> None:
    """Seen red: the others were in another collective, and gloo ended their processes."""
    for said in run_ranks(_one_rank_can_not_begin, 2):
        assert "no room to gather" in said


# Memory, and what a reader may cost the trainer.


def test_two_segments_a_third_under_a_lease_and_never_a_wait_beyond_the_guard() -> None:
    """With two leases nothing is free: that version is left out, and the trainer goes on. In a process of its own: what
    another test's threads still have in shared memory is none of its segments."""
    with children() as start:
        start(_a_third_under_a_lease).result(120)


def _a_third_under_a_lease() -> None:
    model = nn.Linear(64, 64)

    def there() -> int:
        return len(segments_of(os.getpid()))

    before = there()
    assert before == 0
    with WeightManager("actor", dtype="bfloat16", guard_s=1.0) as wm:

        def offload(version: int) -> OffloadReport:
            with torch.no_grad():
                model.weight.fill_(version)
            report = wm.offload(model.named_parameters(), version)
            if report.published:
                wm.wait_published(version, timeout_s=30)  # from here on the agent reads nothing
            return report

        def segment_of(report: OffloadReport) -> Path:
            path = stamped(os.getpid(), report.version)
            assert path is not None
            return path

        for version in range(1, 6):
            report = offload(version)
            assert report.published
            assert there() == min(version, 2)
        first = segment_of(report)
        two = set(segments_of(os.getpid()))
        with Lock(first.name, Reader.MAPPED) as lease:
            second = segment_of(offload(6))
            assert second in two, "the newest may be leased at no cost"
            wait_until(lambda: there() == 3, "a third is made ahead")
            third = segment_of(offload(7))
            assert len({first, second, third}) == there() == 3
            with Lock(second.name, Reader.MAPPED):
                assert there() == 3
                report = offload(8)
                assert not report.published
                assert report.why is not None
                assert 0.9 < report.waited_s < report.seconds < 10
                with pytest.raises(StateError, match="not published"):
                    wm.wait_published(8, timeout_s=5)
                assert not offload(8).published, "it may be tried again"
                with pytest.raises(VersionError, match="7 comes after 7"):
                    offload(7)
                for path, value in ((first, 5), (second, 6), (third, 7)):
                    assert (load_file(path)["weight"] == value).all(), "nobody was written over"
            report = offload(8)
            assert report.published
            assert segment_of(report) == second, "what was given back is used"
            assert there() == 3
            lease.close()
            wait_until(lambda: there() == 2, "nobody needs the third")
            for version in (10, 11, 12):
                assert offload(version).published
            assert there() == 2
    assert there() == 0
