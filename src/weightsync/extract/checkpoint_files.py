"""Which files of a folder are the checkpoint that lies there. No torch."""

from __future__ import annotations

import json
import os
from pathlib import Path

from weightsync.errors import ConfigError

INDEX = "model.safetensors.index.json"
_MAX_INDEX_BYTES = 100_000_000


def checkpoint_files(folder: Path, *, all_of_them: bool = True) -> tuple[Path, ...]:
    """The safetensors files of a checkpoint folder: those that its index names, or all. Others may lie beside an index,
    e.g. the same weights in another form.

    Args:
        all_of_them: those that the index names have to be there, too.

    Raises:
        ConfigError: there is none, or the index names one that is not there or lies elsewhere.
    """
    index = folder / INDEX
    if index.is_file():
        try:
            if index.stat().st_size > _MAX_INDEX_BYTES:
                raise ValueError(f"it has over {_MAX_INDEX_BYTES} bytes")
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OSError) as error:
            raise ConfigError(f"{index} is no index of safetensors files: {error!r:.200}") from error
        for name in names:
            if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
                raise ConfigError(f"{index} names {name!r:.200}, which is no safetensors file of its folder")
    else:
        names = sorted(path.name for path in folder.glob("*.safetensors"))
    if not names:
        what = "has no *.safetensors file" if folder.is_dir() else "is no folder"
        raise ConfigError(f"{folder} {what}: give a checkpoint's folder, with its *.safetensors files")
    there = tuple(folder / name for name in names if os.path.isfile(folder / name))  # unlike Path's, it takes any name
    if all_of_them and len(there) < len(names):
        raise ConfigError(f"{next(folder / name for name in names if folder / name not in there)} is missing")
    return there
