"""VersionFolder: versions of models as folders that are there whole or not at all.

    <root>/<model_tag>/<run_id>-<number>/...   one version, never changed again; `.weightsync` in it says which
    <root>/<model_tag>/latest                  a link to the newest one, replaced in one step

A version is written beside its place, flushed to the disk, and comes by one rename: whoever looks sees all of it or
nothing, and what a publisher that was killed left behind is removed by the next one. Who loads a version holds a lock
on its `.weightsync` meanwhile, which ends with the process, however it ends; such a version is not deleted.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import shutil
import stat
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from weightsync.errors import (
    ConfigError,
    InvalidRequestError,
    StorageError,
    SyncInProgressError,
    UnsupportedError,
    VersionError,
)
from weightsync.net.messages import decode, encode
from weightsync.plan.names import as_name
from weightsync.types import Version
from weightsync.types.message import learn

LATEST = "latest"
_MARK = ".weightsync"
_LOCK = ".lock"
_MAKING, _GONE, _POINTING = ".making-", ".gone-", ".latest-"
_LEFT = re.compile(r"\.(making|gone|latest)-[0-9a-f]{32}")
"""What a publisher that was killed left: nobody calls a file of his own so."""
_MAX_MARK_BYTES = 1 << 16
_logger = logging.getLogger(__name__)


class _Mark(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What lies in a version's folder. `seq` rises with each version of the model, whatever its run."""

    model_tag: str
    version: Version
    seq: int


learn(_Mark)


