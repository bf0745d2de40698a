"""A trainer pushes through an engine whose model lives in another process, behind an engine server."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from torch import nn

from tests.multiproc.pull_kit import wait_until
from tests.standins.faults import FaultyLoader
from tests.standins.processes import Child, children, free_port
from weightsync.engine.embedded import EmbeddedEngine
from weightsync.engine.remote import RemoteWeightLoader
from weightsync.engine.server import EngineServer
from weightsync.errors import EngineUnreachableError, SyncFailedError
from weightsync.extract.module import ModuleWeightExtractor
from weightsync.testing.contracts import bytes_of
from weightsync.trainer.push import PushSync
from weightsync.types import DescribeRequest, EngineOp, Version

TOKEN = "a-token-for-tests-only"
LONG_S = 60.0


def model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 128, dtype=torch.bfloat16), nn.Linear(128, 32, dtype=torch.bfloat16))


def content(module: nn.Module) -> dict[str, bytes]:
    return {name: bytes_of(tensor) for name, tensor in module.named_parameters()}


def far_side(port: int, conn: Connection) -> None:
    """Serves a model until it is told to end; says what it has when asked, and arms faults."""
    torch.set_num_threads(1)
    module = model(0)
    loader = FaultyLoader(module)
    server = EngineServer(EmbeddedEngine.of(loader), port=port, token=TOKEN)
    conn.send(server.start())
    while (asked := conn.recv()) is not None:
        if isinstance(asked, dict):
            loader.arm(asked)
        conn.send((content(module), loader.healthy))
    server.close()


class Job:
    """A trainer here, an engine here, its model there."""

    def __init__(self, child: Child) -> None:
        self.child = child
        self.loader = RemoteWeightLoader(child.recv(LONG_S), token=TOKEN, chunk_bytes=3000, timeout_s=LONG_S)
        self.engine = EmbeddedEngine.of(self.loader)
        self.trainer = model(7)
        self.push = PushSync(ModuleWeightExtractor(self.trainer, chunk_bytes=None), self.engine)
        self.push.initialize()

    def there(self, asked: Any = "show") -> tuple[dict[str, bytes], bool]:
        self.child.conn.send(asked)
        told: tuple[dict[str, bytes], bool] = self.child.recv(LONG_S)
        return told

    def step(self) -> None:
        with torch.no_grad():
            for tensor in self.trainer.parameters():
                tensor.add_(torch.rand_like(tensor))

    def close(self) -> None:
        self.push.close()
        self.engine.close()
        self.loader.close()


@pytest.fixture
def job() -> Iterator[Job]:
    with children() as start:
        made = Job(start(far_side, 0, name="far-side", talk=True))
        yield made
        made.close()


def test_a_push_ends_in_the_other_process_byte_for_byte_and_proved(job: Job) -> None:
    for number in (1, 2, 3):
        job.step()
        report = job.push.sync_weights(number)
        assert report.version.number == number
        assert report.digests_equal is True
        assert not report.lost
        assert job.there() == (content(job.trainer), True)


@pytest.mark.parametrize(
    "fault",
    [
        {"at": "begin", "do": "raise"},
        {"at": "load", "chunk": 0, "do": "raise"},
        {"at": "load", "chunk": 0, "do": "corrupt"},
        {"at": "commit", "do": "raise"},
    ],
)
def test_a_push_that_fails_there_leaves_the_old_model_and_the_next_one_works(job: Job, fault: dict[str, Any]) -> None:
    job.push.sync_weights(1)
    before = job.there(fault)
    job.step()
    with pytest.raises(SyncFailedError):
        job.push.sync_weights(2)
    assert job.there() == before
    job.push.sync_weights(3)
    assert job.there() == (content(job.trainer), True)


def test_a_far_side_that_is_killed_in_a_load_is_a_typed_failure_soon(job: Job) -> None:
    job.push.sync_weights(1)
    job.there({"at": "load", "chunk": 0, "do": "kill"})
    job.step()
    with pytest.raises(SyncFailedError):
        job.push.sync_weights(2)


def test_a_far_side_that_was_started_again_is_not_said_to_serve_what_it_had() -> None:
    """It answered with its first weights, and the engine here said that it serves the version (seen)."""
    with children() as start:
        port = free_port()
        first = start(far_side, port, name="far-side", talk=True)
        job = Job(first)

        def says() -> tuple[Version | None, bool, str | None]:
            reply = job.engine.call(EngineOp.DESCRIBE, DescribeRequest(), timeout_s=LONG_S)
            return reply.version, reply.intact, reply.unhealthy

        job.push.sync_weights(1)
        served = Version(run_id=str(job.push.run_id), number=1)
        assert says() == (served, True, None)
        first.kill()

        def is_gone() -> bool:
            try:
                return says()[0] != served  # its last answer counts for a second
            except EngineUnreachableError:
                return True

        wait_until(is_gone, "it is known to be gone")
        job.child = start(far_side, port, name="far-side-again", talk=True)
        job.child.recv(LONG_S)

        def known() -> bool:
            with contextlib.suppress(EngineUnreachableError):
                version, intact, why = says()
                return (version, intact) == (None, False) and f"nothing that was loaded, and not {served}" in (
                    why or ""
                )
            return False

        wait_until(known, "it is known to have lost it")
        job.step()
        assert job.push.sync_weights(2).digests_equal
        assert says()[0] == Version(run_id=served.run_id, number=2)
        assert job.there() == (content(job.trainer), True)
        job.close()
