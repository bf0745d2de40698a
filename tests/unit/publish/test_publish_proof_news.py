"""ProofNews remembers no more than whoever waits could ask for."""

from __future__ import annotations

import pytest

from weightsync.errors import DeadlineExceededError, StateError
from weightsync.publish.proof_news import ProofNews


def test_versions_that_were_missed_are_forgotten_when_a_newer_one_is_there() -> None:
    news = ProofNews()
    for version in range(10):
        news.skipped(version, "every segment is read")
    with pytest.raises(StateError, match="every segment"):
        news.wait(9, timeout_s=1.0)
    news.hear({"event": "published", "version": 8})
    assert list(news._not_published) == [9]
    news.wait(3, timeout_s=1.0)


def test_they_are_bounded_where_nothing_is_published_for_ever() -> None:
    news = ProofNews()
    for version in range(1000):
        news.skipped(version, "x" * 5000)
    assert len(news._not_published) == 256
    assert sum(map(len, news._not_published.values())) <= 256 * 2000
    with pytest.raises(StateError):
        news.wait(999, timeout_s=1.0)
    with pytest.raises(DeadlineExceededError):
        news.wait(1000, timeout_s=0.01)
