"""A real SGLang serves LoRA adapters: each answer is by one version, which it names, and its scores are PEFT's.

PEFT is the oracle: the version's weights in the same base, in plain transformers, in this process.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import weightsync
from tests.engines.lora_kit import (
    ATTENTION,
    MLP,
    Trainer,
    adapter_folders,
    peft_model,
    refused,
    scores_of,
    served,
    set_version,
    until,
)
from tests.engines.sglang_support import (
    NEEDS_SGLANG,
    Server,
    Starter,
    build_model,
    distance,
    generation,
    save_checkpoint,
    sglang_is_there,
)
from tests.engines.vllm_support import PROMPTS
from tests.standins.processes import children
from weightsync.handles.lora_messages import SGLANG_VARIABLE
from weightsync.handles.two_kinds import SGLangServerEngine
from weightsync.verbs.serving import Service

pytestmark = [pytest.mark.timeout(400), pytest.mark.skipif(not sglang_is_there, reason=NEEDS_SGLANG)]
SLOTS = 3
CLOSE, FAR = 1e-4, 0.2
"""SGLang and PEFT compute the same float32 weights in other orders; of two versions some token's are further apart."""
NUM_STREAMS, NUM_TOKENS = 3, 40
OPTIONS = (
    *("--enable-lora", "--lora-backend", "torch_native", "--max-lora-rank", "16", "--served-model-name", "base"),
    *("--lora-target-modules", *ATTENTION, *MLP, "--max-loras-per-batch", str(SLOTS + 1)),
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("lora")
    starter = Starter()
    made = Server(
        starter, save_checkpoint(folder / "base", build_model()), folder / "server", options=OPTIONS,
        env={SGLANG_VARIABLE: "1"},
    )  # fmt: skip
    try:
        made.start()
        made.wait_until_ready()
        yield made
    finally:
        made.close()
        starter.close()
        weightsync.memory.reclaim_dead()


@pytest.fixture
def trainer() -> Iterator[Callable[..., Trainer]]:
    """Makes trainers, each in a process of its own."""
    with children() as start:
        yield lambda **options: Trainer(start, "actor", {"engine": "sglang", **options})


@pytest.fixture
def serve(server: Server) -> Iterator[Callable[[Trainer], Service]]:
    """Starts services beside the server."""
    with contextlib.ExitStack() as stack:

        def begin(trainer: Trainer) -> Service:
            models = {"actor": f"sglang+{server.url}"}
            return stack.enter_context(weightsync.serve(models, sources=[trainer.endpoint], port=0))

        yield begin


def says(server: Server) -> list[list[float]]:
    """The server's scores of the prompts, by the model's name."""
    scores = []
    for prompt in PROMPTS:
        told = server.http.post("/generate", json={**generation(prompt), "lora_path": "actor"})
        assert told.status_code == 200, told.text
        scores.append([float(each[0]) for each in told.json()["meta_info"]["input_token_logprobs"][1:]])
    return scores


def check_serves(server: Server, trainer: Trainer, version: int | None = None) -> None:
    """It answers as PEFT does with that version, and not as with the one before."""
    version = trainer.version if version is None else version
    told = says(server)
    assert distance(told, trainer.scores[version]) <= CLOSE
    if version - 1 in trainer.scores:
        assert distance(told, trainer.scores[version - 1]) >= FAR


def loaded(server: Server) -> list[dict[str, Any]]:
    """What the middleware has."""
    with contextlib.closing(SGLangServerEngine(server.url)) as engine:
        assert engine.adapters(timeout_s=10).max_loras == SLOTS
    found: list[dict[str, Any]] = server.http.get("/weightsync/adapters").json()["adapters"]
    return found


def stream(server: Server, prompt: list[int]) -> tuple[str, list[int], list[float]]:
    """One streamed answer: its version, as header and all events say, its tokens, and their scores."""
    body = generation(prompt, max_new_tokens=NUM_TOKENS, temperature=1.0)
    body |= {"lora_path": "actor", "stream": True, "logprob_start_len": -1}
    pairs: list[list[Any]] = []
    with server.http.stream("POST", "/generate", json=body, timeout=120) as response:
        assert response.status_code == 200, response.read()
        version = response.headers["x-weightsync-version"]
        for line in response.iter_lines():
            if line.startswith("data: {"):
                meta = json.loads(line.removeprefix("data: "))["meta_info"]
                assert meta["weight_version"] == version
                end = meta["completion_tokens"]
                assert meta["weight_versions"] == [{"version": version, "start": 0, "end": end}]
                assert meta["base_weight_version"] == "default"
                pairs = meta["output_token_logprobs"]
    assert len(pairs) == NUM_TOKENS
    return version, [int(pair[1]) for pair in pairs], [float(pair[0]) for pair in pairs]


def test_each_answer_is_by_one_version_which_it_names(
    server: Server, trainer: Callable[..., Trainer], serve: Callable[[Trainer], Service]
) -> None:
    """Three versions under streams: none fails, each token's score is PEFT's of the version that the answer names and
    of no neighbour; then one adapter is left, and one folder."""
    made = trainer()
    made.publish()
    service = serve(made)
    status = served(service, made)
    assert (status.unprovable, status.artifact) == ({}, "lora")
    over, asked, errors = threading.Event(), list[tuple[list[int], Any]](), list[BaseException]()

    def client(number: int) -> None:
        prompt = [(5 * number + 3 * place) % 97 for place in range(12)]
        try:
            while not over.is_set():
                asked.append((prompt, stream(server, prompt)))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=client, args=(number,), daemon=True) for number in range(NUM_STREAMS)]
    for thread in threads:
        thread.start()
    try:
        for number in (1, 2, 3):
            if number > 1:
                made.publish()
            served(service, made)
            until(lambda: errors or f"{made.run_id}/{number}" in {one[0] for _, one in asked})  # noqa: B023
    finally:
        over.set()
        for thread in threads:
            thread.join(120)
    assert not errors, errors[0]
    assert {one[0] for _, one in asked} == {f"{made.run_id}/{number}" for number in (1, 2, 3)}
    model = peft_model(engine="sglang")
    for number in (1, 2, 3):
        set_version(model, number)
        for prompt, (version, tokens, logprobs) in asked:
            said = scores_of(model, [*prompt, *tokens])[len(prompt) - 1 :]
            off = max(abs(one - other) for one, other in zip(said, logprobs, strict=True))
            mine = int(version.rpartition("/")[2])
            assert off <= CLOSE if mine == number else off >= FAR, (version, number, off)
    check_serves(server, made)
    until(lambda: len(loaded(server)) == 1)
    until(lambda: len(adapter_folders()) == 1)
    cards = server.http.get("/v1/models").json()["data"]
    assert [card["id"] for card in cards] == ["base", "actor"]


