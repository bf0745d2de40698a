"""Training ranks on two hosts push to an engine on a third, and the link breaks while bytes are on their way."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.hosts.kit import Start, starter_in
from tests.multiproc.pull_kit import wait_until
from tests.multiproc.spine import Engine, build, cast_bytes, error_facts, push_of, shard, step
from tests.standins.processes import children, free_port
from weightsync.errors import WeightSyncError
from weightsync.testing.hosts import Hosts
from weightsync.trainer import engines as joined_engines
from weightsync.trainer.push import GRACE_S
from weightsync.transfer.broadcast import BroadcastTransferStrategy

ROWS = 2048
MIB = 1 << 20
TIMES = {"join_timeout_s": 10.0, "transfer_timeout_s": 6.0, "pause_timeout_s": 2.0}
SETTLE_S = 6.0
"""Ranks wait for each other a little longer than for the sync itself."""


def with_large_weight(model: nn.Module) -> None:
    """8 MiB in bfloat16, and the last of all: seconds on a slow link."""
    model.add_module("last", nn.Linear(ROWS, ROWS, bias=False, dtype=next(model.parameters()).dtype))


def made() -> Any:
    model = build(5, blocks=2)
    with_large_weight(model)
    return model


def rank_main(rank: int, urls: dict[str, str], address: str, port: int, conn: Any) -> None:
    """One of two ranks that train with FSDP2, as on two machines: torch's group is theirs, and meets at rank 0."""
    torch.set_num_threads(1)
    joined_engines._SHUN_S = joined_engines._SHUN_BUSY_S = 1.0
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    dist.init_process_group(
        "gloo", init_method=f"tcp://{address}:{port}", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    del os.environ["GLOO_SOCKET_IFNAME"]  # who trains with NCCL has never needed it
    model = shard(made(), "shard0", 2)
    strategy = BroadcastTransferStrategy(
        master_addr=address, join_timeout_s=TIMES["join_timeout_s"], transfer_timeout_s=TIMES["transfer_timeout_s"]
    )
    push = push_of(model, urls, strategy=strategy, chunk_bytes=MIB, **TIMES)
    push.initialize()
    conn.send("ready")
    while (version := conn.recv()) is not None:
        began_s = time.monotonic()
        try:
            step(model)
            report = push.sync_weights(version)
            outcome = {"type": "ok", "engines": report.engine_ids, "equal": report.digests_equal}
        except WeightSyncError as error:
            outcome = error_facts(error)
        conn.send({**outcome, "seconds": time.monotonic() - began_s})


def expected(version: int) -> dict[str, bytes]:
    model = made()
    for _ in range(version):
        step(model)
    return cast_bytes(model)


@pytest.fixture
def start() -> Iterator[Start]:
    with children() as starter:
        yield starter


def test_ranks_of_two_hosts_push_and_a_link_breaks_between_bytes(bench: Callable[..., Hosts], start: Start) -> None:
    """The engine loads into its live weights: cut off half-way it refuses to serve, until a good push. Each host's own
    name leads to loopback, as Debian installs it.

    Seen red with gloo's own choice of an address for the ranks' group.
    """
    hosts = bench(["trainer-0", "trainer-1", "engine"], resolves="loopback")
    near, _, far = hosts
    engine = Engine(
        starter_in(far, start), "e", 2, blocks=2, surgery=with_large_weight, in_place=True, host=far.address
    )
    port = free_port()
    ranks = [
        starter_in(host, start)(rank_main, rank, {"e": engine.url}, near.address, port, talk=True, name=f"rank{rank}")
        for rank, host in enumerate(list(hosts)[:2])
    ]
    assert [rank.recv(60.0) for rank in ranks] == ["ready", "ready"]

    def tell(version: int) -> None:
        for rank in ranks:
            rank.conn.send(version)

    def check_serves(version: int) -> None:
        outcome, text, served = engine.generate()
        assert (outcome, served.rpartition("/")[2]) == ("ok", str(version)), text
        assert [engine.weights(worker) == expected(version) for worker in range(2)] == [True, True]

    tell(1)
    said = [rank.recv(30.0) for rank in ranks]
    assert [each["type"] for each in said] == ["ok", "ok"], said
    check_serves(1)

    far.limit(8)
    before = far.traffic()
    tell(2)
    wait_until(lambda: far.traffic().since(before).received_bytes > 2 * MIB, "bytes are on their way")
    far.link_down()
    said = [rank.recv(30.0) for rank in ranks]
    assert "ok" not in [each["type"] for each in said], said
    assert max(each["seconds"] for each in said) < TIMES["transfer_timeout_s"] + GRACE_S + SETTLE_S
    assert engine.generate()[0] == "NotServingError"
    assert far.traffic().since(before).received_bytes < 8 * MIB, "it broke half-way"

    hosts.heal()
    far.limit(None)
    for version in range(3, 30):
        tell(version)
        said = [rank.recv(30.0) for rank in ranks]
        if said[0].get("engines") == ("e",):
            break
    assert [(each["type"], each.get("equal")) for each in said] == [("ok", True)] * 2
    check_serves(version)
