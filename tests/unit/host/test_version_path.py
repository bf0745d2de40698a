"""The place of a version: nothing but our own links is ever touched, whatever it is called."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from weightsync.errors import ConfigError
from weightsync.host.version_path import VersionPath
from weightsync.types import Version


def pulled(run_id: str, number: int) -> Any:
    return SimpleNamespace(version=Version(run_id=run_id, number=number), segment="weightsync-1-abc")


@pytest.mark.parametrize(
    "model_id", ["actor", "../up", "..", ".", "Qwen/Qwen2.5-7B", "a b", "\ud800", "a\0b"], ids=ascii
)
@pytest.mark.parametrize("run_id", ["run", "../../up", "."])
def test_names_stay_below_the_root(tmp_path: Path, model_id: str, run_id: str) -> None:
    root = tmp_path / "root"
    paths = VersionPath(root, model_id)
    with paths.held(pulled(run_id, 3)) as folder:
        assert folder.resolve().parent.parent == root.resolve()
        assert os.readlink(folder / "model.safetensors") == "/dev/shm/weightsync-1-abc"
        assert [each.name for each in folder.parent.iterdir()] == [folder.name]
    assert list(root.glob("*/*")) == []
    assert [each.name for each in tmp_path.iterdir()] == ["root"]


def test_what_is_not_ours_stays(tmp_path: Path) -> None:
    for precious in ("actor/checkpoint-1/weights.bin", "actor/notes.txt", "actor/sub/model.safetensors/deep"):
        file = tmp_path / precious
        file.parent.mkdir(parents=True)
        file.write_text("precious")
        with pytest.raises((ConfigError, OSError)):
            VersionPath(tmp_path, "actor")
        assert file.read_text() == "precious"
        file.unlink()
        while file.parent != tmp_path:
            file = file.parent
            file.rmdir()


def test_a_body_that_fails_leaves_nothing(tmp_path: Path) -> None:
    paths = VersionPath(tmp_path, "actor")
    with pytest.raises(KeyError), paths.held(pulled("run", 1)):
        raise KeyError
    with paths.held(pulled("run", 1)) as folder:
        assert folder.is_dir()
    assert list(tmp_path.glob("*/*")) == []


def test_what_an_engine_leaves_there_harms_nobody(tmp_path: Path) -> None:
    """Its own file stays; the link goes, the version can be loaded again, and a restarted service begins."""
    paths = VersionPath(tmp_path, "actor")
    for _ in range(2):
        with paths.held(pulled("run", 1)) as folder:
            assert (folder / "model.safetensors").is_symlink()
            (folder / ".lock").write_text("precious")
        assert not (folder / "model.safetensors").is_symlink()
        assert (folder / ".lock").read_text() == "precious"
    VersionPath(tmp_path, "actor")
    with paths.held(pulled("run", 1)) as folder:
        (folder / ".lock").unlink()
    assert list((tmp_path / "actor").iterdir()) == []


@pytest.mark.parametrize("run_id", ["\u0436" * 60, "x" * 256])
def test_a_long_name_is_shortened(tmp_path: Path, run_id: str) -> None:
    paths = VersionPath(tmp_path, run_id)
    with paths.held(pulled(run_id, 10**18)) as one, paths.held(pulled(f"{run_id[:-1]}y", 10**18)) as other:
        assert one != other
    assert list(tmp_path.glob("*/*")) == []
