"""AdapterFolder: what is copied from shared memory is a folder that PEFT's readers read; and what is refused."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from weightsync.errors import ManifestMismatchError, NoRoomError, SharedMemoryError, UnsupportedError
from weightsync.handles.lora_folder import AdapterFolder
from weightsync.host.staged_requests import full_chunks, full_request
from weightsync.memory import PrivateFolder, Segment, reclaim_dead
from weightsync.plan.safetensors import plan_layout
from weightsync.tensors import spec_of
from weightsync.types import BroadcastWeightUpdateRequest, Manifest, TensorTable, Version
from weightsync.types.adapter import Adapter, canonical_config

CONFIG = canonical_config({"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]})
TENSORS = {
    "base_model.model.q_proj.lora_A.weight": torch.arange(8, dtype=torch.float32).reshape(2, 4),
    "base_model.model.q_proj.lora_B.weight": torch.arange(6, dtype=torch.bfloat16).reshape(3, 2),
}


def manifest() -> Manifest:
    return Manifest(
        version=Version(run_id="r", number=3), model_id="actor", artifact="lora", adapter=Adapter(config=CONFIG),
        tensors=TensorTable.of(spec_of(name, tensor) for name, tensor in TENSORS.items()),
    )  # fmt: skip


def staged(made: Manifest) -> tuple[Segment, dict[str, int]]:
    layout = plan_layout(made.tensors)
    segment = Segment(layout.total_bytes)
    offsets = {part.name: part.offset for part in layout.parts}
    for name, tensor in TENSORS.items():
        raw = tensor.contiguous().view(torch.uint8).numpy().tobytes()
        segment.memory[offsets[name] : offsets[name] + len(raw)] = raw
    return segment, offsets


def test_a_staging_becomes_a_folder_that_is_this_users_alone_and_never_written_again() -> None:
    made = manifest()
    segment, offsets = staged(made)
    with segment, AdapterFolder(made) as folder:
        for seq, chunk in enumerate(full_chunks(made.table, offsets, segment.name, 40)):
            folder.take(full_request(chunk, "s", seq, segment.name))
        path = Path("/dev/shm", folder.sealed(made))
        segment.memory[:] = bytes(segment.size_bytes)  # the staging's next version
        found = load_file(path / "adapter_model.safetensors")
        assert found.keys() == TENSORS.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in TENSORS.items())
        assert (path / "adapter_config.json").read_text() == CONFIG
        assert {stat.S_IMODE(each.stat().st_mode) for each in path.iterdir()} == {0o400}
    assert not path.exists()


def test_a_folder_with_something_missing_is_not_sealed() -> None:
    made = manifest()
    segment, offsets = staged(made)
    with segment, AdapterFolder(made) as folder:
        chunk = next(iter(full_chunks(made.table, offsets, segment.name, 8)))
        folder.take(full_request(chunk, "s", 0, segment.name))
        with pytest.raises(ManifestMismatchError, match="1 tensors have not come"):
            folder.sealed(made)


def test_a_configuration_is_written_whole_or_has_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full /dev/shm takes a part of it."""
    made, write = manifest(), os.write

    def full(fd: int, data: memoryview) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    for writes in (lambda fd, data: write(fd, data[:7]), full):
        segment, offsets = staged(made)
        with segment, AdapterFolder(made) as folder:
            for seq, chunk in enumerate(full_chunks(made.table, offsets, segment.name, 40)):
                folder.take(full_request(chunk, "s", seq, segment.name))
            with monkeypatch.context() as patched:
                patched.setattr(os, "write", writes)
                if writes is full:
                    with pytest.raises(NoRoomError, match="No space"):
                        folder.sealed(made)
                    continue
                path = Path("/dev/shm", folder.sealed(made))
            assert (path / "adapter_config.json").read_text() == CONFIG


def test_bytes_of_elsewhere_are_refused() -> None:
    made = manifest()
    sizes = {"names": tuple(TENSORS), "dtypes": ("float32", "bfloat16"), "shapes": ((2, 4), (3, 2))}
    with AdapterFolder(made) as folder, pytest.raises(UnsupportedError, match="weightsync serve"):
        folder.take(BroadcastWeightUpdateRequest(session="s", seq=0, **sizes, offsets=(0, 32), bucket_bytes=44))  # type: ignore[arg-type]


def test_it_goes_with_whoever_took_it_over() -> None:
    with PrivateFolder(shared=True) as folder:
        taken = PrivateFolder.taken_over(folder.name)
        folder.hand_over()
    reclaim_dead()
    assert os.path.isdir(taken.path)
    taken.close()
    assert not os.path.exists(taken.path)
    with pytest.raises(SharedMemoryError):
        PrivateFolder.taken_over(os.path.basename(taken.path))


def test_a_folder_of_one_owner_is_not_taken_over() -> None:
    with PrivateFolder() as folder, pytest.raises(SharedMemoryError):
        PrivateFolder.taken_over(folder.name)
    with pytest.raises(SharedMemoryError):
        PrivateFolder.taken_over("weightsync-ipc-1-../../etc")
