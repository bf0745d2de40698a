"""Answers by an adapter, as clients get them: by the model's name, with the version that gave them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from weightsync.engine.vllm.adapter_table import AdapterTable, Held
from weightsync.engine.vllm.answers import BASE_FIELD, FIELD, Answers
from weightsync.engine.vllm.asgi import Message, Rewritten, Send
from weightsync.engine.vllm.spans import Answer
from weightsync.types import VersionSpan
from weightsync.types.spans import whole_span

VERSION_HEADER = b"x-weightsync-version"


class Completions(Answers):
    """A completion by an adapter: it says the model's name, and the version."""

    def __init__(self, send: Send, held: Held, model: str, *, asked: bool, number: int | None) -> None:
        def spans_of(answers: Mapping[int, Answer]) -> list[list[VersionSpan]]:
            return [whole_span(held.version, len(each.tokens)) for each in answers.values()]

        super().__init__(Renamed(send, held, held.name, model).send, spans_of, asked=asked, num_choices=number)

    def rename(self, document: dict[str, Any]) -> None:
        """What a middleware nearer to vLLM says is of the base's weights."""
        if FIELD in document:
            document[BASE_FIELD] = document.pop(FIELD)


class Renamed(Rewritten):
    """An answer whose header has the version, and in which the engine's name for it is the model's again."""

    def __init__(self, send: Send, held: Held, old: str, model: str) -> None:
        super().__init__(send)
        self._version = str(held.version).encode()
        self._old, self._new = old.encode(), model.encode()

    def begun(self, start: Message) -> tuple[Message, bool]:
        headers = [*start.get("headers", ()), (VERSION_HEADER, self._version)]
        fields = dict(headers)
        kept = fields.get(b"content-type", b"").startswith(b"application/json") and b"content-encoding" not in fields
        return {**start, "headers": headers}, kept

    def whole(self, body: bytes) -> bytes:
        return body.replace(self._old, self._new)

    def part(self, body: bytes, *, last: bool) -> bytes:
        return self.whole(body)  # events come whole


class Models(Rewritten):
    """The list of models: an adapter has its model's name, once."""

    def __init__(self, send: Send, table: AdapterTable) -> None:
        super().__init__(send)
        self._table = table

    def whole(self, body: bytes) -> bytes:
        assert self._start is not None
        return self._listed(body) if self._start["status"] == 200 else body

    def _listed(self, body: bytes) -> bytes:
        try:
            listed = json.loads(body)
            cards = list(listed["data"])
            shown = []
            for card in cards:
                held = self._table.named(card["id"])
                if held is None:
                    shown.append(card)
                elif held.state == "current":
                    shown.append({**card, "id": held.load.model_id})
        except (ValueError, KeyError, TypeError):
            return body
        return json.dumps({**listed, "data": shown}).encode()
