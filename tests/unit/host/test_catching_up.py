"""CatchingUp: what it says of versions that it can't catch up with. With its fleet: test_member.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.standins.threads import logged_here
from weightsync.errors import TransferAbortedError
from weightsync.host.catching_up import CatchingUp
from weightsync.types import Version
from weightsync.types.fleet import ModelVersion


def test_a_run_that_it_can_not_catch_up_with_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    """Seen red: one each heartbeat."""

    def refuses(version: Version, endpoint: str) -> None:
        raise TransferAbortedError(f"run {version.run_id} was taken over by another")

    gate = SimpleNamespace(release=lambda *_, **__: None, allow=lambda _: None)
    model: Any = SimpleNamespace(
        model_id="m", gate=gate, serves=lambda _: False, add_sender=lambda _: None, claimed=refuses
    )
    catching_up = CatchingUp()
    for run_id, number in (("r", 1), ("r", 1), ("r", 2), ("next", 1), ("next", 1)):
        wanted = ModelVersion(model_id="m", run_id=run_id, version=number, sender_endpoint="http://agent:1")
        catching_up.go(model, wanted, None)
    warned = [record.getMessage() for record in logged_here(caplog) if record.levelname == "WARNING"]
    assert [line.partition(": ")[2].partition(":")[0] for line in warned] == [
        "it can't catch up to r/1",
        "it can't catch up to next/1",
    ]
