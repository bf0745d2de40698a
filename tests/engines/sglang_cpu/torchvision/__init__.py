"""Stands in for torchvision, which SGLang imports and text models never use: its builds are for CUDA.

Every module that SGLang imports is there; every name in it is a class that refuses to be made.
"""

from __future__ import annotations

import enum
import sys
import types
import typing
from typing import Any, NoReturn

__version__ = "0.26.0"


class InterpolationMode(enum.Enum):
    """As torchvision has it: its members are read when modules are imported."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


class _Module(types.ModuleType):
    __path__: typing.ClassVar[list[str]] = []
    InterpolationMode = InterpolationMode

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)

        def refuse(*_: Any, **__: Any) -> NoReturn:
            raise RuntimeError(f"there is no torchvision here: {name}")

        return type(name, (), {"__init__": refuse})


for _name in ("transforms", "transforms.functional", "transforms.v2", "transforms.v2.functional", "ops", "io"):
    _module = sys.modules[f"torchvision.{_name}"] = _Module(f"torchvision.{_name}")
    _parent, _, _last = f"torchvision.{_name}".rpartition(".")
    setattr(sys.modules[_parent], _last, _module)
