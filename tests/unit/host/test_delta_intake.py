"""DeltaIntake: when it asks for a full in place of deltas that do not come."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from weightsync.errors import DeadlineExceededError, DigestMismatchError, TransferAbortedError, WeightSyncError
from weightsync.host import delta_intake
from weightsync.host.delta_intake import DeltaIntake
from weightsync.host.staging import Held, Staging
from weightsync.observe import Recorder
from weightsync.types import Manifest, TensorSpec, Version

_VERSION = Version(run_id="run", number=1)


@pytest.fixture
def staging() -> Iterator[Staging]:
    with contextlib.closing(Staging()) as made:
        made.open(Manifest(version=_VERSION, model_id="m", tensors=(TensorSpec(name="w", dtype="int8", shape=(9,)),)))
        made.verified(Held(version=_VERSION, model_digest="d", digests=("e" * 32,)))
        yield made


@pytest.mark.parametrize(
    ("error", "num_bytes", "gives_up"),
    [
        (TransferAbortedError("the agent needs it"), 0, True),
        (DeadlineExceededError("no time left"), 100, True),
        (DeadlineExceededError("nothing came"), 0, False),
        (DigestMismatchError("a block is wrong, three times"), 0, True),
    ],
)
def test_deltas_that_do_not_come_twice_are_given_up_for_a_full(
    monkeypatch: pytest.MonkeyPatch, staging: Staging, error: WeightSyncError, num_bytes: int, gives_up: bool
) -> None:
    """Nothing is kept of them. Seen red: a chain that takes longer than a pull may was fetched from its first byte for
    ever, and so was one with a block that has rotted."""

    def fetch(agents: Any, each: Any, read: Any, arrived: Callable[[int], None]) -> list[memoryview]:
        if num_bytes:
            arrived(num_bytes)
        raise error

    monkeypatch.setattr(delta_intake, "fetch_blobs", fetch)
    agents: Any = SimpleNamespace(shelf=None)
    intake = DeltaIntake(agents, staging, Recorder("r"), mode="auto", patch_limit=lambda: 0.0)
    granted: Any = {0: None}
    came: list[int] = []
    for _ in range(2):
        assert intake.base(0) is not None
        with pytest.raises(type(error)):
            intake.fetch(granted, lambda *_: None, came.append, cancel=lambda: None)
    assert (intake.base(0) is None) is gives_up
    assert sum(came) == 2 * num_bytes
    whole: Any = None
    intake.lay_out("it came in full", whole, None, whole)
    assert intake.base(0) is not None, "the next ones may come"
