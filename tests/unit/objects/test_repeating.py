"""What is tried again, and for how long."""

from __future__ import annotations

import threading

import pytest

from tests.standins.stores import FaultyStore
from weightsync.errors import ObjectMissingError, StoreAuthError, StoreUnavailableError
from weightsync.objects.folder import FolderStore
from weightsync.objects.repeating import Repeating
from weightsync.types import Deadline


def repeating(tmp_path, rule, **options) -> tuple[Repeating, FaultyStore]:
    faulty = FaultyStore(FolderStore(f"file://{tmp_path}/run"), rule)
    return Repeating(faulty, first_s=0.001, **options), faulty


def test_passing_troubles_pass(tmp_path) -> None:
    store, faulty = repeating(tmp_path, lambda op, key, count: "unavailable" if count % 4 else None)
    store.put_large("x", b"1", deadline=Deadline(5))
    store.delete(["x"], deadline=Deadline(5))
    assert not list(store.list_under("", deadline=Deadline(5)))
    assert store.num_repeated > 0
    assert len(faulty.ops) > 3


@pytest.mark.parametrize(("fault", "error"), [("auth", StoreAuthError), (None, ObjectMissingError)])
def test_an_answer_is_not_asked_for_again(tmp_path, fault, error) -> None:
    store, faulty = repeating(tmp_path, lambda op, key, count: fault)
    with pytest.raises(error):
        store.get("x", deadline=Deadline(5))
    assert len(faulty.ops) == 1


def test_the_deadline_is_over_all_tries(tmp_path, monkeypatch) -> None:
    store, faulty = repeating(tmp_path, lambda op, key, count: "unavailable")
    pauses: list[float] = []

    class OfPauses(Deadline):
        """Time goes by in pauses alone."""

        @property
        def remaining_s(self) -> float:
            return max(0.0, self.timeout_s - sum(pauses))

    monkeypatch.setattr(store._closed, "wait", pauses.append)
    with pytest.raises(StoreUnavailableError):
        store.get("x", deadline=OfPauses(1.0))
    assert 2 < len(faulty.ops) < 30, "pauses grow"
    assert sum(pauses) < 1.0


def test_a_pause_that_takes_longer_than_it_was_to_ends_in_the_same_error(tmp_path, monkeypatch) -> None:
    """Seen red, on a busy machine: it was a DeadlineExceededError then, and a StoreUnavailableError else."""
    store, faulty = repeating(tmp_path, lambda op, key, count: "unavailable")
    deadline = Deadline(0.05)

    def overslept(_: float) -> None:
        while not deadline.expired:
            threading.Event().wait(0.001)

    monkeypatch.setattr(store._closed, "wait", overslept)
    with pytest.raises(StoreUnavailableError):
        store.get("x", deadline=deadline)
    assert len(faulty.ops) == 1


def test_close_ends_the_pauses(tmp_path) -> None:
    store, _ = repeating(tmp_path, lambda op, key, count: "unavailable")
    store.close()
    with pytest.raises(StoreUnavailableError):
        store.get("x", deadline=Deadline(60))
