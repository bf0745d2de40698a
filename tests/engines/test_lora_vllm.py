"""A real vLLM serves LoRA adapters: each answer is by one version, which it names, and its scores are PEFT's.

PEFT is the oracle: the version's weights in the same base, in plain transformers, in this process.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import weightsync
from tests.engines.lora_kit import (
    ATTENTION,
    CLOSE,
    FAR,
    MLP,
    Asked,
    Trainer,
    adapter_folders,
    lora_server,
    peft_model,
    refused,
    served,
    set_version,
    stream,
    until,
    worker_adapters,
)
from tests.engines.vllm_support import NEEDS_VLLM, PROMPTS, Server, distance, vllm_is_there
from tests.multiproc.trainers import VOCAB
from tests.standins.processes import children
from weightsync.verbs.serving import Service

pytestmark = pytest.mark.timeout(600)
SLOTS = 6
RANKS = {"actor": 8, "critic": 64}
NUM_STREAMS = 20
NUM_TOKENS = 24


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    if not vllm_is_there:
        pytest.skip(NEEDS_VLLM)
    made = lora_server(tmp_path_factory.mktemp("lora"), max_loras=SLOTS)
    with made.running():
        yield made


@pytest.fixture
def trainers() -> Iterator[Callable[..., Trainer]]:
    """Makes trainers, each in a process of its own."""
    with children() as start:
        yield lambda model_id, **options: Trainer(start, model_id, options)


@pytest.fixture
def serve(server: Server) -> Iterator[Callable[..., Service]]:
    """Starts services beside the server."""
    with contextlib.ExitStack() as stack:

        def begin(*trainers: Trainer, **options: Any) -> Service:
            models = {each.model_id: f"vllm+{server.url}" for each in trainers}
            sources = [each.endpoint for each in trainers]
            return stack.enter_context(weightsync.serve(models, sources=sources, port=0, **options))

        yield begin


def says(server: Server, model: str) -> list[list[float]]:
    """The server's scores of the prompts, by the model's name."""
    told = [server.complete(prompt, model=model, prompt_logprobs=0)["prompt_logprobs"] for prompt in PROMPTS]
    return [[float(next(iter(each.values()))["logprob"]) for each in scores[1:]] for scores in told]


def check_serves(server: Server, trainer: Trainer) -> None:
    """It answers as PEFT does with the trainer's newest version, and not as with the one before."""
    told = says(server, trainer.model_id)
    assert distance(told, trainer.scores[trainer.version]) <= CLOSE
    if trainer.version - 1 in trainer.scores:
        assert distance(told, trainer.scores[trainer.version - 1]) >= FAR


@pytest.mark.parametrize("num_versions", [4, pytest.param(30, marks=pytest.mark.soak)])
def test_each_answer_is_by_one_version_which_it_names(
    server: Server, trainers: Callable[..., Trainer], serve: Callable[..., Service], num_versions: int
) -> None:
    """Two adapters at once, on attention and MLP, each in its versions, under concurrent streams. No request fails;
    each token's score is PEFT's of the version that the answer names, and no other's; then nothing of old ones is left.
    """
    before = adapter_folders()
    made = [trainers(model_id, rank=rank, modules=(*ATTENTION, *MLP)) for model_id, rank in RANKS.items()]
    for each in made:
        each.publish()
    service = serve(*made)
    for each in made:
        status = served(service, each)
        assert (status.unprovable, status.artifact) == ({}, "lora")
    over, asked, errors = threading.Event(), list[Asked](), list[BaseException]()

    def client(number: int) -> None:
        chance = random.Random(number)
        model = list(RANKS)[number % len(RANKS)]
        try:
            while not over.is_set():
                prompt = [chance.randrange(VOCAB) for _ in range(12)]
                asked.append(stream(server, model, prompt, num_tokens=NUM_TOKENS + number))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=client, args=(number,), daemon=True) for number in range(NUM_STREAMS)]
    for thread in threads:
        thread.start()
    try:
        for number in range(1, num_versions + 1):
            for each in made:
                if number > 1:
                    each.publish()
            for each in made:
                served(service, each)
            newest = {f"{each.run_id}/{number}" for each in made}
            until(lambda: errors or newest <= {one.version for one in asked})  # noqa: B023
    finally:
        over.set()
        for thread in threads:
            thread.join(120)
    assert not errors, errors[0]
    assert not any(thread.is_alive() for thread in threads)
    for each in made:
        mine = [one for one in asked if one.model == each.model_id]
        assert {one.version for one in mine} == {f"{each.run_id}/{number}" for number in range(1, num_versions + 1)}
        check_answers(each, mine)
        check_serves(server, each)
    until(lambda: len(worker_adapters(server)) == len(RANKS))
    until(lambda: adapter_folders() - before == {each["folder"] for each in loaded(server)})


