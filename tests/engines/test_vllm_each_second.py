"""A real vLLM that answers 20 clients all the time, and serves another version each second.

No request fails, and the spans of each answer are right: the server's own log of commits says so, and so do the
log-probabilities, which plain transformers computes again with the weights of each version.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.engines import vllm_commits
from tests.engines.test_pull_vllm import Pulls
from tests.engines.vllm_commits import Commit
from tests.engines.vllm_streams import Recomputed, Streamed, Streams
from tests.engines.vllm_support import NEEDS_VLLM, Server, build_model, cast_weights, save_checkpoint, vllm_is_there
from tests.engines.vllm_unpacked import VARIABLE
from tests.multiproc.trainers import VOCAB
from tests.standins.processes import children
from weightsync.observe.events import pauses
from weightsync.trainer.publisher import WeightManager
from weightsync.types import PhaseRecord
from weightsync.types.transfer_messages import Transport

pytestmark = [pytest.mark.timeout(600), pytest.mark.skipif(not vllm_is_there, reason=NEEDS_VLLM)]
NUM_CLIENTS = 20
NUM_TOKENS = 160
EACH_S = 1.0
LEARNING_RATE, SHARE = 0.1, 0.06
CLOSE = 0.15
"""Log-probabilities by vLLM in bfloat16 and by transformers in float32, of the same weights."""
FAR = 4 * CLOSE
"""What neighbouring versions say in one place differs by more."""
OPTIONS = (
    *("--middleware", "weightsync.engine.vllm.version_middleware.VersionMiddleware"),
    *("--logits-processors", "weightsync.engine.vllm.token_versions:TokenVersions"),
    *("--max-model-len", "1024", "--max-num-seqs", str(NUM_CLIENTS)),
)
_logger = logging.getLogger(__name__)


def first_model() -> nn.Module:
    """The tiny model, with something to say: its log-probabilities differ."""
    model = build_model()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "proj" in name:
                parameter.mul_(3.0)
        model.lm_head.weight.mul_(8.0)  # type: ignore[operator,union-attr]
    return model


def sparse_step(model: nn.Module, number: int) -> None:
    """A real AdamW step on random text that changes a share of the elements, so that they come as a patch."""
    torch.manual_seed(1000 + number)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    tokens = torch.randint(0, VOCAB, (8, 64))
    model(input_ids=tokens, labels=tokens).loss.backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.mul_(torch.rand_like(parameter) < SHARE)
    optimizer.step()
    optimizer.zero_grad()


def trainer_main(conn: Any) -> None:
    """A trainer: a step before each version. It keeps what it has published, and gives it out at the end."""
    torch.set_num_threads(1)
    model = first_model()
    kept: dict[str, dict[str, Any]] = {}
    with WeightManager("m", dtype="bfloat16", delta_budget_bytes=1 << 30) as manager:
        manager.start(deltas=True)
        conn.send((manager.run_id, manager.endpoint))
        while (order := conn.recv()) is not None:
            if order == "weights":
                conn.send(kept)
                continue
            version, _, _ = order
            sparse_step(model, version)
            kept[f"{manager.run_id}/{version}"] = {name: t.float().numpy() for name, t in cast_weights(model).items()}
            assert manager.offload(model.named_parameters(), version).published
            manager.wait_published(version, timeout_s=30)
            conn.send(version)
    os._exit(0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flight:
    """What has happened.

    Attributes:
        answers: of each client, one after the other.
        commits: by the server's own log, one for each version.
        weights: of each version, as they were published.
        lasted_s: from the first version that was published under load until the last was served.
        published_s: how long each of these took to be published; then to be served.
        phases: of the service and its engine.
    """

    answers: list[list[Streamed]]
    commits: list[Commit]
    weights: dict[str, dict[str, torch.Tensor]]
    lasted_s: float
    published_s: list[float]
    served_s: list[float]
    phases: list[PhaseRecord]


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The server's own log of commits."""
    return tmp_path_factory.mktemp("commits") / "commits.jsonl"


