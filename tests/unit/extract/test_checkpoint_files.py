"""checkpoint_files: what an index names, in its own folder; without one every file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from weightsync.errors import ConfigError
from weightsync.extract.checkpoint_files import INDEX, checkpoint_files


@pytest.mark.parametrize(
    "names",
    [
        ["../model.safetensors"],
        ["/etc/passwd"],
        ["sub/model.safetensors"],
        [".."],
        ["."],
        [""],
        ["a\0.safetensors"],
        ["x" * 300 + ".safetensors"],
        ["gone.safetensors"],
        ["secret.txt"],
        [5],
        [["model.safetensors"]],
        [],
    ],
)
def test_an_index_names_files_of_its_own_folder(tmp_path: Path, names: list[Any]) -> None:
    folder = tmp_path / "checkpoint"
    (folder / "sub").mkdir(parents=True)
    for path in (tmp_path, folder, folder / "sub"):
        save_file({"w": torch.ones(2)}, path / "model.safetensors")
    (folder / "secret.txt").write_text("secret")
    (folder / INDEX).write_text(json.dumps({"weight_map": {f"w{i}": name for i, name in enumerate(names)}}))
    with pytest.raises(ConfigError):
        checkpoint_files(folder)


def test_an_index_that_is_none_is_refused_and_one_that_is_chooses(tmp_path: Path) -> None:
    for name in ("a", "b", "old"):
        save_file({name: torch.ones(2)}, tmp_path / f"{name}.safetensors")
    assert [path.name for path in checkpoint_files(tmp_path)] == ["a.safetensors", "b.safetensors", "old.safetensors"]
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "a.safetensors", "b": "b.safetensors"}}))
    assert [path.name for path in checkpoint_files(tmp_path)] == ["a.safetensors", "b.safetensors"]
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "a.safetensors", "c": "c.safetensors"}}))
    with pytest.raises(ConfigError, match=r"c\.safetensors is missing"):
        checkpoint_files(tmp_path)
    assert [path.name for path in checkpoint_files(tmp_path, all_of_them=False)] == ["a.safetensors"]
    for text in ("", "{", "[]", "5", '{"weight_map": []}', '{"weight_map": 5}', "[" * 100_000, '{"other": {}}'):
        (tmp_path / INDEX).write_text(text)
        with pytest.raises(ConfigError, match="index"):
            checkpoint_files(tmp_path)
    (tmp_path / INDEX).write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="index"):
        checkpoint_files(tmp_path)
    with (tmp_path / INDEX).open("wb") as file:
        file.truncate(200_000_000)
    with pytest.raises(ConfigError, match="index"):
        checkpoint_files(tmp_path)
