"""LivePatch and the module loader's patches: every dtype and stride, and a failure at every point of a commit."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from weightsync.errors import LoadError, StateError, UnsupportedError
from weightsync.load import patching
from weightsync.load.module import ModuleWeightLoader
from weightsync.load.spans import overlaps_itself
from weightsync.tensors import byte_array
from weightsync.testing.contracts import bytes_of, manifest_of
from weightsync.testing.contracts.loader_patches import patches_of
from weightsync.types import Full, Patch, Version
from weightsync.types.dtypes import ITEMSIZE_BYTES

modes = pytest.mark.parametrize("in_place", [False, True], ids=["staged", "in place"])
V2 = Version(run_id="contract", number=2)


class Buffers(nn.Module):
    """A model of some buffers."""

    def __init__(self, **tensors: torch.Tensor) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)


def raw(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Any bit patterns: NaNs with payloads, infinities, negative zeros."""
    size = torch.empty(0, dtype=dtype).element_size()
    count = int(np.prod(shape))
    words = torch.randint(0, 256, (count * size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return (words & 1 if dtype == torch.bool else words).view(dtype).reshape(shape)


def live_bytes(module: nn.Module) -> dict[str, bytes]:
    return {name: bytes_of(tensor) for name, tensor in module.state_dict().items()}


def prepared(module: nn.Module, *, seed: int = 1, **options: Any) -> tuple[ModuleWeightLoader, dict[str, torch.Tensor]]:
    """A loader with a patch that waits for its commit, and the weights after it."""
    loader = ModuleWeightLoader(module, **options)
    before = {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
    patches, after = patches_of(before, seed)
    loader.begin_patch(manifest_of(after, 2))
    loader.load_weights(patches)
    list(loader.prepare_patch())
    return loader, after


def is_now(module: nn.Module, weights: dict[str, torch.Tensor]) -> bool:
    return live_bytes(module) == {name: bytes_of(tensor) for name, tensor in weights.items()}


@pytest.mark.parametrize("dtype", [name for name in ITEMSIZE_BYTES if hasattr(torch, name)])
def test_every_dtype_contiguous_and_not(dtype: str) -> None:
    kind = getattr(torch, dtype)
    module = Buffers(
        plain=raw(7, 9, dtype=kind),
        turned=raw(5, 6, dtype=kind, seed=1).t(),
        every_other=raw(6, 10, dtype=kind, seed=2)[::2, 1::3],
        one=raw(1, dtype=kind, seed=3).reshape(()),
        none=torch.empty(0, 3, dtype=kind),
    )
    before = live_bytes(module)
    loader, after = prepared(module)
    loader.commit(V2)
    assert is_now(module, after)
    assert live_bytes(module) != before
    loader.rollback()
    assert live_bytes(module) == before


def test_what_lies_between_the_elements_of_a_strided_tensor_is_not_touched() -> None:
    whole = raw(8, 8, dtype=torch.int16)
    rest = whole.clone()
    module = Buffers(part=whole[1::2, ::3])
    loader, after = prepared(module)
    loader.commit(V2)
    rest[1::2, ::3] = after["part"]
    assert torch.equal(whole, rest)


def test_many_pieces_on_many_threads() -> None:
    module = Buffers(
        a=raw(300_000, dtype=torch.bfloat16), b=raw(70_001, dtype=torch.float32), c=raw(3, dtype=torch.int8)
    )
    loader, after = prepared(module)
    loader.commit(V2)
    assert is_now(module, after)


def test_a_patch_writes_in_place_in_either_mode() -> None:
    """No storage moves, and the second set stays where it was: the next full load overwrites it."""
    for in_place in (False, True):
        module = Buffers(w=raw(100, dtype=torch.float32))
        at = module.w.data_ptr()
        loader, after = prepared(module, in_place=in_place)
        loader.commit(V2)
        assert module.w.data_ptr() == at
        full = {"w": raw(100, dtype=torch.float32, seed=9)}
        manifest = manifest_of(full, 3)
        loader.begin(manifest)
        loader.load_weights([Full(name="w", tensor=full["w"])])
        loader.verify()
        loader.commit(manifest.version)
        assert is_now(module, full)
        patches, after = patches_of(full, 4)
        loader.begin_patch(manifest_of(after, 4))
        loader.load_weights(patches)
        list(loader.prepare_patch())
        loader.commit(Version(run_id="contract", number=4))
        assert is_now(module, after)


# --- failures inside the commit ---


class Kernels:
    """The real ones; `at` is called before each call of the kernel with the call's number."""

    def __init__(self, at: Any) -> None:
        self._real = patching.kernels()
        self._at = at
        self._lock = threading.Lock()
        self.calls = 0

    def __getattr__(self, name: str) -> Any:
        kernel = getattr(self._real, name)

        def call(live: Any, *rest: Any) -> Any:
            with self._lock:
                number, self.calls = self.calls, self.calls + 1
            lost = self._at(number, name, live, rest) == "lost"
            found = kernel(live, *rest)
            if lost:  # what the kernel wrote is not what it reads again
                live[rest[0][0]] ^= 1
                return found[0], found[1] + 1
            return found

        return call


def some_model() -> Buffers:
    return Buffers(
        a=raw(40, dtype=torch.bfloat16),
        b=raw(33, dtype=torch.float32, seed=1),
        c=raw(6, 5, dtype=torch.float16, seed=2).t(),
        d=raw(20, dtype=torch.int64, seed=3),
        e=raw(21, dtype=torch.bool, seed=4),
        f=raw(50, dtype=torch.float8_e4m3fn, seed=5),
    )


@pytest.fixture
def tiny_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patching, "_PIECE_ELEMENTS", 4)
    monkeypatch.setattr(patching, "num_cores", lambda: 1)  # call numbers mean something then


def calls_of_a_good_commit(monkeypatch: pytest.MonkeyPatch) -> int:
    loader, _ = prepared(some_model())
    counted = Kernels(lambda *_: None)
    with monkeypatch.context() as patch:
        patch.setattr(patching, "kernels", lambda: counted)
        loader.commit(V2)
    return counted.calls


@modes
def test_a_patch_is_written_when_what_its_gpu_has_queued_is_done(
    in_place: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a GPU; with one: tests/gpu/test_cuda_streams.py. Seen red: an answer that was computed yet was of two
    versions."""
    gpu, seen = torch.device("cuda", 1), list[tuple[torch.device, bool]]()
    monkeypatch.setattr(patching, "gpus_of", lambda tensors: {gpu} if list(tensors) else set())
    module = nn.Linear(7, 5)
    before = live_bytes(module)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda gpu: seen.append((gpu, live_bytes(module) == before)))
    loader, after = prepared(module, in_place=in_place)
    assert seen == []
    loader.commit(V2)
    assert seen == [(gpu, True)]
    assert is_now(module, after)


@pytest.mark.usefixtures("tiny_pieces")
@modes
@pytest.mark.parametrize("fault", ["raise", "another writer", "lost"])
def test_a_failure_at_every_point_of_a_commit_leaves_exactly_what_was(
    monkeypatch: pytest.MonkeyPatch, in_place: bool, fault: str
) -> None:
    num_calls = calls_of_a_good_commit(monkeypatch)
    assert num_calls > 15
    for point in range(num_calls):
        module = some_model()
        before = live_bytes(module)
        loader, _ = prepared(module, in_place=in_place)

        def fail(number: int, name: str, live: Any, rest: Any, *, point: int = point) -> str:
            if number == point:
                if fault == "raise":
                    raise MemoryError("no")
                if fault == "another writer":
                    live[rest[0][0]] ^= 1
                return fault
            return ""

        armed = Kernels(fail)
        with monkeypatch.context() as patch:
            patch.setattr(patching, "kernels", lambda armed=armed: armed)
            with pytest.raises(LoadError):
                loader.commit(V2)
        assert loader.healthy, point
        assert live_bytes(module) == before, point
        with pytest.raises(StateError):
            loader.commit(V2)  # not tried again
        loader.abort("failed")
        assert loader.healthy
        assert live_bytes(module) == before


def test_nothing_is_undone_while_another_thread_writes_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """One piece fails at once, another is slow: what it writes late must not outlive the undo."""
    monkeypatch.setattr(patching, "_PIECE_ELEMENTS", 4)
    monkeypatch.setattr(patching, "num_cores", lambda: 4)
    module = Buffers(w=raw(400, dtype=torch.int32))
    before = live_bytes(module)
    loader, _ = prepared(module)
    slow, undoing = threading.Event(), threading.Event()
    first = int(patches_of(module.state_dict(), 1)[0][0].positions[0])

    def fail(number: int, name: str, live: Any, rest: Any) -> None:
        if name != "exchange":
            return
        if rest[1] is rest[2]:
            undoing.set()
        elif rest[0][0] == first:
            assert slow.wait(5)
            raise MemoryError("no")
        elif not slow.is_set():
            slow.set()
            undoing.wait(0.5)

    armed = Kernels(fail)
    with monkeypatch.context() as patch:
        patch.setattr(patching, "kernels", lambda: armed)
        with pytest.raises(LoadError):
            loader.commit(V2)
    assert loader.healthy
    assert live_bytes(module) == before


@pytest.mark.usefixtures("tiny_pieces")
def test_every_failure_before_the_commit_leaves_exactly_what_was(monkeypatch: pytest.MonkeyPatch) -> None:
    for point in range(0, 18, 3):
        module = some_model()
        before = live_bytes(module)
        patches, after = patches_of(module.state_dict(), 1)
        loader = ModuleWeightLoader(module)

        def fail(number: int, *_: Any, point: int = point) -> None:
            if number == point:
                raise MemoryError("no")

        armed = Kernels(fail)
        loader.begin_patch(manifest_of(after, 2))
        loader.load_weights(patches)
        with monkeypatch.context() as patch:
            patch.setattr(patching, "kernels", lambda armed=armed: armed)
            with pytest.raises(MemoryError):
                loader.prepare_patch()
        loader.abort("failed")
        assert loader.healthy
        assert live_bytes(module) == before


@pytest.mark.usefixtures("tiny_pieces")
@modes
@pytest.mark.parametrize("fault", ["raise", "lost"])
def test_a_patch_that_can_not_be_undone_refuses_to_serve_until_a_full_load(
    monkeypatch: pytest.MonkeyPatch, in_place: bool, fault: str
) -> None:
    module = some_model()
    loader, after = prepared(module, in_place=in_place)

    def fail(number: int, *_: Any) -> str:
        if number == 5 or (number > 5 and fault == "raise"):
            raise MemoryError("no")
        return fault if number > 5 else ""

    with monkeypatch.context() as patch:
        armed = Kernels(fail)
        patch.setattr(patching, "kernels", lambda: armed)
        with pytest.raises(LoadError, match="could not be undone"):
            loader.commit(V2)
    assert not loader.healthy
    loader.abort("failed")
    assert not loader.healthy
    with pytest.raises(StateError, match="half-loaded"):
        loader.begin_patch(manifest_of(after, 3))
    full = manifest_of(after, 3)
    loader.begin(full)
    loader.load_weights(Full(name=name, tensor=tensor) for name, tensor in after.items())
    loader.verify()
    loader.commit(full.version)
    assert loader.healthy
    assert is_now(module, after)


@pytest.mark.parametrize("name", ["a", "c"])
def test_an_element_that_changed_between_preparation_and_pause_is_seen(name: str) -> None:
    """An optimiser that shares the module, or memory that rots. What was gathered is what is put back."""
    module = some_model()
    before = live_bytes(module)
    loader, _ = prepared(module)
    patches, _ = patches_of(some_model().state_dict(), 1)
    at = int(next(update for update in patches if update.name == name).positions[0])
    tensor = module.get_buffer(name)
    row = np.unravel_index(at, tuple(tensor.shape))
    tensor[row] = tensor[row] + 1
    with pytest.raises(LoadError, match="something else writes") as caught:
        loader.commit(V2)
    assert caught.value.parameter == name
    assert loader.healthy
    assert live_bytes(module) == before


def test_live_tensors_that_were_moved_are_not_written() -> None:
    module = some_model()
    loader, _ = prepared(module)
    module.a.data = module.a.data.clone()
    before = live_bytes(module)
    with pytest.raises(LoadError, match="moved"):
        loader.commit(V2)
    assert loader.healthy
    assert live_bytes(module) == before


def test_live_tensors_that_were_moved_after_the_commit_are_not_undone_in_silence() -> None:
    module = some_model()
    loader, _ = prepared(module)
    loader.commit(V2)
    module.a.data = module.a.data.clone()
    with pytest.raises(LoadError, match="moved"):
        loader.rollback()
    assert not loader.healthy


# --- what can't be patched ---


def test_tensors_that_share_memory_can_not_be_patched() -> None:
    whole = torch.zeros(10)
    module = Buffers(q=whole[:6], k=whole[5:])
    loader = ModuleWeightLoader(module, in_place=True)
    with pytest.raises(UnsupportedError, match="share memory"):
        loader.begin_patch(manifest_of(dict(module.state_dict())))
    loader.begin(manifest_of(dict(module.state_dict())))


@pytest.mark.parametrize("size", [(4,), (3, 4)], ids=str)
def test_an_expanded_tensor_can_not_be_patched(size: tuple[int, ...]) -> None:
    module = Buffers(wide=torch.zeros(1).expand(size))
    with pytest.raises(UnsupportedError) as caught:
        ModuleWeightLoader(module).begin_patch(manifest_of({"wide": torch.zeros(size)}))
    assert caught.value.parameter == "wide"


def test_overlapping_elements_are_found() -> None:
    base = torch.zeros(100)
    assert overlaps_itself(base.as_strided((3, 4), (2, 1)))
    assert not overlaps_itself(base.as_strided((3, 4), (4, 1)))
    assert not overlaps_itself(base.as_strided((3, 4), (1, 3)))
    assert not overlaps_itself(base.as_strided((1, 4), (0, 1)))
    assert not overlaps_itself(base.as_strided((0, 4), (0, 1)))


@modes
@pytest.mark.parametrize("name", ["embed", "head"])
def test_a_tied_tensor_is_patched_under_either_name(in_place: bool, name: str) -> None:
    module = nn.Module()
    module.embed = nn.Parameter(raw(50, dtype=torch.bfloat16))
    module.head = module.embed
    weights = {name: module.embed.detach().clone()}
    patches, after = patches_of(weights, 3)
    loader = ModuleWeightLoader(module, in_place=in_place)
    loader.begin_patch(manifest_of(after, 2))
    loader.load_weights(patches)
    list(loader.prepare_patch())
    loader.commit(V2)
    assert module.head is module.embed
    assert bytes_of(module.head) == bytes_of(after[name])


def test_names_left_out_on_purpose_are_left_out_of_patches() -> None:
    module = Buffers(w=raw(50, dtype=torch.bfloat16))
    weights = {"w": module.w.clone(), "rotary": torch.zeros(8)}
    patches, after = patches_of(weights, 3)
    loader = ModuleWeightLoader(module, ignore=["rotary"])
    loader.begin_patch(manifest_of(after, 2))
    loader.load_weights(patches)
    assert [change.spec.name for change in loader.prepare_patch()] == ["w"]
    loader.commit(V2)
    assert bytes_of(module.w) == bytes_of(after["w"])


# --- the compiled loops by themselves ---


@pytest.mark.parametrize("kind", [np.uint8, np.uint16, np.uint32, np.uint64])
def test_a_compiled_loop_never_leaves_the_tensor(kind: Any) -> None:
    """Whoever checked the positions before."""
    memory = np.arange(64, dtype=kind)
    live = memory[16:32]
    where = np.array([0, 15, 16, 17, 1 << 20, (1 << 32) - 1], dtype=np.uint32)
    new = np.full(6, 99, dtype=kind)
    kernels = patching.kernels()
    old = np.zeros(6, dtype=kind)
    assert kernels.gather(live, where, old) == 4
    assert old.tolist() == [16, 31, 0, 0, 0, 0]
    assert kernels.exchange(live, where, old, new) == (4, 4)
    expected = np.arange(64, dtype=kind)
    expected[[16, 31]] = 99
    assert memory.tolist() == expected.tolist()


@pytest.mark.parametrize("kind", [np.uint8, np.uint16, np.uint32, np.uint64])
def test_what_was_written_is_read_again(kind: Any) -> None:
    """The new elements lie in the tensor itself here: writing the second changes what the first should be."""
    live = np.arange(8, dtype=kind)
    where = np.array([0, 4], dtype=np.uint32)
    assert patching.kernels().exchange(live, where, live[[0, 4]], live[4:6]) == (0, 1)
    assert live.tolist() == [4, 1, 2, 3, 5, 5, 6, 7]


def test_blocks_of_a_piece_are_all_written_and_all_read_again() -> None:
    live = np.zeros(40_000, dtype=np.uint16)
    where = np.arange(0, 40_000, 3, dtype=np.uint32)
    old, new = np.zeros(len(where), dtype=np.uint16), np.arange(len(where), dtype=np.uint16) | 1
    old[-1] = 5
    assert patching.kernels().exchange(live, where, old, new) == (1, 0)
    assert (live[::3] == new).all()
    assert not live[1::3].any()
    assert not live[2::3].any()


@pytest.mark.parametrize("kind", [np.uint8, np.uint16, np.uint32, np.uint64])
@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 128, 511, 577, 1100])
def test_every_element_of_every_block_counts(count: int, kind: Any) -> None:
    """What was another one before, and what lies outside."""
    random = np.random.default_rng(count)
    live = random.integers(0, 256, 4 * count + 4).astype(kind)
    where = np.sort(random.choice(len(live), count, replace=False)).astype(np.uint32)
    expected, new = live[where], live[where] ^ kind(1)
    wrong = random.random(count) < 0.1
    expected[wrong] ^= kind(2)
    outside = np.arange(count) >= count - count // 10
    where[outside] += np.uint32(len(live))
    after = live.copy()
    after[where[~outside]] = new[~outside]
    found = patching.kernels().exchange(live, where, expected, new)
    assert found == (np.count_nonzero(wrong | outside), np.count_nonzero(outside))
    assert (live == after).all()


@pytest.mark.parametrize("at", [0, 30, 62, 64, 130])
def test_what_is_overwritten_in_its_block_is_seen(at: int) -> None:
    live = np.zeros(400, dtype=np.uint16)
    where = np.arange(200, dtype=np.uint32)
    where[at + 1] = at  # no patch has this: it stands for another writer
    new = np.arange(1, 201, dtype=np.uint16)
    before, after = patching.kernels().exchange(live, where, np.zeros(200, dtype=np.uint16), new)
    assert (before, after) == (1, 1)


def test_an_unaligned_live_tensor_takes_the_slow_path() -> None:
    flat = torch.zeros(9, dtype=torch.uint8).numpy()
    unaligned = torch.frombuffer(flat[1:].data, dtype=torch.float32) if flat.ctypes.data % 4 == 0 else None
    if unaligned is None or unaligned.data_ptr() % 4 == 0:
        pytest.skip("this torch has no unaligned tensors")
    module = Buffers(w=unaligned)
    loader, after = prepared(module)
    loader.commit(V2)
    assert is_now(module, after)


def test_values_keep_their_bits() -> None:
    """A signalling NaN and a negative zero are patterns like others."""
    module = Buffers(w=torch.zeros(3))
    bits = torch.tensor([0x7FA00001, -0x80000000, 0x7F800000], dtype=torch.int32).view(torch.float32)
    loader = ModuleWeightLoader(module)
    loader.begin_patch(manifest_of({"w": bits}, 2))
    loader.load_weights([Patch(name="w", positions=torch.arange(3), values=bits)])
    list(loader.prepare_patch())
    loader.commit(V2)
    assert byte_array(module.w).tobytes() == byte_array(bits).tobytes()


def test_a_thread_that_can_not_be_started_leaves_no_turn_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both turns of the change that is written end, or never begin, before it is undone."""
    monkeypatch.setattr(patching, "_PIECE_ELEMENTS", 8)
    monkeypatch.setattr(patching, "num_cores", lambda: 8)
    module = Buffers(one=raw(100, dtype=torch.float32), two=raw(100, dtype=torch.float32, seed=1))
    before = live_bytes(module)
    loader, _ = prepared(module)
    live = loader._patch
    assert live is not None
    assert len(live._turns) > 2
    pool, take = live._pool, patching._take
    assert pool is not None
    refused, undoing, too_late = threading.Event(), threading.Event(), []
    submit, submitted = pool.submit, []

    def second_fails(*args: Any) -> Any:
        submitted.append(submit(*args))
        if len(submitted) == 2:
            refused.set()
            raise RuntimeError("can't start new thread")
        return submitted[-1]

    def held(turn: Any, step: str) -> None:
        if step == "undo":
            undoing.set()
        else:
            assert refused.wait(10)
            if undoing.wait(0.2):  # it does not come: nothing else tells
                too_late.append(turn)
        take(turn, step)

    monkeypatch.setattr(pool, "submit", second_fails)
    monkeypatch.setattr(patching, "_take", held)
    with pytest.raises(LoadError, match="it was undone"):
        loader.commit(V2)
    assert undoing.is_set()
    assert not too_late
    assert loader.healthy
    assert live_bytes(module) == before


# --- turns ---


def in_turns(
    monkeypatch: pytest.MonkeyPatch, num_threads: int
) -> tuple[Buffers, ModuleWeightLoader, patching.LivePatch]:
    """A patch of some 40 turns that waits for its commit."""
    monkeypatch.setattr(patching, "_PIECE_ELEMENTS", 4)
    monkeypatch.setattr(patching, "num_cores", lambda: num_threads)
    module = Buffers(w=raw(400, dtype=torch.int32))
    loader, _ = prepared(module)
    live = loader._patch
    assert live is not None
    assert len(live._turns) > 30
    return module, loader, live


def test_threads_take_turns_and_none_is_handed_out_in_the_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen red: each turn was submitted by itself, a thousand of them for a large change."""
    _, loader, live = in_turns(monkeypatch, 3)
    pool, take, turns = live._pool, patching._take, list(live._turns)
    assert pool is not None
    submit, submitted, taken = pool.submit, [], []

    def counted(*args: Any) -> Any:
        submitted.append(args)
        return submit(*args)

    def noted(turn: Any, step: str) -> None:
        taken.append((step, turns.index(turn)))
        take(turn, step)

    monkeypatch.setattr(pool, "submit", counted)
    monkeypatch.setattr(patching, "_take", noted)
    loader.commit(V2)
    assert len(submitted) == 3
    loader.rollback()
    assert len(submitted) == 6
    assert sorted(taken) == [(step, index) for step in ("apply", "undo") for index in range(len(turns))]


def test_behind_a_failure_no_turn_is_taken_and_the_first_turns_error_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen red: while the first turn ran, others were taken though one had failed."""
    module, loader, live = in_turns(monkeypatch, 2)
    before = live_bytes(module)
    take, turns = patching._take, list(live._turns)
    failed, third, taken = threading.Event(), threading.Event(), []

    def one_fails(turn: Any, step: str) -> None:
        if step == "apply":
            taken.append(turns.index(turn))
            if len(taken) > 2:
                third.set()
            if turn is turns[0]:
                assert failed.wait(5)
                third.wait(0.2)  # it does not come: nothing else tells
                raise MemoryError("of the first")
            failed.set()
            raise MemoryError("of the second")
        take(turn, step)

    monkeypatch.setattr(patching, "_take", one_fails)
    with pytest.raises(LoadError) as caught:
        loader.commit(V2)
    assert str(caught.value.__cause__) == "of the first"
    assert sorted(taken) == [0, 1]
    assert loader.healthy
    assert live_bytes(module) == before


def test_nobody_writes_any_more_when_an_undo_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """One turn of the undo fails at once, another is slow."""
    _, loader, live = in_turns(monkeypatch, 4)
    take, turns = patching._take, list(live._turns)
    slow, returned, ended = threading.Event(), threading.Event(), threading.Event()

    def some_fail(turn: Any, step: str) -> None:
        if step == "apply":
            raise MemoryError("no")
        if turn is turns[0]:
            assert slow.wait(5)
            raise MemoryError("nor back")
        if not slow.is_set():
            slow.set()
            returned.wait(0.2)  # it does not come before this ends: nothing else tells
            take(turn, step)
            ended.set()

    monkeypatch.setattr(patching, "_take", some_fail)
    with pytest.raises(LoadError, match="nor back"):
        loader.commit(V2)
    over = ended.is_set()
    returned.set()
    assert over
    assert not loader.healthy


def test_an_undo_brings_back_all_that_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen red: behind the first turn that failed the others were left as the failed commit had written them."""
    _, loader, live = in_turns(monkeypatch, 1)
    take, turns, undone = patching._take, list(live._turns), list[int]()

    def one_fails(turn: Any, step: str) -> None:
        if step == "apply" and turn is turns[-1]:
            raise MemoryError("no")
        if step == "undo" and turn is turns[0]:
            raise MemoryError("nor back")
        take(turn, step)
        if step == "undo":
            undone.append(turns.index(turn))

    monkeypatch.setattr(patching, "_take", one_fails)
    with pytest.raises(LoadError, match="nor back"):
        loader.commit(V2)
    assert undone == list(range(1, len(turns)))


def test_a_large_change_has_larger_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen red: pieces were of one size, so that a large change had more turns than threads can use."""
    monkeypatch.setattr(patching, "_MAX_TURNS", 10)
    monkeypatch.setattr(patching, "_PIECE_ELEMENTS", 4)
    monkeypatch.setattr(patching, "num_cores", lambda: 3)
    module = Buffers(w=raw(400, dtype=torch.int32), v=raw(7, dtype=torch.bfloat16), s=raw(9, 9, dtype=torch.int8).t())
    loader, after = prepared(module)
    live = loader._patch
    assert live is not None
    assert sum(len(turn) for turn in live._turns) <= 13
    loader.commit(V2)
    assert is_now(module, after)
