"""The actors of the pull path's tests, each a process of its own: a trainer, a receiver, an engine, a rollout service.

What they move is a function of (seed, version, position), so every process knows what the right bytes are; the run's
name has the seed in it.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import numpy as np
import torch

from tests.multiproc import pull_hook
from tests.multiproc.pull_hook import Hook
from tests.standins.faults import FaultyLoader
from tests.standins.processes import Child
from weightsync.clients.host import RolloutClient
from weightsync.engine.embedded import EmbeddedEngine
from weightsync.engine.server import EngineServer
from weightsync.errors import WeightSyncError
from weightsync.handles.http import HttpEngine
from weightsync.host import model_updater as follower
from weightsync.host.puller import Puller
from weightsync.host.service import RolloutService
from weightsync.host.settings import RolloutConfig
from weightsync.host.staged_version import StagedVersion
from weightsync.memory import MappedSegment
from weightsync.trainer import publisher as manager
from weightsync.trainer.buffer import PublicationBuffer
from weightsync.trainer.publisher import WeightManager
from weightsync.types import Deadline, EngineOp, EngineReply, EngineRequest, Version
from weightsync.types.service import NotifyRequest, RegisterSenderRequest
from weightsync.types.transfer_messages import Transport

MODEL = "actor"
TOKEN = "a-token-for-tests-only"
BLOCK_BYTES = 64 << 10
RECOVERY_S = 60.0
SLACK_S = 5.0
"""What two busy cores may add to a wait that is over."""
_SHM = Path("/dev/shm")


# --- what is moved ---


def run_of(seed: int) -> str:
    return f"seed-{seed}"


SPARSE = 1_000
"""From this seed on one word in a hundred changes from version to version, as deltas like it."""
_TURN = 97


def content(seed: int, version: int, kib: int = 512) -> dict[str, torch.Tensor]:
    """Tensors of three kinds, of which no byte-aligned word is the same in two versions (but see `SPARSE`)."""
    words = np.arange(kib * 128 + 40, dtype=np.uint64)
    turn = (words * np.uint64(0xD6E8FEB86659FD93)) >> np.uint64(40)
    words += np.uint64((seed * 1_000_003 + (0 if seed >= SPARSE else version + 1)) % (1 << 40) << 20)
    words *= np.uint64(0x9E3779B97F4A7C15)
    if seed >= SPARSE:
        words += (turn % np.uint64(_TURN) + np.uint64(version + _TURN)) // np.uint64(_TURN)
    raw = words.view(np.uint8)
    large = (kib // 2) * 1024
    return {
        "small": torch.from_numpy(raw[-333:].copy()),
        "words": torch.from_numpy(raw[:large].view(np.int64).reshape(-1, 32).copy()),
        "halves": torch.from_numpy(raw[large : large + large // 2].view(np.int16).copy()),
        "none": torch.empty(0, 4, dtype=torch.int32),
    }


def seed_of(version: Version) -> int:
    return int(version.run_id.rsplit("-", 1)[1])


def is_right(pulled: StagedVersion, kib: int) -> bool:
    """Whether what was pulled is exactly what that version is."""
    expected = content(seed_of(pulled.version), pulled.version.number, kib)
    with MappedSegment(pulled.segment, need_bytes=1) as mapped:
        return {spec.name for spec in pulled.manifest.tensors} == set(expected) and all(
            bytes(mapped.memory[pulled.offsets[name] : pulled.offsets[name] + tensor.nbytes])
            == tensor.numpy().tobytes()
            for name, tensor in expected.items()
        )


def shm_of(*pids: int) -> list[str]:
    """The shared memory that these processes have made and that is still there."""
    return sorted(
        path.name for pid in pids for path in _SHM.glob("weightsync-*") if path.name.startswith(f"weightsync-{pid}-")
    )


def wait_until(condition: Callable[[], Any], what: str, timeout_s: float = RECOVERY_S) -> Any:
    """What `condition` says, as soon as it is true."""
    end = time.monotonic() + timeout_s
    while not (said := condition()):
        assert time.monotonic() < end, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.01)
    return said


# --- the test's view of a process ---


class RefusedError(Exception):
    """What an actor's order raised: its type and its words."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind


class Actor:
    """A process that takes orders, one at a time."""

    def __init__(self, start: Callable[..., Child], function: Callable[..., Any], *args: Any, name: str) -> None:
        self.name = name
        self.child = start(function, *args, talk=True, name=name)

    @property
    def pid(self) -> int:
        return self.child.pid

    def tell(self, order: str, *args: Any) -> None:
        self.child.conn.send((order, args))

    def answer(self, timeout_s: float = 60.0) -> Any:
        kind, value = self.child.recv(timeout_s)
        if kind != "ok":
            raise RefusedError(kind, value)
        return value

    def ask(self, order: str, *args: Any) -> Any:
        self.tell(order, *args)
        return self.answer()


