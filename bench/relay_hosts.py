"""A trainer and many rollout hosts, each on a host of its own: what the bench of relaying and its tests run.

Processes are forked from one that has loaded everything, then enter their hosts: twelve cost the memory of one and no
start. What they move is a function of (version, position), so that each knows what the right bytes are.
"""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from weightsync.engine.embedded import EmbeddedEngine
from weightsync.errors import WeightSyncError
from weightsync.host.service import RolloutService
from weightsync.host.settings import RolloutConfig
from weightsync.load.module import ModuleWeightLoader
from weightsync.testing.hosts import Host
from weightsync.trainer.publisher import WeightManager
from weightsync.types import Version

MODEL = "actor"
TOKEN = "a-token-for-benches-only"
PORT = 8765
_TURN = 97
"""One word in so many changes from version to version."""
_NUM_TENSORS = 16
_FORK = multiprocessing.get_context("fork")


def weights(mib: float, version: int) -> dict[str, torch.Tensor]:
    """The model of a version: `_NUM_TENSORS` tensors of 16-bit words."""
    num = int(mib * (1 << 20)) // 2
    words = np.arange(num, dtype=np.uint32)
    words *= np.uint32(0x9E3779B1)
    turn = (words >> np.uint32(8)) % np.uint32(_TURN)
    turn += np.uint32(version)
    turn //= np.uint32(_TURN)
    words >>= np.uint32(16)
    words += turn
    flat = torch.from_numpy(words.astype(np.uint16).view(np.int16))
    return {f"layer.{index}": part for index, part in enumerate(flat.chunk(_NUM_TENSORS))}


def load_all() -> None:
    """Loads what the processes are going to need, once for all of them: call it before there are any, and threads."""
    from weightsync.codec import delta, delta_reader, model_digest
    from weightsync.load import patch_kernels  # noqa: F401

    torch.set_num_threads(1)
    delta.warm_up()
    model_digest.warm_up()
    delta_reader.coding()


class Actor:
    """A process on a host that takes orders, one at a time."""

    def __init__(self, host: Host | None, run: Callable[..., None], *args: Any) -> None:
        self.host = host
        self.connection, theirs = _FORK.Pipe()
        target, given = (run, args) if host is None else (host.place.run, (run, *args))
        self.process = _FORK.Process(target=_lived, args=(self.connection, theirs, target, given), daemon=True)
        self.process.start()
        theirs.close()

    def tell(self, order: str, *args: Any) -> None:
        """Begins an order; `answer` is to follow."""
        self.connection.send((order, args))

    def answer(self, timeout_s: float = 120.0) -> Any:
        """What the order gave.

        Raises:
            RuntimeError: what it raised, in words.
            TimeoutError: nothing came.
        """
        if not self.connection.poll(timeout_s):
            raise TimeoutError(f"{self.host} did not answer within {timeout_s:g} s")
        kind, value = self.connection.recv()
        if kind != "ok":
            raise RuntimeError(f"{self.host}: {kind}: {value}")
        return value

    def ask(self, order: str, *args: Any, timeout_s: float = 120.0) -> Any:
        """An order, and what it gave."""
        self.tell(order, *args)
        return self.answer(timeout_s)

    def kill(self) -> None:
        """As by kill -9."""
        self.process.kill()
        self.process.join(10)

    def close(self) -> None:
        """Ends it."""
        with contextlib.suppress(OSError):
            self.connection.send(None)
        self.process.join(10)
        self.process.kill()


def _lived(ours: Connection, theirs: Connection, run: Callable[..., None], args: tuple[Any, ...]) -> None:
    ours.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    run(*args, theirs)
    os._exit(0)


def act(connection: Connection, orders: Mapping[str, Callable[..., Any]]) -> None:
    """Takes orders until there are none any more."""
    while True:
        try:
            order = connection.recv()
        except EOFError:
            return
        if order is None:
            return
        name, args = order
        try:
            connection.send(("ok", orders[name](*args)))
        except Exception as error:
            connection.send((type(error).__name__, str(error)))


