"""serve: what it says at the call."""

from __future__ import annotations

import pytest

from weightsync.errors import MissingDependencyError
from weightsync.verbs import serving


def test_a_store_that_nothing_installed_reads_is_told_at_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen red: the service ran, and never had a version."""

    def fails(*_: object, **__: object) -> None:
        raise MissingDependencyError("it needs obstore")

    monkeypatch.setattr(serving, "client_at", fails)
    with pytest.raises(MissingDependencyError, match="obstore"):
        serving._ask(["s3://bucket/run"], ["m"], token=None, verify=True, trust_key=None)
