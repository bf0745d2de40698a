"""A real SGLang that is pushed to and that follows a rollout service: the oracle holds after each sync.

The oracle: log-probabilities equal those of a server that was started from the same checkpoint, and so does SGLang's
own checksum of its live weights.
"""

from __future__ import annotations

import contextlib
import copy
import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import weightsync
from tests.engines.sglang_kit import Place, Pulls, model_after, place
from tests.engines.sglang_support import NEEDS_SGLANG, PROMPTS, generation, sglang_is_there
from weightsync.errors import WeightSyncError
from weightsync.extract.module import ModuleWeightExtractor
from weightsync.handles.sglang import LOADING, SGLangEngine
from weightsync.handles.sglang_api import SGLangApi
from weightsync.types import DescribeRequest, EngineOp, WeightChunk
from weightsync.types.transfer_messages import Transport

pytestmark = [pytest.mark.timeout(600), pytest.mark.skipif(not sglang_is_there, reason=NEEDS_SGLANG)]
LONG = 300
Make = Callable[..., Pulls]


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with place(tmp_path_factory.mktemp("sglang")) as there:
        yield there


@pytest.fixture
def pulls(there: Place) -> Iterator[Make]:
    with contextlib.ExitStack() as stack:

        def make(**options: Any) -> Pulls:
            made = Pulls(there.server, **options)
            stack.callback(made.close)
            return made

        yield make


def describe(place: Place) -> tuple[bool, str | None]:
    with contextlib.closing(SGLangEngine(SGLangApi(place.server.url))) as engine:
        reply = engine.call(EngineOp.DESCRIBE, DescribeRequest(), timeout_s=10)
    return reply.serving, place.server.api.model_info(timeout_s=10).weight_version


def test_the_file_that_a_service_has_staged_is_loaded(pulls: Make, there: Place) -> None:
    """update_weights_from_disk, from shared memory: the publisher's own segment, without a copy."""
    run = pulls(transport=Transport.SHM, mode="full")
    for steps in (1, 0):
        run.publish(steps)
        status = run.sync()
        assert (status.transport, status.num_deltas) == (Transport.SHM, 0)
        there.serves(steps)
        assert status.checksums == {"sglang": there.checksum(steps)}
        assert "the file that it read was proved" in status.unprovable["sglang"]


def test_a_service_pulls_deltas_over_tcp(pulls: Make, there: Place) -> None:
    """The staging is brought from one version to the next by what has changed; SGLang reads all of it."""
    run = pulls(transport=Transport.TCP, mode="delta")
    run.publish(1)
    assert run.sync().num_deltas == 0
    there.serves(1)
    model = model_after(1)
    near = copy.deepcopy(model)
    with torch.no_grad():
        for name, tensor in near.named_parameters():
            if name.endswith("down_proj.weight"):
                tensor[:, ::16] += 0.5
    run.publish(near)
    status = run.sync()
    assert (status.num_deltas, status.num_patched) == (1, 0)
    assert status.received_bytes < status.total_bytes / 4
    assert there.server.checksum() not in {there.checksum(steps) for steps in range(2)}
    run.publish(model)
    assert run.sync().num_deltas == 1
    there.serves(1)


def test_workers_map_what_a_service_has_staged_and_prove_it(pulls: Make, there: Place) -> None:
    """update_weights_from_tensor with our loader: of one worker even live bytes are proved."""
    run = pulls(load_by="tensor")
    for steps in (0, 1):
        run.publish(steps)
        status = run.sync()
        there.serves(steps)
        assert (status.unprovable, status.checksums) == ({}, {"sglang": there.checksum(steps)})


