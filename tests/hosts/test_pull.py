"""Pull across hosts: `weightsync.publish` on one, `weightsync.serve` on another, and the link between them breaks.

Nobody says an address twice: the agent listens where the routing table leads to the host, or where it is told.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import weightsync
from tests.hosts.kit import Start, starter_in
from tests.multiproc.pull_kit import wait_until
from tests.multiproc.spine import TOKEN, build, cast_bytes, error_facts, fingerprint_of, step
from tests.standins.processes import Child, children, free_port
from weightsync.errors import WeightSyncError
from weightsync.tensors import byte_array
from weightsync.testing.hosts import Hosts

MIB = 1 << 20
ROWS = 2048
MODEL_BYTES = 8 * MIB
"""And a little more."""
SOON_S = 60.0


def made(dtype: torch.dtype = torch.float32) -> Any:
    model = build(5, dtype=dtype)
    model.add_module("last", nn.Linear(ROWS, ROWS, bias=False, dtype=dtype))
    return model


def trained(steps: int) -> dict[str, bytes]:
    model = made()
    for _ in range(steps):
        step(model)
    return cast_bytes(model)


def trainer_main(options: dict[str, Any], conn: Any) -> None:
    """Steps when it is told to; the error where it can't begin."""
    torch.set_num_threads(1)
    model = made()
    try:
        with weightsync.publish(model, "actor", **options) as publisher:
            conn.send(publisher.endpoint)
            while conn.recv() is not None:
                step(model)
                began_s = time.monotonic()
                report = publisher.step()
                conn.send((report.version.number, report.published, time.monotonic() - began_s))
    except WeightSyncError as error:
        conn.send(error_facts(error))


def host_main(options: dict[str, Any], conn: Any) -> None:
    """A rollout host with a torch module; the error where it can't begin."""
    torch.set_num_threads(1)
    model = made(torch.bfloat16)
    try:
        with weightsync.serve({"actor": model}, **options) as service:
            conn.send(service.url)
            while (order := conn.recv()) is not None:
                if order == "status":
                    conn.send(service.status().models["actor"])
                    continue
                with service.generation("actor") as version:
                    if order == "version":
                        conn.send(version and version.number)
                        continue
                    weights = {name: byte_array(t.contiguous()) for name, t in model.state_dict().items()}
                    conn.send((version and version.number, fingerprint_of(weights)))
    except WeightSyncError as error:
        conn.send(error_facts(error))


def asked(child: Child, order: str) -> Any:
    child.conn.send(order)
    return child.recv(SOON_S)


def stepped(trainer: Child) -> tuple[int, bool, float]:
    trainer.conn.send("step")
    number, published, seconds = trainer.recv(SOON_S)
    return number, published, seconds


def wait_served(host: Child, number: int) -> None:
    wait_until(lambda: asked(host, "version") == number, f"version {number}", SOON_S)
    check_serves(host, number)


def check_serves(host: Child, number: int) -> None:
    """Bit for bit."""
    assert asked(host, "weights") == (number, fingerprint_of(trained(number)))


@pytest.fixture
def start() -> Iterator[Start]:
    with children() as starter:
        yield starter


@pytest.mark.parametrize(
    "said", [{}, {"host": "0.0.0.0", "advertise": "trainer"}], ids=["by the route", "an advertised name"]
)
def test_a_host_follows_a_trainer_of_another_one(two: Hosts, start: Start, said: dict[str, Any]) -> None:
    """The agent's address is found by the route to the host, or advertised; the bytes cross the link. A cut in the
    middle of a pull: the host serves its version, the trainer goes on, and once it is healed the newest one comes.
    """
    trainer_host, rollout = two
    port = free_port()
    trainer = starter_in(trainer_host, start)(
        trainer_main,
        {"to": f"http://{rollout.name}:{port}", "token": TOKEN, "port": 0, **said},
        talk=True,
        name="trainer",
    )
    endpoint = trainer.recv(60.0)
    assert isinstance(endpoint, str), endpoint
    assert endpoint.partition("//")[2].partition(":")[0] == said.get("advertise", trainer_host.address)
    host = starter_in(rollout, start)(
        host_main,
        {"sources": [endpoint], "host": rollout.address, "port": port, "token": TOKEN, "pull_timeout_s": 6.0},
        talk=True,
        name="host",
    )
    assert host.recv(60.0) == f"http://{rollout.address}:{port}"
    before = trainer_host.traffic()
    assert stepped(trainer)[:2] == (1, True)
    wait_served(host, 1)
    assert MODEL_BYTES < trainer_host.traffic().since(before).sent_bytes < 1.5 * MODEL_BYTES
    if said:
        return  # what follows is the same

    rollout.limit(10)
    before = rollout.traffic()
    stepped(trainer)
    wait_until(lambda: rollout.traffic().since(before).received_bytes > 2 * MIB, "bytes are on their way", SOON_S)
    rollout.link_down()
    for number in (3, 4):
        said_number, _, seconds = stepped(trainer)
        assert said_number == number
        assert seconds < 5.0, "nobody who is cut off holds the trainer"
        check_serves(host, 1)
    wait_until(lambda: asked(host, "status").errors or asked(host, "status").sender_errors, "it says so", SOON_S)
    check_serves(host, 1)
    assert rollout.traffic().since(before).received_bytes < MODEL_BYTES
    rollout.limit(None)
    two.heal()
    number, published, _ = stepped(trainer)
    assert (number, published) == (5, True)
    wait_served(host, 5)


@pytest.mark.parametrize(
    ("who", "options", "error", "words"),
    [
        ("trainer", {"to": "http://rollout:9000"}, "ConfigError", "token"),
        ("trainer", {"host": "10.78.0.1"}, "ConfigError", "token"),
        ("host", {"host": "10.78.0.1"}, "ConfigError", "token"),
        ("trainer", {"to": "http://nowhere:9000", "token": TOKEN}, "ConfigError", "nowhere"),
        ("trainer", {"host": "10.78.0.2", "token": TOKEN}, "ConfigError", "10.78.0.2"),
    ],
)
def test_what_is_refused_off_loopback(
    two: Hosts, start: Start, who: str, options: dict[str, Any], error: str, words: str
) -> None:
    """Typed, and at once; each says what to give."""
    main = {"trainer": trainer_main, "host": host_main}[who]
    said = starter_in(two[0], start)(main, {"port": 0, **options}, talk=True, name=who).recv(60.0)
    assert isinstance(said, dict), said
    assert said["type"] == error
    assert words in said["text"]


def test_a_wrong_token_is_refused_from_another_host(two: Hosts, start: Start) -> None:
    trainer_host, rollout = two
    trainer = starter_in(trainer_host, start)(
        trainer_main, {"host": trainer_host.address, "port": 0, "token": TOKEN}, talk=True, name="trainer"
    )
    options = {"sources": [trainer.recv(60.0)], "port": 0}
    for token, error in ((None, "AuthError"), (TOKEN + "-not", "AuthError")):
        host = starter_in(rollout, start)(host_main, {**options, "source_token": token}, talk=True, name="host")
        assert host.recv(60.0)["type"] == error
