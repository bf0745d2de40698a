"""LoraMiddleware around a small application that loads, lists and answers as vLLM's server does.

tests/engines/test_lora_vllm.py runs it in a real one; here are the interleavings that a real one shows by chance alone.
"""

from __future__ import annotations

import asyncio
import json
import os
import types
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from weightsync.engine.vllm import lora_requests
from weightsync.engine.vllm.adapter_table import AdapterTable
from weightsync.engine.vllm.answers import BASE_FIELD, FIELD
from weightsync.engine.vllm.lease_middleware import UNGUARDED, LeaseMiddleware
from weightsync.engine.vllm.lora_calls import UPDATING_VARIABLE
from weightsync.engine.vllm.lora_middleware import LoraMiddleware
from weightsync.errors import WeightSyncError
from weightsync.handles.lora_messages import COMMIT_PATH, DROP_PATH, LOAD_PATH, SCORE_PATH, STATE_PATH
from weightsync.memory import PrivateFolder, reclaim_dead

RUN = "run-1"


class Vllm:
    """An ASGI application: vLLM's routes for adapters, and completions that wait until they are let go on.

    Args:
        slots: vLLM's `--max-loras`.
        token: that every /v1 route asks for; None: none does.
    """

    def __init__(self, *, slots: int = 2, token: str | None = None) -> None:
        self.token = token
        self.workers: dict[int, str] = {}
        self.loads: list[tuple[str, str]] = []
        self.gates: dict[str, asyncio.Event] = {}
        self.asked: list[dict[str, Any]] = []
        self.refuses: str | None = None
        self.fields: dict[str, Any] = {}
        self.scoring = self.most_scoring = 0
        self.refuses_token: int | None = None
        self.cancels_token: int | None = None
        self.models = types.SimpleNamespace(lora_requests={}, base_model_paths=[types.SimpleNamespace(name="base")])
        self.states: dict[str, Any] = {}
        lora = types.SimpleNamespace(max_loras=slots, max_cpu_loras=slots, max_lora_rank=64)
        self.state = types.SimpleNamespace(
            vllm_config=types.SimpleNamespace(lora_config=lora, parallel_config=None),
            openai_serving_models=self.models,
            engine_client=types.SimpleNamespace(output_processor=types.SimpleNamespace(request_states=self.states)),
        )

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        raw = b""
        while True:
            message = await receive()
            raw += message.get("body", b"")
            if not message.get("more_body", False):
                break
        body = json.loads(raw or b"{}")
        wanted = None if self.token is None else f"Bearer {self.token}".encode()
        if wanted and dict(scope["headers"]).get(b"authorization") != wanted and scope["path"].startswith("/v1"):
            if (gate := self.gates.get(body.get("user", ""))) is not None:  # who reads slowly
                await gate.wait()
            await reply(send, 401, {"error": "Unauthorized"})
            return
        await getattr(self, "_" + scope["path"].strip("/").replace("/", "_"))(body, send)

    async def _v1_models(self, body: Any, send: Any) -> None:
        cards = [{"id": name, "object": "model"} for name in ("base", *self.models.lora_requests)]
        await reply(send, 200, {"object": "list", "data": cards})

    async def _v1_load_lora_adapter(self, body: Any, send: Any) -> None:
        if self.refuses is not None:
            await reply(send, 500, {"error": {"message": self.refuses}})
            return
        if (gate := self.gates.get("load")) is not None:
            await gate.wait()
        number = len(self.loads) + 1
        self.loads.append((body["lora_name"], body["lora_path"]))
        self.models.lora_requests[body["lora_name"]] = types.SimpleNamespace(lora_int_id=number)
        self.workers[number] = body["lora_path"]
        await reply(send, 200, "loaded")

    async def _v1_unload_lora_adapter(self, body: Any, send: Any) -> None:
        del self.models.lora_requests[body["lora_name"]]
        await reply(send, 200, "unloaded")

    async def _init_weight_transfer_engine(self, body: Any, send: Any) -> None:
        order = body["init_info"]["adapter"]
        assert order["what"] == "drop"
        assert os.path.isdir(self.workers.pop(order["lora_id"])), "the folder went before the worker let go"
        await reply(send, 200, {})

    async def _v1_completions(self, body: Any, send: Any) -> None:
        self.asked.append(body)
        if body["model"] not in ("base", *self.models.lora_requests):
            await reply(send, 404, {"error": {"message": f"no model {body['model']}"}})
            return
        if body.get("allowed_token_ids") is not None:
            assert "prompt_logprobs" not in body
            self.scoring += 1
            self.most_scoring = max(self.most_scoring, self.scoring)
            if (gate := self.gates.get(f"score {body['allowed_token_ids'][0]}")) is not None:
                await gate.wait()
            self.scoring -= 1
            if body["allowed_token_ids"] == [self.refuses_token]:
                await reply(send, 500, {"error": {"message": "out of memory"}})
                return
            if body["allowed_token_ids"] == [self.cancels_token]:
                raise asyncio.CancelledError
            scores = {"token_logprobs": [-float(token) for token in body["allowed_token_ids"]]}
            await reply(send, 200, {"model": body["model"], "choices": [{"index": 0, "logprobs": scores}]})
            return
        gate = self.gates.get(body.get("user", ""))
        if gate is not None:
            await gate.wait()
        choice = {"index": 0, "text": "x", "token_ids": [1, 2, 3] if body.get("return_token_ids") else None}
        told = {"id": "c", "model": body["model"], "choices": [choice], **self.fields}
        if body.get("stream"):
            await send(
                {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}
            )
            for part in (b"data: " + json.dumps(told).encode(), b"data: [DONE]"):
                await send({"type": "http.response.body", "body": part + b"\n\n", "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        else:
            await reply(send, 200, told)


async def reply(send: Any, status: int, body: Any) -> None:
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", b"application/json")]})
    await send({"type": "http.response.body", "body": json.dumps(body).encode()})


class Client:
    """Requests to an application."""

    def __init__(self, app: Any, vllm: Vllm, *, token: str | None = None) -> None:
        self._app = app
        self._vllm = vllm
        self._token = token

    async def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        headers: tuple[tuple[bytes, bytes], ...] = (),
        ends: bool = True,
    ) -> tuple[int, dict[bytes, bytes], bytes]:
        raw = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        known = [] if self._token is None else [(b"authorization", f"Bearer {self._token}".encode())]
        scope = {
            "type": "http", "method": method, "path": path, "root_path": "", "query_string": b"", "app": self._vllm,
            "headers": [(b"host", b"h"), (b"content-length", str(len(raw)).encode()), *known, *headers],
        }  # fmt: skip
        heard = [{"type": "http.request", "body": raw, "more_body": not ends}]
        out: list[Any] = []

        async def receive() -> Any:
            if heard:
                return heard.pop()
            return await asyncio.Event().wait()

        async def send(message: Any) -> None:
            out.append(message)

        await self._app(scope, receive, send)
        body_out = b"".join(each.get("body", b"") for each in out[1:])
        fields = dict(out[0]["headers"])
        if b"content-length" in fields:
            assert int(fields[b"content-length"]) == len(body_out)
        return out[0]["status"], fields, body_out

    async def complete(self, model: str = "actor", **options: Any) -> dict[str, Any]:
        status, fields, body = await self.ask("POST", "/v1/completions", {"model": model, "prompt": [1], **options})
        assert status == 200, body
        told: dict[str, Any] = json.loads(body)
        told["header"] = fields.get(b"x-weightsync-version", b"").decode()
        return told

    async def order(self, path: str, **message: Any) -> dict[str, Any]:
        status, _, body = await self.ask("POST", path, message)
        assert status == 200, body
        told: dict[str, Any] = json.loads(body)
        return told

    def fill(self, folder: str) -> None:
        """What an engine wants to find in it."""

    async def load(self, number: int, *, model: str = "actor", deadline_s: float = 60.0) -> tuple[int, dict[str, Any]]:
        folder = PrivateFolder(shared=True)
        self.fill(folder.path)
        message = {
            "session": f"{RUN}/{number}#{model}", "model_id": model, "version": {"run_id": RUN, "number": number},
            "model_digest": f"wsd2:{number:032x}", "folder": folder.name, "deadline_s": deadline_s,
        }  # fmt: skip
        status, _, body = await self.ask("POST", LOAD_PATH, message)
        if status == 200:
            folder.hand_over()
        else:
            folder.close()
        return status, json.loads(body)

    async def commit(self, number: int, *, model: str = "actor") -> dict[str, Any]:
        return await self.order(COMMIT_PATH, session=f"{RUN}/{number}#{model}")

    async def serve(self, number: int, *, model: str = "actor") -> None:
        status, told = await self.load(number, model=model)
        assert status == 200, told
        await self.commit(number, model=model)

    async def state(self) -> dict[str, Any]:
        told: dict[str, Any] = json.loads((await self.ask("GET", STATE_PATH))[2])
        return told


@pytest.fixture(autouse=True)
def updating(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(UPDATING_VARIABLE, "True")
    yield
    reclaim_dead()


def run(test: Callable[[Client, Vllm], Awaitable[None]], *, expected: str = "", **options: Any) -> None:
    async def body() -> None:
        vllm = Vllm(**options)
        await test(Client(LoraMiddleware(vllm, expected=expected), vllm, token=options.get("token")), vllm)

    asyncio.run(asyncio.wait_for(body(), 30))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.002)


def test_a_request_under_way_ends_on_its_version_and_new_ones_are_given_the_next() -> None:
    """The old one is unloaded, out of the list, the worker and its folder, when its last request has ended, and not
    before. Seen red with a commit that unloads at once."""

    async def body(there: Client, vllm: Vllm) -> None:
        await there.serve(1)
        vllm.gates["slow"] = asyncio.Event()
        slow = asyncio.ensure_future(there.complete(user="slow"))
        await until(lambda: len(vllm.asked) == 1)
        await there.serve(2)
        told = await there.complete()
        assert (told["model"], told["header"]) == ("actor", f"{RUN}/2")
        assert told[FIELD] == [{"index": 0, "spans": [{"version": f"{RUN}/2", "start": 0, "end": 3}]}]
        old_folder = vllm.loads[0][1]
        for _ in range(100):  # turns in which it could be unloaded
            await asyncio.sleep(0)
        assert sorted(vllm.workers) == [1, 2]
        assert os.path.isdir(old_folder)
        told_of = (await there.state())["adapters"]
        assert [(each["version"]["number"], each["state"], each["in_flight"]) for each in told_of] == [
            (1, "retired", 1), (2, "current", 0),
        ]  # fmt: skip
        vllm.gates["slow"].set()
        assert (await slow)["header"] == f"{RUN}/1"
        await until(lambda: not os.path.isdir(old_folder))
        assert list(vllm.workers) == [2]
        assert len(vllm.models.lora_requests) == 1
        assert [each["version"]["number"] for each in (await there.state())["adapters"]] == [2]

    run(body)


def test_an_answer_that_outlives_its_request_keeps_its_adapter() -> None:
    async def body(there: Client, vllm: Vllm) -> None:
        await there.serve(1)
        vllm.states["background"] = types.SimpleNamespace(lora_name=vllm.loads[0][0])
        await there.serve(2)
        for _ in range(100):  # turns in which it could be unloaded
            await asyncio.sleep(0)
        assert sorted(vllm.workers) == [1, 2]
        vllm.states.clear()
        await until(lambda: list(vllm.workers) == [2])

    run(body)


def test_an_answer_that_goes_on_holds_up_no_load_that_has_a_slot() -> None:
    async def body(there: Client, vllm: Vllm) -> None:
        await there.serve(1)
        vllm.states["background"] = types.SimpleNamespace(lora_name=vllm.loads[0][0])
        await there.serve(2)
        await asyncio.wait_for(there.serve(3), 5)
        await until(lambda: sorted(vllm.workers) == [1, 3])
        vllm.states.clear()
        await until(lambda: list(vllm.workers) == [3])

    run(body, slots=3)


def test_one_that_is_being_unloaded_is_given_no_request() -> None:
    """Under vLLM's own name for it, which its metrics tell: vLLM would look for a folder that is gone, and end."""

    async def body(there: Client, vllm: Vllm) -> None:
        await there.serve(1)
        name = vllm.loads[0][0]
        assert (await there.complete(name))["header"] == f"{RUN}/1"
        vllm.states["background"] = types.SimpleNamespace(lora_name=name)
        await there.serve(2)
        num_asked = len(vllm.asked)
        status, _, raw = await there.ask("POST", "/v1/completions", {"model": name, "prompt": [1]})
        assert (status, json.loads(raw)["error"]["type"]) == (503, "NotServingError")
        assert len(vllm.asked) == num_asked
        vllm.states.clear()
        await until(lambda: list(vllm.workers) == [2])

    run(body)


def test_one_that_is_staged_is_given_no_clients_request() -> None:
    """It is not proved yet; the canary alone asks it."""

    async def body(there: Client, vllm: Vllm) -> None:
        await there.serve(1)
        await there.load(2)
        name = vllm.loads[1][0]
        status, _, raw = await there.ask("POST", "/v1/completions", {"model": name, "prompt": [1]})
        assert (status, json.loads(raw)["error"]["type"]) == (503, "NotServingError")
        assert not vllm.asked
        await there.order(SCORE_PATH, session=f"{RUN}/2#actor", tokens=[5, 6, 7])
        await there.commit(2)
        assert (await there.complete(name))["header"] == f"{RUN}/2"

    run(body)


def test_a_stranger_whose_request_is_the_last_keeps_nothing() -> None:
    """Without vLLM's key it may not unload: what leaves is unloaded in the name of the service."""

    async def body(there: Client, vllm: Vllm) -> None:
        await there.serve(1)
        vllm.gates["slow"] = asyncio.Event()
        request = {"model": "actor", "prompt": [1], "user": "slow"}
        refused = asyncio.ensure_future(Client(there._app, vllm).ask("POST", "/v1/completions", request))
        await asyncio.sleep(0)
        await there.serve(2)
        assert [each["in_flight"] for each in (await there.state())["adapters"]] == [1, 0]
        vllm.gates["slow"].set()
        assert (await refused)[0] == 401
        await until(lambda: list(vllm.workers) == [2])

    run(body, token="secret")


def test_what_is_being_loaded_is_not_committed() -> None:
    async def body(there: Client, vllm: Vllm) -> None:
        await there.serve(1)
        vllm.gates["load"] = asyncio.Event()
        loading = asyncio.ensure_future(there.load(2))
        async with asyncio.timeout(10):
            while len((await there.state())["adapters"]) < 2:
                await asyncio.sleep(0.002)
        status, _, raw = await there.ask("POST", COMMIT_PATH, {"session": f"{RUN}/2#actor"})
        assert (status, json.loads(raw)["error"]) == (409, "StateError")
        assert (await there.complete())["header"] == f"{RUN}/1"
        vllm.gates["load"].set()
        assert (await loading)[0] == 200
        await there.commit(2)
        assert (await there.complete())["header"] == f"{RUN}/2"

    run(body)


def test_full_slots_are_refused_and_the_old_adapter_is_served_on() -> None:
    async def body(there: Client, vllm: Vllm) -> None:
        vllm.gates["slow"] = asyncio.Event()
        await there.serve(1)
        slow = asyncio.ensure_future(there.complete(user="slow"))
        await until(lambda: len(vllm.asked) == 1)
        await there.serve(2)
        status, told = await there.load(3)
        assert (status, told["error"]) == (503, "NoSlotError")
        assert "--max-loras" in told["message"]
        assert "retired, 1 requests" in told["message"]
        assert (await there.complete())["header"] == f"{RUN}/2"
        vllm.gates["slow"].set()
        await slow
        await there.serve(3)
        assert (await there.complete())["header"] == f"{RUN}/3"

    run(body)


def test_adapters_of_others_take_slots_too() -> None:
    async def body(there: Client, vllm: Vllm) -> None:
        vllm.models.lora_requests.update({"x": None, "y": None})
        status, told = await there.load(1)
        assert (status, told["error"]) == (503, "NoSlotError")
        assert "2 of others" in told["message"]

    run(body)


def test_what_vllm_refuses_leaves_nothing() -> None:
    async def body(there: Client, vllm: Vllm) -> None:
        await there.serve(1)
        vllm.refuses = "LoRA rank 128 is greater than max_lora_rank 64."
        status, told = await there.load(2)
        assert status == 500
        assert vllm.refuses in told["message"]
        assert [each["version"]["number"] for each in (await there.state())["adapters"]] == [1]
        assert (await there.complete())["header"] == f"{RUN}/1"

    run(body)


def test_a_staged_one_goes_when_it_is_dropped_or_its_time_is_over_or_another_comes() -> None:
    async def body(there: Client, vllm: Vllm) -> None:
        await there.serve(1)
        await there.load(2)
        await there.order(DROP_PATH, session=f"{RUN}/2#actor")
        await until(lambda: list(vllm.workers) == [1])
        await there.load(3, deadline_s=0.3)
        await until(lambda: list(vllm.workers) == [1])
        status, _, body = await there.ask("POST", COMMIT_PATH, {"session": f"{RUN}/3#actor"})
        assert (status, json.loads(body)["error"]) == (409, "TransferAbortedError")
        await there.load(4)
        await there.load(5)
        assert [each["version"]["number"] for each in (await there.state())["adapters"]] == [1, 5]
        assert (await there.complete())["header"] == f"{RUN}/1"

    run(body)


def test_two_models_and_the_base_are_told_apart() -> None:
    async def body(there: Client, vllm: Vllm) -> None:
        await there.serve(1)
        await there.serve(7, model="critic")
        assert (await there.complete("critic"))["header"] == f"{RUN}/7"
        assert (await there.complete())["header"] == f"{RUN}/1"
        base = await there.complete("base")
        assert (base["header"], base["model"]) == ("", "base")
        assert FIELD not in base
        listed = json.loads((await there.ask("GET", "/v1/models"))[2])
        assert [card["id"] for card in listed["data"]] == ["base", "actor", "critic"]

    run(body, slots=4)


def test_the_bases_own_name_is_no_adapters() -> None:
    async def body(there: Client, vllm: Vllm) -> None:
        status, told = await there.load(1, model="base")
        assert (status, told["error"]) == (422, "ConfigError")
        assert not vllm.loads

    run(body)


def test_a_stream_says_its_version_and_what_is_told_of_the_base_is_told_apart() -> None:
    async def body(there: Client, vllm: Vllm) -> None:
        await there.serve(1)
        _, fields, raw = await there.ask(
            "POST", "/v1/completions", {"model": "actor", "prompt": [1], "stream": True, "return_token_ids": True}
        )
        assert fields[b"x-weightsync-version"] == f"{RUN}/1".encode()
        events = [json.loads(each[6:]) for each in raw.decode().split("\n\n") if each.startswith("data: {")]
        assert [each["model"] for each in events] == ["actor", "actor"]
        assert events[-1][FIELD] == [{"index": 0, "spans": [{"version": f"{RUN}/1", "start": 0, "end": 3}]}]
        vllm.fields = {FIELD: [{"index": 0, "spans": [{"version": "b/9", "start": 0, "end": 3}]}]}
        told = await there.complete()
        assert told[BASE_FIELD] == vllm.fields[FIELD]
        assert told[FIELD][0]["spans"][0]["version"] == f"{RUN}/1"

    run(body)


def test_a_model_that_is_expected_is_refused_until_it_has_an_adapter() -> None:
    async def body(there: Client, vllm: Vllm) -> None:
        request = {"model": "actor", "prompt": [1]}
        status, fields, raw = await there.ask("POST", "/v1/completions", request)
        assert (status, fields[b"retry-after"]) == (503, b"1")
        assert json.loads(raw)["error"]["type"] == "NotServingError"
        assert (await there.ask("POST", "/v1/completions", {**request, "model": "other"}))[0] == 404
        await there.serve(1)
        assert (await there.complete())["header"] == f"{RUN}/1"

    run(body, expected="actor, critic")


def test_a_request_that_can_not_be_read_is_refused_and_reaches_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Too long, too many at once, never complete, nested without end. Seen red where such a one passed unread."""
    monkeypatch.setattr(lora_requests, "_MAX_BYTES", 10_000)
    monkeypatch.setattr(lora_requests, "_MAX_COMING_BYTES", 30_000)
    monkeypatch.setattr(lora_requests, "_READ_S", 0.3)

    async def body(there: Client, vllm: Vllm) -> None:
        await there.serve(1)
        path, plain = "/v1/completions", {"model": "actor", "prompt": [1]}
        assert (await there.ask("POST", path, {**plain, "user": "x" * 10_000}))[0] == 422
        nested = json.dumps(plain).encode()[:-1] + b', "user": ' + b"[" * 4000 + b"]" * 4000 + b"}"
        assert (await there.ask("POST", path, nested))[0] == 422
        held = [asyncio.ensure_future(there.ask("POST", path, b" " * 9000, ends=False)) for _ in range(4)]
        assert sorted([(await each)[0] for each in held]) == [503, 504, 504, 504], "no room for one; their time is over"
        assert (await there.complete())["header"] == f"{RUN}/1", "and their room is free"

    run(body)


def test_a_request_that_was_passed_on_is_not_kept_while_it_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen red: requests for the base that were generating took the room of those that came."""
    monkeypatch.setattr(lora_requests, "_MAX_COMING_BYTES", 30_000)

    async def body(there: Client, vllm: Vllm) -> None:
        await there.serve(1)
        vllm.gates["long"] = asyncio.Event()
        long = {"model": "base", "prompt": [1], "user": "long", "suffix": "x" * 29_000}
        answered = [asyncio.ensure_future(there.ask("POST", "/v1/completions", long)) for _ in range(3)]
        async with asyncio.timeout(20):
            while len(vllm.asked) < 3:
                await asyncio.sleep(0)
        assert (await there.complete(suffix="x" * 29_000))["header"] == f"{RUN}/1"
        vllm.gates["long"].set()
        assert [(await each)[0] for each in answered] == [200] * 3

    run(body)


def test_what_fails_in_the_engine_is_not_answered_by_the_middleware(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answer may have begun."""

    async def body(there: Client, vllm: Vllm) -> None:
        async def fails(body: Any, send: Any) -> None:
            raise WeightSyncError("of the engine's own")

        monkeypatch.setattr(vllm, "_v1_completions", fails)
        with pytest.raises(WeightSyncError, match="of the engine's own"):
            await there.ask("POST", "/v1/completions", {"model": "base", "prompt": [1]})

    run(body)


def test_the_canary_is_asked_of_a_staged_adapter() -> None:
    async def body(there: Client, vllm: Vllm) -> None:
        await there.serve(1)
        await there.load(2)
        told = await there.order(SCORE_PATH, session=f"{RUN}/2#actor", tokens=[5, 6, 7])
        assert told["logprobs"] == [-6.0, -7.0]
        assert vllm.asked[-1]["model"] == f"actor@{RUN}/2#actor"

    run(body)


def test_the_canarys_tokens_are_asked_for_together_and_no_more_than_a_few() -> None:
    """Whichever is answered first. One after the other took as many steps of the engine as the prompt has tokens."""

    async def body(there: Client, vllm: Vllm) -> None:
        await there.load(1)
        vllm.gates["score 1"] = asyncio.Event()
        asked = asyncio.create_task(there.order(SCORE_PATH, session=f"{RUN}/1#actor", tokens=list(range(41))))
        await until(lambda: len(vllm.asked) == 40)
        assert not asked.done()
        vllm.gates["score 1"].set()
        assert (await asked)["logprobs"] == [-float(token) for token in range(1, 41)]
        assert 2 <= vllm.most_scoring <= 16
        assert sorted((tuple(each["prompt"]), *each["allowed_token_ids"]) for each in vllm.asked) == [
            (tuple(range(token)), token) for token in range(1, 41)
        ]

    run(body)


def test_a_canary_that_fails_has_nothing_under_way_any_more() -> None:
    """Else its adapter would be dropped under a request: vLLM ends where a worker finds the folder gone. Seen red where
    the first failure was told at once."""

    async def body(there: Client, vllm: Vllm) -> None:
        await there.load(1)
        vllm.refuses_token, vllm.gates["score 9"] = 7, asyncio.Event()
        order = {"session": f"{RUN}/1#actor", "tokens": list(range(41))}
        asked = asyncio.create_task(there.ask("POST", SCORE_PATH, order))
        await until(lambda: vllm.scoring == 1 and len(vllm.asked) > 9)
        for _ in range(20):
            await asyncio.sleep(0)
        assert not asked.done()
        assert (await there.state())["adapters"][0]["in_flight"] == 1
        vllm.gates["score 9"].set()
        status, _, said = await asked
        assert (status >= 400, b"out of memory" in said) == (True, True)
        assert len(vllm.asked) < 40, "the others are not asked for"
        assert ((await there.state())["adapters"][0]["in_flight"], vllm.scoring) == (0, 0)

    run(body)


def test_a_canarys_token_whose_call_was_cancelled_in_the_server_has_no_score() -> None:
    """A group of tasks passes over one that ended so. Seen red: it was told as 0.0, a probability of one."""

    async def body(there: Client, vllm: Vllm) -> None:
        await there.load(1)
        vllm.cancels_token = 7
        order = {"session": f"{RUN}/1#actor", "tokens": list(range(11))}
        status, _, said = await there.ask("POST", SCORE_PATH, order)
        assert (status >= 400, b"9 of 10" in said) == (True, True), said

    run(body)


def test_who_may_not_use_vllm_gives_no_orders() -> None:
    async def body(there: Client, vllm: Vllm) -> None:
        await there.serve(1)
        stranger = Client(there._app, vllm)
        for method, path in (("GET", STATE_PATH), ("POST", DROP_PATH), ("POST", COMMIT_PATH)):
            status, _, raw = await stranger.ask(method, path, {"session": "x"})
            assert (status, json.loads(raw)["error"]) == (401, "AuthError")
        page = ((b"origin", b"http://elsewhere"),)
        status, _, raw = await there.ask("POST", DROP_PATH, {"session": "x"}, headers=page)
        assert (status, json.loads(raw)["error"]) == (403, "ForbiddenError")

    run(body, token="secret")


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"session": 1}', b'{"session": "a\\u0000b"}'])
def test_an_order_that_is_none_is_refused(body: bytes) -> None:
    async def said_to(there: Client, vllm: Vllm, path: str) -> tuple[int, Any]:
        scope = {"type": "http", "method": "POST", "path": path, "headers": [], "app": vllm}
        out: list[Any] = []

        async def receive() -> Any:
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Any) -> None:
            out.append(message)

        await there._app(scope, receive, send)
        return out[0]["status"], json.loads(out[1]["body"])

    async def ask(there: Client, vllm: Vllm) -> None:
        for path in (LOAD_PATH, SCORE_PATH, COMMIT_PATH, DROP_PATH, f"{STATE_PATH}/other"):
            status, said = await said_to(there, vllm, path)
            assert status in (200, 409, 422), said
            assert status != 200 or path == DROP_PATH

    run(ask)


def test_a_folder_that_is_no_private_one_is_not_loaded() -> None:
    async def body(there: Client, vllm: Vllm) -> None:
        message = {
            "session": "s", "model_id": "actor", "version": {"run_id": RUN, "number": 1}, "model_digest": None,
            "folder": "../../etc", "deadline_s": 5.0,
        }  # fmt: skip
        status, _, raw = await there.ask("POST", LOAD_PATH, message)
        assert json.loads(raw)["error"] == "SharedMemoryError", status
        assert not vllm.loads

    run(body)


def test_a_lease_stands_outside_of_it_and_lets_its_orders_pass() -> None:
    """Else a request would be given its adapter before it waits for a set of models."""
    assert {STATE_PATH} <= UNGUARDED["GET"]
    assert {LOAD_PATH, SCORE_PATH, COMMIT_PATH, DROP_PATH} <= UNGUARDED["POST"]

    async def start(app: Any) -> list[Any]:
        out: list[Any] = []

        async def receive() -> Any:
            return {"type": "lifespan.startup"}

        async def send(message: Any) -> None:
            out.append(message)

        await app({"type": "lifespan"}, receive, send)
        return out

    vllm = Vllm()
    wrong = LoraMiddleware(LeaseMiddleware(vllm, path="/nonexistent"))
    assert asyncio.run(start(wrong))[0]["type"] == "lifespan.startup.failed"
    assert asyncio.run(start(LoraMiddleware(vllm))) == []


def test_a_table_counts_requests_once() -> None:
    assert AdapterTable().begin("actor") is None
    assert not AdapterTable().over()
