"""SGLangLoraMiddleware around a small application that loads and answers as SGLang's server does.

tests/engines/test_lora_sglang.py runs it in a real one.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import types
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.unit.engine.vllm.test_lora_middleware import RUN, Client, reply, until
from tests.unit.handles.test_lora_folder import manifest
from weightsync.engine.sglang_lora import calls
from weightsync.engine.sglang_lora.middleware import SGLangLoraMiddleware
from weightsync.engine.sglang_lora.worker import MARK
from weightsync.engine.vllm import lora_calls
from weightsync.errors import BusyError, DigestMismatchError
from weightsync.handles.lora_messages import MANIFEST_FILE, SCORE_PATH, STATE_PATH
from weightsync.memory import reclaim_dead
from weightsync.net.messages import encode
from weightsync.types import Base

TOKEN = "admin"
DIGEST = f"wsd2:{7:032x}"


class SGLang:
    """An ASGI application: SGLang's routes for adapters, and generations that wait until they are let go on; and its
    tokenizer manager.

    Args:
        per_batch: `--max-loras-per-batch`.
        loaded: `--max-loaded-loras`.
        key: `--admin-api-key`.
        client_key: `--api-key`.
    """

    def __init__(
        self, *, per_batch: int = 3, loaded: int | None = None, key: str | None = None, client_key: str | None = None
    ) -> None:
        self.refs: dict[str, Any] = {}
        self.gates: dict[str, asyncio.Event] = {}
        self.asked: list[dict[str, Any]] = []
        self.refuses: str | None = None
        self.proves = True
        self.loading: list[str] = []
        self.served_model_name = "base"
        self.counts: dict[str, Any] = {}
        self.lora_registry = types.SimpleNamespace(get_all_adapters=lambda: dict(self.refs), _counters=self.counts)
        self.server_args = types.SimpleNamespace(
            enable_lora=True, dp_size=1, tp_size=1, pp_size=1, max_loras_per_batch=per_batch, max_loaded_loras=loaded,
            max_lora_rank=16, api_key=client_key, admin_api_key=key, model_path="/nonexistent",
            weight_version="default",
        )  # fmt: skip

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = json.loads((await receive()).get("body") or b"{}")
        await getattr(self, "_" + scope["path"].strip("/").replace("/", "_"))(body, send)

    async def _load_lora_adapter(self, body: Any, send: Any) -> None:
        assert body["pinned"] is True
        if (gate := self.gates.get("load")) is not None:
            self.loading.append(body["lora_name"])
            await gate.wait()
            self.loading.pop()
        if self.refuses is not None:
            await reply(send, 400, {"success": False, "error_message": self.refuses})
            return
        if self.proves:
            Path(body["lora_path"], "weightsync_proved.1").touch()
        name = body["lora_name"]
        self.refs[name] = types.SimpleNamespace(pinned=True, path=body["lora_path"], lora_id=name)
        await reply(send, 200, {"success": True})

    async def _unload_lora_adapter(self, body: Any, send: Any) -> None:
        ref = self.refs.pop(body["lora_name"], None)
        assert ref is None or os.path.isdir(ref.path), "the folder went first"
        told = {"success": ref is not None, "error_message": "" if ref else "LoRA does not exist"}
        await reply(send, 200 if ref else 400, told)

    async def _generate(self, body: Any, send: Any) -> None:
        self.asked.append(body)
        if (gate := self.gates.get(body.get("rid", ""))) is not None:
            await gate.wait()
        meta = {
            "completion_tokens": 3, "weight_version": "default", "weight_versions": [], "input_token_logprobs": [],
        }  # fmt: skip
        if body.get("return_logprob"):
            meta["input_token_logprobs"] = [
                [None, 0, None],
                *([-float(each), each, None] for each in body["input_ids"][1:]),
            ]
        told = {"text": "x", "meta_info": meta}
        if not body.get("stream"):
            await reply(send, 200, [told, told] if isinstance(body.get("input_ids", [0])[0], list) else told)
            return
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        event = b"data: " + json.dumps(told).encode() + b"\n\n"
        for part in (event[:9], event[9:], b"data: [DONE]\n\n"):
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _v1_score(self, body: Any, send: Any) -> None:
        self.asked.append(body)
        await reply(send, 200, {"model": body["model"], "scores": [0.5]})  # by the base, whatever is named

    _vertex_generate = _v1_responses = _classify = _v1_score
    _v1_tokenize = _v1_score

    async def _v1_completions(self, body: Any, send: Any) -> None:
        self.asked.append(body)
        await reply(send, 200, {"model": body["model"], "choices": [{"text": "of base"}]})


class SGLangClient(Client):
    """Requests to it."""

    def fill(self, folder: str) -> None:
        Path(folder, MANIFEST_FILE).write_bytes(encode(manifest()))

    async def generate(self, lora_path: Any = "actor", **options: Any) -> dict[str, Any]:
        body = {"input_ids": [1], "lora_path": lora_path, **options}
        status, fields, answer = await self.ask("POST", "/generate", body)
        assert status == 200, answer
        return {"told": json.loads(answer), "header": fields.get(b"x-weightsync-version", b"").decode()}


@pytest.fixture(autouse=True)
def keys(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """SGLang's own rule for its keys, which is not installed here."""

    def decide(
        *, authorization_header: str | None, api_key: str | None, admin_api_key: str | None, auth_level: str, **_: Any
    ) -> Any:
        assert auth_level in ("admin", "normal")
        if auth_level == "normal":
            return types.SimpleNamespace(allowed=not api_key or authorization_header == f"Bearer {api_key}")
        return types.SimpleNamespace(allowed=not admin_api_key or authorization_header == f"Bearer {admin_api_key}")

    auth = types.ModuleType("sglang.srt.utils.auth")
    auth.AuthLevel = types.SimpleNamespace(ADMIN_OPTIONAL="admin", NORMAL="normal")  # type: ignore[attr-defined]
    auth.decide_request_auth = decide  # type: ignore[attr-defined]
    for name in ("sglang", "sglang.srt", "sglang.srt.utils"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "sglang.srt.utils.auth", auth)
    yield
    reclaim_dead()