def test_a_delta_is_written_into_live_weights_and_proved(pulls: Make, there: Place) -> None:
    """With our loader, there and back: what has changed alone is written. SGLang's checksum is a fresh server's."""
    run = pulls(transport=Transport.TCP, mode="delta", load_by="tensor")
    model = model_after(1)
    near = copy.deepcopy(model)
    with torch.no_grad():
        for name, tensor in near.named_parameters():
            if name.endswith(("down_proj.weight", "k_proj.weight")):
                tensor[:, ::16] += 0.5
    sums = []
    for number, version in enumerate((model, near, model, near)):
        run.publish(version)
        status = run.sync()
        assert (status.num_committed, status.num_patched) == (number + 1, int(number > 0)), status
        assert status.unprovable == {}, status
        sums.append(status.checksums["sglang"])
        if version is model:
            there.serves(1)
    assert sums[0] == sums[2] == there.checksum(1)
    assert sums[1] == sums[3] != sums[0]


def test_the_verbs_and_an_engine_that_is_named_by_its_url(there: Place) -> None:
    with (
        weightsync.serve({"m": f"sglang+{there.server.url}"}, port=0) as service,
        weightsync.publish(model_after(0), "m", to=[service.url], dtype="keep", port=0) as publisher,
    ):
        publisher.step()
    there.serves(0)


def test_a_push_by_group(there: Place) -> None:
    model = model_after(1)
    with weightsync.push(model, [f"sglang+{there.server.url}"], dtype="keep") as push:
        for steps in (1, 0):
            model.load_state_dict(model_after(steps).state_dict())
            report = push.step()
            assert report is not None
            there.serves(steps)
            assert report.digests_equal is None
            assert list(report.checksums.values()) == [there.checksum(steps)]


@pytest.mark.parametrize("strategy", ["cuda_ipc", "packed_cuda_ipc"])
def test_a_push_by_memory_of_this_host(there: Place, strategy: str) -> None:
    """The IPC strategies into SGLang; of CPU tensors they take shared memory."""
    model = model_after(0)
    with (
        contextlib.closing(SGLangEngine(SGLangApi(there.server.url), load_by="tensor")) as engine,
        weightsync.push(model, [engine], dtype="keep", strategy=strategy) as push,
    ):
        for steps in (1, 0):
            model.load_state_dict(model_after(steps).state_dict())
            report = push.step()
            assert report is not None
            assert report.digests_equal is True
            there.serves(steps)


def test_a_pickle_is_emitted_only_when_told_to(there: Place) -> None:
    """Without load_by="tensor" the IPC strategies are refused before anything is changed."""
    model = model_after(0)
    with (
        contextlib.closing(SGLangEngine(SGLangApi(there.server.url), engine_id="sglang")) as engine,
        weightsync.push(model, [engine], dtype="keep", strategy="packed_cuda_ipc") as push,
        pytest.raises(WeightSyncError, match="loads a staged file here"),
    ):
        push.step()
    assert describe(there)[0]


class FailsHalfWay(ModuleWeightExtractor):
    """Its second chunk can't be had, once it is armed."""

    armed = False

    def extract_weights(self, dtype: Any = None) -> Iterator[WeightChunk]:
        for number, chunk in enumerate(super().extract_weights(dtype)):
            if self.armed and number == 2:
                raise RuntimeError("armed")
            yield chunk


@pytest.mark.parametrize("load_by", ["group", "tensor"])
def test_an_abort_in_the_middle(there: Place, load_by: str) -> None:
    """By group live weights are half-loaded: paused, under a name that says so, until the next sync. By our loader
    nothing was touched: the old version goes on."""
    model = model_after(1)
    extractor = FailsHalfWay(model, chunk_bytes=1 << 14)
    strategy = "sglang" if load_by == "group" else "packed_cuda_ipc"
    api = SGLangApi(there.server.url)
    with (
        contextlib.closing(SGLangEngine(api, load_by="file" if load_by == "group" else "tensor")) as engine,
        weightsync.push(extractor, [engine], dtype="keep", strategy=strategy) as push,
    ):
        push.step()
        there.serves(1)
        model.load_state_dict(model_after(0).state_dict())
        extractor.armed = True
        with pytest.raises(WeightSyncError, match="armed"):
            push.step()
        serving, name = describe(there)
        if load_by == "group":
            assert (serving, name) == (False, LOADING)
        else:
            assert serving
            there.serves(1)
        extractor.armed = False
        push.step()
        there.serves(0)


