"""A manifest names every tensor once, and has digests for all or none."""

from __future__ import annotations

import pytest

from weightsync.errors import InvalidRequestError
from weightsync.types import Manifest, TensorSpec, Version


def spec(name: str) -> TensorSpec:
    return TensorSpec(name=name, dtype="uint8", shape=(2,))


V = Version(run_id="r", number=1)


def test_a_manifest_names_every_tensor_once() -> None:
    with pytest.raises(InvalidRequestError, match="once"):
        Manifest(version=V, model_id="m", tensors=(spec("a"), spec("b"), spec("a")))
    with pytest.raises(InvalidRequestError, match="no tensors"):
        Manifest(version=V, model_id="m", tensors=())


def test_digests_are_filled_in_for_all_or_none() -> None:
    manifest = Manifest(version=V, model_id="m", tensors=(spec("a"), spec("b")))
    one, two = (f"xxh3:{number:032x}" for number in (1, 2))
    filled = manifest.with_digests({"b": two, "a": one}, "3")
    assert [filled.digest(name) for name in ("a", "b")] == [one, two]
    assert filled.model_digest == "3"
    assert manifest.digest("a") is None, "the other one is as it was"
    wrongs: list[dict[str, str]] = [{"a": one}, {"a": one, "b": two, "c": one}, {}, {"a": one, "b": "xxh3:1"}]
    for wrong in [*wrongs, {"a": one, "b": two.removeprefix("xxh3:")}, {"a": one, "b": f"xxh3: {two[6:]}"}]:
        with pytest.raises(InvalidRequestError):
            manifest.with_digests(wrong, "3")
