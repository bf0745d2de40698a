"""lent: which staging tensors a model has taken for its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from weightsync import tensors
from weightsync.errors import ManifestMismatchError
from weightsync.load.whole import Differences, lent, staging_for
from weightsync.types import TensorSpec


def test_every_way_to_share_is_seen() -> None:
    """Whole, in part, as a buffer, under another name, through numpy. Seen red by addresses alone."""
    staging = {name: torch.zeros(8) for name in ("whole", "part", "buffer", "renamed", "numpy", "copied", "spare")}
    staging["empty"] = torch.zeros(0)
    model = nn.Module()
    model.whole = nn.Parameter(staging["whole"])
    model.part = nn.Parameter(staging["part"][2:6].view(2, 2))
    model.register_buffer("buffer", staging["buffer"].view(torch.int32), persistent=False)
    model.inner = nn.Linear(8, 1, bias=False)
    model.inner.weight.data = staging["renamed"].unsqueeze(0)
    model.foreign = nn.Parameter(torch.from_numpy(staging["numpy"].numpy()[5:]))
    model.copied = nn.Parameter(staging["copied"].clone())
    model.nothing = nn.Parameter(torch.zeros(0))
    model.meta = nn.Parameter(torch.zeros(8, device="meta"))
    model.sparse = nn.Parameter(torch.zeros(2, 2).to_sparse())
    assert lent(staging, model) == {"whole", "part", "buffer", "renamed", "numpy"}
    assert lent({}, model) == lent(staging, nn.Module()) == set()


def test_where_no_more_can_be_pinned_the_staging_is_plain_memory(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Seen red: a bare RuntimeError at each version."""
    real = torch.empty

    def no_room(*shape: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be")
        return real(*shape, **options)

    monkeypatch.setattr(torch, "empty", no_room)
    tensors._say_not_pinned.cache_clear()
    specs = {name: TensorSpec(name=name, dtype="bfloat16", shape=(2, 3)) for name in ("a", "b")}
    staging = staging_for(specs, {}, pinned=True)
    assert {name: (part.shape, part.dtype) for name, part in staging.items()} == dict.fromkeys(
        specs, ((2, 3), torch.bfloat16)
    )
    assert [record.message.split("(")[1].split(")")[0] for record in caplog.records] == ["CUDA error: out of memory"]


@pytest.mark.parametrize(
    ("sent", "remedy"),
    [("module.model.{}", "name.removeprefix('module.')"), ("{}", "'model.' + name"), ("actor.{}", None)],
)
def test_a_prefix_is_told_once_with_its_remedy(sent: str, remedy: str | None) -> None:
    """Seen red: ten lines that were alike."""
    known = [f"model.layers.{index}.weight" for index in range(20)]
    differences, names = Differences(), [sent.format(name.removeprefix("model.")) for name in known]
    for name in names:
        differences.add_strange(name, known)
    differences.add_missing(known)
    with pytest.raises(ManifestMismatchError) as caught:
        differences.refuse(lambda: names)
    text = caught.value.message
    assert text.startswith(f"{40 if remedy is None else 20} tensors differ: ")
    assert caught.value.parameter == sent.format("layers.0.weight")
    assert (remedy is not None) == (text.count("layers.") == 0) == (len(text) < 200)
    assert remedy is None or f"name_map=lambda name: {remedy}" in text


@pytest.mark.parametrize(
    ("before", "names"), [("", ["a", "lm_head"]), ("module.model.", ["module.model.a", "lm_head"])]
)
def test_a_remedy_breaks_no_name_that_fits(before: str, names: list[str]) -> None:
    """Seen red: what was added to the strange names was to be added to all."""
    known = ["model.a", "lm_head"]
    differences = Differences()
    differences.add_strange(f"{before}a", known)
    with pytest.raises(ManifestMismatchError) as caught:
        differences.refuse(lambda: names)
    assert ("removeprefix('module.')" in caught.value.message) == bool(before)
    assert "+ name" not in caught.value.message


def test_a_prefix_explains_no_shape() -> None:
    differences = Differences()
    differences.add_strange("module.a", ["a", "b"])
    differences.add("b", "the trainer sends (2,), the engine's model has (3,)")
    with pytest.raises(ManifestMismatchError, match="has no such tensor"):
        differences.refuse()


def test_a_reason_is_said_once_with_the_first_names_and_a_count() -> None:
    """Seen red: the same sentence for each of ten tensors, in a line of 1,600 characters."""
    differences, known = Differences(), [f"layers.{index}.k.weight" for index in range(25)]
    for name in known:
        differences.add(name, "the trainer sends float32, the engine's model has bfloat16", hint="send bfloat16")
    differences.add("norm", "the trainer sends (2,), the engine's model has (3,)")
    differences.add_missing(["a", "b"])
    with pytest.raises(ManifestMismatchError) as caught:
        differences.refuse()
    assert caught.value.message == (
        "28 tensors differ: layers.0.k.weight, layers.1.k.weight, layers.2.k.weight and 22 more: the trainer sends "
        "float32, the engine's model has bfloat16; norm: the trainer sends (2,), the engine's model has (3,); a, b: "
        "the trainer does not send them; send bfloat16"
    )
    assert caught.value.parameter == "layers.0.k.weight"


def test_of_many_reasons_ten_are_said() -> None:
    differences = Differences()
    for index in range(12):
        differences.add(f"{index}", f"reason {index}")
    with pytest.raises(ManifestMismatchError, match=r"12 tensors differ: .*; 9: reason 9; and 2 more ") as caught:
        differences.refuse()
    assert caught.value.parameter == "0"
