"""ToldOnce: which of the lines are warnings."""

from __future__ import annotations

import logging

import pytest

from tests.standins.threads import logged_here
from weightsync.observe.told_once import ToldOnce


def test_a_trouble_is_news_when_it_begins_or_is_another_one(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    told = ToldOnce(logging.getLogger("weightsync.test"))
    for number, what in enumerate(("a", "a", "b", "a", None, "a", "a")):
        if what is None:
            told.over()
        else:
            told.say(what, "%s: try %d", what, number)
    levels = [record.levelname for record in logged_here(caplog)]
    assert levels == ["WARNING", "DEBUG", "WARNING", "WARNING", "WARNING", "DEBUG"]
