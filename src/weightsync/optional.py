"""imported: modules of packages that not every installation has."""

from __future__ import annotations

import importlib
from typing import Any

from weightsync.errors import MissingDependencyError


def imported(module: str, needs: str) -> Any:
    """That module.

    Args:
        module: its full name.
        needs: who needs which package, and how it is installed, for the error.

    Raises:
        MissingDependencyError: it can't be imported; says why.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingDependencyError(f"{needs} ({error})") from error
