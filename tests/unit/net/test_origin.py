"""Names that operators give in the environment: what is none is refused in words, and not passed over."""

from __future__ import annotations

import pytest

from weightsync.errors import ConfigError
from weightsync.net.origin import ALLOWED_HOSTS_VARIABLE, host_names


@pytest.mark.parametrize("value", ["vm:8700", "http://vm", "*", "*.svc", "vm; b", "vm b", "[::1]:80"])
def test_what_is_no_name_is_refused(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    """Seen to fail: it was taken, compared with names, and never equal to one."""
    monkeypatch.setenv(ALLOWED_HOSTS_VARIABLE, value)
    with pytest.raises(ConfigError, match="without scheme, port or pattern"):
        host_names([])


def test_names_are_taken_as_they_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ALLOWED_HOSTS_VARIABLE, " VM , b.example.org., fd00::1,[fd00::2],")
    assert host_names(["own"]) == {"own", "vm", "b.example.org", "fd00::1", "fd00::2"}
