"""`pull --out` writes into a folder of others: what they have there stays, and a full disk harms nothing."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from tests.multiproc.local_user import TIMEOUT_S, as_another, common_folder, needs_root
from weightsync.cli import app
from weightsync.cli.write_out import aside_name, is_aside, prepare, write_out
from weightsync.errors import ConfigError, DigestMismatchError
from weightsync.host.puller import Puller
from weightsync.trainer.publisher import WeightManager
from weightsync.types import Deadline

NUM_BYTES = 1 << 20


@pytest.fixture(scope="module")
def manager() -> Iterator[WeightManager]:
    with WeightManager("actor") as there:
        there.offload({"w": torch.arange(NUM_BYTES // 4, dtype=torch.float32)}.items(), 1)
        there.wait_published(1, timeout_s=60)
        yield there


def pull(manager: WeightManager, out: Path) -> tuple[int, str]:
    """Exit code and what it wrote to stderr."""
    result = CliRunner().invoke(app, ["pull", manager.endpoint, "--out", str(out)], env={"NO_COLOR": "1"})
    return result.exit_code, result.stderr


def is_there(out: Path) -> bool:
    (found,) = load_file(out / "model.safetensors").values()
    return bool(torch.equal(found, torch.arange(NUM_BYTES // 4, dtype=torch.float32)))


def _checkpoint(out: Path) -> Path:
    save_file({"w": torch.zeros(3)}, out / "model.safetensors", metadata={"format": "pt"})
    return out / "model.safetensors"


def _text(name: str, text: str) -> Callable[[Path], Path]:
    def make(out: Path) -> Path:
        (out / name).write_text(text)
        return out / name

    return make


def _link(name: str) -> Callable[[Path], Path]:
    def make(out: Path) -> Path:
        (out / "precious.txt").write_text("precious")
        (out / name).symlink_to(out / "precious.txt")
        return out / "precious.txt"

    return make


def _second_name(out: Path) -> Path:
    """Of a file that a pull might have written."""
    (out / "mine").write_text('{"tensors": []}')
    os.link(out / "mine", out / "manifest.json")
    return out / "manifest.json"


@pytest.mark.parametrize(
    "make",
    [_checkpoint, _text("model.safetensors", "x" * 5000), _text("manifest.json", '{"name": "my web page"}'),
     _text("manifest.json", ""), _link("model.safetensors"), _link("manifest.json"), _second_name],
    ids=["checkpoint", "weights", "manifest", "empty", "link as weights", "link as manifest", "second name"],
)  # fmt: skip
def test_what_no_pull_has_written_stays(manager: WeightManager, tmp_path: Path, make: Callable[[Path], Path]) -> None:
    """Seen to fail: a checkpoint or a manifest.json of another tool was removed without a word."""
    precious = make(tmp_path)
    before = precious.read_bytes(), sorted(path.name for path in tmp_path.iterdir())
    code, said = pull(manager, tmp_path)
    assert code == 2
    assert "was not written by a pull of this user" in said
    assert (precious.read_bytes(), sorted(path.name for path in tmp_path.iterdir())) == before


def test_files_that_are_called_like_ours_stay_and_what_a_killed_pull_left_goes(
    manager: WeightManager, tmp_path: Path
) -> None:
    """Seen to fail: everything that begins with .weightsync- was removed."""
    stay = [".weightsync-notes", ".weightsync-0123456789abcdef", ".weightsync-0123456789abcdef-00000000"]
    for name in stay:
        (tmp_path / name).write_text("mine")
    left, linked = aside_name(), aside_name()
    (tmp_path / left).write_text("left by a killed one")
    os.link(tmp_path / stay[0], tmp_path / linked)
    assert is_aside(left)
    assert not any(map(is_aside, stay))
    for _ in range(2):
        assert pull(manager, tmp_path)[0] == 0
        assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
            [*stay, linked, "manifest.json", "model.safetensors"]
        )
    assert is_there(tmp_path)


@needs_root()
@pytest.mark.parametrize("name", ["model.safetensors", "manifest.json"])
def test_links_of_another_user_in_a_common_folder_are_not_followed(manager: WeightManager, name: str) -> None:
    """Seen to fail: root's pull removed them, and what others had there."""
    with common_folder() as out:
        (out / "victim").write_text("precious")
        as_another('ln -s victim "$1/$2"; ln -s victim "$1/$3"; : > "$1/$4"', out, name, aside_name(), aside_name())
        before = sorted(path.name for path in out.iterdir())
        code, said = pull(manager, out)
        assert (code, "was not written by a pull" in said) == (2, True)
        (out / name).unlink()
        assert pull(manager, out)[0] == 0
        assert set(before) <= {path.name for path in out.iterdir()}, "files of others stay, whatever they are called"
        assert (out / "victim").read_text() == "precious"
        assert is_there(out)