def check_answers(trainer: Trainer, answers: Sequence[Asked]) -> None:
    """Each token's score is that of the version which the answer names, and of no neighbour."""
    model = peft_model(**trainer.options)
    by_number: dict[int, list[Asked]] = {}
    for each in answers:
        by_number.setdefault(int(each.version.rpartition("/")[2]), []).append(each)
    for number, mine in by_number.items():
        for shown, wanted in ((number, True), (number - 1, False)):
            if not shown:
                continue
            set_version(model, shown)
            for each in mine:
                off = each.distance_to(model)
                assert off <= CLOSE if wanted else off >= FAR, (trainer.model_id, number, shown, off)


@pytest.mark.soak
def test_a_server_that_starts_again_comes_back_with_its_adapter(
    server: Server, trainers: Callable[..., Trainer], serve: Callable[..., Service]
) -> None:
    """Killed: nothing of it stays in shared memory. Behind its restart the service notices, and loads again."""
    trainer = trainers("actor")
    trainer.publish()
    service = serve(trainer)
    served(service, trainer)
    check_serves(server, trainer)
    server.kill()
    until(lambda: service.model_status("actor").engines == {server.url: None}, within_s=30)
    server.start()
    server.wait_until_ready()
    until(lambda: service.model_status("actor").engines == {server.url: f"{trainer.run_id}/1"})
    check_serves(server, trainer)
    assert len(adapter_folders()) == 1


def test_a_service_that_starts_again_takes_over_what_the_server_has(
    server: Server, trainers: Callable[..., Trainer], serve: Callable[..., Service]
) -> None:
    trainer = trainers("actor")
    trainer.publish()
    first = serve(trainer)
    served(first, trainer)
    first.close()
    check_serves(server, trainer)  # nobody's end takes the adapter with it
    trainer.publish()
    served(serve(trainer), trainer)
    check_serves(server, trainer)
    until(lambda: len(loaded(server, "actor")) == 1)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"rank": 128}, "ConfigError: the adapter has rank 128"),
        ({"modules": ("q_proj", "embed_tokens")}, "embed_tokens"),
        ({"seed": 5}, "WrongBaseError"),
    ],
    ids=["rank", "module", "base"],
)
def test_what_does_not_fit_is_refused_and_the_old_adapter_is_served_on(
    server: Server, trainers: Callable[..., Trainer], serve: Callable[..., Service], options: dict[str, Any], said: str
) -> None:
    good = trainers("actor")
    good.publish()
    served(serve(good), good)
    bad = trainers("actor", **options)
    bad.publish()
    assert said in refused(serve(bad), bad)
    check_serves(server, good)
    until(lambda: len(loaded(server, "actor")) == 1)


