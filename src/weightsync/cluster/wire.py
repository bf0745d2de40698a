"""What our actors answer: JSON bytes that hold a value or a typed error. No exception of ours is ever pickled."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from weightsync.errors import EngineError, InvalidRequestError, WeightSyncError, as_weightsync_error, error_from_dict
from weightsync.net.messages import decode, encode

_T = TypeVar("_T")
MAX_ANSWER_BYTES = 64 << 20


class Answer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One answer.

    Attributes:
        value: JSON of what was asked for; "null" beside an error.
        error: `WeightSyncError.to_dict`; None where all went well.
    """

    value: msgspec.Raw = msgspec.Raw(b"null")
    error: dict[str, Any] | None = None


msgspec.json.Decoder(Answer)  # learnt once, under the import lock: see types/engine.py


def answer(value: Any = None) -> bytes:
    """An answer that is well."""
    return encode(Answer(value=msgspec.Raw(encode(value))))


def refusal(error: BaseException, what: str, **facts: Any) -> bytes:
    """An answer that tells an error."""
    return encode(Answer(error=as_weightsync_error(error, WeightSyncError, what, **facts).to_dict()))


def read_answer(body: object, kind: type[_T], *, peer: str, what: str) -> _T:
    """The value of an answer.

    Args:
        body: what the actor returned; nothing about it is trusted.
        kind: type of the value.
        peer: who answered.
        what: to what, for messages.

    Raises:
        EngineError: it is no answer of ours.
        WeightSyncError: the error that it tells, typed.
    """
    if not isinstance(body, bytes) or len(body) > MAX_ANSWER_BYTES:
        shape = f"{len(body)} bytes" if isinstance(body, bytes) else f"a {type(body).__name__}"
        raise EngineError(f"{peer} answered {what} with {shape}, which is no answer of ours", peer=peer)
    try:
        told = decode(body, Answer, what=f"the answer to {what}")
        if told.error is None:
            return decode(bytes(told.value), kind, what=f"the answer to {what}")
    except InvalidRequestError as error:
        raise EngineError(f"{peer} answered {what} with what is no answer of ours: {error}", peer=peer) from error
    raise error_from_dict(told.error, peer=peer)
