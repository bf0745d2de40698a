"""A trainer pushes through an engine whose model lives in another process, behind a load server."""

from __future__ import annotations

from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from torch import nn

from weightsync.errors import SyncFailedError
from weightsync.extract.module import ModuleWeightExtractor
from weightsync.load.remote import RemoteWeightLoader
from weightsync.load.remote_server import RemoteLoadServer
from weightsync.publish.push import PushSync
from weightsync.rollout.engine import EmbeddedEngine
from weightsync.testing.contracts import bytes_of
from weightsync.testing.faults import FaultyLoader
from weightsync.testing.processes import Child, children

TOKEN = "a-token-for-tests-only"
LONG_S = 60.0


def model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 128, dtype=torch.bfloat16), nn.Linear(128, 32, dtype=torch.bfloat16))


def content(module: nn.Module) -> dict[str, bytes]:
    return {name: bytes_of(tensor) for name, tensor in module.named_parameters()}


def far_side(conn: Connection) -> None:
    """Serves a model until it is told to end; says what it has when asked, and arms faults."""
    torch.set_num_threads(1)
    module = model(0)
    loader = FaultyLoader(module)
    server = RemoteLoadServer(loader, token=TOKEN)
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
        self.loader = RemoteWeightLoader(child.recv(LONG_S), token=TOKEN, request_bytes=3000, timeout_s=LONG_S)
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
        made = Job(start(far_side, name="far-side", talk=True))
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
