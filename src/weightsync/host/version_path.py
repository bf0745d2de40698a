"""VersionPath: where an engine that loads from a path finds the version that is being loaded, and nothing else.

    <root>/<model_id>/<run_id>-<number>/model.safetensors  ->  /dev/shm/<segment>

Nothing is copied: the file is the staging itself, or the publisher's own segment under the lease that the pull holds.
The folder comes by one rename, when its bytes were proved, and goes before they may change.
"""

from __future__ import annotations

import contextlib
import logging
import os
import uuid
from collections.abc import Iterator
from pathlib import Path

from weightsync.errors import ConfigError
from weightsync.host.staged_version import StagedVersion
from weightsync.memory.folder import path_of
from weightsync.memory.owned import folder_fault, link_fault
from weightsync.plan.names import as_name

_FILE = "model.safetensors"
_LEFT = ".weightsync-left"
"""In a folder of ours that something else lies in, too."""

_logger = logging.getLogger(__name__)


class VersionPath:
    """One model's place under a root. One version at a time.

    Args:
        root: a folder of this host's service alone, on any file system; made if it is not there.
        model_id: which model; characters that a path can't hold are written as in a URL, and what is too long for a
            name ends in a hash. So does a run_id.

    Raises:
        ConfigError: something else lies there, or another user could put something there; nothing was touched.
        OSError: the folder can't be made.
    """

    def __init__(self, root: str | Path, model_id: str) -> None:
        self._folder = Path(root) / as_name(model_id)
        self._folder.mkdir(parents=True, exist_ok=True)
        if why := link_fault(str(self._folder)) or folder_fault(str(root)) or folder_fault(str(self._folder)):
            raise ConfigError(
                f"path_root: {why}, who could put other weights there; nothing was touched: name a folder of this user"
            )
        for left in tuple(self._folder.iterdir()):  # by a service that was killed
            ours = not left.is_symlink() and left.is_dir()
            if not ours or not ((left / _LEFT).exists() or all(map(_is_link, left.iterdir()))):
                raise ConfigError(f"path_root: {left} is not ours, and nothing was touched: name an empty folder")
            _remove(left)

    @contextlib.contextmanager
    def held(self, pulled: StagedVersion) -> Iterator[Path]:
        """The version's folder, there while the body runs.

        Raises:
            OSError: it can't be made.
        """
        version = pulled.version
        final = self._folder / f"{as_name(version.run_id)}-{version.number}"
        aside = self._folder / f"making-{uuid.uuid4().hex}"
        aside.mkdir()
        try:
            os.symlink(path_of(pulled.segment), aside / _FILE)
            if (final / _LEFT).exists() and not (final / _FILE).exists():  # an engine's own file lies in it still
                (aside / _FILE).rename(final / _FILE)
            else:
                aside.rename(final)
            yield final
        finally:
            for each in (aside, final):
                if each.is_dir():
                    _remove(each)


def _is_link(path: Path) -> bool:
    return path.name == _FILE and path.is_symlink()


def _remove(folder: Path) -> None:
    """The link first: who looks meanwhile finds no file, never a wrong one. What is no link of ours stays."""
    try:
        link = folder / _FILE
        if link.is_symlink():
            link.unlink()
        (folder / _LEFT).unlink(missing_ok=True)
        folder.rmdir()
    except OSError as error:  # what was done meanwhile is done
        _logger.warning("%s stays: %s", folder, error)
        with contextlib.suppress(OSError):
            (folder / _LEFT).touch()
