"""Notifier: what the trainer's log says of who can't be told, and can again."""

from __future__ import annotations

import pytest

from tests.unit.host.service_kit import wait_until
from weightsync.errors import ConfigError, EngineUnreachableError
from weightsync.trainer import notifier
from weightsync.trainer.notifier import Notifier, _Told
from weightsync.types import Version


def test_who_can_be_told_again_is_said_to_be(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Seen red: no word in the log said that what it had warned of was over."""
    failures = iter([EngineUnreachableError("nobody there"), EngineUnreachableError("nobody there"), None])

    def tells(self: _Told, version: Version) -> None:
        if (error := next(failures, None)) is not None:
            raise error

    monkeypatch.setattr(_Told, "_tell", tells)
    monkeypatch.setattr(_Told, "_look", lambda self: None)
    monkeypatch.setattr(notifier, "_RETRY_S", 0.01)
    told = Notifier(["http://127.0.0.1:9"], model_id="m", token=None, verify=True)
    with caplog.at_level("INFO", logger="weightsync.trainer.notifier"):
        told.start(["http://agent"])
        told.announce(Version(run_id="r", number=1))
        again = "can be told of new versions again: it was told of r/1"
        wait_until(lambda: again in caplog.text, "it is told, and that is said")
    told.close()
    assert caplog.text.count("can't be told") == 1


def test_an_engine_in_to_names_all_that_may_stand_there() -> None:
    """Seen red: a host alone, of a user who had a controller."""
    with pytest.raises(ConfigError, match=r"weightsync\.push.* that host, or the controller of its fleet"):
        Notifier(["vllm+http://127.0.0.1:9"], model_id="m", token=None, verify=True)