def _act(conn: Any, orders: Mapping[str, Callable[..., Any]]) -> None:
    while (order := conn.recv()) is not None:
        name, args = order
        try:
            conn.send(("ok", orders[name](*args)))
        except Exception as error:
            conn.send((type(error).__name__, str(error)))
    os._exit(0)


# --- the trainer ---


class Run:
    """One WeightManager, as a trainer uses it."""

    def __init__(self, seed: int, kib: int, **options: Any) -> None:
        self.seed = seed
        self.kib = kib
        self.wm = WeightManager(MODEL, run_id=run_of(seed), **options)
        self.wm.start(deltas=seed >= SPARSE)

    def begin_anew(self, seed: int) -> None:
        """A new run from version 0 on at the same agent, as receivers see a trainer that was started again."""
        self.seed = seed
        self.wm.run_id = run_of(seed)
        self.wm._newest = -1
        proofs = self.wm._tracker
        with proofs._changed:
            proofs._published, proofs._delta = -1, None
            proofs._not_published.clear()

    def offload(self, version: int) -> dict[str, Any]:
        weights = content(self.seed, version, self.kib)
        free = PublicationBuffer._free
        with mock.patch.object(PublicationBuffer, "_free", autospec=True, side_effect=free) as looks:
            began = time.monotonic()
            report = self.wm.offload(weights.items(), version)
            seconds = time.monotonic() - began
        return {
            "published": report.published,
            "waited_s": report.waited_s,
            "num_looks": looks.call_count,
            "seconds": seconds,
        }


def trainer_main(kib: int, hook: Hook | None, agent_hooks: list[Hook], conn: Any) -> None:
    """Starts runs, publishes, closes, as told."""
    torch.set_num_threads(1)
    manager.BLOCK_BYTES = BLOCK_BYTES
    if hook is not None:
        hook.arm()
    if agent_hooks:
        _hook_agents(agent_hooks)
    runs: list[Run] = []

    def start(seed: int, options: dict[str, Any]) -> dict[str, Any]:
        runs.append(Run(seed, kib, **options))
        return {"endpoint": runs[-1].wm.endpoint, "agent": runs[-1].wm.agent_pid}

    def publish(version: int, timeout_s: float = 40.0) -> dict[str, Any]:
        said = runs[-1].offload(version)
        if said["published"]:
            runs[-1].wm.wait_published(version, timeout_s=timeout_s)
        return said

    _act(
        conn,
        {
            "start": start,
            "offload": lambda version: runs[-1].offload(version),
            "publish": publish,
            "agent": lambda: runs[-1].wm.agent_pid,
            "delta": lambda version: runs[-1].wm.wait_delta_ready(version, timeout_s=20.0),
            "segments": lambda: (steps := runs[-1].wm._steps) and steps.buffer and len(steps.buffer._segments),
            "resize": lambda kib: setattr(runs[-1], "kib", kib),
            "close": lambda: runs.pop().wm.close(),
        },
    )


def _hook_agents(hooks: list[Hook]) -> None:
    """From now on this process's agents are started with these hooks in them."""
    original = subprocess.Popen
    root = str(Path(__file__).parents[2])

    class Popen(original):  # type: ignore[type-arg,valid-type,misc]
        def __init__(self, args: list[str], **options: Any) -> None:
            if "weightsync.agent.main" in args:
                args = [pull_hook.__name__ if arg == "weightsync.agent.main" else arg for arg in args]
                env = {**options["env"], **pull_hook.agents_env(hooks)}
                env["PYTHONPATH"] = os.pathsep.join((env["PYTHONPATH"], root))
                options["env"] = env
            super().__init__(args, **options)

    subprocess.Popen = Popen  # type: ignore[misc]


def third_stands(folder: Path) -> Hook:
    """For a trainer that a test wants to keep at two segments: the third is being made until `check_cancelled`."""
    at = "weightsync.trainer.spare:pinned_segment"
    return Hook(at=at, do="wait", path=str(folder / "third")).set()