class VersionFolder:
    """Both sides: a trainer publishes, a method reads. Thread-safe; any number of processes.

    Args:
        root: a folder that engines reach too. The first version makes it where it is not there; its parent has to be.
        keep: so many versions of a model stay, the newest ones. Beyond them stay the one that `latest` names and those
            that are being loaded.

    Raises:
        ConfigError: `keep` is below 1, or `root` is something else than a folder, or lies in none.
    """

    def __init__(self, root: str | Path, *, keep: int = 3) -> None:
        if keep < 1:
            raise ConfigError(f"keep is a number of versions, 1 or more, not {keep}")
        try:
            self.root = Path(root).resolve()
            exists, has_place = self.root.exists(), self.root.parent.is_dir()
        except (OSError, RuntimeError, ValueError) as error:
            raise ConfigError(f"{root} can't be a folder of versions: {error}") from error
        if exists and not self.root.is_dir():
            raise ConfigError(f"{root} can't be a folder of versions: it is something else")
        if not has_place:  # mistyped, or a disk that is not mounted: nobody would look for versions there
            raise ConfigError(
                f"{root} can't be a folder of versions: there is no folder {self.root.parent}. Make it, or mend the "
                "path (sync_weight_path)"
            )
        self._keep = keep

    # --- the trainer's side ---

    def publish(self, model_tag: str, version: Version, write: Callable[[Path], object]) -> Path:
        """Publishes a version.

        Args:
            model_tag: which model.
            version: newer than the last one of its run.
            write: writes the files into the folder that it is given: plain files and folders, no links.

        Returns:
            The version's folder.

        Raises:
            SyncInProgressError: another publisher of this model is at work.
            VersionError: it is there already, or is older than the last one of its run.
            InvalidRequestError: nothing was written, or something that is no plain file.
            StorageError: the disk is full, or the folder can't be written.
            Exception: what `write` raised. After any of these nothing is published, and nothing is left.
        """
        with _stored(self.root), self._publisher(model_tag, version) as (model, final):
            aside = model / f"{_MAKING}{uuid.uuid4().hex}"
            aside.mkdir()
            try:
                write(aside)
                return self._settle(model, aside, final, model_tag, version)
            except BaseException:
                shutil.rmtree(aside, ignore_errors=True)
                raise

    def adopt(self, model_tag: str, version: Version, directory: str | Path) -> Path:
        """Publishes a folder that is there already, by moving it.

        Args:
            model_tag, version: as for `publish`.
            directory: whole, and nobody writes into it any more; on the root's file system.

        Raises:
            ConfigError: it is no folder, or lies on another file system: `publish` can copy it.
            WeightSyncError: as for `publish`; the folder stays where it was.
        """
        given = Path(directory)
        if given.is_symlink() or not given.is_dir():
            raise ConfigError(f"{given} is no folder")
        with _stored(self.root), self._publisher(model_tag, version) as (model, final):
            try:
                return self._settle(model, given, final, model_tag, version)
            except OSError as error:
                if error.errno != errno.EXDEV:
                    raise
                raise ConfigError(f"{given} lies on another file system than {self.root}: publish a copy") from error

    # --- the reader's side ---

    def versions(self, model_tag: str) -> tuple[Version, ...]:
        """All that are published, in the order in which they were."""
        found = [mark for _, mark in self._marks(self._model(model_tag))]
        return tuple(mark.version for mark in sorted(found, key=lambda mark: mark.seq))

    def latest(self, model_tag: str) -> Version | None:
        """The newest one; None where nothing is published.

        Raises:
            ConfigError: `latest` names something that is no version here.
        """
        model = self._model(model_tag)
        try:
            name = os.readlink(model / LATEST)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ConfigError(f"{model / LATEST} is not the link that names the newest version: {error}") from error
        if Path(name).name != name or (mark := _read_mark(model / name)) is None:
            raise ConfigError(f"{model / LATEST} names {name!r:.200}, which is no version of {model_tag!r}")
        return mark.version

    def path(self, model_tag: str, version: Version) -> Path:
        """A version's folder.

        Raises:
            VersionError: it is not published, or not any more.
        """
        final = self._final(model_tag, version)
        mark = _read_mark(final)
        if mark is None or (mark.model_tag, mark.version) != (model_tag, version):
            there = ", ".join(map(str, self.versions(model_tag))) or "none"
            raise VersionError(f"{self.root} has no {version} of model {model_tag!r}; it has: {there}")
        return final

    @contextlib.contextmanager
    def held(self, model_tag: str, version: Version) -> Iterator[Path]:
        """A version's folder, which is not deleted while the body runs.

        Raises:
            VersionError: as for `path`.
        """
        final = self.path(model_tag, version)
        with contextlib.ExitStack() as stack:
            try:
                fd = stack.enter_context(_opened(final / _MARK, os.O_RDONLY))
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
                stack.callback(fcntl.flock, fd, fcntl.LOCK_UN)
                gone = not os.path.samestat(os.fstat(fd), os.stat(final / _MARK))
            except (FileNotFoundError, BlockingIOError):
                gone = True
            if gone:
                raise VersionError(f"{version} of model {model_tag!r} was deleted just now: publish it again, or later")
            yield final

    # --- what both share ---

    def _model(self, model_id: str) -> Path:
        if not model_id:
            raise InvalidRequestError("model_tag has at least one character")
        model = self.root / as_name(model_id)
        if model.is_symlink():
            raise ConfigError(f"{model} is a link: it may lead out of {self.root}")
        return model

    def _final(self, model_id: str, version: Version) -> Path:
        return self._model(model_id) / f"{as_name(version.run_id)}-{version.number}"

    @contextlib.contextmanager
    def _publisher(self, model_id: str, version: Version) -> Iterator[tuple[Path, Path]]:
        """The model's folder and the version's place in it, for one publisher at a time."""
        final = self._final(model_id, version)
        model = final.parent
        self.root.mkdir(exist_ok=True)
        model.mkdir(exist_ok=True)
        _flush(self.root)
        with _opened(model / _LOCK, os.O_RDWR | os.O_CREAT) as fd:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise SyncInProgressError(
                    f"another publisher writes a version of model {model_id!r} into {self.root}", version=str(version)
                ) from error
            try:
                for left in model.iterdir():
                    if _LEFT.fullmatch(left.name):
                        _remove(left)
                last = self.latest(model_id)
                if final.exists() or (
                    last is not None and last.run_id == version.run_id and last.number >= version.number
                ):
                    raise VersionError(
                        f"{version} of model {model_id!r} is there already, or is older than {last}",
                        version=str(version),
                        state_left="nothing was published",
                    )
                yield model, final
            finally:
                fcntl.flock(fd, fcntl.LOCK_UN)

    def _settle(self, model: Path, written: Path, final: Path, model_id: str, version: Version) -> Path:
        """What was written becomes the version, then the latest one."""
        files = _plain_tree(written)
        marks = list(self._marks(model))
        seq = 1 + max((mark.seq for _, mark in marks), default=0)
        mark = written / _MARK
        mark.write_bytes(encode(_Mark(model_tag=model_id, version=version, seq=seq)))
        for path in (mark, *files):
            _flush(path)
        _flush(written)
        pointing = model / f"{_POINTING}{uuid.uuid4().hex}"
        written.rename(final)
        try:
            _flush(model)
            pointing.symlink_to(final.name)
            pointing.replace(model / LATEST)
        except Exception:  # as if it had never been there: the same version can be published again
            final.rename(written)
            pointing.unlink(missing_ok=True)
            raise
        try:  # it is published, whatever fails from here on
            _flush(model)
            for path, _ in sorted(marks, key=lambda found: -found[1].seq)[self._keep - 1 :]:
                _delete_unheld(path)
        except (OSError, UnsupportedError) as error:
            _logger.warning("model %s: %s is published; what follows failed: %s", model_id, version, error)
        return final

    def _marks(self, model: Path) -> Iterator[tuple[Path, _Mark]]:
        with contextlib.suppress(FileNotFoundError):
            for path in model.iterdir():
                if not path.name.startswith(".") and path.name != LATEST and (mark := _read_mark(path)) is not None:
                    yield path, mark