def trainer_main(
    host: str, mib: float, run_id: str, guard_s: float, full_sync_interval: int, connection: Connection
) -> None:
    """Publishes versions as it is told; each so many comes in full, where that is above 0."""
    manager = WeightManager(
        MODEL, run_id=run_id, host=host, port=PORT, token=TOKEN, guard_s=guard_s, full_sync_interval=full_sync_interval
    )
    manager.start(deltas=True)

    def publish(version: int, wait: bool) -> dict[str, Any]:
        tensors = weights(mib, version)
        begun_s = time.monotonic()
        report = manager.offload(tensors.items(), version)
        offload_s = time.monotonic() - begun_s
        delta_bytes = 0
        if wait and report.published:
            manager.wait_published(version, timeout_s=60.0)
            if version:
                delta = manager.wait_delta_ready(version, timeout_s=60.0)
                delta_bytes = 0 if delta is None else delta.nbytes
        return {"published": report.published, "offload_s": offload_s, "delta_bytes": delta_bytes}

    act(connection, {"endpoint": lambda: manager.endpoint, "publish": publish})
    manager.close()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Follower:
    """How a rollout host is to run."""

    mib: float
    endpoint: str
    host: str
    name: str
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def follower_main(how: Follower, connection: Connection, more: Mapping[str, Callable[..., Any]] | None = None) -> None:
    """A rollout service with an engine in it. `more` are further orders."""
    module = torch.nn.Module()
    module.layer = torch.nn.Module()
    for name, tensor in weights(how.mib, 0).items():
        module.layer.register_buffer(name.split(".")[1], torch.zeros_like(tensor))
    engine = EmbeddedEngine.of(ModuleWeightLoader(module), engine_id=how.name)
    served: dict[int, float] = {}
    changed = threading.Condition()
    config = RolloutConfig(
        **{
            "service_id": how.name, "host": how.host, "token": TOKEN, "senders": (how.endpoint,),
            "sender_token": TOKEN, "poll_s": 5.0, "transport": "tcp", **how.options,
        }
    )  # fmt: skip

    def on_served(_model: str, version: Version) -> None:
        with changed:
            served[version.number] = time.monotonic()
            changed.notify_all()

    service = RolloutService({MODEL: engine}, config, on_served=on_served)
    service.start()

    def serving() -> tuple[str | None, bool]:
        """What it serves, and whether each byte is that version's."""
        try:
            with engine.generation(timeout_s=0.05) as version:
                if version is None:
                    return None, True
                state = module.state_dict()
                right = weights(how.mib, version.number)
                return str(version), all(torch.equal(state[name], tensor) for name, tensor in right.items())
        except WeightSyncError:
            return None, True

    def wait(version: int, timeout_s: float) -> tuple[float, dict[str, Any]]:
        """When it was served, by the clock that all hosts share, and how it came."""
        with changed:
            if not changed.wait_for(lambda: version in served, timeout_s):
                raise TimeoutError(f"version {version} is not served: {service.status().models[MODEL]}")
        return served[version], status()

    def status() -> dict[str, Any]:
        now = service.status().models[MODEL]
        return {
            "version": now.version, "pull_s": now.pull_s, "load_s": now.load_s, "from": now.received_from,
            "because": now.because, "num_deltas": now.num_deltas, "retrying": now.retrying, "errors": now.errors,
            "sent": 0 if service.relay is None else service.relay.server.sent_bytes, "served": dict(served),
        }  # fmt: skip

    act(connection, {"wait": wait, "status": status, "serving": serving, **(more or {})})
    service.close()


@contextlib.contextmanager
def following(hosts: list[Host], mib: float, endpoint: str, **options: Any) -> Iterator[list[Actor]]:
    """Rollout services on these hosts."""
    actors: list[Actor] = []
    try:
        for host in hosts:
            how = Follower(mib=mib, endpoint=endpoint, host=host.address, name=host.name, options=options)
            actors.append(Actor(host, follower_main, how))
        yield actors
    finally:
        for actor in actors:
            actor.close()
