"""URLs of places in object stores: which there are, and what names a place whoever reaches it by which way."""

from __future__ import annotations

import os
import re
from urllib.parse import parse_qsl, urlsplit

from weightsync.errors import ConfigError
from weightsync.net.http_edge import checked_url
from weightsync.types.store import check_place

SCHEMES = ("s3", "gs", "az", "file", "memory")


def is_store_url(url: str) -> bool:
    """Whether that is a place in an object store, and not somebody who answers HTTP."""
    return url.partition("://")[0] in SCHEMES and "://" in url


def checked_store_url(url: str, *, whose: str) -> str:
    """`url` without a slash at its end.

    Raises:
        ConfigError: it is none, names no bucket and path, or has a credential in it, which is not quoted.
    """
    scheme, _, rest = url.partition("://")
    shown = url.partition("?")[0].partition("#")[0][:200]  # a query may be a signature that opens the store
    if "@" in rest.partition("/")[0]:
        raise ConfigError(f"{whose} URL has an '@': credentials come from the environment, and stand in no URL")
    if scheme not in SCHEMES:
        raise ConfigError(
            f"{whose} URL begins with one of {', '.join(f'{each}://' for each in SCHEMES)}, not {shown!r}"
        )
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise ConfigError(f"{whose} URL can't be read: {error}: {shown!r}") from error
    if parts.query or parts.fragment:
        raise ConfigError(f"{whose} URL has a query, and a place in a store has none: {shown!r}")
    if scheme == "file":
        if parts.netloc or not parts.path.strip("/"):
            raise ConfigError(f"{whose} URL names a folder by its whole path, file:///data/run, not {shown!r}")
    elif not parts.netloc or not parts.path.strip("/"):
        raise ConfigError(f"{whose} URL names a bucket and a path in it, {scheme}://bucket/run, not {shown!r}")
    if ".." in parts.path.split("/"):
        raise ConfigError(f"{whose} URL has '..' in its path: {shown!r}")
    check_place(place_of(url))
    return url.rstrip("/")


def place_of(url: str) -> str:
    """What names a place whoever reaches it: bucket and path; of a folder, which each host mounts elsewhere, its name.

    It is signed with what lies there, so that what was signed for one place is not taken at another.
    """
    parts = urlsplit(url)
    path = parts.path.strip("/")
    return path.rpartition("/")[2] if parts.scheme == "file" else f"{parts.netloc}/{path}"


def folder_of(url: str) -> str:
    return os.path.normpath(urlsplit(url).path)


def split_asked(endpoint: str) -> tuple[str, int, int | None]:
    """A place, which source of its publications, and which version, as `asked_url` writes them.

    Raises:
        ConfigError: the query is none of ours.
    """
    url, _, query = endpoint.partition("?")
    fields = dict(parse_qsl(query))
    if not fields.keys() <= {"source", "version"} or not all(
        re.fullmatch("[0-9]{1,18}", each) for each in fields.values()
    ):
        raise ConfigError(f"{url[:200]!r} is asked for what a store does not know (the query is not shown here)")
    return url, int(fields.get("source", 0)), int(fields["version"]) if "version" in fields else None


def asked_url(url: str, *, source: int = 0, version: int | None = None) -> str:
    """A place, and what of it is asked for."""
    fields = ([f"source={source}"] if source else []) + ([f"version={version}"] if version is not None else [])
    return f"{url}?{'&'.join(fields)}" if fields else url


def is_same_place(endpoint: str, other: str) -> bool:
    """Whether both are of one place in a store, whatever they ask for."""
    return is_store_url(endpoint) and split_asked(endpoint)[0] == split_asked(other)[0]


def checked_source(url: str, *, whose: str) -> str:
    """An agent's URL or a place in a store, without a slash at its end.

    Raises:
        ConfigError: see `checked_url` and `checked_store_url`.
    """
    return checked_store_url(url, whose=whose) if is_store_url(url) else checked_url(url, whose=whose)
