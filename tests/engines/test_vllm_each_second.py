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
import statistics
import time
from collections.abc import Iterator, Sequence
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
NUM_TOKENS = 400
NUM_VERSIONS = 60
EACH_S = 1.0
LEARNING_RATE, SHARE = 0.2, 0.06
CLOSE = 0.1
"""Log-probabilities by vLLM in bfloat16 and by transformers in float32, of the same weights; seen are 0.06."""
FAR = 5 * CLOSE
"""What neighbouring versions say differs by more, in one of the tokens that are told in a place; seen are 1.1."""
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
            manager.wait_published(version, timeout_s=120)
            conn.send(version)
    os._exit(0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flight:
    """What has happened.

    Attributes:
        answers: of all clients.
        commits: by the server's own log, one for each version.
        weights: of each version, as they were published.
        lasted_s: from the first version that was published amid answers until the last was served.
        published_s: how long each of these took to be published.
        served_s: how long it then took to be served.
        phases: of the service and its engine, from then on.
    """

    answers: list[Streamed]
    commits: list[Commit]
    weights: dict[str, dict[str, torch.Tensor]]
    lasted_s: float
    published_s: list[float]
    served_s: list[float]
    phases: list[PhaseRecord]

    def __str__(self) -> str:
        """Its figures."""
        paused_s = max((end - start for spans in pauses(self.phases).values() for start, end in spans), default=0.0)
        tokens = sum(len(answer.tokens) for answer in self.answers)
        return (
            f"{len(self.served_s)} versions in {self.lasted_s:.1f} s, {len(self.answers)} answers, {tokens} tokens; "
            f"published in {max(self.published_s):.3f} s at most, then served in {max(self.served_s):.3f} s (median "
            f"{statistics.median(self.served_s):.3f} s), paused for {paused_s:.3f} s at most"
        )


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The server's own log of commits."""
    return tmp_path_factory.mktemp("commits") / "commits.jsonl"


@pytest.fixture(scope="module")
def server(log: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("each-second")
    env = {VARIABLE: "1", vllm_commits.VARIABLE: str(log)}
    made = Server(save_checkpoint(folder / "v0", first_model()), folder / "server", env=env, options=OPTIONS)
    with made.running():
        yield made


def fly(server: Server, log: Path, num_versions: int) -> Flight:
    """Clients stream all the time; meanwhile a version is published each second, and served before the next."""
    published_s, served_s = [], []
    phases: list[PhaseRecord] = []
    with contextlib.ExitStack() as stack:
        start = stack.enter_context(children())
        there = stack.enter_context(
            contextlib.closing(Pulls(start, server, Transport.TCP, "delta", trainer=trainer_main))
        )
        there.publish(0)
        there.sync()  # in full
        stack.callback(there.service.recorder.subscribe(phases.append))
        streams = stack.enter_context(Streams(server, NUM_CLIENTS, NUM_TOKENS))
        streams.under_way()
        began_s = time.monotonic()
        for number in range(num_versions):
            at_s = _at(began_s + number * EACH_S)
            there.publish(0)
            published_s.append(time.monotonic() - at_s)
            status = there.sync()
            served_s.append(time.monotonic() - at_s - published_s[-1])
            assert (status.num_deltas, status.num_patched, status.unprovable) == (1, 1, {}), status
            streams.check()
        lasted_s = time.monotonic() - began_s
        _at(began_s + num_versions * EACH_S)
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


def _at(when_s: float) -> float:
    """Waits until then: the trainer's pace. What time it is."""
    time.sleep(max(0.0, when_s - time.monotonic()))
    return time.monotonic()


def check_end(answer: Streamed) -> None:
    """It has ended well, with all that was asked for; its spans cover it."""
    assert (answer.finish_reason, answer.is_done) == ("length", True)
    assert len(answer.tokens) == len(answer.scores) == answer.wanted
    assert answer.spans, "it does not say which versions made it"
    assert [span.start for span in answer.spans] == [0, *(span.end for span in answer.spans[:-1])]
    assert answer.spans[-1].end == answer.wanted
    assert all(span.start < span.end for span in answer.spans)


def check_times(answer: Streamed, commits: Sequence[Commit]) -> None:
    """Its versions rise; no token came before its version's commit began, and none is of a version that was no longer
    served when the answer was asked for."""
    numbers = {commit.version: number for number, commit in enumerate(commits)}
    assert answer.spans is not None
    assert {span.version for span in answer.spans} <= set(numbers), answer.spans
    told = [numbers[str(span.version)] for span in answer.spans]
    assert told == sorted(set(told)), answer.spans
    for number, span in zip(told, answer.spans, strict=True):
        assert answer.received_s[span.start] > commits[number].began_s, (span, "it came before the commit")
    served = [number for number, commit in enumerate(commits) if commit.ended_s < answer.began_s]
    assert told[0] >= max(served), (answer.spans, "another version was served when it was asked for")


def check_scores(flight: Flight) -> str:
    """Each token's log-probabilities are what its span's version says; at an edge, and not what its neighbour's says.

    Returns:
        The figures.
    """
    asked: dict[str, list[Streamed]] = {}
    for answer in flight.answers:
        for span in answer.spans or ():
            asked.setdefault(str(span.version), []).append(answer)
    misfits = Recomputed(first_model(), flight.weights).misfits(asked)
    found = {
        (id(answer), version): misfit
        for version, its in asked.items()
        for answer, misfit in zip(its, misfits[version], strict=True)
    }
    own, others, begun = [], [], set()
    for answer in flight.answers:
        spans = [(span, found[id(answer), str(span.version)]) for span in answer.spans or ()]
        for span, misfit in spans:
            own += misfit[span.start : span.end]
        for (_, old), (span, new) in itertools.pairwise(spans):
            others += [new[span.start - 1], old[span.start]]
            begun.add(span.version)
    assert begun == {commit.version for commit in flight.commits[1:]}, "each was committed in the middle of answers"
    assert max(own) <= CLOSE, sorted(own)[-9:]
    assert min(others) >= FAR, sorted(others)[:9]
    return (
        f"{len(others) // 2} edges; log-probabilities within {max(own):.3f}, at edges {min(others):.3f} from the "
        "other version's at the least"
    )


@pytest.mark.soak
def test_each_answer_of_a_busy_server_tells_its_versions(server: Server, log: Path) -> None:
    """20 clients stream; a version each second is written into the live weights in the middle of their answers.

    Seen red with edges one token off to either side, with spans that name the version before or after, with `kv_cache`
    "keep" (tokens come from old keys and values), and with `pause_mode` "abort" (answers end early).
    """
    flight = fly(server, log, NUM_VERSIONS)
    for answer in flight.answers:
        check_end(answer)
        check_times(answer, flight.commits)
    figures = check_scores(flight)
    _logger.warning("%s; %s", flight, figures)
    assert flight.lasted_s < 1.1 * NUM_VERSIONS * EACH_S, flight
