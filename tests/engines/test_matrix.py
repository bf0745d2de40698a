"""Every trainer over every strategy into every engine: {module, FSDP2, DeepSpeed, Megatron} x {broadcast, cuda_ipc,
packed_cuda_ipc} x {module, vLLM}, real processes, real optimizer steps.

A trainer takes a step for each strategy and pushes it to both engines in one sync, so one job makes six cells; the
engines stay, and one job takes them over from the other. In the module engine every live byte has to be the trainer's
cast weight; for vLLM the oracle has to hold.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engines.vllm_support import DIFFERENT, PACKS, SAME, Oracle, Server, distance, save_checkpoint
from tests.multiproc.spine import TOKEN
from tests.multiproc.trainers import KINDS, build_trainer, cast_bytes_of, hf_engine, hf_model
from tests.standins.processes import Child, children, free_port, in_gloo_world
from weightsync.handles.fanout import EngineFanout
from weightsync.handles.http import HttpEngine
from weightsync.handles.vllm import VllmEngine, VllmHttpApi
from weightsync.trainer.push import PushSync
from weightsync.transfer.registry import strategy_named

STRATEGIES = ("broadcast", "cuda_ipc", "packed_cuda_ipc")
LOADERS = ("module", "vllm")
RANKS = {"module": 1, "fsdp": 2, "deepspeed": 2, "megatron": 2}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Synced:
    """What one sync left in both engines.

    Attributes:
        report: `version`, `digests_equal`, `unprovable`, `num_chunks` of the trainer's report.
        held: every byte of the module engine, by name.
        expected: every byte that it had to be, made without the library.
        logprobs: the vLLM server's.
        checkpoint: folder with the weights of this version.
    """

    report: dict[str, Any]
    held: dict[str, bytes]
    expected: dict[str, bytes]
    logprobs: list[list[float]]
    checkpoint: Path


def rank_main(rank: int, world_size: int, kind: str, urls: dict[str, str], folder: str, conn: Any) -> None:
    """Takes strategies from `conn`: steps, syncs, saves the truth, says how it went."""
    trainer = build_trainer(kind, rank, world_size)
    engines = [
        HttpEngine(urls["module"], engine_id="module", token=TOKEN),
        VllmEngine(VllmHttpApi(urls["vllm"]), engine_id="vllm"),
    ]
    conn.send("ready")
    for number, strategy in enumerate(iter(conn.recv, None), 1):
        trainer.step(number)
        push = PushSync(
            trainer.extractor,
            EngineFanout(engines) if rank == 0 else None,
            strategy=strategy_named(strategy),
            dtype="bfloat16",
            transfer_timeout_s=30.0,
            join_timeout_s=15.0,
        )
        push.initialize()
        report = push.sync_weights(number)
        truth = trainer.truth()
        push.close()
        if rank == 0:
            path = Path(folder) / f"{kind}-{strategy}.safetensors"
            save_file({name: t.to(torch.bfloat16).contiguous() for name, t in truth.items()}, path)
            facts = {
                "version": report.version.number,
                "digests_equal": report.digests_equal,
                "unprovable": dict(report.unprovable),
                "num_chunks": report.num_chunks,
            }
            conn.send((facts, cast_bytes_of(truth), str(path)))
    os._exit(0)  # Megatron's and DeepSpeed's groups have nothing left to say


def run_job(kind: str, ranks: Sequence[Child], module: Child, server: Server, folder: Path) -> dict[str, Synced]:
    """All strategies of one trainer."""
    done: dict[str, Synced] = {}
    for rank in ranks:
        assert rank.recv(90) == "ready"
    for strategy in STRATEGIES:
        for rank in ranks:
            rank.conn.send(strategy)
        report, expected, path = ranks[0].recv(90)
        module.conn.send("weights")
        done[strategy] = Synced(
            report=report,
            held=module.recv(30),
            expected=expected,
            logprobs=server.logprobs(),
            checkpoint=save_checkpoint(folder / f"{kind}-{strategy}", hf_model(), load_file(path)),
        )
    return done


@pytest.fixture(scope="module")
def jobs(
    starting_server: Server, oracle: Oracle, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Synced] | Exception]:
    """Every trainer's job, one after the other; one that fails fails its own cells.

    All are built at once, while vLLM starts.
    """
    folder = tmp_path_factory.mktemp("matrix")
    done: dict[str, dict[str, Synced] | Exception] = {}
    with children() as start:
        module = start(hf_engine, False, talk=True, name="module")
        urls = {"module": module.recv(60), "vllm": starting_server.url}
        jobs = {kind: _start_job(start, kind, urls, folder) for kind in KINDS}
        starting_server.wait_until_ready()
        for kind, ranks in jobs.items():
            try:
                done[kind] = job = run_job(kind, ranks, module, starting_server, folder)
                oracle.learn([synced.checkpoint for synced in job.values()])
            except Exception as error:
                done[kind] = error
            for rank in ranks:
                rank.kill()
    return done


def _start_job(start: Callable[..., Child], kind: str, urls: dict[str, str], folder: Path) -> list[Child]:
    port, world_size = free_port(), RANKS[kind]
    return [
        start(
            in_gloo_world, rank, world_size, port, rank_main, (kind, urls, str(folder)), talk=True,
            name=f"{kind}-{rank}",
        )
        for rank in range(world_size)
    ]  # fmt: skip


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("kind", "strategy", "loader"), list(itertools.product(KINDS, STRATEGIES, LOADERS)))
def test_cell(
    jobs: dict[str, dict[str, Synced] | Exception], oracle: Oracle, kind: str, strategy: str, loader: str
) -> None:
    """What the engine holds is what the trainer has, after a step that shows."""
    done = jobs[kind]
    if isinstance(done, Exception):
        raise done
    synced = done[strategy]
    number = STRATEGIES.index(strategy)
    assert synced.report["version"] == number + 1
    assert synced.report["num_chunks"] >= 3
    if loader == "module":
        assert synced.held == synced.expected
        if number:
            assert synced.held != done[STRATEGIES[number - 1]].held
        assert "module" not in synced.report["unprovable"]
        return
    assert distance(synced.logprobs, oracle.logprobs(synced.checkpoint)) <= SAME
    if number:
        before = oracle.logprobs(done[STRATEGIES[number - 1]].checkpoint)
        assert distance(synced.logprobs, before) >= DIFFERENT
    assert list(synced.report["unprovable"]) == ["vllm"] * PACKS
