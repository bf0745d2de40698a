"""What `lora_middleware` asks of the vLLM that it stands before: its own routes, from inside, and what its state shows.

The routes are vLLM's documented ones. They are called in the process, behind all middlewares and with the caller's own
`Authorization`: whoever may not load an adapter at vLLM's door may not do so here.
"""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

from weightsync.engine.vllm.asgi import App, Message, Scope
from weightsync.errors import AuthError, ConfigError, DeadlineExceededError, EngineError, WeightSyncError
from weightsync.handles.lora_messages import AdapterOrder
from weightsync.handles.vllm_api import error_of
from weightsync.handles.vllm_messages import VllmInitMessage, as_info
from weightsync.types import Deadline

UPDATING_VARIABLE = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"
_CALL_S = 120.0
_LOOK_S = 0.02
_SCORED_AT_ONCE = 16


class Inside:
    """Calls of vLLM's routes.

    Args:
        app: what is behind the middleware.
        scope: of the request on whose behalf they are made.

    Attributes:
        engine: what it is, for messages.
    """

    engine = "vLLM"

    def __init__(self, app: App, scope: Scope) -> None:
        self._app = app
        self._scope = scope

    async def check_allowed(self) -> None:
        """Raises AuthError where the caller may not even list models."""
        await self._good("GET", "/v1/models")

    async def load(self, name: str, folder: str) -> str | None:
        """Loads an adapter into every replica.

        Returns:
            Of SGLang: why its workers have not proved it. vLLM's are asked by the service.

        Raises:
            EngineError: vLLM refused it, in its own words; it has none of that name.
        """
        await self._good("POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": folder}, limited=False)
        return None

    async def unload(self, name: str) -> None:
        """Takes it off vLLM's list. Its workers keep it until they are told, or need its place."""
        status, body = await self._call("POST", "/v1/unload_lora_adapter", {"lora_name": name}, limited=False)
        if status not in (200, 404):
            raise self._error(status, body, "/v1/unload_lora_adapter")

    async def drop(self, lora_id: int) -> None:
        """Takes it out of the workers; nothing happens where the weight-transfer backend is not ours."""
        message = VllmInitMessage(adapter=AdapterOrder(what="drop", lora_id=lora_id))
        path = "/init_weight_transfer_engine"
        status, body = await self._call("POST", path, {"init_info": as_info(message)})
        if status not in (200, 404, 405):
            error = self._error(status, body, path)
            if type(error) is not ConfigError:
                raise error

    async def score(self, name: str, tokens: tuple[int, ...], replica: int | None) -> tuple[float, ...]:
        """Log-probabilities of a prompt's tokens but the first: each is asked for as the one token that may follow what
        is before it, some at the same time. vLLM tells them as they are without that limit (its default,
        `--logprobs-mode raw_logprobs`).

        `prompt_logprobs` would be one call: vLLM's CPU build (0.32) ends at it where the same batch generates by an
        adapter.
        """
        few, scores, failed = asyncio.Semaphore(_SCORED_AT_ONCE), dict[int, float](), list[Exception]()

        async def ask(count: int) -> None:
            async with few:
                try:
                    if not failed:
                        scores[count] = await self._score(name, tokens[:count], tokens[count], replica)
                except Exception as error:
                    failed.append(error)

        async with asyncio.TaskGroup() as group:  # none is under way any more when this returns, or raises
            for count in range(1, len(tokens)):
                group.create_task(ask(count))
        if failed:
            raise failed[0]
        if len(scores) != len(tokens) - 1:  # a call that was cancelled within the server fails nothing by itself
            raise EngineError(f"{self.engine} gave {len(scores)} of {len(tokens) - 1} log-probabilities")
        return tuple(scores[count] for count in range(1, len(tokens)))

    async def _score(self, name: str, before: tuple[int, ...], token: int, replica: int | None) -> float:
        extra = [] if replica is None else [(b"x-data-parallel-rank", str(replica).encode())]
        asked = {
            "model": name, "prompt": list(before), "max_tokens": 1, "temperature": 0.0, "logprobs": 0,
            "allowed_token_ids": [token], "return_tokens_as_token_ids": True,
        }  # fmt: skip
        body = await self._good("POST", "/v1/completions", asked, headers=extra)
        try:
            return float(json.loads(body)["choices"][0]["logprobs"]["token_logprobs"][0])
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise EngineError(f"vLLM told no log-probability of a token: {error!r:.200}") from error

    async def _good(self, method: str, path: str, body: Any = None, **options: Any) -> bytes:
        """The body of a good answer; options as of `_call`."""
        status, answer = await self._call(method, path, body, **options)
        if status != 200:
            raise self._error(status, answer, path)
        return answer

    def _error(self, status: int, answer: bytes, path: str) -> WeightSyncError:
        if status in (401, 403):
            return AuthError(f"{self.engine} refuses the token for {path}")
        if status in (404, 405) and path == "/v1/load_lora_adapter" and b"No adapter found" not in answer:
            return ConfigError(f"vLLM has no route {path}: start it with {UPDATING_VARIABLE}=True and --enable-lora")
        return error_of(
            answer.decode("utf-8", "replace"), f"{self.engine} answered {path} with status {status}", peer=self.engine
        )

    async def _call(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        headers: list[tuple[bytes, bytes]] | None = None,
        limited: bool = True,
    ) -> tuple[int, bytes]:
        """One call. Loads and unloads have no limit: one that was cancelled would go on in the workers, whose reply
        SGLang would take for the next one's. Who waits for them has a deadline of his own."""
        sent = b"" if body is None else json.dumps(body).encode()
        known = [(name, value) for name, value in self._scope["headers"] if name in (b"authorization", b"host")]
        fields = [*known, (b"content-type", b"application/json"), (b"content-length", str(len(sent)).encode())]
        root = str(self._scope.get("root_path", ""))
        scope = {
            **{key: value for key, value in self._scope.items() if key not in ("state", "endpoint", "route", "router")},
            "method": method, "path": f"{root}{path}", "raw_path": f"{root}{path}".encode(), "query_string": b"",
            "headers": [*fields, *(headers or ())], "state": dict(self._scope.get("state", {})), "path_params": {},
        }  # fmt: skip
        heard = [{"type": "http.request", "body": sent, "more_body": False}]
        status, parts = 0, []
        over = asyncio.Event()

        async def receive() -> Message:
            if heard:
                return heard.pop()
            await over.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            elif message["type"] == "http.response.body":
                parts.append(message.get("body", b""))
                if not message.get("more_body", False):
                    over.set()

        try:
            await asyncio.wait_for(self._app(scope, receive, send), _CALL_S if limited else None)
        except TimeoutError:
            raise DeadlineExceededError(f"{self.engine} did not answer {path} within {_CALL_S:g} s") from None
        return status, b"".join(parts)


