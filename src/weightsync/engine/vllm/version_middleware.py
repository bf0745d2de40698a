"""VersionMiddleware: answers of vLLM's OpenAI server say which version made which tokens.

    vllm ... --middleware weightsync.engine.vllm.version_middleware.VersionMiddleware \
             --logits-processors weightsync.engine.vllm.token_versions:TokenVersions

Completions and chat completions get a field `weight_versions`: for each choice its index and its spans, or null where
they are not known. A stream gets it in an event of its own before `[DONE]`, with no choices, as vLLM sends usage.

A request is given a tag and asks for token ids; what the client has not asked for is taken out of its answer again.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import msgspec

from weightsync.engine.vllm.spans import Answer, spans_of
from weightsync.engine.vllm.version_board import TAG, VersionBoard
from weightsync.errors import WeightSyncError

ROUTES = ("/v1/completions", "/v1/chat/completions")
FIELD = "weight_versions"
_MAX_BODY_BYTES = 32 << 20
"""Longer requests pass as they are: without spans."""
_MAX_COMING_BYTES = 2 * _MAX_BODY_BYTES
"""So much is kept of all bodies that are still coming; past it requests pass as they are. vLLM asks for its API key
behind this middleware: anybody may send them."""
_DONE = b"data: [DONE]"

_Message = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[_Message]]
_Send = Callable[[_Message], Awaitable[None]]
_App = Callable[[MutableMapping[str, Any], _Receive, _Send], Awaitable[None]]
_logger = logging.getLogger(__name__)


class VersionMiddleware:
    """ASGI middleware. One event loop. Its shared memory (32 MiB) is made at the first request.

    Args:
        app: what answers.
    """

    def __init__(self, app: _App) -> None:
        self._app = app
        self._board: VersionBoard | None = None
        self._failed = False
        self._coming_bytes = 0

    async def __call__(self, scope: MutableMapping[str, Any], receive: _Receive, send: _Send) -> None:
        """Passes a request on, and its answer back with spans where it is a completion."""
        if scope["type"] != "http" or scope["method"] != "POST" or not str(scope["path"]).endswith(ROUTES):
            await self._app(scope, receive, send)
            return
        read: list[_Message] = []
        try:
            body = await self._body(receive, read)
            request = None if body is None else _request(body)
            if request is None:
                await self._app(scope, _again(read, receive), send)
                return
        finally:
            self._coming_bytes -= _num_bytes(read)
        del body, read
        board = self._opened()
        tag = None if board is None or _hides_tokens(request) else board.claim()
        try:
            asked = bool(request.get("return_token_ids"))
            answers = _Answers(send, board, tag, asked=asked, num_choices=_num_choices(request))
            rewritten = json.dumps(_tagged(request, tag)).encode()
            scope = {**scope, "headers": _with_length(scope["headers"], len(rewritten))}
            head: _Message = {"type": "http.request", "body": rewritten, "more_body": False}
            await self._app(scope, _again([head], receive), answers.send)
        finally:
            if board is not None and tag is not None:
                board.release(tag)

    async def _body(self, receive: _Receive, read: list[_Message]) -> bytes | None:
        """The request's body; None where it is too long, there is no room for it, or the client has left. `read` has
        what came."""
        num_bytes, more = 0, True
        while more:
            if num_bytes > _MAX_BODY_BYTES or self._coming_bytes > _MAX_COMING_BYTES:
                return None
            message = await receive()
            read.append(message)
            num_bytes += (size := _num_bytes([message]))
            self._coming_bytes += size
            if message["type"] != "http.request":
                return None
            more = message.get("more_body", False)
        return b"".join(message.get("body", b"") for message in read)

    def _opened(self) -> VersionBoard | None:
        if self._board is None and not self._failed:
            try:
                self._board = VersionBoard()
            except WeightSyncError as error:
                self._failed = True
                _logger.error("answers don't tell their versions: %s", error)
        return self._board


class _Answers:
    """The answer to one request, on its way out."""

    def __init__(
        self, send: _Send, board: VersionBoard | None, tag: str | None, *, asked: bool, num_choices: int | None
    ) -> None:
        self._send = send
        self._board = board
        self._tag = tag
        self._asked = asked
        self._num_choices = num_choices
        self._start: _Message | None = None
        self._streams = self._passes = False
        self._rest = b""
        self._answers: dict[int, Answer] = {}
        self._last: dict[str, Any] = {}
        self._whole = True

    async def send(self, message: _Message) -> None:
        """Takes a message of the application's, and sends what the client gets."""
        if message["type"] == "http.response.start":
            fields = dict(message.get("headers", ()))
            kind = fields.get(b"content-type", b"")
            plain = message["status"] == 200 and b"content-encoding" not in fields
            self._streams = plain and kind.startswith(b"text/event-stream")
            self._passes = not self._streams and not (plain and kind.startswith(b"application/json"))
            if self._streams or self._passes:
                await self._send(message)
            else:
                self._start = message  # its length will be another one
        elif self._passes or message["type"] != "http.response.body":
            await self._send(message)
        elif self._streams:
            body = self._events(message.get("body", b""), last=not message.get("more_body", False))
            await self._send({**message, "body": body})
        else:
            self._rest += message.get("body", b"")
            if not message.get("more_body", False):
                assert self._start is not None
                body = self._document(self._rest)
                await self._send({**self._start, "headers": _with_length(self._start["headers"], len(body))})
                await self._send({**message, "body": body})

    def _document(self, body: bytes) -> bytes:
        try:
            told = json.loads(body)
        except ValueError:
            return body
        if not _is_answer(told):
            return body
        self._take(told)
        told[FIELD] = self._spans()
        return _dumped(told)

    def _events(self, body: bytes, *, last: bool) -> bytes:
        """The events that are whole by now, as the client gets them."""
        *events, self._rest = (self._rest + body).split(b"\n\n")
        if last and self._rest:
            events, self._rest = [*events, self._rest], b""
        return b"".join(self._event(event) + b"\n\n" for event in events)

    def _event(self, event: bytes) -> bytes:
        if event.startswith(_DONE):
            if not self._last:
                return event
            told = {**self._last, "choices": [], FIELD: self._spans()}
            return b"data: " + _dumped(told) + b"\n\n" + event
        if not event.startswith(b"data: {"):
            return event
        try:
            told = json.loads(event.removeprefix(b"data: "))
        except ValueError:
            self._whole = False
            return event
        if not _is_answer(told):  # an error
            self._whole = False
            return event
        self._last = {name: told[name] for name in ("id", "object", "created", "model") if name in told}
        self._take(told)
        return b"data: " + _dumped(told)

    def _take(self, told: dict[str, Any]) -> None:
        """Notes the token ids of a document or an event, and takes out what the client did not ask for."""
        for choice in told["choices"]:
            answer = self._answers.setdefault(choice["index"], Answer(prompt=None, tokens=[]))
            answer.prompt = choice.get("prompt_token_ids") or answer.prompt
            tokens = choice.get("token_ids")
            self._whole &= isinstance(tokens, list) or _is_opening(choice)
            answer.tokens += tokens or []
        if not self._asked:
            for holder in (told, *told["choices"]):
                for name in ("token_ids", "prompt_token_ids"):
                    if name in holder:
                        holder[name] = None

    def _spans(self) -> list[dict[str, Any]] | None:
        known = self._whole and self._board is not None and self._tag is not None
        if not known or len(self._answers) != self._num_choices:
            return None
        assert self._board is not None
        assert self._tag is not None
        numbers = sorted(self._answers)
        spans = spans_of(self._board.edges(self._tag), [self._answers[number] for number in numbers])
        return [
            {"index": number, "spans": msgspec.to_builtins(each)} for number, each in zip(numbers, spans, strict=True)
        ]


