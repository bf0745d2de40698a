"""The weight transfer that TRL is given: real agents, hosts and engines; TRL's own trainer is in tests/adapters."""

from __future__ import annotations

import dataclasses
import gc
import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import weightsync
from tests.multiproc.spine import TOKEN, build, shard, step
from tests.standins.processes import free_port, run_ranks
from weightsync.adapters.trl import WeightTransfer
from weightsync.engine.embedded import EmbeddedEngine
from weightsync.engine.server import EngineServer
from weightsync.errors import ConfigError, SyncFailedError
from weightsync.load.module import ModuleWeightLoader
from weightsync.trainer.offload_steps import OffloadReport


def gathered(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """As TRL's trainer gives it: each step of it is a collective of all ranks."""
    kept = model.state_dict().keys()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name not in kept:
            continue
        yield name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def same(one: nn.Module, other: nn.Module) -> bool:
    there = dict(gathered(other))
    return all(torch.equal(tensor.to(there[name].dtype), there[name]) for name, tensor in gathered(one))


def synced(transfer: WeightTransfer, model: nn.Module) -> None:
    """One sync, as TRL does it."""
    transfer.pause()
    transfer.send_weights(gathered(model))
    transfer.resume()


@pytest.fixture
def engine() -> Iterator[tuple[nn.Module, str]]:
    """An engine behind HTTP, and its URL."""
    model = build(99, dtype=torch.bfloat16)
    made = EmbeddedEngine.of(ModuleWeightLoader(model), engine_id="actor")
    server = EngineServer(made, port=0, token=TOKEN)
    yield model, server.start()
    server.close()
    made.close()


def ranks_main(rank: int, world_size: int, given: dict[str, Any]) -> list[int]:
    """Two ranks walk the iterator in step; rank 0 alone has a transfer, as TRL's does."""
    model = shard(build(5), "shard0", world_size)
    transfer = WeightTransfer(token=TOKEN, **given) if rank == 0 else None
    sent = []
    for _ in range(3):
        step(model)
        if transfer is None:
            for _ in gathered(model):
                pass
        else:
            synced(transfer, model)
            assert transfer.version is not None
            sent.append(transfer.version.number)
        torch.distributed.barrier()
    if transfer is not None:
        transfer.destroy()
    return sent


def test_ranks_that_gather_in_step_publish(engine: tuple[nn.Module, str]) -> None:
    """A host serves the last version when `resume` has returned on rank 0."""
    model, url = engine
    with weightsync.serve({"actor": url}, token=TOKEN, port=0) as service:
        sent = run_ranks(ranks_main, 2, {"model_id": "actor", "to": service.url, "port": 0})
        assert sent == [[1, 2, 3], []]
    wanted = build(5)
    for _ in range(3):
        step(wanted)
    assert same(wanted, model)


def test_ranks_that_gather_in_step_push(engine: tuple[nn.Module, str]) -> None:
    model, url = engine
    assert run_ranks(ranks_main, 2, {"engines": url}) == [[1, 2, 3], []]
    wanted = build(5)
    for _ in range(3):
        step(wanted)
    assert same(wanted, model)


def test_a_version_that_was_not_published_is_not_said_to_be_served(caplog: pytest.LogCaptureFixture) -> None:
    """Seen red: the host served the one before, and was taken to have this one."""
    model, served = build(5), build(99, dtype=torch.bfloat16)
    with weightsync.serve({"actor": served}, token=TOKEN, port=0) as service:
        transfer = WeightTransfer("actor", to=service.url, token=TOKEN, port=0)
        synced(transfer, model)
        report = transfer.report
        assert isinstance(report, OffloadReport)
        transfer.report = dataclasses.replace(report, published=False, why="all memory is read")
        transfer.wait_served()
        assert transfer.not_serving == {"the trainer": "it was not published: all memory is read"}
        assert "was not published, training goes on" in caplog.text
        transfer.destroy()


@pytest.mark.parametrize("by_config", [False, True])
def test_a_version_is_served_when_resume_returns_and_one_after_the_end_begins_a_new_run(*, by_config: bool) -> None:
    """Seen red: who was named by the configuration alone was told, and not waited for."""
    model, served = build(5), build(99, dtype=torch.bfloat16)
    with weightsync.serve({"actor": served}, token=TOKEN, port=0) as service:
        told: dict[str, Any] = {"config": {"publish": {"to": [service.url]}}} if by_config else {"to": service.url}
        transfer = WeightTransfer("actor", token=TOKEN, port=0, **told)
        runs = []
        for number in (1, 2):
            for _ in range(2):
                step(model)
                synced(transfer, model)
                assert same(model, served)
            assert transfer.version is not None
            assert (transfer.version.number, transfer.not_serving) == (2, {})
            runs.append(transfer.version.run_id)
            transfer.destroy()
            transfer.destroy()
            assert transfer.endpoint is None, number
    assert runs[0] != runs[1]


def test_the_end_waits_where_training_goes_well_while_an_error_is_handled() -> None:
    """A training that failed is gone on with in an `except` block; TRL begins a transfer at the first alone. Seen red:
    the error outside was taken for this training's, and hosts never got the last version."""
    waited = []

    class Noted(WeightTransfer):
        def close(self, *, wait: bool = True) -> None:
            waited.append(wait)
            super().close(wait=wait)

    transfer, model = Noted("actor", port=0, last_wait_s=0), build(5)

    def train(*, fails: bool) -> None:
        try:
            synced(transfer, model)
            if fails:
                raise RuntimeError("out of memory")
        finally:
            transfer.destroy()

    transfer.init_weight_transfer()
    try:
        train(fails=True)
    except RuntimeError:
        train(fails=False)
        with pytest.raises(RuntimeError, match="out of memory"):
            train(fails=True)
    train(fails=False)
    assert waited == [False, True, False, True]


@pytest.mark.parametrize("pushes", [False, True])
def test_the_end_gives_the_copy_back(engine: tuple[nn.Module, str], pushes: bool) -> None:
    """Seen red: a whole model stayed in the trainer's memory for as long as it had the transfer."""
    settings: dict[str, Any] = {"engines": engine[1]} if pushes else {"model_id": "actor", "port": 0, "last_wait_s": 0}
    transfer = WeightTransfer(token=TOKEN, **settings)
    for _ in range(2):
        synced(transfer, build(5))
        held = [weakref.ref(tensor) for tensor in transfer._weights.values()]
        assert held
        transfer.destroy()
        gc.collect()
        assert [tensor() for tensor in held if tensor() is not None] == []


def test_an_iterator_is_walked_to_its_end_where_a_tensor_is_wrong() -> None:
    """Others walk theirs in step. Nothing is sent, and the next one is version 1."""
    model, walked = build(5), []

    def wrong() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in gathered(model):
            walked.append(name)
            yield "twice", tensor

    transfer = WeightTransfer("actor", port=0)
    with pytest.raises(weightsync.WeightSyncError, match="comes twice"):
        transfer.send_weights(wrong())
    assert walked == [name for name, _ in gathered(model)]
    assert transfer.version is None
    transfer.send_weights(gathered(model))
    assert transfer.version is not None
    assert transfer.version.number == 1
    transfer.destroy()


@pytest.mark.alone
def test_a_host_that_is_away_costs_its_time_once() -> None:
    """One that never answers; then a second at each sync. Training goes on."""
    dead = f"http://127.0.0.1:{free_port()}"
    transfer = WeightTransfer("actor", to=dead, token=TOKEN, port=0, wait_s=5.0, last_wait_s=1.0)
    model = build(5)
    for _ in range(2):
        began_s = time.monotonic()
        synced(transfer, model)
        assert time.monotonic() - began_s < 10.0
        assert list(transfer.not_serving) == [dead]
    transfer.destroy()


def test_an_engine_that_is_gone_fails_a_push() -> None:
    transfer = WeightTransfer(engines=f"weightsync+http://127.0.0.1:{free_port()}", token=TOKEN)
    with pytest.raises((ConfigError, SyncFailedError, weightsync.EngineUnreachableError)):
        transfer.send_weights(gathered(build(5)))
    transfer.destroy()


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"to": "http://a", "engines": "http://b"}, "one of the two"),
        ({"wait_s": -1.0}, "wait_s"),
        ({"engines": "http://b", "controller": "http://c"}, "the controller http://c orders pushes"),
    ],
)
def test_settings_that_make_no_sense_are_refused(given: dict[str, Any], match: str) -> None:
    """Seen red of a controller: TRL took a version for served whose push was not due."""
    with pytest.raises(ConfigError, match=match):
        WeightTransfer(**given)


def test_a_controller_that_the_configuration_names_is_refused_with_the_first_weights() -> None:
    """Which the main process alone sends: the other nodes may have no such file."""
    transfer = WeightTransfer(engines="http://b", config={"push": {"controller": "http://c"}})
    with pytest.raises(ConfigError, match="the controller http://c orders pushes"):
        transfer.send_weights(gathered(build(5)))
    transfer.destroy()