def run(
    test: Callable[[SGLangClient, SGLang], Awaitable[None]],
    *,
    token: str | None = None,
    expected: str = "",
    **options: Any,
) -> None:
    async def body() -> None:
        sglang = SGLang(**options)
        app = SGLangLoraMiddleware(sglang, sglang, expected=expected)
        await test(SGLangClient(app, sglang, token=token), sglang)  # type: ignore[arg-type]

    asyncio.run(asyncio.wait_for(body(), 30))


def test_a_generation_under_way_ends_on_its_version_and_new_ones_are_given_the_next() -> None:
    async def body(there: SGLangClient, sglang: SGLang) -> None:
        await there.serve(1)
        sglang.gates["slow"] = asyncio.Event()
        slow = asyncio.ensure_future(there.generate(rid="slow"))
        await until(lambda: len(sglang.asked) == 1)
        await there.serve(2)
        told = await there.generate()
        assert told["header"] == f"{RUN}/2"
        meta = told["told"]["meta_info"]
        assert meta["weight_version"] == f"{RUN}/2"
        assert meta["weight_versions"] == [{"version": f"{RUN}/2", "start": 0, "end": 3}]
        assert (meta["base_weight_version"], meta["base_weight_versions"]) == ("default", [])
        assert [each["lora_path"] for each in sglang.asked] == [f"actor@{RUN}/{n}#actor" for n in (1, 2)]
        for _ in range(100):  # turns in which it could be unloaded
            await asyncio.sleep(0)
        assert len(sglang.refs) == 2
        sglang.gates["slow"].set()
        assert (await slow)["header"] == f"{RUN}/1"
        await until(lambda: list(sglang.refs) == [f"actor@{RUN}/2#actor"])

    run(body)


def test_events_and_batches_say_the_version_each() -> None:
    async def body(there: SGLangClient, sglang: SGLang) -> None:
        await there.serve(1)
        _, fields, raw = await there.ask("POST", "/generate", {"input_ids": [1], "lora_path": "actor", "stream": True})
        first, done, rest = raw.split(b"\n\n")
        assert json.loads(first.removeprefix(b"data: "))["meta_info"]["weight_version"] == f"{RUN}/1"
        assert (done, rest, fields[b"x-weightsync-version"]) == (b"data: [DONE]", b"", f"{RUN}/1".encode())
        told = await there.generate(["actor", "actor"], input_ids=[[1], [2]])
        assert [each["meta_info"]["weight_version"] for each in told["told"]] == [f"{RUN}/1"] * 2

    run(body)


def test_openai_names_reach_sglang_as_base_and_adapter_and_come_back() -> None:
    async def body(there: SGLangClient, sglang: SGLang) -> None:
        await there.serve(1)
        for request in ({"model": "actor"}, {"model": "base:actor"}, {"model": "base", "lora_path": "actor"}):
            told = await there.complete(**request)
            assert (told["model"], told["header"]) == (request["model"], f"{RUN}/1")
            assert sglang.asked[-1]["model"] == f"base:actor@{RUN}/1#actor"
            assert "lora_path" not in sglang.asked[-1]
        assert (await there.complete("base"))["header"] == ""
        assert (await there.generate("another"))["header"] == ""

    run(body)


