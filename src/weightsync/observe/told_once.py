"""ToldOnce: a trouble that stays is one line of the log, and not one at each try."""

from __future__ import annotations

import logging


class ToldOnce:
    """Of one kind of work that is tried again and again; for one thread at a time.

    Args:
        logger: whose lines they are.
    """

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._last: object = None

    def say(self, what: object, words: str, *values: object) -> None:
        """A warning; where the same was said last, and was not over since, for those alone who look closely.

        Args:
            what: it is the same trouble where this is equal: words may differ in details.
            words, values: as for a logger.
        """
        self._logger.log(logging.DEBUG if what == self._last else logging.WARNING, words, *values)
        self._last = what

    def over(self) -> None:
        """It went well: the next trouble is news."""
        self._last = None
