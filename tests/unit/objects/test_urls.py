"""Which URLs name a place, and which are refused."""

from __future__ import annotations

import pytest

from weightsync.errors import ConfigError
from weightsync.objects.opened import open_store
from weightsync.objects.urls import (
    asked_url,
    checked_source,
    checked_store_url,
    is_same_place,
    is_store_url,
    place_of,
    split_asked,
)


@pytest.mark.parametrize("url", ["s3://b/run", "gs://b/a/run", "az://b/run", "file:///data/run", "memory://b/run"])
def test_places(url: str) -> None:
    assert is_store_url(url)
    assert checked_store_url(f"{url}/", whose="a") == url == checked_source(url, whose="a")
    for source, version in ((0, None), (3, None), (0, 7), (2, 0)):
        asked = asked_url(url, source=source, version=version)
        assert split_asked(asked) == (url, source, version)
        assert is_same_place(asked, url)


@pytest.mark.parametrize(
    "url",
    [
        "s3://bucket",
        "s3:///x",
        "s3://user:pw@b/run",
        "file://host/x",
        "file:///",
        "s3://b/../x",
        "ftp://b/x",
        "s3://b/run?x=1",
        "s3://b/a#b",
    ],
)
def test_none(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        checked_store_url(url, whose="a")
    assert "pw" not in str(caught.value)


@pytest.mark.parametrize("url", ["az://c/run?sig=SECRET", "https://a.blob.net/c?sig=SECRET", "s3://b?sig=SECRET"])
def test_a_signature_in_a_query_is_not_quoted(url: str) -> None:
    """Seen red with the whole URL in the error."""
    for call in (lambda: checked_store_url(url, whose="a"), lambda: split_asked(url)):
        with pytest.raises(ConfigError) as caught:
            call()
        assert "SECRET" not in str(caught.value)


@pytest.mark.parametrize("url", ["s3://[bucket]/run", "s3://[bucket/run", "az://bu]cket/run", "gs://b\u2100/run"])
def test_a_place_that_can_not_be_split_is_said_so(url: str) -> None:
    """Seen red with a bare ValueError."""
    with pytest.raises(ConfigError, match="can't be read"):
        checked_source(url, whose="a")


def test_a_place_is_the_same_by_whatever_way() -> None:
    assert place_of("s3://b/run") == place_of("gs://b/run") == "b/run"
    assert place_of("file:///mnt/one/run") == place_of("file:///elsewhere/run") == "run"
    assert not is_same_place("http://h:1", "s3://b/run")
    with pytest.raises(ConfigError):
        split_asked("s3://b/run?token=x")
    assert open_store("file:///tmp/none/run").url == "file:///tmp/none/run"
