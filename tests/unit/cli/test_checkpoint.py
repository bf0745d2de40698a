"""What `weightsync export` does not write. What it writes: tests/multiproc/test_store.py."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from weightsync.cli.checkpoint import write_checkpoint
from weightsync.errors import ConfigError
from weightsync.types import Manifest, TensorSpec, Version


def test_an_adapter_is_no_checkpoint_of_a_model(tmp_path: Path) -> None:
    """Seen red: it was written as one, and whoever loaded it had new weights beside it."""
    version = Version(run_id="r", number=1)
    manifest = Manifest(version=version, model_id="m", tensors=(TensorSpec(name="a.lora_A", dtype="int8", shape=(1,)),))
    pulled: Any = SimpleNamespace(manifest=SimpleNamespace(artifact="lora", tensors=manifest.tensors), version=version)
    with pytest.raises(ConfigError, match=r"is an adapter.*weightsync pull"):
        write_checkpoint(pulled, tmp_path / "out", like=None, shard_bytes=1)
    assert list(tmp_path.iterdir()) == []