@pytest.mark.soak
def test_a_server_that_starts_again_comes_back_with_its_adapter(
    server: Server, trainer: Callable[..., Trainer], serve: Callable[[Trainer], Service]
) -> None:
    """Killed: nothing of it stays in shared memory. Behind its restart the service notices, and loads again."""
    made = trainer()
    made.publish()
    service = serve(made)
    served(service, made)
    server.kill()
    until(lambda: service.model_status("actor").engines == {server.url: None}, within_s=30)
    server.start()
    server.wait_until_ready()
    until(lambda: service.model_status("actor").engines == {server.url: f"{made.run_id}/1"})
    check_serves(server, made)
    assert len(adapter_folders()) == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"rank": 32}, "ConfigError: the adapter has rank 32"),
        ({"modules": ("q_proj", "v_proj", "embed_tokens")}, "ConfigError: SGLang has no place for it"),
        ({"seed": 5}, "WrongBaseError"),
    ],
    ids=["rank", "module", "base"],
)
def test_what_does_not_fit_is_refused_and_the_old_adapter_is_served_on(
    server: Server, trainer: Callable[..., Trainer], serve: Callable[[Trainer], Service], options: dict[str, Any],
    said: str,
) -> None:  # fmt: skip
    good = trainer()
    good.publish()
    first = serve(good)
    served(first, good)
    bad = trainer(**options)
    bad.publish()
    assert said in refused(serve(bad), bad)
    check_serves(server, good)
    until(lambda: len(loaded(server)) == 1)


def test_full_slots_are_refused_until_one_is_free(
    server: Server, trainer: Callable[..., Trainer], serve: Callable[[Trainer], Service], tmp_path: Path
) -> None:
    made = trainer()
    made.publish()
    service = serve(made)
    served(service, made)
    until(lambda: len(loaded(server)) == 1)
    peft_model(engine="sglang").save_pretrained(tmp_path)
    others = [f"other-{number}" for number in range(SLOTS - 1)]
    try:
        for name in others:
            body = {"lora_name": name, "lora_path": str(tmp_path), "pinned": True}
            told = server.http.post("/load_lora_adapter", json=body)
            assert told.status_code == 200, told.text
        made.publish()
        assert "NoSlotError" in refused(service, made)
        check_serves(server, made, 1)
    finally:
        for name in others:
            server.http.post("/unload_lora_adapter", json={"lora_name": name})
    served(service, made)
    check_serves(server, made)


def test_a_canary_that_is_off_or_stands_still_fails_the_sync(
    server: Server, trainer: Callable[..., Trainer], serve: Callable[[Trainer], Service]
) -> None:
    """The trainer says something else than what it has published; then it publishes other bytes that do nothing, and
    says that they do. The version before is served on each time."""
    made = trainer(publish={"canary": list(PROMPTS[0]), "canary_tolerance": CLOSE})
    made.publish()
    service = serve(made)
    (reading,) = served(service, made).canaries.values()
    assert (reading.version, reading.tolerance) == (f"{made.run_id}/1", CLOSE)
    assert reading.worst <= CLOSE
    made.publish(lie=1.0)
    assert "CanaryError" in refused(service, made)
    check_serves(server, made, 1)
    made.publish(mute=True)
    served(service, made)
    made.publish(mute=True, lie=0.001)
    assert "stands still" in refused(service, made)
    made.publish()
    served(service, made)
    assert distance(says(server), made.scores[made.version]) <= CLOSE
