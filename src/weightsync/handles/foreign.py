"""ForeignClient: JSON calls to a server that is not ours. What it answers badly becomes a typed error here."""

from __future__ import annotations

from typing import Any

from weightsync.errors import AuthError, EngineError, InvalidRequestError, UnsupportedError, WeightSyncError
from weightsync.net.client import JsonClient
from weightsync.net.messages import decode

_HEAD = 1000  # characters of a foreign error's text that are kept


class ForeignClient(JsonClient):
    """See `JsonClient` for arguments; `call` raises `UnsupportedError` where the server has no such route, `AuthError`
    where it refuses the token, and an `EngineError` with the server's own words otherwise.

    Args:
        needs: what to do where a route is missing, for the error.
    """

    def __init__(self, url: str, *, runs: str, needs: str, token: str | None = None, verify: bool | str = True) -> None:
        super().__init__(url, runs=runs, token=token, verify=verify)
        self._needs = needs

    def _error_in(self, status: int, body: bytes, path: str) -> WeightSyncError:
        words = told_by(body)
        if status in (404, 405):
            return UnsupportedError(f"{self.url} has no route {path}: {self._needs}", peer=self.url, status=status)
        if status in (401, 403):
            return AuthError(f"{self.url} refuses the token for {path}: {words}", peer=self.url)
        return EngineError(f"{self.url} answered {path} with an error: {words}", peer=self.url, status=status)


def told_by(body: bytes) -> str:
    """What a foreign server's answer says went wrong: its words, or the body's head."""
    try:
        answer: Any = decode(body, dict[str, Any], what="the error")
    except InvalidRequestError:
        return body[:_HEAD].decode("utf-8", "replace") or "nothing"
    for key in ("error", "message", "detail"):
        answer = answer.get(key, answer) if isinstance(answer, dict) else answer
    return str(answer)[:_HEAD]