class Trainer(Actor):
    """A trainer of one rank."""

    def __init__(
        self,
        start: Callable[..., Child],
        seed: int | None = 1,
        *,
        kib: int = 512,
        hook: Hook | None = None,
        agent_hooks: list[Hook] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(start, trainer_main, kib, hook, agent_hooks or [], name=f"trainer-{seed}")
        self.endpoint = ""
        if seed is not None:
            self.begin(seed, **options)

    def begin(self, seed: int, **options: Any) -> None:
        """A new run."""
        said = self.ask("start", seed, {"guard_s": 0.4, **options})
        self.seed, self.endpoint, self.agent_pid = seed, said["endpoint"], said["agent"]

    def await_delta_codec(self) -> None:
        """A new agent loads it when a receiver has asked: returns when the next version can have one."""
        url = f"{self.endpoint}/get_capabilities"
        wait_until(
            lambda: httpx.get(url, timeout=RECOVERY_S, trust_env=False).json()["delta_codec_ready"],
            "the delta codec is loaded",
        )

    def publish(self, version: int) -> dict[str, Any]:
        """Returns when the agent serves it."""
        said: dict[str, Any] = self.ask("publish", version)
        return said

    def offload(self, version: int) -> dict[str, Any]:
        """Returns when the weights may change again."""
        said: dict[str, Any] = self.ask("offload", version)
        return said


# --- a receiver ---


def receiver_main(kib: int, hook: Hook | None, conn: Any) -> None:
    """Pulls when told to, and says whether the bytes were right."""
    torch.set_num_threads(1)
    if hook is not None:
        hook.arm()
    pullers: dict[tuple[str, str | None, str], Puller] = {}
    held: list[StagedVersion] = []

    def puller(endpoint: str, transport: str | None, mode: str) -> Puller:
        key = (endpoint, transport, mode)
        if key not in pullers:
            chosen = None if transport is None else Transport(transport)
            pullers[key] = Puller(
                endpoint, MODEL, receiver_id=f"r-{os.getpid()}", transport=chosen, mode=mode, patch_limit=lambda: 0.25
            )
        return pullers[key]

    def pull(
        endpoint: str, transport: str | None, timeout_s: float, at_least: tuple[str, int] | None, hold: bool, mode: str
    ) -> dict[str, Any]:
        wanted = None if at_least is None else Version(run_id=at_least[0], number=at_least[1])
        pulled = puller(endpoint, transport, mode).pull(
            deadline=Deadline(timeout_s), at_least=None if wanted is None else (lambda: wanted)
        )
        said = {
            "version": str(pulled.version),
            "right": is_right(pulled, kib),
            "transport": str(pulled.transport),
            "attempts": pulled.num_attempts,
            "deltas": pulled.num_deltas,
            "received": pulled.received_bytes,
            "patched": None if pulled.patch is None else sum(each.count for each in pulled.patch.tensors),
        }
        if hold:
            held.append(pulled)
        else:
            pulled.release()
        return said

    def release() -> bool:
        """Whether what was held was right to the end."""
        pulled = held.pop()
        right = is_right(pulled, kib)
        pulled.release()
        return right

    def damage(name: str, byte: int) -> None:
        """One bit of what the staging holds, behind everybody's back."""
        for each in pullers.values():
            if (target := each._staging._target) is not None:
                target.segment.memory[target.place(name).offset + byte] ^= 1

    def close() -> None:
        for each in pullers.values():
            each.close()

    _act(conn, {"pull": pull, "release": release, "damage": damage, "close": close})


class Receiver(Actor):
    """A process with a Puller."""

    def __init__(
        self, start: Callable[..., Child], *, kib: int = 512, hook: Hook | None = None, name: str = "receiver"
    ) -> None:
        super().__init__(start, receiver_main, kib, hook, name=name)

    def pull(
        self,
        endpoint: str,
        *,
        transport: str | None = "tcp",
        timeout_s: float = 20.0,
        at_least: tuple[str, int] | None = None,
        hold: bool = False,
        wait: bool = True,
        mode: str = "auto",
    ) -> dict[str, Any]:
        self.tell("pull", endpoint, transport, timeout_s, at_least, hold, mode)
        return self.answer() if wait else {}


# --- engines and services ---


class Module(torch.nn.Module):
    """A model that has `content`'s tensors."""

    def __init__(self, kib: int) -> None:
        super().__init__()
        for name, tensor in content(0, -1, kib).items():
            self.register_buffer(name, tensor)


class Engine:
    """An embedded engine that can be made anew under its handle, as one that was started again."""

    def __init__(self, engine_id: str, kib: int, in_place: bool) -> None:
        self.engine_id = engine_id
        self._kib, self._in_place = kib, in_place
        self.renew()

    def renew(self) -> None:
        self.module = Module(self._kib)
        self.loader = FaultyLoader(self.module, in_place=self._in_place)
        self.engine = EmbeddedEngine.of(self.loader, engine_id=self.engine_id)

    def call(self, op: EngineOp, request: EngineRequest, *, timeout_s: float) -> EngineReply:
        return self.engine.call(op, request, timeout_s=timeout_s)

    def serving(self, timeout_s: float = 0.05) -> tuple[str | None, bool]:
        """(version, whether its bytes are exactly that version's); None where it refuses to serve, or is paused for
        longer than that."""
        try:
            with self.engine.generation(timeout_s=timeout_s) as version:
                seed, number = (0, -1) if version is None else (seed_of(version), version.number)
                expected = content(seed, number, self._kib)
                state = self.module.state_dict()
                right = all(torch.equal(state[name], tensor) for name, tensor in expected.items())
                return ("nothing" if version is None else str(version)), right
        except WeightSyncError:
            return None, True


def engine_main(engine_id: str, kib: int, in_place: bool, conn: Any) -> None:
    """An engine behind HTTP."""
    torch.set_num_threads(1)
    engine = Engine(engine_id, kib, in_place)
    url = EngineServer(engine, token=TOKEN).start()
    _act(conn, {"url": lambda: url, "serving": engine.serving, "arm": lambda fault: engine.loader.arm(fault)})


class EngineActor(Actor):
    """An engine in a process of its own."""

    def __init__(self, start: Callable[..., Child], engine_id: str, *, kib: int = 512, in_place: bool = True) -> None:
        super().__init__(start, engine_main, engine_id, kib, in_place, name=engine_id)
        self.url = self.ask("url")

    def serving(self) -> tuple[str | None, bool]:
        version, right = self.ask("serving")
        return version, right


def service_main(
    kib: int, engines: list[str], urls: dict[str, str], hook: Hook | None, options: dict[str, Any], conn: Any
) -> None:
    """A rollout service with embedded engines, or with engines elsewhere."""
    torch.set_num_threads(1)
    if hook is not None:
        hook.arm()
    follower.LOOK_EVERY_S = 0.5
    embedded = {engine_id: Engine(engine_id, kib, True) for engine_id in engines}
    handles = [*embedded.values(), *(HttpEngine(url, engine_id=name, token=TOKEN) for name, url in urls.items())]
    served: list[str] = []
    also = {name: [Engine("other", kib, True)] for name in [options.pop("also_model", None)] if name}
    service = RolloutService(
        {MODEL: handles, **also}, RolloutConfig(**options), on_served=lambda _, version: served.append(str(version))
    )
    url = service.start()
    _act(
        conn,
        {
            "url": lambda: url,
            "serving": lambda name, timeout_s: embedded[name].serving(timeout_s),
            "arm": lambda name, fault: embedded[name].loader.arm(fault),
            "renew": lambda name: embedded[name].renew(),
            "served": lambda: served,
            "close": service.close,
        },
    )


class Service(Actor):
    """A rollout service, and a client of it."""

    def __init__(
        self,
        start: Callable[..., Child],
        engines: list[str] | None = None,
        *,
        kib: int = 512,
        urls: dict[str, str] | None = None,
        hook: Hook | None = None,
        **options: Any,
    ) -> None:
        settings = {"pull_timeout_s": 8.0, "load_timeout_s": 8.0, "pause_timeout_s": 2.0, **options}
        super().__init__(start, service_main, kib, engines or [], urls or {}, hook, settings, name="service")
        self.client = RolloutClient(self.ask("url"))

    def notify(
        self, endpoint: str, seed: int, version: int, *, wait_s: float | None = RECOVERY_S, model_id: str = MODEL
    ) -> Any:
        return self.client.notify_version(
            NotifyRequest(
                run_id=run_of(seed), model_id=model_id, version=version, sender_endpoint=endpoint, wait_s=wait_s
            )
        )

    def register(self, endpoint: str) -> None:
        self.client.register_sender(RegisterSenderRequest(model_id=MODEL, sender_endpoint=endpoint))

    def metrics(self) -> dict[str, float]:
        """By sample."""
        lines = httpx.get(f"{self.client.url}/metrics").text.splitlines()
        return {name: float(value) for name, _, value in (x.rpartition(" ") for x in lines if not x.startswith("#"))}

    def status(self) -> Any:
        return self.client.status().models[MODEL]

    def serving(self, name: str, timeout_s: float = 0.05) -> tuple[str | None, bool]:
        version, right = self.ask("serving", name, timeout_s)
        return version, right

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.client.close()