@needs_root()
def test_a_folder_that_another_user_links_to_is_not_written(manager: WeightManager, tmp_path: Path) -> None:
    with common_folder() as common:
        as_another('ln -s "$1" "$2"', tmp_path, common / "out")
        code, said = pull(manager, common / "out")
        assert (code, "is a link of uid 65534" in said) == (2, True)
        assert list(tmp_path.iterdir()) == []
        (tmp_path / "mine").symlink_to(tmp_path)
        assert pull(manager, tmp_path / "mine")[0] == 0, "a link of one's own is one's own business"


def test_where_no_folder_can_be(manager: WeightManager, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        code, said = pull(manager, out)
        assert (code, said.startswith("ConfigError")) == (2, True)
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("what", ["tensor", "model"])
def test_digests_beside_the_file_are_of_the_bytes_in_it(manager: WeightManager, tmp_path: Path, what: str) -> None:
    """Seen to fail: the model's digest was written down as the agent said it."""
    with (
        contextlib.closing(Puller(manager.endpoint, "actor", receiver_id="r")) as puller,
        puller.pull(deadline=Deadline(20.0)) as pulled,
    ):
        manifest = pulled.manifest
        if what == "model":
            manifest = msgspec.structs.replace(
                manifest, model_digest=f"{(manifest.model_digest or '')[:-32]}{'0' * 32}"
            )
        else:
            manifest = manifest.with_digests({"w": "xxh3:" + "0" * 32}, manifest.model_digest)
        object.__setattr__(pulled, "manifest", manifest)
        with pytest.raises(DigestMismatchError):
            write_out(pulled, tmp_path)
    assert list(tmp_path.iterdir()) == []


FULL = """
import os, subprocess, sys
from pathlib import Path
folder = Path(sys.argv[1])
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(folder)], check=True)
from typer.testing import CliRunner
from weightsync.cli import app
def pull():
    done = CliRunner().invoke(app, ["pull", sys.argv[2], "--out", str(folder)], env={"NO_COLOR": "1"})
    return done.exit_code, done.stderr.split(":")[0], sorted(os.listdir(folder))
print(pull())
old = {name: (folder / name).read_bytes() for name in os.listdir(folder)}
for fill in map(int, sys.argv[3:]):
    (folder / "other").write_bytes(bytes(fill))
    print(pull())
    assert all((folder / name).read_bytes() == data for name, data in old.items())
(folder / "other").unlink()
print(pull())
"""


@needs_root()
def test_a_full_disk_leaves_the_old_version(manager: WeightManager, tmp_path: Path) -> None:
    """With some room, and with hardly any."""
    fills = 3 * (1 << 20) - 2 * NUM_BYTES, 3 * (1 << 20) - NUM_BYTES - 65536
    done = subprocess.run(
        ["unshare", "-m", sys.executable, "-c", FULL, tmp_path, manager.endpoint, *map(str, fills)],
        capture_output=True, text=True, timeout=2 * TIMEOUT_S, check=False,
    )  # fmt: skip
    good = "(0, '', ['manifest.json', 'model.safetensors'])"
    full = "(1, 'StorageError', ['manifest.json', 'model.safetensors', 'other'])"
    assert done.stdout.splitlines() == [good, full, full, good], done.stderr


def test_what_can_be_replaced_is_looked_at_before_anything_is_fetched(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text("[]")
    with pytest.raises(ConfigError):
        prepare(tmp_path)
    result = CliRunner().invoke(app, ["pull", "http://127.0.0.1:9", "--model-id", "m", "--out", str(tmp_path)])
    assert "was not written by a pull" in result.stderr, "nobody was called"
