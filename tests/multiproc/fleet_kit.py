"""The actors of the fleet's tests: a trainer of several models, rollout services that generate all the time.

A model is one tensor whose every element is its version's number, so that an answer says what it was made of. Each
service writes down every answer that it gave; `read_records` reads that afterwards, of killed ones too.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from tests.multiproc.pull_kit import Actor, _act, wait_until
from tests.standins.faults import FaultyLoader
from tests.standins.processes import Child
from weightsync.clients.controller import ControllerClient
from weightsync.codec.tensor_digest import tensor_digest
from weightsync.control.controller import WeightSyncController
from weightsync.control.methods.fleet import FleetMethod
from weightsync.control.pool import RolloutPool
from weightsync.control.server import ControllerServer
from weightsync.engine.embedded import EmbeddedEngine
from weightsync.errors import WeightSyncError
from weightsync.host.service import RolloutService
from weightsync.host.settings import RolloutConfig
from weightsync.memory import LeaseReader, ServingLease
from weightsync.trainer.publisher import WeightManager

MODELS = ("actor", "verifier")
_NUM_ELEMENTS = 4096
_GENERATION_S = {"actor": 0.002, "verifier": 0.05}
"""One model is done long before the other has paused: without a hold an instance would answer with a mixed set."""
_REST_S = 0.001


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """One generation that was answered.

    Attributes:
        instance, life: who.
        model, run_id, version: what the engine said that it was made with; run_id "": before the first version.
        value: what the weights were.
        began_s, ended_s: by the host's monotonic clock.
    """

    instance: str
    incarnation: int
    model: str
    run_id: str
    version: int
    value: float
    began_s: float
    ended_s: float


def read_records(folder: Path) -> list[Answer]:
    """All answers, by their end; the last line of a process that was killed may be half."""
    found = []
    for path in folder.glob("*.answers"):
        for line in path.read_bytes().split(b"\n"):
            if line.endswith(b"}"):
                found.append(msgspec.json.decode(line, type=Answer))
    return sorted(found, key=lambda answer: answer.ended_s)


# --- trainers ---


def trainers_main(models: Sequence[str], options: dict[str, Any], conn: Any) -> None:
    """Publishes models, as told."""
    torch.set_num_threads(1)
    managers: dict[str, WeightManager] = {}
    num_elements = options.pop("num_elements", _NUM_ELEMENTS)

    def begin(run_id: str, port: int) -> dict[str, str]:
        for manager in managers.values():
            manager.close()
        for model in models:
            managers[model] = WeightManager(model, run_id=f"{model}-{run_id}", guard_s=0.4, port=port, **options)
            managers[model].start()
        return {model: manager.endpoint for model, manager in managers.items()}

    def publish(model: str, version: int, value: float | None = None) -> bool:
        tensor = torch.full((num_elements,), float(version) if value is None else value)
        report = managers[model].offload({"weight": tensor}.items(), version)
        if report.published:
            managers[model].wait_published(version, timeout_s=50.0)
        return report.published

    _act(conn, {"begin": begin, "publish": publish})


class Trainers(Actor):
    """A process that trains several models. With another `num_elements` no service can load them."""

    def __init__(
        self, start: Callable[..., Child], run_id: str | None = "r1", models: Sequence[str] = MODELS, **options: Any
    ) -> None:
        super().__init__(start, trainers_main, tuple(models), options, name="trainers")
        self.models = tuple(models)
        if run_id is not None:
            self.begin(run_id)

    def begin(self, run_id: str, port: int = 0) -> None:
        """`port`: of the agent, where there is one model alone."""
        self.run_id = run_id
        self.endpoints: dict[str, str] = self.ask("begin", run_id, port)

    def run_of(self, model: str) -> str:
        return f"{model}-{self.run_id}"

    def publish(self, model: str, version: int, value: float | None = None) -> None:
        """Its every element is `value`, its number where not given."""
        assert self.ask("publish", model, version, value), f"version {version} of {model} was not published"


# --- services ---


class _Module(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.zeros(_NUM_ELEMENTS))


def service_main(name: str, incarnation: int, controller: str, folder: str, options: dict[str, Any], conn: Any) -> None:
    """A rollout service whose engines generate all the time."""
    torch.set_num_threads(1)
    lease = ServingLease(f"{folder}/{name}.lease")
    modules, loaders, engines = {}, {}, {}
    slow_s = options.pop("slow_s", 0.0)
    for model in options.pop("models", MODELS):
        modules[model] = _Module()
        loaders[model] = FaultyLoader(modules[model], in_place=options.get("in_place", True))
        engines[model] = EmbeddedEngine.of(
            loaders[model], engine_id=f"{name}-{model}", model_id=model, lease=LeaseReader(lease.path)
        )
        if slow_s:
            loaders[model].arm({"at": "begin", "do": "slow", "seconds": slow_s})
    options.pop("in_place", None)
    config = RolloutConfig(
        service_id=name, controller=controller, lease=lease, pull_timeout_s=10.0, load_timeout_s=10.0, **options
    )
    service = RolloutService(engines, config)
    url = service.start()
    output = open(f"{folder}/{name}-{incarnation}.answers", "ab", buffering=0)  # noqa: SIM115
    refused = dict.fromkeys(engines, 0)

    def generate(model: str) -> None:
        pause = threading.Event()
        while True:
            try:
                with engines[model].generation(timeout_s=5.0) as version:
                    began_s = time.monotonic()
                    first = float(modules[model].weight[0])
                    pause.wait(_GENERATION_S[model])
                    value = first if bool((modules[model].weight == first).all()) else -2.0
                    ended_s = time.monotonic()  # once it is given back, the other model may be served anew
                answer = Answer(
                    instance=name, incarnation=incarnation, model=model,
                    run_id="" if version is None else version.run_id,
                    version=-1 if version is None else version.number, value=value, began_s=began_s,
                    ended_s=ended_s,
                )  # fmt: skip
                output.write(msgspec.json.encode(answer) + b"\n")
            except WeightSyncError:
                refused[model] += 1
                pause.wait(0.01)
            pause.wait(_REST_S)

    for model in engines:
        threading.Thread(target=generate, args=(model,), daemon=True).start()

    def weights() -> dict[str, float]:
        return {model: float(module.weight[0]) for model, module in modules.items()}

    def digests() -> dict[str, str]:
        return {model: tensor_digest(module.weight) for model, module in modules.items()}

    def arm(model: str, fault: Any) -> None:
        loaders[model].arm(fault)

    _act(
        conn,
        {
            "url": lambda: url,
            "weights": weights,
            "digests": digests,
            "arm": arm,
            "refused": lambda: dict(refused),
            "status": lambda: msgspec.to_builtins(service.status()),
            "close": service.close,
        },
    )


class FleetService(Actor):
    """A service in a process of its own."""

    def __init__(
        self,
        start: Callable[..., Child],
        name: str,
        controller: str,
        folder: Path,
        *,
        incarnation: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(start, service_main, name, incarnation, controller, str(folder), options, name=name)
        self.folder, self.incarnation = folder, incarnation


def digest_at(version: int) -> str:
    """Of every model at that version."""
    return tensor_digest(torch.full((_NUM_ELEMENTS,), float(version)))


# --- the controller ---


LEASE_S = 3.0
"""A service that gets no CPU for two thirds of it is not evicted (seen: 1.7 s)."""


class Fleet:
    """A controller of a pool, as a user sets it up."""

    def __init__(
        self,
        *,
        sets: tuple[tuple[str, ...], ...] = (MODELS,),
        policy: str = "each",
        host: str = "127.0.0.1",
        port: int = 0,
        token: str | None = None,
        lease_s: float = LEASE_S,
        **options: object,
    ) -> None:
        self.pool = RolloutPool(lease_s=lease_s)
        options = {"barrier_timeout_s": 20.0, "prepare_timeout_s": 8.0, "commit_timeout_s": 5.0} | options
        self.method = FleetMethod(self.pool, sets=sets, commit_policy=policy, token=token, **options)  # type: ignore[arg-type]
        self.controller = WeightSyncController(
            {"sync_mode": "fully-async"}, self.method, model_tags=MODELS, retries_s=(0.2, 0.5, 1.0, 2.0)
        )
        self.server = ControllerServer(self.controller, self.pool, host=host, port=port, token=token)
        self.server_url = self.server.start()
        self.client = ControllerClient(self.server_url, token=token)

    def states(self) -> dict[str, str]:
        return {each.instance_id: each.state for each in self.client.status().instances}

    def wait_states(self, expected: dict[str, str]) -> None:
        wait_until(lambda: self.states() == expected, f"states {expected}, not {self.states()}", 20.0)

    def close(self) -> None:
        self.client.close()
        self.server.close()
        self.controller.close()


def step(fleet: Fleet, trainers: Trainers, version: int) -> list[tuple[str, str, int, float]]:
    """Both trainers publish, tell, and wait at the gate; when it had opened, for `check_records`."""
    for model in MODELS:
        trainers.publish(model, version)
        fleet.client.notify_version(trainers.run_of(model), model, version, trainers.endpoints[model])
    gates = []
    for model in MODELS:
        run_id = trainers.run_of(model)
        opened = fleet.controller.wait_version(run_id, model, version, timeout_s=40.0)
        assert opened, f"version {version} of {model}: {fleet.client.status()}"
        gates.append((model, run_id, version, time.monotonic()))
    return gates


# --- what a record must say ---


def check_records(
    answers: Sequence[Answer], gates: Sequence[tuple[str, str, int, float]], *, begun: bool = True
) -> None:
    """Raises AssertionError where a record breaks a rule.

    - What was served is what was published: every element is the number of the version.
    - Within one life of an instance, versions of a run never go back.
    - Of a set of models an instance answers nothing of the new one before the last answer of the old one.
    - The gate opens when every instance that takes part serves the version: after it has opened, nobody answers with an
      older one, but who does not know yet that it was left out; that ends with its lease, which the gate waits for.

    Args:
        answers: see `read_records`.
        gates: (model, run_id, version, when the gate had opened for it).
        begun: whether nobody answers with the weights that engines began with once a gate had opened.
    """
    for answer in answers:
        assert answer.value == (0.0 if answer.run_id == "" else float(answer.version)), answer
    lives: dict[tuple[str, int], list[Answer]] = {}
    for answer in answers:
        lives.setdefault((answer.instance, answer.incarnation), []).append(answer)
    for who, found in lives.items():
        newest: dict[tuple[str, str], int] = {}
        for answer in found:
            key = (answer.model, answer.run_id)
            assert answer.version >= newest.get(key, -1), f"{who} goes back: {answer}"
            newest[key] = answer.version
        _check_sets(who, found)
    first_s = min((opened_s for _, _, _, opened_s in gates), default=float("inf"))
    for answer in answers:
        assert answer.run_id or answer.began_s < first_s or not begun, f"weights that nobody published: {answer}"
    for model, run_id, version, opened_s in gates:
        for answer in answers:
            late = answer.model == model and answer.run_id == run_id and answer.version < version
            assert not (late and answer.began_s > opened_s), f"after the gate of {version} had opened: {answer}"


def _check_sets(who: tuple[str, int], found: Sequence[Answer]) -> None:
    numbers = sorted({answer.version for answer in found})
    for older, newer in itertools.pairwise(numbers):
        ended_s = max(answer.ended_s for answer in found if answer.version == older)
        began_s = min(answer.began_s for answer in found if answer.version == newer)
        assert ended_s <= began_s, f"{who} answers with a mixed set of {older} and {newer}: {began_s - ended_s:.4f} s"
