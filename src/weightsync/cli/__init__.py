"""The `weightsync` command."""

from __future__ import annotations

import enum
import importlib.metadata
import logging
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from weightsync.cli import controller, pull, status
from weightsync.cli.shared import told
from weightsync.errors import ConfigError, WeightSyncError

app = typer.Typer(
    help="Moves updated weights from a trainer to rollout engines, and proves what they serve.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and end.")] = False,
) -> None:
    """Moves updated weights from a trainer to rollout engines, and proves what they serve."""
    if version:
        print(f"weightsync {importlib.metadata.version('weightsync')}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        raise typer.Exit(2)


class Engine(enum.StrEnum):
    """What generates in the demo."""

    EMBEDDED = "embedded"
    VLLM = "vllm"


class MovePath(enum.StrEnum):
    """Who moves weights in the demo."""

    PUSH = "push"
    PULL = "pull"


class Strategy(enum.StrEnum):
    """How weights are pushed in the demo."""

    BROADCAST = "broadcast"
    CUDA_IPC = "cuda_ipc"
    PACKED_CUDA_IPC = "packed_cuda_ipc"


@app.command()
def demo(
    steps: Annotated[int, typer.Option(min=1, help="How often to train and push.")] = 10,
    ranks: Annotated[int, typer.Option(min=1, max=16, help="Training processes (FSDP2).")] = 2,
    engines: Annotated[int, typer.Option(min=1, max=16, help="Engine processes.")] = 1,
    engine: Annotated[Engine, typer.Option(help="A torch module of ours, or a real vLLM server.")] = Engine.EMBEDDED,
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
    size: Annotated[str, typer.Option(help="Of the model: small or tiny.")] = "small",
    out: Annotated[Path, typer.Option(help="Folder for timeline.json and timeline.png.")] = Path("demo-output"),
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the summary to this file.")] = None,
    deadline_s: Annotated[float, typer.Option(min=1.0, help="Seconds that one sync may take.")] = 30.0,
    timeout_s: Annotated[float, typer.Option(min=10.0, help="Seconds that its start, or one step, may take.")] = 300.0,
) -> None:
    """Trains a small language model on this machine and pushes every version into an engine.

    Two processes train a Qwen3-architecture model with FSDP2 and AdamW on Python's own library sources. After each
    step the new weights go to an engine in a third process, which generates all the time. The engine proves by digest
    what it got, and reports its own loss on text that nobody trained on.

    The engine is a torch module by default; --engine vllm starts a vLLM server and syncs it through vLLM's own
    weight-update routes. --strategy chooses how bytes are pushed, and --ray runs everything as Ray actors.
    With --path pull the trainer publishes each version, at the cost of one copy, and trains on while engines fetch it;
    --strategy and --ray belong to --path push. With --delta each step is one small update at --lr, as in reinforcement
    learning, and what it changed is moved alone; the table then shows how much that is.

    With --fleet 3 --models 2 two trainers publish, a controller waits until both have a version, and three rollout
    services serve both models as a set. One is killed on the way and another one joins; the command fails where any
    answer was of a mixed set, or of another version than it says.

    The table shows, for each version, both losses, bytes, milliseconds of each phase and how long generation was
    paused. The command exits with 1 on any mismatch. It needs no GPU.
    """
    try:
        from weightsync.demo.launch import DemoOptions, run_demo
    except ImportError as error:
        print(f"the demo needs more packages: pip install 'weightsync[demo]' ({error})", file=sys.stderr)
        raise typer.Exit(2) from None
    if fleet:
        if ray or delta or engine is not Engine.EMBEDDED or strategy is not Strategy.BROADCAST:
            print("ConfigError: --fleet runs embedded engines that pull: leave the other parts out", file=sys.stderr)
            raise typer.Exit(2)
        _fleet_demo(fleet, models, mode, steps, size, json, timeout_s)
    options = DemoOptions(
        steps=steps,
        ranks=ranks,
        engines=engines,
        engine=engine,
        path=path,
        delta=delta,
        learning_rate=lr,
        strategy=strategy,
        ray=ray,
        size=size,
        out=out,
        json=json,
        deadline_s=deadline_s,
        step_timeout_s=timeout_s,
    )
    try:
        problems = run_demo(options)
    except WeightSyncError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        raise typer.Exit(2 if isinstance(error, ConfigError) else 1) from None
    raise typer.Exit(1 if problems else 0)


def _fleet_demo(
    services: int, models: int, mode: str, steps: int, size: str, json: Path | None, timeout_s: float
) -> NoReturn:
    from weightsync.demo.fleet import FleetOptions, run_fleet

    options = FleetOptions(
        services=services, models=models, mode=mode, steps=steps, size=size, json=json, step_timeout_s=timeout_s
    )
    logging.getLogger("weightsync").setLevel(logging.ERROR)  # the demo says itself what happens
    with told():
        raise typer.Exit(1 if run_fleet(options) else 0)
    raise AssertionError


pull.register(app)
controller.register(app)
status.register(app)


def main() -> None:
    """Entry point."""
    app()


if __name__ == "__main__":
    main()
