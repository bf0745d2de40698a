"""Answers by an adapter, as clients get them: by the model's name, with the version that gave them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from weightsync.engine.vllm.adapter_table import AdapterTable, Held
from weightsync.engine.vllm.answers import BASE_FIELD, FIELD, Answers
from weightsync.engine.vllm.asgi import Message, Send, with_length
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

    def rename(self, told: dict[str, Any]) -> None:
        """What a middleware nearer to vLLM says is of the base's weights."""
        if FIELD in told:
            told[BASE_FIELD] = told.pop(FIELD)


class Renamed:
    """An answer whose header has the version, and in which the engine's name for it is the model's again."""

    def __init__(self, send: Send, held: Held, old: str, model: str) -> None:
        self._send = send
        self._version = str(held.version).encode()
        self._old, self._new = old.encode(), model.encode()
        self._start: Message | None = None
        self._parts: list[bytes] = []

    async def send(self, message: Message) -> None:
        """Takes a message of the application's, and sends what the client gets."""
        if message["type"] == "http.response.start":
            headers = [*message.get("headers", ()), (VERSION_HEADER, self._version)]
            message = {**message, "headers": headers}
            kind = dict(headers).get(b"content-type", b"")
            if kind.startswith(b"application/json") and b"content-encoding" not in dict(headers):
                self._start = message
            else:
                await self._send(message)
        elif message["type"] != "http.response.body":
            await self._send(message)
        elif self._start is None:  # events come whole
            await self._send({**message, "body": message.get("body", b"").replace(self._old, self._new)})
        else:
            self._parts.append(message.get("body", b""))
            if not message.get("more_body", False):
                body = b"".join(self._parts).replace(self._old, self._new)
                await self._send({**self._start, "headers": with_length(self._start["headers"], len(body))})
                await self._send({**message, "body": body})


class Models:
    """The list of models: an adapter has its model's name, once."""

    def __init__(self, send: Send, table: AdapterTable) -> None:
        self._send = send
        self._table = table
        self._start: Message | None = None
        self._body = b""

    async def send(self, message: Message) -> None:
        """Takes a message of the application's, and sends what the client gets."""
        if message["type"] == "http.response.start":
            self._start = message
            return
        if message["type"] != "http.response.body":
            await self._send(message)
            return
        self._body += message.get("body", b"")
        if message.get("more_body", False):
            return
        assert self._start is not None
        body = self._listed(self._body) if self._start["status"] == 200 else self._body
        await self._send({**self._start, "headers": with_length(self._start.get("headers", ()), len(body))})
        await self._send({**message, "body": body})

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
