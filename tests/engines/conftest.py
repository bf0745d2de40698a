"""One vLLM server and one oracle for all tests of this folder."""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.engines.vllm_faults import disarm
from tests.engines.vllm_support import (
    DIFFERENT,
    NEEDS_VLLM,
    SAME,
    Oracle,
    Server,
    build_model,
    cast_weights,
    distance,
    save_checkpoint,
    train_step,
    vllm_is_there,
)
from tests.engines.vllm_trainers import Trainers
from tests.standins.processes import children


@dataclasses.dataclass(frozen=True, kw_only=True)
class Versions:
    """What a model is after 0, 1 and 2 training steps: a checkpoint's folder and the cast weights of each."""

    checkpoints: tuple[Path, ...]
    weights: tuple[dict[str, torch.Tensor], ...]


@pytest.fixture(scope="package")
def versions(tmp_path_factory: pytest.TempPathFactory) -> Versions:
    """Made by the same steps as the tests' trainers make, without any of the library."""
    return _versions(tmp_path_factory.mktemp("checkpoints"), tied=False)


@pytest.fixture(scope="package")
def tied_versions(tmp_path_factory: pytest.TempPathFactory) -> Versions:
    """The same of a model whose output layer is its embedding."""
    return _versions(tmp_path_factory.mktemp("tied"), tied=True)


def _versions(folder: Path, *, tied: bool) -> Versions:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    model = build_model(tied=tied)
    checkpoints, weights = [], []
    for number in range(3):
        if number:
            train_step(model, number)
        weights.append(cast_weights(model))
        checkpoints.append(save_checkpoint(folder / f"v{number}", model, weights[-1]))
    torch.set_num_threads(threads)
    return Versions(checkpoints=tuple(checkpoints), weights=tuple(weights))


@pytest.fixture(scope="package")
def oracle() -> Iterator[Oracle]:
    """Answers of fresh engines, remembered."""
    with tempfile.TemporaryFile("w+") as log:
        oracle = Oracle(log)
        yield oracle
        oracle.close()


@pytest.fixture(scope="package")
def starting_server(versions: Versions, oracle: Oracle, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of the tiny model that may not answer yet: a start takes long, and much of it on one core."""
    if not vllm_is_there:
        pytest.skip(NEEDS_VLLM)
    server = Server(versions.checkpoints[0], tmp_path_factory.mktemp("server"))
    with contextlib.ExitStack() as stack:
        stack.callback(server.stop)
        stack.callback(server.http.close)
        server.start()
        oracle.learn(versions.checkpoints)
        yield server


@pytest.fixture(scope="package")
def vllm_server(starting_server: Server) -> Server:
    """A running server of the tiny model; a test that kills it starts it again."""
    starting_server.wait_until_ready()
    return starting_server


@pytest.fixture(scope="package")
def trainers(vllm_server: Server) -> Iterator[Trainers]:
    """A training process that syncs to the server when told to."""
    with children() as start:
        yield Trainers(start, vllm_server.url)


@pytest.fixture
def whole(vllm_server: Server, trainers: Trainers) -> Trainers:
    """The trainers, after a good sync of the weights after one step, and no fault armed."""
    disarm(vllm_server.folder)
    trainers.good(1)
    return trainers


@pytest.fixture
def serves(vllm_server: Server, oracle: Oracle, versions: Versions) -> Callable[[int], None]:
    """Asserts that the server answers as a fresh engine with so many training steps, and as no other."""

    def check(steps: int) -> None:
        told = vllm_server.logprobs()
        distances = [distance(told, oracle.logprobs(checkpoint)) for checkpoint in versions.checkpoints]
        assert distances[steps] <= SAME, distances
        assert all(far >= DIFFERENT for number, far in enumerate(distances) if number != steps), distances

    return check