def test_full_slots_are_refused_until_an_old_answer_has_ended(
    server: Server, trainers: Callable[..., Trainer], serve: Callable[..., Service]
) -> None:
    trainer = trainers("actor")
    trainer.publish()
    service = serve(trainer)
    served(service, trainer)
    others = [f"other-{number}" for number in range(SLOTS - 1)]
    try:
        for name in others:
            folder = Path("/dev/shm", loaded(server)[0]["folder"])
            told = server.http.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(folder)})
            assert told.status_code == 200, told.text
        trainer.publish()
        assert "NoSlotError" in refused(service, trainer)
        assert distance(says(server, "actor"), trainer.scores[1]) <= CLOSE
    finally:
        for name in others:
            server.http.post("/v1/unload_lora_adapter", json={"lora_name": name})
    served(service, trainer)
    check_serves(server, trainer)


def test_a_canary_that_is_off_or_stands_still_fails_the_sync(
    server: Server, trainers: Callable[..., Trainer], serve: Callable[..., Service]
) -> None:
    """The trainer says something else than what it has published; then it publishes other bytes that do nothing, and
    says that they do. The version before is served on each time."""
    trainer = trainers("actor", publish={"canary": list(PROMPTS[0]), "canary_tolerance": CLOSE})
    trainer.publish()
    service = serve(trainer)
    status = served(service, trainer)
    (reading,) = status.canaries.values()
    assert (reading.version, reading.tolerance) == (f"{trainer.run_id}/1", CLOSE)
    assert reading.worst <= CLOSE
    trainer.publish(lie=1.0)
    assert "CanaryError" in refused(service, trainer)
    assert distance(says(server, "actor"), trainer.scores[1]) <= CLOSE
    trainer.publish(mute=True)
    served(service, trainer)
    trainer.publish(mute=True, lie=0.001)
    assert "stands still" in refused(service, trainer)
    trainer.publish()
    (reading,) = served(service, trainer).canaries.values()
    assert reading.moved is not None
    assert reading.moved > CLOSE
    check_serves(server, trainer)


@pytest.mark.soak
def test_a_hundred_versions_leave_nothing(
    server: Server, trainers: Callable[..., Trainer], serve: Callable[..., Service]
) -> None:
    """No file, no slot, no memory: the processes' is flat over the last half."""
    import psutil

    before = set(worker_adapters(server))  # of others, which vLLM's own route leaves in its worker
    trainer = trainers("actor", rank=64)
    trainer.publish()
    service = serve(trainer)
    sizes = []
    for number in range(100):
        trainer.publish()
        served(service, trainer)
        if number % 10 == 9:
            until(lambda: len(loaded(server, "actor")) == 1)
            group = [each for each in psutil.process_iter() if _group_of(each.pid) == server.pid]
            sizes.append(sum(each.memory_info().rss for each in group))
            assert len(set(worker_adapters(server)) - before) == len(loaded(server))
            assert adapter_folders() == {each["folder"] for each in loaded(server)}
    adapter = sum(tensor.numel() * 2 for name, tensor in peft_model(rank=64).named_parameters() if "lora_" in name)
    assert sizes[-1] - sizes[4] < 10 * adapter, sizes  # 50 versions


def _group_of(pid: int) -> int | None:
    with contextlib.suppress(ProcessLookupError):
        return os.getpgid(pid)
    return None


def loaded(server: Server, model: str | None = None) -> list[dict[str, Any]]:
    """What the middleware has, of one model where one is named, with the folder of each."""
    listed = {card["id"]: card.get("root") for card in server.get("/v1/models")["data"]}
    found = server.get("/weightsync/adapters")["adapters"]
    return [
        {**each, "folder": os.path.basename(listed.get(each["model_id"]) or "")}
        for each in found
        if model in (None, each["model_id"])
    ]


def test_the_oracle_tells_versions_apart() -> None:
    """Of PEFT alone: versions lie further apart than FAR, on every prompt."""
    torch.manual_seed(0)
    for rank in RANKS.values():
        model = peft_model(rank=rank)
        scores = []
        for number in (1, 2, 3):
            set_version(model, number)
            scores.append([Asked.scores(model, prompt) for prompt in PROMPTS])
        assert all(distance(one, other) >= FAR for one, other in itertools.pairwise(scores))
