"""A file that is written aside and renamed: the old one or the new one is there, never half of one.

Nobody can foresee its name, and it is made anew, so that no link that another user has put there is followed.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


@contextlib.contextmanager
def written_whole(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A file to write into, which is at `path` when the body has ended well.

    Raises:
        OSError: it can't be written; an older file at `path` is left as it was, and nothing beside it.
    """
    target = Path(path)
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
