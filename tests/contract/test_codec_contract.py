"""The library's own codecs keep the codec's contract, and so does the example of the docs."""

from __future__ import annotations

import functools
from typing import Any

from tests.standins.pages import example
from weightsync.codec.base import Codec
from weightsync.codec.changes import ChangesCodec
from weightsync.codec.full import FullCodec
from weightsync.testing.contracts import CodecContract


class TestFull(CodecContract):
    def make_codec(self) -> Codec:
        return FullCodec()


class TestChanges(CodecContract):
    sends_changes = True

    def make_codec(self) -> Codec:
        return ChangesCodec()


class TestChangesOfAnySize(TestChanges):
    def make_codec(self) -> Codec:
        return ChangesCodec(largest=1.0)


class TestChangesKeptBesideTheTensors(TestChanges):
    def make_codec(self) -> Codec:
        return ChangesCodec(keep_on="device")


class TestPlanes(CodecContract):
    """The example of docs/extending-codec.md."""

    @functools.cached_property
    def example(self) -> dict[str, Any]:
        return example("extending-codec.md")

    def make_codec(self) -> Codec:
        made: Codec = self.example["PlanesCodec"]()
        return made
