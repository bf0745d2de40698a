"""Text for the demo, found on any machine: the sources of Python's own library, one token a byte."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from weightsync.errors import ConfigError

VOCAB_SIZE = 256
PROMPT = "def "
SAMPLE_BYTES = 24
_HELD_OUT_EVERY = 10
_MAX_BYTES = 8 << 20
_NO_SOURCES_HINT = "the demo reads Python's own library sources; point it at any folder of .py files instead"


class ByteText:
    """Training and held-out bytes, from different files. Equal in every process that reads the same folder.

    Args:
        folder: where .py files lie directly; by default Python's standard library.
        seed: of the random positions.

    Raises:
        ConfigError: the folder has too few readable .py files to hold any out.
    """

    def __init__(self, folder: Path | None = None, *, seed: int = 0) -> None:
        self._seed = seed
        folder = folder or Path(sysconfig.get_paths()["stdlib"])
        train: list[bytes] = []
        held_out: list[bytes] = []
        total = 0
        for index, text in enumerate(_texts(folder)):
            (held_out if index % _HELD_OUT_EVERY == _HELD_OUT_EVERY - 1 else train).append(text)
            total += len(text)
            if total >= _MAX_BYTES and held_out:
                break
        if not train or not held_out:
            raise ConfigError(
                f"found {len(train)} Python sources in {folder}, {_HELD_OUT_EVERY} are needed: {_NO_SOURCES_HINT}"
            )
        self._train = _joined(train)
        self._held_out = _joined(held_out)

    def batch(self, *, rank: int, update: int, num_rows: int, row_length: int) -> torch.Tensor:
        """Rows of the training text, other ones for each rank and update.

        Returns:
            int64, shape (num_rows, row_length), values below 256, on the CPU.
        """
        return _rows(self._train, np.random.default_rng([self._seed, 1, update, rank]), num_rows, row_length)

    def held_out(self, *, num_rows: int = 16, row_length: int) -> torch.Tensor:
        """Rows of the held-out text, always the same; as `batch`."""
        return _rows(self._held_out, np.random.default_rng([self._seed, 2]), num_rows, row_length)


def _texts(folder: Path) -> Iterable[bytes]:
    for path in sorted(folder.glob("*.py"), key=lambda path: path.name):
        try:
            text = path.read_bytes()
        except OSError:
            continue
        if len(text) > 200:
            yield text


def _joined(texts: Iterable[bytes]) -> npt.NDArray[np.uint8]:
    return np.frombuffer(b"\n\n".join(texts), dtype=np.uint8)


def _rows(text: npt.NDArray[np.uint8], random: np.random.Generator, num_rows: int, row_length: int) -> torch.Tensor:
    if text.size <= row_length:
        raise ConfigError(f"a row has {row_length} bytes, the text only {text.size}: {_NO_SOURCES_HINT}")
    starts = random.integers(0, text.size - row_length, size=num_rows)
    return torch.from_numpy(np.stack([text[start : start + row_length] for start in starts]).astype(np.int64))
