"""What a release lacks is said with the release that has it."""

from __future__ import annotations

import pytest

from weightsync.handles.releases import MODEL, SINCE, since


@pytest.mark.parametrize(
    ("engine", "missing", "said"),
    [
        ("vLLM", ["/start_weight_update"], "take vLLM 0.21 or newer"),
        ("vLLM", ["/finish_weight_update", "/init_weight_transfer_engine"], "take vLLM 0.21 or newer"),
        ("vLLM", ["/update_weight_version", "/weight_checker"], "take vLLM 0.32 or newer"),
        ("vLLM", [MODEL], "take vLLM 0.26 or newer"),
        ("SGLang", ["/begin_weight_update"], "take SGLang 0.5.21 or newer"),
        ("vLLM", ["/start_weight_update", "/nobody_knows"], "take a newer release of vLLM"),
        ("an SGLang router", ["/workers"], "take a newer release of an SGLang router"),
    ],
)
def test_the_newest_of_what_is_needed_counts(engine: str, missing: list[str], said: str) -> None:
    assert since(engine, missing) == said


def test_releases_are_compared_as_numbers() -> None:
    """0.5.9 is before 0.5.21: as text it is behind it."""
    for known in SINCE.values():
        assert all(part.isdigit() for release in known.values() for part in release.split("."))
    assert since("SGLang", ["/update_weight_version", "/end_weight_update"]) == "take SGLang 0.5.21 or newer"