def _read_mark(folder: Path) -> _Mark | None:
    """What a version's folder says of itself; None where it is none."""
    if folder.is_symlink():
        return None
    try:
        with _opened(folder / _MARK, os.O_RDONLY) as fd:
            return decode(os.read(fd, _MAX_MARK_BYTES), _Mark, what=f"{folder / _MARK}")
    except (OSError, InvalidRequestError):
        return None


def _plain_tree(folder: Path) -> list[Path]:
    """Every file and folder in it, the inner ones first.

    Raises:
        InvalidRequestError: there is no file, or something that is neither.
    """
    inside: list[Path] = []
    num_files = 0
    for parent, folders, files in os.walk(folder, topdown=False):
        for name in (*files, *folders):
            path = Path(parent, name)
            mode = path.lstat().st_mode
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                raise InvalidRequestError(f"a version has plain files and folders alone; {path} is neither")
            num_files += stat.S_ISREG(mode)
            inside.append(path)
    if not num_files:
        raise InvalidRequestError("nothing was written: a version has at least one file")
    return inside


def _delete_unheld(folder: Path) -> None:
    """Deletes a version, unless somebody loads it."""
    with contextlib.suppress(FileNotFoundError, BlockingIOError), _opened(folder / _MARK, os.O_RDWR) as fd:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        gone = folder.with_name(f"{_GONE}{uuid.uuid4().hex}")
        folder.rename(gone)  # by one step, so that nobody sees half of it
        _remove(gone)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def _stored(root: Path) -> Iterator[None]:
    """What a disk refuses, typed."""
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"a version could not be written into {root}: {error}", state_left="nothing was published"
        ) from error


@contextlib.contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    """A file or folder; never through a link, and never waiting at a pipe.

    Raises:
        OSError: it can't be opened, or is something else.
    """
    fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    try:
        mode = os.fstat(fd).st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            raise OSError(errno.EINVAL, "it is no plain file", str(path))
        yield fd
    finally:
        os.close(fd)


def _flush(path: Path) -> None:
    with _opened(path, os.O_RDONLY) as fd:
        try:
            os.fsync(fd)
        except OSError as error:
            if error.errno in (errno.EINVAL, errno.ENOTSUP):
                raise UnsupportedError(f"{path} lies on a file system that flushes nothing: {error}") from error
            raise