@pytest.mark.parametrize("path", ["/v1/score", "/v1/responses", "/vertex_generate", "/classify"])
@pytest.mark.parametrize("body", [{"model": "actor"}, {"model": "base:actor"}, {"model": "base", "lora_path": "actor"}])
def test_what_sglang_would_answer_by_its_base_is_refused_for_an_adapter(path: str, body: dict[str, Any]) -> None:
    """Seen in a real one: bit for bit the base's scores, with the adapter's version in the header."""

    async def test(there: SGLangClient, sglang: SGLang) -> None:
        await there.serve(1)
        status, fields, _ = await there.ask("POST", path, body)
        assert (status, b"x-weightsync-version" in fields, sglang.asked) == (422, False, [])
        assert (await there.ask("POST", path, {"model": "base"}))[0] == 200
        assert (await there.ask("POST", "/v1/tokenize", {"model": "actor"}))[0] == 200, "of no version"

    run(test)


def test_sglangs_own_name_for_an_adapter_gets_past_nobody() -> None:
    """By PUT, written with escapes, in UTF-16, behind any prefix, beside another key, or in a batch."""

    async def body(there: SGLangClient, sglang: SGLang) -> None:
        await there.serve(1)
        await there.load(2)
        served, staged = (f"actor@{RUN}/{number}#actor" for number in (1, 2))
        for name, status in ((served, 200), (staged, 503)):
            plain = {"input_ids": [1], "lora_path": name}
            escaped = json.dumps(plain).replace("lora_path", "lora\\u005fpath").encode()
            wide = json.dumps(plain).encode("utf-16")
            for method, asked in (
                ("POST", plain), ("PUT", plain), ("POST", escaped), ("POST", wide),
                ("POST", {**plain, "vllm_xargs": 1}), ("POST", {**plain, "lora_path": f"x:{name}"}),
            ):  # fmt: skip
                got, fields, _ = await there.ask(method, "/generate", asked)
                assert (got, fields.get(b"x-weightsync-version")) == (
                    status, f"{RUN}/1".encode() if status == 200 else None,
                ), asked  # fmt: skip
            for mixed in ([name, None], [name, "theirs"], [served, "actor"]):
                assert (await there.ask("POST", "/generate", {**plain, "lora_path": mixed}))[0] == 422
            completion = {"model": f"x:{name}", "prompt": [1]}
            assert (await there.ask("POST", "/v1/completions", completion))[0] == status
        assert all(staged not in json.dumps(each) for each in sglang.asked)

    run(body)


def test_who_has_no_key_is_not_read() -> None:
    async def body(there: SGLangClient, sglang: SGLang) -> None:
        status, _, _ = await there.ask("POST", "/generate", b" " * 1000, ends=False)
        assert status == 401

    run(body, client_key="key")


def test_a_load_that_takes_too_long_ends_by_itself_and_its_reply_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen with SGLang's own communicator: behind a load that was cancelled each reply went to the next order."""
    monkeypatch.setattr(lora_calls, "_CALL_S", 0.05)

    async def body(there: SGLangClient, sglang: SGLang) -> None:
        await there.serve(1)
        sglang.gates["load"] = asyncio.Event()
        for number in (2, 3):
            status, told = await there.load(number, deadline_s=1.0)
            assert (status, told["error"]) == (504, "DeadlineExceededError"), told
            assert len(sglang.loading) == 1, "it goes on; one at a time"
        sglang.gates["load"].set()
        await until(lambda: list(sglang.refs) == [f"actor@{RUN}/1#actor"])
        sglang.gates.clear()
        await there.serve(4)
        assert (await there.generate())["header"] == f"{RUN}/4"

    run(body, per_batch=5)


def test_an_answer_that_sglang_still_counts_holds_up_no_load() -> None:
    """Its unload waits for such a one under the lock of all loads."""

    async def body(there: SGLangClient, sglang: SGLang) -> None:
        await there.serve(1)
        old, number = f"actor@{RUN}/1#actor", [1]
        sglang.counts[old] = types.SimpleNamespace(value=lambda: number[0])
        await there.serve(2)
        await there.serve(3)
        assert old in sglang.refs
        number[0] = 0
        await until(lambda: list(sglang.refs) == [f"actor@{RUN}/3#actor"])

    run(body, per_batch=5)


def test_before_it_has_an_adapter_a_model_that_is_expected_is_refused() -> None:
    async def body(there: SGLangClient, sglang: SGLang) -> None:
        status, fields, _ = await there.ask("POST", "/generate", {"input_ids": [1], "lora_path": "actor"})
        assert (status, fields[b"retry-after"]) == (503, b"1")
        assert not sglang.asked

    run(body, expected="actor")


