"""LoadSession: what a `RemoteLoadServer` knows of one bracket, and the checks before a byte is taken."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import torch

from weightsync.errors import LoadError, ManifestMismatchError, StateError
from weightsync.load.remote_wire import ChunkHead, Piece
from weightsync.tensors import tensor_from_bytes
from weightsync.types import Full, Manifest, Update


class LoadSession:
    """One bracket of one client; of one thread, the server's.

    Args:
        name: which the client chose.
        manifest: that the loader has begun with, or is just beginning with.
    """

    def __init__(self, name: str, manifest: Manifest) -> None:
        self.name = name
        self.manifest = manifest
        self.num_loaded = 0
        self.busy = False
        self.ended = ""
        self._specs = manifest.by_name()
        self._next_index = 0
        self._num_bytes: dict[str, int] = {}  # that have come, or are announced
        self._coming: dict[str, torch.Tensor] = {}  # of the loader's chunk that is under way
        self._heard_at = time.monotonic()

    @property
    def idle_s(self) -> float:
        """Since when nothing was heard."""
        return time.monotonic() - self._heard_at

    def end(self, why: str) -> None:
        """Whatever still comes is not taken."""
        self.ended = self.ended or why or "aborted"

    @contextlib.contextmanager
    def step(self, *, breaks: bool = False) -> Iterator[None]:
        """Surrounds a step: one at a time.

        Args:
            breaks: whether one that fails leaves nothing to go on with but an abort.

        Raises:
            StateError: another step of it is under way, or it has failed.
        """
        if self.busy or self.ended:
            why = "another step of it is under way" if self.busy else f"it has ended: {self.ended}"
            raise StateError(f"this session takes no step: {why}", version=str(self.manifest.version))
        self.busy = True
        try:
            yield
        except BaseException as error:
            if breaks:
                self.end(f"a chunk failed: {error}"[:300])
            raise
        finally:
            self.busy = False
            self._heard_at = time.monotonic()

    def check(self, head: ChunkHead) -> None:
        """Checks a whole head against the manifest; nothing is allocated.

        Raises:
            StateError: it is not the next request.
            ManifestMismatchError: a name that is not in the manifest, a tensor that came already, or a piece that is
                not the next one of its tensor or goes past its end.
        """
        if head.index != self._next_index:
            raise StateError(f"the next request is number {self._next_index}, not {head.index}")
        after = dict(self._num_bytes)
        for piece in head.pieces:
            spec = self._specs.get(piece.name)
            if spec is None:
                raise ManifestMismatchError("this tensor is not in the manifest", parameter=piece.name)
            whole = piece.name in after and after[piece.name] == spec.nbytes
            if whole:
                raise ManifestMismatchError("this tensor came twice", parameter=piece.name)
            if piece.offset != after.get(piece.name, 0) or piece.offset + piece.nbytes > spec.nbytes:
                raise ManifestMismatchError(
                    f"bytes {piece.offset} to {piece.offset + piece.nbytes} are not the next ones of "
                    f"{after.get(piece.name, 0)} to {spec.nbytes}",
                    parameter=piece.name,
                )
            after[piece.name] = piece.offset + piece.nbytes
        if head.last and (cut := [name for name, end in after.items() if end != self._specs[name].nbytes]):
            raise ManifestMismatchError("a chunk ends within this tensor", parameter=cut[0])
        self._num_bytes = after
        self._next_index += 1

    def place(self, piece: Piece) -> memoryview:
        """Where the piece's bytes go.

        Raises:
            LoadError: no memory for its tensor.
        """
        self._heard_at = time.monotonic()
        buffer = self._coming.get(piece.name)
        if buffer is None:
            try:
                buffer = torch.empty(self._specs[piece.name].nbytes, dtype=torch.uint8)
            except (RuntimeError, MemoryError) as error:
                raise LoadError(f"no memory for this tensor: {error}", parameter=piece.name) from error
            self._coming[piece.name] = buffer
        return buffer.numpy().data[piece.offset : piece.offset + piece.nbytes]

    def take_updates(self) -> list[Update]:
        """The tensors of the loader's chunk, which is complete; they are the caller's."""
        updates: list[Update] = []
        for name, buffer in self._coming.items():
            spec = self._specs[name]
            updates.append(Full(name=name, tensor=tensor_from_bytes(buffer, dtype=spec.dtype, shape=spec.shape)))
        self._coming = {}
        return updates
