"""Checkpoints without torch, for servers that hold bytes and no model; and two such servers that load them."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

from tests.standins.sglang_server import SGLangRouterServer, SGLangServer
from weightsync.control.methods.folder import VersionFolder
from weightsync.types import Version

NAMES = ("model.embed.weight", "model.layers.0.weight", "model.norm.weight")
SHAPE = (4, 6)
NBYTES = 48


def weights(number: int) -> dict[str, bytes]:
    """Other bytes for each number, bfloat16 by size."""
    return {name: bytes((31 * number + 7 * i + k) % 256 for k in range(NBYTES)) for i, name in enumerate(NAMES)}


def write_checkpoint(folder: Path, number: int, *, cut: int = 0) -> Path:
    """A safetensors file of these bytes, less the last `cut`."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = weights(number)
    entries = {
        name: {"dtype": "BF16", "shape": SHAPE, "data_offsets": [NBYTES * i, NBYTES * (i + 1)]}
        for i, name in enumerate(tensors)
    }
    header = json.dumps(entries).encode()
    body = len(header).to_bytes(8, "little") + header + b"".join(tensors.values())
    (folder / "model.safetensors").write_bytes(body[: len(body) - cut])
    return folder


class RoutedServers:
    """Two SGLang servers behind a router, by their contract, and the folder that their trainer publishes into.

    Args:
        folder: for all files.
        opened: ends them.

    Attributes:
        settings: of a configuration whose method syncs them.
    """

    def __init__(self, folder: Path, opened: contextlib.ExitStack) -> None:
        start = write_checkpoint(folder / "start", 0)
        self._servers = [SGLangServer(start) for _ in range(2)]
        router = SGLangRouterServer([_started(server, opened) for server in self._servers])
        _started(router, opened)
        self._folder = VersionFolder(folder / "versions")
        self.settings: dict[str, Any] = {
            "sync_weight_path": str(self._folder.root),
            "inference_service": {"model_tag": "actor", "backend": "sglang", "base_url": router.url},
        }

    def publish(self, version: Version) -> None:
        """The trainer's part."""
        self._folder.publish("actor", version, lambda into: write_checkpoint(into, version.number))

    def check_serve(self, version: Version) -> None:
        """Both hold that version's bytes, call them so, and are not paused."""
        for server in self._servers:
            assert {name: each.tobytes() for name, each in server.weights.items()} == weights(version.number)
            assert (server.weight_version, server.paused) == (str(version), None)


def _started(server: Any, opened: contextlib.ExitStack) -> str:
    opened.callback(server.close)
    url: str = server.start()
    return url
