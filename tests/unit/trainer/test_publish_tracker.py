"""PublishTracker: who waits for which version, and who has fetched it; it remembers no more than could be asked for."""

from __future__ import annotations

import pytest

from weightsync.errors import DeadlineExceededError, StateError
from weightsync.trainer import publish_tracker
from weightsync.trainer.publish_tracker import PublishTracker
from weightsync.types import Version
from weightsync.types.agent_messages import Published, TransferBegun, TransferDone


def began(news: PublishTracker, who: str, version: int) -> None:
    news.hear(TransferBegun(version=Version(run_id="run", number=version), receiver=who))


def fetched(news: PublishTracker, who: str, version: int, *, ok: bool = True) -> None:
    news.hear(TransferDone(version=Version(run_id="run", number=version), receiver=who, ok=ok))


def test_versions_that_were_missed_are_forgotten_when_a_newer_one_is_there() -> None:
    news = PublishTracker()
    for version in range(10):
        news.skipped(version, "every segment is read")
    with pytest.raises(StateError, match="every segment"):
        news.wait(9, timeout_s=1.0)
    news.hear(Published(version=Version(run_id="run", number=8)))
    assert list(news._not_published) == [9]
    news.wait(3, timeout_s=1.0)


def test_they_are_bounded_where_nothing_is_published_for_ever() -> None:
    news = PublishTracker()
    for version in range(1000):
        news.skipped(version, "x" * 5000)
    assert len(news._not_published) == 256
    assert sum(map(len, news._not_published.values())) <= 256 * 2000
    with pytest.raises(StateError):
        news.wait(999, timeout_s=1.0)
    with pytest.raises(DeadlineExceededError):
        news.wait(1000, timeout_s=0.01)


def test_who_keeps_up_and_has_it_not_is_behind() -> None:
    news = PublishTracker()
    assert news.behind(1) is None
    fetched(news, "gone", 1)
    fetched(news, "slow", 10)
    fetched(news, "quick", 20)
    assert news.behind(20) == ("slow",)
    assert news.behind(30) == ("slow", "quick")
    fetched(news, "slow", 30, ok=False)
    assert news.behind(30) == ("slow", "quick")
    fetched(news, "slow", 30)
    assert news.behind(30) == ("quick",)
    fetched(news, "quick", 30)
    assert news.behind(30, wait_s=60.0) == (), "and nothing is waited for"


def test_who_is_at_a_first_pull_is_behind_until_it_is_fetched() -> None:
    """Seen red: nobody counted until a transfer had ended, so a block ended in the middle of the first one."""
    news = PublishTracker()
    began(news, "first", 1)
    assert news.behind(1) == ("first",)
    fetched(news, "first", 1)
    assert news.behind(1) == ()
    began(news, "new", 1)
    assert news.behind(1) == ("new",)
    fetched(news, "new", 1)
    assert news.behind(1) == ()
    assert not news._at_it


def test_who_has_fetched_and_does_not_keep_up_is_not_waited_for_at_its_next_pull() -> None:
    news = PublishTracker()
    fetched(news, "slow", 1)
    for version in (8, 9):
        fetched(news, "quick", version)
    began(news, "slow", 9)
    assert news.behind(9) == ()


def test_who_fails_at_it_is_behind_for_as_long_as_it_may_try_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen red: a block ended between two tries of a host, where another one had the version."""
    news = PublishTracker()
    for who in ("a", "b"):
        began(news, who, 1)
    fetched(news, "a", 1)
    fetched(news, "b", 1, ok=False)
    assert news.behind(1) == ("b",)
    monkeypatch.setattr(publish_tracker, "_AGAIN_S", 0.0)
    fetched(news, "b", 1, ok=False)
    assert news.behind(1) == (), "it does not try again"


def test_who_was_cut_off_by_its_agents_death_is_behind_until_the_next_one_has_proved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    news = PublishTracker()
    began(news, "r", 1)
    news.agent_restarted()
    assert news.behind(1) == ("r",)
    news.hear(Published(version=Version(run_id="run", number=1)))
    assert news.behind(1) == ("r",)
    news.agent_restarted()
    monkeypatch.setattr(publish_tracker, "_AGAIN_S", 0.0)
    news.hear(Published(version=Version(run_id="run", number=1)))
    assert news.behind(1) is None, "it does not come again"


def test_transfers_whose_end_is_never_told_are_not_kept_for_ever() -> None:
    news = PublishTracker()
    for number in range(publish_tracker._MAX_RECEIVERS + 5):
        began(news, f"r{number}", 1)
    assert len(news.behind(1) or ()) == publish_tracker._MAX_RECEIVERS


def test_a_wait_for_receivers_ends_with_its_time() -> None:
    assert PublishTracker().behind(1, wait_s=0.01) is None
