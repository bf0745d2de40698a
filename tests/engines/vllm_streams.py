"""Clients that stream one completion after the other from a vLLM server, and what weights say of the answers.

Streams (threads) -- /v1/completions --> vLLM            Recomputed: each version's weights, in plain transformers
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
import threading
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn

from tests.engines.vllm_support import Server, completion
from tests.multiproc.trainers import VOCAB
from weightsync.types import Deadline, VersionSpan

PROMPT_TOKENS = 24
NUM_TOP = 5
"""Of the likeliest tokens in each place the answer tells the log-probabilities, too."""
_BATCH = 16
_PATIENCE_S = 120.0


@dataclasses.dataclass(kw_only=True)
class Streamed:
    """One answer, and how it came.

    Attributes:
        prompt, wanted: what was asked: its token ids, and how many tokens.
        began_s: when it was asked; the machine's monotonic clock, as all times here.
        tokens: token ids.
        scores: in each token's place, log-probabilities by token id: its own and the likeliest ones'.
        received_s: when each token was there.
        finish_reason: why it ended.
        spans: which version made which tokens, as it says; None where it says nothing.
        is_done: whether the stream has come to its end.
    """

    prompt: list[int]
    wanted: int
    began_s: float
    tokens: list[int] = dataclasses.field(default_factory=list)
    scores: list[dict[int, float]] = dataclasses.field(default_factory=list)
    received_s: list[float] = dataclasses.field(default_factory=list)
    finish_reason: str | None = None
    spans: list[VersionSpan] | None = None
    is_done: bool = False

    def take(self, event: dict[str, Any]) -> None:
        """Notes what an event tells."""
        now_s = time.monotonic()
        for choice in event["choices"]:
            self.finish_reason = choice["finish_reason"] or self.finish_reason
            told = choice["logprobs"] or {"tokens": [], "top_logprobs": []}
            self.tokens += [_id(name) for name in told["tokens"]]
            self.received_s += [now_s] * len(told["tokens"])
            self.scores += [{_id(name): score for name, score in each.items()} for each in told["top_logprobs"]]
        for each in event.get("weight_versions") or ():
            assert each["index"] == 0
            self.spans = [VersionSpan(**span) for span in each["spans"]]


class Streams:
    """So many clients that ask for one answer after the other, until `end`.

    Args:
        server: what answers.
        num_clients: how many, each in a thread.
        num_tokens: the fewest tokens of an answer; clients ask for different numbers.
    """

    def __init__(self, server: Server, num_clients: int, num_tokens: int) -> None:
        self._server = server
        self._num_tokens = num_tokens
        self._over = threading.Event()
        self._started = [threading.Event() for _ in range(num_clients)]
        self._answers: list[list[Streamed]] = [[] for _ in range(num_clients)]
        self._errors: list[BaseException] = []
        self._threads = [threading.Thread(target=self._run, args=(one,), daemon=True) for one in range(num_clients)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._over.set()
        deadline = Deadline(_PATIENCE_S)
        for thread in self._threads:
            thread.join(deadline.remaining_s)

    def under_way(self) -> None:
        """Returns when each client has its first tokens."""
        deadline = Deadline(_PATIENCE_S)
        for started in self._started:
            assert started.wait(deadline.remaining_s)
        self.check()

    def check(self) -> None:
        """Raises what went wrong with a request."""
        if self._errors:
            raise self._errors[0]

    def end(self) -> list[Streamed]:
        """Lets each client finish its last answer; all answers."""
        self.__exit__(None, None, None)
        self.check()
        assert not any(thread.is_alive() for thread in self._threads)
        assert all(self._answers)
        return list(itertools.chain.from_iterable(self._answers))

    def _run(self, one: int) -> None:
        chance = random.Random(one)
        try:
            while not self._over.is_set():
                prompt = [chance.randrange(VOCAB) for _ in range(PROMPT_TOKENS)]
                answer = Streamed(prompt=prompt, wanted=self._num_tokens + 8 * one, began_s=time.monotonic())
                self._ask(answer, self._started[one])
                self._answers[one].append(answer)
        except BaseException as error:
            self._errors.append(error)
        finally:
            self._started[one].set()

    def _ask(self, answer: Streamed, started: threading.Event) -> None:
        body = completion(
            answer.prompt, max_tokens=answer.wanted, ignore_eos=True, temperature=1.0, logprobs=NUM_TOP, stream=True
        )
        with self._server.http.stream("POST", "/v1/completions", json=body, timeout=_PATIENCE_S) as response:
            assert response.status_code == 200, response.read()
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    answer.take(json.loads(line.removeprefix("data: ")))
                    started.set()
                answer.is_done |= line == "data: [DONE]"


def _id(name: str) -> int:
    return int(name.removeprefix("token_id:"))


# --- what weights say of answers ---


class Recomputed:
    """What versions' weights say of answers, by the plain model in float32.

    Args:
        model: of the right shapes; its weights are lost.
        weights: by version, as they were published.
    """

    def __init__(self, model: Any, weights: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        self._model = model.float()
        self._model.set_attn_implementation("sdpa")  # the same in a fifth of the time
        self._weights = weights

    @torch.no_grad()
    def misfits(self, asked: Mapping[str, Sequence[Streamed]]) -> dict[str, list[list[float]]]:
        """How far what each answer tells in each token's place is from what a version says there.

        Args:
            asked: the answers of which each version is asked.

        Returns:
            By version, for each answer and each of its tokens the greatest difference of a log-probability.
        """
        found: dict[str, list[list[float]]] = {}
        for version, answers in asked.items():
            self._model.load_state_dict(self._weights[version])
            found[version] = [
                each
                for first in range(0, len(answers), _BATCH)
                for each in self._misfits(answers[first : first + _BATCH])
            ]
        return found

    def _misfits(self, answers: Sequence[Streamed]) -> list[list[float]]:
        rows = [torch.tensor([*answer.prompt, *answer.tokens[:-1]]) for answer in answers]
        padded = nn.utils.rnn.pad_sequence(rows, batch_first=True)  # behind: no token sees what comes after it
        said = self._model(input_ids=padded).logits.log_softmax(-1)
        misfits = []
        for answer, row in zip(answers, said[:, PROMPT_TOKENS - 1 :], strict=True):
            places = [place for place, scores in enumerate(answer.scores) for _ in scores]
            tokens = list(itertools.chain.from_iterable(answer.scores))
            told = torch.tensor([score for scores in answer.scores for score in scores.values()])
            far = (row[places, tokens] - told).abs()
            worst = torch.zeros(len(answer.tokens)).scatter_reduce(0, torch.tensor(places), far, "amax")
            misfits.append(worst.tolist())
        return misfits
