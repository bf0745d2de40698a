"""Receivers that are slower than the trainer, and hosts whose trainer is gone: who keeps memory, and who waits."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from pathlib import Path

import pytest

from tests.multiproc.pull_kit import MODEL, EngineActor, Service, Trainer, is_right, run_of, shm_of, wait_until
from tests.standins.processes import children
from weightsync.errors import TransferAbortedError
from weightsync.host.puller import Puller
from weightsync.memory import Reader, is_read
from weightsync.memory.folder import path_of
from weightsync.types import Deadline
from weightsync.types.transfer_messages import Transport

KIB = 2048


class SlowReceiver:
    """Takes `pull_s` for a whole version, of which nothing is late."""

    def __init__(self, endpoint: str, pull_s: float) -> None:
        self._puller = Puller(endpoint, MODEL, receiver_id="slow", transport=Transport.TCP, mode="full", num_streams=1)
        self._pull_s = pull_s
        self.got: list[tuple[str, bool]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        before = 0

        def slowly(done: int, total: int) -> None:
            nonlocal before
            time.sleep(self._pull_s * max(0, done - before) / total)
            before = done

        with contextlib.suppress(TransferAbortedError):  # cancelled
            while not self._over.is_set():
                before = 0
                with self._puller.pull(deadline=Deadline(60), progress=slowly) as pulled:
                    self.got.append((str(pulled.version), is_right(pulled, KIB)))

    def close(self) -> None:
        self._over.set()
        self._puller.cancel()
        self._thread.join(20)
        self._puller.close()


def test_a_receiver_slower_than_two_steps_gets_versions_and_the_trainer_hardly_waits() -> None:
    """Seen to fail: it got none, ever, and the trainer waited most of its guard on every other step."""
    step_s, guard_s = 0.4, 0.4
    with children() as start:
        trainer = Trainer(start, 1, kib=KIB, guard_s=guard_s, delta_budget_bytes=0)
        trainer.publish(0)
        receiver = SlowReceiver(trainer.endpoint, 2.6 * step_s)
        waited, most, num_left_out = [], 0, 0
        version = 0
        end = time.monotonic() + 60
        while len(receiver.got) < 2 or most < 3:
            assert time.monotonic() < end, waited
            version += 1
            said = trainer.offload(version)
            if said["published"]:
                waited.append((said["waited_s"], said["num_looks"]))
            else:  # an agent that stood still in a proof held the segment that was free
                num_left_out += 1
            most = max(most, trainer.ask("segments"))
            time.sleep(step_s)
        receiver.close()
        assert all(right for _, right in receiver.got)
        assert most == 3
        assert num_left_out <= 2
        long = sum(
            seconds > 0.5 * guard_s and num_looks > 10  # else the machine stood still, and the trainer with it
            for seconds, num_looks in waited
        )
        assert long <= 2 + len(receiver.got), ("two cuts before the first lease, one before each of the next", waited)
        wait_until(lambda: len(shm_of(trainer.pid)) == 2, "the third segment goes when nobody needs it")


def files_of(trainer: Trainer) -> dict[str, int]:
    """Its segments, held open, so that what they take can be seen when their names are gone."""
    return {name: os.open(path_of(name), os.O_RDONLY) for name in shm_of(trainer.pid)}


def used_bytes(files: dict[str, int]) -> int:
    return sum(os.fstat(fd).st_blocks * 512 for fd in files.values())


def maps(pid: int, files: dict[str, int]) -> list[str]:
    return [line for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if any(name in line for name in files)]


@pytest.mark.parametrize("how", ["kill -9", "close"])
def test_what_a_trainer_leaves_takes_no_memory_though_engines_go_on_serving_it(how: str) -> None:
    """Same-host engines load from its segments. Seen to fail: two models stayed in /dev/shm until the engines' next
    init, and where that was all there was the next trainer could never publish."""
    with children() as start:
        trainer = Trainer(start, 1, kib=KIB)
        engine = EngineActor(start, "a", kib=KIB)
        service = Service(start, kib=KIB, urls={"a": engine.url}, senders=(trainer.endpoint,))
        for version in (1, 2):
            trainer.publish(version)
            assert service.notify(trainer.endpoint, 1, version).transport == "shm"
        files = files_of(trainer)
        assert len(files) == 2
        assert used_bytes(files) >= 1.5 * KIB * 1024
        wait_until(lambda: not maps(engine.pid, files), "the engine maps nothing between two loads")
        assert not maps(service.pid, files)
        if how == "close":
            trainer.ask("close")
        else:
            trainer.child.kill()
        wait_until(lambda: not shm_of(trainer.pid), "the names go")
        wait_until(lambda: used_bytes(files) == 0, "and the pages")
        assert engine.serving() == (f"{run_of(1)}/2", True)
        for fd in files.values():
            os.close(fd)
        service.close()


def test_no_lease_where_the_trainer_wants_none() -> None:
    with children() as start:
        trainer = Trainer(start, 1, kib=KIB, guard_s=0.1, delta_budget_bytes=0, lease_s=0.0)
        trainer.publish(0)
        receiver = SlowReceiver(trainer.endpoint, 1.0)
        for version in range(1, 9):
            trainer.publish(version)
            assert not any(is_read(name, Reader.MAPPED) for name in shm_of(trainer.pid))
            assert trainer.ask("segments") == 2
            time.sleep(0.1)
        receiver.close()