@pytest.fixture(scope="module")
def server(log: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("each-second")
    env = {VARIABLE: "1", vllm_commits.VARIABLE: str(log)}
    made = Server(save_checkpoint(folder / "v0", first_model()), folder / "server", env=env, options=OPTIONS)
    with contextlib.ExitStack() as stack:
        stack.callback(made.stop)
        stack.callback(made.http.close)
        made.start()
        made.wait_until_ready()
        yield made


def fly(server: Server, log: Path, num_versions: int) -> Flight:
    """Has a version published each second while the clients stream, each of them served before the next."""
    published_s, served_s = [], []
    phases: list[PhaseRecord] = []
    with contextlib.ExitStack() as stack:
        start = stack.enter_context(children())
        there = Pulls(start, server, Transport.TCP, "delta", trainer=trainer_main)
        stack.callback(there.close)
        there.publish(0)
        there.sync()  # in full
        stack.callback(there.service.recorder.subscribe(phases.append))
        streams = stack.enter_context(Streams(server, NUM_CLIENTS, NUM_TOKENS))
        streams.under_way()
        began_s = time.monotonic()
        for number in range(num_versions):
            time.sleep(max(0.0, began_s + number * EACH_S - time.monotonic()))  # the pace of the trainer
            at_s = time.monotonic()
            there.publish(0)
            published_s.append(time.monotonic() - at_s)
            status = there.sync()
            served_s.append(time.monotonic() - at_s - published_s[-1])
            assert (status.num_deltas, status.num_patched, status.unprovable) == (1, 1, {}), status
            streams.check()
        lasted_s = time.monotonic() - began_s
        answers = streams.end()
        weights = there.asked("weights")
        commits = [each for each in vllm_commits.read(log) if each.version.startswith(f"{there.run_id}/")]
        assert [each.version for each in commits] == [f"{there.run_id}/{n}" for n in range(1, num_versions + 2)]
    return Flight(
        answers=answers, commits=commits, lasted_s=lasted_s, published_s=published_s, served_s=served_s, phases=phases,
        weights={
            version: {name: torch.from_numpy(array) for name, array in its.items()} for version, its in weights.items()
        },
    )  # fmt: skip


def check_ends(answer: Streamed) -> None:
    """It has ended well, with all that was asked for; its spans cover it."""
    assert (answer.finish_reason, answer.is_done) == ("length", True)
    assert len(answer.tokens) == len(answer.scores) == answer.wanted
    assert answer.spans
    assert [span.start for span in answer.spans] == [0, *(span.end for span in answer.spans[:-1])]
    assert answer.spans[-1].end == answer.wanted
    assert all(span.start < span.end for span in answer.spans)


def check_times(answer: Streamed, commits: Sequence[Commit]) -> None:
    """Versions rise; no token came before the commit of its version began, and none is of a version that had gone when
    it was asked for."""
    numbers = {commit.version: number for number, commit in enumerate(commits)}
    assert answer.spans is not None
    told = [numbers[str(span.version)] for span in answer.spans]
    assert told == sorted(set(told)), answer.spans
    for number, span in zip(told, answer.spans, strict=True):
        assert answer.received_s[span.start] > commits[number].began_s
    served = [number for number, commit in enumerate(commits) if commit.ended_s < answer.began_s]
    assert told[0] >= max(served), "it was asked for when another version was served"


def check_scores(answers: Sequence[Streamed], weights: Mapping[str, Mapping[str, torch.Tensor]]) -> str:
    """Each token's log-probabilities are what its span's version says of it, and at an edge not what the other's says.

    Returns:
        The figures.
    """
    asked: dict[str, list[Streamed]] = {}
    for answer in answers:
        for span in answer.spans or ():
            asked.setdefault(str(span.version), []).append(answer)
    misfits = Recomputed(first_model(), weights).misfits(asked)
    found = {
        (id(answer), version): each
        for version, its in asked.items()
        for answer, each in zip(its, misfits[version], strict=True)
    }
    own, others = [], []
    for answer in answers:
        spans = [(span, found[id(answer), str(span.version)]) for span in answer.spans or ()]
        for span, misfit in spans:
            own += misfit[span.start : span.end]
        for (_, old), (span, new) in itertools.pairwise(spans):
            others += [new[span.start - 1], old[span.start]]
    far = sorted(own)[-5:], sorted(others)[:5]
    figures = (
        f"{len(own)} tokens, {len(others) // 2} edges; misfit {max(own):.3f}, from the other version at an edge "
        f"{min(others, default=0.0):.3f}"
    )
    _logger.warning("%s", figures)
    assert max(own) <= CLOSE, far
    assert min(others) >= FAR, far
    return figures


@pytest.mark.parametrize(
    "num_versions",
    [pytest.param(10, id="ten seconds"), pytest.param(60, id="a minute", marks=pytest.mark.soak)],
)
def test_each_answer_of_a_busy_server_tells_its_versions(server: Server, log: Path, num_versions: int) -> None:
    """20 clients stream; a version each second is written into the live weights in the middle of their answers."""
    flight = fly(server, log, num_versions)
    assert all(flight.answers), "each client was answered"
    answers = list(itertools.chain.from_iterable(flight.answers))
    longest = [max(end - start for start, end in spans) for spans in pauses(flight.phases).values()]
    _logger.warning(
        "%d versions in %.1f s, %d answers, %d tokens/s; publish %.3f/%.3f, serve %.3f/%.3f s, commit %.4f s, pauses %s",
        num_versions, flight.lasted_s, len(answers), sum(a.wanted for a in answers) / flight.lasted_s,
        sorted(flight.published_s)[num_versions // 2], max(flight.published_s),
        sorted(flight.served_s)[num_versions // 2], max(flight.served_s),
        max(c.ended_s - c.began_s for c in flight.commits[1:]), longest,
    )  # fmt: skip
    for answer in answers:
        check_ends(answer)
        check_times(answer, flight.commits)
    begun_s = time.monotonic()
    check_scores(answers, flight.weights)
    _logger.warning("recomputed in %.1f s", time.monotonic() - begun_s)