def test_a_request_in_flight_spans_a_commit(pulls: Make, there: Place) -> None:
    """Retract: it stands still, goes on with the new weights, and is whole; each token says of which it is."""
    run = pulls(load_by="tensor")
    for _ in range(5):  # on a busy machine it may be over before the server is paused
        run.publish(1)
        run.sync()
        before = there.server.api.model_info(timeout_s=10).weight_version
        run.publish(0)
        generating = Generating(there)
        assert generating.begun.wait(30)
        run.sync()
        told = generating.result()
        versions = [each["version"] for each in told["meta_info"]["weight_versions"]]
        if versions != [before]:
            break
    there.serves(0)
    assert versions == [before, there.server.api.model_info(timeout_s=10).weight_version]
    assert len(told["output_ids"]) == LONG


class Generating:
    """A request that runs in a thread of its own.

    Attributes:
        begun: set when its first token has come.
    """

    def __init__(self, there: Place) -> None:
        self.begun = threading.Event()
        self._last: dict[str, Any] = {}
        self._there = there
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        body = {**generation(PROMPTS[0], max_new_tokens=LONG), "stream": True}
        with self._there.server.http.stream("POST", "/generate", json=body) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    self._last = json.loads(line.removeprefix("data: "))
                    self.begun.set()

    def result(self) -> dict[str, Any]:
        self._thread.join(60)
        assert not self._thread.is_alive()
        return self._last


def test_a_pause_holds_requests_and_continue_lets_them_go(there: Place) -> None:
    """One that comes in the pause, and one that runs when it begins."""
    runs = Generating(there)
    assert runs.begun.wait(30)
    there.server.api.pause("retract", timeout_s=10)
    comes = Generating(there)
    assert not comes.begun.wait(1.0)
    there.server.api.resume(timeout_s=10)
    for each in (runs, comes):
        assert len(each.result()["output_ids"]) == LONG


def test_a_server_that_was_killed_and_started_again_is_brought_back(pulls: Make, there: Place) -> None:
    """It starts from its checkpoint; the service sees that it serves something else, and loads it, unasked."""
    run = pulls()
    run.publish(1)
    run.sync()
    there.serves(1)
    there.server.kill()
    with pytest.raises(WeightSyncError):
        run.engine.call(EngineOp.DESCRIBE, DescribeRequest(), timeout_s=5)
    there.server.start()
    there.server.wait_until_ready()
    end = time.monotonic() + 60
    while there.server.api.model_info(timeout_s=10).weight_version != f"{run.manager.run_id}/1":
        assert time.monotonic() < end, run.service.status()
        time.sleep(0.1)  # between two looks
    there.serves(1)


def test_a_server_that_is_killed_while_it_loads_fails_alone(pulls: Make, there: Place) -> None:
    """The service reports it, goes on trying, and brings it back when it is there again."""
    run = pulls()
    run.publish(0)
    run.sync()
    load = SGLangApi.update_from_disk

    def killed(api: SGLangApi, request: Any, *, timeout_s: float) -> None:
        there.server.kill()
        load(api, request, timeout_s=timeout_s)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SGLangApi, "update_from_disk", killed)
        run.publish(1)
        with pytest.raises(WeightSyncError):
            run.sync(wait_s=5)
        end = time.monotonic() + 60
        while not run.service.status().models["m"].errors:
            assert time.monotonic() < end, run.service.status()
            time.sleep(0.1)  # between two looks
    there.server.start()
    there.server.wait_until_ready()
    run.sync()
    there.serves(1)
