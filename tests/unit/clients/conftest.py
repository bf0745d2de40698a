"""What ends with each test of this folder."""

from tests.standins.stored import writers_end

__all__ = ["writers_end"]
