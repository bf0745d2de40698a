"""The demo's fleet: trainers, a barrier and rollout services on one machine; one is killed on the way, one is added."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from rich.console import Console

from weightsync.control.build import Built, build_controller
from weightsync.demo.model import model_size
from weightsync.demo.processes import DemoError, Processes
from weightsync.demo.summary import LOSS_GAP_TOLERANCE, finite, largest_gap, write_summary
from weightsync.demo.trainer import DemoOptions
from weightsync.errors import ConfigError, error_from_dict
from weightsync.types import Deadline

_LEASE_S = 3.0


def run_fleet(options: DemoOptions) -> list[str]:
    """Runs the fleet to its end and writes what it saw.

    Returns:
        Problems, in words; empty where every answer was of a published version, sets were never mixed, the killed
        service was left out and the added one caught up before it answered.

    Raises:
        WeightSyncError: a process failed or the time ran out. No process is left behind.
    """
    model_size(options.size)
    if options.services < 2:
        raise ConfigError(f"one service is killed on the way: --fleet 2 or more, not {options.services}")
    models = ("actor", "verifier", *(f"model-{index}" for index in range(2, options.models)))[: options.models]
    console = Console(highlight=False, soft_wrap=True, markup=False)
    with (
        Processes(step_timeout_s=options.step_timeout_s, say=console.print) as processes,
        _controller(options, models, processes.token) as built,
    ):
        summary = _Fleet(options, models, processes, built, console.print).run().summary()
    if options.json is not None:
        write_summary(summary, options.json)
    problems: list[str] = summary["problems"]
    gap = "unknown" if summary["loss_gap_max"] is None else f"{summary['loss_gap_max']:.4f}"
    console.print(
        f"{len(summary['answers'])} reports of {len(summary['services'])} services, each with its trainer's loss on "
        f"the same text (largest gap {gap}); {summary['killed']} was killed, and "
        f"{summary['added']} caught up to version {summary['added_first_version']} before its first answer."
    )
    for problem in problems:
        console.print(f"PROBLEM: {problem}", style="bold red")
    return problems


def _controller(options: DemoOptions, models: Sequence[str], token: str) -> Built:
    return build_controller(
        {
            "sync_mode": options.mode,
            "sync_method": "pull",
            "fleet": {
                "models": list(models),
                "sets": [list(models)] if len(models) > 1 else [],
                "commit_policy": "each",
                "lease_s": _LEASE_S,
                "after_failure": "evict",
                "port": 0,
            },
        },
        token=token,
    )


class _Fleet:
    """One run: what the processes say, and what is done to them."""

    def __init__(
        self,
        options: DemoOptions,
        models: Sequence[str],
        processes: Processes,
        built: Built,
        say: Callable[[str], None],
    ) -> None:
        self._options, self._models = options, models
        self._processes, self._built, self._say = processes, built, say
        self.answers: list[dict[str, Any]] = []
        self._trained: dict[tuple[str, int], dict[str, Any]] = {}
        self._done: set[str] = set()
        self._killed = ""
        self._added = ""
        self._joined_at: dict[str, int] = {}
        self._states: dict[str, str] = {}
        self._syncs: dict[tuple[str, int, float], str] = {}

    def run(self) -> _Fleet:
        """To the end of all trainers, and until every live service serves their last versions."""
        names = [f"service-{index}" for index in range(self._options.services)]
        self._say(f"controller at {self._built.url}; starting {len(names)} services and {len(self._models)} trainers")
        for name in names:
            self._start_service(name)
        while self._live() < set(names):
            self._hear("the services' start")
        for seed, model in enumerate(self._models):
            self._processes.start(
                f"trainer-{model}", "weightsync.demo.fleet_trainer", model_id=model, controller=self._built.url,
                size=self._options.size, mode=self._options.mode, steps=self._options.steps, seed=seed,
                wait_s=self._options.step_timeout_s,
            )  # fmt: skip
        while self._done < set(self._models):
            self._hear("the trainers' next step")
            self._intervene(names)
        for model in self._models:
            self._built.controller.sync_weight_to_rollout_service(model, timeout_s=self._options.step_timeout_s)
        alive = {*names, self._added} - {self._killed}
        settle = Deadline(self._options.step_timeout_s)
        while not settle.expired and (self._live() != alive or not self._all_answered(alive)):
            self._hear("every service's last version")
        self._look()
        return self

    def summary(self) -> dict[str, Any]:
        gaps = [gap for answer in self.answers if (gap := self._gap(answer)) is not None]
        added = [answer["version"] for answer in self.answers if answer["service"] == self._added]
        return {
            "models": list(self._models),
            "mode": self._options.mode,
            "services": sorted(self._states),
            "killed": self._killed,
            "added": self._added,
            "added_first_version": min(added, default=None),
            "served": {
                model: sorted({answer["version"] for answer in self.answers if answer["served"] == model})
                for model in self._models
            },
            "answers": [{**answer, "loss": finite(answer["loss"])} for answer in self.answers],
            "loss_gap_max": largest_gap(gaps),
            "states": self._states,
            "syncs": [msgspec.to_builtins(record) for record in self._built.controller.status().syncs],
            "problems": self._problems(),
        }

    def _problems(self) -> list[str]:
        found = []
        for answer in self.answers:
            gap = self._gap(answer)
            what = f"{answer['service']} answers as {answer['served']} version {answer['version']}"
            if gap is None:
                found.append(f"{what}, which nobody has trained")
            elif not gap <= LOSS_GAP_TOLERANCE:
                found.append(f"{what} with a loss that is {gap:.4f} from the trainer's")
        for service in {answer["service"] for answer in self.answers}:
            found += _mixed(service, [answer for answer in self.answers if answer["service"] == service])
        last = [answer["version"] for answer in self.answers if answer["service"] == self._added]
        if not last or min(last) < self._joined_at.get(self._added, 0):
            found.append(f"{self._added} answered with version {min(last, default=None)}, before it had caught up")
        if not self._killed:
            found.append("no service was killed: there were too few steps")
        for model in self._models:
            newest = self._built.controller.rollout_service_state(model).rollout_model_version
            if newest != self._options.steps:
                found.append(f"model {model}: version {self._options.steps} was trained, {newest} is served")
        return found

    def _gap(self, answer: Mapping[str, Any]) -> float | None:
        trained = self._trained.get((answer["served"], answer["version"]))
        return None if trained is None else abs(trained["loss"] - answer["loss"])

    def _start_service(self, name: str) -> None:
        self._processes.start(
            name, "weightsync.demo.fleet_service", service_id=name, controller=self._built.url,
            size=self._options.size, lease=self._processes.folder / f"{name}.lease", models=self._models,
        )  # fmt: skip

    def _intervene(self, names: Sequence[str]) -> None:
        """A third of the way a service is killed, and another one started."""
        newest = min(
            max((version for model, version in self._trained if model == each), default=0) for each in self._models
        )
        if not self._killed and newest >= max(1, self._options.steps // 3):
            self._killed, self._added = names[1], f"service-{len(names)}"
            self._say(f"version {newest} is trained: {self._killed} is killed (SIGKILL), {self._added} is added")
            self._processes.kill(self._killed)
            self._start_service(self._added)

    def _hear(self, waiting_for: str) -> None:
        """The next line of anybody; looks at the controller, too."""
        name, message = self._processes.next(waiting_for, look=self._look)
        if "error" in message:
            raise error_from_dict(message["error"], peer=name)
        if "trained" in message:
            self._trained[message["trained"], message["version"]] = message
        elif "served" in message:
            self.answers.append(message)
        elif "done" in message:
            self._done.add(message["done"])
        elif "ended" in message and name != self._killed:
            raise DemoError(f"{name} ended", peer=name)
        self._look()

    def _look(self) -> None:
        status = self._built.controller.status()
        for each in status.instances:
            if self._states.get(each.instance_id) != each.state:
                self._states[each.instance_id] = each.state
                if each.state == "live":
                    newest = status.models[self._models[0]].rollout_model_version
                    self._joined_at.setdefault(each.instance_id, newest)
                why = f": {each.why}" if each.why and each.state != "live" else ""
                self._say(f"{each.instance_id} is {each.state}{why}")
        for record in reversed(status.syncs):
            key = (record.model_tag, record.version, record.started_s)
            if record.outcome != "running" and key not in self._syncs:
                self._syncs[key] = record.outcome
                live = len(self._live())
                text = f"{record.model_tag} {record.version} {record.outcome} in {record.seconds:.2f} s, {live} live"
                self._say(text + (f": {record.error}" if record.error else ""))

    def _live(self) -> set[str]:
        return {each.instance_id for each in self._built.controller.status().instances if each.state == "live"}

    def _all_answered(self, services: set[str]) -> bool:
        wanted = {(name, model, self._options.steps) for name in services for model in self._models}
        return wanted <= {(answer["service"], answer["served"], answer["version"]) for answer in self.answers}


def _mixed(service: str, answers: Sequence[Mapping[str, Any]]) -> list[str]:
    """Where a service answered with a newer version of one model before an older one of another had ended."""
    numbers = sorted({answer["version"] for answer in answers})
    found = []
    for older, newer in itertools.pairwise(numbers):
        ended_s = max(answer["ended_s"] for answer in answers if answer["version"] == older)
        began_s = min(answer["began_s"] for answer in answers if answer["version"] == newer)
        if ended_s > began_s:
            found.append(f"{service} answered with a mixed set of versions {older} and {newer}")
    return found
