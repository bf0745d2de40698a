"""JSON from the network: whatever the bytes are, the outcome is a value of the type or one typed error."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from weightsync.errors import InvalidRequestError

_T = TypeVar("_T")


def decode(body: bytes, kind: type[_T], *, what: str) -> _T:
    """`body` as a `kind`.

    Args:
        body: from the network.
        kind: a msgspec struct, or dict.
        what: what the body is, for the message.

    Raises:
        InvalidRequestError: it is no JSON, no UTF-8, nested too deeply, or does not fit `kind`.
    """
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequestError(f"{what} does not fit: {error}") from error


def encode(message: Any) -> bytes:
    """A message as JSON.

    Raises:
        InvalidRequestError: some text in it can't be said in UTF-8 (a lone surrogate), or a number is none of JSON's,
            or of another library.
    """
    try:
        return msgspec.json.encode(message)
    except (UnicodeEncodeError, ValueError, OverflowError, TypeError) as error:
        raise InvalidRequestError(f"this can't be told to another process: {error}") from error
