"""A file that is written aside and renamed: the old one or the new one is there, never half of one.

Nobody can foresee its name, and it is made anew, so that no link that another user has put there is followed.
What is no file, /dev/null say, is written into: root could replace the device by a file.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

_OUTPUTS = ("/dev/stdout", "/dev/stderr")


@contextlib.contextmanager
def written_whole(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A file to write into, which is at `path` when the body has ended well.

    Raises:
        OSError: it can't be written; an older file at `path` is left as it was, and nothing beside it.
    """
    target = Path(path)
    if str(target) in _OUTPUTS:  # what a command prints would be mixed with it
        raise OSError(errno.EINVAL, "this is the command's own output, name a file", str(target))
    if _is_device(target):
        with open(target, "ab") as device:
            yield device
        return
    number, aside = tempfile.mkstemp(prefix=f".{target.name[:100]}.", dir=target.parent)
    try:
        with os.fdopen(number, "wb") as file:
            yield file
            os.fchmod(file.fileno(), 0o644)
        os.replace(aside, target)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(aside)
        raise


def _is_device(target: Path) -> bool:
    """Whether it is a device or a pipe."""
    try:
        mode = os.stat(target).st_mode
    except OSError:
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))
