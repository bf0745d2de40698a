"""LiveLayer: which of an engine's tensors take a change where they are live, told so that a person can read it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import msgspec

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_MOST = 200


class LiveLayer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Tensors of one name in an engine's layers, and how a change enters them.

    Attributes:
        name: the checkpoint's, with "*" for the number of a layer.
        num_tensors: how many there are.
        why: what is in the way of writing changed elements where they are live, so that all is loaded again; None
            where nothing is.
    """

    name: str
    num_tensors: int
    why: str | None = None


def layers_of(found: Mapping[str, str | None]) -> tuple[LiveLayer, ...]:
    """Tensors by name, with what is in the way, as layers: two hundred at most, the odd ones first."""
    counted: dict[tuple[str, str | None], int] = {}
    for name, why in found.items():
        key = _NUMBER.sub("*", name), None if why is None else _NUMBER.sub("*", why)
        counted[key] = counted.get(key, 0) + 1
    return _sorted(counted)


def merged_layers(workers: Iterable[Iterable[LiveLayer]]) -> tuple[LiveLayer, ...]:
    """What the workers of one engine say, each of its own part of the model: all of it."""
    counted: dict[tuple[str, str | None], int] = {}
    for layers in workers:
        for each in layers:
            key = each.name, each.why
            counted[key] = max(counted.get(key, 0), each.num_tensors)
    return _sorted(counted)


def _sorted(counted: Mapping[tuple[str, str | None], int]) -> tuple[LiveLayer, ...]:
    layers = [LiveLayer(name=name, num_tensors=number, why=why) for (name, why), number in counted.items()]
    found = sorted(layers, key=lambda each: (each.why is None, -each.num_tensors, each.name, each.why or ""))
    if len(found) > _MOST:
        rest = found[_MOST - 1 :]
        why = next((each.why for each in rest if each.why is not None), None)
        found[_MOST - 1 :] = [LiveLayer(name="others", num_tensors=sum(e.num_tensors for e in rest), why=why)]
    return tuple(found)
