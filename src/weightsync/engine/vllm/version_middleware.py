"""VersionMiddleware: answers of vLLM's OpenAI server say which version made which tokens.

    vllm ... --middleware weightsync.engine.vllm.version_middleware.VersionMiddleware \
             --logits-processors weightsync.engine.vllm.token_versions:TokenVersions

See `answers` for the field that tells them. A request is given a tag and asks for token ids; what the client has not
asked for is taken out of its answer again.
"""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Mapping
from typing import Any

from weightsync.engine.vllm.answers import FIELD, ROUTES, Answers, hides_tokens, num_choices
from weightsync.engine.vllm.asgi import App, Bodies, Message, Receive, Scope, Send, first, request_in, with_length_of
from weightsync.engine.vllm.spans import Answer, spans_of
from weightsync.engine.vllm.version_board import TAG, VersionBoard
from weightsync.errors import WeightSyncError
from weightsync.types import VersionSpan

__all__ = ["FIELD", "ROUTES", "VersionMiddleware"]

_MAX_BODY_BYTES = 32 << 20
"""Longer requests pass as they are: without spans."""
_MAX_COMING_BYTES = 2 * _MAX_BODY_BYTES
"""So much is kept of all bodies that are still coming; past it requests pass as they are. vLLM asks for its API key
behind this middleware: anybody may send them."""
_logger = logging.getLogger(__name__)


class VersionMiddleware:
    """ASGI middleware. One event loop. Its shared memory (32 MiB) is made at the first request.

    Args:
        app: what answers.
    """

    def __init__(self, app: App) -> None:
        self._app = app
        self._board: VersionBoard | None = None
        self._failed = False
        self._bodies = Bodies()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on, and its answer back with spans where it is a completion."""
        if scope["type"] != "http" or scope["method"] != "POST" or not str(scope["path"]).endswith(ROUTES):
            await self._app(scope, receive, send)
            return
        read: deque[Message] = deque()
        try:
            body = await self._bodies.read(receive, read, max_bytes=_MAX_BODY_BYTES, max_coming_bytes=_MAX_COMING_BYTES)
            request = None if body is None else request_in(body)
            del body  # an answer may take minutes
            if request is None:
                await self._app(scope, self._bodies.again(read, receive), send)
                return
        finally:
            self._bodies.done(read)
        board = self._opened()
        tag = None if board is None or hides_tokens(request) else board.claim()

        def spans(answers: Mapping[int, Answer]) -> list[list[VersionSpan]] | None:
            return None if board is None or tag is None else spans_of(board.edges(tag), list(answers.values()))

        try:
            asked = bool(request.get("return_token_ids"))
            answers = Answers(send, spans, asked=asked, num_choices=num_choices(request))
            rewritten = json.dumps(_tagged(request, tag)).encode()
            scope, receive = with_length_of(scope, rewritten), first(rewritten, receive)
            del request, rewritten
            await self._app(scope, receive, answers.send)
        finally:
            if board is not None and tag is not None:
                board.release(tag)

    def _opened(self) -> VersionBoard | None:
        if self._board is None and not self._failed:
            try:
                self._board = VersionBoard()
            except WeightSyncError as error:
                self._failed = True
                _logger.error("answers don't tell their versions: %s", error)
        return self._board


def _tagged(request: dict[str, Any], tag: str | None) -> dict[str, Any]:
    """The request under a tag of ours; one that its client made up is gone."""
    extra = {name: value for name, value in (request.get("vllm_xargs") or {}).items() if name != TAG}
    if tag is not None:
        return {**request, "vllm_xargs": {**extra, TAG: tag}, "return_token_ids": True}
    return {**request, "vllm_xargs": extra} if "vllm_xargs" in request else request