def test_the_base_has_a_place_of_each_batch_and_pinned_adapters_of_others_have_theirs() -> None:
    async def body(there: SGLangClient, sglang: SGLang) -> None:
        sglang.refs["theirs"] = types.SimpleNamespace(pinned=True)
        sglang.refs["passing"] = types.SimpleNamespace(pinned=False)
        await there.serve(1)
        state = await there.state()
        assert (state["max_loras"], state["others"], state["max_lora_rank"]) == (2, 1, 16)
        status, told = await there.load(2)
        assert (status, told["error"]) == (503, "NoSlotError"), told
        assert "--max-loras-per-batch" in told["message"]
        del sglang.refs["theirs"]
        await there.serve(2)

    run(body)


def test_a_slot_that_comes_free_while_a_load_waits_is_seen() -> None:
    """What is pinned is read anew at each look."""

    async def body(there: SGLangClient, sglang: SGLang) -> None:
        await there.serve(1)
        for number in (2, 3):  # 3 takes the place of 2, which is unloaded first
            status, told = await there.load(number)
            assert status == 200, told

    run(body, per_batch=3)


def test_sglang_evicts_nobody_for_an_adapter_of_ours() -> None:
    """`--max-loaded-loras`: with all of them loaded SGLang would end the one that was used least lately."""

    async def body(there: SGLangClient, sglang: SGLang) -> None:
        for name in ("one", "two"):
            sglang.refs[name] = types.SimpleNamespace(pinned=False)
        assert (await there.state())["max_loras"] == 1
        await there.serve(1)
        assert (await there.load(2))[0] == 503

    run(body, per_batch=8, loaded=3)


def test_what_a_worker_says_is_typed_again_and_sglangs_own_words_stay() -> None:
    async def body(there: SGLangClient, sglang: SGLang) -> None:
        for words, error in (
            (
                MARK + json.dumps(DigestMismatchError("other bits", parameter="q").to_dict()) + " | more",
                "DigestMismatchError",
            ),
            ("rank 8 is incompatible with the current LoRA memory pool configuration", "ConfigError"),
            ("DoRA", "EngineError"),
        ):
            sglang.refuses = words
            _, told = await there.load(1)
            assert told["error"] == error, told
            assert not (await there.state())["adapters"]

    run(body)


def test_a_checkpoint_is_read_beside_the_loop_and_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen red where the loop itself waits for the reader, and where nobody looks at a deadline."""
    asked = []

    class Reading:
        def equals(self, digest: str) -> bool:
            with pytest.raises(RuntimeError, match="no running event loop"):
                asyncio.get_running_loop()
            asked.append(digest)
            raise BusyError("it is being read")

    monkeypatch.setattr(calls, "_READ_S", 0.3)
    monkeypatch.setitem(calls._checkpoints, "/nonexistent", Reading())  # type: ignore[misc]

    plain = manifest()
    assert plain.adapter is not None
    bound = msgspec.structs.replace(plain.adapter, base=Base(model_id="base", model_digest=DIGEST))
    monkeypatch.setattr(
        SGLangClient, "fill",
        lambda _, folder: Path(folder, MANIFEST_FILE).write_bytes(
            encode(msgspec.structs.replace(plain, adapter=bound))
        ),
    )  # fmt: skip

    async def body(there: SGLangClient, sglang: SGLang) -> None:
        _, told = await there.load(1)
        assert told["error"] == "DeadlineExceededError", told
        assert set(asked) == {DIGEST}
        assert not (await there.state())["adapters"]

    run(body)


def test_workers_without_the_plugin_prove_nothing_and_it_is_said() -> None:
    async def body(there: SGLangClient, sglang: SGLang) -> None:
        sglang.proves = False
        _, told = await there.load(1)
        assert "0 of SGLang's 1 workers" in told["adapters"][0]["unprovable"]
        sglang.proves = True
        _, told = await there.load(2)
        assert told["adapters"][-1].get("unprovable") is None

    run(body)


def test_the_canary_is_one_generation_by_the_staged_adapter() -> None:
    async def body(there: SGLangClient, sglang: SGLang) -> None:
        await there.load(1)
        told = await there.order(SCORE_PATH, session=f"{RUN}/1#actor", tokens=[4, 5, 6])
        assert told["logprobs"] == [-5.0, -6.0]
        assert sglang.asked[-1]["lora_path"] == f"actor@{RUN}/1#actor"
        status, _, _ = await there.ask("POST", "/generate", {"input_ids": [1], "lora_path": f"actor@{RUN}/1#actor"})
        assert status == 503, "a staged adapter answers no client"

    run(body)


@pytest.mark.parametrize(("token", "status"), [(None, 401), ("wrong", 401), (TOKEN, 200)])
def test_orders_need_the_key_that_loads_need(token: str | None, status: int) -> None:
    async def body(there: SGLangClient, sglang: SGLang) -> None:
        assert (await there.ask("GET", STATE_PATH))[0] == status

    run(body, token=token, key=TOKEN)
