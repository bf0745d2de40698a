"""A real vLLM says which version made which token, and each token says it too: version k makes only two tokens likely.

So the spans are compared with the tokens themselves, position by position.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from tests.engines.test_pull_vllm import Pulls
from tests.engines.vllm_support import (
    NEEDS_VLLM,
    PROMPTS,
    Server,
    build_model,
    completion,
    save_checkpoint,
    vllm_is_there,
)
from tests.engines.vllm_unpacked import VARIABLE
from tests.multiproc.trainers import VOCAB
from tests.standins.processes import children
from weightsync.trainer.publisher import WeightManager
from weightsync.types import VersionSpan
from weightsync.types.spans import spans_from
from weightsync.types.transfer_messages import Transport

pytestmark = pytest.mark.timeout(600)
HALF = VOCAB // 2
NUM_TOKENS = 1200
NUM_VERSIONS = 12  # three times as many have to be less than HALF
KV_CACHE_BYTES = 3 << 20  # of all workers; 6144 tokens: not all that is asked for at once has room
OPTIONS = (
    *("--middleware", "weightsync.engine.vllm.version_middleware.VersionMiddleware"),
    *("--logits-processors", "weightsync.engine.vllm.token_versions:TokenVersions"),
    *("--max-model-len", "4096", "--no-skip-tokenizer-init"),
)


def telling_model(number: int) -> nn.Module:
    """A model that says `number` or `number + HALF`, one as likely as the other, whatever it is asked."""
    model = build_model()
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight", "lm_head.weight")):
                tensor.zero_()
            elif name.endswith(("embed_tokens.weight", "model.norm.weight")):
                tensor.fill_(1.0)
        model.lm_head.weight[number::HALF] = 1.0  # type: ignore[index,union-attr]
    return model


def tokenizer() -> Any:
    """Words "w0" and so on: a chat needs them."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{token}": token for token in range(VOCAB)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0")
    made.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    return made


