"""The main job: two training ranks and an engine, each in its own process, and a table of what they prove."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import queue
import secrets
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import msgspec
from rich.console import Console

from weightsync.demo.engine import TOKEN_VARIABLE
from weightsync.demo.model import model_size
from weightsync.demo.ray_job import RayJob
from weightsync.demo.summary import StepRow, summarize, verdict, write_summary
from weightsync.demo.table import DELTA_PHASES, PHASES, PULL_PHASES, StepTable
from weightsync.demo.trainer import TrainerOptions
from weightsync.errors import ConfigError, WeightSyncError, error_from_dict
from weightsync.observe import write_chrome_trace, write_timeline_png
from weightsync.types import Deadline, PhaseRecord


@dataclasses.dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """How the demo runs.

    Attributes:
        steps: how often it trains and pushes.
        ranks: training processes.
        engines: engine processes.
        engine: what generates: "embedded" (a torch module of ours) or "vllm" (a vLLM server).
        path: "push": the trainer brings weights to engines; "pull": it publishes them, and engines fetch them.
        delta: whether what changed alone moves; the trainer then makes one small update a step.
        learning_rate: of these updates.
        strategy: how bytes are pushed: "broadcast", "cuda_ipc" or "packed_cuda_ipc".
        ray: whether trainers and engines are Ray actors.
        size: "small" (2.8 million parameters) or "tiny".
        out: folder for timeline.json and timeline.png.
        json: where to write the summary; None writes none.
        deadline_s: of one sync.
        timeout_s: of the whole demo.
    """

    steps: int = 10
    ranks: int = 2
    engines: int = 1
    engine: str = "embedded"
    path: str = "push"
    delta: bool = False
    learning_rate: float = 2e-6
    strategy: str = "broadcast"
    ray: bool = False
    size: str = "small"
    out: Path = Path("demo-output")
    json: Path | None = None
    deadline_s: float = 30.0
    timeout_s: float = 300.0

    def of_trainer(self, rank: int) -> TrainerOptions:
        """What one rank is told."""
        return TrainerOptions(
            rank=rank,
            world_size=self.ranks,
            size=self.size,
            strategy=self.strategy,
            deadline_s=self.deadline_s,
            path=self.path,
            delta_learning_rate=self.learning_rate if self.delta else None,
        )


class DemoError(WeightSyncError):
    """A process of the demo failed; says which, and shows the end of what it wrote."""


def run_demo(options: DemoOptions, console: Console | None = None) -> list[str]:
    """Runs the demo to its end and writes what it measured.

    Returns:
        Problems, in words; empty where every version was proved, the losses agree and the engine's fell.

    Raises:
        WeightSyncError: a process failed or the time ran out. No process is left behind.
    """
    model_size(options.size)  # refuses an unknown one before anything starts
    if options.path == "pull" and options.ray:
        raise ConfigError("--path pull runs in processes of its own so far: leave --ray out")
    if options.path == "pull" and options.strategy != DemoOptions.strategy:
        raise ConfigError("--strategy says how weights are pushed: leave it out with --path pull")
    if options.delta and options.path == "push" and (options.strategy != "broadcast" or options.engine == "vllm"):
        raise ConfigError(
            "--delta with --path push needs --strategy broadcast (others lend whole tensors) and --engine embedded (a "
            "vLLM is loaded whole); with --path pull any engine takes deltas"
        )
    if not 0 < options.learning_rate < 1:
        raise ConfigError(f"a learning rate lies between 0 and 1, not {options.learning_rate}")
    console = console or Console()
    rows: list[StepRow] = []
    phases: tuple[PhaseRecord, ...] = ()
    options.out.mkdir(parents=True, exist_ok=True)
    phases_shown = PHASES if options.path == "push" else DELTA_PHASES if options.delta else PULL_PHASES
    with (
        StepTable(console, phases=phases_shown, deltas=options.delta) as table,
        (RayJob if options.ray else _Processes)(options) as job,
    ):
        engines = f"{options.engine} engine{' (about a minute)' if options.engine == 'vllm' else ''}"
        table.status(f"starting {options.engines} {engines} and {options.ranks} trainer processes")
        for message in job.messages():
            if "row" in message:
                rows.append(StepRow(**message["row"]))
                table.add(rows[-1])
            elif "phases" in message:
                phases = msgspec.convert(message["phases"], tuple[PhaseRecord, ...])
    summary = summarize(rows, num_steps_asked=options.steps, by_deltas=options.delta)
    trace = write_chrome_trace(phases, options.out / "timeline.json")
    picture = write_timeline_png(
        _without_start(phases),
        options.out / "timeline.png",
        title="weightsync demo: who waited for whom",
        focus_s=_middle_sync(phases),
    )
    if options.json is not None:
        write_summary(summary, options.json)
    problems = verdict(summary)
    _show_end(console, rows, summary, problems, [trace, picture])
    return problems


def _without_start(phases: tuple[PhaseRecord, ...]) -> tuple[PhaseRecord, ...]:
    """From the first training step on: engines generate while trainers still start."""
    start_s = min((phase.start_s for phase in phases if phase.name == "train"), default=0.0)
    return tuple(phase for phase in phases if phase.start_s >= start_s)


def _middle_sync(phases: tuple[PhaseRecord, ...]) -> tuple[float, float] | None:
    """Start and end of a sync in the middle of the run, seen from the trainer, a little room on either side."""
    trainer = [phase for phase in phases if phase.track.startswith("trainer")]
    starts = sorted(phase.start_s for phase in trainer if phase.name == "wait for begin")
    ends = sorted(phase.end_s for phase in trainer if phase.name == "wait for resume")
    published = sorted(phase.start_s for phase in trainer if phase.name == "offload")
    if len(published) > 1:  # of the pull path: from one publication to the next
        middle = (len(published) - 1) // 2
        return published[middle] - 0.01, published[middle + 1] + 0.01
    if not starts or len(starts) != len(ends):
        return None
    start_s, end_s = starts[len(starts) // 2], ends[len(ends) // 2]
    room_s = 0.1 * (end_s - start_s)
    return start_s - room_s, end_s + room_s


def _show_end(
    console: Console, rows: list[StepRow], summary: dict[str, Any], problems: list[str], files: list[Any]
) -> None:
    deltas = [row for row in rows if row.density is not None]
    if deltas:
        density = sum(row.density or 0.0 for row in deltas) / len(deltas)
        ratio = sum((row.received_bytes or 0) / row.total_bytes for row in deltas) / len(deltas)
        console.print(
            f"{len(deltas)} of them came as deltas: {100 * density:.2f} % of the elements changed, {100 * ratio:.2f} % "
            "of the bytes were sent (means).",
            highlight=False,
            soft_wrap=True,
        )
    if rows:
        paused_ms = 1e3 * statistics.median(row.paused_s for row in rows)
        sync_ms = 1e3 * statistics.median(row.sync_s or 0.0 for row in rows)
        console.print(
            f"{len(rows)} versions served, {_proof(rows, summary)}. Engine's loss "
            f"{rows[0].engine_loss:.3f} -> {rows[-1].engine_loss:.3f}, largest gap to the trainer's "
            f"{summary['loss_gap_max']:.4f}. A sync took {sync_ms:.0f} ms, and for {paused_ms:.0f} ms of it no new "
            "generation could start (medians).",
            highlight=False,
            soft_wrap=True,
        )
    console.print(
        f"Timeline: {files[1]} (picture), {files[0]} (open in ui.perfetto.dev)", highlight=False, soft_wrap=True
    )
    for problem in problems:
        console.print(f"PROBLEM: {problem}", style="bold red", highlight=False)


def _proof(rows: list[StepRow], summary: dict[str, Any]) -> str:
    if summary["digests_equal"] is None:
        return f"every tensor proved by its digest as it came ({rows[-1].unprovable})"
    return f"each proved by its digest: {summary['digests_equal']}"


class _Processes:
    """Starts everybody, hands out what rank 0 says, and leaves nobody behind."""

    def __init__(self, options: DemoOptions) -> None:
        self._options = options
        self._deadline = Deadline(options.timeout_s)
        self._stack = contextlib.ExitStack()
        self._lines: queue.SimpleQueue[tuple[str, str | None]] = queue.SimpleQueue()
        self._running: dict[str, subprocess.Popen[str]] = {}
        self._logs: dict[str, IO[str]] = {}
        self._environment = {
            **os.environ,
            TOKEN_VARIABLE: secrets.token_urlsafe(24),
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
        }

    def __enter__(self) -> _Processes:
        self._folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="weightsync-demo-")))
        self._stack.callback(self._end_all)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def messages(self) -> Iterator[dict[str, Any]]:
        """Everything rank 0 says, until all trainers have ended well."""
        options = self._options
        engines = [f"engine-{index}" for index in range(options.engines)]
        for name in engines:
            arguments = ["--kind", options.engine, "--engine-id", name, "--size", options.size]
            arguments += ["--mode", "delta" if options.delta else "auto"]
            self._start(name, "weightsync.demo.engine", arguments)
        told: dict[str, str] = {}
        while len(told) < len(engines):
            name, message = self._next("an engine's URL")
            told[name] = json.dumps(message)
        for rank in range(options.ranks):
            arguments = ["--options", json.dumps(dataclasses.asdict(options.of_trainer(rank)))]
            arguments += ["--rendezvous", str(self._folder / "rendezvous"), "--steps", str(options.steps)]
            arguments += [word for name in engines for word in ("--engine", told[name])]
            self._start(f"trainer-{rank}", "weightsync.demo.trainer", arguments)
        trainers = {f"trainer-{rank}" for rank in range(options.ranks)}
        while trainers:
            name, message = self._next("the trainer's next step")
            if "ended" in message:
                trainers.discard(name)
            elif "error" in message:
                raise error_from_dict(message["error"], peer=name)
            else:
                yield message

    def _next(self, waiting_for: str) -> tuple[str, dict[str, Any]]:
        try:
            name, line = self._lines.get(timeout=self._deadline.check(waiting_for))
        except queue.Empty:
            raise DemoError(f"no {waiting_for} within {self._options.timeout_s:g} s") from None
        if line is not None:
            return name, json.loads(line)
        code = self._running[name].wait()
        if code != 0 or name.startswith("engine"):
            self._logs[name].seek(0)
            tail = "".join(self._logs[name].readlines()[-15:])
            raise DemoError(f"{name} ended with code {code}; it wrote:\n{tail}", peer=name)
        return name, {"ended": True}

    def _start(self, name: str, module: str, arguments: list[str]) -> None:
        log = self._stack.enter_context((self._folder / f"{name}.log").open("w+"))
        process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=self._environment,
        )
        self._running[name] = process
        self._logs[name] = log
        threading.Thread(target=self._read, args=(name, process), daemon=True).start()

    def _read(self, name: str, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                self._lines.put((name, line))
        self._lines.put((name, None))

    def _end_all(self) -> None:
        for process in self._running.values():
            if process.stdin is not None:
                with contextlib.suppress(OSError):
                    process.stdin.close()  # an engine ends by this
        for name, process in self._running.items():
            if name.startswith("trainer"):
                process.terminate()
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
