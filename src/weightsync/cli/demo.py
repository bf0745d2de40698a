"""`weightsync demo`: trains a small model here, and proves what engines serve of it."""

from __future__ import annotations

import contextlib
import enum
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from weightsync.cli.shared import MAX_S, refuse_given, told
from weightsync.errors import ConfigError, MissingDependencyError

_NOT_LORA = (
    "ranks", "engines", "delta", "lr", "strategy", "fleet", "models", "mode", "ray", "out", "deadline_s",
)  # fmt: skip


class Engine(enum.StrEnum):
    """What generates."""

    EMBEDDED = "embedded"
    VLLM = "vllm"
    SGLANG = "sglang"


class MovePath(enum.StrEnum):
    """Who moves weights."""

    PUSH = "push"
    PULL = "pull"


class Strategy(enum.StrEnum):
    """How weights are pushed."""

    BROADCAST = "broadcast"
    CUDA_IPC = "cuda_ipc"
    PACKED_CUDA_IPC = "packed_cuda_ipc"


def demo(
    context: typer.Context,
    steps: Annotated[int, typer.Option(min=1, help="How often to train and push.")] = 10,
    ranks: Annotated[int, typer.Option(min=1, max=16, help="Training processes (FSDP2).")] = 2,
    engines: Annotated[int, typer.Option(min=1, max=16, help="Engine processes.")] = 1,
    engine: Annotated[Engine, typer.Option(help="A torch module of ours, or a real server.")] = Engine.EMBEDDED,
    path: Annotated[
        MovePath, typer.Option(help="The trainer brings weights to engines, or publishes them and engines fetch them.")
    ] = MovePath.PUSH,
    delta: Annotated[
        bool, typer.Option("--delta", help="What changed alone is moved, and written into the engine.")
    ] = False,
    lr: Annotated[float, typer.Option(min=1e-9, max=1.0, help="Learning rate of a step with --delta.")] = 2e-6,
    strategy: Annotated[
        Strategy, typer.Option(help="How bytes move. On a CPU the two IPC strategies use shared memory.")
    ] = Strategy.BROADCAST,
    fleet: Annotated[
        int, typer.Option(min=0, max=16, help="So many rollout services behind a controller; one is killed, one added.")
    ] = 0,
    models: Annotated[int, typer.Option(min=1, max=8, help="With --fleet: trainers, served as one set.")] = 2,
    mode: Annotated[str, typer.Option(help="With --fleet: sync, batch-async or fully-async.")] = "batch-async",
    ray: Annotated[bool, typer.Option("--ray", help="Trainers and engines are Ray actors.")] = False,
    lora: Annotated[
        bool, typer.Option("--lora", help="An adapter is trained and moved alone; its base goes once.")
    ] = False,
    rank: Annotated[int, typer.Option(min=1, max=256, help="With --lora: of the adapter.")] = 8,
    size: Annotated[
        str | None,
        typer.Option(help="Of the model: medium, small or tiny. By itself small; medium for deltas into a vLLM."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for timeline.json and timeline.png.")] = Path("demo-output"),
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the summary to this file.")] = None,
    deadline_s: Annotated[float, typer.Option(min=1.0, max=MAX_S, help="Seconds that one sync may take.")] = 30.0,
    timeout_s: Annotated[
        float, typer.Option(min=10.0, max=MAX_S, help="Seconds that its start, or one step, may take.")
    ] = 300.0,
) -> None:
    """Trains a small language model on this machine and pushes every version into an engine.

    Two processes train a Qwen3-architecture model with FSDP2 and AdamW on Python's own library sources. After each
    step the new weights go to an engine in a third process, which generates all the time. A torch module proves by
    digest what it serves, and a server says why it can't; it reports its own loss on text that nobody trained on.

    The engine is a torch module by default; --engine vllm and --engine sglang start a server and sync it through its
    own weight-update routes. --strategy chooses how bytes are pushed, and --ray runs everything as Ray actors.
    With --path pull the trainer publishes each version, at the cost of one copy, and trains on while engines fetch it;
    --strategy and --ray belong to --path push. With --delta each step is one small update at --lr, as in reinforcement
    learning, and what it changed is moved alone; the table then shows how much that is. With --path pull each fifth
    version goes out in full, and the end says how long the engine stood still for either.

    With --fleet 3 --models 2 two trainers publish, a controller waits until both have a version, and three rollout
    services serve both models as a set. One is killed on the way and another one joins; the command fails where any
    answer was of a mixed set, or of another version than it says.

    With --lora one process trains a LoRA adapter by PEFT. Its base goes into the engine once, then each version of the
    adapter alone, by either path; the loss of what the engine serves has to be the trainer's own.

    The table shows, for each version, both losses, bytes, milliseconds of each phase and how long generation was
    paused. The command exits with 1 on any mismatch. It needs no GPU.

    With --delta give it 5 steps or more: some versions go in full, so that both pauses can be told beside each other.

    Example: weightsync demo --steps 5 --path pull --delta
    """
    with told():
        try:
            from weightsync.demo.fleet import run_fleet
            from weightsync.demo.launch import DemoOptions, run_demo
        except ImportError as error:
            raise MissingDependencyError(f"the demo needs more: pip install 'weightsync[demo]' ({error})") from None
        if json is not None and not json.absolute().parent.is_dir():
            raise ConfigError(f"--json {json}: there is no folder {json.parent}")
        options = DemoOptions(
            steps=steps, ranks=ranks, engines=engines, engine=engine, path=path, delta=delta, learning_rate=lr,
            strategy=strategy, ray=ray, size=size or "", out=out, json=json, deadline_s=deadline_s,
            step_timeout_s=timeout_s, services=fleet, models=models, mode=mode, rank=rank,
        )  # fmt: skip
        if not lora:
            refuse_given(context, ("rank",), "it is of an adapter; add --lora")
        if lora:
            refuse_given(context, _NOT_LORA, "--lora runs one trainer and one engine; run it without")
            from weightsync.demo.lora import run_lora

            with _errors_alone():
                problems = run_lora(options)
        elif fleet:
            others = ("ranks", "engines", "engine", "path", "delta", "lr", "strategy", "ray", "out", "deadline_s")
            why = "--fleet runs one trainer a model and embedded engines that pull; run it without"
            refuse_given(context, others, why)
            with _errors_alone():  # the demo says itself what happens
                problems = run_fleet(options)
        else:
            refuse_given(context, ("models", "mode"), "it belongs to a fleet; add --fleet 3")
            if not delta:
                refuse_given(context, ("lr",), "it is the learning rate of a step with --delta; add --delta")
            problems = run_demo(options)
        raise typer.Exit(1 if problems else 0)


@contextlib.contextmanager
def _errors_alone() -> Iterator[None]:
    """Of the library's log; as it was before, afterwards."""
    logger = logging.getLogger("weightsync")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