def _num_bytes(messages: list[_Message]) -> int:
    return sum(len(message.get("body", b"")) for message in messages)


def _again(read: list[_Message], receive: _Receive) -> _Receive:
    """What was read comes again, then what comes."""
    left = iter(read)

    async def heard() -> _Message:
        message = next(left, None)
        return await receive() if message is None else message

    return heard


def _request(body: bytes) -> dict[str, Any] | None:
    """The request; None where vLLM is to say what is wrong with it."""
    try:
        request = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(request, dict) or not isinstance(request.get("vllm_xargs") or {}, dict):
        return None
    return request


def _is_answer(told: Any) -> bool:
    choices = told.get("choices") if isinstance(told, dict) else None
    return isinstance(choices, list) and all(isinstance(each, dict) and "index" in each for each in choices)


def _is_opening(choice: dict[str, Any]) -> bool:
    """Whether it is what a chat's stream begins with: a role, and no token yet."""
    delta = choice.get("delta")
    return "token_ids" not in choice and isinstance(delta, dict) and "role" in delta and not delta.get("content")


def _tagged(request: dict[str, Any], tag: str | None) -> dict[str, Any]:
    """The request under a tag of ours; one that its client made up is gone."""
    extra = {name: value for name, value in (request.get("vllm_xargs") or {}).items() if name != TAG}
    if tag is not None:
        return {**request, "vllm_xargs": {**extra, TAG: tag}, "return_token_ids": True}
    return {**request, "vllm_xargs": extra} if "vllm_xargs" in request else request


def _dumped(told: dict[str, Any]) -> bytes:
    """JSON as vLLM writes it; escaped where it holds what UTF-8 can't."""
    try:
        return json.dumps(told, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:
        return json.dumps(told, separators=(",", ":")).encode()


def _hides_tokens(request: dict[str, Any]) -> bool:
    """Whether vLLM would answer otherwise if it were asked for token ids."""
    return bool(request.get("echo")) and not request.get("return_token_ids")


def _num_choices(request: dict[str, Any]) -> int | None:
    """How many choices the answer has; None where that can't be told."""
    number = request.get("n")
    number = 1 if number is None else number
    prompt = request.get("prompt")
    several = isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list)
    return number * (len(prompt) if several and isinstance(prompt, list) else 1) if isinstance(number, int) else None


def _with_length(headers: Any, size_bytes: int) -> list[tuple[bytes, bytes]]:
    kept = [(name, value) for name, value in headers if name.lower() not in (b"content-length", b"transfer-encoding")]
    return [*kept, (b"content-length", str(size_bytes).encode())]
