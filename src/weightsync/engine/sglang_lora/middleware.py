"""SGLangLoraMiddleware: `LoraMiddleware` for SGLang: its routes, how requests name an adapter, what answers say.

    /generate    {"lora_path": "actor"}      -> {"lora_path": "actor@run/12#..."}; meta_info says weight_version(s)
    /v1/...      {"model": "base:actor"}, {"model": "actor"}, or {"lora_path": "actor"} beside the base's name
                                             -> {"model": "base:actor@run/12#..."}

What SGLang itself says of versions is of the base: it stands in `base_weight_version(s)`.
"""

from __future__ import annotations

import json
from typing import Any

from weightsync.engine.sglang_lora.calls import SGLangFacts, SGLangInside, check_key
from weightsync.engine.vllm.adapter_table import Held
from weightsync.engine.vllm.asgi import App, Message, Rewritten, Scope, Send, route_of
from weightsync.engine.vllm.lora_answers import Renamed
from weightsync.engine.vllm.lora_middleware import LoraMiddleware
from weightsync.errors import UnsupportedError

_GENERATE = "/generate"
_ROUTES = (_GENERATE, "/v1/completions", "/v1/chat/completions", "/invocations")
"""Those that compute by an adapter that they are given. Others take a model's name, and answer by the base."""
_COUNTS = ("/v1/tokenize", "/v1/detokenize")
"""What these answer is the same by all versions."""
_VERSION, _VERSIONS = "weight_version", "weight_versions"


class SGLangLoraMiddleware(LoraMiddleware):
    """See `LoraMiddleware`.

    Args:
        app: SGLang's, with all that it has put before it.
        tokenizer_manager: SGLang's, which knows its adapters.
        expected: see `LoraMiddleware`.
    """

    slots_advice = "Start SGLang with a greater --max-loras-per-batch (one of them is the base's)"
    generates = (
        *("/v1/", "/generate", "/encode", "/classify", "/score", "/rerank", "/pooling"),
        *("/invocations", "/vertex_generate", "/api/"),
    )
    own_routes = ("/v1/loads",)

    def __init__(self, app: App, tokenizer_manager: Any, *, expected: str | None = None) -> None:
        super().__init__(app, expected=expected)
        self._tokenizer_manager = tokenizer_manager

    def _inside(self, scope: Scope) -> SGLangInside:
        return SGLangInside(self._app, scope, self._tokenizer_manager)

    def _facts(self, scope: Scope) -> SGLangFacts:  # type: ignore[override]
        return SGLangFacts(self._tokenizer_manager)

    def _check_client(self, scope: Scope) -> None:
        check_key(scope, self._tokenizer_manager.server_args, path=route_of(scope), level="NORMAL")

    def _asked(self, request: dict[str, Any], path: str) -> str | None:
        if path in _COUNTS:
            return None
        for key in ("model", "lora_path") if path != _GENERATE else ("lora_path",):
            value = request.get(key)
            each = value if isinstance(value, list) else [value]
            names = {name for name in map(self._ours, each) if name is not None}
            if not names:
                continue
            if path not in _ROUTES:
                raise UnsupportedError(
                    f"SGLang answers {path} by its base: adapters answer {', '.join(_ROUTES)}",
                    state_left="not answered",
                )
            if len(names) > 1 or None in map(self._ours, each):
                raise UnsupportedError(
                    f"{key} names several adapters: send a request for each", state_left="not answered"
                )
            return names.pop()
        return None

    def _ours(self, asked: Any) -> str | None:
        """The adapter of ours that a name means: "actor", "base:actor", or SGLang's own name for it. SGLang takes
        what is behind a colon, whatever is before it."""
        if not isinstance(asked, str):
            return None
        for name in (asked, asked.partition(":")[2]):
            if name in self._expected or self._table.current(name) or self._table.named(name):
                return name
        return None

    def _given(
        self, request: dict[str, Any], path: str, held: Held, model: str, send: Send
    ) -> tuple[dict[str, Any], Send]:
        if path == _GENERATE:
            return {**request, "lora_path": held.name}, _Generated(send, held).send
        named = request.get("model")
        name = f"{self._tokenizer_manager.served_model_name}:{held.name}"
        given = {key: value for key, value in request.items() if key != "lora_path"}
        return {**given, "model": name}, Renamed(send, held, name, named if isinstance(named, str) else model).send


class _Generated(Rewritten):
    """An answer of /generate, whole or as events, that says its version."""

    def __init__(self, send: Send, held: Held) -> None:
        super().__init__(Renamed(send, held, held.name, held.load.model_id).send)
        self._version = str(held.version)
        self._streams = False
        self._rest = b""

    def begun(self, start: Message) -> tuple[Message, bool]:
        kind = dict(start.get("headers", ())).get(b"content-type", b"")
        self._streams = kind.startswith(b"text/event-stream")
        return start, kind.startswith(b"application/json")

    def whole(self, body: bytes) -> bytes:
        return self._said(body)

    def part(self, body: bytes, *, last: bool) -> bytes:
        if not self._streams:
            return body
        *lines, self._rest = (self._rest + body).split(b"\n")
        whole = b"".join(self._line(line) + b"\n" for line in lines)
        return whole + self._line(self._rest) if last else whole

    def _line(self, line: bytes) -> bytes:
        head, found, rest = line.partition(b"data: ")
        return head + found + self._said(rest) if found and rest.startswith((b"{", b"[{")) else line

    def _said(self, body: bytes) -> bytes:
        try:
            document = json.loads(body)
        except ValueError:
            return body
        for each in document if isinstance(document, list) else [document]:
            meta = each.get("meta_info") if isinstance(each, dict) else None
            if isinstance(meta, dict):
                for name in (_VERSION, _VERSIONS):
                    if name in meta:
                        meta[f"base_{name}"] = meta.pop(name)
                meta[_VERSION] = self._version
                num_tokens = meta.get("completion_tokens")
                if isinstance(num_tokens, int):
                    spans = [{"version": self._version, "start": 0, "end": num_tokens}] if num_tokens else []
                    meta[_VERSIONS] = spans
        return json.dumps(document).encode()