class VllmFacts:
    """What vLLM's application shows of itself. A release that shows less is taken to have no slots.

    Args:
        app: vLLM's application.
    """

    def __init__(self, app: Any) -> None:
        self._state = app.state
        config = getattr(self._state, "vllm_config", None)
        lora = getattr(config, "lora_config", None)
        parallel = getattr(config, "parallel_config", None)
        self.max_loras = int(getattr(lora, "max_loras", 0) or 0)
        self.max_cpu_loras = int(getattr(lora, "max_cpu_loras", 0) or self.max_loras)
        self.max_lora_rank = int(getattr(lora, "max_lora_rank", 0) or 0)
        elsewhere = getattr(parallel, "data_parallel_external_lb", False)
        self.num_replicas = 1 if elsewhere else int(getattr(parallel, "data_parallel_size", 1) or 1)
        self.updating = os.environ.get(UPDATING_VARIABLE, "0").strip().lower() in ("1", "true")

    def check(self) -> None:
        """Raises ConfigError where this vLLM takes no adapters."""
        if not self.max_loras or not self.updating:
            raise ConfigError(
                f"this vLLM takes no adapters: start it with --enable-lora and {UPDATING_VARIABLE}=True",
                state_left="nothing was changed",
            )

    def names(self) -> set[str]:
        """Of all adapters that vLLM lists."""
        return set(self._requests())

    def base_names(self) -> set[str]:
        """Under which it serves its base."""
        models = getattr(self._state, "openai_serving_models", None)
        return {str(each.name) for each in getattr(models, "base_model_paths", ())}

    def lora_id(self, name: str) -> int | None:
        """Its workers' number for an adapter."""
        found = getattr(self._requests().get(name), "lora_int_id", None)
        return found if type(found) is int else None

    async def ended(self, name: str, deadline: Deadline) -> None:
        """Returns when no answer by that adapter goes on: one may outlive its request (a response in the background).

        Raises:
            DeadlineExceededError: one does.
        """
        client = getattr(self._state, "engine_client", None)
        states = getattr(getattr(client, "output_processor", None), "request_states", None)
        while isinstance(states, dict) and any(getattr(each, "lora_name", None) == name for each in states.values()):
            deadline.check(f"end of the last answer by {name}")
            await asyncio.sleep(_LOOK_S)

    def _requests(self) -> dict[str, Any]:
        models = getattr(self._state, "openai_serving_models", None)
        found = getattr(models, "lora_requests", None)
        return found if isinstance(found, dict) else {}
