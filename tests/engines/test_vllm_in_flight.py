"""What happens to generations that are under way when a sync comes, and to what vLLM has cached."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from tests.engines.conftest import Versions
from tests.engines.vllm_support import DIFFERENT, LONG_PROMPT, PROMPTS, SAME, Oracle, Server, completion, next_distance
from tests.engines.vllm_trainers import Trainers

pytestmark = pytest.mark.timeout(600)
NUM_TOKENS = {"keep": 2000, "wait": 600, "abort": 4000}
"""On two cores a generation holds up every call to the server, so it begins when the pause is next."""
PAUSE_S = 60.0  # "wait" lasts as long as a generation, which may be slow on a busy machine
HEAD = 2  # tokens that are there, at the least, when a sync comes
_HANGS_S = 240.0  # for hangs: thousands of tokens beside other tests may take a minute and more
CLOSE = 0.05
"""Log-probabilities of the same token and weights, once decoded one by one and once in a single pass; bfloat16."""


class Generation:
    """A streamed completion in a thread."""

    def __init__(self, server: Server, prompt: Sequence[int], num_tokens: int) -> None:
        self._server = server
        self._num_tokens = num_tokens
        self._prompt = list(prompt)
        self.tokens: list[int] = []
        self.scores: list[float] = []
        self.finish_reason: str | None = None
        self._under_way = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def under_way(self) -> None:
        """Returns when at least `HEAD` tokens are there."""
        assert self._under_way.wait(_HANGS_S)

    def result(self) -> str | None:
        """Waits for the end; the finish reason."""
        self._thread.join(_HANGS_S)
        assert not self._thread.is_alive()
        return self.finish_reason

    def _run(self) -> None:
        body = completion(self._prompt, max_tokens=self._num_tokens, logprobs=0, stream=True, ignore_eos=True)
        with self._server.http.stream("POST", "/v1/completions", json=body) as response:
            for line in response.iter_lines():
                if not line.startswith("data: {"):
                    continue
                choice: dict[str, Any] = json.loads(line.removeprefix("data: "))["choices"][0]
                told = choice["logprobs"] or {"tokens": [], "token_logprobs": []}
                self.tokens += [int(name.removeprefix("token_id:")) for name in told["tokens"]]
                self.scores += told["token_logprobs"]
                self.finish_reason = choice["finish_reason"] or self.finish_reason
                if len(self.tokens) >= HEAD:
                    self._under_way.set()


def sync_amid(whole: Trainers, server: Server, pause_mode: str) -> tuple[Generation, dict[str, Any]]:
    """A generation that is under way at the pause of a sync; how the sync went."""
    seconds = {"pause_timeout_s": PAUSE_S, "transfer_timeout_s": 2 * PAUSE_S}  # a pause ends with its sync's deadline
    whole.send(2, waits_at="pause", setup={"pause_mode": pause_mode, **seconds})
    assert whole.child.recv(120) == "the pause is next"
    for _ in range(5):
        generation = Generation(server, PROMPTS[0], NUM_TOKENS[pause_mode])
        generation.under_way()
        if len(generation.tokens) < NUM_TOKENS[pause_mode] // 2:
            break
        generation.result()  # its tokens came all at once, since this process had no time for them: another one
    assert len(generation.tokens) < NUM_TOKENS[pause_mode] // 2, "each is nearly over before the pause"
    whole.child.conn.send("go on")
    outcome: dict[str, Any] = whole.child.recv(120 + 2 * PAUSE_S)
    assert outcome["type"] == "ok", outcome
    return generation, outcome


def misfit(server: Server, generation: Generation) -> list[float]:
    """How far each generated token's score is from what the present weights say of it in its place."""
    whole = [*PROMPTS[0], *generation.tokens]
    told = server.logprobs([whole])[0][len(PROMPTS[0]) - 1 :]
    return [abs(a - b) for a, b in zip(told, generation.scores, strict=True)]


def test_keep_spans_a_sync_and_goes_on_with_the_new_weights(whole: Trainers, vllm_server: Server) -> None:
    """The first tokens are the old weights' and the last ones the new weights', in one answer that is complete."""
    generation, _ = sync_amid(whole, vllm_server, "keep")
    assert generation.result() == "length"
    assert len(generation.tokens) == NUM_TOKENS["keep"]
    of_new = misfit(vllm_server, generation)
    assert max(of_new[-20:]) < CLOSE, of_new[-20:]
    assert max(of_new[:HEAD]) > 4 * CLOSE, of_new[:HEAD]
    whole.good(1)
    of_old = misfit(vllm_server, generation)
    assert max(of_old[:HEAD]) < CLOSE, of_old[:HEAD]
    assert max(of_old[-20:]) > 4 * CLOSE, of_old[-20:]


def test_wait_lets_it_finish_before_the_commit(whole: Trainers, vllm_server: Server) -> None:
    """All tokens are the old weights'."""
    generation, outcome = sync_amid(whole, vllm_server, "wait")
    assert generation.result() == "length"
    assert len(generation.tokens) == NUM_TOKENS["wait"]
    assert outcome["paused_s"] > 0.05
    assert max(misfit(vllm_server, generation)) > 4 * CLOSE
    whole.good(1)
    assert max(misfit(vllm_server, generation)) < CLOSE


def test_abort_ends_it_with_what_it_has(whole: Trainers, vllm_server: Server) -> None:
    """Its tokens up to there are the old weights'."""
    generation, _ = sync_amid(whole, vllm_server, "abort")
    assert generation.result() == "abort"
    assert HEAD <= len(generation.tokens) < NUM_TOKENS["abort"]
    assert max(misfit(vllm_server, generation)[:HEAD]) > 4 * CLOSE
    whole.good(1)
    assert max(misfit(vllm_server, generation)) < CLOSE


@pytest.mark.parametrize("pause_mode", ["keep", "wait", "abort"])
def test_no_cached_prefix_survives_a_sync(
    whole: Trainers, vllm_server: Server, oracle: Oracle, versions: Versions, pause_mode: str
) -> None:
    """A prompt of several cache blocks, cached under the old weights, is answered by the new ones alone.

    Seen red with no reset, neither at the pause nor after the commit; the next test shows the same within one run.
    """
    old, new = (oracle.next_token(versions.checkpoints[steps]) for steps in (1, 2))
    assert next_distance(old, new) >= DIFFERENT
    vllm_server.next_token(LONG_PROMPT)
    assert next_distance(vllm_server.next_token(LONG_PROMPT), old) < CLOSE, "from the cache"
    whole.good(2, setup={"pause_mode": pause_mode})
    assert next_distance(vllm_server.next_token(LONG_PROMPT), new) <= SAME


def test_a_cached_prefix_survives_where_the_policy_says_so(
    whole: Trainers, vllm_server: Server, oracle: Oracle, versions: Versions
) -> None:
    """kv_cache="keep" answers from old keys and values, which is neither the old model nor the new one."""
    old, new = (oracle.next_token(versions.checkpoints[steps]) for steps in (1, 2))
    vllm_server.next_token(LONG_PROMPT)
    whole.good(2, setup={"kv_cache": "keep"})
    told = vllm_server.next_token(LONG_PROMPT)
    assert next_distance(told, new) >= DIFFERENT
    assert next_distance(told, old) >= DIFFERENT
    whole.good(2)  # the default drops it, whoever left it
    assert next_distance(vllm_server.next_token(LONG_PROMPT), new) <= SAME
