"""The main job: two training ranks and an engine, each in its own process, and a table of what they prove."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
from rich.console import Console

from weightsync.demo.model import model_size
from weightsync.demo.processes import Processes
from weightsync.demo.ray_job import RayJob
from weightsync.demo.sglang_engine import SERVED
from weightsync.demo.summary import StepRow, summarize, verdict, write_summary
from weightsync.demo.table import DELTA_PHASES, PHASES, PULL_PHASES, StepTable
from weightsync.demo.trainer import DemoOptions as DemoOptions
from weightsync.errors import ConfigError, error_from_dict
from weightsync.observe import write_chrome_trace, write_timeline_png
from weightsync.types import PhaseRecord


def run_demo(options: DemoOptions) -> list[str]:
    """Runs the demo to its end and writes what it measured.

    Returns:
        Problems, in words; empty where every version was proved, the losses agree and the engine's fell.

    Raises:
        MissingDependencyError: the engine is not installed. Nothing was started.
        WeightSyncError: a process failed or the time ran out. No process is left behind.
    """
    model_size(options.size)  # refuses an unknown one before anything starts
    if options.path == "pull" and options.ray:
        raise ConfigError("--path pull runs in processes of its own so far: leave --ray out")
    if options.path == "pull" and options.strategy != DemoOptions.strategy:
        raise ConfigError("--strategy says how weights are pushed: leave it out with --path pull")
    if options.delta and options.path == "push" and (options.strategy != "broadcast" or options.engine != "embedded"):
        raise ConfigError(
            "--delta with --path push needs --strategy broadcast (others lend whole tensors) and --engine embedded "
            "(servers are loaded whole); with --path pull any engine takes deltas"
        )
    if options.engine == "sglang" and (options.ray or options.strategy != DemoOptions.strategy):
        raise ConfigError("--engine sglang is pushed to by its own strategy, and is no Ray actor: leave both out")
    if not 0 < options.learning_rate < 1:
        raise ConfigError(f"--lr, a learning rate, lies between 0 and 1, not at {options.learning_rate}")
    if options.engine in SERVED:
        SERVED[options.engine].server.check()
    console = Console(highlight=False, soft_wrap=True, markup=False)
    rows: list[StepRow] = []
    phases: tuple[PhaseRecord, ...] = ()
    options.out.mkdir(parents=True, exist_ok=True)
    phases_shown = PHASES if options.path == "push" else DELTA_PHASES if options.delta else PULL_PHASES
    table = StepTable(console, phases=phases_shown, deltas=options.delta)
    with (RayJob if options.ray else _Job)(options, say=table.status) as job:
        engines = f"{options.engine} engine{' (about a minute)' if options.engine != 'embedded' else ''}"
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
            "of the bytes were sent (means)."
        )
        if summary["paused_full_s"] is not None and summary["paused_first_s"] is not None:
            console.print(
                f"No new generation could start for {1e3 * summary['paused_delta_s']:.0f} ms where changes alone "
                f"came, for {1e3 * summary['paused_full_s']:.0f} ms where a whole version came (medians), and for "
                f"{1e3 * summary['paused_first_s']:.0f} ms at the first one, which an engine loads as it would by "
                "itself."
            )
    if rows:
        paused_ms = 1e3 * statistics.median(row.paused_s for row in rows)
        sync_ms = 1e3 * statistics.median(row.sync_s or 0.0 for row in rows)
        console.print(
            f"{len(rows)} versions served, {_proof(rows, summary)}. Engine's loss "
            f"{rows[0].engine_loss:.3f} -> {rows[-1].engine_loss:.3f}, largest gap to the trainer's "
            f"{summary['loss_gap_max']:.4f}. A sync took {sync_ms:.0f} ms, and for {paused_ms:.0f} ms of it no new "
            "generation could start (medians)."
        )
    console.print(f"Timeline: {files[1]} (picture), {files[0]} (open in ui.perfetto.dev)")
    for problem in problems:
        console.print(f"PROBLEM: {problem}", style="bold red")


def _proof(rows: list[StepRow], summary: dict[str, Any]) -> str:
    if summary["digests_equal"] is None:
        return f"unprovable in live weights ({rows[-1].unprovable})"
    return f"each proved by its digest: {summary['digests_equal']}"


class _Job(Processes):
    """Starts everybody, and hands out what rank 0 says."""

    def __init__(self, options: DemoOptions, *, say: Callable[[str], None]) -> None:
        super().__init__(step_timeout_s=options.step_timeout_s, say=say)
        self._options = options

    def messages(self) -> Iterator[dict[str, Any]]:
        options = self._options
        engines = [f"engine-{index}" for index in range(options.engines)]
        for name in engines:
            mode = "delta" if options.delta else "auto"
            self.start(
                name, "weightsync.demo.engine", kind=options.engine, engine_id=name, size=options.size, mode=mode
            )  # fmt: skip
        started: dict[str, dict[str, Any]] = {}
        while len(started) < len(engines):
            name, message = self.next("an engine's start")
            started[name] = message
        for rank in range(options.ranks):
            self.start(
                f"trainer-{rank}", "weightsync.demo.trainer", options=dataclasses.asdict(options), rank=rank,
                rendezvous=self.folder / "rendezvous", engines=[started[name] for name in engines],
            )  # fmt: skip
        trainers = {f"trainer-{rank}" for rank in range(options.ranks)}
        waits_for = "the trainers' start and first step (kernels are compiled once an installation)"
        while trainers:
            name, message = self.next(waits_for)
            waits_for = "the trainer's next step"
            if "ended" in message:
                trainers.discard(name)
            elif "error" in message:
                raise error_from_dict(message["error"], peer=name)
            else:
                yield message
