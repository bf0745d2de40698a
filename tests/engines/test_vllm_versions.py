"""A real vLLM says which version made which token, and each token says it too: version k makes only two tokens likely.

So the spans are compared with the tokens themselves, position by position.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
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
NUM_TOKENS = 1500
KV_CACHE_BYTES = 3 << 20  # 6144 tokens: not all that is asked for at once has room
OPTIONS = (
    *("--middleware", "weightsync.engine.vllm.version_middleware.VersionMiddleware"),
    *("--logits-processors", "weightsync.engine.vllm.token_versions:TokenVersions"),
    *("--max-model-len", "4096", "--kv-cache-memory-bytes", str(KV_CACHE_BYTES)),
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


def publisher_main(conn: Any) -> None:
    """A trainer: publishes the model that says the version's number."""
    torch.set_num_threads(1)
    with WeightManager("m", dtype="bfloat16", delta_budget_bytes=1 << 30) as manager:
        manager.start(deltas=True)
        conn.send((manager.run_id, manager.endpoint))
        while (order := conn.recv()) is not None:
            version, _, _ = order
            model = copy.deepcopy(telling_model(version))
            assert manager.offload(model.named_parameters(), version).published
            manager.wait_published(version, timeout_s=30)
            conn.send(version)
    os._exit(0)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    if not vllm_is_there:
        pytest.skip(NEEDS_VLLM)
    folder = tmp_path_factory.mktemp("versions")
    made = Server(
        save_checkpoint(folder / "v0", telling_model(0)), folder / "server", env={VARIABLE: "1"}, options=OPTIONS
    )
    with contextlib.ExitStack() as stack:
        stack.callback(made.stop)
        stack.callback(made.http.close)
        made.start()
        made.wait_until_ready()
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
    """A completion in a thread.

    Attributes:
        tokens: of each choice, by its index.
        spans: the same; None where the server said that it does not know.
    """

    def __init__(self, server: Server, num_choices: int, *, streams: bool) -> None:
        self._server = server
        self._body = completion(
            PROMPTS[0], max_tokens=NUM_TOKENS, ignore_eos=True, temperature=1.0, n=num_choices, stream=streams,
            return_token_ids=True,
        )  # fmt: skip
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
        assert self._under_way.wait(60)

    def result(self) -> None:
        self._thread.join(120)
        assert self.is_over
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            with self._server.http.stream("POST", "/v1/completions", json=self._body, timeout=120) as response:
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
            self.tokens[choice["index"]] += choice["token_ids"]
        if told.get("weight_versions"):
            assert [each["index"] for each in told["weight_versions"]] == list(range(len(self.tokens)))
            self.spans = [[VersionSpan(**span) for span in each["spans"]] for each in told["weight_versions"]]


def said_by(tokens: Sequence[int], run_id: str, *, before: str | None) -> list[VersionSpan]:
    """The spans that the tokens themselves tell; 0 is what was there before the run."""
    versions = [f"{run_id}/{token % HALF}" if token % HALF else before for token in tokens]
    return spans_from(enumerate(versions), len(tokens))


@pytest.mark.parametrize("kv_cache", ["clear", "keep"])
def test_each_token_is_said_to_be_of_the_version_that_made_it(
    server: Server, pulls: Callable[[str], Pulls], kv_cache: str
) -> None:
    """Streamed or not, one answer or two, while versions are committed in the middle and requests preempted."""
    there = pulls(kv_cache)
    there.publish(0)
    there.sync()
    asked: list[Asked] = []
    for num_choices, streams in ((1, True), (2, True), (1, False), (2, False)):
        asked.append(Asked(server, num_choices, streams=streams))
    for each in asked[:2]:
        each.under_way()
    for _ in range(12):
        if any(each.is_over for each in asked):
            break
        there.publish(0)
        there.sync()
    for each in asked:
        each.result()
    numbers = []
    for each in asked:
        assert each.spans is not None
        for tokens, spans in zip(each.tokens, each.spans, strict=True):
            assert len(tokens) == NUM_TOKENS
            assert spans == said_by(tokens, there.run_id, before="nobody's")
            numbers.append([int(str(span.version).rpartition("/")[2]) for span in spans])
    assert all(mine == sorted(mine) for mine in numbers)
    assert all(len(mine) > 1 for mine in numbers), numbers
    print(numbers)