def publisher_main(conn: Any) -> None:
    """A trainer: publishes the model that says the version's number."""
    torch.set_num_threads(1)
    with WeightManager("m", dtype="bfloat16", delta_budget_bytes=1 << 30) as manager:
        manager.start(deltas=True)
        conn.send((manager.run_id, manager.endpoint))
        while (order := conn.recv()) is not None:
            version, _, _ = order
            assert manager.offload(telling_model(version).named_parameters(), version).published
            manager.wait_published(version, timeout_s=120)
            conn.send(version)
    os._exit(0)


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.soak)], ids=["tp1", "tp2"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    if not vllm_is_there:
        pytest.skip(NEEDS_VLLM)
    folder = tmp_path_factory.mktemp("versions")
    checkpoint = save_checkpoint(folder / "v0", telling_model(0))
    tokenizer().save_pretrained(checkpoint)
    made = Server(
        checkpoint, folder / "server", tp=request.param, env={VARIABLE: "1"},
        options=(*OPTIONS, "--kv-cache-memory-bytes", str(KV_CACHE_BYTES // request.param)), counts=True,
    )  # fmt: skip
    with made.running():
        yield made


@pytest.fixture
def pulls(server: Server) -> Iterator[Callable[[str], Pulls]]:
    with contextlib.ExitStack() as stack:
        start = stack.enter_context(children())

        def make(kv_cache: str) -> Pulls:
            made = Pulls(start, server, Transport.TCP, "delta", trainer=publisher_main, kv_cache=kv_cache)
            stack.callback(made.close)
            return made

        yield make


class Asked:
    """A completion, or a chat's, in a thread.

    Args:
        server: what answers.
        num_choices: how many answers.
        streams: whether they come in events.
        plain: whether it asks for no token ids. Then the names of its log-probabilities tell its tokens.
        chats: whether it is a chat's.

    Attributes:
        tokens: of each choice, by its index.
        spans: the same; None where the server said that it does not know.
    """

    def __init__(
        self, server: Server, num_choices: int = 1, *, streams: bool = True, plain: bool = False, chats: bool = False
    ) -> None:
        self._server = server
        self._path = "/v1/chat/completions" if chats else "/v1/completions"
        self._plain = plain
        self._body = completion(
            PROMPTS[0], max_tokens=NUM_TOKENS, ignore_eos=True, temperature=1.0, n=num_choices, stream=streams,
            **({"logprobs": 0} if plain else {"return_token_ids": True}),
        )  # fmt: skip
        if chats:
            del self._body["prompt"]
            self._body["messages"] = [{"role": "user", "content": "w3 w4"}]
        self.tokens: list[list[int]] = [[] for _ in range(num_choices)]
        self.spans: list[list[VersionSpan]] | None = None
        self._under_way = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()

    def under_way(self) -> None:
        """Returns when its first tokens are there; at once where it is not streamed."""
        if self._body["stream"]:
            assert self._under_way.wait(60)

    def result(self) -> None:
        self._thread.join(120)
        assert self.is_over
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            with self._server.http.stream("POST", self._path, json=self._body, timeout=120) as response:
                assert response.status_code == 200
                if not self._body["stream"]:
                    self._take(json.loads(response.read()))
                else:
                    for line in response.iter_lines():
                        if line.startswith("data: {"):
                            self._take(json.loads(line.removeprefix("data: ")))
                            self._under_way.set()
        except BaseException as error:
            self._error = error
        finally:
            self._under_way.set()

    def _take(self, told: dict[str, Any]) -> None:
        for choice in told["choices"]:
            if self._plain:
                assert choice["token_ids"] is None
                names = choice["logprobs"]["tokens"]
                self.tokens[choice["index"]] += [int(name.removeprefix("token_id:")) for name in names]
            else:
                self.tokens[choice["index"]] += choice.get("token_ids") or []  # a chat's stream begins without
        if told.get("weight_versions"):
            assert [each["index"] for each in told["weight_versions"]] == list(range(len(self.tokens)))
            self.spans = [[VersionSpan(**span) for span in each["spans"]] for each in told["weight_versions"]]


def said_by(tokens: Sequence[int], versions: Mapping[int, str]) -> list[VersionSpan]:
    """The spans that the tokens themselves tell."""
    return spans_from(enumerate(versions[token % HALF] for token in tokens), len(tokens))


def preemptions(server: Server) -> float:
    """How often vLLM has thrown a request out for lack of room, or for a reset of its cache."""
    counted = re.findall(r"^vllm:num_preemptions_total\{.*\} (\S+)$", server.http.get("/metrics").text, re.MULTILINE)
    assert counted
    return sum(map(float, counted))


@pytest.mark.parametrize("kv_cache", ["clear", pytest.param("keep", marks=pytest.mark.soak)])
def test_each_token_is_said_to_be_of_the_version_that_made_it(
    server: Server, pulls: Callable[[str], Pulls], kv_cache: str
) -> None:
    """Streamed or not, one answer or two, while versions are committed in the middle and requests preempted.

    Seen red with a version read one step late, and with positions one off."""
    there = pulls(kv_cache)
    for _ in range(3):  # on a busy machine an answer may be over before the server has heard of the pause
        there.publish(0)
        there.sync()
        before = preemptions(server)
        asked = [
            Asked(server), Asked(server, 2), Asked(server, streams=False), Asked(server, 2, streams=False),
            Asked(server, plain=True), Asked(server, chats=True),
        ]  # fmt: skip
        for each in asked:
            each.under_way()
        for _ in range(NUM_VERSIONS):
            if any(each.is_over for each in asked):
                break
            there.publish(0)
            there.sync()
        for each in asked:
            each.result()
        told = [number for each in asked for number in numbers(each, there.run_id)]
        assert all(mine == sorted(mine) for mine in told)
        if min(map(len, told)) > 1:
            break
    assert max(map(len, told)) > 1, "each was over before a commit: nothing was shown"
    assert preemptions(server) > before


def numbers(asked: Asked, run_id: str) -> list[list[int]]:
    """The versions of each choice, whose spans are as its tokens tell."""
    assert asked.spans is not None
    for tokens, spans in zip(asked.tokens, asked.spans, strict=True):
        assert len(tokens) == NUM_TOKENS
        assert spans == said_by(tokens, {number: f"{run_id}/{number}" for number in range(1, HALF)})
    return [[int(str(span.version).rpartition("/")[2]) for span in spans] for spans in asked.spans]


def test_an_answer_over_a_version_that_is_loaded_in_full(server: Server, pulls: Callable[[str], Pulls]) -> None:
    """Another run's first version: the former run's patch made the tokens before."""
    for _ in range(3):  # as above
        old = pulls("clear")
        for _ in range(3):
            old.publish(0)
            old.sync()
        new = pulls("clear")
        new.publish(0)
        asked = Asked(server)
        asked.under_way()
        new.sync()
        asked.result()
        assert asked.spans is not None
        assert asked.spans[0] == said_by(asked.tokens[0], {3: f"{old.run_id}/3", 1: f"{new.run_id}/1"})
        if len(asked.spans[0]) > 1:
            break
    assert len(asked.spans[0]) == 2, "each was over before the commit: nothing was shown"
