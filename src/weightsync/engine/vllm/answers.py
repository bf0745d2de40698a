"""Answers: completions of vLLM's OpenAI server on their way out, with the spans of the versions that made them.

Completions and chat completions get a field `weight_versions`: for each choice its index and its spans, or null where
they are not known. A stream gets it in an event of its own before `[DONE]`, with no choices, as vLLM sends usage. What
the client has not asked for (token ids, by which spans are counted) is taken out again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from weightsync.engine.vllm.asgi import Message, Rewritten, Send
from weightsync.engine.vllm.spans import Answer
from weightsync.types import VersionSpan

ROUTES = ("/v1/completions", "/v1/chat/completions")
FIELD = "weight_versions"
BASE_FIELD = "base_weight_versions"
"""Spans of the base's weights, in an answer by an adapter."""
_DONE = b"data: [DONE]"

SpansOf = Callable[[Mapping[int, Answer]], list[list[VersionSpan]] | None]
"""The spans of whole answers, by the order of their numbers; None where they are not known."""


class Answers(Rewritten):
    """The answer to one request.

    Args:
        send: where it goes.
        spans_of: called once, when all is there.
        asked: whether the client has asked for token ids.
        num_choices: how many there will be; None: nobody can tell, so no spans are told.
    """

    def __init__(self, send: Send, spans_of: SpansOf, *, asked: bool, num_choices: int | None) -> None:
        super().__init__(send)
        self._spans_of = spans_of
        self._asked = asked
        self._num_choices = num_choices
        self._streams = False
        self._rest = b""
        self._answers: dict[int, Answer] = {}
        self._last: dict[str, Any] = {}
        self._whole = True

    def rename(self, document: dict[str, Any]) -> None:
        """What a document or an event is to say otherwise."""

    def begun(self, start: Message) -> tuple[Message, bool]:
        fields = dict(start.get("headers", ()))
        kind = fields.get(b"content-type", b"")
        plain = start["status"] == 200 and b"content-encoding" not in fields
        self._streams = plain and kind.startswith(b"text/event-stream")
        return start, plain and kind.startswith(b"application/json")

    def whole(self, body: bytes) -> bytes:
        try:
            document = json.loads(body)
        except ValueError:
            return body
        if not _is_answer(document):
            return body
        self._take(document)
        self.rename(document)
        document.setdefault(FIELD, self._spans())
        return _dumped(document)

    def part(self, body: bytes, *, last: bool) -> bytes:
        """Of a stream the events that are whole by now."""
        if not self._streams:
            return body
        *events, self._rest = (self._rest + body).split(b"\n\n")
        if last and self._rest:
            events, self._rest = [*events, self._rest], b""
        return b"".join(self._event(event) + b"\n\n" for event in events)

    def _event(self, event: bytes) -> bytes:
        if event.startswith(_DONE):
            if not self._last:
                return event
            document = {**self._last, "choices": [], FIELD: self._spans()}
            return b"data: " + _dumped(document) + b"\n\n" + event
        if not event.startswith(b"data: {"):
            return event
        try:
            document = json.loads(event.removeprefix(b"data: "))
        except ValueError:
            self._whole = False
            return event
        if not _is_answer(document):  # an error
            self._whole = False
            return event
        self._take(document)
        self.rename(document)
        if FIELD in document:  # another middleware's, nearer to vLLM: it knows more
            self._last = {}
        else:
            self._last = {name: document[name] for name in ("id", "object", "created", "model") if name in document}
        return b"data: " + _dumped(document)

    def _take(self, document: dict[str, Any]) -> None:
        """Notes the token ids of a document or an event, and takes out what the client did not ask for."""
        for choice in document["choices"]:
            answer = self._answers.setdefault(choice["index"], Answer(prompt=None, tokens=[]))
            answer.prompt = choice.get("prompt_token_ids") or answer.prompt
            tokens = choice.get("token_ids")
            self._whole &= isinstance(tokens, list) or _is_opening(choice)
            answer.tokens += tokens or []
        if not self._asked:
            for holder in (document, *document["choices"]):
                for name in ("token_ids", "prompt_token_ids"):
                    if name in holder:
                        holder[name] = None

    def _spans(self) -> list[dict[str, Any]] | None:
        if not self._whole or len(self._answers) != self._num_choices:
            return None
        numbers = sorted(self._answers)
        spans = self._spans_of({number: self._answers[number] for number in numbers})
        if spans is None:
            return None
        return [
            {"index": number, "spans": msgspec.to_builtins(each)} for number, each in zip(numbers, spans, strict=True)
        ]


def hides_tokens(request: dict[str, Any]) -> bool:
    """Whether vLLM would answer otherwise if it were asked for token ids."""
    return bool(request.get("echo")) and not request.get("return_token_ids")


def num_choices(request: dict[str, Any]) -> int | None:
    """How many choices the answer has; None where that can't be told."""
    number = request.get("n")
    number = 1 if number is None else number
    prompt = request.get("prompt")
    several = isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list)
    return number * (len(prompt) if several and isinstance(prompt, list) else 1) if isinstance(number, int) else None


def _is_answer(document: Any) -> bool:
    choices = document.get("choices") if isinstance(document, dict) else None
    return isinstance(choices, list) and all(isinstance(each, dict) and "index" in each for each in choices)


def _is_opening(choice: dict[str, Any]) -> bool:
    """Whether it is what a chat's stream begins with: a role, and no token yet."""
    delta = choice.get("delta")
    return "token_ids" not in choice and isinstance(delta, dict) and "role" in delta and not delta.get("content")


def _dumped(document: dict[str, Any]) -> bytes:
    """JSON as vLLM writes it; escaped where it holds what UTF-8 can't."""
    try:
        return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:
        return json.dumps(document, separators=(",", ":")).encode()
