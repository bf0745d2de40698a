from __future__ import annotations

from pathlib import Path

import pytest
import torch

from weightsync.demo.data import ByteText
from weightsync.errors import ConfigError


def folder_of(path: Path, *, count: int) -> Path:
    for index in range(count):
        (path / f"file{index:02}.py").write_bytes(bytes([65 + index]) * 1000)
    return path


def test_pythons_own_sources_are_found_and_text() -> None:
    text = ByteText()
    assert text._train.size > 1_000_000
    assert text._held_out.size > 50_000
    batch = text.batch(rank=0, update=0, num_rows=4, row_length=64)
    assert batch.shape == (4, 64)
    assert batch.dtype == torch.int64
    assert 0 <= int(batch.min()) <= int(batch.max()) < 256
    assert b" " in bytes(batch.flatten().tolist())


def test_two_readers_agree_and_each_rank_and_update_differs() -> None:
    first, second = ByteText(), ByteText()
    shape = {"num_rows": 4, "row_length": 64}
    assert torch.equal(first.batch(rank=1, update=3, **shape), second.batch(rank=1, update=3, **shape))
    assert torch.equal(first.held_out(**shape), second.held_out(**shape))
    batches = [first.batch(rank=rank, update=update, **shape) for rank in range(2) for update in range(2)]
    assert all(not torch.equal(batches[i], batches[j]) for i in range(4) for j in range(i))
    other = ByteText(seed=1)
    assert not torch.equal(other.held_out(**shape), first.held_out(**shape))


def test_no_file_is_both_trained_on_and_held_out(tmp_path: Path) -> None:
    text = ByteText(folder_of(tmp_path, count=20))
    # File k has only the letter k: the letters show which files a row came from.
    trained = set(text.batch(rank=0, update=0, num_rows=500, row_length=50).flatten().tolist()) - {10}
    held = set(text.held_out(num_rows=500, row_length=50).flatten().tolist()) - {10}
    assert held == {65 + 9, 65 + 19}
    assert len(trained) == 18
    assert not trained & held


@pytest.mark.parametrize("count", [0, 9])
def test_a_folder_without_enough_sources_is_refused(tmp_path: Path, count: int) -> None:
    with pytest.raises(ConfigError, match="Python sources"):
        ByteText(folder_of(tmp_path, count=count))
    with pytest.raises(ConfigError):
        ByteText(tmp_path / "nowhere")


def test_a_row_longer_than_the_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="2000 bytes"):
        ByteText(folder_of(tmp_path, count=10)).held_out(num_rows=1, row_length=2000)
