"""Closing: what has a `close` is a context manager."""

from __future__ import annotations

import abc
from types import TracebackType
from typing import Self


class Closing(abc.ABC):
    """A resource whose `close` is idempotent: `with` gives itself, and closes it at the end."""

    @abc.abstractmethod
    def close(self) -> None:
        """Gives back what it holds. Idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
