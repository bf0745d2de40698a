"""FolderPublisher: publishes a folder of safetensors files, and again whenever they change. No trainer needed."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import torch

from weightsync.errors import ConfigError, InvalidRequestError, WeightSyncError
from weightsync.extract.checkpoint_files import INDEX, checkpoint_files
from weightsync.extract.named import NamedTensorsExtractor
from weightsync.plan.boxes import whole_box
from weightsync.plan.safetensors import read_header
from weightsync.tensors import byte_array, torch_dtype
from weightsync.trainer.offload_steps import OffloadReport
from weightsync.trainer.publisher import WeightManager
from weightsync.types import Box, TensorSpec
from weightsync.types.process import of_one_process
from weightsync.types.scarcity import is_passing

_MAX_HEADER_BYTES = 8 + 100_000_000

_logger = logging.getLogger(__name__)

_LONGEST_PAUSE = 32
"""In looks: so long what failed for want of something may wait to be tried again."""

_ALIKE = 2
_ALIKE_OF_SEVERAL = 10
"""So many looks have to be alike. Several files come one after the other, and the next may be written elsewhere."""

_TOLD_EACH = 60
"""In looks: so often it is said that a change still waits."""

Look = Mapping[str, tuple[int, int, int]]
"""Number, size and time of each file, by name."""


@of_one_process
class FolderPublisher:
    """Publishes what lies in a folder as versions 1, 2, 3 ... of a run of its own.

    The files that count are those that `model.safetensors.index.json` names, or every `*.safetensors`. A change of them
    counts when two looks one after the other see the same entries, sizes and times in the folder, or ten where there
    are, or were, several files: a file that is being copied has any name. Who swaps the folder by a link needs no luck.

    Args:
        folder: the checkpoint.
        manager: made for it; closed by the caller.
        every_s: how often to look.
        dtype_overrides: see `WeightExtractor`.

    Raises:
        ConfigError: there is no safetensors file.
    """

    def __init__(
        self,
        folder: Path,
        manager: WeightManager,
        *,
        every_s: float = 1.0,
        dtype_overrides: Mapping[str, str] | None = None,
    ) -> None:
        self._folder = folder
        self._manager = manager
        self._every_s = every_s
        self._overrides = dtype_overrides
        self._version = 0
        self._published: Look | None = None
        self._serves = True  # False: what was served was taken away
        self._named: tuple[Look, frozenset[str]] = {}, frozenset()  # what an index names, and what it was asked for
        checkpoint_files(folder)

    def publish(self) -> OffloadReport:
        """Publishes what lies there now, as the next version.

        Raises:
            ConfigError: a file is missing, is no safetensors file, or is being written; or the folder can't be listed.
                Nothing was published.
        """
        try:
            seen = self._look()
        except OSError as error:
            raise ConfigError(f"{self._folder} can't be looked at: {error}") from error
        return self._publish(seen)

    def _publish(self, seen: Look) -> OffloadReport:
        with contextlib.ExitStack() as stack:
            files = [_CheckpointFile(path, seen, stack) for path in checkpoint_files(self._folder)]
            extractor = _CheckpointExtractor(files, self._overrides)
            self._version += 1
            report = self._manager.offload(extractor, self._version)
        if report.published:
            self._published = self._of_checkpoint(seen)
        return report

    def watch(self, stop: threading.Event, on_published: Callable[[OffloadReport], None]) -> None:
        """Publishes each change until `stop` is set, and all of it anew where somebody took its memory away. What is no
        checkpoint is logged, and tried again when it changes; what only failed for now, for want of room or
        descriptors say, is tried again, with longer and longer pauses.
        """
        before: Look = {}
        refused: Look | None = None
        restless: list[str] = []  # what has changed last
        num_alike = num_unsettled = num_failed = num_to_wait = 0
        while not stop.wait(self._every_s):
            try:
                seen = self._look()
            except OSError as error:  # no descriptor, say: the next look may have one
                _logger.warning("%s can't be looked at: %s", self._folder, error)
                continue
            changed, before = sorted({name for name, _ in seen.items() ^ before.items()}), seen
            num_alike = 1 if changed else num_alike + 1
            if changed:
                restless = changed
                num_failed = num_to_wait = 0
            files = self._of_checkpoint(seen)
            is_lost = files == self._published and self._manager.is_lost
            if files == refused or (files == self._published and not is_lost):
                num_unsettled = 0
                continue
            num_files = max(len(files), len(self._published or ()))
            if num_alike < (_ALIKE_OF_SEVERAL if num_files > 1 else _ALIKE):
                num_unsettled += 1
                if num_unsettled % _TOLD_EACH == 0:
                    _logger.warning("%s is not published yet: it still changes: %.200r", self._folder, restless)
                continue
            num_unsettled = 0
            if num_to_wait:
                num_to_wait -= 1
                continue
            if is_lost and not num_failed:
                _logger.warning("%s is published anew: somebody took its shared memory away", self._folder)
            self._serves = self._serves and not is_lost
            failure = self._tried(seen, on_published)
            num_failed = 0 if failure is None else num_failed + 1
            if failure is not None:
                if isinstance(failure, ConfigError) and not is_passing(failure):
                    refused = files
                num_to_wait = min(_LONGEST_PAUSE, 2**num_failed // 2 - 1)
                _logger.warning("%s was not published: %s", self._folder, failure)

    def _tried(self, seen: Look, on_published: Callable[[OffloadReport], None]) -> WeightSyncError | OSError | None:
        """Publishes it; gives what kept it from that. `on_published` may raise that it was not proved: it is not tried
        again where one before it is served, for its copy would take that one's memory. Another error of it, as that
        nobody reads its lines, goes through."""
        try:
            report = self._publish(seen)
        except (WeightSyncError, OSError) as error:
            return error
        try:
            on_published(report)
        except WeightSyncError as error:
            self._published = self._published if self._serves else None
            return error
        self._serves = True
        return None

    def _look(self) -> Look:
        """Every entry: what is being copied may have any name."""
        found = {}
        with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(self._folder) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    found[entry.name] = _facts(entry.stat())
        return found

    def _of_checkpoint(self, seen: Look) -> Look:
        """What of it is the checkpoint's: a log that grows beside it makes no version, nor the next one's files before
        the index names them."""
        files = {name: facts for name, facts in seen.items() if name == INDEX or name.endswith(".safetensors")}
        if INDEX not in files:
            return files
        if files != self._named[0]:
            try:
                named = frozenset(path.name for path in checkpoint_files(self._folder, all_of_them=False))
            except ConfigError as error:
                if is_passing(error):  # for want of a descriptor, say: the next look asks again
                    return {name: facts for name, facts in files.items() if name in self._named[1]}
                named = frozenset(files)  # half of an index: whatever is there counts
            self._named = files, named | {INDEX}
        return {name: facts for name, facts in files.items() if name in self._named[1]}


class _CheckpointFile:
    """One opened file, with its header read. What is read of it is what was there when it was looked at.

    It is read and not mapped: whoever cuts off a mapped file while it is read kills its reader.
    """

    def __init__(self, path: Path, seen: Look, stack: contextlib.ExitStack) -> None:
        self._path = path
        self._seen = seen.get(path.name)
        try:
            self._file: BinaryIO = stack.enter_context(path.open("rb", buffering=0))
            self._check()
            head = self._file.read(8)
            length = min(int.from_bytes(head, "little"), _MAX_HEADER_BYTES)
            _, self.specs, _ = read_header(memoryview(head + self._file.read(length)))
        except InvalidRequestError as error:
            raise ConfigError(f"{path}: {error.message}") from error
        except OSError as error:
            raise ConfigError(f"{path} can't be read: {error}") from error
        size_bytes = os.fstat(self._file.fileno()).st_size
        end = max((spec.offset + spec.nbytes for spec in self.specs.values()), default=size_bytes)
        if end != size_bytes:
            raise ConfigError(
                f"{path} is cut off, or no safetensors file: {size_bytes} bytes, its tensors end at {end}"
            )

    def read(self, spec: TensorSpec) -> torch.Tensor:
        """A tensor of it."""
        tensor = torch.empty(spec.shape, dtype=torch_dtype(spec.dtype))
        view = byte_array(tensor).data
        offset = spec.offset
        while view:
            count = os.preadv(self._file.fileno(), [view[: 1 << 30]], offset)
            if count == 0:
                raise ConfigError(f"{self._path} was cut off while it was read", parameter=spec.name)
            view, offset = view[count:], offset + count
        self._check()
        return tensor

    def _check(self) -> None:
        if _facts(os.fstat(self._file.fileno())) != self._seen:
            raise ConfigError(f"{self._path} is being written: it changed while it was read")


class _CheckpointExtractor(NamedTensorsExtractor):
    """Reads a tensor when it is asked for, so that one at a time lies in memory."""

    def __init__(self, files: Sequence[_CheckpointFile], dtype_overrides: Mapping[str, str] | None) -> None:
        self._places: dict[int, tuple[_CheckpointFile, TensorSpec]] = {}
        stand_ins = []
        for file in files:
            for spec in file.specs.values():
                stand_in = torch.empty_strided(spec.shape, (0,) * len(spec.shape), dtype=torch_dtype(spec.dtype))
                self._places[id(stand_in)] = file, spec
                stand_ins.append((spec.name, stand_in))
        super().__init__(stand_ins, dtype_overrides=dtype_overrides)

    def _local_box(self, tensor: torch.Tensor) -> Box | None:
        return whole_box(tuple(tensor.shape))

    def _local_part(self, tensor: torch.Tensor) -> tuple[Box, torch.Tensor] | None:
        file, spec = self._places[id(tensor)]
        return whole_box(spec.shape), file.read(spec)

    def _gather(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        file, spec = self._places[id(tensor)]
        return file.read(spec).to(dtype)


def _facts(facts: os.stat_result) -> tuple[int, int, int]:
    return facts.st_ino, facts.st_size, facts.st_mtime_ns
